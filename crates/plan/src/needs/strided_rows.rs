//! Shards divided into rows of one segment with evenly spaced positions, which the needs are
//! computed from without a list of all rows.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    ops::Range,
};

use annulus_core::{Mask, Run, Runs, Shard, index, mask::Query};

use crate::RingShards;

/// Consecutive local rows of one segment whose row numbers and positions are arithmetic runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StridedRows {
    /// First local row.
    pub(crate) first: u64,
    /// Number of rows, at least 1.
    pub(crate) count: u64,
    /// Row numbers in the unsharded sequence.
    pub(crate) rows: Run,
    /// Positions of the rows.
    pub(crate) positions: Run,
    /// Segment number ([`SegmentNumbers`]): queries attend only to keys of the same segment.
    pub(crate) segment: usize,
}

impl StridedRows {
    /// Returns the query at `index` of these rows.
    pub(crate) const fn query(&self, batch: usize, head: usize, index: u64) -> Query {
        Query {
            batch,
            head,
            row: self.rows.at(index).cast_unsigned(),
            position: self.positions.at(index),
        }
    }

    /// Returns the local rows at `indices` in ascending order of positions.
    pub(crate) const fn local(&self, indices: Range<u64>) -> Range<u64> {
        if self.positions.step < 0 {
            let end = self.first + self.count;
            end - indices.end..end - indices.start
        } else {
            self.first + indices.start..self.first + indices.end
        }
    }
}

/// Heads and batch rows for which the mask must be evaluated. If heads (or batch rows) do not
/// differ, the first represents all.
pub(crate) struct DistinctMasks {
    heads: usize,
    batch: usize,
    repeats: u64,
}

impl DistinctMasks {
    pub(crate) fn new(mask: &dyn Mask, heads: usize, batch: usize, shards: &RingShards) -> Self {
        let mut all = shards.q.iter().chain(&shards.kv);
        let per_batch = mask.per_batch() || all.any(|shard| shard.differs_between_batch_rows());
        let distinct_heads = if mask.per_head() { heads } else { heads.min(1) };
        let distinct_batch = if per_batch { batch } else { batch.min(1) };
        let repeats = heads.saturating_mul(batch) as u64
            / distinct_heads.saturating_mul(distinct_batch).max(1) as u64;
        Self { heads: distinct_heads, batch: distinct_batch, repeats }
    }

    /// Returns the number of pairs of a head and a batch row that each evaluated pair represents.
    pub(crate) const fn repeats(&self) -> u64 {
        self.repeats
    }

    pub(crate) const fn heads(&self) -> Range<usize> {
        0..self.heads
    }

    pub(crate) const fn batches(&self) -> Range<usize> {
        0..self.batch
    }

    /// Returns the batch rows one by one if they differ in their keys; otherwise all at once.
    pub(crate) fn parts(&self, keys_differ: bool) -> impl Iterator<Item = Range<usize>> {
        let size = if keys_differ { 1 } else { self.batch.max(1) };
        self.batches().step_by(size).map(move |batch| batch..batch + size)
    }
}

/// Dense numbers for the segment ids of one batch row. With one set of keys, only ids of keys have
/// one, because queries of other ids attend to no key.
pub(crate) struct SegmentNumbers {
    /// `None` if one side has no ids: then all rows are in segment 0.
    of_id: Option<IdNumbers>,
}

impl SegmentNumbers {
    pub(crate) fn new(shards: &RingShards) -> Self {
        let ids = |shards: &[std::sync::Arc<Shard>]| {
            shards.iter().any(|shard| !shard.segments.is_empty())
        };
        // ids of queries without keys have no number
        let lists = || shards.kv.iter().flat_map(|shard| &shard.segments);
        let numbers = || IdNumbers::of_lists(lists());
        Self { of_id: (ids(&shards.q) && ids(&shards.kv)).then(numbers) }
    }

    /// Returns the number of segments in the key shards passed so far.
    pub(crate) fn len(&self) -> usize {
        self.of_id.as_ref().map_or(1, IdNumbers::len)
    }

