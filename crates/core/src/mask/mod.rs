//! Masks: pure predicates on positions and row numbers, closed under conjunction and disjunction.
//!
//! A mask has a definition and a lowering. [`Mask::visible`] is the definition.
//! [`Mask::intervals`] lowers the mask to the key **positions** that one query attends to, as
//! half-open intervals. It is `None` for dense masks and closures; their bits are computed from
//! `visible`, one tile at a time. Kernels read intervals, segment ids and bits only, so a new mask
//! needs no new kernel.

mod band;
mod combine;
mod neighborhood;
mod positions;
#[cfg(test)]
pub(crate) mod tests;

use std::{any::Any, fmt, sync::Arc};

use crate::{DenseMask, Dims, Fingerprint, KeyIntervals, Result};

pub use band::Band;
pub use combine::{And, Or, PerHead, and, or};
pub use neighborhood::{Axis, Edge, Neighborhood};
pub use positions::{Causal, ChunkedCausal, Everything, Prefix, Window};

/// Properties of a query on which a mask can depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query {
    /// Batch row.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Row number in the unsharded sequence: the index in bias tensors, dense masks and dropout.
    pub row: u64,
    /// Position i', which causal masks, windows and chunks compare.
    pub position: i64,
}

/// Properties of a key on which a mask can depend.
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
/// A custom mask needs a fingerprint, the predicate and its lowering:
/// ```
/// use annulus_core::{Fingerprint, Mask, KeyIntervals, mask::{Key, Query}};
///
/// /// Every query attends to the keys at the two positions before its own.
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
    /// Adds all that the mask depends on to a fingerprint: its name and its parameters. If the
    /// fingerprints of ranks differ, creating a plan fails.
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint;

    /// Returns true if `query` attends to `key`.
    fn visible(&self, query: &Query, key: &Key) -> bool;

    /// Returns exactly the key positions that `query` attends to; `None` if the mask depends on
    /// more than positions, or if only [`Mask::visible`] is known.
    fn intervals(&self, query: &Query) -> Option<KeyIntervals>;

    /// Returns a superset of the key positions that `query` attends to: [`Mask::intervals`] if it
    /// is not `None`. Tiles outside are skipped, so a tight bound saves time.
    fn bound(&self, query: &Query) -> KeyIntervals {
        self.intervals(query).unwrap_or_else(KeyIntervals::everything)
    }

    /// Lowers the mask for all queries of one batch row and head at once; `None` if it is no
    /// [`Band`]. [`Mask::intervals`] of every query must be the interval of the band. With a band,
    /// planning takes time per run of positions instead of time per query.
    fn band(&self, _batch: usize, _head: usize) -> Option<Band> {
        None
    }

    /// Returns true if the result depends on the query's head.
    fn per_head(&self) -> bool {
        false
    }

    /// Returns true if the result depends on the batch row other than through positions.
    fn per_batch(&self) -> bool {
        false
    }

    /// Checks the parameters of the mask.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] naming the field.
    fn validate(&self, _dims: &Dims) -> Result<()> {
        // a mask without parameters is valid for any dims
        Ok(())
    }
}

/// A mask with shared ownership.
pub type SharedMask = Arc<dyn Mask>;

/// Clamps a number to the range of positions. Positions lie within ±`i64::MAX / 4`, so the clamped
/// number compares with them as the number itself does.
fn clip(number: i128) -> i64 {
    if number >= i128::from(i64::MAX) {
        i64::MAX
    } else if number <= i128::from(i64::MIN) {
        i64::MIN
    } else {
        number as i64
    }
}

/// A dense mask of the spec. Every rank has all its query and key rows, in contrast to
/// [`crate::Batch::attention_mask`].
///
/// It is indexed by row numbers instead of positions, and broadcast over batch rows or heads if it
/// has one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dense(pub Arc<DenseMask>);

impl Mask for Dense {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        self.0.fingerprint(into.text("dense"))
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        self.0.visible(query.batch, query.head, crate::index(query.row), crate::index(key.row))
    }

    fn intervals(&self, _: &Query) -> Option<KeyIntervals> {
        None
    }

    fn per_head(&self) -> bool {
        self.0.shape()[1] > 1
    }

    fn per_batch(&self) -> bool {
        self.0.shape()[0] > 1
    }

    fn validate(&self, dims: &Dims) -> Result<()> {
        self.0.validate("mask", dims, dims.q_len)
    }
}

type Function = dyn Fn(&Query, &Key) -> bool + Send + Sync;

/// A mask defined by a closure and identified by a name.
///
/// Ranks compare only the **name**. Closures that differ need different names, and the name must
/// contain the values that a closure captures.
///
/// # Examples
/// ```
/// use annulus_core::mask::Predicate;
/// let dilated = Predicate::of_positions("every 4th key back", |i, j| j <= i && (i - j) % 4 == 0);
/// ```
#[derive(Clone)]
pub struct Predicate {
    name: String,
    by_position_only: bool,
    visible: Arc<Function>,
}

impl Predicate {
    /// Creates a mask that may depend on all fields of query and key. It is evaluated for every
    /// batch row and head.
    pub fn of_pairs(
        name: impl Into<String>,
        visible: impl Fn(&Query, &Key) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), by_position_only: false, visible: Arc::new(visible) }
    }

    /// Creates a mask of the positions (i', j') alone. It is evaluated once for all heads, and for
    /// all batch rows with equal positions.
    pub fn of_positions(
        name: impl Into<String>,
        visible: impl Fn(i64, i64) -> bool + Send + Sync + 'static,
    ) -> Self {
        let visible =
            Arc::new(move |query: &Query, key: &Key| visible(query.position, key.position));
        Self { name: name.into(), by_position_only: true, visible }
    }
}

impl fmt::Debug for Predicate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Predicate")
            .field("name", &self.name)
            .field("by_position_only", &self.by_position_only)
            .finish()
    }
}

impl Mask for Predicate {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("predicate").text(&self.name).number(self.by_position_only.into())
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        (self.visible)(query, key)
    }

    fn intervals(&self, _: &Query) -> Option<KeyIntervals> {
        None
    }

    fn per_head(&self) -> bool {
        !self.by_position_only
    }

    fn per_batch(&self) -> bool {
        !self.by_position_only
    }
}
