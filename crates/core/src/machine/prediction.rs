//! The predicted time of a strategy, and the choice of the least.

use super::{Machine, network::Network, steps, timed_step::TimedStep};
use crate::{
    Error, HeadGrid, Result, Spec, StrategyTraffic, TrafficOptions,
    strategy::{Bounds, best_first},
};

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
    /// Exposed communication of the rank that has the most.
    pub exposed: f64,
}

/// Payload bytes by link. Predictions are exact up to 2⁵³ bytes and rings of 256 ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkBytes {
    /// Bytes between ranks of one node.
    pub inside_node: f64,
    /// Bytes between ranks of different nodes.
    pub between_nodes: f64,
}

impl Prediction {
    /// Predicts the time of a strategy. `options` are those with which `traffic` was computed.
    /// Calls `tick` between steps of a long computation.
    ///
    /// Rings of up to 256 ranks are executed step by step; the work of a step is estimated from
    /// 16,384 queries. Larger rings are a step with the mean work and bytes of all.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `machine` if it is invalid ([`Machine::check`]), has no
    /// rate of the element type, or lacks a link between the nodes of the ranks.
    pub fn of(
        traffic: &StrategyTraffic,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        machine: &Machine,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        machine.check()?;
        let ranks = traffic.forward.len();
        let of_ranks = machine.nodes(ranks, options.placement);
        let order = &traffic.layout.order;
        let nodes: Vec<usize> = (0..ranks).map(|index| of_ranks[order.rank(index)]).collect();
        let network = Network::new(machine, &nodes)?;
        let [forward, backward] = steps::of_passes(traffic, spec, options, machine, tick)?;
        let mut bytes = LinkBytes::default();
        let mut time = |steps: &[TimedStep]| execute(&network, steps, ranks, &mut bytes);
        let [forward, backward] = [time(&forward), time(&backward)];
        let fits = traffic.memory_max_rank <= u128::from(machine.memory);
        Ok(Self { forward, backward, bytes, fits })
    }

    /// Returns the seconds of all passes.
    pub fn seconds(&self) -> f64 {
        self.forward.seconds + self.backward.seconds
    }

    /// Returns the exposed communication of all passes, in seconds.
    pub fn exposed(&self) -> f64 {
        self.forward.exposed + self.backward.exposed
    }
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
}

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
        let mut grids = HeadGrid::candidates(spec, ranks, options.backward);
        grids.retain(admits);
        let bounds = Bounds::new(spec, ranks, options);
        let bounds: Vec<f64> =
            grids.iter().map(|grid| bounds.seconds(grid, self)).collect::<Result<_>>()?;
        let mut computed: Vec<Option<(StrategyTraffic, Prediction)>> =
            grids.iter().map(|_| None).collect();
        best_first(&bounds, |index| {
            let traffic = StrategyTraffic::of(spec, grids[index], options, tick)?;
            let prediction = Prediction::of(&traffic, spec, options, self, tick)?;
            computed[index] = Some((traffic, prediction));
            Ok(prediction.fits.then(|| prediction.seconds()))
        })?;
        let (mut all, mut predictions): (Vec<_>, Vec<_>) = computed.into_iter().flatten().unzip();
        for traffic in StrategyTraffic::of_routes(spec, ranks, options, tick)? {
            predictions.push(Prediction::of(&traffic, spec, options, self, tick)?);
            all.push(traffic);
        }
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

/// Executes the steps of one pass and adds its bytes.
pub(super) fn execute(
    network: &Network<'_>,
    steps: &[TimedStep],
    ranks: usize,
    bytes: &mut LinkBytes,
) -> PassTime {
    let mut clocks = vec![0.0f64; ranks];
    let mut exposed = vec![0.0f64; ranks];
    let mut arrivals: Vec<Option<Arrival>> = vec![None; ranks];
    // ends of sends for which a rank waits after its next tiles
    let mut sends_end = vec![0.0f64; ranks];
    for step in steps {
        let seconds = network.seconds(&step.transfers);
        let delays = network.delays(&step.transfers);
        for _ in 0..step.repeats {
            let begins = clocks.clone();
            for rank in 0..ranks {
                let begin = begins[rank];
                // a rank without tiles only waits
                let delay = if step.compute[rank] > 0.0 { delays[rank] } else { 0.0 };
                let compute = step.compute[rank] + delay;
                let tiles_end = arrivals[rank]
                    .take()
                    .map_or(begin + compute, |arrival| arrival.tiles_end(begin, compute));
                clocks[rank] = tiles_end.max(std::mem::take(&mut sends_end[rank]));
            }
            for (transfer, &[latency, seconds]) in step.transfers.iter().zip(&seconds) {
                network.count(transfer, bytes);
                let begin = begins[transfer.from].max(begins[transfer.to]) + latency;
                let end = begin + seconds;
                let in_parts = |rank: usize| step.in_parts[rank];
                if in_parts(transfer.from) {
                    sends_end[transfer.from] = sends_end[transfer.from].max(end);
                } else {
                    clocks[transfer.from] = clocks[transfer.from].max(end);
                }
                if in_parts(transfer.to) {
                    arrivals[transfer.to] = Some(Arrival { begin, seconds });
                } else {
                    clocks[transfer.to] = clocks[transfer.to].max(end);
                }
            }
            for rank in 0..ranks {
                exposed[rank] += (clocks[rank] - begins[rank] - step.compute[rank]).max(0.0);
            }
        }
    }
    let most = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
    PassTime { seconds: most(&clocks), exposed: most(&exposed) }
}
