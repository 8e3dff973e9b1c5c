//! Epilogue of the forward pass: adds the sinks, once, divides and writes the rows.
//!
//! ```text
//! m' = max(m, max_t a_t)       ℓ' = ℓ·e^{m − m'} + Σ_t e^{a_t − m'}       lse = m' + ln ℓ'
//! out = acc·e^{m − m'} / ℓ'    (not divided if the output is not normalised)
//! ```
//! A sink is a score without a value: it adds to the sum but not to the accumulator.

use std::slice::Chunks;

use annulus_core::{Element, Host, Inputs, Outputs, Result, Spec};
use ndarray::{ArrayView4, ArrayViewMut3, ArrayViewMut4, Axis, s};

use crate::{
    forward::leaves::finish_leaves,
    simd::{
        dispatch::Real,
        float::Float,
        hints::{prefetch_l1, prefetch_l2},
    },
    threads::team::Team,
    tile::{
        geometry::{Geometry, Strip},
        input::{Acc, Input, array, array_mut},
        pack::{TakeLane, each_lane},
        prefetch::ROWS_AHEAD,
        tile_mask::TILE,
    },
    workspace::{
        query_block::QueryBlock,
        state::{State, Summed},
    },
};

/// Adds the sinks and writes the outputs. The workspace is unchanged.
pub(crate) fn finish<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    outputs: &mut Outputs<'_, Host>,
) -> Result<()> {
    finish_leaves(team, state);
    let sinks = inputs.sinks.map(|sinks| array::<Acc<E>>("softmax_aux", sinks)).transpose()?;
    let mut out = array_mut::<E>("out", &mut outputs.out)?;
    let mut lse = array_mut("lse", &mut outputs.lse)?;
    let mut max = outputs.max.as_mut().map(|max| array_mut("max", max)).transpose()?;
    let mut sum = outputs.sum.as_mut().map(|sum| array_mut("sum", sum)).transpose()?;
    let mut ties = outputs.ties.as_mut().map(|ties| array_mut("ties", ties)).transpose()?;

    // one item per block of rows: the outputs are split as items are taken
    let rows = state.q_rows;
    let mut lse = lse.axis_chunks_iter_mut(Axis(2), rows);
    let mut max = max.as_mut().map(|max| max.axis_chunks_iter_mut(Axis(2), rows));
    let mut sum = sum.as_mut().map(|sum| sum.axis_chunks_iter_mut(Axis(2), rows));
    let mut ties = ties.as_mut().map(|ties| ties.axis_chunks_iter_mut(Axis(2), rows));
    let items = out.axis_chunks_iter_mut(Axis(1), rows).enumerate().map(|(index, out)| {
        let max = max.as_mut();
        let sum = sum.as_mut();
        let ties = ties.as_mut();
        Rows {
            index,
            out,
            lse: lse.next(),
            max: max.and_then(Iterator::next),
            sum: sum.and_then(Iterator::next),
            ties: ties.and_then(Iterator::next),
        }
    });
    let mut scratch = std::mem::take(&mut state.scratch);
    let state_read = &*state;
    team.run(&mut scratch, items, None, |_, mut rows: Rows<'_, E>, _| {
        let geometry = &state_read.geometry;
        // all heads of a range of rows before the next rows: they are adjacent in the outputs
        for strip in geometry.strips(rows.out.dim().1) {
            let mut blocks = state_read.blocks_of_rows(rows.index).peekable();
            while let Some(block) = blocks.next() {
                let next =
                    blocks.peek().map_or(&[][..], |next| strip_sums(geometry, next, 0, &strip));
                rows.write(geometry, &state_read.shard.spec, (block, next), &strip, sinks);
            }
        }
    });
    state.scratch = scratch;
    Ok(())
}

/// Outputs of one block of rows.
struct Rows<'a, E: Input> {
    index: usize,
    out: ArrayViewMut4<'a, E>,
    lse: Option<ArrayViewMut4<'a, Acc<E>>>,
    max: Option<ArrayViewMut4<'a, Acc<E>>>,
    sum: Option<ArrayViewMut4<'a, Acc<E>>>,
    ties: Option<ArrayViewMut4<'a, Acc<E>>>,
}

