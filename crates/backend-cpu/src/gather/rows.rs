//! Kernels of one row of queries, or of keys, against gathered rows of the other side.
//!
//! ```text
//! scores      s_j = ⟨a, row(index_j)⟩           a vector of keys at a time, four chains in registers
//! softmax     m, ℓ, p_j = e^{s_j − m}           keys lie in lanes
//! weighted    out += Σ_j p_j · row(index_j)     four rows at a time
//! ```
//! Rows are read where they lie, so that a scattered list costs the reads of its rows and no more.
//! The rows of the next few indices are prefetched, because no hardware predicts them.

use crate::{
    decode::kernels::{add_values, dots, totals},
    simd::{
        dispatch::{Real, SimdKernel},
        element::Float,
        isa::prefetch_l1,
        vector::{MAX_LANES, Vector, unrolled},
    },
    tile::input::{Plane, TileInput},
    workspace::decode::ONE,
};

/// Most gathered rows of one call: their scores stay in the first-level cache.
pub(crate) const PART: usize = 256;

/// Rows whose products are computed together.
const UNROLL: usize = 4;

/// Indices by which rows are prefetched ahead: about as many as fit the line-fill buffers.
const AHEAD: usize = 8;

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
    /// Replaces products by scores, and writes ∂s/∂x to `slope` if there is a cap. The elements
    /// after the scores of a vector become −∞.
    #[inline(always)]
    fn finish(&self, s: &mut [A], count: usize, bias: Option<&[A]>, mut slope: Option<&mut [A]>) {
        for (at, s) in s[..count].iter_mut().enumerate() {
            let bias = bias.map_or(A::ZERO, |bias| bias[at]);
            let mut x = *s * self.scale;
            if self.bias_first {
                x += bias;
            }
            if let Some((cap, inverse)) = self.cap {
                let tanh = (x * inverse).tanh::<false>();
                x = cap * tanh;
                if let Some(slope) = slope.as_deref_mut() {
                    slope[at] = A::ONE - tanh * tanh;
                }
            }
            *s = if self.bias_first { x } else { x + bias };
        }
        s[count..].fill(-A::INFINITY);
    }
}

/// Gathered rows of one side: their indices, and those of the rows that are read next.
#[derive(Clone, Copy)]
pub(crate) struct Gathered<'a> {
    /// At most [`PART`].
    pub(crate) rows: &'a [u32],
    /// The same, followed by later ones.
    pub(crate) ahead: &'a [u32],
}

impl<'a> Gathered<'a> {
    /// Returns the parts of `pairs`, a range of `all`.
    pub(crate) fn parts(
        all: &'a [u32],
        pairs: std::ops::Range<usize>,
    ) -> impl Iterator<Item = (usize, Self)> {
        let end = pairs.end;
        pairs.step_by(PART).map(move |first| {
            let rows = &all[first..end.min(first + PART)];
            (first, Self { rows, ahead: &all[first..] })
        })
    }

    /// Prefetches the rows [`AHEAD`] after `at`.
    #[inline(always)]
    fn prefetch<E: TileInput, const ROWS: usize>(&self, at: usize, plane: &Plane<'_, E>) {
        unrolled!(i < ROWS, {
            if let Some(&row) = self.ahead.get(at + AHEAD + i) {
                prefetch_l1(plane.slice(row as usize).unwrap_or_default());
            }
        });
    }

    /// Prefetches the rows of another plane at `at`.
    #[inline(always)]
    fn prefetch_same<E: TileInput, const ROWS: usize>(&self, at: usize, plane: &Plane<'_, E>) {
        unrolled!(i < ROWS, {
            prefetch_l1(plane.slice(self.rows[at + i] as usize).unwrap_or_default());
        });
    }

