//! The four element types of inputs: exact widening to the accumulator type, and rounding from it.

use annulus_core::Element;
use half::{bf16, f16};

use crate::simd::float::Float;

/// Element type of q, k, v and out.
pub(crate) trait Widen: Element<Accumulator: Float> {
    /// Widens exactly.
    fn widen(self) -> Self::Accumulator;
    /// Rounds to nearest, ties to even.
    fn narrow(value: Self::Accumulator) -> Self;
}

impl Widen for f64 {
    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }

    #[inline(always)]
    fn narrow(value: f64) -> Self {
        value
    }
}

impl Widen for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Widen for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl Widen for f16 {
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
