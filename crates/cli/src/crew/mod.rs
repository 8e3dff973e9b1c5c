//! Who does a job: the ranks of a ring, all of them threads of this process, or one of them with the others in processes of their own.
//!
//! A subcommand is written once for both. It goes from phase to phase; a phase ends when every rank of the job has done its part, or, on all
//! ranks alike, with the failure of the lowest rank that failed.
//!
//! ```text
//!  threads   each(items, work)        a thread for each rank, joined
//!  mpi       each([mine], work)       work on this thread, then all ranks tell each other how it went
//! ```

#[cfg(feature = "mpi")]
mod processes;

use std::time::{Duration, Instant};

use annulus_comm::{
    Descriptor,
    threads::{self, Threads, each_rank},
};
use annulus_core::{Error, Host, Result, Transport};

use crate::{
    arguments::ring::{Means, TransportName, threads_per_rank},
    failure::{Failure, Outcome},
};
#[cfg(feature = "mpi")]
use annulus_comm::mpi::{FirstRanks, Mpi, Settings};
#[cfg(feature = "mpi")]
pub(crate) use processes::World;

/// One rank's endpoint of a ring.
pub(crate) enum Endpoint {
    /// Of a thread of this process.
    Thread(Box<Threads>),
    /// Of this process.
    #[cfg(feature = "mpi")]
    Process(Box<Mpi>),
}

impl Endpoint {
    /// A transport of blocks in host memory.
    pub(crate) fn of_host(self) -> Box<dyn Transport<Host>> {
        match self {
            Self::Thread(endpoint) => endpoint,
            #[cfg(feature = "mpi")]
            Self::Process(endpoint) => endpoint,
        }
    }
}

/// How long the processes of a job wait for a silent one of them, where no flag says it.
pub(crate) const PATIENCE: Duration = annulus::comm::deadline::DEFAULT;

/// The ranks of a job, as this process sees them.
pub(crate) struct Crew {
    ranks: usize,
    #[cfg(feature = "mpi")]
    world: Option<World>,
}

impl Crew {
    /// A crew of threads of this process.
    pub(crate) const fn of_threads(ranks: usize) -> Self {
        Self {
            ranks,
            #[cfg(feature = "mpi")]
            world: None,
        }
    }

    /// The crew that the flags and the launcher make: threads of this process, or all processes of the job, which must have been given the
    /// same subcommand. Who gets a crew must [`Crew::end`] it.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// As [`TransportName::means`]; whatever MPI reports; a failure on all processes if one of them has another subcommand.
    pub(crate) fn form(
        subcommand: &'static str,
        transport: TransportName,
        patience: Duration,
    ) -> Outcome<Self> {
        match transport.means()? {
            Means::Threads => Ok(Self::of_threads(1)),
            #[cfg(feature = "mpi")]
            Means::Processes => {
                let world = World::begin(patience)?;
                let mut crew = Self { ranks: world.ranks(), world: Some(world) };
                // in a job in which somebody could not read its command line, all hear of it here
                let number =
                    subcommand.bytes().fold(0u64, |number, letter| number << 8 | u64::from(letter));
                match crew.agree(Ok(())).and_then(|()| {
                    crew.same(Descriptor::new().field_as("subcommand", number, subcommand))
                }) {
                    Ok(()) => Ok(crew),
                    Err(failure) => Err(crew.end_with(failure)),
                }
            }
            #[cfg(not(feature = "mpi"))]
            Means::Processes => {
                let _: (&str, Duration) = (subcommand, patience);
                Err(TransportName::Mpi.missing())
            }
        }
    }

    /// Gives the ring its number of ranks: as many as were asked for, of threads, or `otherwise`; processes are as many as they are.
    ///
    /// # Errors
    /// [`Failure::Usage`] if the processes are another number.
    pub(crate) fn enlist(&mut self, asked: Option<usize>, otherwise: usize) -> Outcome {
        let all = self.ranks;
        if !self.is_of_processes() {
            self.ranks = asked.unwrap_or(otherwise);
            return Ok(());
        }
        self.agree(match asked.filter(|&asked| asked != all) {
            Some(asked) => Err(Failure::usage(
                "--ranks",
                asked,
                format!("{all}, the processes of this job (or no --ranks)"),
            )),
            None => Ok(()),
        })
    }

