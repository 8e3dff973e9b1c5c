//! Masks without intervals: one bit per pair of row numbers, and closures.

use std::{fmt, sync::Arc};

use super::{Key, Mask, Query};
use crate::{DenseMask, Dims, Fingerprint, KeyIntervals, Result};

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
