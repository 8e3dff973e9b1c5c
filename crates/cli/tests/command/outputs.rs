//! Output files: replacement, permissions, links, streams, and no partial files after errors;
//! traces of ranks, and their merge.

use std::{
    fs::{File, Permissions},
    io::Read,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, symlink},
        process::CommandExt,
    },
    path::Path,
    process::Command,
};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;

use crate::support::{Folder, RunResult, Tensors};

const ATTEND: &str = "attend --input in.safetensors --output";

/// Runs a shell command line in which `$annulus` is the command.
fn shell(folder: &Folder, line: &str) -> RunResult {
    let mut shell = folder.program("sh");
    shell.args(["-c", line]).env("annulus", env!("CARGO_BIN_EXE_annulus"));
    RunResult::from(shell.output().unwrap())
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().mode() & 0o7777
}

fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

#[test]
fn a_replaced_file_keeps_its_mode_and_a_new_one_obeys_the_umask() {
    let folder = Folder::with_input("output_mode");
    let out = folder.path("out.safetensors");
    for wanted in [0o600, 0o755] {
        std::fs::write(&out, "old").unwrap();
        std::fs::set_permissions(&out, Permissions::from_mode(wanted)).unwrap();
        folder.succeed(&format!("{ATTEND} out.safetensors"));
        assert_eq!(mode(&out), wanted, "attend after {wanted:o}");
        folder.succeed("plan --q-len 4 --ranks 2 --json out.safetensors");
        assert_eq!(mode(&out), wanted, "plan after {wanted:o}");
    }
    // a private input that is its own output stays private
    let input = folder.path("in.safetensors");
    std::fs::set_permissions(&input, Permissions::from_mode(0o600)).unwrap();
    folder.succeed(&format!("{ATTEND} in.safetensors"));
    assert_eq!(mode(&input), 0o600);

    for (mask, wanted) in [("022", 0o644), ("077", 0o600)] {
        let line = format!(
            "umask {mask}; $annulus make --output new.safetensors --q-len 4; \
             $annulus plan --q-len 4 --ranks 2 --json new.json"
        );
        assert_eq!(shell(&folder, &line).code, 0);
        for name in ["new.safetensors", "new.json"] {
            assert_eq!(mode(&folder.path(name)), wanted, "{name} under {mask}");
            std::fs::remove_file(folder.path(name)).unwrap();
        }
    }
}

/// Runs the command as an unprivileged user, even if the tests run as root.
fn as_a_user(folder: &Folder, arguments: &str) -> RunResult {
    if !rustix::process::geteuid().is_root() {
        return folder.run(arguments);
    }
    // through a file descriptor, because that user may lack access to the program's folder
    let program = File::open(folder.command("").get_program()).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&program));
    // the working folder is entered before the user changes
    let mut command = Command::new(path);
    command.args(arguments.split_whitespace()).current_dir(folder.path("")).uid(65534).gid(65534);
    RunResult::from(command.output().unwrap())
}

#[test]
fn an_output_without_write_permission_is_refused_at_once() {
    // in a folder that every user can access
    let path = std::env::temp_dir().join(format!("annulus-read-only-{}", std::process::id()));
    let folder = Folder::at(&path);
    std::fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
    Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
    std::fs::set_permissions(folder.path("in.safetensors"), Permissions::from_mode(0o644)).unwrap();
    for name in ["out.safetensors", "out.json"] {
        std::fs::write(folder.path(name), "old").unwrap();
        std::fs::set_permissions(folder.path(name), Permissions::from_mode(0o444)).unwrap();
    }
    for arguments in [
        &format!("{ATTEND} out.safetensors"),
        "make --output out.safetensors --q-len 4",
        "plan --q-len 4 --ranks 2 --json out.json",
        "plan --q-len 4 --ranks 2 --svg out.json",
    ] {
        as_a_user(&folder, arguments).failed(1, &["out.", "Permission denied"]);
    }
    assert_eq!(std::fs::read(folder.path("out.safetensors")).unwrap(), b"old");
    assert_eq!(folder.names(), ["in.safetensors", "out.json", "out.safetensors"]);
    std::fs::remove_dir_all(path).unwrap();
}

