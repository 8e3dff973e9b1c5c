//! Strategies: the division of one attention among ranks.
//!
//! ```text
//! ring          each rank has all heads of its query shard; KV shards circulate over all ranks
//! heads × ring  groups of h ranks; in a group, an all-to-all exchanges sequence shards for heads:
//!               each rank has 1/h of the heads of its group's rows, and the KV shards of these
//!               heads circulate over the ranks / h groups
//! grid          h × a × b ranks: h parts of the heads, a query parts, b key columns; in a group of
//!               h·b ranks queries are all-gathered, the KV shards of a column circulate over its a
//!               ranks, and the partial results of the b columns are merged (reduce-scatter)
//! ```
//! With h = ranks nothing circulates: all-to-all attention over heads. One key column is heads ×
//! ring. Elements that a rank receives in a forward pass, in units of rows · head dim, for full
//! attention:
//!
//! ```text
//! 2·(query heads / h)·(1/a − 1/ranks) + 2·(KV heads / h)·(1/b − 1/ranks)
//! ```
//!
//! # Published strategies
//! They are forms of the ring and of the grid.
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
//! Jacobs et al. 2023, DeepSpeed Ulysses (h = ranks); Fang, Zhao 2024, USP: A Unified Sequence
//! Parallelism Approach for Long Context Generative AI (heads × ring); ATTENTION2D 2025,
//! arXiv 2503.15758, and Mesh-Attention 2025, arXiv 2512.20968 (queries × keys).
//! All-gather: Dubey et al. 2024, The Llama 3 Herd of Models, section 3.3.2. Pass-Q: Yang et al.
//! 2024, Context Parallelism for Scalable Million-Token Inference, arXiv 2411.01783, where queries
//! circulate instead.

mod balance;
mod exchange;
mod group_layout;
mod head_grid;
mod memory;
mod traffic;

pub use balance::StrategyBalance;
pub(crate) use balance::work_of_ranks;
pub(crate) use exchange::backward_mode;
pub use exchange::{ExchangeFields, HeadAxis, HeadField};
pub use group_layout::GroupLayout;
pub use head_grid::HeadGrid;
pub use memory::{GRADIENT_BUFFERS, block_buffers, gradient_buffers};
pub(crate) use traffic::PassMessage;
pub use traffic::{RingRows, StrategyTraffic, TrafficOptions};

use std::{fmt, num::NonZeroUsize, str::FromStr};

use annulus_core::{Error, Result, Spec};

use crate::{Route, schedule::BALANCED};

/// Division of one attention among ranks.
///
/// # Examples
/// ```
/// use annulus_plan::Strategy;
/// let strategy: Strategy = "heads:4".parse()?;
/// assert_eq!(strategy, Strategy::HeadsRing { heads: 4 });
/// assert_eq!(strategy.to_string(), "heads:4");
/// # Ok::<(), annulus_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Strategy {
    /// KV shards circulate over all ranks.
    #[default]
    Ring,
    /// All-to-all over heads in groups of ranks, and a ring over the groups. One rank per group is
    /// the ring; as many as there are ranks is all-to-all over heads alone.
    HeadsRing {
        /// Ranks of a group, which divide the heads: a divisor of the number of ranks and of the
        /// query heads, and a divisor or a multiple of the KV heads.
        heads: usize,
    },
    /// Queries × keys: each rank computes the partial results of one query part over one column of
    /// the keys, of a part of the heads. One part of the keys is [`Strategy::HeadsRing`]. As many
    /// parts of heads, queries and keys together as there are ranks.
    Grid {
        /// Parts of the heads: as [`Strategy::HeadsRing`] divides them.
        heads: usize,
        /// Query parts, over which KV shards circulate.
        queries: usize,
        /// Key columns, whose partial results are merged.
        keys: usize,
    },
    /// All-gather of keys and values: the ring on the direct route, with all blocks in memory.
    AllGather,
    /// All-to-all over heads among all ranks: [`Strategy::HeadsRing`] with one group.
    AllToAll,
    /// The ring on [`Route::OncePerNode`](crate::Route::OncePerNode): a block crosses once between
    /// two nodes.
    OncePerNode {
        /// Ranks of a node; 0: as many as each node of the transport has.
        node_ranks: usize,
    },
    /// Queries travel, and partial results return: [`Strategy::Grid`] with one query part.
    PassQ,
    /// The ring, [`Strategy::HeadsRing`] or [`Strategy::Grid`] with the least predicted time on a
    /// machine ([`Machine::choose`]) or, without one, that sends the fewest bytes; in a forward
    /// and, if the plan has one, a backward pass. On a machine also [`Strategy::AllGather`] and
    /// [`Strategy::OncePerNode`]. Ties are broken in favour of fewer key columns, then of fewer
    /// parts of the heads.
    ///
    /// The predicted time is that of the busiest rank. Bytes do not count its work: for documents,
    /// a grid is not chosen by its bytes if its busiest rank has more than 1.02 times the mean of
    /// the visible pairs, and more than that of the ring.
    ///
    /// [`Machine::choose`]: crate::Machine::choose
    Auto,
}

