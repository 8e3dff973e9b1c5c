//! Online softmax: one update by a tile of scores, for all lanes at once.
//!
//! ```text
//! m' = max(m, max_r s_r)     ℓ' = ℓ·e^{m − m'} + Σ_r e^{s_r − m'}     s_r ← e^{s_r − m'}
//! ```
//! A lane without a visible score has m = −∞ and keeps it while all its scores are −∞ (masked). NaN
//! is never a maximum, but e^NaN is NaN and stays in the sum.
//!
//! # Source
//! Milakov and Gimelshein 2018, algorithm 3.
//!
//! With row statistics also the sum from which the entropy follows, H = ln ℓ − t/ℓ:
//!
//! ```text
//! t = Σ e^{s − m}·(s − m)      t' = (t + ℓ·(m − m'))·e^{m − m'} + Σ_r e^{s_r − m'}·(s_r − m')
//! ```
//! It rescales like ℓ, and has no difference of large numbers, as lse − Σ p·s has.
//!
//! Merge of two partial results of one strip, for the reproducible order.
//!
//! ```text
//! m  = mʳ > mˡ ? mʳ : mˡ       fˡ = e^{mˡ − m}       fʳ = e^{mʳ − m}
//! ℓ  = ℓˡ·fˡ + (ℓʳ·fʳ)         acc = accˡ·fˡ + (accʳ·fʳ)
//! t  = (tˡ + ℓˡ·(mˡ − m))·fˡ + ((tʳ + ℓʳ·(mʳ − m))·fʳ)
//! acc = accˡ where mʳ = −∞     acc = accʳ where mˡ = −∞
//! ```
//! The products in parentheses are rounded, the others are fused where the machine has a fused
//! instruction. The last line does not read the accumulator of a lane without a visible key, which
//! may be unspecified.
//!
//! # Source
//! Milakov and Gimelshein 2018, section 3.1.

use annulus_core::Result;

use crate::{
    simd::{
        dispatch::{Real, SimdKernel},
        vector::{self, MAX_LANES, Vector, unrolled},
    },
    tile::{aligned::Aligned, tile_mask::RowRanges},
};

/// Updates the softmax statistics of each lane with the scores of some rows of a tile, and replaces
/// the scores by unnormalised probabilities e^{s − m'}. Queries lie in lanes.
pub(crate) struct OnlineSoftmax<'a, A> {
    /// In: scores / scale. Out: probabilities.
    pub(crate) tile: &'a mut [A],
    /// Deferred scale: positive factor from the tile's elements to scores.
    pub(crate) scale: A,
    /// Maximum element of each lane of the tile, if the product computed it.
    pub(crate) tile_max: Option<&'a [A]>,
    pub(crate) max: &'a mut [A],
    pub(crate) sum: &'a mut [A],
    /// Number of scores equal to the maximum, if wanted. Requires a scale of 1, because elements
    /// are compared with the maximum unscaled.
    pub(crate) ties: Option<&'a mut [A]>,
    /// For each vector the rows to process, if not all: the others are masked. Requires `tile_max`.
    pub(crate) row_ranges: Option<RowRanges>,
    /// Out: e^{m − m'}, the factor that rescales the accumulator.
    pub(crate) rescale: &'a mut [A],
}

impl<A: Real> SimdKernel<A> for OnlineSoftmax<'_, A> {
    /// True if a maximum changed, so that the accumulator must be rescaled.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        online_softmax::<A, V, VECTORS, false>(self, &mut [])
    }
}

/// [`OnlineSoftmax`] that also updates `score_sum`, t of each lane.
pub(crate) struct OnlineSoftmaxStatistics<'a, A> {
    pub(crate) softmax: OnlineSoftmax<'a, A>,
    pub(crate) score_sum: &'a mut [A],
}

impl<A: Real> SimdKernel<A> for OnlineSoftmaxStatistics<'_, A> {
    /// As of [`OnlineSoftmax`].
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        online_softmax::<A, V, VECTORS, true>(self.softmax, self.score_sum)
    }
}

