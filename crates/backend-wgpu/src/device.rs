//! A device and its queue: opening, pipelines, buffers, polling, errors.
//!
//! Every wgpu call that can fail runs in [`Gpu::guard`]: error scopes catch validation, memory and
//! driver errors, and the device-lost callback catches the rest. A wait ends if nothing completes
//! for [`PATIENCE`].

use std::{
    collections::HashMap,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use annulus_core::{Error, Result};
use wgpu::{BufferUsages, Features, PollType};

use crate::{
    Level, QueryTileSize, RegisterTile,
    adapter::{
        Adapter, ChunkLimits, NO_ADAPTER, adapters, binding_bytes, list, matrices, proven_level,
        subgroup_sizes,
    },
    adapter::{OpenDevice, check_process, is_forked, lock, turn},
    choice::Matrices,
    choice::{AdapterKind, PROOFS, TileChoice, choose},
    errors::{device_error, with_error_scopes},
    kernels::KernelVariant,
    pacing::{StagingPools, Submissions},
    pipelines::{Compilation, KernelEdit, Pipeline, Translate, compile},
};

/// Longest time for which a wait continues although no submission completes: far longer than any
/// submission, so that it expires only if the device hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Longest wait after an error for queued work, to find out if the device is lost.
const LOSS_TIMEOUT: Duration = Duration::from_secs(2);

/// Loop iterations per kernel on a software adapter: Mesa before version 23 silently leaves every
/// loop after 65,535 iterations.
const MAX_SOFTWARE_LOOP_STEPS: u64 = 60_000;

/// Parameters of [`Gpu::open`].
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Index in [`Gpu::list`].
    pub number: usize,
    /// Level. Default: the one in [`Level::VARIABLE`], else [`crate::Adapter::chosen`].
    pub level: Option<Level>,
    /// Register tile of kernels of multiply-adds. Default: the one in [`RegisterTile::VARIABLE`],
    /// else [`crate::Adapter::register_tile`].
    pub register_tile: Option<RegisterTile>,
    /// Queries of a tile of forward, where the kernel can have them. Default: those in
    /// [`QueryTileSize::VARIABLE`], else by adapter, level and shape.
    pub query_tile: Option<QueryTileSize>,
    /// Upper bound of a binding in bytes, to test small devices. Default: the adapter's limit.
    pub most_binding_bytes: Option<u64>,
    /// Upper bound of a buffer in bytes. Default: the adapter's limit.
    pub most_buffer_bytes: Option<u64>,
    /// Upper bound of workgroups per grid dimension. Default: the adapter's limit.
    pub most_groups_a_line: Option<u32>,
    /// Checks indices in shaders, at the cost of a fifth of their instructions. Always done on
    /// Metal, where the device does not bound accesses to buffers.
    pub check_bounds: bool,
    /// Translation of kernels to SPIR-V in place of wgpu's, on Vulkan.
    #[doc(hidden)]
    pub translate: Option<Translate>,
    /// Upper bound of the work of a submission in FLOPs: of a tile kernel, if it has more than one
    /// pair of tiles, and of a kernel of sinks, if it has more than one workgroup and step.
    /// Default: 0.1 s by measured throughput.
    pub most_part_flops: Option<u64>,
}

impl Options {
    /// Reduces limits to the upper bounds.
    fn limit(&self, mut limits: wgpu::Limits) -> wgpu::Limits {
        if let Some(most) = self.most_binding_bytes {
            limits.max_storage_buffer_binding_size =
                limits.max_storage_buffer_binding_size.min(most);
        }
        if let Some(most) = self.most_buffer_bytes {
            limits.max_buffer_size = limits.max_buffer_size.min(most);
        }
        if let Some(most) = self.most_groups_a_line {
            limits.max_compute_workgroups_per_dimension =
                limits.max_compute_workgroups_per_dimension.min(most);
        }
        limits
    }
}

/// A device and its queue. A clone refers to the same device.
#[derive(Debug, Clone)]
pub struct Gpu(Arc<GpuParts>);

