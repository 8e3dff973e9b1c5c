//! One job: plan, read, fit, forward, write, backward, write. Every phase is each rank's of the crew, and the next starts when all ranks did
//! theirs, so that a rank that cannot read or write its rows leaves no other waiting for it.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path, time::Instant};

use annulus::{
    Attention, Backward, Forward, Plan, Report,
    comm::{
        Descriptor,
        trace::{Trace, TraceLog},
    },
};
use annulus_core::{
    Backend, Batch, Control, Element, HostTensors, Layout, Result, Rows, Shard, Side, SinkShape,
    Spec,
};

use super::{
    output::{Given, planned, write_backward, write_forward},
    progress::{Progress, Watched},
    summary::{Pass, RankFigures, Summary},
};
use crate::{
    crew::{Crew, Endpoint},
    engine::{Engine, Wired, with_backend},
    failure::{Failure, Outcome},
    file::{self, Manner, Output},
    input::{Input, OutputGradients, Share},
    memory::{self, peak_bytes},
    message, pairs,
    report::{self, complain},
    trace::{Run, Traces},
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
    /// Print errors only: no progress bar on a terminal, no notes.
    pub(crate) quiet: bool,
}

/// A rank that has a plan.
struct Planned<B: Backend<Space: HostTensors>> {
    plan: Plan<B>,
    log: TraceLog,
}

/// A rank that has read its rows.
struct Rank<T: Element, B: Backend<Space: HostTensors>> {
    plan: Plan<B>,
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
        let progress =
            if crew.leads() && !self.quiet { Progress::on_terminal() } else { Progress::nowhere() };
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
        let fields = Descriptor::new()
            .field("backward", self.backward.into())
            .field("trace", self.trace.is_some().into());
        crew.same(fields)?;
        let start = crew.moment()?;
        let processes = if crew.is_of_processes() { crew.ranks() } else { 1 };
        let prepared = self.prepare().and_then(|(spec, tensors)| {
            self.held(&spec, processes).must_fit()?;
            Ok((spec, tensors))
        });
        let (spec, tensors) = crew.agree(prepared.map_err(Failure::from))?;
        let output = self.open(crew, &tensors)?;
        let traces = self.trace.map(|folder| Traces::create(folder, crew)).transpose()?;

        progress.phase("plan", 0);
        let endpoints = crew.endpoints()?;
        let ranks =
            crew.each(endpoints, |_, endpoint| self.plan(make(endpoint)?, start, progress))?;
        progress.phase("read", 0);
        let all = crew.ranks();
        let mut ranks = crew.each_apart(ranks, |_, rank| self.read::<T, B>(&spec, all, rank))?;
        crew.each(&mut ranks, |_, rank| rank.fit().map_err(|error| input.named(error)))?;
        // what came with the batch may have changed the schedule
        let blocks = blocks(ranks.iter().map(|rank| &rank.plan));
        self.count(&mut ranks);
        // nothing is wrong with the input: a refusal is one line
        let unknown = input.unknown_names();
        if crew.leads() && !self.quiet && !unknown.is_empty() {
            complain!(
                "note: {}: not an input, left alone: {}",
                message::path(input.path()),
                message::list(unknown)
            );
        }

