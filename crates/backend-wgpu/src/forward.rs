//! The forward pass: tiles of queries meet blocks of keys. The kernel is `kernels/forward.wgsl`.

use annulus_core::{Block, Inputs, Result, Tick, Visibility};

use crate::{
    device::Gpu,
    launch::Job,
    memory::WgpuSpace,
    tiles::{Call, Kind, Operands, RowsOf},
    workspace::{Workspace, bias, floats, records, tensor},
};

/// Every row has seen nothing.
pub(crate) fn begin(gpu: &Gpu, workspace: &mut Workspace) -> Result<()> {
    let mut job = Job::new(gpu, &mut workspace.arena);
    job.clear(&workspace.running.buffer);
    job.submit()
}

/// Folds in one block.
pub(crate) fn attend(
    gpu: &Gpu,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, WgpuSpace>,
    block: &Block<'_, WgpuSpace>,
    tick: Tick<'_>,
) -> Result<()> {
    let Workspace { local, tile, storage, arena, sight, acc, running, .. } = workspace;
    let (spec, rows, record) = (&local.spec, local.queries.len(), local.spec.kv_record());
    let of_block = |field| Some(records(Some(&block.buffer.buffer), &record, field, storage.bytes(), RowsOf::Keys));
    let call = Call {
        gpu,
        spec,
        tile: *tile,
        kind: Kind::Forward,
        visibility: Visibility {
            mask: spec.mask.as_ref(),
            attention_mask: local.attention_mask.as_deref(),
            queries: &local.queries,
            keys: block.rows,
        },
        operands: Operands {
            q: Some(tensor(inputs.q, RowsOf::Queries)),
            k: of_block(0),
            v: of_block(1),
            statistics: Some(floats(&running.buffer, rows, spec.dims.q_heads, 4)),
            sums: Some(floats(&acc.buffer, rows, spec.dims.q_heads, spec.dims.value_dim)),
            bias: spec.bias.zip(inputs.bias).map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, rows)),
            ..Operands::default()
        },
    };
    call.run(arena, sight, tick)
}
