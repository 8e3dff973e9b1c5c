//! One step of the running softmax, all lanes at once.
//!
//! ```text
//! m' = max(m, max_r s_r)     sum' = sum·e^{m − m'} + Σ_r e^{s_r − m'}     s_r ← e^{s_r − m'}
//! ```
//! A lane that has seen nothing has m = −∞, and stays so while all its logits are −∞ (hidden). NaN is never a maximum, but e^NaN is NaN and stays in
//! the sum.

use crate::{
    isa::{Job, Kernel},
    lanes::{each_row_mut, strip, strip_mut, unrolled, zip},
    real::Real,
    vector::{self, MOST_WIDTH, Vector},
};

/// Folds the logits of some rows of a tile into the running maximum and sum of each lane, and turns them into weights.
pub(crate) struct Fold<'a, A> {
    /// In: logits / unit. Out: weights.
    pub(crate) tile: &'a mut [A],
    /// What the tile's elements are multiplied by to be logits; positive.
    pub(crate) unit: A,
    /// The largest element of each lane of the tile, if it is known.
    pub(crate) largest: Option<&'a [A]>,
    pub(crate) max: &'a mut [A],
    pub(crate) sum: &'a mut [A],
    /// How many logits share the maximum, where that is wanted; only for a unit of 1.
    pub(crate) ties: Option<&'a mut [A]>,
    /// Out: e^{m − m'}, by which what was summed before is multiplied.
    pub(crate) rescale: &'a mut [A],
}

impl<A: Real> Kernel<A> for Fold<'_, A> {
    /// Whether a maximum has moved, so that something is to be rescaled.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let tile = V::strip_mut::<VECTORS>(self.tile);
        let lanes = (V::row_mut::<VECTORS>(self.max)).zip(V::row_mut::<VECTORS>(self.sum)).zip(V::row_mut::<VECTORS>(self.rescale));
        let Some(((max, sum), rescale)) = lanes else { return false };
        let infinity = V::splat(-A::INFINITY);
        let mut top = [infinity; VECTORS];
        if let Some(largest) = self.largest.and_then(V::row::<VECTORS>) {
            unrolled!(v < VECTORS, top[v] = V::load(&largest[v]));
        } else {
            for row in vector::each_row::<A, V, _>(tile) {
                unrolled!(v < VECTORS, top[v] = V::load(&row[v]).if_larger(top[v]));
            }
        }
        let unit = V::splat(self.unit);
        let mut old = [infinity; VECTORS];
        // of logits
        let mut new = [infinity; VECTORS];
        let mut base = [infinity; VECTORS];
        let mut moved = false;
        unrolled!(v < VECTORS, {
            old[v] = V::load(&max[v]);
            new[v] = top[v].times(unit).if_larger(old[v]);
            new[v].store(&mut max[v]);
            moved |= !new[v].all_equal(old[v]);
            // nothing is subtracted where nothing was seen: −∞ − −∞ would be NaN
            base[v] = new[v].if_equal(infinity, V::splat(A::ZERO), new[v]);
        });
        if let Some(ties) = self.ties.and_then(V::row_mut::<VECTORS>) {
            count_ties::<A, V, VECTORS>(tile, &old, &new, ties);
        }
        let mut more = [V::splat(A::ZERO); VECTORS];
        for row in vector::each_row_mut::<A, V, _>(tile) {
            unrolled!(v < VECTORS, {
                let weight = V::load(&row[v]).times(unit).minus(base[v]).weight();
                more[v] = more[v].plus(weight);
                weight.store(&mut row[v]);
            });
        }
        unrolled!(v < VECTORS, {
            let factor = old[v].minus(base[v]).weight();
            factor.store(&mut rescale[v]);
            V::load(&sum[v]).multiply_add(factor, more[v]).store(&mut sum[v]);
        });
        moved
    }
}

/// ties' = (ties, if the maximum has not moved) + how many rows reach it.
#[inline(always)]
fn count_ties<A: Real, V: Vector<A>, const VECTORS: usize>(
    tile: &[[V::Memory; VECTORS]],
    old: &[V; VECTORS],
    max: &[V; VECTORS],
    ties: &mut [V::Memory; VECTORS],
) {
    let (none, one) = (V::splat(A::ZERO), V::splat(A::ONE));
    let mut reached = [none; VECTORS];
    for row in vector::each_row::<A, V, _>(tile) {
        unrolled!(v < VECTORS, reached[v] = reached[v].plus(V::load(&row[v]).if_equal(max[v], one, none)));
    }
    unrolled!(v < VECTORS, max[v].if_equal(old[v], V::load(&ties[v]), none).plus(reached[v]).store(&mut ties[v]));
}

/// The same for lines whose elements lie side by side: keys in lanes.
pub(crate) struct FoldLines<'a, A> {
    /// In: logits / unit. Out: weights.
    pub(crate) tile: &'a mut [A],
    /// Elements of a line, whole vectors.
    pub(crate) width: usize,
    /// What the tile's elements are multiplied by to be logits; positive.
    pub(crate) unit: A,
    /// One a line, as all that follows.
    pub(crate) max: &'a mut [A],
    pub(crate) sum: &'a mut [A],
    /// Out: e^{m − m'}, by which what was summed before is multiplied.
    pub(crate) rescale: &'a mut [A],
}

impl<A: Real> Kernel<A> for FoldLines<'_, A> {
    /// Whether a maximum has moved, so that something is to be rescaled.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let unit = V::splat(self.unit);
        let mut moved = false;
        let of_line = self.max.iter_mut().zip(self.sum).zip(self.rescale);
        for (line, ((max, sum), rescale)) in self.tile.chunks_exact_mut(self.width).zip(of_line) {
            let line = V::strip_mut::<1>(line);
            let mut top = V::splat(-A::INFINITY);
            for [logits] in vector::each_row::<A, V, _>(line) {
                top = V::load(logits).if_larger(top);
            }
            let mut lanes = [-A::INFINITY; MOST_WIDTH];
            if let Some([lanes]) = V::row_mut::<1>(&mut lanes) {
                top.store(lanes);
            }
            let top = lanes.into_iter().fold(-A::INFINITY, |top, lane| if lane > top { lane } else { top });
            let old = *max;
            let new = if top * self.unit > old { top * self.unit } else { old };
            moved |= new != old;
            // nothing is subtracted where nothing was seen: −∞ − −∞ would be NaN
            let base = if new == -A::INFINITY { A::ZERO } else { new };
            let mut more = V::splat(A::ZERO);
            for [logits] in vector::each_row_mut::<A, V, _>(line) {
                let weight = V::load(logits).times(unit).minus(V::splat(base)).weight();
                more = more.plus(weight);
                weight.store(logits);
            }
            *max = new;
            *rescale = (old - base).weight::<false>();
            *sum = *sum * *rescale + more.total();
        }
        moved
    }
}

/// Multiplies one tile by another, element by element.
pub(crate) struct Multiply<'a, A> {
    pub(crate) tile: &'a mut [A],
    pub(crate) by: &'a [A],
}

impl<A: Real> Job for Multiply<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let tile = strip_mut::<A, VECTORS, WIDTH>(self.tile);
        for (row, by) in each_row_mut(tile).zip(strip::<A, VECTORS, WIDTH>(self.by)) {
            unrolled!(v < VECTORS, row[v] = zip(row[v], by[v], |a, b| a * b));
        }
    }
}
