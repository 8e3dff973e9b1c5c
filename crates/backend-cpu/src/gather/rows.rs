//! Kernels of one row of queries, or of keys, or of four rows with one list, against the rows of
//! the other side.
//!
//! ```text
//! scores      s[l][j] = ⟨a_l, row(j)⟩           four rows j at a time, then sums across lanes
//! softmax     m, ℓ, p[l][j] = e^{s − m}         j lies in lanes
//! weighted    out_l += Σ_j p[l][j] · row(j)     out in registers, one row j at a time
//! ```
//! A row of the other side is read once for all rows of the group: the products of four rows keep
//! two multiply-add units busy with one load for each two of them.

use crate::{
    gather::operands::{GROUP, MergedList, RowsView},
    simd::{
        dispatch::{IsaToken, Real, SimdKernel},
        vector::{FOUR, MAX_LANES, Vector, unrolled},
    },
};

/// Most elements of a list of one call: their scores stay in the first-level cache. A multiple of
/// 64.
pub(crate) const PART: usize = 256;

/// Vectors of a row that are summed in registers, and chains of a sum of one row.
const COLUMNS: usize = 4;
const ONE: usize = 1;
const TWO: usize = 2;

/// Parameters of the scores that do not differ between pairs.
#[derive(Clone, Copy)]
pub(crate) struct ScoreRule<A> {
    pub(crate) scale: A,
    /// cap and 1/cap.
    pub(crate) cap: Option<(A, A)>,
    /// True if the list bias is added before the cap.
    pub(crate) bias_first: bool,
}

impl<A: Real> ScoreRule<A> {
    /// Replaces products by scores, and writes ∂s/∂x to `slope` if there is a cap.
    #[inline(always)]
    fn finish<V: Vector<A>>(&self, s: &mut [A], bias: Option<&[A]>, slope: &mut [A]) {
        if bias.is_none() && self.cap.is_none() {
            let scale = V::splat(self.scale);
            for [s] in V::strip_mut::<1>(s) {
                V::load(s).times(scale).store(s);
            }
            return;
        }
        for (at, s) in s.iter_mut().enumerate() {
            let bias = bias.map_or(A::ZERO, |bias| bias[at]);
            let mut x = *s * self.scale;
            if self.bias_first {
                x += bias;
            }
            if let Some((cap, inverse)) = self.cap {
                let tanh = (x * inverse).tanh::<false>();
                x = cap * tanh;
                slope[at] = A::ONE - tanh * tanh;
            }
            *s = if self.bias_first { x } else { x + bias };
        }
    }
}

/// Listed rows of the other side: at most [`PART`].
#[derive(Clone, Copy)]
pub(crate) struct Others<'a, A> {
    pub(crate) list: MergedList<'a>,
    pub(crate) rows: RowsView<'a, A>,
}

