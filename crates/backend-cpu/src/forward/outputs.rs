//! Outputs of a forward pass: divided between tasks, and written strip by strip.
//!
//! ```text
//! out = acc·e^{m − m'} / ℓ'      lse = m' + ln ℓ'      max = m'      sum = ℓ'
//! out_residual = acc·e^{m − m'} / ℓ' − out, rounded
//! ```
//! with the statistics of [`SoftmaxEnd`]; out is not divided if the output is not normalised.

use std::{ops::Range, slice::Chunks};

use annulus_core::{Element, HostViewMut, Outputs, Result, SoftmaxEnd};
use ndarray::{ArrayView4, ArrayViewMut2, ArrayViewMut4, Axis, s};

use crate::{
    forward::sink_line::sink_line,
    simd::{
        dispatch::Real,
        element::Float,
        isa::{prefetch_l1, prefetch_l2},
    },
    tile::{
        geometry::{Geometry, Strip},
        input::{Acc, TileInput, array_mut},
        pack::{TakeLane, each_lane},
        prefetch::{PrefetchRows, ROWS_AHEAD},
        tile_mask::TILE,
    },
    workspace::query_block::QueryBlock,
};

/// Axis along which outputs are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputAxis {
    Batch,
    Heads,
    Rows,
}

/// Outputs of some batch rows, heads and rows.
pub(crate) struct OutputRows<'a, E: TileInput> {
    /// `[batch, rows, heads, value_dim]`, as the residual.
    out: ArrayViewMut4<'a, E>,
    out_residual: Option<ArrayViewMut4<'a, E>>,
    /// `[batch, heads, rows, 1]`, as the three below.
    lse: ArrayViewMut4<'a, Acc<E>>,
    max: Option<ArrayViewMut4<'a, Acc<E>>>,
    sum: Option<ArrayViewMut4<'a, Acc<E>>>,
    ties: Option<ArrayViewMut4<'a, Acc<E>>>,
}

impl<'a, E: TileInput> OutputRows<'a, E> {
    /// Returns all outputs of a pass.
    pub(crate) fn of(outputs: &'a mut Outputs<HostViewMut<'_>>) -> Result<Self> {
        Ok(Self {
            out: array_mut("out", &mut outputs.out)?,
            out_residual: outputs
                .out_residual
                .as_mut()
                .map(|residual| array_mut("out_residual", residual))
                .transpose()?,
            lse: array_mut("lse", &mut outputs.lse)?,
            max: outputs.max.as_mut().map(|max| array_mut("max", max)).transpose()?,
            sum: outputs.sum.as_mut().map(|sum| array_mut("sum", sum)).transpose()?,
            ties: outputs.ties.as_mut().map(|ties| array_mut("ties", ties)).transpose()?,
        })
    }

