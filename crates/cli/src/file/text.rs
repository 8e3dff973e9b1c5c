//! Text outputs: a file that appears when it is complete, or a stream (pipe, device, standard
//! output).

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use annulus_core::Result;

use super::staged::{Staged, Target};
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
    File(Staged),
    Stream(File),
    Stdout,
}

impl Document {
    /// Opens the destination, so that an error is found before the text is computed.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`] if the folder is missing or not writable, or the file is not
    /// writable.
    pub(crate) fn create(named: &Path) -> Result<Self> {
        let sink = match Target::of(named)? {
            Target::File(target) => Sink::File(Staged::create_for(named, target)?),
            Target::Stdout => Sink::Stdout,
            Target::Stream(_) => {
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
            Sink::File(staged) => {
                staged.file().write_all(text).map_err(failed)?;
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
    matches!(Target::of(named), Ok(Target::Stdout))
}

/// Writes a text file or a stream.
pub(crate) fn write_text(named: &Path, text: &str) -> Result<()> {
    Document::create(named)?.finish(text.as_bytes())
}
