//! One step of the running softmax, all lanes at once.
//!
//! ```text
//! m' = max(m, max_r s_r)     sum' = sum·e^{m − m'} + Σ_r e^{s_r − m'}     s_r ← e^{s_r − m'}
//! ```
//! A lane that has seen nothing has m = −∞, and stays so while all its logits are −∞ (hidden). NaN is never a maximum, but e^NaN is NaN and stays in
//! the sum.

use crate::{
    isa::Job,
    lanes::{each_row, each_row_mut, map, multiply_add, strip, strip_mut, unrolled, zip},
    real::Real,
};

/// Folds the logits of some rows of a tile into the running maximum and sum of each lane, and turns them into weights.
pub(crate) struct Fold<'a, A> {
    pub(crate) tile: &'a mut [A],
    pub(crate) max: &'a mut [A],
    pub(crate) sum: &'a mut [A],
    /// How many logits share the maximum, where that is wanted.
    pub(crate) ties: Option<&'a mut [A]>,
    /// Out: e^{m − m'}, by which what was summed before is multiplied.
    pub(crate) rescale: &'a mut [A],
}

impl<A: Real> Job for Fold<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let tile = strip_mut::<A, VECTORS, WIDTH>(self.tile);
        let lanes = (strip_mut::<A, VECTORS, WIDTH>(self.max).first_mut())
            .zip(strip_mut::<A, VECTORS, WIDTH>(self.sum).first_mut())
            .zip(strip_mut::<A, VECTORS, WIDTH>(self.rescale).first_mut());
        let Some(((max, sum), rescale)) = lanes else { return };
        let old = *max;
        for row in each_row(tile) {
            unrolled!(v < VECTORS, {
                max[v] = zip(row[v], max[v], |s, max| if s > max { s } else { max });
            });
        }
        if let Some(ties) = self.ties.and_then(|ties| strip_mut::<A, VECTORS, WIDTH>(ties).first_mut()) {
            count_ties::<A, VECTORS, WIDTH>(tile, &old, max, ties);
        }
        // nothing is subtracted where nothing was seen: −∞ − −∞ would be NaN
        let mut base = *max;
        unrolled!(v < VECTORS, {
            base[v] = map(max[v], |max| if max == -A::INFINITY { A::ZERO } else { max });
            rescale[v] = zip(old[v], base[v], |old, base| (old - base).exp::<FUSED>());
        });
        let mut more = [[A::ZERO; WIDTH]; VECTORS];
        for row in each_row_mut(tile) {
            unrolled!(v < VECTORS, {
                row[v] = zip(row[v], base[v], |s, base| (s - base).exp::<FUSED>());
                more[v] = zip(more[v], row[v], |sum, weight| sum + weight);
            });
        }
        unrolled!(v < VECTORS, sum[v] = multiply_add::<A, FUSED, WIDTH>(sum[v], rescale[v], more[v]));
    }
}

/// ties' = (ties, if the maximum has not moved) + how many rows reach it.
#[inline(always)]
fn count_ties<A: Real, const VECTORS: usize, const WIDTH: usize>(
    tile: &[[[A; WIDTH]; VECTORS]],
    old: &[[A; WIDTH]; VECTORS],
    max: &[[A; WIDTH]; VECTORS],
    ties: &mut [[A; WIDTH]; VECTORS],
) {
    let mut reached = [[A::ZERO; WIDTH]; VECTORS];
    for row in each_row(tile) {
        unrolled!(v < VECTORS, {
            let at_max = zip(row[v], max[v], |s, max| if s == max { A::ONE } else { A::ZERO });
            reached[v] = zip(reached[v], at_max, |count, one| count + one);
        });
    }
    unrolled!(v < VECTORS, {
        for lane in 0..WIDTH {
            let before = if max[v][lane] > old[v][lane] { A::ZERO } else { ties[v][lane] };
            ties[v][lane] = before + reached[v][lane];
        }
    });
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
