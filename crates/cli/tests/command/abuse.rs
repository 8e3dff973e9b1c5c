//! Flag abuse, made by rules: every flag of every subcommand with values that have no meaning, every
//! path flag with paths that cannot be what they should be, combinations that contradict each other,
//! and variables of the environment.
//!
//! Flags are read from the help texts, so that a new flag joins by itself. What must hold of every
//! case: it ends within seconds, with exit code 0, 1 or 2; a failure is one line on standard error
//! that begins with `annulus: `, fits a screen, has no control character and names the flag, the
//! file or the variable at fault; and it leaves nothing behind.

use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    io::Read,
    os::unix::{ffi::OsStrExt, ffi::OsStringExt, fs::symlink},
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use rustix::{
    fs::{CWD, FileType, Mode, mknodat},
    process::{Pid, Signal, kill_process_group},
};

use crate::{files::Tensors, support::Folder};

/// The longest that a case may take. One is done in milliseconds; this machine may be busy.
const LIMIT: Duration = Duration::from_secs(30);
/// The most bytes of an error: a screen.
const MOST_ERROR_BYTES: usize = 2000;
/// One value in so many is tried on each flag, another one on each; all with ANNULUS_ABUSE=all.
const SHARE: usize = 3;
/// Threads that run cases.
const WORKERS: usize = 4;

/// The kind of value that a flag takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    Nothing,
    Text,
    Path,
}

/// A flag, or an argument by its place, as the help shows it.
#[derive(Debug, Clone)]
struct Flag {
    name: String,
    takes: Takes,
}

/// A subcommand that does something.
#[derive(Debug)]
struct Subcommand {
    name: String,
    flags: Vec<Flag>,
    /// A command line that succeeds, in a few milliseconds: the flags with their values.
    base: Vec<(&'static str, &'static str)>,
}

/// One command line.
#[derive(Debug)]
struct Case {
    arguments: Vec<OsString>,
    environment: Vec<(String, OsString)>,
    /// A failure names one of these.
    names: Vec<String>,
}

/// A command line of each subcommand that succeeds. Arguments without a flag have `<NAME>`.
fn base(subcommand: &str) -> Vec<(&'static str, &'static str)> {
    match subcommand {
        "attend" => vec![("--input", "in.safetensors"), ("--output", "out.safetensors")],
        "check" => vec![
            ("<DIR>", "cases"),
            ("--ranks", "1"),
            ("--layout", "contiguous"),
            ("--dtype", "f64"),
        ],
        "plan" => vec![("--q-len", "8"), ("--ranks", "2")],
        "bench" => vec![
            ("--what", "fwd"),
            ("--ns", "8"),
            ("--ds", "4"),
            ("--heads", "1"),
            ("--causal", "true"),
        ],
        "make" => vec![
            ("--output", "made.safetensors"),
            ("--q-len", "8"),
            ("--heads", "2"),
            ("--head-dim", "4"),
        ],
        "demo" => vec![("--len", "16"), ("--ranks", "1")],
        "doctor" => vec![],
        "trace merge" => vec![("<DIR>", "traces"), ("--output", "merged.json")],
        "completions" => vec![("<SHELL>", "bash")],
        other => panic!("{other} is new: give it a command line that succeeds"),
    }
}

