//! Merge of two partial results of one strip, for the reproducible order.
//!
//! ```text
//! m  = mʳ > mˡ ? mʳ : mˡ       fˡ = e^{mˡ − m}       fʳ = e^{mʳ − m}
//! ℓ  = ℓˡ·fˡ + (ℓʳ·fʳ)         acc = accˡ·fˡ + (accʳ·fʳ)
//! acc = accˡ where mʳ = −∞     acc = accʳ where mˡ = −∞
//! ```
//! The products in parentheses are rounded, the others are fused where the machine has a fused
//! instruction. The last line does not read the accumulator of a lane without a visible key, which
//! may be unspecified.
//!
//! # Source
//! Milakov and Gimelshein 2018, section 3.1.

use crate::simd::{
    dispatch::{Kernel, Real},
    lanes::unrolled,
    vector::{self, Vector},
};

/// Lanes of one partial result: softmax statistics, and the accumulator as a strip.
pub(crate) struct StripPartial<S> {
    pub(crate) max: S,
    pub(crate) sum: S,
    /// Empty if the output is normalised.
    pub(crate) ties: S,
    pub(crate) acc: S,
}

/// Merges `other` into `into`.
pub(crate) struct MergeSoftmax<'a, A> {
    pub(crate) into: StripPartial<&'a mut [A]>,
    pub(crate) other: StripPartial<&'a [A]>,
    /// True if `other` is the left operand.
    pub(crate) other_is_left: bool,
}

impl<A: Real> Kernel<A> for MergeSoftmax<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { into, other, other_is_left } = self;
        let infinity = V::splat(-A::INFINITY);
        let zero = V::splat(A::ZERO);
        let ordered = |into: V, other: V| if other_is_left { (other, into) } else { (into, other) };
        let (Some(max), Some(sum)) =
            (V::row_mut::<VECTORS>(into.max), V::row_mut::<VECTORS>(into.sum))
        else {
            return;
        };
        let (Some(other_max), Some(other_sum)) =
            (V::row::<VECTORS>(other.max), V::row::<VECTORS>(other.sum))
        else {
            return;
        };
        let mut left_max = [infinity; VECTORS];
        let mut right_max = [infinity; VECTORS];
        let mut merged = [infinity; VECTORS];
        let mut left_factor = [zero; VECTORS];
        let mut right_factor = [zero; VECTORS];
        unrolled!(v < VECTORS, {
            (left_max[v], right_max[v]) = ordered(V::load(&max[v]), V::load(&other_max[v]));
            merged[v] = right_max[v].if_larger(left_max[v]);
            // subtract 0 where nothing is visible: −∞ − −∞ would be NaN
            let base = merged[v].if_equal(infinity, zero, merged[v]);
            left_factor[v] = left_max[v].minus(base).softmax_exp();
            right_factor[v] = right_max[v].minus(base).softmax_exp();
            let (left, right) = ordered(V::load(&sum[v]), V::load(&other_sum[v]));
            left.multiply_add(left_factor[v], right.times(right_factor[v])).store(&mut sum[v]);
            merged[v].store(&mut max[v]);
        });
        if let (Some(ties), Some(other_ties)) =
            (V::row_mut::<VECTORS>(into.ties), V::row::<VECTORS>(other.ties))
        {
            unrolled!(v < VECTORS, {
                let (left, right) = ordered(V::load(&ties[v]), V::load(&other_ties[v]));
                let left = left_max[v].if_equal(merged[v], left, zero);
                let right = right_max[v].if_equal(merged[v], right, zero);
                left.plus(right).store(&mut ties[v]);
            });
        }
        let other_rows = V::strip::<VECTORS>(other.acc);
        let rows = vector::each_row_mut::<A, V, _>(V::strip_mut::<VECTORS>(into.acc));
        for (acc, other) in rows.zip(other_rows) {
            unrolled!(v < VECTORS, {
                let (left, right) = ordered(V::load(&acc[v]), V::load(&other[v]));
                let both = left.multiply_add(left_factor[v], right.times(right_factor[v]));
                let kept = right_max[v].if_equal(infinity, left, both);
                left_max[v].if_equal(infinity, right, kept).store(&mut acc[v]);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{dispatch::IsaToken, isa::Isa};

    const LANES: usize = 16;

    /// Statistics and one row of accumulators of one vector.
    #[derive(Debug, Clone, PartialEq)]
    struct Lanes([Vec<f32>; 4]);

    fn merged(isa: Isa, mut into: Lanes, other: &Lanes, other_is_left: bool) -> Lanes {
        let [max, sum, ties, acc] = &mut into.0;
        let into_partial = StripPartial { max: &mut max[..], sum, ties, acc };
        let [max, sum, ties, acc] = &other.0;
        let other = StripPartial { max: &max[..], sum, ties, acc };
        let kernel = MergeSoftmax { into: into_partial, other, other_is_left };
        f32::run_kernel(IsaToken::new(isa).unwrap(), 1, kernel);
        into
    }

    fn lanes(of: impl Fn(f32) -> [f32; 4]) -> Lanes {
        let list = |field: usize| (0..LANES).map(|lane| of(lane as f32)[field]).collect();
        Lanes([list(0), list(1), list(2), list(3)])
    }

    #[test]
    fn the_order_of_operands_is_kept_and_empty_lanes_change_no_bit() {
        let a = lanes(|lane| [lane * 0.37, 1.0 + lane, 1.0, lane - 7.3]);
        let b = lanes(|lane| [5.0 - lane * 0.21, 2.0 + lane / 3.0, 2.0, 0.1 * lane]);
        // no key, and an accumulator that must not be read
        let none = lanes(|_| [f32::NEG_INFINITY, 0.0, 0.0, f32::NAN]);
        for isa in [Isa::Portable, Isa::widest()] {
            let ab = merged(isa, a.clone(), &b, false);
            assert_eq!(ab, merged(isa, b.clone(), &a, true));
            // with fused instructions exchanged operands round differently, so that a wrong order
            // of leaves shows in the bits of a result
            if isa != Isa::Portable {
                assert_ne!(ab, merged(isa, a.clone(), &b, true));
            }
            for lane in 0..LANES {
                let [max, sum, ties, acc] = [0, 1, 2, 3].map(|field| f64::from(ab.0[field][lane]));
                let of = |from: &Lanes, field: usize| f64::from(from.0[field][lane]);
                let weight = |from| (of(from, 0) - max).exp();
                assert_eq!(max, of(&a, 0).max(of(&b, 0)));
                let want = of(&a, 1) * weight(&a) + of(&b, 1) * weight(&b);
                assert!((sum - want).abs() < 1e-6 * want, "{sum} {want}");
                let want = of(&a, 3) * weight(&a) + of(&b, 3) * weight(&b);
                assert!((acc - want).abs() < 1e-5, "{acc} {want}");
                assert_eq!(ties, if of(&a, 0) > of(&b, 0) { 1.0 } else { 2.0 });
            }
            for other_is_left in [false, true] {
                assert_eq!(merged(isa, a.clone(), &none, other_is_left), a);
                assert_eq!(merged(isa, none.clone(), &a, other_is_left), a);
            }
            assert_eq!(merged(isa, none.clone(), &none, false).0[0], none.0[0]);
        }
    }
}
