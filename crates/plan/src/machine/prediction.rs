//! The predicted time of a strategy, and the choice of the one with the least.
//!
//! ```text
//! pass       agreement, exchange, ring, agreement
//! exchange   latency · messages + bytes / bandwidth, inside nodes and then between them
//! ring       tiles + Σ over steps max(messages − tiles of a step, messages / 8)
//! messages   latency · blocks + bytes / bandwidth, of the slower kind of link: the blocks of the
//!            next step, and the gradients of the step before
//! tiles      FLOPs / rate; of a step the mean over the blocks of a rank
//! agreement  ⌈log₂ ranks⌉ short messages, one after another, before and after a pass
//! ```
//! Receives that are posted a steps ahead let messages move under the tiles of a steps: messages
//! and tiles are those of a steps together. Exchange and ring end on the rank that takes the
//! longest. Merges of partial results, and prologue and epilogue of a pass, are not modelled.

use annulus_core::{BackwardMode, Error, Result, Spec};

use crate::{
    machine::{ComputeRate, Link, Machine},
    strategy::{PassMessage, StrategyTraffic, TrafficOptions, backward_mode, work_of_ranks},
};

/// Predicted figures of one strategy on a machine, of all its passes together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Seconds until the last rank has finished.
    pub seconds: f64,
    /// Seconds beyond the tiles of the rank that has the most of them.
    pub exposed: f64,
    /// Payload bytes that all ranks send to ranks of their node.
    pub bytes_inside_nodes: u128,
    /// Payload bytes that all ranks send to other nodes.
    pub bytes_between_nodes: u128,
    /// True if [`StrategyTraffic::memory_max_rank`] fits [`Machine::memory`].
    pub fits: bool,
}

/// Matrix products of a visible pair in each pass: S, O; S, dP, dQ, dK, dV. In two passes S and dP
/// are computed twice.
const FORWARD_PRODUCTS: f64 = 2.0;
const ONE_PASS_PRODUCTS: f64 = 5.0;
const TWO_PASS_PRODUCTS: f64 = 7.0;

/// Share of the time of messages by which they delay the tiles that hide them: copies and the
/// network stack use the same cores. Measured over TCP: 0.6 to 1.5 ns of 8.5 ns a byte
/// (`benches/record/strategies.md`).
const HIDDEN_SHARE: f64 = 0.125;

/// Returns the seconds of a visible pair in a forward pass: a product has 2 · dim FLOPs, and dims
/// of keys and values count half each.
pub(super) fn forward_seconds(spec: &Spec, forward: f64) -> f64 {
    FORWARD_PRODUCTS * product_flops(spec) / forward
}

fn product_flops(spec: &Spec) -> f64 {
    (spec.dims.head_dim + spec.dims.value_dim) as f64
}

/// Times that count as equal to the least: a ring, which is the first, is not left for a difference
/// that no measurement finds.
const NEAR: f64 = 1.01;

impl Prediction {
    /// Predicts the time of a strategy. `options` are those with which `traffic` was computed.
    /// Calls `tick` between steps of a long computation.
    ///
    /// The work of ranks is estimated from 16,384 queries.
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
        let grid = &traffic.grid;
        let ranks = grid.groups() * grid.members();
        let of_ranks = machine.nodes(ranks, options.placement);
        let order = &traffic.layout.order;
        let nodes: Vec<usize> = (0..ranks).map(|index| of_ranks[order.rank(index)]).collect();
        let network = Network::new(machine, &nodes)?;
        let ComputeRate { forward, backward, .. } = machine.rate(spec.dtype, spec.dims.head_dim)?;
        let products = match backward_mode(spec) {
            BackwardMode::TwoPass if grid.groups() > 1 => TWO_PASS_PRODUCTS,
            _ => ONE_PASS_PRODUCTS,
        };
        let pair_seconds =
            [forward_seconds(spec, forward), products * product_flops(spec) / backward];

