//! Element types of a file and their conversion to what a plan computes in.

use annulus_core::{DType, Element};
use half::{bf16, f16};

/// The element type of a tensor in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 64 bits.
    I64,
    /// A float.
    Float(DType),
}

/// Every kind with its name in a header.
const NAMES: [(Kind, &str); 13] = [
    (Kind::Bool, "BOOL"),
    (Kind::U8, "U8"),
    (Kind::I8, "I8"),
    (Kind::U16, "U16"),
    (Kind::I16, "I16"),
    (Kind::U32, "U32"),
    (Kind::I32, "I32"),
    (Kind::U64, "U64"),
    (Kind::I64, "I64"),
    (Kind::Float(DType::F16), "F16"),
    (Kind::Float(DType::Bf16), "BF16"),
    (Kind::Float(DType::F32), "F32"),
    (Kind::Float(DType::F64), "F64"),
];

impl Kind {
    /// The kind of that name in a header.
    pub(crate) fn named(name: &str) -> Option<Self> {
        NAMES.iter().find(|(_, known)| *known == name).map(|&(kind, _)| kind)
    }

    /// Every known name, for errors.
    pub(crate) fn names() -> String {
        NAMES.map(|(_, name)| name).join(", ")
    }

    /// Its name in a header.
    pub(crate) fn name(self) -> &'static str {
        NAMES.iter().find(|(kind, _)| *kind == self).map_or("", |&(_, name)| name)
    }

    /// Bytes of one element.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::U64 | Self::I64 => 8,
            Self::Float(dtype) => dtype.bytes(),
        }
    }

    /// The float type, if it is one.
    pub(crate) const fn float(self) -> Option<DType> {
        match self {
            Self::Float(dtype) => Some(dtype),
            _ => None,
        }
    }
}

/// Turns little-endian bytes of a file into this machine's order, or back, in place.
pub(crate) fn swap_if_big_endian(bytes: &mut [u8], element: usize) {
    if cfg!(target_endian = "big") {
        bytes.chunks_exact_mut(element).for_each(<[u8]>::reverse);
    }
}

/// Rounds floats of a file once to the wanted type. Lengths match: `bytes` holds `into.len()` elements.
pub(crate) fn floats<T: Element>(from: DType, bytes: &[u8], into: &mut [T]) {
    fn each<T: Element, const N: usize>(bytes: &[u8], into: &mut [T], widen: impl Fn([u8; N]) -> f64) {
        for (chunk, value) in bytes.as_chunks::<N>().0.iter().zip(into) {
            *value = T::from_f64(widen(*chunk));
        }
    }
    match from {
        DType::F64 => each(bytes, into, f64::from_le_bytes),
        DType::F32 => each(bytes, into, |bytes| f64::from(f32::from_le_bytes(bytes))),
        DType::Bf16 => each(bytes, into, |bytes| bf16::from_le_bytes(bytes).to_f64()),
        DType::F16 => each(bytes, into, |bytes| f16::from_le_bytes(bytes).to_f64()),
    }
}

/// Widens integers of a file; `None` if they are floats, or do not fit (unsigned 64-bit numbers above 2⁶³).
pub(crate) fn integers(from: Kind, bytes: &[u8]) -> Option<Vec<i64>> {
    fn each<const N: usize>(bytes: &[u8], widen: impl Fn([u8; N]) -> i64) -> Vec<i64> {
        bytes.as_chunks::<N>().0.iter().map(|chunk| widen(*chunk)).collect()
    }
    Some(match from {
        Kind::Bool | Kind::U8 => each(bytes, |bytes| i64::from(u8::from_le_bytes(bytes))),
        Kind::I8 => each(bytes, |bytes| i64::from(i8::from_le_bytes(bytes))),
        Kind::U16 => each(bytes, |bytes| i64::from(u16::from_le_bytes(bytes))),
        Kind::I16 => each(bytes, |bytes| i64::from(i16::from_le_bytes(bytes))),
        Kind::U32 => each(bytes, |bytes| i64::from(u32::from_le_bytes(bytes))),
        Kind::I32 => each(bytes, |bytes| i64::from(i32::from_le_bytes(bytes))),
        Kind::I64 => each(bytes, i64::from_le_bytes),
        Kind::U64 => {
            return bytes.as_chunks::<8>().0.iter().map(|chunk| i64::try_from(u64::from_le_bytes(*chunk)).ok()).collect();
        }
        Kind::Float(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_kinds_are_one_to_one() {
        for (kind, name) in NAMES {
            assert_eq!(Kind::named(name), Some(kind));
            assert_eq!(kind.name(), name);
        }
        assert_eq!(Kind::named("F8_E4M3"), None);
    }

    #[test]
    fn floats_are_rounded_once_and_integers_are_exact() {
        let mut into = [bf16::ZERO; 2];
        floats(DType::F32, bytemuck::cast_slice(&[1.0f32, f32::NAN]), &mut into);
        assert_eq!(into[0], bf16::ONE);
        assert!(into[1].is_nan());
        assert_eq!(integers(Kind::I8, &[0xff, 2]), Some(vec![-1, 2]));
        assert_eq!(integers(Kind::U64, &u64::MAX.to_le_bytes()), None);
        assert_eq!(integers(Kind::Float(DType::F32), &[0; 4]), None);
    }
}
