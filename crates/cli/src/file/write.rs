//! Writing: whole or not at all. A file grows under a temporary name beside its target and takes the target's name when it is complete.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs::File,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use annulus_core::{DType, Element, Error, Fingerprint, Result, Runs};

use super::{header::Entry, kind, kind::Kind, rows::pieces};
use crate::{failure::io, interrupt::Unfinished};

/// A tensor that a file is to have.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    /// Its name.
    pub(crate) name: &'static str,
    /// Its element type.
    pub(crate) kind: Kind,
    /// Its global lengths.
    pub(crate) shape: Vec<usize>,
}

impl Planned {
    /// Bytes of the tensor; 0 past 2⁶³, which [`Output::create`] refuses.
    pub(crate) fn bytes(&self) -> u64 {
        Entry::bytes(self.kind, &self.shape).unwrap_or_default()
    }

    /// Elements of the tensor.
    pub(crate) fn elements(&self) -> usize {
        annulus_core::index(self.bytes()) / self.kind.bytes()
    }
}

/// Where a file is before it has its name.
#[derive(Debug)]
enum Temporary {
    /// Under a temporary one.
    Named(Unfinished),
    /// Nowhere: it goes with the last process that has it open, however that ends.
    Nameless,
    /// Nowhere, and the process that has made it will name it.
    Others,
}

/// A file on its way. Ranks share it: every write is positioned. Dropped before [`Output::finish`], it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Output {
    target: PathBuf,
    file: File,
    temporary: Temporary,
    entries: BTreeMap<&'static str, Entry>,
}

impl Output {
    /// Makes the temporary file in its full size, with its header.
    ///
    /// # Errors
    /// [`Error::Io`]: the folder is missing or not writable, the target is no ordinary file, the disk is full.
    pub(crate) fn create(target: &Path, tensors: &[Planned]) -> Result<Self> {
        let make = |target: &Path| Unfinished::create_beside(target).map(|(unfinished, file)| (Temporary::Named(unfinished), file));
        Self::fill(target, tensors, make)
    }

    /// As [`Output::create`]; the file has no name until it is finished, so that nothing is left even if all processes are killed at once.
    ///
    /// # Errors
    /// As [`Output::create`]; the file system knows no such files.
    pub(crate) fn create_nameless(target: &Path, tensors: &[Planned]) -> Result<Self> {
        Self::fill(target, tensors, |target| nameless(target).map(|file| (Temporary::Nameless, file)))
    }

    fn fill(target: &Path, tensors: &[Planned], make: impl FnOnce(&Path) -> std::io::Result<(Temporary, File)>) -> Result<Self> {
        let target = resolve(target)?;
        let (header, entries, end) = header(tensors).ok_or_else(|| io(&target, "would pass 2^63 bytes"))?;
        let (temporary, file) = make(&target).map_err(|error| io(&target, error))?;
        let fill = || {
            file.set_len(end)?;
            file.write_all_at(&header, 0)
        };
        fill().map_err(|error| io(&target, error))?;
        Ok(Self { target, file, temporary, entries })
    }

    /// Opens the temporary file that another process has made for the same target and tensors, by its [`Output::handle`].
    ///
    /// # Errors
    /// [`Error::Io`]: this process does not see it, or it is another file.
    pub(crate) fn join(target: &Path, tensors: &[Planned], handle: &OsStr) -> Result<Self> {
        let target = resolve(target)?;
        let (_, entries, end) = header(tensors).ok_or_else(|| io(&target, "would pass 2^63 bytes"))?;
        // a handle that is an absolute path is of a file without a name
        let path = target.with_file_name(handle);
        let opened = if Path::new(handle).is_absolute() {
            File::options().write(true).open(&path).map(|file| (Temporary::Others, file))
        } else {
            Unfinished::join(path.clone()).map(|(unfinished, file)| (Temporary::Named(unfinished), file))
        };
        let unseen =
            |error| io(&path, format!("{error}: made by rank 0, and not seen here; the output must be on a file system of all ranks"));
        let (temporary, file) = opened.map_err(unseen)?;
        match file.metadata().map_err(|error| io(&path, error))?.len() {
            bytes if bytes == end => Ok(Self { target, file, temporary, entries }),
            bytes => Err(io(&path, format!("has {bytes} bytes, rank 0 made it with {end}"))),
        }
    }

