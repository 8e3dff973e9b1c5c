//! dk and dv: tiles of keys meet this rank's queries, or queries that travel. The kernel is `kernels/backward_keys.wgsl`.

use annulus_core::{Block, Inputs, Result, Saved, Tick, Visibility};

use crate::{
    device::Gpu,
    memory::{GpuBuffer, WgpuSpace},
    tiles::{Call, Kind, Operands, RowsOf},
    workspace::{Sums, Workspace, bias, floats, records, tensor},
};

/// Writes what this rank's queries give to dk and dv of a block.
pub(crate) fn attend_keys(
    gpu: &Gpu,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, WgpuSpace>,
    saved: &Saved<'_, WgpuSpace>,
    block: &Block<'_, WgpuSpace>,
    fresh: &GpuBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    workspace.sums()?;
    let Workspace { local, tile, storage, arena, sight, gradients, .. } = workspace;
    let Some(Sums { statistics, .. }) = gradients else { return Ok(()) };
    let (spec, rows) = (&local.spec, local.queries.len());
    let (record, gradient) = (spec.kv_record(), spec.gradient_record());
    let of_block = |field| Some(records(Some(&block.buffer.buffer), &record, field, storage.bytes(), RowsOf::Keys));
    let into = |field| Some(records(Some(&fresh.buffer), &gradient, field, 4, RowsOf::Keys));
    let operands = Operands {
        q: Some(tensor(inputs.q, RowsOf::Queries)),
        k: of_block(0),
        v: of_block(1),
        dout: Some(tensor(saved.dout, RowsOf::Queries)),
        statistics: Some(floats(&statistics.buffer, rows, spec.dims.q_heads, 4)),
        sums: into(0),
        more: into(1),
        bias: spec.bias.zip(inputs.bias).map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, rows)),
        gradient: None,
    };
    let visibility =
        Visibility { mask: spec.mask.as_ref(), attention_mask: local.attention_mask.as_deref(), queries: &local.queries, keys: block.rows };
    Call { gpu, spec, tile: *tile, kind: Kind::Keys { travelling: false, add: false }, visibility, operands }.run(arena, sight, tick)
}

/// Adds what travelling queries give to this rank's dk and dv.
pub(crate) fn attend_keys_home(
    gpu: &Gpu,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, WgpuSpace>,
    queries: &Block<'_, WgpuSpace>,
    home: &GpuBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    let Workspace { local, tile, storage, arena, sight, .. } = workspace;
    let spec = &local.spec;
    let (record, gradient, bytes) = (spec.query_record(), spec.gradient_record(), storage.bytes());
    let of_queries = |field| Some(records(Some(&queries.buffer.buffer), &record, field, bytes, RowsOf::Queries));
    let into = |field| Some(records(Some(&home.buffer), &gradient, field, 4, RowsOf::Keys));
    let operands = Operands {
        q: of_queries(0),
        k: Some(tensor(inputs.k, RowsOf::Keys)),
        v: Some(tensor(inputs.v, RowsOf::Keys)),
        dout: of_queries(1),
        statistics: of_queries(2),
        sums: into(0),
        more: into(1),
        // one with a query axis cannot be had for queries of another rank; the ring has refused it
        bias: spec.bias.zip(inputs.bias).map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, queries.rows.len())),
        gradient: None,
    };
    let visibility = Visibility { mask: spec.mask.as_ref(), attention_mask: None, queries: queries.rows, keys: &local.keys };
    Call { gpu, spec, tile: *tile, kind: Kind::Keys { travelling: true, add: true }, visibility, operands }.run(arena, sight, tick)
}