    /// Returns the keys of `shard` that are not padding, and assigns numbers to their ids.
    pub(crate) fn key_rows(&mut self, shard: &Shard, batch: usize) -> Vec<StridedRows> {
        let of_id = &mut self.of_id;
        strided_rows(shard, batch, of_id.is_some(), |id| {
            Some(of_id.as_mut().map_or(0, |of_id| of_id.number(id)))
        })
    }

    /// Returns the queries of `shard` for whose ids there are keys.
    pub(crate) fn query_rows(&self, shard: &Shard, batch: usize) -> Vec<StridedRows> {
        strided_rows(shard, batch, self.of_id.is_some(), |id| {
            self.of_id.as_ref().map_or(Some(0), |of_id| of_id.get(id))
        })
    }
}

/// Divides a shard wherever a run of row numbers, positions or ids ends. Omits rows with a negative
/// id or without a segment number.
fn strided_rows(
    shard: &Shard,
    batch: usize,
    with_ids: bool,
    mut segment_of: impl FnMut(i64) -> Option<usize>,
) -> Vec<StridedRows> {
    fn list(lists: &[Runs], batch: usize) -> &[Run] {
        let batch = if lists.len() > 1 { batch } else { 0 };
        lists.get(batch).map(Runs::runs).unwrap_or_default()
    }
    let same_id = [Run { start: 0, step: 0, count: shard.rows.len() }];
    let mut rows = RunCursor::new(shard.rows.runs());
    let mut positions = RunCursor::new(list(&shard.positions, batch));
    let mut ids = RunCursor::new(if with_ids { list(&shard.segments, batch) } else { &same_id });
    let mut all = Vec::with_capacity(
        [&rows, &positions, &ids].map(|of| of.runs.len()).into_iter().max().unwrap_or(0),
    );
    let mut first = 0;
    let mut last = None;
    while let (Some(row), Some(position), Some(id)) = (rows.rest(), positions.rest(), ids.rest()) {
        let count = row.count.min(position.count).min(if id.step == 0 { id.count } else { 1 });
        // neighbours mostly share their id: cache the last look-up
        let segment = match last {
            Some((before, segment)) if before == id.start => segment,
            _ if id.start < 0 => None,
            _ => segment_of(id.start),
        };
        last = Some((id.start, segment));
        if let Some(segment) = segment {
            all.push(StridedRows {
                first,
                count,
                rows: Run { count, ..row },
                positions: Run { count, ..position },
                segment,
            });
        }
        first += count;
        rows.skip(count);
        positions.skip(count);
        ids.skip(count);
    }
    all
}

/// A cursor over a list of runs.
struct RunCursor<'a> {
    /// The current run and those after it.
    runs: &'a [Run],
    /// Numbers of the current run before the cursor.
    used: u64,
}

impl<'a> RunCursor<'a> {
    const fn new(runs: &'a [Run]) -> Self {
        Self { runs, used: 0 }
    }

    /// Returns the rest of the current run; `None` at the end of the list.
    fn rest(&self) -> Option<Run> {
        self.runs.first().map(|run| Run {
            start: run.at(self.used),
            step: run.step,
            count: run.count - self.used,
        })
    }

    /// Advances by `count`, at most to the end of the current run.
    fn skip(&mut self, count: u64) {
        self.used += count;
        if self.runs.first().is_some_and(|run| run.count == self.used) {
            self.runs = &self.runs[1..];
            self.used = 0;
        }
    }
}

/// Returns the number of elements less than `bound` in an ascending or constant run.
pub(crate) fn count_below(run: &Run, bound: i64) -> u64 {
    if bound <= run.start {
        return 0;
    }
    // bound > start, so the wrapped difference is exact as an unsigned number
    let distance = bound.wrapping_sub(run.start).cast_unsigned();
    match run.step.cast_unsigned() {
        0 => run.count,
        1 => distance.min(run.count),
        step => distance.div_ceil(step).min(run.count),
    }
}

// Dense numbers for segment ids, in the order in which they are first looked up.
//
// Ids of packed documents are 0, 1, 2, …, so that a table by id has few entries without a number,
// and a look-up is one access. Other ids are in a hash table.

