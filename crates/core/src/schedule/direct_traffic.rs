//! Rows that every rank sends on the direct route.
//!
//! A user needs intervals of positions. Where the runs of the owners do not overlap, an interval
//! consists of whole runs, but for the runs at its ends. Whole runs are added to all of their
//! owners with difference arrays, so the time does not grow with users × owners.

use std::ops::Range;

use super::{RingTraffic, Traffic, owner_runs::OwnerRuns};
use crate::needs::BatchNeeds;

/// Traffic of the users that were added so far.
struct DirectTraffic<'a> {
    owners: &'a OwnerRuns,
    /// Rows of the runs before each one, and of all.
    rows_before: Vec<u64>,
    /// End of the runs from each one on whose owners ascend, or descend, by one.
    stretch_ends: Vec<usize>,
    /// Runs of each owner.
    runs_of: Vec<Vec<usize>>,
    /// Users of each whole run, as differences from the run before.
    whole_users: Vec<i64>,
    /// 1 for each whole run that its owner uses itself.
    own_uses: Vec<i64>,
    /// Pairs of user and owner by (user − owner) mod ranks, as differences.
    distances: Vec<i64>,
    of_rank: Vec<Traffic>,
}

/// Computes the traffic of the direct route. Calls `tick` after each user.
pub(super) fn direct_traffic(part: &BatchNeeds, tick: &mut dyn FnMut()) -> RingTraffic {
    let owners = OwnerRuns::new(part);
    let mut traffic = DirectTraffic::new(&owners, part.users.len());
    for (user, intervals) in part.users.iter().enumerate() {
        for interval in intervals {
            traffic.add_interval(user, interval);
        }
        tick();
    }
    traffic.finish()
}

impl<'a> DirectTraffic<'a> {
    fn new(owners: &'a OwnerRuns, ranks: usize) -> Self {
        let runs = &owners.runs;
        let mut runs_of = vec![Vec::new(); ranks];
        for (index, run) in runs.iter().enumerate() {
            runs_of[run.owner].push(index);
        }
        Self {
            owners,
            rows_before: owners.rows_before(),
            stretch_ends: owners.stretch_ends(1),
            runs_of,
            whole_users: vec![0; runs.len() + 1],
            own_uses: vec![0; runs.len()],
            distances: vec![0; ranks + 1],
            of_rank: vec![Traffic::default(); ranks],
        }
    }

    fn add_interval(&mut self, user: usize, interval: &(usize, Range<i64>)) {
        let found = self.owners.overlapping(interval);
        if !self.owners.disjoint || found.len() <= 2 {
            found.for_each(|index| self.add_part(user, index, interval));
            return;
        }
        self.add_part(user, found.start, interval);
        self.add_whole(user, found.start + 1..found.end - 1);
        self.add_part(user, found.end - 1, interval);
    }

    /// Adds the rows of a run within an interval.
    fn add_part(&mut self, user: usize, index: usize, interval: &(usize, Range<i64>)) {
        let owner = self.owners.runs[index].owner;
        let rows = u128::from(self.owners.rows_within(index, interval));
        if rows > 0 && owner != user {
            self.of_rank[owner].block_rows += rows;
            self.of_rank[user].final_gradient_rows += rows;
            self.add_distances(user, owner..owner + 1);
        }
    }

    fn add_whole(&mut self, user: usize, runs: Range<usize>) {
        self.whole_users[runs.start] += 1;
        self.whole_users[runs.end] -= 1;
        let mut rows = self.rows_before[runs.end] - self.rows_before[runs.start];
        for &own in self.runs_of[user].iter().filter(|&own| runs.contains(own)) {
            self.own_uses[own] += 1;
            rows -= self.owners.runs[own].positions.count;
        }
        self.of_rank[user].final_gradient_rows += u128::from(rows);
        let mut start = runs.start;
        while start < runs.end {
            let end = self.stretch_ends[start].min(runs.end);
            let ends = [start, end - 1].map(|index| self.owners.runs[index].owner);
            self.add_distances(user, ends[0].min(ends[1])..ends[0].max(ends[1]) + 1);
            start = end;
        }
    }

    /// Adds the distances of a user from consecutive owners.
    fn add_distances(&mut self, user: usize, owners: Range<usize>) {
        let ranks = self.of_rank.len();
        let first = (user + ranks - (owners.end - 1)) % ranks;
        let end = first + owners.len();
        self.distances[first] += 1;
        self.distances[end.min(ranks)] -= 1;
        if end > ranks {
            // distance 0 follows the largest
            self.distances[0] += 1;
            self.distances[end - ranks] -= 1;
        }
    }

    fn finish(mut self) -> RingTraffic {
        let mut users = 0;
        for (index, run) in self.owners.runs.iter().enumerate() {
            users += self.whole_users[index];
            let others = u128::try_from(users - self.own_uses[index]).unwrap_or(0);
            self.of_rank[run.owner].block_rows += others * u128::from(run.positions.count);
        }
        let mut pairs = self.distances[0];
        let mut hops = 0;
        // a rank is at distance 0 from itself only
        for distance in 1..self.of_rank.len() {
            pairs += self.distances[distance];
            hops += usize::from(pairs > 0);
        }
        RingTraffic { of_rank: self.of_rank, hops }
    }
}
