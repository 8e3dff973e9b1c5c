//! Paths of blocks from their owner to the ranks that need them.

/// Path of blocks from their owner to the ranks that need them. Ranks are ring indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// From rank r to r + 1, as long as a later rank needs some of the rows.
    RelayUp,
    /// From rank r to r − 1, as long as a later rank needs some of the rows.
    RelayDown,
    /// From the owner to each rank that needs some of the rows.
    Direct,
}

impl Route {
    /// All routes. Of several with the same traffic, the first is chosen.
    pub const ALL: [Self; 3] = [Self::RelayUp, Self::RelayDown, Self::Direct];

    /// Returns the name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RelayUp => "relay-up",
            Self::RelayDown => "relay-down",
            Self::Direct => "direct",
        }
    }

    /// Returns true if each rank forwards blocks to the next.
    pub const fn is_relay(self) -> bool {
        !matches!(self, Self::Direct)
    }

    /// Returns the owner of the block on which `rank` computes in step `step`, for
    /// `rank, step < ranks`.
    pub const fn owner(self, rank: usize, step: usize, ranks: usize) -> usize {
        match self {
            Self::RelayDown => (rank + step) % ranks,
            Self::RelayUp | Self::Direct => (rank + ranks - step) % ranks,
        }
    }

    /// Returns the rank that computes on the block of `owner` in step `step`, for
    /// `owner, step < ranks`.
    pub const fn user(self, owner: usize, step: usize, ranks: usize) -> usize {
        match self {
            Self::RelayDown => (owner + ranks - step) % ranks,
            Self::RelayUp | Self::Direct => (owner + step) % ranks,
        }
    }

    /// Returns the step in which `rank` computes on the block of `owner`, for
    /// `rank, owner < ranks`.
    pub const fn step(self, rank: usize, owner: usize, ranks: usize) -> usize {
        match self {
            Self::RelayDown => (owner + ranks - rank) % ranks,
            Self::RelayUp | Self::Direct => (rank + ranks - owner) % ranks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_user_and_step_are_inverse() {
        for ranks in 1..10 {
            for route in Route::ALL {
                for rank in 0..ranks {
                    for step in 0..ranks {
                        let owner = route.owner(rank, step, ranks);
                        assert_eq!(route.user(owner, step, ranks), rank);
                        assert_eq!(route.step(rank, owner, ranks), step);
                        assert!(step > 0 || owner == rank);
                    }
                }
            }
        }
        assert_eq!(Route::RelayUp.owner(1, 2, 4), 3);
        assert_eq!(Route::RelayDown.owner(1, 2, 4), 3);
        assert_eq!(Route::RelayUp.owner(2, 1, 4), 1);
        assert_eq!(Route::RelayDown.owner(2, 1, 4), 3);
    }
}
