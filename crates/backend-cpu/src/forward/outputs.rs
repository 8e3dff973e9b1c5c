//! Outputs of a forward pass: divided between tasks, and written strip by strip.
//!
//! ```text
//! out = acc·e^{m − m'} / ℓ'      lse = m' + ln ℓ'      max = m'      sum = ℓ'
//! out_residual = acc·e^{m − m'} / ℓ' − out, rounded
//! ```
//! with the statistics of [`SoftmaxEnd`]; out is not divided if the output is not normalised.

use std::{ops::Range, slice::Chunks};

use annulus_core::{HostView, HostViewMut, Inputs, Outputs, Result, SoftmaxEnd, Spec, Tick};
use ndarray::{ArrayView4, ArrayViewMut2, ArrayViewMut4, Axis, s};

use crate::{
    simd::{
        dispatch::Real,
        element::Float,
        isa::{prefetch_l1, prefetch_l2},
    },
    threads::team::Team,
    tile::{
        geometry::{Geometry, Strip},
        input::{Acc, TileInput, array, array_mut},
        pack::{TakeLane, each_lane},
        prefetch::{PrefetchRows, ROWS_AHEAD},
        tile_mask::TILE,
    },
    workspace::{query_block::QueryBlock, state::PassState},
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
    /// lse, max, sum and ties, each `[batch, heads, rows, 1]`.
    statistics: [Option<ArrayViewMut4<'a, Acc<E>>>; 4],
    /// `[batch, heads, rows, 3]`: see [`Spec::SCORE_STATISTICS`].
    score_statistics: Option<ArrayViewMut4<'a, Acc<E>>>,
}

impl<'a, E: TileInput> OutputRows<'a, E> {
    /// Returns all outputs of a pass.
    pub(crate) fn of(outputs: &'a mut Outputs<HostViewMut<'_>>) -> Result<Self> {
        let Outputs { out, lse, max, sum, ties, out_residual, statistics, head_statistics: _ } =
            outputs.as_mut();
        let statistic = |name, view: Option<_>| view.map(|view| array_mut(name, view)).transpose();
        Ok(Self {
            out: array_mut("out", out)?,
            out_residual: out_residual.map(|view| array_mut("out_residual", view)).transpose()?,
            statistics: [
                statistic("lse", Some(lse))?,
                statistic("max", max)?,
                statistic("sum", sum)?,
                statistic("ties", ties)?,
            ],
            score_statistics: statistic("statistics", statistics)?,
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
        let (out, out_rest) = self.out.split_at(of_out, index);
        let (out_residual, residual_rest) =
            self.out_residual.map(|view| view.split_at(of_out, index)).unzip();
        let [lse, max, sum, ties] =
            self.statistics.map(|view| view.map(|view| view.split_at(of_lse, index)).unzip());
        let (score_statistics, scores_rest) =
            self.score_statistics.map(|view| view.split_at(of_lse, index)).unzip();
        let rest = Self {
            out: out_rest,
            out_residual: residual_rest,
            statistics: [lse.1, max.1, sum.1, ties.1],
            score_statistics: scores_rest,
        };
        let statistics = [lse.0, max.0, sum.0, ties.0];
        (Self { out, out_residual, statistics, score_statistics }, rest)
    }

    /// Returns the rows of out of one batch row and head, for prefetches.
    pub(crate) fn out_rows(&self, batch: usize, head: usize) -> ndarray::ArrayView2<'_, E> {
        self.out.slice(s![batch, .., head, ..])
    }

    /// Writes the outputs of one strip of one head.
    pub(crate) fn write_strip(&mut self, of: &StripOutput<'_, Acc<E>>) {
        let StripOutput { geometry, block, group_head, strip, next, .. } = of;
        let rows = of.rows();
        let sums = strip_sums(geometry, block, *group_head, strip);
        let mut factors = [None; TILE];
        for (row, (lane, factor)) in of.lanes().zip(&mut factors).enumerate() {
            let RowEnd { factor: of_row, statistics } = of.end(lane);
            *factor = of_row;
            for (view, number) in self.statistics.iter_mut().zip(statistics) {
                if let Some(view) = view {
                    view[[of.batch, of.head, of.first_row + row, 0]] = number;
                }
            }
            if let Some(view) = &mut self.score_statistics {
                for (index, number) in of.score_statistics(lane).into_iter().enumerate() {
                    view[[of.batch, of.head, of.first_row + row, index]] = number;
                }
            }
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
}

/// Factor of each row of a strip; without one out is 0, whatever the accumulator holds.
type Factors<A> = [Option<A>; TILE];

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

/// End of one row's softmax.
struct RowEnd<A> {
    /// See [`Factors`].
    factor: Option<A>,
    /// lse, max, sum and ties.
    statistics: [A; 4],
}

impl<A: Real> StripOutput<'_, A> {
    /// Computes the end of the row in lane `lane` of the block.
    fn end(&self, lane: usize) -> RowEnd<A> {
        let Self { geometry, block, group_head, sinks, .. } = self;
        let (max, sum) = (block.partial.max[lane], block.partial.sum[lane]);
        if sinks.is_none() && self.normalize {
            return plain_end(max, sum);
        }
        let ties = block.partial.ties.get(lane).copied().unwrap_or_default();
        let head = geometry.heads(block.kv_head).start + group_head;
        let sinks = sink_line(*sinks, head);
        let end = SoftmaxEnd::of(max.to_f64(), sum.to_f64(), ties.to_f64(), sinks);
        let factor = if self.normalize { end.rescale / end.sum } else { end.rescale };
        RowEnd {
            factor: end.summed.then(|| A::from_f64(factor)),
            statistics: [end.lse, end.max, end.sum, end.ties].map(A::from_f64),
        }
    }

    /// Computes the statistics of the scores of the row in lane `lane` of the block.
    fn score_statistics(&self, lane: usize) -> [A; Spec::SCORE_STATISTICS] {
        let partial = &self.block.partial;
        let [max, sum] = [partial.max[lane], partial.sum[lane]].map(A::to_f64);
        let max_product = partial.max_product.get(lane).map_or(max, |product| product.to_f64());
        let score_sum = partial.score_sum.get(lane).map_or(f64::NAN, |sum| sum.to_f64());
        let entropy = if self.sinks.is_none() && sum > 0.0 {
            sum.ln() - score_sum / sum
        } else {
            let head = self.geometry.heads(self.block.kv_head).start + self.group_head;
            let sinks = sink_line(self.sinks, head);
            let end = SoftmaxEnd::of(max, sum, 0.0, sinks.clone());
            if end.sum.is_nan() {
                return [A::from_f64(f64::NAN); Spec::SCORE_STATISTICS];
            }
            end.entropy([max, sum], score_sum, sinks)
        };
        [max_product, max, entropy].map(A::from_f64)
    }

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

/// Computes [`StripOutput::end`] without sinks and ties, in the accumulator's type. 1/ℓ rounds to
/// the same number as over f64, because f64 has more than twice the bits of f32.
fn plain_end<A: Real>(max: A, sum: A) -> RowEnd<A> {
    let nan = A::from_f64(f64::NAN);
    if sum.to_f64().is_nan() {
        // NaN has the bits of `SoftmaxEnd`
        return RowEnd { factor: Some(nan), statistics: [nan, nan, nan, A::ZERO] };
    }
    // without a visible key ℓ is 0 and m is −∞
    let summed = sum != A::ZERO || max != -A::INFINITY;
    let lse = A::from_f64(max.to_f64() + sum.to_f64().ln());
    RowEnd { factor: summed.then(|| A::ONE / sum), statistics: [lse, max, sum, A::ZERO] }
}

/// Returns the sink scores of one head.
fn sink_line<A: Real>(
    sinks: Option<ArrayView4<'_, A>>,
    head: usize,
) -> impl Iterator<Item = f64> + Clone {
    let count = sinks.map_or(0, |sinks| sinks.dim().1);
    (0..count).filter_map(move |sink| {
        sinks.map(|sinks| sinks[[if sinks.dim().0 == 1 { 0 } else { head }, sink, 0, 0]].to_f64())
    })
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
    &block.partial.sums[first * depth..(first + strip.width) * depth]
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

// Epilogue of the forward pass: adds the sinks, once, divides and writes the rows.
//
// Runs after the last block of the pass, unless the tasks of that block have written the outputs
// ([`crate::forward::tiles`]).

/// Adds the sinks and writes the outputs. The workspace is unchanged. Ticks between ranges of rows,
/// and with sinks, of which there may be many, between strips.
pub(crate) fn finish<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &Inputs<HostView<'_>>,
    outputs: &mut Outputs<HostViewMut<'_>>,
    tick: Tick<'_>,
) -> Result<()> {
    finish_leaves(team, state, &mut *tick);
    let sinks = inputs.sinks.map(|sinks| array::<Acc<E>>("softmax_aux", sinks)).transpose()?;
    let outputs = OutputRows::<E>::of(outputs)?;
    let items = outputs.parts(OutputAxis::Rows, state.q_rows).enumerate();
    let mut scratch = std::mem::take(&mut state.scratch);
    let state_read = &*state;
    let geometry = &state_read.geometry;
    let group = geometry.dims.group();
    team.run(&mut scratch, items, Some(tick), |_, (index, mut outputs), ticker| {
        // all heads of a range of rows before the next rows: they are adjacent in the outputs
        for strip in geometry.strips(outputs.rows()) {
            let mut blocks = state_read.blocks_of_rows(index).peekable();
            while let Some(block) = blocks.next() {
                if sinks.is_some() && ticker.should_stop() {
                    return;
                }
                for group_head in 0..group {
                    let head = geometry.heads(block.kv_head).start + group_head;
                    let sums = match blocks.peek() {
                        _ if group_head + 1 < group => {
                            strip_sums(geometry, block, group_head + 1, &strip)
                        }
                        Some(next) => strip_sums(geometry, next, 0, &strip),
                        None => &[],
                    };
                    let next_head = Some(head + 1).filter(|&head| head < geometry.dims.q_heads);
                    outputs.write_strip(&StripOutput {
                        geometry,
                        normalize: state_read.shard.spec.normalize,
                        sinks,
                        block,
                        group_head,
                        strip: &strip,
                        batch: block.batch,
                        head,
                        first_row: strip.rows.start,
                        next: Some(NextStrip { sums, head: next_head }),
                    });
                }
            }
        }
    });
    state.scratch = scratch;
    Ok(())
}

/// Closes the last leaf, so that the root of the tree is the result of every query. Does nothing if
/// the order is not reproducible.
fn finish_leaves<A: Real>(team: &Team, state: &mut PassState<A>, tick: Tick<'_>) {
    let PassState { shard, geometry, blocks, scratch, arrivals, .. } = state;
    let Some(plan) = &shard.leaves else { return };
    team.run(scratch, blocks.iter_mut(), Some(tick), |_, block, _| {
        if let Some(step) = arrivals.open() {
            block.close_forward_leaf(geometry, &plan.keys, step);
        }
        block.finish_forward_leaves();
    });
}
