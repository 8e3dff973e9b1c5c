//! The predicted time of a strategy.

use super::{
    Machine,
    execution::execute,
    large_plan,
    steps::{GridPlan, MOST_STEPPED_RANKS},
    timed_step::TimedStep,
};
use crate::{Result, Spec, StrategyTraffic, TrafficOptions};

/// Predicted figures of one strategy on a machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Time of a forward pass.
    pub forward: PassTime,
    /// Time of a backward pass; 0 if there is none.
    pub backward: PassTime,
    /// Payload bytes that all ranks send in all passes.
    pub bytes: LinkBytes,
    /// True if [`StrategyTraffic::memory_max_rank`] fits [`Machine::memory`].
    pub fits: bool,
}

/// Predicted time of one pass, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PassTime {
    /// Time until the last rank has finished.
    pub seconds: f64,
    /// Time beyond the tiles and merges of the rank that has the most of them, at least 0: what
    /// communication, and waiting for ranks with more work in a step, add to a pass.
    pub exposed: f64,
}

impl std::iter::Sum for PassTime {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, of| Self {
            seconds: sum.seconds + of.seconds,
            exposed: sum.exposed + of.exposed,
        })
    }
}

/// Payload bytes by link. Predictions are exact up to 2⁵³ bytes and 256 ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkBytes {
    /// Bytes between ranks of one node.
    pub inside_node: f64,
    /// Bytes between ranks of different nodes.
    pub between_nodes: f64,
}

impl LinkBytes {
    /// Adds the bytes of `other`, so many times.
    pub(super) fn add(&mut self, other: &Self, times: f64) {
        self.inside_node += other.inside_node * times;
        self.between_nodes += other.between_nodes * times;
    }

    /// Returns bytes with this sum, in the same proportion.
    pub(super) fn of_total(&self, total: f64) -> Self {
        let all = self.inside_node + self.between_nodes;
        let share = if all > 0.0 { self.inside_node / all } else { 0.0 };
        Self { inside_node: total * share, between_nodes: total * (1.0 - share) }
    }
}

impl Prediction {
    /// Predicts the time of a strategy. `options` are those with which `traffic` was computed.
    /// Calls `tick` between steps of a long computation.
    ///
    /// Plans of up to 256 ranks are executed step by step on all ranks; the work of a step is
    /// estimated from 16,384 queries. Of more ranks, the exchange is a sum over rounds, and up to
    /// three rings over groups stand for all: executed step by step up to 256 groups, in steps with
    /// the mean work and bytes of more.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] naming `machine` if it is invalid ([`Machine::check`]),
    /// has no rate of the element type, or lacks a link between the nodes of the ranks.
    pub fn of(
        traffic: &StrategyTraffic,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        machine: &Machine,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let plan = GridPlan { traffic, spec, options, machine };
        if plan.ranks() > MOST_STEPPED_RANKS {
            return Self::estimate(&plan, tick);
        }
        let network = plan.network()?;
        let [forward, backward] = plan.of_passes(tick)?;
        let mut bytes = LinkBytes::default();
        let ranks = plan.ranks();
        let mut time = |steps: &[TimedStep]| execute(&network, steps, ranks, &mut bytes).time();
        let [forward, backward] = [time(&forward), time(&backward)];
        let fits = traffic.memory_max_rank <= u128::from(machine.memory);
        Ok(Self { forward, backward, bytes, fits })
    }

    /// Predicts the time of a strategy as that of many ranks. The traffic may lack the bytes of
    /// ranks.
    pub(super) fn estimate(plan: &GridPlan<'_>, tick: &mut dyn FnMut()) -> Result<Self> {
        large_plan::predict(plan, &plan.network()?, tick)
    }

    /// Returns the seconds of all passes.
    pub fn seconds(&self) -> f64 {
        self.forward.seconds + self.backward.seconds
    }

    /// Returns the exposed time of all passes, in seconds.
    pub fn exposed(&self) -> f64 {
        self.forward.exposed + self.backward.exposed
    }
}
