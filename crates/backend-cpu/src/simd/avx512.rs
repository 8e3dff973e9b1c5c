//! AVX-512 leaf: a vector of sixteen f32 in one register.

use std::arch::x86_64::*;

use annulus_core::DType;

use crate::simd::{
    element::WidenTo,
    exp::EXP2_COEFFICIENTS,
    vector::{Bf16Pairs, FOUR, MAX_LANES, Vector, strip, strip_mut, unrolled, widened},
};

/// Sixteen f32; with `PAIRS`, product operands are sixteen pairs of bf16.
///
/// Invariant: only functions of `dispatch.rs` that are compiled for AVX-512 F, VL, BW and DQ
/// (and BF16 with `PAIRS`) name this type, and they run only on a machine that has these features.
/// Every method below may therefore use them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Zmm<const PAIRS: bool>(__m512);

impl<const PAIRS: bool> Zmm<PAIRS> {
    /// Computes e^x = 2^n · 2^r with n = round(x·log₂e) and r the remainder.
    ///
    /// x·log₂e has a rounding error of half a unit in its last place, which the result multiplies
    /// by e^x. For x ≤ 0 its effect is at most that of an error in r near 1.
    ///
    /// Also returns the lanes that are not 0 because e^x would be subnormal.
    #[inline(always)]
    fn softmax_exp_and_lanes(self) -> (Self, __mmask16) {
        // SAFETY: the machine has the instructions: invariant of `Zmm`.
        unsafe {
            let x = _mm512_mul_ps(self.0, _mm512_set1_ps(std::f32::consts::LOG2_E));
            // nearest integer, without exceptions
            let n = _mm512_roundscale_ps::<8>(x);
            let r = _mm512_sub_ps(x, n);
            let mut y = _mm512_set1_ps(EXP2_COEFFICIENTS[5]);
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(EXP2_COEFFICIENTS[4]));
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(EXP2_COEFFICIENTS[3]));
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(EXP2_COEFFICIENTS[2]));
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(EXP2_COEFFICIENTS[1]));
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(EXP2_COEFFICIENTS[0]));
            // "not less than" is true for NaN, which stays NaN; −∞ − −∞ gives NaN but is masked to
            // 0
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            (Self(_mm512_maskz_scalef_ps(normal, y, n)), normal)
        }
    }
}

const EIGHT: usize = 8;

/// Returns the mask of the first sixteen lanes.
#[inline(always)]
const fn sixteen(word: u64) -> __mmask16 {
    (word & 0xffff) as __mmask16
}