#[test]
fn symbolic_links_are_kept_and_those_to_nothing_refused() {
    let folder = Folder::with_input("output_links");
    std::fs::write(folder.path("target.safetensors"), "old").unwrap();
    symlink("target.safetensors", folder.path("b")).unwrap();
    symlink("b", folder.path("a")).unwrap();
    folder.succeed(&format!("{ATTEND} a"));
    assert!(folder.path("a").is_symlink() && folder.path("b").is_symlink());
    assert!(Tensors::read(&folder.path("target.safetensors")).all.contains_key("out"));
    assert!(!folder.path("target.safetensors").is_symlink());

    symlink("x", folder.path("x")).unwrap();
    symlink("nowhere/out", folder.path("z")).unwrap();
    folder.run(&format!("{ATTEND} x")).failed(1, &["--output x: ", "links"]);
    folder.run(&format!("{ATTEND} z")).failed(1, &["--output z: ", "link to a missing file"]);
    folder.run(&format!("{ATTEND} new/")).failed(1, &["--output new/: ", "folder"]);
    assert_eq!(folder.names(), ["a", "b", "in.safetensors", "target.safetensors", "x", "z"]);
}

#[test]
fn standard_output_is_appended_to_and_not_replaced() {
    let folder = Folder::with_input("output_stdout");
    for path in ["/dev/stdout", "-"] {
        let line = format!(
            "(echo line1; $annulus plan --q-len 100 --ranks 2 --json {path}; echo line2) > log.txt"
        );
        assert_eq!(shell(&folder, &line).code, 0, "{path}");
        let log = folder.text("log.txt");
        let json = log
            .strip_prefix("line1\n")
            .and_then(|log| log.strip_suffix("line2\n"))
            .unwrap_or_else(|| panic!("{path}: {log}"));
        assert!(serde_json::from_str::<Value>(json).is_ok(), "{path}: {json}");
    }
    let result = shell(&folder, "$annulus plan --q-len 100 --ranks 2 --svg /dev/stdout");
    assert!(result.out.starts_with("<svg ") && result.out.ends_with("</svg>\n"), "{result:?}");
    let result = shell(&folder, "$annulus plan --q-len 100 --ranks 2 --json /dev/stderr");
    assert!(
        serde_json::from_str::<Value>(&result.err).is_ok() && result.out.contains("work"),
        "{result:?}"
    );

    // outputs that are not written sequentially
    for line in [
        "$annulus attend --input in.safetensors --output /dev/stdout > log.txt",
        "$annulus make --output /dev/stdout --q-len 4 > log.txt",
        "$annulus attend --input in.safetensors --output /dev/fd/3 3> log.txt",
    ] {
        shell(&folder, line).failed(1, &["annulus: "]);
    }
    shell(&folder, "$annulus make --output /dev/stdout --q-len 4 > log.txt")
        .failed(1, &["/dev/stdout", "standard output"]);
    assert_eq!(folder.names(), ["in.safetensors", "log.txt"]);
}

