//! The phases of one attention over files: plan, read, update, forward, write, backward, write.
//!
//! A phase starts when all ranks have finished the one before. So a rank that cannot read or write
//! its rows fails the job on all ranks, and no rank waits for it on the ring.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use annulus::{
    Plan, Report, Setup,
    comm::{
        Descriptor,
        ring::{Activity, StepEvent},
        trace::TraceLog,
    },
};
use annulus_core::{Batch, Element, Result, Runs, Side, SinkShape, Spec};
use annulus_plan::Strategy;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    attend::{
        output::{self, Given},
        summary::{AttendFigures, AttendSummary, PassFigures, PassSummary},
    },
    backend::BackendChoice,
    failure::Outcome,
    file::{OutputFile, PlannedTensor},
    input::{Input, Share},
    job::Job,
    memory::{self, peak_bytes},
    message, pairs,
    report::{self, complain, warn_of_silence},
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

/// Rank of this process.
struct AttendRank<T: Element> {
    plan: Plan,
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
        let prepared = self.prepare(job.processes());
        let (spec, tensors) = job.agree(prepared)?;
        let output = output::open(job, self.output, &tensors)?;
        let traces = self.trace.map(|folder| Traces::create(folder, job)).transpose()?;

        progress.phase("plan", 0);
        let endpoints = job.endpoints()?;
        let all = job.ranks();
        let planned = job.run_phase(endpoints, |rank, endpoint| {
            let warn = warn_of_silence(rank, all);
            let setup = self.setup.clone().map_runtime(|runtime| runtime.on_silence(warn));
            let setup = progress.observe(setup);
            self.backend.traced_plan(self.threads, endpoint, &setup, self.input.dims, start)
        })?;
        progress.phase("read", 0);
        let mut ranks = job.run_local_phase(planned, |_, (plan, log)| {
            self.read::<T>(&spec, all, plan, log).map_err(|error| self.input.named(error))
        })?;
        // equal on all ranks, because it depends only on the file
        job.run_phase(&mut ranks, |_, rank| match std::mem::take(&mut rank.batch) {
            none if none == Batch::default() => Ok(()),
            batch => rank.plan.update(&batch).map_err(|error| self.input.named(error)),
        })?;
        // with a dense mask or key lists `read` has counted them
        if !["attention_mask", "key_list_offsets"].iter().any(|name| self.input.has(name)) {
            count_pairs(&mut ranks);
        }
        // printed only now: a refused input prints nothing but its error
        if job.is_leader() && !self.quiet {
            self.note_unknown_tensors();
        }
        self.run_passes(job, progress, &mut ranks, &output, &spec)?;

