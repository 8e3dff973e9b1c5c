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

    /// Returns the class of a tile of `keys` keys with this mask.
    pub(crate) fn class(&self, keys: usize) -> TileClass {
        let all_of_last = !0u64 >> (63 - (keys - 1) % 64);
        let (mut some, mut missing) = (0, 0);
        for line in self.bits.chunks_exact(self.words) {
            let Some((last, whole)) = line.split_last() else { continue };
            for word in whole {
                some |= word;
                missing |= !word;
            }
            some |= last;
            missing |= last ^ all_of_last;
        }
        match (some, missing) {
            (0, _) => TileClass::Empty,
            (_, 0) => TileClass::Full,
            _ => TileClass::Partial,
        }
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

/// Bounds of the keys that some queries attend to. None of the queries attends to a key outside.
#[derive(Debug, Clone)]
pub(crate) struct TileBounds {
    /// Union of the queries' key positions.
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
        self.intervals.extend(intervals);
        let (least, greatest) = segment.map_or((i64::MIN, i64::MAX), |segment| (segment, segment));
        self.segments = (self.segments.0.min(least), self.segments.1.max(greatest));
    }

    /// Extends the bounds by those of other queries.
    pub(crate) fn extend(&mut self, other: &Self) {
        self.intervals.extend(&other.intervals);
        self.segments =
            (self.segments.0.min(other.segments.0), self.segments.1.max(other.segments.1));
    }

    /// Returns false if none of the queries attends to a key within `keys`.
    pub(crate) fn may_attend_to(&self, keys: &Bounds) -> bool {
        self.segments.0 <= keys.segments.1
            && keys.segments.0 <= self.segments.1
            && self.intervals.overlaps(keys.positions.0, keys.positions.1)
    }
}

/// Key intervals of a tile of queries. They are computed once and then compared with many tiles of
/// keys, see [`crate::Visibility::query_tile`].
///
/// Lists of the rows lie in separate arrays: a pass compares the tiles of all queries with those of
/// a block, and whatever a tile reads comes from the second-level cache.
#[derive(Debug, Clone)]
pub struct QueryTile {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) rows: Range<usize>,
    /// Key positions that each row attends to by the spec's mask, or a superset of them if the row
    /// [`QueryTile::is_bound`]; one row's intervals after another's.
    ranges: Vec<Range<i64>>,
    /// Index into `ranges` after the last interval of each row.
    range_ends: Vec<u32>,
    /// True for rows whose mask does not lower to intervals: it must be evaluated for every pair
    /// within them.
    is_bound: Vec<bool>,
    /// Consecutive rows with one segment id (0 without segment ids): the id, and the row after
    /// them.
    segments: Vec<(i64, usize)>,
    /// Blocks of [`LISTED_BLOCK`] key rows that have a listed key of some row, ascending.
    listed: Vec<u32>,
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
            ranges: Vec::new(),
            range_ends: Vec::new(),
            is_bound: Vec::new(),
            segments: Vec::new(),
            listed: Vec::new(),
            bounds: TileBounds::default(),
            common: KeyIntervals::nothing(),
        }
    }
}

/// Key rows of a block of [`QueryTile::lists_any`].
const LISTED_BLOCK: u32 = 64;

impl QueryTile {
    /// Returns the heap bytes.
    pub fn bytes(&self) -> usize {
        self.ranges.capacity() * size_of::<Range<i64>>()
            + self.range_ends.capacity() * size_of::<u32>()
            + self.is_bound.capacity()
            + self.segments.capacity() * size_of::<(i64, usize)>()
            + self.listed.capacity() * size_of::<u32>()
            + self.bounds.intervals.bytes()
            + self.common.bytes()
    }

    /// Returns the local query rows.
    pub const fn rows(&self) -> &Range<usize> {
        &self.rows
    }

    /// Describes the queries `rows`, without their intervals, which [`QueryTile::push`] adds.
    pub(crate) fn begin(&mut self, batch: usize, head: usize, rows: Range<usize>) {
        self.batch = batch;
        self.head = head;
        self.rows = rows;
        self.ranges.clear();
        self.range_ends.clear();
        self.is_bound.clear();
        self.segments.clear();
        self.listed.clear();
        self.bounds = TileBounds::default();
        self.common = KeyIntervals::nothing();
    }

    /// Adds the intervals and the segment id of the next row.
    pub(crate) fn push(&mut self, intervals: &KeyIntervals, is_bound: bool, segment: i64) {
        self.ranges.extend_from_slice(intervals.ranges());
        self.range_ends.push(self.ranges.len() as u32);
        self.is_bound.push(is_bound);
        let end = self.is_bound.len();
        match self.segments.last_mut() {
            Some((last, last_end)) if *last == segment => *last_end = end,
            _ => self.segments.push((segment, end)),
        }
    }

    /// Notes the listed keys of all rows, those of each row ascending.
    pub(crate) fn note_listed(&mut self, keys: impl Iterator<Item = u32>) {
        for block in keys.map(|key| key / LISTED_BLOCK) {
            if self.listed.last() != Some(&block) {
                self.listed.push(block);
            }
        }
        self.listed.sort_unstable();
        self.listed.dedup();
    }

    /// Returns false if no row has a listed key among the key rows from `first` to `last`.
    pub(crate) fn lists_any(&self, first: u64, last: u64) -> bool {
        let [first, last] = [first, last].map(|key| key / u64::from(LISTED_BLOCK));
        let next = self.listed.partition_point(|&block| u64::from(block) < first);
        self.listed.get(next).is_some_and(|&block| u64::from(block) <= last)
    }

    /// Returns true if all rows were added.
    pub(crate) const fn is_complete(&self) -> bool {
        self.is_bound.len() == self.rows.end - self.rows.start
    }

    /// Returns the intervals of row `row` of the tile.
    pub(crate) fn ranges(&self, row: usize) -> &[Range<i64>] {
        let start = if row == 0 { 0 } else { self.range_ends[row - 1] };
        &self.ranges[start as usize..self.range_ends[row] as usize]
    }

    /// Returns true if the intervals of row `row` are only a bound ([`crate::Mask::bound`]).
    pub(crate) fn is_bound(&self, row: usize) -> bool {
        self.is_bound[row]
    }

    /// Returns true if the intervals of a row are only a bound.
    pub(crate) fn has_bound(&self) -> bool {
        self.is_bound.contains(&true)
    }

    /// Iterates over consecutive rows of the tile with one segment id.
    pub(crate) fn segments(&self) -> impl Iterator<Item = (i64, Range<usize>)> + '_ {
        let mut start = 0;
        self.segments
            .iter()
            .map(move |&(segment, end)| (segment, std::mem::replace(&mut start, end)..end))
    }

    /// Returns true only if every row attends to every key within `keys`.
    pub(crate) fn attends_to_all(&self, keys: &Bounds) -> bool {
        // one id on both sides, or no ids (then both are unbounded)
        let one_segment = self.bounds.segments == keys.segments
            && (keys.segments.0 == keys.segments.1 || keys.segments == (i64::MIN, i64::MAX));
        one_segment && self.common.covers(keys.positions.0, keys.positions.1)
    }
}
