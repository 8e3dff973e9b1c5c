//! Paths of blocks from their owner to the ranks that need them.
//!
//! # Rails
//! On a relay one rank of each node sends blocks to another node, in every step: a node with several
//! network cards uses one of them. On rails all ranks of a node send at once, in every step whose
//! number is a multiple of the L ranks of a node, each to the same rank of the next node. In the
//! other steps blocks move around the ranks of their node:
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

/// Path of blocks from their owner to the ranks that need them. Ranks are ring indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// From rank r to r + 1, as long as a later rank needs some of the rows.
    RelayUp,
    /// From rank r to r − 1, as long as a later rank needs some of the rows.
    RelayDown,
    /// From the owner to each rank that needs some of the rows.
    Direct,
    /// As [`Route::RelayUp`], around the ranks of each node, then from all of them to the next node.
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
        }
    }

    /// Returns true if each rank forwards blocks to the next.
    pub const fn is_relay(self) -> bool {
        !matches!(self, Self::Direct)
    }

    /// Returns true if each rank forwards all blocks to the same rank.
    pub(super) const fn is_simple_relay(self) -> bool {
        matches!(self, Self::RelayUp | Self::RelayDown)
    }

    /// Returns the number of steps after which blocks make the same move again: 1, or on rails the
    /// ranks of a node. Rails that do not [fit](Self::fits) are a relay.
    pub(super) const fn period(self, ranks: usize) -> usize {
        match self {
            Self::RailsUp { node_ranks } | Self::RailsDown { node_ranks } if self.fits(ranks) => {
                node_ranks
            }
            _ => 1,
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
        (first + (rank + step % size + moves * (size - 1)) % size) % ranks
    }

    /// Returns the rank that is `step` moves before `rank`, upwards.
    const fn behind(self, rank: usize, step: usize, ranks: usize) -> usize {
        let size = self.period(ranks);
        if size == 1 {
            return (rank + ranks - step) % ranks;
        }
        let moves = step / size;
        let first = (rank / size + ranks / size - moves) * size;
        (first + (rank + size - step % size + moves) % size) % ranks
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
        moves * size + (to % size + size - from % size + moves) % size
    }

    /// Returns true if the number of ranks has a path of this kind: if `node_ranks` divides it.
    pub const fn fits(self, ranks: usize) -> bool {
        match self {
            Self::RailsUp { node_ranks } | Self::RailsDown { node_ranks } => {
                node_ranks > 0 && ranks.is_multiple_of(node_ranks)
            }
            _ => true,
        }
    }

    /// Returns the route with the ranks of a node of an option that leaves them to the transport.
    pub const fn with_node_ranks(self, of_nodes: usize) -> Self {
        match self {
            Self::RailsUp { node_ranks: 0 } => Self::RailsUp { node_ranks: of_nodes },
            Self::RailsDown { node_ranks: 0 } => Self::RailsDown { node_ranks: of_nodes },
            route => route,
        }
    }

    /// Returns rails in the direction of a relay over nodes of `node_ranks` ranks; the route itself
    /// if it is no relay.
    pub(super) const fn on_rails(self, node_ranks: usize) -> Self {
        match self {
            Self::RelayUp => Self::RailsUp { node_ranks },
            Self::RelayDown => Self::RailsDown { node_ranks },
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
                    [Route::RailsUp { node_ranks }, Route::RailsDown { node_ranks }]
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
        assert!(!Route::RailsDown { node_ranks: 5 }.fits(12));
        assert!(!Route::RailsDown { node_ranks: 0 }.fits(12));
    }
}
