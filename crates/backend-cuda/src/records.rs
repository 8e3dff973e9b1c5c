//! Copies between tensors and wire records, and sums of gradient records: `kernels/records.cuh`.

use std::ops::Range;

use annulus_core::{
    BackwardInputs, Block, Dims, Error, Inputs, RangePairs, Reduction, Result, RowLayout, RowSet,
    Spec, View,
};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event};

use crate::{
    arguments::{Combine, CopyArguments, TensorArgument, field, is_tma_readable, tensor},
    block_mask::{lengths, to_u32},
    kernels::{MAX_BLOCKS, THREADS, grid_of},
    pass_context::PassContext,
};

/// Copies a tensor to another of the shape `[batch, rows, heads, dim]`.
pub(crate) fn copy(
    context: &PassContext,
    kernel: &str,
    from: TensorArgument,
    to: TensorArgument,
    shape: [usize; 4],
) -> Result<()> {
    let elements = shape.iter().map(|&len| len as u64).product();
    let arguments = CopyArguments { from, to, shape: lengths(shape)? };
    // SAFETY: the engine has checked both tensors against this shape.
    unsafe { context.launch(kernel, grid_of(elements), &arguments) }
}

/// True if kernels read K and V of this rank where the caller has them: no other rank reads a
/// record, and TMA can read them if the kernels do so (`by_tma`).
pub(crate) fn can_read_in_place(
    context: &PassContext,
    inputs: &Inputs<View<'_, CudaSpace>>,
    sent: &RowSet,
    by_tma: bool,
) -> Result<bool> {
    let Dims { batch, kv_heads, .. } = context.spec().dims;
    let shape = [to_u32(context.shard.keys.len())?, to_u32(kv_heads)?, to_u32(batch)?];
    let is_readable = |view| !by_tma || is_tma_readable(&tensor(view), shape);
    Ok(sent.is_empty() && [&inputs.k, &inputs.v].into_iter().all(is_readable))
}

/// Describes K and V of a block: its records or, of local keys `in_place`, the inputs.
pub(crate) fn kv_operands(
    context: &PassContext,
    inputs: &Inputs<View<'_, CudaSpace>>,
    kv: &Block<'_, CudaSpace>,
    in_place: bool,
) -> [TensorArgument; 2] {
    let spec = context.spec();
    if let Some(first) = kv.first_local.filter(|_| in_place) {
        return [&inputs.k, &inputs.v].map(|view| {
            let TensorArgument { at, strides } = tensor(view);
            let bytes = strides[1].wrapping_mul(first as i64 * spec.dtype.bytes() as i64);
            TensorArgument { at: at.wrapping_add_signed(bytes), strides }
        });
    }
    let record = spec.kv_row_layout();
    [0, 1].map(|index| field(kv.buffer.address(), &record, index, spec.dtype.bytes()))
}

/// Writes this rank's K and V as records in wire order.
pub(crate) fn pack_kv(
    context: &PassContext,
    inputs: &Inputs<View<'_, CudaSpace>>,
    into: &CudaBuffer,
) -> Result<Event> {
    let Dims { batch, kv_heads, head_dim, value_dim, .. } = context.spec().dims;
    let shape = [batch, context.shard.keys.len(), kv_heads];
    let views = [(&inputs.k, head_dim), (&inputs.v, value_dim)];
    pack(context, &context.spec().kv_row_layout(), views, shape, into)?;
    context.record_use(&[into])
}

/// Writes this rank's Q, dO and row statistics as records in wire order.
pub(crate) fn pack_queries(
    context: &PassContext,
    inputs: &BackwardInputs<View<'_, CudaSpace>>,
    statistics: TensorArgument,
    into: &CudaBuffer,
) -> Result<Event> {
    let Dims { batch, q_heads, head_dim, value_dim, .. } = context.spec().dims;
    let record = context.spec().query_row_layout();
    let [batch, rows, heads] = [batch, context.queries(), q_heads];
    let views = [(&inputs.forward.q, head_dim), (&inputs.dout, value_dim)];
    pack(context, &record, views, [batch, rows, heads], into)?;
    // in 2-byte units, because a record's statistics are only 2-byte aligned
    let to = field(into.address(), &record, 2, 2);
    let shape = [batch, rows, heads, Spec::ROW_STATISTICS];
    copy(context, "copy_statistics", statistics, to, shape)?;
    context.record_use(&[into])
}

