//! dbias from one block of keys: `kernels/bias_gradient.cuh`.

use annulus_core::Result;

use crate::{
    arguments::Attention,
    block_mask::BlockMask,
    kernels::THREADS,
    pass_context::{PassContext, local_bias},
};

/// Adds the block's contribution to dbias, if there is a bias.
pub(crate) fn launch(
    context: &PassContext,
    arguments: &mut Attention,
    block_mask: &BlockMask,
) -> Result<()> {
    let Some([batches, heads, rows, keys]) = local_bias(&context.shard) else { return Ok(()) };
    block_mask.write_to(arguments, false);
    let [query_tiles, key_tiles] = block_mask.tiles();
    let tiles = |shared: bool, tiles: u32| if shared { 1 } else { u64::from(tiles) };
    // as in the kernel: an axis of one row is one tile, broadcast or not
    let grid =
        [tiles(rows == 1, query_tiles), tiles(keys == 1, key_tiles), (batches * heads) as u64];
    let kernel = &context.kernels.bias_gradient;
    // SAFETY: the engine has validated every tensor's shape; memory is freed only after queued
    // work.
    unsafe { kernel.launch(&context.stream, grid, THREADS, arguments) }
}
