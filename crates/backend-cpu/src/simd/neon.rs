//! NEON leaf: a vector of sixteen f32 in four registers.

use std::arch::aarch64::*;

use annulus_core::DType;

use crate::simd::{
    element::WidenTo,
    exp::EXP2_COEFFICIENTS,
    vector::{FOUR, MAX_LANES, Vector, strip, strip_mut, widened},
};

/// Registers of a vector.
const REGISTERS: usize = 4;

/// Sixteen f32.
///
/// Invariant: only the function of `dispatch.rs` that is compiled for NEON names this type, and
/// it runs only on a machine that has NEON. Every method below may therefore use it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quad([float32x4_t; REGISTERS]);

impl Quad {
    #[inline(always)]
    fn map(mut self, f: impl Fn(float32x4_t) -> float32x4_t) -> Self {
        for part in &mut self.0 {
            *part = f(*part);
        }
        self
    }

    #[inline(always)]
    fn zip(mut self, b: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        for (part, b) in self.0.iter_mut().zip(b.0) {
            *part = f(*part, b);
        }
        self
    }
}

/// Computes e^x as [`crate::simd::exp::softmax_exp32`], except that an instruction rounds n.
#[inline(always)]
fn softmax_exp(x: float32x4_t) -> float32x4_t {
    // SAFETY: the machine has the instructions: invariant of `Quad`.
    unsafe {
        let z = vmulq_n_f32(x, std::f32::consts::LOG2_E);
        let n = vrndnq_f32(z);
        let r = vsubq_f32(z, n);
        let mut y = vdupq_n_f32(EXP2_COEFFICIENTS[5]);
        for power in [4, 3, 2, 1, 0] {
            y = vfmaq_f32(vdupq_n_f32(EXP2_COEFFICIENTS[power]), y, r);
        }
        // adds n to the exponent field
        let scaled = vreinterpretq_f32_s32(vaddq_s32(
            vreinterpretq_s32_f32(y),
            vshlq_n_s32::<23>(vcvtq_s32_f32(n)),
        ));
        // z + ∞: ∞ for large arguments, NaN for NaN
        let high = vbslq_f32(
            vcltq_f32(z, vdupq_n_f32(127.5)),
            scaled,
            vaddq_f32(z, vdupq_n_f32(f32::INFINITY)),
        );
        vbslq_f32(vcltq_f32(z, vdupq_n_f32(-126.0)), vdupq_n_f32(0.0), high)
    }
}

