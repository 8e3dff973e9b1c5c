//! State of every peer, with counters, so that a poll does not sweep over all ranks.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::{Index, IndexMut},
    time::{Duration, Instant},
};

use annulus_core::HostBuffer;

use crate::observed::ObservedClock;

/// Time in which messages from or to a rank that has left must complete. Its own sends started
/// before its last frame, so this only covers the time by which frames overtake blocks.
const GRACE: Duration = Duration::from_millis(250);

/// State of one rank.
pub(super) struct Peer {
    /// Time at which a block or a frame last arrived from it.
    pub(super) last_heard: Instant,
    /// Work count of its last heartbeat.
    pub(super) work_count: u64,
    /// Frames from it that MPI has matched.
    pub(super) matched: u64,
    /// Frames from it that were processed.
    pub(super) processed: u64,
    /// Frames that completed before an earlier, longer one, by number.
    pub(super) out_of_order: BTreeMap<u64, HostBuffer>,
    /// True while a heartbeat to it is in flight.
    pub(super) heartbeat_in_flight: bool,
    /// Steps of the sends to it that are in flight.
    sends: VecDeque<usize>,
    departure: Option<Departure>,
}

/// Last frame of a rank that has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Departure {
    pub(super) at: Instant,
    /// Number of all-gathers that it had started.
    pub(super) started: u64,
    /// Rounds of which it had not sent all that other ranks need.
    pub(super) unfinished: Vec<u64>,
}

impl Peer {
    fn new(now: Instant) -> Self {
        Self {
            last_heard: now,
            work_count: 0,
            matched: 0,
            processed: 0,
            out_of_order: BTreeMap::new(),
            heartbeat_in_flight: false,
            sends: VecDeque::new(),
            departure: None,
        }
    }

    /// Returns the last frame of a rank that has left.
    pub(super) const fn departure(&self) -> Option<&Departure> {
        self.departure.as_ref()
    }

    /// Returns the step of the oldest send to it that is in flight.
    pub(super) fn oldest_send(&self) -> Option<usize> {
        self.sends.front().copied()
    }
}

/// State of all ranks of a ring.
pub(super) struct Peers {
    all: Vec<Peer>,
    /// Ranks that have left.
    left: BTreeSet<usize>,
    /// Number of sends in flight, to any rank.
    unsent: usize,
    /// Clock of [`GRACE`]; it runs once a rank has left.
    grace: ObservedClock,
}

impl Peers {
    pub(super) fn new(ranks: usize, now: Instant) -> Self {
        let all = (0..ranks).map(|_| Peer::new(now)).collect();
        let grace = ObservedClock::new(now, GRACE / 4, GRACE);
        Self { all, left: BTreeSet::new(), unsent: 0, grace }
    }

    /// Returns the time at which a message last arrived from `peer`; now, if there is no such rank.
    pub(super) fn last_heard(&self, peer: usize) -> Instant {
        self.all.get(peer).map_or_else(Instant::now, |peer| peer.last_heard)
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

    /// Records that `peer` has left.
    pub(super) fn leave(&mut self, peer: usize, departure: Departure) {
        self.all[peer].departure = Some(departure);
        self.left.insert(peer);
    }

    pub(super) fn has_left(&self, peer: usize) -> bool {
        self.all[peer].departure.is_some()
    }

    /// Returns the ranks that have left, ascending, and polls the clock of [`GRACE`].
    pub(super) fn poll_left(&mut self) -> Vec<usize> {
        if !self.left.is_empty() {
            self.grace.poll(Instant::now());
        }
        self.left.iter().copied().collect()
    }

    /// Returns true if messages in flight from or to this rank have had [`GRACE`] to complete.
    pub(super) fn is_overdue(&self, departure: &Departure) -> bool {
        self.grace.elapsed(departure.at, Instant::now()) >= GRACE
    }

    /// Returns all ranks but `rank` that have not left, ascending.
    pub(super) fn staying(&self, rank: usize) -> Vec<usize> {
        (0..self.all.len()).filter(|&peer| peer != rank && !self.has_left(peer)).collect()
    }

    /// Returns true if all ranks but `rank` have left.
    pub(super) fn all_have_left(&self, rank: usize) -> bool {
        self.left.iter().filter(|&&peer| peer != rank).count() + 1 >= self.all.len()
    }

    /// Returns true if the counters equal the results of sweeps over all ranks.
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

    fn departure() -> Departure {
        Departure { at: Instant::now(), started: 3, unfinished: vec![1] }
    }

    proptest! {
        #[test]
        fn counters_equal_the_results_of_sweeps_over_all_ranks(
            ranks in 1usize..20,
            events in prop::collection::vec(
                (0u8..5, any::<prop::sample::Index>(), 0usize..4),
                0..200,
            ),
        ) {
            let mut peers = Peers::new(ranks, Instant::now());
            for (event, peer, step) in events {
                let peer = peer.index(ranks);
                match event {
                    0 | 1 => peers.begin_send(peer, step),
                    // some of these sends were never started
                    2 | 3 => peers.end_send(peer, step),
                    _ => peers.leave(peer, departure()),
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
