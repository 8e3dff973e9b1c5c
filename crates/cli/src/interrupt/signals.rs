//! Handlers of the signals that end the command.

use std::{
    sync::{Arc, atomic::AtomicBool},
    thread,
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ},
    flag,
    iterator::Signals,
};

use super::{exit_from, state};
use crate::{
    launcher::is_leader_output,
    report::{complain, end_progress},
};

/// Installs the handlers of signals.
pub(crate) fn watch() {
    let ignored = ignored_signals();
    let watched: Vec<i32> =
        [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|&signal| !ignored(signal)).collect();
    let watching = Signals::new(watched).and_then(|mut signals| {
        thread::Builder::new().name("signals".into()).spawn(move || {
            if let Some(signal) = signals.forever().next() {
                end_by(signal);
            }
        })
    });
    if let Err(error) = watching {
        complain!(
            "warning: cannot handle signals ({error}); an interrupt may leave a .partial file"
        );
    }
    // with a handler installed, the write fails with "File too large"
    if let Err(error) = flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))) {
        complain!(
            "warning: cannot handle SIGXFSZ ({error}); a write past the file size limit ends the \
             command"
        );
    }
}

/// Ends the command after a signal with exit code 128 plus its number, as shells do; after a
/// failure that has been printed, with its code.
fn end_by(signal: i32) -> ! {
    // locked before the message is printed: no output gets its name after it
    let state = state();
    end_progress();
    if let Some(code) = state.reported {
        exit_from(&state, code.into());
    }
    if is_leader_output() {
        complain!("{}", state.after_interrupt());
    }
    exit_from(&state, 128 + signal)
}

/// Returns a predicate: true for a signal that is ignored since the start of this process. Only
/// [`watch`] changes the handling of signals, so the present state is that of the start.
///
/// Linux lists the ignored signals in `/proc/self/status`. On other systems only an unsafe system
/// call returns them, so none is treated as ignored.
fn ignored_signals() -> impl Fn(i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = ignored_mask(&status).unwrap_or_default();
    move |signal| (1..=64).contains(&signal) && mask >> (signal - 1) & 1 == 1
}

/// Parses the mask of ignored signals: bit n − 1 for signal n.
fn ignored_mask(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_parsed() {
        assert_eq!(
            ignored_mask("SigBlk:\t0000000000000001\nSigIgn:\t0000000000001003\n"),
            Some(0x1003)
        );
        assert_eq!(ignored_mask("Name:\tannulus\n"), None);
        // Rust's runtime ignores SIGPIPE
        #[cfg(target_os = "linux")]
        assert!(ignored_signals()(signal_hook::consts::SIGPIPE));
    }
}
