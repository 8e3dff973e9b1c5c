//! `annulus attend`: attention over a file, on a ring of ranks, into a file.

pub(crate) mod job;
mod output;
pub(crate) mod progress;
mod summary;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use annulus::{Attention, BiasOrder};
use annulus_core::{DType, SinkShape};
use clap::{Args, ValueEnum};
use half::{bf16, f16};

use crate::{
    arguments::{
        mask::MaskFlags,
        ring::{BackendName, TransportName},
        values::{
            DTypeName, LayoutName, PrecisionName, finite, positive, probability, ranks, silence,
            threads, whole, whole_u64,
        },
    },
    crew::Crew,
    engine::Engine,
    failure::{Failure, Outcome, of_file},
    input::{Input, SinksForm},
    report::say,
};
pub(crate) use job::Job;
pub(crate) use summary::Summary;

const EXAMPLES: &str = "Input tensors, by name:
  query [b, q, h, d]  key [b, k, hk, d]  value [b, k, hk, dv]     f64, f32, bf16 or f16; h = n·hk
  bias [b|1, h|1, q|1, k|1]  softmax_aux [sinks] or [h, sinks]    floats
  attention_mask [b|1, h|1, q, k]                                 integers or bools
  q_segment_ids [b, q]  kv_segment_ids [b, k]                     integers; negative is padding
  cum_seqlens_q [sequences + 1]  cum_seqlens_k [sequences + 1]    integers from 0
  q_positions [b, q]  kv_positions [b, k]                         integers
  dout [b, q, h, dv]  dlse [b, h, q]                              floats, for --backward
Output tensors: out, lse; max, sum with --unnormalized;
  dq, dk, dv, dbias, dsoftmax_aux with --backward.

Examples:
  annulus attend --input in.safetensors --output out.safetensors --causal --ranks 4
  annulus attend --input in.safetensors --output out.safetensors --causal --window 4095,0 --ranks 8
  annulus attend --input in.safetensors --output grads.safetensors --sinks per-head --backward
  annulus attend --input in.safetensors --output out.safetensors --scale -0.5 --trace traces/
  mpirun -n 4 annulus attend --input in.safetensors --output out.safetensors --causal

Under a launcher (mpirun, mpiexec, srun) every process is a rank: it reads its rows of the input and writes its rows of the output, which must be
on a file system that all of them see.";

/// Computes attention, and its gradients, of a safetensors file on a ring of ranks
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AttendFlags {
    /// The file with query, key, value and what else there is (see below)
    #[arg(long, alias = "in", value_name = "FILE")]
    input: PathBuf,
    /// The file to write: whole, or not at all; it may be the input
    ///
    /// A file that is there is replaced: it keeps its permissions, and its owner and group where
    /// the system allows that; its other hard links keep the old content. One that may not be
    /// written is an error. A symbolic link stays, and what it leads to is made or replaced. Pipes,
    /// devices and standard output are refused: the file is not written from front to back.
    #[arg(long, alias = "out", value_name = "FILE")]
    output: PathBuf,
    /// Compute the gradients too; the input must have dout, which `annulus make --backward` writes
    #[arg(long)]
    backward: bool,
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
    /// Print errors only: no summary, no progress bar, no notes
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Element type to compute in; that of query if not said
    #[arg(long, value_enum)]
    dtype: Option<DTypeName>,
    #[command(flatten)]
    mask: MaskFlags,
    #[command(flatten)]
    logits: LogitFlags,
    #[command(flatten)]
    ring: RingFlags,
}

/// What becomes of a logit.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Logits and weights")]
struct LogitFlags {
    /// Multiplies q·k; 1/sqrt(d) if not said
    #[arg(long, value_name = "X", value_parser = finite, allow_hyphen_values = true)]
    scale: Option<f64>,
    /// Logits become X·tanh(logit/X)
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true)]
    soft_cap: Option<f64>,
    /// Add the bias before or after the soft cap; needs --soft-cap and an input with a bias.
    /// Default: after
    #[arg(long, value_enum)]
    bias_order: Option<BiasOrderName>,
    /// What softmax_aux means: sink logits shared by all heads, or of each head
    #[arg(long, value_enum)]
    sinks: Option<SinksForm>,
    /// Drop each weight with this probability
    #[arg(long, value_name = "P", value_parser = probability, requires = "seed", allow_hyphen_values = true)]
    dropout: Option<f64>,
    /// Seed of the dropout
    #[arg(long, value_name = "N", requires = "dropout", value_parser = whole_u64)]
    seed: Option<u64>,
    /// What products may leave out; `default` lets weights of bf16 inputs be rounded to bf16
    #[arg(long, value_enum, default_value = "highest")]
    precision: PrecisionName,
    /// Leave the output undivided, and write max and sum
    #[arg(long)]
    unnormalized: bool,
}

