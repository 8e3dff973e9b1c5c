//! The steps of a pass with the seconds of their tiles and the bytes of their messages.

use super::{
    Machine,
    network::{Network, Transfer},
    ring_steps::RingSteps,
    timed_step::{PairSeconds, TimedStep},
};
use crate::{
    BackwardMode, Error, ExchangeFields, HeadField, Result, Side, Spec, Strategy, StrategyTraffic,
    TrafficOptions,
};

/// The most ranks of a plan of which every rank is executed step by step, which takes O(ranks²)
/// time and memory: 65,536 steps. Of more ranks the exchange is a sum over rounds, and of rings
/// one is executed for all.
pub(crate) const MOST_STEPPED_RANKS: usize = 256;

/// A strategy on a machine, whose time is predicted.
#[derive(Clone, Copy)]
pub(super) struct GridPlan<'a> {
    pub(super) traffic: &'a StrategyTraffic,
    pub(super) spec: &'a Spec,
    pub(super) options: &'a TrafficOptions<'a>,
    pub(super) machine: &'a Machine,
}

/// Returns the least seconds of a visible pair in the tiles of a forward and, if there is one, a
/// backward pass: of one pass, which a ring of one rank takes whatever the spec says.
///
/// # Errors
/// [`Error::InvalidArgument`] naming `machine` if it has no rate of the element type.
pub(crate) fn pair_seconds(spec: &Spec, machine: &Machine, backward: bool) -> Result<f64> {
    let seconds = PairSeconds::new(spec, &machine.rate(spec.dtype, spec.dims.head_dim)?);
    let of_backward = if backward { seconds.backward_pass(BackwardMode::OnePass) } else { 0.0 };
    Ok(seconds.forward_pass() + of_backward)
}

/// Returns the rounds of the all-gather at the entry and at the end of a pass: in round k rank r
/// sends to rank r + 2^k. Its few bytes are not payload.
fn agreement(ranks: usize) -> impl Iterator<Item = TimedStep> {
    let distances = (0..usize::BITS).map(|round| 1 << round);
    distances.take_while(move |&distance: &usize| distance < ranks).map(move |distance| {
        let transfer = |from: usize| Transfer::in_step(from, (from + distance) % ranks, 0.0);
        TimedStep { transfers: (0..ranks).map(transfer).collect(), ..TimedStep::idle(ranks) }
    })
}

impl<'a> GridPlan<'a> {
    pub(super) const fn ranks(&self) -> usize {
        self.traffic.grid.groups() * self.traffic.grid.members()
    }