    /// Iterates over parts of `len` indices along an axis, of which the last may be shorter. A part
    /// is created when it is taken, so that nothing is allocated.
    pub(crate) const fn parts(self, axis: OutputAxis, len: usize) -> OutputParts<'a, E> {
        OutputParts { rest: Some(self), axis, len }
    }

    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.len(OutputAxis::Rows)
    }

    fn len(&self, axis: OutputAxis) -> usize {
        let (batch, rows, heads, _) = self.out.dim();
        match axis {
            OutputAxis::Batch => batch,
            OutputAxis::Heads => heads,
            OutputAxis::Rows => rows,
        }
    }

    fn split_at(self, axis: OutputAxis, index: usize) -> (Self, Self) {
        let (of_out, of_lse) = match axis {
            OutputAxis::Batch => (Axis(0), Axis(0)),
            OutputAxis::Heads => (Axis(2), Axis(1)),
            OutputAxis::Rows => (Axis(1), Axis(2)),
        };
        let split = |view: Option<ArrayViewMut4<'a, _>>| {
            view.map(|view| view.split_at(of_lse, index)).unzip()
        };
        let (out, out_rest) = self.out.split_at(of_out, index);
        let (out_residual, residual_rest) =
            self.out_residual.map(|view| view.split_at(of_out, index)).unzip();
        let (lse, lse_rest) = self.lse.split_at(of_lse, index);
        let (max, max_rest) = split(self.max);
        let (sum, sum_rest) = split(self.sum);
        let (ties, ties_rest) = split(self.ties);
        let rest = Self {
            out: out_rest,
            out_residual: residual_rest,
            lse: lse_rest,
            max: max_rest,
            sum: sum_rest,
            ties: ties_rest,
        };
        (Self { out, out_residual, lse, max, sum, ties }, rest)
    }

    /// Returns the rows of out of one batch row and head, for prefetches.
    pub(crate) fn out_rows(&self, batch: usize, head: usize) -> ndarray::ArrayView2<'_, E> {
        self.out.slice(s![batch, .., head, ..])
    }

    /// Writes the outputs of one strip of one head.
    pub(crate) fn write_strip(&mut self, of: &StripOutput<'_, Acc<E>>) {
        let StripOutput { geometry, block, group_head, strip, sinks, next, .. } = of;
        let rows = of.rows();
        let sums = strip_sums(geometry, block, *group_head, strip);
        let mut factors = [None; TILE];
        if sinks.is_none() && of.normalize {
            self.write_sums(of, &mut factors);
        } else {
            self.write_statistics(of, &mut factors);
        }
        let next = next.map(|NextStrip { sums: next, head }| {
            let out = head.map_or(PrefetchRows::default(), |head| {
                PrefetchRows::of_view(self.out.slice(s![of.batch, rows.clone(), head, ..]))
            });
            NextPrefetch { out, sums: next.chunks((sums.len() / strip.rows.len()).max(1)) }
        });
        let residual = self.out_residual.as_mut();
        let residual = residual.map(|view| view.slice_mut(s![of.batch, rows.clone(), of.head, ..]));
        let out = self.out.slice_mut(s![of.batch, rows, of.head, ..]);
        each_lane(
            geometry.token,
            sums,
            strip.width,
            strip.rows.len(),
            geometry.dims.value_dim,
            WriteOut { out, residual, factors: &factors, next },
        );
    }

    /// Writes lse, maximum and sum of a strip without sinks, and returns the factors of its rows:
    /// as [`OutputRows::write_statistics`], in the accumulator's type. 1/ℓ rounds to the same
    /// number as over f64, because f64 has more than twice the bits of f32.
    fn write_sums(&mut self, of: &StripOutput<'_, Acc<E>>, factors: &mut Factors<Acc<E>>) {
        let lanes = of.lanes();
        let nan = Acc::<E>::from_f64(f64::NAN);
        let at = |row| [of.batch, of.head, of.first_row + row, 0];
        let statistics = of.block.max[lanes.clone()].iter().zip(&of.block.sum[lanes]);
        for (row, (factor, (&max, &sum))) in factors.iter_mut().zip(statistics).enumerate() {
            // without a visible key ℓ is 0 and m is −∞; NaN has the bits of `SoftmaxEnd`
            let is_nan = sum.to_f64().is_nan();
            let [max, sum] = if is_nan { [nan; 2] } else { [max, sum] };
            let summed = sum != Acc::<E>::ZERO || max != -Acc::<E>::INFINITY;
            *factor = summed.then(|| if is_nan { nan } else { Acc::<E>::ONE / sum });
            self.lse[at(row)] =
                if is_nan { nan } else { Acc::<E>::from_f64(max.to_f64() + sum.to_f64().ln()) };
            if let Some(view) = &mut self.max {
                view[at(row)] = max;
            }
            if let Some(view) = &mut self.sum {
                view[at(row)] = sum;
            }
        }
    }

    /// Writes lse and the other statistics of a strip, and returns the factors of its rows.
    fn write_statistics(&mut self, of: &StripOutput<'_, Acc<E>>, factors: &mut Factors<Acc<E>>) {
        let StripOutput { geometry, block, group_head, strip, sinks, .. } = of;
        let head = geometry.heads(block.kv_head).start + group_head;
        let first = of.lanes().start;
        let mut ends = [SoftmaxEnd::default(); TILE];
        let ends = &mut ends[..strip.rows.len()];
        for (lane, (end, factor)) in ends.iter_mut().zip(factors).enumerate() {
            let ties = block.ties.get(first + lane).copied().unwrap_or_default();
            *end = SoftmaxEnd::of(
                block.max[first + lane].to_f64(),
                block.sum[first + lane].to_f64(),
                ties.to_f64(),
                sink_line(*sinks, head),
            );
            *factor = end.summed.then(|| {
                Acc::<E>::from_f64(if of.normalize { end.rescale / end.sum } else { end.rescale })
            });
        }
        let of_end: [(_, Value); 4] = [
            (Some(&mut self.lse), |end| end.lse),
            (self.max.as_mut(), |end| end.max),
            (self.sum.as_mut(), |end| end.sum),
            (self.ties.as_mut(), |end| end.ties),
        ];
        for (view, value) in of_end {
            let Some(view) = view else { continue };
            let line = view.slice_mut(s![of.batch, of.head, of.rows(), 0]);
            line.into_iter()
                .zip(&*ends)
                .for_each(|(into, end)| *into = Acc::<E>::from_f64(value(end)));
        }
    }
}

