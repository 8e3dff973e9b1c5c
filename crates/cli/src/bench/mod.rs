//! `annulus bench`: time and arithmetic rate, one JSON line a case, in the fields that scripts compare.

mod case;
mod clock;

use annulus_comm::Descriptor;
use annulus_core::{DType, Fingerprint};
use clap::{Args, ValueEnum};
use half::{bf16, f16};

use crate::{
    arguments::{
        mask::AlignmentName,
        names::Others,
        ring::{BackendName, TransportName},
        values::{DTypeName, LayoutName, PrecisionName, Window, count, dim, ranks, threads, whole},
    },
    crew::{Crew, PATIENCE},
    engine::Engine,
    failure::{Failure, Outcome},
};
use case::Case;

const EXAMPLES: &str = "Fields of a line: peer what dtype threads batch heads head_dim n causal ms gflops gflops_cpu kv_heads q_len \
kv_len ranks layout window documents align precision pairs backend clock. ms is the least time of a few rounds, by the clock that `clock` names: \
`device` is by timestamps in the queue of a GPU that has them, `host` the wall clock. FLOPs are 4·pairs·head_dim for fwd \
and 3.5 times that for fwd+bwd, where pairs are the visible ones (for plain causal n²/2, as is usual). gflops_cpu is from the least CPU \
time of the process, divided by the threads of all ranks: it holds on a busy machine.

Examples:
  annulus bench
  annulus bench --what fwd --dtype f32,bf16 --ns 1024,2048,4096 --ds 64,128 --causal true
  annulus bench --documents 512,512,512,512 --causal true
  annulus bench --q-len 1 --kv-len 65536 --align bottom-right --threads 1
  annulus bench --ns 8192 --causal true --window 1023,0 --ranks 4
  mpirun -n 4 annulus bench --ns 8192 --causal true --threads 2

Under a launcher (mpirun, mpiexec, srun) every process is a rank; ms is the slowest rank's time, and the CPU time that of all processes.";

/// Times forward and backward passes; prints one JSON line a case
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchFlags {
    /// What to time
    #[arg(long, value_enum, default_value = "fwd,fwd+bwd", value_delimiter = ',')]
    what: Vec<What>,
    /// Element types
    #[arg(long, value_enum, default_value = "f32", value_delimiter = ',')]
    dtype: Vec<DTypeName>,
    /// What products may leave out; `default` lets weights of bf16 inputs be rounded to bf16
    #[arg(long, value_enum, default_value = "highest")]
    precision: PrecisionName,
    /// Lengths of queries and keys
    #[arg(long, value_name = "N,N,...", default_value = "1024,2048", value_delimiter = ',', value_parser = count)]
    ns: Vec<usize>,
    /// Head dims, 1 to 512
    #[arg(long, value_name = "D,D,...", default_value = "64", value_delimiter = ',', value_parser = dim)]
    ds: Vec<usize>,
    /// Batch rows
    #[arg(long, default_value = "1", value_parser = count)]
    batch: usize,
    /// Query heads
    #[arg(long, default_value = "8", value_parser = count)]
    heads: usize,
    /// Key heads. Default: as many as query heads
    #[arg(long, value_parser = count)]
    kv_heads: Option<usize>,
    /// With a causal mask (`--causal`, as in attend), without (`--causal false`) or both in turn.
    /// Default: false,true
    #[arg(long, value_name = "BOOL,BOOL", default_value = "false,true", hide_default_value = true, default_missing_value = "true",
        num_args = 0..=1, value_delimiter = ',', action = clap::ArgAction::Set)]
    causal: Vec<bool>,
    /// Sliding window: L,R, each a number or `none`
    #[arg(long, value_name = "L,R", allow_hyphen_values = true)]
    window: Option<Window>,
    /// Packed documents of these lengths, instead of --ns
    #[arg(long, value_name = "LEN,LEN,...", value_delimiter = ',', value_parser = count, conflicts_with_all = ["ns", "q_len", "kv_len"])]
    documents: Vec<usize>,
    /// Queries, instead of --ns
    #[arg(long, value_name = "N", value_parser = count, conflicts_with = "ns")]
    q_len: Option<usize>,
    /// Keys, instead of --ns
    #[arg(long, value_name = "N", value_parser = count, conflicts_with = "ns")]
    kv_len: Option<usize>,
    /// Where queries stand among the keys when lengths differ
    #[arg(long, value_enum, default_value = "top-left")]
    align: AlignmentName,
    /// Threads of each rank, 1 to 1024, and of all ranks at most 128 for each core
    #[arg(long, value_name = "N", default_value = "1", value_parser = threads)]
    threads: usize,
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
    /// How rows are dealt to ranks
    #[arg(long, value_enum, default_value = "auto")]
    layout: LayoutName,
}

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// A forward pass.
    #[value(name = "fwd")]
    Forward,
    /// A forward and a backward pass.
    #[value(name = "fwd+bwd")]
    Both,
}

