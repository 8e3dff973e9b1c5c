//! A device and its queue: found, opened or handed in; asked for pipelines, memory and work; its failures made into errors.
//!
//! Every call to wgpu that can fail runs inside [`Gpu::guard`]: error scopes catch what validation, memory and the driver say, and the
//! device-lost callback what no scope can. Nothing waits longer than [`PATIENCE`] for a device that does not answer.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use annulus_core::{Error, Result};
use wgpu::{BufferUsages, Features, PollType};

use crate::{
    Level,
    adapter::{adapters, matrices},
    choice::{Kind, PROOFS, choose},
    fault::{caught, fault},
    kernels::{Access, Source, Variant},
    level::Matrices,
    staging::Staging,
};

/// How long a device may take to answer when somebody waits for it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How long an error waits for queued work, to learn whether it is the device that is lost.
const EXPLANATION: Duration = Duration::from_secs(2);

/// Rounds of loops that a kernel may have on a software adapter: Mesa's before 23 leaves every loop after 65535 of them, and says nothing.
const MOST_SOFTWARE_STEPS: u64 = 60_000;

/// How a device is opened.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Which adapter of [`Gpu::list`].
    pub number: usize,
    /// The level, or `None` for the one that [`Level::VARIABLE`] names, or else the one that is chosen for the adapter ([`crate::Adapter::chosen`]).
    pub level: Option<Level>,
    /// The most bytes of one binding, or `None` for the adapter's own: a way to try what a small device does.
    pub most_binding_bytes: Option<u64>,
    /// The most bytes of one buffer, or `None` for the adapter's own.
    pub most_buffer_bytes: Option<u64>,
    /// The most workgroups of one line of a grid, or `None` for the adapter's own.
    pub most_groups_a_line: Option<u32>,
}

/// A device that computes. A clone is the same device.
#[derive(Debug, Clone)]
pub struct Gpu(Arc<Parts>);

struct Parts {
    device: wgpu::Device,
    queue: wgpu::Queue,
    name: String,
    level: Level,
    /// What cooperative matrices could be made of, whether or not the level uses them.
    matrices: Option<Matrices>,
    most_binding: u64,
    most_steps: Option<u64>,
    alignment: u64,
    pipelines: Mutex<HashMap<Variant, Place>>,
    staging: Staging,
    lost: Loss,
    /// Bound where a kernel has a binding that this plan has nothing for.
    nothing: wgpu::Buffer,
}

/// Why a device cannot be used any more, as soon as somebody has told.
#[derive(Debug, Clone, Default)]
struct Loss(Arc<Mutex<Option<String>>>);

impl Loss {
    /// The first reason is kept.
    fn tell(&self, why: impl FnOnce() -> String) {
        lock(&self.0).get_or_insert_with(why);
    }

    fn check(&self) -> Result<()> {
        lock(&self.0).as_ref().map_or(Ok(()), |what| Err(fault(what)))
    }
}

/// Where a kernel goes once it is compiled; locked by the one who compiles it.
type Place = Arc<Mutex<Option<Arc<Pipeline>>>>;

/// A kernel, compiled.
pub(crate) struct Pipeline {
    pub(crate) pipeline: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
    /// Bytes of the kernel's numbers.
    pub(crate) numbers: usize,
}