/// Loads sixteen 16-bit numbers.
#[inline(always)]
fn halves(from: &[u16; 16]) -> __m256i {
    // SAFETY: 32 bytes can be read, and a machine with AVX-512 (this function serves `Zmm` alone)
    // has AVX.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

impl<const PAIRS: bool> Vector<f32> for Zmm<PAIRS> {
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
        // SAFETY: the machine has the instruction (invariant of `Zmm`), and 64 bytes can be read.
        Self(unsafe { _mm512_loadu_ps(from.as_ptr()) })
    }

    #[inline(always)]
    fn store(self, into: &mut [f32; 16]) {
        // SAFETY: the machine has the instruction (invariant of `Zmm`), and 64 bytes can be
        // written.
        unsafe { _mm512_storeu_ps(into.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn splat(element: f32) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_set1_ps(element) })
    }

    /// Uses intrinsics: compiled from scalar code, a vector goes through memory element by element.
    #[inline(always)]
    fn widen<E: WidenTo<Accumulator = f32>>(from: &[E]) -> Self {
        match (E::DTYPE, from.first_chunk::<16>()) {
            (DType::F32, Some(whole)) => Self::load(bytemuck::cast_ref(whole)),
            (DType::Bf16, Some(whole)) => {
                let halves = halves(bytemuck::cast_ref(whole));
                // SAFETY: the machine has the instructions: invariant of `Zmm`.
                Self(unsafe {
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
                })
            }
            (DType::F16, Some(whole)) => {
                let halves = halves(bytemuck::cast_ref(whole));
                // SAFETY: the machine has the instruction: invariant of `Zmm`.
                Self(unsafe { _mm512_cvtph_ps(halves) })
            }
            _ => Self::load(&widened(from)),
        }
    }

    #[inline(always)]
    fn total(self) -> f32 {
        // SAFETY: the machine has the instructions: invariant of `Zmm`.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }

    #[inline(always)]
    fn sums_of_fours([a, b, c, d]: [Self; FOUR]) -> Self {
        // SAFETY: the machine has the instructions (invariant of `Zmm`). The casts are between
        // 64-byte vectors for which every bit pattern is valid.
        unsafe {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a.0, b.0), _mm512_unpackhi_ps(a.0, b.0));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c.0, d.0), _mm512_unpackhi_ps(c.0, d.0));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
            Self(_mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd))))
        }
    }

    #[inline(always)]
    fn totals_of_fours([a, b, c, d]: [Self; FOUR]) -> Self {
        const EVEN: i32 = 0b10_00_10_00;
        const ODD: i32 = 0b11_01_11_01;
        // SAFETY: the machine has the instructions: invariant of `Zmm`.
        unsafe {
            let ab = _mm512_add_ps(
                _mm512_shuffle_f32x4::<EVEN>(a.0, b.0),
                _mm512_shuffle_f32x4::<ODD>(a.0, b.0),
            );
            let cd = _mm512_add_ps(
                _mm512_shuffle_f32x4::<EVEN>(c.0, d.0),
                _mm512_shuffle_f32x4::<ODD>(c.0, d.0),
            );
            let even = _mm512_shuffle_f32x4::<EVEN>(ab, cd);
            Self(_mm512_add_ps(even, _mm512_shuffle_f32x4::<ODD>(ab, cd)))
        }
    }

    /// Transposes by blocks of 2 × 2 elements, then 4 × 4, 8 × 8 and 16 × 16: 64 shuffles.
    #[inline(always)]
    fn transpose(block: &mut [Self; MAX_LANES]) {
        // SAFETY: the machine has the instructions (invariant of `Zmm`). The casts are between
        // 64-byte vectors for which every bit pattern is valid.
        unsafe {
            let mut twos = [_mm512_setzero_ps(); MAX_LANES];
            unrolled!(i < EIGHT, {
                let a = block[2 * i].0;
                let b = block[2 * i + 1].0;
                twos[2 * i] = _mm512_unpacklo_ps(a, b);
                twos[2 * i + 1] = _mm512_unpackhi_ps(a, b);
            });
            // rows 4i ..: each vector holds columns c, c + 4, c + 8 and c + 12 of four rows
            let mut fours = [_mm512_setzero_ps(); MAX_LANES];
            unrolled!(i < EIGHT, {
                let four = i / 2 * 4;
                let column = i % 2;
                let a = _mm512_castps_pd(twos[four + column]);
                let b = _mm512_castps_pd(twos[four + column + 2]);
                fours[four + 2 * column] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                fours[four + 2 * column + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            });
            // rows 8i ..: each vector holds columns c and c + 8 of eight rows
            let mut eights = [_mm512_setzero_ps(); MAX_LANES];
            unrolled!(i < EIGHT, {
                let eight = i / 4 * 8;
                let column = i % 4;
                let a = fours[eight + column];
                let b = fours[eight + column + 4];
                eights[eight + column] = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                eights[eight + column + 4] = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
            });
            unrolled!(i < EIGHT, {
                let a = eights[i];
                let b = eights[i + 8];
                block[i].0 = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                block[i + 8].0 = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
            });
        }
    }

    #[inline(always)]
    fn plus(self, b: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_add_ps(self.0, b.0) })
    }

    #[inline(always)]
    fn minus(self, b: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_sub_ps(self.0, b.0) })
    }

    #[inline(always)]
    fn times(self, b: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_mul_ps(self.0, b.0) })
    }

    #[inline(always)]
    fn multiply_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    fn product(self, b: Self, c: Self) -> Self {
        if PAIRS {
            // SAFETY: the machine has the instruction (invariant of `Zmm`), and any bits are pairs
            // of bf16.
            Self(unsafe { _mm512_dpbf16_ps(c.0, as_bf16_pairs(self.0), as_bf16_pairs(b.0)) })
        } else {
            self.multiply_add(b, c)
        }
    }

    /// Returns the second operand if one is NaN, as the instruction does. `than` is never NaN.
    #[inline(always)]
    fn if_larger(self, than: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_max_ps(self.0, than.0) })
    }

    #[inline(always)]
    fn softmax_exp(self) -> Self {
        self.softmax_exp_and_lanes().0
    }

    #[inline(always)]
    fn softmax_exp_and_sum(self, sum: &mut Self) -> Self {
        let (exp, normal) = self.softmax_exp_and_lanes();
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        sum.0 = unsafe { _mm512_mask3_fmadd_ps(exp.0, self.0, sum.0, normal) };
        exp
    }

    #[inline(always)]
    fn select(self, word: u64, other: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_mask_mov_ps(other.0, sixteen(word), self.0) })
    }

    #[inline(always)]
    fn if_equal(self, b: Self, then: Self, other: Self) -> Self {
        // SAFETY: the machine has the instructions: invariant of `Zmm`.
        Self(unsafe {
            _mm512_mask_mov_ps(other.0, _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, b.0), then.0)
        })
    }

    #[inline(always)]
    fn all_equal(self, b: Self) -> bool {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        unsafe { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, b.0) == !0 }
    }
}

