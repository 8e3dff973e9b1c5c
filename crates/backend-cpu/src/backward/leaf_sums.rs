//! dbias and dsinks in the reproducible order, from the roots and the leaves of the merge tree.
//!
//! ```text
//! bias rows × keys       sums of the owner, one term for each plane and head
//! bias rows × 1          root over leaves of keys, then planes and heads ascend
//! bias 1 × keys          root over leaves of queries, then planes and heads ascend
//! bias 1 × 1             the same of each key; keys of a leaf ascend, in f64; leaves: the ring
//! sinks                  rows of a leaf ascend, in f64; leaves: the ring
//! ```
//!
//! Gradients of the sinks, from the statistics of the rows, also in the order of arrival.
//!
//! ```text
//! da_t = −Σ_i e^{a_t − max_i}/sum_i·delta_i − [a_t = max_i]·share_i        for each sink a_t
//! ```

use std::ops::Range;

use annulus_core::{
    Element, HostBuffer, HostView, Inputs, LeafSums, Result, Rows, Spec, Tick, memory,
};
use ndarray::{ArrayView4, ArrayViewMut4};

use crate::{
    simd::dispatch::Real,
    threads::team::{Team, Ticker},
    tile::input::{Acc, TileInput, TileSource, array},
    workspace::{bias_gradient::BiasGradient, query_block::RowStatistics, state::PassState},
};

/// The sinks of a backward pass, and what their gradients are computed from.
pub(super) struct SinkGradients<'a, A> {
    pub(super) statistics: &'a RowStatistics<A>,
    /// Query heads.
    pub(super) heads: usize,
    /// `[q_heads|1, sinks, 1, 1]`.
    pub(super) sinks: ArrayView4<'a, A>,
    /// Local rows whose contribution is computed.
    pub(super) rows: Range<usize>,
}

impl<A: Real> SinkGradients<'_, A> {
    /// Computes the gradient of sink number `index` in the order of the tensor, in f64: batch rows
    /// and heads ascend, then rows. The result is not read if `ticker` stops.
    pub(super) fn of(&self, index: usize, ticker: &mut Ticker<'_>) -> f64 {
        let Self { statistics, heads, sinks, rows } = self;
        let (lines, count, ..) = sinks.dim();
        let (line, sink) = (index / count, index % count);
        let score = sinks[[line, sink, 0, 0]].to_f64();
        // a sink of −∞ has no weight
        if score == f64::NEG_INFINITY {
            return 0.0;
        }
        let planes = statistics.lines.len().checked_div(statistics.rows).unwrap_or(0);
        let mut sum = 0.0;
        for plane in (0..planes).filter(|plane| lines == 1 || plane % heads == line) {
            if ticker.should_stop() {
                break;
            }
            for row in statistics.of(plane, rows.clone()) {
                let [max, inverse_sum, delta, share] = row.map(Element::to_f64);
                // 0 of a normalised output
                let max_term = if score == max { share } else { 0.0 };
                sum -= (score - max).exp() * inverse_sum * delta + max_term;
            }
        }
        sum
    }
}

/// Calls `found` with the rows of each leaf, in local order.
fn each_leaf(
    rows: &Rows,
    leaf_rows: u64,
    mut found: impl FnMut(Range<usize>) -> Result<()>,
) -> Result<()> {
    let mut first = 0;
    for leaf in rows.rows().chunk_by(|a, b| a / leaf_rows == b / leaf_rows) {
        found(first..first + leaf.len())?;
        first += leaf.len();
    }
    Ok(())
}

/// Computes the terms of dsinks, and of dbias with one row and one column, of each leaf. Ticks
/// between sinks, and of dbias between leaves and every [`KEYS_PER_TICK`] keys.
pub(crate) fn leaf_sums<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &Inputs<HostView<'_>>,
    final_grad: &HostBuffer,
    into: &mut LeafSums,
    tick: Tick<'_>,
) -> Result<()> {
    const WHAT: &str = "the sums of leaves";
    let PassState { shard, statistics, scratch, .. } = &mut *state;
    let statistics = &*statistics;
    let spec = &shard.spec;
    let LeafSums { sinks: of_sinks, bias: of_bias } = into;
    of_sinks.clear();
    of_bias.clear();
    let Some(leaf_rows) = spec.leaf_rows else { return Ok(()) };
    if let Some(sinks) = inputs.sinks {
        let sinks = array::<Acc<E>>("softmax_aux", sinks)?;
        each_leaf(&shard.queries, leaf_rows, |rows| {
            memory::reserve(WHAT, of_sinks, sinks.len())?;
            let first = of_sinks.len();
            of_sinks.resize(first + sinks.len(), 0.0);
            let heads = spec.dims.q_heads;
            let gradients = SinkGradients { statistics, heads, sinks, rows };
            let sums = of_sinks[first..].iter_mut().enumerate();
            team.run(scratch, sums, Some(&mut *tick), |_, (index, sum), ticker| {
                *sum = gradients.of(index, ticker);
            });
            Ok(())
        })?;
    }
    if let Some(gradient) = &mut state.table_gradient {
        gradient.add_terms(of_bias)?;
    }
    if let (Some(gradient), Some([batches, heads, 1, 1])) =
        (&state.bias_gradient, state.shard.spec.pair_bias())
    {
        let of_key = RecordSums::<Acc<E>>::new(state, gradient, final_grad)?;
        each_leaf(&state.shard.keys, leaf_rows, |rows| {
            memory::reserve(WHAT, of_bias, batches * heads)?;
            let first = of_bias.len();
            of_bias.resize(first + batches * heads, 0.0);
            let sums = &mut of_bias[first..];
            of_key.each(rows, &mut *tick, |_, (batch, head), sum| {
                sums[batch * heads + head] += sum.to_f64();
            });
            Ok(())
        })?;
    }
    Ok(())
}