impl<A: Real> Others<'_, A> {
    /// Returns the elements of a tile of scores of one row: whole vectors.
    #[inline(always)]
    fn padded<V: Vector<A>>(&self) -> usize {
        self.list.elements.len().next_multiple_of(V::WIDTH)
    }

    /// Returns bits of the visible pairs of row `l` of the group from element `at` on, those of one
    /// vector.
    #[inline(always)]
    fn visible(&self, l: usize, at: usize) -> u64 {
        match self.list.words.get(at / 64) {
            Some(words) => words[l] >> (at % 64),
            None => !0 >> (64 - (self.list.elements.len() - at).min(64)),
        }
    }

    /// Computes the products of the vectors `own` with those of one side: `[G][PART]`.
    #[inline(always)]
    fn products<V: Vector<A>, const G: usize>(&self, own: [&[A]; G], side: usize, into: &mut [A]) {
        let elements = self.list.elements;
        let dim = self.rows.dims[side];
        let chunks = dim / V::WIDTH;
        let mut rows = [&[][..]; G];
        unrolled!(l < G, rows[l] = &V::strip::<1>(own[l])[..chunks]);
        for first in (0..elements.len()).step_by(V::WIDTH) {
            let end = elements.len().min(first + V::WIDTH);
            let mut fours = [[V::splat(A::ZERO); FOUR]; G];
            for (four, at) in (first..end).step_by(FOUR).enumerate() {
                let mut vectors = [&[][..]; FOUR];
                unrolled!(i < FOUR, {
                    // beyond the end the last row again: its products are masked
                    let row = elements[(at + i).min(elements.len() - 1)];
                    vectors[i] = &V::strip::<1>(self.rows.vector(row, side))[..chunks];
                });
                let mut sums = [[V::splat(A::ZERO); FOUR]; G];
                for c in 0..chunks {
                    let mut vector = [V::splat(A::ZERO); FOUR];
                    unrolled!(i < FOUR, vector[i] = V::load(&vectors[i][c][0]));
                    unrolled!(l < G, {
                        let own = V::load(&rows[l][c][0]);
                        unrolled!(i < FOUR, {
                            sums[l][i] = own.multiply_add(vector[i], sums[l][i]);
                        });
                    });
                }
                unrolled!(l < G, fours[l][four] = V::sums_of_fours(sums[l]));
            }
            unrolled!(l < G, {
                if let Some([into]) = V::row_mut::<1>(&mut into[l * PART + first..]) {
                    V::totals_of_fours(fours[l]).store(into);
                }
            });
        }
    }

    /// Computes out_l += Σ weights\[l\]·vectors of one side, for `G` rows. Weights of masked pairs
    /// are 0.
    #[inline(always)]
    fn add_weighted<V: Vector<A>, const G: usize>(
        &self,
        weights: &[A],
        side: usize,
        out: &mut [A],
    ) {
        let chunks = self.rows.dims[side] / V::WIDTH;
        if !self.rows.is_finite && !self.list.words.is_empty() {
            return self.add_visible::<V, G>(weights, side, out);
        }
        let mut c = 0;
        while c + COLUMNS <= chunks {
            self.add_columns::<V, G, COLUMNS>(weights, side, c, out);
            c += COLUMNS;
        }
        while c < chunks {
            self.add_columns::<V, G, ONE>(weights, side, c, out);
            c += 1;
        }
    }

    /// As [`Others::add_weighted`], of the `N` vectors of each row from vector `c` on.
    #[inline(always)]
    fn add_columns<V: Vector<A>, const G: usize, const N: usize>(
        &self,
        weights: &[A],
        side: usize,
        c: usize,
        out: &mut [A],
    ) {
        let dim = self.rows.dims[side];
        let elements = self.list.elements;
        let mut sums = [[V::splat(A::ZERO); N]; G];
        unrolled!(l < G, {
            if let Some(out) = V::row::<N>(&out[l * dim + c * V::WIDTH..]) {
                unrolled!(n < N, sums[l][n] = V::load(&out[n]));
            }
        });
        let mut at = 0;
        if G == 1 {
            // one row has too few chains to hide the latency: a second set of sums
            let mut more = [V::splat(A::ZERO); N];
            while at + TWO <= elements.len() {
                // no closure: it would be a call for every two rows
                let first = V::row::<N>(&self.rows.vector(elements[at], side)[c * V::WIDTH..]);
                let second = V::row::<N>(&self.rows.vector(elements[at + 1], side)[c * V::WIDTH..]);
                let (Some(first), Some(second)) = (first, second) else { return };
                let (weight, next) = (V::splat(weights[at]), V::splat(weights[at + 1]));
                unrolled!(n < N, {
                    sums[0][n] = weight.multiply_add(V::load(&first[n]), sums[0][n]);
                    more[n] = next.multiply_add(V::load(&second[n]), more[n]);
                });
                at += TWO;
            }
            unrolled!(n < N, sums[0][n] = sums[0][n].plus(more[n]));
        }
        let mut of_row = [&[][..]; G];
        unrolled!(l < G, of_row[l] = &weights[l * PART..][..elements.len()]);
        while at < elements.len() {
            let Some(row) = V::row::<N>(&self.rows.vector(elements[at], side)[c * V::WIDTH..])
            else {
                return;
            };
            let mut vector = [V::splat(A::ZERO); N];
            unrolled!(n < N, vector[n] = V::load(&row[n]));
            unrolled!(l < G, {
                let weight = V::splat(of_row[l][at]);
                unrolled!(n < N, sums[l][n] = weight.multiply_add(vector[n], sums[l][n]));
            });
            at += 1;
        }
        unrolled!(l < G, {
            if let Some(out) = V::row_mut::<N>(&mut out[l * dim + c * V::WIDTH..]) {
                unrolled!(n < N, sums[l][n].store(&mut out[n]));
            }
        });
    }

    /// As [`Others::add_weighted`], without masked pairs: a masked vector may be NaN, and 0·NaN is
    /// NaN.
    #[inline(always)]
    fn add_visible<V: Vector<A>, const G: usize>(&self, weights: &[A], side: usize, out: &mut [A]) {
        let dim = self.rows.dims[side];
        for (l, out) in out.chunks_exact_mut(dim).enumerate().take(G) {
            for (at, &row) in self.list.elements.iter().enumerate() {
                if self.visible(l, at) & 1 == 0 {
                    continue;
                }
                let weight = V::splat(weights[l * PART + at]);
                let vector = V::strip::<1>(self.rows.vector(row, side));
                for ([out], [vector]) in V::strip_mut::<1>(out).iter_mut().zip(vector) {
                    weight.multiply_add(V::load(vector), V::load(out)).store(out);
                }
            }
        }
    }
}

