//! Split-KV decoding: with few queries, ranges of the keys of a query tile are workgroups of their
//! own, because a GPU would otherwise be mostly idle. Their partial results are merged into the
//! state of the pass. Kernel: `merge_ranges.wgsl`.
//!
//! ```text
//! for each range s of the list of a query tile, in parallel:  (m_s, ℓ_s, acc_s) of its keys
//! for each row, in parallel:                     (m, ℓ, acc) ← merge of (m, ℓ, acc) and all s
//! ```
//! The number of ranges depends on shapes and masks, not on the processors of the device, so that
//! the order of sums is the same everywhere.
//!
//! Source: Flash-Decoding (Dao et al. 2023).

use annulus_core::{Dims, Error, Result};

use crate::{
    block_mask::WorkChunk,
    copy::ElementStrides,
    device::Gpu,
    kernels::{
        KernelVariant, MAX_RANGES,
        params::{MergeParams, Strided},
    },
    launch::{Arena, BoundResource, Commands},
};

/// Workgroups that fill a GPU: four for each of the 128 multiprocessors of the largest consumer
/// GPUs.
const FILLING_WORKGROUPS: usize = 512;

/// Returns the number of ranges that fill a GPU; 1 if that many workgroups fill half of it.
fn wanted_ranges(workgroups: usize) -> usize {
    let fills_half = 2 * workgroups > FILLING_WORKGROUPS;
    if fills_half { 1 } else { FILLING_WORKGROUPS.div_ceil(workgroups.max(1)).min(MAX_RANGES) }
}

/// Shape of the partial results of one range: all batch rows and heads, the queries of a chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RangeShape {
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
}

impl RangeShape {
    pub(crate) const fn of(dims: &Dims, queries: usize) -> Self {
        Self { batch: dims.batch, queries, heads: dims.q_heads, dim: dims.value_dim }
    }

    const fn rows(self) -> usize {
        self.batch * self.queries * self.heads
    }

    /// Returns the number of ranges of which all partial results fit a buffer and a binding of
    /// `bytes`, and that `workgroups` workgroups without ranges may use.
    pub(crate) fn most_ranges(self, bytes: u64, workgroups: usize) -> usize {
        let of_range = 4 * (self.rows() * self.dim.max(4)) as u64;
        let fit = usize::try_from(bytes / of_range.max(1)).unwrap_or(usize::MAX);
        fit.min(wanted_ranges(workgroups)).max(1)
    }
}

/// Binding and layout of a state that partial results are merged into.
#[derive(Debug)]
pub(crate) struct MergeTarget {
    pub(crate) bound: BoundResource,
    /// The chunk's elements in the binding.
    pub(crate) at: Strided,
}

/// Partial results of all ranges of a launch.
#[derive(Debug)]
pub(crate) struct RangeResults {
    shape: RangeShape,
    ranges: usize,
    /// `[range, batch, query, head, dim]`.
    acc: wgpu::Buffer,
    /// `[range, batch, query, head, 4]`.
    statistics: wgpu::Buffer,
}

impl RangeResults {
    pub(crate) fn new(
        gpu: &Gpu,
        arena: &mut Arena,
        shape: RangeShape,
        ranges: usize,
    ) -> Result<Self> {
        let [acc, statistics] = arena.partial_results(gpu, Self::bytes(shape, ranges))?;
        Ok(Self { shape, ranges, acc, statistics })
    }

    /// Bytes of accumulators and of statistics.
    fn bytes(shape: RangeShape, ranges: usize) -> [u64; 2] {
        [shape.dim, 4].map(|dim| 4 * (ranges * shape.rows() * dim) as u64)
    }

    /// Layouts of one range's accumulators and statistics, from the chunk's first element on.
    pub(crate) fn layouts(&self, chunk: &WorkChunk) -> [ElementStrides; 2] {
        let RangeShape { queries, heads, dim, .. } = self.shape;
        [dim, 4].map(|dim| {
            let whole = ElementStrides::dense(queries, heads, dim);
            let (batch, head) = (chunk.batches.0 as u64, chunk.heads.0 as u64);
            ElementStrides { base: batch * whole.batch + head * whole.head, ..whole }
        })
    }

    /// Elements of accumulators, and of statistics, from one range to the next.
    pub(crate) fn strides(&self) -> [u32; 2] {
        [self.shape.dim, 4].map(|dim| (self.shape.rows() * dim) as u32)
    }

    /// Bindings of accumulators and statistics.
    pub(crate) fn resources(&self) -> [BoundResource; 2] {
        let [acc, statistics] = Self::bytes(self.shape, self.ranges);
        [(&self.acc, acc), (&self.statistics, statistics)]
            .map(|(buffer, size)| BoundResource::Buffer { buffer: buffer.clone(), offset: 0, size })
    }

    /// Sets the statistics to those of no key before the first kernel of the batch runs.
    pub(crate) fn clear(&self, commands: &mut Commands<'_>) {
        commands.clear(&self.statistics);
    }

    /// Records the merge of all ranges into the accumulators and statistics of the chunk.
    pub(crate) fn merge(
        &self,
        commands: &mut Commands<'_>,
        chunk: &WorkChunk,
        state: &[MergeTarget],
    ) -> Result<()> {
        let [acc, statistics] = state else {
            return Err(Error::internal("partial results without a state"));
        };
        let [range_acc, range_statistics] =
            self.layouts(chunk).map(|layout| layout.at(layout.base as u32));
        let [acc_range, statistics_range] = self.strides();
        let [of_acc, of_statistics] = self.resources();
        let count = chunk.batches.1 * self.shape.queries * chunk.heads.1;
        let bindings = vec![of_statistics, of_acc, statistics.bound.clone(), acc.bound.clone()];
        commands.launch(KernelVariant::MergeRanges, count as u64, bindings, |grid_width| {
            MergeParams {
                count: count as u32,
                grid_width,
                rows: self.shape.queries as u32,
                heads: chunk.heads.1 as u32,
                ranges: self.ranges as u32,
                dim: self.shape.dim as u32,
                statistics: statistics.at,
                acc: acc.at,
                range_statistics,
                statistics_range,
                range_acc,
                acc_range,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_divided_only_among_few_workgroups() {
        // a token of 8 KV heads
        assert_eq!(wanted_ranges(8), 64);
        assert_eq!(wanted_ranges(1), MAX_RANGES);
        // half of a GPU is filled: a merge would cost more than it saves
        assert_eq!(wanted_ranges(257), 1);
        assert_eq!(wanted_ranges(256), 2);
        assert_eq!(wanted_ranges(0), MAX_RANGES);
    }

    #[test]
    fn partial_results_fit_a_binding() {
        let shape = RangeShape { batch: 2, queries: 3, heads: 5, dim: 8 };
        assert_eq!(shape.most_ranges(4 * 2 * 3 * 5 * 8 * 7 + 1, 1), 7);
        // statistics are longer than vectors of dim 1
        assert_eq!(RangeShape { dim: 1, ..shape }.most_ranges(4 * 2 * 3 * 5 * 4 * 3, 1), 3);
        assert_eq!(shape.most_ranges(100, 1), 1);
        assert_eq!(shape.most_ranges(u64::MAX, 8), 64);
    }
}
