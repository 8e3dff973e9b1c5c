//! Words and figures of a whole plan that a picture shows beside its rings.

use annulus_core::Spec;
use annulus_plan::StrategyTraffic;

use super::{
    division::{division_in_words, passes_in_words},
    figures::{self, Bytes, Figures},
    rank_figures::{self, RankFigures},
    strategies::{GridFigures, Strategies},
};

/// Words and figures of all ranks.
pub(super) struct Frame {
    /// The plan in one line.
    pub(super) title: String,
    /// The strategy and the hops of its ring in one line.
    pub(super) subtitle: String,
    /// Bytes of the forward pass of all ranks.
    pub(super) forward: Bytes,
    /// Bytes of the backward pass of all ranks, if there is one.
    pub(super) backward: Option<Bytes>,
    /// Parts of each pass, in order; empty for a ring.
    pub(super) passes: Vec<[String; 3]>,
    /// Number of ranks.
    pub(super) ranks: usize,
    /// Visible pairs, all heads and batch rows.
    pub(super) pairs_total: u128,
    /// Work of the busiest rank divided by the mean.
    pub(super) work_max_over_mean: f64,
    /// Figures of the ranks that are drawn ([`rank_figures::drawn`]).
    pub(super) bars: Vec<RankFigures>,
}

impl Frame {
    /// Describes the plan of `strategies`. `ring` is that of the first heads and key column.
    pub(super) fn new(spec: &Spec, ring: &Figures, strategies: &Strategies) -> Self {
        let Some((traffic, GridFigures { passes, pairs, .. })) = strategies.grid() else {
            return Self {
                title: ring.title(),
                subtitle: ring.route_in_words(),
                forward: ring.forward,
                backward: ring.backward,
                passes: Vec::new(),
                ranks: ring.ranks,
                pairs_total: ring.pairs_total,
                work_max_over_mean: ring.work_max_over_mean,
                bars: ring.drawn_ranks.clone(),
            };
        };
        let StrategyTraffic { grid, layout, .. } = traffic;
        let ranks = traffic.forward.len();
        let name = traffic.strategy.published_on(ranks).to_string();
        let parts = [grid.head_parts(), grid.groups(), grid.columns()];
        let [forward, backward] = figures::bytes_of_grid(spec, traffic);
        let hops = match grid.groups() {
            1 => "nothing circulates".to_owned(),
            _ => ring.hops_in_words(),
        };
        let has_backward = ring.backward.is_some();
        let of_ranks = rank_figures::rank_figures_of(spec, traffic, pairs, has_backward);
        Self {
            title: ring.title_of(ranks, layout.of_ranks.name()),
            subtitle: format!("{}; {hops}", division_in_words(&name, parts)),
            forward,
            backward: has_backward.then_some(backward),
            passes: passes_in_words(parts, passes),
            ranks,
            pairs_total: pairs.iter().sum(),
            work_max_over_mean: rank_figures::most_work_over_mean(&of_ranks),
            bars: rank_figures::drawn(&of_ranks),
        }
    }
}
