//! `annulus demo`: generates an input, computes attention on a ring, and checks a sample of rows
//! against the oracle.

use std::path::{Path, PathBuf};

use annulus::{Attention, Division, Setup, backend::BackendName};
use annulus_core::{
    Batch, DType, Dims, Error, Runs,
    oracle::{Problem, forward_rows},
};
use clap::Args;
use ndarray::{Array, Array4};
use tempfile::TempDir;

use crate::{
    arguments::{
        names,
        ring::{TransportName, threads_per_rank},
        values::{self, LayoutName, count, ranks},
    },
    attend::AttendRun,
    backend::{BackendChoice, DeviceFlags},
    failure::{Failure, Outcome, io},
    file::TensorFile,
    input::Input,
    interrupt,
    job::{DEFAULT_DEADLINE, Job},
    make::{Recipe, bytes, make},
    memory::{self, must_fit_on_disk},
    message,
    report::{self, counted},
    say,
};

const EXAMPLES: &str = "Examples:
  annulus demo
  annulus demo --len 4096 --ranks 7 --dir here/
  annulus demo --documents 512,2048,1000,4632";

/// Number of rows that are checked against the oracle, which takes O(sequence length) for each.
const SAMPLES: usize = 128;
/// The largest error that passes, relative for values above 1. The errors of f32 sums over 16 384
/// keys stay well below it.
const TOLERANCE: f64 = 2e-5;

/// Runs a complete example: generates a causal GQA input, computes attention on a ring, verifies it
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DemoFlags {
    /// Tokens
    #[arg(long, value_name = "N", default_value = "16384", value_parser = count)]
    len: usize,
    /// Packed documents of these lengths instead of --len, on a layout that balances their work
    #[arg(long, value_name = "LEN,LEN,...", value_delimiter = ',', value_parser = count,
        conflicts_with = "len")]
    documents: Vec<usize>,
    /// Ranks of the ring, 1 to 128
    #[arg(long, value_name = "N", default_value = "4", value_parser = ranks)]
    ranks: usize,
    /// Keep the files, input.safetensors and output.safetensors, in this folder. Default: a
    /// temporary folder, which is removed
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Replace existing files in --dir
    #[arg(long, requires = "dir")]
    force: bool,
}

/// Files of the demo.
const FILES: [&str; 2] = ["input.safetensors", "output.safetensors"];

impl DemoFlags {
    /// Returns the tokens.
    fn tokens(&self) -> Outcome<usize> {
        if self.documents.is_empty() {
            Ok(self.len)
        } else {
            values::rows_of_documents(&self.documents)
        }
    }

    /// Refuses a folder that has a file of the demo, unless `--force` is given.
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
}

/// Runs `annulus demo`.
pub(crate) fn run(flags: &DemoFlags) -> Outcome {
    let transport = TransportName::Threads;
    let device = DeviceFlags { backend: BackendName::Cpu, device: None, transport };
    let backend = BackendChoice::open(&device, DEFAULT_DEADLINE)?;
    let tokens = flags.tokens()?;
    let length = if flags.documents.is_empty() { "--len" } else { values::DOCUMENTS };
    let dims = Dims { kv_heads: 2, ..Dims::new(1, tokens, 8, 64) };
    let named = |error| names::of_flags(error, &[("q_len", length), ("kv_len", length)]);
    dims.validate().map_err(named)?;
    flags.check()?;
    // the oracle needs all rows of queries, keys and values in f64
    let inputs = memory::Tensors::default()
        .and(&[dims.q_len, dims.q_heads, dims.head_dim], 1, size_of::<f64>())
        .and(&[dims.kv_len, dims.kv_heads, dims.head_dim + dims.value_dim], 1, size_of::<f64>());
    inputs.must_fit().map_err(named)?;
    memory::Tensors::of(&dims, DType::F32, false).must_fit().map_err(named)?;
    let (folder, _temporary) = match &flags.dir {
        Some(folder) => {
            std::fs::create_dir_all(folder).map_err(|error| io(folder, error))?;
            (folder.clone(), None)
        }
        None => {
            let made = temporary_folder()?;
            (made.path().to_owned(), Some(made))
        }
    };
    let recipe = Recipe::new(&dims, &flags.documents);
    let [input, output] = FILES.map(|name| folder.join(name));
    // out has the size of query, and the input is larger than query: twice the input is enough
    must_fit_on_disk(&input, bytes(&recipe).saturating_mul(2)).map_err(named)?;
    let made = make(&recipe, &input)?;
    let mut tokens = counted(tokens as u64, "token", "tokens");
    if !flags.documents.is_empty() {
        let documents = counted(flags.documents.len() as u64, "document", "documents");
        tokens = format!("{tokens} in {documents}");
    }
    say!(
        "wrote {} ({}): {tokens}, 8 query heads, 2 KV heads, head dim 64, f32",
        message::path(&input),
        report::bytes(made)
    );

    let attention = Attention::new().causal(true).forward_only(true);
    let source = Input::open(&input)?;
    let layout = if flags.documents.is_empty() { LayoutName::Auto } else { LayoutName::Balanced };
    let batch = source.coordinates()?;
    let division = Division::new();
    let division = layout.apply(division, &attention, dims, flags.ranks, || Ok(batch.clone()))?;
    let run = AttendRun {
        setup: Setup::from((&attention, division)),
        sinks: None,
        backend,
        threads: threads_per_rank(None, flags.ranks)?,
        backward: false,
        output: &output,
        trace: None,
        input: &source,
        quiet: false,
    };
    let summary = run.execute(&mut Job::of_threads(flags.ranks), DType::F32)?;
    summary.print();
    if !summary.bytes_as_predicted() {
        say!("FAIL: the bytes sent differ from the prediction");
        return Err(Failure::Reported);
    }
    verify(&source, &output, &attention, &batch)?;
    if flags.dir.is_none() {
        say!("removing both files; --dir keeps them");
    }
    Ok(())
}

