//! Adapters of this machine and their capabilities.
//!
//! Limits of a device that the launches of tile kernels obey.

use std::{
    cell::Cell,
    mem,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use annulus_core::{HomeProcess, Result};
use wgpu::AdapterInfo;

use crate::{
    Level, QueryTileSize, RegisterTile,
    choice::Matrices,
    choice::{AdapterKind, PROOFS, choose},
};

/// Reason why [`crate::Gpu::list`] is empty.
pub const NO_ADAPTER: &str = "no Vulkan, Metal or DX12 driver found (wgpu lists no adapter without \
     a graphics queue, such as AMD Instinct, and DX12 needs dxcompiler.dll)";

/// Subgroup size of all Apple GPUs. wgpu reports 4 to 64 for any Metal device.
const APPLE_SUBGROUP: u32 = 32;

/// An adapter of this machine, as returned by [`crate::Gpu::list`].
#[derive(Debug, Clone)]
pub struct Adapter {
    /// Index for [`crate::Options::number`].
    pub number: usize,
    /// Name reported by the driver.
    pub name: String,
    /// Driver and its version.
    pub driver: String,
    /// Vulkan, Metal or DX12.
    pub api: String,
    /// True for an adapter that computes on the CPU.
    pub software: bool,
    /// Smallest and largest subgroup size.
    pub subgroups: (u32, u32),
    /// Levels that the adapter can run; any of them can be requested.
    pub levels: Vec<Level>,
    /// Level that is used by default.
    pub chosen: Level,
    /// Record file of the measurement that justifies `chosen`; `None` for [`Level::Plain`].
    pub record: Option<&'static str>,
    /// Register tile that is used by default.
    pub register_tile: RegisterTile,
    /// Query tile that large forward launches have by default at [`Level::Matrix`]; `None` if the
    /// adapter cannot run that level. At other levels it is [`QueryTileSize::Of32`].
    pub query_tile: Option<QueryTileSize>,
}

impl Adapter {
    /// Returns true if both are of the same model, with the same driver and API.
    pub fn is_same_kind(&self, other: &Self) -> bool {
        let kind = |of: &Self| (of.name.clone(), of.driver.clone(), of.api.clone());
        kind(self) == kind(other)
    }
}

/// Lists the adapters of this machine: of a GPU that Vulkan and DX12 offer, Vulkan's. `turn` is the
/// guard of [`turn()`].
pub(crate) fn adapters(turn: &MutexGuard<'static, ()>) -> Vec<wgpu::Adapter> {
    let all = pollster::block_on(instance(turn).enumerate_adapters(wgpu::Backends::all()));
    let infos: Vec<_> = all.iter().map(wgpu::Adapter::get_info).collect();
    let wanted = |(adapter, info)| (!is_second(info, &infos)).then_some(adapter);
    all.into_iter().zip(&infos).filter_map(wanted).collect()
}

/// True for a DX12 adapter of a GPU that Vulkan offers, too.
fn is_second(info: &AdapterInfo, all: &[AdapterInfo]) -> bool {
    let same = |other: &AdapterInfo| (other.vendor, other.device) == (info.vendor, info.device);
    info.backend == wgpu::Backend::Dx12
        && all.iter().any(|other| other.backend == wgpu::Backend::Vulkan && same(other))
}

/// Returns the smallest and the largest subgroup size of an adapter.
pub(crate) fn subgroup_sizes(info: &AdapterInfo) -> (u32, u32) {
    if info.backend == wgpu::Backend::Metal && info.name.starts_with("Apple") {
        return (APPLE_SUBGROUP, APPLE_SUBGROUP);
    }
    (info.subgroup_min_size, info.subgroup_max_size)
}

/// Returns the cooperative matrices that the kernels can use on an adapter.
pub(crate) fn matrices(adapter: &wgpu::Adapter) -> Option<Matrices> {
    let (least, most) = subgroup_sizes(&adapter.get_info());
    Matrices::of_device(&adapter.cooperative_matrix_properties(), least, most)
}

/// Returns the levels that an adapter can run.
fn levels(adapter: &wgpu::Adapter) -> Vec<Level> {
    let (least, _) = subgroup_sizes(&adapter.get_info());
    Level::of_device(adapter.features(), least, matrices(adapter))
}

/// Returns the level that a record shows to be the fastest on such adapters, if one does.
pub(crate) fn proven_level(adapter: &wgpu::Adapter) -> Option<Level> {
    choose(PROOFS, &AdapterKind::of(&adapter.get_info()), &levels(adapter)).map(|proof| proof.level)
}

/// Lists the adapters of this machine; empty without a driver.
pub(crate) fn list() -> Vec<Adapter> {
    let describe = |(number, adapter): (usize, wgpu::Adapter)| {
        let info = adapter.get_info();
        let subgroups = subgroup_sizes(&info);
        let levels = levels(&adapter);
        let proof = choose(PROOFS, &AdapterKind::of(&info), &levels);
        let register_tile = RegisterTile::of_adapter(&info);
        let has_matrices = levels.contains(&Level::Matrix);
        let query_tile = has_matrices.then(|| QueryTileSize::of_adapter(&info, Level::Matrix));
        Adapter {
            number,
            name: info.name,
            driver: format!("{} {}", info.driver, info.driver_info),
            api: info.backend.to_string(),
            software: info.device_type == wgpu::DeviceType::Cpu,
            subgroups,
            levels,
            chosen: proof.map_or(Level::Plain, |proof| proof.level),
            record: proof.map(|proof| proof.record),
            register_tile,
            query_tile,
        }
    };
    let Ok(turn) = turn() else { return Vec::new() };
    adapters(&turn).into_iter().enumerate().map(describe).collect()
}

/// Limits of a device that chunks obey.
#[derive(Debug, Clone)]
pub(crate) struct ChunkLimits {
    /// Name of the device.
    pub(crate) device: String,
    /// Upper bound of a binding in bytes.
    pub(crate) binding_bytes: u64,
    /// Alignment of binding offsets in bytes.
    pub(crate) alignment: u64,
    /// Upper bound of loop iterations per kernel, if any.
    pub(crate) loop_steps: Option<u64>,
    /// Upper bound of the work of a part in FLOPs, if it is less than the default.
    pub(crate) part_work: Option<u64>,
    /// Register tile of the kernels, which determines their work.
    pub(crate) register_tile: RegisterTile,
}

/// Returns the upper bound of a binding in bytes. Kernels compute offsets within a binding in 32
/// bits, in elements of at least 2 bytes: a bound of 2^32 bytes leaves half of the range to offsets
/// of rows beyond the last, which are computed before they are clamped.
pub(crate) fn binding_bytes(limits: &wgpu::Limits) -> u64 {
    limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(1 << 32)
}

// The Vulkan instance of the process, and its devices, which open and close one at a time.
//
// Vulkan permits any thread to open and close instances and devices, and ranks that are threads do
// it at the same time. Two data races make that crash: Vulkan's loader inserts and removes devices
// in a list without the lock under which it searches it (github.com/KhronosGroup/Vulkan-Loader,
// issue 2018), and NVIDIA's driver for Linux has one between two instances that are created
// (github.com/gfx-rs/wgpu, issue 5930). So the process has one instance, which is never destroyed,
// and a lock is held while it is created and searched, and while a device opens or closes.
//
// A forked child has none of the threads of a driver and shares its connection, so no child of the
// process that used wgpu first opens a device or calls one: everything on it is leaked there.
//
// A device closes when the last object on it is dropped, which must therefore be an
// [`OpenDevice`]: every struct that holds a buffer also has a [`crate::Gpu`], as its last field.

/// The process that used wgpu first.
static HOME: HomeProcess = HomeProcess::unused();

static INSTANCE: OnceLock<wgpu::Instance> = OnceLock::new();

/// Held while adapters are listed and while a device opens or closes.
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    /// True while this thread closes a device under [`TURN`].
    static CLOSES: Cell<bool> = const { Cell::new(false) };
}