impl Strategy {
    /// Names that [`Strategy::from_str`] reads, for messages.
    pub const EXPECTED: &str = "ring, heads:H, grid:QxK, grid:HxQxK, once-per-node:N with numbers \
        from 1, once-per-node, all-gather, all-to-all, pass-q, or auto";

    /// Returns the parts of the heads, 1 for the ring; `None` if they depend on the ranks or on a
    /// choice.
    pub const fn heads(self) -> Option<usize> {
        match self {
            Self::Ring | Self::AllGather | Self::OncePerNode { .. } | Self::PassQ => Some(1),
            Self::HeadsRing { heads } | Self::Grid { heads, .. } => Some(heads),
            Self::AllToAll | Self::Auto => None,
        }
    }

    /// Returns the strategy with groups of `heads` ranks.
    pub const fn of_heads(heads: usize) -> Self {
        if heads == 1 { Self::Ring } else { Self::HeadsRing { heads } }
    }
}

impl fmt::Display for Strategy {
    /// Writes the name on the command line: `ring`, `heads:4`, `grid:2x4` (queries × keys),
    /// `grid:2x4x8` (heads × queries × keys), `all-gather`, `all-to-all`, `once-per-node`,
    /// `once-per-node:8` (ranks of a node), `pass-q`, `auto`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring => f.write_str("ring"),
            Self::HeadsRing { heads } => write!(f, "heads:{heads}"),
            Self::Grid { heads: 1, queries, keys } => write!(f, "grid:{queries}x{keys}"),
            Self::Grid { heads, queries, keys } => write!(f, "grid:{heads}x{queries}x{keys}"),
            Self::AllGather => f.write_str("all-gather"),
            Self::AllToAll => f.write_str("all-to-all"),
            Self::OncePerNode { node_ranks: 0 } => f.write_str("once-per-node"),
            Self::OncePerNode { node_ranks } => write!(f, "once-per-node:{node_ranks}"),
            Self::PassQ => f.write_str("pass-q"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let count = |text: &str| text.parse().ok().filter(|&count: &usize| count > 0);
        let heads = || count(text.strip_prefix("heads:")?).map(|heads| Self::HeadsRing { heads });
        let grid = || {
            let counts: Option<Vec<usize>> =
                text.strip_prefix("grid:")?.split('x').map(count).collect();
            match counts?[..] {
                [queries, keys] => Some(Self::Grid { heads: 1, queries, keys }),
                [heads, queries, keys] => Some(Self::Grid { heads, queries, keys }),
                _ => None,
            }
        };
        let nodes = || {
            let node_ranks = count(text.strip_prefix("once-per-node:")?)?;
            Some(Self::OncePerNode { node_ranks })
        };
        match text {
            "ring" => Ok(Self::Ring),
            "all-gather" => Ok(Self::AllGather),
            "all-to-all" => Ok(Self::AllToAll),
            "once-per-node" => Ok(Self::OncePerNode { node_ranks: 0 }),
            "pass-q" => Ok(Self::PassQ),
            "auto" => Ok(Self::Auto),
            _ => heads()
                .or_else(grid)
                .or_else(nodes)
                .ok_or_else(|| Error::invalid("strategy", text, Self::EXPECTED)),
        }
    }
}

