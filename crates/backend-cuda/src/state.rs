//! Device memory of one rank over all ring steps: softmax statistics, accumulators, gradients in
//! the sums' type.
//!
//! Split-KV decoding: with few queries, ranges of the keys of a query tile are thread blocks of
//! their own, because a GPU would otherwise be mostly idle. Kernel: `kernels/merge_splits.cuh`.
//!
//! ```text
//! for each range s of the list of a query tile, in parallel:  (m_s, ℓ_s, O_s) of its keys
//! for each row, in parallel:                     (m, ℓ, O) ← merge of (m, ℓ, O) and all s
//! ```
//! The number of ranges depends on shapes and masks, not on the multiprocessors of the device, so
//! that the order of sums is the same on every GPU.
//!
//! Source: Flash-Decoding (Dao et al. 2023).

use annulus_core::{Dims, RankShard, Result, Spec};
use annulus_device_cuda::{CudaBuffer, Device};

use crate::{
    arguments::{AttentionArguments, Merge, StateAddresses},
    forward_tiles::partial_sums,
    pass_context::{PassContext, local_bias},
};

/// Online softmax of every local query.
#[derive(Debug)]
pub(crate) struct ForwardState {
    /// `[b, local q_len, q_heads, value_dim]`.
    pub(crate) acc: CudaBuffer,
    /// `[b, q_heads, local q_len]`, like the two below.
    pub(crate) max: CudaBuffer,
    pub(crate) sum: CudaBuffer,
    pub(crate) ties: CudaBuffer,
    /// Partial results of all ranges: accumulators, then maxima, sums and ties, each range after
    /// range. Empty if keys are not divided.
    pub(crate) partial: CudaBuffer,
}

/// State of the backward pass.
#[derive(Debug)]
pub(crate) struct BackwardState {
    /// `[b, local q_len, q_heads, 4]`.
    pub(crate) statistics: CudaBuffer,
    /// `[b, local q_len, q_heads, head_dim]`.
    pub(crate) dq: CudaBuffer,
    /// Shape of this rank's bias; empty without one.
    pub(crate) dbias: CudaBuffer,
    /// lse and delta for kernels on warpgroups: see [`crate::backward_warpgroup`]. Grows on use.
    pub(crate) statistics_tiles: CudaBuffer,
    /// Row ranges of the last [`crate::records::reduce`]. Grows on use.
    pub(crate) ranges: CudaBuffer,
}

impl ForwardState {
    pub(crate) fn new(sizes: &StateSizes, device: &Device) -> Result<Self> {
        let [acc, max, sum, ties, partial] =
            sizes.forward.map(|bytes| CudaBuffer::new(device, bytes));
        Ok(Self { acc: acc?, max: max?, sum: sum?, ties: ties?, partial: partial? })
    }

    pub(crate) const fn buffers(&mut self) -> [&mut CudaBuffer; 5] {
        let Self { acc, max, sum, ties, partial } = self;
        [acc, max, sum, ties, partial]
    }

    pub(crate) fn addresses(&self) -> StateAddresses {
        let Self { acc, max, sum, ties, .. } = self;
        let [acc, max, sum, ties] = [acc, max, sum, ties].map(CudaBuffer::address);
        StateAddresses { acc, max, sum, ties }
    }

    /// Addresses of the partial results of `ranges` ranges.
    pub(crate) fn partial_addresses(&self, context: &PassContext, ranges: usize) -> StateAddresses {
        let dims = &context.spec().dims;
        let sums = context.sums().bytes();
        let rows = (ranges * dims.batch * dims.q_heads * context.queries() * sums) as u64;
        let acc = self.partial.address();
        let max = acc + rows * dims.value_dim as u64;
        StateAddresses { acc, max, sum: max + rows, ties: max + 2 * rows }
    }

    /// Queues the merge of `ranges` ranges into the state, or with
    /// [`crate::arguments::WRITE_OUTPUTS`] into the outputs of `arguments`.
    pub(crate) fn merge(
        &self,
        context: &PassContext,
        ranges: usize,
        arguments: &AttentionArguments,
    ) -> Result<()> {
        let AttentionArguments { batches, queries, q_heads, value_dim, .. } = *arguments;
        let merge = Merge {
            state: self.addresses(),
            partial: self.partial_addresses(context, ranges),
            out: arguments.out,
            of_rows: arguments.of_rows,
            batches,
            queries,
            q_heads,
            value_dim,
            splits: arguments.block_mask.splits,
            flags: arguments.flags,
        };
        let rows = u64::from(batches) * u64::from(queries) * u64::from(q_heads);
        // SAFETY: the partial results and the state have these rows.
        unsafe { context.launch("merge_splits", [rows, 1, 1], &merge) }
    }
}

impl BackwardState {
    pub(crate) fn new(sizes: &StateSizes, device: &Device) -> Result<Self> {
        let [statistics, dq, dbias, statistics_tiles, ranges] =
            sizes.backward.map(|bytes| CudaBuffer::new(device, bytes));
        Ok(Self {
            statistics: statistics?,
            dq: dq?,
            dbias: dbias?,
            statistics_tiles: statistics_tiles?,
            ranges: ranges?,
        })
    }

    pub(crate) const fn buffers(&mut self) -> [&mut CudaBuffer; 5] {
        let Self { statistics, dq, dbias, statistics_tiles, ranges } = self;
        [statistics, dq, dbias, statistics_tiles, ranges]
    }
}

/// Bytes per buffer; 0 for those that grow on use.
pub(crate) struct StateSizes {
    pub(crate) forward: [u64; 5],
    pub(crate) backward: [u64; 5],
}

impl StateSizes {
    /// Sizes for a shard and up to `most_ranges` ranges of keys per tile.
    pub(crate) fn of(shard: &RankShard, most_ranges: usize) -> Self {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = shard.spec.dims;
        let bytes = |sums: usize| (sums * shard.spec.dtype.accumulator().bytes()) as u64;
        let rows = batch * q_heads * shard.queries.len();
        let ranges = if most_ranges == 1 { 0 } else { most_ranges };
        let partial = ranges * rows * partial_sums(value_dim);
        let dbias = local_bias(shard).map_or(0, |shape| shape.iter().product());
        Self {
            forward: [rows * value_dim, rows, rows, rows, partial].map(bytes),
            backward: [rows * Spec::ROW_STATISTICS, rows * head_dim, dbias, 0, 0].map(bytes),
        }
    }
}

/// Replaces the buffers that are too small.
pub(crate) fn grow(device: &Device, buffers: [&mut CudaBuffer; 5], sizes: [u64; 5]) -> Result<()> {
    for (buffer, bytes) in buffers.into_iter().zip(sizes) {
        if buffer.len() < bytes {
            *buffer = CudaBuffer::new(device, bytes)?;
        }
    }
    Ok(())
}
