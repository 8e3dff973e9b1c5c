//! Problems that are too large, and limited memory: an error of one line, no file, no abort.
//! Messages with external text: without control characters, and at most a screen long.

use std::{
    ffi::OsStr,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::json;

use crate::support::{Folder, RunResult};

/// The longest time of a command that is refused at once, on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// Runs the command, and kills it after [`SOON`].
pub(crate) fn soon(folder: &Folder, arguments: &str) -> RunResult {
    let mut command = folder.command(arguments);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    RunResult::from(wait(child, arguments).wait_with_output().unwrap())
}

fn wait(mut child: Child, arguments: &str) -> Child {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > SOON {
            child.kill().unwrap();
            panic!("annulus {arguments} did not end within {SOON:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

/// Runs the command in an address space of `kibibytes` KiB.
fn limited(folder: &Folder, kibibytes: usize, arguments: &str) -> RunResult {
    let inner = folder.command(arguments);
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v \"$1\" && shift && exec \"$@\"", "sh", &kibibytes.to_string()]);
    command.arg(inner.get_program()).args(inner.get_args());
    // else each thread reserves 64 MiB of address space
    command.env("MALLOC_ARENA_MAX", "1");
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let child = command.current_dir(folder.path(".")).stdout(Stdio::piped()).stderr(Stdio::piped());
    RunResult::from(wait(child.spawn().unwrap(), arguments).wait_with_output().unwrap())
}

/// Checks that the command succeeded or failed with one line, and left no temporary file. Returns
/// true if it succeeded.
#[track_caller]
fn ended_well(folder: &Folder, result: &RunResult, what: &str) -> bool {
    assert!(result.code == 0 || result.code == 1, "{what}: {result:?}");
    if result.code == 1 {
        result.failed(1, &[]);
    }
    let left: Vec<String> =
        folder.names().into_iter().filter(|name| name.contains("partial")).collect();
    assert!(left.is_empty(), "{what}: {left:?}");
    result.code == 0
}

/// Returns sizes of address spaces in KiB, from the least one in which the program starts.
fn limits(folder: &Folder, step: usize, count: usize) -> Vec<usize> {
    let runs = |limit: &usize| limited(folder, *limit, "--version").code == 0;
    let least = (1..200).map(|number| number * 8192).find(runs).unwrap();
    (1..=count).map(|number| least + number * step).collect()
}

#[test]
fn an_allocation_that_fails_names_its_tensor_and_leaves_no_output() {
    let folder = Folder::new("limits_named");
    folder
        .succeed("make --output in.st --q-len 2048 --heads 4 --head-dim 8 --bias bhqk --backward");
    let mut named = 0;
    let mut succeeded = 0;
    let attend = "attend --input in.st --output o.st --ranks 2 --threads 1 --backward";
    for limit in limits(&folder, 16 << 10, 20) {
        let result = limited(&folder, limit, attend);
        let there = folder.path("o.st").exists();
        assert_eq!(ended_well(&folder, &result, &format!("{limit} KiB")), there, "{result:?}");
        if there {
            std::fs::remove_file(folder.path("o.st")).unwrap();
            succeeded += 1;
        }
        // a bias of two ranks, and its gradient, of 4 · 1024 · 2048 numbers each
        named += usize::from(result.err.contains("bias needs 33554432 bytes"));
        assert!(!result.err.contains("asked for"), "{}", result.err);
    }
    // the limits must include both outcomes
    assert!(named > 0 && succeeded > 0, "{named} named, {succeeded} succeeded");
}

#[test]
fn a_problem_larger_than_memory_is_refused_at_once() {
    let folder = Folder::new("limits_vast");
    let bench =
        soon(&folder, "bench --q-len 16 --kv-len 1099511627776 --ds 8 --heads 1 --what fwd");
    bench.failed(1, &["out of memory: a problem of this size needs 70368744178880 bytes"]);

    // a sparse file of 4 TiB
    let rows = 1u64 << 38;
    let bytes = rows * 16;
    let entry = |name: &str, rows: u64, begin: u64, end: u64| {
        format!(
            r#""{name}":{{"dtype":"F32","shape":[1,{rows},1,4],"data_offsets":[{begin},{end}]}}"#
        )
    };
    let header = format!(
        r#"{{{},{},{}}}"#,
        entry("query", rows, 0, bytes),
        entry("key", 1, bytes, bytes + 16),
        entry("value", 1, bytes + 16, bytes + 32),
    );
    folder.write_raw("sparse.st", &header, bytes + 32);
    let result = soon(&folder, "attend --input sparse.st --output spo.st");
    result.failed(1, &["out of memory: a problem of this size needs"]);
    assert_eq!(folder.names(), ["sparse.st"]);
}

#[test]
fn huge_lengths_end_in_one_line() {
    let folder = Folder::new("limits_unbound");
    for arguments in [
        "bench --heads 4294967296",
        "bench --batch 4294967296",
        "bench --q-len 4294967296",
        "bench --kv-len 4294967296",
        "bench --documents 4294967296",
        "bench --documents 9223372036854775808,9",
        "bench --ns 4294967296 --causal true --window 5,0",
        "make --output m.st --q-len 1099511627776",
        "make --output m.st --batch 1099511627776",
        "demo --len 4294967296",
        "plan --q-len 4294967296 --ranks 4",
        "plan --causal --q-len 1000000000000 --ranks 1024",
    ] {
        let result = soon(&folder, arguments);
        assert!(result.code == 1 || result.code == 2, "{arguments}: {result:?}");
        result.failed(result.code, &[]);
        assert_eq!(folder.names(), [""; 0], "{arguments}");
    }
    // keys are planned in runs, and batch rows and heads with equal masks together
    let planned = soon(&folder, "plan --q-len 16 --kv-len 4294967296 --ranks 64 --batch 4096");
    assert_eq!(planned.code, 0, "{planned:?}");
}

#[test]
fn tensors_without_elements_end_at_once() {
    let folder = Folder::new("limits_nothing");
    let write = |shape: &str, more: &str| {
        let entry = |name: &str| {
            format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}"#)
        };
        let header = format!(
            "{{{},{},{},{}{more}}}",
            entry("query"),
            entry("key"),
            entry("value"),
            entry("dout")
        );
        folder.write_raw("in.st", &header, 0);
    };
    let lines = 1u64 << 40;
    let bias = format!(r#","bias":{{"dtype":"F32","shape":[{lines},2,0,0],"data_offsets":[0,0]}}"#);
    for (shape, more) in [
        (format!("[{lines},0,2,4]"), String::new()),
        (format!("[1,0,{lines},4]"), String::new()),
        (format!("[{lines},0,2,4]"), bias),
        (format!("[{lines},0,{lines},4]"), String::new()),
    ] {
        write(&shape, &more);
        for flags in ["--causal --ranks 3", "--backward --unnormalized --threads 2"] {
            let result = soon(&folder, &format!("attend --input in.st --output o.st {flags}"));
            ended_well(&folder, &result, &format!("{shape} {more} {flags}"));
        }
    }
}

/// A screen of 24 lines of 80 columns.
const SCREEN: usize = 24 * 80;
/// Name that clears the screen, rings the bell, forges a line and reverses the text direction.
const EVIL: &str =
    "evil\n\u{1b}[2J\u{1b}[31mannulus: fake message\r\u{7}\u{8}\0\u{9b}31m\u{202e}\u{2028}";

/// Checks that the output has no control characters, and that standard error fits a screen.
#[track_caller]
fn harmless(result: &RunResult) {
    for text in [&result.out, &result.err] {
        let bad = text.chars().find(|&letter| {
            (letter.is_control() && letter != '\n') || matches!(letter, '\u{202e}' | '\u{2028}')
        });
        assert_eq!(bad, None, "{text:?}");
    }
    assert!(result.err.len() <= SCREEN, "{} bytes: {}", result.err.len(), result.err);
    assert!(result.err.lines().all(|line| line.starts_with("annulus: ")), "{:?}", result.err);
    assert!(!result.out.lines().any(|line| line.starts_with("annulus: fake")), "{:?}", result.out);
}

/// Runs the command with arguments that may have white space.
fn run<'a>(folder: &Folder, arguments: impl IntoIterator<Item = &'a str>) -> RunResult {
    let mut command = folder.command("");
    command.args(arguments.into_iter().map(OsStr::new));
    RunResult::from(command.output().unwrap())
}

/// Writes a file of query, key and value with 4 rows each, the header text `more` after them, and
/// `data` more bytes of data.
fn with_header(folder: &Folder, more: &str, data: u64) {
    let entry = |index: usize| {
        format!(
            r#"{{"dtype":"F32","shape":[1,4,2,4],"data_offsets":[{},{}]}}"#,
            128 * index,
            128 * (index + 1)
        )
    };
    let header =
        format!(r#"{{"query":{},"key":{},"value":{}{more}}}"#, entry(0), entry(1), entry(2));
    folder.write_raw("in.safetensors", &header, 384 + data);
}

const ATTEND: [&str; 5] = ["attend", "--input", "in.safetensors", "--output", "out.safetensors"];

#[test]
fn names_in_a_file_are_escaped() {
    let folder = Folder::with_input("message_names");
    let quoted = serde_json::to_string(EVIL).unwrap();
    // ignored, with a note
    with_header(
        &folder,
        &format!(r#",{quoted}:{{"dtype":"F32","shape":[1],"data_offsets":[384,388]}}"#),
        4,
    );
    let result = run(&folder, ATTEND);
    harmless(&result);
    assert_eq!((result.code, result.err.lines().count()), (0, 1), "{result:?}");
    assert!(
        result.err.contains(r"ignored: evil\n\u{1b}[2J\u{1b}[31mannulus: fake message\r"),
        "{result:?}"
    );
    // refused: a gap, and a type that is unknown
    for more in [
        format!(r#",{quoted}:{{"dtype":"F32","shape":[1],"data_offsets":[388,392]}}"#),
        format!(r#","bias":{{"dtype":{quoted},"shape":[1,1,1,1],"data_offsets":[384,392]}}"#),
    ] {
        with_header(&folder, &more, 8);
        let result = run(&folder, ATTEND);
        harmless(&result);
        result.failed(1, &["in.safetensors", r"\u{1b}[2J\u{1b}[31mannulus: fake message"]);
    }
}

#[test]
fn a_malformed_case_is_reported_once() {
    let folder = Folder::with_input("message_cases");
    for id in [EVIL.to_owned(), "c".repeat(1 << 20)] {
        let case = json!({ "id": id, "file": "in.safetensors" });
        let index = json!({ "format": "annulus-cases-1", "cases": [case] });
        std::fs::write(folder.path("index.json"), index.to_string()).unwrap();
        let result = folder.run("check .");
        harmless(&result);
        assert!(result.out.len() < 3 * SCREEN, "{} bytes", result.out.len());
        // two element types
        assert_eq!(
            result.out.lines().filter(|line| line.starts_with("FAIL ")).count(),
            2,
            "{result:?}"
        );
        assert_eq!(result.out.lines().last(), Some("0 passed, 30 failed"));
        result.failed(1, &["30 failed", "./index.json: case", "missing field `dims`"]);
    }
    std::fs::write(folder.path("index.json"), r#"{"format":"annulus-cases-1","cases":[]}"#)
        .unwrap();
    folder.run("check . --case nosuch").failed(1, &["--case", "got nosuch", "index.json"]);
}
