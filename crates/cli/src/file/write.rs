//! Writes safetensors files, which appear only when they are complete.

use std::{borrow::Cow, cmp::Reverse, ffi::OsStr, os::unix::fs::FileExt, path::Path};

use annulus_core::{Element, Error, Result, Runs};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use super::{dtype, for_each_range, staged::StagedFile};
use crate::failure::io;

/// Bytes of one write of adjacent rows of several parts: large enough that the time of the system
/// call does not matter.
const WINDOW_BYTES: usize = 1 << 20;

/// Tensor of a file to write.
#[derive(Debug, Clone)]
pub(crate) struct PlannedTensor {
    /// Name.
    pub(crate) name: &'static str,
    /// Element type.
    pub(crate) dtype: Dtype,
    /// Global shape.
    pub(crate) shape: Vec<usize>,
}

impl PlannedTensor {
    /// Creates a tensor.
    pub(crate) fn new(name: &'static str, dtype: Dtype, shape: &[usize]) -> Self {
        Self { name, dtype, shape: shape.to_vec() }
    }

    /// Returns the bytes of the tensor; 0 from 2⁶¹ on, which [`OutputFile::create`] refuses.
    pub(crate) fn bytes(&self) -> u64 {
        dtype::bytes(self.dtype, &self.shape).unwrap_or_default()
    }

    /// Returns the number of elements.
    pub(crate) fn elements(&self) -> usize {
        annulus_core::index(self.bytes()) / dtype::element_bytes(self.dtype)
    }
}

/// One rank's rows of a tensor.
#[derive(Debug)]
pub(crate) struct TensorPart<'a, T> {
    /// Row numbers in the whole tensor.
    pub(crate) rows: &'a Runs,
    /// Values in row-major order.
    pub(crate) values: &'a [T],
}

/// Safetensors file under construction. Ranks share it, because all writes are positioned. If it is
/// dropped before [`OutputFile::finish`], no file is left.
#[derive(Debug)]
pub(crate) struct OutputFile {
    staged: StagedFile,
    metadata: Metadata,
    /// Offset of the data from the start of the file.
    start: u64,
}

impl OutputFile {
    /// Creates the file in its full size, with its header.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder is missing or not writable, the target is not a regular file or
    /// not writable, or the disk is full.
    pub(crate) fn create(target: &Path, tensors: &[PlannedTensor]) -> Result<Self> {
        let (metadata, header) = header(tensors).map_err(|what| io(target, what))?;
        let start = header.len() as u64;
        let staged = StagedFile::create(target)?;
        let file = &staged.file;
        file.set_len(start + metadata.data_len() as u64)
            .and_then(|()| file.write_all_at(&header, 0))
            .map_err(|error| io(target, error))?;
        Ok(Self { staged, metadata, start })
    }

    /// Opens the file that another process has created for the same target and tensors, by its
    /// [`OutputFile::temporary_name`].
    ///
    /// # Errors
    /// [`Error::Io`] if this process cannot open it, or the file has another size.
    pub(crate) fn join(target: &Path, tensors: &[PlannedTensor], name: &OsStr) -> Result<Self> {
        let (metadata, header) = header(tensors).map_err(|what| io(target, what))?;
        let start = header.len() as u64;
        let end = start + metadata.data_len() as u64;
        let staged = StagedFile::join(target, name)?;
        match staged.file.metadata().map_err(|error| io(target, error))?.len() {
            bytes if bytes == end => Ok(Self { staged, metadata, start }),
            bytes => Err(io(target, format!("has {bytes} bytes, rank 0 created it with {end}"))),
        }
    }

    /// Name by which another process can open the unfinished file.
    pub(crate) fn temporary_name(&self) -> &OsStr {
        self.staged.name()
    }

