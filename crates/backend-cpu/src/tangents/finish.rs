//! End of a JVP and of a double backward.
//!
//! ```text
//! ℓ ← ℓ + Σ_t e^{a_t − m}      μ ← (μ + Σ_t e^{a_t − m}·ȧ_t)/ℓ      a_t: the sinks
//! out = O/ℓ      out˙ = Ȯ/ℓ − μ·out      lse = m + ln ℓ      lse˙ = μ
//! Δ = ⟨dout, out⟩ − dlse      Δ̇ = ⟨dout, out˙⟩
//! da˙_t = −Σ_i e^{a_t − m}/ℓ·((ȧ_t − μ)·Δ + Δ̇)
//! ```

use std::sync::Mutex;

use annulus_core::{
    Element, Gradients, HostBuffer, HostView, HostViewMut, Result, TangentInputs, TangentOutputs,
    Tick,
};
use ndarray::{ArrayView4, ArrayViewMut2, Axis, s};

use super::strip_elements;

use crate::{
    simd::{dispatch::Real, element::Float},
    threads::{ordered_reduction::lock, team::Team},
    tile::{
        geometry::{Geometry, Strip},
        input::{Acc, TileInput, TileSource, array, array_mut},
        pack::{TakeLane, each_lane},
        tile_mask::TILE,
    },
    workspace::{
        state::PassState,
        tangents::{Chunk, TangentState},
    },
};

/// Sinks of one head and their tangents.
fn sinks_of<A: Element>(
    sinks: Option<ArrayView4<'_, A>>,
    tangents: Option<ArrayView4<'_, A>>,
    head: usize,
) -> Vec<[f64; 2]> {
    let Some(sinks) = sinks else { return Vec::new() };
    let row = if sinks.dim().0 == 1 { 0 } else { head };
    let tangent = |t: usize| tangents.map_or(0.0, |tangents| tangents[[row, t, 0, 0]].to_f64());
    (0..sinks.dim().1).map(|t| [sinks[[row, t, 0, 0]].to_f64(), tangent(t)]).collect()
}

/// Ends the softmax of every query, and writes out, lse and their tangents.
pub(crate) fn write_tangents<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &TangentInputs<HostView<'_>>,
    outputs: &mut TangentOutputs<HostViewMut<'_>>,
    tick: Tick<'_>,
) -> Result<()> {
    let Some(tangents) = &mut state.tangents else { return Ok(()) };
    let TangentState { geometry, chunks, scratch, .. } = &mut **tangents;
    let TangentInputs { primal, tangent, .. } = inputs;
    let sinks = primal.sinks.map(|sinks| array::<Acc<E>>("softmax_aux", sinks)).transpose()?;
    let of_sinks = tangent.sinks.map(|sinks| array::<Acc<E>>("softmax_aux", sinks)).transpose()?;
    let dout = inputs.dout.map(|dout| array::<E>("dout", dout)).transpose()?;
    let dlse = inputs.dlse.map(|dlse| array::<Acc<E>>("dlse", dlse)).transpose()?;
    // before `end_rows` replaces them by what the second circulation reads
    if let Some(lse) = &mut outputs.lse {
        let mut lse = array_mut::<Acc<E>>("lse", lse)?;
        for chunk in &*chunks {
            let sinks = sinks_of(sinks, of_sinks, chunk.head);
            let mut rows = lse.index_axis_mut(Axis(0), chunk.batch);
            let mut rows = rows.index_axis_mut(Axis(0), chunk.head);
            for (lane, row) in chunk.rows.clone().enumerate() {
                let [max, sum, _] = with_sinks(chunk, lane, &sinks);
                rows[[row, 0]] = Acc::<E>::from_f64(max + sum.ln());
            }
        }
    }
    let mut out = outputs.out.as_mut().map(|out| array_mut::<E>("out", out)).transpose()?;
    let out_tangent = array_mut::<E>("tangent of out", &mut outputs.out_tangent)?;
    let mut lse_tangent = array_mut::<Acc<E>>("tangent of lse", &mut outputs.lse_tangent)?;
    // chunks write disjoint rows, under a lock held once for each strip
    let views = Mutex::new([Some(out_tangent), out.take()]);
    team.run(scratch, chunks.iter_mut(), Some(tick), |scratch, chunk, _| {
        let sinks = sinks_of(sinks, of_sinks, chunk.head);
        end_rows::<E>(geometry, chunk, &sinks, &mut scratch.dout_lanes, dout, dlse);
        for strip in geometry.strips(chunk.rows.len()) {
            let rows = strip.rows_from(chunk.rows.start);
            let elements = strip_elements(&strip, geometry.value_rows());
            let mut views = lock(&views);
            for (view, sums) in views.iter_mut().zip([&chunk.out_tangent, &chunk.out]) {
                let Some(view) = view else { continue };
                let into = view.slice_mut(s![chunk.batch, rows.clone(), chunk.head, ..]);
                let write = WriteRows { into, factor: Acc::<E>::ONE, is_empty: None };
                write.run(geometry, &sums[elements.clone()], &strip);
            }
        }
    });
    for chunk in chunks {
        for (lane, row) in chunk.rows.clone().enumerate() {
            lse_tangent[[chunk.batch, chunk.head, row, 0]] = chunk.row.mean[lane];
        }
    }
    Ok(())
}