    /// Returns the vectors of `ROWS` rows from `at` on.
    #[inline(always)]
    fn vectors<'s, E: TileInput, const ROWS: usize>(
        &self,
        at: usize,
        plane: &Plane<'s, E>,
    ) -> [&'s [E]; ROWS] {
        let mut vectors = [&[][..]; ROWS];
        unrolled!(i < ROWS, {
            vectors[i] = plane.slice(self.rows[at + i] as usize).unwrap_or_default();
        });
        vectors
    }

    /// Computes the products of `a`, padded with zeros to whole vectors, with the rows. Prefetches
    /// those of `next`, which are read after all products.
    #[inline(always)]
    fn products<E: TileInput, V: Vector<E::Accumulator>, const ROWS: usize>(
        &self,
        a: &[E::Accumulator],
        [plane, next]: [&Plane<'_, E>; 2],
        block: &mut [E::Accumulator],
        into: &mut [E::Accumulator],
    ) {
        let mut first = 0;
        for into in into.chunks_exact_mut(V::WIDTH) {
            let end = self.rows.len().min(first + V::WIDTH);
            let mut at = first;
            while at < end {
                let block = &mut block[(at - first) * V::WIDTH..];
                if ROWS >= UNROLL && at + UNROLL <= end {
                    self.prefetch::<E, UNROLL>(at, plane);
                    dots::<E, V, UNROLL, ONE>(self.vectors(at, plane), a, block);
                    self.prefetch_same::<E, UNROLL>(at, next);
                    at += UNROLL;
                } else {
                    self.prefetch::<E, ONE>(at, plane);
                    dots::<E, V, ONE, ONE>(self.vectors(at, plane), a, block);
                    self.prefetch_same::<E, ONE>(at, next);
                    at += ONE;
                }
            }
            if let Some([into]) = V::row_mut::<1>(into) {
                totals::<E::Accumulator, V>(block).store(into);
            }
            first = end;
        }
    }

    /// Computes out += Σ weights·rows.
    #[inline(always)]
    fn add_weighted<E: TileInput, V: Vector<E::Accumulator>, const ROWS: usize>(
        &self,
        weights: &[E::Accumulator],
        plane: &Plane<'_, E>,
        out: &mut [E::Accumulator],
    ) {
        let mut at = 0;
        while at < self.rows.len() {
            let weights = (&weights[at..], 0);
            if ROWS >= UNROLL && at + UNROLL <= self.rows.len() {
                add_values::<E, V, UNROLL, ONE>(out, weights, self.vectors(at, plane), [true]);
                at += UNROLL;
            } else {
                add_values::<E, V, ONE, ONE>(out, weights, self.vectors(at, plane), [true]);
                at += ONE;
            }
        }
    }
}

/// Scratch of one row.
pub(crate) struct RowScratch<'a, A> {
    /// `[lanes][lanes]`.
    pub(crate) block: &'a mut [A],
    /// [`PART`] elements each: products and what becomes of them.
    pub(crate) s: &'a mut [A],
    pub(crate) dp: &'a mut [A],
    pub(crate) slope: &'a mut [A],
}

/// Attends to gathered keys with one query: updates its statistics and its accumulator.
pub(crate) struct AttendRow<'a, 's, E: TileInput> {
    pub(crate) keys: Gathered<'a>,
    pub(crate) q: &'a [E::Accumulator],
    pub(crate) planes: [Plane<'s, E>; 2],
    pub(crate) rule: ScoreRule<E::Accumulator>,
    pub(crate) bias: Option<&'a [E::Accumulator]>,
    /// Dropout factor of each pair.
    pub(crate) keep: Option<&'a [E::Accumulator]>,
    pub(crate) scratch: RowScratch<'a, E::Accumulator>,
    pub(crate) out: &'a mut [E::Accumulator],
    pub(crate) max: &'a mut E::Accumulator,
    pub(crate) sum: &'a mut E::Accumulator,
}

impl<E: TileInput> SimdKernel<E::Accumulator> for AttendRow<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { keys, q, planes: [k, v], rule, scratch, out, max, sum, .. } = self;
        let count = keys.rows.len();
        let s = &mut scratch.s[..count.next_multiple_of(V::WIDTH)];
        keys.products::<E, V, ROWS>(q, [&k, &v], scratch.block, s);
        rule.finish(s, count, self.bias, None);

