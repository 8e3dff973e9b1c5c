//! The state of every peer, with counters, so that a poll does not sweep over all ranks.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::{Index, IndexMut},
    time::{Duration, Instant},
};

use annulus_core::HostBuffer;

use crate::observed::ObservedClock;

/// Time in which messages from or to a rank that has said goodbye must complete.
const GRACE: Duration = Duration::from_millis(250);

/// The state of one rank.
pub(super) struct Peer {
    pub(super) heard: Instant,
    /// Number of its reports of work.
    pub(super) worked: u64,
    /// Frames from it that MPI has matched, and those that were obeyed.
    pub(super) matched: u64,
    pub(super) obeyed: u64,
    /// Frames that overtook a longer one before them.
    pub(super) ahead: BTreeMap<u64, HostBuffer>,
    /// True while a heartbeat to it is in flight.
    pub(super) beating: bool,
    /// The steps of sends to it that are in flight.
    sends: VecDeque<usize>,
    goodbye: Option<Goodbye>,
}

/// The last message of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Goodbye {
    pub(super) at: Instant,
    /// Gathers that it had begun by then.
    pub(super) begun: u64,
    /// Those of which it had not done its part.
    pub(super) owed: Vec<u64>,
}

impl Peer {
    fn new(now: Instant) -> Self {
        Self {
            heard: now,
            worked: 0,
            matched: 0,
            obeyed: 0,
            ahead: BTreeMap::new(),
            beating: false,
            sends: VecDeque::new(),
            goodbye: None,
        }
    }

    /// The goodbye of a rank that has left.
    pub(super) const fn goodbye(&self) -> Option<&Goodbye> {
        self.goodbye.as_ref()
    }

    /// The step of the oldest send to it that is in flight.
    pub(super) fn oldest_send(&self) -> Option<usize> {
        self.sends.front().copied()
    }
}

/// All ranks of a ring.
pub(super) struct Peers {
    all: Vec<Peer>,
    /// Ranks that have said goodbye.
    left: BTreeSet<usize>,
    /// Sends to any rank that are in flight.
    unsent: usize,
    /// Runs once a rank has left.
    grace: ObservedClock,
}

impl Peers {
    pub(super) fn new(ranks: usize, now: Instant) -> Self {
        let all = (0..ranks).map(|_| Peer::new(now)).collect();
        let grace = ObservedClock::new(now, GRACE / 4, GRACE);
        Self { all, left: BTreeSet::new(), unsent: 0, grace }
    }

    /// The time of the last word of `peer`; now, if there is no such rank.
    pub(super) fn heard(&self, peer: usize) -> Instant {
        self.all.get(peer).map_or_else(Instant::now, |peer| peer.heard)
    }

    /// Counts a send as in flight.
    pub(super) fn begin_send(&mut self, peer: usize, step: usize) {
        self.all[peer].sends.push_back(step);
        self.unsent += 1;
    }

    /// Counts a send as done.
    pub(super) fn end_send(&mut self, peer: usize, step: usize) {
        let sends = &mut self.all[peer].sends;
        if let Some(index) = sends.iter().position(|&of| of == step) {
            sends.remove(index);
            self.unsent -= 1;
        }
    }

    /// Returns true while any send is in flight.
    pub(super) const fn has_unsent(&self) -> bool {
        self.unsent > 0
    }

    /// Records a goodbye.
    pub(super) fn leave(&mut self, peer: usize, goodbye: Goodbye) {
        self.all[peer].goodbye = Some(goodbye);
        self.left.insert(peer);
    }

    pub(super) fn has_left(&self, peer: usize) -> bool {
        self.all[peer].goodbye.is_some()
    }

    /// Ranks that have said goodbye, ascending; polls the clock of their grace.
    pub(super) fn poll_left(&mut self) -> Vec<usize> {
        if !self.left.is_empty() {
            self.grace.poll(Instant::now());
        }
        self.left.iter().copied().collect()
    }

    /// Returns true if nothing that is in flight from or to this rank can still be expected.
    pub(super) fn is_overdue(&self, goodbye: &Goodbye) -> bool {
        self.grace.elapsed(goodbye.at, Instant::now()) >= GRACE
    }

    /// All ranks but `rank` that have not said goodbye, ascending.
    pub(super) fn staying(&self, rank: usize) -> Vec<usize> {
        (0..self.all.len()).filter(|&peer| peer != rank && !self.has_left(peer)).collect()
    }

    /// Returns true if no rank but `rank` stays.
    pub(super) fn all_have_left(&self, rank: usize) -> bool {
        self.left.iter().filter(|&&peer| peer != rank).count() + 1 >= self.all.len()
    }

    /// Returns true if the counters are what sweeps over all ranks find.
    #[cfg(test)]
    fn agrees_with_a_sweep(&self) -> bool {
        let ranks = 0..self.all.len();
        let left: BTreeSet<usize> = ranks.filter(|&peer| self.has_left(peer)).collect();
        let unsent: usize = self.all.iter().map(|peer| peer.sends.len()).sum();
        left == self.left && unsent == self.unsent
    }
}

impl Index<usize> for Peers {
    type Output = Peer;

    fn index(&self, peer: usize) -> &Peer {
        &self.all[peer]
    }
}

impl IndexMut<usize> for Peers {
    fn index_mut(&mut self, peer: usize) -> &mut Peer {
        &mut self.all[peer]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn goodbye() -> Goodbye {
        Goodbye { at: Instant::now(), begun: 3, owed: vec![1] }
    }

    proptest! {
        #[test]
        fn counters_are_what_a_sweep_over_all_ranks_finds(
            ranks in 1usize..20,
            events in prop::collection::vec((0u8..5, any::<prop::sample::Index>(), 0usize..4), 0..200),
        ) {
            let mut peers = Peers::new(ranks, Instant::now());
            for (event, peer, step) in events {
                let peer = peer.index(ranks);
                match event {
                    0 | 1 => peers.begin_send(peer, step),
                    // some of them were never begun
                    2 | 3 => peers.end_send(peer, step),
                    _ => peers.leave(peer, goodbye()),
                }
                prop_assert!(peers.agrees_with_a_sweep());
                let sending = (0..ranks).any(|peer| peers[peer].oldest_send().is_some());
                prop_assert_eq!(peers.has_unsent(), sending);
                prop_assert_eq!(peers.all_have_left(0), peers.staying(0).is_empty());
                let gone: Vec<usize> = (0..ranks).filter(|&peer| peers.has_left(peer)).collect();
                prop_assert_eq!(peers.poll_left(), gone);
            }
        }
    }
}