/// Multiplies `tile` by the factors `by`, if there are any.
#[inline(always)]
fn multiply<A: Real, V: Vector<A>>(tile: &mut [A], by: Option<&[A]>) {
    let Some(by) = by else { return };
    for ([into], [factor]) in V::strip_mut::<1>(tile).iter_mut().zip(V::strip::<1>(by)) {
        V::load(into).times(V::load(factor)).store(into);
    }
}

/// Scratch of a group of rows.
pub(crate) struct RowScratch<'a, A> {
    /// `[GROUP][PART]` each: products and what becomes of them.
    pub(crate) s: &'a mut [A],
    pub(crate) dp: &'a mut [A],
    pub(crate) slope: &'a mut [A],
}

/// Attends to listed keys with the queries of a group: updates their statistics and accumulators.
pub(crate) struct AttendRows<'a, A, const G: usize> {
    pub(crate) keys: Others<'a, A>,
    /// `[G]` rows.
    pub(crate) q: &'a [A],
    pub(crate) rule: ScoreRule<A>,
    /// `[G][PART]` each: list bias, and dropout factors.
    pub(crate) bias: Option<&'a [A]>,
    pub(crate) keep: Option<&'a [A]>,
    pub(crate) scratch: RowScratch<'a, A>,
    /// `[G]` rows.
    pub(crate) out: &'a mut [A],
    pub(crate) max: &'a mut [A],
    pub(crate) sum: &'a mut [A],
}

