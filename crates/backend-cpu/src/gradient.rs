//! The gradients of a tile's logits.
//!
//! ```text
//! normalised:     p = e^{s − lse}                          ds = p·(keep·dp − delta)                                      weight = keep·p
//! unnormalised:   p = e^{s − lse}   e = e^{s − max}        ds = e·keep·dp − p·delta − [s = max]·share                    weight = keep·e
//! ```
//! and 0 where a pair is hidden, whatever stands in its vectors.

use crate::{
    isa::Job,
    lanes::{each_row_mut, map, select, strip, strip_mut, unrolled, zip},
    real::Real,
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
    /// In: s. Out: ds.
    pub(crate) s: &'a mut [A],
    /// In: ⟨dout, v⟩. Out: what dout is multiplied by in dv.
    pub(crate) dp: &'a mut [A],
    /// What dropout multiplies weights by.
    pub(crate) keep: Option<&'a [A]>,
    pub(crate) queries: OfQueries<'a, A>,
    pub(crate) normalize: bool,
    /// Lane bits of each row, where pairs are hidden.
    pub(crate) words: Option<&'a [u64]>,
}

impl<A: Real> Job for Differentiate<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        match (self.queries.by_row, self.normalize) {
            (false, true) => self.all::<false, true, FUSED, VECTORS, WIDTH>(),
            (true, true) => self.all::<true, true, FUSED, VECTORS, WIDTH>(),
            (false, false) => self.all::<false, false, FUSED, VECTORS, WIDTH>(),
            (true, false) => self.all::<true, false, FUSED, VECTORS, WIDTH>(),
        }
    }
}

impl<A: Real> Differentiate<'_, A> {
    #[inline(always)]
    fn all<const BY_ROW: bool, const NORMALIZE: bool, const FUSED: bool, const VECTORS: usize, const WIDTH: usize>(self) {
        let s = strip_mut::<A, VECTORS, WIDTH>(self.s);
        let dp = strip_mut::<A, VECTORS, WIDTH>(self.dp);
        let keep = self.keep.map(strip::<A, VECTORS, WIDTH>);
        for (row, (s, dp)) in each_row_mut(s).zip(dp).enumerate() {
            unrolled!(v < VECTORS, {
                let at = |list: &[A]| of_queries::<A, BY_ROW, WIDTH>(list, row, v);
                let p = zip(s[v], at(self.queries.lse), |s, lse| (s - lse).exp::<FUSED>());
                let mut kept = dp[v];
                if let Some(keep) = keep {
                    kept = zip(kept, keep[row][v], |dp, keep| dp * keep);
                }
                let (mut ds, mut weight);
                if NORMALIZE {
                    ds = zip(p, zip(kept, at(self.queries.delta), |dp, delta| dp - delta), |p, rest| p * rest);
                    weight = p;
                } else {
                    let max = at(self.queries.max);
                    weight = zip(s[v], max, |s, max| (s - max).exp::<FUSED>());
                    ds = zip(weight, kept, |weight, dp| weight * dp);
                    ds = zip(ds, zip(p, at(self.queries.delta), |p, delta| p * delta), |ds, more| ds - more);
                    let reached = zip(s[v], max, |s, max| if s == max { A::ONE } else { A::ZERO });
                    let lost = zip(reached, at(self.queries.share), |reached, share| if reached == A::ZERO { A::ZERO } else { share });
                    ds = zip(ds, lost, |ds, lost| ds - lost);
                }
                if let Some(keep) = keep {
                    weight = zip(weight, keep[row][v], |weight, keep| weight * keep);
                }
                if let Some(words) = self.words {
                    ds = select(words[row], v * WIDTH, ds, [A::ZERO; WIDTH]);
                    weight = select(words[row], v * WIDTH, weight, [A::ZERO; WIDTH]);
                }
                s[v] = ds;
                dp[v] = weight;
            });
        }
    }
}

/// The numbers that belong to vector `v` of row `row`.
#[inline(always)]
fn of_queries<A: Real, const BY_ROW: bool, const WIDTH: usize>(list: &[A], row: usize, v: usize) -> [A; WIDTH] {
    if BY_ROW {
        [list[row]; WIDTH]
    } else {
        let mut lanes = [A::ZERO; WIDTH];
        lanes.copy_from_slice(&list[v * WIDTH..][..WIDTH]);
        map(lanes, |lane| lane)
    }
}
