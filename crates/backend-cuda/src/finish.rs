//! The end of a row: `finish_forward` of `kernels/ends.cuh`.

use annulus_core::{Inputs, Outputs, Result};
use annulus_device_cuda::CudaSpace;

use crate::{
    Cuda,
    arguments::{Ends, UNNORMALIZED, by_head, tensor, tensor_mut},
    kernels::THREADS,
    sight::narrow,
    workspace::Workspace,
};

/// Rows a block of threads: a warp each.
const ROWS: u64 = 8;

/// Blocks of threads for a kernel that works a warp a row.
pub(crate) fn grid_of_rows(workspace: &Workspace) -> [u64; 3] {
    let dims = &workspace.local.spec.dims;
    [((dims.batch * dims.q_heads * workspace.queries()) as u64).div_ceil(ROWS), 1, 1]
}

/// What every kernel of rows is given.
pub(crate) fn ends(workspace: &Workspace) -> Result<Ends> {
    let spec = &workspace.local.spec;
    Ok(Ends {
        acc: workspace.acc.address(),
        row_max: workspace.max.address(),
        row_sum: workspace.sum.address(),
        row_ties: workspace.ties.address(),
        queries: narrow(workspace.queries())?,
        batches: narrow(spec.dims.batch)?,
        q_heads: narrow(spec.dims.q_heads)?,
        value_dim: narrow(spec.dims.value_dim)?,
        sinks_count: narrow(spec.sinks.map_or(0, |sinks| sinks.count))?,
        sinks_lines: spec.sinks.map_or(Ok(0), |sinks| narrow(if sinks.per_head { spec.dims.q_heads } else { 1 }))?,
        flags: if spec.normalize { 0 } else { UNNORMALIZED },
        ..Ends::default()
    })
}

/// A caller's sinks `[line, sink, 1, 1]`: lines as heads, sinks as rows.
pub(crate) fn sinks_of(inputs: &Inputs<'_, CudaSpace>) -> crate::arguments::Tensor {
    inputs.sinks.as_ref().map(|sinks| by_line(tensor(sinks))).unwrap_or_default()
}

/// `[line, sink, 1, 1]` with lines as heads and sinks as rows.
pub(crate) fn by_line(tensor: crate::arguments::Tensor) -> crate::arguments::Tensor {
    let [line, sink, ..] = tensor.strides;
    crate::arguments::Tensor { strides: [0, sink, line, 0], ..tensor }
}

/// Folds in the sinks, divides, rounds, writes.
pub(crate) fn finish(
    cuda: &Cuda,
    workspace: &Workspace,
    inputs: &Inputs<'_, CudaSpace>,
    outputs: &mut Outputs<'_, CudaSpace>,
) -> Result<()> {
    let rows =
        |view: &Option<annulus_device_cuda::CudaViewMut<'_>>| view.as_ref().map(|view| by_head(tensor_mut(view))).unwrap_or_default();
    let arguments = Ends {
        out: tensor_mut(&outputs.out),
        lse: by_head(tensor_mut(&outputs.lse)),
        max: rows(&outputs.max),
        sum: rows(&outputs.sum),
        ties: rows(&outputs.ties),
        sinks: sinks_of(inputs),
        ..ends(workspace)?
    };
    // SAFETY: every address is that of memory which the engine has checked to be large enough for these shapes, and which is freed only after
    // queued work.
    unsafe { workspace.kernels.finish_forward.launch(cuda.stream(), grid_of_rows(workspace), THREADS, &arguments) }
}
