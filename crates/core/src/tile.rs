//! What a tile is: its class, its bits, and what its queries see.

use std::ops::Range;

use crate::{KeyIntervals, row_bounds::Bounds};

/// What a mask does to a rectangle of (query, key) pairs. Exact: no `Empty` tile has a visible pair, no `Full` tile a hidden one, every `Edge`
/// tile has both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TileClass {
    /// No pair is visible: it costs nothing.
    Empty,
    /// Every pair is visible: no mask code runs.
    Full,
    /// Some are: the bits say which.
    Partial,
}

/// One bit a pair of a tile: `words` 64-bit words a query row, lowest bit = first key of the tile.
#[derive(Debug, Clone, Default)]
pub struct TileBits {
    words: usize,
    bits: Vec<u64>,
}

impl TileBits {
    /// The bits of query `row` of the tile.
    pub fn line(&self, row: usize) -> &[u64] {
        &self.bits[row * self.words..][..self.words]
    }

    /// Whether query `row` of the tile sees key `key` of the tile.
    pub fn visible(&self, row: usize, key: usize) -> bool {
        self.line(row)[key / 64] >> (key % 64) & 1 != 0
    }

    /// 64-bit words a query row.
    pub const fn words(&self) -> usize {
        self.words
    }

    /// The lines of all query rows, one after another.
    pub fn lines(&self) -> &[u64] {
        &self.bits
    }

    /// All bits 0. Keeps its memory.
    pub(crate) fn reset(&mut self, rows: usize, keys: usize) {
        self.words = keys.div_ceil(64);
        self.bits.clear();
        self.bits.resize(rows * self.words, 0);
    }

    pub(crate) fn line_mut(&mut self, row: usize) -> &mut [u64] {
        &mut self.bits[row * self.words..][..self.words]
    }

    /// Sets the bits of the keys `keys`, at least one, of query `row`.
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

/// What one query sees by the spec's mask, and its segment.
#[derive(Debug, Clone)]
pub(crate) struct SeenBy {
    /// The key positions that it sees; if `opaque`, only among them.
    pub(crate) spans: KeyIntervals,
    /// Whether the mask must be asked about each pair.
    pub(crate) opaque: bool,
    /// Its segment id; 0 if there are none.
    pub(crate) segment: i64,
}

/// Bounds of what some queries see: no key outside is seen by any of them.
#[derive(Debug, Clone)]
pub(crate) struct TileBounds {
    /// Of key positions.
    pub(crate) spans: KeyIntervals,
    /// Least and greatest segment id; unbounded if there are none.
    pub(crate) segments: (i64, i64),
}

impl Default for TileBounds {
    fn default() -> Self {
        Self { spans: KeyIntervals::nothing(), segments: Bounds::NONE.segments }
    }
}

impl TileBounds {
    /// Takes in one more query.
    pub(crate) fn add(&mut self, spans: &KeyIntervals, segment: Option<i64>) {
        self.spans = self.spans.cover(spans);
        let (least, greatest) = segment.map_or((i64::MIN, i64::MAX), |segment| (segment, segment));
        self.segments = (self.segments.0.min(least), self.segments.1.max(greatest));
    }

    /// Whether any of these queries might see any of these keys.
    pub(crate) fn meets(&self, keys: &Bounds) -> bool {
        self.segments.0 <= keys.segments.1
            && keys.segments.0 <= self.segments.1
            && self
                .spans
                .ranges()
                .iter()
                .any(|range| range.start <= keys.positions.1 && keys.positions.0 < range.end)
    }
}

/// What a tile of queries sees, worked out once and then asked of many key tiles.
#[derive(Debug, Clone)]
pub struct QueryTile {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) rows: Range<usize>,
    /// of each row
    pub(crate) seen: Vec<SeenBy>,
    /// of all rows together
    pub(crate) hull: TileBounds,
    /// key positions that every row sees for certain, if it has the same segment
    pub(crate) core: KeyIntervals,
}

impl Default for QueryTile {
    fn default() -> Self {
        Self {
            batch: 0,
            head: 0,
            rows: 0..0,
            seen: Vec::new(),
            hull: TileBounds::default(),
            core: KeyIntervals::nothing(),
        }
    }
}

impl QueryTile {
    /// The local query rows.
    pub const fn rows(&self) -> &Range<usize> {
        &self.rows
    }

    /// Whether every row sees every key within `keys` for certain.
    pub(crate) fn sees_all(&self, keys: &Bounds) -> bool {
        // one id on both sides, or none at all (then both are unbounded)
        let one_segment = self.hull.segments == keys.segments
            && (keys.segments.0 == keys.segments.1 || keys.segments == (i64::MIN, i64::MAX));
        one_segment
            && self
                .core
                .ranges()
                .iter()
                .any(|range| range.start <= keys.positions.0 && keys.positions.1 < range.end)
    }
}
