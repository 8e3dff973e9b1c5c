//! Backward on warpgroups: `kernels/backward_warpgroup.cuh`, with tensor maps of the streamed
//! operands for TMA, and row statistics as aligned arrays of f32.

use std::sync::Arc;

use annulus_core::{Dims, Result};
use annulus_device_cuda::{CudaBuffer, Device, TensorMap};

use crate::{
    arguments::{AttentionArguments, BackwardAttention, is_tma_readable, tma_boxes},
    block_mask::to_u32,
    kernels::VariantKernels,
    pass_context::PassContext,
    variant::{WARPGROUP_BACKWARD_KERNELS, needs_epilogue},
};

/// Rows of a `StatisticsTile` of `kernels/backward_warpgroup.cuh`, and its bytes.
const STATISTICS_ROWS: u64 = 64;
const STATISTICS_BYTES: u64 = 3 * 4 * STATISTICS_ROWS;

/// The kernels for one set of queries, with the statistics of these.
#[derive(Debug)]
pub(crate) struct OnWarpgroups {
    kernels: Arc<VariantKernels>,
    statistics: u64,
    statistics_tiles: u32,
}

impl OnWarpgroups {
    /// Writes the statistics of the queries of `arguments` to `into`, which grows to hold them.
    pub(crate) fn new(
        context: &PassContext,
        kernels: Arc<VariantKernels>,
        attention: &AttentionArguments,
        into: &mut CudaBuffer,
    ) -> Result<Self> {
        let Dims { batch, q_heads, .. } = context.spec().dims;
        // whole tiles of the kernels' own rows: the dQ pass reads 128 rows at a time
        let [rows, _] = kernels.variant.tile();
        let tiles = u64::from(attention.queries).next_multiple_of(rows as u64) / STATISTICS_ROWS;
        let bytes = (batch * q_heads) as u64 * tiles * STATISTICS_BYTES;
        if into.len() < bytes {
            *into = CudaBuffer::new(context.stream.device(), bytes)?;
        }
        let made =
            Self { kernels, statistics: into.address(), statistics_tiles: to_u32(tiles as usize)? };
        let [name, ..] = WARPGROUP_BACKWARD_KERNELS;
        let threads = u64::from(made.kernels.variant.threads(name));
        let grid = [(tiles * STATISTICS_ROWS).div_ceil(threads), q_heads as u64, batch as u64];
        let arguments = made.arguments(attention, [TensorMap::UNUSED; 2]);
        // SAFETY: the buffer holds the statistics of all rows.
        unsafe { made.kernels.launch(&context.stream, name, grid, &arguments)? };
        Ok(made)
    }

    fn arguments(&self, attention: &AttentionArguments, maps: [TensorMap; 2]) -> BackwardAttention {
        BackwardAttention {
            maps,
            attention: *attention,
            statistics: self.statistics,
            statistics_tiles: self.statistics_tiles,
            section: 1,
        }
    }

    /// True if the kernel for dK and dV can stream these queries: always those of records.
    pub(crate) fn can_stream_queries(attention: &AttentionArguments) -> bool {
        let shape = [attention.queries, attention.q_heads, attention.batches];
        [&attention.q, &attention.dout].into_iter().all(|tensor| is_tma_readable(tensor, shape))
    }

    /// Launches the kernel for dQ, which streams K and V from records, or that for dK and dV
    /// (`of_keys`), which streams Q and dO.
    pub(crate) fn launch(
        &self,
        context: &PassContext,
        attention: &AttentionArguments,
        grid: [u64; 3],
        of_keys: bool,
    ) -> Result<()> {
        let AttentionArguments { q, dout, k, v, head_dim, value_dim, .. } = attention;
        let AttentionArguments { queries, keys, q_heads, kv_heads, batches, .. } = *attention;
        let epilogue = needs_epilogue(context.spec());
        let [_, of_queries, queries_epilogue, of_kv, kv_epilogue] = WARPGROUP_BACKWARD_KERNELS;
        let ([one, other], shape, rows, names) = if of_keys {
            ([q, dout], [queries, q_heads, batches], 64, [of_kv, kv_epilogue])
        } else {
            let rows = if epilogue { 64 } else { 128 };
            ([k, v], [keys, kv_heads, batches], rows, [of_queries, queries_epilogue])
        };
        let device = context.stream.device();
        let maps = [
            tma_boxes(device, one, *head_dim, shape, rows)?,
            tma_boxes(device, other, *value_dim, shape, rows)?,
        ];
        let [streamed_rows, streamed_heads, _] = shape;
        let dims = u64::from(*head_dim) + u64::from(*value_dim);
        // streamed by the blocks of a KV head
        let bytes = u64::from(streamed_rows) * u64::from(streamed_heads / kv_heads) * 2 * dims;
        let kv_planes = u64::from(kv_heads) * u64::from(batches);
        let arguments = BackwardAttention {
            section: section(device, bytes, kv_planes) * (q_heads / streamed_heads),
            ..self.arguments(attention, maps)
        };
        let grid = [grid.iter().product(), 1, 1];
        // SAFETY: the engine has validated the shape of every tensor.
        unsafe {
            self.kernels.launch(&context.stream, names[usize::from(epilogue)], grid, &arguments)
        }
    }
}

/// KV heads, of `heads` in all, in a section of own tiles: as many as have what their blocks
/// stream, `bytes` each, in half of the L2 cache together.
fn section(device: &Device, bytes: u64, heads: u64) -> u32 {
    // at most the number of tiles, which is a u32
    (device.l2_bytes() / 2 / bytes.max(1)).max(1).min(heads.max(1)) as u32
}
