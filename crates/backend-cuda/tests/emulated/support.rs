//! The emulated device as a subject of the suite.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use annulus_conformance::Subject;
use annulus_core::Result;
use annulus_cuda::{
    Cuda, Level,
    device::{Cache, Compiler, Device, Stream, emulator},
};

use crate::common::{hosted, staged};

/// A device of its own for every rank of every run, so that one that has failed disturbs nobody.
pub(crate) fn next_device() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed) % emulator::DEVICES
}

/// The emulated compiler, remembering in the folder that tests may write.
pub(crate) fn compiler() -> Result<Compiler> {
    Compiler::with_symbols(emulator::compiler_symbols(), Some(cache()))
}

fn cache() -> Cache {
    Cache::new(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels"))
}

/// A backend on an emulated device of its own.
pub(crate) fn emulated(options: &[&str]) -> Result<Cuda> {
    emulated_on(next_device(), options)
}

/// A backend on emulated device `ordinal`.
pub(crate) fn emulated_on(ordinal: usize, options: &[&str]) -> Result<Cuda> {
    let device = Device::with_symbols(emulator::symbols(), ordinal)?;
    Ok(Cuda::on(Stream::new(&device)?, compiler()?, options.iter().map(|&option| option.to_owned()).collect()))
}

/// Emulated devices, one a rank, each message up to `delay` late. Kernels are compiled with `options` besides their own.
pub(crate) fn subject(options: &'static [&'static str], delay: Duration) -> impl Subject {
    staged("emulated cuda over staged threads", delay, move || emulated(options))
}

/// As [`subject`] of the kernels as they are, on time.
pub(crate) fn plain() -> impl Subject {
    subject(&[], Duration::ZERO)
}

/// A backend on an emulated device of compute capability 9.0, at the level of warpgroups, whose kernels make this mistake.
pub(crate) fn hopper(mistake: u32) -> Result<Cuda> {
    let ordinal = next_device();
    emulator::plant(ordinal, mistake);
    let device = Device::with_symbols(emulator::hopper_symbols(), ordinal)?;
    let compiler = Compiler::with_symbols(emulator::hopper_compiler_symbols(), Some(cache()))?;
    Cuda::on(Stream::new(&device)?, compiler, Vec::new()).at_level(Level::Warpgroup)
}

/// As [`plain`], on warpgroups, with a mistake or 0.
pub(crate) fn on_warpgroups(mistake: u32) -> impl Subject {
    staged("emulated cuda on warpgroups over staged threads", Duration::ZERO, move || hopper(mistake))
}

/// Emulated devices for tensors in host memory.
pub(crate) fn plain_hosted() -> impl Subject {
    hosted("hosted emulated cuda over staged threads", || emulated(&[]))
}
