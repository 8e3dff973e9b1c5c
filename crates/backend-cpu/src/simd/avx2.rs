//! AVX2 leaf: a vector of sixteen f32 in two registers.

use std::arch::x86_64::*;

use annulus_core::DType;

use crate::simd::{
    element::WidenTo,
    exp::EXP2_COEFFICIENTS,
    vector::{FOUR, MAX_LANES, Vector, strip, strip_mut, unrolled, widened},
};

/// Registers of a vector.
const REGISTERS: usize = 2;
/// Lanes of a register.
const EIGHT: usize = 8;

/// Sixteen f32.
///
/// Invariant: only the function of `dispatch.rs` that is compiled for AVX2, FMA and F16C names
/// this type, and it runs only on a machine that has these features. Every method below may
/// therefore use them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ymms([__m256; REGISTERS]);

/// Evaluates an expression for each register, as a vector.
///
/// Not a closure: a closure has no target features, and instructions in it become calls where it is
/// not inlined.
macro_rules! each_register {
    ($i:ident, $part:expr) => {
        Ymms([
            {
                let $i = 0;
                $part
            },
            {
                let $i = 1;
                $part
            },
        ])
    };
}

/// Computes e^x as [`crate::simd::exp::softmax_exp32`], except that an instruction rounds n.
#[inline(always)]
fn softmax_exp(x: __m256) -> __m256 {
    // SAFETY: the machine has the instructions: invariant of `Ymms`.
    unsafe {
        let z = _mm256_mul_ps(x, _mm256_set1_ps(std::f32::consts::LOG2_E));
        // nearest integer, without exceptions
        let n = _mm256_round_ps::<8>(z);
        let r = _mm256_sub_ps(z, n);
        let mut y = _mm256_set1_ps(EXP2_COEFFICIENTS[5]);
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(EXP2_COEFFICIENTS[4]));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(EXP2_COEFFICIENTS[3]));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(EXP2_COEFFICIENTS[2]));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(EXP2_COEFFICIENTS[1]));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(EXP2_COEFFICIENTS[0]));
        // adds n to the exponent field
        let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
        let scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
        // z + ∞: ∞ for large arguments, NaN for NaN
        let infinite = _mm256_add_ps(z, _mm256_set1_ps(f32::INFINITY));
        let bounded = _mm256_cmp_ps::<_CMP_LT_OQ>(z, _mm256_set1_ps(127.5));
        let high = _mm256_blendv_ps(infinite, scaled, bounded);
        _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(z, _mm256_set1_ps(-126.0)), high)
    }
}