/// [`OnlineSoftmax`], with `SCORES` also t: a constant, because a test in the loop over rows would
/// cost a pass without statistics time.
#[inline(always)]
fn online_softmax<A: Real, V: Vector<A>, const VECTORS: usize, const SCORES: bool>(
    softmax: OnlineSoftmax<'_, A>,
    score_sum: &mut [A],
) -> bool {
    let tile = V::strip_mut::<VECTORS>(softmax.tile);
    let lanes = (V::row_mut::<VECTORS>(softmax.max))
        .zip(V::row_mut::<VECTORS>(softmax.sum))
        .zip(V::row_mut::<VECTORS>(softmax.rescale));
    let Some(((max, sum), rescale)) = lanes else { return false };
    let infinity = V::splat(-A::INFINITY);
    // 1. the tile's maximum, computed by the product where possible
    let mut top = [infinity; VECTORS];
    if let Some(tile_max) = softmax.tile_max.and_then(V::row::<VECTORS>) {
        unrolled!(v < VECTORS, top[v] = V::load(&tile_max[v]));
    } else {
        for row in vector::each_row::<A, V, _>(tile) {
            unrolled!(v < VECTORS, top[v] = V::load(&row[v]).if_larger(top[v]));
        }
    }
    // 2. m' = max(m, scale · tile maximum)
    let scale = V::splat(softmax.scale);
    let mut old = [infinity; VECTORS];
    // maximum of scores; `top` is the maximum of unscaled elements
    let mut new = [infinity; VECTORS];
    let mut base = [infinity; VECTORS];
    let mut max_changed = false;
    unrolled!(v < VECTORS, {
        old[v] = V::load(&max[v]);
        new[v] = top[v].times(scale).if_larger(old[v]);
        new[v].store(&mut max[v]);
        max_changed |= !new[v].all_equal(old[v]);
        // subtract 0 where nothing is visible yet: −∞ − −∞ would be NaN
        base[v] = new[v].if_equal(infinity, V::splat(A::ZERO), new[v]);
    });
    if let Some(ties) = softmax.ties.and_then(V::row_mut::<VECTORS>) {
        count_ties::<A, V, VECTORS>(tile, &old, &new, ties);
    }
    // 3. probabilities and their sum
    let mut added = [V::splat(A::ZERO); VECTORS];
    let mut added_scores = added;
    if let Some(row_ranges) = softmax.row_ranges {
        // masked rows would add 0
        unrolled!(v < VECTORS, {
            let rows = row_ranges.get(v).cloned().unwrap_or_default();
            let rows = tile.get_mut(rows).unwrap_or_default();
            for row in vector::each_row_mut::<A, V, _>(rows) {
                let score = V::load(&row[v]).times(scale).minus(base[v]);
                let prob = if SCORES {
                    score.softmax_exp_and_sum(&mut added_scores[v])
                } else {
                    score.softmax_exp()
                };
                added[v] = added[v].plus(prob);
                prob.store(&mut row[v]);
            }
        });
    } else {
        for row in vector::each_row_mut::<A, V, _>(tile) {
            unrolled!(v < VECTORS, {
                let score = V::load(&row[v]).times(scale).minus(base[v]);
                let prob = if SCORES {
                    score.softmax_exp_and_sum(&mut added_scores[v])
                } else {
                    score.softmax_exp()
                };
                added[v] = added[v].plus(prob);
                prob.store(&mut row[v]);
            });
        }
    }
    // 4. t' = (t + ℓ·(m − m'))·e^{m − m'} + sum of scores
    if SCORES && let Some(score_sum) = V::row_mut::<VECTORS>(score_sum) {
        unrolled!(v < VECTORS, {
            let moved = old[v].minus(base[v]);
            let factor = moved.softmax_exp();
            // ℓ is 0 where nothing was visible
            let moved = old[v].if_equal(infinity, V::splat(A::ZERO), moved);
            V::load(&sum[v])
                .multiply_add(moved, V::load(&score_sum[v]))
                .multiply_add(factor, added_scores[v])
                .store(&mut score_sum[v]);
        });
    }
    // 5. ℓ' = ℓ·e^{m − m'} + sum
    unrolled!(v < VECTORS, {
        let factor = old[v].minus(base[v]).softmax_exp();
        factor.store(&mut rescale[v]);
        V::load(&sum[v]).multiply_add(factor, added[v]).store(&mut sum[v]);
    });
    max_changed
}

