//! Paths of blocks from their owner to the ranks that need them.
//!
//! # Rails
//! On a relay one rank of each node sends blocks to another node, in every step: a node with
//! several network cards uses one of them. On rails all ranks of a node send at once, in every step
//! whose number is a multiple of the L ranks of a node, each to the same rank of the next node. In
//! the other steps blocks move around the ranks of their node:
//!
//! ```text
//! step       0 …… L − 1         L …… 2L − 1         2L ……
//! block of   own node           node before          the one before that
//! moves           between nodes          between nodes
//!          inside             inside              inside
//! ```
//! In step k·L + j a block has made k moves between nodes and j + k·(L − 1) moves inside, so it is
//! on the rank j − k after its owner in the node: modulo L, and k nodes after it. So each rank
//! computes on every block once, always gets it from the rank that computed on it in the step
//! before, and all else is as on a relay, of which rails are a permutation of the owners. N nodes
//! have N − 1 moves between them, instead of N·L − 1 steps that each wait for the network.
//!
//! # Once per node
//! A relay passes rows through all nodes before the last one that needs them, and the direct route
//! sends them to each rank of a node. Once per node is direct between nodes and a relay inside:
//!
//! ```text
//! step       0 …… L − 1       L …… 2L − 1            2L ……
//! block of   own node         node before            the one before that
//! moves      in the node      from its owner, then   from its owner, then
//!                             in the node            in the node
//! ```
//! In step k·L + j the block of rank i of node a is on rank i + j, modulo L, of node a + k. The
//! owner sends the rows that any rank of a node needs to rank i of this node; they pass its ranks
//! in a circle. Their gradients are summed on the same circle, and the last rank that needs a row
//! sends the sum of its node to the owner. So a row, and its gradient, cross once between two
//! nodes.

use std::ops::Range;

/// Path of blocks from their owner to the ranks that need them. Ranks are ring indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// From rank r to r + 1, as long as a later rank needs some of the rows.
    RelayUp,
    /// From rank r to r − 1, as long as a later rank needs some of the rows.
    RelayDown,
    /// From the owner to each rank that needs some of the rows.
    Direct,
    /// As [`Route::RelayUp`], around the ranks of each node, then from all of them to the next
    /// node.
    RailsUp {
        /// Ranks of each node, of which ring indices are neighbours: a divisor of the number of
        /// ranks. 0 as an option: as many as each node of the transport has.
        node_ranks: usize,
    },
    /// As [`Route::RailsUp`], in the other direction.
    RailsDown {
        /// As of [`Route::RailsUp`].
        node_ranks: usize,
    },
    /// From the owner to one rank of each node, and on to the others of the node that need some of
    /// the rows.
    OncePerNode {
        /// As of [`Route::RailsUp`]. With 1 it is [`Route::Direct`], with all ranks
        /// [`Route::RelayUp`].
        node_ranks: usize,
    },
}

impl Route {
    /// The routes that do not depend on nodes. Of several with the same traffic, the first is
    /// chosen.
    pub const ALL: [Self; 3] = [Self::RelayUp, Self::RelayDown, Self::Direct];

