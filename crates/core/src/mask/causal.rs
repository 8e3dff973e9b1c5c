//! j' ≤ i' + offset.

use super::{Key, Mask, Query, clip};
use crate::Spans;

/// A query sees the keys that do not come after it: j' ≤ i' + offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Causal {
    /// How far ahead a query sees; negative hides its nearest past too. 0 is the ordinary causal mask.
    pub offset: i64,
}

impl Mask for Causal {
    fn visible(&self, query: &Query, key: &Key) -> bool {
        key.position <= query.position.saturating_add(self.offset)
    }

    fn spans(&self, query: &Query) -> Option<Spans> {
        let last = i128::from(query.position) + i128::from(self.offset);
        Some(Spans::one(i64::MIN, clip(last + 1)))
    }
}
