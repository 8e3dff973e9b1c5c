//! The forward pass on warpgroups: `kernels/forward_warpgroup.cuh`, with what the copy engine must know of keys and values.

use annulus_core::{Result, Spec};
use annulus_device_cuda::{Device, TensorMap};

use crate::{
    Cuda,
    arguments::{Attention, Tensor, WarpgroupAttention},
    kernels::WarpgroupKernels,
};

/// Folds in one block of keys, which lies in records: rows at multiples of 16 bytes, as [`crate::Variant::on_warpgroups`] has made sure.
pub(crate) fn attend(cuda: &Cuda, kernels: &WarpgroupKernels, attention: &Attention, spec: &Spec, grid: [u64; 3]) -> Result<()> {
    let device = cuda.stream().device();
    let [_, rows] = kernels.variant.tile();
    let map = |tensor: &Tensor, dim| boxes(device, tensor, attention, dim, rows, spec.dtype.bytes() as u64);
    let arguments = WarpgroupAttention {
        first: map(&attention.k, attention.head_dim)?,
        second: map(&attention.v, attention.value_dim)?,
        attention: *attention,
    };
    // SAFETY: every address is that of memory which the engine has checked to be large enough for these shapes, and which is freed only after
    // queued work.
    unsafe { kernels.forward.launch(cuda.stream(), grid, WarpgroupKernels::THREADS, &arguments) }
}

/// Keys or values as boxes of so many rows.
fn boxes(device: &Device, tensor: &Tensor, attention: &Attention, dim: u32, rows: usize, element: u64) -> Result<TensorMap> {
    let [batch, row, head, _] = tensor.strides.map(|stride| stride.cast_unsigned() * element);
    let lengths = [dim, attention.keys, attention.kv_heads, attention.batches].map(u64::from);
    TensorMap::new(device, tensor.at, lengths, [row, head, batch], crate::sight::narrow(rows)?)
}
