//! State of every peer, with counters, so that a poll does not sweep over all ranks.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::{Index, IndexMut},
    time::{Duration, Instant},
};

use annulus_core::HostBuffer;

use super::circulant;
use crate::observed::ObservedClock;

/// Time in which messages from or to a rank that has left must complete. Its own sends started
/// before its last frame, so this only covers the time by which frames overtake blocks.
const GRACE: Duration = Duration::from_millis(250);

/// Most heartbeats to a rank from which nothing has arrived since the first of them. A short
/// message is complete for its sender before it is received, so a rank that does not poll (it is
/// stopped, or the host computes between two calls) would otherwise collect heartbeats without a
/// limit. A rank that polls answers within one heartbeat interval, in which it is sent three.
const MOST_UNANSWERED: u32 = 8;

/// State of one rank.
pub(super) struct Peer {
    /// Time at which a block or a frame last arrived from it.
    pub(super) last_heard: Instant,
    /// Frames from it that MPI has matched.
    pub(super) matched: u64,
    /// Frames from it that were processed.
    pub(super) processed: u64,
    /// Frames that completed before an earlier, longer one, by number.
    pub(super) out_of_order: BTreeMap<u64, HostBuffer>,
    /// Heartbeats sent to it since something last arrived from it.
    unanswered: u32,
    /// Steps of the sends to it that are in flight.
    sends: VecDeque<usize>,
    departure: Option<Departure>,
}

/// Last frame of a rank that has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Departure {
    pub(super) at: Instant,
    /// True if another rank forwarded the frame: other frames of the rank that has left may arrive
    /// after it.
    pub(super) is_forwarded: bool,
    /// True if the rank does not take part in the barrier that frees the communicators.
    pub(super) has_failed: bool,
    /// Number of all-gathers that it had started.
    pub(super) started: u64,
    /// Rounds of which it had not sent all that other ranks need.
    pub(super) unfinished: Vec<u64>,
}

impl Peer {
    fn new(now: Instant) -> Self {
        Self {
            last_heard: now,
            matched: 0,
            processed: 0,
            out_of_order: BTreeMap::new(),
            unanswered: 0,
            sends: VecDeque::new(),
            departure: None,
        }
    }

    /// Returns the last frame of a rank that has left.
    pub(super) const fn departure(&self) -> Option<&Departure> {
        self.departure.as_ref()
    }

    /// Records that a block or a frame of it has arrived.
    pub(super) fn hear(&mut self) {
        self.last_heard = Instant::now();
        self.unanswered = 0;
    }

    /// Counts a heartbeat to it. Returns false if it has left too many unanswered.
    pub(super) fn count_heartbeat(&mut self) -> bool {
        let allowed = self.unanswered < MOST_UNANSWERED;
        self.unanswered += u32::from(allowed);
        allowed
    }

    /// Returns the step of the oldest send to it that is in flight.
    pub(super) fn oldest_send(&self) -> Option<usize> {
        self.sends.front().copied()
    }
}

/// State of all ranks of a ring.
pub(super) struct Peers {
    all: Vec<Peer>,
    /// Neighbours of this rank (`circulant.rs`), ascending.
    neighbours: Vec<usize>,
    /// Neighbours that have not left, ascending.
    staying: Vec<usize>,
    /// Ranks of which this rank knows that they have left.
    left: BTreeSet<usize>,
    /// Those whose last frame was not forwarded, in the order in which the frames arrived.
    unforwarded: Vec<usize>,
    /// Number of neighbours that left after a failure.
    failed: usize,
    /// Number of sends in flight, to any rank.
    unsent: usize,
    /// Clock of [`GRACE`]; it runs once a rank has left.
    grace: ObservedClock,
}

