//! Under a launcher, as its environment tells: one process must not do what all were asked to do together.
//!
//! Jobs of several processes are tested by `scripts/mpi-command`.

use crate::{
    files::Tensors,
    support::{Folder, Said},
};

const ATTEND: &str = "attend --input in.safetensors --output out.safetensors";

fn folder(name: &str) -> Folder {
    let folder = Folder::new(name);
    Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
    folder
}

/// Runs the command as process `rank` of `size`, as launchers of PMI start them.
fn run_as(folder: &Folder, arguments: &str, rank: usize, size: usize) -> Said {
    let mut command = folder.command(arguments);
    command.env("PMI_RANK", rank.to_string()).env("PMI_SIZE", size.to_string());
    Said::from(command.output().unwrap())
}

#[test]
#[cfg(not(feature = "mpi"))]
fn without_mpi_a_job_of_several_processes_is_refused_once() {
    let folder = folder("launcher_refused");
    for arguments in [ATTEND, "check .", "bench"] {
        run_as(&folder, arguments, 0, 4)
            .failed(1, &["4 processes", "PMI", "--features mpi", "--transport threads"]);
        let said = run_as(&folder, arguments, 3, 4);
        assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (1, "", ""));
    }
    folder
        .run("bench --transport mpi")
        .failed(1, &["mpi", "threads", "cargo build", "--features mpi"]);
    assert!(run_as(&folder, "doctor", 0, 4).out.contains("warning"));
    assert_eq!(run_as(&folder, "doctor", 1, 4).out, "");
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn one_process_and_those_that_stand_alone_are_rings_of_threads() {
    let folder = folder("launcher_threads");
    let alone = run_as(&folder, &format!("{ATTEND} --ranks 2"), 0, 1);
    assert_eq!(alone.code, 0, "{alone:?}");
    // each for itself: it says what it has to say, whatever its rank
    let said = run_as(&folder, &format!("{ATTEND} --ranks 2 --transport threads"), 3, 4);
    assert!(said.code == 0 && said.out.starts_with("2 ranks of "), "{said:?}");
    let said =
        run_as(&folder, "attend --input none --output out.safetensors --transport threads", 3, 4);
    said.failed(1, &["none", "No such file"]);
}

#[test]
fn what_one_process_does_is_refused_to_several() {
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
