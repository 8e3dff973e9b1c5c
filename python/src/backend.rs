//! The backend of a plan, by name. GPUs are opened once and stay open until the process ends, so
//! that plans share their compiled kernels.

use std::sync::{Mutex, PoisonError};

use annulus::{
    Result,
    backend::{AnyBackend, BackendName},
};
use annulus_core::HomeProcess;

/// Name of a backend, and the number of a GPU.
pub(crate) type PyBackend = (String, Option<usize>);

/// Opened GPUs.
static GPUS: Mutex<Vec<(BackendName, Option<usize>, AnyBackend)>> = Mutex::new(Vec::new());

/// Process that uses [`GPUS`]: its forked children can use no GPU, and may find the lock taken.
static HOME: HomeProcess = HomeProcess::unused();

/// Opens a backend. The threads of a CPU rank are `threads`, by default `cores()`.
pub(crate) fn open(
    (name, device): &PyBackend,
    threads: Option<usize>,
    cores: impl FnOnce() -> usize,
) -> Result<AnyBackend> {
    let name: BackendName = name.parse()?;
    if name == BackendName::Cpu {
        return AnyBackend::open(name, *device, threads.unwrap_or_else(cores));
    }
    HOME.check("a GPU")?;
    HOME.note();
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = gpus.iter().find(|(of, number, _)| (of, number) == (&name, device));
    if let (Some((.., gpu)), None) = (opened, threads) {
        return Ok(gpu.clone());
    }
    let gpu = AnyBackend::open(name, *device, threads.unwrap_or(0))?;
    gpus.push((name, *device, gpu.clone()));
    Ok(gpu)
}
