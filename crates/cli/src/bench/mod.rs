//! `annulus bench`: measures time and arithmetic rate, one JSON line for each case.

mod case;

use annulus_comm::Descriptor;
use annulus_core::{DType, Dims, Fingerprint};
use annulus_plan::Machine;
use clap::{Args, ValueEnum};
use half::{bf16, f16};

use crate::{
    arguments::{
        mask::AlignmentName,
        option_flags::{DivisionFlags, PrecisionName},
        values::{self, WindowSides, count, dim, dtype, ranks, threads},
    },
    backend::{BackendChoice, DeviceFlags},
    failure::Outcome,
    file,
    job::{DEFAULT_DEADLINE, Job},
};
use case::BenchCase;

const EXAMPLES: &str = "\
Fields of a line: peer what dtype threads batch heads head_dim n causal ms gflops gflops_cpu
kv_heads q_len kv_len ranks layout window documents align precision pairs backend clock strategy.

  ms          the least time of 2 to 8 rounds, by the clock that `clock` names: `device` for
              timestamps in the queue of a GPU that has them, `host` for the wall clock
              after one that is not measured; all rounds write the same outputs
  gflops      FLOPs / ms. FLOPs are 4·pairs·head_dim for fwd and 3.5 times that for fwd+bwd
  pairs       visible pairs, all heads and batch rows; for plain causal n²/2, as is usual
  gflops_cpu  FLOPs / (least CPU time / threads of all ranks), which holds on a busy machine too
  strategy    the one in force, by its published name if it has one

Examples:
  annulus bench
  annulus bench --what fwd --dtype f32,bf16 --ns 1024,2048,4096 --ds 64,128 --causal true
  annulus bench --documents 512,512,512,512 --causal true
  annulus bench --documents 512,6000,1680 --causal true --ranks 4 --layout balanced
  annulus bench --q-len 1 --kv-len 65536 --align bottom-right --threads 1
  annulus bench --ns 8192 --causal true --window 1023,0 --ranks 4
  mpirun -n 4 annulus bench --ns 8192 --causal true --threads 2

Under a launcher (mpirun, mpiexec, srun) every process is a rank; ms is the time of the slowest
rank, and the CPU time is that of all processes.";

/// Measures forward and backward passes; prints one JSON line for each case
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchFlags {
    /// Passes to measure
    #[arg(long, value_enum, default_value = "fwd,fwd+bwd", value_delimiter = ',')]
    what: Vec<MeasuredPasses>,
    /// Element types
    #[arg(long, value_parser = dtype(), default_value = "f32", value_delimiter = ',')]
    dtype: Vec<DType>,
    /// Precision of matrix products: on the CPU `default` may round probabilities of bf16 inputs to
    /// bf16; matrix units of GPUs round those of 16-bit inputs at every precision
    #[arg(long, value_enum, default_value = "highest")]
    precision: PrecisionName,
    /// Sequence lengths, for queries and keys
    #[arg(long, value_name = "N,N,...", default_value = "1024,2048", value_delimiter = ',',
        value_parser = count)]
    ns: Vec<usize>,
    /// Head dims, 1 to 1024
    #[arg(long, value_name = "D,D,...", default_value = "64", value_delimiter = ',',
        value_parser = dim)]
    ds: Vec<usize>,
    /// Batch rows
    #[arg(long, default_value = "1", value_parser = count)]
    batch: usize,
    /// Query heads
    #[arg(long, default_value = "8", value_parser = count)]
    heads: usize,
    /// KV heads. Default: as many as query heads
    #[arg(long, value_parser = count)]
    kv_heads: Option<usize>,
    /// Causal mask: `--causal` or `--causal true`, `--causal false`, or both in turn. Default:
    /// false,true
    #[arg(long, value_name = "BOOL,BOOL", default_value = "false,true", hide_default_value = true,
        default_missing_value = "true", num_args = 0..=1, value_delimiter = ',',
        action = clap::ArgAction::Set)]
    causal: Vec<bool>,
    /// Sliding window: L,R, each a number or `none`
    #[arg(long, value_name = "L,R", allow_hyphen_values = true)]
    window: Option<WindowSides>,
    /// Packed documents of these lengths, instead of --ns
    #[arg(long, value_name = "LEN,LEN,...", value_delimiter = ',', value_parser = count,
        conflicts_with_all = ["ns", "q_len", "kv_len"])]
    documents: Vec<usize>,
    /// Queries, instead of --ns
    #[arg(long, value_name = "N", value_parser = count, conflicts_with = "ns")]
    q_len: Option<usize>,
    /// Keys, instead of --ns
    #[arg(long, value_name = "N", value_parser = count, conflicts_with = "ns")]
    kv_len: Option<usize>,
    /// Compute in the reproducible order
    #[arg(long)]
    reproducible: bool,
    /// Alignment of query positions to key positions for different lengths
    #[arg(long, value_enum, default_value = "top-left")]
    align: AlignmentName,
    /// Threads per rank, 1 to 1024; all ranks together at most 128 per core
    #[arg(long, value_name = "N", default_value = "1", value_parser = threads)]
    threads: usize,
    #[command(flatten)]
    device: DeviceFlags,
    /// Ranks of the ring, 1 to 128. Default: 1. Under MPI always the number of processes
    #[arg(long, value_name = "N", value_parser = ranks)]
    ranks: Option<usize>,
    #[command(flatten)]
    division: DivisionFlags,
}