        // steps of the ring of a pass, of which some together
        let steps =
            if products == ONE_PASS_PRODUCTS { grid.groups() + 1 } else { 2 * grid.groups() };
        let ahead = traffic.receive_ahead(options).min(steps);
        let phases = 1 + steps.div_ceil(ahead);
        // by pass: the exchange, then the steps
        let mut loads: Vec<Vec<Loads<'_>>> = (0..1 + usize::from(options.backward))
            .map(|_| (0..phases).map(|_| network.loads()).collect())
            .collect();
        let mut sent = [0; 2];
        traffic.for_each_message(spec, options, tick, &mut |message| {
            let PassMessage { is_backward, step, has_gradients, from, to, bytes } = message;
            let phase = step.map_or(0, |step| 1 + step / ahead);
            sent[network.link([from, to])] += bytes;
            let loads = &mut loads[usize::from(is_backward)][phase];
            loads.add([from, to], bytes as f64, !has_gradients);
        })?;
        let pairs = work_of_ranks(traffic, spec, options, tick)?;
        let [mut seconds, mut tiles] = [0.0; 2];
        let most = |of_rank: &dyn Fn(usize) -> f64| (0..ranks).map(of_rank).fold(0.0, f64::max);
        for (is_backward, (loads, pair_seconds)) in loads.iter().zip(pair_seconds).enumerate() {
            let compute = |rank: usize| pairs[rank] as f64 * pair_seconds;
            let (exchange, ring) = loads.split_at(1);
            // a backward pass in one pass computes a part of the own block at the end
            let own = 1 + usize::from(is_backward == 1 && products == ONE_PASS_PRODUCTS);
            seconds += network.agreements()
                + most(&|rank| exchange[0].seconds(rank).iter().sum())
                + most(&|rank| ring_seconds(ring, rank, compute(rank), own, ahead));
            tiles += most(&compute);
        }
        let [bytes_inside_nodes, bytes_between_nodes] = sent;
        let fits = traffic.memory_max_rank <= u128::from(machine.memory);
        let exposed = (seconds - tiles).max(0.0);
        Ok(Self { seconds, exposed, bytes_inside_nodes, bytes_between_nodes, fits })
    }
}

/// Returns the seconds of the ring of a rank: its tiles take `compute` seconds, in the blocks that
/// it receives and in `own` parts of its own block. A phase has `ahead` steps.
fn ring_seconds(phases: &[Loads<'_>], rank: usize, compute: f64, own: usize, ahead: usize) -> f64 {
    let blocks: usize = phases.iter().map(|phase| phase.messages(rank)).sum();
    let steps = ahead.min(blocks + own - 1);
    let busy = phases.iter().filter(|phase| phase.seconds(rank) != [0.0; 2]).count();
    let hidden = compute * steps as f64 / (blocks + own).max(busy * steps) as f64;
    let late = |phase: &Loads<'_>| {
        let [inside, between] = phase.seconds(rank);
        let seconds = inside.max(between);
        (seconds - hidden).max(seconds * HIDDEN_SHARE)
    };
    compute + phases.iter().map(late).sum::<f64>()
}

impl Machine {
    /// Predicts every strategy of `all`, and returns the index of the one with the least time whose
    /// buffers fit the memory of a rank; of times within 1 % the first. If the buffers of none fit,
    /// it is the one with the least memory.
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
        let fitting = predictions.iter().enumerate().filter(|(_, prediction)| prediction.fits);
        let least = fitting.clone().map(|(_, of)| of.seconds).fold(f64::INFINITY, f64::min);
        let fastest = fitting.clone().find(|(_, of)| of.seconds <= least * NEAR);
        let smallest = || (0..all.len()).min_by_key(|&index| all[index].memory_max_rank);
        let chosen = fastest.map(|(index, _)| index).or_else(smallest);
        let chosen = chosen.ok_or_else(|| Error::invalid("ranks", 0, "at least 1"))?;
        Ok((chosen, predictions))
    }
}

// Messages of a phase of a pass over the links of a machine.

/// Links between the ranks of a plan, in the order of the caller's numbers.
pub(super) struct Network<'a> {
    machine: &'a Machine,
    /// Node of each rank, as a number below the number of nodes.
    nodes: Vec<usize>,
    node_count: usize,
}

/// Kinds of links: 0 inside a node, 1 between nodes.
const LINKS: [usize; 2] = [0, 1];

/// Messages of a phase, by rank and kind of link.
pub(super) struct Loads<'a> {
    network: &'a Network<'a>,
    of_ranks: Vec<RankLoad>,
    /// Bytes that leave and enter each node.
    of_nodes: Vec<[f64; 2]>,
}

/// Messages of a rank in a phase, by kind of link.
#[derive(Clone, Copy, Default)]
struct RankLoad {
    /// Messages that it receives and whose latency it waits for.
    messages: [u32; 2],
    /// Bytes `[sent, received]`.
    bytes: [[f64; 2]; 2],
}