/// The flags of every subcommand, from their help.
fn subcommands(folder: &Folder, path: &str) -> Vec<Subcommand> {
    let help = folder.succeed(&format!("{path} --help")).out;
    let mut section = "";
    let (mut flags, mut found) = (Vec::new(), Vec::new());
    for line in help.lines() {
        let indent = line.len() - line.trim_start().len();
        if indent == 0 && line.ends_with(':') {
            section = line;
        }
        // descriptions are two spaces apart, or on lines of their own, further in
        let head = line.trim_start().split("  ").next().unwrap_or_default();
        match section {
            "Commands:" if indent == 2 && !head.is_empty() && head != "help" => {
                found.extend(subcommands(folder, format!("{path} {head}").trim_start()));
            }
            "Arguments:" if head.starts_with('<') => {
                flags.push(Flag { name: head.to_owned(), takes: taken(head) })
            }
            "Examples:" => {}
            // a hyphen alone begins one of the values that a flag takes
            _ if head.starts_with("--") || head.get(2..5) == Some(", -") => {
                let name =
                    head.split([' ', ',']).find(|word| word.starts_with("--")).unwrap().to_owned();
                let takes = if head.contains('<') { taken(head) } else { Takes::Nothing };
                flags.push(Flag { name, takes });
            }
            _ => {}
        }
    }
    if found.is_empty() {
        assert!(flags.len() > 1, "{help}");
        flags.retain(|flag| flag.name != "--help" && flag.name != "--version");
        found.push(Subcommand { name: path.to_owned(), flags, base: base(path) });
    }
    found
}

fn taken(head: &str) -> Takes {
    if head.contains("<FILE>") || head.contains("<DIR>") { Takes::Path } else { Takes::Text }
}

/// Values that most flags can make nothing of.
fn values() -> Vec<Vec<u8>> {
    let texts = [
        "",
        "-1",
        "-0",
        "0",
        "1",
        "2",
        "-inf",
        "4294967296",
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "1e400",
        "-1e400",
        "1e-400",
        "NaN",
        "inf",
        "x",
        "1.5",
        "\u{1b}[2J\u{1b}[31mred\u{7}\n\r",
        ",",
        "1,,2",
        "1,1",
        "1,2,3,4",
        "4k",
        "1GiB",
        "5s",
        "0x10",
        "½",
        "１",
        " 1",
        "1 ",
        "+1",
        "--",
        "-",
        "*",
        "\u{202e}evil",
        "auto,",
        "true",
        "none",
        "../..",
        "annulus: error",
    ];
    let mut values: Vec<Vec<u8>> = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
    values.push(b"\xff\xfe".to_vec());
    values.push(vec![b'9'; 100_000]);
    values.push("ä\u{1b}".repeat(30_000).into_bytes());
    values
}

/// Paths that are not what a path flag wants, made in every worker's folder.
fn paths() -> Vec<Vec<u8>> {
    let mut paths: Vec<Vec<u8>> = [
        "nowhere/at/all",
        "folder",
        "fifo",
        "/dev/null",
        "/dev/full",
        "dangling",
        "loop",
        "in.safetensors/",
        "in.safetensors/x",
        "folder/",
        "",
        ".",
        "..",
        "/",
        "/proc/self/mem",
        "/proc/nothing",
        "\u{1b}[2Jred",
        "locked/x/y",
    ]
    .iter()
    .map(|path| path.as_bytes().to_vec())
    .collect();
    paths.extend([255, 256, 5000, 100_000].map(|length| vec![b'n'; length]));
    paths.push("ü".repeat(128).into_bytes());
    paths.push(b"nowhere\xff/x".to_vec());
    paths.push(b"a\nb\tc/x".to_vec());
    paths
}

