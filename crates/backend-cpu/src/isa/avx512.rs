//! The leaf for AVX-512: a vector of sixteen f32 in one register.

use std::arch::x86_64::*;

use annulus_core::DType;

use crate::{
    exp::POWER_OF_TWO,
    input::Input,
    lanes::{strip, strip_mut, unrolled},
    vector::{MOST_WIDTH, Pairs, Vector, widened},
};

/// Sixteen f32; with `PAIRS`, operands of products are sixteen pairs of bf16.
///
/// Invariant: it is named nowhere but in the functions of the parent module that are compiled for AVX-512 F, VL, BW and DQ, and BF16 with `PAIRS`, and
/// run only on a machine that has them. So every method below may use them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Zmm<const PAIRS: bool>(__m512);

const EIGHT: usize = 8;

/// The bits of the first sixteen lanes.
#[inline(always)]
const fn sixteen(word: u64) -> __mmask16 {
    (word & 0xffff) as __mmask16
}

/// Sixteen numbers of 16 bits.
#[inline(always)]
fn halves(from: &[u16; 16]) -> __m256i {
    // SAFETY: 32 bytes can be read, and whoever has AVX-512 (this is for `Zmm` alone) has AVX.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

impl<const PAIRS: bool> Vector<f32> for Zmm<PAIRS> {
    type Memory = [f32; 16];
    const WIDTH: usize = 16;
    const BY_COMPILER: bool = false;

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
        // SAFETY: the machine has the instruction (invariant of `Zmm`), and 64 bytes can be written.
        unsafe { _mm512_storeu_ps(into.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn splat(element: f32) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_set1_ps(element) })
    }

    /// By instructions: left to the compiler, a vector goes through memory, element by element.
    #[inline(always)]
    fn widen<E: Input<Accumulator = f32>>(from: &[E]) -> Self {
        match (E::DTYPE, from.first_chunk::<16>()) {
            (DType::F32, Some(whole)) => Self::load(bytemuck::cast_ref(whole)),
            (DType::Bf16, Some(whole)) => {
                let halves = halves(bytemuck::cast_ref(whole));
                // SAFETY: the machine has the instructions: invariant of `Zmm`.
                Self(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))) })
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

    /// By blocks of 2 × 2 elements, then 4 × 4, 8 × 8 and 16 × 16.
    #[inline(always)]
    fn transpose(block: &mut [Self; MOST_WIDTH]) {
        // SAFETY: the machine has the instructions (invariant of `Zmm`); casts between vectors of 64 bytes, of which any will do.
        unsafe {
            let mut twos = [_mm512_setzero_ps(); MOST_WIDTH];
            unrolled!(i < EIGHT, {
                let (a, b) = (block[2 * i].0, block[2 * i + 1].0);
                twos[2 * i] = _mm512_unpacklo_ps(a, b);
                twos[2 * i + 1] = _mm512_unpackhi_ps(a, b);
            });
            // of four rows: their columns 0, 1, 2, 3, and those 4, 8 and 12 further
            let mut fours = [_mm512_setzero_ps(); MOST_WIDTH];
            unrolled!(i < EIGHT, {
                let (four, column) = (i / 2 * 4, i % 2);
                let (a, b) = (_mm512_castps_pd(twos[four + column]), _mm512_castps_pd(twos[four + column + 2]));
                fours[four + 2 * column] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                fours[four + 2 * column + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            });
            // of eight rows: columns 0 to 7, and those 8 further
            let mut eights = [_mm512_setzero_ps(); MOST_WIDTH];
            unrolled!(i < EIGHT, {
                let (eight, column) = (i / 4 * 8, i % 4);
                let (a, b) = (fours[eight + column], fours[eight + column + 4]);
                eights[eight + column] = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                eights[eight + column + 4] = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
            });
            unrolled!(i < EIGHT, {
                let (a, b) = (eights[i], eights[i + 8]);
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
            // SAFETY: the machine has the instruction (invariant of `Zmm`), and any bits are pairs of bf16.
            Self(unsafe { _mm512_dpbf16_ps(c.0, pairs(self.0), pairs(b.0)) })
        } else {
            self.multiply_add(b, c)
        }
    }

    /// The instruction gives its second operand where one is NaN; `than` is never NaN.
    #[inline(always)]
    fn if_larger(self, than: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_max_ps(self.0, than.0) })
    }

    /// e^x = 2^n · 2^r where n = round(x·log₂e) and r is the rest.
    ///
    /// The rounding error of x·log₂e, half a unit in its last place, is multiplied by e^x: for x ≤ 0 it never matters more than that of r ≈ 1.
    #[inline(always)]
    fn weight(self) -> Self {
        // SAFETY: the machine has the instructions: invariant of `Zmm`.
        unsafe {
            let x = _mm512_mul_ps(self.0, _mm512_set1_ps(std::f32::consts::LOG2_E));
            // the nearest integer, no exception
            let n = _mm512_roundscale_ps::<8>(x);
            let r = _mm512_sub_ps(x, n);
            let mut y = _mm512_set1_ps(POWER_OF_TWO[5]);
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER_OF_TWO[4]));
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER_OF_TWO[3]));
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER_OF_TWO[2]));
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER_OF_TWO[1]));
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER_OF_TWO[0]));
            // "not less than": true for NaN, which stays; −∞ − −∞ is NaN but is masked
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            Self(_mm512_maskz_scalef_ps(normal, y, n))
        }
    }

    #[inline(always)]
    fn select(self, word: u64, other: Self) -> Self {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        Self(unsafe { _mm512_mask_mov_ps(other.0, sixteen(word), self.0) })
    }

    #[inline(always)]
    fn if_equal(self, b: Self, then: Self, other: Self) -> Self {
        // SAFETY: the machine has the instructions: invariant of `Zmm`.
        Self(unsafe { _mm512_mask_mov_ps(other.0, _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, b.0), then.0) })
    }

    #[inline(always)]
    fn all_equal(self, b: Self) -> bool {
        // SAFETY: the machine has the instruction: invariant of `Zmm`.
        unsafe { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, b.0) == !0 }
    }
}

