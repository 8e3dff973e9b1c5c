//! A mask defined by a closure.

use std::{fmt, sync::Arc};

use super::{Key, Mask, Query};
use crate::{Fingerprint, KeyIntervals};

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
