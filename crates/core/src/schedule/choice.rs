//! Which layout and which route, if nobody says: balanced work first, then the fewest bytes.

use super::{Route, Work};
use crate::{Coordinates, Layout, Needs, Spec, needs::Views};

/// How rows are dealt to ranks and how blocks find their users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// How rows are dealt.
    pub layout: Layout,
    /// How blocks find their users in the forward pass.
    pub route: Route,
}

impl Choice {
    /// How much more work than in the best balanced layout the busiest rank of a layout may have, compared to the mean.
    pub const IMBALANCE: f64 = 1.25;

    /// Queries asked at most (times heads and batch rows, where they differ): beyond, evenly spaced ones stand for all.
    const SAMPLES: usize = 1 << 16;

    /// Chooses layout and route, or only the route of a fixed `layout`.
    ///
    /// Of contiguous, zigzag and striped, those whose [`Work::max_over_mean`] is within [`Choice::IMBALANCE`] times the least; of these and
    /// all routes, the fewest block bytes. Ties: relay up, relay down, direct; then contiguous, zigzag, striped.
    ///
    /// Only the spec decides, not a batch: segment ids never change the layout. The same spec gives the same choice on every rank.
    pub fn auto(spec: &Spec, ranks: usize, layout: Option<&Layout>) -> Self {
        let layouts = layout.map_or_else(|| vec![Layout::Contiguous, Layout::Zigzag, Layout::Striped], |layout| vec![layout.clone()]);
        let (mask, heads, batch) = (&*spec.mask, spec.dims.q_heads, spec.dims.batch);
        let dealt: Vec<(Layout, Coordinates)> = layouts
            .into_iter()
            .map(|layout| {
                let coordinates = Coordinates::plain(&spec.dims, spec.alignment, &layout, ranks);
                (layout, coordinates)
            })
            .collect();
        let stride = |coordinates: &Coordinates| {
            let views = Views::new(mask, heads, batch, coordinates);
            spec.dims.q_len.saturating_mul(views.heads().len() * views.batches().len()).div_ceil(Self::SAMPLES).max(1)
        };
        let imbalance = |coordinates: &Coordinates| match layout {
            // a fixed layout has no rival
            Some(_) => 1.0,
            None => Work::of_sampled_queries(mask, heads, batch, coordinates, stride(coordinates)).max_over_mean(),
        };
        let imbalances: Vec<f64> = dealt.iter().map(|(_, coordinates)| imbalance(coordinates)).collect();
        let bound = Self::IMBALANCE * imbalances.iter().copied().fold(f64::INFINITY, f64::min);
        dealt
            .into_iter()
            .zip(imbalances)
            .filter(|(_, imbalance)| *imbalance <= bound)
            .map(|((layout, coordinates), _)| {
                let (route, rows) = Route::cheapest(&Needs::of_sampled_queries(mask, heads, batch, &coordinates, stride(&coordinates)));
                (rows, Self { layout, route })
            })
            // the first of equals: layouts come in the order of their ties
            .min_by_key(|(rows, choice)| (*rows, choice.route))
            .map_or(Self { layout: Layout::Contiguous, route: Route::RelayUp }, |(_, choice)| choice)
    }
}
