//! Forward on warpgroups: `kernels/forward_warpgroup.cuh`, with tensor maps of K and V for TMA.

use annulus_core::{Result, Spec};
use annulus_device_cuda::TensorMap;

use crate::{
    arguments::{Attention, WRITE_OUTPUTS, WarpgroupAttention},
    block_mask::to_u32,
    kernels::WarpgroupKernels,
    pass_context::PassContext,
    tma::{is_tma_readable, tma_boxes},
    variant::needs_epilogue,
};

/// Rows of a box of outputs: those of a consumer, `Q_ROWS` of `kernels/warpgroup.cuh`.
const OUTPUT_ROWS: u32 = 64;

/// Attends to one block of keys, stored as records or [readable](is_tma_readable) in the caller's
/// tensors. Strides of records are multiples of 16 bytes: see [`crate::Variant::on_warpgroups`].
/// `order` is the address of [`crate::block_mask::BlockMask::order`].
pub(crate) fn launch(
    context: &PassContext,
    kernels: &WarpgroupKernels,
    attention: &Attention,
    order: u64,
) -> Result<()> {
    let device = context.stream.device();
    let spec = context.spec();
    let [_, rows] = kernels.variant.tile();
    let rows = to_u32(rows)?;
    let Attention { queries, keys, q_heads, kv_heads, batches, .. } = *attention;
    let Attention { head_dim, value_dim, packed_heads, .. } = *attention;
    let kv_shape = [keys, kv_heads, batches];
    let out_shape = [queries, q_heads, batches];
    let stores_by_tma = attention.flags & WRITE_OUTPUTS != 0
        && packed_heads == 1
        && is_tma_readable(&attention.out, out_shape);
    let out_map = if stores_by_tma {
        tma_boxes(device, &attention.out, value_dim, out_shape, OUTPUT_ROWS)?
    } else {
        TensorMap::UNUSED
    };
    let groups = u64::from(q_heads / packed_heads) * u64::from(batches);
    let tiles = u64::from(attention.block_mask.lists) * groups;
    let arguments = WarpgroupAttention {
        k_map: tma_boxes(device, &attention.k, head_dim, kv_shape, rows)?,
        v_map: tma_boxes(device, &attention.v, value_dim, kv_shape, rows)?,
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
    unsafe { kernel.launch(&context.stream, grid, kernels.threads, &arguments) }
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