impl Gpu {
    /// Opens an adapter with all of its limits.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is no such adapter, it cannot run the level, or it multiplies matrices wrongly; [`Error::InvalidArgument`] as [`Level::forced`];
    /// [`Error::Device`] if it does not open.
    pub fn open(options: &Options) -> Result<Self> {
        let level = options.level.map_or_else(Level::forced, |level| Ok(Some(level)))?;
        let found = adapters();
        let count = found.len();
        let Some(adapter) = found.into_iter().nth(options.number) else {
            let have = if count == 0 {
                "no Vulkan, Metal or DX12 driver was found".to_owned()
            } else {
                format!("there are {count}, counted from 0")
            };
            return Err(Error::unsupported(format!("wgpu device {}", options.number), format!("this machine: {have}")));
        };
        let mut wanted = Features::SUBGROUP | Features::TIMESTAMP_QUERY;
        let mut experimental_features = wgpu::ExperimentalFeatures::disabled();
        if level == Some(Level::Matrix) {
            wanted |= Matrices::FEATURES;
            // SAFETY: the caller has asked for what is experimental. Of that, the kernels use one thing: matrices of a size and of types that the adapter
            // names, at places within arrays of workgroup memory, by whole subgroups. Any defect of wgpu that this meets is to be reported to it.
            experimental_features = unsafe { wgpu::ExperimentalFeatures::enabled() };
        }
        let mut limits = adapter.limits();
        if let Some(most) = options.most_binding_bytes {
            limits.max_storage_buffer_binding_size = limits.max_storage_buffer_binding_size.min(most);
        }
        if let Some(most) = options.most_buffer_bytes {
            limits.max_buffer_size = limits.max_buffer_size.min(most);
        }
        if let Some(most) = options.most_groups_a_line {
            limits.max_compute_workgroups_per_dimension = limits.max_compute_workgroups_per_dimension.min(most);
        }
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("annulus"),
            required_features: adapter.features() & wanted,
            required_limits: limits,
            experimental_features,
            ..Default::default()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))
            .map_err(|error| Error::Device { what: format!("{}: {error}", adapter.get_info().name) })?;
        let lost = Loss::default();
        let place = lost.clone();
        // without this wgpu would panic
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            place.tell(|| format!("an error that no call was asked for: {error}"))
        }));
        let gpu = Self::assemble(device, queue, lost, level, matrices(&adapter))?;
        gpu.matrices().map_or(Ok(()), |matrices| gpu.probe(matrices))?;
        Ok(gpu)
    }

    /// The same device at another level. Tensors of either serve both.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn at(&self, level: Level) -> Result<Self> {
        let Parts { device, queue, lost, matrices, .. } = &*self.0;
        let gpu = Self::assemble(device.clone(), queue.clone(), lost.clone(), Some(level), *matrices)?;
        gpu.matrices().map_or(Ok(()), |matrices| gpu.probe(matrices))?;
        Ok(gpu)
    }

    /// Computes on a device and queue that somebody else made. Its device-lost callback is replaced; its error handler is not touched. It does not tell
    /// which matrices its adapter multiplies: [`Level::Matrix`] takes [`Gpu::open`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it lacks what the level, or any level, needs; [`Error::Device`].
    pub fn adopt(device: wgpu::Device, queue: wgpu::Queue, level: Option<Level>) -> Result<Self> {
        Self::assemble(device, queue, Loss::default(), level, None)
    }

    fn assemble(device: wgpu::Device, queue: wgpu::Queue, lost: Loss, level: Option<Level>, matrices: Option<Matrices>) -> Result<Self> {
        let (info, limits) = (device.adapter_info(), device.limits());
        let available = Level::of_device(device.features(), info.subgroup_min_size, matrices);
        let proven = || choose(PROOFS, Kind::of(&info), &available).map_or(Level::Plain, |proof| proof.level);
        let level = level.unwrap_or_else(proven);
        if !available.contains(&level) {
            return Err(Error::unsupported(format!("wgpu level {}", level.name()), info.name));
        }
        for (what, has, needs) in [
            ("invocations a workgroup", limits.max_compute_invocations_per_workgroup, 64),
            ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size, 16 << 10),
            ("storage buffers a kernel", limits.max_storage_buffers_per_shader_stage, 8),
        ] {
            if has < needs {
                return Err(Error::unsupported(format!("wgpu with {has} {what} (it takes {needs})"), info.name));
            }
        }
        let place = lost.clone();
        device.set_device_lost_callback(move |reason, what| place.tell(|| format!("the device is lost ({reason:?}): {what}")));
        let descriptor =
            wgpu::BufferDescriptor { label: Some("nothing"), size: 256, usage: BufferUsages::STORAGE, mapped_at_creation: false };
        let (nothing, errors) = caught(&device, || device.create_buffer(&descriptor));
        lost.check()?;
        errors.into_error().map_or(Ok(()), Err)?;
        Ok(Self(Arc::new(Parts {
            name: format!("{} ({} {})", info.name, info.driver, info.driver_info),
            level,
            matrices,
            most_steps: (info.device_type == wgpu::DeviceType::Cpu).then_some(MOST_SOFTWARE_STEPS),
            // places in a binding are counted in 2-byte elements, by 32 bits
            most_binding: limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(1 << 32),
            alignment: u64::from(limits.min_storage_buffer_offset_alignment.max(limits.min_uniform_buffer_offset_alignment)).max(4),
            pipelines: Mutex::default(),
            staging: Staging::default(),
            lost,
            nothing,
            device,
            queue,
        })))
    }

    /// Name of adapter and driver.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The level at which it computes.
    pub fn level(&self) -> Level {
        self.0.level
    }

    /// The device, for those who share it.
    pub fn device(&self) -> &wgpu::Device {
        &self.0.device
    }

    /// The queue, for those who share it.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.0.queue
    }

    /// Waits until everything that was queued is done.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails or does not answer within [`PATIENCE`].
    pub fn synchronize(&self) -> Result<()> {
        self.poll(PollType::Wait { submission_index: None, timeout: Some(PATIENCE) })
    }

    /// What products of f16 elements are made of, where not of multiply-adds.
    pub(crate) fn matrices(&self) -> Option<Matrices> {
        self.0.matrices.filter(|_| self.0.level == Level::Matrix)
    }

    /// The most rounds of all loops of a kernel, where there is such a limit.
    pub(crate) fn most_steps(&self) -> Option<u64> {
        self.0.most_steps
    }

    /// Whether memory of one is memory of the other: the same device, at whatever levels. wgpu cannot tell, for it finds what it is given by a number that
    /// means something else in another instance of it.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.lost.0, &other.0.lost.0)
    }

    pub(crate) fn staging(&self) -> &Staging {
        &self.0.staging
    }

    pub(crate) fn nothing(&self) -> &wgpu::Buffer {
        &self.0.nothing
    }

    /// The most bytes of one binding.
    pub(crate) fn most_binding(&self) -> u64 {
        self.0.most_binding
    }

    /// What offsets of bindings are multiples of.
    pub(crate) fn alignment(&self) -> u64 {
        self.0.alignment
    }

    /// Workgroups as a grid of at most as many lines, and as many a line, as the device takes; `None` if there are too many for that.
    pub(crate) fn grid(&self, groups: u32) -> Option<(u32, u32)> {
        let most = self.0.device.limits().max_compute_workgroups_per_dimension.max(1);
        let width = groups.clamp(1, most);
        let height = groups.div_ceil(width);
        (height <= most).then_some((width, height))
    }

    /// Looks what has happened, without waiting.
    pub(crate) fn look(&self) -> Result<()> {
        self.poll(PollType::Poll)
    }

    fn poll(&self, how: PollType) -> Result<()> {
        self.0.lost.check()?;
        // wgpu has no error for a device that is lost in mid-poll: it panics
        let polled = catch_unwind(AssertUnwindSafe(|| self.0.device.poll(how)));
        self.0.lost.check()?;
        match polled {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(wgpu::PollError::Timeout)) => Err(fault(format!("{} did not answer for {} s", self.name(), PATIENCE.as_secs()))),
            Ok(Err(error)) => Err(fault(error)),
            Err(_) => Err(fault(format!("{} failed while it was polled", self.name()))),
        }
    }

    /// Runs calls to wgpu; the first error that they cause, if any.
    pub(crate) fn guard<T>(&self, calls: impl FnOnce(&wgpu::Device, &wgpu::Queue) -> T) -> Result<T> {
        self.0.lost.check()?;
        let (result, errors) = caught(&self.0.device, || calls(&self.0.device, &self.0.queue));
        self.0.lost.check()?;
        match errors.into_error() {
            None => Ok(result),
            Some(Error::Device { what }) => Err(self.explain(what)),
            Some(other) => Err(other),
        }
    }

    /// An error of a call. Where the device is lost that is the reason, whatever the call says; wgpu tells of it in a poll, once what was queued is done.
    pub(crate) fn explain(&self, what: impl ToString) -> Error {
        let done = self.poll(PollType::Wait { submission_index: None, timeout: Some(EXPLANATION) });
        match done {
            Err(lost) if self.0.lost.check().is_err() => lost,
            _ => fault(what),
        }
    }

    /// A buffer of at least `bytes` bytes, a multiple of 4 and not empty.
    pub(crate) fn create_buffer(&self, label: &str, bytes: u64, usage: BufferUsages) -> Result<wgpu::Buffer> {
        let size = bytes.max(4).next_multiple_of(4);
        let most = self.0.device.limits().max_buffer_size;
        if size > most {
            return Err(Error::OutOfMemory { asked: size, free: Some(most) });
        }
        let descriptor = wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false };
        self.guard(|device, _| device.create_buffer(&descriptor)).map_err(|error| match error {
            Error::OutOfMemory { .. } => Error::OutOfMemory { asked: size, free: None },
            other => other,
        })
    }

    /// A kernel, compiled once for all plans on this device: ranks that want the same one at the same time wait for the first of them.
    pub(crate) fn pipeline(&self, variant: Variant) -> Result<Arc<Pipeline>> {
        let place = Arc::clone(lock(&self.0.pipelines).entry(variant).or_default());
        let mut place = lock(&place);
        if let Some(pipeline) = &*place {
            return Ok(Arc::clone(pipeline));
        }
        let Source { wgsl, bindings, numbers } = variant.source();
        let name = variant.name();
        let made = self.guard(|device, _| {
            let uniform = wgpu::BindGroupLayoutEntry {
                binding: 0,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer { ty: wgpu::BufferBindingType::Uniform, has_dynamic_offset: false, min_binding_size: None },
                count: None,
            };
            let storage = |(number, access): (u32, &Access)| wgpu::BindGroupLayoutEntry {
                binding: number,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: *access == Access::Read },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                ..uniform
            };
            let entries: Vec<_> = std::iter::once(uniform).chain((1..).zip(&bindings).map(storage)).collect();
            let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(name), entries: &entries });
            let whole = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some(name),
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
            let text = wgpu::ShaderModuleDescriptor { label: Some(name), source: wgpu::ShaderSource::Wgsl(wgsl.into()) };
            let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..wgpu::ShaderRuntimeChecks::checked() };
            // SAFETY: of the checks only the one against endless loops is left out. The texts are this crate's own, and every loop in them counts an
            // unsigned number up to a bound that the loop does not change; where that number is read from a list, it is read once, before.
            let module = unsafe { device.create_shader_module_trusted(text, checks) };
            let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(name),
                layout: Some(&whole),
                module: &module,
                entry_point: Some("main"),
                // kernels write what they read
                compilation_options: wgpu::PipelineCompilationOptions { zero_initialize_workgroup_memory: false, ..Default::default() },
                cache: None,
            });
            Pipeline { pipeline, layout, numbers }
        })?;
        let made = Arc::new(made);
        *place = Some(Arc::clone(&made));
        Ok(made)
    }
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("name", &self.name).field("level", &self.level).finish_non_exhaustive()
    }
}

/// What a thread that panicked under the lock left is no worse than what it found: entries are whole or absent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
