//! Beginning and end of the backward pass: `begin_backward` and `sink_gradient` of `kernels/ends.cuh`, and copies.

use annulus_core::{Dims, Gradients, Inputs, Result, Saved};
use annulus_device_cuda::{CudaBuffer, CudaSpace, CudaView};

use crate::{
    Cuda,
    arguments::{Ends, Fill, by_head, dense, field, tensor, tensor_mut},
    finish::{by_line, ends, grid_of_rows, sinks_of},
    kernels::THREADS,
    records::{copy, grid_of},
    workspace::Workspace,
};

/// Row statistics; dq, dbias ← 0.
pub(crate) fn begin(cuda: &Cuda, workspace: &Workspace, saved: &Saved<'_, CudaSpace>) -> Result<()> {
    let state = workspace.backward()?;
    let rows = |view: &Option<CudaView<'_>>| view.as_ref().map(|view| by_head(tensor(view))).unwrap_or_default();
    let arguments = Ends {
        out: tensor(&saved.out),
        dout: tensor(&saved.dout),
        lse: by_head(tensor(&saved.lse)),
        max: rows(&saved.max),
        ties: rows(&saved.ties),
        dlse: rows(&saved.dlse),
        statistics: workspace.own_statistics()?,
        ..ends(workspace)?
    };
    // SAFETY: every address is that of memory which the engine has checked to be large enough for these shapes, and which is freed only after
    // queued work.
    unsafe { workspace.kernels.begin_backward.launch(cuda.stream(), grid_of_rows(workspace), THREADS, &arguments)? };
    let bytes = workspace.sums().bytes() as u64;
    for buffer in [Some(&state.dq), state.dbias.as_ref()].into_iter().flatten() {
        let count = buffer.len() / bytes;
        let arguments = Fill { at: buffer.address(), count, value: 0.0 };
        // SAFETY: the buffer holds so many sums, and is freed only after queued work.
        unsafe { workspace.kernels.fill_sums.launch(cuda.stream(), grid_of(count), THREADS, &arguments)? };
    }
    Ok(())
}

/// Writes the gradients.
pub(crate) fn finish(
    cuda: &Cuda,
    workspace: &Workspace,
    inputs: &Inputs<'_, CudaSpace>,
    home: &CudaBuffer,
    gradients: &mut Gradients<'_, CudaSpace>,
) -> Result<()> {
    let (state, kernels, spec) = (workspace.backward()?, &workspace.kernels, &workspace.local.spec);
    let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = spec.dims;
    let (queries, keys, bytes) = (workspace.queries(), workspace.local.keys.len(), workspace.sums().bytes());
    let dq = dense(state.dq.address(), queries, q_heads, head_dim);
    copy(cuda, &kernels.round_sums, dq, tensor_mut(&gradients.dq), [batch, queries, q_heads, head_dim])?;
    let record = spec.gradient_record();
    let [dk, dv] = [0, 1].map(|place| field(home.address(), &record, place, bytes));
    copy(cuda, &kernels.round_sums, dk, tensor_mut(&gradients.dk), [batch, keys, kv_heads, head_dim])?;
    copy(cuda, &kernels.round_sums, dv, tensor_mut(&gradients.dv), [batch, keys, kv_heads, value_dim])?;
    if let (Some(view), Some(sums), Some([batch, heads, rows, keys])) = (&gradients.dbias, &state.dbias, workspace.bias_shape()) {
        copy(cuda, &kernels.copy_sums, dense(sums.address(), heads, rows, keys), tensor_mut(view), [batch, heads, rows, keys])?;
    }
    if let Some(view) = &gradients.dsinks {
        let arguments = Ends {
            sinks: sinks_of(inputs),
            dsinks: by_line(tensor_mut(view)),
            statistics: workspace.own_statistics()?,
            ..ends(workspace)?
        };
        let grid = [u64::from(arguments.sinks_count), u64::from(arguments.sinks_lines), 1];
        // SAFETY: every address is that of memory which the engine has checked to be large enough for these shapes, and which is freed only
        // after queued work.
        unsafe { kernels.sink_gradient.launch(cuda.stream(), grid, THREADS, &arguments)? };
    }
    cuda.after(&[home]).map(|_| ())
}