/// Returns true in a forked child of the process that uses wgpu.
pub(crate) fn is_forked() -> bool {
    HOME.is_foreign()
}

/// Checks that this is not a forked child of the process that uses wgpu.
pub(crate) fn check_process() -> Result<()> {
    HOME.check("wgpu")
}

/// Waits until no other thread lists adapters, opens or closes a device of this backend.
pub(crate) fn turn() -> Result<MutexGuard<'static, ()>> {
    check_process()?;
    HOME.note();
    Ok(lock(&TURN))
}

/// Returns the instance of the process. `_turn` is the guard of [`turn`].
pub(crate) fn instance(_turn: &MutexGuard<'static, ()>) -> &'static wgpu::Instance {
    INSTANCE.get_or_init(|| {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        // in every build: shaders without their source, which older validation layers reject, and
        // no layer but those that the environment requests
        descriptor.flags = wgpu::InstanceFlags::empty();
        descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
        // without dxcompiler.dll there is no DX12: the older compiler, FXC, knows no subgroups,
        // takes minutes for unrolled loops, and rejects barriers in loops whose bounds come from a
        // buffer
        descriptor.backend_options.dx12.shader_compiler = wgpu::Dx12Compiler::default_dynamic_dxc();
        wgpu::Instance::new(descriptor)
    })
}

/// Part of a wgpu device that is dropped as soon as the device is closed.
struct Sentinel(Arc<OnceLock<bool>>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        // nobody else sets it
        let _ = self.0.set(CLOSES.get());
    }
}

