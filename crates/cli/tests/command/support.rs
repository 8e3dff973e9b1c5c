//! Running the command in a folder of its own.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// The variables by which a command knows its place among the processes of a launcher.
const LAUNCHERS: [&str; 7] = [
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
    "SLURM_PROCID",
    "PMIX_RANK",
];

/// A folder of one test, empty at its start.
pub(crate) struct Folder {
    path: PathBuf,
}

/// What the command said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Gives a command the signals of a login shell. Tests may run under `nohup` or in the background
/// of a script, where SIGHUP, SIGINT or SIGQUIT is ignored, and children inherit that.
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

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        Self::at(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(name))
    }

    /// As [`Folder::new`], anywhere.
    pub(crate) fn at(path: &Path) -> Self {
        if path.exists() {
            std::fs::remove_dir_all(path).unwrap();
        }
        std::fs::create_dir_all(path).unwrap();
        Self { path: path.to_owned() }
    }

    /// Makes a file of query, key and value that are all zero, `len` rows each, without writing
    /// them.
    pub(crate) fn zeros(&self, name: &str, len: usize, heads: usize, dim: usize) {
        let bytes = len * heads * dim * 4;
        let entry = |index: usize| {
            let offsets = [index * bytes, (index + 1) * bytes];
            serde_json::json!({ "dtype": "F32", "shape": [1, len, heads, dim], "data_offsets": offsets })
        };
        let header = serde_json::json!({ "query": entry(0), "key": entry(1), "value": entry(2) })
            .to_string();
        let start = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        let path = self.path(name);
        std::fs::write(&path, &start).unwrap();
        std::fs::File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_len((start.len() + 3 * bytes) as u64)
            .unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Runs the command in this folder; arguments are separated by spaces.
    pub(crate) fn run(&self, arguments: &str) -> Said {
        Said::from(self.command(arguments).output().unwrap())
    }

    /// As [`Folder::run`], and it must succeed.
    pub(crate) fn succeed(&self, arguments: &str) -> Said {
        let said = self.run(arguments);
        assert_eq!((said.code, said.err.as_str()), (0, ""), "annulus {arguments}");
        said
    }

    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_annulus"));
        command.args(arguments.split_whitespace()).current_dir(&self.path);
        // whoever tests under a launcher tests single processes all the same
        for name in LAUNCHERS {
            command.env_remove(name);
        }
        // Mesa complains on standard error where there is none
        if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
            command.env("XDG_RUNTIME_DIR", std::env::temp_dir());
        }
        command
    }

    /// The names of all files here.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.path).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code().unwrap_or(-1),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }
}

impl Said {
    /// It must have failed with this code, on one line that has all of `words`.
    #[track_caller]
    pub(crate) fn failed(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        assert!(
            self.err.starts_with("annulus: ")
                && self.err.ends_with('\n')
                && self.err.lines().count() == 1,
            "{self:?}"
        );
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in {self:?}");
        }
    }
}
