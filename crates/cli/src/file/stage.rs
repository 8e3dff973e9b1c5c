//! Staged output file: unnamed, or under a temporary name, until it is complete and gets the name
//! of its target.
//!
//! ```text
//!  unnamed  O_TMPFILE                   removed by the system with the last open descriptor
//!           linkat(target)              if the target is missing
//!           linkat(temporary), rename   to replace the target: linkat fails on an existing name
//!  named    O_EXCL(temporary), rename   without O_TMPFILE, or if other nodes open the file by name
//! ```

use std::{
    ffi::{OsStr, OsString},
    fs::{File, Metadata, Permissions},
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, PermissionsExt, fchown},
    },
    path::{Path, PathBuf},
};

use annulus_core::Result;

use super::target::{Target, resolve};
use crate::{
    failure::io,
    interrupt::{self, Unfinished},
};

/// Permissions of a new file, before the umask.
const NEW_MODE: u32 = 0o666;
/// Permissions of a file that replaces another, until it gets those of the other.
const PRIVATE_MODE: u32 = 0o600;

/// End of the errors for outputs that cannot be a stream.
const NOT_SEQUENTIAL: &str = ": this output is not written sequentially";

/// Kinds of staging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Staging {
    /// Unnamed if the file system supports it, else named.
    Best,
    /// Unnamed: no file is left even if the process is killed.
    Unnamed,
    /// Named, so that processes on other nodes can open it.
    Named,
}

/// Name of a staged file.
#[derive(Debug)]
enum Temporary {
    /// Temporary name.
    Named(Unfinished),
    /// None.
    Unnamed,
    /// None, in another process, which will name the file.
    OfOther,
}

/// Staged file. If it is dropped before [`Staged::commit`], no file is left.
#[derive(Debug)]
pub(super) struct Staged {
    /// Path as the user wrote it, for messages.
    named: PathBuf,
    /// Folder of the target.
    folder: PathBuf,
    /// The target.
    path: PathBuf,
    file: File,
    temporary: Temporary,
}

impl Staged {
    /// Creates the staged file.
    ///
    /// # Errors
    /// As [`resolve`]; [`annulus_core::Error::Io`] if the target is not a regular file, or no file
    /// can be created in its folder.
    pub(super) fn create(named: &Path, staging: Staging) -> Result<Self> {
        match resolve(named)? {
            Target::File { folder, path, exists } => {
                Self::create_in(named, folder, path, exists, staging)
            }
            Target::Stdout => {
                Err(io(named, format!("is standard output, want a regular file{NOT_SEQUENTIAL}")))
            }
            Target::Stderr => {
                Err(io(named, format!("is standard error, want a regular file{NOT_SEQUENTIAL}")))
            }
            Target::Stream(what) => Err(io(named, format!("{what}{NOT_SEQUENTIAL}"))),
        }
    }

    /// As [`Staged::create`], for a resolved target.
    pub(super) fn create_in(
        named: &Path,
        folder: PathBuf,
        path: PathBuf,
        exists: bool,
        staging: Staging,
    ) -> Result<Self> {
        let mode = if exists { PRIVATE_MODE } else { NEW_MODE };
        let create_named = || {
            Unfinished::create_in(&folder, mode)
                .map(|(unfinished, file)| (Temporary::Named(unfinished), file))
        };
        let create_unnamed = || unnamed(&folder, mode).map(|file| (Temporary::Unnamed, file));
        let created = match staging {
            Staging::Unnamed => create_unnamed(),
            Staging::Named => create_named(),
            // an error of the folder is returned by the second attempt
            Staging::Best => create_unnamed().or_else(|_| create_named()),
        };
        let (temporary, file) = created.map_err(|error| io(named, error))?;
        interrupt::begin_output();
        Ok(Self { named: named.to_owned(), folder, path, file, temporary })
    }

    /// Opens the staged file of another process for the same target by its [`Staged::handle`].
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`] if this process cannot open it.
    pub(super) fn join(named: &Path, handle: &OsStr) -> Result<Self> {
        let Target::File { folder, path, .. } = resolve(named)? else {
            return Err(io(named, "is not a regular file"));
        };
        // the handle of an unnamed file is an absolute path, which `join` returns unchanged
        let at = folder.join(handle);
        let opened = if Path::new(handle).is_absolute() {
            File::options().write(true).open(&at).map(|file| (Temporary::OfOther, file))
        } else {
            Unfinished::join(at.clone())
                .map(|(unfinished, file)| (Temporary::Named(unfinished), file))
        };
        let cannot_open = |error| {
            io(
                &at,
                format!(
                    "{error}: rank 0 created this file; the output must be on a file system shared \
                     by all ranks"
                ),
            )
        };
        let (temporary, file) = opened.map_err(cannot_open)?;
        interrupt::begin_output();
        Ok(Self { named: named.to_owned(), folder, path, file, temporary })
    }

    /// Returns the handle by which another process can open the file: its name in the target's
    /// folder, or a path that is valid while this process runs.
    pub(super) fn handle(&self) -> OsString {
        match &self.temporary {
            Temporary::Named(unfinished) => {
                unfinished.path().file_name().unwrap_or_default().to_owned()
            }
            Temporary::Unnamed | Temporary::OfOther => {
                format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
            }
        }
    }

    /// The open file.
    pub(super) const fn file(&self) -> &File {
        &self.file
    }

    /// Path as the user wrote it.
    pub(super) fn named(&self) -> &Path {
        &self.named
    }

    /// Gives the complete file its name, and the permissions of a file that it replaces.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`]; then no file is left.
    pub(super) fn commit(self) -> Result<()> {
        let named = self.named.clone();
        self.take_name().map_err(|error| io(&named, error))
    }

    fn take_name(self) -> std::io::Result<()> {
        let Self { folder, path, file, temporary, .. } = self;
        if matches!(temporary, Temporary::OfOther) {
            return Ok(());
        }
        let replaced = std::fs::symlink_metadata(&path).ok().filter(Metadata::is_file);
        if let Some(replaced) = &replaced {
            keep_permissions(&file, replaced)?;
        }
        match temporary {
            Temporary::Named(unfinished) => unfinished.rename_to(&path),
            Temporary::Unnamed | Temporary::OfOther => {
                if replaced.is_none() {
                    match interrupt::commit(&path, || link(&file, &path)) {
                        // created by another process meanwhile: replace it below
                        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                        named => return named,
                    }
                }
                let (unfinished, ()) =
                    Unfinished::name_in(&folder, |temporary| link(&file, temporary))?;
                unfinished.rename_to(&path)
            }
        }
    }

    /// Releases a file that another process has completed.
    pub(super) fn forget(self) {
        if let Temporary::Named(unfinished) = self.temporary {
            unfinished.forget();
        }
    }
}