/// Creates a folder that is removed at the end, or by a signal.
fn temporary_folder() -> annulus_core::Result<TempDir> {
    let made = || tempfile::Builder::new().prefix("annulus-demo-").tempdir();
    interrupt::temporary(made).map_err(|error| io(&std::env::temp_dir(), error))
}

/// Compares a sample of output rows with the oracle.
fn verify(input: &Input, output: &Path, attention: &Attention, batch: &Batch) -> Outcome {
    let dims = input.dims;
    let all = Runs::counting(0, dims.q_len as u64);
    let load = |name: &str, heads, dim| -> annulus_core::Result<Array4<f64>> {
        let values = input.tensors().floats(name, 1, &all)?;
        Array::from_shape_vec((dims.batch, dims.q_len, heads, dim), values)
            .map_err(|error| Error::invalid(name, error, "a dense tensor"))
    };
    let q = load("query", dims.q_heads, dims.head_dim)?;
    let k = load("key", dims.kv_heads, dims.head_dim)?;
    let v = load("value", dims.kv_heads, dims.value_dim)?;
    let spec = attention.spec(dims)?;
    let problem = Problem {
        spec: &spec,
        batch,
        q: q.view(),
        k: k.view(),
        v: v.view(),
        bias: None,
        sinks: None,
    };
    let samples = SAMPLES.min(dims.q_len);
    // rows evenly spaced from the first to the last, heads in turn
    let row = |sample: usize| sample * (dims.q_len - 1) / (samples - 1).max(1);
    let rows: Vec<_> = (0..samples).map(|sample| (0, sample % dims.q_heads, row(sample))).collect();
    // fails early if the oracle's buffers, up to 64 bytes for each row, do not fit
    drop(annulus_core::memory::list::<[u64; 8]>("rows of the oracle", dims.q_len + dims.kv_len)?);
    let expected = forward_rows(&problem, &rows)?;

    let written = TensorFile::open(output)?;
    let mut worst = 0.0f64;
    for (&(_, head, i), want) in rows.iter().zip(&expected) {
        let this = Runs::counting(i as i64, 1);
        let out = written.floats::<f64>("out", 1, &this)?;
        let lse = written.floats::<f64>("lse", 2, &this)?;
        let got = out[head * dims.value_dim..][..dims.value_dim].iter().chain(&lse[head..=head]);
        for (got, want) in got.zip(want.out.iter().chain([&want.lse])) {
            let error = (got - want).abs() / want.abs().max(1.0);
            // f64::max ignores a NaN
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
    }
    say!(
        "verified {samples} rows against the f64 oracle: largest error {worst:.2e}, \
         {TOLERANCE:.0e} allowed"
    );
    if worst <= TOLERANCE {
        return Ok(());
    }
    say!("FAIL: the output is wrong");
    Err(Failure::Reported)
}
