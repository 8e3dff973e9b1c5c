//! The forward pass over one block of keys: `kernels/forward.cuh`, on matrix units `kernels/forward_matrix.cuh`, or on warpgroups
//! `kernels/forward_warpgroup.cuh`.

use annulus_core::{Block, Inputs, Result};
use annulus_device_cuda::CudaSpace;

use crate::{
    Cuda,
    arguments::{Fill, field, tensor},
    forward_warpgroup,
    kernels::THREADS,
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
    let tile = on_warpgroups.as_ref().map_or(workspace.kernels.variant, |kernels| kernels.variant).tile();
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
    let grid = [u64::from(sight.tiles()[0]), spec.dims.q_heads as u64, spec.dims.batch as u64];
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
