//! The processes of a job under MPI: what they tell each other beside the rings, and how they end.
//!
//! Every process has an endpoint over all of them for the life of the job. What is said on it is small: how a phase went, a file's temporary
//! name, a few numbers. While a process reads or writes its rows for itself, this endpoint says that it is alive.
//!
//! # How a job ends
//! | what happened | who says it | MPI |
//! |---|---|---|
//! | all went well | rank 0 | is finalised |
//! | a rank failed and all know | rank 0, naming the rank | is finalised |
//! | a rank was lost | rank 0; if it is the one that was lost, whoever found that out | is left as it is: finalising would wait for the lost one |

use std::{
    ops::RangeInclusive,
    thread,
    time::{Duration, Instant},
};

use annulus_comm::{
    Deadline, Descriptor, agreement,
    mpi::{FirstRanks, Launch, Mpi, NodeMap, RankLocation, Settings},
};
use annulus_core::{Control, Error, Host, Result, Transport};

use super::Endpoint;
use crate::{
    failure::{Failure, LINGER, Outcome},
    launcher,
    report::{complain, of_silence},
};

/// How long a process whose command line makes no sense waits for the others to hear of it.
pub(super) const REFUSAL: Duration = Duration::from_secs(10);
/// How long ranks whose ring died wait for each other, to find out whether all of them are still there.
const ROLL_CALL: Duration = Duration::from_secs(2);
/// How long MPI may take to finalise a job that has failed.
const LEAVING: Duration = Duration::from_secs(5);
/// How often a process that is busy with itself gives a sign of life.
const BEAT: Duration = Duration::from_millis(2);

/// All processes of the job.
pub(crate) struct World {
    endpoint: Deadline<Mpi, Host>,
    nodes: NodeMap,
    patience: Duration,
    round: u64,
    // last: MPI must outlive the endpoint
    launch: Launch,
}

impl World {
    /// Begins MPI, and meets the other processes.
    ///
    /// # Errors
    /// Whatever MPI reports; [`Error::InvalidArgument`] if the launcher has started another number of processes than MPI sees.
    pub(super) fn begin(patience: Duration) -> Result<Self> {
        let launch = Launch::begin()?;
        let endpoint = Mpi::world(Settings { patience, ..Settings::default() })?;
        let nodes = endpoint.nodes().clone();
        let (rank, ranks) = (endpoint.rank(), endpoint.ranks());
        let endpoint = Deadline::new(endpoint, patience)?.with_warning(of_silence(rank, ranks));
        let expected = launcher::place().and_then(|place| Some((place.by, place.size?)));
        if let Some((by, size)) = expected.filter(|&(_, size)| size != ranks) {
            let library = launch.library()?;
            let library = library.lines().next().unwrap_or_default().trim();
            let got = format!("{ranks} in MPI's world, {size} started by a launcher ({by})");
            return Err(Error::invalid(
                "processes",
                got,
                format!("the launcher of the MPI that this command was built with: {library}"),
            ));
        }
        Ok(Self { endpoint, nodes, patience, round: 0, launch })
    }

    pub(crate) fn rank(&self) -> usize {
        self.endpoint.rank()
    }

    pub(crate) fn ranks(&self) -> usize {
        self.endpoint.ranks()
    }

    /// Where every process runs.
    pub(crate) const fn nodes(&self) -> &NodeMap {
        &self.nodes
    }

    /// MPI, from its beginning to its end.
    pub(crate) const fn launch(&self) -> &Launch {
        &self.launch
    }

    /// How many ranks of this node may run on cores of this one's, itself among them.
    pub(super) fn sharers(&self) -> usize {
        let places = self.nodes.locations();
        let Some(mine) = places.get(self.rank()) else { return 1 };
        let meets = |other: &RankLocation| {
            let unknown = mine.cores.is_empty() || other.cores.is_empty();
            let common = |run: &RangeInclusive<usize>| {
                mine.cores.iter().any(|own| own.start() <= run.end() && run.start() <= own.end())
            };
            other.node == mine.node && (unknown || other.cores.iter().any(common))
        };
        places.iter().filter(|other| meets(other)).count()
    }

