//! Signals, and the temporary files and folders that they remove.
//!
//! SIGHUP, SIGINT and SIGTERM remove them and end the command with exit code 128 plus their number.
//! A signal that was ignored when the command started (`nohup`, `trap "" INT`) stays ignored.
//! SIGXFSZ does not end the command: a write past the limit of file sizes returns an error instead.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic::AtomicBool},
    thread,
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ},
    flag,
    iterator::Signals,
};

use crate::{
    launcher::is_leader_output,
    report::{complain, end_progress},
};

/// Temporary files and folders, with those that are gone. The lock is held while one is created or
/// gets its final name, so a signal is handled before that or after it.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Exit code of a failure that has been printed.
static REPORTED: OnceLock<u8> = OnceLock::new();

fn lock() -> MutexGuard<'static, Vec<PathBuf>> {
    TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a temporary file or folder, which a signal removes.
pub(crate) fn temporary<T: AsRef<Path>>(create: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let mut all = lock();
    let made = create()?;
    all.push(made.as_ref().to_owned());
    Ok(made)
}

/// Calls `name`, which gives a temporary file its final name. A signal is handled before the call
/// or after it.
pub(crate) fn complete<T>(name: impl FnOnce() -> T) -> T {
    let _lock = lock();
    name()
}

/// Calls `print`, which prints the failure with which the command ends, unless a signal has ended
/// it before. A later signal prints nothing more and does not change the exit code: a launcher
/// sends SIGTERM to the processes of a job as soon as one of them has ended with an error.
pub(crate) fn report(code: u8, print: impl FnOnce()) {
    let _lock = lock();
    print();
    REPORTED.get_or_init(|| code);
}

/// Removes all temporary files and exits.
pub(crate) fn exit(code: i32) -> ! {
    let all = lock();
    remove(&all);
    std::process::exit(code)
}

fn remove(temporary: &[PathBuf]) {
    for path in temporary {
        // one that is missing has its final name, or was removed
        drop(if path.is_dir() {
            std::fs::remove_dir_all(path)
        } else {
            std::fs::remove_file(path)
        });
    }
}

/// Installs the handlers of signals.
pub(crate) fn watch() {
    let ignored = ignored_mask(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    let watched: Vec<i32> = [SIGHUP, SIGINT, SIGTERM]
        .into_iter()
        .filter(|signal| ignored >> (signal - 1) & 1 == 0)
        .collect();
    let watching = Signals::new(watched).and_then(|mut signals| {
        thread::Builder::new()
            .name("signals".into())
            .spawn(move || signals.forever().next().map(|signal| end_by(signal)))
    });
    // with a handler installed, the write fails with "File too large"
    let limited = flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
    if let Err(error) = watching.map(drop).and(limited) {
        complain!("warning: cannot handle signals ({error}): they may leave a .partial file");
    }
}

/// Ends the command after a signal. The lock is held until the process ends, so no file gets its
/// final name meanwhile, and no error that a removed file causes is printed.
fn end_by(signal: i32) -> ! {
    let all = lock();
    remove(&all);
    end_progress();
    let reported = REPORTED.get().copied();
    if reported.is_none() && is_leader_output() {
        complain!("interrupted");
    }
    std::process::exit(reported.map_or(128 + signal, i32::from))
}

/// Parses the mask of ignored signals in `/proc/self/status` of Linux: bit n − 1 for signal n. 0 on
/// other systems, where only an unsafe system call returns it.
fn ignored_mask(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}
