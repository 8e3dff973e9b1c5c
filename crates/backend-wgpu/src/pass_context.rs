//! State of one rank and of its passes in device memory.

use annulus_core::{BackwardInputs, Inputs, RankShard, View};

use crate::{
    block_mask::BlockMask,
    device::Gpu,
    kernels::{BiasAxes, TileVariant},
    launch::Arena,
    memory::{GpuBuffer, WgpuSpace},
    row_buffers::RowBuffers,
};

/// Device, shard and kernel variant of one rank, and memory for the parameters of launches: common
/// to all passes of a workspace.
#[derive(Debug)]
pub(crate) struct RankKernels {
    pub(crate) shard: RankShard,
    pub(crate) tile: TileVariant,
    pub(crate) arena: Arena,
    pub(crate) block_mask: BlockMask,
    pub(crate) gpu: Gpu,
}

/// State of a forward pass.
#[derive(Debug)]
pub(crate) struct ForwardState {
    /// Accumulator of O, `[b, rows, q_heads, value_dim]`.
    pub(crate) acc: RowBuffers,
    /// (m, ℓ, ties, any key attended to), `[b, rows, q_heads, 4]`.
    pub(crate) softmax_statistics: GpuBuffer,
}

impl ForwardState {
    pub(crate) fn bytes(&self) -> u64 {
        self.acc.bytes() + self.softmax_statistics.size()
    }
}

/// State of a backward pass.
#[derive(Debug)]
pub(crate) struct BackwardState {
    /// dQ / scale, `[b, rows, q_heads, head_dim]`.
    pub(crate) dq: RowBuffers,
    /// (max, 1 / sum, Δ, share), `[b, rows, q_heads, 4]`.
    pub(crate) statistics: GpuBuffer,
    /// dbias: shaped as the bias, or one number per query row if the bias has no key axis.
    pub(crate) bias: Option<GpuBuffer>,
}

impl BackwardState {
    pub(crate) fn bytes(&self) -> u64 {
        let bias = self.bias.as_ref().map_or(0, GpuBuffer::size);
        self.dq.bytes() + self.statistics.size() + bias
    }
}

/// A forward pass in progress: state and inputs.
pub(crate) struct ForwardContext<'p> {
    pub(crate) kernels: &'p mut RankKernels,
    pub(crate) state: &'p ForwardState,
    pub(crate) inputs: Inputs<View<'p, WgpuSpace>>,
}

/// A backward pass in progress: state and inputs.
pub(crate) struct BackwardContext<'p> {
    pub(crate) kernels: &'p mut RankKernels,
    pub(crate) state: &'p BackwardState,
    pub(crate) inputs: BackwardInputs<View<'p, WgpuSpace>>,
}

/// Reduction of the gradient of a bias of this shape.
pub(crate) const fn bias_axes([_, _, queries, keys]: [usize; 4]) -> BiasAxes {
    match (queries, keys) {
        (_, 1) => BiasAxes::Queries,
        (1, _) => BiasAxes::Keys,
        _ => BiasAxes::Pairs,
    }
}
