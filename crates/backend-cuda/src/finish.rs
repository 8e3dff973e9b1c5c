//! Forward epilogue of a row: `finish_forward` of `kernels/rows.cuh`.

use annulus_core::{Inputs, Outputs, Result, View, ViewMut};
use annulus_device_cuda::CudaSpace;

use crate::{
    arguments::{
        PARTIAL, RowArguments, RowOutputs, TensorArgument, UNNORMALIZED, by_head, tensor,
        tensor_mut,
    },
    block_mask::to_u32,
    kernels::THREADS,
    pass_context::PassContext,
    state::ForwardState,
};

/// Rows per thread block: one per warp.
const ROWS: u64 = 8;

/// Grid of `finish_forward`.
fn grid_of_rows(context: &PassContext) -> [u64; 3] {
    let dims = &context.spec().dims;
    [((dims.batch * dims.q_heads * context.queries()) as u64).div_ceil(ROWS), 1, 1]
}

/// Common arguments of the row kernels.
pub(crate) fn row_arguments(context: &PassContext) -> Result<RowArguments> {
    let spec = context.spec();
    Ok(RowArguments {
        queries: to_u32(context.queries())?,
        batches: to_u32(spec.dims.batch)?,
        q_heads: to_u32(spec.dims.q_heads)?,
        value_dim: to_u32(spec.dims.value_dim)?,
        sinks_count: to_u32(spec.sinks.map_or(0, |sinks| sinks.count))?,
        sinks_lines: spec
            .sinks
            .map_or(Ok(0), |sinks| to_u32(if sinks.per_head { spec.dims.q_heads } else { 1 }))?,
        flags: if spec.normalize { 0 } else { UNNORMALIZED }
            | if spec.partial { PARTIAL } else { 0 },
        ..RowArguments::default()
    })
}

/// Describes the caller's sinks `[line, sink, 1, 1]` with lines as heads and sinks as rows.
pub(crate) fn sinks_of(inputs: &Inputs<View<'_, CudaSpace>>) -> TensorArgument {
    inputs.sinks.as_ref().map(|sinks| by_line(tensor(sinks))).unwrap_or_default()
}

/// Permutes the strides of `[line, sink, 1, 1]`: lines as heads, sinks as rows.
pub(crate) fn by_line(tensor: TensorArgument) -> TensorArgument {
    let [line, sink, ..] = tensor.strides;
    TensorArgument { strides: [0, sink, line, 0], ..tensor }
}

/// Adds the sinks, normalizes, rounds, and writes out and statistics.
pub(crate) fn finish(
    context: &PassContext,
    state: &ForwardState,
    inputs: &Inputs<View<'_, CudaSpace>>,
    outputs: &mut Outputs<ViewMut<'_, CudaSpace>>,
) -> Result<()> {
    let RowOutputs { lse, max, sum } = RowOutputs::new(outputs);
    let ties = outputs.ties.as_ref().map(|ties| by_head(tensor_mut(ties)));
    let arguments = RowArguments {
        out: tensor_mut(&outputs.out),
        lse,
        max,
        sum,
        ties: ties.unwrap_or_default(),
        sinks: sinks_of(inputs),
        acc: state.acc.address(),
        row_max: state.max.address(),
        row_sum: state.sum.address(),
        row_ties: state.ties.address(),
        ..row_arguments(context)?
    };
    let kernel = &context.kernels.finish_forward;
    // SAFETY: the engine has validated every tensor's shape; memory is freed only after queued
    // work.
    unsafe { kernel.launch(&context.stream, grid_of_rows(context), THREADS, &arguments) }
}