    /// This process's endpoint of a new ring of all.
    pub(super) fn endpoint(&self) -> Result<Endpoint> {
        Ok(Endpoint::Process(Box::new(Mpi::world(self.settings())?)))
    }

    /// The first `count` processes, of which rings can be made; `None` if this one is not among them.
    ///
    /// # Ordering
    /// Collective over all processes.
    /// # Errors
    /// As [`FirstRanks::of_world`].
    pub(crate) fn first_ranks(&self, count: usize) -> Result<Option<FirstRanks>> {
        FirstRanks::of_world(count, self.patience)
    }

    /// How this job's endpoints behave.
    pub(crate) fn settings(&self) -> Settings {
        Settings { patience: self.patience, ..Settings::default() }
    }

    pub(super) fn gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.round += 1;
        agreement::all_gather(&mut self.endpoint, self.round, bytes)
    }

    /// As [`World::gather`]; the loss of a process is taken for granted after `patience`.
    fn gather_within(&mut self, bytes: &[u8], patience: Duration) -> Result<Vec<Vec<u8>>> {
        self.round += 1;
        let (round, started) = (self.round, Instant::now());
        self.endpoint.start_all_gather(round, bytes)?;
        loop {
            if let Some(parts) = self.endpoint.try_all_gather(round)? {
                return Ok(parts);
            }
            if started.elapsed() >= patience {
                let peer = self.endpoint.stragglers(round).first().copied().unwrap_or_default();
                return Err(Error::PeerLost { peer, step: 0 });
            }
            self.endpoint.progress(Duration::from_millis(5))?;
        }
    }

    pub(super) fn same(&mut self, descriptor: Descriptor) -> Outcome {
        self.round += 1;
        agreement::agree(&mut self.endpoint, self.round, Ok(descriptor))?;
        Ok(())
    }

    pub(super) fn agree<T>(&mut self, mine: Outcome<T>) -> Outcome<T> {
        let status = mine.as_ref().err().map(Status::of);
        let bytes = status.as_ref().map_or_else(Vec::new, Status::encode);
        // a ring that died may have died of a rank that did
        let gathered = if status.is_some_and(|status| status.fatal) {
            self.gather_within(&bytes, ROLL_CALL)
        } else {
            self.gather(&bytes)
        };
        match (gathered, mine) {
            (Ok(all), mine) => judge(&all).map_or(mine, Err),
            (Err(_), Err(own)) => Err(own),
            (Err(lost), Ok(_)) => Err(lost.into()),
        }
    }

    /// Does `work`, which is no affair of MPI's, on a thread of its own, and says meanwhile that this process is alive.
    pub(super) fn beating<T: Send>(
        &mut self,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        thread::scope(|scope| {
            let worker = thread::Builder::new().name("files".into()).spawn_scoped(scope, work);
            let worker = worker.map_err(|error| Error::Device {
                what: format!("a thread did not start: {error}"),
            })?;
            let mut moving = Ok(());
            while !worker.is_finished() {
                match moving {
                    Ok(()) => moving = self.alive(BEAT),
                    // whoever waits for this one next hears of it then
                    Err(_) => thread::sleep(BEAT),
                }
            }
            worker.join().unwrap_or_else(|_| {
                Err(Error::Device { what: "the thread of a rank panicked".into() })
            })
        })
    }

    /// Says that this process works, and hears what there is to hear.
    ///
    /// # Errors
    /// The loss of a process.
    pub(crate) fn alive(&mut self, patience: Duration) -> Result<()> {
        self.endpoint.heartbeat(true);
        self.endpoint.progress(patience)
    }

    /// Leaves MPI, as all processes do. Should MPI not let go of a job that has failed, the process ends with `code` all the same.
    pub(super) fn leave(self, code: u8) {
        let Self { endpoint, launch, .. } = self;
        if code != 0 {
            // it ends with the process
            drop(thread::Builder::new().name("leaving".into()).spawn(move || {
                thread::sleep(LEAVING);
                std::process::exit(i32::from(code));
            }));
        }
        drop(endpoint);
        drop(launch);
    }

    /// Says what failed if it is this process's to say, and leaves.
    pub(super) fn fail(mut self, failure: Failure) -> Failure {
        let rank = self.rank();
        if let Failure::Agreed { rank: failed, what, code } = &failure {
            if rank == 0 && !what.is_empty() {
                match failed {
                    Some(failed) => complain!("rank {failed}: {what}"),
                    None => complain!("{what}"),
                };
            }
            let code = *code;
            self.leave(code);
            return Failure::Told(code);
        }
        if let Failure::Library(error) = &failure {
            self.endpoint.abort(error);
        }
        let speaks = rank == 0 || finds_rank_0_lost(&failure);
        if speaks {
            match &failure {
                Failure::Library(Error::Aborted { rank, what }) => complain!("rank {rank}: {what}"),
                failure => complain!("rank {rank}: {}", failure.text()),
            };
        } else {
            thread::sleep(LINGER);
        }
        let Self { endpoint, launch, .. } = self;
        drop(endpoint);
        launch.abandon();
        Failure::Told(failure.code())
    }
}

