//! Writes safetensors files, which appear only when they are complete.

use std::{cmp::Reverse, ffi::OsStr, ops::Range, os::unix::fs::FileExt, path::Path};

use annulus_core::{Element, Error, Result, Run, Runs};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use super::{dtype, rows::for_each_strided, staged::StagedFile};
use crate::failure::io;

/// Bytes of one write of rows that alternate between ranks: large enough that the time of the
/// system call does not matter.
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
        let file = staged.file();
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
        match staged.file().metadata().map_err(|error| io(target, error))?.len() {
            bytes if bytes == end => Ok(Self { staged, metadata, start }),
            bytes => Err(io(target, format!("has {bytes} bytes, rank 0 created it with {end}"))),
        }
    }

    /// Name by which another process can open the unfinished file.
    pub(crate) fn temporary_name(&self) -> &OsStr {
        self.staged.name()
    }

    /// Writes rows along `axis` of the tensor `name`. `parts` has the rows of all ranks of this
    /// process, and each rank calls this with the index of its own part.
    ///
    /// A rank writes the contiguous rows of its part. Strided rows, which alternate between parts,
    /// are gathered from all parts into windows of a megabyte, and each rank writes an equal range
    /// of the tensor: one system call for each window instead of one for each row.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidArgument`] if the file was created without such a tensor.
    pub(crate) fn write_rows<T: Element>(
        &self,
        name: &str,
        axis: usize,
        parts: &[TensorPart<'_, T>],
        own: usize,
    ) -> Result<()> {
        let entry = self.entry(name, Some(dtype::of_floats(T::DTYPE)))?;
        let Some(part) = parts.get(own) else { return Ok(()) };
        let mut rest = part.values;
        for_each_strided(&entry.shape, axis, part.rows, |strided| {
            let (from, after) = rest.split_at(strided.elements());
            rest = after;
            match (strided.rows, parts.len()) {
                (1, _) => self.write(entry, strided.first, from),
                // the rows between belong to other processes
                (_, 1) => from.chunks(strided.row).zip(0u64..).try_for_each(|(row, index)| {
                    self.write(entry, strided.first + index * strided.stride, row)
                }),
                _ => Ok(()),
            }
        })?;
        if parts.len() > 1 { self.write_strided(entry, axis, parts, own) } else { Ok(()) }
    }

    /// Writes the strided rows of all parts in the range of the tensor of rank number `own`.
    fn write_strided<T: Element>(
        &self,
        entry: &TensorInfo,
        axis: usize,
        parts: &[TensorPart<'_, T>],
        own: usize,
    ) -> Result<()> {
        let strided: Vec<StridedRun<'_, T>> = parts.iter().flat_map(StridedRun::of_part).collect();
        let inner: usize = entry.shape[axis + 1..].iter().product();
        let lines: usize = entry.shape[..axis].iter().product();
        let len = entry.shape[axis];
        if strided.is_empty() || lines * len * inner == 0 {
            return Ok(());
        }
        // row numbers count over all lines: line · len + row
        let edge = |rank: usize| {
            (lines as u128 * len as u128 * rank as u128 / parts.len() as u128) as usize
        };
        let begin = edge(own);
        let end = edge(own + 1);
        let window = (WINDOW_BYTES / (inner * T::DTYPE.bytes())).clamp(1, (end - begin).max(1));
        let mut rows = vec![T::zeroed(); window * inner];
        let mut held = vec![false; window];
        for first in (begin..end).step_by(window) {
            let last = (first + window).min(end);
            held.fill(false);
            for line in first / len..=(last - 1) / len {
                let within = |row: usize| row.clamp(line * len, (line + 1) * len) - line * len;
                for run in &strided {
                    run.for_each_row(line, within(first)..within(last), inner, |row, values| {
                        let index = line * len + row - first;
                        held[index] = true;
                        rows[index * inner..][..inner].copy_from_slice(values);
                    });
                }
            }
            // other rows are contiguous in a part, or of other processes
            let mut index = 0;
            for run in held[..last - first].chunk_by(|a, b| a == b) {
                if run[0] {
                    self.write(
                        entry,
                        ((first + index) * inner) as u64,
                        &rows[index * inner..][..run.len() * inner],
                    )?;
                }
                index += run.len();
            }
        }
        Ok(())
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
        self.staged.file().sync_all().map_err(|error| io(self.staged.named(), error))
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
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let offset = first * T::DTYPE.bytes() as u64;
        if cfg!(target_endian = "little") {
            return self.write_at(bytes, entry, offset);
        }
        let mut swapped = bytes.to_vec();
        dtype::swap_if_big_endian(&mut swapped, T::DTYPE.bytes());
        self.write_at(&swapped, entry, offset)
    }

    /// Writes bytes from byte `offset` of `entry` on.
    fn write_at(&self, bytes: &[u8], entry: &TensorInfo, offset: u64) -> Result<()> {
        self.staged
            .file()
            .write_all_at(bytes, self.start + entry.data_offsets.0 as u64 + offset)
            .map_err(|error| io(self.staged.named(), error))
    }
}

/// Run of strided rows of a part.
struct StridedRun<'a, T> {
    run: Run,
    /// Number of rows of the part before the run.
    before: usize,
    /// Number of rows of the part.
    len: usize,
    /// Values of the part.
    values: &'a [T],
}

impl<'a, T: Element> StridedRun<'a, T> {
    /// Returns the strided runs of a part.
    fn of_part(part: &TensorPart<'a, T>) -> Vec<Self> {
        let mut before = 0;
        let mut strided = Vec::new();
        for &run in part.rows.runs() {
            // the same condition as in `for_each_strided`
            if run.step > 1 && run.count > 1 {
                strided.push(Self {
                    run,
                    before,
                    len: annulus_core::index(part.rows.len()),
                    values: part.values,
                });
            }
            before += annulus_core::index(run.count);
        }
        strided
    }

    /// Calls `each` with the number and the values of every row of the run that is in `rows` of
    /// line `line`.
    fn for_each_row(
        &self,
        line: usize,
        rows: Range<usize>,
        inner: usize,
        mut each: impl FnMut(usize, &[T]),
    ) {
        let number = |row: usize| i64::try_from(row).unwrap_or(i64::MAX);
        for index in self.run.indices_within(number(rows.start), number(rows.end)) {
            let local = line * self.len + self.before + annulus_core::index(index);
            each(
                annulus_core::index(self.run.at(index).cast_unsigned()),
                &self.values[local * inner..][..inner],
            );
        }
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
