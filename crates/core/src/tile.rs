//! Tiles: their class, their mask as bits, and the key intervals of their queries.

use std::ops::Range;

use crate::{KeyIntervals, row_bounds::Bounds};

/// Class of a tile, exact: an empty tile has no visible pair, a full tile no masked pair, a partial
/// tile both.
///
/// # Source
/// The three classes of FlexAttention (Dong et al. 2024) and FlashMask (Wang et al. 2024).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TileClass {
    /// No pair is visible. Kernels skip the tile.
    Empty,
    /// Every pair is visible. Kernels apply no mask.
    Full,
    /// Some pairs are visible. Kernels apply the tile mask.
    Partial,
}

/// Tile mask: one bit per pair, set if the pair is visible.
///
/// A query row has [`TileBits::words`] 64-bit words; the lowest bit of the first word is the first
/// key of the tile. Bits beyond the last key are 0.
#[derive(Debug, Clone, Default)]
pub struct TileBits {
    words: usize,
    bits: Vec<u64>,
}

impl TileBits {
    /// Returns the bits of query `row` of the tile.
    pub fn line(&self, row: usize) -> &[u64] {
        &self.bits[row * self.words..][..self.words]
    }

    /// Returns true if query `row` of the tile attends to key `key` of the tile.
    pub fn visible(&self, row: usize, key: usize) -> bool {
        self.line(row)[key / 64] >> (key % 64) & 1 != 0
    }

    /// Returns the number of 64-bit words per query row.
    pub const fn words(&self) -> usize {
        self.words
    }

    /// Returns the bits of all query rows, one row after another.
    pub fn lines(&self) -> &[u64] {
        &self.bits
    }

    /// Resizes the mask and clears all bits. Reuses its memory.
    pub(crate) fn reset(&mut self, rows: usize, keys: usize) {
        self.words = keys.div_ceil(64);
        self.bits.clear();
        self.bits.resize(rows * self.words, 0);
    }

    pub(crate) fn line_mut(&mut self, row: usize) -> &mut [u64] {
        &mut self.bits[row * self.words..][..self.words]
    }

    /// Sets the bits of query `row` for `keys`, at least one key.
    pub(crate) fn set(&mut self, row: usize, keys: Range<usize>) {
        let first = !0u64 << (keys.start % 64);
        let last = !0u64 >> (63 - (keys.end - 1) % 64);
        let line = &mut self.line_mut(row)[keys.start / 64..=(keys.end - 1) / 64];
        match line {
            [only] => *only |= first & last,
            [head, middle @ .., tail] => {
                *head |= first;
                middle.fill(!0);
                *tail |= last;
            }
            [] => {}
        }
    }
}

/// Key intervals of one query by the spec's mask, and its segment id.
#[derive(Debug, Clone)]
pub(crate) struct QueryIntervals {
    /// Key positions that the query attends to, or a superset of them if `is_bound`.
    pub(crate) intervals: KeyIntervals,
    /// True if the mask does not lower to intervals: it must be evaluated for every pair within
    /// them.
    pub(crate) is_bound: bool,
    /// Segment id; 0 without segment ids.
    pub(crate) segment: i64,
}

/// Bounds of the keys that some queries attend to. None of the queries attends to a key outside.
#[derive(Debug, Clone)]
pub(crate) struct TileBounds {
    /// Cover of the queries' key positions.
    pub(crate) intervals: KeyIntervals,
    /// Least and greatest segment id; unbounded without segment ids.
    pub(crate) segments: (i64, i64),
}

impl Default for TileBounds {
    /// Returns the bounds of no queries.
    fn default() -> Self {
        Self { intervals: KeyIntervals::nothing(), segments: Bounds::NONE.segments }
    }
}

impl TileBounds {
    /// Extends the bounds by one query.
    pub(crate) fn add(&mut self, intervals: &KeyIntervals, segment: Option<i64>) {
        self.intervals.extend_cover(intervals);
        let (least, greatest) = segment.map_or((i64::MIN, i64::MAX), |segment| (segment, segment));
        self.segments = (self.segments.0.min(least), self.segments.1.max(greatest));
    }

    /// Extends the bounds by those of other queries.
    pub(crate) fn extend(&mut self, other: &Self) {
        self.intervals.extend_cover(&other.intervals);
        self.segments =
            (self.segments.0.min(other.segments.0), self.segments.1.max(other.segments.1));
    }

    /// Returns false if none of the queries attends to a key within `keys`.
    pub(crate) fn may_attend_to(&self, keys: &Bounds) -> bool {
        self.segments.0 <= keys.segments.1
            && keys.segments.0 <= self.segments.1
            && self
                .intervals
                .ranges()
                .iter()
                .any(|range| range.start <= keys.positions.1 && keys.positions.0 < range.end)
    }
}

/// Key intervals of a tile of queries. They are computed once and then compared with many tiles of
/// keys, see [`crate::Visibility::query_tile`].
#[derive(Debug, Clone)]
pub struct QueryTile {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) rows: Range<usize>,
    /// One entry per row.
    pub(crate) queries: Vec<QueryIntervals>,
    /// Bounds of the keys of all rows. Tiles of keys outside are empty.
    pub(crate) bounds: TileBounds,
    /// Key positions that every row attends to if its segment id equals the key's. Tiles of keys
    /// within are full.
    pub(crate) common: KeyIntervals,
}

impl Default for QueryTile {
    fn default() -> Self {
        Self {
            batch: 0,
            head: 0,
            rows: 0..0,
            queries: Vec::new(),
            bounds: TileBounds::default(),
            common: KeyIntervals::nothing(),
        }
    }
}

impl QueryTile {
    /// Returns the heap bytes.
    pub const fn bytes(&self) -> usize {
        self.queries.capacity() * size_of::<QueryIntervals>()
    }

    /// Returns the local query rows.
    pub const fn rows(&self) -> &Range<usize> {
        &self.rows
    }

    /// Returns true only if every row attends to every key within `keys`.
    pub(crate) fn attends_to_all(&self, keys: &Bounds) -> bool {
        // one id on both sides, or no ids (then both are unbounded)
        let one_segment = self.bounds.segments == keys.segments
            && (keys.segments.0 == keys.segments.1 || keys.segments == (i64::MIN, i64::MAX));
        one_segment
            && self
                .common
                .ranges()
                .iter()
                .any(|range| range.start <= keys.positions.0 && keys.positions.1 < range.end)
    }
}
