//! Visible pairs between the queries of one rank and the keys of one block, tile by tile.
//!
//! [`Visibility::pair`] is the definition: the conjunction of the spec's mask, the segment ids,
//! the batch's dense mask and its key lists. All other functions give the same result for whole tiles at less cost:
//!
//! ```text
//! once per query tile    intervals of each row, their cover (bounds) and intersection (common)
//! per key tile           keys outside the bounds      → empty
//!                        keys within the intersection → full
//!                        otherwise                    → set one bit per pair and count the bits
//! ```
//! The first two tests take a few comparisons with the bounds of the keys. Bits are set for an
//! interval of a strided run of keys at a time.

use std::ops::Range;

use crate::{
    DenseMask, KeyIntervals, ListedKeys, Mask, QueryTile, Rows, TileBits, TileClass,
    mask::{Key, Query},
    row_bounds::{GROUP, StridedRun},
};

/// The complete mask between the queries of one rank and the keys of one block.
#[derive(Debug, Clone, Copy)]
pub struct Visibility<'a> {
    /// Mask of the spec.
    pub mask: &'a dyn Mask,
    /// Dense mask of the batch, `[b|1, heads|1, local q_len, global kv_len]`.
    pub attention_mask: Option<&'a DenseMask>,
    /// Key lists of the batch.
    pub key_lists: Option<ListedKeys<'a>>,
    /// Query rows of this rank.
    pub queries: &'a Rows,
    /// Key rows of the block.
    pub keys: &'a Rows,
}

