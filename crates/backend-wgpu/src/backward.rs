//! The beginning and the end of the backward pass. The kernels are `kernels/row_statistics.wgsl`, `kernels/copy.wgsl`, `kernels/sinks.wgsl` and
//! `kernels/bias_rows.wgsl`.

use annulus_core::{Gradients, Inputs, Result, Saved};

use crate::{
    copy::{Copy, Layout, Line, Side, Window, bind_whole, launch_line, rounding},
    device::Gpu,
    kernels::{BiasAxes, Copying, Variant, numbers::RowNumbers},
    launch::{Bound, Job, Stretch},
    memory::{GpuBuffer, WgpuSpace},
    workspace::{Sums, Workspace, bias_axes},
};

/// Computes row statistics and clears all sums.
pub(crate) fn begin(gpu: &Gpu, workspace: &mut Workspace, saved: &Saved<'_, WgpuSpace>) -> Result<()> {
    workspace.sums()?;
    let Workspace { local, storage, arena, gradients, .. } = workspace;
    let Some(Sums { dq, statistics, bias }) = gradients else { return Ok(()) };
    let (dims, rows, bytes) = (local.spec.dims, local.queries.len(), storage.bytes());
    let mut job = Job::new(gpu, arena);
    job.clear(&dq.buffer);
    bias.iter().for_each(|bias| job.clear(&bias.buffer));
    let layout = Layout::dense(rows, dims.q_heads, dims.value_dim);
    let stretch = |window: &Window| layout.stretch(window, dims.q_heads as u64, dims.value_dim as u64, bytes);
    let fits = |window: &Window| Stretch::bound_bytes(stretch(window).count, bytes, gpu.alignment()) <= gpu.most_binding();
    let whole = |view: Option<&crate::Tensor>| bind_whole(view.map(|view| &view.buffer));
    for window in Window::cut(dims.batch as u64, rows as u64, fits) {
        let (out, out_base) = stretch(&window).bind(gpu, &saved.out.buffer)?;
        let (dout, dout_base) = stretch(&window).bind(gpu, &saved.dout.buffer)?;
        let bindings = vec![
            out,
            dout,
            Bound::whole(&saved.lse.buffer),
            whole(saved.dlse),
            whole(saved.max),
            whole(saved.ties),
            Bound::whole(&statistics.buffer),
        ];
        let count = window.batches.1 * window.rows.1 * dims.q_heads as u64;
        job.launch(Variant::RowStatistics(*storage), count.div_ceil(64), bindings, |grid_width| RowNumbers {
            count: count as u32,
            grid_width,
            rows: window.rows.1 as u32,
            all_rows: rows as u32,
            row_first: window.rows.0 as u32,
            batch_first: window.batches.0 as u32,
            heads: dims.q_heads as u32,
            value_dim: dims.value_dim as u32,
            out_base,
            out_row: layout.row as u32,
            out_batch: layout.batch as u32,
            dout_base,
            normalize: u32::from(local.spec.normalize),
            has_dlse: u32::from(saved.dlse.is_some()),
            ..RowNumbers::default()
        })?;
    }
    job.submit()
}

/// Writes the gradients.
pub(crate) fn finish(
    gpu: &Gpu,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, WgpuSpace>,
    home: &GpuBuffer,
    into: &mut Gradients<'_, WgpuSpace>,
) -> Result<()> {
    workspace.sums()?;
    let Workspace { local, storage, arena, gradients, .. } = workspace;
    let Some(Sums { dq, statistics, bias }) = gradients else { return Ok(()) };
    let (spec, dims, bytes) = (&local.spec, local.spec.dims, storage.bytes());
    let (queries, keys) = (local.queries.len(), local.keys.len());
    let mut job = Job::new(gpu, arena);
    let vectors = Layout::dense(queries, dims.q_heads, dims.head_dim);
    let copy = Copy {
        from: Side { buffer: &dq.buffer, layout: vectors, bytes: 4 },
        into: Side { buffer: &into.dq.buffer, layout: vectors, bytes },
        batches: dims.batch as u64,
        rows: queries as u64,
        heads: dims.q_heads as u64,
        dim: dims.head_dim as u64,
        copying: rounding(*storage, false),
        factor: spec.scale as f32,
        factors: None,
    };
    copy.launch(gpu, &mut job)?;
    let record = spec.gradient_record();
    for (field, tensor, dim) in [(0, &into.dk, dims.head_dim), (1, &into.dv, dims.value_dim)] {
        let copy = Copy {
            from: Side { buffer: &home.buffer, layout: Layout::records(&record, field, 4), bytes: 4 },
            into: Side { buffer: &tensor.buffer, layout: Layout::dense(keys, dims.kv_heads, dim), bytes },
            rows: keys as u64,
            heads: dims.kv_heads as u64,
            dim: dim as u64,
            factor: 1.0,
            ..copy
        };
        copy.launch(gpu, &mut job)?;
    }
    if let (Some(shape), Some(sums), Some(dbias)) = (spec.bias, &bias, &into.dbias) {
        let [batches, heads, of_queries, _] = shape;
        let lines = (batches * heads) as u64;
        if bias_axes(shape) == BiasAxes::Queries && of_queries == 1 {
            let bindings = vec![Bound::whole(&sums.buffer), Bound::whole(&dbias.buffer)];
            job.launch(Variant::BiasRows, lines, bindings, |grid_width| RowNumbers {
                count: lines as u32,
                grid_width,
                all_rows: queries as u32,
                ..RowNumbers::default()
            })?;
        } else {
            let count = dbias.shape.iter().map(|&len| len as u64).product();
            let line = Line { from: 0, into: 0, count };
            launch_line(gpu, &mut job, &sums.buffer, &dbias.buffer, line, 4, Copying::Raw { half: false })?;
        }
    }
    if let (Some(shape), Some(sinks), Some(dsinks)) = (spec.sinks, inputs.sinks, &into.dsinks) {
        let count = (shape.count * if shape.per_head { dims.q_heads } else { 1 }) as u64;
        let bindings = vec![Bound::whole(&statistics.buffer), Bound::whole(&sinks.buffer), Bound::whole(&dsinks.buffer)];
        job.launch(Variant::Sinks, count, bindings, |grid_width| RowNumbers {
            count: count as u32,
            grid_width,
            all_rows: (dims.batch * queries) as u32,
            heads: dims.q_heads as u32,
            sinks: shape.count as u32,
            sinks_head: u32::from(shape.per_head),
            normalize: u32::from(spec.normalize),
            ..RowNumbers::default()
        })?;
    }
    job.submit()
}
