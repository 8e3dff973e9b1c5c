//! Which layout, which route and which order of ranks, if nobody says: balanced work first, then the fewest bytes, then the fewest of them from
//! node to node.

use super::{Order, Placement, Route, Work};
use crate::{Coordinates, Layout, Needs, Spec};

/// How rows are dealt to ranks and how blocks find their users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// How rows are dealt.
    pub layout: Layout,
    /// How blocks find their users in the forward pass.
    pub route: Route,
    /// Which rank stands where on the ring: the rank at place p holds shard p of the layout.
    pub order: Order,
}

impl Choice {
    /// How much more work than in the best balanced layout the busiest rank of a layout may have, compared to the mean.
    pub const IMBALANCE: f64 = 1.25;

    /// Queries asked at most (times heads and batch rows, where they differ): beyond, evenly spaced ones stand for all. Fewer are
    /// enough for the work, which changes little from one to the next, than for the bytes.
    const SAMPLES_OF_NEEDS: usize = 1 << 16;
    const SAMPLES_OF_WORK: usize = 1 << 14;

    /// Chooses layout and route, or only the route of a fixed `layout`.
    ///
    /// Of contiguous, zigzag and striped, those whose [`Work::max_over_mean`] is within [`Choice::IMBALANCE`] times the least; of these and
    /// all routes, the fewest block bytes. Ties: relay up, relay down, direct; then contiguous, zigzag, striped.
    ///
    /// Only the spec decides, not a batch: segment ids never change the layout. The same spec gives the same choice on every rank.
    ///
    /// Where `placement` says which node each rank is on, and no layout is fixed, ranks of one node stand next to each other
    /// ([`Placement::order`]). A fixed layout says which rank holds what, so it keeps ascending ranks.
    pub fn auto(spec: &Spec, ranks: usize, layout: Option<&Layout>, placement: Option<&Placement>) -> Self {
        let placed = placement.filter(|placement| layout.is_none() && placement.nodes().len() == ranks);
        let order = placed.map_or_else(|| Order::ascending(ranks), Placement::order);
        let (mask, heads, batch) = (&*spec.mask, spec.dims.q_heads, spec.dims.batch);
        let asked = if mask.per_head() { heads } else { 1 } * if mask.per_batch() { batch } else { 1 };
        let stride = |samples| spec.dims.q_len.saturating_mul(asked).div_ceil(samples).max(1);
        let deal = |layout: Layout| (Coordinates::plain(&spec.dims, spec.alignment, &layout, ranks), layout);
        let candidates: Vec<(Coordinates, Layout)> = match layout {
            Some(layout) => vec![deal(layout.clone())],
            None => {
                let all = [Layout::Contiguous, Layout::Zigzag, Layout::Striped].map(deal);
                let imbalances = all.each_ref().map(|(coordinates, _)| {
                    Work::of_sampled_queries(mask, heads, batch, coordinates, stride(Self::SAMPLES_OF_WORK)).max_over_mean()
                });
                let bound = Self::IMBALANCE * imbalances.into_iter().fold(f64::INFINITY, f64::min);
                all.into_iter().zip(imbalances).filter(|&(_, imbalance)| imbalance <= bound).map(|(candidate, _)| candidate).collect()
            }
        };
        let routed = candidates.into_iter().map(|(coordinates, layout)| {
            let needs = Needs::of_sampled_queries(mask, heads, batch, &coordinates, stride(Self::SAMPLES_OF_NEEDS));
            let (route, rows) = Route::cheapest(&needs);
            (rows, Self { layout, route, order: order.clone() })
        });
        // the first of equals: layouts come in the order of their ties
        let best = routed.min_by_key(|(rows, choice)| (*rows, choice.route));
        best.map_or(Self { layout: Layout::Contiguous, route: Route::RelayUp, order }, |(_, choice)| choice)
    }
}