        let mut top = V::splat(-E::Accumulator::INFINITY);
        for [scores] in V::strip::<1>(s) {
            top = V::load(scores).if_larger(top);
        }
        let top = largest::<E::Accumulator, V>(top);
        let old = *max;
        let new = if top > old { top } else { old };
        // subtract 0 where nothing is visible yet: −∞ − −∞ would be NaN
        let base = if new == -E::Accumulator::INFINITY { E::Accumulator::ZERO } else { new };
        let mut added = V::splat(E::Accumulator::ZERO);
        for [scores] in V::strip_mut::<1>(s) {
            let prob = V::load(scores).minus(V::splat(base)).softmax_exp();
            added = added.plus(prob);
            prob.store(scores);
        }
        *max = new;
        if new != old {
            let rescale = (old - base).softmax_exp::<false>();
            *sum = *sum * rescale;
            let rescale = V::splat(rescale);
            for [sums] in V::strip_mut::<1>(out) {
                V::load(sums).times(rescale).store(sums);
            }
        }
        *sum += added.total();
        if let Some(keep) = self.keep {
            s.iter_mut().zip(keep).for_each(|(prob, &keep)| *prob = *prob * keep);
        }
        keys.add_weighted::<E, V, ROWS>(s, &v, out);
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

/// Statistics of the queries of the pairs: those of one query, or a list.
#[derive(Clone, Copy)]
pub(crate) enum PairStatistics<'a, A> {
    /// max, 1/sum, delta.
    One([A; 3]),
    /// The same, of each gathered query.
    Each([&'a [A]; 3]),
}

impl<A: Real> PairStatistics<'_, A> {
    /// Returns the statistics of vector number `index` of the pairs.
    #[inline(always)]
    fn vectors<V: Vector<A>>(&self, index: usize) -> [V; 3] {
        let mut vectors = [V::splat(A::ZERO); 3];
        unrolled!(i < THREE, {
            vectors[i] = match self {
                Self::One(numbers) => V::splat(numbers[i]),
                Self::Each(lists) => {
                    let list = V::strip::<1>(lists[i]);
                    V::load(&list[index][0])
                }
            };
        });
        vectors
    }
}

const THREE: usize = 3;

/// dS of one row, a query or a key, with gathered rows of the other side: its gradient is
/// `out[0] += Σ dS·rows`, and with two outputs `out[1] += Σ P·rows` of the second plane.
///
/// ```text
/// query   s = ⟨q, k_j⟩   dp = ⟨dO, v_j⟩   dq += Σ dS_j·k_j
/// key     s = ⟨k, q_j⟩   dp = ⟨v, dO_j⟩   dk += Σ dS_j·q_j   dv += Σ P_j·dO_j
/// ```
pub(crate) struct GradientRow<'a, 's, E: TileInput> {
    pub(crate) other: Gathered<'a>,
    /// The row of the first plane's side, and that of the second.
    pub(crate) own: [&'a [E::Accumulator]; 2],
    pub(crate) planes: [Plane<'s, E>; 2],
    pub(crate) rule: ScoreRule<E::Accumulator>,
    pub(crate) bias: Option<&'a [E::Accumulator]>,
    pub(crate) keep: Option<&'a [E::Accumulator]>,
    pub(crate) statistics: PairStatistics<'a, E::Accumulator>,
    pub(crate) scratch: RowScratch<'a, E::Accumulator>,
    pub(crate) out: &'a mut [E::Accumulator],
    pub(crate) out_value: Option<&'a mut [E::Accumulator]>,
    /// dS as the gradient of the list bias.
    pub(crate) dbias: Option<&'a mut [E::Accumulator]>,
}

impl<E: TileInput> SimdKernel<E::Accumulator> for GradientRow<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { other, own, planes: [first, second], rule, scratch, .. } = self;
        let count = other.rows.len();
        let padded = count.next_multiple_of(V::WIDTH);
        let RowScratch { block, s, dp, slope } = scratch;
        let [s, dp, slope] = [s, dp, slope].map(|list| &mut list[..padded]);
        other.products::<E, V, ROWS>(own[0], [&first, &second], block, s);
        other.products::<E, V, ROWS>(own[1], [&second, &first], block, dp);
        rule.finish(s, count, self.bias, Some(&mut *slope));
        dp[count..].fill(E::Accumulator::ZERO);
        if let Some(keep) = self.keep {
            dp.iter_mut().zip(keep).for_each(|(dp, &keep)| *dp = *dp * keep);
        }
        let pairs = V::strip_mut::<1>(s).iter_mut().zip(V::strip_mut::<1>(dp));
        for (index, ([s], [dp])) in pairs.enumerate() {
            let [max, inverse_sum, delta] = self.statistics.vectors::<V>(index);
            let prob = V::load(s).minus(max).softmax_exp().times(inverse_sum);
            prob.times(V::load(dp).minus(delta)).store(s);
            prob.store(dp);
        }
        let mut dbias = self.dbias;
        let mut add_bias = |ds: &[E::Accumulator], is_now: bool| {
            if let Some(dbias) = dbias.as_deref_mut().filter(|_| is_now) {
                dbias.iter_mut().zip(ds).for_each(|(into, &ds)| *into += ds);
            }
        };
        add_bias(s, !rule.bias_first);
        if rule.cap.is_some() {
            s.iter_mut().zip(&*slope).take(count).for_each(|(ds, &slope)| *ds = *ds * slope);
        }
        add_bias(s, rule.bias_first);
        other.add_weighted::<E, V, ROWS>(s, &first, self.out);
        if let Some(out) = self.out_value {
            if let Some(keep) = self.keep {
                dp.iter_mut().zip(keep).for_each(|(prob, &keep)| *prob = *prob * keep);
            }
            other.add_weighted::<E, V, ROWS>(dp, &second, out);
        }
    }
}
