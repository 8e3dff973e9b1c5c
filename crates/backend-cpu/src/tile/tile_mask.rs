//! Tile mask: the visible pairs of one tile, one word of lane bits per row, for queries or keys in
//! lanes.
//!
//! ```text
//! classify:    Empty → skip the tile     Full → all rows, no words
//!              Partial → words[row], and the range of rows with a visible pair
//! strip:       words → those of a strip, and for each of its vectors of lanes the rows that hold
//!              its visible pairs
//! ```
//!
//! # Source
//! Full, partial and empty tiles as in FlexAttention (Dong et al. 2024).

use std::ops::Range;

use annulus_core::{QueryTile, TileBits, TileClass, Visibility};

use crate::tile::aligned::list_bytes;

/// Rows of a tile, and its maximum number of lanes: the bits of a mask word.
pub(crate) const TILE: usize = 64;

/// Maximum vectors of a strip for [`TileMask::row_ranges`].
pub(crate) const MAX_STRIP_VECTORS: usize = 4;

/// For each vector of a strip, a range of rows.
pub(crate) type RowRanges = [Range<usize>; MAX_STRIP_VECTORS];

/// Selects what lies in the lanes, queries or keys. The other side are the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaneAxis {
    Queries,
    Keys,
}

/// Visible pairs of one tile.
#[derive(Debug, Clone)]
pub(crate) struct TileMask {
    words: [u64; TILE],
    /// Range of the rows with a visible pair. Rows outside it have none.
    rows: Range<usize>,
    /// True if every pair within `rows` is visible; `words` are then unspecified.
    full: bool,
    /// See [`TileMask::row_ranges`].
    row_ranges: Option<RowRanges>,
}

impl Default for TileMask {
    fn default() -> Self {
        Self { words: [0; TILE], rows: 0..0, full: true, row_ranges: None }
    }
}

impl TileMask {
    /// Returns the mask of `rows` rows of which every pair is visible.
    pub(crate) fn full(rows: usize) -> Self {
        Self { rows: 0..rows, ..Self::default() }
    }

    /// Classifies the tile of `queries` × `keys`. Returns false if it is empty.
    pub(crate) fn classify(
        &mut self,
        lanes: LaneAxis,
        visibility: &Visibility<'_>,
        queries: &QueryTile,
        keys: Range<usize>,
        bits: &mut TileBits,
    ) -> bool {
        let rows = match lanes {
            LaneAxis::Queries => keys.len(),
            LaneAxis::Keys => queries.rows().len(),
        };
        match visibility.classify(queries, keys, bits) {
            TileClass::Empty => return false,
            TileClass::Full => {
                self.rows = 0..rows;
                self.full = true;
            }
            TileClass::Partial => {
                self.words.fill(0);
                self.words.iter_mut().zip(bits.lines()).for_each(|(word, &line)| *word = line);
                if lanes == LaneAxis::Queries {
                    transpose(&mut self.words);
                }
                let visible = |&row: &usize| self.words[row] != 0;
                let first = (0..rows).find(visible).unwrap_or(0);
                self.rows = first..(first..rows).rfind(visible).map_or(first, |last| last + 1);
                self.full = false;
            }
        }
        true
    }

    /// Writes the mask of one strip of this tile to `into`: that of the tile's lanes `lanes`,
    /// counted from any multiple of [`TILE`], in vectors of `width` lanes. Returns false if the
    /// strip is empty.
    ///
    /// Rows of which every pair is visible need no words, also if other rows have none: at the edge
    /// of a document only the tiles on the diagonal are masked pair by pair.
    pub(crate) fn strip(&self, lanes: &Range<usize>, width: usize, into: &mut Self) -> bool {
        debug_assert!(lanes.start % TILE + lanes.len() <= TILE);
        into.full = self.full;
        into.rows = self.rows.clone();
        into.row_ranges = None;
        if self.full {
            return true;
        }
        let first = lanes.start % TILE;
        let all = !0u64 >> (TILE - lanes.len());
        into.words.fill(0);
        for row in self.rows.clone() {
            into.words[row] = self.words[row] >> first & all;
        }
        let visible = |&row: &usize| into.words[row] != 0;
        let Some(begin) = self.rows.clone().find(visible) else { return false };
        let end = (begin..self.rows.end).rfind(visible).map_or(begin, |last| last + 1);
        into.rows = begin..end;
        into.full = into.words[into.rows.clone()].iter().all(|&word| word == all);
        into.row_ranges = into.trimmed_ranges(lanes.len().div_ceil(width), width);
        true
    }

