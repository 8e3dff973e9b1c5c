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
pub(crate) const WITH_MPI: &str =
    "`cargo build --release -p annulus-cli --features mpi` makes one that has mpi";

impl TransportName {
    /// What the ranks are by this name, where this process is.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what this build has, also where `auto` finds a launcher for which it has nothing: several processes that
    /// know nothing of each other would all do the same.
    pub(crate) fn means(self) -> Outcome<Means> {
        match (self, launcher::among_others()) {
            (Self::Nccl, _) if !cfg!(feature = "nccl") => Err(self.missing()),
            (Self::Mpi, _) | (Self::Auto | Self::Nccl, Some(_)) if cfg!(feature = "mpi") => {
                Ok(Means::Processes)
            }
            (Self::Auto | Self::Nccl, None) => Ok(Means::Threads),
            (Self::Threads, _) => {
                launcher::stand_alone();
                Ok(Means::Threads)
            }
            (Self::Auto | Self::Nccl, Some(place)) => {
                let size = place.size.map_or_else(|| "several".to_owned(), |size| size.to_string());
                let what = format!("a job of {size} processes (started through {})", place.by);
                let by = format!(
                    "this build, which has: threads; {WITH_MPI}, and --transport threads lets each process work for itself"
                );
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
        Error::unsupported(
            "transport nccl",
            format!("this build, which has: {}; {with}", transports()),
        )
        .into()
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
/// The most threads of all ranks for each core. Threads of a rank wait for each other at every
/// tile: on one core 256 tokens on 1024 threads take 2 s, and on 4096 threads over 9 minutes.
const MOST_THREADS_PER_CORE: usize = 128;

/// Threads of each rank: as asked, or the machine's shared among the ranks.
///
/// # Errors
/// [`Failure::Usage`] if all ranks together would start more than the machine's cores can run.
pub(crate) fn threads_per_rank(asked: Option<usize>, ranks: usize) -> Outcome<usize> {
    threads_on(cores(), asked, ranks)
}

fn threads_on(cores: usize, asked: Option<usize>, ranks: usize) -> Outcome<usize> {
    let threads = asked.unwrap_or_else(|| (cores / ranks.max(1)).max(1));
    // a rank has a thread of its own in any case
    let most = cores.saturating_mul(MOST_THREADS_PER_CORE).min(MOST_THREADS).max(ranks);
    let all = threads.saturating_mul(ranks);
    if all <= most {
        return Ok(threads);
    }
    let got = format!(
        "{threads}, which makes {all} threads of {ranks} rank{}",
        if ranks == 1 { "" } else { "s" }
    );
    let want = format!(
        "at most {}: {MOST_THREADS_PER_CORE} threads for each of {cores} cores",
        most / ranks.max(1)
    );
    Err(Failure::usage("--threads", got, want))
}

/// Threads that this machine runs at once.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_all_ranks_are_bounded_by_the_cores() {
        assert_eq!(threads_on(8, None, 3).ok(), Some(2));
        assert_eq!(threads_on(1, None, 128).ok(), Some(1));
        assert_eq!(threads_on(1, Some(32), 4).ok(), Some(32));
        assert_eq!(threads_on(64, Some(1024), 4).ok(), Some(1024));
        for (cores, threads, ranks) in [(1, 33, 4), (1, 1024, 1), (2, 32, 128), (64, 1024, 5)] {
            let failure = threads_on(cores, Some(threads), ranks).unwrap_err().text();
            assert!(failure.starts_with(&format!("--threads: got {threads}, ")), "{failure}");
        }
        // as many ranks as the command allows always start
        assert_eq!(threads_on(1, Some(1), 128).ok(), Some(1));
    }
}
