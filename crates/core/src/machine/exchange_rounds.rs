//! Exchanges and agreements of many ranks, as sums over rounds instead of the steps of each rank.
//!
//! ```text
//! round d       member i of each group sends to member i + d (mod members), all at the same time
//! crossing(d)   ranks of a node that send to another node: 0 if a group fits a node of n ranks,
//!               else min(d, n, members − d)
//! inside        latency + bytes / bandwidth
//! between       latency + max(bytes / bandwidth, crossing · bytes / bandwidth of the node)
//! round         the later of both, if there are such messages
//! keys          are sent in rounds with members of the same column, and between nodes only if a
//!               column is longer than a node
//! ```
//! The rounds of members that are far apart are alike: d from n to members − n. Groups are taken to
//! begin at nodes, and every message to have the rows of the longest shard.

use super::{LinkBytes, Machine, PassTime};
use crate::{HeadField, HeadGrid, Side};

/// The exchange of a grid on a machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExchangeRounds<'a> {
    pub(crate) grid: &'a HeadGrid,
    pub(crate) machine: &'a Machine,
    /// The most ranks of a node.
    pub(crate) node_ranks: usize,
}

/// Tensors of one exchange.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchanged<'a> {
    pub(crate) fields: &'a [HeadField],
    /// Query and key rows of a rank.
    pub(crate) rows: [u64; 2],
}

impl Exchanged<'_> {
    /// Returns the bytes of the rows of one side that a rank sends to another.
    fn bytes(&self, grid: &HeadGrid, side: Side) -> f64 {
        let of_side = self.fields.iter().filter(|field| field.side == side);
        let rows = self.rows[usize::from(side == Side::Kv)];
        of_side.map(|field| field.bytes(grid, rows)).sum::<u128>() as f64
    }
}

impl ExchangeRounds<'_> {
    /// Returns the ranks of a node that send to another node in a round.
    fn crossing(&self, distance: usize) -> usize {
        let members = self.grid.members();
        if members <= self.node_ranks {
            return 0;
        }
        distance.min(self.node_ranks).min(members - distance)
    }

    /// Returns true if some ranks exchange keys in a round: those of one column.
    fn has_keys(&self, distance: usize) -> bool {
        let parts = self.grid.head_parts();
        distance < parts || self.grid.members() - distance < parts
    }

    /// Returns the seconds of a round.
    fn seconds(&self, distance: usize, exchanged: &Exchanged<'_>) -> f64 {
        let Machine { inside_node, between_nodes, node_bandwidth, .. } = self.machine;
        let crossing = self.crossing(distance);
        let both = |is_full_duplex: bool| if is_full_duplex { 1.0 } else { 2.0 };
        let [inside, between] = self.bytes(distance, exchanged);
        let link = inside_node.filter(|_| crossing < self.node_ranks && inside > 0.0);
        let inside_seconds = link
            .map_or(0.0, |link| link.latency + both(link.is_full_duplex) * inside / link.bandwidth);
        let link = between_nodes.filter(|_| crossing > 0 && between > 0.0);
        let between_seconds = link.map_or(0.0, |link| {
            let bytes = both(link.is_full_duplex) * between;
            let of_node = node_bandwidth.map_or(0.0, |of| crossing as f64 * bytes / of);
            link.latency + of_node.max(bytes / link.bandwidth)
        });
        inside_seconds.max(between_seconds)
    }

    /// Returns the bytes of the largest message of a round inside a node, and between nodes.
    fn bytes(&self, distance: usize, exchanged: &Exchanged<'_>) -> [f64; 2] {
        let queries = exchanged.bytes(self.grid, Side::Q);
        let keys = if self.has_keys(distance) { exchanged.bytes(self.grid, Side::Kv) } else { 0.0 };
        let is_long = self.grid.head_parts() > self.node_ranks;
        [queries + keys, if is_long { queries + keys } else { queries }]
    }

    /// Returns the rounds `1..members` as `(distance, repeats)`: those that are alike are one.
    fn rounds(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let members = self.grid.members();
        let near = self.node_ranks.max(self.grid.head_parts()).min(members);
        let far = (members + 1).saturating_sub(near).max(near);
        let alike = (far > near).then_some((near, far - near));
        let one = |distance| (distance, 1);
        (1..near).map(one).chain(alike).chain((far..members).map(one))
    }

    /// Returns the time of an exchange whose messages nothing overlaps.
    pub(crate) fn of_messages(&self, exchanged: &Exchanged<'_>) -> PassTime {
        let round = |(distance, repeats)| self.seconds(distance, exchanged) * repeats as f64;
        let seconds = self.rounds().map(round).sum();
        PassTime { seconds, exposed: seconds }
    }

    /// Returns the time of an exchange of partial results, of which a part takes `merge` seconds to
    /// be merged: the own one first, each other one under the messages of the next round.
    pub(crate) fn of_partial(&self, exchanged: &Exchanged<'_>, merge: f64) -> PassTime {
        let messages = self.of_messages(exchanged);
        let members = self.grid.members();
        if merge == 0.0 || members < 2 {
            return messages;
        }
        let round = |(distance, repeats)| {
            let [bytes, _] = self.bytes(distance, exchanged);
            let messages = self.seconds(distance, exchanged);
            let merged = messages.max(merge + 2.0 * bytes * self.machine.message_overhead);
            // under the messages of the first round there is nothing to merge
            let first = if distance == 1 { messages } else { merged };
            first + merged * (repeats - 1) as f64
        };
        let seconds = self.rounds().map(round).sum::<f64>() + 2.0 * merge;
        PassTime { seconds, exposed: (seconds - merge * members as f64).max(0.0) }
    }

    /// Returns the bytes of an exchange of all ranks.
    pub(super) fn link_bytes(&self, exchanged: &Exchanged<'_>) -> LinkBytes {
        let members = self.grid.members();
        let ranks = (self.grid.groups() * members) as f64;
        let [queries, keys] = [Side::Q, Side::Kv].map(|side| exchanged.bytes(self.grid, side));
        // each rank exchanges keys with the other parts of its column
        let all = ranks
            * (queries * (members as f64 - 1.0) + keys * (self.grid.head_parts() as f64 - 1.0));
        let node_ranks = self.node_ranks.min(members) as f64;
        let between = |(distance, repeats)| {
            let [_, bytes] = self.bytes(distance, exchanged);
            self.crossing(distance) as f64 / node_ranks * repeats as f64 * bytes
        };
        let between = (ranks * self.rounds().map(between).sum::<f64>()).min(all);
        LinkBytes { inside_node: all - between, between_nodes: between }
    }
}

/// Returns the time of the agreement before or after a pass: in each of ⌈log₂ ranks⌉ rounds every
/// rank waits for a short message.
pub(crate) fn agreement(grid: &HeadGrid, machine: &Machine, node_ranks: usize) -> PassTime {
    let ranks = grid.groups() * grid.members();
    let seconds = machine.agreement_seconds(ranks, node_ranks);
    PassTime { seconds, exposed: seconds }
}
