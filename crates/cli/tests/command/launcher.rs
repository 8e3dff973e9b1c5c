//! Behaviour under the environment variables of a launcher, in single processes. Jobs of several
//! processes are tested by `scripts/mpi-command`.

use crate::{
    files::Tensors,
    support::{Folder, RunResult},
};

const ATTEND: &str = "attend --input in.safetensors --output out.safetensors";

fn folder(name: &str) -> Folder {
    let folder = Folder::new(name);
    Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
    folder
}

/// Runs the command as process `rank` of `size` of a PMI launcher.
fn run_as(folder: &Folder, arguments: &str, rank: usize, size: usize) -> RunResult {
    let mut command = folder.command(arguments);
    command.env("PMI_RANK", rank.to_string()).env("PMI_SIZE", size.to_string());
    RunResult::from(command.output().unwrap())
}

#[test]
#[cfg(not(feature = "mpi"))]
fn without_mpi_a_job_of_several_processes_is_refused_once() {
    let folder = folder("launcher_refused");
    for arguments in [ATTEND, "check .", "bench"] {
        run_as(&folder, arguments, 0, 4)
            .failed(1, &["4 processes", "PMI", "--features mpi", "--transport threads"]);
        let result = run_as(&folder, arguments, 3, 4);
        assert_eq!((result.code, result.out.as_str(), result.err.as_str()), (1, "", ""));
    }
    folder
        .run("bench --transport mpi")
        .failed(1, &["mpi", "threads", "cargo build", "--features mpi"]);
    assert!(run_as(&folder, "doctor", 0, 4).out.contains("warning"));
    assert_eq!(run_as(&folder, "doctor", 1, 4).out, "");
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn one_process_and_transport_threads_are_rings_of_threads() {
    let folder = folder("launcher_threads");
    let alone = run_as(&folder, &format!("{ATTEND} --ranks 2"), 0, 1);
    assert_eq!(alone.code, 0, "{alone:?}");
    // independent of the other processes: it prints its output on any rank
    let result = run_as(&folder, &format!("{ATTEND} --ranks 2 --transport threads"), 3, 4);
    assert!(result.code == 0 && result.out.starts_with("2 ranks of "), "{result:?}");
    let result =
        run_as(&folder, "attend --input none --output out.safetensors --transport threads", 3, 4);
    result.failed(1, &["none", "No such file"]);
}

#[test]
fn single_process_subcommands_are_refused_under_a_launcher() {
    let folder = folder("launcher_alone");
    for (arguments, word) in [
        ("make --output x.safetensors", "make"),
        ("plan --q-len 8 --ranks 2", "plan"),
        ("demo --dir kept", "demo"),
        ("trace merge . --output y.json", "trace"),
    ] {
        run_as(&folder, arguments, 0, 2).failed(2, &[word, "2 processes", "without the launcher"]);
        assert_eq!(run_as(&folder, arguments, 1, 2).err, "");
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
}
