//! What queries give to dk and dv: `kernels/backward_keys.cuh`, or on matrix units `kernels/backward_matrix.cuh`.

use annulus_core::{Block, Dims, Inputs, Result, Saved};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event};

use crate::{
    Cuda,
    arguments::{ADD, Attention, field, tensor},
    backward_queries::own_queries,
    kernels::THREADS,
    sight::Sight,
    workspace::{Workspace, bias_of},
};

/// dk, dv of a block from this rank's queries, written into `fresh`.
pub(crate) fn attend_keys(
    cuda: &Cuda,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, CudaSpace>,
    saved: &Saved<'_, CudaSpace>,
    block: &Block<'_, CudaSpace>,
    fresh: &CudaBuffer,
) -> Result<Event> {
    fresh.wait_on(cuda.stream())?;
    if let Some((mut arguments, sight)) = own_queries(cuda, workspace, inputs, saved, block, true)? {
        write_to(&mut arguments, workspace, fresh);
        launch(cuda, workspace, &arguments, &sight)?;
    }
    cuda.after(&[block.buffer, fresh])
}

/// What travelling queries give to this rank's own dk, dv, added to `home`.
pub(crate) fn attend_keys_home(
    cuda: &Cuda,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, CudaSpace>,
    block: &Block<'_, CudaSpace>,
    home: &CudaBuffer,
) -> Result<()> {
    let spec = workspace.local.spec.clone();
    let sight =
        workspace.sights.of(&workspace.local, block.rows, &workspace.local.keys, workspace.kernels.variant.tile(), cuda.stream())?;
    if sight.is_empty() {
        return Ok(());
    }
    cuda.wait_for(block)?;
    let (record, bytes, at) = (spec.query_record(), spec.dtype.bytes(), block.buffer.address());
    let mut arguments = workspace.attention(bias_of(inputs))?;
    sight.describe(&mut arguments, true);
    arguments.q = field(at, &record, 0, bytes);
    arguments.dout = field(at, &record, 1, bytes);
    arguments.statistics = field(at, &record, 2, 2);
    arguments.k = tensor(&inputs.k);
    arguments.v = tensor(&inputs.v);
    arguments.flags |= ADD;
    write_to(&mut arguments, workspace, home);
    launch(cuda, workspace, &arguments, &sight)?;
    cuda.after(&[block.buffer, home]).map(|_| ())
}

/// dk and dv are the two fields of gradient records.
fn write_to(arguments: &mut Attention, workspace: &Workspace, records: &CudaBuffer) {
    let (record, bytes) = (workspace.local.spec.gradient_record(), workspace.sums().bytes());
    [arguments.dk, arguments.dv] = [0, 1].map(|place| field(records.address(), &record, place, bytes));
}

fn launch(cuda: &Cuda, workspace: &Workspace, arguments: &Attention, sight: &Sight) -> Result<()> {
    let Dims { batch, kv_heads, .. } = workspace.local.spec.dims;
    let grid = [u64::from(sight.tiles()[1]), kv_heads as u64, batch as u64];
    let kernels = &workspace.kernels;
    let kernel = kernels.matrix_for(&workspace.local.spec).map_or(&kernels.backward_keys, |matrix| &matrix.backward_keys);
    // SAFETY: every address is that of memory which the engine has checked to be large enough for these shapes, and which is freed only after
    // queued work.
    unsafe { kernel.launch(cuda.stream(), grid, THREADS, arguments) }
}