/// Combinations that contradict each other or lack something: command line, what the failure names.
const CONTRADICTIONS: [(&str, &str); 44] = [
    ("attend", "--input"),
    ("attend --input in.safetensors", "--output"),
    ("attend --output out.safetensors", "--input"),
    ("attend --input in.safetensors --output out.safetensors --causal --prefix 3", "--prefix"),
    ("attend --input in.safetensors --output out.safetensors --dropout 0.1", "--seed"),
    ("attend --input in.safetensors --output out.safetensors --seed 1", "--dropout"),
    ("attend --input in.safetensors --output out.safetensors --bias-order before", "--bias-order"),
    (
        "attend --input in.safetensors --output out.safetensors --bias-order before --soft-cap 2",
        "--bias-order",
    ),
    ("attend --input in.safetensors --output out.safetensors --first-visible 4", "--first-visible"),
    ("attend --input in.safetensors --output out.safetensors --device 0", "--device"),
    ("attend --input in.safetensors --output out.safetensors --backward", "--backward"),
    ("attend --input in.safetensors --output out.safetensors --sinks shared", "--sinks"),
    ("attend --input in.safetensors --output out.safetensors --quiet --json", "--json"),
    (
        "attend --input in.safetensors --output out.safetensors --ranks 128 --threads 64",
        "--threads",
    ),
    ("attend --input in.safetensors --output out.safetensors extra", "extra"),
    ("attend --input in.safetensors --output out.safetensors --transport nccl", "nccl"),
    ("check", "DIR"),
    ("check cases --case nosuch", "--case"),
    ("check cases --case", "--case"),
    ("check cases cases", "cases"),
    ("check cases --device 3", "--device"),
    ("check traces", "index.json"),
    ("plan", "--q-len"),
    ("plan --q-len 8", "--ranks"),
    ("plan --q-len 8 --ranks 2 --heads 3 --kv-heads 2", "--heads"),
    ("plan --q-len 8 --ranks 2 --causal --prefix 2", "--prefix"),
    ("plan --q-len 8 --ranks 2 --first-visible 2", "--first-visible"),
    ("plan --q-len 8 --ranks 2 --batch 9223372036854775808", "--batch"),
    ("bench --ns 8 --q-len 8", "--q-len"),
    ("bench --documents 8 --ns 8", "--documents"),
    ("bench --documents 8 --kv-len 8", "--documents"),
    ("bench --ns 8 --heads 3 --kv-heads 2", "--heads"),
    ("bench --ns 8 --device 1", "--device"),
    ("bench --ns 8 --batch 9223372036854775808", "--batch"),
    ("make", "--output"),
    ("make --output x --heads 3 --kv-heads 2", "--heads"),
    ("make --output x --q-len 8 --documents 4,5", "--documents"),
    ("make --output x --sinks-count 3", "--sinks"),
    ("make --output x --batch 9223372036854775808", "--batch"),
    ("demo --force", "--dir"),
    ("demo --len 16 --dir taken", "--force"),
    ("trace merge", "DIR"),
    ("trace merge traces", "--output"),
    ("trace split", "split"),
];

/// Variables of the environment that the sources of the workspace read.
fn variables() -> BTreeSet<String> {
    fn scan(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                scan(&path, found);
            } else if path.extension() == Some(OsStr::new("rs")) {
                let text = std::fs::read_to_string(&path).unwrap();
                for piece in text.split("\"ANNULUS_").skip(1) {
                    let name: String = piece
                        .chars()
                        .take_while(|letter| letter.is_ascii_uppercase() || *letter == '_')
                        .collect();
                    found.insert(format!("ANNULUS_{name}"));
                }
            }
        }
    }
    let mut found = BTreeSet::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for member in std::fs::read_dir(crates).unwrap() {
        let sources = member.unwrap().path().join("src");
        if sources.is_dir() {
            scan(&sources, &mut found);
        }
    }
    assert!(found.contains("ANNULUS_CPU_ISA"), "{found:?}");
    found
}