/// Keys whose sums are read between two ticks: some microseconds, long beside a tick.
const KEYS_PER_TICK: usize = 4096;

/// dbias of each local key, plane and head, from the records of dk and dv.
struct RecordSums<'a, A> {
    source: TileSource<'a, A>,
    gradient: &'a BiasGradient<A>,
    /// Numbers of batch rows, KV heads and sums per KV head.
    shape: [usize; 3],
}

impl<'a, A: Real> RecordSums<'a, A> {
    fn new(
        state: &PassState<A>,
        gradient: &'a BiasGradient<A>,
        final_grad: &'a HostBuffer,
    ) -> Result<Self> {
        let spec = &state.shard.spec;
        let record = spec.gradient_row_layout();
        let keys = state.shard.keys.len();
        let source = TileSource::records(final_grad.bytes(), keys, &record, 2)?;
        let shape = [spec.dims.batch, spec.dims.kv_heads, spec.bias_heads_per_kv_head()];
        Ok(Self { source, gradient, shape })
    }

    /// Calls `found` with the local key, the element of dbias and the sum: planes and heads ascend,
    /// then keys. Ends early if the tick breaks.
    fn each(
        &self,
        keys: Range<usize>,
        tick: Tick<'_>,
        mut found: impl FnMut(usize, (usize, usize), A),
    ) {
        let [batches, kv_heads, sums] = self.shape;
        for (batch, kv_head) in (0..batches).flat_map(|b| (0..kv_heads).map(move |h| (b, h))) {
            for index in 0..sums {
                let element = self.gradient.element(batch, kv_head, index);
                for first in keys.clone().step_by(KEYS_PER_TICK) {
                    if tick().is_break() {
                        return;
                    }
                    for key in first..keys.end.min(first + KEYS_PER_TICK) {
                        found(key, element, self.source.vector(batch, key, kv_head)[index]);
                    }
                }
            }
        }
    }
}

/// Writes this rank's part of dbias: of a bias that is broadcast over queries the columns of local
/// keys, and 0 in the others. The ring writes a bias with one row and one column. Ends early if the
/// tick breaks.
pub(super) fn write_dbias<A: Real>(
    state: &PassState<A>,
    gradient: &BiasGradient<A>,
    final_grad: &HostBuffer,
    mut into: ArrayViewMut4<'_, A>,
    tick: Tick<'_>,
) -> Result<()> {
    if gradient.in_blocks() {
        into.fill(A::ZERO);
        let Spec { dims, .. } = &*state.shard.spec;
        let sums = state.shard.spec.bias_heads_per_kv_head();
        let blocks = 0..state.shard.queries.len().div_ceil(state.q_rows);
        for block in blocks.flat_map(|index| state.blocks_of_rows(index)) {
            if tick().is_break() {
                break;
            }
            for head in 0..dims.group() {
                let (batch, into_head) = gradient.element(block.batch, block.kv_head, head % sums);
                let of_rows = &block.partial.sum[block.lane(head, 0)..];
                for (row, &sum) in block.rows.clone().zip(of_rows) {
                    into[[batch, into_head, row, 0]] += sum;
                }
            }
        }
    } else if !gradient.in_records() {
        gradient.write(into, tick);
    } else if !gradient.over_keys() {
        into.fill(A::ZERO);
        let rows = state.shard.keys.rows();
        let sums = RecordSums::new(state, gradient, final_grad)?;
        sums.each(0..rows.len(), tick, |key, (batch, head), sum| {
            into[[batch, head, 0, annulus_core::index(rows[key])]] += sum;
        });
    }
    Ok(())
}
