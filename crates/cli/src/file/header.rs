//! Header of a safetensors file: the tensors and the ranges of their bytes, checked before any data
//! is read.
//!
//! Not read by the crate `safetensors`: its errors name neither tensor nor field, it takes the last
//! of two tensors of one name, and one tensor of a dtype that it does not know makes the whole file
//! unreadable.

use std::{collections::BTreeMap, fs::File, os::unix::fs::FileExt, path::Path};

use annulus_core::Result;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, Visitor},
};

use super::kind::Kind;
use crate::{
    failure::{io, of_file},
    message,
};

/// The largest header, the limit of the format's reference implementation.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// Tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Element type.
    pub(crate) kind: Kind,
    /// Shape.
    pub(crate) shape: Vec<usize>,
    /// Offset of its bytes from the start of the file.
    pub(crate) offset: u64,
}

impl Entry {
    /// Returns the bytes of the whole tensor; `None` from 2⁶³ on. Lengths of 0 count as 1 in this
    /// check, so that the product of any of the lengths fits.
    pub(crate) fn bytes(kind: Kind, shape: &[usize]) -> Option<u64> {
        let lengths = shape.iter().map(|&len| len.max(1) as u64);
        let bytes = lengths
            .chain([kind.bytes() as u64])
            .try_fold(1u64, u64::checked_mul)
            .filter(|&bytes| bytes <= i64::MAX as u64)?;
        Some(if shape.contains(&0) { 0 } else { bytes })
    }
}

/// Tensors of a file by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    /// Tensors of a supported dtype.
    pub(super) entries: BTreeMap<String, Entry>,
    /// Dtypes of all other tensors. Only their byte ranges are checked.
    pub(super) unsupported: BTreeMap<String, String>,
}

/// Tensor in the JSON text.
#[derive(Debug)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for RawEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = RawEntry;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object with dtype, shape and data_offsets")
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<RawEntry, A::Error> {
                let mut dtype = None;
                let mut shape = None;
                let mut data_offsets = None;
                while let Some(field) = map.next_key::<String>()? {
                    match field.as_str() {
                        "dtype" => once(&mut dtype, "dtype", &mut map)?,
                        "shape" => once(&mut shape, "shape", &mut map)?,
                        "data_offsets" => once(&mut data_offsets, "data_offsets", &mut map)?,
                        // a later version of the format may add fields
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                let missing = A::Error::missing_field;
                Ok(RawEntry {
                    dtype: dtype.ok_or_else(|| missing("dtype"))?,
                    shape: shape.ok_or_else(|| missing("shape"))?,
                    data_offsets: data_offsets.ok_or_else(|| missing("data_offsets"))?,
                })
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// Reads the value of a field, and refuses a second one of the same name.
fn once<'de, T: Deserialize<'de>, A: MapAccess<'de>>(
    value: &mut Option<T>,
    field: &'static str,
    map: &mut A,
) -> std::result::Result<(), A::Error> {
    let read =
        map.next_value().map_err(|error| A::Error::custom(format_args!("{field}: {error}")))?;
    if value.replace(read).is_some() { Err(A::Error::duplicate_field(field)) } else { Ok(()) }
}

/// All tensors in order, not as a map, so that duplicate names are detected.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                let mut metadata = None::<Metadata>;
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        once(&mut metadata, METADATA, &mut map)?;
                    } else {
                        let entry = map.next_value();
                        let of_tensor = |error| {
                            A::Error::custom(format_args!(
                                "tensor {}: {error}",
                                message::name(&name)
                            ))
                        };
                        let entry = entry.map_err(of_tensor)?;
                        entries.push((name, entry));
                    }
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Key of the header that is not a tensor.
const METADATA: &str = "__metadata__";

/// Metadata, which is checked to have only strings and is discarded.
struct Metadata;

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Texts;
        impl<'de> Visitor<'de> for Texts {
            type Value = Metadata;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Metadata, A::Error> {
                while map.next_entry::<String, String>()?.is_some() {}
                Ok(Metadata)
            }
        }
        deserializer.deserialize_map(Texts)
    }
}

/// Reads and checks the header of `file`.
///
/// # Errors
/// [`annulus_core::Error::Io`] if the file is not a safetensors file or is truncated, or if its
/// tensors overlap or leave gaps; [`annulus_core::Error::InvalidArgument`] naming the file and the
/// tensor if the bytes of a tensor do not match its shape.
pub(super) fn read(file: &File, path: &Path) -> Result<Header> {
    let Parsed { entries, start, bytes } = parse(file, path)?;
    let mut header = Header::default();
    let mut ranges = Vec::new();
    for (name, raw) in entries.0 {
        let [begin, end] = raw.data_offsets;
        if begin > end {
            return Err(reversed(path, &name, &raw));
        }
        if end > bytes {
            let what = format!(
                "tensor {} ends at byte {end} of {bytes} bytes of data",
                message::name(&name)
            );
            return Err(io(path, format!("is truncated: {what}")));
        }
        let new = match Kind::named(&raw.dtype) {
            Some(kind) => {
                let entry = entry(path, &name, kind, &raw, start)?;
                header.entries.insert(name.clone(), entry).is_none()
                    && !header.unsupported.contains_key(&name)
            }
            None => {
                header.unsupported.insert(name.clone(), raw.dtype).is_none()
                    && !header.entries.contains_key(&name)
            }
        };
        if !new {
            return Err(io(path, format!("has two tensors named {}", message::name(&name))));
        }
        ranges.push((begin, end, name));
    }
    check_ranges(path, ranges, bytes)?;
    Ok(header)
}

