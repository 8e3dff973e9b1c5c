//! Writing: whole or not at all. A file grows under a temporary name beside its target and takes the target's name when it is complete.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use annulus_core::{DType, Element, Error, Result, Runs};

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

/// A file on its way. Ranks share it: every write is positioned. Dropped before [`Output::finish`], it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Output {
    target: PathBuf,
    file: File,
    unfinished: Unfinished,
    entries: BTreeMap<&'static str, Entry>,
}

impl Output {
    /// Makes the temporary file in its full size, with its header.
    ///
    /// # Errors
    /// [`Error::Io`]: the folder is missing or not writable, the target is no ordinary file, the disk is full.
    pub(crate) fn create(target: &Path, tensors: &[Planned]) -> Result<Self> {
        let target = resolve(target)?;
        let (header, entries, end) = header(tensors).ok_or_else(|| io(&target, "would pass 2^63 bytes"))?;
        let (unfinished, file) = Unfinished::create_beside(&target).map_err(|error| io(&target, error))?;
        let fill = || {
            file.set_len(end)?;
            file.write_all_at(&header, 0)
        };
        fill().map_err(|error| io(&target, error))?;
        Ok(Self { target, file, unfinished, entries })
    }

    /// Opens the temporary file that another process has made for the same target and tensors; `name` is its name, of the target's folder.
    ///
    /// # Errors
    /// [`Error::Io`]: this process does not see it, or it is another file.
    pub(crate) fn join(target: &Path, tensors: &[Planned], name: &OsStr) -> Result<Self> {
        let target = resolve(target)?;
        let (_, entries, end) = header(tensors).ok_or_else(|| io(&target, "would pass 2^63 bytes"))?;
        let path = target.with_file_name(name);
        let unseen =
            |error| io(&path, format!("{error}: made by rank 0, and not seen here; the output must be on a file system of all ranks"));
        let (unfinished, file) = Unfinished::join(path.clone()).map_err(unseen)?;
        match file.metadata().map_err(|error| io(&path, error))?.len() {
            bytes if bytes == end => Ok(Self { target, file, unfinished, entries }),
            bytes => Err(io(&path, format!("has {bytes} bytes, rank 0 made it with {end}"))),
        }
    }

    /// The name of the temporary file.
    pub(crate) fn temporary_name(&self) -> &OsStr {
        self.unfinished.path().file_name().unwrap_or_default()
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
        self.unfinished.rename_to(&self.target).map_err(|error| io(&self.target, error))
    }

    /// Lets go of a file that another process has finished.
    pub(crate) fn forget(self) {
        self.unfinished.forget();
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