    /// Threads of each rank: as asked, or those that it can have.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// As [`threads_per_rank`], of the ranks of this process.
    pub(crate) fn threads(&mut self, asked: Option<usize>) -> Outcome<usize> {
        let threads = threads_per_rank(asked, self.sharers());
        self.agree(threads)
    }

    /// How many ranks share the cores of this process.
    fn sharers(&self) -> usize {
        #[cfg(feature = "mpi")]
        if let Some(world) = &self.world {
            return world.sharers();
        }
        self.ranks
    }

    /// All ranks of the ring.
    pub(crate) const fn ranks(&self) -> usize {
        self.ranks
    }

    /// Whether every rank is a process.
    pub(crate) const fn is_of_processes(&self) -> bool {
        #[cfg(feature = "mpi")]
        return self.world.is_some();
        #[cfg(not(feature = "mpi"))]
        return false;
    }

    /// Whether the ranks are several processes of one machine.
    pub(crate) fn shares_a_node(&self) -> bool {
        #[cfg(feature = "mpi")]
        if let Some(world) = &self.world {
            return world.nodes().nodes() == 1;
        }
        false
    }

    /// Whether this process says what is said once, and makes what is made once.
    pub(crate) fn leads(&self) -> bool {
        self.first_rank() == 0
    }

    /// The first rank of this process: 0, or the only one.
    pub(crate) fn first_rank(&self) -> usize {
        #[cfg(feature = "mpi")]
        if let Some(world) = &self.world {
            return world.rank();
        }
        0
    }

