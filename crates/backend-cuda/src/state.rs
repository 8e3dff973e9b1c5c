//! Device memory of the passes of one rank: softmax statistics, accumulators, gradients.
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
    kernels::THREADS,
    key_ranges::partial_sums,
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
    /// Of split-KV decoding; empty if keys are not divided.
    pub(crate) partial: SplitResults,
}

/// State of the backward pass.
#[derive(Debug)]
pub(crate) struct BackwardState {
    /// `[b, local q_len, q_heads, 4]`.
    pub(crate) statistics: CudaBuffer,
    /// lse and delta for kernels on warpgroups: see [`crate::backward_warpgroup`]. Grows on use.
    pub(crate) statistics_tiles: CudaBuffer,
    /// `[b, local q_len, q_heads, head_dim]`.
    pub(crate) dq: CudaBuffer,
    /// Shape of this rank's bias.
    pub(crate) dbias: Option<CudaBuffer>,
    /// Row ranges of the last [`crate::records::reduce`].
    pub(crate) ranges: CudaBuffer,
}

impl ForwardState {
    pub(crate) fn bytes(&self) -> u64 {
        let Self { acc, max, sum, ties, partial } = self;
        partial.bytes() + [acc, max, sum, ties].map(CudaBuffer::len).iter().sum::<u64>()
    }

    pub(crate) fn addresses(&self) -> StateAddresses {
        let Self { acc, max, sum, ties, .. } = self;
        let [acc, max, sum, ties] = [acc.address(), max.address(), sum.address(), ties.address()];
        StateAddresses { acc, max, sum, ties }
    }

    pub(crate) fn new(sizes: &StateSizes, device: &Device) -> Result<Self> {
        Ok(Self {
            acc: sizes.buffer(device, sizes.acc)?,
            max: sizes.buffer(device, sizes.rows)?,
            sum: sizes.buffer(device, sizes.rows)?,
            ties: sizes.buffer(device, sizes.rows)?,
            partial: SplitResults::new(device, sizes.partial_bytes())?,
        })
    }

    /// Replaces the buffers that are too small.
    pub(crate) fn grow(&mut self, sizes: &StateSizes, device: &Device) -> Result<()> {
        sizes.grow(device, &mut self.acc, sizes.acc)?;
        for rows in [&mut self.max, &mut self.sum, &mut self.ties] {
            sizes.grow(device, rows, sizes.rows)?;
        }
        if self.partial.bytes() < sizes.partial_bytes() {
            self.partial = SplitResults::new(device, sizes.partial_bytes())?;
        }
        Ok(())
    }
}

impl BackwardState {
    pub(crate) fn bytes(&self) -> u64 {
        let Self { statistics, statistics_tiles, dq, dbias, ranges } = self;
        [statistics, statistics_tiles, dq, ranges]
            .into_iter()
            .chain(dbias)
            .map(CudaBuffer::len)
            .sum()
    }

    pub(crate) fn new(sizes: &StateSizes, device: &Device) -> Result<Self> {
        Ok(Self {
            statistics: sizes.buffer(device, sizes.statistics)?,
            statistics_tiles: CudaBuffer::new(device, 0)?,
            dq: sizes.buffer(device, sizes.dq)?,
            dbias: sizes.dbias.map(|sums| sizes.buffer(device, sums)).transpose()?,
            ranges: CudaBuffer::new(device, 0)?,
        })
    }

    /// Replaces the buffers that are too small.
    pub(crate) fn grow(&mut self, sizes: &StateSizes, device: &Device) -> Result<()> {
        sizes.grow(device, &mut self.statistics, sizes.statistics)?;
        sizes.grow(device, &mut self.dq, sizes.dq)?;
        match (&mut self.dbias, sizes.dbias) {
            (Some(dbias), Some(sums)) => sizes.grow(device, dbias, sums),
            _ => Ok(()),
        }
    }
}

/// Numbers of sums per buffer.
pub(crate) struct StateSizes {
    sum_bytes: u64,
    rows: usize,
    acc: usize,
    /// Of all ranges of split-KV decoding.
    partial: usize,
    statistics: usize,
    dq: usize,
    dbias: Option<usize>,
}

impl StateSizes {
    /// Sizes for a shard and up to `most_ranges` ranges of keys per tile.
    pub(crate) fn of(shard: &RankShard, most_ranges: usize) -> Self {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = shard.spec.dims;
        let rows = batch * q_heads * shard.queries.len();
        Self {
            sum_bytes: shard.spec.dtype.accumulator().bytes() as u64,
            rows,
            acc: rows * value_dim,
            partial: match most_ranges {
                1 => 0,
                ranges => ranges * rows * partial_sums(value_dim),
            },
            statistics: rows * Spec::ROW_STATISTICS,
            dq: rows * head_dim,
            dbias: local_bias(shard).map(|shape| shape.iter().product()),
        }
    }

    pub(crate) const fn partial_bytes(&self) -> u64 {
        self.partial as u64 * self.sum_bytes
    }

    fn buffer(&self, device: &Device, sums: usize) -> Result<CudaBuffer> {
        CudaBuffer::new(device, sums as u64 * self.sum_bytes)
    }

    /// Replaces a buffer that is too small.
    fn grow(&self, device: &Device, buffer: &mut CudaBuffer, sums: usize) -> Result<()> {
        if buffer.len() < sums as u64 * self.sum_bytes {
            *buffer = self.buffer(device, sums)?;
        }
        Ok(())
    }
}

/// Device memory of the partial results of all ranges: accumulators, then maxima, sums and ties,
/// each range after range.
#[derive(Debug)]
pub(crate) struct SplitResults {
    buffer: CudaBuffer,
}

impl SplitResults {
    /// Allocates `bytes` bytes ([`crate::state::StateSizes::partial_bytes`]).
    pub(crate) fn new(device: &Device, bytes: u64) -> Result<Self> {
        Ok(Self { buffer: CudaBuffer::new(device, bytes)? })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.buffer.len()
    }

    /// Addresses for `ranges` ranges.
    fn addresses(&self, context: &PassContext, ranges: usize) -> StateAddresses {
        let dims = &context.spec().dims;
        let sums = context.sums().bytes();
        let rows = (ranges * dims.batch * dims.q_heads * context.queries() * sums) as u64;
        let acc = self.buffer.address();
        let max = acc + rows * dims.value_dim as u64;
        StateAddresses { acc, max, sum: max + rows, ties: max + 2 * rows }
    }

    /// Makes a forward kernel write the partial results of `ranges` ranges.
    pub(crate) fn write_to(
        &self,
        context: &PassContext,
        ranges: usize,
        arguments: &mut AttentionArguments,
    ) {
        arguments.set_state(self.addresses(context, ranges));
    }

    /// Queues the merge of `ranges` ranges into the state, or with
    /// [`crate::arguments::WRITE_OUTPUTS`] into the outputs of `arguments`.
    pub(crate) fn merge(
        &self,
        context: &PassContext,
        ranges: usize,
        arguments: &AttentionArguments,
        state: StateAddresses,
    ) -> Result<()> {
        let AttentionArguments { batches, queries, q_heads, value_dim, .. } = *arguments;
        let merge = Merge {
            state,
            partial: self.addresses(context, ranges),
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
        let kernel = &context.kernels.merge_splits;
        // SAFETY: the engine has validated the outputs' shapes, and the partial results and the
        // state have these rows; memory is freed only after queued work.
        unsafe { kernel.launch(&context.stream, [rows, 1, 1], THREADS, &merge) }
    }
}
