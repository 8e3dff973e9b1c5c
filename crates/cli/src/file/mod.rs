//! Files: safetensors files, of which each rank reads and writes its own rows by positioned I/O;
//! and text files.
//!
//! A safetensors file is `[u64 header length][JSON header][data]`, little-endian. It is never held
//! in memory as a whole: the header is parsed, and each rank reads only its rows of each tensor. An
//! output has a temporary name until it is complete.
//! Text goes to a file that appears when it is complete, or to a stream (pipe, device, standard
//! output).

use std::{
    fs::{File, FileType},
    io::Write,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

use annulus_core::{Result, Runs};
use annulus_plan::Machine;

use self::staged::{FileTarget, StagedFile};
use crate::{failure::io, message};

mod dtype;
mod read;
mod staged;
mod write;

pub(crate) use dtype::{element_bytes, float, of_floats};
pub(crate) use read::TensorFile;
pub(crate) use write::{OutputFile, PlannedTensor, TensorPart};

/// Text output under construction. If it is dropped before [`TextDocument::finish`], no file is
/// left.
#[derive(Debug)]
pub(crate) struct TextDocument {
    /// Path as the user wrote it, for messages.
    named: PathBuf,
    sink: Sink,
}

/// Opened destination of a text.
#[derive(Debug)]
enum Sink {
    File(StagedFile),
    Stream(File),
    Stdout,
}

impl TextDocument {
    /// Opens the destination, so that an error is found before the text is computed.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`] if the folder is missing or not writable, or the file is not
    /// writable.
    pub(crate) fn create(named: &Path) -> Result<Self> {
        let sink = match FileTarget::of(named)? {
            FileTarget::File(target) => Sink::File(StagedFile::create_for(named, target)?),
            FileTarget::Stdout => Sink::Stdout,
            FileTarget::Stream(_) => {
                let opened = File::options().write(true).open(named);
                Sink::Stream(opened.map_err(|error| io(named, error))?)
            }
        };
        Ok(Self { named: named.to_owned(), sink })
    }

    /// Writes the text, and gives a file its final name.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`]; then no file is left.
    pub(crate) fn finish(self, text: &[u8]) -> Result<()> {
        let Self { named, sink } = self;
        let failed = |error| io(&named, error);
        match sink {
            Sink::File(mut staged) => {
                staged.file.write_all(text).map_err(failed)?;
                staged.commit()
            }
            Sink::Stream(mut stream) => stream.write_all(text).map_err(failed),
            Sink::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(text).and_then(|()| out.flush()).map_err(failed)
            }
        }
    }
}

/// True if a path names standard output, such as `/dev/stdout`.
pub(crate) fn is_standard_output(named: &Path) -> bool {
    matches!(FileTarget::of(named), Ok(FileTarget::Stdout))
}

/// Writes a text file or a stream.
pub(crate) fn write_text(named: &Path, text: &str) -> Result<()> {
    TextDocument::create(named)?.finish(text.as_bytes())
}

/// Opens a regular file. Pipes, devices, sockets and folders are refused before they are opened:
/// opening a pipe blocks, and opening a device may have effects.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file.
pub(crate) fn open_regular(path: &Path) -> Result<File> {
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

/// Reads a machine file.
///
/// # Errors
/// [`annulus_core::Error::Io`] if the file cannot be read, is no JSON, or has an unknown, missing
/// or malformed field; [`annulus_core::Error::InvalidArgument`] of a wrong version or number. All
/// name file and field.
pub(crate) fn read_machine(path: &Path) -> Result<Machine> {
    annulus_machine_file::parse(&read_text(path)?, &message::path(path))
}

fn check(path: &Path) -> Result<()> {
    let kind = std::fs::metadata(path).map_err(|error| io(path, error))?.file_type();
    if kind.is_file() { Ok(()) } else { Err(io(path, not_regular(kind))) }
}

/// Formats the error for a file that is not regular, with its kind.
fn not_regular(kind: FileType) -> String {
    let name = match () {
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    format!("is {name}, want a regular file")
}

/// Calls `visit` with the first element and the number of elements of each contiguous range of the
/// rows `rows` along `axis` of a tensor of this shape, in the row-major order of the local tensor
/// with these rows. Adjacent ranges are merged.
fn for_each_range<E>(
    shape: &[usize],
    axis: usize,
    rows: &Runs,
    mut visit: impl FnMut(u64, u64) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    // an empty tensor may have up to 2⁶³ lines, which must not be iterated over
    if shape.contains(&0) || rows.is_empty() {
        return Ok(());
    }
    let product = |lens: &[usize]| lens.iter().map(|&len| len as u64).product::<u64>();
    let len = shape[axis] as u64;
    let inner = product(&shape[axis + 1..]);
    // a range that the next one may continue: a whole tensor is one range
    let (mut start, mut held) = (0, 0);
    for line in 0..product(&shape[..axis]) {
        for run in rows.runs() {
            let (ranges, count) = if run.step == 1 { (1, run.count) } else { (run.count, 1) };
            for index in 0..ranges {
                let first = (line * len + run.at(index).cast_unsigned()) * inner;
                if start + held != first {
                    if held > 0 {
                        visit(start, held)?;
                    }
                    (start, held) = (first, 0);
                }
                held += count * inner;
            }
        }
    }
    visit(start, held)
}
