//! Exchange of verdicts between the ranks of a test, over an endpoint of its own.

use std::time::Duration;

use annulus_comm::{
    Deadline, all_gather,
    mpi::{Mpi, Settings},
};
use annulus_core::{Control, Host, Result};

/// `Ok`, or the failure as text.
pub(crate) type Verdict = std::result::Result<(), String>;

/// Longest wait of a rank for the others, which may compute a slow case meanwhile.
const DEADLINE: Duration = Duration::from_secs(120);

/// One rank of a test.
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

    /// Returns every rank's bytes. Collective.
    pub(crate) fn gather(&mut self, bytes: &[u8]) -> std::result::Result<Vec<Vec<u8>>, String> {
        self.round += 1;
        all_gather::<Host>(&mut self.endpoint, self.round, bytes)
            .map_err(|error| format!("the harness: {error}"))
    }

    /// Returns the first failure of any rank, the same on every rank. Collective.
    pub(crate) fn share(&mut self, verdict: Verdict) -> Verdict {
        let text = verdict.err().unwrap_or_default();
        let all = self.gather(text.as_bytes())?;
        match all.iter().enumerate().find(|(_, text)| !text.is_empty()) {
            None => Ok(()),
            Some((rank, text)) => Err(format!("rank {rank}: {}", String::from_utf8_lossy(text))),
        }
    }
}

/// Returns an error unless `holds`.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}
