//! Messages with external text: without control characters, and at most a screen long.

use std::ffi::OsStr;

use serde_json::json;

use crate::{
    files::Tensors,
    support::{Folder, RunResult},
};

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

fn folder(name: &str) -> Folder {
    let folder = Folder::new(name);
    Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
    folder
}

/// Runs the command with arguments that may have white space.
fn run<'a>(folder: &Folder, arguments: impl IntoIterator<Item = &'a str>) -> RunResult {
    let mut command = folder.command("");
    command.args(arguments.into_iter().map(OsStr::new));
    RunResult::from(command.output().unwrap())
}

/// Writes a file of query, key and value with 4 rows each, the header text `more` after them, and
/// `data` more bytes of data.
fn with_header(folder: &Folder, more: &str, data: usize) {
    let entry = |index: usize| {
        format!(
            r#"{{"dtype":"F32","shape":[1,4,2,4],"data_offsets":[{},{}]}}"#,
            128 * index,
            128 * (index + 1)
        )
    };
    let header =
        format!(r#"{{"query":{},"key":{},"value":{}{more}}}"#, entry(0), entry(1), entry(2));
    let mut bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    bytes.resize(bytes.len() + 384 + data, 0);
    std::fs::write(folder.path("in.safetensors"), bytes).unwrap();
}

const ATTEND: [&str; 5] = ["attend", "--input", "in.safetensors", "--output", "out.safetensors"];

#[test]
fn names_in_a_file_are_escaped() {
    let folder = folder("message_names");
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
fn messages_are_at_most_a_screen_long() {
    let folder = folder("message_length");
    let mut many = String::new();
    for number in 0..300_000 {
        many += &format!(
            r#","strange{number}":{{"dtype":"F32","shape":[0],"data_offsets":[384,384]}}"#
        );
    }
    with_header(&folder, &many, 0);
    let result = run(&folder, ATTEND);
    harmless(&result);
    assert!(
        result.code == 0
            && result.err.contains("strange0, ")
            && result.err.contains(" and 299992 more\n"),
        "{result:?}"
    );

    let long = "n".repeat(1 << 20);
    let ones = vec!["1"; 100_000].join(",");
    for (code, more, words) in [
        (
            0,
            format!(r#","{long}":{{"dtype":"F32","shape":[1],"data_offsets":[384,388]}}"#),
            vec!["ignored: ", "(1048576 bytes)"],
        ),
        (
            1,
            format!(r#","bias":{{"dtype":"F32","shape":[{ones}],"data_offsets":[384,388]}}"#),
            vec!["bias", "[1, 1, ", "want 4 dimensions"],
        ),
    ] {
        with_header(&folder, &more, 4);
        let result = run(&folder, ATTEND);
        harmless(&result);
        assert_eq!(result.code, code, "{result:?}");
        for word in words {
            assert!(result.err.contains(word), "no {word} in {result:?}");
        }
    }
}

#[test]
fn a_malformed_case_is_reported_once() {
    let folder = folder("message_cases");
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
