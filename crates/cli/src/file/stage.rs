//! A file before it has its name: it grows under no name, or a temporary one, and takes its
//! target's name when it is complete.
//!
//! ```text
//!  nameless  O_TMPFILE                    ends with the last process that has it open
//!            linkat(target)               the target is missing: one step
//!            linkat(temporary), rename    it is replaced: a link takes no name that is taken
//!  named     O_EXCL(temporary), rename    no nameless files here, or other nodes open it by name
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

/// Permissions of a new file, of which the system takes what the user's mask takes.
const NEW_MODE: u32 = 0o666;
/// Permissions of a file that will replace another, until it has that one's.
const PRIVATE_MODE: u32 = 0o600;

/// Kinds of temporary files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// Nameless where the file system has such files, else named.
    Best,
    /// Nameless.
    Nameless,
    /// Named, so that processes of other machines can open it.
    Named,
}

/// The state of a file before it has its name.
#[derive(Debug)]
enum Temporary {
    /// Under a temporary one.
    Named(Unfinished),
    /// Nowhere.
    Nameless,
    /// Nowhere, and the process that has made it will name it.
    Others,
}

/// A file on its way. Dropped before [`Staged::commit`], it leaves nothing behind.
#[derive(Debug)]
pub(super) struct Staged {
    /// The path as the user wrote it, for messages.
    named: PathBuf,
    folder: PathBuf,
    path: PathBuf,
    file: File,
    temporary: Temporary,
}

impl Staged {
    /// Makes the temporary file.
    ///
    /// # Errors
    /// As [`resolve`]; [`annulus_core::Error::Io`] if the target is no ordinary file or no file can
    /// be made in its folder.
    pub(super) fn create(named: &Path, manner: Manner) -> Result<Self> {
        match resolve(named)? {
            Target::File { folder, path, exists } => {
                Self::create_in(named, folder, path, exists, manner)
            }
            Target::Output => Err(io(
                named,
                "is standard output, want an ordinary file: this output is not written from front to back",
            )),
            Target::Error => Err(io(
                named,
                "is standard error, want an ordinary file: this output is not written from front to back",
            )),
            Target::Stream(what) => {
                Err(io(named, format!("{what}; this output is not written from front to back")))
            }
        }
    }

    /// As [`Staged::create`], for a target that has been resolved.
    pub(super) fn create_in(
        named: &Path,
        folder: PathBuf,
        path: PathBuf,
        exists: bool,
        manner: Manner,
    ) -> Result<Self> {
        let mode = if exists { PRIVATE_MODE } else { NEW_MODE };
        let make_named = || {
            Unfinished::create_in(&folder, mode)
                .map(|(unfinished, file)| (Temporary::Named(unfinished), file))
        };
        let make_nameless = || nameless(&folder, mode).map(|file| (Temporary::Nameless, file));
        let made = match manner {
            Manner::Nameless => make_nameless(),
            Manner::Named => make_named(),
            // if the folder is at fault the second attempt says so
            Manner::Best => make_nameless().or_else(|_| make_named()),
        };
        let (temporary, file) = made.map_err(|error| io(named, error))?;
        interrupt::begin_output();
        Ok(Self { named: named.to_owned(), folder, path, file, temporary })
    }