/// Writes the vectors of a strip to their rows of a tensor.
struct WriteRows<'a, E: TileInput> {
    /// `[rows, dim]`.
    into: ArrayViewMut2<'a, E>,
    factor: Acc<E>,
    /// Maximum of each row: a row of +∞ is 0, even if its vector is not finite.
    is_empty: Option<&'a [Acc<E>]>,
}

impl<E: TileInput> WriteRows<'_, E> {
    fn run(self, geometry: &Geometry, sums: &[Acc<E>], strip: &Strip) {
        let dim = self.into.ncols();
        each_lane(geometry.token, sums, strip.width, strip.rows.len(), dim, self);
    }
}

impl<E: TileInput> TakeLane<Acc<E>> for WriteRows<'_, E> {
    #[inline(always)]
    fn take(&mut self, lane: usize, first: usize, sums: &[Acc<E>]) {
        let mut row = self.into.row_mut(lane);
        let factor = self.factor;
        if self.is_empty.is_some_and(|max| max[lane] == Acc::<E>::INFINITY) {
            row.slice_mut(s![first..first + sums.len()]).fill(E::narrow(Acc::<E>::ZERO));
        } else if let Some(row) = row.as_slice_mut() {
            let row = row[first..].iter_mut().zip(sums);
            row.for_each(|(into, &sum)| *into = E::narrow(factor * sum));
        } else {
            let row = row.slice_mut(s![first..]);
            row.into_iter().zip(sums).for_each(|(into, &sum)| *into = E::narrow(factor * sum));
        }
    }
}

/// Returns maximum, sum and Σ e^{s − max}·ṡ of a row with its sinks.
fn with_sinks<A: Real>(chunk: &Chunk<A>, lane: usize, sinks: &[[f64; 2]]) -> [f64; 3] {
    let [max, sum, mean] =
        [&chunk.row.max, &chunk.row.sum, &chunk.row.mean].map(|list| list[lane].to_f64());
    let top = sinks.iter().fold(max, |top, &[sink, _]| if sink > top { sink } else { top });
    let base = if top == f64::NEG_INFINITY { 0.0 } else { top };
    let factor = (max - base).exp();
    // a row without visible keys has a sum of 0, whatever its maximum
    let start = if max == f64::NEG_INFINITY { [0.0; 2] } else { [sum * factor, mean * factor] };
    let [sum, mean] = sinks.iter().filter(|[sink, _]| *sink != f64::NEG_INFINITY).fold(
        start,
        |[sum, mean], &[sink, tangent]| {
            let weight = (sink - base).exp();
            [sum + weight, mean + weight * tangent]
        },
    );
    [top, sum, mean]
}

