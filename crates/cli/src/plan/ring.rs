//! One ring of a plan: its steps and messages. Of a grid it is the ring of a key column, of the
//! ranks with the first heads.

use annulus_core::{Backend, Batch, Error, Result, RowLayout, Spec};
use annulus_plan::{
    Group, Layout, Message, NeedsIndex, RankSchedule, RingShards, RingTraffic, Route, Schedule,
    Step, WorkMatrix,
};
use serde::Serialize;

/// The most ranks for which every step of every rank is checked, written and drawn, up to 5 MB of
/// each.
pub(super) const MOST_DETAILED_RANKS: usize = 128;

/// The most ranks that are listed one by one, and for which all strategies are compared. The
/// schedule takes O(ranks²) memory, all other figures O(ranks).
pub(super) const MOST_LISTED_RANKS: usize = 256;

/// A ring of ranks.
pub(super) struct PlannedRing<'a> {
    pub(super) spec: &'a Spec,
    pub(super) route: Route,
    pub(super) shards: RingShards,
    pub(super) needs: NeedsIndex<'a>,
    /// Second pass of a backward pass in the reproducible order, in which queries are sent.
    pub(super) queries: Option<QueryPass<'a>>,
    /// True if a backward pass is planned too.
    pub(super) backward: bool,
}

impl<'a> PlannedRing<'a> {
    /// Plans the ring of `spec`. `batch` has all rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a batch that does not fit.
    pub(super) fn new(
        spec: &'a Spec,
        layout: &Layout,
        ranks: usize,
        route: Route,
        batch: &Batch,
        backward: bool,
    ) -> Result<Self> {
        let shards = RingShards::of_batch(&spec.dims, spec.alignment, layout, ranks, batch)?;
        let (heads, batch_rows) = (spec.dims.q_heads, spec.dims.batch);
        let mask = spec.mask.as_ref();
        let needs = NeedsIndex::of_queries(mask, heads, batch_rows, &shards, &mut || ());
        let queries = spec.leaf_rows.map(|_| QueryPass::new(spec, route, &shards)).transpose()?;
        Ok(Self { spec, route, shards, needs, queries, backward })
    }

    /// Number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.shards.q.len()
    }

    /// Number of steps in which any rank sends a block.
    pub(super) fn hops(&self) -> usize {
        RingTraffic::of(&self.needs, self.route, &mut || ()).hops
    }

    /// Returns the steps of one rank; with `gradients` those of a backward pass too.
    pub(super) fn schedule_of(&self, rank: usize, gradients: bool) -> RankSchedule {
        RankSchedule::derive(&self.needs, self.route, gradients, rank, &mut || ())
    }

    /// Returns the messages of all ranks, of a backward pass with gradients, checked for at most
    /// [`MOST_DETAILED_RANKS`]; `None` for more than [`MOST_LISTED_RANKS`].
    pub(super) fn schedule(&self) -> Result<Option<Schedule>> {
        if self.ranks() > MOST_LISTED_RANKS {
            return Ok(None);
        }
        let needs = self.needs.to_needs();
        let schedule = Schedule::build(&needs, self.route, self.backward);
        if self.ranks() <= MOST_DETAILED_RANKS {
            schedule.check(&needs, self.backward).map_err(Error::internal)?;
        }
        Ok(Some(schedule))
    }

    /// Returns the steps of all ranks.
    pub(super) fn steps(&self, schedule: &Schedule) -> Vec<StepFigures> {
        if self.ranks() > MOST_DETAILED_RANKS {
            return Vec::new();
        }
        let Spec { mask, dims, .. } = self.spec;
        let work = WorkMatrix::of(mask.as_ref(), dims.q_heads, dims.batch, &self.shards);
        let bytes = self.spec.kv_row_layout().bytes();
        let steps = 0..schedule.steps.len();
        steps.map(|step| StepFigures::new(step, schedule, &work, bytes)).collect()
    }
}

/// Pass in which queries are sent.
pub(super) struct QueryPass<'a> {
    needs: NeedsIndex<'a>,
    route: Route,
    pub(super) row_bytes: u64,
}

impl<'a> QueryPass<'a> {
    fn new(spec: &'a Spec, route: Route, shards: &RingShards) -> Result<Self> {
        let tile = annulus_cpu::Cpu::new(1)?.capabilities(spec)?.kv_tile;
        let (heads, batch_rows) = (spec.dims.q_heads, spec.dims.batch);
        let mask = spec.mask.as_ref();
        let needs = NeedsIndex::of_keys(mask, heads, batch_rows, shards, &mut || ());
        let row_bytes = spec.query_row_layout().bytes();
        Ok(Self { needs: needs.in_tiles(tile), route: route.opposite(), row_bytes })
    }

    /// Returns the steps of one rank.
    pub(super) fn schedule_of(&self, rank: usize) -> RankSchedule {
        RankSchedule::derive(&self.needs, self.route, false, rank, &mut || ())
    }
}

