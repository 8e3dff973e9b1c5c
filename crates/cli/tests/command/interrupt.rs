//! An interrupt leaves nothing behind.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::Folder;

#[test]
fn an_interrupt_leaves_no_half_file() {
    let folder = Folder::new("interrupt");
    // minutes of work, were it let go on
    folder.succeed("make --out in.safetensors --q-len 60000 --heads 4 --kv-heads 1 --head-dim 16");
    let mut command = folder.command("attend --input in.safetensors --output out.safetensors --ranks 2");
    let mut child = command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while !folder.names().iter().any(|name| name.ends_with(".partial")) {
        assert!(started.elapsed() < Duration::from_secs(30), "no output under way");
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    let process = Pid::from_child(&child);
    kill_process(process, Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "annulus: interrupted; no output was written\n");
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn an_interrupted_demo_removes_its_folder() {
    let folder = Folder::new("interrupt_demo");
    let mut command = folder.command("demo --len 100000");
    command.env("TMPDIR", folder.path("")).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    while folder.names().is_empty() {
        assert!(started.elapsed() < Duration::from_secs(30) && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(folder.names().is_empty(), "{:?}", folder.names());
}
