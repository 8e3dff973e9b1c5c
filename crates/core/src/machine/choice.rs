//! The choice of the strategy with the least predicted time.

use super::{
    Machine, Prediction,
    steps::{GridPlan, MOST_STEPPED_RANKS},
};
use crate::{
    Error, GroupLayout, HeadGrid, Result, RingTraffic, Spec, StrategyTraffic, TrafficOptions,
    strategy::{Bounds, best_first},
};

/// Strategies that were compared on a machine.
#[derive(Debug)]
pub struct Comparison {
    /// Traffic of the strategies.
    pub all: Vec<StrategyTraffic>,
    /// Predictions of the strategies, in the same order.
    pub predictions: Vec<Prediction>,
    /// Index of the one to choose, as [`Machine::choose`] does.
    pub chosen: usize,
}

impl Machine {
    /// Predicts every strategy of `all`, and returns the index of the one with the least time whose
    /// buffers fit the memory of a rank; of ties the first. If the buffers of none fit, it is the
    /// one with the least memory.
    ///
    /// # Errors
    /// As [`Prediction::of`]; [`Error::InvalidArgument`] if there is no strategy.
    pub fn choose(
        &self,
        all: &[StrategyTraffic],
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<(usize, Vec<Prediction>)> {
        let predict = |traffic| Prediction::of(traffic, spec, options, self, tick);
        let predictions = all.iter().map(predict).collect::<Result<Vec<_>>>()?;
        Ok((Self::best(all, &predictions)?, predictions))
    }

    /// Chooses among all strategies that `admits` accepts, without those of which a lower bound of
    /// the time already exceeds the least time: as [`Machine::choose`] of
    /// [`StrategyTraffic::of_all`] and [`StrategyTraffic::of_routes`].
    ///
    /// # Errors
    /// As [`Prediction::of`] and [`StrategyTraffic::of`]; [`Error::InvalidArgument`] if there is no
    /// strategy.
    pub fn fastest(
        &self,
        spec: &Spec,
        ranks: usize,
        options: &TrafficOptions<'_>,
        admits: &dyn Fn(&HeadGrid) -> bool,
        tick: &mut dyn FnMut(),
    ) -> Result<Comparison> {
        RingTraffic::check_ranks(ranks)?;
        let mut grids = HeadGrid::candidates(spec, ranks, options.backward);
        grids.retain(admits);
        let search = Search { machine: self, spec, options, grids };
        let is_large = ranks > MOST_STEPPED_RANKS;
        let mut compared = search.best_first(is_large, tick)?;
        if is_large {
            for (traffic, prediction) in &mut compared {
                *traffic = traffic.clone().counted(spec, options, tick)?;
                prediction.bytes = prediction.bytes.of_total(traffic.total() as f64);
            }
        }
        for traffic in StrategyTraffic::of_routes(spec, ranks, options, tick)? {
            let prediction = Prediction::of(&traffic, spec, options, self, tick)?;
            compared.push((traffic, prediction));
        }
        let (all, predictions): (Vec<_>, Vec<_>) = compared.into_iter().unzip();
        let chosen = Self::best(&all, &predictions)?;
        Ok(Comparison { all, predictions, chosen })
    }

    /// Returns the index of the strategy that [`Machine::choose`] chooses.
    fn best(all: &[StrategyTraffic], predictions: &[Prediction]) -> Result<usize> {
        let fitting = predictions.iter().enumerate().filter(|(_, prediction)| prediction.fits);
        let fastest = fitting.min_by(|(_, a), (_, b)| a.seconds().total_cmp(&b.seconds()));
        let smallest = || (0..all.len()).min_by_key(|&index| all[index].memory_max_rank);
        let chosen = fastest.map(|(index, _)| index).or_else(smallest);
        chosen.ok_or_else(|| Error::invalid("ranks", 0, "at least 1"))
    }
}

/// Grids among which one is chosen.
pub(super) struct Search<'a> {
    pub(super) machine: &'a Machine,
    pub(super) spec: &'a Spec,
    pub(super) options: &'a TrafficOptions<'a>,
    pub(super) grids: Vec<HeadGrid>,
}

impl Search<'_> {
    /// Predicts grids in the order of their bounds until one exceeds the least time; as
    /// [`Prediction::estimate`] if the plan is large, and then without the bytes of ranks. Returns
    /// those that were predicted, in the order of the grids.
    pub(super) fn best_first(
        &self,
        is_large: bool,
        tick: &mut dyn FnMut(),
    ) -> Result<Vec<(StrategyTraffic, Prediction)>> {
        let Self { machine, spec, options, ref grids } = *self;
        let ranks = grids.first().map_or(0, |grid| grid.groups() * grid.members());
        let layouts = if is_large { self.layouts(tick) } else { Vec::new() };
        let bounds = Bounds::new(spec, ranks, options);
        let bound = |grid: &HeadGrid| match layout_of(&layouts, grid) {
            Some(layout) => bounds.seconds_of_many(grid, machine, &layout.of_ranks),
            None => bounds.seconds(grid, machine),
        };
        let bounds: Vec<f64> = grids.iter().map(bound).collect::<Result<_>>()?;
        let mut computed: Vec<Option<(StrategyTraffic, Prediction)>> =
            grids.iter().map(|_| None).collect();
        best_first(&bounds, |index| {
            let grid = grids[index];
            let (traffic, prediction) = if let Some(layout) = layout_of(&layouts, &grid) {
                let layout = layout.of_same_parts(&spec.dims, &grid);
                let strategy = grid.strategy();
                let traffic = StrategyTraffic::without_bytes(spec, strategy, grid, options, layout);
                let plan = GridPlan { traffic: &traffic, spec, options, machine };
                let prediction = Prediction::estimate(&plan, tick)?;
                (traffic, prediction)
            } else {
                let traffic = StrategyTraffic::of(spec, grid, options, tick)?;
                let prediction = Prediction::of(&traffic, spec, options, machine, tick)?;
                (traffic, prediction)
            };
            computed[index] = Some((traffic, prediction));
            Ok(prediction.fits.then(|| prediction.seconds()))
        })?;
        Ok(computed.into_iter().flatten().collect())
    }

    /// Returns a layout for each number of head parts: that of the ranks depends on nothing else,
    /// and its choice takes longer than a prediction.
    fn layouts(&self, tick: &mut dyn FnMut()) -> Vec<(usize, GroupLayout)> {
        let Self { spec, options, ref grids, .. } = *self;
        let TrafficOptions { layout, placement, .. } = *options;
        let mut layouts: Vec<(usize, GroupLayout)> = Vec::new();
        for grid in grids {
            if layout_of(&layouts, grid).is_none() {
                let of_member = spec.of_member(grid, 0);
                let chosen = GroupLayout::choose(&of_member, grid, layout, placement, tick);
                layouts.push((grid.head_parts(), chosen));
            }
        }
        layouts
    }
}

/// Returns the layout of a grid with as many head parts.
fn layout_of<'a>(layouts: &'a [(usize, GroupLayout)], grid: &HeadGrid) -> Option<&'a GroupLayout> {
    layouts.iter().find(|of| of.0 == grid.head_parts()).map(|of| &of.1)
}
