//! Host tensors in front of a device backend.
//!
//! ```text
//! host tensors ──upload──▶ q, k, v, …    pass on the device    out, … ──download──▶ host tensors
//!                                        blocks: device buffers, for any transport of the space
//! ```
//! Inputs are uploaded when a pass starts and outputs are downloaded when it finishes. Between them
//! nothing is copied: queries, accumulators, gradients and blocks stay on the device.

mod passes;
mod slots;
mod space;

pub use passes::{OnHostBackward, OnHostForward};
pub use space::HostViews;

use std::ops::Range;

use crate::{
    Backend, BackwardInputs, BackwardMode, Capabilities, DeviceSpace, HostView, Inputs, Outputs,
    Passes, RankShard, Result, Space, Spec, Tick, Workspace,
};
use slots::PassTensors;

/// A device backend for tensors in host memory.
#[derive(Debug, Clone)]
pub struct OnHost<B: Backend<Space: DeviceSpace>> {
    inner: B,
    context: <B::Space as DeviceSpace>::Context,
}

impl<B: Backend<Space: DeviceSpace>> OnHost<B> {
    /// Wraps a backend; `context` is the device and queue that it works on.
    pub const fn new(inner: B, context: <B::Space as DeviceSpace>::Context) -> Self {
        Self { inner, context }
    }

    /// Returns the device backend.
    pub const fn inner(&self) -> &B {
        &self.inner
    }
}

impl<B: Backend<Space: DeviceSpace>> Backend for OnHost<B> {
    type Space = HostViews<B::Space>;
    type Workspace = OnHostWorkspace<B::Workspace, B::Space>;

    fn capabilities(&self, spec: &Spec) -> Result<Capabilities> {
        self.inner.capabilities(spec)
    }

    fn allocate(&self, bytes: u64) -> Result<<B::Space as Space>::Buffer> {
        self.inner.allocate(bytes)
    }

    fn write_block(
        &self,
        into: &mut <B::Space as Space>::Buffer,
        bytes: Range<u64>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<<B::Space as Space>::Event> {
        self.inner.write_block(into, bytes, fill)
    }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<Self::Workspace> {
        let inner = self.inner.workspace(shard, passes)?;
        Ok(OnHostWorkspace { inner, tensors: PassTensors::new(self.context.clone()) })
    }
}

/// Workspace of [`OnHost`]: the workspace of the device backend, and the tensors of a pass on the
/// device. They are allocated by the first pass and reused by later ones.
pub struct OnHostWorkspace<W, D: DeviceSpace> {
    inner: W,
    tensors: PassTensors<D>,
}

impl<W: Workspace<Space = D>, D: DeviceSpace> Workspace for OnHostWorkspace<W, D> {
    type Space = HostViews<D>;
    type Forward<'p> = OnHostForward<'p, W::Forward<'p>, D>;
    type Backward<'p> = OnHostBackward<'p, W::Backward<'p>, D>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        self.inner.update(shard)
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes() + self.tensors.bytes()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<HostView<'p>>,
        tick: Tick<'_>,
    ) -> Result<Self::Forward<'p>> {
        let PassTensors { context, inputs: slots, outputs, .. } = &mut self.tensors;
        let inputs = slots
            .as_mut()
            .zip(inputs)
            .try_map(|(slot, tensor)| slot.upload(context, tensor, &mut *tick))?;
        Ok(OnHostForward { pass: self.inner.forward(inputs, tick)?, context, outputs })
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<HostView<'p>>,
        mode: BackwardMode,
        tick: Tick<'_>,
    ) -> Result<Self::Backward<'p>> {
        let PassTensors { context, inputs: slots, outputs, dout, dlse, gradients } =
            &mut self.tensors;
        let Outputs { out, lse, max: _, sum, ties, out_residual } = outputs.as_mut();
        let slots = BackwardInputs {
            forward: slots.as_mut(),
            out,
            // shaped as lse, which is an input in its place if there is no sum
            max: lse,
            sum,
            ties,
            out_residual,
            dout,
            dlse: Some(dlse),
        };
        let inputs =
            slots.zip(inputs).try_map(|(slot, tensor)| slot.upload(context, tensor, &mut *tick))?;
        Ok(OnHostBackward { pass: self.inner.backward(inputs, mode, tick)?, context, gradients })
    }
}
