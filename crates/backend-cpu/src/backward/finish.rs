//! Epilogue of the backward pass: writes the gradients, each rounded once.
//!
//! ```text
//! dq = scale·Σ dS·K      dk, dv from their records
//! dbias from its sums, dsinks from the statistics of the rows (`leaf_sums.rs`)
//! ```

use annulus_core::{Element, Gradients, HostBuffer, HostView, HostViewMut, Inputs, Result, Tick};
use ndarray::{ArrayView1, ArrayViewMut1, ArrayViewMut4, Axis};

use crate::{
    backward::leaf_sums::{SinkGradients, write_dbias},
    simd::{
        dispatch::{ArrayKernel, IsaToken, Real},
        element::Float,
        isa::prefetch_l1,
    },
    threads::team::Team,
    tile::{
        input::{Acc, TileInput, TileSource, array, array_mut},
        prefetch::ROWS_AHEAD,
        tile_mask::TILE,
    },
    workspace::{
        bias_gradient::BiasPartial,
        scratch::ThreadScratch,
        state::{DqLayout, PassState},
    },
};

/// Writes dq, dk, dv, dbias and dsinks. A partial dq is not rounded.
pub(crate) fn finish<E: TileInput<Accumulator: TileInput<Accumulator = Acc<E>>>>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &Inputs<HostView<'_>>,
    final_grad: &HostBuffer,
    gradients: &mut Gradients<HostViewMut<'_>>,
    tick: Tick<'_>,
) -> Result<()> {
    let (mut dk, mut dv) =
        (array_mut::<E>("dk", &mut gradients.dk)?, array_mut::<E>("dv", &mut gradients.dv)?);
    finish_leaves(team, state, &mut *tick);
    let reproducible = state.shard.leaves.is_some();
    let mut scratch = std::mem::take(&mut state.scratch);
    if state.shard.spec.partial {
        let mut dq = array_mut::<Acc<E>>("dq", &mut gradients.dq)?;
        write_dq(team, state, &mut scratch, &mut dq, &mut *tick);
    } else {
        let mut dq = array_mut::<E>("dq", &mut gradients.dq)?;
        write_dq(team, state, &mut scratch, &mut dq, &mut *tick);
    }
    let record = state.shard.spec.gradient_row_layout();
    let rows = state.shard.keys.len();
    let token = state.geometry.token;
    for (field, tensor) in [(0, &mut dk), (1, &mut dv)] {
        let source = TileSource::<Acc<E>>::records(final_grad.bytes(), rows, &record, field)?;
        let chunks = tensor.axis_chunks_iter_mut(Axis(1), TILE).enumerate();
        team.run(&mut scratch, chunks, Some(&mut *tick), |_, (index, mut chunk), _| {
            for (batch, mut chunk) in chunk.outer_iter_mut().enumerate() {
                for (row, mut chunk) in chunk.outer_iter_mut().enumerate() {
                    let factor = <Acc<E> as Float>::ONE;
                    let sums = source.row(batch, index * TILE + row);
                    if let (Some(into), Some(sums)) = (chunk.as_slice_mut(), sums) {
                        Acc::<E>::run(token, 1, ScaleAndRound { into, sums, factor });
                        continue;
                    }
                    for (head, into) in chunk.outer_iter_mut().enumerate() {
                        let sums = source.vector(batch, index * TILE + row, head);
                        write_row(token, into, sums, factor);
                    }
                }
            }
        });
    }
    // the ring sums those of leaves
    if let (Some(sinks), Some(dsinks), false) =
        (inputs.sinks, gradients.dsinks.as_mut(), reproducible)
    {
        let PassState { shard, statistics, .. } = &*state;
        let sinks = array("softmax_aux", sinks)?;
        let heads = shard.spec.dims.q_heads;
        let rows = 0..statistics.rows;
        let gradients = SinkGradients { statistics, heads, sinks, rows };
        let mut dsinks = array_mut::<Acc<E>>("dsinks", dsinks)?;
        let items = dsinks.iter_mut().enumerate();
        team.run(&mut scratch, items, Some(&mut *tick), |_, (index, into), ticker| {
            *into = Acc::<E>::from_f64(gradients.of(index, ticker));
        });
    }
    state.scratch = scratch;
    if let (Some(gradient), Some(dbias)) = (&mut state.table_gradient, gradients.dbias.as_mut())
        && !reproducible
    {
        gradient.write(array_mut::<Acc<E>>("dbias", dbias)?);
    }
    if let (Some(gradient), Some(dbias)) = (&state.bias_gradient, gradients.dbias.as_mut()) {
        write_dbias(state, gradient, final_grad, array_mut("dbias", dbias)?, tick)?;
    }
    Ok(())
}

