//! The processes of an MPI job: their control messages beside the rings, and the end of the job.
//!
//! Every process has an endpoint over all processes for the whole job. It carries small messages:
//! the status of a phase, the temporary name of a file, a few numbers. While a process reads or
//! writes files, it sends heartbeats on this endpoint.
//!
//! # End of a job
//! | event | printed by | MPI |
//! |---|---|---|
//! | success | rank 0 | is finalised |
//! | a rank failed, and all agreed on it | rank 0, naming the rank | is finalised |
//! | a rank was lost | rank 0, or ranks that lost rank 0 | is not finalised, which would block |

use std::{
    ops::RangeInclusive,
    thread,
    time::{Duration, Instant},
};

use annulus::Runtime;
use annulus_comm::{
    Deadline, Descriptor, agreement,
    mpi::{FirstRanks, Launch, Mpi, NodeMap, RankLocation, Settings, Timeout},
};
use annulus_core::{Control, Error, Host, Result, Transport};
use serde::{Deserialize, Serialize};

use super::RankEndpoint;
use crate::{
    failure::{Failure, Outcome, SILENT_EXIT_DELAY, is_echo},
    interrupt,
    launcher::{self, LaunchedRank},
    report::{complain, warn_of_silence},
};

/// Deadline of the agreement on a refused command line. The command ends in any case, so this is
/// far below the default.
pub(super) const REFUSAL_DEADLINE: Duration = Duration::from_secs(10);
/// Deadline of the agreement after a fatal error, in which a lost rank does not answer. The live
/// ranks have failed at nearly the same time, so they answer sooner than this.
const AFTER_FATAL_DEADLINE: Duration = Duration::from_secs(2);
/// The longest time that MPI may take to finalise a job that has failed.
const FINALIZE_DEADLINE: Duration = Duration::from_secs(5);
/// Interval of heartbeats during local work: short beside the least deadline of 1 s.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(2);

/// All processes of the job.
pub(crate) struct World {
    endpoint: Deadline<Mpi, Host>,
    /// Node, host and cores of every process.
    pub(crate) nodes: NodeMap,
    /// The highest tag of a message.
    pub(crate) last_tag: u64,
    /// Settings of this job's endpoints.
    pub(crate) settings: Settings,
    /// Number of the last collective on `endpoint`.
    round: u64,
    // dropped last: MPI must outlive the endpoint
    pub(crate) launch: Launch,
}

impl World {
    /// Initialises MPI and creates an endpoint over all processes.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// Errors of MPI; [`Error::InvalidArgument`] if MPI's world has another number of processes
    /// than the launcher started.
    pub(super) fn init(deadline: Duration) -> Result<Self> {
        let launch = Launch::begin()?;
        let variable = Runtime::deadline_variable()?;
        let timeout = match variable {
            Some(Duration::ZERO) => Timeout::unlimited(),
            variable => Timeout::at_most(variable.unwrap_or(deadline)),
        };
        let settings = Settings { timeout, ..Settings::default() };
        let endpoint = Mpi::world(settings.clone())?;
        let nodes = endpoint.nodes().clone();
        let last_tag = endpoint.last_tag();
        let rank = endpoint.rank();
        let ranks = endpoint.ranks();
        let endpoint = match variable {
            Some(Duration::ZERO) => Deadline::new(endpoint, deadline)?.endless(),
            variable => Deadline::new(endpoint, variable.unwrap_or(deadline))?,
        };
        let endpoint = endpoint.with_warning(warn_of_silence(rank, ranks));
        let launched = launcher::launched_rank();
        let other = launched.filter(|launched| launched.ranks.is_some_and(|count| count != ranks));
        if let Some(LaunchedRank { launcher, ranks: Some(count), .. }) = other {
            let library = launch.library()?;
            let library = library.lines().next().unwrap_or_default().trim();
            let got = format!("{ranks} in MPI's world, {count} started by a launcher ({launcher})");
            return Err(Error::invalid(
                "processes",
                got,
                format!("the launcher of the MPI that this command was built with: {library}"),
            ));
        }
        Ok(Self { endpoint, nodes, last_tag, settings, round: 0, launch })
    }

    /// Rank of this process.
    pub(crate) fn rank(&self) -> usize {
        self.endpoint.rank()
    }

