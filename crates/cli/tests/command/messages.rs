//! Text from outside on its way to the terminal: no control character, and never more than a
//! screen.

use std::ffi::OsStr;

use serde_json::json;

use crate::{
    files::Tensors,
    support::{Folder, Said},
};

/// A screen of 24 lines of 80 columns.
const SCREEN: usize = 24 * 80;
/// A name that clears the screen, rings the bell, forges a line and turns the writing direction.
const EVIL: &str =
    "evil\n\u{1b}[2J\u{1b}[31mannulus: fake message\r\u{7}\u{8}\0\u{9b}31m\u{202e}\u{2028}";

/// Everything that was said is harmless, and what went to standard error fits a screen.
#[track_caller]
fn harmless(said: &Said) {
    for text in [&said.out, &said.err] {
        let bad = text.chars().find(|&letter| {
            (letter.is_control() && letter != '\n') || matches!(letter, '\u{202e}' | '\u{2028}')
        });
        assert_eq!(bad, None, "{text:?}");
    }
    assert!(said.err.len() <= SCREEN, "{} bytes: {}", said.err.len(), said.err);
    assert!(said.err.lines().all(|line| line.starts_with("annulus: ")), "{:?}", said.err);
    assert!(!said.out.lines().any(|line| line.starts_with("annulus: fake")), "{:?}", said.out);
}

fn folder(name: &str) -> Folder {
    let folder = Folder::new(name);
    Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
    folder
}

/// Runs the command with arguments of any bytes.
fn run<'a>(folder: &Folder, arguments: impl IntoIterator<Item = &'a str>) -> Said {
    let mut command = folder.command("");
    command.args(arguments.into_iter().map(OsStr::new));
    Said::from(command.output().unwrap())
}

/// A file of this header, with query, key and value of 4 rows in it, and this many bytes of data
/// after them.
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
fn names_in_a_file_do_not_reach_the_terminal_as_they_are() {
    let folder = folder("message_names");
    let quoted = serde_json::to_string(EVIL).unwrap();
    // left alone, with a note
    with_header(
        &folder,
        &format!(r#",{quoted}:{{"dtype":"F32","shape":[1],"data_offsets":[384,388]}}"#),
        4,
    );
    let said = run(&folder, ATTEND);
    harmless(&said);
    assert_eq!((said.code, said.err.lines().count()), (0, 1), "{said:?}");
    assert!(
        said.err.contains(r"ignored: evil\n\u{1b}[2J\u{1b}[31mannulus: fake message\r"),
        "{said:?}"
    );
    // refused: a hole, a shape that does not fit, a field that is missing, two of the name, a dtype
    for more in [
        format!(r#",{quoted}:{{"dtype":"F32","shape":[1],"data_offsets":[388,392]}}"#),
        format!(r#",{quoted}:{{"dtype":"F32","shape":[2],"data_offsets":[384,388]}}"#),
        format!(r#",{quoted}:{{"dtype":"F32","shape":[2]}}"#),
        format!(
            r#",{quoted}:{{"dtype":"U8","shape":[0],"data_offsets":[384,384]}},{quoted}:{{"dtype":"U8","shape":[0],"data_offsets":[384,384]}}"#
        ),
        format!(r#","bias":{{"dtype":{quoted},"shape":[1,1,1,1],"data_offsets":[384,392]}}"#),
        format!(r#","bias":{{"dtype":"F32","shape":[{quoted}],"data_offsets":[384,388]}}"#),
    ] {
        with_header(&folder, &more, 8);
        let said = run(&folder, ATTEND);
        harmless(&said);
        said.failed(1, &["in.safetensors", r"\n\u{1b}[2J\u{1b}[31mannulus: fake message"]);
    }
}

#[test]
fn a_message_is_never_longer_than_a_screen() {
    let folder = folder("message_length");
    let mut many = String::new();
    for number in 0..300_000 {
        many += &format!(
            r#","strange{number}":{{"dtype":"F32","shape":[0],"data_offsets":[384,384]}}"#
        );
    }
    with_header(&folder, &many, 0);
    let said = run(&folder, ATTEND);
    harmless(&said);
    assert!(
        said.code == 0
            && said.err.contains("strange0, ")
            && said.err.contains(" and 299992 more\n"),
        "{said:?}"
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
            format!(r#","{long}":{{"dtype":"F32","shape":[2],"data_offsets":[384,388]}}"#),
            vec!["in.safetensors", "(1048576 bytes)", "shape [2]"],
        ),
        (
            1,
            format!(r#","bias":{{"dtype":"{long}","shape":[1],"data_offsets":[384,388]}}"#),
            vec!["bias", "(1048576 bytes)", "want one of"],
        ),
        (
            1,
            format!(r#","bias":{{"dtype":"F32","shape":[{ones}],"data_offsets":[384,388]}}"#),
            vec!["bias", "[1, 1, ", "want 4 dimensions"],
        ),
        (
            1,
            format!(r#","bias":{{"dtype":"F32","shape":["{long}"],"data_offsets":[384,388]}}"#),
            vec!["bias", "shape"],
        ),
    ] {
        with_header(&folder, &more, 4);
        let said = run(&folder, ATTEND);
        harmless(&said);
        assert_eq!(said.code, code, "{said:?}");
        for word in words {
            assert!(said.err.contains(word), "no {word} in {said:?}");
        }
    }
}

#[test]
fn arguments_do_not_reach_the_terminal_as_they_are() {
    let folder = folder("message_arguments");
    // an argument may have 128 KiB, and may have no zero byte
    let evil = EVIL.replace('\0', "");
    for value in [evil.clone(), "v".repeat(100_000), evil.repeat(1000)] {
        for arguments in [
            vec!["attend", "--input", &value, "--output", "out"],
            vec!["attend", "--input", "in.safetensors", "--output", "out", "--ranks", &value],
            vec!["attend", "--input", "in.safetensors", "--output", "out", "--layout", &value],
            vec!["attend", "--input", "in.safetensors", "--output", &format!("nowhere/{value}")],
            vec!["attend", &value],
            vec![&value],
            vec!["check", &value],
            vec!["check", ".", "--case", &value],
            vec!["make", "--out", "x", "--bias", &value],
            vec!["trace", "merge", &value, "--out", "x"],
        ] {
            let said = run(&folder, arguments.iter().copied());
            harmless(&said);
            assert!(said.code > 0 && said.err.lines().count() == 1, "{said:?}");
        }
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn a_case_that_cannot_be_read_is_reported_once_and_briefly() {
    let folder = folder("message_cases");
    for id in [EVIL.to_owned(), "c".repeat(1 << 20)] {
        let index = json!({ "format": "annulus-cases-1", "cases": [{ "id": id, "file": "in.safetensors" }] });
        std::fs::write(folder.path("index.json"), index.to_string()).unwrap();
        let said = folder.run("check .");
        harmless(&said);
        assert!(said.out.len() < 3 * SCREEN, "{} bytes", said.out.len());
        // two element types
        assert_eq!(
            said.out.lines().filter(|line| line.starts_with("FAIL ")).count(),
            2,
            "{said:?}"
        );
        assert_eq!(said.out.lines().last(), Some("0 passed, 30 failed"));
        said.failed(1, &["30 failed", "./index.json: case", "missing field `dims`"]);
    }
    std::fs::write(folder.path("index.json"), r#"{"format":"annulus-cases-1","cases":[]}"#)
        .unwrap();
    folder.run("check . --case nosuch").failed(1, &["--case", "got nosuch", "index.json"]);
}
