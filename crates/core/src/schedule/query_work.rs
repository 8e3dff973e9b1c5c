//! Visible pairs of consecutive queries, as differences of sums over all queries before a row.
//!
//! ```text
//! before(row) = sum over batch rows of
//!                   pairs of the runs of queries before the run of `row`      (stored)
//!                 + pairs of the queries of that run before `row`             (closed form)
//! pairs of the queries start..end = before(end) - before(start)
//! ```
//! A run has queries of one segment at evenly spaced positions. Pairs of a run of a mask with a
//! [`Band`] have a closed form, so that `before` takes O(log runs) time. The pairs of other masks
//! are counted query by query, once, and their sums are stored. Where short chunks or tiles are
//! dealt, the sums before each tile are stored too: deals of shorter chunks, and exchanges of whole
//! tiles, read them again.

use std::{cell::OnceCell, ops::Range, sync::Arc};

use super::{tile_deal::TILE_ROWS, work::closed_form};
use crate::{
    Mask, Result, RingShards, Run, Spec, index,
    mask::Band,
    memory,
    needs::{DistinctMasks, KeyIndex, SegmentNumbers, StridedRows},
};

/// Pairs of all queries of a batch, which are on one rank.
pub(super) struct QueryWork {
    /// By distinct batch row.
    batches: Vec<BatchWork>,
    /// Heads and batch rows that each counted pair represents.
    repeats: u128,
    tiles: OnceCell<Tiles>,
}

/// Pairs and runs before the first row of each whole tile, and before the end of the last.
struct Tiles {
    /// [`QueryWork::before`].
    sums: Vec<u128>,
    /// Runs that begin before, by batch row.
    runs: Vec<Vec<usize>>,
}

/// Pairs of one batch row.
struct BatchWork {
    segments: SegmentNumbers,
    keys: KeyIndex,
    /// Bands of the distinct heads; of masks without a band none.
    bands: Vec<Band>,
    /// Ascending; padding is in no run.
    runs: Vec<StridedRows>,
    /// First row of each run.
    firsts: Vec<u64>,
    /// Pairs of all runs before each one.
    before: Vec<u128>,
    /// Pairs of the queries of each run before each one, and of all; no list if there is a closed
    /// form.
    sums: Vec<Vec<u128>>,
}

impl QueryWork {
    /// Counts the pairs. `whole` has all rows on one rank, in ascending order.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] of the sums of a mask without a band.
    pub(super) fn new(spec: &Spec, whole: &RingShards) -> Result<Self> {
        let mask = &*spec.mask;
        let distinct = DistinctMasks::new(mask, spec.dims.q_heads, spec.dims.batch, whole);
        let batches = distinct.batches().map(|batch| {
            let mut segments = SegmentNumbers::new(whole);
            let key_rows: Vec<Vec<StridedRows>> =
                whole.kv.iter().map(|shard| segments.key_rows(shard, batch)).collect();
            let keys = KeyIndex::of_owners(&key_rows, segments.len());
            let bands: Option<Vec<Band>> =
                distinct.heads().map(|head| mask.band(batch, head)).collect();
            let runs = match (whole.q.first(), whole.kv.first()) {
                // every id has keys
                (Some(q), Some(kv)) if Arc::ptr_eq(q, kv) => {
                    key_rows.into_iter().next().unwrap_or_default()
                }
                (Some(q), _) => segments.query_rows(q, batch),
                (None, _) => Vec::new(),
            };
            let mut work = BatchWork {
                segments,
                keys,
                bands: bands.unwrap_or_default(),
                firsts: runs.iter().map(|rows| rows.first).collect(),
                before: Vec::with_capacity(runs.len()),
                sums: Vec::new(),
                runs,
            };
            let mut before = 0;
            for (index, rows) in work.runs.iter().enumerate() {
                work.before.push(before);
                before += match work.closed_form(rows.segment, &rows.positions) {
                    Some(pairs) => pairs,
                    None => {
                        let sums = work.sums(mask, batch, &distinct, rows)?;
                        let of_run = sums.last().copied().unwrap_or(0);
                        work.sums.resize_with(index, Vec::new);
                        work.sums.push(sums);
                        of_run
                    }
                };
            }
            Ok(work)
        });
        Ok(Self {
            batches: batches.collect::<Result<_>>()?,
            repeats: distinct.repeats().into(),
            tiles: OnceCell::new(),
        })
    }

