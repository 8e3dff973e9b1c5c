//! The phases of one attention over files: plan, read, update, forward, write, backward, write.
//!
//! A phase starts when all ranks have finished the one before. So a rank that cannot read or write
//! its rows fails the job on all ranks, and no rank waits for it on the ring.

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
    backend::{BackendChoice, with_backend},
    failure::{Failure, Outcome},
    file::{self, Output, Staging},
    input::{Input, OutputGradients, Share},
    job::{Endpoint, Job, RankBackend},
    memory::{self, peak_bytes},
    message, pairs,
    report::{self, complain},
    trace::{RunId, Traces},
};

/// Arguments of one attention over files.
#[derive(Debug)]
pub(crate) struct AttendRun<'a> {
    /// Definition of the attention.
    pub(crate) attention: Attention,
    /// Shape of its sink logits.
    pub(crate) sinks: Option<SinkShape>,
    /// Opened backend.
    pub(crate) backend: BackendChoice,
    /// Threads per rank.
    pub(crate) threads: usize,
    /// Layout; `None` chooses one from the mask.
    pub(crate) layout: Option<Layout>,
    /// True to compute gradients.
    pub(crate) backward: bool,
    /// File to write.
    pub(crate) output: &'a Path,
    /// Folder of the traces; `None` writes none.
    pub(crate) trace: Option<&'a Path>,
    /// File to read.
    pub(crate) input: &'a Input,
    /// Print errors only: no progress bar on a terminal, no notes.
    pub(crate) quiet: bool,
}

/// Rank after the phase plan.
struct Planned<B: Backend<Space: HostTensors>> {
    plan: Plan<B>,
    log: TraceLog,
}

/// Rank after the phase read.
struct Rank<T: Element, B: Backend<Space: HostTensors>> {
    plan: Plan<B>,
    log: TraceLog,
    batch: Batch,
    share: Share<T>,
    /// Visible pairs of its queries, all heads and batch rows.
    pairs: f64,
    /// Reports of the passes so far.
    reports: Vec<Report>,
}

