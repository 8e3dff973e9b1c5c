//! Passes of [`crate::OnHost`]: those of the device, with outputs that are downloaded at the end.

use super::{
    HostViews,
    slots::{GradientSlots, Slot},
};
use crate::{
    BackwardPass, Block, DeviceSpace, ForwardPass, Gradients, HostViewMut, Outputs, RangePairs,
    Reduction, Result, RowSet, Space, Tick,
};

/// Slots of the outputs of a forward pass.
pub(super) struct OutputSlots<'p, D: DeviceSpace> {
    pub(super) out: &'p mut Slot<D>,
    pub(super) lse: &'p mut Slot<D>,
    pub(super) max: &'p mut Slot<D>,
    pub(super) sum: &'p mut Slot<D>,
    pub(super) ties: &'p mut Slot<D>,
    pub(super) out_residual: &'p mut Slot<D>,
}

/// Forward pass of [`crate::OnHost`].
pub struct OnHostForward<'p, P, D: DeviceSpace> {
    pub(super) pass: P,
    pub(super) context: &'p D::Context,
    pub(super) outputs: OutputSlots<'p, D>,
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

    fn optional(
        context: &D::Context,
        slot: &'a mut Slot<D>,
        on_host: Option<&'a mut HostViewMut<'b>>,
    ) -> Result<Option<Self>> {
        on_host.map(|on_host| Self::new(context, slot, on_host)).transpose()
    }

    fn view(&mut self) -> D::ViewMut<'_> {
        D::view_mut(self.on_device)
    }

    fn download(self, context: &D::Context, tick: Tick<'_>) -> Result<()> {
        D::download(context, self.on_device, self.on_host, tick)
    }
}

/// Downloads the outputs that there are. The first download waits for the kernels of the pass.
fn download_all<D: DeviceSpace, const N: usize>(
    context: &D::Context,
    outputs: [Option<Output<'_, '_, D>>; N],
    tick: Tick<'_>,
) -> Result<()> {
    outputs.into_iter().flatten().try_for_each(|output| output.download(context, &mut *tick))
}

impl<P: ForwardPass<D>, D: DeviceSpace> ForwardPass<HostViews<D>> for OnHostForward<'_, P, D> {
    fn local_kv(&mut self, into: &mut D::Buffer, sent: &RowSet) -> Result<D::Event> {
        self.pass.local_kv(into, sent)
    }

    fn attend(&mut self, kv: &Block<'_, HostViews<D>>, tick: Tick<'_>) -> Result<()> {
        self.pass.attend(&on_device(kv), tick)
    }

    /// Writes no outputs: they are downloaded once, in `finish`.
    fn attend_last(
        &mut self,
        kv: &Block<'_, HostViews<D>>,
        _: &mut Outputs<'_, HostViews<D>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.attend(kv, tick)
    }

    fn finish(self, outputs: &mut Outputs<'_, HostViews<D>>, tick: Tick<'_>) -> Result<()> {
        let Self { pass, context, outputs: slots } = self;
        let mut out = Output::new(context, slots.out, &mut outputs.out)?;
        let mut lse = Output::new(context, slots.lse, &mut outputs.lse)?;
        let mut max = Output::optional(context, slots.max, outputs.max.as_mut())?;
        let mut sum = Output::optional(context, slots.sum, outputs.sum.as_mut())?;
        let mut ties = Output::optional(context, slots.ties, outputs.ties.as_mut())?;
        let mut out_residual =
            Output::optional(context, slots.out_residual, outputs.out_residual.as_mut())?;
        pass.finish(
            &mut Outputs {
                out: out.view(),
                lse: lse.view(),
                max: max.as_mut().map(Output::view),
                sum: sum.as_mut().map(Output::view),
                ties: ties.as_mut().map(Output::view),
                out_residual: out_residual.as_mut().map(Output::view),
            },
            &mut *tick,
        )?;
        download_all(context, [Some(out), Some(lse), max, sum, ties, out_residual], tick)
    }
}

/// Backward pass of [`crate::OnHost`].
pub struct OnHostBackward<'p, P, D: DeviceSpace> {
    pub(super) pass: P,
    pub(super) context: &'p D::Context,
    pub(super) gradients: &'p mut GradientSlots<D>,
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
        gradients: &mut Gradients<'_, HostViews<D>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let Self { pass, context, gradients: slots } = self;
        let mut dq = Output::new(context, &mut slots.dq, &mut gradients.dq)?;
        let mut dk = Output::new(context, &mut slots.dk, &mut gradients.dk)?;
        let mut dv = Output::new(context, &mut slots.dv, &mut gradients.dv)?;
        let mut dbias = Output::optional(context, &mut slots.dbias, gradients.dbias.as_mut())?;
        let mut dsinks = Output::optional(context, &mut slots.dsinks, gradients.dsinks.as_mut())?;
        pass.finish(
            dkv,
            &mut Gradients {
                dq: dq.view(),
                dk: dk.view(),
                dv: dv.view(),
                dbias: dbias.as_mut().map(Output::view),
                dsinks: dsinks.as_mut().map(Output::view),
            },
            &mut *tick,
        )?;
        download_all(context, [Some(dq), Some(dk), Some(dv), dbias, dsinks], tick)
    }
}

/// The same block in the space of the device.
const fn on_device<'a, D: Space>(block: &Block<'a, HostViews<D>>) -> Block<'a, D> {
    let &Block { buffer, ready, rows, first_local } = block;
    Block { buffer, ready, rows, first_local }
}
