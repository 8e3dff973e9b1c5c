//! The ranks of one command: all threads of this process, or this process as one MPI rank.
//!
//! A subcommand is written once for both. It is a sequence of phases. A phase ends when every rank
//! has finished its part, or on all ranks with the same failure: that of the lowest rank that
//! failed.
//!
//! ```text
//!  threads   run_phase(items, work)     one thread per rank, joined
//!  MPI       run_phase([mine], work)    work on this thread, then an all-gather of the status
//! ```

#[cfg(feature = "mpi")]
mod processes;

use std::time::{Duration, Instant};

use annulus_comm::{
    Descriptor,
    threads::{self, Threads, each_rank},
};
use annulus_core::{Backend, Error, Host, Result as LibraryResult, Transport};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    arguments::ring::{TransportName, threads_per_rank},
    failure::{Failure, Outcome},
};
#[cfg(feature = "mpi")]
use annulus_comm::mpi::{FirstRanks, Mpi, Settings};
#[cfg(feature = "mpi")]
pub(crate) use processes::World;

/// Backend of one rank, and the transport of its blocks.
pub(crate) type RankBackend<B> = (B, Box<dyn Transport<<B as Backend>::Space>>);

/// Endpoint of one rank on a ring.
pub(crate) enum RankEndpoint {
    /// A thread of this process.
    Thread(Box<Threads>),
    /// This process.
    #[cfg(feature = "mpi")]
    Process(Box<Mpi>),
}

impl RankEndpoint {
    /// Returns the endpoint as a transport of blocks in host memory.
    pub(crate) fn of_host(self) -> Box<dyn Transport<Host>> {
        match self {
            Self::Thread(endpoint) => endpoint,
            #[cfg(feature = "mpi")]
            Self::Process(endpoint) => endpoint,
        }
    }
}

/// Deadline of subcommands without a `--deadline`: the library's default.
pub(crate) const DEFAULT_DEADLINE: Duration = annulus::comm::deadline::DEFAULT;

/// The ranks of one command.
pub(crate) struct Job {
    ranks: usize,
    /// All processes, if the ranks are MPI processes.
    #[cfg(feature = "mpi")]
    world: Option<World>,
}

impl Job {
    /// Creates a job of `ranks` threads of this process.
    pub(crate) const fn of_threads(ranks: usize) -> Self {
        Self {
            ranks,
            #[cfg(feature = "mpi")]
            world: None,
        }
    }

    /// Starts a job of the kind that the flags and the launcher determine. Processes initialise
    /// MPI and check that all run the same subcommand. A started job must be ended with
    /// [`Job::end`].
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn start(
        subcommand: &'static str,
        transport: TransportName,
        deadline: Duration,
    ) -> Outcome<Self> {
        if !transport.is_of_processes()? {
            return Ok(Self::of_threads(1));
        }
        #[cfg(feature = "mpi")]
        {
            let world = World::init(deadline)?;
            let mut job = Self { ranks: world.ranks(), world: Some(world) };
            let number =
                subcommand.bytes().fold(0u64, |number, letter| number << 8 | u64::from(letter));
            // a process that could not parse its command line reports that in this agreement
            let same = job.agree(Ok::<_, Failure>(())).and_then(|()| {
                job.require_same(Descriptor::new().field_as("subcommand", number, subcommand))
            });
            match same {
                Ok(()) => Ok(job),
                Err(failure) => Err(job.end_with(failure)),
            }
        }
        #[cfg(not(feature = "mpi"))]
        {
            let _: (&str, Duration) = (subcommand, deadline);
            Err(TransportName::Mpi.missing())
        }
    }

    /// Sets the number of ranks. Threads: `requested`, or `default` without a request. Processes
    /// are as many as the launcher started, so a request must equal their number.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// [`Failure::Usage`] if `requested` is not the number of processes.
    pub(crate) fn set_ranks(&mut self, requested: Option<usize>, default: usize) -> Outcome {
        let all = self.ranks;
        if !self.is_mpi() {
            self.ranks = requested.unwrap_or(default);
            return Ok(());
        }
        self.agree(match requested.filter(|&ranks| ranks != all) {
            Some(ranks) => Err(Failure::usage(
                "--ranks",
                ranks,
                format!("{all}, the processes of this job (or no --ranks)"),
            )),
            None => Ok(()),
        })
    }

