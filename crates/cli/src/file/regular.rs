//! Opens regular files for reading.

use std::{
    fs::{File, FileType},
    os::unix::fs::FileTypeExt,
    path::Path,
};

use annulus_core::Result;

use crate::failure::io;

/// Opens a regular file. Pipes, devices, sockets and folders are refused before they are opened:
/// opening a pipe blocks, and opening a device may have effects.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file.
pub(crate) fn open(path: &Path) -> Result<File> {
    check(path)?;
    File::open(path).map_err(|error| io(path, error))
}

/// Reads a regular file of UTF-8 text.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    check(path)?;
    std::fs::read_to_string(path).map_err(|error| io(path, error))
}

fn check(path: &Path) -> Result<()> {
    let kind = std::fs::metadata(path).map_err(|error| io(path, error))?.file_type();
    if kind.is_file() { Ok(()) } else { Err(io(path, not_regular(kind))) }
}

/// Formats the error for a file that is not regular, with its kind.
pub(super) fn not_regular(kind: FileType) -> String {
    let name = match () {
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    format!("is {name}, want a regular file")
}
