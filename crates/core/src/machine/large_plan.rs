//! The time of plans of more ranks than are executed one by one.
//!
//! ```text
//! pass = agreement, exchange, ring, exchange, agreement
//! ring = the slowest of the rings of three members, each on its ranks alone: step by step up to
//!        256 groups, in mean steps of more (`mean_steps.rs`)
//! ```
//! The rings of the members of a group send about as many bytes at the same time from neighbours,
//! so that each stands for all: its messages count in the bandwidth of a node as often as members
//! are on it. The members are the one with the most work, and those of the first and of the last
//! key column: under a window only keys at the end of a group are needed by another group.

use super::{
    LinkBytes, PassTime, Prediction,
    exchange_rounds::{ExchangeRounds, Exchanged, agreement},
    execution::{Executed, execute},
    mean_steps::MeanRing,
    network::Network,
    ring_steps::RingSteps,
    steps::{GridPlan, MOST_STEPPED_RANKS},
    timed_step::TimedStep,
};
use crate::{ExchangeFields, Result, StrategyTraffic, Work, strategy::backward_mode};

/// A member of each group, and the work of its ring.
pub(super) struct MemberWork {
    member: usize,
    work: Work,
}

/// Predicts the time of a plan.
pub(super) fn predict(
    plan: &GridPlan<'_>,
    network: &Network<'_>,
    tick: &mut dyn FnMut(),
) -> Result<Prediction> {
    let GridPlan { traffic, spec, options, machine } = *plan;
    let grid = &traffic.grid;
    let exchange = ExchangeRounds { grid, machine, node_ranks: network.node_ranks() };
    let agreed = agreement(grid, machine, exchange.node_ranks);
    let rows = plan.most_rows();
    let mut bytes = LinkBytes::default();
    let mut pass = |ring: PassTime, is_forward: bool| {
        let fields = if is_forward {
            ExchangeFields::of_forward(spec, grid)
        } else {
            ExchangeFields::of_backward(spec, grid)
        };
        let partial = fields.partial(is_forward).iter().map(|field| field.bytes(grid, rows[0]));
        let merge = plan.merge_seconds(partial.sum::<u128>() as f64);
        let [inputs, outputs] =
            [&fields.inputs, &fields.outputs].map(|fields| Exchanged { fields, rows });
        for exchanged in [&inputs, &outputs] {
            bytes.add(&exchange.link_bytes(exchanged), 1.0);
        }
        let before = exchange.of_messages(&inputs);
        let after = exchange.of_partial(&outputs, merge);
        [agreed, before, ring, after, agreed].into_iter().sum::<PassTime>()
    };
    let Rings { most: [forward, backward], bytes: of_rings } = plan.rings(network, tick)?;
    let forward = pass(forward.time(), true);
    let backward =
        if options.backward { pass(backward.time(), false) } else { PassTime::default() };
    bytes.add(&of_rings, 1.0);
    // exact if the bytes of ranks are known
    if !traffic.forward.is_empty() {
        bytes = bytes.of_total(traffic.total() as f64);
    }
    let fits = traffic.memory_max_rank <= u128::from(machine.memory);
    Ok(Prediction { forward, backward, bytes, fits })
}

/// Rings of some members.
struct Rings {
    /// Time of the slowest and most tiles of any, forward and backward.
    most: [Executed; 2],
    /// Bytes of all members.
    bytes: LinkBytes,
}

impl GridPlan<'_> {
    /// Returns the most query and key rows of a rank.
    fn most_rows(&self) -> [u64; 2] {
        self.rows().into_iter().fold([0; 2], |most, of| [most[0].max(of[0]), most[1].max(of[1])])
    }

    /// Executes the rings of some members.
    fn rings(&self, network: &Network<'_>, tick: &mut dyn FnMut()) -> Result<Rings> {
        let grid = &self.traffic.grid;
        let mut most = [Executed::default(); 2];
        let mut bytes = LinkBytes::default();
        let members = self.members(tick)?;
        for of in &members {
            let ranks: Vec<usize> =
                (0..grid.groups()).map(|group| grid.ring_index(group, of.member)).collect();
            let on_node = |group: usize| {
                let members = (0..grid.members()).map(|member| grid.ring_index(group, member));
                let node = network.node(ranks[group]);
                members.filter(|&rank| network.node(rank) == node).count() as f64
            };
            let weights = (0..grid.groups()).map(on_node).collect();
            let network = network.of_some(&ranks, weights);
            for (most, steps) in most.iter_mut().zip(self.ring_steps(of, tick)?) {
                let mut of_ranks = LinkBytes::default();
                *most = most.most(execute(&network, &steps, ranks.len(), &mut of_ranks));
                bytes.add(&of_ranks, grid.members() as f64 / members.len() as f64);
            }
        }
        Ok(Rings { most, bytes })
    }

    /// Returns the member with the most work on any rank, the first and the last one.
    pub(super) fn members(&self, tick: &mut dyn FnMut()) -> Result<Vec<MemberWork>> {
        let Self { traffic, spec, options, .. } = *self;
        let StrategyTraffic { grid, layout, .. } = traffic;
        let mut all = Vec::new();
        for member in grid.distinct_members(spec.mask.per_head()) {
            let shards = options.shards(spec, layout.of_member(grid, member), grid.groups())?;
            let work = Work::estimate(&spec.of_member(grid, member), &shards, tick);
            all.push(MemberWork { member, work });
        }
        let last = all.len().saturating_sub(1);
        let busiest = (0..all.len()).max_by_key(|&index| all[index].work.most()).unwrap_or(0);
        let some = all.into_iter().enumerate();
        let some = some.filter(|(index, _)| [0, busiest, last].contains(index));
        Ok(some.map(|(_, of)| of).collect())
    }

    /// Returns the steps of one ring, forward and backward.
    fn ring_steps(&self, of: &MemberWork, tick: &mut dyn FnMut()) -> Result<[Vec<TimedStep>; 2]> {
        let Self { traffic, spec, options, .. } = *self;
        let seconds = self.pair_seconds()?;
        let member = of.member;
        if traffic.grid.groups() <= MOST_STEPPED_RANKS {
            let ring = RingSteps::new(traffic, spec, options, seconds, Some(member), tick)?;
            return Ok([ring.forward(), ring.backward()]);
        }
        self.mean_steps(of, tick)
    }

    /// Returns the mean steps of one ring, forward and backward.
    pub(super) fn mean_steps(
        &self,
        of: &MemberWork,
        tick: &mut dyn FnMut(),
    ) -> Result<[Vec<TimedStep>; 2]> {
        let Self { traffic, spec, options, .. } = *self;
        let of_member = spec.of_member(&traffic.grid, of.member);
        let of_ring = traffic.of_ring(&of_member, of.member, options, tick)?;
        let ring = MeanRing { work: &of.work, seconds: self.pair_seconds()? };
        Ok([ring.forward(&of_ring.forward), ring.backward(backward_mode(spec), &of_ring.backward)])
    }
}
