//! `annulus attend`: computes attention of the tensors in a file on a ring of ranks.

pub(crate) mod output;
mod run;
mod summary;

use std::path::PathBuf;

use annulus::{Attention, BiasOrder, Division, Runtime, Setup, bias::BiasTable};
use annulus_core::{Batch, DType, SinkShape};
use annulus_plan::{Machine, Strategy};
use clap::Args;
use half::{bf16, f16};
use serde::Serialize;

use crate::{
    arguments::{
        mask::{MaskFlags, ScoreFlags},
        names::check_strategy,
        option_flags::{DivisionFlags, OutputFlags, RuntimeFlags},
        values::{LayoutName, bias_order, dtype, ranks},
    },
    backend::{BackendChoice, DeviceFlags},
    failure::{Failure, Outcome, of_file},
    file,
    input::Input,
    job::Job,
    report::json_line,
    say,
};
pub(crate) use run::AttendRun;
use summary::AttendSummary;

const EXAMPLES: &str = "Input tensors, by name:
  query [b, q, h, d]  key [b, k, hk, d]  value [b, k, hk, dv]     f64, f32, bf16 or f16; h = n·hk
  bias [b|1, h|1, q|1, k|1]  softmax_aux [sinks] or [h, sinks]    floats
  attention_mask [b|1, h|1, q, k]                                 integers or bools
  q_segment_ids [b, q]  kv_segment_ids [b, k]                     integers; negative is padding
  cum_seqlens_q [sequences + 1]  cum_seqlens_k [sequences + 1]    integers from 0
  q_positions [b, q]  kv_positions [b, k]                         integers
  key_list_offsets [n·q + 1]  key_list_indices [entries]          integers; n head groups
  key_list_ends [entries]                                         integers; entries are ranges
  key_list_bias [pairs]                                           floats
  dout [b, q, h, dv]  dlse [b, h, q]                              floats, for --backward
OutputFile tensors: out, lse; max, sum with --unnormalized;
  statistics [b, h, q, 3], head_statistics [h, 3, 2] with --statistics;
  dq, dk, dv, dbias, dsoftmax_aux, dkey_list_bias with --backward.

Examples:
  annulus attend --input in.safetensors --output out.safetensors --causal --ranks 4
  annulus attend --input in.safetensors --output out.safetensors --causal --window 4095,0 --ranks 8
  annulus attend --input in.safetensors --output grads.safetensors --sinks per-head --backward
  annulus attend --input in.safetensors --output out.safetensors --scale -0.5 --trace traces/
  mpirun -n 4 annulus attend --input in.safetensors --output out.safetensors --causal
  annulus attend --input packed.safetensors --output out.safetensors --causal --ranks 4 \
    --documents 512,2048,1536 --layout balanced

Under a launcher (mpirun, mpiexec, srun) every process is a rank. It reads its rows of the input
and writes its rows of the output, which must be on a file system shared by all processes.";

/// Flags of an attention from file to file.
#[derive(Debug, Args)]
pub(crate) struct FileFlags {
    /// File with query, key, value and the optional tensors (see below)
    #[arg(long, alias = "in", value_name = "FILE")]
    pub(crate) input: PathBuf,
    /// File to write. It appears only when it is complete, and it may be the input
    ///
    /// An existing file is replaced. The new file has its permissions; other hard links keep the
    /// old content. A file without write permission is an error. A symbolic link is kept, and its
    /// target is replaced. Pipes, devices and standard output are refused, because the file is not
    /// written sequentially.
    #[arg(long, alias = "out", value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
    /// Print errors only: no summary, no progress bar, no notes
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Element type to compute in. Default: that of query
    #[arg(long, value_parser = dtype())]
    dtype: Option<DType>,
    #[command(flatten)]
    pub(crate) mask: MaskFlags,
    #[command(flatten)]
    pub(crate) scores: ScoreFlags,
    #[command(flatten, next_help_heading = "Ring")]
    pub(crate) device: DeviceFlags,
    /// Number of ranks, 1 to 128. Default: 1. Under MPI always the number of processes
    #[arg(long, value_name = "N", value_parser = ranks)]
    pub(crate) ranks: Option<usize>,
    #[command(flatten)]
    pub(crate) runtime: RuntimeFlags,
}

impl FileFlags {
    /// Opens the input. Returns it with the shape of its sink logits and the element type to
    /// compute in.
    ///
    /// # Ordering
    /// Collective over the processes of the job.
    pub(crate) fn open(&self, job: &mut Job) -> Outcome<(Input, Option<SinkShape>, DType)> {
        let input = Input::open(&self.input).map_err(Failure::from);
        let input = job.agree(input.and_then(|input| input.packed(&self.mask.documents)))?;
        let sinks = input.sinks(self.scores.sinks).map_err(|error| input.named(error));
        let sinks = job.agree(sinks)?;
        let dtype = self.dtype.unwrap_or(input.dtype);
        Ok((input, sinks, dtype))
    }

    /// Returns the definition of the attention without a bias.
    pub(crate) fn attention(&self, dtype: DType, sinks: Option<SinkShape>) -> Attention {
        self.scores.apply(self.mask.apply(Attention::new()), sinks).dtype(dtype)
    }

    /// Returns the deadlines: all ranks read their parts of one file before a call, so that a late
    /// one is lost.
    pub(crate) fn runtime(&self) -> Runtime {
        let deadline = self.runtime.deadline;
        Runtime::new().deadline(deadline).arrival_deadline(deadline)
    }

