//! The end of the forward pass: sinks are folded in, rows are divided, rounded once and written. The kernels are `kernels/finish_rows.wgsl` and
//! `kernels/copy.wgsl`.

use annulus_core::{Inputs, Outputs, Result};

use crate::{
    copy::{Copy, Layout, Side, bind_whole, rounding},
    device::Gpu,
    kernels::{Variant, numbers::RowNumbers},
    launch::{Bound, Job},
    memory::WgpuSpace,
    workspace::Workspace,
};

/// Writes the outputs.
pub(crate) fn finish(
    gpu: &Gpu,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, WgpuSpace>,
    outputs: &mut Outputs<'_, WgpuSpace>,
) -> Result<()> {
    let Workspace { local, storage, arena, acc, running, .. } = workspace;
    let (spec, dims, rows) = (&local.spec, local.spec.dims, local.queries.len());
    let mut job = Job::new(gpu, arena);
    let items = (dims.batch * rows * dims.q_heads) as u64;
    let mut bindings =
        vec![Bound::whole(&running.buffer), bind_whole(inputs.sinks.map(|sinks| &sinks.buffer)), Bound::whole(&outputs.lse.buffer)];
    if !spec.normalize {
        for view in [&outputs.max, &outputs.sum, &outputs.ties] {
            bindings.push(bind_whole(view.as_ref().map(|view| &view.buffer)));
        }
    }
    let sinks = spec.sinks;
    job.launch(Variant::FinishRows { normalize: spec.normalize }, items.div_ceil(64), bindings, |grid_width| RowNumbers {
        count: items as u32,
        grid_width,
        all_rows: rows as u32,
        heads: dims.q_heads as u32,
        sinks: sinks.map_or(0, |sinks| sinks.count as u32),
        sinks_head: sinks.filter(|sinks| sinks.per_head).map_or(0, |sinks| sinks.count as u32),
        ..RowNumbers::default()
    })?;
    let vectors = Layout::dense(rows, dims.q_heads, dims.value_dim);
    let copy = Copy {
        from: Side { buffer: &acc.buffer, layout: vectors, bytes: 4 },
        into: Side { buffer: &outputs.out.buffer, layout: vectors, bytes: storage.bytes() },
        batches: dims.batch as u64,
        rows: rows as u64,
        heads: dims.q_heads as u64,
        dim: dims.value_dim as u64,
        copying: rounding(*storage, true),
        factor: 1.0,
        factors: Some(Side { buffer: &running.buffer, layout: Layout::dense(rows, dims.q_heads, 4), bytes: 4 }),
    };
    copy.launch(gpu, &mut job)?;
    job.submit()
}