/// Computes ties' = (ties if the maximum is unchanged, else 0) + number of rows equal to the new
/// maximum.
#[inline(always)]
fn count_ties<A: Real, V: Vector<A>, const VECTORS: usize>(
    tile: &[[V::Memory; VECTORS]],
    old: &[V; VECTORS],
    max: &[V; VECTORS],
    ties: &mut [V::Memory; VECTORS],
) {
    let none = V::splat(A::ZERO);
    let one = V::splat(A::ONE);
    let mut reached = [none; VECTORS];
    for row in vector::each_row::<A, V, _>(tile) {
        unrolled!(
            v < VECTORS,
            reached[v] = reached[v].plus(V::load(&row[v]).if_equal(max[v], one, none))
        );
    }
    unrolled!(
        v < VECTORS,
        max[v].if_equal(old[v], V::load(&ties[v]), none).plus(reached[v]).store(&mut ties[v])
    );
}

/// Online softmax for rows of contiguous scores: keys lie in lanes, and maximum and sum reduce
/// across them.
pub(crate) struct OnlineSoftmaxRows<'a, A> {
    /// In: scores / scale. Out: probabilities.
    pub(crate) tile: &'a mut [A],
    /// Elements of a row: whole vectors.
    pub(crate) width: usize,
    /// Deferred scale: positive factor from the tile's elements to scores.
    pub(crate) scale: A,
    /// One element per row, like `sum` and `rescale`.
    pub(crate) max: &'a mut [A],
    pub(crate) sum: &'a mut [A],
    /// Out: e^{m − m'}, the factor that rescales the accumulator.
    pub(crate) rescale: &'a mut [A],
}

impl<A: Real> SimdKernel<A> for OnlineSoftmaxRows<'_, A> {
    /// True if a maximum changed, so that the accumulator must be rescaled.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let scale = V::splat(self.scale);
        let mut max_changed = false;
        let statistics = self.max.iter_mut().zip(self.sum).zip(self.rescale);
        for (row, ((max, sum), rescale)) in self.tile.chunks_exact_mut(self.width).zip(statistics) {
            let row = V::strip_mut::<1>(row);
            let mut top = V::splat(-A::INFINITY);
            for [scores] in vector::each_row::<A, V, _>(row) {
                top = V::load(scores).if_larger(top);
            }
            let mut lanes = [-A::INFINITY; MAX_LANES];
            if let Some([lanes]) = V::row_mut::<1>(&mut lanes) {
                top.store(lanes);
            }
            let mut half = V::WIDTH / 2;
            while half > 0 {
                for i in 0..half {
                    let lane = lanes[i + half];
                    lanes[i] = if lane > lanes[i] { lane } else { lanes[i] };
                }
                half /= 2;
            }
            let top = lanes[0];
            let old = *max;
            let new = if top * self.scale > old { top * self.scale } else { old };
            max_changed |= new != old;
            // subtract 0 where nothing is visible yet: −∞ − −∞ would be NaN
            let base = if new == -A::INFINITY { A::ZERO } else { new };
            let mut added = V::splat(A::ZERO);
            for [scores] in vector::each_row_mut::<A, V, _>(row) {
                let prob = V::load(scores).times(scale).minus(V::splat(base)).softmax_exp();
                added = added.plus(prob);
                prob.store(scores);
            }
            *max = new;
            let unchanged = new == old && new > -A::INFINITY;
            *rescale = if unchanged { A::ONE } else { (old - base).softmax_exp::<false>() };
            *sum = *sum * *rescale + added.total();
        }
        max_changed
    }
}

/// Multiplies one tile by another, element by element.
pub(crate) struct MultiplyTile<'a, A> {
    pub(crate) tile: &'a mut [A],
    pub(crate) by: &'a [A],
}

impl<A: Real> SimdKernel<A> for MultiplyTile<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let tile = V::strip_mut::<VECTORS>(self.tile);
        let rows = vector::each_row_mut::<A, V, _>(tile).zip(V::strip::<VECTORS>(self.by));
        for (row, by) in rows {
            unrolled!(v < VECTORS, V::load(&row[v]).times(V::load(&by[v])).store(&mut row[v]));
        }
    }
}

/// Partial result of some rows: softmax statistics, and an accumulator. `L` is a list or, of the
/// lanes of one strip, a slice.
#[derive(Debug)]
pub(crate) struct Partial<L> {
    pub(crate) sums: L,
    /// Running maximum m.
    pub(crate) max: L,
    /// Running sum ℓ. Backward in the reproducible order: dbias summed over keys.
    pub(crate) sum: L,
    /// Number of scores equal to the running maximum. Empty if the output is normalised.
    pub(crate) ties: L,
    /// Running sum t of scores. Empty without row statistics.
    pub(crate) score_sum: L,
    /// Largest scale·q·k. Empty if that is the maximum: without bias and soft cap.
    pub(crate) max_product: L,
}

