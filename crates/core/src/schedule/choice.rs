//! The automatic choice of layout, route and ring order: first balanced work, then the fewest
//! bytes, then the fewest hops between nodes.

use super::{Order, Placement, Route, Work};
use crate::{Layout, Needs, RingShards, Spec};

/// Layout, route and ring order of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Assignment of rows to ring indices.
    pub layout: Layout,
    /// Route of the KV blocks in the forward pass.
    pub route: Route,
    /// Order of the ranks on the ring: the rank at ring index p owns shard p of the layout.
    pub order: Order,
}

impl Choice {
    /// Largest [`Work::max_over_mean`] of a candidate layout, relative to the least of all layouts:
    /// for fewer bytes, a pass may take up to a quarter more compute time.
    pub const IMBALANCE: f64 = 1.25;

    /// Most queries (× heads and batch rows with masks of their own) for which the needs are
    /// computed. Longer sequences are sampled at equal distances.
    const SAMPLES_OF_NEEDS: usize = 1 << 16;
    /// As [`Choice::SAMPLES_OF_NEEDS`] for the work: fewer, because the number of visible keys
    /// changes less from one query to the next than the sets of needed rows.
    const SAMPLES_OF_WORK: usize = 1 << 14;

    /// Chooses layout and route, or only the route of a fixed `layout`.
    ///
    /// Candidates are those of contiguous, zigzag and striped whose [`Work::max_over_mean`] is at
    /// most [`Choice::IMBALANCE`] times the least. Of these with each route, the one that sends the
    /// fewest block bytes is chosen. Ties are broken in the order relay up, relay down, direct;
    /// then contiguous, zigzag, striped.
    ///
    /// The choice depends on the spec alone and so is equal on all ranks. It does not depend on a
    /// batch: segment ids never change the layout.
    ///
    /// With a `placement`, and without a fixed layout, the ranks of one node become neighbours
    /// ([`Placement::order`]). A fixed layout keeps ascending ranks, because its caller has
    /// distributed the rows by rank.
    pub fn auto(
        spec: &Spec,
        ranks: usize,
        layout: Option<&Layout>,
        placement: Option<&Placement>,
    ) -> Self {
        let placed =
            placement.filter(|placement| layout.is_none() && placement.nodes().len() == ranks);
        let order = placed.map_or_else(|| Order::ascending(ranks), Placement::order);
        let mask = &*spec.mask;
        let heads = spec.dims.q_heads;
        let batch = spec.dims.batch;
        let distinct_masks =
            if mask.per_head() { heads } else { 1 } * if mask.per_batch() { batch } else { 1 };
        let queries = spec.dims.q_len.saturating_mul(distinct_masks);
        let stride = |samples| queries.div_ceil(samples).max(1);
        let shard = |layout: Layout| {
            (RingShards::plain(&spec.dims, spec.alignment, &layout, ranks), layout)
        };
        let candidates: Vec<(RingShards, Layout)> = match layout {
            Some(layout) => vec![shard(layout.clone())],
            None => {
                let all = [Layout::Contiguous, Layout::Zigzag, Layout::Striped].map(shard);
                let imbalances = all.each_ref().map(|(shards, _)| {
                    Work::of_sampled_queries(
                        mask,
                        heads,
                        batch,
                        shards,
                        stride(Self::SAMPLES_OF_WORK),
                    )
                    .max_over_mean()
                });
                let bound = Self::IMBALANCE * imbalances.into_iter().fold(f64::INFINITY, f64::min);
                all.into_iter()
                    .zip(imbalances)
                    .filter(|&(_, imbalance)| imbalance <= bound)
                    .map(|(candidate, _)| candidate)
                    .collect()
            }
        };
        let routed = candidates.into_iter().map(|(shards, layout)| {
            let needs = Needs::of_sampled_queries(
                mask,
                heads,
                batch,
                &shards,
                stride(Self::SAMPLES_OF_NEEDS),
            );
            let (route, rows) = Route::cheapest(&needs);
            (rows, Self { layout, route, order: order.clone() })
        });
        // `min_by_key` returns the first of equals, and layouts are in the order of their ties
        let best = routed.min_by_key(|(rows, choice)| (*rows, choice.route));
        best.map_or(
            Self { layout: Layout::Contiguous, route: Route::RelayUp, order },
            |(_, choice)| choice,
        )
    }
}
