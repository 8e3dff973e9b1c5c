//! Element types of files, and their conversion to the element types of plans.

use annulus_core::{DType, Element, Result, memory};
use half::{bf16, f16};

/// Element type of a tensor in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bool of one byte, 0 or 1.
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
    /// Float.
    Float(DType),
}

/// Kinds with their names in a header.
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
    /// Returns the kind with this name in a header.
    pub(crate) fn named(name: &str) -> Option<Self> {
        NAMES.iter().find(|(_, known)| *known == name).map(|&(kind, _)| kind)
    }

    /// Lists all names, for errors.
    pub(crate) fn names() -> String {
        NAMES.map(|(_, name)| name).join(", ")
    }

    /// Name in a header.
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

    /// Returns the float type, if it is one.
    pub(crate) const fn float(self) -> Option<DType> {
        match self {
            Self::Float(dtype) => Some(dtype),
            _ => None,
        }
    }
}

/// Converts little-endian bytes to the host's byte order, or back, in place.
pub(crate) fn swap_if_big_endian(bytes: &mut [u8], element: usize) {
    if cfg!(target_endian = "big") {
        bytes.chunks_exact_mut(element).for_each(<[u8]>::reverse);
    }
}

/// Converts floats of type `from` to `T`, each rounded once. `bytes` has `into.len()` elements.
pub(crate) fn floats<T: Element>(from: DType, bytes: &[u8], into: &mut [T]) {
    fn each<T: Element, const N: usize>(
        bytes: &[u8],
        into: &mut [T],
        widen: impl Fn([u8; N]) -> f64,
    ) {
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

/// Converts integers of type `from`. `None` if they are floats, or if one does not fit: an unsigned
/// number of 2⁶³ or more.
///
/// # Errors
/// [`annulus_core::Error::OutOfMemory`] naming the tensor `name`.
pub(crate) fn integers(name: &str, from: Kind, bytes: &[u8]) -> Result<Option<Vec<i64>>> {
    let mut wide = memory::list(name, bytes.len() / from.bytes())?;
    let mut each = Widen { bytes, wide: &mut wide };
    let fits = match from {
        Kind::Bool | Kind::U8 => each.by(|bytes| Some(i64::from(u8::from_le_bytes(bytes)))),
        Kind::I8 => each.by(|bytes| Some(i64::from(i8::from_le_bytes(bytes)))),
        Kind::U16 => each.by(|bytes| Some(i64::from(u16::from_le_bytes(bytes)))),
        Kind::I16 => each.by(|bytes| Some(i64::from(i16::from_le_bytes(bytes)))),
        Kind::U32 => each.by(|bytes| Some(i64::from(u32::from_le_bytes(bytes)))),
        Kind::I32 => each.by(|bytes| Some(i64::from(i32::from_le_bytes(bytes)))),
        Kind::I64 => each.by(|bytes| Some(i64::from_le_bytes(bytes))),
        Kind::U64 => each.by(|bytes| i64::try_from(u64::from_le_bytes(bytes)).ok()),
        Kind::Float(_) => false,
    };
    Ok(fits.then_some(wide))
}

/// Conversion of the bytes of a file to numbers.
struct Widen<'a> {
    bytes: &'a [u8],
    wide: &'a mut Vec<i64>,
}

impl Widen<'_> {
    /// Appends every element; returns false if one does not fit.
    fn by<const N: usize>(&mut self, widen: impl Fn([u8; N]) -> Option<i64>) -> bool {
        self.wide.extend(self.bytes.as_chunks::<N>().0.iter().map_while(|chunk| widen(*chunk)));
        self.wide.len() == self.bytes.len() / N
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_names_correspond() {
        for (kind, name) in NAMES {
            assert_eq!(Kind::named(name), Some(kind));
            assert_eq!(kind.name(), name);
        }
        assert_eq!(Kind::named("F8_E4M3"), None);
    }

    /// Checks values just above a tie, which a second rounding would round down.
    #[test]
    fn wider_floats_are_rounded_once() {
        let one = |from, bytes: &[u8]| {
            let (mut narrow, mut half) = ([bf16::ZERO], [f16::ZERO]);
            floats(from, bytes, &mut narrow);
            floats(from, bytes, &mut half);
            (narrow[0].to_f64(), half[0].to_f64())
        };
        let above_a_tie = 1.0f32 + 2f32.powi(-8) + 2f32.powi(-23);
        assert_eq!(one(DType::F32, &above_a_tie.to_le_bytes()).0, 1.0078125);
        let above_a_tie = 1.0 + 2f64.powi(-8) + 2f64.powi(-50);
        assert_eq!(one(DType::F64, &above_a_tie.to_le_bytes()).0, 1.0078125);
        let above_a_tie = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(one(DType::F64, &above_a_tie.to_le_bytes()).1, 1.0009765625);
        let mut narrow = [0f32];
        let above_a_tie = 1.0 + 2f64.powi(-24) + 2f64.powi(-52);
        floats(DType::F64, &above_a_tie.to_le_bytes(), &mut narrow);
        assert_eq!(narrow[0], 1.0 + f32::EPSILON);
        // widening is exact
        let mut wide = [0f64];
        floats(DType::Bf16, &bf16::from_bits(0x8001).to_le_bytes(), &mut wide);
        assert_eq!(wide[0], -2f64.powi(-133));
        floats(DType::F32, &(-0f32).to_le_bytes(), &mut wide);
        assert!(wide[0] == 0.0 && wide[0].is_sign_negative());
    }

    #[test]
    fn nan_is_kept_and_integers_are_exact() {
        let mut into = [bf16::ZERO; 2];
        floats(DType::F32, bytemuck::cast_slice(&[1.0f32, f32::NAN]), &mut into);
        assert_eq!(into[0], bf16::ONE);
        assert!(into[1].is_nan());
        let integers = |from, bytes: &[u8]| integers("ids", from, bytes).unwrap();
        assert_eq!(integers(Kind::I8, &[0xff, 2]), Some(vec![-1, 2]));
        assert_eq!(integers(Kind::U64, &7u64.to_le_bytes()), Some(vec![7]));
        assert_eq!(integers(Kind::U64, &u64::MAX.to_le_bytes()), None);
        assert_eq!(integers(Kind::Float(DType::F32), &[0; 4]), None);
    }
}
