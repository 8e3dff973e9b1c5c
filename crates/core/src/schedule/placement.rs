//! Where ranks are, and in which order they stand around the ring: each node's next to each other.
//!
//! A ring of P ranks on N > 1 nodes crosses from node to node at least N times a lap. Where a launcher deals ranks to nodes like cards, the ring
//! of ascending ranks crosses P times, and every hop of every step goes through the network. So the ring has an [`Order`]: at place p stands
//! rank `order.rank(p)`. Everything that a schedule says is about places; ranks matter where a message has an address, and nowhere else.
//! So an order moves shards from rank to rank and changes nothing that is computed from them, not a bit.

/// Which node each rank runs on.
///
/// # Examples
/// Two nodes, ranks dealt to them in turn: the ring goes through one node, then through the other.
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
    /// `nodes[rank]` names the node of that rank; equal numbers are the same node.
    pub const fn new(nodes: Vec<usize>) -> Self {
        Self { nodes }
    }

    /// The node of each rank.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// Steps from one node to another on a lap around a ring of this order, the last place's to the first included. A rank without a node is a
    /// node of its own.
    pub fn crossings(&self, order: &Order) -> usize {
        let node = |place: usize| self.nodes.get(order.rank(place));
        let ranks = order.ranks.len();
        (0..ranks).filter(|&place| ranks > 1 && (node(place).is_none() || node(place) != node((place + 1) % ranks))).count()
    }

    /// An order with the fewest crossings: ascending ranks if they have no more, else node by node, each node's ranks ascending, nodes by their
    /// first ranks.
    pub fn order(&self) -> Order {
        let ascending = Order::ascending(self.nodes.len());
        let first = |node: usize| self.nodes.iter().position(|&other| other == node);
        let mut ranks = ascending.ranks.clone();
        ranks.sort_by_key(|&rank| (first(self.nodes[rank]), rank));
        let grouped = Order { ranks };
        if self.crossings(&grouped) < self.crossings(&ascending) { grouped } else { ascending }
    }
}

/// The order in which ranks stand around the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// A permutation of all ranks.
    ranks: Vec<usize>,
}

impl Order {
    /// Rank r at place r.
    pub fn ascending(ranks: usize) -> Self {
        Self { ranks: (0..ranks).collect() }
    }

    /// The rank at each place.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The rank at `place`; a place that is not in the ring is taken by the rank of that number, which is not either.
    pub fn rank(&self, place: usize) -> usize {
        self.ranks.get(place).copied().unwrap_or(place)
    }

    /// The place of `rank`, alike.
    pub fn place(&self, rank: usize) -> usize {
        self.ranks.iter().position(|&other| other == rank).unwrap_or(rank)
    }

    /// What belongs to each rank, by place.
    pub fn by_place<T>(&self, of_ranks: Vec<T>) -> Vec<T> {
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
            for place in 0..of_ranks.len() {
                prop_assert_eq!(order.place(order.rank(place)), place);
            }
            prop_assert_eq!(order.by_place(of_ranks.clone()), order.ranks().iter().map(|&rank| of_ranks[rank]).collect::<Vec<_>>());
        }
    }

    #[test]
    fn an_order_that_is_good_stays() {
        for of_ranks in [vec![], vec![7], vec![0, 0, 0], vec![0, 0, 1, 1], vec![5, 5, 2, 2, 2], vec![0, 1, 1, 0]] {
            let ranks = of_ranks.len();
            assert_eq!(Placement::new(of_ranks).order(), Order::ascending(ranks));
        }
        assert_eq!(Placement::new(vec![3, 1, 3, 1]).order().ranks(), [0, 2, 1, 3]);
    }
}