/// Header text as JSON, and the extent of the data after it.
struct Parsed {
    entries: RawHeader,
    /// Offset of the data from the start of the file.
    start: u64,
    /// Bytes of the data.
    bytes: u64,
}

/// Reads and parses the text of the header.
///
/// # Errors
/// [`annulus_core::Error::Io`] if the file is not a safetensors file or is truncated.
fn parse(file: &File, path: &Path) -> Result<Parsed> {
    let file_bytes = file.metadata().map_err(|error| io(path, error))?.len();
    if file_bytes < 8 {
        return Err(io(
            path,
            format!("is truncated: {file_bytes} bytes, too short for a safetensors header"),
        ));
    }
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(|error| changed(path, &error))?;
    let length = u64::from_le_bytes(length);
    if length > MOST_HEADER_BYTES {
        return Err(io(
            path,
            format!(
                "is not a safetensors file: its header length is {length}, want at most \
                 {MOST_HEADER_BYTES}"
            ),
        ));
    }
    let start = 8 + length;
    if start > file_bytes {
        return Err(io(
            path,
            format!("is truncated: {file_bytes} bytes, but the header ends at {start}"),
        ));
    }
    let mut text = vec![0; annulus_core::index(length)];
    file.read_exact_at(&mut text, 8).map_err(|error| changed(path, &error))?;
    let entries = serde_json::from_slice(&text)
        .map_err(|error| io(path, format!("has a malformed safetensors header: {error}")))?;
    Ok(Parsed { entries, start, bytes: file_bytes - start })
}

/// Checks that the byte ranges of the tensors cover the `bytes` bytes of data without overlaps and
/// gaps.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the first tensor that does not start where the one before it
/// ends.
fn check_ranges(path: &Path, mut ranges: Vec<(u64, u64, String)>, bytes: u64) -> Result<()> {
    ranges.sort();
    let mut expected = 0;
    for (begin, end, name) in ranges {
        if begin != expected {
            let what = if begin < expected {
                "overlaps the tensor before it"
            } else {
                "leaves a gap before it"
            };
            let name = message::name(&name);
            return Err(io(
                path,
                format!(
                    "tensor {name} {what}: starts at byte {begin} of the data, want {expected}"
                ),
            ));
        }
        expected = end;
    }
    match bytes - expected {
        0 => Ok(()),
        more => Err(io(path, format!("has {more} bytes after its last tensor"))),
    }
}

/// Creates the error of a read within the length that the file had.
fn changed(path: &Path, error: &std::io::Error) -> annulus_core::Error {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => io(path, "was truncated while it was read"),
        _ => io(path, error),
    }
}

/// Creates the error of a tensor that ends before it begins.
fn reversed(path: &Path, name: &str, raw: &RawEntry) -> annulus_core::Error {
    let [begin, end] = raw.data_offsets;
    of_file(
        path,
        name,
        format!("bytes {begin}..{end} for {} {:?}", message::name(&raw.dtype), raw.shape),
        "ascending offsets",
    )
}

/// Creates the entry of a tensor whose byte range is within the file; `data` is the start of the
/// data.
///
/// # Errors
/// As [`read`].
fn entry(path: &Path, name: &str, kind: Kind, raw: &RawEntry, data: u64) -> Result<Entry> {
    let [begin, end] = raw.data_offsets;
    let shape: Vec<usize> = raw.shape.iter().map(|&len| annulus_core::index(len)).collect();
    let want = Entry::bytes(kind, &shape);
    if want != Some(end - begin) {
        let got = format!("bytes {begin}..{end} for {} of shape {shape:?}", kind.name());
        let want = want.map_or_else(
            || "a shape of less than 2^63 bytes".to_owned(),
            |bytes| format!("{bytes} bytes for this shape and dtype"),
        );
        return Err(of_file(path, name, got, want));
    }
    Ok(Entry { kind, shape, offset: data + begin })
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::DType;

    #[test]
    fn a_length_of_zero_does_not_hide_overflow() {
        let bytes = |shape: &[usize]| Entry::bytes(Kind::Float(DType::F32), shape);
        assert_eq!(bytes(&[2, 3]), Some(24));
        assert_eq!(bytes(&[1 << 40, 0, 2, 4]), Some(0));
        for zero in 0..3 {
            let mut shape = [1 << 62, 1 << 62, 1 << 62];
            shape[zero] = 0;
            assert_eq!(bytes(&shape), None);
        }
        assert_eq!(bytes(&[1 << 61]), None);
        assert_eq!(bytes(&[(1 << 61) - 1]), Some((1 << 63) - 4));
    }
}
