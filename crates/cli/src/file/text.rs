//! Text outputs: a whole file or none; a pipe, a device or standard output is written as a stream.

use std::{
    fs::{File, OpenOptions},
    io::{Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use annulus_core::Result;
use rustix::fs::OFlags;

use super::{
    stage::{Manner, Staged},
    target::{Target, resolve},
};
use crate::failure::io;

/// A text on its way to its place. Dropped before [`Document::finish`], it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Document {
    named: PathBuf,
    place: Place,
}

#[derive(Debug)]
enum Place {
    File(Box<Staged>),
    Stream(File),
    Output,
    Error,
}

impl Document {
    /// Finds out whether it can be written, before there is anything to write.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`]: the folder is missing or not writable, the file may not be
    /// written.
    pub(crate) fn create(named: &Path) -> Result<Self> {
        let place = match resolve(named)? {
            Target::File { folder, path, exists } => {
                Place::File(Box::new(Staged::create_in(named, folder, path, exists, Manner::Best)?))
            }
            Target::Output => Place::Output,
            Target::Error => Place::Error,
            Target::Stream(_) => {
                let flags = OFlags::NOCTTY.bits().cast_signed();
                Place::Stream(
                    OpenOptions::new()
                        .write(true)
                        .custom_flags(flags)
                        .open(named)
                        .map_err(|error| io(named, error))?,
                )
            }
        };
        Ok(Self { named: named.to_owned(), place })
    }

    /// Writes the text and, of a file, gives it its name.
    ///
    /// # Errors
    /// [`annulus_core::Error::Io`]; then no file is left.
    pub(crate) fn finish(self, text: &[u8]) -> Result<()> {
        let Self { named, place } = self;
        let written = match place {
            Place::File(staged) => {
                let mut file = staged.file();
                file.seek(SeekFrom::Start(0))
                    .and_then(|_| file.write_all(text))
                    .map_err(|error| io(&named, error))?;
                return staged.commit();
            }
            Place::Stream(mut stream) => stream.write_all(text),
            Place::Output => {
                let mut out = std::io::stdout().lock();
                out.write_all(text).and_then(|()| out.flush())
            }
            Place::Error => std::io::stderr().lock().write_all(text),
        };
        written.map_err(|error| io(&named, error))
    }
}

/// True if a path stands for standard output.
pub(crate) fn is_standard_output(named: &Path) -> bool {
    matches!(resolve(named), Ok(Target::Output))
}

/// Writes a whole text file, or none; or a stream.
///
/// # Errors
/// As [`Document::create`] and [`Document::finish`].
pub(crate) fn write_text(named: &Path, text: &str) -> Result<()> {
    Document::create(named)?.finish(text.as_bytes())
}
