//! What one block of keys gives to dbias: `kernels/bias_gradient.cuh`.

use annulus_core::{Block, Inputs, Result, Saved};
use annulus_device_cuda::CudaSpace;

use crate::{Cuda, backward_queries::own_queries, kernels::THREADS, workspace::Workspace};

/// Adds to dbias, if there is a bias.
pub(crate) fn add(
    cuda: &Cuda,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, CudaSpace>,
    saved: &Saved<'_, CudaSpace>,
    block: &Block<'_, CudaSpace>,
) -> Result<()> {
    let Some([batches, heads, rows, keys]) = workspace.bias_shape() else { return Ok(()) };
    let Some((arguments, sight)) = own_queries(cuda, workspace, inputs, saved, block, false)? else { return Ok(()) };
    let [query_tiles, key_tiles] = sight.tiles();
    let tiles = |shared: bool, tiles: u32| if shared { 1 } else { u64::from(tiles) };
    // as the kernel: an axis of one row belongs to that row, whether it is broadcast or not
    let grid = [tiles(rows == 1, query_tiles), tiles(keys == 1, key_tiles), (batches * heads) as u64];
    // SAFETY: every address is that of memory which the engine has checked to be large enough for these shapes, and which is freed only after
    // queued work.
    unsafe { workspace.kernels.bias_gradient.launch(cuda.stream(), grid, THREADS, &arguments)? };
    cuda.after(&[block.buffer]).map(|_| ())
}
