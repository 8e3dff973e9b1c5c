//! A command while it runs: its progress bar on a terminal; signals: exit codes, messages and files
//! after an interrupt.

use std::{
    fs::File,
    io::Read,
    os::unix::ffi::OsStrExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    fs::{CWD, FileType, Mode, mknodat},
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use crate::support::{Folder, with_default_signals};

/// The longest time to wait for a state of a child: shorter than the work that is interrupted.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits until `held` returns true for a running child, given its folder in /proc.
#[track_caller]
fn wait_until(child: &mut Child, mut held: impl FnMut(&Path) -> bool) {
    let started = Instant::now();
    let process = Path::new("/proc").join(child.id().to_string());
    while !held(&process) {
        assert!(started.elapsed() < LIMIT, "the state was not reached");
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// True once the process has created a temporary file in `folder`.
fn has_begun(process: &Path, folder: &Path) -> bool {
    let Ok(open) = std::fs::read_dir(process.join("fd")) else { return false };
    // as /proc names it: the build's folder may be a link
    let folder = folder.canonicalize().unwrap();
    open.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok()).any(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        file.starts_with(&folder) && (name.starts_with(".annulus-"))
    })
}

/// True once the process handles signals.
fn handles_signals(process: &Path) -> bool {
    let Ok(threads) = std::fs::read_dir(process.join("task")) else { return false };
    threads.flatten().any(|thread| {
        std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name == "signals\n")
    })
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Creates a folder with an input for which attend takes minutes.
fn folder(name: &str) -> Folder {
    let folder = Folder::new(name);
    folder.zeros("in.safetensors", 1 << 18, 4, 16);
    folder
}

fn attend(folder: &Folder) -> Command {
    let command = folder
        .command("attend --input in.safetensors --output out.safetensors --ranks 2 --trace traces");
    let mut command = with_default_signals(&command);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

#[test]
fn an_interrupt_leaves_no_partial_file() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let folder = folder(&format!("interrupt_{code}"));
        let mut child = attend(&folder).spawn().unwrap();
        wait_until(&mut child, |process| {
            has_begun(process, &folder.path("")) && folder.path("traces").exists()
        });
        send(&child, signal);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "annulus: interrupted\n");
        assert_eq!(folder.names(), ["in.safetensors", "traces"]);
        assert_eq!(std::fs::read_dir(folder.path("traces")).unwrap().count(), 0);
    }
}

#[test]
fn a_killed_command_leaves_nothing_under_the_name_of_its_output() {
    let folder = folder("killed");
    let mut child = attend(&folder).stderr(Stdio::null()).spawn().unwrap();
    wait_until(&mut child, |process| has_begun(process, &folder.path("")));
    send(&child, Signal::KILL);
    assert_eq!(child.wait().unwrap().code(), None);
    assert!(!folder.path("out.safetensors").exists());
}

/// Starts a command that blocks until a pipe has a reader. `ignored` is a shell command before it.
fn start_blocked(folder: &Folder, ignored: &str) -> Child {
    if !folder.path("pipe").exists() {
        mknodat(CWD, folder.path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }
    let plan = folder.command("plan --q-len 100 --ranks 2 --json pipe");
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &format!("{ignored} exec \"$0\" \"$@\"")])
        .arg(plan.get_program())
        .args(plan.get_args());
    shell.current_dir(folder.path(""));
    let mut shell = with_default_signals(&shell);
    let mut child = shell.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until(&mut child, handles_signals);
    child
}

#[test]
fn a_signal_that_is_ignored_at_the_start_stays_ignored() {
    let folder = Folder::new("interrupt_ignored");
    let all = [(Signal::HUP, "HUP", 129), (Signal::INT, "INT", 130), (Signal::TERM, "TERM", 143)];
    for (signal, name, _) in all {
        let mut child = start_blocked(&folder, &format!("trap '' {name};"));
        send(&child, signal);
        // longer than the command needs to handle a signal
        std::thread::sleep(Duration::from_millis(300));
        assert!(child.try_wait().unwrap().is_none(), "{name} ended it");
        let mut json = String::new();
        std::fs::File::open(folder.path("pipe")).unwrap().read_to_string(&mut json).unwrap();
        assert!(json.starts_with('{'));
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()), "{name}");
        // the other signals still end the command
        for (other, _, code) in all.into_iter().filter(|(other, ..)| *other != signal) {
            let child = start_blocked(&folder, &format!("trap '' {name};"));
            send(&child, other);
            assert_eq!(child.wait_with_output().unwrap().status.code(), Some(code));
        }
    }
}

#[test]
fn an_interrupted_demo_removes_its_folder() {
    let folder = Folder::new("interrupt_demo");
    let mut command = with_default_signals(&folder.command("demo --len 100000"));
    command.env("TMPDIR", folder.path("")).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    wait_until(&mut child, |_| !folder.names().is_empty());
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(folder.names().is_empty(), "{:?}", folder.names());
}

/// Starts a command whose standard error is a terminal of 80 columns. Returns it and a thread that
/// collects its output.
fn start(mut command: Command) -> (Child, std::thread::JoinHandle<String>) {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    tcsetwinsize(&terminal, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 })
        .unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap();
    let side = File::options()
        .read(true)
        .write(true)
        .open(std::ffi::OsStr::from_bytes(name.as_bytes()))
        .unwrap();
    command.env("TERM", "xterm").stdin(Stdio::null()).stdout(Stdio::null()).stderr(side);
    let child = command.spawn().unwrap();
    // closes this process's copy of the terminal, so that reading ends with the child
    drop(command);
    let reader = std::thread::spawn(move || {
        let mut terminal = File::from(terminal);
        let mut all = Vec::new();
        let mut bytes = [0; 4096];
        // reading fails after the other side is closed
        while let Ok(count @ 1..) = terminal.read(&mut bytes) {
            all.extend_from_slice(&bytes[..count]);
        }
        String::from_utf8_lossy(&all).into_owned()
    });
    (child, reader)
}

#[test]
fn an_interrupt_removes_the_bar() {
    let folder = Folder::new("terminal_interrupt");
    folder.succeed("make --output in.st --q-len 60000 --heads 4 --kv-heads 1 --head-dim 16");
    let (mut child, reader) = start(with_default_signals(
        &folder.command("attend --input in.st --output out.st --ranks 2"),
    ));
    let started = Instant::now();
    // the computation takes minutes, and the bar is drawn from the start
    while started.elapsed() < Duration::from_millis(1500) {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let result = reader.join().unwrap();
    let (before, after) =
        result.split_once("annulus: interrupted").unwrap_or_else(|| panic!("{result:?}"));
    let (_, line) =
        before.rsplit_once("\u{1b}[2K").unwrap_or_else(|| panic!("never wiped: {result:?}"));
    assert!(line.chars().all(|letter| letter == '\r'), "left on the line: {line:?}");
    assert!(!after.contains('\u{1b}'), "drawn again: {after:?}");
}