impl Peers {
    pub(super) fn new(rank: usize, ranks: usize, now: Instant) -> Self {
        let neighbours = circulant::neighbours(rank, ranks);
        Self {
            all: (0..ranks).map(|_| Peer::new(now)).collect(),
            staying: neighbours.clone(),
            neighbours,
            left: BTreeSet::new(),
            unforwarded: Vec::new(),
            failed: 0,
            unsent: 0,
            grace: ObservedClock::new(now, GRACE / 4, GRACE),
        }
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

    /// Returns the ranks to which a send is in flight, ascending.
    pub(super) fn receivers(&self) -> impl Iterator<Item = usize> {
        (0..self.all.len()).filter(|&peer| !self.all[peer].sends.is_empty())
    }

    /// Records that `peer` has left. Its own frame replaces a forwarded one.
    pub(super) fn leave(&mut self, peer: usize, departure: Departure) {
        let known = self.all[peer].departure.as_ref();
        if known.is_some_and(|known| departure.is_forwarded || !known.is_forwarded) {
            return;
        }
        if known.is_none() {
            self.unforwarded.push(peer);
            self.left.insert(peer);
            if let Ok(index) = self.staying.binary_search(&peer) {
                self.staying.remove(index);
                self.failed += usize::from(departure.has_failed);
            }
        }
        self.all[peer].departure = Some(departure);
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

    /// Returns the neighbours of this rank, ascending.
    pub(super) fn neighbours(&self) -> &[usize] {
        &self.neighbours
    }

    /// Returns the neighbours that have not left, ascending.
    pub(super) fn staying(&self) -> &[usize] {
        &self.staying
    }

    /// Returns true if a neighbour left after a failure.
    pub(super) const fn has_failed_neighbour(&self) -> bool {
        self.failed > 0
    }

    /// Returns true if the last frame of any rank was not forwarded.
    pub(super) const fn has_unforwarded(&self) -> bool {
        !self.unforwarded.is_empty()
    }

    /// Takes the ranks that have left, whose last frame was not forwarded, and that `concerns`
    /// selects.
    pub(super) fn take_unforwarded(
        &mut self,
        mut concerns: impl FnMut(&Departure) -> bool,
    ) -> Vec<usize> {
        let all = &self.all;
        let departure = |peer: usize| all[peer].departure.as_ref();
        self.unforwarded
            .extract_if(.., |peer| departure(*peer).is_some_and(&mut concerns))
            .collect()
    }

    /// Returns true if the counters equal the results of sweeps over all ranks.
    #[cfg(test)]
    fn agrees_with_a_sweep(&self) -> bool {
        let ranks = 0..self.all.len();
        let left: BTreeSet<usize> = ranks.filter(|&peer| self.has_left(peer)).collect();
        let unsent: usize = self.all.iter().map(|peer| peer.sends.len()).sum();
        let neighbours = self.neighbours.iter().copied();
        let staying: Vec<usize> = neighbours.filter(|&peer| !self.has_left(peer)).collect();
        left == self.left && unsent == self.unsent && staying == self.staying
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
        Departure {
            at: Instant::now(),
            is_forwarded: false,
            has_failed: false,
            started: 3,
            unfinished: vec![1],
        }
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
            let mut peers = Peers::new(0, ranks, Instant::now());
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
                let has_send = |peer: &usize| peers[*peer].oldest_send().is_some();
                prop_assert!(peers.receivers().eq((0..ranks).filter(has_send)));
                let gone: Vec<usize> = (0..ranks).filter(|&peer| peers.has_left(peer)).collect();
                prop_assert_eq!(peers.poll_left(), gone);
            }
        }
    }

    #[test]
    fn a_last_frame_is_taken_once_and_a_forwarded_one_is_replaced() {
        let mut peers = Peers::new(0, 9, Instant::now());
        assert_eq!(peers.staying(), [1, 2, 4, 5, 7, 8]);
        peers.leave(3, Departure { is_forwarded: true, ..departure() });
        peers.leave(1, Departure { has_failed: true, ..departure() });
        assert!(peers.has_failed_neighbour());
        assert_eq!(peers.staying(), [2, 4, 5, 7, 8]);
        let is_forwarded = |peers: &Peers| peers[3].departure().unwrap().is_forwarded;
        assert!(is_forwarded(&peers));
        peers.leave(3, departure());
        peers.leave(3, Departure { is_forwarded: true, ..departure() });
        assert!(!is_forwarded(&peers));
        // in the order in which they left
        assert_eq!(peers.take_unforwarded(|departure| departure.started > 3), [0; 0]);
        assert_eq!(peers.take_unforwarded(|_| true), [3, 1]);
        assert_eq!(peers.take_unforwarded(|_| true), [0; 0]);
    }

    #[test]
    fn heartbeats_to_a_rank_that_does_not_answer_are_bounded() {
        let mut peer = Peer::new(Instant::now());
        let sent = |peer: &mut Peer| (0..100).filter(|_| peer.count_heartbeat()).count();
        assert_eq!(sent(&mut peer), MOST_UNANSWERED as usize);
        assert_eq!(sent(&mut peer), 0);
        peer.hear();
        assert_eq!(sent(&mut peer), MOST_UNANSWERED as usize);
    }
}
