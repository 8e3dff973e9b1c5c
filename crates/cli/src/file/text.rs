//! Text outputs: a file that appears when it is complete, or a stream (pipe, device, standard
//! output).

use std::{
    fs::{File, OpenOptions},
    io::{Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use annulus_core::Result;
use rustix::fs::OFlags;

use super::{
    stage::{Staged, Staging},
    target::{Target, resolve},
};
use crate::failure::io;

/// Text output under construction. If it is dropped before [`Document::finish`], no file is left.
#[derive(Debug)]
pub(crate) struct Document {
    /// Path as the user wrote it, for messages.
    named: PathBuf,
    sink: Sink,
}

/// Opened destination of a text.
#[derive(Debug)]
enum Sink {
    File(Box<Staged>),
    Stream(File),
    Stdout,
    Stderr,
}

impl Document {
    /// Opens the destination, so that an error is found before the text is computed.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`] if the folder is missing or not writable, or the file is not
    /// writable.
    pub(crate) fn create(named: &Path) -> Result<Self> {
        let sink = match resolve(named)? {
            Target::File { folder, path, exists } => {
                Sink::File(Box::new(Staged::create_in(named, folder, path, exists, Staging::Best)?))
            }
            Target::Stdout => Sink::Stdout,
            Target::Stderr => Sink::Stderr,
            Target::Stream(_) => {
                let flags = OFlags::NOCTTY.bits().cast_signed();
                Sink::Stream(
                    OpenOptions::new()
                        .write(true)
                        .custom_flags(flags)
                        .open(named)
                        .map_err(|error| io(named, error))?,
                )
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
        let written = match sink {
            Sink::File(staged) => {
                let mut file = staged.file();
                file.seek(SeekFrom::Start(0))
                    .and_then(|_| file.write_all(text))
                    .map_err(|error| io(&named, error))?;
                return staged.commit();
            }
            Sink::Stream(mut stream) => stream.write_all(text),
            Sink::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(text).and_then(|()| out.flush())
            }
            Sink::Stderr => std::io::stderr().lock().write_all(text),
        };
        written.map_err(|error| io(&named, error))
    }
}

/// True if a path names standard output, such as `/dev/stdout`.
pub(crate) fn is_standard_output(named: &Path) -> bool {
    matches!(resolve(named), Ok(Target::Stdout))
}

/// Writes a text file or a stream.
///
/// # Errors
/// As [`Document::create`] and [`Document::finish`].
pub(crate) fn write_text(named: &Path, text: &str) -> Result<()> {
    Document::create(named)?.finish(text.as_bytes())
}