/// Who does the work.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Ring")]
struct RingFlags {
    /// What computes
    #[arg(long, value_enum, default_value = "cpu")]
    backend: BackendName,
    /// Which device, counted from 0 as `annulus doctor` lists them; the first if not said
    #[arg(long, value_name = "N", value_parser = whole)]
    device: Option<usize>,
    /// How ranks reach each other
    #[arg(long, value_enum, default_value = "auto")]
    transport: TransportName,
    /// Ranks of the ring, 1 to 128. Default: 1; under MPI the processes of the job, no more and no fewer
    #[arg(long, value_name = "N", value_parser = ranks)]
    ranks: Option<usize>,
    /// Threads of each rank, 1 to 1024, and of all ranks at most 128 for each core. Default: the cores
    /// shared among the ranks
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// How rows are dealt to ranks; auto chooses from the mask
    #[arg(long, value_enum, default_value = "auto")]
    layout: LayoutName,
    /// Fail after this many seconds of silence on the ring
    #[arg(long, value_name = "S", default_value = "120", value_parser = silence, allow_hyphen_values = true)]
    deadline: Duration,
    /// Write a trace of each rank into this folder, for Perfetto or chrome://tracing; `annulus trace merge` joins them
    ///
    /// The traces take their names after the output: where one cannot be written the output is
    /// there all the same.
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,
}

impl RingFlags {
    fn engine(&self) -> Outcome<Engine> {
        Engine::open(self.backend, self.device, self.transport, self.deadline)
    }
}

/// Bias orders by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BiasOrderName {
    /// cap·tanh((x + bias)/cap).
    Before,
    /// cap·tanh(x/cap) + bias.
    After,
}

/// Runs `annulus attend`.
pub(crate) fn run(flags: &AttendFlags) -> Outcome {
    flags.check()?;
    let engine = flags.ring.engine()?;
    let mut crew = Crew::form("attend", flags.ring.transport, flags.ring.deadline)?;
    let done = flags.attend(&mut crew, engine);
    crew.end(done)
}

impl AttendFlags {
    /// Refuses flags that do nothing without others.
    fn check(&self) -> Outcome {
        self.mask.check()?;
        if self.logits.bias_order.is_some() && self.logits.soft_cap.is_none() {
            return Err(Failure::usage(
                "--bias-order",
                "no --soft-cap",
                "a --soft-cap, before or after which the bias is added",
            ));
        }
        Ok(())
    }

    fn attend(&self, crew: &mut Crew, engine: Engine) -> Outcome {
        let RingFlags { ranks, threads, layout, trace, .. } = &self.ring;
        crew.enlist(*ranks, 1)?;
        let threads = crew.threads(*threads)?;
        let input = crew.agree(Input::open(&self.input).map_err(Failure::from))?;
        let dtype = self.dtype.map_or(input.dtype, DType::from);
        crew.agree(self.needed_tensors(&input))?;
        let sinks =
            input.sinks(self.logits.sinks).map_err(|error| Failure::from(input.named(error)));
        let sinks = crew.agree(sinks)?;
        let job = Job {
            attention: self.attention(&input, dtype, sinks),
            sinks,
            engine,
            threads,
            layout: layout.layout(),
            backward: self.backward,
            output: &self.output,
            trace: trace.as_deref(),
            input: &input,
            quiet: self.quiet,
        };
        let summary = job.run(crew, dtype)?;
        if crew.leads() {
            match (self.quiet, self.json) {
                (true, _) => {}
                (false, true) => say!("{}", summary.json()),
                (false, false) => summary.print(),
            }
        }
        summary.untraced.map_or(Ok(()), Err)
    }

    /// Checks that the input has the tensors that the flags speak of.
    fn needed_tensors(&self, input: &Input) -> Outcome {
        let needed = |name: &str, with: &str, made_by: &str| {
            let want = format!(
                "a tensor named {name} (`annulus make {made_by}` writes one), or no {with}"
            );
            Err(of_file(&self.input, name, format!("no such tensor, with {with}"), want).into())
        };
        if self.backward && !input.has("dout") {
            return needed("dout", "--backward", "--backward");
        }
        if self.logits.bias_order.is_some() && !input.has("bias") {
            return needed("bias", "--bias-order", "--bias");
        }
        Ok(())
    }

    /// The files that flags name.
    pub(crate) fn paths(&self) -> Vec<(&'static str, &Path)> {
        let trace = self.ring.trace.iter().map(|folder| ("--trace", folder.as_path()));
        [("--input", self.input.as_path()), ("--output", self.output.as_path())]
            .into_iter()
            .chain(trace)
            .collect()
    }
}

impl Job<'_> {
    /// Runs the job in `dtype`, which its attention has too.
    pub(crate) fn run(&self, crew: &mut Crew, dtype: DType) -> Outcome<Summary> {
        match dtype {
            DType::F64 => self.run_as::<f64>(crew),
            DType::F32 => self.run_as::<f32>(crew),
            DType::Bf16 => self.run_as::<bf16>(crew),
            DType::F16 => self.run_as::<f16>(crew),
        }
    }
}

impl AttendFlags {
    fn attention(&self, input: &Input, dtype: DType, sinks: Option<SinkShape>) -> Attention {
        let logits = &self.logits;
        let attention =
            self.mask.apply(Attention::new()).dtype(dtype).deadline(self.ring.deadline).bias_order(
                match logits.bias_order {
                    Some(BiasOrderName::Before) => BiasOrder::BeforeSoftCap,
                    Some(BiasOrderName::After) | None => BiasOrder::AfterSoftCap,
                },
            );
        let dropout = logits.dropout.zip(logits.seed).unwrap_or_default();
        attention
            .precision(logits.precision.into())
            .softmax_scale(logits.scale)
            .logits_soft_cap(logits.soft_cap)
            .bias(input.bias)
            .softmax_aux(sinks)
            .dropout(dropout.0, dropout.1)
            .unnormalized(logits.unnormalized)
            .forward_only(!self.backward)
    }
}
