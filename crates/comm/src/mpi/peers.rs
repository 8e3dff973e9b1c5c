//! State of every peer of an endpoint, whatever the context of its messages, and the ranks that
//! have left a plan: see "Lifetime" in the documentation of [`super`].

use std::{
    collections::{BTreeMap, HashMap},
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
}

impl Peer {
    fn new(now: Instant) -> Self {
        Self {
            last_heard: now,
            matched: 0,
            processed: 0,
            out_of_order: BTreeMap::new(),
            unanswered: 0,
        }
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
}

/// State of all ranks of a ring.
pub(super) struct Peers {
    pub(super) all: Vec<Peer>,
    /// Neighbours of this rank (`circulant.rs`), ascending.
    pub(super) neighbours: Vec<usize>,
    /// Neighbours that have not left the endpoint, ascending.
    pub(super) staying: Vec<usize>,
    /// Neighbours that have, with the times of their last frames.
    pub(super) left: BTreeMap<usize, Instant>,
    /// True if one of them left after a failure.
    pub(super) has_failed_neighbour: bool,
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
            left: BTreeMap::new(),
            has_failed_neighbour: false,
            grace: ObservedClock::new(now, GRACE / 4, GRACE),
        }
    }

    /// Returns the time at which a message last arrived from `peer`; now, if there is no such rank.
    pub(super) fn last_heard(&self, peer: usize) -> Instant {
        self.all.get(peer).map_or_else(Instant::now, |peer| peer.last_heard)
    }

    /// Records that `peer` has left the endpoint.
    pub(super) fn leave(&mut self, peer: usize, at: Instant, has_failed: bool) {
        if let Ok(index) = self.staying.binary_search(&peer) {
            self.staying.remove(index);
            self.left.insert(peer, at);
            self.has_failed_neighbour |= has_failed;
        }
    }

    /// Polls the clock of [`GRACE`].
    pub(super) fn poll_grace(&mut self, now: Instant) {
        self.grace.poll(now);
    }

    /// Returns true if messages in flight have had [`GRACE`] to complete since `at`.
    pub(super) fn is_overdue(&self, at: Instant, now: Instant) -> bool {
        self.grace.elapsed(at, now) >= GRACE
    }
}

/// Last frame of a rank in a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Departure {
    pub(super) at: Instant,
    /// True if another rank forwarded the frame: other frames of the rank that has left may arrive
    /// after it.
    pub(super) is_forwarded: bool,
    /// Number of all-gathers that it had started.
    pub(super) started: u64,
    /// Rounds of which it had not sent all that other ranks need.
    pub(super) unfinished: Vec<u64>,
}

/// Ranks that have left a context, as far as this rank has been informed.
#[derive(Debug, Default)]
pub(super) struct Departures {
    all: BTreeMap<usize, Departure>,
    /// Those whose last frame was not forwarded, in the order in which the frames arrived.
    unforwarded: Vec<usize>,
}

impl Departures {
    /// Records that `peer` has left. Its own frame replaces a forwarded one.
    pub(super) fn add(&mut self, peer: usize, departure: Departure) {
        let known = self.all.get(&peer);
        if known.is_some_and(|known| departure.is_forwarded || !known.is_forwarded) {
            return;
        }
        if known.is_none() {
            self.unforwarded.push(peer);
        }
        self.all.insert(peer, departure);
    }

    /// Returns the last frame of a rank that has left.
    pub(super) fn get(&self, peer: usize) -> Option<&Departure> {
        self.all.get(&peer)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Iterates over the ranks that have left, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Departure)> {
        self.all.iter().map(|(&peer, departure)| (peer, departure))
    }

    /// Takes the ranks whose last frame was not forwarded and that `concerns` selects.
    pub(super) fn take_unforwarded(
        &mut self,
        mut concerns: impl FnMut(&Departure) -> bool,
    ) -> Vec<usize> {
        let all = &self.all;
        self.unforwarded.extract_if(.., |peer| all.get(peer).is_some_and(&mut concerns)).collect()
    }
}

/// Work of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankWork {
    pub(super) rank: usize,
    /// Number of times that the rank had worked by then, 0 for never.
    pub(super) count: u64,
    pub(super) at: Instant,
}