/// Writes the first two fields of records, from views of `[batch, rows, heads]` and their dims.
fn pack(
    context: &PassContext,
    record: &RowLayout,
    views: [(&View<'_, CudaSpace>, usize); 2],
    [batch, rows, heads]: [usize; 3],
    into: &CudaBuffer,
) -> Result<()> {
    into.wait_on(&context.stream)?;
    let bytes = context.spec().dtype.bytes();
    for (index, (view, dim)) in views.into_iter().enumerate() {
        let to = field(into.address(), record, index, bytes);
        copy(context, "copy_elements", tensor(view), to, [batch, rows, heads, dim])?;
    }
    Ok(())
}

/// Grid for `ranges` ranges, the longest of which has `sums` sums: blocks along x are ranges, along
/// y parts of a range.
///
/// One block for each range would leave most multiprocessors idle, because a block of a ring has
/// few ranges. A part has at least 16 sums a thread.
fn grid_of_ranges(ranges: u64, sums: u64) -> [u64; 3] {
    let parts = sums.div_ceil(16 * u64::from(THREADS));
    [ranges, parts.min(MAX_BLOCKS / ranges.max(1)).max(1), 1]
}

/// Copies or adds ranges of gradient records. The ranges are uploaded to `ranges`, which grows to
/// hold them.
pub(crate) fn reduce(
    context: &PassContext,
    ranges: &mut CudaBuffer,
    into: &CudaBuffer,
    from: &CudaBuffer,
    ready: &Event,
    pairs: &RangePairs,
    reduction: Reduction,
) -> Result<Event> {
    let record = context.spec().gradient_row_layout();
    let is_inside =
        |range: &Range<u64>, buffer: &CudaBuffer| range.end * record.bytes() <= buffer.len();
    let mut words = Vec::with_capacity(3 * pairs.len());
    for (to, source) in pairs {
        let is_valid = to.end - to.start == source.end - source.start
            && is_inside(to, into)
            && is_inside(source, from);
        if !is_valid {
            let what = "two ranges of one length within their buffers";
            return Err(Error::internal(format!("records {source:?} to {to:?} are not {what}")));
        }
        words.extend([to.start, source.start, to.end - to.start]);
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_ne_bytes()).collect();
    if ranges.len() < bytes.len() as u64 {
        *ranges = CudaBuffer::new(context.stream.device(), bytes.len() as u64)?;
    }
    context.stream.wait_for(ready)?;
    into.wait_on(&context.stream)?;
    // SAFETY: the buffer is large enough; only this stream uses it, in order.
    unsafe { context.stream.copy_to_device(ranges.address(), &bytes)? };
    let arguments = Combine {
        to: into.address(),
        from: from.address(),
        ranges: ranges.address(),
        record_sums: record.bytes() / context.sums().bytes() as u64,
        add: (reduction == Reduction::Add).into(),
        reserved: 0,
    };
    let longest = pairs.iter().map(|(to, _)| to.end - to.start).max().unwrap_or(0);
    let grid = grid_of_ranges(pairs.len() as u64, longest * arguments.record_sums);
    // SAFETY: the ranges were checked against the buffers.
    unsafe { context.launch("combine_records", grid, &arguments)? };
    context.record_use(&[into, from])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_divided_over_the_device() {
        // one long range fills the grid; a short one is one part; many ranges have one part each
        assert_eq!(grid_of_ranges(1, 1 << 30), [1, MAX_BLOCKS, 1]);
        assert_eq!(grid_of_ranges(1, 100), [1, 1, 1]);
        assert_eq!(grid_of_ranges(3, 9000), [3, 3, 1]);
        assert_eq!(grid_of_ranges(5000, 1 << 30), [5000, 1, 1]);
        assert_eq!(grid_of_ranges(2, 0), [2, 1, 1]);
    }
}
