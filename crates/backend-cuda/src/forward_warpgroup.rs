//! Forward on warpgroups: `kernels/forward_warpgroup.cuh`, with tensor maps of K and V for TMA.

use annulus_core::{Result, Spec};
use annulus_device_cuda::{CudaView, Device, TensorMap};

use crate::{
    arguments::{Attention, Tensor, WRITE_OUTPUTS, WarpgroupAttention},
    backward_warpgroup::{is_tma_readable, tma_boxes_of},
    block_mask::to_u32,
    kernels::{WarpgroupKernels, needs_epilogue},
    pass_context::PassContext,
};

/// Stride of an axis of length 1, in bytes: a stride of TMA is a positive multiple of 16.
const UNUSED_STRIDE: u64 = 16;

/// Rows of a box of outputs: those of a consumer, `Q_ROWS` of `kernels/warpgroup.cuh`.
const OUTPUT_ROWS: u32 = 64;

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
/// [`crate::Variant::on_warpgroups`]. `order` is the address of
/// [`crate::block_mask::BlockMask::order`].
pub(crate) fn launch(
    context: &PassContext,
    kernels: &WarpgroupKernels,
    attention: &Attention,
    order: u64,
) -> Result<()> {
    let device = context.stream.device();
    let spec = context.spec();
    let [_, rows] = kernels.variant.tile();
    let map = |tensor: &Tensor, dim| {
        tma_boxes(device, tensor, attention, dim, rows, spec.dtype.bytes() as u64)
    };
    let Attention { queries, q_heads, batches, value_dim, packed_heads, .. } = *attention;
    let out_shape = [queries, q_heads, batches];
    let stores_by_tma = attention.flags & WRITE_OUTPUTS != 0
        && packed_heads == 1
        && is_tma_readable(&attention.out, out_shape);
    let out_map = if stores_by_tma {
        tma_boxes_of(device, &attention.out, value_dim, out_shape, OUTPUT_ROWS)?
    } else {
        TensorMap::UNUSED
    };
    let groups = u64::from(q_heads / packed_heads) * u64::from(batches);
    let tiles = u64::from(attention.block_mask.lists) * groups;
    let arguments = WarpgroupAttention {
        k_map: map(&attention.k, attention.head_dim)?,
        v_map: map(&attention.v, value_dim)?,
        out_map,
        attention: *attention,
        order,
        counter: context.tile_counter()?,
        tiles: to_u32(tiles as usize)?,
        section: section(attention, spec, device.l2_bytes() / 2, groups),
        stores_by_tma: stores_by_tma.into(),
        reserved: 0,
    };
    let epilogue = kernels.with_epilogue.as_ref().filter(|_| needs_epilogue(spec));
    let kernel = epilogue.unwrap_or(&kernels.forward);
    let grid = [tiles.min(kernels.blocks as u64), 1, 1];
    // SAFETY: the engine has validated every tensor's shape; memory is freed only after queued
    // work.
    unsafe { kernel.launch(&context.stream, grid, WarpgroupKernels::THREADS, &arguments) }
}

/// Groups of packed heads in a section of the tile scheduler, of `groups` in all: those of as many
/// KV heads as have their keys and values in `most_bytes` together.
fn section(attention: &Attention, spec: &Spec, most_bytes: u64, groups: u64) -> u32 {
    let Attention { keys, head_dim, value_dim, q_heads, kv_heads, packed_heads, .. } = *attention;
    let dims = u64::from(head_dim) + u64::from(value_dim);
    let bytes = (u64::from(keys) * dims * spec.dtype.bytes() as u64).max(1);
    let of_kv_head = u64::from(q_heads / kv_heads / packed_heads);
    // at most the number of tiles, which is a u32
    ((most_bytes / bytes).max(1) * of_kv_head).min(groups) as u32
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
