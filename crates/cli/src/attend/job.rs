//! One job: plan, read, fit, forward, write, backward, write. Every phase is each rank's of the crew, and the next starts when all ranks did
//! theirs, so that a rank that cannot read or write its rows leaves no other waiting for it.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path, time::Instant};

use annulus::{
    Attention, Backward, Forward, RankPlan, Report,
    comm::{
        Descriptor,
        trace::{Trace, TraceLog},
    },
};
use annulus_core::{Backend, Batch, Control, Element, HostTensors, Layout, Result, Rows, Shard, Side, SinkShape, Spec};

use super::{
    output::{planned, write_backward, write_forward, write_trace},
    progress::{Progress, Watched},
    summary::{Pass, RankFigures, Summary},
};
use crate::{
    crew::{Crew, Endpoint},
    engine::{Engine, Wired, with_backend},
    failure::{Failure, Outcome},
    file::{self, Output},
    input::{Input, OutputGradients, Share},
    memory::peak_bytes,
    pairs, report,
    trace::Run,
};

/// What to do, in full.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    /// The definition.
    pub(crate) attention: Attention,
    /// Shape of the sinks that it has.
    pub(crate) sinks: Option<SinkShape>,
    /// What computes.
    pub(crate) engine: Engine,
    /// Threads of each rank.
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
struct Planned<B: Backend<Space: HostTensors>> {
    plan: RankPlan<B>,
    log: TraceLog,
}

/// A rank that has read its rows.
struct Rank<T: Element, B: Backend<Space: HostTensors>> {
    plan: RankPlan<B>,
    log: TraceLog,
    batch: Batch,
    share: Share<T>,
    pairs: f64,
    reports: Vec<Report>,
}