impl Subcommand {
    /// The base command line, without the flag `without`, and then `more`.
    fn with(&self, without: &str, more: Vec<OsString>) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = self.name.split(' ').map(OsString::from).collect();
        for (flag, value) in self.base.iter().filter(|(flag, _)| *flag != without) {
            if !flag.starts_with('<') {
                arguments.push(flag.into());
            }
            arguments.push(value.into());
        }
        // what others need
        match (self.name.as_str(), without) {
            ("attend", "--dropout") => arguments.extend(["--seed".into(), "1".into()]),
            ("attend", "--seed") => arguments.extend(["--dropout".into(), "0.5".into()]),
            ("attend", "--bias-order") => arguments.extend(["--soft-cap".into(), "1".into()]),
            ("attend" | "plan", "--first-visible") => {
                arguments.extend(["--window".into(), "1".into()])
            }
            ("make", "--sinks-count") => arguments.extend(["--sinks".into(), "shared".into()]),
            ("bench", "--q-len" | "--kv-len" | "--documents") => {
                let ns = arguments.iter().position(|argument| argument == "--ns").unwrap();
                arguments.drain(ns..ns + 2);
            }
            _ => {}
        }
        arguments.extend(more);
        arguments
    }

    /// Every abuse of one flag.
    fn abuses(&self, flag: &Flag, seed: usize) -> Vec<Case> {
        let name: OsString = flag.name.as_str().into();
        let positional = flag.name.starts_with('<');
        let case = |more: Vec<OsString>, names: Vec<String>| Case {
            arguments: self.with(&flag.name, more),
            environment: Vec::new(),
            names,
        };
        let called = flag.name.trim_matches(['<', '>']).to_owned();
        if flag.takes == Takes::Nothing {
            let joined: OsString = format!("{}=yes", flag.name).into();
            let both =
                |first: OsString, second: OsString| case(vec![first, second], vec![called.clone()]);
            return vec![
                case(vec![joined], vec![called.clone()]),
                both(name.clone(), name.clone()),
                both(name, "stray".into()),
            ]
            .into_iter()
            .map(|mut case| {
                case.names.push("stray".into());
                case
            })
            .collect();
        }
        let put = |value: Vec<u8>, joined: bool| {
            let value = OsString::from_vec(value);
            match (positional, joined) {
                (true, _) => vec![value],
                (false, true) => {
                    vec![[name.as_os_str(), OsStr::new("="), &value].into_iter().collect()]
                }
                (false, false) => vec![name.clone(), value],
            }
        };
        let mut cases = Vec::new();
        for (number, value) in values().into_iter().enumerate() {
            if flag.takes == Takes::Path || (number + seed).is_multiple_of(share()) {
                // of a path flag these are names of files
                let text = String::from_utf8_lossy(&value);
                let first: String = text.chars().take(1).flat_map(char::escape_debug).collect();
                let names = vec![called.clone(), text.chars().take(12).collect(), first];
                let names = if flag.takes == Takes::Path || positional {
                    names
                } else {
                    vec![called.clone()]
                };
                cases.push(case(put(value, (number + seed).is_multiple_of(2)), names));
            }
        }
        if flag.takes == Takes::Path {
            for (number, path) in paths().into_iter().enumerate() {
                let text = String::from_utf8_lossy(&path).into_owned();
                let text = text.trim_start_matches(char::is_control);
                let shown: String =
                    text.chars().take_while(|letter| !letter.is_control()).take(12).collect();
                let names = if shown.is_empty() {
                    vec![called.clone()]
                } else {
                    vec![called.clone(), shown]
                };
                cases.push(case(put(path, number.is_multiple_of(2)), names));
            }
        }
        if !positional {
            cases.push(case(vec![name.clone()], vec![called.clone()]));
            let twice = |value: &str| vec![name.clone(), value.into(), name.clone(), value.into()];
            cases.push(case(twice("1"), vec![called.clone()]));
            cases.push(case(vec![name, "--nosuch".into()], vec![called, "nosuch".into()]));
        }
        cases
    }
}

fn share() -> usize {
    if std::env::var_os("ANNULUS_ABUSE").is_some_and(|value| value == "all") { 1 } else { SHARE }
}

