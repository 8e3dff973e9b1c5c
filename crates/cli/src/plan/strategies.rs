//! Figures of every strategy that ranks and heads admit.

use annulus_core::{
    Backend, Batch, Choice, Error, HeadGrid, Layout, Machine, Placement, Prediction, Result, Spec,
    Strategy, StrategyTraffic, TrafficOptions,
};
use serde::Serialize;

use super::figures::MOST_STEPPED_RANKS;
use crate::report::bytes;

/// Figures of one strategy.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StrategyFigures {
    /// Name of the strategy, as `--strategy` takes it.
    pub(super) name: String,
    /// Parts into which heads, queries and keys are divided at the same time; a part of the
    /// queries receives the keys one after another.
    pub(super) grid: [usize; 3],
    /// Payload bytes of a forward pass.
    pub(super) bytes_sent_total: u128,
    /// Those of the rank that sends the most.
    pub(super) bytes_max_rank: u128,
    /// Payload bytes of a backward pass.
    backward_bytes_sent_total: u128,
    /// Those of the rank that sends the most.
    backward_bytes_max_rank: u128,
    /// Upper bound of the bytes of message buffers and of exchanged tensors on a rank.
    pub(super) memory_max_rank: u128,
    /// Predicted seconds of a forward and a backward pass; null without a machine, as are the
    /// fields below.
    pub(super) time_predicted: Option<f64>,
    /// Predicted seconds of them in which a rank waits for messages.
    exposed_predicted: Option<f64>,
    /// Payload bytes of both passes between ranks of a node.
    bytes_inside_node: Option<u128>,
    /// Payload bytes of both passes between nodes.
    bytes_between_nodes: Option<u128>,
    /// True if `memory_max_rank` fits the memory of a rank.
    fits_memory: Option<bool>,
}

/// Traffic of the strategies, and the one that is planned.
#[derive(Default)]
pub(super) struct Strategies {
    all: Vec<StrategyTraffic>,
    /// Predictions of the strategies in the same order; empty without a machine.
    predictions: Vec<Prediction>,
    /// Index of the one that is planned.
    chosen: usize,
}

impl Strategies {
    /// Plans every strategy of `spec` with a forward and a backward pass. For more than
    /// [`MOST_STEPPED_RANKS`] ranks a ring is planned alone, because that takes a third of the time.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] naming `strategy` if it does not fit ranks and
    /// heads, or `machine` as [`Machine::choose`]; [`annulus_core::Error::Unsupported`] of the
    /// reproducible order.
    pub(super) fn new(
        spec: &Spec,
        ranks: usize,
        layout: Option<&Layout>,
        strategy: Strategy,
        machine: Option<&Machine>,
        placement: Option<&Placement>,
    ) -> Result<Self> {
        let grid = HeadGrid::of(&spec.dims, ranks, strategy)?;
        if let Some(grid) = &grid {
            grid.check(spec, true)?;
        }
        if strategy == Strategy::Ring && ranks > MOST_STEPPED_RANKS && machine.is_none() {
            return Ok(Self::default());
        }
        let options = TrafficOptions { placement, ..options(spec, layout)? };
        let all = StrategyTraffic::of_all(spec, ranks, &options, &mut || ())?;
        let (fastest, predictions) = match machine {
            Some(machine) => {
                let (fastest, all) = machine.choose(&all, spec, &options, &mut || ())?;
                (Some(fastest), all)
            }
            None => (None, Vec::new()),
        };
        let position = |wanted| all.iter().position(|of| of.grid == wanted).unwrap_or(0);
        let chosen = match (grid, fastest) {
            (Some(grid), _) => position(grid),
            (None, Some(fastest)) => fastest,
            (None, None) => position(StrategyTraffic::cheapest(&all)?.grid),
        };
        Ok(Self { all, predictions, chosen })
    }

