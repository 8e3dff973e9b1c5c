//! Forward on warpgroups: `kernels/forward_warpgroup.cuh`, with tensor maps of K and V for TMA.

use annulus_core::{Result, Spec};
use annulus_device_cuda::{CudaView, Device, Stream, TensorMap};

use crate::{
    arguments::{Attention, Tensor, WarpgroupAttention},
    kernels::{WarpgroupKernels, needs_epilogue},
};

/// Stride of an axis of length 1, in bytes: a stride of TMA is a positive multiple of 16.
const UNUSED_STRIDE: u64 = 16;

/// True if TMA can read a caller's K or V: its elements are contiguous along dims, and address and
/// other strides are multiples of 16 bytes.
pub(crate) fn is_readable_by_tma(view: &CudaView<'_>) -> bool {
    let bytes = view.dtype().bytes() as i64;
    let shape = view.shape();
    let mut strides = view.strides();
    let contiguous = shape[3] == 1 || strides[3] == 1;
    strides[3] = 0;
    let is_readable = |(stride, len): (i64, usize)| {
        len == 1 || (stride > 0 && stride < (1 << 40) / bytes && stride * bytes % 16 == 0)
    };
    contiguous
        && view.address().is_multiple_of(16)
        && strides.into_iter().zip([shape[0], shape[1], shape[2]]).all(is_readable)
}

/// Attends to one block of keys, stored as records or [readable](is_readable_by_tma) in the
/// caller's tensors. Strides of records are multiples of 16 bytes: see
/// [`crate::Variant::on_warpgroups`].
pub(crate) fn launch(
    stream: &Stream,
    kernels: &WarpgroupKernels,
    attention: &Attention,
    spec: &Spec,
    grid: [u64; 3],
) -> Result<()> {
    let device = stream.device();
    let [_, rows] = kernels.variant.tile();
    let map = |tensor: &Tensor, dim| {
        tma_boxes(device, tensor, attention, dim, rows, spec.dtype.bytes() as u64)
    };
    let arguments = WarpgroupAttention {
        k_map: map(&attention.k, attention.head_dim)?,
        v_map: map(&attention.v, attention.value_dim)?,
        attention: *attention,
    };
    let epilogue = kernels.with_epilogue.as_ref().filter(|_| needs_epilogue(spec));
    let kernel = epilogue.unwrap_or(&kernels.forward);
    // SAFETY: the engine has validated every tensor's shape; memory is freed only after queued
    // work.
    unsafe { kernel.launch(stream, grid, WarpgroupKernels::THREADS, &arguments) }
}

/// Encodes the tensor map of K or V, with boxes of `rows` rows.
fn tma_boxes(
    device: &Device,
    tensor: &Tensor,
    attention: &Attention,
    dim: u32,
    rows: usize,
    element: u64,
) -> Result<TensorMap> {
    let in_bytes = |stride: i64| match stride.cast_unsigned() * element {
        0 => UNUSED_STRIDE,
        bytes => bytes,
    };
    let [batch, row, head, _] = tensor.strides.map(in_bytes);
    let lengths = [dim, attention.keys, attention.kv_heads, attention.batches].map(u64::from);
    TensorMap::new(device, tensor.at, lengths, [row, head, batch], crate::block_mask::to_u32(rows)?)
}
