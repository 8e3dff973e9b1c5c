//! First and last users of all rows in each node, for a route on which blocks enter a node once
//! ([`Route::OncePerNode`]).
//!
//! The rows of rank i of a node pass the ranks of every node in a circle from rank i. The last user
//! in a circle is found by painting (`circle.rs`); the first one is the last one in a circle with
//! mirrored numbers. A node visits the runs of owners of which it needs some rows: O(ranks · nodes)
//! of them if every node needs rows of every rank, but for a logarithm. `node_traffic.rs` counts
//! the rows of whole runs at once.

use std::ops::Range;

use super::{
    Route,
    circle::Circle,
    owner_runs::{OwnerRun, OwnerRuns},
};
use crate::needs::{BatchNeeds, count_below};

/// Rows of one owner with the same first and last user in a node.
pub(super) struct NodeUsers {
    pub(super) owner: usize,
    /// Number of nodes after that of the owner; 0 is its own.
    pub(super) moves: usize,
    /// Places of the first and the last user after that of the owner, in a circle.
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) rows: u64,
}

/// Calls `found` for all rows that are sent on `route`, in groups of rows with the same owner, node
/// and users. Calls `tick` after each node.
pub(super) fn for_each_users_of_nodes(
    needs: &BatchNeeds,
    route: Route,
    tick: &mut dyn FnMut(),
    mut found: impl FnMut(NodeUsers),
) {
    let ranks = needs.users.len();
    let size = route.period(ranks);
    let nodes = ranks / size;
    let owners = OwnerRuns::new(needs);
    for number in 0..nodes {
        tick();
        let node = Node::new(&needs.users[number * size..(number + 1) * size]);
        let mut needed = Vec::new();
        owners.for_each_within(&node.positions, |run, _| needed.push(run));
        needed.sort_unstable();
        needed.dedup();
        for run in needed.into_iter().map(|index| &owners.runs[index]) {
            let owner = run.owner;
            let moves = (number + nodes - owner / size) % nodes;
            node.for_each(owner % size, moves == 0, run, |first, last, rows| {
                found(NodeUsers { owner, moves, first, last, rows });
            });
        }
    }
}

/// Users of one node, in both directions.
pub(super) struct Node {
    ascending: Circle,
    descending: Circle,
    /// Positions that any rank needs.
    positions: Vec<(usize, Range<i64>)>,
    /// Segments and positions at which the users change, ascending.
    edges: Vec<(usize, i64)>,
    size: usize,
}

impl Node {
    pub(super) fn new(users: &[Vec<(usize, Range<i64>)>]) -> Self {
        let of_user = Vec::as_slice;
        let mut all: Vec<_> = users.iter().flatten().cloned().collect();
        let mut edges: Vec<_> = all
            .iter()
            .flat_map(|(segment, range)| [(*segment, range.start), (*segment, range.end)])
            .collect();
        edges.sort_unstable();
        edges.dedup();
        all.sort_unstable_by_key(|(segment, range)| (*segment, range.start));
        let mut positions: Vec<(usize, Range<i64>)> = Vec::new();
        for (segment, range) in all {
            match positions.last_mut() {
                Some((last, before)) if *last == segment && range.start <= before.end => {
                    before.end = before.end.max(range.end);
                }
                _ => positions.push((segment, range)),
            }
        }
        Self {
            ascending: Circle::new(users.iter().map(of_user)),
            descending: Circle::new(users.iter().rev().map(of_user)),
            positions,
            edges,
            size: users.len(),
        }
    }

    /// Returns the positions that any rank needs, divided into intervals with the same users.
    pub(super) fn intervals(&self) -> Vec<(usize, Range<i64>)> {
        let mut intervals = Vec::with_capacity(self.edges.len());
        for (segment, positions) in &self.positions {
            let first = self.edges.partition_point(|edge| *edge <= (*segment, positions.start));
            let within = self.edges[first..].iter();
            let mut start = positions.start;
            for &(_, end) in within.take_while(|edge| **edge <= (*segment, positions.end)) {
                intervals.push((*segment, start..end));
                start = end;
            }
        }
        intervals
    }

    /// Returns the places of the first and of the last user of an interval, of which all positions
    /// have the same users, after `place` of another node.
    pub(super) fn users_at(
        &self,
        place: usize,
        (segment, positions): &(usize, Range<i64>),
    ) -> Option<[usize; 2]> {
        let mirrored = self.size - place;
        let last = self.ascending.last(place, *segment, positions.start).user?;
        let first = self.descending.last(mirrored, *segment, positions.start).user?;
        let after = |user: usize| (user + self.size - place) % self.size;
        Some([after(self.size - 1 - first), after(last)])
    }

    /// Calls `found` with the places of the first and of the last user after `place`, and the
    /// number of rows of which they are. In the own node the rank at `place` does not count.
    pub(super) fn for_each(
        &self,
        place: usize,
        is_own: bool,
        run: &OwnerRun,
        mut found: impl FnMut(usize, usize, u64),
    ) {
        let OwnerRun { segment, positions, .. } = run;
        let mirrored = self.size - 1 - place;
        let after = |user: usize| (user + self.size - place) % self.size;
        let mut index = 0;
        while index < positions.count {
            let position = positions.at(index);
            let [last, first] = if is_own {
                [
                    self.ascending.last_but(place, *segment, position),
                    self.descending.last_but(mirrored, *segment, position),
                ]
            } else {
                [
                    self.ascending.last(place, *segment, position),
                    self.descending.last(mirrored + 1, *segment, position),
                ]
            };
            let next = count_below(positions, last.end.min(first.end)).max(index + 1);
            if let (Some(last), Some(first)) = (last.user, first.user) {
                found(after(self.size - 1 - first), after(last), next - index);
            }
            index = next;
        }
    }
}
