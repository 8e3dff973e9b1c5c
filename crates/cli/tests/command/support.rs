//! Runs the command in a folder of its own; safetensors files, read and written by the reference
//! implementation.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

/// Variables in which launchers pass a rank.
const LAUNCHERS: [&str; 7] = [
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
    "SLURM_PROCID",
    "PMIX_RANK",
];

/// Folder of one test of this process, initially empty. It is removed in the end, unless the test
/// fails.
pub(crate) struct Folder {
    path: PathBuf,
}

/// Exit code and output of the command.
#[derive(Debug)]
pub(crate) struct RunResult {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Resets the signals of a command to their defaults. Under `nohup`, or in the background of a
/// script, SIGHUP, SIGINT or SIGQUIT is ignored, and children inherit that.
pub(crate) fn with_default_signals(command: &Command) -> Command {
    let mut env = Command::new("env");
    env.arg("--default-signal=HUP,INT,QUIT,TERM")
        .arg(command.get_program())
        .args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        env.current_dir(folder);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => env.env(name, value),
            None => env.env_remove(name),
        };
    }
    env
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // what stays behind in the target folder harms nobody
            std::fs::remove_dir_all(&self.path).unwrap_or_default();
        }
    }
}

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("{name}-{}", std::process::id());
        Self::at(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(name))
    }

    /// As [`Folder::new`], at any path.
    pub(crate) fn at(path: &Path) -> Self {
        if path.exists() {
            std::fs::remove_dir_all(path).unwrap();
        }
        std::fs::create_dir_all(path).unwrap();
        Self { path: path.to_owned() }
    }

    /// Creates a sparse file of query, key and value, `len` rows of zeros each.
    pub(crate) fn zeros(&self, name: &str, len: usize, heads: usize, dim: usize) {
        let bytes = len * heads * dim * 4;
        let entry = |index: usize| {
            let offsets = [index * bytes, (index + 1) * bytes];
            let shape = [1, len, heads, dim];
            json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets })
        };
        let header = json!({ "query": entry(0), "key": entry(1), "value": entry(2) });
        self.write_raw(name, &header.to_string(), 3 * bytes as u64);
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Runs the command in this folder with arguments separated by white space.
    pub(crate) fn run(&self, arguments: &str) -> RunResult {
        RunResult::from(self.command(arguments).output().unwrap())
    }

    /// As [`Folder::run`], and checks that it succeeds without a message.
    pub(crate) fn succeed(&self, arguments: &str) -> RunResult {
        let result = self.run(arguments);
        assert_eq!((result.code, result.err.as_str()), (0, ""), "annulus {arguments}");
        result
    }

    /// As [`Folder::succeed`], of a command that prints JSON.
    pub(crate) fn json(&self, arguments: &str) -> Value {
        serde_json::from_str(&self.succeed(arguments).out).unwrap()
    }

    /// Returns the JSON document of a plan.
    pub(crate) fn plan(&self, flags: &str) -> Value {
        self.json(&format!("plan {flags} --json -"))
    }

    /// Requires that these tensors of two files differ by at most `most` times the larger of 1 and
    /// what is wanted.
    #[track_caller]
    pub(crate) fn close(&self, [got, want]: [&str; 2], names: &[&str], most: f64) {
        let [got, want] = [got, want].map(|name| Tensors::read(&self.path(name)));
        for name in names {
            let [got, want] = [&got, &want].map(|file| file.numbers(name));
            assert_eq!(got.len(), want.len(), "{name}");
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                let same = got == want || (got - want).abs() <= most * want.abs().max(1.0);
                assert!(same, "{name} {index}: {got}, {want}");
            }
        }
    }

    /// Reads a text file.
    pub(crate) fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// Writes `machine.json`: nodes of four ranks, `between` bytes per second between them, and
    /// ranks of `flops` FLOP/s.
    pub(crate) fn write_machine(&self, between: f64, flops: f64) -> Value {
        let machine = json!({
            "version": 1,
            "ranks_per_node": 4,
            "inside_node": { "latency": 1e-6, "bandwidth": 1e11 },
            "between_nodes": { "latency": 1e-6, "bandwidth": between },
            "node_bandwidth": 4.0 * between,
            "rates": [{ "dtype": "f32", "head_dim": 64, "forward": flops, "backward": flops }],
            "memory": 1u64 << 40,
        });
        std::fs::write(self.path("machine.json"), machine.to_string()).unwrap();
        machine
    }

    /// As [`Folder::new`], with an input of four rows.
    pub(crate) fn with_input(name: &str) -> Self {
        let folder = Self::new(name);
        Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
        folder
    }

    /// Writes a safetensors file with this header text and `data` bytes of zeros, of which the file
    /// system stores none.
    pub(crate) fn write_raw(&self, name: &str, header: &str, data: u64) {
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        std::fs::write(self.path(name), &bytes).unwrap();
        let file = std::fs::File::options().write(true).open(self.path(name)).unwrap();
        file.set_len(bytes.len() as u64 + data).unwrap();
    }

    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = self.program(env!("CARGO_BIN_EXE_annulus"));
        command.args(arguments.split_whitespace());
        command
    }

    /// A command of `program` in this folder, with an environment that does not depend on where
    /// the tests run.
    pub(crate) fn program(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.path);
        // the tests run single processes, even if they themselves run under a launcher
        for name in LAUNCHERS {
            command.env_remove(name);
        }
        // without it Mesa prints a warning on standard error
        if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
            command.env("XDG_RUNTIME_DIR", std::env::temp_dir());
        }
        command
    }

    /// Lists the names of all files, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.path).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl From<Output> for RunResult {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code().unwrap_or(-1),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }
}

