//! Who sees whom between the queries of one rank and the keys of one block, tile by tile.
//!
//! [`Visibility::pair`] is the meaning: the spec's mask and the segment ids and the batch's dense mask. Everything else here gives the same answers
//! for whole tiles, cheaply. Per query tile, once: each row's [`KeyIntervals`], the hull of all (outside it: `Empty`) and the core common to all (inside it:
//! `Full`). Per key tile: hull and core against the bounds of the keys, a few comparisons; only where those do not decide are bits made, an
//! interval of a stretch of keys at a time, and counted.

use std::ops::Range;

use crate::{
    DenseMask, KeyIntervals, Mask, QueryTile, Rows, TileBits, TileClass,
    mask::{Key, Query},
    row_bounds::{GROUP, StridedRun},
    tile::{SeenBy, TileBounds},
};

/// The whole mask between the queries of one rank and the keys of one block.
#[derive(Debug, Clone, Copy)]
pub struct Visibility<'a> {
    /// The spec's mask.
    pub mask: &'a dyn Mask,
    /// The batch's dense mask: its query rows are the local ones, its key rows the global ones.
    pub attention_mask: Option<&'a DenseMask>,
    /// The query rows.
    pub queries: &'a Rows,
    /// The key rows.
    pub keys: &'a Rows,
}

