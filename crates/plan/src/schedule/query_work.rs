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
//! are counted query by query, once, and their sums are stored.

use std::{ops::Range, sync::Arc};

use super::work::closed_form;
use crate::{
    RingShards,
    needs::{DistinctMasks, KeyIndex, SegmentNumbers, StridedRows},
};
use annulus_core::{Mask, Result, Run, Spec, index, mask::Band, memory};

/// Pairs of all queries of a batch, which are on one rank.
pub(super) struct QueryWork {
    /// By distinct batch row.
    batches: Vec<BatchWork>,
    /// Heads and batch rows that each counted pair represents.
    repeats: u128,
}

/// Pairs of units of rows, which are single rows or leaves.
pub(super) struct UnitWork<'a> {
    pub(super) pairs: &'a QueryWork,
    /// Rows of a unit.
    pub(super) unit: u64,
    /// All rows; the last unit may lack some.
    pub(super) rows: u64,
}

impl UnitWork<'_> {
    /// Returns the number of units.
    pub(super) const fn units(&self) -> u64 {
        self.rows.div_ceil(self.unit)
    }

    /// Returns the first row of a unit, or the end of all rows.
    pub(super) fn row(&self, unit: u64) -> u64 {
        unit.saturating_mul(self.unit).min(self.rows)
    }

    /// Returns the pairs of the queries of all units before `unit`.
    pub(super) fn before(&self, unit: u64) -> u128 {
        self.pairs.before(self.row(unit))
    }

    /// Returns the pairs of the queries of some units.
    pub(super) fn between(&self, units: &Range<u64>) -> u128 {
        if units.is_empty() { 0 } else { self.before(units.end) - self.before(units.start) }
    }
}

/// Pairs of one batch row.
struct BatchWork {
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
    /// [`annulus_core::Error::OutOfMemory`] of the sums of a mask without a band.
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
        Ok(Self { batches: batches.collect::<Result<_>>()?, repeats: distinct.repeats().into() })
    }

    /// Returns the pairs of the queries of all rows before `row`.
    pub(super) fn before(&self, row: u64) -> u128 {
        let of = |batch: &BatchWork| {
            batch.before(row, batch.firsts.partition_point(|&first| first < row))
        };
        self.batches.iter().map(of).sum::<u128>() * self.repeats
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
    use crate::{CustomLayout, Layout, Work, needs::tests::Sample};
    use annulus_core::{
        Batch, DType, Dims, Runs,
        mask::{self, SharedMask},
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
            }
        }
    }
}
