//! Flags that say on what, and by whom, the work is done.

use annulus_core::Error;
use annulus_cpu::Isa;
use clap::ValueEnum;

use crate::failure::{Failure, Outcome};

/// Backends by name, whether or not this build has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// Host memory and SIMD.
    Cpu,
    /// Any GPU through WebGPU.
    Wgpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// Transports by name, whether or not this build has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportName {
    /// One rank a thread of this process.
    Threads,
    /// One rank a process of an MPI program.
    Mpi,
    /// NVIDIA GPUs among themselves.
    Nccl,
}

impl BackendName {
    /// Refuses what this build does not have, and what this backend cannot be told to be, before anything is read.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what it has; [`Failure::Usage`] if the environment names no instruction set.
    pub(crate) fn check(self) -> Outcome {
        match self {
            Self::Cpu => Isa::chosen().map(|_| ()).map_err(Failure::of_flags),
            Self::Wgpu | Self::Cuda => Err(missing("backend", &self, "cpu")),
        }
    }
}

impl TransportName {
    /// Refuses what this build does not have.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what it has.
    pub(crate) fn check(self) -> Outcome {
        match self {
            Self::Threads => Ok(()),
            Self::Mpi | Self::Nccl => Err(missing("transport", &self, "threads")),
        }
    }
}

fn missing(what: &str, name: &impl ValueEnum, has: &str) -> Failure {
    let name = name.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    Error::unsupported(format!("{what} {name}"), format!("this build, which has: {has}")).into()
}

/// The most threads of all ranks together.
const MOST_THREADS: usize = 4096;

/// Threads of each rank: as asked, or the machine's shared among the ranks.
///
/// # Errors
/// [`Failure::Usage`] if all ranks together would start more than is sane.
pub(crate) fn threads_per_rank(asked: Option<usize>, ranks: usize) -> Outcome<usize> {
    let threads = asked.unwrap_or_else(|| (cores() / ranks.max(1)).max(1));
    match threads.saturating_mul(ranks) {
        0..=MOST_THREADS => Ok(threads),
        all => Err(Failure::usage("--threads", format!("{all} threads in all ranks"), format!("at most {MOST_THREADS}"))),
    }
}

/// Threads that this machine runs at once.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