impl RunResult {
    /// Checks that the command failed with this code and one line, or an error of clap, that has
    /// all of `words`.
    #[track_caller]
    pub(crate) fn failed(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        let of_clap = code == 2 && self.err.starts_with("error: ");
        let is_line = self.err.starts_with("annulus: ") && self.err.lines().count() == 1;
        assert!(self.err.ends_with('\n') && (of_clap || is_line), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in {self:?}");
        }
    }
}

/// Tensors by name: element type, shape, bytes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tensors {
    pub(crate) all: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Tensors {
    pub(crate) fn with(
        mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        bytes: Vec<u8>,
    ) -> Self {
        self.all.insert(name.into(), (dtype, shape.to_vec(), bytes));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.all.remove(name);
        self
    }

    pub(crate) fn f32(self, name: &str, shape: &[usize], number: impl Fn(usize) -> f32) -> Self {
        let bytes =
            (0..shape.iter().product()).flat_map(|index| number(index).to_le_bytes()).collect();
        self.with(name, Dtype::F32, shape, bytes)
    }

    pub(crate) fn f64(
        self,
        name: &str,
        shape: &[usize],
        numbers: impl IntoIterator<Item = f64>,
    ) -> Self {
        self.with(name, Dtype::F64, shape, numbers.into_iter().flat_map(f64::to_le_bytes).collect())
    }

    pub(crate) fn i64(self, name: &str, shape: &[usize], numbers: &[i64]) -> Self {
        self.with(
            name,
            Dtype::I64,
            shape,
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        )
    }

    /// Creates query, key and value of one batch row with pseudo-random values.
    pub(crate) fn qkv(q: [usize; 3], k: [usize; 3], value_dim: usize) -> Self {
        let wave =
            |phase: f32| move |index: usize| ((index * 37 + 11) as f32 * 0.618 + phase).sin();
        Self::default()
            .f32("query", &[1, q[0], q[1], q[2]], wave(0.0))
            .f32("key", &[1, k[0], k[1], k[2]], wave(1.0))
            .f32("value", &[1, k[0], k[1], value_dim], wave(2.0))
    }

    pub(crate) fn write(&self, path: &Path) {
        let views = self.all.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let all = file.iter().map(|(name, view)| {
            (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        });
        Self { all: all.collect() }
    }

    /// Returns the values of a float tensor, widened.
    pub(crate) fn numbers(&self, name: &str) -> Vec<f64> {
        let (dtype, _, bytes) = &self.all[name];
        match dtype {
            Dtype::F64 => {
                bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
            }
            Dtype::F32 => bytes
                .as_chunks::<4>()
                .0
                .iter()
                .map(|bytes| f64::from(f32::from_le_bytes(*bytes)))
                .collect(),
            Dtype::BF16 => bytes
                .as_chunks::<2>()
                .0
                .iter()
                .map(|bytes| half::bf16::from_le_bytes(*bytes).to_f64())
                .collect(),
            other => panic!("{name} is {other:?}"),
        }
    }
}
