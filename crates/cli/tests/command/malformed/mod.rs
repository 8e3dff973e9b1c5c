//! Malformed files, generated from rules: each ends within seconds with one line that names the
//! file and what in it is at fault, and leaves nothing. Files that are only odd are read.

mod rng;
mod tensors;
mod texts;
mod writer;

use std::{
    collections::BTreeMap,
    io::Read,
    process::{Child, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::support::Folder;

/// A screen of 24 lines of 80 columns: no message is longer.
const SCREEN: usize = 24 * 80;
/// No case takes longer, on however busy a machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// Folders in which cases run at the same time.
const LANES: usize = 4;

/// Contents of the folder of a case.
#[derive(Debug, Clone)]
enum Content {
    File(Vec<u8>),
    Folder,
    Pipe,
    Socket,
    Link(String),
}

/// The end that a case must have.
#[derive(Debug, Clone)]
enum Expected {
    /// Exit code 1 and one line that has one word of each group.
    Refused(Vec<Vec<String>>),
    /// Exit code 0; a note at most.
    Taken,
    /// The one or the other: the case is random.
    Either,
}

/// A run of the command.
#[derive(Debug, Clone)]
struct Case {
    rule: String,
    arguments: String,
    files: Vec<(String, Content)>,
    /// The file that is at fault.
    file: &'static str,
    expected: Expected,
}

/// Groups of words, of each of which one must be in the message: alternatives are separated by `|`.
fn words(groups: &[&str]) -> Expected {
    Expected::Refused(
        groups.iter().map(|group| group.split('|').map(str::to_owned).collect()).collect(),
    )
}

impl Case {
    fn attend(rule: impl Into<String>, flags: &str, bytes: Vec<u8>, expected: Expected) -> Self {
        Self {
            rule: rule.into(),
            arguments: format!("attend --input in.safetensors --output out.safetensors {flags}"),
            files: vec![("in.safetensors".into(), Content::File(bytes))],
            file: "in.safetensors",
            expected,
        }
    }
}

#[test]
fn malformed_files_are_refused_by_name_and_odd_ones_are_read() {
    let mut cases = tensors::cases();
    cases.extend(texts::cases());
    assert!(cases.len() >= 900, "{} cases", cases.len());
    let refused = cases.iter().filter(|case| matches!(case.expected, Expected::Refused(_))).count();
    let taken = cases.iter().filter(|case| matches!(case.expected, Expected::Taken)).count();
    assert!(refused >= 600 && taken >= 40, "{refused} refused, {taken} taken");

    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    thread::scope(|scope| {
        for lane in 0..LANES {
            let (cases, next, wrong) = (&cases, &next, &wrong);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(index) else { break };
                    if let Err(what) = run(&format!("malformed_{lane}"), case) {
                        wrong.lock().unwrap().insert(index, format!("{}: {what}", case.rule));
                    }
                }
            });
        }
    });
    let wrong: Vec<String> = wrong.into_inner().unwrap().into_values().collect();
    let shown: Vec<&str> = wrong.iter().take(40).map(String::as_str).collect();
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), shown.join("\n"));
}

/// Runs a case in a new folder and judges what it did.
fn run(name: &str, case: &Case) -> Result<(), String> {
    let folder = Folder::new(name);
    for (name, content) in &case.files {
        content.make(&folder, name);
    }
    let before = folder.names();
    let mut command = folder.command(&case.arguments);
    let child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (code, err) = end(child)?;
    let mut after = folder.names();
    let taken = code == Some(0) && !matches!(case.expected, Expected::Refused(_));
    if taken {
        after.retain(|name| !["out.safetensors", "all.json"].contains(&name.as_str()));
    }
    let say = |what: &str| Err(format!("{what}: {code:?} {err:?}"));
    if after != before {
        return say(&format!("left {after:?}"));
    }
    if err.len() > SCREEN {
        return Err(format!("{} bytes of message", err.len()));
    }
    if err.strip_suffix('\n').unwrap_or(&err).chars().any(char::is_control)
        || err.lines().any(|line| !line.starts_with("annulus: "))
    {
        return say("not one clean line");
    }
    if taken {
        return if err.is_empty() || err.starts_with("annulus: note: ") {
            Ok(())
        } else {
            say("taken with words")
        };
    }
    match &case.expected {
        Expected::Taken => say("refused"),
        _ if code != Some(1) || err.lines().count() != 1 => say("no refusal of one line"),
        _ if !err.contains(case.file) => say("the file is not named"),
        Expected::Refused(groups) => {
            match groups.iter().find(|group| !group.iter().any(|word| err.contains(word.as_str())))
            {
                Some(group) => say(&format!("nothing of {group:?}")),
                None => Ok(()),
            }
        }
        Expected::Either => Ok(()),
    }
}

/// Waits for the end of a child and returns its code and its standard error.
fn end(mut child: Child) -> Result<(Option<i32>, String), String> {
    let mut pipes = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let out = thread::spawn(move || std::io::copy(&mut pipes.0, &mut std::io::sink()));
    let err = thread::spawn(move || {
        let mut bytes = Vec::new();
        pipes.1.read_to_end(&mut bytes).map(|_| bytes)
    });
    let started = Instant::now();
    let code = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status.code();
        }
        if started.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            return Err("it did not end".to_owned());
        }
        thread::sleep(Duration::from_millis(2));
    };
    out.join().unwrap().unwrap();
    let text = String::from_utf8(err.join().unwrap().unwrap())
        .map_err(|_| "no UTF-8 on standard error".to_owned())?;
    Ok((code, text))
}

impl Content {
    fn make(&self, folder: &Folder, name: &str) {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let path = folder.path(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).unwrap();
        }
        match self {
            Self::File(bytes) => std::fs::write(path, bytes).unwrap(),
            Self::Folder => std::fs::create_dir(path).unwrap(),
            Self::Pipe => mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap(),
            // a socket's own path must be short
            Self::Socket => {
                mknodat(CWD, path, FileType::Socket, Mode::RUSR | Mode::WUSR, 0).unwrap()
            }
            Self::Link(to) => std::os::unix::fs::symlink(to, path).unwrap(),
        }
    }
}
