//! Ranks of this process in an attention over files: their plans, rows, passes and figures.

use std::time::Instant;

use annulus::{Backward, Forward, Plan, Report, comm::trace::TraceLog};
use annulus_core::{Batch, Element, Result};
use annulus_plan::Strategy;

use super::{output::Given, summary::AttendFigures};
use crate::{
    failure::Outcome,
    input::{OutputGradients, Share},
    job::Job,
    memory::peak_bytes,
};

/// Rank after the phase plan.
pub(super) struct PlannedRank {
    pub(super) plan: Plan,
    pub(super) log: TraceLog,
}

/// Rank after the phase read.
pub(super) struct AttendRank<T: Element> {
    pub(super) plan: Plan,
    pub(super) log: TraceLog,
    pub(super) batch: Batch,
    pub(super) share: Share<T>,
    /// Visible pairs of its queries, all heads and batch rows.
    pub(super) pairs: f64,
    /// Reports of the passes so far.
    pub(super) reports: Vec<Report>,
}

impl<T: Element> AttendRank<T> {
    /// Updates the plan with the masks, ids and positions of the batch.
    pub(super) fn update(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        // equal on all ranks, because it depends only on the file
        if batch == Batch::default() { Ok(()) } else { self.plan.update(&batch) }
    }

    /// Runs the forward pass.
    pub(super) fn forward(&mut self) -> Result<Forward<T>> {
        let begin = Instant::now();
        let forward = self.plan.forward(&self.share.tensors())?;
        self.log.span("forward", 0, begin);
        self.reports.extend(&forward.reports);
        Ok(forward)
    }

    /// Runs the backward pass.
    pub(super) fn backward(
        &mut self,
        forward: &Forward<T>,
        of_output: &OutputGradients<T>,
    ) -> Result<Backward<T>> {
        let begin = Instant::now();
        let gradients = self.plan.backward(
            &self.share.tensors(),
            forward,
            of_output.dout.view(),
            of_output.dlse_view(),
        )?;
        self.log.span("backward", 0, begin);
        self.reports.extend(&gradients.reports);
        Ok(gradients)
    }
}

/// Counts the visible pairs of each rank, for inputs without a dense mask.
pub(super) fn count_pairs<T: Element>(ranks: &mut [AttendRank<T>]) {
    // in a ring one computation serves all ranks: each plan has the positions and ids of all rows
    let is_ring = ranks.first().is_some_and(|rank| rank.plan.strategy() == Strategy::Ring);
    let work = ranks.first().filter(|_| is_ring).map(|rank| rank.plan.work().0);
    for rank in ranks {
        rank.pairs = match &work {
            Some(work) => work.of_rank(rank.plan.ring_index()) as f64,
            None => {
                let (work, index) = rank.plan.work();
                work.of_rank(index) as f64
            }
        };
    }
}

/// All-gathers the figures of every rank, by rank.
pub(super) fn gather_figures<T: Element>(
    job: &mut Job,
    ranks: &[AttendRank<T>],
) -> Outcome<Vec<AttendFigures>> {
    // the peak is that of the process, so of all its ranks together
    let peak = peak_bytes();
    let mine: Vec<AttendFigures> = ranks
        .iter()
        .map(|rank| AttendFigures { pairs: rank.pairs, peak, reports: rank.reports.clone() })
        .collect();
    let numbers: Vec<f64> = mine.iter().flat_map(AttendFigures::numbers).collect();
    let all = job.all_gather_numbers(&numbers)?.concat();
    Ok(all.chunks(numbers.len() / mine.len().max(1)).map(AttendFigures::of_numbers).collect())
}

/// Writes the arrays `given` of this process's ranks. Each rank calls `write(all, own, rank)` with
/// the arrays of all ranks of the process, its index among them and its rank.
pub(super) fn write<T: Element, G: Sync>(
    job: &mut Job,
    ranks: &[AttendRank<T>],
    given: &[G],
    write: impl Fn(&[Given<'_, G>], usize, usize) -> Result<()> + Sync,
) -> Outcome {
    let of_rank = |(rank, arrays): (_, _)| {
        let rank: &AttendRank<T> = rank;
        Given { q_rows: rank.plan.q_rows(), kv_rows: rank.plan.kv_rows(), arrays }
    };
    let all: Vec<Given<'_, G>> = ranks.iter().zip(given).map(of_rank).collect();
    let logs: Vec<(usize, TraceLog)> =
        ranks.iter().map(|rank| rank.log.clone()).enumerate().collect();
    job.run_local_phase(logs, |rank, (own, log)| {
        let begin = Instant::now();
        write(&all, own, rank)?;
        log.span("write", 0, begin);
        Ok(())
    })?;
    Ok(())
}

/// Number of blocks that these ranks compute on in a forward and in a backward pass.
pub(crate) fn blocks<'a>(plans: impl Iterator<Item = &'a Plan>) -> [usize; 2] {
    plans
        .map(Plan::blocks_computed)
        .fold([0, 0], |sum, blocks| [sum[0] + blocks[0], sum[1] + blocks[1]])
}
