//! Nodes of the ranks, and a ring order in which the ranks of one node are neighbours.
//!
//! A ring over N > 1 nodes has at least N hops between nodes. If a launcher assigns ranks to nodes
//! round-robin, a ring of P ranks in ascending order has P of them: every hop of every step uses
//! the network. An [`Order`] therefore maps each ring index to a rank. Layouts and schedules use
//! ring indices only; ranks occur only as addresses of messages. An order thus decides which rank
//! owns which shard, and leaves the results unchanged bit for bit.

use std::collections::HashMap;

/// The node of each rank.
///
/// # Examples
/// Ranks are assigned to two nodes round-robin. The ring passes through all ranks of the first
/// node, then through all of the second:
/// ```
/// use annulus_core::{Order, Placement};
///
/// let placement = Placement::new(vec![0, 1, 0, 1, 0, 1]);
/// assert_eq!(placement.crossings(&Order::ascending(6)), 6);
/// let order = placement.order();
/// assert_eq!(order.ranks(), [0, 2, 4, 1, 3, 5]);
/// assert_eq!(placement.crossings(&order), 2);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    nodes: Vec<usize>,
}

impl Placement {
    /// Creates a placement from the node number of each rank, `nodes[rank]`.
    pub const fn new(nodes: Vec<usize>) -> Self {
        Self { nodes }
    }

    /// Returns the node number of each rank.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// Returns the number of hops between different nodes on a ring of this order, including the
    /// hop from the last rank to the first. A rank without a node number counts as a node of its
    /// own.
    pub fn crossings(&self, order: &Order) -> usize {
        let node = |ring_index: usize| self.nodes.get(order.rank(ring_index));
        let ranks = order.ranks.len();
        (0..ranks)
            .filter(|&ring_index| {
                let next = (ring_index + 1) % ranks;
                ranks > 1 && (node(ring_index).is_none() || node(ring_index) != node(next))
            })
            .count()
    }

    /// Returns the ranks of each node, if every node has as many and they are neighbours in this
    /// order; `None` otherwise, and if there is only one node.
    pub fn node_ranks(&self, order: &Order) -> Option<usize> {
        let nodes: Vec<usize> =
            order.ranks.iter().map(|&rank| self.nodes.get(rank).copied()).collect::<Option<_>>()?;
        let first = nodes.first()?;
        let size = nodes.iter().take_while(|node| *node == first).count();
        let chunks = nodes.chunks(size);
        let mut distinct: Vec<usize> =
            chunks.clone().filter_map(|node| node.first().copied()).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let is_uniform = chunks
            .clone()
            .all(|node| node.len() == size && node.iter().all(|other| Some(other) == node.first()));
        (is_uniform && chunks.len() > 1 && distinct.len() == chunks.len()).then_some(size)
    }

    /// Returns an order with the fewest crossings: ascending ranks if they attain it. Otherwise
    /// ranks are grouped by node, ascending within a node, and nodes are ordered by their lowest
    /// rank.
    pub fn order(&self) -> Order {
        let ascending = Order::ascending(self.nodes.len());
        let mut first_ranks = HashMap::new();
        for (rank, &node) in self.nodes.iter().enumerate() {
            first_ranks.entry(node).or_insert(rank);
        }
        let mut ranks = ascending.ranks.clone();
        ranks.sort_by_cached_key(|&rank| (first_ranks.get(&self.nodes[rank]), rank));
        let grouped = Order { ranks };
        if self.crossings(&grouped) < self.crossings(&ascending) { grouped } else { ascending }
    }
}

/// The sequence in which ranks are arranged on the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// A permutation of all ranks, by ring index.
    ranks: Vec<usize>,
}

impl Order {
    /// Returns the order in which rank r has ring index r.
    pub fn ascending(ranks: usize) -> Self {
        Self { ranks: (0..ranks).collect() }
    }

    /// Returns the rank at each ring index.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Returns the rank at `ring_index`, or `ring_index` itself if it is outside the ring.
    pub fn rank(&self, ring_index: usize) -> usize {
        self.ranks.get(ring_index).copied().unwrap_or(ring_index)
    }

    /// Returns the ring index of `rank`, or `rank` itself if it is not in the ring.
    pub fn ring_index(&self, rank: usize) -> usize {
        self.ranks.iter().position(|&other| other == rank).unwrap_or(rank)
    }

    /// Permutes a list by rank into a list by ring index.
    pub fn by_ring_index<T>(&self, of_ranks: Vec<T>) -> Vec<T> {
        let mut of_ranks: Vec<Option<T>> = of_ranks.into_iter().map(Some).collect();
        self.ranks.iter().filter_map(|&rank| of_ranks.get_mut(rank)?.take()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nodes(placement: &[usize]) -> usize {
        placement.iter().collect::<std::collections::BTreeSet<_>>().len()
    }

    proptest! {
        #[test]
        fn each_nodes_ranks_are_neighbours(of_ranks in prop::collection::vec(0usize..6, 1..40)) {
            let placement = Placement::new(of_ranks.clone());
            let order = placement.order();
            let mut all = order.ranks().to_vec();
            all.sort_unstable();
            prop_assert_eq!(&all, &(0..of_ranks.len()).collect::<Vec<_>>());
            let least = if nodes(&of_ranks) == 1 { 0 } else { nodes(&of_ranks) };
            prop_assert_eq!(placement.crossings(&order), least);
            for ring_index in 0..of_ranks.len() {
                prop_assert_eq!(order.ring_index(order.rank(ring_index)), ring_index);
            }
            let permuted: Vec<_> = order.ranks().iter().map(|&rank| of_ranks[rank]).collect();
            prop_assert_eq!(order.by_ring_index(of_ranks.clone()), permuted);
        }
    }

    /// An algorithm that is quadratic in the nodes needs minutes for this placement.
    #[test]
    fn ranks_on_thousands_of_nodes_are_ordered_at_once() {
        let started = std::time::Instant::now();
        let order = Placement::new((0..30_000).cycle().take(60_000).collect()).order();
        assert_eq!(order.ranks()[..4], [0, 30_000, 1, 30_001]);
        assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    }

    #[test]
    fn an_order_that_is_good_stays() {
        for of_ranks in [
            vec![],
            vec![7],
            vec![0, 0, 0],
            vec![0, 0, 1, 1],
            vec![5, 5, 2, 2, 2],
            vec![0, 1, 1, 0],
        ] {
            let ranks = of_ranks.len();
            assert_eq!(Placement::new(of_ranks).order(), Order::ascending(ranks));
        }
        assert_eq!(Placement::new(vec![3, 1, 3, 1]).order().ranks(), [0, 2, 1, 3]);
    }

    #[test]
    fn nodes_of_equal_size_are_found_in_ring_order() {
        let of = |nodes: &[usize]| {
            let placement = Placement::new(nodes.to_vec());
            [Order::ascending(nodes.len()), placement.order()]
                .map(|order| placement.node_ranks(&order))
        };
        assert_eq!(of(&[0, 0, 1, 1]), [Some(2); 2]);
        assert_eq!(of(&[3, 1, 3, 1]), [None, Some(2)]);
        assert_eq!(of(&[0, 1, 2]), [Some(1); 2]);
        for uneven in [&[][..], &[0], &[0, 0, 0], &[0, 0, 1], &[0, 1, 1], &[0, 0, 1, 1, 0, 0]] {
            assert_eq!(of(uneven), [None; 2], "{uneven:?}");
        }
    }
}