/// The same bits as pairs of bf16.
#[inline(always)]
fn pairs(bits: __m512) -> __m512bh {
    // SAFETY: both are 64 bytes of which any will do.
    unsafe { std::mem::transmute(bits) }
}

impl Pairs for Zmm<true> {
    #[inline(always)]
    fn interleaved(low: Self, high: Self) -> Self {
        // low 0, high 0, low 1, high 1, …: where the instruction leaves them
        const PLACES: [u16; 32] = {
            let mut places = [0; 32];
            let mut lane = 0;
            while lane < 16 {
                places[2 * lane] = lane as u16;
                places[2 * lane + 1] = 16 + lane as u16;
                lane += 1;
            }
            places
        };
        // SAFETY: the machine has the instructions (invariant of `Zmm`), 64 bytes can be read, and any bits are pairs and integers.
        unsafe {
            let places = _mm512_loadu_si512(PLACES.as_ptr().cast());
            let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high.0, low.0));
            Self(_mm512_castsi512_ps(_mm512_permutexvar_epi16(places, both)))
        }
    }

    #[inline(always)]
    fn in_order(first: Self, second: Self) -> Self {
        // SAFETY: the machine has the instruction (invariant of `Zmm`), and any bits are f32.
        Self(unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second.0, first.0)) })
    }

    #[inline(always)]
    fn masked(self, word: u32) -> Self {
        // SAFETY: the machine has the instructions: invariant of `Zmm`.
        Self(unsafe { _mm512_and_ps(self.0, _mm512_castsi512_ps(_mm512_set1_epi32(word.cast_signed()))) })
    }
}