impl<A: Real, const G: usize> SimdKernel<A> for AttendRows<'_, A, G> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { keys, q, rule, scratch, out, max, sum, .. } = self;
        let padded = keys.padded::<V>();
        let [q_dim, dim] = keys.rows.dims;
        let q = std::array::from_fn(|l| &q[l * q_dim..(l + 1) * q_dim]);
        keys.products::<V, G>(q, 0, scratch.s);
        for l in 0..G {
            let span = l * PART..l * PART + padded;
            let s = &mut scratch.s[span.clone()];
            let bias = self.bias.map(|bias| &bias[span.clone()]);
            rule.finish::<V>(s, bias, &mut scratch.slope[span.clone()]);
            let masked = V::splat(-A::INFINITY);
            let mut top = masked;
            for (at, [scores]) in V::strip_mut::<1>(s).iter_mut().enumerate() {
                let visible = V::load(scores).select(keys.visible(l, at * V::WIDTH), masked);
                visible.store(scores);
                top = visible.if_larger(top);
            }
            let top = largest::<A, V>(top);
            let old = max[l];
            let new = if top > old { top } else { old };
            // subtract 0 where nothing is visible yet: −∞ − −∞ would be NaN
            let base = if new == -A::INFINITY { A::ZERO } else { new };
            let mut added = V::splat(A::ZERO);
            for [scores] in V::strip_mut::<1>(s) {
                let prob = V::load(scores).minus(V::splat(base)).softmax_exp();
                added = added.plus(prob);
                prob.store(scores);
            }
            max[l] = new;
            if new != old && old != -A::INFINITY {
                let rescale = (old - base).softmax_exp::<false>();
                sum[l] = sum[l] * rescale;
                let rescale = V::splat(rescale);
                for [sums] in V::strip_mut::<1>(&mut out[l * dim..(l + 1) * dim]) {
                    V::load(sums).times(rescale).store(sums);
                }
            }
            sum[l] += added.total();
            multiply::<A, V>(s, self.keep.map(|keep| &keep[span.clone()]));
        }
        keys.add_weighted::<V, G>(scratch.s, 1, out);
    }
}

/// Returns the largest lane.
#[inline(always)]
fn largest<A: Real, V: Vector<A>>(vector: V) -> A {
    let mut lanes = [-A::INFINITY; MAX_LANES];
    if let Some([lanes]) = V::row_mut::<1>(&mut lanes) {
        vector.store(lanes);
    }
    let mut half = V::WIDTH / 2;
    while half > 0 {
        for i in 0..half {
            let lane = lanes[i + half];
            lanes[i] = if lane > lanes[i] { lane } else { lanes[i] };
        }
        half /= 2;
    }
    lanes[0]
}

