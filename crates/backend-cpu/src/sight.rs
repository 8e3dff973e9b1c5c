//! Which pairs of a tile are visible: one word of lane bits a row, whichever of queries and keys the lanes are.

use std::ops::Range;

use annulus_core::{QueryTile, TileBits, TileClass, Visibility};

/// Rows of a tile, and the most lanes that it can have.
pub(crate) const TILE: usize = 64;

/// The most vectors that [`Sight::parts`] tells apart.
pub(crate) const MOST_PARTS: usize = 4;

/// Whether queries or keys lie in the lanes; the others are the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lanes {
    Queries,
    Keys,
}

/// The visible pairs of one tile.
#[derive(Debug, Clone)]
pub(crate) struct Sight {
    words: [u64; TILE],
    /// Rows outside see, or are seen by, no lane at all.
    rows: Range<usize>,
    /// Whether no pair within `rows` is hidden; then `words` mean nothing.
    full: bool,
}

impl Default for Sight {
    fn default() -> Self {
        Self { words: [0; TILE], rows: 0..0, full: true }
    }
}

impl Sight {
    /// Looks at the tile of `queries` × `keys`; false if it is empty.
    pub(crate) fn look(
        &mut self,
        lanes: Lanes,
        visibility: &Visibility<'_>,
        queries: &QueryTile,
        keys: Range<usize>,
        bits: &mut TileBits,
    ) -> bool {
        let rows = match lanes {
            Lanes::Queries => keys.len(),
            Lanes::Keys => queries.rows().len(),
        };
        match visibility.classify(queries, keys, bits) {
            TileClass::Empty => return false,
            TileClass::Full => {
                self.rows = 0..rows;
                self.full = true;
            }
            TileClass::Edge => {
                self.words.fill(0);
                self.words.iter_mut().zip(bits.lines()).for_each(|(word, &line)| *word = line);
                if lanes == Lanes::Queries {
                    transpose(&mut self.words);
                }
                let seen = |&row: &usize| self.words[row] != 0;
                let first = (0..rows).find(seen).unwrap_or(0);
                self.rows = first..(first..rows).rfind(seen).map_or(first, |last| last + 1);
                self.full = false;
            }
        }
        true
    }

    /// Rows with a visible pair lie within.
    pub(crate) const fn rows(&self) -> &Range<usize> {
        &self.rows
    }

    /// The lane bits of the rows, if any pair within them is hidden.
    pub(crate) fn words(&self) -> Option<&[u64]> {
        (!self.full).then(|| &self.words[self.rows.clone()])
    }

    /// Whether a pair of one of the rows is visible.
    pub(crate) const fn visible(&self, row: usize, lane: usize) -> bool {
        self.full || self.words[row] >> lane & 1 != 0
    }

    /// The lanes, of the first `lanes`, that some of the first `rows` rows see, and those that all of them see.
    pub(crate) fn seen_by_rows(&self, rows: usize, lanes: usize) -> (u64, u64) {
        let all = !0u64 >> (TILE - lanes);
        if self.full {
            return (all, all);
        }
        self.words[..rows].iter().fold((0, all), |(some, all), word| (some | word, all & word))
    }

    /// For each vector of `width` lanes, the rows that hold all its visible pairs; `None` where it is all rows for all of them.
    pub(crate) fn parts(&self, vectors: usize, width: usize) -> Option<[Range<usize>; MOST_PARTS]> {
        let words = self.words().filter(|_| (2..=MOST_PARTS).contains(&vectors) && vectors * width <= TILE)?;
        let mut parts = [const { 0..0 }; MOST_PARTS];
        for (v, part) in parts.iter_mut().enumerate().take(vectors) {
            let lanes = !0u64 >> (TILE - width) << (v * width);
            let seen = |word: &u64| word & lanes != 0;
            if let (Some(first), Some(last)) = (words.iter().position(seen), words.iter().rposition(seen)) {
                *part = self.rows.start + first..self.rows.start + last + 1;
            }
        }
        let trimmed = parts.iter().take(vectors).any(|part| *part != self.rows);
        trimmed.then_some(parts)
    }

    /// Hides one more pair of one of the rows.
    pub(crate) fn hide(&mut self, row: usize, lane: usize) {
        if self.full {
            self.full = false;
            self.words.fill(!0);
        }
        self.words[row] &= !(1 << lane);
    }
}

