//! Writing safetensors files: whole or not at all.

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
    rows::pieces,
    stage::{Manner, Staged},
    target::{Target, resolve},
};
use crate::failure::io;

/// Bytes that are written at a time of rows that several ranks hold in turns.
const WINDOW_BYTES: usize = 1 << 20;

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

/// Rows of a tensor: one rank's.
#[derive(Debug)]
pub(crate) struct Part<'a, T> {
    /// Their numbers in the whole tensor.
    pub(crate) rows: &'a Runs,
    /// The local tensor, dense.
    pub(crate) values: &'a [T],
}

/// A file on its way. Ranks share it: every write is positioned. Dropped before [`Output::finish`], it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Output {
    staged: Staged,
    entries: BTreeMap<&'static str, Entry>,
}

impl Output {
    /// Makes the file in its full size, with its header. It has no name until it is finished where
    /// the file system has such files.
    ///
    /// # Errors
    /// [`Error::Io`]: the folder is missing or not writable, the target is no ordinary file or may
    /// not be written, the disk is full.
    pub(crate) fn create(target: &Path, tensors: &[Planned]) -> Result<Self> {
        Self::create_in_manner(target, tensors, Manner::Best)
    }

    /// As [`Output::create`], in one of the two ways.
    ///
    /// # Errors
    /// As [`Output::create`]; the file system has no nameless files.
    pub(crate) fn create_in_manner(
        target: &Path,
        tensors: &[Planned],
        manner: Manner,
    ) -> Result<Self> {
        let (header, entries, end) =
            header(tensors).ok_or_else(|| io(target, "would pass 2^63 bytes"))?;
        let staged = Staged::create(target, manner)?;
        let file = staged.file();
        file.set_len(end)
            .and_then(|()| file.write_all_at(&header, 0))
            .map_err(|error| io(target, error))?;
        Ok(Self { staged, entries })
    }

    /// Opens the file that another process has made for the same target and tensors, by its
    /// [`Output::handle`].
    ///
    /// # Errors
    /// [`Error::Io`]: this process does not see it, or it is another file.
    pub(crate) fn join(target: &Path, tensors: &[Planned], handle: &OsStr) -> Result<Self> {
        let (_, entries, end) =
            header(tensors).ok_or_else(|| io(target, "would pass 2^63 bytes"))?;
        let staged = Staged::join(target, handle)?;
        match staged.file().metadata().map_err(|error| io(target, error))?.len() {
            bytes if bytes == end => Ok(Self { staged, entries }),
            bytes => Err(io(target, format!("has {bytes} bytes, rank 0 made it with {end}"))),
        }
    }

    /// By what another process can open the file before it has its name.
    pub(crate) fn handle(&self) -> OsString {
        self.staged.handle()
    }

    /// Writes rows along `axis` of the tensor `name`, of which `parts` holds what each rank of this
    /// process has. Each rank calls this with the number of its own part. Rows that lie together in
    /// a part are written by its rank. Rows that parts hold in turns are collected from all of
    /// them, and every rank writes its share of the tensor: a call of the system for a megabyte
    /// instead of one for each row.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidArgument`] if the file was not planned with such a tensor.
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
        pieces(&entry.shape, axis, part.rows, |piece| {
            let (from, after) = rest.split_at(piece.elements());
            rest = after;
            match (piece.rows, parts.len()) {
                (1, _) => self.write(entry, piece.first, from),
                // the rows between are other processes'
                (_, 1) => from.chunks(piece.row).zip(0u64..).try_for_each(|(row, index)| {
                    self.write(entry, piece.first + index * piece.stride, row)
                }),
                _ => Ok(()),
            }
        })?;
        if parts.len() > 1 { self.write_in_turns(entry, axis, parts, own) } else { Ok(()) }
    }

    /// One rank's share of the rows that parts hold in turns.
    fn write_in_turns<T: Element>(
        &self,
        entry: &Entry,
        axis: usize,
        parts: &[Part<'_, T>],
        own: usize,
    ) -> Result<()> {
        let strided: Vec<Turns<'_, T>> = parts.iter().flat_map(Turns::of_part).collect();
        let inner: usize = entry.shape[axis + 1..].iter().product();
        let (lines, len) = (entry.shape[..axis].iter().product::<usize>(), entry.shape[axis]);
        if strided.is_empty() || lines * len * inner == 0 {
            return Ok(());
        }
        // rows of all lines, one line after the other
        let share = |rank: usize| {
            (lines as u128 * len as u128 * rank as u128 / parts.len() as u128) as usize
        };
        let (begin, end) = (share(own), share(own + 1));
        let window = (WINDOW_BYTES / (inner * T::DTYPE.bytes())).clamp(1, (end - begin).max(1));
        let (mut rows, mut held) = (vec![T::zeroed(); window * inner], vec![false; window]);
        for first in (begin..end).step_by(window) {
            let last = (first + window).min(end);
            held.fill(false);
            for line in first / len..=(last - 1) / len {
                let within = |row: usize| row.clamp(line * len, (line + 1) * len) - line * len;
                for turns in &strided {
                    turns.copy(line, within(first)..within(last), inner, |row, values| {
                        let index = line * len + row - first;
                        held[index] = true;
                        rows[index * inner..][..inner].copy_from_slice(values);
                    });
                }
            }
            // what is not held by these parts is another's to write
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

    /// Writes elements of the tensor `name` from its element `first` on, whatever its axes.
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

    /// Writes little-endian bytes of the tensor `name` from its element `first` on.
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
                "a tensor that the file was made with",
            )
        })
    }

    /// Waits until what this process has written is on the disk.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn sync(&self) -> Result<()> {
        self.staged.file().sync_all().map_err(|error| io(self.staged.named(), error))
    }

    /// Gives the complete file its name.
    ///
    /// # Errors
    /// [`Error::Io`]; then nothing is left.
    pub(crate) fn finish(self) -> Result<()> {
        self.sync()?;
        self.staged.commit()
    }

    /// Lets go of a file that another process has finished.
    pub(crate) fn forget(self) {
        self.staged.forget();
    }

    fn write<T: Element>(&self, entry: &Entry, first: u64, values: &[T]) -> Result<()> {
        let (bytes, offset): (&[u8], u64) =
            (bytemuck::cast_slice(values), entry.offset + first * T::DTYPE.bytes() as u64);
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

/// Rows of a part at equal distances.
struct Turns<'a, T> {
    run: Run,
    /// Rows of the part before these.
    before: usize,
    /// Rows of the part.
    len: usize,
    values: &'a [T],
}

impl<'a, T: Element> Turns<'a, T> {
    fn of_part(part: &Part<'a, T>) -> Vec<Self> {
        let mut before = 0;
        let mut turns = Vec::new();
        for &run in part.rows.runs() {
            // as `pieces` has it: any others are one row at a time
            if run.step > 1 && run.count > 1 {
                turns.push(Self {
                    run,
                    before,
                    len: annulus_core::index(part.rows.len()),
                    values: part.values,
                });
            }
            before += annulus_core::index(run.count);
        }
        turns
    }

    /// Calls `each` with every one of these rows that lies in `rows` of line `line`.
    fn copy(
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

/// Identifies this target among all of the same machine, however its path is written;
/// `None` where its folder cannot be found.
pub(crate) fn identity(target: &Path) -> Option<u64> {
    let Ok(Target::File { folder, path, .. }) = resolve(target) else { return None };
    let folder = std::fs::metadata(folder).ok()?;
    let name = path.file_name()?.as_encoded_bytes();
    Some(Fingerprint::new().number(folder.dev()).number(folder.ino()).bytes(name).finish())
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