/// Statistics of the queries of the pairs: those of the group's rows, or of its list.
#[derive(Clone, Copy)]
pub(crate) enum PairStatistics<'a, A> {
    /// max, 1/sum, delta of each row of the group.
    Own([&'a [A]; 3]),
    /// The same, of each listed query.
    Listed([&'a [A]; 3]),
}

impl<A: Real> PairStatistics<'_, A> {
    /// Returns the statistics of row `l` of the group and vector number `index` of the list.
    #[inline(always)]
    fn vectors<V: Vector<A>>(&self, l: usize, index: usize) -> [V; 3] {
        let mut vectors = [V::splat(A::ZERO); 3];
        unrolled!(i < THREE, {
            vectors[i] = match self {
                Self::Own(rows) => V::splat(rows[i][l]),
                Self::Listed(lists) => {
                    let list = V::strip::<1>(lists[i]);
                    V::load(&list[index][0])
                }
            };
        });
        vectors
    }
}

const THREE: usize = 3;

/// dS of the rows of a group, queries or keys, with listed rows of the other side: the gradients
/// are `out[0] += Σ dS·rows` and with two outputs `out[1] += Σ P·rows` of the second side.
///
/// ```text
/// query   s = ⟨q, k_j⟩   dp = ⟨dO, v_j⟩   dq += Σ dS_j·k_j
/// key     s = ⟨k, q_j⟩   dp = ⟨v, dO_j⟩   dk += Σ dS_j·q_j   dv += Σ P_j·dO_j
/// ```
pub(crate) struct GradientRows<'a, A, const G: usize> {
    pub(crate) others: Others<'a, A>,
    /// Rows of the group, and their numbers.
    pub(crate) own: (RowsView<'a, A>, [u32; GROUP]),
    pub(crate) rule: ScoreRule<A>,
    pub(crate) bias: Option<&'a [A]>,
    pub(crate) keep: Option<&'a [A]>,
    pub(crate) statistics: PairStatistics<'a, A>,
    pub(crate) scratch: RowScratch<'a, A>,
    pub(crate) out: &'a mut [A],
    pub(crate) out_value: Option<&'a mut [A]>,
    /// dS as the gradient of the list bias, `[G][PART]`.
    pub(crate) dbias: Option<&'a mut [A]>,
}

impl<A: Real, const G: usize> SimdKernel<A> for GradientRows<'_, A, G> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { others, own, rule, scratch, .. } = self;
        let padded = others.padded::<V>();
        let RowScratch { s, dp, slope } = scratch;
        let (rows, numbers) = own;
        let vectors = |side| std::array::from_fn(|l| rows.vector(numbers[l], side));
        others.products::<V, G>(vectors(0), 0, s);
        others.products::<V, G>(vectors(1), 1, dp);
        let mut dbias = self.dbias;
        for l in 0..G {
            let span = l * PART..l * PART + padded;
            let [s, dp, slope] =
                [&mut *s, &mut *dp, &mut *slope].map(|list| &mut list[span.clone()]);
            let keep = self.keep.map(|keep| &keep[span.clone()]);
            rule.finish::<V>(s, self.bias.map(|bias| &bias[span.clone()]), slope);
            multiply::<A, V>(dp, keep);
            let zero = V::splat(A::ZERO);
            let pairs = V::strip_mut::<1>(s).iter_mut().zip(V::strip_mut::<1>(dp));
            for (index, ([s], [dp])) in pairs.enumerate() {
                let [max, inverse_sum, delta] = self.statistics.vectors::<V>(l, index);
                let visible = others.visible(l, index * V::WIDTH);
                let prob = V::load(s).minus(max).softmax_exp().times(inverse_sum);
                prob.times(V::load(dp).minus(delta)).select(visible, zero).store(s);
                prob.select(visible, zero).store(dp);
            }
            let mut add_bias = |ds: &[A], is_now: bool| {
                if let Some(dbias) = dbias.as_deref_mut().filter(|_| is_now) {
                    dbias[span.clone()].copy_from_slice(ds);
                }
            };
            add_bias(s, !rule.bias_first);
            if rule.cap.is_some() {
                multiply::<A, V>(s, Some(slope));
            }
            add_bias(s, rule.bias_first);
            multiply::<A, V>(dp, keep);
        }
        others.add_weighted::<V, G>(s, 0, self.out);
        if let Some(out) = self.out_value {
            others.add_weighted::<V, G>(dp, 1, out);
        }
    }
}

/// Runs the kernel `$kernel::<G>` of one row or of a group of [`GROUP`] rows.
macro_rules! run_rows {
    ($token:expr, $is_merged:expr, $kernel:ident { $($fields:tt)* }) => {
        if $is_merged {
            A::run_kernel($token, 1, $kernel::<A, GROUP> { $($fields)* });
        } else {
            A::run_kernel($token, 1, $kernel::<A, 1> { $($fields)* });
        }
    };
}

impl<'a, A: Real> AttendRows<'a, A, GROUP> {
    /// Runs the kernel: for a list that is not merged with one row.
    pub(crate) fn run_rows(self, token: IsaToken) {
        let Self { keys, q, rule, bias, keep, scratch, out, max, sum } = self;
        let is_merged = !keys.list.words.is_empty();
        run_rows!(
            token,
            is_merged,
            AttendRows { keys, q, rule, bias, keep, scratch, out, max, sum }
        );
    }
}

impl<'a, A: Real> GradientRows<'a, A, GROUP> {
    /// As [`AttendRows::run_rows`].
    pub(crate) fn run_rows(self, token: IsaToken) {
        let Self { others, own, rule, bias, keep, statistics, scratch, out, out_value, dbias } =
            self;
        let is_merged = !others.list.words.is_empty();
        run_rows!(
            token,
            is_merged,
            GradientRows {
                others,
                own,
                rule,
                bias,
                keep,
                statistics,
                scratch,
                out,
                out_value,
                dbias
            }
        );
    }
}