/// Lengths of the lists of a [`Partial`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PartialLens {
    pub(crate) sums: usize,
    /// Of max and sum.
    pub(crate) rows: usize,
    pub(crate) ties: usize,
    pub(crate) score_sum: usize,
    pub(crate) max_product: usize,
}

impl<A: Real> Partial<Aligned<A>> {
    /// Allocates lists of these lengths.
    pub(crate) fn new(lens: PartialLens) -> Result<Self> {
        Ok(Self {
            sums: Aligned::zeroed(lens.sums)?,
            max: Aligned::zeroed(lens.rows)?,
            sum: Aligned::zeroed(lens.rows)?,
            ties: Aligned::zeroed(lens.ties)?,
            score_sum: Aligned::zeroed(lens.score_sum)?,
            max_product: Aligned::zeroed(lens.max_product)?,
        })
    }

    /// Resets the statistics of all rows, but not the sums.
    pub(crate) fn reset(&mut self) {
        self.max.fill(-A::INFINITY);
        self.sum.fill(A::ZERO);
        self.ties.fill(A::ZERO);
        self.score_sum.fill(A::ZERO);
        self.max_product.fill(-A::INFINITY);
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let Self { sums, max, sum, ties, score_sum, max_product } = self;
        [sums, max, sum, ties, score_sum, max_product].map(Aligned::bytes).iter().sum()
    }
}

/// Merges `other` into `into`.
pub(crate) struct MergeSoftmax<'a, A> {
    pub(crate) into: Partial<&'a mut [A]>,
    pub(crate) other: Partial<&'a [A]>,
    /// True if `other` is the left operand.
    pub(crate) other_is_left: bool,
}

impl<A: Real> SimdKernel<A> for MergeSoftmax<'_, A> {
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
        let mut left_sum = [zero; VECTORS];
        let mut right_sum = [zero; VECTORS];
        unrolled!(v < VECTORS, {
            (left_max[v], right_max[v]) = ordered(V::load(&max[v]), V::load(&other_max[v]));
            merged[v] = right_max[v].if_larger(left_max[v]);
            // subtract 0 where nothing is visible: −∞ − −∞ would be NaN
            let base = merged[v].if_equal(infinity, zero, merged[v]);
            left_factor[v] = left_max[v].minus(base).softmax_exp();
            right_factor[v] = right_max[v].minus(base).softmax_exp();
            let (left, right) = ordered(V::load(&sum[v]), V::load(&other_sum[v]));
            (left_sum[v], right_sum[v]) = (left, right);
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
        if let (Some(score_sum), Some(others)) =
            (V::row_mut::<VECTORS>(into.score_sum), V::row::<VECTORS>(other.score_sum))
        {
            unrolled!(v < VECTORS, {
                let (left, right) = ordered(V::load(&score_sum[v]), V::load(&others[v]));
                let moved = |max: V| max.if_equal(infinity, zero, max.minus(merged[v]));
                let left = left_sum[v].multiply_add(moved(left_max[v]), left);
                let right = right_sum[v].multiply_add(moved(right_max[v]), right);
                left.multiply_add(left_factor[v], right.times(right_factor[v]))
                    .store(&mut score_sum[v]);
            });
        }
        if let (Some(max_product), Some(others)) =
            (V::row_mut::<VECTORS>(into.max_product), V::row::<VECTORS>(other.max_product))
        {
            unrolled!(v < VECTORS, {
                V::load(&others[v]).if_larger(V::load(&max_product[v])).store(&mut max_product[v]);
            });
        }
        let other_rows = V::strip::<VECTORS>(other.sums);
        let rows = vector::each_row_mut::<A, V, _>(V::strip_mut::<VECTORS>(into.sums));
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
        let [max, sum, ties, sums] = &mut into.0;
        let into_partial = Partial {
            max: &mut max[..],
            sum,
            ties,
            sums,
            score_sum: &mut [],
            max_product: &mut [],
        };
        let [max, sum, ties, sums] = &other.0;
        let other = Partial { max: &max[..], sum, ties, sums, score_sum: &[], max_product: &[] };
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
