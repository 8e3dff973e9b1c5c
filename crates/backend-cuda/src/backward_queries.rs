//! dQ from one block of keys: `kernels/backward_queries.cuh`, or on tensor cores
//! `kernels/backward_matrix.cuh`.

use annulus_core::{Dims, Result};

use crate::{
    arguments::Attention, block_mask::BlockMask, kernels::THREADS, pass_context::PassContext,
};

/// Adds the block's contribution to dQ of this rank's queries.
pub(crate) fn launch(
    context: &PassContext,
    arguments: &mut Attention,
    block_mask: &BlockMask,
) -> Result<()> {
    let spec = context.spec();
    let kernels = &context.kernels;
    block_mask.write_to(arguments, false);
    let Dims { batch, q_heads, .. } = spec.dims;
    let grid = [u64::from(block_mask.tiles()[0]), q_heads as u64, batch as u64];
    let matrix = kernels.matrix_for(spec);
    let kernel = matrix.map_or(&kernels.backward_queries, |matrix| &matrix.backward_queries);
    // SAFETY: the engine has validated every tensor's shape; memory is freed only after queued
    // work.
    unsafe { kernel.launch(&context.stream, grid, THREADS, arguments) }
}