    /// Returns the keys of the first batch row, and the numbers of their segments.
    pub(super) fn first_keys(&self) -> Option<(&KeyIndex, &SegmentNumbers)> {
        self.batches.first().map(|batch| (&batch.keys, &batch.segments))
    }

    /// Returns the pairs of the queries of all rows before `row`.
    pub(super) fn before(&self, row: u64) -> u128 {
        if let Some(sum) = self.stored(row) {
            return sum;
        }
        let of = |(index, batch): (usize, &BatchWork)| {
            let near = self.near(row, index, batch.firsts.len());
            let within = batch.firsts[near.clone()].partition_point(|&first| first < row);
            batch.before(row, near.start + within)
        };
        self.batches.iter().enumerate().map(of).sum::<u128>() * self.repeats
    }

    /// Returns indices of the runs of a batch row between which the last one before `row` ends: of
    /// those that begin in its tile, if the runs before tiles are stored, else of all `runs`.
    fn near(&self, row: u64, batch: usize, runs: usize) -> Range<usize> {
        let Some(before) = self.tiles.get().and_then(|tiles| tiles.runs.get(batch)) else {
            return 0..runs;
        };
        let tile = index(row / TILE_ROWS);
        let at = |tile: usize| before.get(tile).copied().unwrap_or(runs);
        at(tile.min(before.len().saturating_sub(1)))..at(tile + 1)
    }

    /// Returns [`QueryWork::before`] of the first row of a tile, if the sums of tiles are stored.
    fn stored(&self, row: u64) -> Option<u128> {
        let tiles = self.tiles.get().filter(|_| row.is_multiple_of(TILE_ROWS))?;
        tiles.sums.get(index(row / TILE_ROWS)).copied()
    }

    /// Returns [`QueryWork::before`] of rows in ascending order, in time linear in rows and runs.
    pub(super) fn before_each(&self, rows: impl Iterator<Item = u64> + Clone) -> Vec<u128> {
        match rows.clone().map(|row| self.stored(row)).collect() {
            Some(stored) => stored,
            None => self.sums_of(rows, |_, _| ()),
        }
    }

    /// As [`QueryWork::before_each`], computed anew. Calls `found` with each batch row and the
    /// number of its runs that begin before each row.
    fn sums_of(
        &self,
        rows: impl Iterator<Item = u64> + Clone,
        mut found: impl FnMut(usize, usize),
    ) -> Vec<u128> {
        let mut sums = vec![0; rows.clone().count()];
        for (index, batch) in self.batches.iter().enumerate() {
            let mut after = 0;
            for (sum, row) in sums.iter_mut().zip(rows.clone()) {
                while batch.firsts.get(after).is_some_and(|&first| first < row) {
                    after += 1;
                }
                *sum += batch.before(row, after) * self.repeats;
                found(index, after);
            }
        }
        sums
    }

    /// Returns [`QueryWork::before`] of the first row of each whole tile of `rows` rows, and of the
    /// end of the last, and stores them.
    pub(super) fn before_tiles(&self, rows: u64) -> &[u128] {
        let tiles = rows / TILE_ROWS;
        let compute = || {
            let edges = (0..=tiles).map(|tile| tile * TILE_ROWS);
            let list = |_: &BatchWork| Vec::with_capacity(index(tiles) + 1);
            let mut runs: Vec<Vec<usize>> = self.batches.iter().map(list).collect();
            let sums = self.sums_of(edges, |batch, before| runs[batch].push(before));
            Tiles { sums, runs }
        };
        &self.tiles.get_or_init(compute).sums
    }

    /// Returns the pairs of the queries of some rows.
    pub(super) fn between(&self, rows: &Range<u64>) -> u128 {
        self.before(rows.end) - self.before(rows.start)
    }
}

impl BatchWork {
    /// Returns the pairs of the queries before `row`, which is after the first row of `after` runs.
    fn before(&self, row: u64, after: usize) -> u128 {
        let Some(last) = after.checked_sub(1) else { return 0 };
        let run = &self.runs[last];
        let count = (row - run.first).min(run.count);
        let of_run = match self.sums.get(last).and_then(|sums| sums.get(index(count))) {
            Some(&sum) => sum,
            None => {
                let positions = Run { count, ..run.positions };
                self.closed_form(run.segment, &positions).unwrap_or(0)
            }
        };
        self.before[last] + of_run
    }

