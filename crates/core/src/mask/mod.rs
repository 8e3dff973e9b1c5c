//! Who may see whom: pure predicates on positions and row numbers, closed under and/or, with a lowering to intervals.
//!
//! A mask has two views. [`Mask::visible`] is its meaning. [`Mask::intervals`] is its *lowering*: for one query the key **positions** that
//! it sees, as at most a few half-open intervals, or `None` where it cannot be said so (dense masks, closures): then bits are made
//! lazily, a tile at a time, from `visible`. Kernels only ever see intervals, segment ids and bits, so a new mask is never a new kernel.

use std::{any::Any, sync::Arc};

use crate::{Dims, Fingerprint, KeyIntervals, Result};

mod causal;
mod chunked_causal;
mod combine;
mod dense;
mod everything;
mod per_head;
mod predicate;
mod prefix;
#[cfg(test)]
pub(crate) mod tests;
mod window;

pub use causal::Causal;
pub use chunked_causal::ChunkedCausal;
pub use combine::{And, Or, and, or};
pub use dense::Dense;
pub use everything::Everything;
pub use per_head::PerHead;
pub use predicate::Predicate;
pub use prefix::Prefix;
pub use window::Window;

/// A query as a mask sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query {
    /// Batch row.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Row number in the unsharded sequence: bias tensors, dense masks and dropout go by it.
    pub row: u64,
    /// Position i': what causal, windows and chunks compare.
    pub position: i64,
}

/// A key as a mask sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// Row number in the unsharded sequence.
    pub row: u64,
    /// Position j'.
    pub position: i64,
}

/// A pure predicate on (query, key) pairs: visible or masked.
///
/// # Examples
/// A custom mask is a name and one function; a third makes it fast:
/// ```
/// use annulus_core::{Fingerprint, Mask, KeyIntervals, mask::{Key, Query}};
///
/// /// Every query sees the keys at the two positions before its own.
/// #[derive(Debug)]
/// struct TwoBefore;
///
/// impl Mask for TwoBefore {
///     fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
///         into.text("two before")
///     }
///
///     fn visible(&self, query: &Query, key: &Key) -> bool {
///         (1..=2).contains(&(query.position - key.position))
///     }
///
///     fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
///         Some(KeyIntervals::one(query.position - 2, query.position))
///     }
/// }
/// ```
pub trait Mask: Any + std::fmt::Debug + Send + Sync {
    /// Adds all that the mask depends on to a fingerprint: a name, and the numbers that it was made
    /// with. Ranks refuse to plan with different fingerprints.
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint;

    /// Returns true if `query` attends to `key`.
    fn visible(&self, query: &Query, key: &Key) -> bool;

    /// The key positions that `query` sees, exactly; `None` if they are no few intervals of positions.
    fn intervals(&self, query: &Query) -> Option<KeyIntervals>;

    /// Key positions among which are all that `query` sees: exact where [`Mask::intervals`] is, else as tight as is cheap. Tiles outside cost nothing.
    fn bound(&self, query: &Query) -> KeyIntervals {
        self.intervals(query).unwrap_or_else(KeyIntervals::everything)
    }

    /// Whether the answer depends on the query's head.
    fn per_head(&self) -> bool {
        false
    }

    /// Whether the answer depends on the batch row other than through positions.
    fn per_batch(&self) -> bool {
        false
    }

    /// Checks the mask's own numbers.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] naming the field.
    fn validate(&self, _dims: &Dims) -> Result<()> {
        // a mask without numbers is right for any dims
        Ok(())
    }
}

/// A shared mask.
pub type SharedMask = Arc<dyn Mask>;

/// A number of any size as a position. Positions lie within ±`i64::MAX / 4`, so the clipped number compares with them as the true one does.
fn clip(number: i128) -> i64 {
    if number >= i128::from(i64::MAX) {
        i64::MAX
    } else if number <= i128::from(i64::MIN) {
        i64::MIN
    } else {
        number as i64
    }
}