        progress.phase("forward", blocks[0]);
        let forwards = crew.each(&mut ranks, |_, rank| rank.forward())?;
        progress.phase("write", 0);
        write(crew, &ranks, &forwards, |all, own, _| write_forward(&output, all, own))?;
        if self.backward {
            progress.phase("read", 0);
            let gradients = crew.each_apart(&mut ranks, |_, rank| {
                input.output_gradients::<T>(rank.plan.q_rows()).map_err(|error| input.named(error))
            })?;
            progress.phase("backward", blocks[1]);
            let items = ranks.iter_mut().zip(forwards.iter().zip(gradients));
            let gradients = crew.each(items, |_, (rank, (forward, of_output))| {
                rank.backward(forward, &of_output)
            })?;
            progress.phase("write", 0);
            write(crew, &ranks, &gradients, |all, own, rank| {
                write_backward(&output, &spec, all, own, rank)
            })?;
        }
        let figures = self.figures(crew, &ranks)?;
        let run = traces.is_some().then(|| Run::agreed(crew)).transpose()?;
        // whatever fails before leaves no output, and nothing that fails after it takes it away
        finish(crew, output)?;
        let bytes = tensors.iter().map(file::Planned::bytes).sum();
        let mut summary = self.summary(
            crew.ranks(),
            ranks.first().map(|rank| &rank.plan),
            T::DTYPE.name(),
            &figures,
            start,
            bytes,
        );
        if let (Some(traces), Some(run)) = (traces, run) {
            let logs = ranks.iter().map(|rank| rank.log.clone()).collect();
            summary.untraced = traces.write(crew, logs, &run).err();
        }
        Ok(summary)
    }

    fn prepare(&self) -> Result<(Spec, Vec<file::Planned>)> {
        let named = |error| self.input.named(error);
        let spec = self.attention.spec(self.input.dims).map_err(named)?;
        let tensors = planned(&spec, self.input, self.backward).map_err(named)?;
        Ok((spec, tensors))
    }

    /// Every tensor that the ranks of one process hold at once, of `processes` processes.
    fn held(&self, spec: &Spec, processes: usize) -> memory::Tensors {
        let mut held = memory::Tensors::of(&spec.dims, spec.dtype, self.backward);
        if let Some(bias) = spec.bias {
            held =
                held.and(&bias, 1 + usize::from(self.backward), spec.dtype.accumulator().bytes());
        }
        held.shared_by(processes)
    }

    /// One file for all ranks: made by the first, opened by the others.
    fn open(&self, crew: &mut Crew, tensors: &[file::Planned]) -> Outcome<Output> {
        if crew.shares_a_node() {
            // paths may differ from node to node, but not here
            let identity = file::identity(self.output).unwrap_or_default();
            crew.same(Descriptor::new().field_as("output", identity, self.output.display()))?;
            // not on every file system; and processes may not be allowed to open each other's files
            if let Ok(output) = self.open_as(crew, tensors, Manner::Nameless) {
                return Ok(output);
            }
        }
        // what other nodes open must have a name
        let manner = if crew.is_of_processes() { Manner::Named } else { Manner::Best };
        self.open_as(crew, tensors, manner)
    }

    fn open_as(
        &self,
        crew: &mut Crew,
        tensors: &[file::Planned],
        manner: Manner,
    ) -> Outcome<Output> {
        let made = if crew.leads() {
            Output::create_in_manner(self.output, tensors, manner).map(Some)
        } else {
            Ok(None)
        };
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
        let attention = self
            .attention
            .clone()
            .layout(self.layout.clone())
            .on_silence(report::of_silence(transport.rank(), transport.ranks()));
        let transport = Watched::new(transport, progress.clone());
        let plan = Plan::new(&attention, self.input.dims, backend, transport)?;
        Ok(Planned { plan, log })
    }

    /// One rank reads its rows. Where there is a dense mask, it counts the pairs that they see.
    fn read<T: Element, B: Backend<Space: HostTensors>>(
        &self,
        spec: &Spec,
        ranks: usize,
        rank: Planned<B>,
    ) -> Result<Rank<T, B>> {
        let Planned { plan, log } = rank;
        let begin = Instant::now();
        let named = |error| self.input.named(error);
        let batch = self.input.batch(plan.q_rows(), plan.kv_rows()).map_err(named)?;
        let share = self.input.share(self.sinks, plan.q_rows(), plan.kv_rows()).map_err(named)?;
        log.span("read", 0, begin);
        let mut pairs = 0.0;
        if let Some(dense) = &batch.attention_mask {
            let keys: Rows = pairs::rows(&pairs::whole(
                spec,
                Side::Kv,
                &self.input.coordinates().map_err(named)?,
            ))?;
            let queries = Shard::local(
                &spec.dims,
                spec.alignment,
                plan.ring().layout(),
                Side::Q,
                place(&plan),
                ranks,
                &batch,
            );
            pairs = pairs::visible_under(dense, spec, &pairs::rows(&queries)?, &keys);
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
    fn figures<T: Element, B: Backend<Space: HostTensors>>(
        &self,
        crew: &mut Crew,
        ranks: &[Rank<T, B>],
    ) -> Outcome<Vec<RankFigures>> {
        // peak memory is the process's, so its ranks' together
        let peak = peak_bytes();
        let mine: Vec<RankFigures> = ranks
            .iter()
            .map(|rank| RankFigures { pairs: rank.pairs, peak, reports: rank.reports.clone() })
            .collect();
        let numbers: Vec<f64> = mine.iter().flat_map(RankFigures::numbers).collect();
        let all = crew.share_numbers(&numbers)?.concat();
        Ok(all.chunks(numbers.len() / mine.len().max(1)).map(RankFigures::of_numbers).collect())
    }

    fn summary<B: Backend<Space: HostTensors>>(
        &self,
        count: usize,
        plan: Option<&Plan<B>>,
        dtype: &'static str,
        figures: &[RankFigures],
        start: Instant,
        bytes: u64,
    ) -> Summary {
        // pairs are summed over heads and batch rows already
        let per_pair = 2.0 * (self.input.dims.head_dim + self.input.dims.value_dim) as f64;
        let (layout, route) = plan
            .map_or(("no", "no"), |plan| (plan.ring().layout().name(), plan.ring().route().name()));
        Summary {
            ranks: count,
            threads: self.threads,
            backend: self.engine.description(),
            layout,
            route,
            dtype,
            pairs: figures.iter().map(|rank| rank.pairs).sum(),
            passes: [("forward", per_pair), ("backward", 2.5 * per_pair)]
                .into_iter()
                .enumerate()
                .take(1 + usize::from(self.backward))
                .map(|(place, (name, flops))| Pass::new(name, place, flops, figures))
                .collect(),
            seconds: start.elapsed().as_secs_f64(),
            peak: figures.iter().filter_map(|rank| rank.peak).max(),
            output: message::path(self.output),
            output_bytes: bytes,
            untraced: None,
        }
    }
}

/// The ranks of this process write what their passes gave: each its share, as `write` does it for
/// all of them, the number of this one among them, and its rank.
fn write<T: Element, B: Backend<Space: HostTensors>, G: Sync>(
    crew: &mut Crew,
    ranks: &[Rank<T, B>],
    given: &[G],
    write: impl Fn(&[Given<'_, G>], usize, usize) -> Result<()> + Sync,
) -> Outcome {
    let of_rank = |(rank, arrays): (_, _)| {
        let rank: &Rank<T, B> = rank;
        Given { q_rows: rank.plan.q_rows(), kv_rows: rank.plan.kv_rows(), arrays }
    };
    let all: Vec<Given<'_, G>> = ranks.iter().zip(given).map(of_rank).collect();
    let logs: Vec<(usize, TraceLog)> =
        ranks.iter().map(|rank| rank.log.clone()).enumerate().collect();
    crew.each_apart(logs, |rank, (own, log)| {
        let begin = Instant::now();
        write(&all, own, rank)?;
        log.span("write", 0, begin);
        Ok(())
    })?;
    Ok(())
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

    fn backward(
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

/// Blocks that these ranks receive in a forward and in a backward pass.
pub(super) fn blocks<'a, B: Backend<Space: HostTensors> + 'a>(
    plans: impl Iterator<Item = &'a Plan<B>> + Clone,
) -> [usize; 2] {
    let Some(schedule) = plans.clone().next().map(|plan| plan.ring().schedule()) else {
        return [0, 0];
    };
    let steps = || plans.clone().filter_map(|plan| schedule.steps.get(place(plan))).flatten();
    let before: usize = steps().map(|step| step.before.receives.len()).sum();
    [before, before + steps().map(|step| step.after.receives.len()).sum::<usize>()]
}

/// Where a rank stands on its ring: schedule and work go by places.
fn place<B: Backend<Space: HostTensors>>(plan: &Plan<B>) -> usize {
    let ring = plan.ring();
    ring.order().ring_index(ring.rank())
}