        // 2 flops for each element of q·k and of p·v; pairs include all heads and batch rows
        let per_pair = 2.0 * (spec.dims.head_dim + spec.dims.value_dim) as f64;
        let figures = gather_figures(job, &ranks, [per_pair, 2.5 * per_pair])?;
        let run = traces.is_some().then(|| RunId::agree(job)).transpose()?;
        // an error before this leaves no output, an error after it keeps the output
        output::finish(job, output)?;
        let plan = ranks.first().map(|rank| &rank.plan);
        let visible_pairs: f64 = figures.iter().map(|rank| rank.pairs).sum();
        let pass = |(index, (name, per_pair))| {
            PassSummary::new(name, index, per_pair * visible_pairs, &figures)
        };
        let passes = [("forward", per_pair), ("backward", 2.5 * per_pair)].into_iter().enumerate();
        let mut summary = AttendSummary {
            ranks: job.ranks(),
            threads: self.threads,
            backend: self.backend.description(),
            strategy: plan.map(|plan| plan.named_strategy().to_string()).unwrap_or_default(),
            layout: plan.map_or("no", |plan| plan.layout().name()),
            route: plan.map_or("no", |plan| plan.route().name()),
            dtype: T::DTYPE.name(),
            visible_pairs,
            passes: passes.take(1 + usize::from(self.backward)).map(pass).collect(),
            seconds: start.elapsed().as_secs_f64(),
            peak_bytes: figures.iter().filter_map(|rank| rank.peak).max(),
            output: message::path(self.output),
            output_bytes: tensors.iter().map(PlannedTensor::bytes).sum(),
            untraced: None,
        };
        if let (Some(traces), Some(run)) = (traces, run) {
            let logs = ranks.iter().map(|rank| rank.log.clone()).collect();
            summary.untraced = traces.write(job, logs, &run).err();
        }
        Ok(summary)
    }

    /// Returns the definition and the tensors of the output. Checks that the tensors that one of
    /// `processes` processes holds at the same time fit its memory.
    fn prepare(&self, processes: usize) -> Result<(Spec, Vec<PlannedTensor>)> {
        let named = |error| self.input.named(error);
        let spec = self.setup.spec(self.input.dims).map_err(named)?;
        let tensors = output::planned(&spec, self.input, self.backward).map_err(named)?;
        let mut held = memory::Tensors::of(&spec.dims, spec.dtype, self.backward);
        if let Some(bias) = spec.bias {
            held =
                held.and(&bias, 1 + usize::from(self.backward), spec.dtype.accumulator().bytes());
        }
        held.shared_by(processes).must_fit()?;
        Ok((spec, tensors))
    }

    /// Reads the rows of one rank. With a dense mask, also counts the visible pairs of its queries:
    /// later phases have no dense mask.
    fn read<T: Element>(
        &self,
        spec: &Spec,
        ranks: usize,
        plan: Plan,
        log: TraceLog,
    ) -> Result<AttendRank<T>> {
        let begin = Instant::now();
        let batch = self.input.batch(plan.q_rows(), plan.kv_rows())?;
        let share = self.input.share(self.sinks, plan.q_rows(), plan.kv_rows())?;
        log.span("read", 0, begin);
        let mut pairs = 0.0;
        if batch.attention_mask.is_some() || batch.key_lists.is_some() {
            let keys = pairs::whole(spec, Side::Kv, &self.input.coordinates()?);
            let Spec { dims, alignment, .. } = spec;
            let index = plan.ring_index();
            let queries =
                plan.layout().local_shard(dims, *alignment, Side::Q, index, ranks, &batch);
            let [queries, keys] = [&queries, &keys].map(pairs::rows);
            pairs = match &batch.attention_mask {
                Some(dense) if batch.key_lists.is_none() => {
                    pairs::visible_under(dense, spec, &queries?, &keys?)
                }
                _ => pairs::visible_in_lists(&batch, spec, &queries?, &keys?)?,
            };
        }
        Ok(AttendRank { plan, log, batch, share, pairs, reports: Vec::new() })
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
        let [in_forward, in_backward] = blocks(ranks.iter().map(|rank| &rank.plan));
        progress.phase("forward", in_forward);
        let forwards = job.run_phase(&mut *ranks, |_, rank| {
            let begin = Instant::now();
            let forward = rank.plan.forward(&rank.share.tensors())?;
            rank.log.span("forward", 0, begin);
            rank.reports.extend(&forward.reports);
            Ok(forward)
        })?;
        progress.phase("write", 0);
        let leader = job.is_leader();
        write(job, ranks, &forwards, |all| output::write_forward(output, all, leader))?;
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
        let gradients = job.run_phase(items, |_, (rank, (forward, (dout, dlse)))| {
            let begin = Instant::now();
            let tensors = rank.share.tensors();
            let dlse = dlse.as_ref().map(|dlse| dlse.view());
            let gradients = rank.plan.backward(&tensors, forward, dout.view(), dlse)?;
            rank.log.span("backward", 0, begin);
            rank.reports.extend(&gradients.reports);
            Ok(gradients)
        })?;
        progress.phase("write", 0);
        write(job, ranks, &gradients, |all| output::write_backward(output, spec, all, leader))?;
        if !self.input.has("key_list_bias") {
            return Ok(());
        }
        let gradient = |rank: &AttendRank<T>| {
            (rank.plan.q_rows().clone(), rank.plan.list_bias_gradient().unwrap_or_default())
        };
        let gradients: Vec<(Runs, Vec<f64>)> = ranks.iter().map(gradient).collect();
        job.run_local_phase([()], |_, ()| {
            let Some(lists) = self.input.whole_key_lists()? else { return Ok(()) };
            gradients.iter().try_for_each(|(rows, gradient)| {
                output::write_list_bias::<T>(output, &lists, rows, gradient)
            })
        })?;
        Ok(())
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
}

/// Counts the visible pairs of each rank, for inputs without a dense mask.
fn count_pairs<T: Element>(ranks: &mut [AttendRank<T>]) {
    // in a ring one computation serves all ranks: each plan has the positions and ids of all rows
    let ring = ranks.first().filter(|rank| rank.plan.strategy() == Strategy::Ring);
    let of_ring = ring.map(|rank| rank.plan.work().0);
    for rank in ranks {
        rank.pairs = match &of_ring {
            Some(work) => work.of_rank(rank.plan.ring_index()) as f64,
            None => {
                let (work, index) = rank.plan.work();
                work.of_rank(index) as f64
            }
        };
    }
}

/// All-gathers the figures of every rank, by rank. `flops_per_pair` is that of each pass.
fn gather_figures<T: Element>(
    job: &mut Job,
    ranks: &[AttendRank<T>],
    flops_per_pair: [f64; 2],
) -> Outcome<Vec<AttendFigures>> {
    // the peak is that of the process, so of all its ranks together
    let peak = peak_bytes();
    let of_rank = |&AttendRank { pairs, ref reports, .. }: &AttendRank<T>| {
        let passes = reports.iter().zip(flops_per_pair);
        let passes = passes.map(|(report, flops)| PassFigures::new(report, flops * pairs));
        AttendFigures { pairs, peak, passes: passes.collect() }
    };
    let own: Vec<AttendFigures> = ranks.iter().map(of_rank).collect();
    Ok(job.all_gather_values(&own)?.concat())
}