    /// Number of processes.
    pub(crate) fn ranks(&self) -> usize {
        self.endpoint.ranks()
    }

    /// Number of ranks of this node that may run on a core of this rank, itself included. Ranks
    /// whose cores are unknown count as sharing.
    pub(super) fn ranks_sharing_cores(&self) -> usize {
        let locations = self.nodes.locations();
        let Some(mine) = locations.get(self.rank()) else { return 1 };
        let overlaps = |other: &RankLocation| {
            let unknown = mine.cores.is_empty() || other.cores.is_empty();
            let common = |run: &RangeInclusive<usize>| {
                mine.cores.iter().any(|own| own.start() <= run.end() && run.start() <= own.end())
            };
            other.node == mine.node && (unknown || other.cores.iter().any(common))
        };
        locations.iter().filter(|other| overlaps(other)).count()
    }

    /// Creates a ring of all processes and returns the endpoint of this one.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(super) fn endpoint(&self) -> Result<RankEndpoint> {
        Ok(RankEndpoint::Process(Box::new(Mpi::world(self.settings.clone())?)))
    }

    /// Returns the group of the first `count` processes, or `None` if this one is not in it.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn first_ranks(&self, count: usize) -> Result<Option<FirstRanks>> {
        FirstRanks::of_world(count, self.settings.timeout.clone())
    }

    pub(super) fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.round += 1;
        agreement::all_gather(&mut self.endpoint, self.round, bytes)
    }

    /// As [`World::all_gather`]; returns [`Error::PeerLost`] after `deadline`.
    fn all_gather_within(&mut self, bytes: &[u8], deadline: Duration) -> Result<Vec<Vec<u8>>> {
        self.round += 1;
        let round = self.round;
        let started = Instant::now();
        self.endpoint.start_all_gather(round, bytes)?;
        loop {
            if let Some(parts) = self.endpoint.try_all_gather(round)? {
                return Ok(parts);
            }
            if started.elapsed() >= deadline {
                let peer = self.endpoint.stragglers(round).first().copied().unwrap_or_default();
                return Err(Error::PeerLost { peer, step: 0 });
            }
            self.endpoint.progress(Duration::from_millis(5))?;
        }
    }

    pub(super) fn require_same(&mut self, descriptor: Descriptor) -> Outcome {
        self.round += 1;
        agreement::agree(&mut self.endpoint, self.round, Ok(descriptor))?;
        Ok(())
    }

    pub(super) fn agree<T>(&mut self, mine: Outcome<T>) -> Outcome<T> {
        let status = mine.as_ref().err().map(RankStatus::of);
        let bytes = RankStatus::encode(status.as_ref());
        // a fatal error may come from a rank that was lost and does not answer
        let gathered = if status.is_some_and(|status| status.fatal) {
            self.all_gather_within(&bytes, AFTER_FATAL_DEADLINE)
        } else {
            self.all_gather(&bytes)
        };
        match (gathered, mine) {
            (Ok(all), mine) => common_failure(&all).map_or(mine, Err),
            (Err(_), Err(own)) => Err(own),
            (Err(lost), Ok(_)) => Err(lost.into()),
        }
    }

    /// Runs `work`, which does not call MPI, on a thread of its own, and sends heartbeats
    /// meanwhile.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Device`] if the thread does not start, or panics.
    pub(super) fn with_heartbeat<T: Send>(
        &mut self,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        thread::scope(|scope| {
            let worker = thread::Builder::new().name("files".into()).spawn_scoped(scope, work);
            let worker = worker.map_err(|error| Error::Device {
                what: format!("a thread did not start: {error}"),
            })?;
            let mut beating = Ok(());
            while !worker.is_finished() {
                match beating {
                    Ok(()) => beating = self.heartbeat(HEARTBEAT_INTERVAL),
                    // the next collective returns the error again
                    Err(_) => thread::sleep(HEARTBEAT_INTERVAL),
                }
            }
            worker.join().unwrap_or_else(|_| {
                Err(Error::Device { what: "the thread of a rank panicked".into() })
            })
        })
    }

    /// Sends a heartbeat, then receives messages for at most `wait`.
    pub(crate) fn heartbeat(&mut self, wait: Duration) -> Result<()> {
        self.endpoint.heartbeat(true);
        self.endpoint.progress(wait)
    }

    /// Finalises MPI. After a failure, which is a `code` other than 0, the process exits with
    /// `code` if finalising takes longer than [`FINALIZE_DEADLINE`].
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(super) fn finalize(self, code: u8) {
        let Self { endpoint, launch, .. } = self;
        if code != 0 {
            // detached: the thread ends with the process
            drop(thread::Builder::new().name("finalize".into()).spawn(move || {
                thread::sleep(FINALIZE_DEADLINE);
                std::process::exit(i32::from(code));
            }));
        }
        drop(endpoint);
        drop(launch);
    }

    /// Prints the failure if this process is the one to print it, and ends MPI.
    pub(super) fn fail(mut self, failure: Failure) -> Failure {
        let rank = self.rank();
        if let Failure::Agreed { rank: failed, what, code } = &failure {
            let code = *code;
            interrupt::report(code, || match failed {
                _ if rank != 0 || what.is_empty() => {}
                Some(failed) => {
                    complain!("rank {failed}: {what}");
                }
                None => {
                    complain!("{what}");
                }
            });
            self.finalize(code);
            return Failure::Printed(code);
        }
        if let Failure::Library(error) = &failure {
            self.endpoint.abort(error);
        }
        interrupt::report(failure.code(), || match &failure {
            _ if rank != 0 && !is_loss_of_rank_0(&failure) => thread::sleep(SILENT_EXIT_DELAY),
            Failure::Library(Error::Aborted { rank, what }) => {
                complain!("rank {rank}: {what}");
            }
            failure => {
                complain!("rank {rank}: {}", failure.text());
            }
        });
        let Self { endpoint, launch, .. } = self;
        drop(endpoint);
        launch.abandon();
        Failure::Printed(failure.code())
    }
}

