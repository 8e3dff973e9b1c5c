//! Files that have a temporary name in the folder of their target until they are complete.

use std::{
    ffi::OsStr,
    fs::{File, Metadata, Permissions},
    io::ErrorKind,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use annulus_core::Result;
use tempfile::{Builder, TempPath};

use super::not_regular;
use crate::{failure::io, interrupt};

/// Destination of an output.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FileTarget {
    /// Regular file: its path, without symbolic links if it exists.
    File(PathBuf),
    /// Standard output.
    Stdout,
    /// Pipe or device, with the error for outputs that need a regular file.
    Stream(String),
}

impl FileTarget {
    /// Resolves a path.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`] if the folder is missing, or the path names a folder, a
    /// symbolic link to a missing file, a file without write permission, or the regular file of a
    /// file descriptor.
    pub(super) fn of(named: &Path) -> Result<Self> {
        let failed = |error| io(named, error);
        if ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].map(Path::new).contains(&named) {
            return Ok(Self::Stdout);
        }
        let found = match std::fs::metadata(named) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Self::missing(named),
            found => found.map_err(failed)?,
        };
        if found.is_dir() {
            return Err(io(named, not_regular(found.file_type())));
        }
        if !found.is_file() {
            return Ok(Self::Stream(not_regular(found.file_type())));
        }
        // processes that have it open would keep the old file
        if ["/dev/fd", "/dev/stderr", "/proc"].iter().any(|folder| named.starts_with(folder)) {
            return Err(io(named, "is a file descriptor, want the path of the file"));
        }
        File::options().write(true).open(named).map_err(failed)?;
        std::fs::canonicalize(named).map(Self::File).map_err(failed)
    }

    /// Returns the target for a path at which nothing is.
    fn missing(named: &Path) -> Result<Self> {
        if named.is_symlink() {
            return Err(io(named, "is a symbolic link to a missing file"));
        }
        let is_folder = named.as_os_str().as_bytes().ends_with(b"/");
        let Some(name) = named.file_name().filter(|_| !is_folder) else {
            return Err(io(named, "names a folder, want a file"));
        };
        let folder = named.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = std::fs::canonicalize(folder.unwrap_or(Path::new(".")));
        Ok(Self::File(folder.map_err(|error| io(named, error))?.join(name)))
    }
}

/// Unfinished file. If it is dropped before [`StagedFile::commit`], or a signal ends the command,
/// the file is removed.
#[derive(Debug)]
pub(super) struct StagedFile {
    /// Path as the user wrote it, for messages.
    pub(super) named: PathBuf,
    target: PathBuf,
    pub(super) file: File,
    temporary: TempPath,
}

impl StagedFile {
    /// Creates the file.
    pub(super) fn create(named: &Path) -> Result<Self> {
        match FileTarget::of(named)? {
            FileTarget::File(target) => Self::create_for(named, target),
            FileTarget::Stdout => Err(io(named, "is standard output, want a regular file")),
            FileTarget::Stream(what) => Err(io(named, what)),
        }
    }

    /// As [`StagedFile::create`], for a regular file.
    pub(super) fn create_for(named: &Path, target: PathBuf) -> Result<Self> {
        // before the umask; private until it gets the permissions of the file that it replaces
        let mode = if target.exists() { 0o600 } else { 0o666 };
        let folder = target.parent().unwrap_or(Path::new("/"));
        let made = interrupt::temporary(|| {
            Builder::new()
                .prefix(".annulus-")
                .suffix(".partial")
                .permissions(Permissions::from_mode(mode))
                .tempfile_in(folder)
        });
        let (file, temporary) = made.map_err(|error| io(named, error))?.into_parts();
        Ok(Self { named: named.to_owned(), target, file, temporary })
    }

    /// Opens the file that another process has created for the same target under the temporary
    /// name `name`. Dropping the result removes the file too, in case that process was killed.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`] if this process cannot open it.
    pub(super) fn join(named: &Path, name: &OsStr) -> Result<Self> {
        let FileTarget::File(target) = FileTarget::of(named)? else {
            return Err(io(named, "is not a regular file"));
        };
        let at = target.with_file_name(name);
        let opened = interrupt::temporary(|| TempPath::try_from_path(&at))
            .and_then(|temporary| Ok((File::options().write(true).open(&at)?, temporary)));
        let shared = "rank 0 created this file; all ranks must name the same output, on a file \
                      system that they share";
        let (file, temporary) = opened.map_err(|error| io(&at, format!("{error}: {shared}")))?;
        Ok(Self { named: named.to_owned(), target, file, temporary })
    }

    /// Temporary name, by which another process opens the file.
    pub(super) fn name(&self) -> &OsStr {
        self.temporary.file_name().unwrap_or_default()
    }

    /// Gives the complete file its name, and the permissions of a file that it replaces.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`]; then no file is left.
    pub(super) fn commit(self) -> Result<()> {
        let Self { named, target, file, temporary } = self;
        if let Ok(replaced) = std::fs::metadata(&target) {
            keep_permissions(&file, &replaced);
        }
        interrupt::complete(|| temporary.persist(&target))
            .map_err(|failed| io(&named, &failed.error))
    }

    /// Releases a file that another process has completed.
    pub(super) fn release(mut self) {
        self.temporary.disable_cleanup(true);
    }
}

/// Gives `file` the permissions of the file that it replaces. Another group than that of the
/// replaced file gets none. Where the system does not allow it, the file stays private.
fn keep_permissions(file: &File, replaced: &Metadata) {
    let has_group = file.metadata().is_ok_and(|own| own.gid() == replaced.gid());
    let mode = replaced.mode() & if has_group { 0o777 } else { 0o707 };
    drop(file.set_permissions(Permissions::from_mode(mode)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staged_files_become_the_target_or_leave_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("o".repeat(255));
        for mode in [None, Some(0o600), Some(0o751)] {
            if let Some(mode) = mode {
                std::fs::write(&target, "old").unwrap();
                std::fs::set_permissions(&target, Permissions::from_mode(mode)).unwrap();
            }
            let files = || std::fs::read_dir(&folder).unwrap().count();
            let before = files();
            drop(StagedFile::create(&target).unwrap());
            assert_eq!(files(), before, "{mode:?}");
            let staged = StagedFile::create(&target).unwrap();
            let mut joined = StagedFile::join(&target, staged.name()).unwrap();
            std::io::Write::write_all(&mut joined.file, b"new").unwrap();
            staged.commit().unwrap();
            joined.release();
            assert_eq!(files(), 1, "{mode:?}");
            assert_eq!(std::fs::read(&target).unwrap(), b"new");
            let got = target.metadata().unwrap().mode() & 0o777;
            assert!(mode.is_none_or(|mode| got == mode), "{got:o}, {mode:?}");
            std::fs::remove_file(&target).unwrap();
        }
    }

    #[test]
    fn a_process_that_joined_removes_the_file_of_one_that_was_killed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        let staged = StagedFile::create(&target).unwrap();
        let joined = StagedFile::join(&target, staged.name()).unwrap();
        staged.release();
        drop(joined);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    }
}