    /// By what another process can open the temporary file: its name in the target's folder, or, as long as this process lives, a path.
    pub(crate) fn handle(&self) -> OsString {
        match &self.temporary {
            Temporary::Named(unfinished) => unfinished.path().file_name().unwrap_or_default().to_owned(),
            Temporary::Nameless | Temporary::Others => format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into(),
        }
    }

    /// Writes the rows `rows` along `axis` of the tensor `name`; `values` is the local tensor, dense.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidArgument`] if the file was not planned with such a tensor.
    pub(crate) fn write_rows<T: Element>(&self, name: &str, axis: usize, rows: &Runs, values: &[T]) -> Result<()> {
        let entry = self.entry(name, Some(T::DTYPE))?;
        let mut rest = values;
        pieces(&entry.shape, axis, rows, |first, count| {
            let (from, after) = rest.split_at(count);
            rest = after;
            let offset = entry.offset + first * T::DTYPE.bytes() as u64;
            self.write(bytemuck::cast_slice(from), T::DTYPE.bytes(), offset)
        })
    }

    /// Writes elements of the tensor `name` from its element `first` on, whatever its axes.
    ///
    /// # Errors
    /// As [`Output::write_rows`].
    pub(crate) fn write_flat<T: Element>(&self, name: &str, first: usize, values: &[T]) -> Result<()> {
        let offset = self.entry(name, Some(T::DTYPE))?.offset + (first * T::DTYPE.bytes()) as u64;
        self.write(bytemuck::cast_slice(values), T::DTYPE.bytes(), offset)
    }

    /// Writes little-endian bytes of the tensor `name` from its element `first` on.
    ///
    /// # Errors
    /// As [`Output::write_rows`].
    pub(crate) fn write_bytes(&self, name: &str, first: usize, bytes: &[u8]) -> Result<()> {
        let entry = self.entry(name, None)?;
        let offset = entry.offset + (first * entry.kind.bytes()) as u64;
        self.file.write_all_at(bytes, offset).map_err(|error| io(&self.target, error))
    }

    fn entry(&self, name: &str, dtype: Option<DType>) -> Result<&Entry> {
        let entry = self.entries.get(name).filter(|entry| dtype.is_none_or(|dtype| entry.kind == Kind::Float(dtype)));
        entry.ok_or_else(|| Error::invalid(name, dtype.map_or("bytes", DType::name), "a tensor that the file was made with"))
    }

    /// Waits until what this process has written is on the disk.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|error| io(&self.target, error))
    }

    /// Gives the complete file its name.
    ///
    /// # Errors
    /// [`Error::Io`]; then nothing is left.
    pub(crate) fn finish(self) -> Result<()> {
        self.sync()?;
        let finish = || match self.temporary {
            Temporary::Named(unfinished) => unfinished.rename_to(&self.target),
            // a link takes no name that is taken, a new name does
            Temporary::Nameless => name(&self.file, &self.target)?.rename_to(&self.target),
            Temporary::Others => Ok(()),
        };
        finish().map_err(|error| io(&self.target, error))
    }

    /// Lets go of a file that another process has finished.
    pub(crate) fn forget(self) {
        if let Temporary::Named(unfinished) = self.temporary {
            unfinished.forget();
        }
    }

    fn write(&self, bytes: &[u8], element: usize, offset: u64) -> Result<()> {
        let failed = |error| io(&self.target, error);
        if cfg!(target_endian = "little") {
            return self.file.write_all_at(bytes, offset).map_err(failed);
        }
        let mut swapped = bytes.to_vec();
        kind::swap_if_big_endian(&mut swapped, element);
        self.file.write_all_at(&swapped, offset).map_err(failed)
    }
}