/// Transposes eight rows of eight elements, by blocks of 2 × 2, 4 × 4 and 8 × 8: 24 shuffles.
#[inline(always)]
fn transposed(rows: [__m256; EIGHT]) -> [__m256; EIGHT] {
    // SAFETY: the machine has the instructions (invariant of `Ymms`). The casts are between 32-byte
    // vectors for which every bit pattern is valid.
    unsafe {
        let zero = _mm256_setzero_ps();
        let mut twos = [zero; EIGHT];
        unrolled!(i < FOUR, {
            twos[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
            twos[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
        });
        // rows 4i ..: each vector holds columns c and c + 4 of four rows
        let mut fours = [zero; EIGHT];
        unrolled!(i < FOUR, {
            let four = i / 2 * 4;
            let column = i % 2;
            let a = _mm256_castps_pd(twos[four + column]);
            let b = _mm256_castps_pd(twos[four + column + 2]);
            fours[four + 2 * column] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            fours[four + 2 * column + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        });
        let mut columns = [zero; EIGHT];
        unrolled!(i < FOUR, {
            columns[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
            columns[i + 4] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
        });
        columns
    }
}

impl Vector<f32> for Ymms {
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
        let from = from.as_ptr();
        // SAFETY: the machine has the instruction (invariant of `Ymms`), and 2 × 32 bytes can be
        // read.
        Self(unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(EIGHT))] })
    }

    #[inline(always)]
    fn store(self, into: &mut [f32; 16]) {
        let [low, high] = self.0;
        let into = into.as_mut_ptr();
        // SAFETY: the machine has the instruction (invariant of `Ymms`), and 2 × 32 bytes can be
        // written.
        unsafe {
            _mm256_storeu_ps(into, low);
            _mm256_storeu_ps(into.add(EIGHT), high);
        }
    }

    #[inline(always)]
    fn splat(element: f32) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Ymms`.
        Self([unsafe { _mm256_set1_ps(element) }; REGISTERS])
    }

    /// Uses intrinsics: compiled from scalar code, a vector goes through memory element by element.
    #[inline(always)]
    fn widen<E: WidenTo<Accumulator = f32>>(from: &[E]) -> Self {
        match (E::DTYPE, from.first_chunk::<16>()) {
            (DType::F32, Some(whole)) => Self::load(bytemuck::cast_ref(whole)),
            (DType::Bf16, Some(whole)) => {
                let halves: &[u16; 16] = bytemuck::cast_ref(whole);
                let (parts, _) = halves.as_chunks::<EIGHT>();
                // SAFETY: the machine has the instructions (invariant of `Ymms`), and 16 bytes can
                // be read of each register's part.
                unsafe {
                    each_register!(i, {
                        let halves = _mm_loadu_si128(parts[i].as_ptr().cast());
                        let words = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves));
                        _mm256_castsi256_ps(words)
                    })
                }
            }
            (DType::F16, Some(whole)) => {
                let halves: &[u16; 16] = bytemuck::cast_ref(whole);
                let (parts, _) = halves.as_chunks::<EIGHT>();
                // SAFETY: as above.
                unsafe {
                    each_register!(i, {
                        _mm256_cvtph_ps(_mm_loadu_si128(parts[i].as_ptr().cast()))
                    })
                }
            }
            _ => Self::load(&widened(from)),
        }
    }

    #[inline(always)]
    fn total(self) -> f32 {
        let [low, high] = self.0;
        // SAFETY: the machine has the instructions: invariant of `Ymms`.
        unsafe {
            let eight = _mm256_add_ps(low, high);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn sums_of_fours([a, b, c, d]: [Self; FOUR]) -> Self {
        let part = |i: usize| {
            // SAFETY: the machine has the instruction: invariant of `Ymms`.
            unsafe {
                let (ab, cd) = (_mm256_hadd_ps(a.0[i], b.0[i]), _mm256_hadd_ps(c.0[i], d.0[i]));
                _mm256_hadd_ps(ab, cd)
            }
        };
        Self([part(0), part(1)])
    }

    #[inline(always)]
    fn totals_of_fours([a, b, c, d]: [Self; FOUR]) -> Self {
        let total = |a: Self, b: Self| {
            // SAFETY: the machine has the instructions: invariant of `Ymms`.
            unsafe {
                let (a, b) = (_mm256_add_ps(a.0[0], a.0[1]), _mm256_add_ps(b.0[0], b.0[1]));
                let low = _mm256_permute2f128_ps::<0x20>(a, b);
                _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
            }
        };
        Self([total(a, b), total(c, d)])
    }

    /// Transposes blocks of 8 × 8 elements and exchanges the blocks.
    #[inline(always)]
    fn transpose(block: &mut [Self; MAX_LANES]) {
        let rows = *block;
        let part = |eight: usize, part: usize| {
            let row = |i: usize| rows[EIGHT * eight + i].0[part];
            [row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)]
        };
        let parts = [
            transposed(part(0, 0)),
            transposed(part(1, 0)),
            transposed(part(0, 1)),
            transposed(part(1, 1)),
        ];
        for i in 0..EIGHT {
            block[i].0 = [parts[0][i], parts[1][i]];
            block[EIGHT + i].0 = [parts[2][i], parts[3][i]];
        }
    }

    #[inline(always)]
    fn plus(self, b: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Ymms`.
        unsafe { each_register!(i, _mm256_add_ps(self.0[i], b.0[i])) }
    }

    #[inline(always)]
    fn minus(self, b: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Ymms`.
        unsafe { each_register!(i, _mm256_sub_ps(self.0[i], b.0[i])) }
    }

    #[inline(always)]
    fn times(self, b: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Ymms`.
        unsafe { each_register!(i, _mm256_mul_ps(self.0[i], b.0[i])) }
    }

    #[inline(always)]
    fn multiply_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Ymms`.
        unsafe { each_register!(i, _mm256_fmadd_ps(self.0[i], b.0[i], c.0[i])) }
    }

    /// Returns the second operand if one is NaN, as the instruction does. `than` is never NaN.
    #[inline(always)]
    fn if_larger(self, than: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Ymms`.
        unsafe { each_register!(i, _mm256_max_ps(self.0[i], than.0[i])) }
    }

    #[inline(always)]
    fn softmax_exp(self) -> Self {
        each_register!(i, softmax_exp(self.0[i]))
    }

    #[inline(always)]
    fn select(self, word: u64, other: Self) -> Self {
        // SAFETY: the machine has the instructions: invariant of `Ymms`.
        unsafe {
            let bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            each_register!(i, {
                let bits = _mm256_set1_epi32((word >> (EIGHT * i) & 0xff) as i32);
                let own = _mm256_cmpeq_epi32(_mm256_and_si256(bits, bit), bit);
                _mm256_blendv_ps(other.0[i], self.0[i], _mm256_castsi256_ps(own))
            })
        }
    }

    #[inline(always)]
    fn if_equal(self, b: Self, then: Self, other: Self) -> Self {
        // SAFETY: the machine has the instructions: invariant of `Ymms`.
        unsafe {
            each_register!(i, {
                let equal = _mm256_cmp_ps::<_CMP_EQ_OQ>(self.0[i], b.0[i]);
                _mm256_blendv_ps(other.0[i], then.0[i], equal)
            })
        }
    }

    #[inline(always)]
    fn all_equal(self, b: Self) -> bool {
        // SAFETY: the machine has the instructions: invariant of `Ymms`.
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_EQ_OQ>(self.0[0], b.0[0]);
            let high = _mm256_cmp_ps::<_CMP_EQ_OQ>(self.0[1], b.0[1]);
            _mm256_movemask_ps(_mm256_and_ps(low, high)) == 0xff
        }
    }
}
