//! Gradients of a tile's scores.
//!
//! ```text
//! e = e^{s − max}     p = e·(1/sum)
//! normalised:    ds = p·(keep·dp − delta)                       prob = keep·p
//! unnormalised:  ds = e·keep·dp − p·delta − [s = max]·share     prob = keep·e
//! ```
//! Masked pairs give 0, also if their operands are NaN. `prob` multiplies dO in dV.
//!
//! # Source
//! Dao et al. 2022, algorithm 4; the unnormalised form differentiates out = Σ e^{s − max}·v, with
//! the gradient of the maximum split evenly among ties.

use crate::simd::{
    dispatch::{Kernel, Real},
    lanes::unrolled,
    vector::{Vector, each_row_mut},
};

/// Statistics of the tile's queries: one per lane where queries lie in lanes, else one per row.
#[derive(Clone, Copy)]
pub(crate) struct QueryStatistics<'a, A> {
    pub(crate) by_row: bool,
    pub(crate) max: &'a [A],
    pub(crate) inverse_sum: &'a [A],
    pub(crate) delta: &'a [A],
    /// Read only if the output is not normalised.
    pub(crate) share: &'a [A],
}

/// Replaces scores by dS, and dP by the probabilities that multiply dO.
pub(crate) struct ScoreGradient<'a, A> {
    /// In: s / scale. Out: dS.
    pub(crate) s: &'a mut [A],
    /// Deferred scale: factor from elements of `s` to scores.
    pub(crate) scale: A,
    /// In: dP = ⟨dout, v⟩. Out: the factor of dout in dV.
    pub(crate) dp: &'a mut [A],
    /// Dropout factors of the probabilities.
    pub(crate) keep: Option<&'a [A]>,
    pub(crate) queries: QueryStatistics<'a, A>,
    pub(crate) normalize: bool,
    /// Lane bits of each row, if the tile has masked pairs.
    pub(crate) words: Option<&'a [u64]>,
}

impl<A: Real> Kernel<A> for ScoreGradient<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        match (self.queries.by_row, self.normalize) {
            (false, true) => self.run_specialized::<V, false, true, VECTORS>(),
            (true, true) => self.run_specialized::<V, true, true, VECTORS>(),
            (false, false) => self.run_specialized::<V, false, false, VECTORS>(),
            (true, false) => self.run_specialized::<V, true, false, VECTORS>(),
        }
    }
}

impl<A: Real> ScoreGradient<'_, A> {
    #[inline(always)]
    fn run_specialized<
        V: Vector<A>,
        const BY_ROW: bool,
        const NORMALIZE: bool,
        const VECTORS: usize,
    >(
        self,
    ) {
        let s = V::strip_mut::<VECTORS>(self.s);
        let dp = V::strip_mut::<VECTORS>(self.dp);
        let keep = self.keep.map(V::strip::<VECTORS>);
        let scale = V::splat(self.scale);
        let zero = V::splat(A::ZERO);
        let lanes = !0u64 >> (u64::BITS as usize - V::WIDTH);
        let QueryStatistics { max, inverse_sum, delta, share, .. } = self.queries;
        for (row, (s, dp)) in each_row_mut::<A, V, _>(s).zip(dp).enumerate() {
            unrolled!(v < VECTORS, 'vector: {
                // a vector without a visible pair: the usual case beside the diagonal
                if let Some(words) = self.words
                    && words[row] >> (v * V::WIDTH) & lanes == 0
                {
                    zero.store(&mut s[v]);
                    zero.store(&mut dp[v]);
                    break 'vector;
                }
                let score = V::load(&s[v]).times(scale);
                let max = query_statistic::<A, V, BY_ROW, VECTORS>(max, row, v);
                let inverse_sum = query_statistic::<A, V, BY_ROW, VECTORS>(inverse_sum, row, v);
                let e = score.minus(max).softmax_exp();
                let p = e.times(inverse_sum);
                let delta = query_statistic::<A, V, BY_ROW, VECTORS>(delta, row, v);
                // keep·dp
                let mut kept = V::load(&dp[v]);
                if let Some(keep) = keep {
                    kept = kept.times(V::load(&keep[row][v]));
                }
                let (mut ds, mut prob);
                if NORMALIZE {
                    ds = p.times(kept.minus(delta));
                    prob = p;
                } else {
                    let share = query_statistic::<A, V, BY_ROW, VECTORS>(share, row, v);
                    prob = e;
                    ds = prob
                        .times(kept)
                        .minus(p.times(delta))
                        .minus(score.if_equal(max, share, zero));
                }
                if let Some(keep) = keep {
                    prob = prob.times(V::load(&keep[row][v]));
                }
                // masked pairs: p and dp may be NaN
                if let Some(words) = self.words {
                    let word = words[row] >> (v * V::WIDTH);
                    ds = ds.select(word, zero);
                    prob = prob.select(word, zero);
                }
                ds.store(&mut s[v]);
                prob.store(&mut dp[v]);
            });
        }
    }
}

/// Loads the statistic of vector `v` of row `row`.
#[inline(always)]
fn query_statistic<A: Real, V: Vector<A>, const BY_ROW: bool, const VECTORS: usize>(
    list: &[A],
    row: usize,
    v: usize,
) -> V {
    if BY_ROW {
        V::splat(list[row])
    } else {
        V::row::<VECTORS>(list).map_or(V::splat(A::ZERO), |list| V::load(&list[v]))
    }
}