/// Replaces the sums of a chunk by out and its tangent, and its statistics by those that the second
/// circulation reads.
fn end_rows<E: TileInput>(
    geometry: &Geometry,
    chunk: &mut Chunk<Acc<E>>,
    sinks: &[[f64; 2]],
    dout_lanes: &mut [Acc<E>],
    dout: Option<ArrayView4<'_, E>>,
    dlse: Option<ArrayView4<'_, Acc<E>>>,
) {
    let lanes = chunk.row.max.len();
    for lane in 0..lanes {
        let [max, sum, mean] = with_sinks(chunk, lane, sinks);
        let keys_max = chunk.row.max[lane].to_f64();
        let is_empty = max == f64::NEG_INFINITY || lane >= chunk.rows.len();
        // the accumulators are relative to the maximum of the keys; 1/ℓ to that of all
        let to_max = if keys_max == f64::NEG_INFINITY { 0.0 } else { (keys_max - max).exp() };
        let [max, inverse, mean, of_sums] = if is_empty {
            [f64::INFINITY, 0.0, 0.0, 0.0]
        } else {
            [max, 1.0 / sum, mean / sum, to_max / sum]
        };
        chunk.row.max[lane] = Element::from_f64(max);
        chunk.row.sum[lane] = Element::from_f64(inverse);
        chunk.row.mean[lane] = Element::from_f64(mean);
        chunk.row.delta[lane] = Element::from_f64(of_sums);
    }
    for strip in geometry.strips(chunk.rows.len()) {
        let Strip { rows, width, .. } = &strip;
        let lanes = rows.start..rows.start + width;
        let elements = strip_elements(&strip, geometry.value_rows());
        let factors = &chunk.row.delta[lanes.clone()];
        let means = &chunk.row.mean[lanes.clone()];
        let out = chunk.out[elements.clone()].chunks_exact_mut(*width);
        let tangents = chunk.out_tangent[elements.clone()].chunks_exact_mut(*width);
        for (out, tangents) in out.zip(tangents) {
            let of_row = factors.iter().zip(means);
            for ((out, tangent), (&factor, &mean)) in out.iter_mut().zip(tangents).zip(of_row) {
                *out = *out * factor;
                *tangent = *tangent * factor - mean * *out;
            }
        }
        let mut deltas = [[0.0; TILE]; 2];
        if let Some(dout) = dout {
            let plane = TileSource::tensor(dout).plane(chunk.batch, chunk.head);
            let dout_lanes = &mut dout_lanes[..geometry.dims.value_dim * width];
            let of_chunk = strip.rows_from(chunk.rows.start);
            geometry.pack_strip(plane, of_chunk.clone(), *width, dout_lanes);
            for (sums, of_out) in deltas.iter_mut().zip([&chunk.out, &chunk.out_tangent]) {
                let of_out = of_out[elements.clone()].chunks_exact(*width);
                for (dout, of_out) in dout_lanes.chunks_exact(*width).zip(of_out) {
                    for (sum, (dout, of_out)) in sums.iter_mut().zip(dout.iter().zip(of_out)) {
                        *sum += dout.to_f64() * of_out.to_f64();
                    }
                }
            }
            if let Some(dlse) = dlse {
                for (delta, row) in deltas[0].iter_mut().zip(of_chunk) {
                    *delta -= dlse[[chunk.batch, chunk.head, row, 0]].to_f64();
                }
            }
        }
        for lane in 0..*width {
            let index = rows.start + lane;
            // 0 in a row without scores, even if its dout or dlse is not finite
            let is_empty = chunk.row.max[index] == Acc::<E>::INFINITY;
            let of_lane = |deltas: &[f64; TILE]| if is_empty { 0.0 } else { deltas[lane] };
            chunk.row.delta[index] = Element::from_f64(of_lane(&deltas[0]));
            chunk.row.delta_tangent[index] = Element::from_f64(of_lane(&deltas[1]));
        }
    }
}