#[test]
fn pipes_and_devices_accept_text_outputs_only() {
    let folder = Folder::with_input("output_pipes");
    pipe(&folder.path("pipe"));
    let read = |mut from: File| {
        std::thread::spawn(move || {
            let mut text = String::new();
            from.read_to_string(&mut text).unwrap();
            text
        })
    };
    for flag in ["--json", "--svg"] {
        let path = folder.path("pipe");
        let reader = std::thread::spawn(move || read(File::open(path).unwrap()).join().unwrap());
        folder.succeed(&format!("plan --q-len 100 --ranks 2 {flag} pipe"));
        let text = reader.join().unwrap();
        assert!(text.starts_with('{') || text.starts_with("<svg "), "{flag}: {text}");
        folder.succeed(&format!("plan --q-len 100 --ranks 2 {flag} /dev/null"));
    }
    // as `>(…)` of a shell passes it
    let result = shell(
        &folder,
        "$annulus plan --q-len 100 --ranks 2 --json /dev/fd/3 3>&1 >/dev/null | cat",
    );
    assert!(serde_json::from_str::<Value>(&result.out).is_ok(), "{result:?}");
    for target in ["pipe", "/dev/null", "/dev/full"] {
        folder
            .run(&format!("{ATTEND} {target}"))
            .failed(1, &[&format!("--output {target}: is a "), "want a regular file"]);
        folder
            .run(&format!("make --output {target} --q-len 4"))
            .failed(1, &[&format!("--output {target}: is a "), "want a regular file"]);
    }
    folder
        .run("plan --q-len 100 --ranks 2 --json /dev/full")
        .failed(1, &["annulus: --json /dev/full: No space left"]);
    assert_eq!(folder.names(), ["in.safetensors", "pipe"]);
}

#[test]
fn a_full_or_closed_standard_output_is_an_error() {
    let folder = Folder::with_input("output_stdout");
    for arguments in [
        "help attend",
        "completions bash",
        "plan --q-len 100 --ranks 2",
        "attend --input in.safetensors --output out.safetensors",
    ] {
        shell(&folder, &format!("$annulus {arguments} >/dev/full"))
            .failed(1, &["cannot write to standard output: No space left"]);
        // a reader that has ended, as `head` does, needs no message
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let result = RunResult::from(folder.command(arguments).stdout(writer).output().unwrap());
        assert_eq!((result.code, result.err.as_str()), (1, ""), "{arguments}");
    }
}

#[test]
fn exceeding_the_file_size_limit_is_an_error() {
    let folder = Folder::with_input("output_limit");
    for arguments in [
        "make --output big --q-len 4096",
        "attend --input big.safetensors --output big",
        "plan --q-len 999 --ranks 64 --json big",
    ] {
        if arguments.starts_with("attend") {
            folder.succeed("make --output big.safetensors --q-len 1024");
        }
        shell(&folder, &format!("ulimit -f 8; $annulus {arguments}"))
            .failed(1, &[" big: File too large"]);
        assert!(
            !folder.names().iter().any(|name| name == "big" || name.starts_with('.')),
            "{:?}",
            folder.names()
        );
    }
}

#[test]
fn a_trace_folder_that_cannot_be_written_is_refused_at_once() {
    let folder = Folder::with_input("output_trace_folder");
    // attend would take hours
    folder.zeros("big.safetensors", 1 << 20, 4, 16);
    std::fs::create_dir_all(folder.path("taken/rank-1.json")).unwrap();
    for (trace, words) in [
        ("in.safetensors/x", "Not a directory"),
        ("taken", "rank-1.json"),
        ("/proc/none", "/proc/none"),
    ] {
        let arguments = format!(
            "attend --input big.safetensors --output out.safetensors --ranks 2 --trace {trace}"
        );
        folder.run(&arguments).failed(1, &[words]);
    }
    assert_eq!(folder.names(), ["big.safetensors", "in.safetensors", "taken"]);
}

#[test]
fn a_trace_that_fails_leaves_the_output_complete() {
    let folder = Folder::with_input("output_trace_fails");
    folder.succeed(&format!("{ATTEND} first --ranks 4 --trace sizes"));
    let trace = folder.path("sizes/rank-0.json").metadata().unwrap().len();
    let output = folder.path("first").metadata().unwrap().len();
    // shells count in blocks of 512 or of 1024 bytes
    let limit = output.div_ceil(512);
    assert!(limit * 1024 < trace, "an output of {output} bytes, a trace of {trace}");
    let result = shell(
        &folder,
        &format!("ulimit -f {limit}; $annulus {ATTEND} out.safetensors --ranks 4 --trace traces"),
    );
    result.failed(1, &["traces/rank-0.json: File too large"]);
    assert!(result.out.contains("wrote out.safetensors"), "{result:?}");
    assert!(Tensors::read(&folder.path("out.safetensors")).all.contains_key("out"));
    assert_eq!(std::fs::read_dir(folder.path("traces")).unwrap().count(), 0);
}

