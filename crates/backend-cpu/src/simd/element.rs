//! The four element types of inputs: exact widening to the accumulator type, and rounding from it.
//!
//! Scalar arithmetic of the two accumulator types, f32 and f64.

use std::{
    iter::Sum,
    ops::{Add, AddAssign, Div, Mul, Neg, Sub},
};

use annulus_core::{DType, Element};
use half::{bf16, f16};

use crate::simd::exp::{exp64, softmax_exp32, tanh32};

/// Element type of q, k, v and out.
pub(crate) trait WidenTo: Element<Accumulator: Float> {
    /// Widens exactly.
    fn widen(self) -> Self::Accumulator;
    /// Rounds to nearest, ties to even.
    fn narrow(value: Self::Accumulator) -> Self;
}

impl WidenTo for f64 {
    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }

    #[inline(always)]
    fn narrow(value: f64) -> Self {
        value
    }
}

impl WidenTo for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl WidenTo for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl WidenTo for f16 {
    /// Rebases the exponent by a multiplication, which also normalises subnormals. Branch-free, so
    /// that the compiler vectorises it.
    #[inline(always)]
    fn widen(self) -> f32 {
        const REBASE: f32 = f32::from_bits((127 + 112) << 23);
        let bits = u32::from(self.to_bits());
        let size = f32::from_bits((bits & 0x7fff) << 13) * REBASE;
        let special = if size >= 65_536.0 { 0x7f80_0000 } else { 0 };
        f32::from_bits(size.to_bits() | special | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// Arithmetic of f32 and f64.
pub(crate) trait Float:
    Element<Accumulator = Self>
    + Default
    + PartialOrd
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Sum
{
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;
    /// Elements of a 64-byte vector.
    const WIDTH: usize;

    /// Computes self·b + c, rounded once if `FUSED`.
    fn fused<const FUSED: bool>(self, b: Self, c: Self) -> Self;
    /// Computes e^self for arguments at most slightly above 0; see
    /// [`crate::simd::exp::softmax_exp32`].
    fn softmax_exp<const FUSED: bool>(self) -> Self;
    /// Computes tanh, for the soft cap.
    fn tanh<const FUSED: bool>(self) -> Self;
    /// Rounds to a narrower type and widens again. Wider types change nothing.
    fn rounded(self, dtype: DType) -> Self;
}

impl Float for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const INFINITY: Self = Self::INFINITY;
    const WIDTH: usize = 16;

    #[inline(always)]
    fn fused<const FUSED: bool>(self, b: Self, c: Self) -> Self {
        if FUSED { self.mul_add(b, c) } else { self * b + c }
    }

    #[inline(always)]
    fn softmax_exp<const FUSED: bool>(self) -> Self {
        softmax_exp32::<FUSED>(self)
    }

    #[inline(always)]
    fn tanh<const FUSED: bool>(self) -> Self {
        tanh32::<FUSED>(self)
    }

    #[inline(always)]
    fn rounded(self, dtype: DType) -> Self {
        match dtype {
            DType::F64 | DType::F32 => self,
            DType::Bf16 => bf16::from_f32(self).to_f32(),
            DType::F16 => f16::from_f32(self).to_f32(),
        }
    }
}

impl Float for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const INFINITY: Self = Self::INFINITY;
    const WIDTH: usize = 8;

    #[inline(always)]
    fn fused<const FUSED: bool>(self, b: Self, c: Self) -> Self {
        if FUSED { self.mul_add(b, c) } else { self * b + c }
    }

    #[inline(always)]
    fn softmax_exp<const FUSED: bool>(self) -> Self {
        exp64::<FUSED>(self)
    }

    #[inline(always)]
    fn tanh<const FUSED: bool>(self) -> Self {
        Self::tanh(self)
    }

    #[inline(always)]
    fn rounded(self, dtype: DType) -> Self {
        dtype.round(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_float_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            let brain = bf16::from_bits(bits);
            for (got, want) in [(half.widen(), half.to_f32()), (brain.widen(), brain.to_f32())] {
                assert!(
                    got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                    "{bits:04x}"
                );
            }
        }
    }
}
