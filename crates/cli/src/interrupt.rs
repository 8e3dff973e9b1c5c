//! Signals, and what must not outlive the command: temporary files and folders, which a signal that
//! ends the command removes.
//!
//! SIGHUP, SIGINT and SIGTERM end the command with 128 and their number, unless whoever started it
//! had them ignored (`nohup`, `trap "" INT`): such a signal stays ignored. SIGXFSZ ends nothing: a
//! write past the limit of file sizes is an error like any other.

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
    launcher::speaks,
    message,
    report::{complain, end_progress},
};

static STATE: Mutex<State> =
    Mutex::new(State { leftovers: Vec::new(), begun: false, written: Vec::new() });

/// Everything that the command has on the disk at this moment. A change holds the lock until the
/// disk has changed too, so that a signal comes before both or after both.
#[derive(Debug)]
struct State {
    /// To be removed, the last one first.
    leftovers: Vec<Leftover>,
    /// An output was begun.
    begun: bool,
    /// Outputs that have their names.
    written: Vec<PathBuf>,
}

/// Something that is removed unless it is finished.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Leftover {
    /// A file.
    File(PathBuf),
    /// A folder with all that is in it.
    Folder(PathBuf),
    /// A folder, if there is nothing in it.
    EmptyFolder(PathBuf),
}

impl Leftover {
    /// Removes it. Somebody may have removed it before; if it cannot be removed the user is told.
    fn remove(&self) {
        let (path, removed) = match self {
            Self::File(path) => (path, std::fs::remove_file(path)),
            Self::Folder(path) => (path, std::fs::remove_dir_all(path)),
            // somebody else's files are in it
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

    /// Says what an interrupt has done, which is true whenever the signal came.
    fn after_interrupt(&self) -> String {
        let goes = |path: &&PathBuf| {
            self.leftovers.iter().any(
                |leftover| matches!(leftover, Leftover::Folder(folder) if path.starts_with(folder)),
            )
        };
        let written: Vec<String> = self
            .written
            .iter()
            .filter(|path| !goes(path))
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

/// From now on an interrupt of this command has the words for one whose output is not written yet.
pub(crate) fn begin_output() {
    state().begun = true;
}

/// Gives an output its name by `name`, which happens before an interrupt or not at all.
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

/// The temporary name of a file. Dropping it removes the file; so does an interrupt.
#[derive(Debug)]
pub(crate) struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    /// Makes an empty file in `folder`, of a name that no other file has. `mode` are its
    /// permissions before the user's mask.
    ///
    /// # Errors
    /// The folder is missing or not writable.
    pub(crate) fn create_in(folder: &Path, mode: u32) -> std::io::Result<(Self, File)> {
        Self::name_in(folder, |path| {
            OpenOptions::new().write(true).create_new(true).mode(mode).open(path)
        })
    }

    /// Finds such a name, under which `make` puts something. It is short whatever the output is
    /// called, so that an output may have the longest name that its file system takes.
    ///
    /// # Errors
    /// Those of `make`, which is called again with another name if it finds the name taken.
    pub(crate) fn name_in<T>(
        folder: &Path,
        make: impl Fn(&Path) -> std::io::Result<T>,
    ) -> std::io::Result<(Self, T)> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut state = state();
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            // one may be left by a killed process of the same number
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

    /// Takes the file `path`, which another process has made, for one of this process's own: dropping it removes the file here too, so
    /// that it goes even if the one that made it cannot remove it any more.
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

    /// Lets go of a file that another process has given its final name.
    pub(crate) fn forget(self) {
        state().forget(&Leftover::File(self.path.clone()));
    }

    /// Gives the file its final name. An interrupt comes before it or after it, never in between.
    ///
    /// # Errors
    /// Those of the system; then the file is removed.
    pub(crate) fn rename_to(self, target: &Path) -> std::io::Result<()> {
        let mut state = state();
        let renamed = std::fs::rename(&self.path, target);
        if renamed.is_ok() {
            state.forget(&Leftover::File(self.path.clone()));
            state.written.push(target.to_owned());
        }
        // dropping this takes the lock again
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

/// Folders that were made for files which may never come: those that are empty in the end are
/// removed.
#[derive(Debug)]
pub(crate) struct MadeFolders {
    made: Vec<PathBuf>,
}

impl MadeFolders {
    /// Makes `path` and the folders that it is in, where they are missing.
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
                // by another rank in this moment
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

/// A folder for files that somebody may or may not want to keep.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    kept: bool,
}

impl Scratch {
    /// A folder that stays, made if it is not there.
    pub(crate) fn kept(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(|error| io(path, error))?;
        Ok(Self { path: path.to_owned(), kept: true })
    }

    /// A new folder of this process that goes with the value, or with an interrupt.
    pub(crate) fn temporary(name: &str) -> Result<Self> {
        // as outputs are named, so that what is written into it is known to be in it
        let temp = std::env::temp_dir();
        let temp = std::fs::canonicalize(&temp).map_err(|error| io(&temp, error))?;
        let path = temp.join(format!("{name}-{}", std::process::id()));
        let mut state = state();
        // not if it exists: it would be somebody else's
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

/// Removes what is unfinished and ends the process.
pub(crate) fn leave(code: i32) -> ! {
    leave_from(&state(), code)
}

/// As [`leave`]. The lock is held to the end: a rename that waits for it never happens.
fn leave_from(state: &State, code: i32) -> ! {
    state.leftovers.iter().rev().for_each(Leftover::remove);
    std::process::exit(code)
}

/// From now on a signal that ends the command removes what is unfinished first.
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
        complain!("warning: cannot watch for interrupts ({error}); one may leave a .partial file");
    }
    // the write that caused it fails with "File too large"
    if let Err(error) = flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))) {
        complain!(
            "warning: cannot watch for SIGXFSZ ({error}); a limit of file sizes ends the command"
        );
    }
}

/// Ends the command by a signal, as shells have it: with 128 and its number.
fn end_by(signal: i32) -> ! {
    // first the lock: after these words no output gets its name
    let state = state();
    end_progress();
    if speaks() {
        complain!("{}", state.after_interrupt());
    }
    leave_from(&state, 128 + signal)
}

/// The signals that were ignored when this process began, and still are: nothing but [`watch`]
/// changes them.
///
/// Linux lists them in `/proc/self/status`. Elsewhere a system call reads them, for which this
/// program has no safe function: there none counts as ignored.
fn ignored_signals() -> impl Fn(i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = ignored_mask(&status).unwrap_or_default();
    move |signal| (1..=64).contains(&signal) && mask >> (signal - 1) & 1 == 1
}

/// The mask of ignored signals: bit n − 1 for signal n.
fn ignored_mask(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        assert_eq!(
            ignored_mask("SigBlk:\t0000000000000001\nSigIgn:\t0000000000001003\n"),
            Some(0x1003)
        );
        assert_eq!(ignored_mask("Name:\tannulus\n"), None);
        // the runtime of every Rust program has SIGPIPE ignored
        #[cfg(target_os = "linux")]
        assert!(ignored_signals()(signal_hook::consts::SIGPIPE));
    }

    #[test]
    fn what_is_said_of_an_interrupt_is_never_false() {
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
