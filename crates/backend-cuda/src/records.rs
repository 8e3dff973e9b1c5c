//! Tensors to records and back, and sums of gradient records: `kernels/records.cuh`.

use std::ops::Range;

use annulus_core::{Dims, Error, Inputs, Result, Saved, Spec};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event, Kernel};

use crate::{
    Cuda,
    arguments::{Combine, Copy, Tensor, field, tensor},
    kernels::THREADS,
    sight::narrow,
    workspace::Workspace,
};

/// The most blocks of a kernel whose threads go through elements in strides.
const MOST_BLOCKS: u64 = 4096;

/// Blocks for so many elements.
pub(crate) fn grid_of(elements: u64) -> [u64; 3] {
    [elements.div_ceil(u64::from(THREADS)).min(MOST_BLOCKS), 1, 1]
}

/// One tensor to another of the shape `[batch, rows, heads, dim]`.
pub(crate) fn copy(cuda: &Cuda, kernel: &Kernel, from: Tensor, to: Tensor, shape: [usize; 4]) -> Result<()> {
    let elements = shape.iter().map(|&len| len as u64).product();
    let mut lengths = [0; 4];
    for (length, &len) in lengths.iter_mut().zip(&shape) {
        *length = narrow(len)?;
    }
    // SAFETY: both tensors have this shape, as the engine has checked, and are freed only after queued work.
    unsafe { kernel.launch(cuda.stream(), grid_of(elements), THREADS, &Copy { from, to, shape: lengths }) }
}

/// This rank's keys and values, in wire order.
pub(crate) fn pack(cuda: &Cuda, workspace: &Workspace, inputs: &Inputs<'_, CudaSpace>, into: &CudaBuffer) -> Result<Event> {
    let spec = &workspace.local.spec;
    let Dims { batch, kv_heads, head_dim, value_dim, .. } = spec.dims;
    let (record, bytes, rows) = (spec.kv_record(), spec.dtype.bytes(), workspace.local.keys.len());
    into.wait_on(cuda.stream())?;
    for (place, (view, dim)) in [(&inputs.k, head_dim), (&inputs.v, value_dim)].into_iter().enumerate() {
        let to = field(into.address(), &record, place, bytes);
        copy(cuda, &workspace.kernels.copy_elements, tensor(view), to, [batch, rows, kv_heads, dim])?;
    }
    cuda.after(&[into])
}

/// This rank's queries, in wire order.
pub(crate) fn pack_queries(
    cuda: &Cuda,
    workspace: &Workspace,
    inputs: &Inputs<'_, CudaSpace>,
    saved: &Saved<'_, CudaSpace>,
    into: &CudaBuffer,
) -> Result<Event> {
    let spec = &workspace.local.spec;
    let Dims { batch, q_heads, head_dim, value_dim, .. } = spec.dims;
    let (record, bytes, rows) = (spec.query_record(), spec.dtype.bytes(), workspace.queries());
    into.wait_on(cuda.stream())?;
    for (place, (view, dim)) in [(&inputs.q, head_dim), (&saved.dout, value_dim)].into_iter().enumerate() {
        let to = field(into.address(), &record, place, bytes);
        copy(cuda, &workspace.kernels.copy_elements, tensor(view), to, [batch, rows, q_heads, dim])?;
    }
    // a record's statistics may lie at any even address
    let (from, to) = (workspace.own_statistics()?, field(into.address(), &record, 2, 2));
    copy(cuda, &workspace.kernels.copy_statistics, from, to, [batch, rows, q_heads, Spec::ROW_STATISTICS])?;
    cuda.after(&[into])
}

/// Gradient records to gradient records, added or written.
pub(crate) fn combine(
    cuda: &Cuda,
    workspace: &mut Workspace,
    into: &CudaBuffer,
    from: &CudaBuffer,
    ready: &Event,
    places: &[(Range<u64>, Range<u64>)],
    add: bool,
) -> Result<Event> {
    let record = workspace.local.spec.gradient_record();
    let mut words = Vec::with_capacity(3 * places.len());
    for (to, source) in places {
        let inside = |range: &Range<u64>, buffer: &CudaBuffer| range.end * record.bytes() <= buffer.len();
        if to.end - to.start != source.end - source.start || !inside(to, into) || !inside(source, from) {
            return Err(Error::invalid("places", format!("{source:?} to {to:?}"), "ranges of one length within their buffers"));
        }
        words.extend([to.start, source.start, to.end - to.start]);
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    if workspace.places.len() < bytes.len() as u64 {
        workspace.places = CudaBuffer::new(cuda.stream().device(), bytes.len() as u64)?;
    }
    cuda.stream().wait_for(ready)?;
    into.wait_on(cuda.stream())?;
    // SAFETY: the buffer is large enough, and only this stream touches it, in order.
    unsafe { cuda.stream().copy_to_device(workspace.places.address(), &bytes)? };
    let arguments = Combine {
        to: into.address(),
        from: from.address(),
        places: workspace.places.address(),
        record: record.bytes() / workspace.sums().bytes() as u64,
        add: add.into(),
        reserved: 0,
    };
    // SAFETY: the ranges were checked against the buffers, which are freed only after queued work.
    unsafe { workspace.kernels.combine_records.launch(cuda.stream(), [places.len() as u64, 1, 1], THREADS, &arguments)? };
    cuda.after(&[into, from])
}
