//! Visible pairs of each rank, and the load balance of a layout.

use std::sync::Arc;

use super::Route;
use crate::{
    RingShards,
    needs::{ConsecutiveKeys, DistinctMasks, KeyIndex, SegmentNumbers, StridedRows, ascending},
};
use annulus_core::{Dims, Mask, Run, Spec, mask::Band};

/// Number of evaluations of a mask after which `tick` is called, as for the needs.
const EVALUATIONS_PER_TICK: u64 = 64;

/// Numbers of visible (query, key) pairs of each rank's queries, summed over batch rows and heads.
///
/// No sum overflows: [`Dims::validate`] keeps batch · heads · length below 2⁵⁹ on each side, so all
/// pairs are fewer than 2¹¹⁸.
///
/// [`Dims::validate`]: annulus_core::Dims::validate
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    pairs: Vec<u128>,
}

impl Work {
    /// Most queries (× heads and batch rows with masks of their own) for which the visible keys are
    /// counted; longer sequences are sampled at equal distances. Fewer than for the needs, because
    /// the number of visible keys changes less from one query to the next than the sets of needed
    /// rows.
    pub(super) const SAMPLES: usize = 1 << 14;

    /// Counts the pairs: exactly for masks that lower to [`annulus_core::KeyIntervals`], otherwise
    /// all pairs within [`Mask::bound`]. The time is almost linear in the runs for masks with a
    /// [`Band`] over runs of consecutive keys, and in the rows for others.
    pub fn of(mask: &dyn Mask, heads: usize, batch: usize, shards: &RingShards) -> Self {
        Self::of_sampled_queries(mask, heads, batch, shards, 1, &mut || ())
    }

    /// As [`Work::of`], but where pairs are counted query by query, only for every `stride`-th
    /// query of a run, which represents the queries up to the next. Calls `tick` after each rank,
    /// and within a rank after every few queries.
    pub(super) fn of_sampled_queries(
        mask: &dyn Mask,
        heads: usize,
        batch: usize,
        shards: &RingShards,
        stride: usize,
        tick: &mut dyn FnMut(),
    ) -> Self {
        let distinct = DistinctMasks::new(mask, heads, batch, shards);
        let mut pairs = vec![0u128; shards.q.len()];
        for batch in distinct.batches() {
            let mut segments = SegmentNumbers::new(shards);
            let keys = KeyIndex::of_batch(shards, batch, &mut segments);
            for (shard, pairs) in shards.q.iter().zip(&mut pairs) {
                for rows in segments.query_rows(shard, batch) {
                    for head in distinct.heads() {
                        let counted =
                            sampled_pairs(mask, [batch, head], &keys, &rows, stride, tick);
                        *pairs += counted * u128::from(distinct.repeats());
                    }
                }
                tick();
            }
        }
        Self { pairs }
    }

    /// As [`Work::of`], but estimated from at most [`Work::SAMPLES`] queries at equal distances,
    /// each of which represents the queries up to the next.
    pub(crate) fn estimate(spec: &Spec, shards: &RingShards, tick: &mut dyn FnMut()) -> Self {
        let stride = stride(spec, Work::SAMPLES);
        let Dims { q_heads, batch, .. } = spec.dims;
        Self::of_sampled_queries(spec.mask.as_ref(), q_heads, batch, shards, stride, tick)
    }

    /// Returns the pairs of one rank's queries; 0 if it is outside the ring.
    pub fn of_rank(&self, rank: usize) -> u128 {
        self.pairs.get(rank).copied().unwrap_or(0)
    }

    /// Returns the pairs of the rank that has the most.
    pub(crate) fn most(&self) -> u128 {
        self.pairs.iter().copied().max().unwrap_or(0)
    }

    /// Returns the pairs of all ranks.
    pub fn total(&self) -> u128 {
        self.pairs.iter().sum()
    }

    /// Returns the most pairs of any rank, divided by the mean over all ranks: 1 if the work is
    /// balanced perfectly, or if there are no pairs.
    pub fn max_over_mean(&self) -> f64 {
        let most = self.most();
        if most == 0 { 1.0 } else { most as f64 * self.pairs.len() as f64 / self.total() as f64 }
    }
}

/// Counts the pairs of `rows` in one batch row and head: in closed form, or from every `stride`-th
/// query, which represents the queries up to the next.
fn sampled_pairs(
    mask: &dyn Mask,
    [batch, head]: [usize; 2],
    keys: &KeyIndex,
    rows: &StridedRows,
    stride: usize,
    tick: &mut dyn FnMut(),
) -> u128 {
    let band = mask.band(batch, head);
    let counted = band.and_then(|band| closed_form(&band, keys, rows.segment, &rows.positions));
    counted.unwrap_or_else(|| {
        let mut sum = 0;
        for_each_sample(rows.count, stride, tick, |queries, index| {
            let bound = mask.bound(&rows.query(batch, head, index));
            let keys = keys.count(rows.segment, bound.ranges());
            sum += u128::from(keys) * u128::from(queries);
        });
        sum
    })
}

