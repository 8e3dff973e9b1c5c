//! Wire records: packing of the local rows, and sums of gradient records.

use annulus_core::{Inputs, RangePairs, Reduction, Result, RowLayout, Spec, View, index};

use crate::{
    copy::{Copy, CopySide, LinearCopy, launch_linear},
    device::Gpu,
    kernels::CopyMode,
    launch::Commands,
    memory::{GpuBuffer, Queued, Tensor, WgpuSpace},
    pass_context::{BackwardContext, RankKernels},
};

/// Records the copy of a tensor into field `field` of records.
fn launch_field(
    gpu: &Gpu,
    commands: &mut Commands<'_>,
    tensor: &Tensor,
    record: &RowLayout,
    field: usize,
    into: &GpuBuffer,
) -> Result<()> {
    let [_, rows, heads, dim] = tensor.shape;
    let bytes = tensor.dtype.bytes() as u64;
    let from = CopySide::dense(&tensor.buffer, [rows, heads, dim], bytes);
    let into = CopySide::records(&into.buffer, record, field, bytes);
    let mode = CopyMode::Raw { half: bytes == 2 };
    Copy::new(into, tensor.shape, mode).launch(from, gpu, commands)
}

/// Writes K and V as records of [`Spec::kv_row_layout`].
pub(crate) fn pack_kv(
    kernels: &mut RankKernels,
    inputs: &Inputs<View<'_, WgpuSpace>>,
    into: &GpuBuffer,
) -> Result<Queued> {
    let RankKernels { gpu, shard, arena, .. } = kernels;
    let record = shard.spec.kv_row_layout();
    let mut commands = Commands::new(gpu, arena);
    launch_field(gpu, &mut commands, inputs.k, &record, 0, into)?;
    launch_field(gpu, &mut commands, inputs.v, &record, 1, into)?;
    commands.submit()?;
    Ok(Queued)
}

/// Writes Q, dO and row statistics as records of [`Spec::query_row_layout`].
pub(crate) fn pack_queries(pass: &mut BackwardContext<'_>, into: &GpuBuffer) -> Result<Queued> {
    let BackwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, .. } = &mut **kernels;
    let (record, rows, dims) =
        (shard.spec.query_row_layout(), shard.queries.len(), shard.spec.dims);
    let bytes = tile.storage.bytes();
    let mut commands = Commands::new(gpu, arena);
    launch_field(gpu, &mut commands, inputs.forward.q, &record, 0, into)?;
    launch_field(gpu, &mut commands, inputs.dout, &record, 1, into)?;
    // in records of 2-byte elements an f32 may straddle two words: copied by halves
    let numbers = Spec::ROW_STATISTICS * index(4 / bytes);
    let from = CopySide::dense(&state.statistics.buffer, [rows, dims.q_heads, numbers], bytes);
    let into = CopySide::records(&into.buffer, &record, 2, bytes);
    let mode = CopyMode::Raw { half: bytes == 2 };
    let shape = [dims.batch, rows, dims.q_heads, numbers];
    Copy::new(into, shape, mode).launch(from, gpu, &mut commands)?;
    commands.submit()?;
    Ok(Queued)
}

/// Copies or adds ranges of records of [`Spec::gradient_row_layout`].
pub(crate) fn reduce_gradients(
    kernels: &mut RankKernels,
    into: &GpuBuffer,
    from: &GpuBuffer,
    pairs: &RangePairs,
    reduction: Reduction,
) -> Result<Queued> {
    let RankKernels { gpu, shard, arena, .. } = kernels;
    let words = shard.spec.gradient_row_layout().bytes() / 4;
    let mode = match reduction {
        Reduction::Copy => CopyMode::Raw { half: false },
        Reduction::Add => CopyMode::Added,
    };
    let mut commands = Commands::new(gpu, arena);
    for (to, source) in pairs.iter().filter(|(to, _)| !to.is_empty()) {
        let line = LinearCopy {
            from: source.start * words,
            into: to.start * words,
            count: (to.end - to.start) * words,
        };
        launch_linear(gpu, &mut commands, &from.buffer, &into.buffer, line, 4, mode)?;
    }
    commands.submit()?;
    Ok(Queued)
}