    /// Returns the number of threads per rank: `requested`, or an equal part of the cores.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn threads(&mut self, requested: Option<usize>) -> Outcome<usize> {
        let threads = threads_per_rank(requested, self.ranks_sharing_cores());
        self.agree(threads)
    }

    /// Number of ranks that run on the cores of this process.
    fn ranks_sharing_cores(&self) -> usize {
        #[cfg(feature = "mpi")]
        if let Some(world) = &self.world {
            return world.ranks_sharing_cores();
        }
        self.ranks
    }

    /// Number of ranks of the ring.
    pub(crate) const fn ranks(&self) -> usize {
        self.ranks
    }

    /// Number of processes.
    pub(crate) const fn processes(&self) -> usize {
        if self.is_mpi() { self.ranks } else { 1 }
    }

    /// True if every rank is an MPI process.
    pub(crate) const fn is_mpi(&self) -> bool {
        #[cfg(feature = "mpi")]
        return self.world.is_some();
        #[cfg(not(feature = "mpi"))]
        return false;
    }

    /// True if this process has rank 0, which prints the results and creates the output file.
    pub(crate) fn is_leader(&self) -> bool {
        self.first_rank() == 0
    }

    /// Lowest rank of this process: 0 for threads, else its MPI rank.
    pub(crate) fn first_rank(&self) -> usize {
        #[cfg(feature = "mpi")]
        if let Some(world) = &self.world {
            return world.rank();
        }
        0
    }

    /// Creates a new ring and returns the endpoints of this process's ranks.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn endpoints(&mut self) -> Outcome<Vec<RankEndpoint>> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            let endpoint = world.endpoint();
            return self.agree(endpoint.map(|endpoint| vec![endpoint]));
        }
        Ok(threads::ring(self.ranks)
            .into_iter()
            .map(|endpoint| RankEndpoint::Thread(Box::new(endpoint)))
            .collect())
    }

    /// Returns the group of the first `count` processes, which can create rings. `None` if this
    /// process is not in the group, or the ranks are threads.
    ///
    /// # Ordering
    /// Collective over the processes.
    #[cfg(feature = "mpi")]
    pub(crate) fn first_ranks(&mut self, count: usize) -> Outcome<Option<FirstRanks>> {
        let part = self.world.as_ref().map_or(Ok(None), |world| world.first_ranks(count));
        self.agree(part)
    }

    /// All processes, if the ranks are MPI processes.
    #[cfg(feature = "mpi")]
    pub(crate) const fn world(&self) -> Option<&World> {
        self.world.as_ref()
    }

    /// Sends a heartbeat to the processes that wait for this one.
    #[cfg(feature = "mpi")]
    pub(crate) fn heartbeat(&mut self) -> Outcome {
        Ok(self.world.as_mut().map_or(Ok(()), |world| world.heartbeat(Duration::ZERO))?)
    }

    /// Settings of the processes' endpoints.
    #[cfg(feature = "mpi")]
    pub(crate) fn settings(&self) -> Settings {
        self.world.as_ref().map_or_else(Settings::default, |world| world.settings.clone())
    }

    /// Returns an instant that all ranks take at the same time, up to the latency of a message.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn synchronized_now(&mut self) -> Outcome<Instant> {
        // the first all-gathers wake processes that sleep, so that the last one is short
        for _ in 0..3 {
            self.all_gather(&[])?;
        }
        Ok(Instant::now())
    }

    /// All-gathers bytes: returns those of every process, by rank.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn all_gather(&mut self, bytes: &[u8]) -> Outcome<Vec<Vec<u8>>> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            return Ok(world.all_gather(bytes)?);
        }
        Ok(vec![bytes.to_vec()])
    }

    /// All-gathers a value of every process, by rank.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn all_gather_values<T: Serialize + DeserializeOwned>(
        &mut self,
        value: &T,
    ) -> Outcome<Vec<T>> {
        let bytes = serde_json::to_vec(value).map_err(Error::internal)?;
        let decoded = |(peer, bytes): (usize, Vec<u8>)| {
            let wrong = |error: serde_json::Error| {
                Failure::from(Error::Comm { peer, step: 0, what: error.to_string() })
            };
            serde_json::from_slice(&bytes).map_err(wrong)
        };
        self.all_gather(&bytes)?.into_iter().enumerate().map(decoded).collect()
    }

    /// Agrees on the status of all processes. Returns `mine` if every process succeeded, else the
    /// same failure on all processes.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// The failure of the lowest rank that did not merely repeat another rank's; the loss of a
    /// process.
    pub(crate) fn agree<T>(&mut self, mine: Result<T, impl Into<Failure>>) -> Outcome<T> {
        let mine = mine.map_err(Into::into);
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            return world.agree(mine);
        }
        mine
    }

    /// Checks that all processes have the same arguments.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// [`Error::RankMismatch`] naming the field; the loss of a process.
    pub(crate) fn require_same(&mut self, descriptor: Descriptor) -> Outcome {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            let same = world.require_same(descriptor);
            return world.agree(same);
        }
        drop(descriptor);
        Ok(())
    }

    /// Runs a phase in which ranks may communicate over the ring: `work(rank, item)` for each rank
    /// of this process.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn run_phase<I: Send, T: Send>(
        &mut self,
        items: impl IntoIterator<Item = I>,
        work: impl Fn(usize, I) -> LibraryResult<T> + Sync,
    ) -> Outcome<Vec<T>> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            let rank = world.rank();
            // on this thread: below MPI_THREAD_MULTIPLE no other thread may call MPI
            let done = items.into_iter().map(|item| work(rank, item)).collect::<LibraryResult<_>>();
            return world.agree(done.map_err(Failure::from));
        }
        Ok(each_rank(items, work)?)
    }

    /// Runs a phase without communication, such as reading or writing files. Processes send
    /// heartbeats meanwhile, so the phase may take longer than the deadline.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn run_local_phase<I: Send, T: Send>(
        &mut self,
        items: impl IntoIterator<Item = I, IntoIter: Send>,
        work: impl Fn(usize, I) -> LibraryResult<T> + Sync,
    ) -> Outcome<Vec<T>> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            let rank = world.rank();
            let items = items.into_iter();
            let done = world.with_heartbeat(|| {
                items.map(|item| work(rank, item)).collect::<LibraryResult<_>>()
            });
            return world.agree(done.map_err(Failure::from));
        }
        Ok(each_rank(items, work)?)
    }

    /// Ends the job: prints a failure once and finalises MPI.
    ///
    /// # Ordering
    /// Collective over the processes, unless one was lost.
    /// # Errors
    /// The failure of `outcome`, marked as printed where it was.
    pub(crate) fn end(self, outcome: Outcome) -> Outcome {
        match outcome {
            Ok(()) => {
                #[cfg(feature = "mpi")]
                if let Some(world) = self.world {
                    world.finalize(0);
                }
                Ok(())
            }
            Err(failure) => Err(self.end_with(failure)),
        }
    }

    fn end_with(self, failure: Failure) -> Failure {
        #[cfg(feature = "mpi")]
        if let Some(world) = self.world {
            return world.fail(failure);
        }
        failure
    }
}

/// Refuses a command line. Where a launcher gave it to several processes, these agree on the
/// failure, so that it is printed once and all end with the same exit code.
pub(crate) fn refuse(failure: Failure) -> Failure {
    #[cfg(feature = "mpi")]
    if crate::launcher::one_of_several().is_some()
        && let Ok(mut world) = World::init(processes::REFUSAL_DEADLINE)
    {
        let agreed = world.agree::<()>(Err(failure));
        return agreed.map_or_else(|failure| world.fail(failure), |()| Failure::Printed(2));
    }
    failure
}