    /// Returns the mask of a strip of `lanes` lanes, in vectors of `width`, with these bits; `None`
    /// if it is empty.
    #[cfg(test)]
    pub(crate) fn of_words(words: [u64; TILE], lanes: usize, width: usize) -> Option<Self> {
        let mut strip = Self::default();
        let whole = Self { words, rows: 0..TILE, full: false, row_ranges: None };
        whole.strip(&(0..lanes), width, &mut strip).then_some(strip)
    }

    /// Returns the range of the rows with a visible pair.
    pub(crate) const fn rows(&self) -> &Range<usize> {
        &self.rows
    }

    /// Returns the lane bits of the rows if a pair within them is masked.
    pub(crate) fn words(&self) -> Option<&[u64]> {
        (!self.full).then(|| &self.words[self.rows.clone()])
    }

    /// Returns the lane bits of every row of the tile: 0 outside [`TileMask::rows`].
    pub(crate) fn lane_words(&self) -> [u64; TILE] {
        let mut words = [0; TILE];
        let rows = self.rows.clone();
        match self.full {
            true => words[rows].fill(!0),
            false => words[rows.clone()].copy_from_slice(&self.words[rows]),
        }
        words
    }

    /// True if a pair of one of the rows is visible.
    pub(crate) const fn visible(&self, row: usize, lane: usize) -> bool {
        self.full || self.words[row] >> lane & 1 != 0
    }

    /// Returns which of the first `lanes` lanes are visible in some of the first `rows` rows.
    pub(crate) fn visible_lanes(&self, rows: usize, lanes: usize) -> u64 {
        if self.full {
            return !0u64 >> (TILE - lanes);
        }
        self.words[..rows].iter().fold(0, |some, word| some | word)
    }

    /// Returns the lane bits of one row: 0 outside [`TileMask::rows`].
    pub(crate) fn lane_word(&self, row: usize) -> u64 {
        match self.full {
            _ if !self.rows.contains(&row) => 0,
            true => !0,
            false => self.words[row],
        }
    }

    /// Returns for each vector of lanes of a strip a range of rows that holds its visible pairs;
    /// `None` if no vector's range is trimmed. Computed with the strip, because several products
    /// use it.
    pub(crate) fn row_ranges(&self) -> Option<RowRanges> {
        self.row_ranges.clone()
    }

    /// Computes [`TileMask::row_ranges`] for vectors of `width` lanes.
    fn trimmed_ranges(&self, vectors: usize, width: usize) -> Option<RowRanges> {
        let words = self
            .words()
            .filter(|_| (2..=MAX_STRIP_VECTORS).contains(&vectors) && vectors * width <= TILE)?;
        let mut row_ranges = [const { 0..0 }; MAX_STRIP_VECTORS];
        for (v, range) in row_ranges.iter_mut().enumerate().take(vectors) {
            let lanes = !0u64 >> (TILE - width) << (v * width);
            let visible = |word: &u64| word & lanes != 0;
            if let (Some(first), Some(last)) =
                (words.iter().position(visible), words.iter().rposition(visible))
            {
                *range = self.rows.start + first..self.rows.start + last + 1;
            }
        }
        let trimmed = row_ranges.iter().take(vectors).any(|range| *range != self.rows);
        trimmed.then_some(row_ranges)
    }

    /// Masks out one more pair of one of the rows.
    pub(crate) fn hide(&mut self, row: usize, lane: usize) {
        if self.full {
            self.full = false;
            self.words.fill(!0);
        }
        self.words[row] &= !(1 << lane);
    }
}

/// Cache of a task's tile masks in the order of its tiles. All heads with the same mask reuse them.
/// If a strip is as wide as a tile, they are those of strips.
#[derive(Debug)]
pub(crate) struct TileMaskCache {
    /// One entry per tile: false if the tile is empty, and its mask.
    entries: Vec<(bool, TileMask)>,
    next: usize,
}

impl TileMaskCache {
    /// Maximum number of cached tiles, about 70 KiB. Every tile of a narrow mask fits; under a wide
    /// mask, computing on a tile outweighs its classification.
    const CAPACITY: usize = 128;

    /// Creates an empty cache with its memory allocated.
    pub(crate) fn new() -> Self {
        Self { entries: Vec::with_capacity(Self::CAPACITY), next: 0 }
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        list_bytes(&self.entries)
    }

    /// Empties the cache.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Returns to the first tile.
    pub(crate) const fn rewind(&mut self) {
        self.next = 0;
    }

    /// Advances to the next tile and loads its mask. Returns false if the tile is empty, `None` if
    /// it is not cached.
    pub(crate) fn load_next(&mut self, tile_mask: &mut TileMask) -> Option<bool> {
        let index = self.next;
        self.next += 1;
        let (non_empty, cached) = self.entries.get(index)?;
        if *non_empty {
            tile_mask.clone_from(cached);
        }
        Some(*non_empty)
    }

