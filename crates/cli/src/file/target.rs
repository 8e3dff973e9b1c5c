//! The place that an output's path stands for: an ordinary file, or something that text is written
//! into as a stream.

use std::{
    ffi::OsStr,
    fs::{Metadata, OpenOptions},
    os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            fs::{MetadataExt, OpenOptionsExt},
        },
    },
    path::{Component, Path, PathBuf},
};

use annulus_core::Result;
use rustix::fs::OFlags;

use super::regular::not_ordinary;
use crate::failure::io;

/// The most links that are followed, as Linux has it.
const MOST_LINKS: usize = 40;
/// The bit of a folder in which only a file's owner may replace it.
const STICKY: u32 = 0o1000;

/// The end of a path whose links have been followed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// An ordinary file: its folder and its own path, neither of them a link; whether it is there
    /// already.
    File { folder: PathBuf, path: PathBuf, exists: bool },
    /// Standard output.
    Output,
    /// Standard error.
    Error,
    /// A pipe or a device, and what is wrong with it where an ordinary file is wanted.
    Stream(String),
}

/// Finds the place. Links are followed, so that a link stays a link, and one to a missing file
/// makes that file.
///
/// # Errors
/// [`annulus_core::Error::Io`]: the folder is missing, the path names a folder, the links lead
/// nowhere, the file may not be written or replaced, or it is where standard output or standard
/// error goes.
pub(super) fn resolve(named: &Path) -> Result<Target> {
    let failed = |error| io(named, error);
    let mut path = named.to_owned();
    for _ in 0..=MOST_LINKS {
        let Some(name) = path
            .file_name()
            .filter(|_| !path.as_os_str().as_bytes().ends_with(b"/"))
            .map(OsStr::to_owned)
        else {
            let kind = std::fs::metadata(&path).map(|metadata| metadata.file_type());
            return Err(io(
                named,
                kind.map_or_else(|_| "names a folder, want a file".to_owned(), not_ordinary),
            ));
        };
        let folder = std::fs::canonicalize(folder_of(&path)).map_err(failed)?;
        path = folder.join(&name);
        if is_of_descriptors(&folder) {
            return of_descriptor(named, &path);
        }
        match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Target::File { folder, path, exists: false });
            }
            Err(error) => return Err(failed(error)),
            Ok(metadata) if metadata.is_symlink() => {
                path = folder.join(std::fs::read_link(&path).map_err(failed)?)
            }
            Ok(metadata) if metadata.is_file() => {
                replaceable(named, &folder, &path, &metadata)?;
                return Ok(Target::File { folder, path, exists: true });
            }
            Ok(metadata) if metadata.is_dir() => {
                return Err(io(named, not_ordinary(metadata.file_type())));
            }
            Ok(metadata) => return Ok(Target::Stream(not_ordinary(metadata.file_type()))),
        }
    }
    Err(io(named, format!("is a link that leads to links, more than {MOST_LINKS} of them")))
}

/// The folder that a file is, or will be, in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// True of folders whose entries are open files of a process: `/dev/fd`, `/proc/PID/fd`,
/// `/proc/PID/task/TID/fd`.
fn is_of_descriptors(folder: &Path) -> bool {
    let mut parts = folder.components();
    folder == Path::new("/dev/fd")
        || (parts.next() == Some(Component::RootDir)
            && parts.next() == Some(Component::Normal(OsStr::new("proc")))
            && parts.next_back() == Some(Component::Normal(OsStr::new("fd"))))
}

/// An open file by its number. It is never replaced: whoever has it open would go on with the old
/// one.
fn of_descriptor(named: &Path, path: &Path) -> Result<Target> {
    let own =
        [Path::new("/dev/fd"), &Path::new("/proc").join(std::process::id().to_string()).join("fd")]
            .contains(&folder_of(path));
    match path.file_name().and_then(OsStr::to_str).filter(|_| own) {
        Some("1") => return Ok(Target::Output),
        Some("2") => return Ok(Target::Error),
        _ => {}
    }
    let metadata = std::fs::metadata(path).map_err(|error| io(named, error))?;
    if metadata.is_file() {
        return Err(io(named, "is a file that a process has open, want a path of the file itself"));
    }
    if metadata.is_dir() {
        Err(io(named, not_ordinary(metadata.file_type())))
    } else {
        Ok(Target::Stream(not_ordinary(metadata.file_type())))
    }
}

/// Refuses a file that may not be written, as every program that writes into it would, and one that
/// cannot be replaced in the end.
fn replaceable(named: &Path, folder: &Path, path: &Path, metadata: &Metadata) -> Result<()> {
    let same = |stat: rustix::io::Result<rustix::fs::Stat>| {
        stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (metadata.dev(), metadata.ino()))
    };
    for (stream, stat) in [
        ("output", rustix::fs::fstat(std::io::stdout().as_fd())),
        ("error", rustix::fs::fstat(std::io::stderr().as_fd())),
    ] {
        if same(stat) {
            return Err(io(named, format!("is where standard {stream} goes, want another file")));
        }
    }
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    OpenOptions::new()
        .write(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| io(named, error))?;
    let of_folder = std::fs::metadata(folder).map_err(|error| io(named, error))?;
    let user = rustix::process::geteuid().as_raw();
    if of_folder.mode() & STICKY != 0 && ![0, metadata.uid(), of_folder.uid()].contains(&user) {
        let what = format!(
            "belongs to user {}, who alone may replace it in {}",
            metadata.uid(),
            crate::message::path(folder)
        );
        return Err(io(named, what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_are_known_by_their_folders() {
        for folder in ["/dev/fd", "/proc/7/fd", "/proc/7/task/8/fd"] {
            assert!(is_of_descriptors(Path::new(folder)), "{folder}");
        }
        for folder in ["/dev", "/data/proc/7/fd", "/proc/7", "proc/7/fd"] {
            assert!(!is_of_descriptors(Path::new(folder)), "{folder}");
        }
    }
}
