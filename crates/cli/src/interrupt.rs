//! Files and folders that must not outlive the command, and what becomes of them when it is interrupted: they are removed.

use std::{
    fs::{File, OpenOptions},
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use annulus_core::Result;

use crate::{failure::io, launcher::speaks, report::complain};

/// Exit code after an interrupt, as shells have it: 128 + SIGINT.
const INTERRUPTED: i32 = 130;

static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// The temporary name of a file that is being written. Dropping it removes the file; so does an interrupt.
#[derive(Debug)]
pub(crate) struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    /// Makes an empty file beside `target`, of a name that no other file has (one may be left by a killed process of the same number).
    pub(crate) fn create_beside(target: &Path) -> std::io::Result<(Self, File)> {
        Self::name_beside(target, |path| OpenOptions::new().write(true).create_new(true).open(path))
    }

    /// Finds such a name, under which `make` puts something.
    ///
    /// # Errors
    /// Those of `make`, which is asked again if it finds the name taken.
    pub(crate) fn name_beside<T>(target: &Path, make: impl Fn(&Path) -> std::io::Result<T>) -> std::io::Result<(Self, T)> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        // made and remembered under one lock: an interrupt comes before both or after both
        let mut names = names();
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = target.with_file_name(format!(".{name}.{}-{count}.partial", std::process::id()));
            match make(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                made => {
                    let made = made?;
                    names.push(path.clone());
                    return Ok((Self { path }, made));
                }
            }
        }
    }

    /// Takes the file `path`, which another process has made, for one of this process's own: dropping it removes the file here too, so
    /// that it goes even if the one that made it cannot remove it any more.
    pub(crate) fn join(path: PathBuf) -> std::io::Result<(Self, File)> {
        let mut names = names();
        let file = OpenOptions::new().write(true).open(&path)?;
        names.push(path.clone());
        Ok((Self { path }, file))
    }

    /// The temporary name.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Lets go of a file that another process has given its final name.
    pub(crate) fn forget(self) {
        names().retain(|name| *name != self.path);
    }

    /// Gives the file its final name. An interrupt comes before it or after it, never in between.
    pub(crate) fn rename_to(self, target: &Path) -> std::io::Result<()> {
        let mut names = names();
        std::fs::rename(&self.path, target)?;
        names.retain(|name| *name != self.path);
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let mut names = names();
        if let Some(place) = names.iter().position(|name| *name == self.path) {
            names.swap_remove(place);
            remove(&self.path);
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
        let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        let mut names = names();
        // not if it exists: it would be somebody else's
        std::fs::create_dir(&path).map_err(|error| io(&path, error))?;
        names.push(path.clone());
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
            let mut names = names();
            names.retain(|name| *name != self.path);
            remove(&self.path);
        }
    }
}

/// Removes what is unfinished and ends the process.
pub(crate) fn leave(code: i32) -> ! {
    // held to the end: a rename that waits for it never happens
    let names = names();
    names.iter().for_each(|name| remove(name));
    std::process::exit(code)
}

/// From now on an interrupt (Ctrl-C, SIGTERM, SIGHUP) removes what is unfinished and ends the command.
pub(crate) fn remove_unfinished_on_interrupt() {
    let handler = || {
        if speaks() {
            complain!("interrupted; no output was written");
        }
        leave(INTERRUPTED);
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        complain!("cannot watch for interrupts ({error}); an interrupt may leave a .partial file");
    }
}

fn names() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Somebody may have removed it before; if it cannot be removed there is nobody left to tell but the user.
fn remove(path: &Path) {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            complain!("cannot remove {}: {error}", path.display());
        }
        _ => {}
    }
}
