//! Temporary files and folders that are removed when they are dropped, or by an interrupt.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use annulus_core::Result;

use super::{Leftover, state};
use crate::failure::io;

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
