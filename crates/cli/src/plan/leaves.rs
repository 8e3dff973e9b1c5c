//! The reproducible order: its backward pass, in which queries are sent, and the partial results of
//! leaves that wait to be merged.

use annulus_core::{Backend, LeafMerges, RankLeaves, Result, Spec, leaves_of};
use annulus_plan::{NeedsIndex, RankSchedule, RingShards, RingTraffic, Route, Traffic};
use serde::Serialize;

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

/// Second pass of a backward pass in the reproducible order, in which queries are sent.
pub(super) struct QueryPass<'a> {
    needs: NeedsIndex<'a>,
    route: Route,
    row_bytes: u64,
}

impl<'a> QueryPass<'a> {
    /// Plans the pass; `None` if the order is not reproducible.
    pub(super) fn new(spec: &'a Spec, route: Route, shards: &RingShards) -> Result<Option<Self>> {
        if spec.leaf_rows.is_none() {
            return Ok(None);
        }
        let tile = annulus_cpu::Cpu::new(1)?.capabilities(spec)?.kv_tile;
        let tick = &mut || ();
        let mask = spec.mask.as_ref();
        let needs = NeedsIndex::of_keys(mask, spec.dims.q_heads, spec.dims.batch, shards, tick);
        let needs = needs.in_tiles(tile);
        let row_bytes = spec.query_row_layout().bytes();
        Ok(Some(Self { needs, route: route.opposite(), row_bytes }))
    }

    /// Returns the steps of one rank.
    pub(super) fn schedule(&self, rank: usize) -> RankSchedule {
        RankSchedule::derive(&self.needs, self.route, false, rank, &mut || ())
    }

    /// Returns the bytes that each rank sends.
    pub(super) fn bytes_of_ranks(&self) -> Vec<u128> {
        let traffic = RingTraffic::of(&self.needs, self.route, &mut || ());
        traffic.of_rank.into_iter().map(|sent| self.bytes(sent)).collect()
    }

    /// Returns the bytes that all ranks send if every row goes to every rank.
    pub(super) fn bytes_of_full_ring(&self) -> u128 {
        self.bytes(Traffic::full_ring(self.needs.held(), false))
    }

    const fn bytes(&self, traffic: Traffic) -> u128 {
        traffic.block_rows * self.row_bytes as u128
    }

    /// Returns the bytes of a query row.
    pub(super) const fn row_bytes(&self) -> u64 {
        self.row_bytes
    }
}

impl LeafFigures {
    /// Plans the merges of the ranks.
    pub(super) fn new(
        spec: &Spec,
        needs: &NeedsIndex<'_>,
        route: Route,
        shards: &RingShards,
        query_pass: &QueryPass<'_>,
        has_backward: bool,
    ) -> Result<Self> {
        let rows = spec.leaf_rows.unwrap_or(1);
        let mut most = Self {
            rows,
            most_partial_results: 0,
            most_bytes: 0,
            most_partial_gradients: has_backward.then_some(0),
            most_bytes_with_backward: has_backward.then_some(0),
            ranks_planned: 0,
        };
        let ranks = shards.q.len();
        for rank in (0..ranks).step_by(ranks.div_ceil(MOST_RANKS)) {
            let merges = |schedule: &RankSchedule,
                          shards: &[std::sync::Arc<annulus_core::Shard>]| {
                let mut arrivals = Vec::new();
                for step in &schedule.steps {
                    let rows_of = &shards[step.owner].rows;
                    leaves_of(rows_of, &step.rows, rows, |leaf| arrivals.push(leaf));
                }
                LeafMerges::of_arrivals(arrivals)
            };
            let keys = RankSchedule::derive(needs, route, false, rank, &mut || ());
            let leaves = RankLeaves {
                rows,
                keys: merges(&keys, &shards.kv)?,
                queries: merges(&query_pass.schedule(rank), &shards.q)?,
                sends_queries: ranks > 1,
            };
            let [queries, keys] = [&shards.q, &shards.kv].map(|shards| shards[rank].rows.len());
            let with_backward =
                leaves.bytes(spec, queries, true) + leaves.gradient_bytes(spec, keys);
            most.ranks_planned += 1;
            most.most_partial_results = most.most_partial_results.max(leaves.keys.slots());
            most.most_bytes = most.most_bytes.max(leaves.bytes(spec, queries, false));
            let slots = leaves.queries.slots();
            most.most_partial_gradients = most.most_partial_gradients.map(|of| of.max(slots));
            most.most_bytes_with_backward =
                most.most_bytes_with_backward.map(|of| of.max(with_backward));
        }
        Ok(most)
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
