//! All-gathers, aborts and signs of life over small messages.

use std::time::Instant;

use annulus::{Error, Result};
use annulus_core::Control;

use super::{HostTransport, frame::Frame, pump::Label};

/// An all-gather: one part of each rank.
pub(super) struct Gather {
    parts: Vec<Option<Vec<u8>>>,
    /// Messages with this rank's part that are in flight.
    pub(super) unsent: usize,
}

impl Gather {
    fn new(ranks: usize) -> Self {
        Self { parts: vec![None; ranks], unsent: 0 }
    }

    /// Takes the part of `rank`; false if it was here.
    pub(super) fn put(&mut self, rank: usize, part: Vec<u8>) -> bool {
        let is_new = self.parts[rank].is_none();
        self.parts[rank] = Some(part);
        is_new
    }

    /// Returns true if `rank` has begun it and the part of `peer` is missing.
    pub(super) fn lacks(&self, rank: usize, peer: usize) -> bool {
        self.parts[rank].is_some() && self.parts[peer].is_none()
    }
}

impl HostTransport {
    /// The all-gather of this number.
    pub(super) fn gather(&mut self, round: u64) -> &mut Gather {
        let ranks = self.peers.len();
        self.gathers.entry(round).or_insert_with(|| Gather::new(ranks))
    }

    fn send_part(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        let part = Frame::Part { round, bytes: bytes.to_vec() };
        for peer in self.others() {
            // a rank that has left needs nothing any more
            if !self.peers[peer].has_left() {
                self.say(peer, &part, Label::Part { round })?;
                self.gather(round).unsent += 1;
            }
        }
        Ok(())
    }
}

impl Control for HostTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.peers.len()
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.alive()?;
        let rank = self.rank;
        if !self.gather(round).put(rank, bytes.to_vec()) {
            return Err(Error::invalid("round", round, "a gather that is not under way here"));
        }
        self.send_part(round, bytes).inspect_err(|error| self.fail(error))
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.pump()?;
        let rank = self.rank;
        let Some(gather) = self.gathers.get(&round).filter(|gather| gather.parts[rank].is_some())
        else {
            let want = "a gather that this rank has begun and not collected";
            return Err(Error::invalid("round", round, want));
        };
        // a rank that has collected may leave, so its own part must have left before
        if gather.unsent > 0 || gather.parts.iter().any(Option::is_none) {
            return Ok(None);
        }
        let parts = self.gathers.remove(&round).map(|gather| gather.parts).unwrap_or_default();
        Ok(Some(parts.into_iter().flatten().collect()))
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        let is_missing = |rank: &usize| {
            self.gathers.get(&round).is_none_or(|gather| gather.parts[*rank].is_none())
        };
        (0..self.peers.len()).filter(is_missing).collect()
    }

    fn abort(&mut self, error: &Error) {
        let (rank, what) = match error {
            Error::Aborted { rank, what } => (*rank as u64, what.clone()),
            error => (self.rank as u64, error.to_string()),
        };
        self.failed.get_or_insert_with(|| error.clone());
        let abort = Frame::Abort { rank, what };
        for peer in self.others() {
            if !self.peers[peer].has_left() {
                // a rank that gets no message detects the silence at its deadline
                drop(self.say(peer, &abort, Label::Said));
            }
        }
    }

    fn heartbeat(&mut self, working: bool) {
        if self.failed.is_some() {
            return;
        }
        if working {
            self.count_work();
        }
        let beat = Frame::Beat { worked: self.worked };
        for peer in self.others() {
            if self.peers[peer].beating || self.peers[peer].has_left() {
                continue;
            }
            match self.say(peer, &beat, Label::Beat { peer }) {
                Ok(()) => self.peers[peer].beating = true,
                Err(error) => return self.fail(&error),
            }
        }
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.peers.get(peer).map_or_else(Instant::now, |peer| peer.heard)
    }

    fn last_work(&self) -> Instant {
        self.last_work
    }
}
