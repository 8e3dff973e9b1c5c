//! Device memory of the passes of one rank: softmax statistics, accumulators, gradients.

use annulus_core::{Dims, RankShard, Result, Spec};
use annulus_device_cuda::{CudaBuffer, Device};

use crate::{
    arguments::StateAddresses, key_ranges::partial_sums, pass_context::local_bias,
    split_kv::PartialResults,
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
    pub(crate) partial: PartialResults,
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

    pub(crate) fn new(sizes: &Sizes, device: &Device) -> Result<Self> {
        Ok(Self {
            acc: sizes.buffer(device, sizes.acc)?,
            max: sizes.buffer(device, sizes.rows)?,
            sum: sizes.buffer(device, sizes.rows)?,
            ties: sizes.buffer(device, sizes.rows)?,
            partial: PartialResults::new(device, sizes.partial_bytes())?,
        })
    }

    /// Replaces the buffers that are too small.
    pub(crate) fn grow(&mut self, sizes: &Sizes, device: &Device) -> Result<()> {
        sizes.grow(device, &mut self.acc, sizes.acc)?;
        for rows in [&mut self.max, &mut self.sum, &mut self.ties] {
            sizes.grow(device, rows, sizes.rows)?;
        }
        if self.partial.bytes() < sizes.partial_bytes() {
            self.partial = PartialResults::new(device, sizes.partial_bytes())?;
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

    pub(crate) fn new(sizes: &Sizes, device: &Device) -> Result<Self> {
        Ok(Self {
            statistics: sizes.buffer(device, sizes.statistics)?,
            statistics_tiles: CudaBuffer::new(device, 0)?,
            dq: sizes.buffer(device, sizes.dq)?,
            dbias: sizes.dbias.map(|sums| sizes.buffer(device, sums)).transpose()?,
            ranges: CudaBuffer::new(device, 0)?,
        })
    }

    /// Replaces the buffers that are too small.
    pub(crate) fn grow(&mut self, sizes: &Sizes, device: &Device) -> Result<()> {
        sizes.grow(device, &mut self.statistics, sizes.statistics)?;
        sizes.grow(device, &mut self.dq, sizes.dq)?;
        match (&mut self.dbias, sizes.dbias) {
            (Some(dbias), Some(sums)) => sizes.grow(device, dbias, sums),
            _ => Ok(()),
        }
    }
}

/// Numbers of sums per buffer.
pub(crate) struct Sizes {
    sum_bytes: u64,
    rows: usize,
    acc: usize,
    /// Of all ranges of split-KV decoding.
    partial: usize,
    statistics: usize,
    dq: usize,
    dbias: Option<usize>,
}

impl Sizes {
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