    /// Writes rows along `axis` of the tensor `name`. `parts` has the rows of all ranks of this
    /// process: adjacent rows of several ranks are written together, a megabyte at a time.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidArgument`] if the file was created without such a tensor.
    pub(crate) fn write_rows<T: Element>(
        &self,
        name: &str,
        axis: usize,
        parts: &[TensorPart<'_, T>],
    ) -> Result<()> {
        let entry = self.entry(name, Some(dtype::of_floats(T::DTYPE)))?;
        let mut ranges = Vec::new();
        for part in parts {
            let mut local = 0;
            // rows of one line, which are the same in all others
            for_each_range(&[entry.shape[axis]], 0, part.rows, |row, count| {
                let [row, count] = [row, count].map(annulus_core::index);
                ranges.push((row, count, part, local));
                local += count;
                Ok::<(), Error>(())
            })?;
        }
        ranges.sort_unstable_by_key(|&(row, ..)| row);
        // an empty tensor may have up to 2⁶³ lines
        let is_empty = ranges.is_empty() || entry.shape.contains(&0);
        let lines = if is_empty { 0 } else { entry.shape[..axis].iter().product() };
        let inner: usize = entry.shape[axis + 1..].iter().product();
        let mut window: Vec<T> = Vec::new();
        let mut first = 0;
        for line in 0..lines {
            for &(row, count, part, local) in &ranges {
                let at = (line * entry.shape[axis] + row) * inner;
                let from = line * annulus_core::index(part.rows.len()) + local;
                let values = &part.values[from * inner..][..count * inner];
                let is_full = (window.len() + values.len()) * size_of::<T>() > WINDOW_BYTES;
                if first + window.len() != at || is_full {
                    self.write(entry, first as u64, &window)?;
                    window.clear();
                    first = at;
                }
                if size_of_val(values) > WINDOW_BYTES {
                    self.write(entry, at as u64, values)?;
                    first = at + values.len();
                } else {
                    window.extend_from_slice(values);
                }
            }
        }
        self.write(entry, first as u64, &window)
    }

    /// Writes elements of the tensor `name` from element `first` on, in row-major order.
    pub(crate) fn write_flat<T: Element>(
        &self,
        name: &str,
        first: usize,
        values: &[T],
    ) -> Result<()> {
        self.write(self.entry(name, Some(dtype::of_floats(T::DTYPE)))?, first as u64, values)
    }

    /// Writes little-endian elements of the tensor `name` from element `first` on.
    pub(crate) fn write_bytes(&self, name: &str, first: usize, bytes: &[u8]) -> Result<()> {
        let entry = self.entry(name, None)?;
        self.write_at(bytes, entry, first as u64 * dtype::element_bytes(entry.dtype) as u64)
    }

    fn entry(&self, name: &str, dtype: Option<Dtype>) -> Result<&TensorInfo> {
        let info = self.metadata.info(name);
        info.filter(|info| dtype.is_none_or(|dtype| info.dtype == dtype)).ok_or_else(|| {
            let got = dtype.map_or_else(|| "bytes".to_owned(), |dtype| dtype.to_string());
            Error::invalid(name, got, "a tensor that the file was created with")
        })
    }

    /// Waits until the writes of this process are on the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        self.staged.file.sync_all().map_err(|error| io(&self.staged.named, error))
    }

    /// Gives the complete file its name.
    ///
    /// # Errors
    /// [`Error::Io`]; then no file is left.
    pub(crate) fn finish(self) -> Result<()> {
        self.sync()?;
        self.staged.commit()
    }

    /// Releases a file that another process has completed.
    pub(crate) fn release(self) {
        self.staged.release();
    }

    fn write<T: Element>(&self, entry: &TensorInfo, first: u64, values: &[T]) -> Result<()> {
        let mut bytes = Cow::Borrowed(bytemuck::cast_slice(values));
        if cfg!(target_endian = "big") {
            bytes.to_mut().chunks_exact_mut(T::DTYPE.bytes()).for_each(<[u8]>::reverse);
        }
        self.write_at(&bytes, entry, first * T::DTYPE.bytes() as u64)
    }

    /// Writes bytes from byte `offset` of `entry` on.
    fn write_at(&self, bytes: &[u8], entry: &TensorInfo, offset: u64) -> Result<()> {
        self.staged
            .file
            .write_all_at(bytes, self.start + entry.data_offsets.0 as u64 + offset)
            .map_err(|error| io(&self.staged.named, error))
    }
}

/// Returns the tensors with their offsets, and the bytes before the data. Tensors are ordered by
/// descending element size and the header is padded, so that all are aligned.
///
/// # Errors
/// As text, if a tensor or the file would have 2⁶¹ bytes or more.
fn header(tensors: &[PlannedTensor]) -> std::result::Result<(Metadata, Vec<u8>), String> {
    let too_large = || "would have 2^61 bytes or more".to_owned();
    let mut ordered: Vec<&PlannedTensor> = tensors.iter().collect();
    ordered.sort_by_key(|tensor| (Reverse(tensor.dtype.bitsize()), tensor.name));
    let mut infos = Vec::new();
    let mut end = 0u64;
    for PlannedTensor { name, dtype, shape } in ordered {
        let begin = end;
        let bytes = dtype::bytes(*dtype, shape).ok_or_else(too_large)?;
        end = begin.checked_add(bytes).filter(|&end| end < 1 << 61).ok_or_else(too_large)?;
        let data_offsets = (annulus_core::index(begin), annulus_core::index(end));
        let info = TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets };
        infos.push(((*name).to_owned(), info));
    }
    let metadata = Metadata::new(None, infos).map_err(|error| error.to_string())?;
    let mut text = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    Ok((metadata, bytes))
}