/// A file without a name in the folder of `target`.
#[cfg(target_os = "linux")]
fn nameless(target: &Path) -> std::io::Result<File> {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    // as whoever makes a file makes it; the system takes away what the user wants away
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
    Ok(openat(CWD, folder_of(target), flags, mode)?.into())
}

/// Gives a nameless file a temporary name beside `target`.
#[cfg(target_os = "linux")]
fn name(file: &File, target: &Path) -> std::io::Result<Unfinished> {
    use rustix::fs::{AtFlags, CWD, linkat};
    let handle = format!("/proc/self/fd/{}", file.as_raw_fd());
    let link = |path: &Path| Ok(linkat(CWD, handle.as_str(), CWD, path, AtFlags::SYMLINK_FOLLOW)?);
    Unfinished::name_beside(target, link).map(|(unfinished, ())| unfinished)
}

#[cfg(not(target_os = "linux"))]
fn nameless(_: &Path) -> std::io::Result<File> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn name(_: &File, _: &Path) -> std::io::Result<Unfinished> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// The folder that a file is, or will be, in.
fn folder_of(target: &Path) -> &Path {
    target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// What tells this target from every other one of the same machine, however its path is written; `None` where its folder cannot be asked.
pub(crate) fn identity(target: &Path) -> Option<u64> {
    let target = resolve(target).ok()?;
    let folder = std::fs::metadata(folder_of(&target)).ok()?;
    let name = target.file_name()?.as_encoded_bytes();
    Some(Fingerprint::new().number(folder.dev()).number(folder.ino()).bytes(name).finish())
}

/// The file that a path stands for: links are followed, so that a link stays a link; anything but an ordinary file is refused.
fn resolve(target: &Path) -> Result<PathBuf> {
    match std::fs::metadata(target) {
        Ok(metadata) if !metadata.is_file() => Err(io(target, "is no ordinary file")),
        Ok(_) => std::fs::canonicalize(target).map_err(|error| io(target, error)),
        Err(_) if target.file_name().is_none() => Err(io(target, "names no file")),
        Err(_) => Ok(target.to_owned()),
    }
}

/// Header bytes, entries and the size of the whole file. Wide elements come first and the header is padded, so that all are aligned.
fn header(tensors: &[Planned]) -> Option<(Vec<u8>, BTreeMap<&'static str, Entry>, u64)> {
    let mut ordered: Vec<&Planned> = tensors.iter().collect();
    ordered.sort_by_key(|tensor| (std::cmp::Reverse(tensor.kind.bytes()), tensor.name));
    let mut json = serde_json::Map::new();
    let mut entries = BTreeMap::new();
    let mut end = 0u64;
    for tensor in ordered {
        let begin = end;
        end = begin.checked_add(Entry::bytes(tensor.kind, &tensor.shape)?)?;
        let entry = serde_json::json!({ "dtype": tensor.kind.name(), "shape": tensor.shape, "data_offsets": [begin, end] });
        json.insert(tensor.name.to_owned(), entry);
        entries.insert(tensor.name, Entry { kind: tensor.kind, shape: tensor.shape.clone(), offset: begin });
    }
    let mut text = serde_json::Value::Object(json).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let data = 8 + text.len() as u64;
    entries.values_mut().for_each(|entry| entry.offset += data);
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    Some((bytes, entries, end.checked_add(data).filter(|&end| end <= i64::MAX as u64)?))
}

/// Writes a whole text file, or none.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write_text(target: &Path, text: &str) -> Result<()> {
    let target = resolve(target)?;
    let write = || {
        let (unfinished, file) = Unfinished::create_beside(&target)?;
        file.write_all_at(text.as_bytes(), 0)?;
        unfinished.rename_to(&target)
    };
    write().map_err(|error| io(&target, error))
}