impl Visibility<'_> {
    /// Returns true if local query row `q` attends to key `k` of the block.
    pub fn pair(&self, batch: usize, head: usize, q: usize, k: usize) -> bool {
        let query = self.query(batch, head, q);
        let key = self.key(batch, k);
        let same_segment = match (self.queries.segments(batch), self.keys.segments(batch)) {
            (Some(of_query), Some(of_key)) => of_query[q] >= 0 && of_query[q] == of_key[k],
            _ => true,
        };
        let in_dense = |mask: &DenseMask| mask.visible(batch, head, q, crate::index(key.row));
        same_segment
            && self.mask.visible(&query, &key)
            && self.attention_mask.is_none_or(in_dense)
            && self.key_lists.is_none_or(|listed| listed.contains(batch, head, q, key.row))
    }

    /// Returns true if the mask may differ between heads. Otherwise results for one head hold for
    /// all.
    pub fn per_head(&self) -> bool {
        let listed = self.key_lists.is_some_and(|listed| listed.lists.shape()[1] > 1);
        self.mask.per_head()
            || listed
            || self.attention_mask.is_some_and(|mask| mask.shape()[1] > 1)
    }

    /// Returns true if the mask may differ between batch rows. Otherwise results for one batch row
    /// hold for all.
    pub fn per_batch(&self) -> bool {
        let dense = self.attention_mask.is_some_and(|mask| mask.shape()[0] > 1);
        let listed = self.key_lists.is_some_and(|listed| listed.lists.shape()[0] > 1);
        self.mask.per_batch()
            || dense
            || listed
            || self.queries.per_batch()
            || self.keys.per_batch()
    }

    /// Computes the key intervals of the queries `rows`. They hold for every KV block of the same
    /// batch.
    pub fn query_tile(&self, batch: usize, head: usize, rows: Range<usize>, into: &mut QueryTile) {
        into.begin(batch, head, rows.clone());
        into.common = KeyIntervals::everything();
        if let Some(listed) = self.key_lists {
            into.note_listed(rows.clone().flat_map(|q| listed.keys(batch, head, q)).copied());
        }
        for q in rows {
            let (intervals, is_bound) = self.intervals(batch, head, q);
            let segment = self.segment(batch, q);
            match segment {
                // padding attends to no key
                Some(..0) => into.common = KeyIntervals::nothing(),
                _ => into.bounds.add(&intervals, segment),
            }
            if is_bound {
                into.common = KeyIntervals::nothing();
            } else {
                into.common.intersect(&intervals);
            }
            // also if the keys of this block have no ids: a rank without keys has none, while the
            // keys of other ranks have
            let segment = self.queries.segments(batch).map_or(0, |segments| segments[q]);
            into.push(&intervals, is_bound, segment);
        }
    }

    /// Classifies the tile of `tile` × `keys`. Writes its mask to `bits` if it is
    /// [`TileClass::Partial`]; otherwise the contents of `bits` are unspecified.
    pub fn classify(&self, tile: &QueryTile, keys: Range<usize>, bits: &mut TileBits) -> TileClass {
        if keys.is_empty() || tile.rows.is_empty() {
            return TileClass::Empty;
        }
        debug_assert!(tile.is_complete(), "a tile without its intervals");
        let key_bounds = self.keys.row_bounds(tile.batch).of(&keys);
        if !tile.bounds.may_attend_to(&key_bounds) {
            return TileClass::Empty;
        }
        if self.has_only_intervals() && tile.attends_to_all(&key_bounds) {
            return TileClass::Full;
        }
        let key_rows = &self.keys.rows()[keys.clone()];
        if self.key_lists.is_some()
            && self.keys.are_consecutive(keys.clone())
            && !tile.lists_any(key_rows[0], key_rows[keys.len() - 1])
        {
            return TileClass::Empty;
        }
        // between the first and the last key of a patch of a grid lie many that are not in it
        let intervals = &tile.bounds.intervals;
        if intervals.ranges().len() > 1 {
            let mut runs = self.keys.row_bounds(tile.batch).strided_runs(keys.clone());
            if !runs.any(|(part, run)| intervals.overlaps(run.position, run.last(part.len()))) {
                return TileClass::Empty;
            }
        }
        bits.reset(tile.rows.len(), keys.len());
        self.set_interval_bits(tile, keys.clone(), bits);
        if !self.has_only_intervals() || tile.has_bound() {
            for (row, q) in tile.rows.clone().enumerate() {
                let line = bits.line_mut(row);
                if let Some(mask) = self.attention_mask {
                    self.retain_dense(mask.line(tile.batch, tile.head, q), &keys, line);
                }
                if let Some(listed) = self.key_lists {
                    self.retain_listed(listed.keys(tile.batch, tile.head, q), &keys, line);
                }
                if tile.is_bound(row) {
                    let query = self.query(tile.batch, tile.head, q);
                    retain(line, |key| {
                        self.mask.visible(&query, &self.key(tile.batch, keys.start + key))
                    });
                }
            }
        }
        bits.class(keys.len())
    }

    /// Returns, in ascending order, the key tiles `0..width, width..2·width, …` that are not
    /// certainly empty. All omitted tiles are [`TileClass::Empty`].
    ///
    /// Skips keys outside the bounds in groups of 4096.
    pub fn key_tiles<'s>(
        &'s self,
        tile: &'s QueryTile,
        width: usize,
    ) -> impl Iterator<Item = Range<usize>> + 's {
        let len = self.keys.len();
        let width = width.max(1);
        let mut start = 0;
        // the last group within the bounds, so that its tiles are not compared with it again
        let mut entered = None;
        std::iter::from_fn(move || {
            while start < len {
                let keys = start..len.min(start + width);
                let row_bounds = self.keys.row_bounds(tile.batch);
                let group = start / GROUP;
                let group_end = len.min((group + 1) * GROUP);
                if entered != Some(group) && keys.end <= group_end {
                    if !tile.bounds.may_attend_to(&row_bounds.of_group(group)) {
                        // a tile that crosses the end of the group is tested by itself
                        start = if group_end == len { len } else { group_end / width * width };
                        continue;
                    }
                    entered = Some(group);
                }
                start = keys.end;
                if tile.bounds.may_attend_to(&row_bounds.of(&keys)) {
                    return Some(keys);
                }
            }
            None
        })
    }

    /// Counts, for the `side` queries in the middle, the pairs within the mask's intervals and the
    /// tiles of `side` keys that are not certainly empty. Returns `None` if the mask differs between
    /// heads, if it does not lower to intervals, or if a query has one interval at most.
    pub fn sample_intervals(&self, side: usize) -> Option<[usize; 2]> {
        let (queries, keys) = (self.queries.len(), self.keys.len());
        if self.per_head() || queries == 0 || keys == 0 {
            return None;
        }
        let (intervals, is_bound) = self.intervals(0, 0, queries / 2);
        if is_bound || intervals.ranges().len() < 2 {
            return None;
        }
        let first = queries / 2 / side * side;
        let mut tile = QueryTile::default();
        self.query_tile(0, 0, first..queries.min(first + side), &mut tile);
        let (least, greatest) = self.keys.row_bounds(0).of(&(0..keys)).positions;
        let within = |range: &Range<i64>| {
            let (start, end) = (range.start.max(least), range.end.min(greatest.saturating_add(1)));
            end.saturating_sub(start).max(0)
        };
        let ranges = (0..tile.rows.len()).flat_map(|row| tile.ranges(row));
        let pairs = ranges.map(within).fold(0, i64::saturating_add);
        let tiles = self.key_tiles(&tile, side).count();
        Some([usize::try_from(pairs).unwrap_or(usize::MAX), tiles])
    }

    /// Returns false if no query of `tile` attends to a key of `keys`, by the bounds of both.
    pub fn may_attend(&self, tile: &QueryTile, keys: &Range<usize>) -> bool {
        !keys.is_empty() && tile.bounds.may_attend_to(&self.keys.row_bounds(tile.batch).of(keys))
    }

    /// Lowers the mask for query `q`. Returns key positions, and true if they are only a bound
    /// ([`Mask::bound`]).
    pub(crate) fn intervals(&self, batch: usize, head: usize, q: usize) -> (KeyIntervals, bool) {
        let query = self.query(batch, head, q);
        self.mask
            .intervals(&query)
            .map_or_else(|| (self.mask.bound(&query), true), |intervals| (intervals, false))
    }

    /// Returns the segment id of query `q`; `None` if queries or keys have no segment ids.
    pub(crate) fn segment(&self, batch: usize, q: usize) -> Option<i64> {
        self.keys.segments(batch).and(self.queries.segments(batch)).map(|segments| segments[q])
    }

    /// Sets the bits of the pairs that are visible by key intervals and segment ids.
    fn set_interval_bits(&self, tile: &QueryTile, keys: Range<usize>, bits: &mut TileBits) {
        let segmented = self.segment(tile.batch, tile.rows.start).is_some();
        for (part, run) in self.keys.row_bounds(tile.batch).strided_runs(keys.clone()) {
            let part = part.start - keys.start..part.end - keys.start;
            if !segmented {
                set_run_bits(tile, 0..tile.rows.len(), &part, &run, bits);
                continue;
            }
            for (segment, rows) in tile.segments() {
                // padding attends to no key
                if segment == run.segment && segment >= 0 {
                    set_run_bits(tile, rows, &part, &run, bits);
                }
            }
        }
    }

    /// Returns true if neither a dense mask nor key lists restrict the intervals, so that bounds
    /// can prove that a tile is full.
    pub(crate) const fn has_only_intervals(&self) -> bool {
        self.attention_mask.is_none() && self.key_lists.is_none()
    }

    /// Clears the bits of `line` for keys that are not in `list`.
    fn retain_listed(&self, list: &[u32], keys: &Range<usize>, line: &mut [u64]) {
        let rows = &self.keys.rows()[keys.clone()];
        if !self.keys.are_consecutive(keys.clone()) {
            let contains =
                |row| u32::try_from(row).is_ok_and(|row| list.binary_search(&row).is_ok());
            return retain(line, |key| contains(rows[key]));
        }
        let first = rows[0];
        let start = list.partition_point(|&key| u64::from(key) < first);
        let mut listed = list[start..].iter().map(|&key| crate::index(u64::from(key) - first));
        let mut next = listed.next();
        for (index, word) in line.iter_mut().enumerate() {
            let mut bits = 0;
            while let Some(key) = next.filter(|key| key / 64 == index) {
                bits |= 1 << (key % 64);
                next = listed.next();
            }
            *word &= bits;
        }
    }

    /// Clears the bits of `line` for keys that the dense mask's line `dense` masks.
    fn retain_dense(&self, dense: &[u64], keys: &Range<usize>, line: &mut [u64]) {
        let rows = &self.keys.rows()[keys.clone()];
        if self.keys.are_consecutive(keys.clone()) {
            let first = crate::index(rows[0]);
            for (index, word) in line.iter_mut().enumerate() {
                *word &= word_at(dense, first + 64 * index);
            }
        } else {
            retain(line, |key| word_at(dense, crate::index(rows[key])) & 1 != 0);
        }
    }

    pub(crate) fn query(&self, batch: usize, head: usize, q: usize) -> Query {
        Query {
            batch,
            head,
            row: self.queries.rows()[q],
            position: self.queries.positions(batch)[q],
        }
    }

    fn key(&self, batch: usize, k: usize) -> Key {
        Key { row: self.keys.rows()[k], position: self.keys.positions(batch)[k] }
    }
}

