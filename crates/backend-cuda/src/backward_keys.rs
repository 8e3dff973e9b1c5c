//! dK and dV: `kernels/backward_keys.cuh`, on tensor cores `kernels/backward_keys_matrix.cuh`,
//! on warpgroups `kernels/backward_keys_warpgroup.cuh`.

use annulus_core::{Dims, Result};
use annulus_device_cuda::CudaBuffer;

use crate::{
    arguments::{Attention, field},
    backward_warpgroup::OnWarpgroups,
    block_mask::BlockMask,
    kernels::{MatrixKernels, THREADS},
    pass_context::PassContext,
};

/// Computes dK and dV of the block's keys from its queries, and writes them to gradient records, or
/// adds them with [`crate::arguments::ADD`]. The tiles of the block mask are those of the warpgroup
/// kernels, if given, else of the general ones.
pub(crate) fn launch(
    context: &PassContext,
    arguments: &mut Attention,
    block_mask: &BlockMask,
    records: &CudaBuffer,
    warpgroups: Option<&OnWarpgroups>,
) -> Result<()> {
    let spec = context.spec();
    let kernels = &context.kernels;
    write_to(arguments, context, block_mask, records);
    let Dims { batch, kv_heads, .. } = spec.dims;
    let mut grid = [u64::from(block_mask.tiles()[1]), kv_heads as u64, batch as u64];
    if let Some(warpgroups) = warpgroups {
        return warpgroups.launch_keys(context, arguments, grid);
    }
    let (kernel, threads) = match kernels.matrix_for(spec) {
        Some(matrix) => {
            grid[0] *= (kernels.variant.tile()[1] / kernels.variant.keys_matrix_rows()) as u64;
            (&matrix.backward_keys, MatrixKernels::THREADS)
        }
        None => (&kernels.backward_keys, THREADS),
    };
    // SAFETY: the engine has validated every tensor's shape; memory is freed only after queued
    // work.
    unsafe { kernel.launch(&context.stream, grid, threads, arguments) }
}

/// Sets the block mask by key tile, and dK and dV as fields of gradient records.
pub(crate) fn write_to(
    arguments: &mut Attention,
    context: &PassContext,
    block_mask: &BlockMask,
    records: &CudaBuffer,
) {
    let record = context.spec().gradient_row_layout();
    let bytes = context.sums().bytes();
    block_mask.write_to(arguments, true);
    [arguments.dk, arguments.dv] =
        [0, 1].map(|index| field(records.address(), &record, index, bytes));
}
