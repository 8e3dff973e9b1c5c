//! What one block of keys gives to dq: `kernels/backward_queries.cuh`, or on matrix units `kernels/backward_matrix.cuh`.

use annulus_core::{Block, Inputs, Result, Saved};
use annulus_device_cuda::CudaSpace;

use crate::{
    Cuda,
    arguments::{Attention, field, tensor},
    kernels::THREADS,
    sight::Sight,
    workspace::{Workspace, bias_of},
};

/// dq of this rank's queries.
pub(crate) fn attend_queries(
    cuda: &Cuda,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, CudaSpace>,
    saved: &Saved<'_, CudaSpace>,
    block: &Block<'_, CudaSpace>,
) -> Result<()> {
    let Some((arguments, sight)) = own_queries(cuda, workspace, inputs, saved, block, false)? else { return Ok(()) };
    let dims = &workspace.local.spec.dims;
    let grid = [u64::from(sight.tiles()[0]), dims.q_heads as u64, dims.batch as u64];
    let kernels = &workspace.kernels;
    let kernel = kernels.matrix_for(&workspace.local.spec).map_or(&kernels.backward_queries, |matrix| &matrix.backward_queries);
    // SAFETY: every address is that of memory which the engine has checked to be large enough for these shapes, and which is freed only after
    // queued work.
    unsafe { kernel.launch(cuda.stream(), grid, THREADS, &arguments)? };
    cuda.after(&[block.buffer]).map(|_| ())
}

/// This rank's queries and a block of keys, as backward kernels are given them; `None` if one side has no rows.
pub(crate) fn own_queries(
    cuda: &Cuda,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, CudaSpace>,
    saved: &Saved<'_, CudaSpace>,
    block: &Block<'_, CudaSpace>,
    by_keys: bool,
) -> Result<Option<(Attention, std::sync::Arc<Sight>)>> {
    let spec = workspace.local.spec.clone();
    let sight =
        workspace.sights.of(&workspace.local, &workspace.local.queries, block.rows, workspace.kernels.variant.tile(), cuda.stream())?;
    if sight.is_empty() && !by_keys {
        return Ok(None);
    }
    cuda.wait_for(block)?;
    let (record, bytes) = (spec.kv_record(), spec.dtype.bytes());
    let mut arguments = workspace.attention(bias_of(inputs))?;
    sight.describe(&mut arguments, by_keys);
    let state = workspace.backward()?;
    arguments.q = tensor(&inputs.q);
    arguments.dout = tensor(&saved.dout);
    arguments.k = field(block.buffer.address(), &record, 0, bytes);
    arguments.v = field(block.buffer.address(), &record, 1, bytes);
    arguments.statistics = workspace.own_statistics()?;
    arguments.dq = state.dq.address();
    arguments.dbias = state.dbias.as_ref().map_or(0, |dbias| dbias.address());
    Ok(Some((arguments, sight)))
}