fn is_loss_of_rank_0(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Library(
            Error::Timeout { peer: 0, .. }
                | Error::PeerLost { peer: 0, .. }
                | Error::ArrivalTimeout { peer: 0, .. }
        )
    )
}

/// Failure of one rank as a message.
#[derive(Serialize, Deserialize)]
struct RankStatus {
    /// The exit code.
    code: u8,
    /// True if the error ended the ring, or if a rank did not come.
    fatal: bool,
    /// True if the error only repeats that of another rank.
    echo: bool,
    /// The error as text.
    what: String,
}

impl RankStatus {
    fn of(failure: &Failure) -> Self {
        let (fatal, echo) = match failure {
            Failure::Library(error) => {
                (error.is_fatal() || matches!(error, Error::ArrivalTimeout { .. }), is_echo(error))
            }
            _ => (false, false),
        };
        Self { code: failure.code(), fatal, echo, what: failure.text() }
    }

    /// Encodes the status of a rank: empty if it has not failed.
    fn encode(status: Option<&Self>) -> Vec<u8> {
        // cannot fail: all keys are strings
        status.map_or_else(Vec::new, |status| serde_json::to_vec(status).unwrap_or_default())
    }
}

/// Chooses one failure from the status of all ranks: that of the lowest rank whose error is not an
/// echo. No rank is named if all failed with the same text.
fn common_failure(all: &[Vec<u8>]) -> Option<Failure> {
    let failed: Vec<(usize, RankStatus)> = all
        .iter()
        .enumerate()
        .filter_map(|(rank, bytes)| Some((rank, serde_json::from_slice(bytes).ok()?)))
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
        RankStatus::encode(Some(&RankStatus::of(failure)))
    }

    fn judged(all: &[Vec<u8>]) -> Option<(Option<usize>, u8, String)> {
        common_failure(all).map(|failure| match failure {
            Failure::Agreed { rank, code, what } => (rank, code, what),
            other => (None, other.code(), other.text()),
        })
    }

    #[test]
    fn the_lowest_rank_without_an_echo_is_named() {
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
    fn a_failure_of_all_ranks_names_none() {
        let own = status(&Failure::Usage("--ranks: no".into()));
        assert_eq!(judged(&[own.clone(), own.clone()]), Some((None, 2, "--ranks: no".into())));
        assert_eq!(judged(&[own]), Some((None, 2, "--ranks: no".into())));
    }
}