/// The latest work of any rank that `rank` knows of.
#[derive(Debug)]
pub(super) struct LatestWork {
    rank: usize,
    latest: RankWork,
    /// Highest known work count of each rank of which work is known.
    counts: HashMap<usize, u64>,
}

impl LatestWork {
    pub(super) fn new(rank: usize, now: Instant) -> Self {
        Self { rank, latest: RankWork { rank, count: 0, at: now }, counts: HashMap::new() }
    }

    /// Records that this rank works.
    pub(super) fn work(&mut self, now: Instant) {
        let count = self.counts.entry(self.rank).or_default();
        *count += 1;
        self.latest = RankWork { rank: self.rank, count: *count, at: now };
    }

    /// Records work that a heartbeat reports as `age` old.
    pub(super) fn learn(&mut self, rank: usize, count: u64, age: Duration, now: Instant) {
        let known = self.counts.entry(rank).or_default();
        if rank == self.rank || count <= *known {
            return;
        }
        *known = count;
        let at = now.checked_sub(age).unwrap_or(self.latest.at);
        if at > self.latest.at {
            self.latest = RankWork { rank, count, at };
        }
    }

    pub(super) const fn latest(&self) -> RankWork {
        self.latest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_that_leaves_does_so_once() {
        let now = Instant::now();
        let mut peers = Peers::new(0, 9, now);
        assert_eq!(peers.staying, [1, 2, 4, 5, 7, 8]);
        // no neighbour
        peers.leave(3, now, true);
        peers.leave(4, now, false);
        assert!(!peers.has_failed_neighbour);
        peers.leave(1, now, true);
        peers.leave(4, now + GRACE, true);
        assert!(peers.has_failed_neighbour);
        assert_eq!(peers.staying, [2, 5, 7, 8]);
        assert_eq!(peers.left, BTreeMap::from([(1, now), (4, now)]));
        assert_eq!(peers.neighbours, [1, 2, 4, 5, 7, 8]);
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

    #[test]
    fn a_last_frame_is_taken_once_and_a_forwarded_one_is_replaced() {
        let departure = || Departure {
            at: Instant::now(),
            is_forwarded: false,
            started: 3,
            unfinished: vec![1],
        };
        let mut departures = Departures::default();
        departures.add(3, Departure { is_forwarded: true, ..departure() });
        departures.add(1, departure());
        let is_forwarded = |departures: &Departures| departures.get(3).unwrap().is_forwarded;
        assert!(is_forwarded(&departures));
        departures.add(3, departure());
        departures.add(3, Departure { is_forwarded: true, ..departure() });
        assert!(!is_forwarded(&departures));
        // in the order in which they left
        assert_eq!(departures.take_unforwarded(|departure| departure.started > 3), [0; 0]);
        assert_eq!(departures.take_unforwarded(|_| true), [3, 1]);
        assert_eq!(departures.take_unforwarded(|_| true), [0; 0]);
        let left: Vec<usize> = departures.iter().map(|(peer, _)| peer).collect();
        assert_eq!(left, [1, 3]);
    }

    #[test]
    fn work_that_comes_back_is_not_new() {
        let start = Instant::now();
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        let age = |work: RankWork, now: Instant| now - work.at;
        let mut ranks = [LatestWork::new(0, start), LatestWork::new(1, start)];
        ranks[0].work(after(5));
        let worked = ranks[0].latest();
        assert_eq!(worked, RankWork { rank: 0, count: 1, at: after(5) });
        // both pass it on every 10 ms; each message takes 3 ms
        for round in 1..100 {
            for sender in 0..2 {
                let sent = after(10 * round + 5 * sender as u64);
                let work = ranks[sender].latest();
                ranks[1 - sender].learn(
                    work.rank,
                    work.count,
                    age(work, sent),
                    sent + Duration::from_millis(3),
                );
            }
        }
        assert_eq!(ranks[0].latest(), worked);
        assert_eq!(ranks[1].latest(), RankWork { at: after(8), ..worked });
        // new work of the same rank is
        ranks[0].work(after(2000));
        ranks[1].learn(0, 2, Duration::ZERO, after(2003));
        assert_eq!(ranks[1].latest(), RankWork { rank: 0, count: 2, at: after(2003) });
        // and older work of another one is not the latest
        ranks[1].learn(2, 9, Duration::from_secs(1), after(2010));
        assert_eq!(ranks[1].latest().rank, 0);
    }
}