    /// Stores the mask of the tile to which [`TileMaskCache::load_next`] advanced last, if it is
    /// the next to be cached and there is room.
    pub(crate) fn store(&mut self, non_empty: bool, tile_mask: &TileMask) {
        if self.next == self.entries.len() + 1 && self.next <= Self::CAPACITY {
            let cached = if non_empty { tile_mask.clone() } else { TileMask::default() };
            self.entries.push((non_empty, cached));
        }
    }
}

/// Transposes 64 × 64 bits recursively: exchanges the off-diagonal blocks of 32 × 32, then within
/// the halves those of 16 × 16, and so on.
///
/// # Source
/// Warren, "Hacker's Delight", section 7-3.
pub(crate) fn transpose(words: &mut [u64; TILE]) {
    let mut size = TILE / 2;
    let mut mask = !0u64 >> size;
    while size != 0 {
        for block in (0..TILE).step_by(2 * size) {
            for row in block..block + size {
                let moved = (words[row] >> size ^ words[row + size]) & mask;
                words[row + size] ^= moved;
                words[row] ^= moved << size;
            }
        }
        size /= 2;
        mask ^= mask << size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_ranges_hold_the_visible_rows_of_each_vector() {
        let causal = std::array::from_fn(|key| !0u64 << key);
        let of = |words, rows, lanes: usize, width| {
            let whole = TileMask { words, rows, full: false, row_ranges: None };
            let mut strip = TileMask::default();
            assert!(whole.strip(&(64..64 + lanes), width, &mut strip));
            strip.row_ranges()
        };
        let row_ranges = of(causal, 0..TILE, 64, 16).unwrap();
        assert_eq!(row_ranges, [0..16, 0..32, 0..48, 0..64]);
        assert_eq!(of(causal, 0..TILE, 16, 8).unwrap()[..2], [0..8, 0..16]);
        assert_eq!(of(causal, 0..TILE, 13, 8).unwrap()[..2], [0..8, 0..13]);
        assert!(of(causal, 0..TILE, 16, 16).is_none());
        let one_vector = std::array::from_fn(|key| causal[key] & 0xff << 16);
        assert_eq!(of(one_vector, 3..24, 64, 16).unwrap(), [0..0, 3..24, 0..0, 0..0]);
        assert!(of([0x8000_8000_8000_8000; TILE], 5..9, 64, 16).is_none());
    }

    #[test]
    fn a_strip_has_the_bits_of_its_lanes() {
        // rows 2..60: lanes 8.. see all rows, lanes 0..8 the rows from 20 on, lane 40 none
        let words = std::array::from_fn(|row| match row {
            2..20 => !0xff & !(1 << 40),
            20..60 => !(1 << 40),
            _ => 0,
        });
        let whole = TileMask { words, rows: 2..60, full: false, row_ranges: None };
        let mut strip = TileMask::default();
        for first in (0..TILE).step_by(8) {
            let lanes = 128 + first..128 + first + 8;
            assert!(whole.strip(&lanes, 8, &mut strip));
            assert_eq!(*strip.rows(), if first == 0 { 20..60 } else { 2..60 });
            assert_eq!(strip.words().is_some(), first == 40, "lanes from {first} on");
            for row in strip.rows().clone() {
                for lane in 0..8 {
                    assert_eq!(strip.visible(row, lane), whole.visible(row, first + lane));
                }
            }
        }
        // lanes without a visible pair
        assert!(!whole.strip(&(40..41), 8, &mut strip));
        assert!(TileMask { rows: 3..9, ..TileMask::default() }.strip(&(5..6), 8, &mut strip));
        assert!(strip.words().is_none() && *strip.rows() == (3..9));
    }

    #[test]
    fn masks_are_cached_until_the_cache_is_cleared() {
        let mut mask_cache = TileMaskCache::new();
        let mut classified = 0;
        for round in 0..2 {
            mask_cache.rewind();
            for tile in 0..TileMaskCache::CAPACITY + 2 {
                let mut tile_mask = TileMask::default();
                let non_empty = mask_cache.load_next(&mut tile_mask).unwrap_or_else(|| {
                    classified += 1;
                    tile_mask.rows = 0..tile;
                    mask_cache.store(tile % 3 != 0, &tile_mask);
                    tile % 3 != 0
                });
                assert!(
                    non_empty == (tile % 3 != 0) && (!non_empty || tile_mask.rows == (0..tile)),
                    "round {round} tile {tile}"
                );
            }
        }
        assert_eq!(classified, TileMaskCache::CAPACITY + 4);
        mask_cache.clear();
        mask_cache.rewind();
        assert!(mask_cache.load_next(&mut TileMask::default()).is_none());
    }
}
