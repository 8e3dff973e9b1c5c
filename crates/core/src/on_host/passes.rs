//! Passes of [`crate::OnHost`]: those of the device, with outputs that are downloaded at the end.

use super::{HostViews, slots::Slot};
use crate::{
    BackwardPass, Block, DeviceSpace, ForwardPass, Gradients, HostViewMut, Outputs, RangePairs,
    Reduction, Result, RowSet, Space, Tick,
};

/// Forward pass of [`crate::OnHost`].
pub struct OnHostForward<'p, P, D: DeviceSpace> {
    pub(super) pass: P,
    pub(super) context: &'p D::Context,
    pub(super) outputs: &'p mut Outputs<Slot<D>>,
}

/// An output of the pass on the device and the caller's tensor that it is downloaded to.
struct Output<'a, 'b, D: DeviceSpace> {
    on_device: &'a mut D::Tensor,
    on_host: &'a mut HostViewMut<'b>,
}

impl<'a, 'b, D: DeviceSpace> Output<'a, 'b, D> {
    fn new(
        context: &D::Context,
        slot: &'a mut Slot<D>,
        on_host: &'a mut HostViewMut<'b>,
    ) -> Result<Self> {
        let on_device = slot.reserve(context, on_host.dtype(), on_host.shape())?;
        Ok(Self { on_device, on_host })
    }

    fn view(&mut self) -> D::ViewMut<'_> {
        D::view_mut(self.on_device)
    }

    fn download(self, context: &D::Context, tick: Tick<'_>) -> Result<()> {
        D::download(context, self.on_device, self.on_host, tick)
    }
}

impl<P: ForwardPass<D>, D: DeviceSpace> ForwardPass<HostViews<D>> for OnHostForward<'_, P, D> {
    fn local_kv(&mut self, into: &mut D::Buffer, sent: &RowSet) -> Result<D::Event> {
        self.pass.local_kv(into, sent)
    }

    fn attend(&mut self, kv: &Block<'_, HostViews<D>>, tick: Tick<'_>) -> Result<()> {
        self.pass.attend(&on_device(kv), tick)
    }

    /// Downloads the outputs. The first download waits for the kernels of the pass.
    fn finish(self, outputs: &mut Outputs<HostViewMut<'_>>, tick: Tick<'_>) -> Result<()> {
        let Self { pass, context, outputs: slots } = self;
        let mut outputs = slots
            .as_mut()
            .zip(outputs.as_mut())
            .try_map(|(slot, on_host)| Output::new(context, slot, on_host))?;
        pass.finish(&mut outputs.as_mut().map(Output::view), &mut *tick)?;
        outputs.into_tensors().try_for_each(|output| output.download(context, &mut *tick))
    }
}

/// Backward pass of [`crate::OnHost`].
pub struct OnHostBackward<'p, P, D: DeviceSpace> {
    pub(super) pass: P,
    pub(super) context: &'p D::Context,
    pub(super) gradients: &'p mut Gradients<Slot<D>>,
}

impl<P: BackwardPass<D>, D: DeviceSpace> BackwardPass<HostViews<D>> for OnHostBackward<'_, P, D> {
    fn local_kv(&mut self, into: &mut D::Buffer, sent: &RowSet) -> Result<D::Event> {
        self.pass.local_kv(into, sent)
    }

    fn local_queries(&mut self, into: &mut D::Buffer) -> Result<D::Event> {
        self.pass.local_queries(into)
    }

    fn attend_kv(
        &mut self,
        kv: &Block<'_, HostViews<D>>,
        dkv: Option<&mut D::Buffer>,
        tick: Tick<'_>,
    ) -> Result<D::Event> {
        self.pass.attend_kv(&on_device(kv), dkv, tick)
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, HostViews<D>>,
        dkv: &mut D::Buffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.pass.attend_queries(&on_device(queries), dkv, tick)
    }

    fn reduce(
        &mut self,
        into: &mut D::Buffer,
        from: &D::Buffer,
        ready: &D::Event,
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<D::Event> {
        self.pass.reduce(into, from, ready, pairs, reduction)
    }

    fn finish(
        self,
        dkv: &D::Buffer,
        gradients: &mut Gradients<HostViewMut<'_>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let Self { pass, context, gradients: slots } = self;
        let mut outputs = slots
            .as_mut()
            .zip(gradients.as_mut())
            .try_map(|(slot, on_host)| Output::new(context, slot, on_host))?;
        pass.finish(dkv, &mut outputs.as_mut().map(Output::view), &mut *tick)?;
        outputs.into_tensors().try_for_each(|output| output.download(context, &mut *tick))
    }
}

/// The same block in the space of the device.
const fn on_device<'a, D: Space>(block: &Block<'a, HostViews<D>>) -> Block<'a, D> {
    let &Block { buffer, ready, rows, first_local } = block;
    Block { buffer, ready, rows, first_local }
}