#[test]
fn files_of_a_plan_are_different_ones() {
    let folder = Folder::with_input("same_output");
    symlink("a.json", folder.path("link.json")).unwrap();
    let plan = |flags: &str| folder.run(&format!("plan --q-len 4 --ranks 2 {flags}"));
    plan("--svg a.json --json a.json")
        .failed(2, &["--json: got a.json, want another file than --svg"]);
    assert_eq!(folder.names(), ["in.safetensors", "link.json"]);
    folder.succeed("plan --q-len 4 --ranks 2 --json a.json");
    plan("--svg a.json --json ./link.json")
        .failed(2, &["--json: got ./link.json, want another file than --svg"]);
    plan("--json a.json --machine a.json --strategy auto")
        .failed(2, &["--machine: got a.json, want another file than --json"]);
    // one stream takes both
    let both = plan("--svg /dev/stdout --json /dev/stdout");
    assert!(both.code == 0 && both.out.contains("<svg") && both.out.starts_with('{'), "{both:?}");
}

const TRACED: &str =
    "attend --input in.safetensors --output out.safetensors --trace traces --ranks";

fn events(folder: &Folder, name: &str) -> Vec<Value> {
    let trace: Value = serde_json::from_str(&folder.text(name)).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn traces_of_one_run_are_merged() {
    let folder = Folder::new("trace_merge");
    folder.succeed("make --output in.safetensors --q-len 24 --heads 2 --head-dim 4");
    folder.succeed(&format!("{TRACED} 3"));
    let result = folder.succeed("trace merge traces --output all.json");
    let all = events(&folder, "all.json");
    assert_eq!(result.out, format!("wrote all.json: {} events of 3 ranks\n", all.len()));
    let parts: Vec<Value> =
        (0..3).flat_map(|rank| events(&folder, &format!("traces/rank-{rank}.json"))).collect();
    assert_eq!(all, parts);
    for rank in 0..3 {
        assert!(
            all.iter().any(|event| event["pid"] == rank && event["name"] == "forward"),
            "rank {rank}"
        );
    }
    // the third file is left from the run before
    folder.succeed(&format!("{TRACED} 2"));
    assert!(folder.succeed("trace merge traces --output all.json").out.contains("of 2 ranks"));
    assert!(events(&folder, "all.json").iter().all(|event| event["pid"] != 2));
}

#[test]
fn traces_of_other_runs_and_malformed_ones_are_refused() {
    let folder = Folder::new("trace_refused");
    folder.run("trace merge traces --output all.json").failed(1, &["rank-0.json", "No such file"]);
    folder.succeed("make --output in.safetensors --q-len 24 --heads 2 --head-dim 4");
    folder.succeed(&format!("{TRACED} 2"));
    let old = std::fs::read(folder.path("traces/rank-1.json")).unwrap();
    folder.succeed(&format!("{TRACED} 2"));
    std::fs::write(folder.path("traces/rank-1.json"), old).unwrap();
    folder.run("trace merge traces --output all.json").failed(1, &["rank-1.json", "another run"]);
    std::fs::write(folder.path("traces/rank-1.json"), "{\"traceEvents\":[]}").unwrap();
    folder
        .run("trace merge traces --output all.json")
        .failed(1, &["rank-1.json", "not a trace of a rank"]);
    std::fs::remove_file(folder.path("traces/rank-1.json")).unwrap();
    folder.run("trace merge traces --output all.json").failed(1, &["rank-1.json", "No such file"]);
    folder.run("trace merge traces").failed(2, &["--output", "trace merge"]);
    assert!(!folder.path("all.json").exists());
}