/// Counts the pairs of the queries of a segment at `positions` without a loop over them, if band
/// and keys permit it. Whether they do does not depend on the number of queries.
pub(super) fn closed_form(
    band: &Band,
    keys: &KeyIndex,
    segment: usize,
    positions: &Run,
) -> Option<u128> {
    let keys = keys.consecutive(segment)?;
    let positions = ascending(positions);
    // the common case: the keys of a segment are one run
    if let (Some(run), None) = (keys.positions(0), keys.positions(1))
        && let Some(pairs) = band.count_pairs(&positions, &run)
    {
        return Some(pairs);
    }
    closed_form_of_runs(band, &keys, &positions)
}

/// As [`closed_form`], of keys in several runs and queries at ascending positions. It is not
/// inlined, so that few registers are saved where it is not called.
///
/// Both ends of a band ascend with the query. Runs of keys between the last query's begin and the
/// first query's end are visible to all queries, and those outside the first query's begin and the
/// last query's end to none. Only the others are counted one by one; or, if they are more than the
/// queries (strided queries over keys with gaps), the keys of each query.
#[inline(never)]
fn closed_form_of_runs(band: &Band, keys: &ConsecutiveKeys<'_>, positions: &Run) -> Option<u128> {
    let first = band.at(positions.start);
    let last = band.at(positions.at(positions.count - 1));
    let begin = keys.partition_point(|run| run.end <= first.start);
    let end = keys.partition_point(|run| run.start < last.end).max(begin);
    let begin_of_full = keys.partition_point(|run| run.start < last.start).clamp(begin, end);
    let end_of_full = keys.partition_point(|run| run.end <= first.end).clamp(begin_of_full, end);
    let full = u128::from(keys.count(begin_of_full..end_of_full)) * u128::from(positions.count);
    let mut partial = (begin..begin_of_full).chain(end_of_full..end);
    let runs = begin_of_full - begin + end - end_of_full;
    if runs as u64 <= positions.count {
        return partial.try_fold(full, |sum, run| {
            Some(sum + band.count_pairs(positions, &keys.positions(run)?)?)
        });
    }
    let of_query = |index| {
        let interval = band.at(positions.at(index));
        u128::from(keys.count_below(begin..end, interval.end))
            - u128::from(keys.count_below(begin..end, interval.start))
    };
    band.has_closed_form().then(|| (0..positions.count).map(of_query).sum())
}

/// Calls `found(queries, index)` for every `stride`-th of `count` queries, which represents
/// `queries` of them, and `tick` after every few.
fn for_each_sample(
    count: u64,
    stride: usize,
    tick: &mut dyn FnMut(),
    mut found: impl FnMut(u64, u64),
) {
    for (evaluated, index) in (0..count).step_by(stride).enumerate() {
        found((count - index).min(stride as u64), index);
        if (evaluated as u64 + 1).is_multiple_of(EVALUATIONS_PER_TICK) {
            tick();
        }
    }
}

/// Numbers of visible (query, key) pairs of each pair of ranks, for figures of few ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkMatrix {
    /// `pairs[user][owner]`: queries of `user`, keys of `owner`.
    pub pairs: Vec<Vec<u128>>,
}

impl WorkMatrix {
    /// Counts the pairs as [`Work::of`], of the keys of one rank after another.
    pub fn of(mask: &dyn Mask, heads: usize, batch: usize, shards: &RingShards) -> Self {
        let mut pairs = vec![Vec::with_capacity(shards.kv.len()); shards.q.len()];
        for keys in &shards.kv {
            let of_owner = RingShards { q: shards.q.clone(), kv: vec![Arc::clone(keys)] };
            let work = Work::of(mask, heads, batch, &of_owner);
            pairs.iter_mut().zip(work.pairs).for_each(|(pairs, count)| pairs.push(count));
        }
        Self { pairs }
    }

    /// Returns the pairs that `rank` computes in step `step`; 0 if there is no such rank or step.
    pub fn of_step(&self, route: Route, rank: usize, step: usize) -> u128 {
        let ranks = self.pairs.len();
        if rank < ranks && step < ranks {
            self.pairs[rank][route.owner(rank, step, ranks)]
        } else {
            0
        }
    }
}

/// Returns the distance of queries of which at most `samples` are evaluated.
pub(super) fn stride(spec: &Spec, samples: usize) -> usize {
    let mask = &*spec.mask;
    let distinct_masks = if mask.per_head() { spec.dims.q_heads } else { 1 }
        * if mask.per_batch() { spec.dims.batch } else { 1 };
    spec.dims.q_len.saturating_mul(distinct_masks).div_ceil(samples).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_represent_all_queries_once() {
        for (count, stride) in (0..20).flat_map(|count| (1..8).map(move |stride| (count, stride))) {
            let mut next = 0;
            for_each_sample(count, stride, &mut || (), |queries, index| {
                assert_eq!(index, next, "{count} by {stride}");
                next += queries;
            });
            assert_eq!(next, count, "by {stride}");
        }
    }
}