/// Reinterprets the bits as pairs of bf16.
#[inline(always)]
fn as_bf16_pairs(bits: __m512) -> __m512bh {
    // SAFETY: both types are 64 bytes for which every bit pattern is valid.
    unsafe { std::mem::transmute(bits) }
}

/// Returns the indices low, high, low + 1, high + 1, …
const fn in_turns(low: u16, high: u16) -> [u16; 32] {
    let mut order = [0; 32];
    let mut lane = 0;
    while lane < 16 {
        order[2 * lane] = low + lane as u16;
        order[2 * lane + 1] = high + lane as u16;
        lane += 1;
    }
    order
}

impl Bf16Pairs for Zmm<true> {
    #[inline(always)]
    fn interleaved(low: Self, high: Self) -> Self {
        // low 0, high 0, low 1, high 1, …: indices of these lanes in the instruction's output
        const LANE_ORDER: [u16; 32] = in_turns(0, 16);
        // SAFETY: the machine has the instructions (invariant of `Zmm`), 64 bytes can be read, and
        // any bits are pairs and integers.
        unsafe {
            let order = _mm512_loadu_si512(LANE_ORDER.as_ptr().cast());
            let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high.0, low.0));
            Self(_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both)))
        }
    }

    #[inline(always)]
    fn in_order(first: Self, second: Self) -> Self {
        // SAFETY: the machine has the instruction (invariant of `Zmm`), and any bits are f32.
        Self(unsafe {
            std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second.0, first.0))
        })
    }

    #[inline(always)]
    fn zipped(low: Self, high: Self) -> [Self; 2] {
        const ORDERS: [[u16; 32]; 2] = [in_turns(0, 32), in_turns(16, 48)];
        // SAFETY: the machine has the instructions (invariant of `Zmm`), 64 bytes can be read, and
        // any bits are pairs and integers.
        unsafe {
            let (low, high) = (_mm512_castps_si512(low.0), _mm512_castps_si512(high.0));
            let [first, second] = [
                _mm512_loadu_si512(ORDERS[0].as_ptr().cast()),
                _mm512_loadu_si512(ORDERS[1].as_ptr().cast()),
            ];
            [
                Self(_mm512_castsi512_ps(_mm512_permutex2var_epi16(low, first, high))),
                Self(_mm512_castsi512_ps(_mm512_permutex2var_epi16(low, second, high))),
            ]
        }
    }

    #[inline(always)]
    fn masked(self, word: u32) -> Self {
        // SAFETY: the machine has the instructions: invariant of `Zmm`.
        Self(unsafe {
            _mm512_and_ps(self.0, _mm512_castsi512_ps(_mm512_set1_epi32(word.cast_signed())))
        })
    }
}