    /// Opens the temporary file that another process has made for the same target, by its
    /// [`Staged::handle`].
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`]: this process does not see it.
    pub(super) fn join(named: &Path, handle: &OsStr) -> Result<Self> {
        let Target::File { folder, path, .. } = resolve(named)? else {
            return Err(io(named, "is no ordinary file"));
        };
        // a handle that is an absolute path is of a file without a name
        let at = folder.join(handle);
        let opened = if Path::new(handle).is_absolute() {
            File::options().write(true).open(&at).map(|file| (Temporary::Others, file))
        } else {
            Unfinished::join(at.clone())
                .map(|(unfinished, file)| (Temporary::Named(unfinished), file))
        };
        let unseen = |error| {
            io(
                &at,
                format!(
                    "{error}: made by rank 0, and not seen here; the output must be on a file system of all ranks"
                ),
            )
        };
        let (temporary, file) = opened.map_err(unseen)?;
        interrupt::begin_output();
        Ok(Self { named: named.to_owned(), folder, path, file, temporary })
    }

    /// By what another process can open the file: its name in the target's folder, or, as long as
    /// this process lives, a path.
    pub(super) fn handle(&self) -> OsString {
        match &self.temporary {
            Temporary::Named(unfinished) => {
                unfinished.path().file_name().unwrap_or_default().to_owned()
            }
            Temporary::Nameless | Temporary::Others => {
                format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
            }
        }
    }

    /// The file itself.
    pub(super) const fn file(&self) -> &File {
        &self.file
    }

    /// The path as the user wrote it.
    pub(super) fn named(&self) -> &Path {
        &self.named
    }

    /// Gives the complete file its name, and where it replaces another, that one's permissions.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`]; then nothing is left.
    pub(super) fn commit(self) -> Result<()> {
        let named = self.named.clone();
        self.take_name().map_err(|error| io(&named, error))
    }

    fn take_name(self) -> std::io::Result<()> {
        let Self { folder, path, file, temporary, .. } = self;
        if matches!(temporary, Temporary::Others) {
            return Ok(());
        }
        let replaced = std::fs::symlink_metadata(&path).ok().filter(Metadata::is_file);
        if let Some(replaced) = &replaced {
            keep_permissions(&file, replaced)?;
        }
        match temporary {
            Temporary::Named(unfinished) => unfinished.rename_to(&path),
            Temporary::Nameless | Temporary::Others => {
                if replaced.is_none() {
                    match interrupt::commit(&path, || link(&file, &path)) {
                        // somebody has made it meanwhile
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

    /// Lets go of a file that another process has finished.
    pub(super) fn forget(self) {
        if let Temporary::Named(unfinished) = self.temporary {
            unfinished.forget();
        }
    }
}

/// Gives `file` the permissions of the file that it replaces, and its group and owner where the
/// system allows it. A group that it cannot have gets no more than everybody. What the file system
/// cannot do takes no finished work away: until it is done the file is its user's alone.
fn keep_permissions(file: &File, replaced: &Metadata) -> std::io::Result<()> {
    let own = file.metadata()?;
    let has_group = own.gid() == replaced.gid() || fchown(file, None, Some(replaced.gid())).is_ok();
    let mode = replaced.mode() & 0o777;
    let mode = if has_group { mode } else { mode & !0o070 | (mode & 0o007) << 3 & mode };
    drop(file.set_permissions(Permissions::from_mode(mode)));
    if own.uid() != replaced.uid() {
        // last: the new owner's file is not this user's to change. For the superuser alone
        drop(fchown(file, Some(replaced.uid()), None));
    }
    Ok(())
}

/// A file without a name in `folder` that can be given one.
#[cfg(target_os = "linux")]
fn nameless(folder: &Path, mode: u32) -> std::io::Result<File> {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    let file: File = openat(
        CWD,
        folder,
        OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::from_raw_mode(mode),
    )?
    .into();
    // without /proc it would never get a name, and that must not be found at the end of a job
    let (own, by_handle) = (file.metadata()?, std::fs::metadata(handle_of(&file))?);
    let same = (own.dev(), own.ino()) == (by_handle.dev(), by_handle.ino());
    if same { Ok(file) } else { Err(std::io::ErrorKind::Unsupported.into()) }
}

#[cfg(target_os = "linux")]
fn handle_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Gives a nameless file a name that is free.
#[cfg(target_os = "linux")]
fn link(file: &File, path: &Path) -> std::io::Result<()> {
    use rustix::fs::{AtFlags, CWD, linkat};
    Ok(linkat(CWD, handle_of(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

#[cfg(not(target_os = "linux"))]
fn nameless(_: &Path, _: u32) -> std::io::Result<File> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn link(_: &File, _: &Path) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new folder, with its path as the system has it.
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
    fn both_kinds_of_temporary_files_become_the_target_or_nothing() {
        let folder = folder("stage");
        let target = folder.join("o".repeat(255));
        for manner in [Manner::Best, Manner::Named, Manner::Nameless] {
            for mode in [None, Some(0o600), Some(0o751)] {
                if let Some(mode) = mode {
                    std::fs::write(&target, "old").unwrap();
                    std::fs::set_permissions(&target, Permissions::from_mode(mode)).unwrap();
                }
                let before = names(&folder);
                drop(Staged::create(&target, manner).unwrap());
                assert_eq!(names(&folder), before, "{manner:?} {mode:?}");
                let staged = Staged::create(&target, manner).unwrap();
                std::io::Write::write_all(&mut staged.file(), b"new").unwrap();
                staged.commit().unwrap();
                assert_eq!(names(&folder), ["o".repeat(255)], "{manner:?} {mode:?}");
                assert_eq!(std::fs::read(&target).unwrap(), b"new");
                let got = target.metadata().unwrap().mode() & 0o777;
                assert!(mode.is_none_or(|mode| got == mode), "{got:o} for {mode:?} by {manner:?}");
                std::fs::remove_file(&target).unwrap();
            }
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_target_that_appears_meanwhile_is_replaced() {
        let folder = folder("stage-race");
        let target = folder.join("out");
        for manner in [Manner::Best, Manner::Named] {
            let staged = Staged::create(&target, manner).unwrap();
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
