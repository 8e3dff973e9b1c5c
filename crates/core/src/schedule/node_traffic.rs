//! Rows that every rank sends on a route on which blocks enter a node once
//! ([`Route::OncePerNode`]), without a visit of every owner by every node.
//!
//! ```text
//! for each node, and interval of positions with the same users in it:
//!     for each place in a node:
//!         R = rows in the interval of the owners with this place in all other nodes
//!         from this place on, in a circle, a rank relays R rows up to the last user,
//!         and their gradients from the first user on
//! ```
//! Where the runs of these owners do not overlap, an interval consists of whole runs, but for the
//! runs at its ends, so R is a difference of sums. What owners send, and the steps in which any
//! rank sends, are added to all owners of whole runs with difference arrays. An owner in the node
//! itself, one for each place, is counted alone. The time is O(ranks · ranks of a node), but for a
//! logarithm.

use std::ops::Range;

use super::{
    RingTraffic, Route, Traffic,
    node_users::{Node, NodeUsers, for_each_users_of_nodes},
    owner_runs::OwnerRuns,
};
use crate::needs::BatchNeeds;

/// Computes the traffic of `route`. Calls `tick` after each node.
pub(super) fn node_traffic(part: &BatchNeeds, route: Route, tick: &mut dyn FnMut()) -> RingTraffic {
    let ranks = part.users.len();
    let size = route.period(ranks);
    let of_places: Vec<OwnerRuns> =
        (0..size).map(|place| OwnerRuns::of_owners(part, (place..ranks).step_by(size))).collect();
    let mut traffic = NodeTraffic::new(ranks, size);
    if of_places.iter().any(|owners| !owners.disjoint) {
        for_each_users_of_nodes(part, route, tick, |users| traffic.add_owner(&users));
        return traffic.finish();
    }
    let mut of_places: Vec<PlaceOwners<'_>> =
        of_places.iter().map(|owners| PlaceOwners::new(owners, ranks / size, size)).collect();
    for number in 0..ranks / size {
        let node = Node::new(&part.users[number * size..(number + 1) * size]);
        let intervals = node.intervals();
        for (place, owners) in of_places.iter_mut().enumerate() {
            for interval in &intervals {
                if let Some([first, last]) = node.users_at(place, interval) {
                    let rows = owners.add(&mut traffic, number, interval, last);
                    traffic.add_relays(number, place, [first, last], rows);
                }
            }
            let own = number * size + place;
            for &run in owners.runs_of_node(number) {
                node.for_each(place, true, &owners.owners.runs[run], |first, last, rows| {
                    traffic.add_owner(&NodeUsers { owner: own, moves: 0, first, last, rows });
                });
            }
        }
        tick();
    }
    of_places.into_iter().for_each(|owners| owners.finish(&mut traffic));
    traffic.finish()
}

/// Traffic of the nodes that were added so far.
struct NodeTraffic {
    size: usize,
    of_rank: Vec<Traffic>,
    /// `senders[last]`: number of blocks that reach the user after `last` places, by the number of
    /// nodes from that of the owner, as differences.
    senders: Vec<Vec<i64>>,
}

impl NodeTraffic {
    fn new(ranks: usize, size: usize) -> Self {
        Self {
            size,
            of_rank: vec![Traffic::default(); ranks],
            senders: vec![vec![0; ranks / size + 1]; size],
        }
    }

    fn nodes(&self) -> usize {
        self.of_rank.len() / self.size
    }

    /// Adds rows of one owner.
    fn add_owner(&mut self, users: &NodeUsers) {
        let &NodeUsers { owner, moves, first, last, rows } = users;
        let node = (owner / self.size + moves) % self.nodes();
        if moves > 0 {
            self.of_rank[owner].block_rows += u128::from(rows);
        }
        self.add_moves(last, moves..moves + 1);
        self.add_relays(node, owner % self.size, [first, last], rows.into());
    }

    /// Adds rows that pass the ranks of a node from `place` on, up to the user `last` places after
    /// it, with gradients from the user `first` places after it on.
    fn add_relays(&mut self, node: usize, place: usize, [first, last]: [usize; 2], rows: u128) {
        if rows == 0 {
            return;
        }
        for after in 0..=last {
            let rank = node * self.size + (place + after) % self.size;
            let of_rank = &mut self.of_rank[rank];
            if after < last {
                of_rank.block_rows += rows;
            }
            if (first..last).contains(&after) {
                of_rank.partial_gradient_rows += rows;
            }
            if after == last {
                of_rank.final_gradient_rows += rows;
            }
        }
    }

    /// Adds blocks that move by each of `moves` nodes, which may exceed the number of nodes.
    fn add_moves(&mut self, last: usize, moves: Range<usize>) {
        let nodes = self.nodes();
        let first = moves.start % nodes;
        let end = first + moves.len();
        let senders = &mut self.senders[last];
        senders[first] += 1;
        senders[end.min(nodes)] -= 1;
        if end > nodes {
            senders[0] += 1;
            senders[end - nodes] -= 1;
        }
    }

