//! Figures of every strategy that ranks and heads admit.

use annulus_core::{Result, Side, Spec};
use annulus_plan::{
    ExchangeFields, HeadField, HeadGrid, Machine, Prediction, Route, Strategy, StrategyBalance,
    StrategyTraffic, TrafficOptions,
};
use serde::Serialize;

use super::ring::{MOST_DETAILED_RANKS, MOST_LISTED_RANKS};
use crate::report::bytes;

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
    /// Payload bytes of a backward pass; null of a plan that is forward only, as is the field
    /// below.
    backward_bytes_sent_total: Option<u128>,
    /// Those of the rank that sends the most.
    backward_bytes_max_rank: Option<u128>,
    /// Upper bound of the bytes of message buffers and of exchanged tensors on a rank.
    pub(super) memory_max_rank: u128,
    /// Predicted seconds of a forward and, if there is one, a backward pass; null without a
    /// machine, as are the fields below.
    pub(super) time_predicted: Option<f64>,
    /// Predicted seconds of them beyond the tiles of the rank that has the most.
    exposed_predicted: Option<f64>,
    /// Payload bytes of all passes between ranks of a node.
    bytes_inside_node: Option<u128>,
    /// Payload bytes of all passes between nodes.
    bytes_between_nodes: Option<u128>,
    /// True if `memory_max_rank` fits the memory of a rank.
    fits_memory: Option<bool>,
    /// Balance, with packed documents.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    balance: Option<BalanceFigures>,
}

/// [`StrategyBalance`] of a strategy, as fields of its figures.
#[derive(Debug, Clone, Copy, Serialize)]
struct BalanceFigures {
    work_max_over_mean: f64,
    rows_max_over_mean: f64,
    redundancy: f64,
}

/// Traffic of the strategies, and further figures of the one that is planned.
pub(super) struct Strategies {
    all: Vec<StrategyTraffic>,
    /// Predictions of the strategies in the same order; empty without a machine.
    predictions: Vec<Prediction>,
    /// Balance of the strategies in the same order; empty without documents, where the layouts of
    /// all strategies balance about as well.
    balances: Vec<StrategyBalance>,
    /// True if a backward pass is planned too.
    backward: bool,
    /// Index of the one that is planned.
    chosen: usize,
    /// Visible pairs of each rank.
    pub(super) pairs: Vec<u128>,
    pub(super) balance: StrategyBalance,
    /// Route of the ring, of a grid that of the first key column.
    pub(super) route: Route,
}

/// Payload bytes that all ranks send in the parts of a pass of a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct PassBytes {
    /// Exchange of inputs in the groups.
    pub(super) before: u128,
    /// Rings over the groups.
    pub(super) rings: u128,
    /// Exchange of results in the groups.
    pub(super) after: u128,
}

impl Strategies {
    /// Plans every strategy of `spec`. For more than [`MOST_LISTED_RANKS`] ranks a strategy by its
    /// name is planned alone. The rings of a grid are checked for at most
    /// [`MOST_DETAILED_RANKS`].
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] naming `strategy` if it does not fit ranks and
    /// heads, or `machine` as [`Machine::choose`]; [`annulus_core::Error::Unsupported`] of the
    /// reproducible order.
    pub(super) fn new(
        spec: &Spec,
        ranks: usize,
        requested: Strategy,
        options: &TrafficOptions<'_>,
        machine: Option<&Machine>,
    ) -> Result<Self> {
        let tick = &mut || ();
        let grid = HeadGrid::of(&spec.dims, ranks, requested)?;
        grid.map_or(Ok(()), |grid| grid.check(spec, options.backward))?;
        let given = grid.map(|_| requested);
        let (all, given) = match given {
            Some(given) if ranks > MOST_LISTED_RANKS => {
                (vec![StrategyTraffic::of_strategy(spec, ranks, given, options, tick)?], Some(0))
            }
            _ => {
                let mut all = StrategyTraffic::of_all(spec, ranks, options, tick)?;
                all.extend(StrategyTraffic::of_routes(spec, ranks, options, tick)?);
                let of_given = |given| position(&mut all, spec, ranks, given, options);
                let given = given.map(of_given).transpose()?;
                (all, given)
            }
        };
        let choose = |machine: &Machine| machine.choose(&all, spec, options, tick);
        let (best, predictions) = machine.map(choose).transpose()?.unzip();
        let chosen = match given.or(best) {
            Some(chosen) => chosen,
            None => StrategyTraffic::choose(&all, spec, options, tick)?,
        };
        let mut balance = |of: &StrategyTraffic| of.balance(spec, options, tick);
        let balances: Vec<StrategyBalance> = match options.batch {
            Some(_) => all.iter().map(&mut balance).collect::<Result<_>>()?,
            None => Vec::new(),
        };
        let planned = &all[chosen];
        let of_planned = balances.get(chosen).copied();
        let balance = of_planned.map_or_else(|| balance(planned), Ok)?;
        if planned.grid.members() > 1 && ranks <= MOST_DETAILED_RANKS {
            planned.check(spec, options, tick)?;
        }
        let pairs = planned.pairs_of_ranks(spec, options)?;
        let route = planned.route(&planned.grid.spec_of(spec, 0), 0, options, tick);
        let predictions = predictions.unwrap_or_default();
        let backward = options.backward;
        Ok(Self { all, predictions, balances, backward, chosen, pairs, balance, route })
    }

    /// Returns the traffic of the strategy that is planned.
    pub(super) fn planned(&self) -> &StrategyTraffic {
        &self.all[self.chosen]
    }

    /// Returns the figures of all strategies that were planned.
    pub(super) fn figures(&self) -> Vec<StrategyFigures> {
        let of = |(index, traffic)| {
            let prediction = self.predictions.get(index);
            let figures = StrategyFigures::of(traffic, self.backward, prediction);
            StrategyFigures { balance: self.balances.get(index).map(Into::into), ..figures }
        };
        self.all.iter().enumerate().map(of).collect()
    }
}

