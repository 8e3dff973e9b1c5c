//! The predicted time of a strategy.

use super::{
    Machine, large_plan,
    network::Network,
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
    ///
    /// # Errors
    /// As [`Prediction::of`].
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

/// A block that arrives in parts while the tiles of its step are computed.
#[derive(Clone, Copy)]
struct Arrival {
    /// Time at which the transfer begins, with the latency.
    begin: f64,
    /// Seconds of the bytes.
    seconds: f64,
}

impl Arrival {
    /// Parts of a block, as the ring engine divides it.
    const PARTS: [f64; 4] = [0.5, 0.25, 0.125, 0.125];

    /// Returns the time at which tiles of `compute` seconds that begin at `begin` end: those of a
    /// part begin when it has arrived.
    fn tiles_end(self, begin: f64, compute: f64) -> f64 {
        let mut arrived = 0.0;
        Self::PARTS.into_iter().fold(begin, |end, part| {
            arrived += part;
            end.max(self.begin + self.seconds * arrived) + compute * part
        })
    }
}

/// Steps that were executed, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Executed {
    /// Time until the last rank has finished.
    pub(super) seconds: f64,
    /// Tiles and merges of all steps, of the rank that has the most.
    pub(super) tiles: f64,
}

impl Executed {
    /// Returns the time of steps of which `self` is the slowest and has the most tiles.
    pub(super) fn time(self) -> PassTime {
        PassTime { seconds: self.seconds, exposed: (self.seconds - self.tiles).max(0.0) }
    }

    /// Returns the later end, and the larger tiles, of steps that are executed at the same time.
    pub(super) const fn most(self, other: Self) -> Self {
        Self { seconds: self.seconds.max(other.seconds), tiles: self.tiles.max(other.tiles) }
    }
}

/// Executes the steps of one pass and adds its bytes.
pub(super) fn execute(
    network: &Network<'_>,
    steps: &[TimedStep],
    ranks: usize,
    bytes: &mut LinkBytes,
) -> Executed {
    let mut tiles = vec![0.0; ranks];
    let mut execution = Execution {
        clocks: vec![0.0; ranks],
        arrivals: vec![None; ranks],
        sends_end: vec![0.0; ranks],
    };
    for step in steps {
        let mut of_step = LinkBytes::default();
        step.transfers.iter().for_each(|transfer| network.count(transfer, &mut of_step));
        bytes.add(&of_step, step.repeats as f64);
        for (tiles, seconds) in tiles.iter_mut().zip(&step.compute) {
            *tiles += seconds * step.repeats as f64;
        }
        if step.repeats == 1 {
            execution.execute(step, network);
        } else {
            execution.repeat(step, network);
        }
    }
    let most = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
    Executed { seconds: most(&execution.clocks), tiles: most(&tiles) }
}

/// Clocks of all ranks in a pass.
struct Execution {
    clocks: Vec<f64>,
    arrivals: Vec<Option<Arrival>>,
    /// Ends of sends for which a rank waits after its next tiles.
    sends_end: Vec<f64>,
}

impl Execution {
    fn execute(&mut self, step: &TimedStep, network: &Network<'_>) {
        let begins = self.clocks.clone();
        for (rank, compute) in Self::tiles(step, network).into_iter().enumerate() {
            let begin = begins[rank];
            let tiles_end = self.arrivals[rank]
                .take()
                .map_or(begin + compute, |arrival| arrival.tiles_end(begin, compute));
            self.clocks[rank] = tiles_end.max(std::mem::take(&mut self.sends_end[rank]));
        }
        let seconds = network.seconds(&step.transfers);
        for (transfer, &[latency, seconds]) in step.transfers.iter().zip(&seconds) {
            let begin = begins[transfer.from].max(begins[transfer.to]) + latency;
            let end = begin + seconds;
            if step.in_parts[transfer.from] {
                self.sends_end[transfer.from] = self.sends_end[transfer.from].max(end);
            } else {
                self.clocks[transfer.from] = self.clocks[transfer.from].max(end);
            }
            if step.in_parts[transfer.to] {
                self.arrivals[transfer.to] = Some(Arrival { begin, seconds });
            } else {
                self.clocks[transfer.to] = self.clocks[transfer.to].max(end);
            }
        }
    }

    /// Executes equal steps, none of whose messages arrives in parts: each takes as long as that of
    /// the slowest rank, for which all ranks of a ring wait in the end.
    fn repeat(&mut self, step: &TimedStep, network: &Network<'_>) {
        let mut longest = Self::tiles(step, network).into_iter().fold(0.0, f64::max);
        for [latency, seconds] in network.seconds(&step.transfers) {
            longest = longest.max(latency + seconds);
        }
        let repeats = step.repeats as f64;
        let end = self.clocks.iter().copied().fold(0.0, f64::max) + longest * repeats;
        self.clocks.fill(end);
    }

    /// Returns the seconds of the tiles of each rank, delayed by messages. A rank without tiles
    /// only waits.
    fn tiles(step: &TimedStep, network: &Network<'_>) -> Vec<f64> {
        let delays = network.delays(&step.transfers);
        let tiles = step.compute.iter().zip(delays);
        tiles.map(|(&compute, delay)| if compute > 0.0 { compute + delay } else { 0.0 }).collect()
    }
}
