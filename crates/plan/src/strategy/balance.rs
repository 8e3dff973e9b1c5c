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

use super::{RingRows, StrategyTraffic, group_layout::in_few_runs};
use crate::{Layout, TrafficOptions, Work};
use annulus_core::{Dims, Result, Side, Spec};

/// Balance of a strategy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StrategyBalance {
    /// Visible pairs of the busiest rank divided by the mean; 1 if there are none. Masks without a
    /// [`Band`](annulus_core::mask::Band), and layouts without runs of consecutive rows, are
    /// estimated from 16,384 queries.
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
        let rows = [(Side::Q, spec.dims.q_len), (Side::Kv, spec.dims.kv_len)].map(|(side, len)| {
            let ranks = self.ranks();
            let of_rank = |index| self.layout.of_ranks.shard(side, len, index, ranks).len().into();
            max_over_mean(&(0..ranks).map(of_rank).collect::<Vec<u128>>())
        });
        let RingRows { sent, needed } = self.ring_rows;
        Ok(StrategyBalance {
            work_max_over_mean: self.work_max_over_mean(spec, options, tick)?,
            rows_max_over_mean: rows[0].max(rows[1]),
            redundancy: if needed == 0 { 1.0 } else { sent as f64 / needed as f64 },
        })
    }

    /// Computes [`StrategyBalance::work_max_over_mean`], which needs no bytes of ranks.
    pub(super) fn work_max_over_mean(
        &self,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<f64> {
        Ok(max_over_mean(&work_of_ranks(self, spec, options, tick)?))
    }

    /// Counts the visible pairs that each rank computes, by ring index, as [`Work::of`] does.
    ///
    /// # Errors
    /// As [`StrategyTraffic::of`].
    pub fn pairs_of_ranks(&self, spec: &Spec, options: &TrafficOptions<'_>) -> Result<Vec<u128>> {
        let groups = self.grid.groups();
        each_ring(self, spec, |of_member, layout| {
            let shards = options.shards(of_member, layout, groups)?;
            let Dims { q_heads, batch, .. } = of_member.dims;
            let work = Work::of(&*of_member.mask, q_heads, batch, &shards);
            Ok((0..groups).map(|group| work.of_rank(group)).collect())
        })
    }

    const fn ranks(&self) -> usize {
        self.grid.groups() * self.grid.members()
    }
}

/// Returns the largest number divided by the mean; 1 if all are 0.
fn max_over_mean(of: &[u128]) -> f64 {
    let total: u128 = of.iter().sum();
    let most = of.iter().copied().max().unwrap_or(0);
    if total == 0 { 1.0 } else { most as f64 * of.len() as f64 / total as f64 }
}

/// Estimates the work of each rank, by ring index, from its rows in few runs.
pub(crate) fn work_of_ranks(
    traffic: &StrategyTraffic,
    spec: &Spec,
    options: &TrafficOptions<'_>,
    tick: &mut dyn FnMut(),
) -> Result<Vec<u128>> {
    let groups = traffic.grid.groups();
    each_ring(traffic, spec, |of_member, layout| {
        let layout = in_few_runs(layout, options.sequences());
        let work = Work::estimate(of_member, &options.shards(of_member, &layout, groups)?, tick);
        Ok((0..groups).map(|group| work.of_rank(group)).collect())
    })
}

/// Calls `work` with spec and layout of every ring that differs, for the work of each of its ranks.
/// Returns the work of all ranks, by ring index.
fn each_ring(
    traffic: &StrategyTraffic,
    spec: &Spec,
    mut work: impl FnMut(&Spec, &Layout) -> Result<Vec<u128>>,
) -> Result<Vec<u128>> {
    let grid = &traffic.grid;
    let per_head = spec.mask.per_head();
    let alike = if per_head { 1 } else { grid.head_parts() };
    let mut pairs = vec![0; traffic.ranks()];
    for member in grid.distinct_members(per_head) {
        let of_member = grid.spec_of(spec, member);
        let layout = traffic.layout.of_member(grid, member);
        let work = work(&of_member, layout)?;
        for member in member..member + alike {
            for (group, &work) in work.iter().enumerate() {
                pairs[grid.ring_index(group, member)] = work;
            }
        }
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use std::{borrow::Cow, sync::Arc};

    use super::*;
    use crate::{NeedsIndex, RingTraffic, Route, needs::tests::Sample};
    use annulus_core::{
        Batch, DType,
        mask::{self, SharedMask},
    };

    /// On striped shards of many documents, groups have their rows in blocks: the estimates and the
    /// rows that are sent are those of the rows in their own order.
    #[test]
    fn figures_of_rows_in_few_runs_are_those_of_their_own_order() -> Result<()> {
        // more queries than are sampled
        let (len, ranks) = (40_000, 16);
        let starts: Vec<i64> = (0..=80).map(|n| (n * 500 - n % 7 * 11).min(39_990)).collect();
        let batch = Batch { cum_seqlens_q: Some(starts), ..Batch::default() };
        let causal: SharedMask = Arc::new(mask::Causal::default());
        let window = mask::and(causal.clone(), Arc::new(mask::Window::new(Some(90), None)));
        let prefix = mask::and(window.clone(), Arc::new(mask::Prefix { len: 40 }));
        let parity: SharedMask = Arc::new(Sample::Parity);
        let options = TrafficOptions {
            layout: Some(&Layout::Striped),
            route: Some(Route::RelayUp),
            batch: Some(&batch),
            ..TrafficOptions::FORWARD
        };
        let tick = &mut || ();
        let mut in_blocks = 0;
        for mask in [causal, window, prefix, parity] {
            let spec = Spec { mask, ..Spec::new(Dims::new(1, len, 2, 8), DType::F32) };
            for traffic in StrategyTraffic::of_all(&spec, ranks, &options, tick)? {
                let groups = traffic.grid.groups();
                let mut sent = 0;
                let want = each_ring(&traffic, &spec, |of_member, layout| {
                    let few = in_few_runs(layout, options.sequences());
                    in_blocks += usize::from(matches!(few, Cow::Owned(_)));
                    let shards = options.shards(of_member, layout, groups)?;
                    let heads = of_member.dims.q_heads;
                    let mask = of_member.mask.as_ref();
                    let needs = NeedsIndex::of_queries(mask, heads, 1, &shards, &mut || ());
                    let ring = RingTraffic::of(&needs, Route::RelayUp, &mut || ());
                    // those of all members of the column
                    sent += ring.total().block_rows * traffic.grid.head_parts() as u128;
                    let work = Work::of(mask, heads, 1, &shards);
                    Ok((0..groups).map(|group| work.of_rank(group)).collect())
                })?;
                let got = work_of_ranks(&traffic, &spec, &options, tick)?;
                let name = format!("{} {:?}", traffic.strategy, spec.mask);
                // from samples, if there is no closed form
                let [balance, exact] = [&got, &want].map(|of| max_over_mean(of));
                assert!((balance - exact).abs() <= 0.03, "{name}: {balance}, {exact}");
                for (got, want) in got.into_iter().zip(want) {
                    assert!(got.abs_diff(want) <= want / 10, "{name}: {got}, {want}");
                }
                assert_eq!(traffic.ring_rows.sent, sent, "{} {:?}", traffic.strategy, spec.mask);
            }
        }
        assert!(in_blocks > 10, "{in_blocks}");
        Ok(())
    }
}