/// Returns the index of a strategy, which is added if there is none of its name: once per node with
/// other nodes than those of the placement.
fn position(
    all: &mut Vec<StrategyTraffic>,
    spec: &Spec,
    ranks: usize,
    given: Strategy,
    options: &TrafficOptions<'_>,
) -> Result<usize> {
    let grid = HeadGrid::of(&spec.dims, ranks, given)?;
    let is_same = |of: &StrategyTraffic| match given {
        Strategy::OncePerNode { .. } => false,
        Strategy::AllGather => of.strategy == given,
        _ => of.strategy.route().is_none() && Some(of.grid) == grid,
    };
    if let Some(index) = all.iter().position(is_same) {
        return Ok(index);
    }
    let traffic = StrategyTraffic::of_strategy(spec, ranks, given, options, &mut || ())?;
    let same = all.iter().position(|of| of.strategy == traffic.strategy);
    Ok(same.unwrap_or_else(|| {
        all.push(traffic);
        all.len() - 1
    }))
}

impl PassBytes {
    /// Returns the bytes of a forward and, if there is one, of a backward pass of a grid.
    pub(super) fn of(traffic: &StrategyTraffic, spec: &Spec, has_backward: bool) -> Vec<Self> {
        let StrategyTraffic { grid, forward, backward, .. } = traffic;
        let sent = |fields: &[HeadField]| -> u128 {
            let of = fields.iter().map(|field| match field.side {
                Side::Q => field.bytes(grid, spec.dims.q_len as u64) * (grid.members() as u128 - 1),
                Side::Kv => {
                    field.bytes(grid, spec.dims.kv_len as u64) * (grid.head_parts() as u128 - 1)
                }
            });
            of.sum()
        };
        let pass = |fields: ExchangeFields, all: &[u128]| {
            let [before, after] = [&fields.inputs, &fields.outputs].map(|fields| sent(fields));
            let rings = all.iter().sum::<u128>().saturating_sub(before + after);
            Self { before, rings, after }
        };
        let of_forward = pass(ExchangeFields::of_forward(spec, grid), forward);
        let of_backward =
            has_backward.then(|| pass(ExchangeFields::of_backward(spec, grid), backward));
        [of_forward].into_iter().chain(of_backward).collect()
    }
}

impl From<&StrategyBalance> for BalanceFigures {
    fn from(balance: &StrategyBalance) -> Self {
        let StrategyBalance { work_max_over_mean, rows_max_over_mean, redundancy } = *balance;
        Self { work_max_over_mean, rows_max_over_mean, redundancy }
    }
}

impl StrategyFigures {
    fn of(traffic: &StrategyTraffic, has_backward: bool, predicted: Option<&Prediction>) -> Self {
        let StrategyTraffic { grid, strategy, .. } = traffic;
        let backward = Some(&traffic.backward).filter(|_| has_backward);
        let published = strategy.published_on(traffic.forward.len());
        let most = |bytes: &[u128]| bytes.iter().copied().max().unwrap_or(0);
        Self {
            name: published.to_string(),
            form: (published != *strategy).then(|| strategy.to_string()),
            grid: [grid.head_parts(), grid.groups(), grid.columns()],
            bytes_sent_total: traffic.forward.iter().sum(),
            bytes_max_rank: most(&traffic.forward),
            backward_bytes_sent_total: backward.map(|sent| sent.iter().sum()),
            backward_bytes_max_rank: backward.map(|sent| most(sent)),
            memory_max_rank: traffic.memory_max_rank,
            time_predicted: predicted.map(|of| of.seconds),
            exposed_predicted: predicted.map(|of| of.exposed),
            bytes_inside_node: predicted.map(|of| of.bytes_inside_nodes),
            bytes_between_nodes: predicted.map(|of| of.bytes_between_nodes),
            fits_memory: predicted.map(|of| of.fits),
            balance: None,
        }
    }

    /// Describes the strategy in one line; that of `chosen` is marked.
    pub(super) fn in_words(&self, chosen: &str) -> String {
        let mark = if self.name == chosen { "*" } else { " " };
        let name = match &self.form {
            Some(form) => format!("{} ({form})", self.name),
            None => self.name.clone(),
        };
        let backward = self.backward_bytes_sent_total;
        let backward = backward.map(|sent| format!(", {} backward", bytes(sent)));
        let mut sent = format!(
            "{mark} {name:<12} {} sent forward{}, at most {} of buffers on a rank",
            bytes(self.bytes_sent_total),
            backward.unwrap_or_default(),
            bytes(self.memory_max_rank)
        );
        if let Some(balance) = self.balance {
            let BalanceFigures { work_max_over_mean, rows_max_over_mean, redundancy } = balance;
            sent += &format!(
                "; work {work_max_over_mean:.3}, rows {rows_max_over_mean:.3}, redundancy \
                 {redundancy:.3}"
            );
        }
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
