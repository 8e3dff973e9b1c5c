//! Workspace: device memory of one rank over all ring steps, for softmax statistics, accumulators,
//! gradients in the sums' type, and cached block masks.
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

use annulus_core::{
    BackwardInputs, BackwardMode, Dims, Error, Inputs, Passes, RankShard, Result, Spec, Tick, View,
    Workspace,
};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Device, Stream};

use crate::{
    arguments::{AttentionArguments, Merge, StateAddresses},
    backward::CudaBackward,
    forward::CudaForward,
    forward_tiles::{ForwardTiles, partial_sums},
    kernels::Kernels,
    pass_context::{PassContext, local_bias},
};

/// Device memory of the passes of one rank.
#[derive(Debug)]
pub struct CudaWorkspace {
    context: PassContext,
    forward: ForwardState,
    /// Present in a workspace for [`Passes::Both`].
    backward: Option<BackwardState>,
}

impl CudaWorkspace {
    pub(crate) fn new(
        shard: &RankShard,
        passes: Passes,
        stream: &Stream,
        kernels: Kernels,
    ) -> Result<Self> {
        let context = PassContext::new(stream, kernels, shard, passes)?;
        let sizes = StateSizes::of(shard, context.forward_tiles.ranges.most);
        let device = stream.device();
        let backward = match passes {
            Passes::Forward => None,
            Passes::Both => Some(BackwardState::new(&sizes, device)?),
        };
        Ok(Self { context, forward: ForwardState::new(&sizes, device)?, backward })
    }
}

impl Workspace for CudaWorkspace {
    type Space = CudaSpace;
    type Forward<'p> = CudaForward<'p>;
    type Backward<'p> = CudaBackward<'p>;

    /// Buffers that are large enough are kept.
    fn update(&mut self, shard: &RankShard) -> Result<()> {
        let tiles = ForwardTiles::of(&self.context.kernels, shard);
        let sizes = StateSizes::of(shard, tiles.ranges.most);
        let device = self.context.stream.device();
        grow(device, self.forward.buffers(), sizes.forward)?;
        if let Some(state) = &mut self.backward {
            grow(device, state.buffers(), sizes.backward)?;
        }
        self.context.update(shard);
        Ok(())
    }

    /// Not counted: masks, slopes and the tile counter.
    fn bytes(&self) -> u64 {
        let ForwardState { acc, max, sum, ties, partial } = &self.forward;
        let of_backward = self.backward.iter().flat_map(|state| {
            let BackwardState { statistics, dq, dbias, statistics_tiles, ranges } = state;
            [statistics, dq, dbias, statistics_tiles, ranges]
        });
        [acc, max, sum, ties, partial].into_iter().chain(of_backward).map(CudaBuffer::len).sum()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<View<'p, CudaSpace>>,
        _: Tick<'_>,
    ) -> Result<CudaForward<'p>> {
        Ok(CudaForward::begin(&mut self.context, &self.forward, inputs))
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<View<'p, CudaSpace>>,
        _: BackwardMode,
        _: Tick<'_>,
    ) -> Result<CudaBackward<'p>> {
        let state = self.backward.as_mut().ok_or_else(|| {
            Error::internal("a backward pass in a workspace allocated for forward passes only")
        })?;
        CudaBackward::begin(&mut self.context, state, inputs)
    }
}

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
    partial: CudaBuffer,
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
    fn new(sizes: &StateSizes, device: &Device) -> Result<Self> {
        let [acc, max, sum, ties, partial] =
            sizes.forward.map(|bytes| CudaBuffer::new(device, bytes));
        Ok(Self { acc: acc?, max: max?, sum: sum?, ties: ties?, partial: partial? })
    }

    const fn buffers(&mut self) -> [&mut CudaBuffer; 5] {
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
    fn new(sizes: &StateSizes, device: &Device) -> Result<Self> {
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

    const fn buffers(&mut self) -> [&mut CudaBuffer; 5] {
        let Self { statistics, dq, dbias, statistics_tiles, ranges } = self;
        [statistics, dq, dbias, statistics_tiles, ranges]
    }
}

/// Bytes per buffer; 0 for those that grow on use.
struct StateSizes {
    forward: [u64; 5],
    backward: [u64; 5],
}

impl StateSizes {
    /// Sizes for a shard and up to `most_ranges` ranges of keys per tile.
    fn of(shard: &RankShard, most_ranges: usize) -> Self {
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
fn grow(device: &Device, buffers: [&mut CudaBuffer; 5], sizes: [u64; 5]) -> Result<()> {
    for (buffer, bytes) in buffers.into_iter().zip(sizes) {
        if buffer.len() < bytes {
            *buffer = CudaBuffer::new(device, bytes)?;
        }
    }
    Ok(())
}
