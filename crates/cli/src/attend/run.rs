//! The phases of one attention over files: plan, read, update, forward, write, backward, write.
//!
//! A phase starts when all ranks have finished the one before. So a rank that cannot read or write
//! its rows fails the job on all ranks, and no rank waits for it on the ring.

use std::{path::Path, time::Instant};

use annulus::{
    Plan, Setup,
    comm::{Descriptor, trace::Trace},
};
use annulus_core::{Backend, Control, Element, HostTensors, Result, Rows, Side, SinkShape, Spec};

use super::{
    output::{planned, write_backward, write_forward},
    progress::Progress,
    ranks::{self, AttendRank, PlannedRank},
    shared_output,
    summary::{AttendFigures, AttendSummary, PassSummary},
};
use crate::{
    backend::{BackendChoice, with_backend},
    failure::{Failure, Outcome},
    file::{self, OutputFile},
    input::Input,
    job::{Job, RankBackend},
    memory, message, pairs,
    report::{self, complain},
    trace::{RunId, Traces},
};

/// Arguments of one attention over files.
#[derive(Debug)]
pub(crate) struct AttendRun<'a> {
    /// The attention, its layout and its deadlines.
    pub(crate) setup: Setup,
    /// Shape of its sink logits.
    pub(crate) sinks: Option<SinkShape>,
    /// Opened backend.
    pub(crate) backend: BackendChoice,
    /// Threads per rank.
    pub(crate) threads: usize,
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