struct GpuParts {
    /// Bound to bindings that a plan does not use. The first field, because the compiler evaluates
    /// `Sync` in the order of fields, and in a field of more levels exceeds its recursion limit.
    nothing: wgpu::Buffer,
    name: String,
    level: Level,
    /// Cooperative matrices of the device, even if the level does not use them.
    matrices: Option<Matrices>,
    chunk_limits: ChunkLimits,
    pipelines: Mutex<HashMap<KernelVariant, PipelineSlot>>,
    staging: StagingPools,
    /// True if tests let the device's timestamps read as 0.
    lacks_clock: bool,
    /// True if the device's conversion from f16 keeps subnormal numbers; set at first use.
    unpacks: OnceLock<bool>,
    edit: Option<KernelEdit>,
    query_tile: TileChoice,
    /// The last field, so that the device is closed after all other objects on it are dropped.
    opened: Opened,
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if is_forked() {
            mem::forget(Arc::clone(&self.0));
        }
    }
}

/// Device, queue and state that handles at all levels share.
#[derive(Clone)]
struct Opened {
    device: wgpu::Device,
    queue: wgpu::Queue,
    lost: LostReason,
    submissions: Arc<Submissions>,
    /// See [`Options::most_part_flops`].
    part_work: Option<u64>,
    compilation: Compilation,
    /// Closes the device; the last field.
    open: Arc<OpenDevice>,
}

impl Opened {
    fn new(
        given: (wgpu::Device, wgpu::Queue),
        lost: LostReason,
        options: &Options,
    ) -> Result<Self> {
        let open = OpenDevice::new(&given, lost.on_lost());
        // declared after `open`, so that an error drops them before it
        let (device, queue) = given;
        let part_work = options.most_part_flops;
        let submissions = Arc::new(Submissions::new(&device, part_work)?);
        let is_metal = device.adapter_info().backend == wgpu::Backend::Metal;
        let compilation =
            Compilation { checked: options.check_bounds || is_metal, translate: options.translate };
        Ok(Self { device, queue, lost, submissions, part_work, compilation, open })
    }
}

/// Kernels of a handle. `None`: those of the adapter's kind.
struct Choices {
    level: Option<Level>,
    register_tile: Option<RegisterTile>,
    query_tile: Option<QueryTileSize>,
    matrices: Option<Matrices>,
}

/// Reason why the device is lost, once one is reported.
#[derive(Debug, Clone, Default)]
struct LostReason(Arc<Mutex<Option<String>>>);

impl LostReason {
    /// Records a reason, unless there is an earlier one.
    fn set_once(&self, why: impl FnOnce() -> String) {
        lock(&self.0).get_or_insert_with(why);
    }

    /// Returns a device-lost callback that records the reason.
    fn on_lost(&self) -> impl Fn(wgpu::DeviceLostReason, String) + Send + 'static {
        let slot = self.clone();
        move |reason, what| {
            slot.set_once(|| format!("the device is lost ({reason:?}): {what}"));
        }
    }

    fn check(&self) -> Result<()> {
        lock(&self.0).as_ref().map_or(Ok(()), |what| Err(device_error(what)))
    }
}

/// A compiled kernel, or `None` until it is compiled under the lock.
type PipelineSlot = Arc<Mutex<Option<Arc<Pipeline>>>>;

impl Gpu {
    /// Lists the adapters of this machine; empty without a driver.
    pub fn list() -> Vec<Adapter> {
        list()
    }