impl<E: Input<Accumulator: Summed>> Rows<'_, E> {
    /// Writes the rows of one strip of a block. `next` are the sums that are read after its own.
    fn write(
        &mut self,
        geometry: &Geometry,
        spec: &Spec,
        (block, next): (&QueryBlock<Acc<E>>, &[Acc<E>]),
        strip: &Strip,
        sinks: Option<ArrayView4<'_, Acc<E>>>,
    ) {
        let batch = block.batch;
        for (group_head, head) in geometry.heads(block.kv_head).enumerate() {
            let mut out = self.out.index_axis_mut(Axis(0), batch);
            let first = block.lane(group_head, strip.rows.start);
            let sums = strip_sums(geometry, block, group_head, strip);
            let next = if group_head + 1 < geometry.dims.group() {
                strip_sums(geometry, block, group_head + 1, strip)
            } else {
                next
            }
            .chunks(sums.len() / strip.rows.len());
            let mut factors = [None; TILE];
            let mut ends = [End::default(); TILE];
            let ends = &mut ends[..strip.rows.len()];
            for (lane, (end, factor)) in ends.iter_mut().zip(&mut factors).enumerate() {
                let ties = block.ties.get(first + lane).copied().unwrap_or_default();
                *end = End::of(
                    block.max[first + lane],
                    block.sum[first + lane],
                    ties,
                    sink_line(sinks, head),
                );
                *factor = end.summed.then(|| {
                    Acc::<E>::from_f64(if spec.normalize {
                        end.rescale / end.sum
                    } else {
                        end.rescale
                    })
                });
            }
            let of_end: [(_, Value); 4] = [
                (&mut self.lse, |end| end.lse),
                (&mut self.max, |end| end.max),
                (&mut self.sum, |end| end.sum),
                (&mut self.ties, |end| end.ties),
            ];
            for (view, value) in of_end {
                let Some(view) = view else { continue };
                let line = view.slice_mut(s![batch, head, strip.rows.clone(), 0]);
                line.into_iter()
                    .zip(&*ends)
                    .for_each(|(into, end)| *into = Acc::<E>::from_f64(value(end)));
            }
            let dim = geometry.dims.value_dim;
            each_lane(
                geometry.token,
                sums,
                strip.width,
                strip.rows.len(),
                dim,
                WriteOut { out: OutRows::of(&mut out), strip, head, factors: &factors, next },
            );
        }
    }
}

/// Returns the accumulator of a strip of a block's head number `group_head`.
fn strip_sums<'a, A: Real>(
    geometry: &Geometry,
    block: &'a QueryBlock<A>,
    group_head: usize,
    strip: &Strip,
) -> &'a [A] {
    let depth = geometry.value_rows();
    let first = block.lane(group_head, strip.rows.start);
    &block.sums[first * depth..(first + strip.width) * depth]
}

/// Rows of one batch row of out.
enum OutRows<'v, 'a, E> {
    /// `[rows][heads][value_dim]`
    Contiguous {
        elements: &'v mut [E],
        heads: usize,
        dim: usize,
    },
    View(&'v mut ArrayViewMut3<'a, E>),
}

impl<'v, 'a, E> OutRows<'v, 'a, E> {
    fn of(out: &'v mut ArrayViewMut3<'a, E>) -> Self {
        let (_, heads, dim) = out.dim();
        if out.is_standard_layout() && dim > 0 {
            let elements = out.as_slice_mut().unwrap_or_default();
            Self::Contiguous { elements, heads, dim }
        } else {
            Self::View(out)
        }
    }
}

/// Writes the rows of one strip and head, divided by the sums of their softmax.
struct WriteOut<'v, 'a, E: Input> {
    out: OutRows<'v, 'a, E>,
    strip: &'v Strip,
    head: usize,
    /// Factor of each lane; without one out is 0, whatever the accumulator holds.
    factors: &'v [Option<Acc<E>>],
    /// Sums of the strip that is written next, in as many parts as this one has rows.
    next: Chunks<'v, Acc<E>>,
}

impl<E: Input> TakeLane<Acc<E>> for WriteOut<'_, '_, E> {
    #[inline(always)]
    fn take(&mut self, lane: usize, first: usize, sums: &[Acc<E>]) {
        let row = self.strip.rows.start + lane;
        let factor = self.factors[lane];
        match &mut self.out {
            OutRows::Contiguous { elements, heads, dim } => {
                if first == 0 {
                    // of the next head after the last rows: its strip is written next
                    let ahead = lane + ROWS_AHEAD;
                    let len = self.strip.rows.len();
                    let index = if ahead < len {
                        (self.strip.rows.start + ahead) * *heads + self.head
                    } else {
                        (self.strip.rows.start + ahead - len) * *heads + self.head + 1
                    };
                    let row = index * *dim..(index + 1) * *dim;
                    prefetch_l1(elements.get(row).unwrap_or_default());
                    prefetch_l2(self.next.next().unwrap_or_default());
                }
                let out = &mut elements[(row * *heads + self.head) * *dim..][..*dim][first..];
                match factor {
                    Some(factor) => out
                        .iter_mut()
                        .zip(sums)
                        .for_each(|(out, &sum)| *out = E::narrow(factor * sum)),
                    None => out[..sums.len()].fill(E::narrow(Acc::<E>::ZERO)),
                }
            }
            OutRows::View(out) => {
                let out = out.slice_mut(s![row, self.head, first..]);
                out.into_iter().zip(sums).for_each(|(out, &sum)| {
                    *out = E::narrow(factor.map_or(Acc::<E>::ZERO, |factor| factor * sum));
                });
            }
        }
    }
}