    /// Returns the network of the ranks, by ring index.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `machine` if it is invalid, or lacks a link.
    pub(super) fn network(&self) -> Result<Network<'a>> {
        let Self { traffic, options, machine, .. } = *self;
        machine.check()?;
        let of_ranks = machine.nodes(self.ranks(), options.placement);
        let order = &traffic.layout.order;
        let nodes: Vec<usize> =
            (0..self.ranks()).map(|index| of_ranks[order.rank(index)]).collect();
        Network::new(machine, &nodes)
    }

    /// Returns the seconds of a visible pair.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `machine` if it has no rate of the element type, or
    /// `strategy` for [`Strategy::Auto`], which has no steps.
    pub(super) fn pair_seconds(&self) -> Result<PairSeconds> {
        let Self { traffic, spec, machine, .. } = *self;
        if traffic.strategy == Strategy::Auto {
            return Err(Error::invalid(
                "strategy",
                Strategy::Auto,
                "one that was chosen, not auto",
            ));
        }
        Ok(PairSeconds::new(spec, &machine.rate(spec.dtype, spec.dims.head_dim)?))
    }

    /// Returns the steps of the forward and of the backward pass; the latter has none without one.
    pub(super) fn of_passes(&self, tick: &mut dyn FnMut()) -> Result<[Vec<TimedStep>; 2]> {
        let passes = self.steps(self.pair_seconds()?, tick)?;
        let ranks = self.ranks();
        let agreed = |steps: Vec<TimedStep>| {
            if steps.is_empty() {
                return steps;
            }
            agreement(ranks).chain(steps).chain(agreement(ranks)).collect()
        };
        Ok(passes.map(agreed))
    }

    /// Returns the bytes of partial results that a rank merges per second; `None` if there are
    /// none, or if they take no time.
    pub(super) fn merge_bandwidth(&self) -> Option<f64> {
        self.machine.merge_bandwidth.filter(|_| self.traffic.grid.columns() > 1)
    }

    /// Returns the steps of a grid: exchange, ring over groups, exchange. A ring is a grid whose
    /// groups have one member.
    fn steps(&self, seconds: PairSeconds, tick: &mut dyn FnMut()) -> Result<[Vec<TimedStep>; 2]> {
        let Self { traffic, spec, options, .. } = *self;
        let grid = &traffic.grid;
        let of_forward = ExchangeFields::of_forward(spec, grid);
        let of_backward = ExchangeFields::of_backward(spec, grid);
        let ring = RingSteps::new(traffic, spec, options, seconds, None, tick)?;
        let around = |fields: &ExchangeFields, ring: Vec<TimedStep>, is_forward| {
            let partial = fields.partial(is_forward);
            let [before, after] = self.exchange(fields, partial);
            before.into_iter().chain(ring).chain(after).collect()
        };
        let [forward, backward] = [ring.forward(), ring.backward()];
        let forward = around(&of_forward, forward, true);
        let backward =
            if options.backward { around(&of_backward, backward, false) } else { Vec::new() };
        Ok([forward, backward])
    }

    /// Returns the query and the key rows of each rank.
    pub(super) fn rows(&self) -> Vec<[u64; 2]> {
        let StrategyTraffic { grid, layout, .. } = self.traffic;
        let ranks = grid.groups() * grid.members();
        let dims = &self.spec.dims;
        let rows = |ring_index: usize| {
            let of = |side, len| layout.of_ranks.shard(side, len, ring_index, ranks).len();
            [of(Side::Q, dims.q_len), of(Side::Kv, dims.kv_len)]
        };
        (0..ranks).map(rows).collect()
    }

    pub(super) fn merge_seconds(&self, bytes: f64) -> f64 {
        self.merge_bandwidth().map_or(0.0, |bandwidth| bytes / bandwidth)
    }

    /// Returns the rounds of the exchange before a pass, and those after it. The part of a round is
    /// merged under the messages of the next.
    fn exchange(&self, fields: &ExchangeFields, partial: &[HeadField]) -> [Vec<TimedStep>; 2] {
        let grid = &self.traffic.grid;
        let members = grid.members();
        let rows = self.rows();
        let ranks = rows.len();
        let bytes = |fields: &[HeadField], between: [usize; 2], of: usize| {
            let members = between.map(|ring_index| grid.member(ring_index));
            ExchangeFields::bytes_between(fields, grid, members, rows[of]) as f64
        };
        let at = |ring_index: usize, distance: usize| {
            grid.ring_index(grid.group(ring_index), (grid.member(ring_index) + distance) % members)
        };
        let rounds = |bytes_of: &dyn Fn(usize, usize) -> f64| -> Vec<TimedStep> {
            let round = |distance: usize| {
                let transfer = |from: usize| {
                    let to = at(from, distance);
                    Transfer::in_step(from, to, bytes_of(from, to))
                };
                let all = (0..ranks).map(transfer).filter(|transfer| transfer.bytes > 0.0);
                TimedStep { transfers: all.collect(), ..TimedStep::idle(ranks) }
            };
            (1..members).map(round).collect()
        };
        // own rows of another member's heads, then another member's rows of the own heads
        let before = rounds(&|from, to| bytes(&fields.inputs, [from, to], from));
        let mut after = rounds(&|from, to| bytes(&fields.outputs, [from, to], to));
        if self.merge_bandwidth().is_some() {
            // the seconds of the part of the member at a distance before each rank
            let merge = |distance: usize| -> Vec<f64> {
                let of = |to: usize| {
                    let from = at(to, members - distance);
                    self.merge_seconds(bytes(partial, [from, to], to))
                };
                (0..ranks).map(of).collect()
            };
            // the own part is merged before the first message is posted
            let own = TimedStep { compute: merge(0), ..TimedStep::idle(ranks) };
            for distance in 2..members {
                after[distance - 1].compute = merge(distance - 1);
            }
            let last = TimedStep { compute: merge(members - 1), ..TimedStep::idle(ranks) };
            after.insert(0, own);
            after.push(last);
        }
        [before, after]
    }
}
