//! Reads rows of tensors from a safetensors file into dense arrays.

use std::{
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use annulus_core::{Element, Error, Result, Runs, memory};
use safetensors::tensor::{Metadata, TensorInfo};

use super::{dtype, for_each_range, open_regular};
use crate::{
    failure::{io, of_file},
    message,
};

/// The most bytes of one read, with the gaps between its ranges: the memory beside the array.
const SPAN_BYTES: u64 = 1 << 20;
/// The largest gap between two ranges that is read and discarded: copying 16 KiB takes about as
/// long as a system call.
const GAP_BYTES: u64 = 1 << 14;

/// The largest header, the limit of the format's reference implementation.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// Open safetensors file. Ranks share it, because all reads are positioned.
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Offset of the data from the start of the file.
    start: u64,
}

impl TensorFile {
    /// Opens a file and checks its header: the ranges of the tensors cover its data without gaps,
    /// and the bytes of each match its shape.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, is malformed or truncated.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = open_regular(path)?;
        let bytes = file.metadata().map_err(|error| io(path, error))?.len();
        let wrong = |what: String| io(path, format!("is not a safetensors file: {what}"));
        let truncated = |end| io(path, format!("is truncated: has {bytes} bytes, want {end}"));
        if bytes < 8 {
            return Err(truncated(8));
        }
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(|error| io(path, error))?;
        let length = u64::from_le_bytes(length);
        if length > MOST_HEADER_BYTES {
            return Err(wrong(format!(
                "header of {length} bytes, want at most {MOST_HEADER_BYTES}"
            )));
        }
        let start = 8 + length;
        if start > bytes {
            return Err(truncated(start));
        }
        let mut text = vec![0; annulus_core::index(length)];
        file.read_exact_at(&mut text, 8).map_err(|error| io(path, error))?;
        let metadata: Metadata =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let end = start.saturating_add(metadata.data_len() as u64);
        if end > bytes {
            return Err(truncated(end));
        }
        if end < bytes {
            return Err(wrong(format!("{} bytes after its last tensor", bytes - end)));
        }
        for (name, info) in metadata.tensors() {
            if dtype::bytes(info.dtype, &info.shape).is_none() {
                let shape = format!("shape {:?}", info.shape);
                return Err(of_file(path, &name, shape, "fewer than 2^61 bytes"));
            }
        }
        Ok(Self { path: path.to_owned(), file, metadata, start })
    }

    /// Creates an error about the tensor `name` of this file.
    fn invalid(
        &self,
        name: &str,
        got: impl std::fmt::Display,
        want: impl std::fmt::Display,
    ) -> Error {
        of_file(&self.path, name, got, want)
    }

    /// Returns the tensor `name`, if the file has it.
    pub(crate) fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// Lists the names of all tensors, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names = self.metadata.offset_keys();
        names.sort();
        names
    }

    /// Returns the tensor `name`, which must have `dimensions` axes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming it.
    pub(crate) fn need(&self, name: &str, dimensions: usize) -> Result<&TensorInfo> {
        let entry = self.entry(name)?;
        if entry.shape.len() != dimensions {
            return Err(self.invalid(
                name,
                format!("shape {:?}", entry.shape),
                format!("{dimensions} dimensions"),
            ));
        }
        Ok(entry)
    }

    /// Reads the rows `rows` along `axis` of a float tensor, each element rounded once to `T`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it holds no floats; [`Error::Io`]; [`Error::OutOfMemory`].
    pub(crate) fn floats<T: Element>(
        &self,
        name: &str,
        axis: usize,
        rows: &Runs,
    ) -> Result<Vec<T>> {
        let entry = self.entry(name)?;
        let from = dtype::float(entry.dtype)
            .ok_or_else(|| self.invalid(name, entry.dtype, "a float dtype"))?;
        let mut values = memory::zeroed::<T>(name, local_elements(entry, axis, rows))?;
        let mut rest = &mut values[..];
        self.read_rows(name, axis, rows, |bytes| {
            let (into, after) = std::mem::take(&mut rest).split_at_mut(bytes.len() / from.bytes());
            rest = after;
            dtype::floats(from, bytes, into);
        })?;
        Ok(values)
    }

    /// Reads the rows `rows` along `axis` of an integer or bool tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has floats or numbers of 2⁶³ and more; [`Error::Io`];
    /// [`Error::OutOfMemory`].
    pub(crate) fn integers(&self, name: &str, axis: usize, rows: &Runs) -> Result<Vec<i64>> {
        let entry = self.entry(name)?;
        self.refuse_floats(name)?;
        let mut numbers = memory::list(name, local_elements(entry, axis, rows))?;
        let mut fit = true;
        self.read_rows(name, axis, rows, |bytes| {
            fit &= dtype::integers(entry.dtype, bytes, &mut numbers);
        })?;
        let wrong = || self.invalid(name, "a number of 2^63 or more", "numbers below 2^63");
        if fit { Ok(numbers) } else { Err(wrong()) }
    }

    /// Reads the rows `rows` along `axis` as bits, 64 in a word, which are 1 where an element is
    /// not 0.
    pub(crate) fn bits(&self, name: &str, axis: usize, rows: &Runs) -> Result<Vec<u64>> {
        let entry = self.entry(name)?;
        let words = local_elements(entry, axis, rows).div_ceil(64);
        let mut bits = memory::zeroed::<u64>(name, words)?;
        let mut index = 0;
        self.read_rows(name, axis, rows, |bytes| {
            for element in bytes.chunks_exact(dtype::element_bytes(entry.dtype)) {
                let is_set = element.iter().any(|&byte| byte != 0);
                bits[index / 64] |= u64::from(is_set) << (index % 64);
                index += 1;
            }
        })?;
        Ok(bits)
    }

    /// As [`TensorFile::integers`], for numbers of 32 bits.
    pub(crate) fn narrow_integers(&self, name: &str, axis: usize, rows: &Runs) -> Result<Vec<i32>> {
        let wide = self.integers(name, axis, rows)?;
        let mut narrow = memory::list(name, wide.len())?;
        for number in wide {
            narrow.push(
                i32::try_from(number)
                    .map_err(|_| self.invalid(name, number, "numbers of 32 bits"))?,
            );
        }
        Ok(narrow)
    }

    /// Checks that the tensor `name`, if there is one, has an integer or bool dtype.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming it.
    pub(crate) fn refuse_floats(&self, name: &str) -> Result<()> {
        match self.get(name) {
            Some(TensorInfo { dtype, .. }) if !dtype::is_integer(*dtype) => {
                Err(self.invalid(name, dtype, "an integer or bool dtype"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming it.
    pub(crate) fn entry(&self, name: &str) -> Result<&TensorInfo> {
        let missing = || {
            self.invalid(name, "no such tensor", format!("a tensor named {}", message::name(name)))
        };
        self.get(name).ok_or_else(missing)
    }

    /// Reads the rows `rows` along `axis` and passes their bytes to `each`, in order. Ranges with
    /// small gaps are read together.
    fn read_rows(
        &self,
        name: &str,
        axis: usize,
        rows: &Runs,
        mut each: impl FnMut(&[u8]),
    ) -> Result<()> {
        let entry = self.entry(name)?;
        let element = dtype::element_bytes(entry.dtype) as u64;
        let mut bytes = Vec::new();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut read = |ranges: &mut Vec<Range<u64>>| {
            let [Some(first), Some(last)] = [ranges.first(), ranges.last()] else { return Ok(()) };
            let start = first.start;
            bytes.resize(annulus_core::index(last.end - start), 0);
            self.read(name, &mut bytes, self.start + entry.data_offsets.0 as u64 + start)?;
            for range in ranges.drain(..) {
                let [first, end] = [range.start, range.end].map(|at| at - start);
                each(&bytes[annulus_core::index(first)..annulus_core::index(end)]);
            }
            Ok(())
        };
        for_each_range(&entry.shape, axis, rows, |first, count| {
            let mut rest = first * element..(first + count) * element;
            while !rest.is_empty() {
                let start = ranges.first().map_or(rest.start, |first| first.start);
                let end = ranges.last().map_or(rest.start, |last| last.end);
                let most = start + SPAN_BYTES;
                if rest.start < end || rest.start - end > GAP_BYTES || rest.start >= most {
                    read(&mut ranges)?;
                    continue;
                }
                let part = rest.start..rest.end.min(most);
                rest.start = part.end;
                ranges.push(part);
            }
            Ok(())
        })?;
        read(&mut ranges)
    }

    /// Reads bytes from byte `offset` of the file on.
    fn read(&self, name: &str, into: &mut [u8], offset: u64) -> Result<()> {
        self.file.read_exact_at(into, offset).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                let end = self.file.metadata().map_or_else(
                    |error| error.to_string(),
                    |metadata| format!("{} bytes", metadata.len()),
                );
                let wanted = offset + into.len() as u64;
                io(
                    &self.path,
                    format!(
                        "was truncated while it was read: {end}, tensor {} needs {wanted}",
                        message::name(name)
                    ),
                )
            }
            _ => io(&self.path, format!("tensor {}: {error}", message::name(name))),
        })
    }
}

/// Number of elements of the given rows. Cannot overflow: the header has been checked to describe
/// as many bytes as the file has for the whole tensor.
fn local_elements(entry: &TensorInfo, axis: usize, rows: &Runs) -> usize {
    let others =
        entry.shape.iter().enumerate().filter(|&(index, _)| index != axis).map(|(_, &len)| len);
    others.product::<usize>() * annulus_core::index(rows.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{OutputFile, PlannedTensor, TensorPart};
    use annulus_core::Run;
    use safetensors::Dtype;

    /// Returns the rows of one rank of a striped layout.
    fn every(step: u64, start: u64, len: u64) -> Runs {
        let mut rows = Runs::new();
        rows.push_run(Run {
            start: start as i64,
            step: step as i64,
            count: (len - start).div_ceil(step),
        });
        rows
    }

    fn planned(shape: &[usize]) -> Vec<PlannedTensor> {
        vec![PlannedTensor::new("x", Dtype::F32, shape)]
    }

    /// Returns the numbers of read and write system calls of this thread.
    #[cfg(target_os = "linux")]
    fn calls() -> [u64; 2] {
        let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        ["syscr: ", "syscw: "].map(|name| {
            text.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap()
        })
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn striped_rows_need_few_system_calls() {
        let path =
            std::env::temp_dir().join(format!("annulus-turns-{}.safetensors", std::process::id()));
        let (ranks, len, heads) = (4u64, 100_000, 2);
        let output = OutputFile::create(&path, &planned(&[1, len, heads])).unwrap();
        let rows: Vec<Runs> = (0..ranks).map(|rank| every(ranks, rank, len as u64)).collect();
        let number = |row: i64, head: usize| (row * heads as i64 + head as i64) as f32;
        let of_rank = |rows: &Runs| {
            rows.iter()
                .flat_map(|row| (0..heads).map(move |head| number(row, head)))
                .collect::<Vec<f32>>()
        };
        let values: Vec<Vec<f32>> = rows.iter().map(of_rank).collect();
        let parts: Vec<TensorPart<'_, f32>> =
            rows.iter().zip(&values).map(|(rows, values)| TensorPart { rows, values }).collect();
        let [_, before] = calls();
        output.write_rows("x", 1, &parts).unwrap();
        let written = calls()[1] - before;
        assert!(written < 50, "{written} writes");
        output.finish().unwrap();

        let file = TensorFile::open(&path).unwrap();
        let [before, _] = calls();
        for (rows, values) in rows.iter().zip(&values) {
            assert_eq!(&file.floats::<f32>("x", 1, rows).unwrap(), values);
            let wide: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
            assert_eq!(file.floats::<f64>("x", 1, rows).unwrap(), wide);
        }
        let read = calls()[0] - before;
        assert!(read < 100, "{read} reads");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn parts_of_any_rows_are_written_and_read() {
        let path =
            std::env::temp_dir().join(format!("annulus-parts-{}.safetensors", std::process::id()));
        let run = |start, step, count| Run { start, step, count };
        // contiguous, strided, descending and single rows
        let all = [
            vec![run(0, 1, 5), run(12, 3, 3)],
            vec![run(5, 2, 4)],
            vec![run(10, -4, 2), run(8, 1, 1)],
            vec![run(13, 3, 2), run(14, 3, 2), run(19, 1, 2)],
        ];
        let rows: Vec<Runs> = all
            .iter()
            .map(|runs| {
                let mut rows = Runs::new();
                runs.iter().for_each(|&run| rows.push_run(run));
                rows
            })
            .collect();
        let mut seen: Vec<i64> = rows.iter().flat_map(Runs::iter).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..21).collect::<Vec<_>>());
        for (lines, inner) in [(6, 1), (6, 3), (1, 70_000)] {
            let shape = [1, lines, 21, inner];
            let value =
                |line: usize, row: usize, index: usize| ((line * 21 + row) * inner + index) as f32;
            let local = |rows: &Runs| {
                let mut values = Vec::new();
                for line in 0..lines {
                    rows.iter().for_each(|row| {
                        values.extend((0..inner).map(|index| value(line, row as usize, index)))
                    });
                }
                values
            };
            let values: Vec<Vec<f32>> = rows.iter().map(local).collect();
            let parts: Vec<TensorPart<'_, f32>> = rows
                .iter()
                .zip(&values)
                .map(|(rows, values)| TensorPart { rows, values })
                .collect();
            // all ranks in one process, or one process per rank
            for together in [true, false] {
                let output = OutputFile::create(&path, &planned(&shape)).unwrap();
                for parts in parts.chunks(if together { parts.len() } else { 1 }) {
                    output.write_rows("x", 2, parts).unwrap();
                }
                output.finish().unwrap();
                let file = TensorFile::open(&path).unwrap();
                let whole = file.floats::<f32>("x", 2, &Runs::counting(0, 21)).unwrap();
                assert!(
                    whole.iter().zip(0..).all(|(&got, index)| got == index as f32),
                    "inner {inner}, together: {together}"
                );
                for (rows, values) in rows.iter().zip(&values) {
                    assert_eq!(&file.floats::<f32>("x", 2, rows).unwrap(), values);
                }
            }
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_truncated_while_it_is_read_is_an_error_with_the_tensor() {
        let path = std::env::temp_dir()
            .join(format!("annulus-shorter-{}.safetensors", std::process::id()));
        OutputFile::create(&path, &planned(&[1, 100, 2])).unwrap().finish().unwrap();
        let file = TensorFile::open(&path).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
        let error = file.floats::<f32>("x", 1, &Runs::counting(0, 100)).unwrap_err().to_string();
        assert!(
            error.starts_with(&path.display().to_string())
                && error.contains("was truncated")
                && error.contains("tensor x"),
            "{error}"
        );
        std::fs::remove_file(path).unwrap();
    }
}