    /// Counts the pairs of the queries of a segment at `positions` in closed form. `None` if there
    /// is none, whatever the number of queries.
    fn closed_form(&self, segment: usize, positions: &Run) -> Option<u128> {
        if self.bands.is_empty() {
            return None;
        }
        let pairs = |band| closed_form(band, &self.keys, segment, positions);
        self.bands.iter().try_fold(0, |sum, band| Some(sum + pairs(band)?))
    }

    /// Counts the pairs of `rows` query by query. Returns the sums before each one, and of all.
    fn sums(
        &self,
        mask: &dyn Mask,
        batch: usize,
        distinct: &DistinctMasks,
        rows: &StridedRows,
    ) -> Result<Vec<u128>> {
        let mut sums = memory::list("sums of visible pairs", index(rows.count).saturating_add(1))?;
        let mut sum = 0;
        sums.push(sum);
        for query in 0..rows.count {
            for head in distinct.heads() {
                let bound = mask.bound(&rows.query(batch, head, query));
                sum += u128::from(self.keys.count(rows.segment, bound.ranges()));
            }
            sums.push(sum);
        }
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        Batch, CustomLayout, DType, Dims, Layout, Runs, Work,
        mask::{self, SharedMask},
        needs::samples::Sample,
    };

    fn masks() -> Vec<SharedMask> {
        let causal: SharedMask = Arc::new(mask::Causal::default());
        let window = mask::and(causal.clone(), Arc::new(mask::Window::new(Some(9), None)));
        let samples = [Sample::Full, Sample::PerHead, Sample::PerBatch, Sample::Parity];
        let samples = samples.map(|sample| Arc::new(sample) as SharedMask);
        [causal, window, Arc::new(mask::Prefix { len: 7 })].into_iter().chain(samples).collect()
    }

    proptest! {
        #[test]
        fn differences_are_the_work_of_a_rank_with_the_rows(
            lens in prop::collection::vec(0i64..40, 1..6),
            padding in 0usize..20,
            cut in any::<prop::sample::Index>(),
            with_ids in any::<bool>(),
        ) {
            let ends: Vec<i64> = std::iter::once(0)
                .chain(lens.iter().scan(0, |end, len| { *end += len; Some(*end) }))
                .collect();
            let len = lens.iter().sum::<i64>() as usize + padding;
            let ids = ndarray::Array2::from_shape_fn((2, len), |(b, row)| {
                (row as i32 + 5 * b as i32) / 20 - 1
            });
            let batch = if with_ids {
                Batch { q_segment_ids: Some(ids), ..Batch::default() }
            } else {
                Batch { cum_seqlens_q: Some(ends), ..Batch::default() }
            };
            let dims = Dims::new(2, len, 3, 1);
            let cut = cut.index(len + 1) as u64;
            for mask in masks() {
                let spec = Spec { mask, ..Spec::new(dims, DType::F32) };
                let whole =
                    RingShards::of_batch(&dims, spec.alignment, &Layout::Contiguous, 1, &batch);
                let whole = whole.unwrap();
                let work = QueryWork::new(&spec, &whole).unwrap();
                let queries = |rows: std::ops::Range<u64>| {
                    Runs::counting(rows.start.cast_signed(), rows.end - rows.start)
                };
                let layout = Layout::Custom(Arc::new(CustomLayout {
                    q: vec![queries(0..cut), queries(cut..len as u64)],
                    kv: vec![queries(0..cut), queries(cut..len as u64)],
                }));
                let shards = RingShards::of_batch(&dims, spec.alignment, &layout, 2, &batch);
                let want = Work::of(&*spec.mask, dims.q_heads, dims.batch, &shards.unwrap());
                prop_assert_eq!(work.before(0), 0);
                prop_assert_eq!(work.before(cut), want.of_rank(0), "{:?}", &spec.mask);
                prop_assert_eq!(work.before(len as u64), want.total());
                let each: Vec<u128> = (0..=len as u64).map(|row| work.before(row)).collect();
                prop_assert_eq!(work.before_each(0..=len as u64), each.clone());
                // sums of tiles are the same when they are stored
                let tiles: Vec<u128> = each.iter().copied().step_by(64).collect();
                prop_assert_eq!(work.before_tiles(len as u64), tiles);
                prop_assert!((0..=len as u64).all(|row| work.before(row) == each[row as usize]));
            }
        }
    }
}
