//! The steps of large rings, as means over the steps of a pass.

use super::{
    network::Transfer,
    ring_steps::distinct_members,
    timed_step::{PairSeconds, TimedStep},
};
use crate::{BackwardMode, Result, Spec, StrategyTraffic, TrafficOptions, Work};

/// Returns the steps of a forward and a backward pass over more groups than are executed one by
/// one: the first step, then a mean step as often as there are others.
///
/// A rank sends the bytes of a pass, those of the exchange included, in equal messages to the same
/// member of the next group, so those of the exchange count as messages between groups.
pub(super) fn of_grid(
    traffic: &StrategyTraffic,
    spec: &Spec,
    options: &TrafficOptions<'_>,
    seconds: PairSeconds,
) -> Result<[Vec<TimedStep>; 2]> {
    let StrategyTraffic { grid, layout, .. } = traffic;
    let groups = grid.groups();
    let per_head = spec.mask.per_head();
    let work = |member| {
        let layout = layout.of_member(grid, member);
        let shards = options.shards(spec, layout, groups)?;
        let spec = spec.of_member(grid, member);
        Ok(Work::of(spec.mask.as_ref(), spec.dims.q_heads, spec.dims.batch, &shards))
    };
    let work: Vec<Work> = distinct_members(grid, per_head).map(work).collect::<Result<_>>()?;
    let ranks = groups * grid.members();
    let steps = |pair_seconds: f64, bytes: &[u128]| {
        let compute = |ring_index: usize| {
            let member = grid.member(ring_index);
            let pairs = &work[if per_head { member } else { grid.column(member) }];
            let pairs = pairs.of_rank(grid.group(ring_index)) as f64;
            pairs * pair_seconds / groups as f64
        };
        let compute: Vec<f64> = (0..ranks).map(compute).collect();
        let transfer = |(from, &bytes): (usize, &u128)| {
            let next = (grid.group(from) + 1) % groups;
            let to = grid.ring_index(next, grid.member(from));
            Transfer { from, to, bytes: bytes as f64 / (groups - 1) as f64 }
        };
        let transfers = bytes.iter().enumerate().map(transfer);
        let transfers = transfers.filter(|transfer| transfer.bytes > 0.0).collect();
        let mean = TimedStep {
            compute: compute.clone(),
            transfers,
            repeats: groups - 1,
            ..TimedStep::idle(ranks)
        };
        // no message moves under the tiles of the last block
        vec![mean, TimedStep { compute, ..TimedStep::idle(ranks) }]
    };
    let two_passes = spec.leaf_rows.is_some() || spec.backward == BackwardMode::TwoPass;
    let mode = if two_passes { BackwardMode::TwoPass } else { BackwardMode::OnePass };
    let of_backward = if options.backward {
        steps(seconds.backward_pass(mode), &traffic.backward)
    } else {
        Vec::new()
    };
    Ok([steps(seconds.forward_pass(), &traffic.forward), of_backward])
}