/// A device and its queue, which close in turn.
#[derive(Debug)]
pub(crate) struct OpenDevice {
    handles: Option<(wgpu::Device, wgpu::Queue)>,
    closed_in_turn: Arc<OnceLock<bool>>,
}

impl OpenDevice {
    /// Keeps a device until it closes in turn. `on_lost` replaces its device-lost callback.
    pub(crate) fn new(
        handles: &(wgpu::Device, wgpu::Queue),
        on_lost: impl Fn(wgpu::DeviceLostReason, String) + Send + 'static,
    ) -> Arc<Self> {
        HOME.note();
        let closed_in_turn = Arc::<OnceLock<bool>>::default();
        let sentinel = Sentinel(Arc::clone(&closed_in_turn));
        // wgpu drops the callback after it has closed the device
        handles.0.set_device_lost_callback(move |reason, what| {
            let _kept = &sentinel;
            on_lost(reason, what);
        });
        Arc::new(Self { handles: Some(handles.clone()), closed_in_turn })
    }

    /// True once the device is closed under the lock, false once it is closed without. A lost
    /// device counts as closed.
    pub(crate) const fn closed_in_turn(&self) -> &Arc<OnceLock<bool>> {
        &self.closed_in_turn
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        let Ok(_turn) = turn() else { return mem::forget(self.handles.take()) };
        CLOSES.set(true);
        drop(self.handles.take());
        CLOSES.set(false);
    }
}

/// Locks, ignoring poison: entries are complete or absent even if a holder panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use wgpu::{Backend, DeviceType};

    use super::*;

    fn info(backend: Backend, name: &str, device: u32) -> AdapterInfo {
        AdapterInfo {
            name: name.to_owned(),
            vendor: 0x1002,
            device,
            ..AdapterInfo::new(DeviceType::DiscreteGpu, backend)
        }
    }

    #[test]
    fn a_gpu_is_listed_once() {
        let all = [
            info(Backend::Vulkan, "a", 1),
            info(Backend::Vulkan, "a", 1),
            info(Backend::Dx12, "a", 1),
            info(Backend::Dx12, "b", 2),
        ];
        // two equal cards are two adapters
        assert_eq!(all.each_ref().map(|info| is_second(info, &all)), [false, false, true, false]);
    }

    #[test]
    fn apple_gpus_have_subgroups_of_32() {
        let reported =
            |info: AdapterInfo| AdapterInfo { subgroup_min_size: 4, subgroup_max_size: 64, ..info };
        let sizes = |backend, name| subgroup_sizes(&reported(info(backend, name, 0)));
        assert_eq!(sizes(Backend::Metal, "Apple M3 Max"), (32, 32));
        assert_eq!(sizes(Backend::Metal, "AMD Radeon Pro 5500M"), (4, 64));
        assert_eq!(sizes(Backend::Vulkan, "Apple M1 (G13G B1)"), (4, 64));
    }
}

#[cfg(test)]
mod limits_tests {
    use super::*;

    #[test]
    fn offsets_within_a_binding_have_31_bits() {
        let limits = |binding, buffer| wgpu::Limits {
            max_storage_buffer_binding_size: binding,
            max_buffer_size: buffer,
            ..wgpu::Limits::default()
        };
        for large in [1 << 32, 1 << 33, 1 << 40] {
            assert_eq!((binding_bytes(&limits(large, large)) / 2 - 1) >> 31, 0, "{large}");
        }
        assert_eq!(binding_bytes(&limits(1000, 1 << 40)), 1000);
        assert_eq!(binding_bytes(&limits(1 << 40, 1000)), 1000);
    }
}
