//! Signals, and the temporary files and folders that a signal removes before it ends the command.
//!
//! SIGHUP, SIGINT and SIGTERM end the command with exit code 128 plus their number. A signal that
//! was ignored when the command started (`nohup`, `trap "" INT`) stays ignored. SIGXFSZ does not
//! end the command: a write past the limit of file sizes returns an error instead.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use annulus_core::Result;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ},
    flag,
    iterator::Signals,
};

use crate::{
    failure::io,
    launcher::is_leader_output,
    message,
    report::{complain, end_progress},
};

static STATE: Mutex<State> =
    Mutex::new(State { leftovers: Vec::new(), begun: false, written: Vec::new() });

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

/// Temporary name of a file. Dropping it, or an interrupt, removes the file.
#[derive(Debug)]
pub(crate) struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    /// Creates an empty file in `folder` under a new temporary name. `mode` has its permissions
    /// before the umask.
    ///
    /// # Errors
    /// The folder is missing or not writable.
    pub(crate) fn create_in(folder: &Path, mode: u32) -> std::io::Result<(Self, File)> {
        Self::name_in(folder, |path| {
            OpenOptions::new().write(true).create_new(true).mode(mode).open(path)
        })
    }

    /// Calls `make` with temporary names until one is free. They are short and independent of the
    /// output's name, which may have the maximum length of the file system.
    ///
    /// # Errors
    /// Those of `make`, except `AlreadyExists`, after which it is called with another name.
    pub(crate) fn name_in<T>(
        folder: &Path,
        make: impl Fn(&Path) -> std::io::Result<T>,
    ) -> std::io::Result<(Self, T)> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut state = state();
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            // a killed process with the same PID may have left this name
            let path = folder.join(format!(".annulus-{}-{count}.partial", std::process::id()));
            match make(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                made => {
                    let made = made?;
                    state.leftovers.push(Leftover::File(path.clone()));
                    return Ok((Self { path }, made));
                }
            }
        }
    }

    /// Opens the temporary file `path` of another process. Dropping the result removes the file
    /// too, in case the process that created it was killed.
    pub(crate) fn join(path: PathBuf) -> std::io::Result<(Self, File)> {
        let mut state = state();
        let file = OpenOptions::new().write(true).open(&path)?;
        state.leftovers.push(Leftover::File(path.clone()));
        Ok((Self { path }, file))
    }

    /// The temporary name.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Releases a file that another process has given its final name.
    pub(crate) fn forget(self) {
        state().forget(&Leftover::File(self.path.clone()));
    }

    /// Gives the file its final name. An interrupt is handled before the rename or after it.
    ///
    /// # Errors
    /// Those of the rename; then the file is removed.
    pub(crate) fn rename_to(self, target: &Path) -> std::io::Result<()> {
        let mut state = state();
        let renamed = std::fs::rename(&self.path, target);
        if renamed.is_ok() {
            state.forget(&Leftover::File(self.path.clone()));
            state.written.push(target.to_owned());
        }
        // `self` is dropped below and locks the state again
        drop(state);
        renamed
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let mut state = state();
        let file = Leftover::File(self.path.clone());
        if state.leftovers.contains(&file) {
            state.forget(&file);
            file.remove();
        }
    }
}

/// Folders that this command created for its outputs. Dropping it removes those that are empty.
#[derive(Debug)]
pub(crate) struct MadeFolders {
    made: Vec<PathBuf>,
}

impl MadeFolders {
    /// Creates `path` and its missing parent folders.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`] naming the folder.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let mut folders = Self { made: Vec::new() };
        let missing: Vec<&Path> = path
            .ancestors()
            .filter(|folder| !folder.as_os_str().is_empty())
            .take_while(|folder| !folder.exists())
            .collect();
        for folder in missing.into_iter().rev() {
            let mut state = state();
            match std::fs::create_dir(folder) {
                Ok(()) => {
                    state.leftovers.push(Leftover::EmptyFolder(folder.to_owned()));
                    folders.made.push(folder.to_owned());
                }
                // another rank has created it meanwhile
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    drop(state);
                    return Err(io(folder, error));
                }
            }
        }
        Ok(folders)
    }
}

impl Drop for MadeFolders {
    fn drop(&mut self) {
        let mut state = state();
        for folder in self.made.drain(..).rev() {
            let folder = Leftover::EmptyFolder(folder);
            state.forget(&folder);
            folder.remove();
        }
    }
}

/// Folder of the files of a demo: kept, or removed at the end.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    kept: bool,
}

impl Scratch {
    /// Creates a folder that is kept, or opens it.
    pub(crate) fn kept(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(|error| io(path, error))?;
        Ok(Self { path: path.to_owned(), kept: true })
    }

    /// Creates a temporary folder. Dropping it, or an interrupt, removes it.
    pub(crate) fn temporary(name: &str) -> Result<Self> {
        // canonical, as the paths of outputs are, so that outputs in it are recognised
        let temp = std::env::temp_dir();
        let temp = std::fs::canonicalize(&temp).map_err(|error| io(&temp, error))?;
        let path = temp.join(format!("{name}-{}", std::process::id()));
        let mut state = state();
        // an existing folder belongs to another process: an error
        std::fs::create_dir(&path).map_err(|error| io(&path, error))?;
        state.leftovers.push(Leftover::Folder(path.clone()));
        Ok(Self { path, kept: false })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.kept {
            let mut state = state();
            let folder = Leftover::Folder(self.path.clone());
            state.forget(&folder);
            folder.remove();
        }
    }
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

/// Ends the command after a signal with exit code 128 plus its number, as shells do.
fn end_by(signal: i32) -> ! {
    // locked before the message is printed: no output gets its name after it
    let state = state();
    end_progress();
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

    #[test]
    fn the_message_of_an_interrupt_lists_complete_outputs() {
        let path = |name: &str| PathBuf::from(name);
        let mut state = State { leftovers: Vec::new(), begun: false, written: Vec::new() };
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