impl<'a> Network<'a> {
    /// Creates the network of ranks on these nodes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `machine` if it lacks a link between some of the ranks.
    pub(super) fn new(machine: &'a Machine, nodes: &[usize]) -> Result<Self> {
        let mut names = nodes.to_vec();
        names.sort_unstable();
        let has_neighbours = names.windows(2).any(|two| two[0] == two[1]);
        names.dedup();
        let ranks = nodes.len();
        let lacks = |which: &str| {
            let want = format!("one that has it: {ranks} ranks are on {} nodes", names.len());
            Err(Error::invalid("machine", format!("no link {which}"), want))
        };
        if names.len() > 1 && machine.between_nodes.is_none() {
            return lacks("between_nodes");
        }
        if has_neighbours && machine.inside_node.is_none() {
            return lacks("inside_node");
        }
        let number = |node: &usize| names.binary_search(node).unwrap_or(0);
        Ok(Self { machine, nodes: nodes.iter().map(number).collect(), node_count: names.len() })
    }

    /// Returns the seconds of the agreements before and after a pass: ⌈log₂ ranks⌉ short messages,
    /// one after another, in each.
    pub(super) fn agreements(&self) -> f64 {
        let latency = |link: Option<Link>| link.map_or(0.0, |link| link.latency);
        let Machine { inside_node, between_nodes, .. } = *self.machine;
        let inside = latency(inside_node.filter(|_| self.node_count < self.nodes.len()));
        let between = latency(between_nodes.filter(|_| self.node_count > 1));
        2.0 * f64::from(self.nodes.len().next_power_of_two().ilog2()) * inside.max(between)
    }

    /// Returns the seconds of the messages of a rank over a kind of link: latency · messages +
    /// bytes / bandwidth, or as long as its node takes for the bytes of all its ranks.
    fn seconds(&self, link: usize, messages: f64, bytes: f64, of_node: f64) -> f64 {
        let Machine { inside_node, between_nodes, node_bandwidth, .. } = *self.machine;
        let Some(Link { latency, bandwidth }) = [inside_node, between_nodes][link] else {
            return 0.0;
        };
        let of_node = node_bandwidth.map_or(0.0, |of| of_node / of);
        latency * messages + (bytes / bandwidth).max(of_node)
    }

    /// Returns the kind of the link between two ranks: 0 inside a node, 1 between nodes.
    pub(super) fn link(&self, [from, to]: [usize; 2]) -> usize {
        usize::from(self.nodes[from] != self.nodes[to])
    }

    /// Returns the loads of no message.
    pub(super) fn loads(&'a self) -> Loads<'a> {
        Loads {
            network: self,
            of_ranks: vec![RankLoad::default(); self.nodes.len()],
            of_nodes: vec![[0.0; 2]; self.node_count],
        }
    }
}

impl Loads<'_> {
    /// Adds a message. The receiver waits for its latency, unless other messages hide it.
    pub(super) fn add(&mut self, [from, to]: [usize; 2], bytes: f64, waits: bool) {
        let link = self.network.link([from, to]);
        self.of_ranks[from].bytes[link][0] += bytes;
        let receiver = &mut self.of_ranks[to];
        receiver.messages[link] += u32::from(waits);
        receiver.bytes[link][1] += bytes;
        if link == 1 {
            self.of_nodes[self.network.nodes[from]][0] += bytes;
            self.of_nodes[self.network.nodes[to]][1] += bytes;
        }
    }

    /// Returns the number of messages that a rank receives and waits for.
    pub(super) fn messages(&self, rank: usize) -> usize {
        self.of_ranks[rank].messages.iter().map(|&count| count as usize).sum()
    }

    /// Returns the seconds of the messages of a rank over each kind of link, of the direction with
    /// more bytes.
    pub(super) fn seconds(&self, rank: usize) -> [f64; 2] {
        let larger = |[sent, received]: [f64; 2]| sent.max(received);
        LINKS.map(|link| {
            let RankLoad { messages, bytes } = self.of_ranks[rank];
            let messages = f64::from(messages[link]);
            let bytes = larger(bytes[link]);
            let is_shared = link == 1 && bytes > 0.0;
            let of_node =
                if is_shared { larger(self.of_nodes[self.network.nodes[rank]]) } else { 0.0 };
            self.network.seconds(link, messages, bytes, of_node)
        })
    }
}
