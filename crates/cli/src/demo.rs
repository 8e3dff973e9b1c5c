//! `annulus demo`: makes an input, attends over a ring, checks a sample of rows against the oracle, says how it went.

use std::path::{Path, PathBuf};

use annulus::Attention;
use annulus_core::{
    Batch, DType, Dims, Error, Runs,
    oracle::{Problem, forward_rows},
};
use clap::Args;
use ndarray::{Array, Array4};

use crate::{
    arguments::{
        names,
        ring::{BackendName, TransportName, threads_per_rank},
        values::{count, ranks},
    },
    attend::Job,
    crew::{Crew, PATIENCE},
    engine::Engine,
    failure::{Failure, Outcome},
    file::Tensors,
    input::Input,
    interrupt::Scratch,
    make::{Recipe, bytes, make},
    memory::{self, must_fit_on_disk},
    message,
    report::{self, counted, say},
};

const EXAMPLES: &str = "Examples:
  annulus demo
  annulus demo --len 4096 --ranks 7 --dir here/";

/// Rows that are checked against the oracle.
const SAMPLES: usize = 128;
/// The largest error that passes, relative to numbers above 1: f32 sums of 16 384 terms stay well below.
const TOLERANCE: f64 = 2e-5;

/// Shows the whole path at work: makes a causal input with grouped heads, attends over a ring, verifies
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DemoFlags {
    /// Tokens
    #[arg(long, value_name = "N", default_value = "16384", value_parser = count)]
    len: usize,
    /// Ranks of the ring, 1 to 128
    #[arg(long, value_name = "N", default_value = "4", value_parser = ranks)]
    ranks: usize,
    /// Keep the files, input.safetensors and output.safetensors, in this folder. Default: they are
    /// made in a temporary one and removed
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Replace these files in --dir
    #[arg(long, requires = "dir")]
    force: bool,
}

/// The flag that sets both lengths.
const LENGTH: names::Others = &[("q_len", "--len"), ("kv_len", "--len")];
/// The files that the demo makes.
const FILES: [&str; 2] = ["input.safetensors", "output.safetensors"];

impl DemoFlags {
    /// Refuses a folder in which the demo would replace a file that it has not been told to replace.
    fn check(&self) -> Outcome {
        let folder = self.dir.as_ref().filter(|_| !self.force);
        let taken = folder.and_then(|folder| {
            FILES
                .map(|name| folder.join(name))
                .into_iter()
                .find(|path| path.symlink_metadata().is_ok())
        });
        match taken {
            Some(path) => Err(Failure::usage(
                "--dir",
                format!("{}, which exists", message::path(&path)),
                "another folder, or --force",
            )),
            None => Ok(()),
        }
    }

    /// The files that flags name.
    pub(crate) fn paths(&self) -> Vec<(&'static str, &Path)> {
        self.dir.iter().map(|folder| ("--dir", folder.as_path())).collect()
    }
}