    fn finish(self) -> RingTraffic {
        let mut blocks = vec![0; self.size];
        let mut hops = 0;
        for moves in 0..self.nodes() {
            for (blocks, senders) in blocks.iter_mut().zip(&self.senders) {
                *blocks += senders[moves];
            }
            // the owner's message to the node, then one for each place that a block passes
            if let Some(last) = blocks.iter().rposition(|&blocks| blocks > 0) {
                hops += usize::from(moves > 0) + last;
            }
        }
        RingTraffic { of_rank: self.of_rank, hops }
    }
}

/// Owners with the same place in all nodes.
struct PlaceOwners<'a> {
    owners: &'a OwnerRuns,
    rows_before: Vec<u64>,
    stretch_ends: Vec<usize>,
    /// Runs of the owner in each node.
    runs_of: Vec<Vec<usize>>,
    /// Nodes that need each whole run, as differences from the run before.
    whole_users: Vec<i64>,
    /// 1 for each whole run that the node of its owner needs, for each interval.
    own_uses: Vec<i64>,
    size: usize,
}

impl<'a> PlaceOwners<'a> {
    fn new(owners: &'a OwnerRuns, nodes: usize, size: usize) -> Self {
        let mut runs_of = vec![Vec::new(); nodes];
        for (index, run) in owners.runs.iter().enumerate() {
            runs_of[run.owner / size].push(index);
        }
        Self {
            rows_before: owners.rows_before(),
            stretch_ends: owners.stretch_ends(size),
            runs_of,
            whole_users: vec![0; owners.runs.len() + 1],
            own_uses: vec![0; owners.runs.len()],
            owners,
            size,
        }
    }

    fn runs_of_node(&self, node: usize) -> &[usize] {
        &self.runs_of[node]
    }

    /// Adds what the owners in other nodes send to node `node` in `interval`, whose last user is
    /// `last` places after them. Returns the number of rows.
    fn add(
        &mut self,
        traffic: &mut NodeTraffic,
        node: usize,
        interval: &(usize, Range<i64>),
        last: usize,
    ) -> u128 {
        let found = self.owners.overlapping(interval);
        let whole = match found.len() {
            0..=2 => found.start..found.start,
            _ => found.start + 1..found.end - 1,
        };
        let mut rows = 0;
        for index in found.clone().filter(|index| !whole.contains(index)) {
            rows += self.add_part(traffic, node, index, interval, last);
        }
        if !whole.is_empty() {
            rows += self.add_whole(traffic, node, whole, last);
        }
        rows
    }

    /// Adds the rows of a run within an interval.
    fn add_part(
        &self,
        traffic: &mut NodeTraffic,
        node: usize,
        index: usize,
        interval: &(usize, Range<i64>),
        last: usize,
    ) -> u128 {
        let owner = self.owners.runs[index].owner;
        let rows = u128::from(self.owners.rows_within(index, interval));
        if rows == 0 || owner / self.size == node {
            return 0;
        }
        traffic.of_rank[owner].block_rows += rows;
        let nodes = traffic.nodes();
        let moves = (node + nodes - owner / self.size) % nodes;
        traffic.add_moves(last, moves..moves + 1);
        rows
    }

    fn add_whole(
        &mut self,
        traffic: &mut NodeTraffic,
        node: usize,
        runs: Range<usize>,
        last: usize,
    ) -> u128 {
        self.whole_users[runs.start] += 1;
        self.whole_users[runs.end] -= 1;
        let mut rows = self.rows_before[runs.end] - self.rows_before[runs.start];
        for &own in self.runs_of[node].iter().filter(|&own| runs.contains(own)) {
            self.own_uses[own] += 1;
            rows -= self.owners.runs[own].positions.count;
        }
        let nodes = traffic.nodes();
        let mut start = runs.start;
        while start < runs.end {
            let end = self.stretch_ends[start].min(runs.end);
            let ends = [start, end - 1].map(|index| self.owners.runs[index].owner / self.size);
            let [least, most] = [ends[0].min(ends[1]), ends[0].max(ends[1])];
            // the own node, at a distance of 0, is not among the receivers
            let moves = node + nodes - most..node + nodes - least + 1;
            for moves in split_at_own(moves, nodes) {
                traffic.add_moves(last, moves);
            }
            start = end;
        }
        rows.into()
    }

    fn finish(self, traffic: &mut NodeTraffic) {
        let mut users = 0;
        for (index, run) in self.owners.runs.iter().enumerate() {
            users += self.whole_users[index];
            let others = u128::try_from(users - self.own_uses[index]).unwrap_or(0);
            traffic.of_rank[run.owner].block_rows += others * u128::from(run.positions.count);
        }
    }
}

/// Returns the parts of a range of moves, between 1 and 2 · `nodes` − 1, without `nodes`.
fn split_at_own(moves: Range<usize>, nodes: usize) -> impl Iterator<Item = Range<usize>> {
    let before = moves.start..moves.end.min(nodes);
    let after = moves.start.max(nodes + 1)..moves.end;
    [before, after].into_iter().filter(|moves| !moves.is_empty())
}