impl Job<'_> {
    /// Runs the job; the output file appears if and only if all of it succeeds.
    ///
    /// # Ordering
    /// Collective over the processes of the crew.
    /// # Errors
    /// Whatever a rank or a file reports.
    pub(super) fn run_as<T: Element>(&self, crew: &mut Crew) -> Outcome<Summary> {
        let progress = if crew.leads() { Progress::on_terminal() } else { Progress::nowhere() };
        let summary = with_backend!(&self.engine, self.threads, make => self.phases::<T, _>(crew, &progress, make));
        progress.finish();
        summary
    }

    fn phases<T: Element, B: Backend<Space: HostTensors>>(
        &self,
        crew: &mut Crew,
        progress: &Progress,
        make: impl Fn(Endpoint) -> Result<Wired<B>> + Sync,
    ) -> Outcome<Summary> {
        let input = self.input;
        let fields = Descriptor::new().field("backward", self.backward.into()).field("trace", self.trace.is_some().into());
        crew.same(fields)?;
        let start = crew.moment()?;
        let (spec, tensors) = crew.agree(self.prepare().map_err(Failure::from))?;
        let output = self.open(crew, &tensors)?;

        progress.phase("plan", 0);
        let endpoints = crew.endpoints()?;
        let ranks = crew.each(endpoints, |_, endpoint| self.plan(make(endpoint)?, start, progress))?;
        let blocks = blocks(&ranks);
        progress.phase("read", 0);
        let all = crew.ranks();
        let mut ranks = crew.each_apart(ranks, |_, rank| self.read::<T, B>(&spec, all, rank))?;
        crew.each(&mut ranks, |_, rank| rank.fit())?;
        self.count(&mut ranks);

        progress.phase("forward", blocks[0]);
        let forwards = crew.each(&mut ranks, |_, rank| rank.forward())?;
        progress.phase("write", 0);
        crew.each_apart(ranks.iter_mut().zip(&forwards), |_, (rank, forward)| {
            rank.timed("write", || write_forward(&output, &rank.plan, forward))
        })?;
        if self.backward {
            progress.phase("read", 0);
            let gradients = crew.each_apart(&mut ranks, |_, rank| input.output_gradients::<T>(rank.plan.q_rows()))?;
            progress.phase("backward", blocks[1]);
            let items = ranks.iter_mut().zip(forwards.iter().zip(gradients));
            let gradients = crew.each(items, |_, (rank, (forward, of_output))| rank.backward(forward, &of_output))?;
            progress.phase("write", 0);
            crew.each_apart(ranks.iter_mut().zip(&gradients), |index, (rank, gradients)| {
                rank.timed("write", || write_backward(&output, &rank.plan, index, gradients))
            })?;
        }
        if let Some(folder) = self.trace {
            let run = Run::agreed(crew)?;
            crew.each_apart(ranks.iter().map(|rank| rank.log.clone()).collect::<Vec<_>>(), |_, log| write_trace(folder, &log, &run))?;
        }
        let figures = self.figures(crew, &ranks)?;
        // last: whatever fails before leaves no output
        finish(crew, output)?;
        let bytes = tensors.iter().map(file::Planned::bytes).sum();
        Ok(self.summary(crew.ranks(), ranks.first().map(|rank| &rank.plan), T::DTYPE.name(), &figures, start, bytes))
    }

    fn prepare(&self) -> Result<(Spec, Vec<file::Planned>)> {
        let spec = self.attention.spec(self.input.dims)?;
        let tensors = planned(&spec, self.input, self.backward)?;
        Ok((spec, tensors))
    }

    /// One file for all ranks: made by the first, opened by the others.
    fn open(&self, crew: &mut Crew, tensors: &[file::Planned]) -> Outcome<Output> {
        if crew.shares_a_node() {
            // paths may differ from node to node, but not here
            let identity = file::identity(self.output).unwrap_or_default();
            crew.same(Descriptor::new().field_as("output", identity, self.output.display()))?;
            // not on every file system
            if let Ok(output) = self.open_as(crew, tensors, Output::create_nameless) {
                return Ok(output);
            }
        }
        self.open_as(crew, tensors, Output::create)
    }

    fn open_as(
        &self,
        crew: &mut Crew,
        tensors: &[file::Planned],
        create: impl FnOnce(&Path, &[file::Planned]) -> Result<Output>,
    ) -> Outcome<Output> {
        let made = if crew.leads() { create(self.output, tensors).map(Some) } else { Ok(None) };
        let made = crew.agree(made.map_err(Failure::from))?;
        let mine = made.as_ref().map(Output::handle).unwrap_or_default();
        let handles = crew.share(mine.as_bytes())?;
        let handle = OsStr::from_bytes(handles.first().map_or(&[], Vec::as_slice));
        let opened = made.map_or_else(|| Output::join(self.output, tensors, handle), Ok);
        crew.agree(opened.map_err(Failure::from))
    }

    fn plan<B: Backend<Space: HostTensors>>(
        &self,
        (backend, transport): Wired<B>,
        start: Instant,
        progress: &Progress,
    ) -> Result<Planned<B>> {
        let transport = Trace::new(transport, start);
        let log = transport.log();
        let attention = self.attention.clone().on_silence(report::of_silence(transport.rank(), transport.ranks()));
        let transport = Watched::new(transport, progress.clone());
        let plan = RankPlan::new(&attention, self.input.dims, self.layout.clone(), backend, transport)?;
        Ok(Planned { plan, log })
    }

    /// One rank reads its rows. Where there is a dense mask, it counts the pairs that they see.
    fn read<T: Element, B: Backend<Space: HostTensors>>(&self, spec: &Spec, ranks: usize, rank: Planned<B>) -> Result<Rank<T, B>> {
        let Planned { plan, log } = rank;
        let begin = Instant::now();
        let batch = self.input.batch(plan.q_rows(), plan.kv_rows())?;
        let share = self.input.share(self.sinks, plan.q_rows(), plan.kv_rows())?;
        log.span("read", 0, begin);
        let mut pairs = 0.0;
        if let Some(dense) = &batch.attention_mask {
            let keys: Rows = pairs::rows(&pairs::whole(spec, Side::Kv, &self.input.coordinates()?));
            let queries = Shard::local(&spec.dims, spec.alignment, plan.ring().layout(), Side::Q, place(&plan), ranks, &batch);
            pairs = pairs::visible_under(dense, spec, &pairs::rows(&queries), &keys);
        }
        Ok(Rank { plan, log, batch, share, pairs, reports: Vec::new() })
    }

    /// Counts the pairs that each rank's queries see, where no dense mask has done it.
    fn count<T: Element, B: Backend<Space: HostTensors>>(&self, ranks: &mut [Rank<T, B>]) {
        if self.input.has("attention_mask") {
            return;
        }
        // of all ranks at once: each knows all rows' positions and ids
        let work = ranks.first().map(|rank| rank.plan.ring().work());
        for rank in ranks {
            rank.pairs = work.as_ref().map_or(0.0, |work| work.of_rank(place(&rank.plan)) as f64);
        }
    }

    /// What every rank of the job has to tell, in the order of ranks.
    fn figures<T: Element, B: Backend<Space: HostTensors>>(&self, crew: &mut Crew, ranks: &[Rank<T, B>]) -> Outcome<Vec<RankFigures>> {
        // peak memory is the process's, so its ranks' together
        let peak = peak_bytes();
        let mine: Vec<RankFigures> =
            ranks.iter().map(|rank| RankFigures { pairs: rank.pairs, peak, reports: rank.reports.clone() }).collect();
        let numbers: Vec<f64> = mine.iter().flat_map(RankFigures::numbers).collect();
        let all = crew.share_numbers(&numbers)?.concat();
        Ok(all.chunks(numbers.len() / mine.len().max(1)).map(RankFigures::of_numbers).collect())
    }

    fn summary<B: Backend<Space: HostTensors>>(
        &self,
        count: usize,
        plan: Option<&RankPlan<B>>,
        dtype: &str,
        figures: &[RankFigures],
        start: Instant,
        bytes: u64,
    ) -> Summary {
        // pairs are summed over heads and batch rows already
        let per_pair = 2.0 * (self.input.dims.head_dim + self.input.dims.value_dim) as f64;
        let (layout, route) = plan.map_or(("no", "no"), |plan| (plan.ring().layout().name(), plan.ring().route().name()));
        let (threads, pairs) = (self.threads, report::count(figures.iter().map(|rank| rank.pairs).sum()));
        Summary {
            head: format!(
                "{count} rank{} of {threads} thread{}, {}, {layout} layout, {route} route, {dtype}, {pairs} visible pairs",
                plural(count),
                plural(threads),
                self.engine.description(),
            ),
            passes: [("forward", per_pair), ("backward", 2.5 * per_pair)]
                .into_iter()
                .enumerate()
                .take(1 + usize::from(self.backward))
                .map(|(place, (name, flops))| Pass::new(name, place, flops, figures))
                .collect(),
            seconds: start.elapsed().as_secs_f64(),
            peak: figures.iter().filter_map(|rank| rank.peak).max(),
            output: format!("{} ({})", self.output.display(), report::bytes(bytes)),
        }
    }
}