fn cases(folder: &Folder) -> Vec<Case> {
    let all = subcommands(folder, "");
    let names: Vec<&str> = all.iter().map(|subcommand| subcommand.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "attend",
            "check",
            "plan",
            "bench",
            "make",
            "demo",
            "doctor",
            "trace merge",
            "completions"
        ]
    );
    let mut cases = Vec::new();
    for (number, subcommand) in all.iter().enumerate() {
        cases.push(Case {
            arguments: subcommand.with("", Vec::new()),
            environment: Vec::new(),
            names: Vec::new(),
        });
        for (place, flag) in subcommand.flags.iter().enumerate() {
            cases.extend(subcommand.abuses(flag, 7 * number + place));
        }
    }
    for (line, name) in CONTRADICTIONS {
        let arguments = line.split(' ').map(OsString::from).collect();
        cases.push(Case { arguments, environment: Vec::new(), names: vec![name.to_owned()] });
    }
    for (arguments, name) in [
        (vec![b"nosuch".to_vec()], "nosuch"),
        (vec![b"-".to_vec()], "-"),
        (vec![b"\xff".to_vec()], "subcommand"),
        (vec![b"--nosuch".to_vec()], "nosuch"),
        (vec![b"y".repeat(100_000)], "yyy"),
        (vec![b"attend".to_vec(), b"attend".to_vec()], "attend"),
        (vec![b"help".to_vec(), b"nosuch".to_vec()], "nosuch"),
        (vec![b"\x1b[2J".to_vec()], "[2J"),
        (vec![b"attend".to_vec(), [b"--", &b"z".repeat(100_000)[..]].concat()], "zzz"),
    ] {
        let arguments = arguments.into_iter().map(OsString::from_vec).collect();
        cases.push(Case { arguments, environment: Vec::new(), names: vec![name.to_owned()] });
    }
    let lines = [
        "doctor",
        "attend --input in.safetensors --output out.safetensors",
        "bench --what fwd --ns 8 --ds 4 --heads 1 --causal",
    ];
    let texts: [&[u8]; 7] =
        [b"", b"bogus", b"1e400", b"\xff\xfe", b"\x1b[2J\n", b"-1", &[b'v'; 100_000]];
    for (variable, text) in
        variables().iter().flat_map(|variable| texts.map(|text| (variable, text)))
    {
        for line in lines {
            let arguments = line.split(' ').map(OsString::from).collect();
            let environment = vec![(variable.clone(), OsStr::from_bytes(text).to_owned())];
            cases.push(Case { arguments, environment, names: vec![variable.clone()] });
        }
    }
    for (variable, text) in [
        ("TMPDIR", "nowhere"),
        ("TMPDIR", "in.safetensors"),
        ("TERM", "\u{1b}"),
        ("COLUMNS", "0"),
        ("COLUMNS", "999999999999"),
        ("HOME", "nowhere"),
        ("PMI_RANK", "x"),
        ("OMPI_COMM_WORLD_RANK", "-1"),
        ("SLURM_PROCID", "999999999999999999999"),
        ("RUST_LOG", "trace"),
        ("LANG", "xx"),
    ] {
        for line in ["demo --len 16 --ranks 1", "doctor", "attend --help"] {
            let arguments = line.split(' ').map(OsString::from).collect();
            cases.push(Case {
                arguments,
                environment: vec![(variable.to_owned(), text.into())],
                names: vec![variable.to_owned(), text.to_owned()],
            });
        }
    }
    cases
}

/// A folder with what the base command lines need, and with paths of every kind.
fn prepare(worker: usize) -> Folder {
    let folder = Folder::new(&format!("abuse_{worker}"));
    Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
    folder.succeed("attend --input in.safetensors --output traced.safetensors --trace traces");
    std::fs::remove_file(folder.path("traced.safetensors")).unwrap();
    crate::check::write_cases(&folder);
    for name in ["folder", "taken"] {
        std::fs::create_dir(folder.path(name)).unwrap();
    }
    std::fs::write(folder.path("taken/input.safetensors"), "mine").unwrap();
    mknodat(CWD, folder.path("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    // opened for both, so that neither side ever waits for the other; read to its end with the tests
    let mut pipe =
        std::fs::File::options().read(true).write(true).open(folder.path("fifo")).unwrap();
    std::thread::spawn(move || std::io::copy(&mut pipe, &mut std::io::sink()));
    symlink("nowhere/target", folder.path("dangling")).unwrap();
    symlink("loop", folder.path("loop")).unwrap();
    folder
}

/// Everything in a folder: names, and the sizes of files.
fn listing(folder: &Path) -> BTreeSet<(PathBuf, u64)> {
    let mut all = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            let kind = if metadata.is_symlink() { u64::MAX } else { 0 };
            all.insert((path.clone(), if metadata.is_file() { metadata.len() } else { kind }));
            if metadata.is_dir() {
                folders.push(path);
            }
        }
    }
    all
}

