//! Writes safetensors files, which appear only when they are complete.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
};

use annulus_core::{DType, Element, Error, Fingerprint, Result, Run, Runs};

use super::{
    header::Entry,
    kind,
    kind::Kind,
    rows::for_each_strided,
    stage::{Staged, Staging},
    target::{Target, resolve},
};
use crate::failure::io;

/// Bytes of one write of rows that alternate between ranks: large enough that the time of the
/// system call does not matter.
const WINDOW_BYTES: usize = 1 << 20;

/// Tensor of a file to write.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    /// Name.
    pub(crate) name: &'static str,
    /// Element type.
    pub(crate) kind: Kind,
    /// Global shape.
    pub(crate) shape: Vec<usize>,
}

impl Planned {
    /// Returns the bytes of the tensor; 0 from 2⁶³ on, which [`Output::create`] refuses.
    pub(crate) fn bytes(&self) -> u64 {
        Entry::bytes(self.kind, &self.shape).unwrap_or_default()
    }

    /// Returns the number of elements.
    pub(crate) fn elements(&self) -> usize {
        annulus_core::index(self.bytes()) / self.kind.bytes()
    }
}

/// One rank's rows of a tensor.
#[derive(Debug)]
pub(crate) struct Part<'a, T> {
    /// Row numbers in the whole tensor.
    pub(crate) rows: &'a Runs,
    /// Values in row-major order.
    pub(crate) values: &'a [T],
}

/// Safetensors file under construction. Ranks share it, because all writes are positioned. If it is
/// dropped before [`Output::finish`], no file is left.
#[derive(Debug)]
pub(crate) struct Output {
    staged: Staged,
    entries: BTreeMap<&'static str, Entry>,
}

impl Output {
    /// Creates the file in its full size, with its header, as [`Staging::Best`].
    ///
    /// # Errors
    /// [`Error::Io`] if the folder is missing or not writable, the target is not a regular file or
    /// not writable, or the disk is full.
    pub(crate) fn create(target: &Path, tensors: &[Planned]) -> Result<Self> {
        Self::create_staged(target, tensors, Staging::Best)
    }

    /// As [`Output::create`], with the given staging.
    ///
    /// # Errors
    /// As [`Output::create`]; [`Error::Io`] if the file system does not support the staging.
    pub(crate) fn create_staged(
        target: &Path,
        tensors: &[Planned],
        staging: Staging,
    ) -> Result<Self> {
        let (header, entries, end) =
            header(tensors).ok_or_else(|| io(target, "would have 2^63 bytes or more"))?;
        let staged = Staged::create(target, staging)?;
        let file = staged.file();
        file.set_len(end)
            .and_then(|()| file.write_all_at(&header, 0))
            .map_err(|error| io(target, error))?;
        Ok(Self { staged, entries })
    }

    /// Opens the file that another process has created for the same target and tensors, by its
    /// [`Output::handle`].
    ///
    /// # Errors
    /// [`Error::Io`] if this process cannot open it, or the file has another size.
    pub(crate) fn join(target: &Path, tensors: &[Planned], handle: &OsStr) -> Result<Self> {
        let (_, entries, end) =
            header(tensors).ok_or_else(|| io(target, "would have 2^63 bytes or more"))?;
        let staged = Staged::join(target, handle)?;
        match staged.file().metadata().map_err(|error| io(target, error))?.len() {
            bytes if bytes == end => Ok(Self { staged, entries }),
            bytes => Err(io(target, format!("has {bytes} bytes, rank 0 created it with {end}"))),
        }
    }

    /// Returns the handle by which another process can open the unfinished file.
    pub(crate) fn handle(&self) -> OsString {
        self.staged.handle()
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
        parts: &[Part<'_, T>],
        own: usize,
    ) -> Result<()> {
        let entry = self.entry(name, Some(T::DTYPE))?;
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
        entry: &Entry,
        axis: usize,
        parts: &[Part<'_, T>],
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
    ///
    /// # Errors
    /// As [`Output::write_rows`].
    pub(crate) fn write_flat<T: Element>(
        &self,
        name: &str,
        first: usize,
        values: &[T],
    ) -> Result<()> {
        self.write(self.entry(name, Some(T::DTYPE))?, first as u64, values)
    }

    /// Writes little-endian elements of the tensor `name` from element `first` on.
    ///
    /// # Errors
    /// As [`Output::write_rows`].
    pub(crate) fn write_bytes(&self, name: &str, first: usize, bytes: &[u8]) -> Result<()> {
        let entry = self.entry(name, None)?;
        self.write_at(bytes, entry.offset + (first * entry.kind.bytes()) as u64)
    }

    fn entry(&self, name: &str, dtype: Option<DType>) -> Result<&Entry> {
        let entry = self
            .entries
            .get(name)
            .filter(|entry| dtype.is_none_or(|dtype| entry.kind == Kind::Float(dtype)));
        entry.ok_or_else(|| {
            Error::invalid(
                name,
                dtype.map_or("bytes", DType::name),
                "a tensor that the file was created with",
            )
        })
    }

    /// Waits until the writes of this process are on the disk.
    ///
    /// # Errors
    /// [`Error::Io`].
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
    pub(crate) fn forget(self) {
        self.staged.forget();
    }

    fn write<T: Element>(&self, entry: &Entry, first: u64, values: &[T]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let offset = entry.offset + first * T::DTYPE.bytes() as u64;
        if cfg!(target_endian = "little") {
            return self.write_at(bytes, offset);
        }
        let mut swapped = bytes.to_vec();
        kind::swap_if_big_endian(&mut swapped, T::DTYPE.bytes());
        self.write_at(&swapped, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.staged
            .file()
            .write_all_at(bytes, offset)
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
    fn of_part(part: &Part<'a, T>) -> Vec<Self> {
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

/// Identifies a target on this machine independently of how its path is written: by the device and
/// inode of its folder and its name. `None` if the folder does not exist.
pub(crate) fn identity(target: &Path) -> Option<u64> {
    let Ok(Target::File { folder, path, .. }) = resolve(target) else { return None };
    let folder = std::fs::metadata(folder).ok()?;
    let name = path.file_name()?.as_encoded_bytes();
    Some(Fingerprint::new().number(folder.dev()).number(folder.ino()).bytes(name).finish())
}

/// Returns the header's bytes, the entries and the size of the file; `None` from 2⁶³ bytes on.
/// Tensors are ordered by descending element size and the header is padded, so that all are
/// aligned.
fn header(tensors: &[Planned]) -> Option<(Vec<u8>, BTreeMap<&'static str, Entry>, u64)> {
    let mut ordered: Vec<&Planned> = tensors.iter().collect();
    ordered.sort_by_key(|tensor| (std::cmp::Reverse(tensor.kind.bytes()), tensor.name));
    let mut json = serde_json::Map::new();
    let mut entries = BTreeMap::new();
    let mut end = 0u64;
    for tensor in ordered {
        let begin = end;
        end = begin.checked_add(Entry::bytes(tensor.kind, &tensor.shape)?)?;
        let entry = serde_json::json!({
            "dtype": tensor.kind.name(),
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        });
        json.insert(tensor.name.to_owned(), entry);
        entries.insert(
            tensor.name,
            Entry { kind: tensor.kind, shape: tensor.shape.clone(), offset: begin },
        );
    }
    let mut text = serde_json::Value::Object(json).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let data = 8 + text.len() as u64;
    entries.values_mut().for_each(|entry| entry.offset += data);
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    Some((bytes, entries, end.checked_add(data).filter(|&end| end <= i64::MAX as u64)?))
}