#[cfg(test)]
mod tests;

// The choice of the strategy that sends the fewest bytes.
//
// Bytes do not count the work of ranks, and need not: without documents, layouts of all grids
// balance the work about as well. With documents they do not. A layout that balances a ring gives
// each rank as many pairs with all keys, but a rank of a grid has those with one key column. So a
// grid is chosen for documents only if it is balanced, or no less than the ring, to which the
// layout was given.

impl StrategyTraffic {
    /// Returns the index of the ring or grid that sends the fewest bytes in all passes, of ties the
    /// first. With a batch these are the ring and the grids whose busiest rank has at most 1.02
    /// times the mean of the visible pairs, or no more than that of the ring. Rings on a route of
    /// their own differ in time, not in the bytes that are needed. `options` are those with which
    /// the traffic was computed. Calls `tick` between steps of a long computation.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is none: the number of ranks is 0; as
    /// [`StrategyTraffic::of`].
    pub fn choose(
        all: &[Self],
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<usize> {
        let is_open = |&index: &usize| all[index].strategy.route().is_none();
        let mut order: Vec<usize> = (0..all.len()).filter(is_open).collect();
        order.sort_by_key(|&index| all[index].total());
        let mut limit = WorkLimit::new(spec, options);
        for &index in &order {
            if limit.admits(&all[index], tick)? {
                return Ok(index);
            }
        }
        order.first().copied().ok_or_else(|| Error::invalid("ranks", 0, "at least 1"))
    }
}

/// The most work of the busiest rank of a grid that is chosen.
struct WorkLimit<'a> {
    spec: &'a Spec,
    options: &'a TrafficOptions<'a>,
    /// Work of the busiest rank of the ring over the mean, computed when it is first used.
    of_ring: Option<f64>,
}

impl<'a> WorkLimit<'a> {
    const fn new(spec: &'a Spec, options: &'a TrafficOptions<'a>) -> Self {
        Self { spec, options, of_ring: None }
    }

    /// Returns true if the work of a grid does not exceed the limit. Without a batch none does.
    fn admits(&mut self, traffic: &StrategyTraffic, tick: &mut dyn FnMut()) -> Result<bool> {
        let Self { spec, options, .. } = *self;
        if options.batch.is_none() || traffic.strategy == Strategy::Ring {
            return Ok(true);
        }
        let work = traffic.work_max_over_mean(spec, options, tick)?;
        if work <= BALANCED {
            return Ok(true);
        }
        let ranks = traffic.grid.groups() * traffic.grid.members();
        let of_ring = match self.of_ring {
            Some(of_ring) => of_ring,
            None => *self.of_ring.insert(self.work_of_ring(ranks, tick)?),
        };
        Ok(work <= of_ring)
    }

    fn work_of_ring(&self, ranks: usize, tick: &mut dyn FnMut()) -> Result<f64> {
        let Self { spec, options, .. } = *self;
        let TrafficOptions { layout, placement, .. } = *options;
        let ring = HeadGrid::new(&spec.dims, ranks, 1)?;
        let layout = GroupLayout::choose(spec, &ring, layout, placement, tick);
        let ring = StrategyTraffic::without_bytes(spec, Strategy::Ring, ring, options, layout);
        ring.work_max_over_mean(spec, options, tick)
    }
}

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
