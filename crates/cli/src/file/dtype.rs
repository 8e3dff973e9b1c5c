//! Element types of files, and their conversion to the element types of plans.

use annulus_core::{DType, Element};
use half::{bf16, f16};
use safetensors::Dtype;

/// Returns the float type in which a plan computes with a tensor; `None` for all other types.
pub(crate) const fn float(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F64 => Some(DType::F64),
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Returns the type of a tensor of floats.
pub(crate) const fn of_floats(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
    }
}

/// True for the types of masks, ids, positions and packed lengths.
pub(crate) const fn is_integer(dtype: Dtype) -> bool {
    use Dtype::{BOOL, I8, I16, I32, I64, U8, U16, U32, U64};
    matches!(dtype, BOOL | U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64)
}

/// Bytes of an element of one of the types above.
pub(crate) fn element_bytes(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// Returns the bytes of a tensor; `None` from 2⁶¹ on. Lengths of 0 count as 1 in this check, so
/// that the product of any of the lengths fits.
pub(crate) fn bytes(dtype: Dtype, shape: &[usize]) -> Option<u64> {
    let lengths = shape.iter().map(|&len| len.max(1) as u64);
    let bits = lengths.chain([dtype.bitsize() as u64]).try_fold(1u64, u64::checked_mul)?;
    Some(if shape.contains(&0) { 0 } else { bits / 8 })
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
        same if same == T::DTYPE && cfg!(target_endian = "little") => {
            bytemuck::cast_slice_mut(into).copy_from_slice(bytes);
        }
        DType::F64 => each(bytes, into, f64::from_le_bytes),
        DType::F32 => each(bytes, into, |bytes| f64::from(f32::from_le_bytes(bytes))),
        DType::Bf16 => each(bytes, into, |bytes| bf16::from_le_bytes(bytes).to_f64()),
        DType::F16 => each(bytes, into, |bytes| f16::from_le_bytes(bytes).to_f64()),
    }
}

/// Appends integers of type `from`. Returns false if they are none, or if one does not fit: an
/// unsigned number of 2⁶³ or more.
pub(crate) fn integers(from: Dtype, bytes: &[u8], into: &mut Vec<i64>) -> bool {
    fn each<const N: usize>(
        bytes: &[u8],
        into: &mut Vec<i64>,
        widen: impl Fn([u8; N]) -> Option<i64>,
    ) -> bool {
        let before = into.len();
        into.extend(bytes.as_chunks::<N>().0.iter().map_while(|chunk| widen(*chunk)));
        into.len() - before == bytes.len() / N
    }
    match from {
        Dtype::BOOL | Dtype::U8 => each(bytes, into, |of| Some(u8::from_le_bytes(of).into())),
        Dtype::I8 => each(bytes, into, |of| Some(i8::from_le_bytes(of).into())),
        Dtype::U16 => each(bytes, into, |of| Some(u16::from_le_bytes(of).into())),
        Dtype::I16 => each(bytes, into, |of| Some(i16::from_le_bytes(of).into())),
        Dtype::U32 => each(bytes, into, |of| Some(u32::from_le_bytes(of).into())),
        Dtype::I32 => each(bytes, into, |of| Some(i32::from_le_bytes(of).into())),
        Dtype::I64 => each(bytes, into, |of| Some(i64::from_le_bytes(of))),
        Dtype::U64 => each(bytes, into, |of| i64::try_from(u64::from_le_bytes(of)).ok()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let integers = |from, bytes: &[u8]| {
            let mut into = Vec::new();
            integers(from, bytes, &mut into).then_some(into)
        };
        assert_eq!(integers(Dtype::I8, &[0xff, 2]), Some(vec![-1, 2]));
        assert_eq!(integers(Dtype::U64, &7u64.to_le_bytes()), Some(vec![7]));
        assert_eq!(integers(Dtype::U64, &u64::MAX.to_le_bytes()), None);
        assert_eq!(integers(Dtype::F32, &[0; 4]), None);
    }
}
