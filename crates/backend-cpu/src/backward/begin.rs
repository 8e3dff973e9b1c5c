//! Prologue of the backward pass: row statistics from out and its rounding residual, max, sum, dout
//! and dlse.
//!
//! See `workspace/query_block.rs` for their definitions.

use annulus_core::{BackwardInputs, BackwardMode, Element, HostView, ListedKeys, Result, memory};
use ndarray::ArrayView4;

use crate::{
    gather::block::needs_tiles,
    simd::{
        dispatch::{ArrayKernel, IsaToken, Real},
        element::Float,
    },
    threads::team::Team,
    tile::{
        bias::ListBiasSums,
        input::{Acc, TileInput, TileSource, array},
        prefetch::{PrefetchRows, ROWS_AHEAD},
    },
    workspace::{
        query_block::Statistics,
        state::{DqLayout, PassState},
    },
};

/// Computes the row statistics and zeroes all accumulators.
pub(crate) fn begin<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &BackwardInputs<HostView<'_>>,
    mode: BackwardMode,
) -> Result<()> {
    state.dq_layout = match mode {
        BackwardMode::OnePass => DqLayout::Rows,
        BackwardMode::TwoPass => DqLayout::Strips,
    };
    state.arrivals.begin();
    state.query_tiles.begin();
    state.key_leaves.next = 0;
    // rows are gathered in one pass only
    let tiles = mode == BackwardMode::TwoPass || needs_tiles::<Acc<E>>(&state.shard);
    begin_list_bias(state, tiles)?;
    let PassState { shard, geometry, blocks, scratch, statistics, bias_gradient, .. } = state;
    team.run(scratch, blocks.iter_mut(), None, |_, block, _| {
        block.partial.sums.fill(Acc::<E>::ZERO);
        block.leaves.begin();
    });
    bias_gradient.iter_mut().for_each(|gradient| gradient.clear());
    state.table_gradient.iter_mut().for_each(|gradient| gradient.clear());
    let rows = StatisticsInputs::<E> {
        token: geometry.token,
        out: (!shard.spec.partial).then(|| array("out", inputs.out)).transpose()?,
        out_residual: inputs
            .out_residual
            .map(|residual| array("out_residual", residual))
            .transpose()?,
        dout: array("dout", inputs.dout)?,
        max: array("max", inputs.max)?,
        sum: inputs.sum.map(|sum| array("sum", sum)).transpose()?,
        dlse: inputs.dlse.map(|dlse| array("dlse", dlse)).transpose()?,
        ties: inputs.ties.map(|ties| array("ties", ties)).transpose()?,
        normalize: shard.spec.normalize,
    };
    let heads = shard.spec.dims.q_heads;
    let lines = statistics.lines.chunks_mut(statistics.rows.max(1)).enumerate();
    team.run(scratch, lines, None, |_, (line, into), _| {
        rows.fill(line / heads, line % heads, into);
    });
    Ok(())
}

/// Zeroes the gradient of the bias of key lists; with `tiles` also its sums by tiles.
pub(crate) fn begin_list_bias<A: Real>(state: &mut PassState<A>, tiles: bool) -> Result<()> {
    let PassState { shard, list_bias_gradient, tile_list_bias, .. } = state;
    list_bias_gradient.clear();
    *tile_list_bias = None;
    let lists = shard.key_lists.as_deref().filter(|lists| lists.bias().is_some());
    let Some(lists) = lists else { return Ok(()) };
    memory::reserve("the gradient of key_list_bias", list_bias_gradient, lists.len())?;
    list_bias_gradient.resize(lists.len(), A::ZERO);
    if tiles {
        let listed = ListedKeys::new(lists, shard.spec.dims.q_heads);
        *tile_list_bias = Some(ListBiasSums::new(listed, &shard.spec)?);
    }
    Ok(())
}