/// Factor of each row of a strip; without one out is 0, whatever the accumulator holds.
type Factors<A> = [Option<A>; TILE];

/// Reads one number of a [`SoftmaxEnd`].
type Value = fn(&SoftmaxEnd) -> f64;

/// Parts of outputs; see [`OutputRows::parts`].
pub(crate) struct OutputParts<'a, E: TileInput> {
    rest: Option<OutputRows<'a, E>>,
    axis: OutputAxis,
    len: usize,
}

impl<'a, E: TileInput> Iterator for OutputParts<'a, E> {
    type Item = OutputRows<'a, E>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.rest.take()?;
        let left = rest.len(self.axis);
        if left <= self.len {
            return (left > 0).then_some(rest);
        }
        let (part, rest) = rest.split_at(self.axis, self.len);
        self.rest = Some(rest);
        Some(part)
    }
}

/// A strip of one head whose outputs are written.
pub(crate) struct StripOutput<'b, A> {
    pub(crate) geometry: &'b Geometry,
    /// False if out is not divided by the sum.
    pub(crate) normalize: bool,
    /// `[heads|1, sinks, 1, 1]`
    pub(crate) sinks: Option<ArrayView4<'b, A>>,
    pub(crate) block: &'b QueryBlock<A>,
    /// Index of the head in its group.
    pub(crate) group_head: usize,
    /// Rows of the block.
    pub(crate) strip: &'b Strip,
    /// Index of the batch row in the outputs.
    pub(crate) batch: usize,
    /// Index of the head in the outputs.
    pub(crate) head: usize,
    /// Index of the strip's first row in the outputs.
    pub(crate) first_row: usize,
    /// Prefetches of a strip whose rows of out have not been prefetched.
    pub(crate) next: Option<NextStrip<'b, A>>,
}

/// Strip that is written next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NextStrip<'b, A> {
    pub(crate) sums: &'b [A],
    /// Index of its head in the outputs, if it has the same rows.
    pub(crate) head: Option<usize>,
}

impl<A> StripOutput<'_, A> {
    /// Returns the lanes of the strip's rows in the statistics of the block.
    fn lanes(&self) -> Range<usize> {
        let first = self.block.lane(self.group_head, self.strip.rows.start);
        first..first + self.strip.rows.len()
    }

    /// Returns the rows of the strip in the outputs.
    const fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + (self.strip.rows.end - self.strip.rows.start)
    }
}

/// Returns the accumulator of a strip of a block's head number `group_head`.
pub(crate) fn strip_sums<'a, A: Real>(
    geometry: &Geometry,
    block: &'a QueryBlock<A>,
    group_head: usize,
    strip: &Strip,
) -> &'a [A] {
    let depth = geometry.value_rows();
    let first = block.lane(group_head, strip.rows.start);
    &block.sums[first * depth..(first + strip.width) * depth]
}

/// Writes the rows of one strip and head, divided by the sums of their softmax.
struct WriteOut<'v, E: TileInput> {
    /// `[rows of the strip, value_dim]`
    out: ArrayViewMut2<'v, E>,
    /// As out.
    residual: Option<ArrayViewMut2<'v, E>>,
    factors: &'v Factors<Acc<E>>,
    next: Option<NextPrefetch<'v, Acc<E>>>,
}

/// Prefetches while a strip is written.
struct NextPrefetch<'v, A> {
    /// Rows of out that are written next.
    out: PrefetchRows,
    /// Sums of the strip that is written next, in as many parts as this one has rows.
    sums: Chunks<'v, A>,
}