/// Entries of the table for each id, at most.
const ENTRIES_PER_ID: u64 = 4;

/// Entry of an id without a number.
const NONE: usize = usize::MAX;

/// Numbers of segment ids.
#[derive(Default)]
pub(super) struct IdNumbers {
    /// Numbers of the ids below its length.
    of_small: Vec<usize>,
    /// Numbers of the other ids.
    of_others: HashMap<i64, usize, BuildHasherDefault<IdHasher>>,
    count: usize,
}

impl IdNumbers {
    /// Creates numbers for ids, of which most are in `lists`.
    pub(crate) fn of_lists<'a>(lists: impl Iterator<Item = &'a Runs>) -> Self {
        let mut ids = 0;
        let mut end = 0;
        let mut add = |run: &Run| {
            let (count, largest) = match run.step {
                0 => (1, run.start),
                _ => (run.count, run.start.max(run.at(run.count - 1))),
            };
            ids += count;
            // padding, whose ids are negative, has no number
            end = end.max(largest.saturating_add(1).max(0).cast_unsigned());
        };
        lists.for_each(|list| list.runs().iter().filter(|run| run.count > 0).for_each(&mut add));
        let is_dense = end / ENTRIES_PER_ID <= ids;
        let of_small = if is_dense { vec![NONE; index(end)] } else { Vec::new() };
        Self { of_small, ..Self::default() }
    }

    /// Returns the number of ids that have a number.
    pub(crate) const fn len(&self) -> usize {
        self.count
    }

    /// Returns the number of an id; `None` if it has none.
    pub(crate) fn get(&self, id: i64) -> Option<usize> {
        match self.index(id) {
            Some(index) => Some(self.of_small[index]).filter(|&number| number != NONE),
            None => self.of_others.get(&id).copied(),
        }
    }

    /// Returns the number of an id, the next one if it has none.
    #[inline]
    pub(crate) fn number(&mut self, id: i64) -> usize {
        let next = self.count;
        let number = match self.index(id) {
            Some(index) => {
                let number = &mut self.of_small[index];
                if *number == NONE {
                    *number = next;
                }
                *number
            }
            None => *self.of_others.entry(id).or_insert(next),
        };
        if number == next {
            self.count += 1;
        }
        number
    }

    /// Returns the index of an id in the table.
    fn index(&self, id: i64) -> Option<usize> {
        usize::try_from(id).ok().filter(|&id| id < self.of_small.len())
    }
}

/// Hash function of segment ids: a multiplication, because a plan looks up thousands of them.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_i64(byte.into()));
    }

    fn write_i64(&mut self, id: i64) {
        // Fibonacci hashing; the table uses the high bits and the low bits
        let product = (self.0 ^ id.cast_unsigned()).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_numbered_in_the_order_of_their_look_ups() {
        let run = |start, step, count| Run { start, step, count };
        let dense = vec![run(0, 1, 4), run(4, 0, 9), run(-1, 0, 3), run(9, 0, 1)];
        for (runs, entries) in [
            (dense.clone(), 10),
            (vec![run(3, -1, 4)], 4),
            // too few ids for a table, and none
            (vec![run(0, 0, 5), run(100, 0, 1)], 0),
            (vec![run(i64::MAX, 0, 1)], 0),
            (vec![run(-1, 0, 7)], 0),
            (Vec::new(), 0),
        ] {
            let mut list = Runs::new();
            runs.iter().for_each(|&run| list.push_run(run));
            let mut numbers = IdNumbers::of_lists([&list].into_iter());
            assert_eq!(numbers.of_small.len(), entries, "{runs:?}");
            // also ids that are in no list
            for (number, id) in [7, 0, i64::MAX, 100, 9, -5].into_iter().enumerate() {
                assert_eq!((numbers.get(id), numbers.len()), (None, number));
                assert_eq!(numbers.number(id), number);
                assert_eq!((numbers.number(id), numbers.get(id)), (number, Some(number)));
            }
            assert_eq!(numbers.len(), 6);
        }
    }
}
