//! Figures of each ring step: owners of blocks, visible pairs and messages of the ranks.

use annulus_core::{Error, Result, Spec};
use annulus_plan::{NeedsIndex, RingShards, Route, Schedule, Step, WorkMatrix};
use serde::Serialize;

use super::{limits::MOST_DETAILED_RANKS, program::Send};

/// Figures of one ring step.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StepFigures {
    /// Number of the step.
    pub(super) step: usize,
    /// Figures of each rank in it.
    pub(super) ranks: Vec<StepOfRank>,
}

impl StepFigures {
    fn new(step: usize, schedule: &Schedule, work: &WorkMatrix, row_bytes: u64) -> Self {
        let of_rank = |(rank, steps): (usize, &Vec<Step>)| {
            let of_step = steps.get(step)?;
            let sends = of_step.before.sends.iter().map(|message| Send::new(message, row_bytes));
            let pairs = work.of_step(schedule.route, rank, step);
            Some(StepOfRank {
                rank,
                owner: of_step.owner,
                rows: of_step.rows.count(),
                pairs,
                sends: sends.collect(),
            })
        };
        Self { step, ranks: schedule.steps.iter().enumerate().filter_map(of_rank).collect() }
    }
}

/// Figures of one ring step, summed over ranks.
#[derive(Debug, Serialize)]
pub(super) struct StepSums {
    /// Number of the step.
    step: usize,
    /// Visible pairs that all ranks compute.
    pairs: u128,
    /// Visible pairs that the busiest rank computes.
    busiest_pairs: u128,
    /// Blocks sent during the step.
    blocks_sent: usize,
    /// Their payload bytes.
    bytes_sent: u128,
}

impl StepSums {
    /// Sums the figures of all ranks.
    pub(super) fn of(step: &StepFigures) -> Self {
        let sends = || step.ranks.iter().flat_map(|of| &of.sends);
        Self {
            step: step.step,
            pairs: step.ranks.iter().map(|of| of.pairs).sum(),
            busiest_pairs: step.ranks.iter().map(|of| of.pairs).max().unwrap_or_default(),
            blocks_sent: sends().count(),
            bytes_sent: sends().map(|send| send.bytes).sum(),
        }
    }
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

/// Returns the number of steps up to the last in which a rank computes or forwards a block, at
/// least 1; `None` without steps.
pub(super) fn busy_steps(steps: &[StepFigures]) -> Option<usize> {
    let busy = |step: &StepFigures| {
        step.ranks.iter().any(|of| of.pairs > 0 || (step.step > 0 && of.rows > 0))
    };
    let last = steps.iter().rposition(busy).map_or(1, |last| last + 1);
    (!steps.is_empty()).then_some(last)
}

/// Returns the messages of all ranks, of a backward pass with gradients, checked for at most
/// [`MOST_DETAILED_RANKS`].
pub(super) fn checked_schedule(
    needs: &NeedsIndex<'_>,
    route: Route,
    gradients: bool,
) -> Result<Schedule> {
    let needs = needs.to_needs();
    let schedule = Schedule::build(&needs, route, gradients);
    if needs.held.len() <= MOST_DETAILED_RANKS {
        schedule.check(&needs, gradients).map_err(Error::internal)?;
    }
    Ok(schedule)
}

/// Returns the steps of all ranks.
pub(super) fn steps(spec: &Spec, schedule: &Schedule, shards: &RingShards) -> Vec<StepFigures> {
    let work = WorkMatrix::of(spec.mask.as_ref(), spec.dims.q_heads, spec.dims.batch, shards);
    let bytes = spec.kv_row_layout().bytes();
    let steps = 0..schedule.steps.len();
    steps.map(|step| StepFigures::new(step, schedule, &work, bytes)).collect()
}
