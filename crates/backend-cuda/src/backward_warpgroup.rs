//! Backward on warpgroups: `kernels/backward_warpgroup.cuh`, with tensor maps of the streamed
//! operands for TMA, and row statistics as aligned arrays of f32.

use std::sync::Arc;

use annulus_core::{Dims, Result};
use annulus_device_cuda::{CudaBuffer, Device, TensorMap};

use crate::{
    arguments::{AttentionArguments, BackwardAttention, is_tma_readable, tma_boxes},
    block_mask::to_u32,
    kernels::BackwardWarpgroupKernels,
    pass_context::PassContext,
    variant::needs_epilogue,
};

/// Rows of a `StatisticsTile` of `kernels/backward_warpgroup.cuh`, and its bytes.
const STATISTICS_ROWS: u64 = 64;
const STATISTICS_BYTES: u64 = 3 * 4 * STATISTICS_ROWS;

const THREADS: u32 = BackwardWarpgroupKernels::THREADS;

/// The kernels for one set of queries, with the statistics of these.
#[derive(Debug)]
pub(crate) struct OnWarpgroups {
    kernels: Arc<BackwardWarpgroupKernels>,
    statistics: u64,
    statistics_tiles: u32,
}

impl OnWarpgroups {
    /// Writes the statistics of the queries of `arguments` to `into`, which grows to hold them.
    pub(crate) fn new(
        context: &PassContext,
        kernels: Arc<BackwardWarpgroupKernels>,
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
        let threads = u64::from(THREADS);
        let grid = [(tiles * STATISTICS_ROWS).div_ceil(threads), q_heads as u64, batch as u64];
        let arguments = made.arguments(attention, [TensorMap::UNUSED; 2]);
        let kernel = &made.kernels.statistics;
        // SAFETY: the buffer holds the statistics of all rows; the engine has validated those of
        // the queries; memory is freed only after queued work.
        unsafe {
            kernel.launch(&context.stream, grid, THREADS, &arguments)?;
        }
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

    /// Launches the kernel for dQ: K and V are streamed, from records.
    pub(crate) fn launch_queries(
        &self,
        context: &PassContext,
        attention: &AttentionArguments,
        grid: [u64; 3],
    ) -> Result<()> {
        let epilogue = needs_epilogue(context.spec());
        let rows = if epilogue { 64 } else { 128 };
        let shape = [attention.keys, attention.kv_heads, attention.batches];
        let device = context.stream.device();
        let maps = [
            tma_boxes(device, &attention.k, attention.head_dim, shape, rows)?,
            tma_boxes(device, &attention.v, attention.value_dim, shape, rows)?,
        ];
        let kernel = &self.kernels.queries[usize::from(epilogue)];
        let mut arguments = self.arguments(attention, maps);
        let dims = u64::from(attention.head_dim) + u64::from(attention.value_dim);
        let group = attention.q_heads / attention.kv_heads;
        let kv_heads = u64::from(attention.kv_heads) * u64::from(attention.batches);
        arguments.section = section(device, u64::from(attention.keys) * 2 * dims, kv_heads) * group;
        let grid = [grid.iter().product(), 1, 1];
        // SAFETY: the engine has validated every tensor's shape; memory is freed only after queued
        // work.
        unsafe { kernel.launch(&context.stream, grid, THREADS, &arguments) }
    }

    /// True if the kernel for dK and dV can stream these queries: always those of records.
    pub(crate) fn can_stream_queries(attention: &AttentionArguments) -> bool {
        let shape = [attention.queries, attention.q_heads, attention.batches];
        [&attention.q, &attention.dout].into_iter().all(|tensor| is_tma_readable(tensor, shape))
    }

    /// Launches the kernel for dK and dV: Q and dO are streamed.
    pub(crate) fn launch_keys(
        &self,
        context: &PassContext,
        attention: &AttentionArguments,
        grid: [u64; 3],
    ) -> Result<()> {
        let shape = [attention.queries, attention.q_heads, attention.batches];
        let device = context.stream.device();
        let maps = [
            tma_boxes(device, &attention.q, attention.head_dim, shape, 64)?,
            tma_boxes(device, &attention.dout, attention.value_dim, shape, 64)?,
        ];
        let kernel = &self.kernels.keys[usize::from(needs_epilogue(context.spec()))];
        let mut arguments = self.arguments(attention, maps);
        let dims = u64::from(attention.head_dim) + u64::from(attention.value_dim);
        let group = u64::from(attention.q_heads / attention.kv_heads);
        let kv_heads = u64::from(attention.kv_heads) * u64::from(attention.batches);
        let bytes = u64::from(attention.queries) * group * 2 * dims;
        arguments.section = section(device, bytes, kv_heads);
        let grid = [grid.iter().product(), 1, 1];
        // SAFETY: as for `launch_queries`.
        unsafe { kernel.launch(&context.stream, grid, THREADS, &arguments) }
    }
}

/// KV heads, of `heads` in all, in a section of own tiles: as many as have what their blocks
/// stream, `bytes` each, in half of the L2 cache together.
fn section(device: &Device, bytes: u64, heads: u64) -> u32 {
    // at most the number of tiles, which is a u32
    (device.l2_bytes() / 2 / bytes.max(1)).max(1).min(heads.max(1)) as u32
}