/// Runs `annulus demo`.
pub(crate) fn run(flags: &DemoFlags) -> Outcome {
    let engine = Engine::open(BackendName::Cpu, None, TransportName::Threads, PATIENCE)?;
    let dims = Dims { kv_heads: 2, ..Dims::new(1, flags.len, 8, 64) };
    let named = |error| names::of_size(names::of_flags(error, &dims, LENGTH), &dims, LENGTH);
    dims.validate().map_err(named)?;
    flags.check()?;
    // verifying takes queries, keys and values in f64, all rows at once
    let inputs = memory::Tensors::default()
        .and(&[dims.q_len, dims.q_heads, dims.head_dim], 1, size_of::<f64>())
        .and(&[dims.kv_len, dims.kv_heads, dims.head_dim + dims.value_dim], 1, size_of::<f64>());
    inputs.must_fit().map_err(named)?;
    memory::Tensors::of(&dims, DType::F32, false).must_fit().map_err(named)?;
    let scratch = match &flags.dir {
        Some(folder) => Scratch::kept(folder)?,
        None => Scratch::temporary("annulus-demo")?,
    };
    let recipe = Recipe::new(dims, DType::F32, 0);
    let (input, output) = (scratch.path().join(FILES[0]), scratch.path().join(FILES[1]));
    // the output is as large as the queries, which are most of the input
    must_fit_on_disk(&input, bytes(&recipe).saturating_mul(2)).map_err(named)?;
    let made = make(&recipe, &input)?;
    let tokens = counted(flags.len as u64, "token", "tokens");
    say!(
        "made {} ({}): {tokens}, 8 query heads, 2 key heads, dim 64, f32",
        message::path(&input),
        report::bytes(made)
    );

    let attention = Attention::new().causal(true).forward_only(true);
    let source = Input::open(&input)?;
    let job = Job {
        attention: attention.clone(),
        sinks: None,
        engine,
        threads: threads_per_rank(None, flags.ranks)?,
        layout: None,
        backward: false,
        output: &output,
        trace: None,
        input: &source,
        quiet: false,
    };
    let summary = job.run(&mut Crew::of_threads(flags.ranks), DType::F32)?;
    summary.print();
    if !summary.bytes_as_predicted() {
        say!("FAIL: bytes sent are not the bytes predicted");
        return Err(Failure::Reported);
    }
    verify(&source, &output, &attention)?;
    if flags.dir.is_none() {
        say!("the two files are removed again; --dir keeps them");
    }
    Ok(())
}

/// Computes a sample of rows with the oracle and compares.
fn verify(input: &Input, output: &Path, attention: &Attention) -> Outcome {
    let dims = input.dims;
    let all = Runs::counting(0, dims.q_len as u64);
    let load = |name: &str, heads, dim| -> annulus_core::Result<Array4<f64>> {
        let values = input.tensors().floats(name, 1, &all)?;
        Array::from_shape_vec((dims.batch, dims.q_len, heads, dim), values)
            .map_err(|error| Error::invalid(name, error, "a dense tensor"))
    };
    let (q, k, v) = (
        load("query", dims.q_heads, dims.head_dim)?,
        load("key", dims.kv_heads, dims.head_dim)?,
        load("value", dims.kv_heads, dims.value_dim)?,
    );
    let spec = attention.spec(dims)?;
    let batch = Batch::default();
    let problem = Problem {
        spec: &spec,
        batch: &batch,
        q: q.view(),
        k: k.view(),
        v: v.view(),
        bias: None,
        sinks: None,
    };
    let samples = SAMPLES.min(dims.q_len);
    // evenly over the sequence, the heads in turn; the first and the last row among them
    let row = |at: usize| at * (dims.q_len - 1) / (samples - 1).max(1);
    let rows: Vec<_> = (0..samples).map(|at| (0, at % dims.q_heads, row(at))).collect();
    // what the oracle keeps of every row
    drop(annulus_core::memory::list::<[u64; 8]>("rows of the oracle", dims.q_len + dims.kv_len)?);
    let expected = forward_rows(&problem, &rows)?;

    let written = Tensors::open(output)?;
    let mut worst = 0.0f64;
    for (&(_, head, i), want) in rows.iter().zip(&expected) {
        let this = Runs::counting(i as i64, 1);
        let (out, lse) =
            (written.floats::<f64>("out", 1, &this)?, written.floats::<f64>("lse", 2, &this)?);
        let got = out[head * dims.value_dim..][..dims.value_dim].iter().chain(&lse[head..=head]);
        for (got, want) in got.zip(want.out.iter().chain([&want.lse])) {
            let error = (got - want).abs() / want.abs().max(1.0);
            // a NaN is the worst there is
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
    }
    say!(
        "verified {samples} rows against the f64 oracle: largest error {worst:.2e}, {TOLERANCE:.0e} allowed"
    );
    if worst <= TOLERANCE {
        return Ok(());
    }
    say!("FAIL: the output is wrong");
    Err(Failure::Reported)
}