    /// Opens an adapter with its full limits.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is no such adapter, it cannot run the level, or its shuffles
    /// or matrix products are wrong; [`Error::InvalidArgument`] as [`Level::forced`],
    /// [`RegisterTile::forced`] and [`QueryTileSize::forced`], and of a register tile that no
    /// device has; [`Error::Device`] if it does not open. [`Error::Unsupported`] also in a forked
    /// child of a process that uses wgpu.
    pub fn open(options: &Options) -> Result<Self> {
        let level = options.level.map_or_else(Level::forced, |level| Ok(Some(level)))?;
        let register_tile =
            options.register_tile.map_or_else(RegisterTile::forced, |tile| Ok(Some(tile)))?;
        if let Some(tile) = register_tile.filter(|tile| !RegisterTile::ALL.contains(tile)) {
            return Err(Error::invalid("register_tile", tile.name(), "4x4 or 2x4"));
        }
        let query_tile =
            options.query_tile.map_or_else(QueryTileSize::forced, |tile| Ok(Some(tile)))?;
        let turn = turn()?;
        let found = adapters(&turn);
        let count = found.len();
        let Some(adapter) = found.into_iter().nth(options.number) else {
            let have = if count == 0 {
                NO_ADAPTER.to_owned()
            } else {
                format!("there are {count}, counted from 0")
            };
            return Err(Error::unsupported(
                format!("wgpu device {}", options.number),
                format!("this machine: {have}"),
            ));
        };
        // without its features, which a device has only on request, the level cannot be chosen
        let level = level.or_else(|| proven_level(&adapter));
        // with SUBGROUP the driver chooses the size of a kernel's subgroups
        let mut wanted = Features::SUBGROUP | Features::TIMESTAMP_QUERY | Features::SHADER_INT64;
        let mut experimental_features = wgpu::ExperimentalFeatures::disabled();
        if level == Some(Level::Matrix) {
            // on Vulkan, their kernels are SPIR-V modules
            wanted |= Matrices::FEATURES | Features::PASSTHROUGH_SHADERS;
            // SAFETY: the caller requested an experimental feature, or a record shows that the
            // kernels are right on such adapters. They use one part of it: matrices of sizes and
            // types that the adapter reports, loaded from arrays in workgroup memory within bounds,
            // by whole subgroups.
            experimental_features = unsafe { wgpu::ExperimentalFeatures::enabled() };
        }
        if options.translate.is_some() {
            wanted |= Features::PASSTHROUGH_SHADERS;
        }
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("annulus"),
            required_features: adapter.features() & wanted,
            required_limits: options.limit(adapter.limits()),
            experimental_features,
            ..Default::default()
        };
        let opened = pollster::block_on(adapter.request_device(&descriptor)).map_err(|error| {
            Error::Device { what: format!("{}: {error}", adapter.get_info().name) }
        })?;
        drop(turn);
        let lost = LostReason::default();
        let reason_slot = lost.clone();
        // without a handler wgpu panics
        opened.0.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            reason_slot.set_once(|| {
                format!("an uncaptured error, caused by no call of this backend: {error}")
            })
        }));
        let opened = Opened::new(opened, lost, options)?;
        let matrices = matrices(&adapter);
        Self::probed(assemble(opened, Choices { level, register_tile, query_tile, matrices })?)
    }

    /// Returns the same device at another level; both share their tensors.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn at(&self, level: Level) -> Result<Self> {
        Self::probed(self.again(|choices| choices.level = Some(level))?)
    }

    /// Returns the same device and level with these queries of a tile of forward, where the kernel
    /// can have them; both share their tensors.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn with_query_tile(&self, tile: QueryTileSize) -> Result<Self> {
        Self::probed(self.again(|choices| choices.query_tile = Some(tile))?)
    }

    /// Returns the same device and level with a change of one kernel, so that tests can plant a
    /// mistake; both share tensors, and the compiled kernels of other names.
    ///
    /// # Errors
    /// [`Error::Device`]. A plan whose kernel lacks the text fails with
    /// [`Error::InvalidArgument`].
    #[doc(hidden)]
    pub fn edited(&self, edit: KernelEdit) -> Result<Self> {
        let unpacks = OnceLock::from(self.unpacks()?);
        let compiled = lock(&self.0.pipelines);
        let others = compiled.iter().filter(|(variant, _)| variant.name() != edit.kernel);
        let pipelines =
            Mutex::new(others.map(|(&variant, slot)| (variant, Arc::clone(slot))).collect());
        let parts = self.again(|_| ())?;
        Ok(Self(Arc::new(GpuParts { pipelines, unpacks, edit: Some(edit), ..parts })))
    }

    /// Returns the same device with timestamps that read as 0, as Metal's may, so that tests can
    /// show what callers of [`crate::Stopwatch`] do then.
    ///
    /// # Errors
    /// [`Error::Device`].
    #[doc(hidden)]
    pub fn without_clock(&self) -> Result<Self> {
        let parts = self.again(|_| ())?;
        Ok(Self(Arc::new(GpuParts { lacks_clock: true, ..parts })))
    }

    /// Returns the same device with kernels for a driver that may choose smaller subgroups than the
    /// largest, so that tests can run the path for those; both share tensors.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    #[doc(hidden)]
    pub fn with_smaller_subgroups(&self) -> Result<Self> {
        let matrices = self.0.matrices.map(Matrices::with_smaller_subgroups);
        Self::probed(self.again(|choices| choices.matrices = matrices)?)
    }

    /// True if timestamps read as 0.
    pub(crate) fn lacks_clock(&self) -> bool {
        self.0.lacks_clock
    }

    /// Returns another handle to the device, with changed choices.
    fn again(&self, change: impl FnOnce(&mut Choices)) -> Result<GpuParts> {
        let mut choices = Choices {
            level: Some(self.0.level),
            register_tile: Some(self.register_tile()),
            query_tile: match self.0.query_tile {
                TileChoice::Forced(tile) => Some(tile),
                TileChoice::Default(_) => None,
            },
            matrices: self.0.matrices,
        };
        change(&mut choices);
        assemble(self.0.opened.clone(), choices)
    }

    /// Returns the handle if the device computes what the kernels of its level rely on.
    fn probed(parts: GpuParts) -> Result<Self> {
        let gpu = Self(Arc::new(parts));
        gpu.probe()?;
        Ok(gpu)
    }

    /// Uses a caller's device and queue. Replaces the device-lost callback; the error handler is
    /// kept. A device does not report its adapter's matrices, so [`Level::Matrix`] requires
    /// [`Gpu::open`]. A caller whose threads open and close devices of their own should do so one
    /// at a time: Vulkan's loader and NVIDIA's driver have data races there.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it lacks a feature of the level or of every level;
    /// [`Error::Device`].
    pub fn adopt(device: wgpu::Device, queue: wgpu::Queue, level: Option<Level>) -> Result<Self> {
        let opened = Opened::new((device, queue), LostReason::default(), &Options::default())?;
        let choices = Choices { level, register_tile: None, query_tile: None, matrices: None };
        Self::probed(assemble(opened, choices)?)
    }

    /// Name of adapter and driver.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Level of the kernels.
    pub fn level(&self) -> Level {
        self.0.level
    }

    /// Register tile of the kernels of multiply-adds.
    pub fn register_tile(&self) -> RegisterTile {
        self.0.chunk_limits.register_tile
    }

    /// Queries of a tile of forward: of all launches that can have them, or of those that gain by
    /// them.
    pub fn query_tile(&self) -> QueryTileSize {
        match self.0.query_tile {
            TileChoice::Forced(tile) | TileChoice::Default(tile) => tile,
        }
    }

    pub(crate) fn tile_choice(&self) -> TileChoice {
        self.0.query_tile
    }

    /// The wgpu device, for sharing.
    pub fn device(&self) -> &wgpu::Device {
        &self.0.opened.device
    }

    /// The wgpu queue, for sharing.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.0.opened.queue
    }

    /// True once the device is closed while no other thread opens or closes one, false once it is
    /// closed otherwise. Tests read it after they have dropped all handles, tensors and plans.
    #[doc(hidden)]
    pub fn closed_in_turn(&self) -> Arc<OnceLock<bool>> {
        Arc::clone(self.0.opened.open.closed_in_turn())
    }

    /// Cooperative matrices that the level uses for f16 products.
    pub(crate) fn matrices(&self) -> Option<Matrices> {
        self.0.matrices.filter(|_| self.0.level == Level::Matrix)
    }

    /// Limits of the chunks of tile kernels.
    pub(crate) fn chunk_limits(&self) -> &ChunkLimits {
        &self.0.chunk_limits
    }

    /// True if buffers of one serve the other: the same device, at any level. wgpu cannot
    /// compare devices, because its ids are unique per instance only.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.opened.lost.0, &other.0.opened.lost.0)
    }

    pub(crate) fn staging(&self) -> &StagingPools {
        &self.0.staging
    }

    /// True if the device's conversion from f16 keeps subnormal numbers. The first call measures
    /// it.
    pub(crate) fn unpacks(&self) -> Result<bool> {
        if let Some(&unpacks) = self.0.unpacks.get() {
            return Ok(unpacks);
        }
        let unpacks = self.probe_unpacking()?;
        Ok(*self.0.unpacks.get_or_init(|| unpacks))
    }

    pub(crate) fn submissions(&self) -> &Submissions {
        &self.0.opened.submissions
    }

    pub(crate) fn nothing(&self) -> &wgpu::Buffer {
        &self.0.nothing
    }

    /// Upper bound of a buffer in bytes, in whole words.
    pub(crate) fn max_buffer_bytes(&self) -> u64 {
        self.0.opened.device.limits().max_buffer_size / 4 * 4
    }

    /// True if the adapter computes on the CPU.
    pub(crate) fn is_software(&self) -> bool {
        self.0.chunk_limits.loop_steps.is_some()
    }

    /// Arranges workgroups in a 2-D grid within the device's limits; `None` if there are too many.
    pub(crate) fn grid(&self, groups: u32) -> Option<(u32, u32)> {
        let most = self.0.opened.device.limits().max_compute_workgroups_per_dimension.max(1);
        let width = groups.clamp(1, most);
        let height = groups.div_ceil(width);
        (height <= most).then_some((width, height))
    }

    /// Returns a size for a buffer of at least `bytes` bytes that other uses will fit, too.
    pub(crate) fn rounded_size(&self, bytes: u64) -> u64 {
        let most = self.max_buffer_bytes();
        bytes.next_power_of_two().max(4096).min(most).max(bytes.next_multiple_of(4))
    }

    /// Returns the reason if the device is lost.
    pub(crate) fn check_lost(&self) -> Result<()> {
        self.0.opened.lost.check()
    }

    /// Marks the device as lost, unless it already is; returns the error.
    pub(crate) fn mark_lost<T>(&self, what: String) -> Result<T> {
        self.0.opened.lost.set_once(|| what.clone());
        Err(device_error(what))
    }

    pub(crate) fn poll(&self, how: PollType) -> Result<()> {
        check_process()?;
        self.0.opened.lost.check()?;
        // wgpu panics if the device is lost during a poll
        let polled = catch_unwind(AssertUnwindSafe(|| self.0.opened.device.poll(how)));
        self.0.opened.lost.check()?;
        match polled {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(wgpu::PollError::Timeout)) => {
                Err(device_error(format!("{} did not answer", self.name())))
            }
            Ok(Err(error)) => Err(device_error(error)),
            Err(_) => Err(device_error(format!("{} failed while it was polled", self.name()))),
        }
    }

    /// Runs wgpu calls; returns their first error, if any.
    pub(crate) fn guard<T>(
        &self,
        calls: impl FnOnce(&wgpu::Device, &wgpu::Queue) -> T,
    ) -> Result<T> {
        check_process()?;
        self.0.opened.lost.check()?;
        let Opened { device, queue, .. } = &self.0.opened;
        let (result, errors) = with_error_scopes(device, || calls(device, queue));
        self.0.opened.lost.check()?;
        match errors.into_error() {
            None => Ok(result),
            Some(Error::Device { what }) => Err(self.explain(what)),
            Some(other) => Err(other),
        }
    }

    /// Converts an error of a call. If the device is lost, that is the reason, whatever the call
    /// reports; wgpu reports a loss in a poll, after the queued work.
    pub(crate) fn explain(&self, what: impl ToString) -> Error {
        let done =
            self.poll(PollType::Wait { submission_index: None, timeout: Some(LOSS_TIMEOUT) });
        match done {
            Err(lost) if self.0.opened.lost.check().is_err() => lost,
            _ => device_error(what),
        }
    }

    /// Creates a buffer of at least `bytes` bytes, a multiple of 4 and not empty.
    pub(crate) fn create_buffer(
        &self,
        label: &str,
        bytes: u64,
        usage: BufferUsages,
    ) -> Result<wgpu::Buffer> {
        let size = bytes.max(4).next_multiple_of(4);
        let most = self.0.opened.device.limits().max_buffer_size;
        if size > most {
            return Err(Error::OutOfMemory { what: label.into(), asked: size, free: Some(most) });
        }
        let descriptor =
            wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false };
        self.guard(|device, _| device.create_buffer(&descriptor)).map_err(|error| match error {
            Error::OutOfMemory { .. } => Error::out_of_memory(label, size),
            other => other,
        })
    }

    /// Returns a compiled kernel, shared by all plans on this device. Ranks that need the same
    /// kernel at the same time compile it once.
    pub(crate) fn pipeline(&self, variant: KernelVariant) -> Result<Arc<Pipeline>> {
        check_process()?;
        let slot = Arc::clone(lock(&self.0.pipelines).entry(variant).or_default());
        let mut slot = lock(&slot);
        if let Some(pipeline) = &*slot {
            return Ok(Arc::clone(pipeline));
        }
        let mut source = variant.source();
        if let Some(edit) = self.0.edit.as_ref().filter(|edit| edit.kernel == variant.name()) {
            source.wgsl = edit.apply(&source.wgsl)?;
        }
        let compilation = self.0.opened.compilation;
        let compiled = Arc::new(
            self.guard(|device, _| compile(device, variant.name(), source, compilation))??,
        );
        *slot = Some(Arc::clone(&compiled));
        Ok(compiled)
    }
}