    /// Prints a summary as the flags say, once per job; with `print` as text.
    pub(crate) fn print<S: Serialize>(&self, job: &Job, summary: &S, print: impl FnOnce(&S)) {
        match (job.is_leader() && !self.quiet, self.json) {
            (false, _) => {}
            (true, true) => say!("{}", json_line(summary)),
            (true, false) => print(summary),
        }
    }
}

/// Computes attention and its gradients from a safetensors file on a ring of ranks
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AttendFlags {
    #[command(flatten)]
    files: FileFlags,
    /// Also compute the gradients; the input must have dout (`annulus make --backward` writes it)
    #[arg(long, help_heading = None)]
    backward: bool,
    /// Add the bias before or after the soft cap; needs --soft-cap and an input with a bias.
    /// Default: after
    #[arg(long, value_parser = bias_order(), requires = "soft_cap",
        help_heading = "Scores and probabilities")]
    bias_order: Option<BiasOrder>,
    /// The bias `[1, h|1, 1, entries]` of the input is a table by relative positions: clipped:L,R,
    /// t5:BUCKETS,DISTANCE, t5-causal:BUCKETS,DISTANCE, grid:8x8 or grid:LENGTHS,WINDOWS
    #[arg(long, value_name = "KIND")]
    bias_table: Option<BiasTable>,
    #[command(flatten)]
    outputs: OutputFlags,
    #[command(flatten, next_help_heading = "Ring")]
    division: DivisionFlags,
    /// Write a trace of each rank into this folder, for Perfetto or chrome://tracing;
    /// `annulus trace merge` joins them
    ///
    /// Traces are completed after the output, so a trace that cannot be written does not affect the
    /// output.
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,
}

/// Runs `annulus attend`.
pub(crate) fn run(flags: &AttendFlags) -> Outcome {
    let FileFlags { device, runtime, .. } = &flags.files;
    device.run_job("attend", runtime.deadline, |job, backend| flags.attend(job, backend))
}

impl AttendFlags {
    fn attend(&self, job: &mut Job, backend: BackendChoice) -> Outcome {
        let Self { files, division, .. } = self;
        job.set_ranks(files.ranks, 1)?;
        let threads = job.threads(files.runtime.threads)?;
        let machine = division.machine.as_deref().map(file::read_machine).transpose();
        let machine = job.agree(machine)?;
        let (input, sinks, dtype) = files.open(job)?;
        job.agree(self.needed_tensors(&input))?;
        job.agree(check_strategy(division.strategy, &input.dims, job.ranks()))?;
        let attention = files.attention(dtype, sinks).bias(input.bias);
        let attention = attention.bias_table(self.bias_table.clone());
        let attention = attention.bias_order(self.bias_order.unwrap_or(BiasOrder::AfterSoftCap));
        let attention = self.outputs.set_mathematics(attention).forward_only(!self.backward);
        // the whole batch is read for the balanced layout and the strategy auto only
        let layout = division.layout;
        let division = self.division(&input, machine).and_then(|division| {
            layout.apply(division, &attention, input.dims, job.ranks(), || input.coordinates())
        });
        let division = job.agree(division.map_err(|error| input.named(error)))?;
        let run = AttendRun {
            setup: Setup { attention, division, runtime: files.runtime() },
            sinks,
            backend,
            threads,
            backward: self.backward,
            output: &files.output,
            trace: self.trace.as_deref(),
            input: &input,
            quiet: files.quiet,
        };
        let summary = run.execute(job, dtype)?;
        files.print(job, &summary, AttendSummary::print);
        summary.untraced.map_or(Ok(()), Err)
    }

    /// Returns the division, and what auto chooses its strategy by.
    fn division(&self, input: &Input, machine: Option<Machine>) -> annulus_core::Result<Division> {
        let DivisionFlags { strategy, layout, .. } = self.division;
        let division =
            self.division.set_division(Division::new()).strategy(strategy).machine(machine);
        // the balanced layout sets them
        if strategy != Strategy::Auto || layout == LayoutName::Balanced {
            return Ok(division);
        }
        let batch = Some(input.coordinates()?);
        Ok(division.documents(batch.filter(|batch| *batch != Batch::default())))
    }

    /// Checks that the input has the tensors that the flags require.
    fn needed_tensors(&self, input: &Input) -> Outcome {
        let needed = |name: &str, with: &str, made_by: &str| {
            let want = format!(
                "a tensor named {name} (`annulus make {made_by}` writes one), or no {with}"
            );
            Err(of_file(&self.files.input, name, format!("no such tensor, with {with}"), want)
                .into())
        };
        if self.backward && !input.has("dout") {
            return needed("dout", "--backward", "--backward");
        }
        if self.bias_table.is_some() && !input.has("bias") {
            return needed("bias", "--bias-table", "--bias");
        }
        if self.bias_order.is_some() && !input.has("bias") {
            return needed("bias", "--bias-order", "--bias");
        }
        Ok(())
    }
}

impl AttendRun<'_> {
    /// Computes attention in `dtype`, which must be that of `self.setup`.
    ///
    /// # Ordering
    /// Collective over the processes of the job.
    pub(crate) fn execute(&self, job: &mut Job, dtype: DType) -> Outcome<AttendSummary> {
        match dtype {
            DType::F64 => self.run_as::<f64>(job),
            DType::F32 => self.run_as::<f32>(job),
            DType::Bf16 => self.run_as::<bf16>(job),
            DType::F16 => self.run_as::<f16>(job),
        }
    }
}
