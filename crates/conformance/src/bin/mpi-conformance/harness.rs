//! What the ranks of a test tell each other about it, over an endpoint of its own.

use std::time::Duration;

use annulus_comm::{
    Deadline, all_gather,
    mpi::{Mpi, Settings},
};
use annulus_core::{Control, Host, Result};

/// Nothing, or what is wrong.
pub(crate) type Verdict = std::result::Result<(), String>;

/// No rank of a test waits longer than this for the others.
const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) struct Harness {
    endpoint: Deadline<Mpi, Host>,
    round: u64,
}

impl Harness {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { endpoint: Deadline::new(Mpi::world(Settings::default())?, DEADLINE)?, round: 0 })
    }

    pub(crate) fn rank(&self) -> usize {
        self.endpoint.rank()
    }

    pub(crate) fn ranks(&self) -> usize {
        self.endpoint.ranks()
    }

    /// Every rank's bytes.
    pub(crate) fn gather(&mut self, bytes: &[u8]) -> std::result::Result<Vec<Vec<u8>>, String> {
        self.round += 1;
        all_gather::<Host>(&mut self.endpoint, self.round, bytes)
            .map_err(|error| format!("the harness: {error}"))
    }

    /// The first verdict that is not good, on every rank.
    pub(crate) fn share(&mut self, verdict: Verdict) -> Verdict {
        let text = verdict.err().unwrap_or_default();
        let all = self.gather(text.as_bytes())?;
        match all.iter().enumerate().find(|(_, text)| !text.is_empty()) {
            None => Ok(()),
            Some((rank, text)) => Err(format!("rank {rank}: {}", String::from_utf8_lossy(text))),
        }
    }
}

/// An error unless `holds`.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}
