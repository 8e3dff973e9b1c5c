//! Chunked causal mask: ⌊i'/size⌋ = ⌊j'/size⌋ and j' ≤ i'.

use super::{Band, Key, Mask, Query, clip};
use crate::{Dims, Error, Fingerprint, KeyIntervals, Result};

/// Causal mask within chunks of `size` positions: ⌊i'/size⌋ = ⌊j'/size⌋ and j' ≤ i'. The division
/// rounds down for negative positions too.
///
/// # Source
/// Chunked attention of Llama 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkedCausal {
    /// Positions per chunk, at least 1.
    pub size: u64,
}

impl ChunkedCausal {
    fn chunk(&self, position: i64) -> i128 {
        // `validate` rejects a size of 0; before it, a division by zero must not panic
        i128::from(position).div_euclid(i128::from(self.size.max(1)))
    }
}

impl Mask for ChunkedCausal {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("chunked causal").number(self.size)
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        key.position <= query.position && self.chunk(key.position) == self.chunk(query.position)
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let first = self.chunk(query.position) * i128::from(self.size.max(1));
        Some(KeyIntervals::one(clip(first), query.position.saturating_add(1)))
    }

    fn band(&self, _: usize, _: usize) -> Option<Band> {
        Some(Band::everything().in_chunks(self.size).ending(1))
    }

    fn validate(&self, _: &Dims) -> Result<()> {
        if self.size == 0 { Err(Error::invalid("chunk_size", 0, "at least 1")) } else { Ok(()) }
    }
}
