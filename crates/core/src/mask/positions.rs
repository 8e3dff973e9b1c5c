//! Masks that compare positions: full attention, causal, windows, chunks, prefix.

use super::{Band, Key, Mask, Query, clip};
use crate::{Dims, Error, Fingerprint, KeyIntervals, Result};

/// Full attention: every query attends to every key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Everything;

impl Mask for Everything {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("everything")
    }

    fn visible(&self, _: &Query, _: &Key) -> bool {
        true
    }

    fn intervals(&self, _: &Query) -> Option<KeyIntervals> {
        Some(KeyIntervals::everything())
    }

    fn band(&self, _: usize, _: usize) -> Option<Band> {
        Some(Band::everything())
    }
}

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

/// Sliding window, both ends included: i' + offset − left ≤ j' ≤ i' + offset + right. A side that
/// is `None` is unbounded.
///
/// # Source
/// Beltagy et al. 2020, Longformer (window); Xiao et al. 2023, Efficient Streaming Language Models
/// with Attention Sinks (the first keys stay visible).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Window {
    /// Number of earlier positions in the window. `None`: all.
    pub left: Option<u64>,
    /// Number of later positions in the window. `None`: all.
    pub right: Option<u64>,
    /// Keys at positions j' < `first_visible` are visible outside the window too, unless another
    /// mask masks them. 0: none.
    pub first_visible: u64,
    /// Shift of the window.
    pub offset: i64,
}

impl Window {
    /// Creates the window (left, right) without a shift and without exempt keys.
    pub const fn new(left: Option<u64>, right: Option<u64>) -> Self {
        Self { left, right, first_visible: 0, offset: 0 }
    }

    /// Returns the first and last position of the window itself. In 128 bits, because the sum of a
    /// position, an offset and a side can exceed 64.
    fn ends(&self, query: &Query) -> (i128, i128) {
        let centre = i128::from(query.position) + i128::from(self.offset);
        let first = self.left.map_or(i128::from(i64::MIN), |left| centre - i128::from(left));
        let last = self.right.map_or(i128::from(i64::MAX), |right| centre + i128::from(right));
        (first, last)
    }

    /// Returns the position before which all keys are exempt. It is `i64::MIN` if none is: with 0,
    /// negative positions would be exempt.
    fn exempt_before(&self) -> i64 {
        if self.first_visible == 0 { i64::MIN } else { clip(self.first_visible.into()) }
    }
}

impl Mask for Window {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        let into = into.text("window").optional(self.left).optional(self.right);
        into.number(self.first_visible).number(self.offset.cast_unsigned())
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        let (first, last) = self.ends(query);
        (first..=last).contains(&i128::from(key.position)) || key.position < self.exempt_before()
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let (first, last) = self.ends(query);
        let window = KeyIntervals::one(clip(first), clip(last + 1));
        if self.first_visible == 0 {
            Some(window)
        } else {
            Some(window.or(&KeyIntervals::one(i64::MIN, self.exempt_before())))
        }
    }

    fn band(&self, _: usize, _: usize) -> Option<Band> {
        // with exempt keys, a query has two intervals
        if self.first_visible > 0 {
            return None;
        }
        let offset = i128::from(self.offset);
        let band = Band::everything();
        let band = self.left.map_or(band, |left| band.starting(offset - i128::from(left)));
        Some(self.right.map_or(band, |right| band.ending(offset + i128::from(right) + 1)))
    }
}

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