/// Message with a block or with gradients.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Send {
    /// Receiving rank.
    pub(super) to: usize,
    /// Owner of the rows.
    pub(super) owner: usize,
    /// Number of rows.
    rows: u64,
    /// Payload bytes.
    pub(super) bytes: u128,
}

impl Send {
    /// Returns messages of rows of `row_bytes` bytes.
    pub(super) fn of(messages: &[Message], row_bytes: u64) -> Vec<Self> {
        let send = |message: &Message| {
            let rows = message.rows.count();
            let bytes = u128::from(rows) * u128::from(row_bytes);
            Self { to: message.peer, owner: message.owner, rows, bytes }
        };
        messages.iter().map(send).collect()
    }
}

/// Figures of one ring step.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StepFigures {
    /// Number of the step.
    pub(super) step: usize,
    /// Figures of each rank in it.
    pub(super) ranks: Vec<StepOfRank>,
}

/// Figures of one rank in one step.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StepOfRank {
    /// The rank.
    pub(super) rank: usize,
    /// Owner of the block that its queries attend to.
    pub(super) owner: usize,
    /// Number of the owner's rows in the block.
    pub(super) rows: u64,
    /// Visible pairs that it computes.
    pub(super) pairs: u128,
    /// Blocks that it sends during the step.
    pub(super) sends: Vec<Send>,
}

impl StepFigures {
    fn new(step: usize, schedule: &Schedule, work: &WorkMatrix, row_bytes: u64) -> Self {
        let of_rank = |(rank, steps): (usize, &Vec<Step>)| {
            let of_step = steps.get(step)?;
            Some(StepOfRank {
                rank,
                owner: of_step.owner,
                rows: of_step.rows.count(),
                pairs: work.of_step(schedule.route, rank, step),
                sends: Send::of(&of_step.before.sends, row_bytes),
            })
        };
        Self { step, ranks: schedule.steps.iter().enumerate().filter_map(of_rank).collect() }
    }
}

/// Returns the number of steps up to the last in which a rank computes or forwards a block, at
/// least 1; `None` without steps.
pub(super) fn busy_steps(steps: &[StepFigures]) -> Option<usize> {
    let busy = |step: &StepFigures| {
        step.ranks.iter().any(|of| of.pairs > 0 || (step.step > 0 && of.rows > 0))
    };
    let last = steps.iter().rposition(busy).map_or(1, |last| last + 1);
    (!steps.is_empty()).then_some(last)
}

/// Messages from one node to another.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct BetweenNodes {
    /// Ranks of a node.
    pub(super) node_ranks: usize,
    /// Payload bytes of all ranks in a forward pass.
    pub(super) bytes_sent_total: u128,
    /// Payload bytes of the rank that sends most in a forward pass.
    pub(super) bytes_max_rank: u128,
    /// Most steps of a forward pass in which any one rank sends to another node.
    pub(super) steps_max_rank: usize,
    /// Payload bytes of all ranks in a backward pass; null of a plan that is forward only.
    pub(super) backward_bytes_sent_total: Option<u128>,
}

impl BetweenNodes {
    /// Adds up the messages of `schedule` and, in the reproducible order, those of the queries of a
    /// backward pass.
    pub(super) fn new(node_ranks: usize, ring: &PlannedRing<'_>, schedule: &Schedule) -> Self {
        let [block, gradient] = [ring.spec.kv_row_layout(), ring.spec.gradient_row_layout()];
        let [block, gradient] = [&block, &gradient].map(RowLayout::bytes);
        let mut figures = Self {
            node_ranks,
            bytes_sent_total: 0,
            bytes_max_rank: 0,
            steps_max_rank: 0,
            backward_bytes_sent_total: None,
        };
        let mut backward = 0;
        for (rank, steps) in schedule.steps.iter().enumerate() {
            let sent = |group: &Group, row_bytes: u64| -> u128 {
                let others = group.sends.iter();
                let others = others.filter(|send| send.peer / node_ranks != rank / node_ranks);
                others.map(|send| u128::from(send.rows.count()) * u128::from(row_bytes)).sum()
            };
            let of_steps: Vec<u128> = steps.iter().map(|step| sent(&step.before, block)).collect();
            let of_forward: u128 = of_steps.iter().sum();
            let of_backward: u128 = match &ring.queries {
                Some(pass) => {
                    let steps = pass.schedule_of(rank).steps;
                    steps.iter().map(|step| sent(&step.before, pass.row_bytes)).sum()
                }
                None => steps.iter().map(|step| sent(&step.after, gradient)).sum(),
            };
            figures.bytes_sent_total += of_forward;
            backward += of_forward + of_backward;
            figures.bytes_max_rank = figures.bytes_max_rank.max(of_forward);
            let busy_steps = of_steps.iter().filter(|&&bytes| bytes > 0).count();
            figures.steps_max_rank = figures.steps_max_rank.max(busy_steps);
        }
        figures.backward_bytes_sent_total = ring.backward.then_some(backward);
        figures
    }
}
