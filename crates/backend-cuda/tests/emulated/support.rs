//! Emulated devices as subjects of the conformance suite.

use std::{
    cell::Cell,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use annulus_conformance::Subject;
use annulus_core::Result;
use annulus_cuda::{
    Cuda, Level,
    device::{Cache, Compiler, Device, Stream},
};
use annulus_cuda_emulator as emulator;

use crate::{
    common::{hosted, staged},
    mistakes::Planted,
};

thread_local! {
    /// Seed of the devices that this thread allots.
    static SEED: Cell<u64> = const { Cell::new(emulator::DEFAULT_SEED) };
}

/// Allots one device to every rank of every run, so that a failed device affects one run only.
pub(crate) fn next_device() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let ordinal = NEXT.fetch_add(1, Ordering::Relaxed) % emulator::DEVICES;
    emulator::set_seed(ordinal, SEED.get());
    emulator::plant(ordinal, 0);
    ordinal
}

/// Calls `run`, with devices whose blocks and threads run in the order of this seed.
pub(crate) fn with_seed<T>(seed: u64, run: impl FnOnce() -> T) -> T {
    let before = SEED.replace(seed);
    let result = run();
    SEED.set(before);
    result
}

/// The emulated compiler with a cache in the folder for test files.
pub(crate) fn compiler() -> Result<Compiler> {
    Compiler::with_symbols(emulator::compiler_symbols(), Some(cache()))
}

fn cache() -> Cache {
    Cache::new(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels"))
}

/// A backend on a new emulated device.
pub(crate) fn emulated() -> Result<Cuda> {
    emulated_on(next_device())
}

/// A backend on emulated device `ordinal`.
pub(crate) fn emulated_on(ordinal: usize) -> Result<Cuda> {
    let device = Device::with_symbols(emulator::symbols(), ordinal)?;
    Ok(Cuda::on(Stream::new(&device)?, compiler()?))
}

/// As [`emulated_on`], with a planted mistake.
pub(crate) fn planted_on(ordinal: usize, planted: Planted) -> Result<Cuda> {
    planted.plant(ordinal);
    Ok(emulated_on(ordinal)?.edited(planted.edit()))
}

/// Ring of emulated devices, messages delayed by up to `delay`.
pub(crate) fn delayed(delay: Duration) -> impl Subject {
    staged("emulated cuda over staged threads", delay, emulated)
}

/// As [`delayed`], without delay.
pub(crate) fn plain() -> impl Subject {
    delayed(Duration::ZERO)
}

/// A backend at the warpgroup level on an emulated device of compute capability 9.0, with the
/// kernels as they are or with a planted mistake.
pub(crate) fn hopper(planted: Option<Planted>) -> Result<Cuda> {
    // the cases have few queries
    hopper_on(next_device(), planted, 0)
}

/// As [`hopper`] on device `ordinal`, with the fewest rows for which warpgroups are used.
pub(crate) fn hopper_on(ordinal: usize, planted: Option<Planted>, rows: usize) -> Result<Cuda> {
    let device = Device::with_symbols(emulator::hopper_symbols(), ordinal)?;
    let compiler = Compiler::with_symbols(emulator::hopper_compiler_symbols(), Some(cache()))?;
    let mut cuda = Cuda::on(Stream::new(&device)?, compiler).with_min_warpgroup_rows(rows);
    if let Some(planted) = planted {
        planted.plant(ordinal);
        cuda = cuda.edited(planted.edit());
    }
    cuda.at_level(Level::Warpgroup)
}

/// As [`plain`] on warpgroups without wide tiles: see [`hopper`].
pub(crate) fn on_warpgroups(planted: Option<Planted>) -> impl Subject {
    staged("emulated cuda on warpgroups over staged threads", Duration::ZERO, move || {
        Ok(hopper(planted)?.with_wide_tiles(false))
    })
}

/// As [`on_warpgroups`], with wide tiles of the forward pass.
pub(crate) fn on_wide_tiles(planted: Option<Planted>) -> impl Subject {
    staged("emulated cuda on wide tiles over staged threads", Duration::ZERO, move || {
        Ok(hopper(planted)?.with_wide_tiles(true))
    })
}

/// As [`plain`], for tensors in host memory.
pub(crate) fn plain_hosted() -> impl Subject {
    hosted("hosted emulated cuda over staged threads", emulated)
}