/// What was seen of a task's tiles, one after another, so that the next head that sees alike need not look again: of the first few tiles, which are
/// all of a narrow mask's.
#[derive(Debug)]
pub(crate) struct Sights {
    /// Whether anything was seen, and what.
    seen: Vec<(bool, Sight)>,
    next: usize,
}

impl Sights {
    /// The most tiles that are remembered.
    const MOST: usize = 128;

    /// None yet; room for all.
    pub(crate) fn new() -> Self {
        Self { seen: Vec::with_capacity(Self::MOST), next: 0 }
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.seen.clear();
    }

    /// Goes back to the first tile.
    pub(crate) const fn rewind(&mut self) {
        self.next = 0;
    }

    /// What is seen of the next tile: as remembered, else as `look` says.
    pub(crate) fn next(&mut self, sight: &mut Sight, look: impl FnOnce(&mut Sight) -> bool) -> bool {
        let place = self.next;
        self.next += 1;
        if let Some((any, seen)) = self.seen.get(place) {
            if *any {
                sight.clone_from(seen);
            }
            return *any;
        }
        let any = look(sight);
        if place == self.seen.len() && place < Self::MOST {
            self.seen.push((any, if any { sight.clone() } else { Sight::default() }));
        }
        any
    }
}

/// Transposes 64 × 64 bits by halves: blocks of 32 × 32 change places, then within them blocks of 16 × 16, and so on.
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
    fn transposing_exchanges_rows_and_lanes() {
        let mut words: [u64; TILE] = std::array::from_fn(|row| (row as u64 + 3).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let before = words;
        transpose(&mut words);
        for (row, before) in before.iter().enumerate() {
            for (lane, word) in words.iter().enumerate() {
                assert_eq!(word >> row & 1, before >> lane & 1);
            }
        }
    }

    #[test]
    fn parts_hold_what_each_vector_sees() {
        let causal = std::array::from_fn(|key| !0u64 << key);
        let mut sight = Sight { words: causal, rows: 0..TILE, full: false };
        let parts = sight.parts(4, 16).unwrap();
        assert_eq!(parts, [0..16, 0..32, 0..48, 0..64]);
        assert_eq!(sight.parts(2, 8).unwrap()[..2], [0..8, 0..16]);
        assert!(sight.parts(1, 16).is_none());
        sight = Sight { words: std::array::from_fn(|key| causal[key] & 0xff << 16), rows: 3..24, full: false };
        assert_eq!(sight.parts(4, 16).unwrap(), [0..0, 3..24, 0..0, 0..0]);
        sight = Sight { words: [0x8000_8000_8000_8000; TILE], rows: 5..9, full: false };
        assert!(sight.parts(4, 16).is_none());
    }

    #[test]
    fn lanes_are_seen_by_some_or_all_rows() {
        let words = std::array::from_fn(|row| [0b1100, 0b0110, !0][row.min(2)]);
        let sight = Sight { words, rows: 0..2, full: false };
        assert_eq!(sight.seen_by_rows(2, 4), (0b1110, 0b0100));
        // a row that sees nothing
        assert_eq!(Sight { words: [0; TILE], ..sight }.seen_by_rows(2, 64), (0, 0));
        assert_eq!(Sight::default().seen_by_rows(3, 5), (0b11111, 0b11111));
    }

    #[test]
    fn what_was_seen_is_remembered_until_it_is_forgotten() {
        let mut sights = Sights::new();
        let mut looks = 0;
        for round in 0..2 {
            sights.rewind();
            for tile in 0..Sights::MOST + 2 {
                let mut sight = Sight::default();
                let any = sights.next(&mut sight, |sight| {
                    looks += 1;
                    sight.rows = 0..tile;
                    tile % 3 != 0
                });
                assert!(any == (tile % 3 != 0) && (!any || sight.rows == (0..tile)), "round {round} tile {tile}");
            }
        }
        assert_eq!(looks, Sights::MOST + 4);
        sights.clear();
        sights.rewind();
        assert!(sights.next(&mut Sight::default(), |_| true));
    }

    #[test]
    fn hiding_one_pair_hides_no_other() {
        let mut sight = Sight { rows: 0..5, ..Sight::default() };
        assert!(sight.words().is_none());
        sight.hide(3, 63);
        assert!(!sight.visible(3, 63) && sight.visible(3, 62) && sight.visible(2, 63));
        assert_eq!(sight.words().map(<[u64]>::len), Some(5));
    }
}