/// Transposes four rows of four elements.
#[inline(always)]
fn transposed([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: the machine has the instructions (invariant of `Quad`). The casts are between 16-byte
    // vectors for which every bit pattern is valid.
    unsafe {
        // two columns in each vector: 0 and 2, or 1 and 3
        let twos = [vtrn1q_f32(a, b), vtrn2q_f32(a, b), vtrn1q_f32(c, d), vtrn2q_f32(c, d)]
            .map(|two| vreinterpretq_f64_f32(two));
        let [even, odd, even_below, odd_below] = twos;
        let columns = [
            vtrn1q_f64(even, even_below),
            vtrn1q_f64(odd, odd_below),
            vtrn2q_f64(even, even_below),
            vtrn2q_f64(odd, odd_below),
        ];
        columns.map(|column| vreinterpretq_f32_f64(column))
    }
}

impl Vector<f32> for Quad {
    type Memory = [f32; 16];
    const WIDTH: usize = 16;
    const AUTOVECTORIZED: bool = false;

    #[inline(always)]
    fn strip<const N: usize>(elements: &[f32]) -> &[[[f32; 16]; N]] {
        strip(elements)
    }

    #[inline(always)]
    fn strip_mut<const N: usize>(elements: &mut [f32]) -> &mut [[[f32; 16]; N]] {
        strip_mut(elements)
    }

    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        let (parts, _) = from.as_chunks::<4>();
        // SAFETY: the machine has the instruction (invariant of `Quad`), and 16 bytes can be read
        // of each register's part.
        Self(std::array::from_fn(|i| unsafe { vld1q_f32(parts[i].as_ptr()) }))
    }

    #[inline(always)]
    fn store(self, into: &mut [f32; 16]) {
        for (part, into) in self.0.into_iter().zip(into.as_chunks_mut::<4>().0) {
            // SAFETY: the machine has the instruction (invariant of `Quad`), and 16 bytes can be
            // written.
            unsafe { vst1q_f32(into.as_mut_ptr(), part) };
        }
    }

    #[inline(always)]
    fn splat(element: f32) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Quad`.
        Self([unsafe { vdupq_n_f32(element) }; REGISTERS])
    }

    #[inline(always)]
    fn widen<E: WidenTo<Accumulator = f32>>(from: &[E]) -> Self {
        match (E::DTYPE, from.first_chunk::<16>()) {
            (DType::F32, Some(whole)) => Self::load(bytemuck::cast_ref(whole)),
            (DType::Bf16, Some(whole)) => {
                let halves: &[u16; 16] = bytemuck::cast_ref(whole);
                let (parts, _) = halves.as_chunks::<4>();
                // SAFETY: the machine has the instructions (invariant of `Quad`), and 8 bytes can
                // be read of each register's part.
                Self(std::array::from_fn(|i| unsafe {
                    vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(parts[i].as_ptr())))
                }))
            }
            _ => Self::load(&widened(from)),
        }
    }

    #[inline(always)]
    fn total(self) -> f32 {
        let [a, b, c, d] = self.0;
        // SAFETY: the machine has the instructions: invariant of `Quad`.
        unsafe {
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }

    #[inline(always)]
    fn sums_of_fours([a, b, c, d]: [Self; FOUR]) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Quad`.
        let pairs = |a, b| unsafe { vpaddq_f32(a, b) };
        let part = |i: usize| pairs(pairs(a.0[i], b.0[i]), pairs(c.0[i], d.0[i]));
        Self([part(0), part(1), part(2), part(3)])
    }

    #[inline(always)]
    fn totals_of_fours(sums: [Self; FOUR]) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Quad`.
        let plus = |a, b| unsafe { vaddq_f32(a, b) };
        Self(sums.map(|Self([a, b, c, d])| plus(plus(a, b), plus(c, d))))
    }

    /// Transposes blocks of 4 × 4 elements and exchanges the blocks.
    #[inline(always)]
    fn transpose(block: &mut [Self; MAX_LANES]) {
        let rows = *block;
        for (part, of_part) in block.as_chunks_mut::<REGISTERS>().0.iter_mut().enumerate() {
            for four in 0..REGISTERS {
                let row = |i: usize| rows[REGISTERS * four + i].0[part];
                let columns = transposed([row(0), row(1), row(2), row(3)]);
                for (column, elements) in of_part.iter_mut().zip(columns) {
                    column.0[four] = elements;
                }
            }
        }
    }

    #[inline(always)]
    fn plus(self, b: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Quad`.
        self.zip(b, |a, b| unsafe { vaddq_f32(a, b) })
    }

    #[inline(always)]
    fn minus(self, b: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Quad`.
        self.zip(b, |a, b| unsafe { vsubq_f32(a, b) })
    }

    #[inline(always)]
    fn times(self, b: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Quad`.
        self.zip(b, |a, b| unsafe { vmulq_f32(a, b) })
    }

    #[inline(always)]
    fn multiply_add(self, b: Self, mut c: Self) -> Self {
        for ((c, a), b) in c.0.iter_mut().zip(self.0).zip(b.0) {
            // SAFETY: the machine has the instruction: invariant of `Quad`.
            *c = unsafe { vfmaq_f32(*c, a, b) };
        }
        c
    }

    #[inline(always)]
    fn if_larger(self, than: Self) -> Self {
        // SAFETY: the machine has the instructions: invariant of `Quad`. A comparison with NaN is
        // false.
        self.zip(than, |a, b| unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) })
    }

    #[inline(always)]
    fn softmax_exp(self) -> Self {
        self.map(softmax_exp)
    }

    #[inline(always)]
    fn select(self, word: u64, mut other: Self) -> Self {
        const LANES: [u32; 4] = [1, 2, 4, 8];
        for (i, (other, own)) in other.0.iter_mut().zip(self.0).enumerate() {
            let bits = (word >> (4 * i) & 15) as u32;
            // SAFETY: the machine has the instructions (invariant of `Quad`), and 16 bytes can be
            // read.
            *other = unsafe {
                vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(LANES.as_ptr())), own, *other)
            };
        }
        other
    }

    #[inline(always)]
    fn if_equal(self, b: Self, then: Self, mut other: Self) -> Self {
        for (i, other) in other.0.iter_mut().enumerate() {
            // SAFETY: the machine has the instructions: invariant of `Quad`.
            *other = unsafe { vbslq_f32(vceqq_f32(self.0[i], b.0[i]), then.0[i], *other) };
        }
        other
    }

    #[inline(always)]
    fn all_equal(self, b: Self) -> bool {
        // SAFETY: the machine has the instructions: invariant of `Quad`.
        self.0.into_iter().zip(b.0).all(|(a, b)| unsafe { vminvq_u32(vceqq_f32(a, b)) } != 0)
    }
}