fn finds_rank_0_lost(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Library(Error::Timeout { peer: 0, .. } | Error::PeerLost { peer: 0, .. })
    )
}

/// A failure on its way to the other ranks: `[code][fatal][echo][text]`.
struct Status {
    code: u8,
    /// The ring is dead.
    fatal: bool,
    /// It repeats what another rank said.
    echo: bool,
    what: String,
}

impl Status {
    fn of(failure: &Failure) -> Self {
        let (fatal, echo) = match failure {
            Failure::Library(error) => (
                error.is_fatal(),
                matches!(
                    error,
                    Error::Refused { .. } | Error::Aborted { .. } | Error::PeerLost { .. }
                ),
            ),
            _ => (false, false),
        };
        Self { code: failure.code(), fatal, echo, what: failure.text() }
    }

    fn encode(&self) -> Vec<u8> {
        [&[self.code, u8::from(self.fatal), u8::from(self.echo)], self.what.as_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (&[code, fatal, echo], what) = bytes.split_first_chunk()?;
        Some(Self {
            code,
            fatal: fatal != 0,
            echo: echo != 0,
            what: String::from_utf8_lossy(what).into_owned(),
        })
    }
}

/// The failure that says most, from every rank's status: that of the lowest rank that does not only repeat what another one said.
fn judge(all: &[Vec<u8>]) -> Option<Failure> {
    let failed: Vec<(usize, Status)> = all
        .iter()
        .enumerate()
        .filter_map(|(rank, bytes)| Some((rank, Status::decode(bytes)?)))
        .collect();
    let (rank, first) = failed.iter().find(|(_, status)| !status.echo).or(failed.first())?;
    let common =
        failed.len() == all.len() && failed.iter().all(|(_, status)| status.what == first.what);
    let rank = (!common).then_some(*rank);
    Some(Failure::Agreed { rank, code: first.code, what: first.what.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(failure: &Failure) -> Vec<u8> {
        Status::of(failure).encode()
    }

    fn judged(all: &[Vec<u8>]) -> Option<(Option<usize>, u8, String)> {
        judge(all).map(|failure| match failure {
            Failure::Agreed { rank, code, what } => (rank, code, what),
            other => (None, other.code(), other.text()),
        })
    }

    #[test]
    fn the_lowest_rank_that_found_something_is_named() {
        let own = status(&Failure::Usage("--ranks: no".into()));
        let echo =
            status(&Failure::Library(Error::Refused { rank: 2, what: "--ranks: no".into() }));
        assert_eq!(judged(&[vec![], vec![]]), None);
        assert_eq!(
            judged(&[echo.clone(), vec![], own.clone()]),
            Some((Some(2), 2, "--ranks: no".into()))
        );
        assert_eq!(
            judged(&[vec![], own.clone(), own.clone()]),
            Some((Some(1), 2, "--ranks: no".into()))
        );
    }

    #[test]
    fn what_all_ranks_say_is_no_single_one_s() {
        let own = status(&Failure::Usage("--ranks: no".into()));
        assert_eq!(judged(&[own.clone(), own.clone()]), Some((None, 2, "--ranks: no".into())));
        assert_eq!(judged(&[own]), Some((None, 2, "--ranks: no".into())));
    }
}
