//! The steps of rings over groups: blocks that circulate, and gradients that follow them.

use super::{
    network::Transfer,
    pace::{BlockPaces, GradientPaces, Pace},
    timed_step::{
        BACKWARD_PRODUCTS, KV_PASS_PRODUCTS, PairSeconds, QUERY_PASS_PRODUCTS, TimedStep,
    },
};
use crate::{
    BackwardMode, Group, Message, NeedsIndex, Result, RowLayout, Schedule, Spec, StrategyTraffic,
    TrafficOptions, WorkMatrix,
};

/// The rings over groups, one for each member.
pub(super) struct RingSteps<'a> {
    traffic: &'a StrategyTraffic,
    /// The member whose ring alone is executed, by group; `None` for all members.
    only: Option<usize>,
    seconds: PairSeconds,
    backward: bool,
    reproducible: bool,
    mode: BackwardMode,
    /// By member, or by key column if the members of a column have the same.
    rings: Vec<MemberRing>,
    per_head: bool,
    kv_row: RowLayout,
    gradient_row: RowLayout,
    query_row: RowLayout,
}

/// Tiles of the local block in a one-pass backward that overlap the last gradients.
#[derive(Clone, Copy)]
struct Tail {
    /// Share of the work on the local block.
    share: f64,
    /// Step in which they are computed.
    step: usize,
}

/// The ring of the heads of one member.
struct MemberRing {
    keys: Circulation,
    gradients: GradientPaces,
    /// Blocks of queries, of a backward pass in two passes.
    queries: Option<Circulation>,
}

/// Blocks that circulate in the ring of one member.
struct Circulation {
    schedule: Schedule,
    paces: BlockPaces,
    work: WorkMatrix,
}

impl<'a> RingSteps<'a> {
    /// Derives the messages and the work of every ring, or of the ring of one member alone.
    pub(super) fn new(
        traffic: &'a StrategyTraffic,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        seconds: PairSeconds,
        only: Option<usize>,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let grid = &traffic.grid;
        let reproducible = spec.leaf_rows.is_some();
        let mode = if reproducible { BackwardMode::TwoPass } else { spec.backward };
        let two_passes = options.backward && mode == BackwardMode::TwoPass;
        let per_head = spec.mask.per_head();
        let ring = |member| {
            let of_member = spec.of_member(grid, member);
            MemberRing::new(traffic, &of_member, member, options, two_passes, tick)
        };
        let of_member = spec.of_member(grid, 0);
        let query_row = if reproducible {
            of_member.whole_query_row_layout(None)
        } else {
            of_member.query_row_layout()
        };
        let members: Vec<usize> = match only {
            Some(member) => vec![member],
            None => grid.distinct_members(per_head).collect(),
        };
        Ok(Self {
            traffic,
            only,
            seconds,
            backward: options.backward,
            reproducible,
            mode,
            rings: members.into_iter().map(ring).collect::<Result<_>>()?,
            per_head,
            kv_row: of_member.kv_row_layout(),
            gradient_row: of_member.gradient_row_layout(),
            query_row,
        })
    }

    fn ranks(&self) -> usize {
        let grid = &self.traffic.grid;
        if self.only.is_some() { grid.groups() } else { grid.groups() * grid.members() }
    }

    /// Returns the ring of the heads of the rank at `ring_index`, and its group.
    fn ring(&self, ring_index: usize) -> (&MemberRing, usize) {
        let grid = &self.traffic.grid;
        if self.only.is_some() {
            return (&self.rings[0], ring_index);
        }
        let member = grid.member(ring_index);
        let ring = if self.per_head { member } else { grid.column(member) };
        (&self.rings[ring], grid.group(ring_index))
    }

    /// Returns a step with the seconds of `compute(ring_index)`.
    fn step(&self, compute: impl Fn(usize) -> f64) -> TimedStep {
        let ranks = self.ranks();
        TimedStep { compute: (0..ranks).map(compute).collect(), ..TimedStep::idle(ranks) }
    }

    /// Adds the blocks that are posted for a step.
    fn add_blocks(
        &self,
        into: &mut TimedStep,
        step: usize,
        row: &RowLayout,
        blocks: impl Fn(&MemberRing) -> Option<&Circulation>,
        in_parts: impl Fn(usize) -> bool,
    ) {
        let group_of =
            |ring, group: usize| Some(&blocks(ring)?.schedule.steps.get(group)?.get(step)?.before);
        self.add_messages(into, row, group_of, |ring, _, message, to| {
            Some(blocks(ring)?.paces.pace(message.peer, step, in_parts(to)))
        });
    }

