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

use crate::{
    simd::{
        dispatch::{ArrayKernel, Kernel, Real},
        lanes::{each_row_mut, strip, strip_mut, unrolled, zip},
        vector::{self, MAX_LANES, Vector},
    },
    tile::tile_mask::RowRanges,
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

impl<A: Real> Kernel<A> for OnlineSoftmax<'_, A> {
    /// True if a maximum changed, so that the accumulator must be rescaled.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let tile = V::strip_mut::<VECTORS>(self.tile);
        let lanes = (V::row_mut::<VECTORS>(self.max))
            .zip(V::row_mut::<VECTORS>(self.sum))
            .zip(V::row_mut::<VECTORS>(self.rescale));
        let Some(((max, sum), rescale)) = lanes else { return false };
        let infinity = V::splat(-A::INFINITY);
        // 1. the tile's maximum, computed by the product where possible
        let mut top = [infinity; VECTORS];
        if let Some(tile_max) = self.tile_max.and_then(V::row::<VECTORS>) {
            unrolled!(v < VECTORS, top[v] = V::load(&tile_max[v]));
        } else {
            for row in vector::each_row::<A, V, _>(tile) {
                unrolled!(v < VECTORS, top[v] = V::load(&row[v]).if_larger(top[v]));
            }
        }
        // 2. m' = max(m, scale · tile maximum)
        let scale = V::splat(self.scale);
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
        if let Some(ties) = self.ties.and_then(V::row_mut::<VECTORS>) {
            count_ties::<A, V, VECTORS>(tile, &old, &new, ties);
        }
        // 3. probabilities and their sum
        let mut added = [V::splat(A::ZERO); VECTORS];
        if let Some(row_ranges) = self.row_ranges {
            // masked rows would add 0
            unrolled!(v < VECTORS, {
                let rows = row_ranges.get(v).cloned().unwrap_or_default();
                let rows = tile.get_mut(rows).unwrap_or_default();
                for row in vector::each_row_mut::<A, V, _>(rows) {
                    let prob = V::load(&row[v]).times(scale).minus(base[v]).softmax_exp();
                    added[v] = added[v].plus(prob);
                    prob.store(&mut row[v]);
                }
            });
        } else {
            for row in vector::each_row_mut::<A, V, _>(tile) {
                unrolled!(v < VECTORS, {
                    let prob = V::load(&row[v]).times(scale).minus(base[v]).softmax_exp();
                    added[v] = added[v].plus(prob);
                    prob.store(&mut row[v]);
                });
            }
        }
        // 4. ℓ' = ℓ·e^{m − m'} + sum
        unrolled!(v < VECTORS, {
            let factor = old[v].minus(base[v]).softmax_exp();
            factor.store(&mut rescale[v]);
            V::load(&sum[v]).multiply_add(factor, added[v]).store(&mut sum[v]);
        });
        max_changed
    }
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

impl<A: Real> Kernel<A> for OnlineSoftmaxRows<'_, A> {
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

impl<A: Real> ArrayKernel for MultiplyTile<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let tile = strip_mut::<A, VECTORS, WIDTH>(self.tile);
        for (row, by) in each_row_mut(tile).zip(strip::<A, VECTORS, WIDTH>(self.by)) {
            unrolled!(v < VECTORS, row[v] = zip(row[v], by[v], |a, b| a * b));
        }
    }
}
