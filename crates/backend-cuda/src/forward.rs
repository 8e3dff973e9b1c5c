//! The forward pass over one block of keys: `kernels/forward.cuh`, on matrix units `kernels/forward_matrix.cuh`, or on warpgroups
//! `kernels/forward_warpgroup.cuh`.

use annulus_core::{Block, Inputs, Result, Spec, Visibility};
use annulus_device_cuda::CudaSpace;

use crate::{
    Cuda,
    arguments::{Fill, field, tensor},
    forward_warpgroup,
    kernels::THREADS,
    packing::Packing,
    records::grid_of,
    workspace::{Workspace, bias_of},
};

/// Every row has seen nothing.
pub(crate) fn begin(cuda: &Cuda, workspace: &Workspace) -> Result<()> {
    let bytes = workspace.sums().bytes() as u64;
    for (buffer, value) in [(&workspace.acc, 0.0), (&workspace.sum, 0.0), (&workspace.ties, 0.0), (&workspace.max, f64::NEG_INFINITY)] {
        let count = buffer.len() / bytes;
        let arguments = Fill { at: buffer.address(), count, value };
        // SAFETY: the buffer holds so many sums, and lives as long as the workspace; it is freed only after queued work.
        unsafe { workspace.kernels.fill_sums.launch(cuda.stream(), grid_of(count), THREADS, &arguments)? };
    }
    Ok(())
}

/// Folds in one block.
pub(crate) fn attend(cuda: &Cuda, workspace: &mut Workspace, inputs: &Inputs<'_, CudaSpace>, block: &Block<'_, CudaSpace>) -> Result<()> {
    let spec = workspace.local.spec.clone();
    let on_warpgroups = workspace.kernels.warpgroup.clone();
    let [rows, keys] = on_warpgroups.as_ref().map_or(workspace.kernels.variant, |kernels| kernels.variant).tile();
    let packing = packing(workspace, block, rows, on_warpgroups.is_none());
    let tile = [packing.queries(), keys];
    let sight = workspace.sights.of(&workspace.local, &workspace.local.queries, block.rows, tile, cuda.stream())?;
    if sight.is_empty() {
        return Ok(());
    }
    cuda.wait_for(block)?;
    let (record, bytes) = (spec.kv_record(), spec.dtype.bytes());
    let mut arguments = workspace.attention(bias_of(inputs))?;
    sight.describe(&mut arguments, false);
    arguments.q = tensor(&inputs.q);
    arguments.k = field(block.buffer.address(), &record, 0, bytes);
    arguments.v = field(block.buffer.address(), &record, 1, bytes);
    (arguments.packed_heads, arguments.packed_reciprocal) = packing.numbers();
    let grid = [u64::from(sight.tiles()[0]), (spec.dims.q_heads / packing.heads()) as u64, spec.dims.batch as u64];
    if let Some(kernels) = on_warpgroups {
        forward_warpgroup::attend(cuda, &kernels, &arguments, &spec, grid)?;
        return cuda.after(&[block.buffer]).map(|_| ());
    }
    let kernels = &workspace.kernels;
    let kernel = kernels.matrix_for(&spec).map_or(&kernels.forward, |matrix| &matrix.forward);
    // SAFETY: every address is that of memory which the engine has checked to be large enough for these shapes, and which is freed only after
    // queued work.
    unsafe { kernel.launch(cuda.stream(), grid, THREADS, &arguments)? };
    cuda.after(&[block.buffer]).map(|_| ())
}

/// How many heads share a tile: one but on matrix units, and where heads see differently, for a tile has one list of keys.
fn packing(workspace: &Workspace, block: &Block<'_, CudaSpace>, rows: usize, allowed: bool) -> Packing {
    let local = &workspace.local;
    let Spec { dims, mask, .. } = &*local.spec;
    let (mask, attention_mask) = (mask.as_ref(), local.attention_mask.as_deref());
    let visibility = Visibility { mask, attention_mask, queries: &local.queries, keys: block.rows };
    if allowed && workspace.kernels.matrix_for(&local.spec).is_some() && !visibility.per_head() {
        Packing::of(local.queries.len(), dims.q_heads / dims.kv_heads, rows)
    } else {
        Packing::none(rows)
    }
}
