//! Opening files for reading: ordinary ones only, and without waiting for anybody.

use std::{
    fs::{File, FileType, OpenOptions},
    io::Read,
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::Path,
};

use annulus_core::Result;
use rustix::fs::OFlags;

use crate::failure::io;

/// The largest text that is read as a whole. A trace of this size has some ten million events.
const MOST_TEXT_BYTES: u64 = 2 << 30;

/// Opens an ordinary file. Anything else is refused without being waited for or read: a pipe, a
/// device, a socket, a folder.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file.
pub(crate) fn open(path: &Path) -> Result<File> {
    let refuse = |kind: FileType| io(path, not_ordinary(kind));
    // before it is opened: opening a device may do something
    let kind = std::fs::metadata(path).map_err(|error| io(path, error))?.file_type();
    if !kind.is_file() {
        return Err(refuse(kind));
    }
    // should a pipe have taken its place meanwhile, opening it does not wait for a writer
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| io(path, error))?;
    let kind = file.metadata().map_err(|error| io(path, error))?.file_type();
    if kind.is_file() { Ok(file) } else { Err(refuse(kind)) }
}

/// Reads an ordinary file of UTF-8 text as a whole.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let file = open(path)?;
    let bytes = file.metadata().map_err(|error| io(path, error))?.len();
    if bytes > MOST_TEXT_BYTES {
        return Err(io(
            path,
            format!("has {bytes} bytes, want a text of at most {MOST_TEXT_BYTES}"),
        ));
    }
    let mut text = Vec::new();
    file.take(MOST_TEXT_BYTES).read_to_end(&mut text).map_err(|error| io(path, error))?;
    String::from_utf8(text).map_err(|error| {
        io(path, format!("is no UTF-8 text: byte {}", error.utf8_error().valid_up_to()))
    })
}

/// Says that a file is no ordinary one, and of which kind it is.
pub(super) fn not_ordinary(kind: FileType) -> String {
    let name = match () {
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () if kind.is_char_device() || kind.is_block_device() => "a device",
        () => "something else",
    };
    format!("is no ordinary file but {name}")
}
