//! Progress bar on a terminal.

use std::{
    fs::File,
    io::Read,
    os::unix::ffi::OsStrExt,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use crate::support::{Folder, with_default_signals};

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

/// Returns every `N/M blocks` that was drawn.
fn drawn(result: &str) -> Vec<(u64, u64)> {
    let pair = |before: &str| {
        let (got, all) = before.rsplit(' ').next()?.split_once('/')?;
        Some((got.parse().ok()?, all.parse().ok()?))
    };
    result.split(" blocks").filter_map(pair).collect()
}

#[test]
fn the_bar_never_exceeds_its_total() {
    let folder = Folder::new("terminal_total");
    folder.succeed("make --output in.st --q-len 12000 --heads 2 --head-dim 32 --backward");
    for ranks in [3, 4] {
        let command = folder.command(&format!(
            "attend --input in.st --output out.st --ranks {ranks} --layout contiguous --backward"
        ));
        let (mut child, reader) = start(command);
        assert!(child.wait().unwrap().success());
        let result = reader.join().unwrap();
        let drawn = drawn(&result);
        assert!(drawn.iter().any(|(got, _)| *got > 0), "{result:?}");
        assert!(drawn.iter().all(|(got, all)| got <= all), "{drawn:?}");
    }
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
