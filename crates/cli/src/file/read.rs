//! Reading: of each tensor only the rows that are asked for, straight into the array that will be computed on.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use annulus_core::{Element, Error, Result, Runs};

use super::{header, header::Entry, kind, kind::Kind, rows::pieces};
use crate::failure::io;

/// Bytes that are converted at a time: the only memory beside the array itself.
const CHUNK_BYTES: usize = 1 << 18;

/// An open safetensors file. Ranks share it: every read is positioned.
#[derive(Debug)]
pub(crate) struct Tensors {
    path: PathBuf,
    file: File,
    entries: BTreeMap<String, Entry>,
}

impl Tensors {
    /// Opens a file and checks its header.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read or is malformed; [`Error::InvalidArgument`] naming a tensor that is.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // asked before it is opened: opening a pipe would wait for a writer
        let kind = std::fs::metadata(path).map_err(|error| io(path, error))?.file_type();
        if !kind.is_file() {
            return Err(io(path, if kind.is_dir() { "is a directory" } else { "is no ordinary file" }));
        }
        let file = File::open(path).map_err(|error| io(path, error))?;
        let entries = header::read(&file, path)?;
        Ok(Self { path: path.to_owned(), file, entries })
    }

    /// The tensor `name`, if the file has it.
    pub(crate) fn get(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    /// The names of all tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The tensor `name`, which must have `dimensions` lengths.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming it.
    pub(crate) fn need(&self, name: &str, dimensions: usize) -> Result<&Entry> {
        let path = self.path.display();
        let entry =
            self.get(name).ok_or_else(|| Error::invalid(name, format!("no such tensor in {path}"), format!("a tensor named {name}")))?;
        if entry.shape.len() != dimensions {
            return Err(Error::invalid(name, format!("shape {:?}", entry.shape), format!("{dimensions} dimensions")));
        }
        Ok(entry)
    }

    /// The rows `rows` along `axis` of a float tensor, each element rounded once to `T`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it holds no floats; [`Error::Io`]; [`Error::OutOfMemory`].
    pub(crate) fn floats<T: Element>(&self, name: &str, axis: usize, rows: &Runs) -> Result<Vec<T>> {
        let entry = self.entry(name)?;
        let from = entry.kind.float().ok_or_else(|| Error::invalid(name, entry.kind.name(), "a float dtype"))?;
        let mut values = zeroed::<T>(local_elements(entry, axis, rows))?;
        let mut rest = &mut values[..];
        let mut bytes = Vec::new();
        pieces(&entry.shape, axis, rows, |first, count| {
            let (into, after) = std::mem::take(&mut rest).split_at_mut(count);
            rest = after;
            if from == T::DTYPE {
                let raw = bytemuck::cast_slice_mut(into);
                self.read(raw, entry, first)?;
                kind::swap_if_big_endian(raw, T::DTYPE.bytes());
                return Ok(());
            }
            for (index, into) in into.chunks_mut(CHUNK_BYTES / from.bytes()).enumerate() {
                bytes.resize(into.len() * from.bytes(), 0);
                self.read(&mut bytes, entry, first + (index * (CHUNK_BYTES / from.bytes())) as u64)?;
                kind::floats(from, &bytes, into);
            }
            Ok(())
        })?;
        Ok(values)
    }

    /// The rows `rows` along `axis` of an integer or bool tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it holds floats or numbers of 2⁶³ and more; [`Error::Io`]; [`Error::OutOfMemory`].
    pub(crate) fn integers(&self, name: &str, axis: usize, rows: &Runs) -> Result<Vec<i64>> {
        let entry = self.entry(name)?;
        self.refuse_floats(name)?;
        let mut bytes = zeroed::<u8>(local_elements(entry, axis, rows) * entry.kind.bytes())?;
        let mut rest = &mut bytes[..];
        pieces(&entry.shape, axis, rows, |first, count| {
            let (into, after) = std::mem::take(&mut rest).split_at_mut(count * entry.kind.bytes());
            rest = after;
            self.read(into, entry, first)
        })?;
        kind::integers(entry.kind, &bytes).ok_or_else(|| Error::invalid(name, "a number above 2^63", "numbers of 63 bits"))
    }

    /// As [`Tensors::integers`], for numbers that must fit 32 bits.
    ///
    /// # Errors
    /// As [`Tensors::integers`]; [`Error::InvalidArgument`] for a number that does not fit.
    pub(crate) fn narrow_integers(&self, name: &str, axis: usize, rows: &Runs) -> Result<Vec<i32>> {
        let wide = self.integers(name, axis, rows)?;
        wide.into_iter().map(|number| i32::try_from(number).map_err(|_| Error::invalid(name, number, "numbers of 32 bits"))).collect()
    }

    /// Reads one line (the last axis) of an integer or bool tensor into `line`, as raw bytes of one element each.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn line(&self, name: &str, first: u64, line: &mut [u8]) -> Result<()> {
        let entry = self.entry(name)?;
        self.read(line, entry, first)
    }

    /// Refuses a tensor of floats where only integers and bools have a meaning.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming it.
    pub(crate) fn refuse_floats(&self, name: &str) -> Result<()> {
        match self.get(name) {
            Some(Entry { kind: kind @ Kind::Float(_), .. }) => Err(Error::invalid(name, kind.name(), "an integer or bool dtype")),
            _ => Ok(()),
        }
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.get(name).ok_or_else(|| Error::invalid(name, "no such tensor", format!("a tensor named {name}")))
    }

    /// Bytes from element `first` of `entry` on.
    fn read(&self, into: &mut [u8], entry: &Entry, first: u64) -> Result<()> {
        let offset = entry.offset + first * entry.kind.bytes() as u64;
        self.file.read_exact_at(into, offset).map_err(|error| io(&self.path, error))
    }
}

/// Elements of the local tensor that holds these rows. Fits: the global one was measured against its bytes.
fn local_elements(entry: &Entry, axis: usize, rows: &Runs) -> usize {
    let others = entry.shape.iter().enumerate().filter(|&(place, _)| place != axis).map(|(_, &len)| len);
    others.product::<usize>() * annulus_core::index(rows.len())
}

fn zeroed<T: bytemuck::Zeroable>(len: usize) -> Result<Vec<T>> {
    let asked = (len as u64).saturating_mul(size_of::<T>() as u64);
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| Error::OutOfMemory { asked, free: None })
}
