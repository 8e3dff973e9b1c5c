//! How much there is to compute, and how evenly a layout deals it.

use super::Route;
use crate::{
    Coordinates, Mask,
    needs::{Classes, KeyIndex, Views},
};

/// Visible (query, key) pairs, summed over batch rows and heads, by the ranks that hold them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    /// `pairs[user][owner]`: queries of `user`, keys of `owner`.
    pub pairs: Vec<Vec<u64>>,
}

impl Work {
    /// Counts the pairs. Exact for masks that lower to spans; as tight as [`Mask::bound`] otherwise. Near linear in the rows.
    pub fn of(mask: &dyn Mask, heads: usize, batch: usize, coordinates: &Coordinates) -> Self {
        Self::of_sampled_queries(mask, heads, batch, coordinates, 1)
    }

    /// As [`Work::of`], letting every `stride`-th query of a run stand for those up to the next.
    pub(super) fn of_sampled_queries(mask: &dyn Mask, heads: usize, batch: usize, coordinates: &Coordinates, stride: usize) -> Self {
        let views = Views::new(mask, heads, batch, coordinates);
        let mut pairs = vec![vec![0u64; coordinates.kv.len()]; coordinates.q.len()];
        for batch in views.batches() {
            let mut classes = Classes::new(coordinates);
            let keys = KeyIndex::new(coordinates, batch, &mut classes);
            for (shard, pairs) in coordinates.q.iter().zip(&mut pairs) {
                for piece in classes.query_pieces(shard, batch) {
                    for head in views.heads() {
                        for index in (0..piece.count).step_by(stride) {
                            let queries = (piece.count - index).min(stride as u64) * views.repeats();
                            let seen = mask.bound(&piece.query(batch, head, index));
                            keys.count_by_rank(piece.class, &seen, |owner, keys| {
                                pairs[owner] = pairs[owner].saturating_add(keys.saturating_mul(queries));
                            });
                        }
                    }
                }
            }
        }
        Self { pairs }
    }

    /// Pairs of one rank's queries; 0 if there is no such rank.
    pub fn of_rank(&self, rank: usize) -> u64 {
        self.pairs.get(rank).map_or(0, |owners| owners.iter().fold(0, |sum: u64, &pairs| sum.saturating_add(pairs)))
    }

    /// Pairs that `rank` computes in step `step`; 0 if there is no such rank or step.
    pub fn of_step(&self, route: Route, rank: usize, step: usize) -> u64 {
        let ranks = self.pairs.len();
        if rank < ranks && step < ranks { self.pairs[rank][route.owner(rank, step, ranks)] } else { 0 }
    }

    /// Pairs of all ranks.
    pub fn total(&self) -> u64 {
        (0..self.pairs.len()).fold(0, |sum, rank| sum.saturating_add(self.of_rank(rank)))
    }

    /// The busiest rank's pairs over the mean of all ranks, at least 1; 1 where there is nothing to do.
    pub fn max_over_mean(&self) -> f64 {
        let most = (0..self.pairs.len()).map(|rank| self.of_rank(rank)).max().unwrap_or(0);
        if most == 0 { 1.0 } else { most as f64 * self.pairs.len() as f64 / self.total() as f64 }
    }
}
