//! Forward on warpgroups: `kernels/forward_warpgroup.cuh`, with tensor maps of K and V for TMA.

use annulus_core::{Result, Spec};
use annulus_device_cuda::{Device, Stream, TensorMap};

use crate::{
    arguments::{Attention, Tensor, WarpgroupAttention},
    kernels::WarpgroupKernels,
};

/// Attends to one block of keys, stored as records. Strides are multiples of 16 bytes: see
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
    // SAFETY: the engine has validated every tensor's shape; memory is freed only after queued
    // work.
    unsafe { kernels.forward.launch(stream, grid, WarpgroupKernels::THREADS, &arguments) }
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
    let [batch, row, head, _] = tensor.strides.map(|stride| stride.cast_unsigned() * element);
    let lengths = [dim, attention.keys, attention.kv_heads, attention.batches].map(u64::from);
    TensorMap::new(device, tensor.at, lengths, [row, head, batch], crate::block_mask::to_u32(rows)?)
}