/// Sets the bits of rows `rows` of a tile for those keys of a strided run that are within the rows'
/// intervals. `part` are the keys of the run, counted from the first key of the tile.
fn set_run_bits(
    tile: &QueryTile,
    rows: Range<usize>,
    part: &Range<usize>,
    run: &StridedRun,
    bits: &mut TileBits,
) {
    let (first, last) = (run.position, run.last(part.len()));
    let is_one_word = bits.words() == 1;
    if is_one_word && (run.step == 1 || part.len() == 1) {
        // positions, and so indices, ascend by 1: neither a division nor a branch
        let index = |position: i64| {
            position.saturating_sub(run.position).clamp(0, part.len() as i64) as u32
        };
        for row in rows {
            let within =
                |range: &Range<i64>| low_bits(index(range.end)) & !low_bits(index(range.start));
            let near = near(tile.ranges(row), first, last);
            let visible = near.fold(0, |bits, range| bits | within(range));
            bits.line_mut(row)[0] |= visible << part.start;
        }
        return;
    }
    for row in rows {
        for range in near(tile.ranges(row), first, last) {
            let within = indices_within(run, part.len(), range);
            if !within.is_empty() {
                bits.set(row, part.start + within.start..part.start + within.end);
            }
        }
    }
}

/// Iterates over the intervals that overlap the positions `first..=last`, and maybe others if there
/// are few.
fn near(ranges: &[Range<i64>], first: i64, last: i64) -> impl Iterator<Item = &Range<i64>> {
    let begin = match ranges.len() {
        0..=2 => 0,
        _ => ranges.partition_point(|range| range.end <= first),
    };
    ranges[begin..].iter().take_while(move |range| range.start <= last)
}

