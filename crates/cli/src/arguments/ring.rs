//! Flags that say on what, and by whom, the work is done.

use annulus_core::Error;
use clap::ValueEnum;

use crate::{
    failure::{Failure, Outcome},
    launcher,
};

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
    /// MPI if a launcher has started several processes, else threads.
    Auto,
    /// One rank a thread of this process.
    Threads,
    /// One rank a process of an MPI program.
    Mpi,
    /// NVIDIA GPUs among themselves, a GPU a rank; ranks are as with auto.
    Nccl,
}

/// What the ranks of a ring are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Means {
    /// Threads of this process.
    Threads,
    /// Processes of an MPI program.
    Processes,
}

/// What makes a command that has MPI.
pub(crate) const WITH_MPI: &str = "`cargo build --release -p annulus-cli --features mpi` makes one that has mpi";

impl TransportName {
    /// What the ranks are by this name, where this process is.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what this build has, also where `auto` finds a launcher for which it has nothing: several processes that
    /// know nothing of each other would all do the same.
    pub(crate) fn means(self) -> Outcome<Means> {
        match (self, launcher::among_others()) {
            (Self::Nccl, _) if !cfg!(feature = "nccl") => Err(self.missing()),
            (Self::Mpi, _) | (Self::Auto | Self::Nccl, Some(_)) if cfg!(feature = "mpi") => Ok(Means::Processes),
            (Self::Auto | Self::Nccl, None) => Ok(Means::Threads),
            (Self::Threads, _) => {
                launcher::stand_alone();
                Ok(Means::Threads)
            }
            (Self::Auto | Self::Nccl, Some(place)) => {
                let size = place.size.map_or_else(|| "several".to_owned(), |size| size.to_string());
                let what = format!("a job of {size} processes (started through {})", place.by);
                let by = format!("this build, which has: threads; {WITH_MPI}, and --transport threads lets each process work for itself");
                Err(Error::unsupported(what, by).into())
            }
            (Self::Mpi, _) => Err(self.missing()),
        }
    }

    /// That this build does not have it.
    pub(crate) fn missing(self) -> Failure {
        if self == Self::Mpi {
            let by = format!("this build, which has: {}; {WITH_MPI}", transports());
            return Error::unsupported("transport mpi", by).into();
        }
        let with = "`cargo build --release -p annulus-cli --features nccl` makes one that has nccl";
        Error::unsupported("transport nccl", format!("this build, which has: {}; {with}", transports())).into()
    }
}

/// The transports of this build.
pub(crate) const fn transports() -> &'static str {
    match (cfg!(feature = "mpi"), cfg!(feature = "nccl")) {
        (false, false) => "threads",
        (true, false) => "threads, mpi",
        (false, true) => "threads, nccl",
        (true, true) => "threads, mpi, nccl",
    }
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