/// The whole file takes its name when all that every rank has written is on the disk.
fn finish(crew: &mut Crew, output: Output) -> Outcome {
    crew.each_apart([&output], |_, output| output.sync())?;
    if crew.leads() {
        let finished = output.finish();
        return crew.agree(finished.map_err(Failure::from));
    }
    crew.agree(Ok(()))?;
    output.forget();
    Ok(())
}

impl<T: Element, B: Backend<Space: HostTensors>> Rank<T, B> {
    /// Does `work` and notes in the trace how long it took.
    fn timed<R>(&self, name: &'static str, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let begin = Instant::now();
        let done = work()?;
        self.log.span(name, 0, begin);
        Ok(done)
    }

    /// Fits the plan to what came with the batch.
    fn fit(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        // the same on all ranks: it follows from the file alone
        if batch == Batch::default() { Ok(()) } else { self.plan.update(&batch) }
    }

    fn forward(&mut self) -> Result<Forward<T>> {
        let begin = Instant::now();
        let forward = self.plan.forward(&self.share.tensors())?;
        self.log.span("forward", 0, begin);
        self.reports.extend(&forward.reports);
        Ok(forward)
    }

    fn backward(&mut self, forward: &Forward<T>, of_output: &OutputGradients<T>) -> Result<Backward<T>> {
        let begin = Instant::now();
        let gradients = self.plan.backward(&self.share.tensors(), forward, of_output.dout.view(), of_output.dlse_view())?;
        self.log.span("backward", 0, begin);
        self.reports.extend(&gradients.reports);
        Ok(gradients)
    }
}

/// Messages that these ranks receive in a forward and in a backward pass.
fn blocks<B: Backend<Space: HostTensors>>(ranks: &[Planned<B>]) -> [usize; 2] {
    let Some(schedule) = ranks.first().map(|rank| rank.plan.ring().schedule()) else { return [0, 0] };
    let steps = || ranks.iter().filter_map(|rank| schedule.steps.get(place(&rank.plan))).flatten();
    let before: usize = steps().map(|step| step.before.receives.len()).sum();
    [before, before + steps().map(|step| step.after.receives.len()).sum::<usize>()]
}

/// Where a rank stands on its ring: schedule and work go by places.
fn place<B: Backend<Space: HostTensors>>(plan: &RankPlan<B>) -> usize {
    let ring = plan.ring();
    ring.order().place(ring.rank())
}

const fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}