impl AttendRun<'_> {
    /// Computes attention in `T`. The output file appears if and only if all phases succeed.
    ///
    /// # Ordering
    /// Collective over the processes of the job.
    /// # Errors
    /// Those of the ranks and of the files.
    pub(super) fn run_as<T: Element>(&self, job: &mut Job) -> Outcome<Summary> {
        let progress = if job.is_leader() && !self.quiet {
            Progress::on_terminal()
        } else {
            Progress::hidden()
        };
        let summary = with_backend!(&self.backend, self.threads, make => {
            self.phases::<T, _>(job, &progress, make)
        });
        progress.finish();
        summary
    }

    fn phases<T: Element, B: Backend<Space: HostTensors>>(
        &self,
        job: &mut Job,
        progress: &Progress,
        make: impl Fn(Endpoint) -> Result<RankBackend<B>> + Sync,
    ) -> Outcome<Summary> {
        let input = self.input;
        let fields = Descriptor::new()
            .field("backward", self.backward.into())
            .field("trace", self.trace.is_some().into());
        job.require_same(fields)?;
        let start = job.synchronized_now()?;
        let processes = if job.is_mpi() { job.ranks() } else { 1 };
        let prepared = self.prepare().and_then(|(spec, tensors)| {
            self.tensors_held(&spec, processes).must_fit()?;
            Ok((spec, tensors))
        });
        let (spec, tensors) = job.agree(prepared.map_err(Failure::from))?;
        let output = self.open(job, &tensors)?;
        let traces = self.trace.map(|folder| Traces::create(folder, job)).transpose()?;

        progress.phase("plan", 0);
        let endpoints = job.endpoints()?;
        let ranks =
            job.run_phase(endpoints, |_, endpoint| self.plan(make(endpoint)?, start, progress))?;
        progress.phase("read", 0);
        let all = job.ranks();
        let mut ranks =
            job.run_local_phase(ranks, |_, rank| self.read::<T, B>(&spec, all, rank))?;
        job.run_phase(&mut ranks, |_, rank| rank.update().map_err(|error| input.named(error)))?;
        // after the update: segment ids and positions may have changed the schedule
        let blocks = blocks(ranks.iter().map(|rank| &rank.plan));
        self.count_pairs(&mut ranks);
        // printed only now: a refused input prints nothing but its error
        let unknown = input.unknown_names();
        if job.is_leader() && !self.quiet && !unknown.is_empty() {
            complain!(
                "note: {}: not an input tensor, ignored: {}",
                message::path(input.path()),
                message::list(unknown)
            );
        }

        progress.phase("forward", blocks[0]);
        let forwards = job.run_phase(&mut ranks, |_, rank| rank.forward())?;
        progress.phase("write", 0);
        write(job, &ranks, &forwards, |all, own, _| write_forward(&output, all, own))?;
        if self.backward {
            progress.phase("read", 0);
            let gradients = job.run_local_phase(&mut ranks, |_, rank| {
                input.output_gradients::<T>(rank.plan.q_rows()).map_err(|error| input.named(error))
            })?;
            progress.phase("backward", blocks[1]);
            let items = ranks.iter_mut().zip(forwards.iter().zip(gradients));
            let gradients = job.run_phase(items, |_, (rank, (forward, of_output))| {
                rank.backward(forward, &of_output)
            })?;
            progress.phase("write", 0);
            write(job, &ranks, &gradients, |all, own, rank| {
                write_backward(&output, &spec, all, own, rank)
            })?;
        }
        let figures = self.figures(job, &ranks)?;
        let run = traces.is_some().then(|| RunId::agree(job)).transpose()?;
        // an error before this leaves no output, an error after it keeps the output
        finish(job, output)?;
        let bytes = tensors.iter().map(file::Planned::bytes).sum();
        let mut summary = self.summary(
            job.ranks(),
            ranks.first().map(|rank| &rank.plan),
            T::DTYPE.name(),
            &figures,
            start,
            bytes,
        );
        if let (Some(traces), Some(run)) = (traces, run) {
            let logs = ranks.iter().map(|rank| rank.log.clone()).collect();
            summary.untraced = traces.write(job, logs, &run).err();
        }
        Ok(summary)
    }

    fn prepare(&self) -> Result<(Spec, Vec<file::Planned>)> {
        let named = |error| self.input.named(error);
        let spec = self.attention.spec(self.input.dims).map_err(named)?;
        let tensors = planned(&spec, self.input, self.backward).map_err(named)?;
        Ok((spec, tensors))
    }

    /// Size of the tensors that one of `processes` processes holds at the same time.
    fn tensors_held(&self, spec: &Spec, processes: usize) -> memory::Tensors {
        let mut held = memory::Tensors::of(&spec.dims, spec.dtype, self.backward);
        if let Some(bias) = spec.bias {
            held =
                held.and(&bias, 1 + usize::from(self.backward), spec.dtype.accumulator().bytes());
        }
        held.shared_by(processes)
    }

    /// Opens the output file of all ranks: rank 0 creates it, the others open it.
    ///
    /// # Ordering
    /// Collective over the processes of the job.
    fn open(&self, job: &mut Job, tensors: &[file::Planned]) -> Outcome<Output> {
        if job.is_on_one_node() {
            // on one node all ranks must name the same file; paths on other nodes may differ
            let identity = file::identity(self.output).unwrap_or_default();
            job.require_same(Descriptor::new().field_as(
                "output",
                identity,
                self.output.display(),
            ))?;
            // fails on some file systems, and where a process may not open another one's files
            if let Ok(output) = self.open_as(job, tensors, Staging::Unnamed) {
                return Ok(output);
            }
        }
        // other nodes can open the file only by its name
        let staging = if job.is_mpi() { Staging::Named } else { Staging::Best };
        self.open_as(job, tensors, staging)
    }

    fn open_as(
        &self,
        job: &mut Job,
        tensors: &[file::Planned],
        staging: Staging,
    ) -> Outcome<Output> {
        let made = if job.is_leader() {
            Output::create_staged(self.output, tensors, staging).map(Some)
        } else {
            Ok(None)
        };
        let made = job.agree(made.map_err(Failure::from))?;
        let mine = made.as_ref().map(Output::handle).unwrap_or_default();
        let handles = job.all_gather(mine.as_bytes())?;
        let handle = OsStr::from_bytes(handles.first().map_or(&[], Vec::as_slice));
        let opened = made.map_or_else(|| Output::join(self.output, tensors, handle), Ok);
        job.agree(opened.map_err(Failure::from))
    }

    fn plan<B: Backend<Space: HostTensors>>(
        &self,
        (backend, transport): RankBackend<B>,
        start: Instant,
        progress: &Progress,
    ) -> Result<Planned<B>> {
        let transport = Trace::new(transport, start);
        let log = transport.log();
        let attention = self
            .attention
            .clone()
            .layout(self.layout.clone())
            .on_silence(report::warn_of_silence(transport.rank(), transport.ranks()));
        let transport = Watched::new(transport, progress.clone());
        let plan = Plan::new(&attention, self.input.dims, backend, transport)?;
        Ok(Planned { plan, log })
    }

    /// Reads the rows of one rank. With a dense mask, also counts the visible pairs of its queries:
    /// later phases have no dense mask.
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
                ring_index(&plan),
                ranks,
                &batch,
            );
            pairs = pairs::visible_under(dense, spec, &pairs::rows(&queries)?, &keys);
        }
        Ok(Rank { plan, log, batch, share, pairs, reports: Vec::new() })
    }

    /// Counts the visible pairs of each rank without a dense mask, with which [`AttendRun::read`]
    /// has counted them.
    fn count_pairs<T: Element, B: Backend<Space: HostTensors>>(&self, ranks: &mut [Rank<T, B>]) {
        if self.input.has("attention_mask") {
            return;
        }
        // one computation for all ranks: each plan has the positions and ids of all rows
        let work = ranks.first().map(|rank| rank.plan.ring().work());
        for rank in ranks {
            rank.pairs =
                work.as_ref().map_or(0.0, |work| work.of_rank(ring_index(&rank.plan)) as f64);
        }
    }

    /// All-gathers the figures of every rank, by rank.
    fn figures<T: Element, B: Backend<Space: HostTensors>>(
        &self,
        job: &mut Job,
        ranks: &[Rank<T, B>],
    ) -> Outcome<Vec<RankFigures>> {
        // the peak is that of the process, so of all its ranks together
        let peak = peak_bytes();
        let mine: Vec<RankFigures> = ranks
            .iter()
            .map(|rank| RankFigures { pairs: rank.pairs, peak, reports: rank.reports.clone() })
            .collect();
        let numbers: Vec<f64> = mine.iter().flat_map(RankFigures::numbers).collect();
        let all = job.all_gather_numbers(&numbers)?.concat();
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
        // 2 flops for each element of q·k and of p·v; pairs include all heads and batch rows
        let per_pair = 2.0 * (self.input.dims.head_dim + self.input.dims.value_dim) as f64;
        let (layout, route) = plan
            .map_or(("no", "no"), |plan| (plan.ring().layout().name(), plan.ring().route().name()));
        Summary {
            ranks: count,
            threads: self.threads,
            backend: self.backend.description(),
            layout,
            route,
            dtype,
            pairs: figures.iter().map(|rank| rank.pairs).sum(),
            passes: [("forward", per_pair), ("backward", 2.5 * per_pair)]
                .into_iter()
                .enumerate()
                .take(1 + usize::from(self.backward))
                .map(|(index, (name, flops))| Pass::new(name, index, flops, figures))
                .collect(),
            seconds: start.elapsed().as_secs_f64(),
            peak: figures.iter().filter_map(|rank| rank.peak).max(),
            output: message::path(self.output),
            output_bytes: bytes,
            untraced: None,
        }
    }
}

