//! Blocks in wire order: this rank's rows written as records, and sums of gradient records.

use std::ops::Range;

use annulus_core::{Inputs, Record, Result, Saved};

use crate::{
    copy::{Copy, Layout, Line, Side, launch_line},
    device::Gpu,
    kernels::Copying,
    launch::Job,
    memory::{GpuBuffer, Tensor, WgpuSpace},
    workspace::Workspace,
};

/// Adds the copy of a tensor into field `field` of records.
fn launch_field(gpu: &Gpu, job: &mut Job<'_>, tensor: &Tensor, record: &Record, field: usize, into: &GpuBuffer) -> Result<()> {
    let [batch, rows, heads, dim] = tensor.shape;
    let bytes = tensor.dtype.bytes() as u64;
    let copy = Copy {
        from: Side { buffer: &tensor.buffer, layout: Layout::dense(rows, heads, dim), bytes },
        into: Side { buffer: &into.buffer, layout: Layout::records(record, field, bytes), bytes },
        batches: batch as u64,
        rows: rows as u64,
        heads: heads as u64,
        dim: dim as u64,
        copying: Copying::Raw { half: bytes == 2 },
        factor: 1.0,
        factors: None,
    };
    copy.launch(gpu, job)
}

/// Writes k and v as records of [`annulus_core::Spec::kv_record`].
pub(crate) fn pack(gpu: &Gpu, workspace: &mut Workspace, inputs: &Inputs<'_, WgpuSpace>, into: &GpuBuffer) -> Result<()> {
    let record = workspace.local.spec.kv_record();
    let mut job = Job::new(gpu, &mut workspace.arena);
    launch_field(gpu, &mut job, inputs.k, &record, 0, into)?;
    launch_field(gpu, &mut job, inputs.v, &record, 1, into)?;
    job.submit()
}

/// Writes q, dout and row statistics as records of [`annulus_core::Spec::query_record`].
pub(crate) fn pack_queries(
    gpu: &Gpu,
    workspace: &mut Workspace,
    inputs: &Inputs<'_, WgpuSpace>,
    saved: &Saved<'_, WgpuSpace>,
    into: &GpuBuffer,
) -> Result<()> {
    let (record, rows) = (workspace.local.spec.query_record(), workspace.local.queries.len());
    let dims = workspace.local.spec.dims;
    let statistics = workspace.sums()?.statistics.buffer.clone();
    let bytes = workspace.storage.bytes();
    let mut job = Job::new(gpu, &mut workspace.arena);
    launch_field(gpu, &mut job, inputs.q, &record, 0, into)?;
    launch_field(gpu, &mut job, saved.dout, &record, 1, into)?;
    // f32 numbers, of which records of 2-byte elements may put the halves into different words
    let numbers = annulus_core::Spec::ROW_STATISTICS * annulus_core::index(4 / bytes);
    let copy = Copy {
        from: Side { buffer: &statistics, layout: Layout::dense(rows, dims.q_heads, numbers), bytes },
        into: Side { buffer: &into.buffer, layout: Layout::records(&record, 2, bytes), bytes },
        batches: dims.batch as u64,
        rows: rows as u64,
        heads: dims.q_heads as u64,
        dim: numbers as u64,
        copying: Copying::Raw { half: bytes == 2 },
        factor: 1.0,
        factors: None,
    };
    copy.launch(gpu, &mut job)?;
    job.submit()
}

/// `into[place] ← from[place]`, or `+=`, for gradient records.
pub(crate) fn combine(
    gpu: &Gpu,
    workspace: &mut Workspace,
    into: &GpuBuffer,
    from: &GpuBuffer,
    places: &[(Range<u64>, Range<u64>)],
    add: bool,
) -> Result<()> {
    let words = workspace.local.spec.gradient_record().bytes() / 4;
    let copying = if add { Copying::Added } else { Copying::Raw { half: false } };
    let mut job = Job::new(gpu, &mut workspace.arena);
    for (to, source) in places.iter().filter(|(to, _)| !to.is_empty()) {
        let line = Line { from: source.start * words, into: to.start * words, count: (to.end - to.start) * words };
        launch_line(gpu, &mut job, &from.buffer, &into.buffer, line, 4, copying)?;
    }
    job.submit()
}