/// Passes of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MeasuredPasses {
    /// A forward pass.
    #[value(name = "fwd")]
    Forward,
    /// A forward and a backward pass.
    #[value(name = "fwd+bwd")]
    ForwardBackward,
}

/// Runs `annulus bench`.
pub(crate) fn run(flags: &BenchFlags) -> Outcome {
    flags.device.run_job("bench", DEFAULT_DEADLINE, |job, backend| bench(flags, job, &backend))
}

fn bench(flags: &BenchFlags, job: &mut Job, backend: &BackendChoice) -> Outcome {
    job.set_ranks(flags.ranks, 1)?;
    job.threads(Some(flags.threads))?;
    let machine = flags.division.machine.as_deref().map(file::read_machine).transpose();
    let machine: Option<Machine> = job.agree(machine)?;
    let machine = machine.as_ref();
    // the processes of a ring must measure the same cases
    let all = format!("{flags:?}");
    job.require_same(Descriptor::new().field_as(
        "command line",
        Fingerprint::new().bytes(all.as_bytes()).finish(),
        "another one",
    ))?;
    let batch = &values::packed(&flags.documents);
    let lengths = job.agree(flags.lengths())?;
    for &dtype in &flags.dtype {
        for &head_dim in &flags.ds {
            for &[q_len, kv_len] in &lengths {
                let dims = Dims {
                    batch: flags.batch,
                    q_len,
                    kv_len,
                    q_heads: flags.heads,
                    kv_heads: flags.kv_heads.unwrap_or(flags.heads),
                    head_dim,
                    value_dim: head_dim,
                };
                for &causal in &flags.causal {
                    let case = BenchCase { flags, dims, dtype, causal, machine, batch };
                    match dtype {
                        DType::F64 => case.run::<f64>(job, &flags.what, backend),
                        DType::F32 => case.run::<f32>(job, &flags.what, backend),
                        DType::Bf16 => case.run::<bf16>(job, &flags.what, backend),
                        DType::F16 => case.run::<f16>(job, &flags.what, backend),
                    }?;
                }
            }
        }
    }
    Ok(())
}

impl BenchFlags {
    /// Flags of arguments that other subcommands set by another flag.
    fn names(&self) -> [(&'static str, &'static str); 4] {
        let [q_len, kv_len] = match (self.q_len, self.kv_len) {
            _ if !self.documents.is_empty() => [values::DOCUMENTS; 2],
            (None, None) => ["--ns"; 2],
            (None, Some(_)) => ["--kv-len"; 2],
            (Some(_), _) => ["--q-len", "--kv-len"],
        };
        [("head_dim", "--ds"), ("value_dim", "--ds"), ("q_len", q_len), ("kv_len", kv_len)]
    }

    /// Returns the numbers of queries and of keys to measure.
    fn lengths(&self) -> Outcome<Vec<[usize; 2]>> {
        if !self.documents.is_empty() {
            return Ok(vec![[values::rows_of_documents(&self.documents)?; 2]]);
        }
        Ok(match (self.q_len, self.kv_len) {
            (None, None) => self.ns.iter().map(|&n| [n; 2]).collect(),
            (Some(len), None) | (None, Some(len)) => vec![[len; 2]],
            (Some(q_len), Some(kv_len)) => vec![[q_len, kv_len]],
        })
    }
}
