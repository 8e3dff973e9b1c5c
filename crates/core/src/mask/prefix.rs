//! j' < len or j' ≤ i': a prefix that all see, causal after it.

use super::{Key, Mask, Query, clip};
use crate::{Fingerprint, KeyIntervals};

/// The mask of a prefix language model: every query sees the first `len` positions, and is causal beyond: j' < len or j' ≤ i'.
///
/// # Source
/// Raffel et al. 2020.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// Positions that every query sees.
    pub len: u64,
}

impl Mask for Prefix {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("prefix").number(self.len)
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        key.position <= query.position || i128::from(key.position) < i128::from(self.len)
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        Some(KeyIntervals::one(
            i64::MIN,
            clip(self.len.into()).max(query.position.saturating_add(1)),
        ))
    }
}
