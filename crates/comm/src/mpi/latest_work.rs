//! The latest work of any rank, as far as this rank has been informed.
//!
//! A heartbeat contains the latest work that its sender knows of: the rank that did it, that
//! rank's work count, and the age, because clocks of different nodes do not agree. Its receiver
//! passes it on in its own heartbeats. The count tells new work from work that comes back by
//! another path: without it, two idle ranks would pass the same work to each other, younger each
//! time by the latency of a message, and a deadlock would never be found.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

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
