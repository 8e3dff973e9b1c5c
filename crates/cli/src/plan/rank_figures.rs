//! Figures of each rank: rows, visible pairs and bytes sent.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc};

use annulus_core::{Shard, Side, Spec};
use annulus_plan::{RingShards, StrategyTraffic, Work};
use serde::Serialize;

use super::limits::MOST_STEPPED_RANKS;

/// Figures of one rank.
#[derive(Debug, Clone, Serialize)]
pub(super) struct RankFigures {
    /// The rank.
    pub(super) rank: usize,
    /// Query rows that it owns.
    pub(super) q_rows: u64,
    /// Key rows that it owns.
    pub(super) kv_rows: u64,
    /// Visible pairs of its queries, all heads and batch rows.
    pub(super) pairs: u128,
    /// Its pairs divided by the mean of all ranks.
    pub(super) work_over_mean: f64,
    /// Payload bytes that it sends in a forward pass.
    pub(super) bytes_sent: u128,
    /// Payload bytes that it sends in a backward pass.
    pub(super) backward_bytes_sent: Option<u128>,
}

/// Returns the figures of every rank. `sent(rank)` are the bytes of its forward and, if there is
/// one, of its backward pass.
pub(super) fn rank_figures(
    shards: &RingShards,
    work: &Work,
    sent: impl Fn(usize) -> (u128, Option<u128>),
) -> Vec<RankFigures> {
    let mean = work.total() as f64 / shards.q.len() as f64;
    let of_rank = |(rank, (q, kv)): (usize, (&Arc<Shard>, &Arc<Shard>))| {
        let (bytes_sent, backward_bytes_sent) = sent(rank);
        let pairs = work.of_rank(rank);
        RankFigures {
            rank,
            q_rows: q.rows.len(),
            kv_rows: kv.rows.len(),
            pairs,
            work_over_mean: if mean > 0.0 { pairs as f64 / mean } else { 0.0 },
            bytes_sent,
            backward_bytes_sent,
        }
    };
    shards.q.iter().zip(&shards.kv).enumerate().map(of_rank).collect()
}

/// Returns the figures of every rank under a strategy that divides heads or keys. `pairs` are those
/// of each rank.
pub(super) fn rank_figures_of(
    spec: &Spec,
    traffic: &StrategyTraffic,
    pairs: &[u128],
    has_backward: bool,
) -> Vec<RankFigures> {
    let StrategyTraffic { layout, forward, backward, .. } = traffic;
    let total: u128 = pairs.iter().sum();
    let ranks = forward.len();
    let mean = total as f64 / ranks as f64;
    let of_rank = |(rank, &pairs): (usize, &u128)| {
        let rows = |side, len| layout.of_ranks.shard(side, len, rank, ranks).len();
        RankFigures {
            rank,
            q_rows: rows(Side::Q, spec.dims.q_len),
            kv_rows: rows(Side::Kv, spec.dims.kv_len),
            pairs,
            work_over_mean: if mean > 0.0 { pairs as f64 / mean } else { 0.0 },
            bytes_sent: forward[rank],
            backward_bytes_sent: has_backward.then(|| backward[rank]),
        }
    };
    pairs.iter().enumerate().map(of_rank).collect()
}

/// Returns the work of the busiest rank divided by the mean.
pub(super) fn most_work_over_mean(all: &[RankFigures]) -> f64 {
    all.iter().map(|of| of.work_over_mean).fold(0.0, f64::max)
}

/// Selects at most [`MOST_STEPPED_RANKS`] ranks at equal distances.
pub(super) fn drawn(all: &[RankFigures]) -> Vec<RankFigures> {
    all.iter().step_by(all.len().div_ceil(MOST_STEPPED_RANKS).max(1)).cloned().collect()
}

/// Selects the first ranks with the least and the most pairs and bytes, and `rank`.
pub(super) fn extremes(all: &[RankFigures], rank: Option<usize>) -> Vec<RankFigures> {
    let keys: [fn(&RankFigures) -> u128; 3] =
        [|of| of.pairs, |of| of.bytes_sent, |of| of.backward_bytes_sent.unwrap_or_default()];
    let mut shown: BTreeSet<usize> = rank.into_iter().collect();
    for key in keys {
        shown.extend(all.iter().min_by_key(|of| key(of)).map(|of| of.rank));
        shown.extend(all.iter().min_by_key(|of| Reverse(key(of))).map(|of| of.rank));
    }
    shown.into_iter().filter_map(|rank| all.get(rank).cloned()).collect()
}