    /// Adds the gradients that follow the blocks of the step before.
    fn add_gradients(&self, into: &mut TimedStep, step_before: usize) {
        self.add_messages(
            into,
            &self.gradient_row,
            |ring, group| Some(&ring.keys.schedule.steps.get(group)?.get(step_before)?.after),
            |ring, group, message, _| {
                let ends = [group, message.peer];
                Some(ring.gradients.pace(message.channel, ends, step_before))
            },
        );
    }

    /// Adds the messages of a group of each rank. `pace` takes the group of the sender, a message
    /// and the ring index of its receiver.
    fn add_messages<'b>(
        &'b self,
        into: &mut TimedStep,
        row: &RowLayout,
        group_of: impl Fn(&'b MemberRing, usize) -> Option<&'b Group>,
        pace: impl Fn(&'b MemberRing, usize, &Message, usize) -> Option<Pace>,
    ) {
        let grid = &self.traffic.grid;
        for from in 0..self.ranks() {
            let (ring, group) = self.ring(from);
            for message in group_of(ring, group).iter().flat_map(|messages| &messages.sends) {
                let to = match self.only {
                    Some(_) => message.peer,
                    None => grid.ring_index(message.peer, grid.member(from)),
                };
                let bytes = u128::from(message.rows.count()) * u128::from(row.bytes());
                let pace = pace(ring, group, message, to).unwrap_or(Pace::InStep);
                into.transfers.push(Transfer { from, to, bytes: bytes as f64, pace });
            }
        }
    }

    /// Returns the steps of a forward pass.
    pub(super) fn forward(&self) -> Vec<TimedStep> {
        self.circulation(
            &self.kv_row,
            |ring| Some(&ring.keys),
            |ring, group, step| ring.keys.pairs(group, step) * self.seconds.forward_pass(),
        )
    }

    /// Returns the steps of a backward pass; none without one.
    pub(super) fn backward(&self) -> Vec<TimedStep> {
        let groups = self.traffic.grid.groups();
        if !self.backward {
            return Vec::new();
        }
        if self.mode == BackwardMode::OnePass || groups == 1 {
            return self.one_pass();
        }
        let seconds = self.seconds.backward;
        let mut steps = self.circulation(
            &self.kv_row,
            |ring| Some(&ring.keys),
            |ring, group, step| {
                // the local queries add to the local dK and dV in the first pass
                let local = step == 0 && !self.reproducible;
                let products = if local { BACKWARD_PRODUCTS } else { KV_PASS_PRODUCTS };
                ring.keys.pairs(group, step) * products * seconds
            },
        );
        let of_queries = |ring: &MemberRing, group, step| {
            let local = step == 0 && !self.reproducible;
            let products = if local { 0.0 } else { QUERY_PASS_PRODUCTS };
            // the local keys and the queries of the owner of the step
            let pairs = ring.queries.as_ref().map_or(0.0, |blocks| blocks.pairs(group, step));
            pairs * products * seconds
        };
        steps.extend(self.circulation(&self.query_row, |ring| ring.queries.as_ref(), of_queries));
        steps
    }

    /// Returns the steps of blocks that circulate: the last block of a rank arrives in parts.
    fn circulation(
        &self,
        row: &RowLayout,
        blocks: impl Fn(&MemberRing) -> Option<&Circulation>,
        compute: impl Fn(&MemberRing, usize, usize) -> f64,
    ) -> Vec<TimedStep> {
        let last_block = |ring_index| {
            let (ring, group) = self.ring(ring_index);
            blocks(ring).and_then(|blocks| blocks.schedule.of_rank(group).last_block())
        };
        let last_blocks: Vec<Option<usize>> = (0..self.ranks()).map(last_block).collect();
        let groups = self.traffic.grid.groups();
        let step = |step| {
            let mut timed = self.step(|ring_index| {
                let (ring, group) = self.ring(ring_index);
                compute(ring, group, step)
            });
            let in_parts = |to: usize| last_blocks[to] == Some(step + 1);
            self.add_blocks(&mut timed, step, row, &blocks, in_parts);
            timed.ends_ring = step + 1 == groups;
            timed
        };
        (0..groups).map(step).collect()
    }

    /// Returns the steps of a backward pass in one pass: gradients follow their blocks one step
    /// behind, and tiles of a tail of the local block overlap the last of them.
    fn one_pass(&self) -> Vec<TimedStep> {
        let groups = self.traffic.grid.groups();
        let pair = self.seconds.backward_pass(BackwardMode::OnePass);
        let tails: Vec<Tail> = (0..self.ranks()).map(|ring_index| self.tail(ring_index)).collect();
        let step = |step: usize| {
            let mut timed = self.step(|ring_index| {
                let (ring, group) = self.ring(ring_index);
                let Tail { share, step: after } = tails[ring_index];
                let local = ring.keys.pairs(group, 0);
                let tail = if step == after { share * local } else { 0.0 };
                let pairs = match step {
                    0 => (1.0 - share) * local,
                    _ => ring.keys.pairs(group, step),
                };
                (pairs + tail) * pair
            });
            self.add_blocks(&mut timed, step, &self.kv_row, |ring| Some(&ring.keys), |_| false);
            if let Some(before) = step.checked_sub(1) {
                self.add_gradients(&mut timed, before);
            }
            timed.ends_ring = step == groups;
            timed
        };
        (0..=groups).map(step).collect()
    }

    /// Returns the tail of the local block. Head and tail have work in proportion to the bytes that
    /// they overlap.
    fn tail(&self, ring_index: usize) -> Tail {
        let (ring, group) = self.ring(ring_index);
        let schedule = ring.keys.schedule.of_rank(group);
        let Some(last) = schedule.last_step() else { return Tail { share: 0.0, step: 0 } };
        let bytes = |messages: &Group, row: &RowLayout| {
            let of = |messages: &[Message]| {
                messages.iter().map(|message| message.rows.count()).sum::<u64>()
            };
            of(&messages.sends).max(of(&messages.receives)) as f64 * row.bytes() as f64
        };
        let first = bytes(&schedule.steps[0].before, &self.kv_row);
        let after = bytes(&schedule.steps[last].after, &self.gradient_row);
        let share = if after > 0.0 { after / (first + after) } else { 0.0 };
        Tail { share, step: last + 1 }
    }
}

impl MemberRing {
    fn new(
        traffic: &StrategyTraffic,
        spec: &Spec,
        member: usize,
        options: &TrafficOptions<'_>,
        two_passes: bool,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let groups = traffic.grid.groups();
        let layout = traffic.layout.of_member(&traffic.grid, member);
        let route = traffic.route(spec, member, options, tick);
        let shards = options.shards(spec, layout, groups)?;
        let work = WorkMatrix::estimate(spec, &shards, tick);
        let (heads, batch) = (spec.dims.q_heads, spec.dims.batch);
        let mask = spec.mask.as_ref();
        let needs = NeedsIndex::of_queries(mask, heads, batch, &shards, tick);
        let schedule = Schedule::build(&needs.to_needs(), route, options.backward && !two_passes);
        let receive_ahead = traffic.receive_ahead(options);
        let queries = two_passes.then(|| {
            let needs = NeedsIndex::of_keys(mask, heads, batch, &shards, tick);
            let needs =
                if spec.leaf_rows.is_some() { needs.in_tiles(options.kv_tile) } else { needs };
            let schedule = Schedule::build(&needs.to_needs(), route.opposite(), false);
            Circulation::new(schedule, work.transposed(), receive_ahead)
        });
        let gradients = GradientPaces::new(&schedule, receive_ahead);
        let keys = Circulation::new(schedule, work, receive_ahead);
        Ok(Self { keys, gradients, queries })
    }
}

impl Circulation {
    fn new(schedule: Schedule, work: WorkMatrix, receive_ahead: usize) -> Self {
        let paces = BlockPaces::new(&schedule, receive_ahead);
        Self { schedule, paces, work }
    }

    fn pairs(&self, group: usize, step: usize) -> f64 {
        self.work.of_step(self.schedule.route, group, step) as f64
    }
}

impl WorkMatrix {
    /// Returns `pairs[owner][user]`, for blocks of queries that circulate.
    fn transposed(&self) -> Self {
        let column = |owner: usize| self.pairs.iter().map(|row| row[owner]).collect();
        Self { pairs: (0..self.pairs.len()).map(column).collect() }
    }
}