/// Creates a handle to an open device.
fn assemble(opened: Opened, choices: Choices) -> Result<GpuParts> {
    let Choices { level, register_tile, query_tile, matrices } = choices;
    let Opened { device, lost, part_work, .. } = &opened;
    let info = device.adapter_info();
    let limits = device.limits();
    let (least, _) = subgroup_sizes(&info);
    let available = Level::of_device(device.features(), least, matrices);
    let proven = || {
        choose(PROOFS, &AdapterKind::of(&info), &available)
            .map_or(Level::Plain, |proof| proof.level)
    };
    let level = level.unwrap_or_else(proven);
    if !available.contains(&level) {
        return Err(Error::unsupported(format!("wgpu level {}", level.name()), info.name));
    }
    let register_tile = register_tile.unwrap_or_else(|| RegisterTile::of_adapter(&info));
    check_limits(&limits, register_tile, &info.name)?;
    let by_default = TileChoice::Default(QueryTileSize::of_adapter(&info, level));
    let query_tile = query_tile.map_or(by_default, TileChoice::Forced);
    let descriptor = wgpu::BufferDescriptor {
        label: Some("nothing"),
        size: 256,
        usage: BufferUsages::STORAGE,
        mapped_at_creation: false,
    };
    let (nothing, errors) = with_error_scopes(device, || device.create_buffer(&descriptor));
    lost.check()?;
    errors.into_error().map_or(Ok(()), Err)?;
    Ok(GpuParts {
        name: format!("{} ({} {})", info.name, info.driver, info.driver_info),
        level,
        matrices,
        chunk_limits: ChunkLimits {
            device: info.name,
            binding_bytes: binding_bytes(&limits),
            alignment: u64::from(
                limits
                    .min_storage_buffer_offset_alignment
                    .max(limits.min_uniform_buffer_offset_alignment),
            )
            .max(4),
            loop_steps: (info.device_type == wgpu::DeviceType::Cpu)
                .then_some(MAX_SOFTWARE_LOOP_STEPS),
            part_work: *part_work,
            register_tile,
        },
        pipelines: Mutex::default(),
        staging: StagingPools::default(),
        lacks_clock: false,
        unpacks: OnceLock::new(),
        nothing,
        edit: None,
        query_tile,
        opened,
    })
}

/// Returns an error if the device's limits are too small for the kernels.
fn check_limits(limits: &wgpu::Limits, tile: RegisterTile, name: &str) -> Result<()> {
    let invocations = tile.max_invocations();
    for (what, has, needs) in [
        ("invocations a workgroup", limits.max_compute_invocations_per_workgroup, invocations),
        ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size, 16 << 10),
        ("storage buffers a kernel", limits.max_storage_buffers_per_shader_stage, 8),
    ] {
        if has < needs {
            return Err(Error::unsupported(
                format!("wgpu with {has} {what} (it takes {needs})"),
                name,
            ));
        }
    }
    Ok(())
}

impl std::fmt::Debug for GpuParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("name", &self.name)
            .field("level", &self.level)
            .finish_non_exhaustive()
    }
}
