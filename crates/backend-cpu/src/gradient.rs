//! The gradients of a tile's logits.
//!
//! ```text
//! normalised:     p = e^{s − lse}                          ds = p·(keep·dp − delta)                                      weight = keep·p
//! unnormalised:   p = e^{s − lse}   e = e^{s − max}        ds = e·keep·dp − p·delta − [s = max]·share                    weight = keep·e
//! ```
//! and 0 where a pair is hidden, whatever stands in its vectors.

use crate::{
    isa::Kernel,
    lanes::unrolled,
    real::Real,
    vector::{Vector, each_row_mut},
};

/// Numbers of the tile's queries: one a lane where queries lie in lanes, else one a row.
#[derive(Clone, Copy)]
pub(crate) struct OfQueries<'a, A> {
    pub(crate) by_row: bool,
    pub(crate) lse: &'a [A],
    /// [`OfQueries::max`] and [`OfQueries::share`] are used if and only if out is not normalised.
    pub(crate) max: &'a [A],
    pub(crate) delta: &'a [A],
    pub(crate) share: &'a [A],
}

/// Turns logits into their gradients, and gradients of weights into weights.
pub(crate) struct Differentiate<'a, A> {
    /// In: s / unit. Out: ds.
    pub(crate) s: &'a mut [A],
    /// What elements of `s` are multiplied by to be logits.
    pub(crate) unit: A,
    /// In: ⟨dout, v⟩. Out: what dout is multiplied by in dv.
    pub(crate) dp: &'a mut [A],
    /// What dropout multiplies weights by.
    pub(crate) keep: Option<&'a [A]>,
    pub(crate) queries: OfQueries<'a, A>,
    pub(crate) normalize: bool,
    /// Lane bits of each row, where pairs are hidden.
    pub(crate) words: Option<&'a [u64]>,
}

impl<A: Real> Kernel<A> for Differentiate<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        match (self.queries.by_row, self.normalize) {
            (false, true) => self.all::<V, false, true, VECTORS>(),
            (true, true) => self.all::<V, true, true, VECTORS>(),
            (false, false) => self.all::<V, false, false, VECTORS>(),
            (true, false) => self.all::<V, true, false, VECTORS>(),
        }
    }
}

impl<A: Real> Differentiate<'_, A> {
    #[inline(always)]
    fn all<V: Vector<A>, const BY_ROW: bool, const NORMALIZE: bool, const VECTORS: usize>(self) {
        let s = V::strip_mut::<VECTORS>(self.s);
        let dp = V::strip_mut::<VECTORS>(self.dp);
        let keep = self.keep.map(V::strip::<VECTORS>);
        let (unit, zero) = (V::splat(self.unit), V::splat(A::ZERO));
        let OfQueries { lse, max, delta, share, .. } = self.queries;
        for (row, (s, dp)) in each_row_mut::<A, V, _>(s).zip(dp).enumerate() {
            unrolled!(v < VECTORS, {
                let logit = V::load(&s[v]).times(unit);
                let p = logit.minus(of_queries::<A, V, BY_ROW, VECTORS>(lse, row, v)).weight();
                let delta = of_queries::<A, V, BY_ROW, VECTORS>(delta, row, v);
                let mut kept = V::load(&dp[v]);
                if let Some(keep) = keep {
                    kept = kept.times(V::load(&keep[row][v]));
                }
                let (mut ds, mut weight);
                if NORMALIZE {
                    ds = p.times(kept.minus(delta));
                    weight = p;
                } else {
                    let max = of_queries::<A, V, BY_ROW, VECTORS>(max, row, v);
                    let share = of_queries::<A, V, BY_ROW, VECTORS>(share, row, v);
                    weight = logit.minus(max).weight();
                    ds = weight.times(kept).minus(p.times(delta)).minus(logit.if_equal(max, share, zero));
                }
                if let Some(keep) = keep {
                    weight = weight.times(V::load(&keep[row][v]));
                }
                if let Some(words) = self.words {
                    let word = words[row] >> (v * V::WIDTH);
                    ds = ds.select(word, zero);
                    weight = weight.select(word, zero);
                }
                ds.store(&mut s[v]);
                weight.store(&mut dp[v]);
            });
        }
    }
}

/// The numbers that belong to vector `v` of row `row`.
#[inline(always)]
fn of_queries<A: Real, V: Vector<A>, const BY_ROW: bool, const VECTORS: usize>(list: &[A], row: usize, v: usize) -> V {
    if BY_ROW { V::splat(list[row]) } else { V::row::<VECTORS>(list).map_or(V::splat(A::ZERO), |list| V::load(&list[v])) }
}
