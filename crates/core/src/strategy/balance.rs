//! Balance of work and rows under a strategy, and the share of the rows sent that ranks need.
//!
//! ```text
//! work        pairs of the busiest rank / mean over ranks
//! rows        rows of the longest shard / mean over ranks, of queries or keys
//! redundancy  block rows that all rings send in a forward pass / rows that their ranks need
//! ```
//! The rings over groups of a grid depend on the grid: a group has the rows of its members, so that
//! documents that a ring divides may be whole in a group. The exchange within a group is not part
//! of the redundancy: its bytes depend on the number of rows alone.

use super::{RingRows, StrategyTraffic};
use crate::{Result, RingShards, Side, Spec, TrafficOptions, Work};

/// Balance of a strategy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StrategyBalance {
    /// Visible pairs of the busiest rank divided by the mean; 1 if there are none. Masks without a
    /// [`Band`](crate::mask::Band), and layouts without runs of consecutive rows, are estimated
    /// from 16,384 queries.
    pub work_max_over_mean: f64,
    /// Rows of the longest shard divided by the mean, of queries or keys; 1 if there are none.
    pub rows_max_over_mean: f64,
    /// Block rows that all rings send in a forward pass, divided by the rows that their ranks need
    /// of each other; 1 if they need none.
    pub redundancy: f64,
}

impl StrategyTraffic {
    /// Computes the balance. `options` are those with which the traffic was computed. Calls `tick`
    /// between steps of a long computation.
    ///
    /// # Errors
    /// As [`StrategyTraffic::of`].
    pub fn balance(
        &self,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<StrategyBalance> {
        let work =
            work_of_ranks(self, spec, options, |spec, shards| Work::estimate(spec, shards, tick))?;
        let max_over_mean = |of: &[u128]| {
            let total: u128 = of.iter().sum();
            let most = of.iter().copied().max().unwrap_or(0);
            if total == 0 { 1.0 } else { most as f64 * of.len() as f64 / total as f64 }
        };
        let rows = [(Side::Q, spec.dims.q_len), (Side::Kv, spec.dims.kv_len)].map(|(side, len)| {
            let ranks = self.ranks();
            let of_rank = |index| self.layout.of_ranks.shard(side, len, index, ranks).len().into();
            max_over_mean(&(0..ranks).map(of_rank).collect::<Vec<u128>>())
        });
        let RingRows { sent, needed } = self.ring_rows;
        Ok(StrategyBalance {
            work_max_over_mean: max_over_mean(&work),
            rows_max_over_mean: rows[0].max(rows[1]),
            redundancy: if needed == 0 { 1.0 } else { sent as f64 / needed as f64 },
        })
    }

    /// Counts the visible pairs that each rank computes, by ring index, as [`Work::of`] does.
    ///
    /// # Errors
    /// As [`StrategyTraffic::of`].
    pub fn pairs_of_ranks(&self, spec: &Spec, options: &TrafficOptions<'_>) -> Result<Vec<u128>> {
        work_of_ranks(self, spec, options, |spec, shards| {
            Work::of(&*spec.mask, spec.dims.q_heads, spec.dims.batch, shards)
        })
    }

    const fn ranks(&self) -> usize {
        self.grid.groups() * self.grid.members()
    }
}

/// Calls `work` with spec and shards of every ring that differs. Returns the work of each rank, by
/// ring index.
fn work_of_ranks(
    traffic: &StrategyTraffic,
    spec: &Spec,
    options: &TrafficOptions<'_>,
    mut work: impl FnMut(&Spec, &RingShards) -> Work,
) -> Result<Vec<u128>> {
    let grid = &traffic.grid;
    let per_head = spec.mask.per_head();
    let alike = if per_head { 1 } else { grid.head_parts() };
    let mut pairs = vec![0; traffic.ranks()];
    for member in grid.distinct_members(per_head) {
        let of_member = spec.of_member(grid, member);
        let layout = traffic.layout.of_member(grid, member);
        let shards = options.shards(&of_member, layout, grid.groups())?;
        let work = work(&of_member, &shards);
        for member in member..member + alike {
            for group in 0..grid.groups() {
                pairs[grid.ring_index(group, member)] = work.of_rank(group);
            }
        }
    }
    Ok(pairs)
}
