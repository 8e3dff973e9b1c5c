//! Opens regular files for reading, without blocking on pipes and devices.

use std::{
    fs::{File, FileType, OpenOptions},
    io::Read,
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::Path,
};

use annulus_core::Result;
use rustix::fs::OFlags;

use crate::failure::io;

/// The largest text file. A trace of this size has about ten million events.
const MOST_TEXT_BYTES: u64 = 2 << 30;

/// Opens a regular file. Pipes, devices, sockets and folders are refused before they are opened.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file.
pub(crate) fn open(path: &Path) -> Result<File> {
    let refuse = |kind: FileType| io(path, not_regular(kind));
    // checked before it is opened, because opening a device may have effects
    let kind = std::fs::metadata(path).map_err(|error| io(path, error))?.file_type();
    if !kind.is_file() {
        return Err(refuse(kind));
    }
    // non-blocking, in case a pipe has replaced the file since the check
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| io(path, error))?;
    let kind = file.metadata().map_err(|error| io(path, error))?.file_type();
    if kind.is_file() { Ok(file) } else { Err(refuse(kind)) }
}

/// Reads a regular file of UTF-8 text.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let file = open(path)?;
    let bytes = file.metadata().map_err(|error| io(path, error))?.len();
    if bytes > MOST_TEXT_BYTES {
        return Err(io(
            path,
            format!("has {bytes} bytes, want text of at most {MOST_TEXT_BYTES} bytes"),
        ));
    }
    let mut text = Vec::new();
    file.take(MOST_TEXT_BYTES).read_to_end(&mut text).map_err(|error| io(path, error))?;
    String::from_utf8(text).map_err(|error| {
        io(path, format!("is not UTF-8 text: byte {}", error.utf8_error().valid_up_to()))
    })
}

/// Formats the error for a file that is not regular, with its kind.
pub(super) fn not_regular(kind: FileType) -> String {
    let name = match () {
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () if kind.is_char_device() || kind.is_block_device() => "a device",
        () => "something else",
    };
    format!("is {name}, want a regular file")
}
