//! dK and dV, by key tiles. Kernel: `backward_keys.wgsl`.

use annulus_core::{Block, Result, Tick, Visibility};

use crate::{
    memory::{GpuBuffer, WgpuSpace},
    operands::{Operands, RowsOf, TileKernel, bias, floats, records, tensor},
    pass_context::{BackwardContext, BackwardState, RankKernels},
    tiles::TilePass,
};

/// Computes the local queries' part of dK and dV of a KV block, and writes it to `dkv`.
pub(crate) fn backward_dkv(
    pass: &mut BackwardContext<'_>,
    kv: &Block<'_, WgpuSpace>,
    dkv: &GpuBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    let BackwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, block_mask } = &mut **kernels;
    let BackwardState { statistics, .. } = state;
    let spec = &shard.spec;
    let rows = shard.queries.len();
    let (record, gradient, bytes) =
        (spec.kv_row_layout(), spec.gradient_row_layout(), tile.storage.bytes());
    let of_block =
        |field| Some(records(Some(&kv.buffer.buffer), &record, field, bytes, RowsOf::Keys));
    let into = |field| Some(records(Some(&dkv.buffer), &gradient, field, 4, RowsOf::Keys));
    let operands = Operands {
        q: Some(tensor(inputs.forward.q, RowsOf::Queries)),
        k: of_block(0),
        v: of_block(1),
        dout: Some(tensor(inputs.dout, RowsOf::Queries)),
        statistics: Some(floats(&statistics.buffer, rows, spec.dims.q_heads, 4)),
        acc: into(0),
        dv: into(1),
        bias: spec
            .bias
            .zip(inputs.forward.bias)
            .map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, rows)),
        dbias: None,
    };
    let visibility = shard.visibility(&shard.queries, kv.rows);
    TilePass {
        gpu,
        spec,
        tile: *tile,
        kind: TileKernel::Keys { from_records: false, add: false },
        visibility,
        operands,
        acc: None,
    }
    .run(arena, block_mask, tick)
    .map(drop)
}

/// Adds a query block's part of dK and dV of the local keys to `dkv`.
pub(crate) fn backward_dkv_from_queries(
    pass: &mut BackwardContext<'_>,
    queries: &Block<'_, WgpuSpace>,
    dkv: &GpuBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    let BackwardContext { kernels, inputs, .. } = pass;
    let RankKernels { gpu, shard, tile, arena, block_mask } = &mut **kernels;
    let spec = &shard.spec;
    let (record, gradient, bytes) =
        (spec.query_row_layout(), spec.gradient_row_layout(), tile.storage.bytes());
    let of_queries =
        |field| Some(records(Some(&queries.buffer.buffer), &record, field, bytes, RowsOf::Queries));
    let into = |field| Some(records(Some(&dkv.buffer), &gradient, field, 4, RowsOf::Keys));
    let operands = Operands {
        q: of_queries(0),
        k: Some(tensor(inputs.forward.k, RowsOf::Keys)),
        v: Some(tensor(inputs.forward.v, RowsOf::Keys)),
        dout: of_queries(1),
        statistics: of_queries(2),
        acc: into(0),
        dv: into(1),
        // the ring refuses a bias with a query axis here: it would need another rank's rows
        bias: spec
            .bias
            .zip(inputs.forward.bias)
            .map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, queries.rows.len())),
        dbias: None,
    };
    let visibility = Visibility {
        mask: spec.mask.as_ref(),
        attention_mask: None,
        queries: queries.rows,
        keys: &shard.keys,
    };
    TilePass {
        gpu,
        spec,
        tile: *tile,
        kind: TileKernel::Keys { from_records: true, add: true },
        visibility,
        operands,
        acc: None,
    }
    .run(arena, block_mask, tick)
    .map(drop)
}
