//! The automatic choice of layout, route and ring order: first balanced work, then the fewest
//! bytes, then the fewest hops between nodes.

use super::{Route, Work, ring_traffic::estimated_block_rows, work::stride};
use crate::{Layout, NeedsIndex, RingShards};
use annulus_core::{Order, Placement, Spec};

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

    /// Share of a route's block rows, as a divisor, that its form over nodes may send in addition
    /// to be chosen. Between nodes rails send about as many rows as the relay (a block passes the
    /// same nodes in either order), from each rank of a node instead of from one; once per node
    /// sends at most as many as the direct route. The further rows move inside nodes.
    const EXCESS_OVER_NODES: u128 = 4;

    /// Most queries (× heads and batch rows with masks of their own) for which a mask without a
    /// [`Band`](annulus_core::mask::Band) is evaluated for the needs. Longer sequences are sampled
    /// at equal distances.
    const SAMPLES_OF_NEEDS: usize = 1 << 16;
    /// Chooses layout and route, or only the route of a fixed `layout`.
    ///
    /// Candidates are those of contiguous, zigzag and striped whose [`Work::max_over_mean`] is at
    /// most [`Choice::IMBALANCE`] times the least. Of these with each route, the one that sends the
    /// fewest block bytes is chosen. Ties are broken in the order relay up, relay down, direct;
    /// then contiguous, zigzag, striped.
    ///
    /// Layouts are cut at leaves if the spec has [`Spec::leaf_rows`].
    ///
    /// The choice depends on the spec alone and so is equal on all ranks. It does not depend on a
    /// batch: segment ids never change the layout.
    ///
    /// Rails ([`Route::RailsUp`]) take the place of a relay if `placement` has several nodes of as
    /// many ranks each, more than one and neighbours on the ring, and [`Route::OncePerNode`] that
    /// of the direct route, unless blocks then move much further, as with a window that its users
    /// share with few neighbours.
    ///
    /// With a `placement`, and without a fixed layout, the ranks of one node become neighbours
    /// ([`Placement::order`]). A fixed layout keeps ascending ranks, because its caller has
    /// distributed the rows by rank.
    ///
    /// `tick` is called after every few rows of a long computation, so that a rank that plans can
    /// send heartbeats.
    pub fn auto(
        spec: &Spec,
        ranks: usize,
        layout: Option<&Layout>,
        placement: Option<&Placement>,
        tick: &mut dyn FnMut(),
    ) -> Self {
        let placed =
            placement.filter(|placement| layout.is_none() && placement.nodes().len() == ranks);
        let order = placed.map_or_else(|| Order::ascending(ranks), Placement::order);
        let candidates = match layout {
            Some(layout) => vec![with_shards(spec, ranks, layout.clone())],
            None => balanced_layouts(spec, ranks, tick),
        };
        let mut best: Option<(u128, Route, Layout)> = None;
        for (layout, shards) in candidates {
            let needs = NeedsIndex::of_sampled_queries(
                &*spec.mask,
                spec.dims.q_heads,
                spec.dims.batch,
                &shards,
                stride(spec, Self::SAMPLES_OF_NEEDS),
                tick,
            );
            let limit = best.as_ref().map_or(u128::MAX, |(rows, ..)| *rows);
            if let Some((route, rows)) = Route::cheapest(&needs, limit, tick)
                // layouts are in the order of their ties
                && best.as_ref().is_none_or(|best| (rows, route) < (best.0, best.1))
            {
                best = Some((rows, route, layout));
            }
        }
        let (rows, route, layout) = best.unwrap_or((0, Route::RelayUp, Layout::Contiguous));
        let node_ranks = placement
            .filter(|placement| placement.nodes().len() == ranks)
            .and_then(|placement| placement.node_ranks(&order));
        let over_nodes = route.over_nodes(node_ranks.unwrap_or(1));
        if over_nodes.period(ranks) > 1 {
            let (_, shards) = with_shards(spec, ranks, layout.clone());
            let stride = stride(spec, Self::SAMPLES_OF_NEEDS);
            let (heads, batch) = (spec.dims.q_heads, spec.dims.batch);
            let mask = &*spec.mask;
            let needs = NeedsIndex::of_sampled_queries(mask, heads, batch, &shards, stride, tick);
            let most = rows.saturating_add(rows / Self::EXCESS_OVER_NODES);
            if estimated_block_rows(&needs, over_nodes, tick) <= most {
                return Self { layout, route: over_nodes, order };
            }
        }
        Self { layout, route, order }
    }
}

/// Returns the layouts of which no rank has much more work than the mean, and their shards.
fn balanced_layouts(
    spec: &Spec,
    ranks: usize,
    tick: &mut dyn FnMut(),
) -> Vec<(Layout, RingShards)> {
    let mut imbalance = |shards: &RingShards| {
        Work::of_sampled_queries(
            &*spec.mask,
            spec.dims.q_heads,
            spec.dims.batch,
            shards,
            stride(spec, Work::SAMPLES),
            tick,
        )
        .max_over_mean()
    };
    let layouts = [Layout::Contiguous, Layout::Zigzag, Layout::Striped]
        .map(|layout| spec.leaf_rows.map_or(layout.clone(), |rows| layout.at_leaves(rows)));
    let all = layouts.map(|layout| with_shards(spec, ranks, layout));
    let imbalances = all.each_ref().map(|(_, shards)| imbalance(shards));
    let bound = Choice::IMBALANCE * imbalances.into_iter().fold(f64::INFINITY, f64::min);
    let candidates = all.into_iter().zip(imbalances);
    candidates
        .filter(|&(_, imbalance)| imbalance <= bound)
        .map(|(candidate, _)| candidate)
        .collect()
}

fn with_shards(spec: &Spec, ranks: usize, layout: Layout) -> (Layout, RingShards) {
    let shards = RingShards::plain(&spec.dims, spec.alignment, &layout, ranks);
    (layout, shards)
}
