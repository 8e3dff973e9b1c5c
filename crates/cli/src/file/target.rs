//! Resolves the path of an output to a regular file or a stream.

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

use super::regular::not_regular;
use crate::failure::io;

/// The most symbolic links that are followed: Linux's limit.
const MOST_LINKS: usize = 40;
/// Mode bit of a folder in which only the owner of a file may replace it.
const STICKY: u32 = 0o1000;

/// Target of a path after its symbolic links.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// Regular file: its folder and its path, without symbolic links. `exists` is true for an
    /// existing file.
    File { folder: PathBuf, path: PathBuf, exists: bool },
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// Pipe or device, with the error for outputs that need a regular file.
    Stream(String),
}

/// Resolves a path. Symbolic links are followed, so that a link is kept and its target is created
/// or replaced.
///
/// # Errors
/// [`annulus_core::Error::Io`] if the folder is missing, the path names a folder, the links form a
/// cycle, the file may not be written or replaced, or standard output or standard error is
/// redirected to it.
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
                kind.map_or_else(|_| "names a folder, want a file".to_owned(), not_regular),
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
                check_replaceable(named, &folder, &path, &metadata)?;
                return Ok(Target::File { folder, path, exists: true });
            }
            Ok(metadata) if metadata.is_dir() => {
                return Err(io(named, not_regular(metadata.file_type())));
            }
            Ok(metadata) => return Ok(Target::Stream(not_regular(metadata.file_type()))),
        }
    }
    Err(io(named, format!("has more than {MOST_LINKS} levels of symbolic links")))
}

/// Returns the folder of a file.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// True for folders of file descriptors: `/dev/fd`, `/proc/PID/fd`, `/proc/PID/task/TID/fd`.
fn is_of_descriptors(folder: &Path) -> bool {
    let mut parts = folder.components();
    folder == Path::new("/dev/fd")
        || (parts.next() == Some(Component::RootDir)
            && parts.next() == Some(Component::Normal(OsStr::new("proc")))
            && parts.next_back() == Some(Component::Normal(OsStr::new("fd"))))
}

/// Resolves the path of a file descriptor. A regular file is refused: processes that have it open
/// would keep the old file after the replacement.
fn of_descriptor(named: &Path, path: &Path) -> Result<Target> {
    let own =
        [Path::new("/dev/fd"), &Path::new("/proc").join(std::process::id().to_string()).join("fd")]
            .contains(&folder_of(path));
    match path.file_name().and_then(OsStr::to_str).filter(|_| own) {
        Some("1") => return Ok(Target::Stdout),
        Some("2") => return Ok(Target::Stderr),
        _ => {}
    }
    let metadata = std::fs::metadata(path).map_err(|error| io(named, error))?;
    if metadata.is_file() {
        return Err(io(named, "is a file descriptor of a process, want the path of the file"));
    }
    if metadata.is_dir() {
        Err(io(named, not_regular(metadata.file_type())))
    } else {
        Ok(Target::Stream(not_regular(metadata.file_type())))
    }
}

/// Checks that an existing file is writable and can be replaced.
///
/// # Errors
/// As [`resolve`].
fn check_replaceable(named: &Path, folder: &Path, path: &Path, metadata: &Metadata) -> Result<()> {
    let same = |stat: rustix::io::Result<rustix::fs::Stat>| {
        stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (metadata.dev(), metadata.ino()))
    };
    for (stream, stat) in [
        ("output", rustix::fs::fstat(std::io::stdout().as_fd())),
        ("error", rustix::fs::fstat(std::io::stderr().as_fd())),
    ] {
        if same(stat) {
            return Err(io(named, format!("is the file of standard {stream}, want another file")));
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
            "belongs to user {}, and only its owner may replace it in {}",
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
    fn folders_of_file_descriptors_are_detected() {
        for folder in ["/dev/fd", "/proc/7/fd", "/proc/7/task/8/fd"] {
            assert!(is_of_descriptors(Path::new(folder)), "{folder}");
        }
        for folder in ["/dev", "/data/proc/7/fd", "/proc/7", "proc/7/fd"] {
            assert!(!is_of_descriptors(Path::new(folder)), "{folder}");
        }
    }
}