/// Writes the arrays `given` of this process's ranks. Each rank calls `write(all, own, rank)` with
/// the arrays of all ranks of the process, its index among them and its rank.
fn write<T: Element, B: Backend<Space: HostTensors>, G: Sync>(
    job: &mut Job,
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
    job.run_local_phase(logs, |rank, (own, log)| {
        let begin = Instant::now();
        write(&all, own, rank)?;
        log.span("write", 0, begin);
        Ok(())
    })?;
    Ok(())
}

/// Gives the output file its name once the data of all ranks is on the disk.
///
/// # Ordering
/// Collective over the processes of the job.
fn finish(job: &mut Job, output: Output) -> Outcome {
    job.run_local_phase([&output], |_, output| output.sync())?;
    if job.is_leader() {
        let finished = output.finish();
        return job.agree(finished.map_err(Failure::from));
    }
    job.agree(Ok(()))?;
    output.forget();
    Ok(())
}

impl<T: Element, B: Backend<Space: HostTensors>> Rank<T, B> {
    /// Updates the plan with the masks, ids and positions of the batch.
    fn update(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        // equal on all ranks, because it depends only on the file
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

/// Number of blocks that these ranks receive in a forward and in a backward pass.
pub(super) fn blocks<'a, B: Backend<Space: HostTensors> + 'a>(
    plans: impl Iterator<Item = &'a Plan<B>> + Clone,
) -> [usize; 2] {
    let Some(schedule) = plans.clone().next().map(|plan| plan.ring().schedule()) else {
        return [0, 0];
    };
    let steps = || plans.clone().filter_map(|plan| schedule.steps.get(ring_index(plan))).flatten();
    let before: usize = steps().map(|step| step.before.receives.len()).sum();
    [before, before + steps().map(|step| step.after.receives.len()).sum::<usize>()]
}

/// Ring index of a plan's rank, by which schedules and work are indexed.
fn ring_index<B: Backend<Space: HostTensors>>(plan: &Plan<B>) -> usize {
    let ring = plan.ring();
    ring.order().ring_index(ring.rank())
}
