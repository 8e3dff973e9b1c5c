//! dq and dbias: tiles of queries meet blocks of keys. The kernels are `kernels/backward_queries.wgsl` and `kernels/backward_bias.wgsl`.

use annulus_core::{Block, Inputs, Result, Saved, Tick, Visibility};

use crate::{
    device::Gpu,
    memory::WgpuSpace,
    tiles::{Call, Kind, Operands, RowsOf},
    workspace::{Sums, Workspace, bias, bias_axes, bias_sums, floats, records, tensor},
};

/// Adds what one block gives to dq and dbias.
pub(crate) fn attend_queries(
    gpu: &Gpu,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, WgpuSpace>,
    saved: &Saved<'_, WgpuSpace>,
    block: &Block<'_, WgpuSpace>,
    tick: Tick<'_>,
) -> Result<()> {
    workspace.sums()?;
    let Workspace { local, tile, storage, arena, sight, gradients, .. } = workspace;
    let Some(Sums { dq, statistics, bias: dbias }) = gradients else { return Ok(()) };
    let (spec, rows, record) = (&local.spec, local.queries.len(), local.spec.kv_record());
    let heads = spec.dims.q_heads;
    let of_block = |field| Some(records(Some(&block.buffer.buffer), &record, field, storage.bytes(), RowsOf::Keys));
    let operands = Operands {
        q: Some(tensor(inputs.q, RowsOf::Queries)),
        k: of_block(0),
        v: of_block(1),
        dout: Some(tensor(saved.dout, RowsOf::Queries)),
        statistics: Some(floats(&statistics.buffer, rows, heads, 4)),
        sums: Some(floats(&dq.buffer, rows, heads, spec.dims.head_dim)),
        bias: spec.bias.zip(inputs.bias).map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, rows)),
        gradient: spec.bias.zip(dbias.as_ref()).map(|(shape, sums)| bias_sums(Some(&sums.buffer), shape, rows)),
        more: None,
    };
    let visibility =
        Visibility { mask: spec.mask.as_ref(), attention_mask: local.attention_mask.as_deref(), queries: &local.queries, keys: block.rows };
    let call = Call { gpu, spec, tile: *tile, kind: Kind::Queries, visibility, operands };
    call.run(arena, sight, &mut *tick)?;
    match spec.bias {
        Some(shape) => Call { kind: Kind::Bias(bias_axes(shape)), ..call }.run(arena, sight, tick),
        None => Ok(()),
    }
}