/// Runs `annulus bench`.
pub(crate) fn run(flags: &BenchFlags) -> Outcome {
    let engine = Engine::open(flags.backend, flags.device, flags.transport, PATIENCE)?;
    let mut crew = Crew::form("bench", flags.transport, PATIENCE)?;
    let done = bench(flags, &mut crew, &engine);
    crew.end(done)
}

fn bench(flags: &BenchFlags, crew: &mut Crew, engine: &Engine) -> Outcome {
    crew.enlist(flags.ranks, 1)?;
    crew.threads(Some(flags.threads))?;
    // whatever differs would not be timed together
    let all = format!("{flags:?}");
    crew.same(Descriptor::new().field_as(
        "command line",
        Fingerprint::new().bytes(all.as_bytes()).finish(),
        "another one",
    ))?;
    for &dtype in &flags.dtype {
        for &head_dim in &flags.ds {
            for (q_len, kv_len) in crew.agree(flags.lengths())? {
                for &causal in &flags.causal {
                    let case = Case::new(flags, dtype.into(), head_dim, (q_len, kv_len), causal);
                    match DType::from(dtype) {
                        DType::F64 => case.run::<f64>(crew, &flags.what, engine),
                        DType::F32 => case.run::<f32>(crew, &flags.what, engine),
                        DType::Bf16 => case.run::<bf16>(crew, &flags.what, engine),
                        DType::F16 => case.run::<f16>(crew, &flags.what, engine),
                    }?;
                }
            }
        }
    }
    Ok(())
}

impl BenchFlags {
    /// The flags that set arguments which other subcommands set by others.
    pub(super) fn names(&self) -> Others {
        if self.q_len.is_none() && self.kv_len.is_some() {
            return &[("head_dim", "--ds"), ("value_dim", "--ds"), ("q_len", "--kv-len")];
        }
        match (self.documents.is_empty(), self.q_len.is_some()) {
            (false, _) => &[
                ("head_dim", "--ds"),
                ("value_dim", "--ds"),
                ("q_len", "--documents"),
                ("kv_len", "--documents"),
            ],
            (true, true) => &[("head_dim", "--ds"), ("value_dim", "--ds")],
            (true, false) => &[
                ("head_dim", "--ds"),
                ("value_dim", "--ds"),
                ("q_len", "--ns"),
                ("kv_len", "--ns"),
            ],
        }
    }

    /// The (q_len, kv_len) to time.
    fn lengths(&self) -> Outcome<Vec<(usize, usize)>> {
        if !self.documents.is_empty() {
            let total = self.documents.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
            let total = total.filter(|&total| i64::try_from(total).is_ok());
            let total = total.ok_or_else(|| {
                Failure::usage("--documents", "lengths past 2^63 in all", "shorter documents")
            })?;
            return Ok(vec![(total, total)]);
        }
        Ok(match (self.q_len, self.kv_len) {
            (None, None) => self.ns.iter().map(|&n| (n, n)).collect(),
            (q_len, kv_len) => {
                let one = q_len.or(kv_len).unwrap_or(1);
                vec![(q_len.unwrap_or(one), kv_len.unwrap_or(one))]
            }
        })
    }
}
