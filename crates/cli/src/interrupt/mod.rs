//! Signals, and the temporary files and folders that a signal removes before it ends the command.
//!
//! SIGHUP, SIGINT and SIGTERM end the command with exit code 128 plus their number. A signal that
//! was ignored when the command started (`nohup`, `trap "" INT`) stays ignored. SIGXFSZ does not
//! end the command: a write past the limit of file sizes returns an error instead.

mod files;
mod signals;

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{message, report::complain};
pub(crate) use files::{MadeFolders, Scratch, Unfinished};
pub(crate) use signals::watch;

static STATE: Mutex<State> =
    Mutex::new(State { leftovers: Vec::new(), begun: false, written: Vec::new(), reported: None });

/// Files and folders that the command has on disk. A change of one of them holds the lock until the
/// disk has changed too, so a signal is handled before both changes or after both.
#[derive(Debug)]
struct State {
    /// Temporary files and folders; they are removed in reverse order.
    leftovers: Vec<Leftover>,
    /// True once an output was created.
    begun: bool,
    /// Complete outputs.
    written: Vec<PathBuf>,
    /// Exit code of a failure that has been printed.
    reported: Option<u8>,
}

/// Temporary file or folder, removed unless it is completed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Leftover {
    /// A file.
    File(PathBuf),
    /// A folder and its content.
    Folder(PathBuf),
    /// A folder, removed only if it is empty.
    EmptyFolder(PathBuf),
}

impl Leftover {
    /// Removes it, and prints an error if that fails. A missing file is no error.
    fn remove(&self) {
        let (path, removed) = match self {
            Self::File(path) => (path, std::fs::remove_file(path)),
            Self::Folder(path) => (path, std::fs::remove_dir_all(path)),
            // it is not empty: the files in it are not of this command
            Self::EmptyFolder(path) => (path, std::fs::remove_dir(path).or(Ok(()))),
        };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                complain!("cannot remove {}: {error}", message::path(path));
            }
            _ => {}
        }
    }
}

impl State {
    fn forget(&mut self, leftover: &Leftover) {
        self.leftovers.retain(|other| other != leftover);
    }

    /// Formats the message of an interrupt: the outputs that were complete before it.
    fn after_interrupt(&self) -> String {
        let is_removed = |path: &&PathBuf| {
            self.leftovers.iter().any(
                |leftover| matches!(leftover, Leftover::Folder(folder) if path.starts_with(folder)),
            )
        };
        let written: Vec<String> = self
            .written
            .iter()
            .filter(|path| !is_removed(path))
            .map(|path| message::path(path))
            .collect();
        match (written.is_empty(), self.begun) {
            (false, _) => format!(
                "interrupted; written before that: {}",
                message::list(written.iter().map(String::as_str))
            ),
            (true, true) => "interrupted; no output was written".to_owned(),
            (true, false) => "interrupted".to_owned(),
        }
    }
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records that an output was created, so that the message of an interrupt mentions outputs.
pub(crate) fn begin_output() {
    state().begun = true;
}

/// Gives an output its final name by calling `name`. An interrupt is handled before that call or
/// after it.
///
/// # Errors
/// Those of `name`.
pub(crate) fn commit<T>(
    output: &Path,
    name: impl FnOnce() -> std::io::Result<T>,
) -> std::io::Result<T> {
    let mut state = state();
    let named = name()?;
    state.written.push(output.to_owned());
    Ok(named)
}

/// Records that the failure with which the command ends has been printed. A signal then prints
/// nothing more and does not change the exit code: a launcher sends SIGTERM to the processes of a
/// job as soon as one of them has ended with an error.
pub(crate) fn set_reported(code: u8) {
    state().reported = Some(code);
}

/// Removes all temporary files and exits.
pub(crate) fn exit(code: i32) -> ! {
    exit_from(&state(), code)
}

/// As [`exit`]. The lock on `state` is held until the process ends, so a rename that waits for it
/// never happens.
fn exit_from(state: &State, code: i32) -> ! {
    state.leftovers.iter().rev().for_each(Leftover::remove);
    std::process::exit(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_an_interrupt_lists_complete_outputs() {
        let path = |name: &str| PathBuf::from(name);
        let mut state =
            State { leftovers: Vec::new(), begun: false, written: Vec::new(), reported: None };
        assert_eq!(state.after_interrupt(), "interrupted");
        state.begun = true;
        assert_eq!(state.after_interrupt(), "interrupted; no output was written");
        state.written.push(path("/tmp/demo/in.st"));
        state.leftovers.push(Leftover::Folder(path("/tmp/demo")));
        assert_eq!(state.after_interrupt(), "interrupted; no output was written");
        state.written.push(path("/data/out\u{1b}.st"));
        assert_eq!(
            state.after_interrupt(),
            r"interrupted; written before that: /data/out\u{1b}.st"
        );
    }
}
