//! Device memory of one rank over all ring steps.

use annulus_core::{
    BackwardInputs, BackwardMode, Error, Inputs, Passes, RankShard, Result, Tick, View, Workspace,
};
use annulus_device_cuda::{CudaSpace, Stream};

use crate::{
    backward::CudaBackward,
    forward::CudaForward,
    forward_tiles::ForwardTiles,
    kernels::Kernels,
    pass_context::PassContext,
    state::{BackwardState, ForwardState, StateSizes},
};

/// Softmax statistics, accumulators, gradients in the sums' type, and cached block masks.
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
        self.forward.grow(&sizes, device)?;
        if let Some(state) = &mut self.backward {
            state.grow(&sizes, device)?;
        }
        self.context.update(shard);
        Ok(())
    }

    /// Not counted: masks, slopes and the tile counter.
    fn bytes(&self) -> u64 {
        self.forward.bytes() + self.backward.as_ref().map_or(0, BackwardState::bytes)
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