/// Writes the tangents of the gradients, each rounded once.
pub(crate) fn write_gradients<E: TileInput>(
    _: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &TangentInputs<HostView<'_>>,
    dkv: &HostBuffer,
    gradients: &mut Gradients<HostViewMut<'_>>,
) -> Result<()> {
    let Some(tangents) = &state.tangents else { return Ok(()) };
    let TangentState { geometry, chunks, dbias: sums, .. } = &**tangents;
    let spec = &*state.shard.spec;
    let mut dq = array_mut::<E>("dq", &mut gradients.dq)?;
    let scale = Acc::<E>::from_f64(spec.scale);
    for chunk in chunks {
        for strip in geometry.strips(chunk.rows.len()) {
            let rows = strip.rows_from(chunk.rows.start);
            let sums = &chunk.dq[strip_elements(&strip, geometry.head_rows())];
            let write = WriteRows {
                into: dq.slice_mut(s![chunk.batch, rows, chunk.head, ..]),
                factor: scale,
                is_empty: Some(&chunk.row.max[strip.rows.clone()]),
            };
            write.run(geometry, sums, &strip);
        }
    }
    let record = spec.gradient_row_layout();
    let mut dk = array_mut::<E>("dk", &mut gradients.dk)?;
    let mut dv = array_mut::<E>("dv", &mut gradients.dv)?;
    for (field, tensor) in [(0, &mut dk), (1, &mut dv)] {
        let rows = state.shard.keys.len();
        let source = TileSource::<Acc<E>>::records(dkv.bytes(), rows, &record, field)?;
        let (batches, _, heads, _) = tensor.dim();
        for batch in 0..batches {
            for row in 0..rows {
                for head in 0..heads {
                    let mut into = tensor.slice_mut(s![batch, row, head, ..]);
                    let from = source.vector(batch, row, head);
                    match (into.as_slice_mut(), from.to_slice()) {
                        (Some(into), Some(from)) => {
                            let pairs = into.iter_mut().zip(from);
                            pairs.for_each(|(into, &sum)| *into = E::narrow(sum));
                        }
                        _ => into.iter_mut().zip(from).for_each(|(into, &sum)| {
                            *into = E::narrow(sum);
                        }),
                    }
                }
            }
        }
    }
    if let Some(dbias) = &mut gradients.dbias {
        // with one owner a batch row and KV head, these are in the order of the tensor's heads
        let mut dbias = array_mut::<Acc<E>>("dbias", dbias)?;
        dbias.fill(Acc::<E>::ZERO);
        dbias.into_iter().zip(sums.iter()).for_each(|(into, &sum)| *into = sum);
    }
    if let (Some(dsinks), Some(sinks)) = (&mut gradients.dsinks, inputs.primal.sinks) {
        let sinks = array::<Acc<E>>("softmax_aux", sinks)?;
        let of_sinks = inputs.tangent.sinks.map(|view| array::<Acc<E>>("softmax_aux", view));
        let of_sinks = of_sinks.transpose()?;
        let mut dsinks = array_mut::<Acc<E>>("dsoftmax_aux", dsinks)?;
        let (rows, count, ..) = dsinks.dim();
        let mut sums = vec![0.0; rows * count];
        for chunk in chunks {
            let first = if rows == 1 { 0 } else { chunk.head * count };
            let of_head = sinks_of(Some(sinks), of_sinks, chunk.head);
            for (sum, [sink, tangent]) in sums[first..].iter_mut().zip(of_head) {
                for lane in 0..chunk.rows.len() {
                    let row = &chunk.row;
                    let [max, inverse, mean, delta, delta_tangent] =
                        [&row.max, &row.sum, &row.mean, &row.delta, &row.delta_tangent]
                            .map(|list| list[lane].to_f64());
                    // a sink of −∞ is no sink, and a row without scores has no gradient
                    if sink != f64::NEG_INFINITY && max != f64::INFINITY {
                        let weight = (sink - max).exp() * inverse;
                        *sum -= weight * ((tangent - mean) * delta + delta_tangent);
                    }
                }
            }
        }
        dsinks.iter_mut().zip(sums).for_each(|(into, sum)| *into = Acc::<E>::from_f64(sum));
    }
    Ok(())
}
