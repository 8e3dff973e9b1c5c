//! The steps of a pass with the seconds of their tiles and the bytes of their messages.

use super::{
    Machine, mean_steps,
    network::Transfer,
    ring_steps::RingSteps,
    timed_step::{PairSeconds, TimedStep},
};
use crate::{
    Error, ExchangeFields, HeadField, Result, Side, Spec, Strategy, StrategyTraffic, TrafficOptions,
};

/// The most ranks of a ring whose steps are executed one by one, which takes O(ranks²) time and
/// memory: 65,536 steps. Larger rings have one mean step.
pub(crate) const MOST_STEPPED_RANKS: usize = 256;

/// Returns the steps of the forward and of the backward pass; the latter has none without one.
///
/// # Errors
/// [`Error::InvalidArgument`] naming `machine` if it has no rate of the element type, or `strategy`
/// for [`Strategy::Auto`], which has no steps.
pub(super) fn of_passes(
    traffic: &StrategyTraffic,
    spec: &Spec,
    options: &TrafficOptions<'_>,
    machine: &Machine,
    tick: &mut dyn FnMut(),
) -> Result<[Vec<TimedStep>; 2]> {
    let rate = machine.rate(spec.dtype, spec.dims.head_dim)?;
    let seconds = PairSeconds::new(spec, &rate);
    if traffic.strategy == Strategy::Auto {
        return Err(Error::invalid("strategy", Strategy::Auto, "one that was chosen, not auto"));
    }
    let passes = of_grid(traffic, spec, options, seconds, tick)?;
    let grid = &traffic.grid;
    let ranks = grid.groups() * grid.members();
    // a ring within a grid has agreements of its own
    let is_nested = grid.groups() > 1 && grid.members() > 1;
    let agreements = || (0..1 + usize::from(is_nested)).flat_map(|_| agreement(ranks));
    let agreed = |steps: Vec<TimedStep>| {
        if steps.is_empty() {
            return steps;
        }
        agreements().chain(steps).chain(agreements()).collect()
    };
    Ok(passes.map(agreed))
}

/// Returns the rounds of the all-gather at the entry and at the end of a pass: in round k rank r
/// sends to rank r + 2^k. Its few bytes are not payload.
fn agreement(ranks: usize) -> impl Iterator<Item = TimedStep> {
    let distances = (0..usize::BITS).map(|round| 1 << round);
    distances.take_while(move |&distance: &usize| distance < ranks).map(move |distance| {
        let transfer = |from: usize| Transfer { from, to: (from + distance) % ranks, bytes: 0.0 };
        TimedStep { transfers: (0..ranks).map(transfer).collect(), ..TimedStep::idle(ranks) }
    })
}

/// Returns the steps of a grid: exchange, ring over groups, exchange. A ring is a grid whose groups
/// have one member.
fn of_grid(
    traffic: &StrategyTraffic,
    spec: &Spec,
    options: &TrafficOptions<'_>,
    seconds: PairSeconds,
    tick: &mut dyn FnMut(),
) -> Result<[Vec<TimedStep>; 2]> {
    if traffic.grid.groups() > MOST_STEPPED_RANKS {
        return mean_steps::of_grid(traffic, spec, options, seconds);
    }
    let ring = RingSteps::new(traffic, spec, options, seconds, tick)?;
    let grid = &traffic.grid;
    let fields = [ExchangeFields::of_forward(spec, grid), ExchangeFields::of_backward(spec, grid)];
    let [forward, backward] = [ring.forward(), ring.backward()];
    let [of_forward, of_backward] = fields.map(|fields| exchange(traffic, spec, &fields));
    let around = |[before, after]: [Vec<TimedStep>; 2], ring: Vec<TimedStep>| {
        before.into_iter().chain(ring).chain(after).collect()
    };
    let forward = around(of_forward, forward);
    Ok([forward, if options.backward { around(of_backward, backward) } else { Vec::new() }])
}

/// Returns the rounds of the exchange before a pass, and those after it.
fn exchange(
    traffic: &StrategyTraffic,
    spec: &Spec,
    fields: &ExchangeFields,
) -> [Vec<TimedStep>; 2] {
    let StrategyTraffic { grid, layout, .. } = traffic;
    let (members, ranks) = (grid.members(), grid.groups() * grid.members());
    let rows = |ring_index: usize| {
        let of = |side, len| layout.of_ranks.shard(side, len, ring_index, ranks).len();
        [of(Side::Q, spec.dims.q_len), of(Side::Kv, spec.dims.kv_len)]
    };
    let rows: Vec<[u64; 2]> = (0..ranks).map(rows).collect();
    let bytes = |fields: &[HeadField], between: [usize; 2], of: usize| {
        let members = between.map(|ring_index| grid.member(ring_index));
        ExchangeFields::bytes_between(fields, grid, members, rows[of]) as f64
    };
    let rounds = |bytes_of: &dyn Fn(usize, usize) -> f64| -> Vec<TimedStep> {
        let round = |distance: usize| {
            let transfer = |from: usize| {
                let to =
                    grid.ring_index(grid.group(from), (grid.member(from) + distance) % members);
                Transfer { from, to, bytes: bytes_of(from, to) }
            };
            let all = (0..ranks).map(transfer).filter(|transfer| transfer.bytes > 0.0);
            TimedStep { transfers: all.collect(), ..TimedStep::idle(ranks) }
        };
        (1..members).map(round).collect()
    };
    // own rows of another member's heads, then another member's rows of the own heads
    [
        rounds(&|from, to| bytes(&fields.inputs, [from, to], from)),
        rounds(&|from, to| bytes(&fields.outputs, [from, to], to)),
    ]
}
