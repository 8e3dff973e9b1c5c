//! Strategies: the division of one attention among ranks.
//!
//! ```text
//! ring          each rank has all heads of its query shard; KV shards circulate over all ranks
//! heads × ring  groups of h ranks; in a group, an all-to-all exchanges sequence shards for heads:
//!               each rank has 1/h of the heads of its group's rows, and the KV shards of these
//!               heads circulate over the ranks / h groups
//! ```
//! With h = ranks nothing circulates: all-to-all attention over heads.
//!
//! # Source
//! Jacobs et al. 2023, DeepSpeed Ulysses (h = ranks); Fang, Zhao 2024, USP: A Unified Sequence
//! Parallelism Approach for Long Context Generative AI (heads × ring).

mod exchange;
mod group_layout;
mod head_grid;
mod head_shard;
mod memory;
mod traffic;

use std::{fmt, str::FromStr};

pub use exchange::{ExchangeFields, HeadAxis, HeadField};
pub use group_layout::{GroupLayout, RowSegment};
pub use head_grid::HeadGrid;
pub use head_shard::HeadShard;
pub use traffic::{StrategyTraffic, TrafficOptions};

use crate::{Error, Result};

/// Division of one attention among ranks.
///
/// # Examples
/// ```
/// use annulus_core::Strategy;
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
    /// The strategy of the two above with the least predicted time on a machine
    /// ([`Machine::choose`]) or, without one, that sends the fewest bytes; in a forward and, if the
    /// plan has one, a backward pass. Ties are broken in favour of smaller groups.
    ///
    /// [`Machine::choose`]: crate::Machine::choose
    Auto,
}

impl Strategy {
    /// Returns the ranks of a group, 1 for the ring; `None` for [`Strategy::Auto`].
    pub const fn heads(self) -> Option<usize> {
        match self {
            Self::Ring => Some(1),
            Self::HeadsRing { heads } => Some(heads),
            Self::Auto => None,
        }
    }

    /// Returns the strategy with groups of `heads` ranks.
    pub const fn of_heads(heads: usize) -> Self {
        if heads == 1 { Self::Ring } else { Self::HeadsRing { heads } }
    }
}

impl fmt::Display for Strategy {
    /// Writes the name on the command line: `ring`, `heads:4`, `auto`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring => f.write_str("ring"),
            Self::HeadsRing { heads } => write!(f, "heads:{heads}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let heads =
            |text: &str| text.strip_prefix("heads:")?.parse().ok().filter(|&heads| heads > 0);
        match text {
            "ring" => Ok(Self::Ring),
            "auto" => Ok(Self::Auto),
            _ => heads(text).map(|heads| Self::HeadsRing { heads }).ok_or_else(|| {
                Error::invalid("strategy", text, "ring, heads:H with H from 1, or auto")
            }),
        }
    }
}

#[cfg(test)]
mod tests;
