//! Operands of the tile kernels in the layouts that passes have: dense tensors, dense f32 buffers,
//! wire records, biases.

use crate::{
    copy::Layout,
    memory::Tensor,
    tiles::{Operand, RowsOf},
};

/// Operand for a dense tensor.
pub(crate) fn tensor(tensor: &Tensor, rows: RowsOf) -> Operand<'_> {
    let [_, len, heads, dim] = tensor.shape;
    let layout = Layout::dense(len, heads, dim);
    Operand { buffer: Some(&tensor.buffer), layout, dim, bytes: tensor.dtype.bytes() as u64, rows }
}

/// Operand for a dense f32 buffer `[b, rows, heads, dim]` of queries.
pub(crate) const fn floats(
    buffer: &wgpu::Buffer,
    rows: usize,
    heads: usize,
    dim: usize,
) -> Operand<'_> {
    Operand {
        buffer: Some(buffer),
        layout: Layout::dense(rows, heads, dim),
        dim,
        bytes: 4,
        rows: RowsOf::Queries,
    }
}

/// Operand for field `field` of records.
pub(crate) fn records<'a>(
    buffer: Option<&'a wgpu::Buffer>,
    record: &annulus_core::RowLayout,
    field: usize,
    bytes: u64,
    rows: RowsOf,
) -> Operand<'a> {
    let annulus_core::RowField { dim, dtype, .. } = record.fields()[field];
    let scale = annulus_core::index(dtype.bytes() as u64 / bytes);
    Operand { buffer, layout: Layout::records(record, field, bytes), dim: dim * scale, bytes, rows }
}

/// Operand for a bias `[b|1, heads|1, rows|1, keys|1]`, one vector per query row.
pub(crate) fn bias(buffer: Option<&wgpu::Buffer>, shape: [usize; 4], rows: usize) -> Operand<'_> {
    let [batches, heads, queries, keys] = shape;
    let rows = if queries == 1 { 1 } else { rows as u64 };
    let distance = |len: usize, distance: u64| if len == 1 { 0 } else { distance };
    let layout = Layout {
        base: 0,
        batch: distance(batches, heads as u64 * rows * keys as u64),
        row: distance(queries, keys as u64),
        head: distance(heads, rows * keys as u64),
    };
    Operand { buffer, layout, dim: keys, bytes: 4, rows: RowsOf::Queries }
}

/// Operand for dbias: shaped as the bias, but with one number per row if it has no key axis.
pub(crate) fn dbias_operand(
    buffer: Option<&wgpu::Buffer>,
    shape: [usize; 4],
    rows: usize,
) -> Operand<'_> {
    let [batches, heads, queries, keys] = shape;
    if keys != 1 {
        return bias(buffer, shape, rows);
    }
    // one number per row, even if the bias has no query axis
    let mut acc = bias(buffer, [batches, heads, queries.max(2), 1], rows);
    acc.layout.row = 1;
    acc
}
