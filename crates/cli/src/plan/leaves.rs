//! Partial results of leaves that wait to be merged, in the reproducible order.

use annulus_core::{
    LeafMerges, NeedsIndex, RankLeaves, RankSchedule, Result, RingShards, Route, Spec, leaves_of,
};
use serde::Serialize;

use crate::report::{bytes, counted};

/// The most ranks of which every one is planned; of more, as many at equal distances.
const MOST_RANKS: usize = 64;

/// Memory of the partial results of a forward pass.
#[derive(Debug, Serialize)]
pub(super) struct LeafFigures {
    /// Rows of a leaf.
    rows: u64,
    /// The most partial results of a query that wait at one time, of any rank.
    most_partial_results: usize,
    /// Their bytes, on the rank with the most.
    most_bytes: u64,
    /// Number of ranks that were planned.
    ranks_planned: usize,
}

impl LeafFigures {
    /// Plans the merges of the ranks; `None` if the order is not reproducible.
    ///
    /// # Errors
    /// [`annulus_core::Error::OutOfMemory`].
    pub(super) fn new(
        spec: &Spec,
        needs: &NeedsIndex<'_>,
        route: Route,
        shards: &RingShards,
    ) -> Result<Option<Self>> {
        let Some(rows) = spec.leaf_rows else { return Ok(None) };
        let mut most = Self { rows, most_partial_results: 0, most_bytes: 0, ranks_planned: 0 };
        let ranks = shards.q.len();
        for rank in (0..ranks).step_by(ranks.div_ceil(MOST_RANKS)) {
            let schedule = RankSchedule::derive(needs, route, false, rank, &mut || ());
            let mut arrivals = Vec::new();
            for step in &schedule.steps {
                let keys = &shards.kv[step.owner].rows;
                leaves_of(keys, &step.rows, rows, |leaf| arrivals.push(leaf));
            }
            let keys = LeafMerges::of_arrivals(arrivals)?;
            let leaves = RankLeaves { rows, keys, queries: LeafMerges::default() };
            most.ranks_planned += 1;
            most.most_partial_results = most.most_partial_results.max(leaves.keys.slots());
            most.most_bytes = most.most_bytes.max(leaves.bytes(spec, shards.q[rank].rows.len()));
        }
        Ok(Some(most))
    }

    /// Describes the figures in one line.
    pub(super) fn in_words(&self) -> String {
        let Self { rows, most_partial_results, most_bytes, .. } = self;
        let results = counted(*most_partial_results as u64, "partial result", "partial results");
        format!(
            "of {rows} rows; at most {results} of a query at a time, {} on a rank",
            bytes(u128::from(*most_bytes))
        )
    }
}