/// Closes the last leaf of keys, so that the root of the tree is dq of every query, and gives zeros
/// and NaN of dbias the same bits. Does nothing if the order is not reproducible.
fn finish_leaves<A: Real>(team: &Team, state: &mut PassState<A>, tick: Tick<'_>) {
    let PassState { shard, blocks, scratch, arrivals, bias_gradient, .. } = state;
    let Some(plan) = &shard.leaves else { return };
    if let Some(partials) = bias_gradient.as_mut().and_then(|gradient| gradient.partials()) {
        partials.for_each(BiasPartial::unify);
    }
    team.run(scratch, blocks.iter_mut(), Some(tick), |_, block, _| {
        if let Some(step) = arrivals.open() {
            block.close_dq_leaf(&plan.keys, step);
        }
        block.finish_dq_leaves();
    });
}

/// Writes factor·sums, rounded to the inputs' type.
fn write_row<E: TileInput>(
    token: IsaToken,
    mut into: ArrayViewMut1<'_, E>,
    sums: ArrayView1<'_, E::Accumulator>,
    factor: E::Accumulator,
) {
    match (into.as_slice_mut(), sums.to_slice()) {
        (Some(into), Some(sums)) => {
            <E::Accumulator as Real>::run(token, 1, ScaleAndRound { into, sums, factor })
        }
        _ => into.iter_mut().zip(sums).for_each(|(into, &sum)| *into = E::narrow(factor * sum)),
    }
}

/// Scales and rounds contiguous elements.
struct ScaleAndRound<'a, E: TileInput> {
    into: &'a mut [E],
    sums: &'a [E::Accumulator],
    factor: E::Accumulator,
}

impl<E: TileInput> ArrayKernel for ScaleAndRound<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        for (into, &sum) in self.into.iter_mut().zip(self.sums) {
            *into = E::narrow(self.factor * sum);
        }
    }
}

/// Writes dq, scaled and rounded, from either layout.
fn write_dq<E: TileInput>(
    team: &Team,
    state: &PassState<Acc<E>>,
    scratch: &mut [ThreadScratch<Acc<E>>],
    dq: &mut ArrayViewMut4<'_, E>,
    tick: Tick<'_>,
) {
    let geometry = &state.geometry;
    let head_rows = geometry.head_rows();
    let scale = Acc::<E>::from_f64(state.shard.spec.scale);
    let chunks = dq.axis_chunks_iter_mut(Axis(1), state.q_rows).enumerate();
    team.run(scratch, chunks, Some(tick), |_, (index, mut dq), _| {
        for block in state.blocks_of_rows(index) {
            for (index_in_group, head) in geometry.heads(block.kv_head).enumerate() {
                let mut dq = dq.index_axis_mut(Axis(0), block.batch);
                let mut dq = dq.index_axis_mut(Axis(1), head);
                if state.dq_layout == DqLayout::Rows {
                    let width = geometry.padded_head_dim();
                    let lines = block.partial.sums[block.lane(index_in_group, 0) * width..]
                        .chunks_exact(width);
                    for (row, line) in (0..dq.dim().0).zip(lines) {
                        if row + ROWS_AHEAD < dq.dim().0 {
                            let ahead = dq.index_axis(Axis(0), row + ROWS_AHEAD);
                            prefetch_l1(ahead.to_slice().unwrap_or_default());
                        }
                        let into = dq.index_axis_mut(Axis(0), row);
                        let dim = into.len();
                        write_row(geometry.token, into, ArrayView1::from(&line[..dim]), scale);
                    }
                } else {
                    for strip in geometry.strips(block.rows.len()) {
                        let first = block.lane(index_in_group, strip.rows.start);
                        let sums = &block.partial.sums
                            [first * head_rows..(first + strip.width) * head_rows];
                        for (lane, row) in strip.rows.clone().enumerate() {
                            let column = sums.iter().skip(lane).step_by(strip.width);
                            let into = dq.index_axis_mut(Axis(0), row).into_iter();
                            into.zip(column)
                                .for_each(|(into, &sum)| *into = E::narrow(scale * sum));
                        }
                    }
                }
                let head_index = block.batch * state.shard.spec.dims.q_heads + head;
                let statistics = state.statistics.of(head_index, block.rows.clone());
                for (mut into, &[max, ..]) in dq.outer_iter_mut().zip(statistics) {
                    // max = +∞: every probability is 0, and dq is 0 even if a key is not finite
                    // (0 · ∞ is NaN in the sums)
                    if max == Acc::<E>::INFINITY {
                        into.fill(E::narrow(Acc::<E>::ZERO));
                    }
                }
            }
        }
    });
}
