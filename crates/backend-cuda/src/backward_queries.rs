//! dQ from one block of keys: `kernels/backward_queries.cuh`, on tensor cores
//! `kernels/backward_queries_matrix.cuh`, on warpgroups `kernels/backward_queries_warpgroup.cuh`.

use annulus_core::{Dims, Result};

use crate::{
    arguments::Attention,
    backward_warpgroup::OnWarpgroups,
    block_mask::BlockMask,
    kernels::{MatrixKernels, THREADS},
    pass_context::PassContext,
};

/// Adds the block's contribution to dQ of this rank's queries. The tiles of the block mask are
/// those of the warpgroup kernels, if given, else of [`tile`].
pub(crate) fn launch(
    context: &PassContext,
    arguments: &mut Attention,
    block_mask: &BlockMask,
    warpgroups: Option<&OnWarpgroups>,
) -> Result<()> {
    let spec = context.spec();
    let kernels = &context.kernels;
    block_mask.write_to(arguments, false);
    let Dims { batch, q_heads, .. } = spec.dims;
    let grid = [u64::from(block_mask.tiles()[0]), q_heads as u64, batch as u64];
    if let Some(warpgroups) = warpgroups {
        return warpgroups.launch_queries(context, arguments, grid);
    }
    let (kernel, threads) = match kernels.matrix_for(spec) {
        Some(matrix) => (&matrix.backward_queries, MatrixKernels::THREADS),
        None => (&kernels.backward_queries, THREADS),
    };
    // SAFETY: the engine has validated every tensor's shape; memory is freed only after queued
    // work.
    unsafe { kernel.launch(&context.stream, grid, threads, arguments) }
}

/// Queries and keys per tile of the kernel, unless it is one on warpgroups.
pub(crate) fn tile(context: &PassContext) -> [usize; 2] {
    let variant = context.kernels.variant;
    match context.kernels.matrix_for(context.spec()) {
        Some(_) => variant.queries_matrix_tile(),
        None => variant.tile(),
    }
}