/// Gives `file` the permissions of the file that it replaces, and its group and owner where the
/// system allows that. If the group cannot be kept, the new group gets no more than others have.
/// Errors of `chmod` and `chown` are ignored: the file then stays private to its user.
fn keep_permissions(file: &File, replaced: &Metadata) -> std::io::Result<()> {
    let own = file.metadata()?;
    let has_group = own.gid() == replaced.gid() || fchown(file, None, Some(replaced.gid())).is_ok();
    let mode = replaced.mode() & 0o777;
    let mode = if has_group { mode } else { mode & !0o070 | (mode & 0o007) << 3 & mode };
    drop(file.set_permissions(Permissions::from_mode(mode)));
    if own.uid() != replaced.uid() {
        // last, because only the owner may change permissions; allowed for the superuser only
        drop(fchown(file, Some(replaced.uid()), None));
    }
    Ok(())
}

/// Creates an unnamed file in the file system of `folder` that can be linked later.
#[cfg(target_os = "linux")]
fn unnamed(folder: &Path, mode: u32) -> std::io::Result<File> {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    let file: File = openat(
        CWD,
        folder,
        OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::from_raw_mode(mode),
    )?
    .into();
    // linking needs /proc: checked now rather than at the end of a run
    let own = file.metadata()?;
    let by_handle = std::fs::metadata(handle_of(&file))?;
    let same = (own.dev(), own.ino()) == (by_handle.dev(), by_handle.ino());
    if same { Ok(file) } else { Err(std::io::ErrorKind::Unsupported.into()) }
}

#[cfg(target_os = "linux")]
fn handle_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Gives an unnamed file a name; fails if the name exists.
#[cfg(target_os = "linux")]
fn link(file: &File, path: &Path) -> std::io::Result<()> {
    use rustix::fs::{AtFlags, CWD, linkat};
    Ok(linkat(CWD, handle_of(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

#[cfg(not(target_os = "linux"))]
fn unnamed(_: &Path, _: u32) -> std::io::Result<File> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn link(_: &File, _: &Path) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a new folder and returns its canonical path.
    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("annulus-{name}-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&path));
        std::fs::create_dir(&path).unwrap();
        std::fs::canonicalize(path).unwrap()
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn staged_files_become_the_target_or_leave_nothing() {
        let folder = folder("stage");
        let target = folder.join("o".repeat(255));
        for staging in [Staging::Best, Staging::Named, Staging::Unnamed] {
            for mode in [None, Some(0o600), Some(0o751)] {
                if let Some(mode) = mode {
                    std::fs::write(&target, "old").unwrap();
                    std::fs::set_permissions(&target, Permissions::from_mode(mode)).unwrap();
                }
                let before = names(&folder);
                drop(Staged::create(&target, staging).unwrap());
                assert_eq!(names(&folder), before, "{staging:?} {mode:?}");
                let staged = Staged::create(&target, staging).unwrap();
                std::io::Write::write_all(&mut staged.file(), b"new").unwrap();
                staged.commit().unwrap();
                assert_eq!(names(&folder), ["o".repeat(255)], "{staging:?} {mode:?}");
                assert_eq!(std::fs::read(&target).unwrap(), b"new");
                let got = target.metadata().unwrap().mode() & 0o777;
                assert!(mode.is_none_or(|mode| got == mode), "{got:o}, {mode:?} {staging:?}");
                std::fs::remove_file(&target).unwrap();
            }
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_target_that_appears_meanwhile_is_replaced() {
        let folder = folder("stage-race");
        let target = folder.join("out");
        for staging in [Staging::Best, Staging::Named] {
            let staged = Staged::create(&target, staging).unwrap();
            std::fs::write(&target, "another's").unwrap();
            staged.commit().unwrap();
            assert_eq!(
                (names(&folder), std::fs::read(&target).unwrap()),
                (vec!["out".to_owned()], Vec::new())
            );
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
