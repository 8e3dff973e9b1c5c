//! Figures of every strategy that ranks and heads admit.

use annulus_core::{
    Backend, Batch, Choice, HeadGrid, Layout, Machine, Placement, Prediction, Result, Route, Spec,
    Strategy, StrategyTraffic, TrafficOptions,
};
use serde::Serialize;

use crate::report::bytes;

/// The most ranks for which steps are written and drawn. They take O(ranks²) time and memory, all
/// other figures O(ranks).
pub(super) const MOST_STEPPED_RANKS: usize = 256;

/// Figures of one strategy.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StrategyFigures {
    /// Name of the strategy, as `--strategy` takes it: the published one, if there is one.
    pub(super) name: String,
    /// Name of the heads × ring or grid that it is a published name of.
    #[serde(skip_serializing_if = "Option::is_none")]
    form: Option<String>,
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
    /// [`MOST_STEPPED_RANKS`] ranks a strategy by its name is planned alone, and of all strategies
    /// those that a lower bound does not exclude from the choice, because all of them take minutes
    /// for 65,536 ranks. The figures of a ring then are those of the ring alone.
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
        let options = TrafficOptions { placement, ..options(spec, layout)? };
        if let Some(grid) = grid.filter(|_| ranks > MOST_STEPPED_RANKS && machine.is_none()) {
            if grid.members() == 1 {
                return Ok(Self::default());
            }
            let all = vec![StrategyTraffic::of(spec, grid, &options, &mut || ())?];
            return Ok(Self { all, predictions: Vec::new(), chosen: 0 });
        }
        let Compared { all, predictions, fastest } =
            Compared::new(spec, ranks, &options, grid, machine)?;
        let chosen = match (grid, fastest) {
            (Some(grid), _) => position(&all, strategy, grid),
            (None, Some(fastest)) => fastest,
            (None, None) => {
                let cheapest = StrategyTraffic::cheapest(&all)?;
                position(&all, cheapest.strategy, cheapest.grid)
            }
        };
        Ok(Self { all, predictions, chosen })
    }

    /// Plans the ring of packed documents on the route of `choice` and on those of other
    /// strategies, and predicts them.
    ///
    /// # Errors
    /// As [`Strategies::new`].
    pub(super) fn of_documents(
        spec: &Spec,
        choice: &Choice,
        batch: &Batch,
        strategy: Strategy,
        machine: &Machine,
        placement: Option<&Placement>,
    ) -> Result<Self> {
        let ranks = choice.order.ranks().len();
        let layout = Some(&choice.layout);
        let of_routes = TrafficOptions { batch: Some(batch), placement, ..options(spec, layout)? };
        let of_ring = TrafficOptions { route: Some(choice.route), ..of_routes };
        let grid = HeadGrid::new(&spec.dims, ranks, 1)?;
        let mut all = vec![StrategyTraffic::of(spec, grid, &of_ring, &mut || ())?];
        all.extend(StrategyTraffic::of_routes(spec, ranks, &of_routes, &mut || ())?);
        let predict = |traffic: &StrategyTraffic| {
            let is_ring = traffic.strategy == Strategy::Ring;
            let options = if is_ring { &of_ring } else { &of_routes };
            Prediction::of(traffic, spec, options, machine, &mut || ())
        };
        let predictions = all.iter().map(predict).collect::<Result<_>>()?;
        let chosen = position(&all, strategy, grid);
        Ok(Self { all, predictions, chosen })
    }

    /// Returns the route of the strategy that is planned, if that is a part of it.
    pub(super) fn route(&self) -> Option<Route> {
        self.all.get(self.chosen)?.strategy.route()
    }

    /// Returns the strategy that is planned, if strategies were compared.
    pub(super) fn chosen(&self) -> Option<Strategy> {
        Some(self.all.get(self.chosen)?.strategy)
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

/// Strategies that are listed.
struct Compared {
    all: Vec<StrategyTraffic>,
    /// Predictions in the same order; empty without a machine.
    predictions: Vec<Prediction>,
    /// Index of the one to choose on a machine.
    fastest: Option<usize>,
}

impl Compared {
    /// Computes all strategies or, for more than [`MOST_STEPPED_RANKS`] ranks, those of which no
    /// lower bound exceeds the best, and the `given` one.
    fn new(
        spec: &Spec,
        ranks: usize,
        options: &TrafficOptions<'_>,
        given: Option<HeadGrid>,
        machine: Option<&Machine>,
    ) -> Result<Self> {
        let tick = &mut || ();
        if ranks <= MOST_STEPPED_RANKS {
            let mut all = StrategyTraffic::of_all(spec, ranks, options, tick)?;
            all.extend(StrategyTraffic::of_routes(spec, ranks, options, tick)?);
            let choose = |machine: &Machine| machine.choose(&all, spec, options, &mut || ());
            let (fastest, predictions) = machine.map(choose).transpose()?.unzip();
            return Ok(Self { all, predictions: predictions.unwrap_or_default(), fastest });
        }
        // a strategy that is given is predicted alone: others may take hours to execute
        let admits = |grid: &HeadGrid| given.is_none_or(|given| *grid == given);
        let Some(machine) = machine else {
            let all = StrategyTraffic::of_fewest_bytes(spec, ranks, options, &admits, tick)?;
            return Ok(Self { all, predictions: Vec::new(), fastest: None });
        };
        let compared = machine.fastest(spec, ranks, options, &admits, tick)?;
        Ok(Self {
            all: compared.all,
            predictions: compared.predictions,
            fastest: Some(compared.chosen),
        })
    }
}

/// Returns the index of a strategy: of one with a route of its own, or else of a grid.
fn position(all: &[StrategyTraffic], strategy: Strategy, grid: HeadGrid) -> usize {
    let is_wanted = |of: &StrategyTraffic| match (of.strategy.route(), strategy.route()) {
        (Some(route), Some(wanted)) => route.name() == wanted.name(),
        (None, None) => of.grid == grid,
        _ => false,
    };
    all.iter().position(is_wanted).unwrap_or(0)
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
        let StrategyTraffic { grid, strategy, .. } = traffic;
        let published = strategy.published_on(traffic.forward.len());
        let most = |bytes: &[u128]| bytes.iter().copied().max().unwrap_or(0);
        Self {
            name: published.to_string(),
            form: (published != *strategy).then(|| strategy.to_string()),
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
        let name = match &self.form {
            Some(form) => format!("{} ({form})", self.name),
            None => self.name.clone(),
        };
        let sent = format!(
            "{mark} {name:<12} {} sent forward, {} backward, at most {} of buffers on a rank",
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
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".into(),
        of if of >= 1.0 => format!("{of:.3} s"),
        of if of >= 1e-3 => format!("{:.3} ms", of * 1e3),
        of => format!("{:.3} µs", of * 1e6),
    }
}