    /// New endpoints of a ring: those of this process's ranks.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// As `Mpi::world`.
    pub(crate) fn endpoints(&mut self) -> Outcome<Vec<Endpoint>> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            let endpoint = world.endpoint();
            return self.agree(endpoint.map(|endpoint| vec![endpoint]).map_err(Failure::from));
        }
        Ok(threads::ring(self.ranks)
            .into_iter()
            .map(|endpoint| Endpoint::Thread(Box::new(endpoint)))
            .collect())
    }

    /// The first `count` processes, of which rings can be made; `None` if this one is not among them, or none is.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// As [`FirstRanks::of_world`].
    #[cfg(feature = "mpi")]
    pub(crate) fn first_ranks(&mut self, count: usize) -> Outcome<Option<FirstRanks>> {
        let part = self.world.as_ref().map_or(Ok(None), |world| world.first_ranks(count));
        self.agree(part.map_err(Failure::from))
    }

    /// The processes, if the ranks are processes.
    #[cfg(feature = "mpi")]
    pub(crate) const fn world(&self) -> Option<&World> {
        self.world.as_ref()
    }

    /// Says that this process works, to those that wait for it.
    ///
    /// # Errors
    /// The loss of a process.
    #[cfg(feature = "mpi")]
    pub(crate) fn alive(&mut self) -> Outcome {
        Ok(self.world.as_mut().map_or(Ok(()), |world| world.alive(Duration::ZERO))?)
    }

    /// How the processes' endpoints behave.
    #[cfg(feature = "mpi")]
    pub(crate) fn settings(&self) -> Settings {
        self.world.as_ref().map_or_else(Settings::default, World::settings)
    }

    /// A moment that is the same for all ranks, as nearly as messages can tell.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// The loss of a process.
    pub(crate) fn moment(&mut self) -> Outcome<Instant> {
        // whoever has just been woken by one is awake for the next
        for _ in 0..3 {
            self.share(&[])?;
        }
        Ok(Instant::now())
    }

    /// Every process's bytes, in the order of ranks.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// The loss of a process.
    pub(crate) fn share(&mut self, bytes: &[u8]) -> Outcome<Vec<Vec<u8>>> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            return Ok(world.gather(bytes)?);
        }
        Ok(vec![bytes.to_vec()])
    }

    /// Every process's numbers, as many each.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// As [`Crew::share`]; [`Error::Comm`] if a process has another number of numbers.
    pub(crate) fn share_numbers(&mut self, numbers: &[f64]) -> Outcome<Vec<Vec<f64>>> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let decoded = |(peer, bytes): (usize, Vec<u8>)| {
            let decoded: Vec<f64> =
                bytes.as_chunks::<8>().0.iter().copied().map(f64::from_le_bytes).collect();
            let complete = decoded.len() == numbers.len();
            let what = || format!("{} numbers, want {}", decoded.len(), numbers.len());
            if complete {
                Ok(decoded)
            } else {
                Err(Error::Comm { peer, step: 0, what: what() }.into())
            }
        };
        self.share(&bytes)?.into_iter().enumerate().map(decoded).collect()
    }

    /// This process's result if every process has one, else the failure that says most, on all processes the same.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// As said; the loss of a process.
    pub(crate) fn agree<T>(&mut self, mine: Outcome<T>) -> Outcome<T> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            return world.agree(mine);
        }
        mine
    }

    /// Makes sure that all processes were asked to do the same.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// [`Error::RankMismatch`] naming the field; the loss of a process.
    pub(crate) fn same(&mut self, descriptor: Descriptor) -> Outcome {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            let same = world.same(descriptor);
            return world.agree(same);
        }
        drop(descriptor);
        Ok(())
    }

    /// One phase in which ranks may talk over the ring: `work(rank, item)` for each of this process's ranks.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// As [`Crew::agree`].
    pub(crate) fn each<I: Send, T: Send>(
        &mut self,
        items: impl IntoIterator<Item = I>,
        work: impl Fn(usize, I) -> Result<T> + Sync,
    ) -> Outcome<Vec<T>> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            let rank = world.rank();
            // on this thread: below MPI_THREAD_MULTIPLE no other may move the ring
            let done = items.into_iter().map(|item| work(rank, item)).collect::<Result<_>>();
            return world.agree(done.map_err(Failure::from));
        }
        Ok(each_rank(items, work)?)
    }

    /// One phase in which every rank is busy with itself (it reads, it writes), for however long.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// As [`Crew::agree`].
    pub(crate) fn each_apart<I: Send, T: Send>(
        &mut self,
        items: impl IntoIterator<Item = I, IntoIter: Send>,
        work: impl Fn(usize, I) -> Result<T> + Sync,
    ) -> Outcome<Vec<T>> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &mut self.world {
            let (rank, items) = (world.rank(), items.into_iter());
            let done = world.beating(|| items.map(|item| work(rank, item)).collect::<Result<_>>());
            return world.agree(done.map_err(Failure::from));
        }
        Ok(each_rank(items, work)?)
    }

    /// The end of the job, as well or as badly as it went: says what failed, once, and leaves MPI.
    ///
    /// # Ordering
    /// Collective over the processes, unless one was lost.
    /// # Errors
    /// The failure, if there was one; it may be one that has been said.
    pub(crate) fn end(self, outcome: Outcome) -> Outcome {
        match outcome {
            Ok(()) => {
                #[cfg(feature = "mpi")]
                if let Some(world) = self.world {
                    world.leave(0);
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

/// Says that the command line makes no sense: once, where it was given to several processes, all of which then end as this one does.
pub(crate) fn refuse(failure: Failure) -> Failure {
    #[cfg(feature = "mpi")]
    if crate::launcher::among_others().is_some()
        && let Ok(mut world) = World::begin(processes::REFUSAL)
    {
        let agreed = world.agree::<()>(Err(failure));
        return agreed.map_or_else(|failure| world.fail(failure), |()| Failure::Told(2));
    }
    failure
}
