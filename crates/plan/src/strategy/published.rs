//! Published strategies by name, as forms of the ring and of the grid.
//!
//! | name | form |
//! |---|---|
//! | `all-gather` | ring on the direct route, all receives posted at the start of a pass |
//! | `all-to-all` | heads × ring with one group, so that nothing circulates |
//! | `once-per-node` | ring on [`Route::OncePerNode`] |
//! | `pass-q` | grid with one query part: keys and values stay |
//!
//! All-gather: rank r receives the shards of the ranks r − 1, r − 2 … into a buffer each and
//! computes on them in this order, so that tiles of the first ones overlap the arrival of others.
//! Its backward pass sends the gradients of each shard to the owner, a reduce-scatter. It moves the
//! bytes of the ring, in the memory of all shards.
//!
//! Pass-Q: queries are all-gathered, and the partial results of all ranks are merged on the owner
//! of each query. Its bytes depend on the queries alone.
//!
//! # Source
//! All-gather: Dubey et al. 2024, The Llama 3 Herd of Models, section 3.3.2. Pass-Q: Yang et al.
//! 2024, Context Parallelism for Scalable Million-Token Inference, arXiv 2411.01783, where queries
//! circulate instead.

use std::num::NonZeroUsize;

use super::Strategy;
use crate::Route;

impl Strategy {
    /// Returns the form of a published strategy on `ranks` ranks: the ring, heads × ring or a grid.
    /// Other strategies stay.
    pub const fn on_ranks(self, ranks: usize) -> Self {
        match self {
            Self::AllGather | Self::OncePerNode { .. } => Self::Ring,
            Self::AllToAll => Self::of_heads(ranks),
            Self::PassQ if ranks == 1 => Self::Ring,
            Self::PassQ => Self::Grid { heads: 1, queries: 1, keys: ranks },
            other => other,
        }
    }

    /// Returns the route that is a part of the strategy.
    pub const fn route(self) -> Option<Route> {
        match self {
            Self::AllGather => Some(Route::Direct),
            Self::OncePerNode { node_ranks } => Some(Route::OncePerNode { node_ranks }),
            _ => None,
        }
    }

    /// Returns the ring steps by which the strategy posts receives ahead: all with
    /// [`Strategy::AllGather`].
    pub const fn receive_ahead(self) -> Option<NonZeroUsize> {
        match self {
            Self::AllGather => Some(NonZeroUsize::MAX),
            _ => None,
        }
    }

    /// Returns the published strategy of which this is the form on `ranks` ranks, if that divides
    /// heads or keys; else the strategy itself. Its name is the one to print.
    #[must_use]
    pub const fn published_on(self, ranks: usize) -> Self {
        match self {
            _ if ranks < 2 => self,
            Self::HeadsRing { heads } if heads == ranks => Self::AllToAll,
            Self::Grid { queries: 1, keys, .. } if keys == ranks => Self::PassQ,
            _ => self,
        }
    }
}
