//! Visible pairs of each rank, and the load balance of a layout.

use super::Route;
use crate::{
    Mask, RingShards,
    needs::{DistinctMasks, KeyIndex, SegmentNumbers},
};

/// Numbers of visible (query, key) pairs, summed over batch rows and heads, for each pair of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    /// `pairs[user][owner]`: queries of `user`, keys of `owner`. No sum overflows:
    /// [`Dims::validate`] keeps batch · heads · length below 2⁵⁹ on each side, so all pairs are
    /// fewer than 2¹¹⁸.
    ///
    /// [`Dims::validate`]: crate::Dims::validate
    pub pairs: Vec<Vec<u128>>,
}

impl Work {
    /// Counts the pairs: exactly for masks that lower to [`crate::KeyIntervals`], otherwise all
    /// pairs within [`Mask::bound`]. The time is almost linear in the rows.
    pub fn of(mask: &dyn Mask, heads: usize, batch: usize, shards: &RingShards) -> Self {
        Self::of_sampled_queries(mask, heads, batch, shards, 1)
    }

    /// As [`Work::of`], but evaluates the mask only for every `stride`-th query of a run, which
    /// represents the queries up to the next.
    pub(super) fn of_sampled_queries(
        mask: &dyn Mask,
        heads: usize,
        batch: usize,
        shards: &RingShards,
        stride: usize,
    ) -> Self {
        let distinct = DistinctMasks::new(mask, heads, batch, shards);
        let mut pairs = vec![vec![0u128; shards.kv.len()]; shards.q.len()];
        for batch in distinct.batches() {
            let mut segments = SegmentNumbers::new(shards);
            let keys = KeyIndex::new(shards, batch, &mut segments);
            for (shard, pairs) in shards.q.iter().zip(&mut pairs) {
                for rows in segments.query_rows(shard, batch) {
                    for head in distinct.heads() {
                        for index in (0..rows.count).step_by(stride) {
                            let queries = u128::from((rows.count - index).min(stride as u64))
                                * u128::from(distinct.repeats());
                            let intervals = mask.bound(&rows.query(batch, head, index));
                            keys.count_by_rank(rows.segment, &intervals, |owner, keys| {
                                pairs[owner] += u128::from(keys) * queries;
                            });
                        }
                    }
                }
            }
        }
        Self { pairs }
    }

    /// Returns the pairs of one rank's queries; 0 if it is outside the ring.
    pub fn of_rank(&self, rank: usize) -> u128 {
        self.pairs.get(rank).map_or(0, |owners| owners.iter().sum())
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

    /// Returns the pairs of all ranks.
    pub fn total(&self) -> u128 {
        self.pairs.iter().flatten().sum()
    }

    /// Returns the most pairs of any rank, divided by the mean over all ranks: 1 if the work is
    /// balanced perfectly, or if there are no pairs.
    pub fn max_over_mean(&self) -> f64 {
        let most = (0..self.pairs.len()).map(|rank| self.of_rank(rank)).max().unwrap_or(0);
        if most == 0 { 1.0 } else { most as f64 * self.pairs.len() as f64 / self.total() as f64 }
    }
}
