//! The header of a safetensors file: what tensors there are and where their bytes lie, checked before a byte of data is read.

use std::{collections::BTreeMap, fs::File, os::unix::fs::FileExt, path::Path};

use annulus_core::{Error, Result};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};

use super::kind::Kind;
use crate::failure::io;

/// The largest header that is believed; the format's own limit.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Element type.
    pub(crate) kind: Kind,
    /// Lengths.
    pub(crate) shape: Vec<usize>,
    /// Where its bytes start, from the start of the file.
    pub(crate) offset: u64,
}

impl Entry {
    /// Bytes of the whole tensor; `None` past 2⁶³.
    pub(crate) fn bytes(kind: Kind, shape: &[usize]) -> Option<u64> {
        let elements = shape.iter().try_fold(1u64, |product, &len| product.checked_mul(len as u64))?;
        elements.checked_mul(kind.bytes() as u64).filter(|&bytes| bytes <= i64::MAX as u64)
    }
}

/// A tensor as the JSON text has it.
#[derive(Debug, Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// All entries in order of appearance, so that a name that comes twice is seen.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Reads and checks the header of `file`.
///
/// # Errors
/// [`Error::Io`] if the file is no safetensors file, truncated, or its tensors overlap or leave holes; [`Error::InvalidArgument`] naming
/// the tensor for an unknown dtype or a shape that its bytes do not have.
pub(super) fn read(file: &File, path: &Path) -> Result<BTreeMap<String, Entry>> {
    let file_bytes = file.metadata().map_err(|error| io(path, error))?.len();
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(|_| io(path, format!("is truncated: {file_bytes} bytes, no safetensors header")))?;
    let length = u64::from_le_bytes(length);
    if length > MOST_HEADER_BYTES {
        return Err(io(path, format!("is no safetensors file: its header claims {length} bytes, more than {MOST_HEADER_BYTES}")));
    }
    let data = 8 + length;
    if data > file_bytes {
        return Err(io(path, format!("is truncated: {file_bytes} bytes, the header alone ends at {data}")));
    }
    let mut text = vec![0; annulus_core::index(length)];
    file.read_exact_at(&mut text, 8).map_err(|error| io(path, error))?;
    let raw: RawHeader = serde_json::from_slice(&text).map_err(|error| io(path, format!("has a malformed safetensors header: {error}")))?;

    let mut entries = BTreeMap::new();
    let mut extents = Vec::new();
    for (name, raw) in raw.0 {
        let [begin, end] = raw.data_offsets;
        extents.push((begin, end, name.clone()));
        if entries.insert(name.clone(), entry(&name, raw, data)?).is_some() {
            return Err(io(path, format!("has two tensors named {name}")));
        }
    }
    extents.sort();
    let mut expected = 0;
    for (begin, end, name) in extents {
        if begin != expected {
            let what = if begin < expected { "overlaps the tensor before it" } else { "leaves a hole before it" };
            return Err(io(path, format!("tensor {name} {what}: starts at byte {begin} of the data, want {expected}")));
        }
        expected = end;
    }
    match data.checked_add(expected) {
        Some(end) if end == file_bytes => Ok(entries),
        Some(end) if end < file_bytes => Err(io(path, format!("has {} bytes after its last tensor", file_bytes - end))),
        _ => Err(io(path, format!("is truncated: {file_bytes} bytes, its tensors need {}", data.saturating_add(expected)))),
    }
}

fn entry(name: &str, raw: RawEntry, data: u64) -> Result<Entry> {
    let [begin, end] = raw.data_offsets;
    let kind =
        Kind::named(&raw.dtype).ok_or_else(|| Error::invalid(name, format!("dtype {}", raw.dtype), format!("one of {}", Kind::names())))?;
    let shape: Vec<usize> = raw.shape.iter().map(|&len| annulus_core::index(len)).collect();
    let bytes = end.checked_sub(begin);
    if bytes.is_none() || bytes != Entry::bytes(kind, &shape) {
        let got = format!("bytes {begin}..{end} for {} {shape:?}", kind.name());
        return Err(Error::invalid(name, got, "as many bytes as its shape and dtype make"));
    }
    let offset = data.checked_add(begin).ok_or_else(|| Error::invalid(name, begin, "an offset within the file"))?;
    Ok(Entry { kind, shape, offset })
}