impl<E: TileInput> TakeLane<Acc<E>> for WriteOut<'_, E> {
    #[inline(always)]
    fn take(&mut self, lane: usize, first: usize, sums: &[Acc<E>]) {
        if let Some(next) = self.next.as_mut().filter(|_| first == 0) {
            let ahead = lane + ROWS_AHEAD;
            match ahead.checked_sub(self.out.nrows()) {
                None => prefetch_l1(self.out.row(ahead).to_slice().unwrap_or_default()),
                Some(row) => next.out.prefetch(row),
            }
            prefetch_l2(next.sums.next().unwrap_or_default());
        }
        let factor = self.factors[lane];
        let mut row = self.out.row_mut(lane);
        match row.as_slice_mut() {
            Some(out) => match factor {
                Some(factor) => out[first..]
                    .iter_mut()
                    .zip(sums)
                    .for_each(|(out, &sum)| *out = E::narrow(factor * sum)),
                None => out[first..][..sums.len()].fill(E::narrow(Acc::<E>::ZERO)),
            },
            None => row.slice_mut(s![first..]).into_iter().zip(sums).for_each(|(out, &sum)| {
                *out = E::narrow(factor.map_or(Acc::<E>::ZERO, |factor| factor * sum));
            }),
        }
        let Some(residual) = &mut self.residual else { return };
        let factor = factor.unwrap_or(Acc::<E>::ZERO);
        let out = self.out.row(lane);
        let mut residual = residual.row_mut(lane);
        let write = |((into, &out), &sum): ((&mut E, &E), &Acc<E>)| {
            // without a factor the sum is unspecified, and out is 0
            let exact = if factor == Acc::<E>::ZERO { factor } else { factor * sum };
            *into = rounding_residual(exact, out);
        };
        match (residual.as_slice_mut(), out.as_slice()) {
            (Some(residual), Some(out)) => {
                residual[first..].iter_mut().zip(&out[first..]).zip(sums).for_each(write);
            }
            _ => {
                let residual = residual.slice_mut(s![first..]);
                residual.into_iter().zip(out.slice(s![first..])).zip(sums).for_each(write);
            }
        }
    }
}

/// Returns `exact` − `rounded`, rounded; 0 if `rounded` is not finite.
#[inline(always)]
fn rounding_residual<E: TileInput>(exact: Acc<E>, rounded: E) -> E {
    let residual = exact - rounded.widen();
    let infinity = Acc::<E>::INFINITY;
    let is_finite = -infinity < residual && residual < infinity;
    E::narrow(if is_finite { residual } else { Acc::<E>::ZERO })
}

#[cfg(test)]
mod tests {
    use annulus_core::{HostViewMut, Outputs};
    use ndarray::Array4;

    use super::*;

    #[test]
    fn parts_cover_all_outputs_once() {
        let mut out = Array4::<f32>::zeros((2, 7, 3, 4));
        let mut residual = out.clone();
        let mut lse = Array4::<f32>::zeros((2, 3, 7, 1));
        let mut ties = lse.clone();
        let mut outputs = Outputs {
            out: HostViewMut::F32(out.view_mut()),
            lse: HostViewMut::F32(lse.view_mut()),
            max: None,
            sum: None,
            ties: Some(HostViewMut::F32(ties.view_mut())),
            out_residual: Some(HostViewMut::F32(residual.view_mut())),
        };
        let all = OutputRows::<f32>::of(&mut outputs).unwrap();
        let mut rows = Vec::new();
        for (batch, of_batch) in all.parts(OutputAxis::Batch, 1).enumerate() {
            for (heads, of_heads) in of_batch.parts(OutputAxis::Heads, 2).enumerate() {
                for (index, mut part) in of_heads.parts(OutputAxis::Rows, 3).enumerate() {
                    let number = (100 * batch + 10 * heads + index) as f32;
                    part.out.mapv_inplace(|old| old + number + 1.0);
                    let residual = part.out_residual.as_mut().unwrap();
                    residual.mapv_inplace(|old| old + number + 2.0);
                    part.lse.mapv_inplace(|old| old + number + 1.0);
                    part.ties.iter_mut().for_each(|ties| ties.mapv_inplace(|old| old + number));
                    assert!(part.max.is_none() && part.sum.is_none());
                    rows.push(part.rows());
                }
            }
        }
        assert_eq!(rows, [3, 3, 1].repeat(4));
        for ((batch, row, head, _), &number) in out.indexed_iter() {
            let want = 100 * batch + 10 * (head / 2) + row / 3 + 1;
            assert_eq!(number, want as f32);
            assert_eq!(residual[[batch, row, head, 0]], want as f32 + 1.0);
            assert_eq!(lse[[batch, head, row, 0]], want as f32);
            assert_eq!(ties[[batch, head, row, 0]], want as f32 - 1.0);
        }
    }
}
