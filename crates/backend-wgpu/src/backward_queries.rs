//! dQ and dbias, by query tiles. Kernels: `backward_queries.wgsl`, `backward_bias.wgsl`.

use std::ops::ControlFlow;

use annulus_core::{Block, Result, Tick};

use crate::{
    memory::WgpuSpace,
    operands::{Operands, RowsOf, TileKernel, bias, dbias_operand, floats, records, tensor},
    pass_context::{BackwardContext, BackwardState, RankKernels, bias_axes},
    tiles::TilePass,
};

/// Adds one KV block's contribution to dQ and dbias. Returns `Break` if the tick did.
pub(crate) fn backward_dq(
    pass: &mut BackwardContext<'_>,
    kv: &Block<'_, WgpuSpace>,
    tick: Tick<'_>,
) -> Result<ControlFlow<()>> {
    let BackwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, block_mask } = &mut **kernels;
    let BackwardState { dq, statistics, bias: dbias } = state;
    let spec = &shard.spec;
    let rows = shard.queries.len();
    let record = shard.spec.kv_row_layout();
    let bytes = tile.storage.bytes();
    let heads = spec.dims.q_heads;
    let of_block =
        |field| Some(records(Some(&kv.buffer.buffer), &record, field, bytes, RowsOf::Keys));
    let operands = Operands {
        q: Some(tensor(inputs.forward.q, RowsOf::Queries)),
        k: of_block(0),
        v: of_block(1),
        dout: Some(tensor(inputs.dout, RowsOf::Queries)),
        statistics: Some(floats(&statistics.buffer, rows, heads, 4)),
        acc: None,
        bias: spec
            .bias
            .zip(inputs.forward.bias)
            .map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, rows)),
        dbias: spec
            .bias
            .zip(dbias.as_ref())
            .map(|(shape, acc)| dbias_operand(Some(&acc.buffer), shape, rows)),
        dv: None,
    };
    let visibility = shard.visibility(&shard.queries, kv.rows);
    let pass = TilePass {
        gpu,
        spec,
        tile: *tile,
        kind: TileKernel::Queries,
        visibility,
        operands,
        acc: Some(dq),
    };
    let flow = pass.run(arena, block_mask, &mut *tick)?;
    match spec.bias.filter(|_| flow.is_continue()) {
        Some(shape) => TilePass { kind: TileKernel::Bias(bias_axes(shape)), acc: None, ..pass }
            .run(arena, block_mask, tick),
        None => Ok(flow),
    }
}