impl AttendRun<'_> {
    /// Computes attention in `T`. The output file appears if and only if all phases succeed.
    ///
    /// # Ordering
    /// Collective over the processes of the job.
    pub(super) fn run_as<T: Element>(&self, job: &mut Job) -> Outcome<AttendSummary> {
        let progress = if job.is_leader() && !self.quiet {
            Progress::on_terminal()
        } else {
            Progress::hidden()
        };
        let summary = self.phases::<T>(job, &progress);
        progress.finish();
        summary
    }

    fn phases<T: Element>(&self, job: &mut Job, progress: &Progress) -> Outcome<AttendSummary> {
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
        let output = shared_output::open(job, self.output, &tensors)?;
        let traces = self.trace.map(|folder| Traces::create(folder, job)).transpose()?;

        progress.phase("plan", 0);
        let endpoints = job.endpoints()?;
        let planned = with_backend!(&self.backend, self.threads, make => {
            job.run_phase(endpoints, |_, endpoint| self.plan(make(endpoint)?, start, progress))
        })?;
        let mut ranks = self.read_ranks::<T>(job, progress, &spec, planned)?;
        // printed only now: a refused input prints nothing but its error
        if job.is_leader() && !self.quiet {
            self.note_unknown_tensors();
        }
        self.run_passes(job, progress, &mut ranks, &output, &spec)?;

        let figures = ranks::gather_figures(job, &ranks)?;
        let run = traces.is_some().then(|| RunId::agree(job)).transpose()?;
        // an error before this leaves no output, an error after it keeps the output
        shared_output::finish(job, output)?;
        let bytes = tensors.iter().map(file::PlannedTensor::bytes).sum();
        let plan = ranks.first().map(|rank| &rank.plan);
        let mut summary = self.summary(job.ranks(), plan, T::DTYPE.name(), &figures, start, bytes);
        if let (Some(traces), Some(run)) = (traces, run) {
            let logs = ranks.iter().map(|rank| rank.log.clone()).collect();
            summary.untraced = traces.write(job, logs, &run).err();
        }
        Ok(summary)
    }

    /// Reads the rows of this process's ranks, updates their plans and counts their pairs.
    fn read_ranks<T: Element>(
        &self,
        job: &mut Job,
        progress: &Progress,
        spec: &Spec,
        planned: Vec<PlannedRank>,
    ) -> Outcome<Vec<AttendRank<T>>> {
        progress.phase("read", 0);
        let all = job.ranks();
        let mut ranks = job.run_local_phase(planned, |_, rank| self.read::<T>(spec, all, rank))?;
        job.run_phase(&mut ranks, |_, rank| {
            rank.update().map_err(|error| self.input.named(error))
        })?;
        // with a dense mask `read` has counted them
        if !self.input.has("attention_mask") {
            ranks::count_pairs(&mut ranks);
        }
        Ok(ranks)
    }

    /// Runs the forward pass and, if requested, the backward pass, and writes their results.
    fn run_passes<T: Element>(
        &self,
        job: &mut Job,
        progress: &Progress,
        ranks: &mut [AttendRank<T>],
        output: &OutputFile,
        spec: &Spec,
    ) -> Outcome {
        // counted after the update, because segment ids and positions may change the schedule
        let [in_forward, in_backward] = ranks::blocks(ranks.iter().map(|rank| &rank.plan));
        progress.phase("forward", in_forward);
        let forwards = job.run_phase(&mut *ranks, |_, rank| rank.forward())?;
        progress.phase("write", 0);
        ranks::write(job, ranks, &forwards, |all, own, _| write_forward(output, all, own))?;
        if !self.backward {
            return Ok(());
        }
        progress.phase("read", 0);
        let gradients = job.run_local_phase(&mut *ranks, |_, rank| {
            let gradients = self.input.output_gradients::<T>(rank.plan.q_rows());
            gradients.map_err(|error| self.input.named(error))
        })?;
        progress.phase("backward", in_backward);
        let items = ranks.iter_mut().zip(forwards.iter().zip(gradients));
        let gradients = job.run_phase(items, |_, (rank, (forward, of_output))| {
            rank.backward(forward, &of_output)
        })?;
        progress.phase("write", 0);
        ranks::write(job, ranks, &gradients, |all, own, rank| {
            write_backward(output, spec, all, own, rank)
        })
    }

    /// Prints a note on tensors with unknown names, if the input has some.
    fn note_unknown_tensors(&self) {
        let unknown = self.input.unknown_names();
        if !unknown.is_empty() {
            complain!(
                "note: {}: not an input tensor, ignored: {}",
                message::path(self.input.path()),
                message::list(unknown.iter().map(String::as_str))
            );
        }
    }

    /// Returns the definition and the tensors of the output.
    fn prepare(&self) -> Result<(Spec, Vec<file::PlannedTensor>)> {
        let named = |error| self.input.named(error);
        let spec = self.setup.spec(self.input.dims).map_err(named)?;
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

    /// Creates the plan of one rank, with a trace around its transport, observed by the progress
    /// bar.
    fn plan<B: Backend<Space: HostTensors>>(
        &self,
        (backend, transport): RankBackend<B>,
        start: Instant,
        progress: &Progress,
    ) -> Result<PlannedRank> {
        let transport = Trace::new(transport, start);
        let log = transport.log();
        let warn = report::warn_of_silence(transport.rank(), transport.ranks());
        let setup = self.setup.clone().map_runtime(|runtime| runtime.on_silence(warn));
        let setup = progress.observe(setup);
        let plan = Plan::with_backend(setup, self.input.dims, backend, transport)?;
        Ok(PlannedRank { plan, log })
    }

    /// Reads the rows of one rank. With a dense mask, also counts the visible pairs of its queries:
    /// later phases have no dense mask.
    fn read<T: Element>(
        &self,
        spec: &Spec,
        ranks: usize,
        rank: PlannedRank,
    ) -> Result<AttendRank<T>> {
        let PlannedRank { plan, log } = rank;
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
            let queries = plan.layout().local_shard(
                &spec.dims,
                spec.alignment,
                Side::Q,
                plan.ring_index(),
                ranks,
                &batch,
            );
            pairs = pairs::visible_under(dense, spec, &pairs::rows(&queries)?, &keys);
        }
        Ok(AttendRank { plan, log, batch, share, pairs, reports: Vec::new() })
    }

    fn summary(
        &self,
        count: usize,
        plan: Option<&Plan>,
        dtype: &'static str,
        figures: &[AttendFigures],
        start: Instant,
        bytes: u64,
    ) -> AttendSummary {
        // 2 flops for each element of q·k and of p·v; pairs include all heads and batch rows
        let per_pair = 2.0 * (self.input.dims.head_dim + self.input.dims.value_dim) as f64;
        let (layout, route) =
            plan.map_or(("no", "no"), |plan| (plan.layout().name(), plan.route().name()));
        AttendSummary {
            ranks: count,
            threads: self.threads,
            backend: self.backend.description(),
            strategy: plan.map(|plan| plan.named_strategy().to_string()).unwrap_or_default(),
            layout,
            route,
            dtype,
            pairs: figures.iter().map(|rank| rank.pairs).sum(),
            passes: [("forward", per_pair), ("backward", 2.5 * per_pair)]
                .into_iter()
                .enumerate()
                .take(1 + usize::from(self.backward))
                .map(|(index, (name, flops))| PassSummary::new(name, index, flops, figures))
                .collect(),
            seconds: start.elapsed().as_secs_f64(),
            peak: figures.iter().filter_map(|rank| rank.peak).max(),
            output: message::path(self.output),
            output_bytes: bytes,
            untraced: None,
        }
    }
}