    /// Returns the name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RelayUp => "relay-up",
            Self::RelayDown => "relay-down",
            Self::Direct => "direct",
            Self::RailsUp { .. } => "rails-up",
            Self::RailsDown { .. } => "rails-down",
            Self::OncePerNode { .. } => "once-per-node",
        }
    }

    /// Returns true if each rank forwards blocks to the next: a relay, or rails.
    pub const fn is_relay(self) -> bool {
        !matches!(self, Self::Direct | Self::OncePerNode { .. })
    }

    /// Returns true if the block of step `step` ≥ 1 comes from the rank that had it in the step
    /// before, false if it comes from its owner.
    pub const fn forwards(self, step: usize, ranks: usize) -> bool {
        match self {
            Self::Direct => false,
            Self::OncePerNode { .. } => !step.is_multiple_of(self.period(ranks)),
            _ => true,
        }
    }

    /// Returns true if a rank sends its own rows after step 0: if not every block is forwarded.
    pub const fn keeps_local(self, ranks: usize) -> bool {
        match self {
            Self::Direct => true,
            Self::OncePerNode { .. } => self.period(ranks) < ranks,
            _ => false,
        }
    }

    /// Returns the number of steps after which blocks make the same move again: 1, or on rails and
    /// once per node the ranks of a node. Without nodes that [fit](Self::fits), rails are a relay,
    /// and once per node is direct.
    pub(super) const fn period(self, ranks: usize) -> usize {
        match self.node_ranks() {
            Some(node_ranks) if self.fits(ranks) => node_ranks,
            _ => 1,
        }
    }

    /// Returns the steps of the way that a block is on in step `step`, on which it is forwarded
    /// from user to user. The owner, which has the block in step 0, is no user.
    pub(super) const fn way(self, step: usize, ranks: usize) -> Range<usize> {
        let steps = if self.is_relay() { ranks } else { self.period(ranks) };
        let first = step / steps * steps;
        if first == 0 { 1..steps } else { first..first + steps }
    }

    /// Returns the ranks of a node of a route that depends on nodes.
    pub const fn node_ranks(self) -> Option<usize> {
        match self {
            Self::RailsUp { node_ranks }
            | Self::RailsDown { node_ranks }
            | Self::OncePerNode { node_ranks } => Some(node_ranks),
            _ => None,
        }
    }

    /// Returns true if blocks move towards lower ring indices.
    pub(super) const fn is_down(self) -> bool {
        matches!(self, Self::RelayDown | Self::RailsDown { .. })
    }

    /// Returns the owner of the block on which `rank` computes in step `step`, for
    /// `rank, step < ranks`.
    pub const fn owner(self, rank: usize, step: usize, ranks: usize) -> usize {
        if self.is_down() { self.ahead(rank, step, ranks) } else { self.behind(rank, step, ranks) }
    }

    /// Returns the rank that computes on the block of `owner` in step `step`, for
    /// `owner, step < ranks`.
    pub const fn user(self, owner: usize, step: usize, ranks: usize) -> usize {
        if self.is_down() {
            self.behind(owner, step, ranks)
        } else {
            self.ahead(owner, step, ranks)
        }
    }

    /// Returns the rank that is `step` moves after `rank`, upwards.
    const fn ahead(self, rank: usize, step: usize, ranks: usize) -> usize {
        let size = self.period(ranks);
        if size == 1 {
            return (rank + step) % ranks;
        }
        let moves = step / size;
        let first = (rank / size + moves) * size;
        (first + (rank + step % size + self.turn(moves, size)) % size) % ranks
    }

    /// Returns the rank that is `step` moves before `rank`, upwards.
    const fn behind(self, rank: usize, step: usize, ranks: usize) -> usize {
        let size = self.period(ranks);
        if size == 1 {
            return (rank + ranks - step) % ranks;
        }
        let moves = step / size;
        let first = (rank / size + ranks / size - moves) * size;
        let turned = size - self.turn(moves, size);
        (first + (rank + size - step % size + turned) % size) % ranks
    }

    /// Returns the places in a node by which blocks have moved after whole turns of `moves` nodes:
    /// on rails `size` − 1 for each, modulo `size` ranks of a node.
    const fn turn(self, moves: usize, size: usize) -> usize {
        match self {
            Self::OncePerNode { .. } => 0,
            _ => (size - moves % size) % size,
        }
    }

    /// Returns the step in which `rank` computes on the block of `owner`, for
    /// `rank, owner < ranks`.
    pub const fn step(self, rank: usize, owner: usize, ranks: usize) -> usize {
        let (from, to) = if self.is_down() { (rank, owner) } else { (owner, rank) };
        let size = self.period(ranks);
        if size == 1 {
            return (to + ranks - from) % ranks;
        }
        let moves = (to / size + ranks / size - from / size) % (ranks / size);
        moves * size + (to % size + 2 * size - from % size - self.turn(moves, size)) % size
    }

    /// Returns true if the number of ranks has a path of this kind: if `node_ranks` divides it.
    pub const fn fits(self, ranks: usize) -> bool {
        match self.node_ranks() {
            Some(node_ranks) => node_ranks > 0 && ranks.is_multiple_of(node_ranks),
            None => true,
        }
    }

    /// Returns the route with the ranks of a node of an option that leaves them to the transport.
    pub const fn with_node_ranks(self, of_nodes: usize) -> Self {
        match self {
            Self::RailsUp { node_ranks: 0 } => Self::RailsUp { node_ranks: of_nodes },
            Self::RailsDown { node_ranks: 0 } => Self::RailsDown { node_ranks: of_nodes },
            Self::OncePerNode { node_ranks: 0 } => Self::OncePerNode { node_ranks: of_nodes },
            route => route,
        }
    }

    /// Returns the form of a route over nodes of `node_ranks` ranks: rails in the direction of a
    /// relay, once per node in place of the direct route.
    pub(super) const fn over_nodes(self, node_ranks: usize) -> Self {
        match self {
            Self::RelayUp => Self::RailsUp { node_ranks },
            Self::RelayDown => Self::RailsDown { node_ranks },
            Self::Direct => Self::OncePerNode { node_ranks },
            route => route,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_user_and_step_are_inverse() {
        for ranks in 1..25 {
            let rails =
                (1..=ranks).filter(|&node_ranks| ranks % node_ranks == 0).flat_map(|node_ranks| {
                    [
                        Route::RailsUp { node_ranks },
                        Route::RailsDown { node_ranks },
                        Route::OncePerNode { node_ranks },
                    ]
                });
            for route in Route::ALL.into_iter().chain(rails) {
                assert!(route.fits(ranks));
                for rank in 0..ranks {
                    for step in 0..ranks {
                        let owner = route.owner(rank, step, ranks);
                        assert_eq!(route.user(owner, step, ranks), rank);
                        assert_eq!(route.step(rank, owner, ranks), step);
                        assert!(step > 0 || owner == rank);
                        let opposite = route.opposite();
                        if route.is_relay() {
                            assert_eq!(
                                opposite.owner(rank, step, ranks),
                                route.user(rank, step, ranks)
                            );
                        }
                    }
                }
            }
        }
        assert_eq!(Route::RelayUp.owner(1, 2, 4), 3);
        assert_eq!(Route::RelayDown.owner(1, 2, 4), 3);
        assert_eq!(Route::RelayUp.owner(2, 1, 4), 1);
        assert_eq!(Route::RelayDown.owner(2, 1, 4), 3);
    }

    #[test]
    fn rails_leave_a_node_in_one_step_of_each_period() {
        let [nodes, size] = [3, 4];
        let ranks = nodes * size;
        for route in [Route::RailsUp { node_ranks: size }, Route::RailsDown { node_ranks: size }] {
            let mut visited = Vec::new();
            for step in 1..ranks {
                for owner in 0..ranks {
                    let [from, to] = [step - 1, step].map(|step| route.user(owner, step, ranks));
                    let is_between = from / size != to / size;
                    assert_eq!(is_between, step % size == 0, "{route:?} {step}");
                    // between nodes to the same rank of the neighbour, inside to a neighbour
                    let up = if is_between {
                        (from + size) % ranks
                    } else {
                        from / size * size + (from + 1) % size
                    };
                    let down = if is_between {
                        (from + ranks - size) % ranks
                    } else {
                        from / size * size + (from + size - 1) % size
                    };
                    let next =
                        if route == (Route::RailsUp { node_ranks: size }) { up } else { down };
                    assert_eq!(to, next, "{route:?} {step}");
                }
                visited.push(route.user(5, step, ranks));
            }
            visited.sort_unstable();
            assert_eq!(visited, (0..ranks).filter(|&rank| rank != 5).collect::<Vec<_>>());
        }
        assert_eq!(
            Route::RailsUp { node_ranks: 0 }.with_node_ranks(4),
            Route::RailsUp { node_ranks: 4 }
        );
        assert_eq!(Route::RelayUp.with_node_ranks(4), Route::RelayUp);
        assert_eq!(
            Route::OncePerNode { node_ranks: 0 }.with_node_ranks(4),
            Route::OncePerNode { node_ranks: 4 }
        );
        assert!(!Route::RailsDown { node_ranks: 5 }.fits(12));
        assert!(!Route::RailsDown { node_ranks: 0 }.fits(12));
    }

    #[test]
    fn once_per_node_passes_each_node_in_a_circle_from_the_place_of_the_owner() {
        let [nodes, size] = [3, 4];
        let ranks = nodes * size;
        let route = Route::OncePerNode { node_ranks: size };
        for owner in 0..ranks {
            for step in 0..ranks {
                let node = (owner / size + step / size) % nodes;
                let user = node * size + (owner + step) % size;
                assert_eq!(route.user(owner, step, ranks), user);
                assert_eq!(route.forwards(step, ranks), step % size != 0);
            }
        }
        // its limits are the direct route and a relay
        for (node_ranks, limit) in [(1, Route::Direct), (ranks, Route::RelayUp)] {
            let route = Route::OncePerNode { node_ranks };
            assert_eq!(route.keeps_local(ranks), limit.keeps_local(ranks));
            for step in 1..ranks {
                assert_eq!(route.user(5, step, ranks), limit.user(5, step, ranks));
                assert_eq!(route.forwards(step, ranks), limit.forwards(step, ranks));
            }
        }
    }
}