/// Writes the arrays `given` of this process's ranks.
fn write<T: Element, G: Sync>(
    job: &mut Job,
    ranks: &[AttendRank<T>],
    given: &[G],
    write: impl Fn(&[Given<'_, G>]) -> Result<()> + Sync,
) -> Outcome {
    let of_rank = |(rank, arrays): (_, _)| {
        let rank: &AttendRank<T> = rank;
        Given { q_rows: rank.plan.q_rows(), kv_rows: rank.plan.kv_rows(), arrays }
    };
    let all: Vec<Given<'_, G>> = ranks.iter().zip(given).map(of_rank).collect();
    let begin = Instant::now();
    // of all ranks of the process on one thread: systems write a file in one thread at a time
    job.run_local_phase([()], |_, ()| write(&all))?;
    ranks.iter().for_each(|rank| rank.log.span("write", 0, begin));
    Ok(())
}

/// Number of blocks that these ranks compute on in a forward and in a backward pass.
pub(super) fn blocks<'a>(plans: impl Iterator<Item = &'a Plan>) -> [usize; 2] {
    plans
        .map(Plan::blocks_computed)
        .fold([0, 0], |sum, blocks| [sum[0] + blocks[0], sum[1] + blocks[1]])
}

/// Progress bar. It is hidden where standard error is not a terminal.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Creates a bar on the terminal of standard error. Messages are printed above it.
    pub(crate) fn on_terminal() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        // the tick needs a thread, whose failure to start would end the program: only if visible
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        report::set_progress_bar(Some(bar.clone()));
        Self(bar)
    }

    /// Creates a bar that is never drawn.
    pub(crate) fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    /// Starts a phase in which the ranks of this process compute on `blocks` blocks. Without blocks
    /// only the elapsed time is shown.
    pub(crate) fn phase(&self, name: &'static str, blocks: usize) {
        let template = if blocks > 0 {
            "{msg:9} {wide_bar} {pos}/{len} blocks {elapsed}"
        } else {
            "{msg:9} {spinner} {elapsed}"
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.0.set_style(style);
        }
        self.0.set_message(name);
        self.0.set_length(blocks as u64);
        self.0.set_position(0);
    }

    /// Advances the bar with every block of the plans of `setup`. Without a visible bar plans make
    /// no events.
    pub(crate) fn observe(&self, setup: Setup) -> Setup {
        if self.0.is_hidden() { setup } else { advance(setup, self.0.clone()) }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
        report::set_progress_bar(None);
    }
}

fn advance(setup: Setup, bar: ProgressBar) -> Setup {
    let observe = move |event: StepEvent| {
        if event.activity == Activity::Compute {
            bar.inc(1);
        }
    };
    setup.map_runtime(|runtime| runtime.on_step(observe))
}

#[cfg(test)]
mod tests {
    use annulus::{
        Attention, Dims, Division, Plan, Strategy, Tensors,
        comm::threads::{each_rank, ring},
    };
    use ndarray::Array4;

    use super::*;
    use crate::attend::run::blocks;

    /// Returns (counted, planned) numbers of blocks of a forward and of a backward pass.
    fn counted(setup: &Setup, ranks: usize, len: usize) -> [(u64, usize); 2] {
        let dims = Dims::new(1, len, 2, 8);
        let bar = ProgressBar::hidden();
        let setup = advance(setup.clone(), bar.clone());
        let mut plans =
            each_rank(ring(ranks), |_, endpoint| Plan::new(&setup, dims, endpoint)).unwrap();
        let [of_forward, of_backward] = blocks(plans.iter());
        let tensors: Vec<Array4<f32>> = plans
            .iter()
            .map(|plan| Array4::from_elem((1, plan.q_rows().len() as usize, 2, 8), 0.5))
            .collect();
        let forwards = each_rank(plans.iter_mut().zip(&tensors), |_, (plan, x)| {
            plan.forward(&Tensors::new(x.view(), x.view(), x.view()))
        })
        .unwrap();
        let in_forward = bar.position();
        each_rank(
            plans.iter_mut().zip(tensors.iter().zip(&forwards)),
            |_, (plan, (x, forward))| {
                plan.backward(&Tensors::new(x.view(), x.view(), x.view()), forward, x.view(), None)
            },
        )
        .unwrap();
        [(in_forward, of_forward), (bar.position() - in_forward, of_backward)]
    }

    #[test]
    fn the_bar_ends_full() {
        // long enough that the last block of each rank is split into four messages
        for ranks in [1, 3, 4] {
            for setup in [
                Attention::new().into(),
                Attention::new().causal(true).into(),
                Attention::new().sliding_window(40, 0).into(),
                Attention::new().causal(true).reproducible(true).into(),
                Setup::from((
                    Attention::new().causal(true),
                    Division::new().strategy(Strategy::AllGather),
                )),
            ] {
                for (got, want) in counted(&setup, ranks, 512 * ranks) {
                    assert_eq!(got, want as u64, "{ranks} ranks, {setup:?}");
                }
            }
        }
        // the local block, one from each of the others, the last in four parts
        assert_eq!(counted(&Setup::default(), 3, 1536)[0].1, 3 * (1 + 1 + 4));
    }
}
