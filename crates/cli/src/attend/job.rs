//! One job: plan, read, forward, write, backward, write. Every phase is one thread a rank, and the next starts when all ranks did theirs, so
//! that a rank that cannot read or write its rows leaves no other waiting for it.

use std::{path::Path, time::Instant};

use annulus::{
    Attention, Cpu, Forward, RankPlan, Report,
    comm::{
        Threads,
        threads::{self, each_rank},
        trace::{Trace, TraceLog},
    },
};
use annulus_core::{Batch, Element, Layout, Result, Rows, Shard, Side, SinkShape, Spec};

use super::{
    output::{planned, write_backward, write_forward, write_traces},
    progress::{Progress, Watched},
    summary::{Pass, Summary},
};
use crate::{
    file::{self, Output},
    input::{Input, Share},
    pairs, report,
};

/// What to do, in full.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    /// The definition.
    pub(crate) attention: Attention,
    /// Shape of the sinks that it has.
    pub(crate) sinks: Option<SinkShape>,
    /// Ranks.
    pub(crate) ranks: usize,
    /// Threads of each.
    pub(crate) threads: usize,
    /// The layout, or `None` to choose one from the mask.
    pub(crate) layout: Option<Layout>,
    /// Whether gradients are computed.
    pub(crate) backward: bool,
    /// The file to write.
    pub(crate) output: &'a Path,
    /// Where traces go, if they are written.
    pub(crate) trace: Option<&'a Path>,
    /// The file to read.
    pub(crate) input: &'a Input,
}

/// A rank that has a plan.
struct Planned {
    plan: RankPlan<Cpu>,
    log: TraceLog,
}

/// A rank that has read its rows.
struct Rank<T: Element> {
    plan: RankPlan<Cpu>,
    log: TraceLog,
    batch: Batch,
    share: Share<T>,
    pairs: f64,
}