/// Returns the sink scores of one head.
pub(crate) fn sink_line<A: Real>(
    sinks: Option<ArrayView4<'_, A>>,
    head: usize,
) -> impl Iterator<Item = f64> + Clone {
    let count = sinks.map_or(0, |sinks| sinks.dim().1);
    (0..count).filter_map(move |sink| {
        sinks.map(|sinks| sinks[[if sinks.dim().0 == 1 { 0 } else { head }, sink, 0, 0]].to_f64())
    })
}

/// Reads one number of an [`End`].
type Value = fn(&End) -> f64;

/// Final softmax statistics of one row, sinks included.
#[derive(Debug, Clone, Copy, Default)]
struct End {
    /// True if a key was visible. Otherwise the accumulator is unspecified.
    summed: bool,
    lse: f64,
    max: f64,
    sum: f64,
    ties: f64,
    /// Factor of the accumulator before the division.
    rescale: f64,
}

impl End {
    fn of<A: Real>(max: A, sum: A, ties: A, sinks: impl Iterator<Item = f64> + Clone) -> Self {
        let seen_max = max.to_f64();
        let seen_sum = sum.to_f64();
        let max = sinks.clone().fold(seen_max, |max, sink| if sink > max { sink } else { max });
        if max == f64::NEG_INFINITY
            && seen_sum == 0.0
            && sinks.clone().all(|sink| sink == f64::NEG_INFINITY)
        {
            return Self { summed: false, lse: max, max, sum: 0.0, ties: 0.0, rescale: 0.0 };
        }
        // rescales from the keys' maximum to the final one; 0 if no key was visible
        let rescale = if seen_max == max { 1.0 } else { (seen_max - max).exp() };
        let reached = sinks.clone().filter(|&sink| sink == max).count() as f64;
        let ties = if seen_max == max { ties.to_f64() + reached } else { reached };
        let sum = seen_sum * rescale + sinks.map(|sink| (sink - max).exp()).sum::<f64>();
        if sum.is_nan() {
            // a NaN score is never the maximum, and a later block may have reset the accumulator: a
            // factor of NaN makes the row NaN, whatever the accumulator holds
            return Self {
                summed: true,
                lse: f64::NAN,
                max: f64::NAN,
                sum,
                ties: 0.0,
                rescale: f64::NAN,
            };
        }
        let summed = seen_max != f64::NEG_INFINITY || seen_sum != 0.0;
        Self { summed, lse: max + sum.ln(), max, sum, ties, rescale }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinks_end_a_row() {
        let nothing = End::of(f32::NEG_INFINITY, 0.0, 0.0, std::iter::empty());
        assert!(!nothing.summed && nothing.lse == f64::NEG_INFINITY);
        let no_sink = End::of(f32::NEG_INFINITY, 0.0, 0.0, std::iter::once(f64::NEG_INFINITY));
        assert!(!no_sink.summed && no_sink.lse == f64::NEG_INFINITY);
        let only = End::of(f32::NEG_INFINITY, 0.0, 0.0, [1.0, 1.0].into_iter());
        assert!(
            !only.summed
                && only.rescale == 0.0
                && only.ties == 2.0
                && (only.lse - (1.0 + 2f64.ln())).abs() < 1e-12
        );
        let both = End::of(1.0f32, 2.0, 1.0, [1.0, 0.0].into_iter());
        assert!(
            both.summed
                && both.ties == 2.0
                && both.max == 1.0
                && (both.sum - (3.0 + (-1f64).exp())).abs() < 1e-12
        );
        let nan = End::of(f32::NEG_INFINITY, f32::NAN, 0.0, std::iter::once(0.0));
        assert!(nan.summed && nan.lse.is_nan() && nan.sum.is_nan());
        // a maximum of +∞, and a sink that is NaN or +∞, too
        let infinite = End::of(f32::INFINITY, f32::NAN, 1.0, std::iter::empty());
        let sinks =
            [f64::NAN, f64::INFINITY].map(|sink| End::of(1.0f32, 1.0, 1.0, std::iter::once(sink)));
        for end in [nan, infinite].into_iter().chain(sinks) {
            assert!(end.summed && end.ties == 0.0);
            assert!([end.lse, end.max, end.sum, end.rescale].iter().all(|x| x.is_nan()), "{end:?}");
        }
    }
}
