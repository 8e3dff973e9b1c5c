//! The reproducible order: the partial results of leaves that wait to be merged.

use std::sync::Arc;

use annulus_core::{LeafMerges, RankLeaves, Result, Shard, leaves_of};
use annulus_plan::RankSchedule;
use serde::Serialize;

use super::ring::{PlannedRing, QueryPass};
use crate::report::{bytes, counted};

/// The most ranks of which every one is planned; of more, as many at equal distances.
const MOST_RANKS: usize = 64;

/// Memory of partial results.
#[derive(Debug, Serialize)]
pub(super) struct LeafFigures {
    /// Rows of a leaf.
    rows: u64,
    /// The most partial results of a query that wait at one time, of any rank.
    most_partial_results: usize,
    /// Their bytes in a plan that is forward only, on the rank with the most.
    most_bytes: u64,
    /// The most partial results of dK and dV that wait at one time, of any rank; null of a plan
    /// that is forward only.
    most_partial_gradients: Option<usize>,
    /// Bytes of both kinds in a plan with a backward pass, on the rank with the most; null of a
    /// plan that is forward only.
    most_bytes_with_backward: Option<u64>,
    /// Number of ranks that were planned.
    ranks_planned: usize,
}

impl LeafFigures {
    /// Plans the merges of the ranks of `ring`.
    pub(super) fn new(ring: &PlannedRing<'_>, query_pass: &QueryPass<'_>) -> Result<Self> {
        let rows = ring.spec.leaf_rows.unwrap_or(1);
        let merges = |schedule: &RankSchedule, shards: &[Arc<Shard>]| {
            let mut arrivals = Vec::new();
            for step in &schedule.steps {
                let rows_of = &shards[step.owner].rows;
                leaves_of(rows_of, &step.rows, rows, |leaf| arrivals.push(leaf));
            }
            LeafMerges::of_arrivals(arrivals)
        };
        let ranks = ring.ranks();
        let planned: Vec<usize> = (0..ranks).step_by(ranks.div_ceil(MOST_RANKS)).collect();
        let (mut results, mut forward, mut gradients, mut both) = (0, 0, 0, 0);
        for &rank in &planned {
            let leaves = RankLeaves {
                rows,
                keys: merges(&ring.schedule_of(rank, false), &ring.shards.kv)?,
                queries: merges(&query_pass.schedule_of(rank), &ring.shards.q)?,
                sends_queries: ranks > 1,
            };
            let queries = ring.shards.q[rank].rows.len();
            let keys = ring.shards.kv[rank].rows.len();
            let with_backward =
                leaves.bytes(ring.spec, queries, true) + leaves.gradient_bytes(ring.spec, keys);
            results = results.max(leaves.keys.slots());
            forward = forward.max(leaves.bytes(ring.spec, queries, false));
            gradients = gradients.max(leaves.queries.slots());
            both = both.max(with_backward);
        }
        Ok(Self {
            rows,
            most_partial_results: results,
            most_bytes: forward,
            most_partial_gradients: ring.backward.then_some(gradients),
            most_bytes_with_backward: ring.backward.then_some(both),
            ranks_planned: planned.len(),
        })
    }

    /// Describes the figures in one line for a plan that is forward only, and one more for a plan
    /// with a backward pass.
    pub(super) fn in_words(&self) -> Vec<String> {
        let results = |count: usize| counted(count as u64, "partial result", "partial results");
        let forward = format!(
            "of {} rows; at most {} of a query at a time, {} on a rank",
            self.rows,
            results(self.most_partial_results),
            bytes(self.most_bytes)
        );
        let with_backward = self.most_partial_gradients.zip(self.most_bytes_with_backward);
        let backward = with_backward.map(|(gradients, together)| {
            format!(
                "with a backward pass also at most {} of dK and dV, together {} on a rank",
                results(gradients),
                bytes(together)
            )
        });
        [forward].into_iter().chain(backward).collect()
    }
}
