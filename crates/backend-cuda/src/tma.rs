//! Tensor maps of the operands and outputs of the warpgroup kernels, for TMA.

use annulus_core::Result;
use annulus_device_cuda::{Device, TensorMap};

use crate::arguments::Tensor;

/// Bytes of an element: the warpgroup kernels serve 16-bit types only.
const ELEMENT: u64 = 2;

/// Stride of an axis of length 1, in bytes: TMA does not use it, but it must be a positive multiple
/// of 16.
const UNUSED_STRIDE: u64 = 16;

/// True if TMA can read or write a caller's tensor of 16-bit elements with `shape` rows, heads and
/// batch rows: contiguous dims, and rows, heads and batch rows at multiples of 16 bytes. An axis of
/// length 1 has stride 0 ([`crate::arguments`]).
pub(crate) fn is_tma_readable(tensor: &Tensor, shape: [u32; 3]) -> bool {
    let [batch, row, head, dim] = tensor.strides;
    let [rows, heads, batches] = shape;
    let fits = |stride: i64, length: u32| {
        length == 1 || (stride > 0 && stride % 8 == 0 && stride < 1 << 39)
    };
    (dim == 1 || dim == 0)
        && tensor.at.is_multiple_of(16)
        && fits(row, rows)
        && fits(head, heads)
        && fits(batch, batches)
}

/// Encodes the tensor map of a tensor with `shape` rows, heads and batch rows, in boxes of `rows`
/// rows.
pub(crate) fn tma_boxes(
    device: &Device,
    tensor: &Tensor,
    dim: u32,
    shape: [u32; 3],
    rows: u32,
) -> Result<TensorMap> {
    let [batch, row, head, _] = tensor.strides;
    let in_bytes = |stride: i64| match stride.cast_unsigned() * ELEMENT {
        0 => UNUSED_STRIDE,
        bytes => bytes,
    };
    let [rows_of, heads, batches] = shape.map(u64::from);
    let lengths = [u64::from(dim), rows_of, heads, batches];
    TensorMap::new(device, tensor.at, lengths, [row, head, batch].map(in_bytes), rows)
}
