//! Causal mask: j' ≤ i' + offset.

use super::{Band, Key, Mask, Query, clip};
use crate::{Fingerprint, KeyIntervals};

/// Causal mask: a query attends to the keys at j' ≤ i' + offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Causal {
    /// Number of later positions that are visible. A negative offset also masks the nearest earlier
    /// positions. 0 is the ordinary causal mask.
    pub offset: i64,
}

impl Mask for Causal {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("causal").number(self.offset.cast_unsigned())
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        key.position <= query.position.saturating_add(self.offset)
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let last = i128::from(query.position) + i128::from(self.offset);
        Some(KeyIntervals::one(i64::MIN, clip(last + 1)))
    }

    fn band(&self, _: usize, _: usize) -> Option<Band> {
        Some(Band::everything().ending(i128::from(self.offset) + 1))
    }
}