impl Job<'_> {
    /// Runs the job; the output file appears if and only if all of it succeeds.
    ///
    /// # Errors
    /// Whatever a rank or a file reports.
    pub(super) fn run_as<T: Element>(&self) -> Result<Summary> {
        let progress = Progress::on_terminal();
        let summary = self.phases::<T>(&progress);
        progress.finish();
        summary
    }

    fn phases<T: Element>(&self, progress: &Progress) -> Result<Summary> {
        let (start, input) = (Instant::now(), self.input);
        let spec = self.attention.spec(input.dims)?;
        let tensors = planned(&spec, input, self.backward)?;
        let whole = input.coordinates()?;
        let output = Output::create(self.output, &tensors)?;

        progress.phase("plan", 0);
        let ranks = each_rank(threads::ring(self.ranks), |_, transport| self.plan(Trace::new(transport, start), progress))?;
        let blocks = ranks.first().map_or([0, 0], |rank| blocks(&rank.plan.ring().schedule()));
        progress.phase("read", 0);
        let keys = input.has("attention_mask").then(|| pairs::rows(&pairs::whole(&spec, Side::Kv, &whole)));
        let mut ranks = each_rank(ranks, |index, rank| self.read::<T>(&spec, index, rank, keys.as_ref()))?;
        let pairs = if keys.is_some() { ranks.iter().map(|rank| rank.pairs).sum() } else { pairs::visible(&spec, &whole) };
        drop((whole, keys));

        progress.phase("forward", blocks[0]);
        let forwards = each_rank(&mut ranks, |_, rank| rank.forward())?;
        let mut reports = vec![forwards.iter().flat_map(|forward| forward.reports.clone()).collect()];
        progress.phase("write", 0);
        each_rank(ranks.iter_mut().zip(&forwards), |_, (rank, forward)| {
            rank.timed("write", || write_forward(&output, &rank.plan, forward))
        })?;
        if self.backward {
            progress.phase("backward", blocks[1]);
            let pairs = ranks.iter_mut().zip(forwards);
            reports.push(each_rank(pairs, |index, (rank, forward)| rank.backward(index, &forward, input, &output))?.concat());
        }
        if let Some(folder) = self.trace {
            write_traces(folder, ranks.iter().map(|rank| &rank.log))?;
        }
        // last: whatever fails before leaves no output
        output.finish()?;
        Ok(self.summary(&ranks, &reports, pairs, start, tensors.iter().map(file::Planned::bytes).sum()))
    }

    fn plan(&self, transport: Trace<Threads>, progress: &Progress) -> Result<Planned> {
        let log = transport.log();
        let transport = Watched::new(transport, progress.clone());
        let plan = RankPlan::new(&self.attention, self.input.dims, self.layout.clone(), Cpu::new(self.threads)?, transport)?;
        Ok(Planned { plan, log })
    }

    /// One rank reads its rows. Where there is a dense mask, given with all `keys`, it counts the pairs that they see.
    fn read<T: Element>(&self, spec: &Spec, index: usize, rank: Planned, keys: Option<&Rows>) -> Result<Rank<T>> {
        let Planned { plan, log } = rank;
        let begin = Instant::now();
        let batch = self.input.batch(plan.q_rows(), plan.kv_rows())?;
        let share = self.input.share(self.sinks, plan.q_rows(), plan.kv_rows())?;
        log.span("read", 0, begin);
        let mut pairs = 0.0;
        if let (Some(dense), Some(keys)) = (&batch.attention_mask, keys) {
            let queries = Shard::local(&spec.dims, spec.alignment, plan.ring().layout(), Side::Q, index, self.ranks, &batch);
            pairs = pairs::visible_under(dense, spec, &pairs::rows(&queries), keys);
        }
        Ok(Rank { plan, log, batch, share, pairs })
    }

    fn summary<T: Element>(&self, ranks: &[Rank<T>], reports: &[Vec<Report>], pairs: f64, start: Instant, bytes: u64) -> Summary {
        // pairs are summed over heads and batch rows already
        let flops = 2.0 * pairs * (self.input.dims.head_dim + self.input.dims.value_dim) as f64;
        let (layout, route) =
            ranks.first().map_or(("no", "no"), |rank| (rank.plan.ring().layout().name(), rank.plan.ring().route().name()));
        let (count, threads, dtype, pairs) = (self.ranks, self.threads, T::DTYPE.name(), report::count(pairs));
        Summary {
            head: format!(
                "{count} rank{} of {threads} thread{}, cpu, {layout} layout, {route} route, {dtype}, {pairs} visible pairs",
                plural(count),
                plural(threads)
            ),
            passes: reports
                .iter()
                .zip([("forward", flops), ("backward", 2.5 * flops)])
                .map(|(reports, (name, flops))| Pass::new(name, reports, flops))
                .collect(),
            seconds: start.elapsed().as_secs_f64(),
            output: format!("{} ({})", self.output.display(), report::bytes(bytes)),
        }
    }
}

impl<T: Element> Rank<T> {
    /// Does `work` and notes in the trace how long it took.
    fn timed<R>(&self, name: &'static str, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let begin = Instant::now();
        let done = work()?;
        self.log.span(name, 0, begin);
        Ok(done)
    }

    fn forward(&mut self) -> Result<Forward<T>> {
        let begin = Instant::now();
        let batch = std::mem::take(&mut self.batch);
        // the same on all ranks: it follows from the file alone
        if batch != Batch::default() {
            self.plan.update(&batch)?;
        }
        drop(batch);
        let forward = self.plan.forward(&self.share.tensors())?;
        self.log.span("forward", 0, begin);
        Ok(forward)
    }

    fn backward(&mut self, index: usize, forward: &Forward<T>, input: &Input, output: &Output) -> Result<Vec<Report>> {
        let of_output = input.output_gradients(self.plan.q_rows())?;
        let begin = Instant::now();
        let gradients = self.plan.backward(&self.share.tensors(), forward, of_output.dout.view(), of_output.dlse_view())?;
        self.log.span("backward", 0, begin);
        self.timed("write", || write_backward(output, &self.plan, index, &gradients))?;
        Ok(gradients.reports)
    }
}

/// Messages of a forward and of a backward pass, all ranks together.
fn blocks(schedule: &annulus_core::Schedule) -> [usize; 2] {
    let steps = || schedule.steps.iter().flatten();
    let before: usize = steps().map(|step| step.before.receives.len()).sum();
    [before, before + steps().map(|step| step.after.receives.len()).sum::<usize>()]
}

const fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}