/// Removes what a case that succeeded has made; false if it has changed what was there before.
fn restore(folder: &Path, before: &BTreeSet<(PathBuf, u64)>) -> bool {
    let known = |path: &Path| before.iter().any(|(known, _)| known == path);
    for (path, _) in listing(folder) {
        if !known(&path) && path.symlink_metadata().is_ok() {
            if path.is_dir() && !path.is_symlink() {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            }
            .unwrap();
        }
    }
    listing(folder) == *before
}

/// Runs a case; what of it must not be, if anything.
fn violation(folder: &Folder, before: &BTreeSet<(PathBuf, u64)>, case: &Case) -> Option<String> {
    use std::os::unix::process::CommandExt;
    let mut command = folder.command("");
    command.args(&case.arguments).envs(case.environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    let started = Instant::now();
    let mut child = command.spawn().unwrap();
    let mut pipe = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut said = Vec::new();
        pipe.read_to_end(&mut said).map(|_| said)
    });
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if started.elapsed() > LIMIT => {
                kill_process_group(Pid::from_child(&child), Signal::KILL).unwrap();
                child.wait().unwrap();
                return Some(format!("did not end within {LIMIT:?}"));
            }
            None => std::thread::sleep(Duration::from_millis(3)),
        }
    };
    let said = String::from_utf8_lossy(&reader.join().unwrap().unwrap()).into_owned();
    let after = listing(&folder.path(""));
    let shown: String = said.chars().take(400).collect();
    if said.trim_end_matches('\n').chars().any(|letter| letter.is_control() && letter != '\n') {
        return Some(format!("control characters in {shown:?}"));
    }
    match status.code() {
        Some(0) => said
            .lines()
            .find(|line| !line.starts_with("annulus: "))
            .map(|line| format!("said {line:?}")),
        Some(1 | 2) => {
            let one_line =
                said.starts_with("annulus: ") && said.ends_with('\n') && said.lines().count() == 1;
            let named = case.names.iter().any(|name| said.contains(name.as_str()));
            let wrong = [
                (!one_line, "not one line"),
                (said.len() > MOST_ERROR_BYTES, "too long"),
                (!named, "names nothing at fault"),
                (after != *before, "left something behind"),
            ];
            wrong
                .iter()
                .find(|(wrong, _)| *wrong)
                .map(|(_, what)| format!("{what}, want {:?}: {shown}", case.names))
        }
        code => Some(format!("exit code {code:?}: {shown}")),
    }
}

#[test]
fn whatever_flags_say_the_command_ends_in_good_order() {
    let cases = cases(&Folder::new("abuse"));
    assert!(cases.len() >= 600, "{}", cases.len());
    let (next, started) = (AtomicUsize::new(0), Instant::now());
    let worker = |number: usize| {
        let mut folder = prepare(number);
        let mut before = listing(&folder.path(""));
        let mut violations = Vec::new();
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(what) = violation(&folder, &before, case) {
                let show =
                    |text: &OsString| text.to_string_lossy().chars().take(40).collect::<String>();
                let line: Vec<String> = case.arguments.iter().map(show).collect();
                let environment: Vec<String> = case
                    .environment
                    .iter()
                    .map(|(name, value)| format!("{name}={}", show(value)))
                    .collect();
                violations.push(format!(
                    "{} annulus {}: {what}",
                    environment.join(" "),
                    line.join(" ")
                ));
            }
            if !restore(&folder.path(""), &before) {
                folder = prepare(number);
                before = listing(&folder.path(""));
            }
        }
        violations
    };
    let violations: Vec<String> = std::thread::scope(|scope| {
        let workers: Vec<_> =
            (0..WORKERS).map(|number| scope.spawn(move || worker(number))).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    eprintln!("{} abuses in {:.1} s", cases.len(), started.elapsed().as_secs_f64());
    assert!(
        violations.is_empty(),
        "{} of {}:\n{}",
        violations.len(),
        cases.len(),
        violations.join("\n")
    );
}