/// Returns a word with the lowest `count` bits set, at most 64.
const fn low_bits(count: u32) -> u64 {
    match 1u64.checked_shl(count) {
        Some(bit) => bit - 1,
        None => !0,
    }
}

/// Clears the set bits of `line` for which `visible` returns false.
fn retain(line: &mut [u64], visible: impl Fn(usize) -> bool) {
    for (index, word) in line.iter_mut().enumerate() {
        let mut left = *word;
        while left != 0 {
            let bit = left.trailing_zeros() as usize;
            left &= left - 1;
            if !visible(64 * index + bit) {
                *word &= !(1 << bit);
            }
        }
    }
}

/// Returns the 64 bits of `line` that start at bit `first`; bits beyond its end are 0.
fn word_at(line: &[u64], first: usize) -> u64 {
    let word = |index| line.get(index).copied().unwrap_or(0);
    match first % 64 {
        0 => word(first / 64),
        shift => word(first / 64) >> shift | word(first / 64 + 1) << (64 - shift),
    }
}

/// Returns the indices of the first `count` rows of a run whose positions are in `range`.
fn indices_within(run: &StridedRun, count: usize, range: &Range<i64>) -> Range<usize> {
    // number of rows with positions less than `end`; positions ascend
    let before = |end: i64| {
        let distance = end.saturating_sub(run.position);
        let rows = match run.step {
            _ if distance <= 0 => 0,
            1 => distance.unsigned_abs(),
            0 => u64::MAX,
            step => (distance.unsigned_abs() - 1) / step.unsigned_abs() + 1,
        };
        crate::index(rows.min(count as u64))
    };
    before(range.start)..before(range.end)
}

#[cfg(test)]
pub(crate) mod tests;