impl Visibility<'_> {
    /// Whether local query row `q` sees key `k` of the block.
    pub fn pair(&self, batch: usize, head: usize, q: usize, k: usize) -> bool {
        let query = self.query(batch, head, q);
        let key = self.key(batch, k);
        let same_segment = match (self.queries.segments(batch), self.keys.segments(batch)) {
            (Some(of_query), Some(of_key)) => of_query[q] >= 0 && of_query[q] == of_key[k],
            _ => true,
        };
        let in_dense = |mask: &DenseMask| mask.visible(batch, head, q, crate::index(key.row));
        same_segment && self.mask.visible(&query, &key) && self.attention_mask.is_none_or(in_dense)
    }

    /// Whether heads see differently; if not, what holds for one head holds for all.
    pub fn per_head(&self) -> bool {
        self.mask.per_head() || self.attention_mask.is_some_and(|mask| mask.shape()[1] > 1)
    }

    /// Whether batch rows see differently; if not, what holds for one holds for all.
    pub fn per_batch(&self) -> bool {
        let dense = self.attention_mask.is_some_and(|mask| mask.shape()[0] > 1);
        self.mask.per_batch() || dense || self.queries.per_batch() || self.keys.per_batch()
    }

    /// Works out what the queries `rows` see. The tile then serves for every block of keys of the same batch.
    pub fn query_tile(&self, batch: usize, head: usize, rows: Range<usize>, into: &mut QueryTile) {
        into.batch = batch;
        into.head = head;
        into.rows = rows.clone();
        into.seen.clear();
        into.hull = TileBounds::default();
        into.core = KeyIntervals::everything();
        for q in rows {
            let (spans, opaque) = self.intervals(batch, head, q);
            let segment = self.segment(batch, q);
            match segment {
                Some(..0) => into.core = KeyIntervals::nothing(),
                _ => into.hull.add(&spans, segment),
            }
            into.core = if opaque {
                KeyIntervals::nothing()
            } else {
                into.core.and(&spans).unwrap_or(KeyIntervals::nothing())
            };
            // whether or not this block's keys have ids: the next block's may, where a rank without keys made the tile
            let segment = self.queries.segments(batch).map_or(0, |segments| segments[q]);
            into.seen.push(SeenBy { spans, opaque, segment });
        }
    }

    /// The class of `tile` × `keys`; `bits` are set if it is [`TileClass::Partial`] and mean nothing otherwise.
    pub fn classify(&self, tile: &QueryTile, keys: Range<usize>, bits: &mut TileBits) -> TileClass {
        if keys.is_empty() || tile.rows.is_empty() {
            return TileClass::Empty;
        }
        let extent = self.keys.outline(tile.batch).extent(&keys);
        if !tile.hull.meets(&extent) {
            return TileClass::Empty;
        }
        if self.attention_mask.is_none() && tile.sees_all(&extent) {
            return TileClass::Full;
        }
        bits.reset(tile.rows.len(), keys.len());
        self.set_spans(tile, keys.clone(), bits);
        let mut count = 0;
        for (row, seen) in tile.seen.iter().enumerate() {
            let line = bits.line_mut(row);
            if let Some(mask) = self.attention_mask {
                self.keep_dense(
                    mask.line(tile.batch, tile.head, tile.rows.start + row),
                    &keys,
                    line,
                );
            }
            if seen.opaque {
                let query = self.query(tile.batch, tile.head, tile.rows.start + row);
                keep(line, |key| {
                    self.mask.visible(&query, &self.key(tile.batch, keys.start + key))
                });
            }
            count += line.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        }
        match count {
            0 => TileClass::Empty,
            _ if count == tile.rows.len() * keys.len() => TileClass::Full,
            _ => TileClass::Partial,
        }
    }

    /// The key tiles `0..width, width..2·width, …` of which `tile` may see some, in order. Those left out are all [`TileClass::Empty`]; keys far
    /// outside are passed over 4096 at a time.
    pub fn key_tiles<'s>(
        &'s self,
        tile: &'s QueryTile,
        width: usize,
    ) -> impl Iterator<Item = Range<usize>> + 's {
        let (len, width) = (self.keys.len(), width.max(1));
        let mut start = 0;
        // the group that was last found to be worth a closer look
        let mut looked_at = None;
        std::iter::from_fn(move || {
            while start < len {
                let keys = start..len.min(start + width);
                let outline = self.keys.outline(tile.batch);
                let group = start / GROUP;
                let group_end = len.min((group + 1) * GROUP);
                if looked_at != Some(group) && keys.end <= group_end {
                    if !tile.hull.meets(&outline.group(group)) {
                        // the tile that lies across the group's end, if any, is looked at by itself
                        start = if group_end == len { len } else { group_end / width * width };
                        continue;
                    }
                    looked_at = Some(group);
                }
                start = keys.end;
                if tile.hull.meets(&outline.extent(&keys)) {
                    return Some(keys);
                }
            }
            None
        })
    }

    /// What the mask's lowering says of query `q`: key positions, and whether it sees only some among them.
    pub(crate) fn intervals(&self, batch: usize, head: usize, q: usize) -> (KeyIntervals, bool) {
        let query = self.query(batch, head, q);
        self.mask
            .intervals(&query)
            .map_or_else(|| (self.mask.bound(&query), true), |spans| (spans, false))
    }

    /// The segment id of query `q`, if segment ids count at all.
    pub(crate) fn segment(&self, batch: usize, q: usize) -> Option<i64> {
        self.keys.segments(batch).and(self.queries.segments(batch)).map(|segments| segments[q])
    }

    /// Sets the bits of the pairs that spans and segment ids allow.
    fn set_spans(&self, tile: &QueryTile, keys: Range<usize>, bits: &mut TileBits) {
        let segmented = self.segment(tile.batch, tile.rows.start).is_some();
        for (part, stretch) in self.keys.outline(tile.batch).stretches(keys.clone()) {
            let place = part.start - keys.start;
            for (row, seen) in tile.seen.iter().enumerate() {
                if segmented && (seen.segment != stretch.segment || seen.segment < 0) {
                    continue;
                }
                if part.len() == 1 {
                    // keys in disorder
                    bits.line_mut(row)[place / 64] |=
                        u64::from(seen.spans.contains(stretch.position)) << (place % 64);
                    continue;
                }
                for range in seen.spans.ranges() {
                    let within = indices_within(&stretch, part.len(), range);
                    if !within.is_empty() {
                        bits.set(row, place + within.start..place + within.end);
                    }
                }
            }
        }
    }

    /// Keeps in `line` only the keys that the dense mask's line allows.
    fn keep_dense(&self, dense: &[u64], keys: &Range<usize>, line: &mut [u64]) {
        let rows = &self.keys.rows()[keys.clone()];
        if self.keys.count_up(keys.clone()) {
            let first = crate::index(rows[0]);
            for (place, word) in line.iter_mut().enumerate() {
                *word &= word_at(dense, first + 64 * place);
            }
        } else {
            keep(line, |key| word_at(dense, crate::index(rows[key])) & 1 != 0);
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

/// Clears the bits of `line` of which `wanted` says no.
fn keep(line: &mut [u64], wanted: impl Fn(usize) -> bool) {
    for (place, word) in line.iter_mut().enumerate() {
        let mut left = *word;
        while left != 0 {
            let bit = left.trailing_zeros() as usize;
            left &= left - 1;
            if !wanted(64 * place + bit) {
                *word &= !(1 << bit);
            }
        }
    }
}

/// 64 bits of `line` from bit `first` on; 0 beyond its end.
fn word_at(line: &[u64], first: usize) -> u64 {
    let word = |place| line.get(place).copied().unwrap_or(0);
    match first % 64 {
        0 => word(first / 64),
        shift => word(first / 64) >> shift | word(first / 64 + 1) << (64 - shift),
    }
}

/// Which of the `count` rows of a stretch have positions within `range`.
fn indices_within(stretch: &StridedRun, count: usize, range: &Range<i64>) -> Range<usize> {
    // how many rows come before `end`
    let before = |end: i64| {
        let distance = end.saturating_sub(stretch.position);
        let rows = match stretch.step {
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