/// Inputs of the row statistics.
struct StatisticsInputs<'a, E: TileInput> {
    token: IsaToken,
    /// None of partial results, of which dlse is −delta; of an output that is not normalised ties
    /// is then −⟨out, dout⟩ / ties.
    out: Option<ArrayView4<'a, E>>,
    out_residual: Option<ArrayView4<'a, E>>,
    dout: ArrayView4<'a, E>,
    max: ArrayView4<'a, Acc<E>>,
    sum: Option<ArrayView4<'a, Acc<E>>>,
    dlse: Option<ArrayView4<'a, Acc<E>>>,
    ties: Option<ArrayView4<'a, Acc<E>>>,
    normalize: bool,
}

impl<E: TileInput> StatisticsInputs<'_, E> {
    /// Computes the statistics of one batch row and head.
    fn fill(&self, batch: usize, head: usize, into: &mut [Statistics<Acc<E>>]) {
        let out = self.out.map(TileSource::tensor);
        let residual = self.out_residual.map(TileSource::tensor);
        let dout = TileSource::tensor(self.dout);
        let ahead = [out.as_ref(), Some(&dout)].map(|source| {
            source.map_or(PrefetchRows::default(), |source| {
                PrefetchRows::of(source.plane(batch, head))
            })
        });
        for (row, into) in into.iter_mut().enumerate() {
            ahead.iter().for_each(|rows| rows.prefetch(row + ROWS_AHEAD));
            let at = [batch, head, row, 0];
            let of =
                |view: Option<ArrayView4<'_, Acc<E>>>| view.map_or(0.0, |view| view[at].to_f64());
            let max = self.max[at];
            // an empty row has no gradient, whatever dout and dlse are
            let empty = max == -Acc::<E>::INFINITY;
            let sum = self.sum.map_or(1.0, |sum| sum[at].to_f64());
            let product = match &out {
                Some(out) if !empty => {
                    let dot = |of| dot(self.token, of, &dout, [batch, row, head]);
                    dot(out) + residual.as_ref().map_or(0.0, dot)
                }
                _ => 0.0,
            };
            let dlse = if empty { 0.0 } else { of(self.dlse) };
            let inverse_sum = if empty { 0.0 } else { 1.0 / sum };
            let [delta, share] = match (self.normalize, out.is_some()) {
                (true, _) => [product - dlse, 0.0],
                (false, _) if empty => [-dlse, 0.0],
                (false, true) => [-dlse, product / of(self.ties)],
                (false, false) => [-dlse, -of(self.ties)],
            };
            let max = if empty { Acc::<E>::INFINITY } else { max };
            let [inverse_sum, delta, share] = [inverse_sum, delta, share].map(Element::from_f64);
            *into = [max, inverse_sum, delta, share];
        }
    }
}

/// Computes ⟨a, b⟩ of one row with eight partial sums, in the same order for every memory layout.
fn dot<E: TileInput>(
    token: IsaToken,
    a: &TileSource<'_, E>,
    b: &TileSource<'_, E>,
    [batch, row, head]: [usize; 3],
) -> f64 {
    let a = a.vector(batch, row, head);
    let b = b.vector(batch, row, head);
    if let (Some(a), Some(b)) = (a.to_slice(), b.to_slice()) {
        return Acc::<E>::run(token, 1, Dot { a, b });
    }
    let mut sums = [0.0; PARTIAL_SUMS];
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        sums[i % PARTIAL_SUMS] += a.to_f64() * b.to_f64();
    }
    sums.iter().sum()
}

/// Partial sums of a [`Dot`]: one 64-byte vector of f64.
const PARTIAL_SUMS: usize = 8;

/// Computes ⟨a, b⟩ of contiguous elements.
struct Dot<'a, E> {
    a: &'a [E],
    b: &'a [E],
}

impl<E: TileInput> ArrayKernel for Dot<'_, E> {
    type Output = f64;

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(
        self,
    ) -> f64 {
        let ((a, a_rest), (b, b_rest)) =
            (self.a.as_chunks::<PARTIAL_SUMS>(), self.b.as_chunks::<PARTIAL_SUMS>());
        let mut sums = [0.0; PARTIAL_SUMS];
        for (a, b) in a.iter().zip(b) {
            for i in 0..PARTIAL_SUMS {
                sums[i] += a[i].widen().to_f64() * b[i].widen().to_f64();
            }
        }
        for (i, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
            sums[i] += a.to_f64() * b.to_f64();
        }
        sums.iter().sum()
    }
}
