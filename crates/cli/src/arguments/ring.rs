//! Flags that choose the transport and the number of threads.

use annulus_core::Error;
use clap::ValueEnum;

use crate::{
    failure::{Failure, Outcome},
    launcher::{self, LaunchedRank},
};

/// Names of transports, including those that this build does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportName {
    /// MPI if a launcher has started several processes, else threads.
    Auto,
    /// Each rank is a thread of this process.
    Threads,
    /// Each rank is a process of an MPI job.
    Mpi,
    /// NCCL between NVIDIA GPUs, RCCL between AMD GPUs, one for each rank; ranks are threads or
    /// processes as with auto.
    Nccl,
}

/// Command that builds a binary with MPI, for messages.
pub(crate) const WITH_MPI: &str = "`cargo build --release -p annulus-cli --features mpi` adds it";

impl TransportName {
    /// Returns true if every rank is a process of an MPI job, under the launcher of this process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what this build has. Also for `auto` under a launcher in a
    /// build without MPI: the processes could not communicate, so each would do all the work.
    pub(crate) fn is_of_processes(self) -> Outcome<bool> {
        match (self, launcher::one_of_several()) {
            (Self::Nccl, _) if !cfg!(feature = "nccl") => Err(self.missing()),
            (Self::Mpi, _) | (Self::Auto | Self::Nccl, Some(_)) if cfg!(feature = "mpi") => {
                Ok(true)
            }
            (Self::Auto | Self::Nccl, None) => Ok(false),
            (Self::Threads, _) => {
                launcher::force_single();
                Ok(false)
            }
            (Self::Auto | Self::Nccl, Some(launched)) => {
                let LaunchedRank { launcher, .. } = launched;
                let count = launched.count();
                let what = format!("a job of {count} processes (started through {launcher})");
                let by = format!(
                    "this build, which has no mpi; {WITH_MPI}, and with --transport threads \
                     the processes are independent of each other"
                );
                Err(Error::unsupported(what, by).into())
            }
            (Self::Mpi, _) => Err(self.missing()),
        }
    }

    /// Error for a transport that this build does not have.
    pub(crate) fn missing(self) -> Failure {
        let name = if self == Self::Mpi { "mpi" } else { "nccl" };
        let with = WITH_MPI.replace("mpi", name);
        let by = format!("this build, which has: {}; {with}", transports());
        Error::unsupported(format!("transport {name}"), by).into()
    }
}

/// Lists the transports of this build.
const fn transports() -> &'static str {
    match (cfg!(feature = "mpi"), cfg!(feature = "nccl")) {
        (false, false) => "threads",
        (true, false) => "threads, mpi",
        (false, true) => "threads, nccl",
        (true, true) => "threads, mpi, nccl",
    }
}

/// The most threads of all ranks together: far above the cores of a node, and far below the number
/// of threads that systems allow a process.
const MOST_THREADS: usize = 4096;
/// The most threads of all ranks for each core. Threads of a rank wait for each other at every
/// tile, so many threads for each core are slow: measured on one core with 256 tokens, 1024 threads
/// take 2 s and 4096 threads over 9 minutes.
const MOST_THREADS_PER_CORE: usize = 128;

/// Returns the number of threads per rank: `requested`, or an equal part of the cores.
///
/// # Errors
/// [`Failure::Usage`] if all ranks together would have more than [`MOST_THREADS`] threads, or more
/// than [`MOST_THREADS_PER_CORE`] for each core.
pub(crate) fn threads_per_rank(requested: Option<usize>, ranks: usize) -> Outcome<usize> {
    threads_on(cores(), requested, ranks)
}

fn threads_on(cores: usize, requested: Option<usize>, ranks: usize) -> Outcome<usize> {
    let threads = requested.unwrap_or_else(|| (cores / ranks.max(1)).max(1));
    // one thread for each rank is always allowed
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

/// Number of threads that run in parallel on this machine.
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
        // the largest number of ranks that the flags accept
        assert_eq!(threads_on(1, Some(1), 128).ok(), Some(1));
    }
}
