//! The choice of the strategy that sends the fewest bytes.
//!
//! Bytes do not count the work of ranks, and need not: without documents, layouts of all grids
//! balance the work about as well. With documents they do not. A layout that balances a ring gives
//! each rank as many pairs with all keys, but a rank of a grid has those with one key column. So a
//! grid is chosen for documents only if it is balanced, or no less than the ring, to which the
//! layout was given.

use super::{HeadGrid, Strategy, StrategyTraffic, TrafficOptions};
use crate::{GroupLayout, schedule::BALANCED};
use annulus_core::{Error, Result, Spec};

impl StrategyTraffic {
    /// Returns the index of the ring or grid that sends the fewest bytes in all passes, of ties the
    /// first. With a batch these are the ring and the grids whose busiest rank has at most 1.02
    /// times the mean of the visible pairs, or no more than that of the ring. Rings on a route of
    /// their own differ in time, not in the bytes that are needed. `options` are those with which
    /// the traffic was computed. Calls `tick` between steps of a long computation.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is none: the number of ranks is 0; as
    /// [`StrategyTraffic::of`].
    pub fn choose(
        all: &[Self],
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<usize> {
        let is_open = |&index: &usize| all[index].strategy.route().is_none();
        let mut order: Vec<usize> = (0..all.len()).filter(is_open).collect();
        order.sort_by_key(|&index| all[index].total());
        let mut limit = WorkLimit::new(spec, options);
        for &index in &order {
            if limit.admits(&all[index], tick)? {
                return Ok(index);
            }
        }
        order.first().copied().ok_or_else(|| Error::invalid("ranks", 0, "at least 1"))
    }
}

/// The most work of the busiest rank of a grid that is chosen.
struct WorkLimit<'a> {
    spec: &'a Spec,
    options: &'a TrafficOptions<'a>,
    /// Work of the busiest rank of the ring over the mean, computed when it is first used.
    of_ring: Option<f64>,
}

impl<'a> WorkLimit<'a> {
    const fn new(spec: &'a Spec, options: &'a TrafficOptions<'a>) -> Self {
        Self { spec, options, of_ring: None }
    }

    /// Returns true if the work of a grid does not exceed the limit. Without a batch none does.
    fn admits(&mut self, traffic: &StrategyTraffic, tick: &mut dyn FnMut()) -> Result<bool> {
        let Self { spec, options, .. } = *self;
        if options.batch.is_none() || traffic.strategy == Strategy::Ring {
            return Ok(true);
        }
        let work = traffic.work_max_over_mean(spec, options, tick)?;
        if work <= BALANCED {
            return Ok(true);
        }
        let ranks = traffic.grid.groups() * traffic.grid.members();
        let of_ring = match self.of_ring {
            Some(of_ring) => of_ring,
            None => *self.of_ring.insert(self.work_of_ring(ranks, tick)?),
        };
        Ok(work <= of_ring)
    }

    fn work_of_ring(&self, ranks: usize, tick: &mut dyn FnMut()) -> Result<f64> {
        let Self { spec, options, .. } = *self;
        let TrafficOptions { layout, placement, .. } = *options;
        let ring = HeadGrid::new(&spec.dims, ranks, 1)?;
        let layout = GroupLayout::choose(spec, &ring, layout, placement, tick);
        let ring = StrategyTraffic::without_bytes(spec, Strategy::Ring, ring, options, layout);
        ring.work_max_over_mean(spec, options, tick)
    }
}
