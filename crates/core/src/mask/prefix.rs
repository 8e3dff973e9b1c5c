//! Prefix mask: j' < len or j' ≤ i'.

use super::{Band, Key, Mask, Query, clip};
use crate::{Fingerprint, KeyIntervals};

/// Mask of a prefix language model: the first `len` positions are visible to every query, later
/// positions causally. j' < len or j' ≤ i'.
///
/// # Source
/// Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text
/// Transformer, §3.2.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// Number of positions that are visible to every query.
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

    fn band(&self, _: usize, _: usize) -> Option<Band> {
        Some(Band::everything().with_prefix(self.len))
    }
}