    /// Plans the ring of packed documents, for which there is no other strategy here; with a machine
    /// it is predicted.
    ///
    /// # Errors
    /// As [`Strategies::new`].
    pub(super) fn of_documents(
        spec: &Spec,
        ranks: usize,
        Choice { layout, route, .. }: &Choice,
        batch: &Batch,
        machine: &Machine,
    ) -> Result<Self> {
        let options = TrafficOptions {
            route: Some(*route),
            batch: Some(batch),
            ..options(spec, Some(layout))?
        };
        let none = || Error::internal("no grid of a ring");
        let grid = HeadGrid::of(&spec.dims, ranks, Strategy::Ring)?.ok_or_else(none)?;
        let traffic = StrategyTraffic::of(spec, grid, &options, &mut || ())?;
        let prediction = Prediction::of(&traffic, spec, &options, machine, &mut || ())?;
        Ok(Self { all: vec![traffic], predictions: vec![prediction], chosen: 0 })
    }

    /// Returns the traffic of the strategy that is planned; `None` if it is the ring.
    pub(super) fn grid(&self) -> Option<&StrategyTraffic> {
        self.all.get(self.chosen).filter(|of| of.grid.members() > 1)
    }

    /// Returns the figures of all strategies that were planned.
    pub(super) fn figures(&self) -> Vec<StrategyFigures> {
        let of = |(index, traffic)| StrategyFigures::of(traffic, self.predictions.get(index));
        self.all.iter().enumerate().map(of).collect()
    }
}

/// Options of a forward and a backward pass on the CPU.
fn options<'a>(spec: &Spec, layout: Option<&'a Layout>) -> Result<TrafficOptions<'a>> {
    let kv_tile = annulus_cpu::Cpu::new(1)?.capabilities(spec)?.kv_tile;
    Ok(TrafficOptions {
        backward: true,
        layout,
        route: None,
        placement: None,
        kv_tile,
        receive_ahead: 1,
        batch: None,
    })
}

impl StrategyFigures {
    fn of(traffic: &StrategyTraffic, predicted: Option<&Prediction>) -> Self {
        let grid = &traffic.grid;
        let most = |bytes: &[u128]| bytes.iter().copied().max().unwrap_or(0);
        Self {
            name: traffic.strategy.to_string(),
            grid: [grid.head_parts(), grid.groups(), grid.columns()],
            bytes_sent_total: traffic.forward.iter().sum(),
            bytes_max_rank: most(&traffic.forward),
            backward_bytes_sent_total: traffic.backward.iter().sum(),
            backward_bytes_max_rank: most(&traffic.backward),
            memory_max_rank: traffic.memory_max_rank,
            time_predicted: predicted.map(Prediction::seconds),
            exposed_predicted: predicted.map(Prediction::exposed),
            bytes_inside_node: predicted.map(|of| of.bytes.inside_node as u128),
            bytes_between_nodes: predicted.map(|of| of.bytes.between_nodes as u128),
            fits_memory: predicted.map(|of| of.fits),
        }
    }

    /// Describes the strategy in one line; that of `chosen` is marked.
    pub(super) fn in_words(&self, chosen: &str) -> String {
        let mark = if self.name == chosen { "*" } else { " " };
        let sent = format!(
            "{mark} {:<12} {} sent forward, {} backward, at most {} of buffers on a rank",
            self.name,
            bytes(self.bytes_sent_total),
            bytes(self.backward_bytes_sent_total),
            bytes(self.memory_max_rank)
        );
        let (Some(time), Some(exposed), Some(inside), Some(between)) = (
            self.time_predicted,
            self.exposed_predicted,
            self.bytes_inside_node,
            self.bytes_between_nodes,
        ) else {
            return sent;
        };
        let fits = match self.fits_memory {
            Some(false) => ", more than its memory",
            _ => "",
        };
        format!(
            "{sent}{fits}; predicted {}, of which {} exposed; {} inside nodes, {} between them",
            seconds(time),
            seconds(exposed),
            bytes(inside),
            bytes(between)
        )
    }
}

/// Formats seconds with three digits after the unit's point.
fn seconds(seconds: f64) -> String {
    match seconds {
        of if of >= 1.0 => format!("{of:.3} s"),
        of if of >= 1e-3 => format!("{:.3} ms", of * 1e3),
        of => format!("{:.3} µs", of * 1e6),
    }
}
