//! Host tensors in front of a device backend.
//!
//! ```text
//! host tensors ──upload──▶ q, k, v, …    pass on the device    out, … ──download──▶ host tensors
//!                                        blocks: device buffers, for any transport of the space
//! ```
//! Inputs are uploaded when a pass starts and outputs are downloaded when it finishes. Between them
//! nothing is copied: queries, accumulators, gradients and blocks stay on the device.

use std::{marker::PhantomData, ops::Range};

use crate::{
    Arrived, Backend, BackwardInputs, BackwardMode, BackwardPass, Block, Capabilities, DType,
    DeviceSpace, ForwardPass, Gradients, HostBuffer, HostView, HostViewMut, Inputs, Outputs,
    Passes, RangePairs, RankShard, Readers, Reduction, Result, Space, Spec, StagedSpace, Tick,
    Workspace,
};

/// The space of [`OnHost`]: tensors in host memory, blocks and events of the device space `D`.
#[derive(Debug, Clone, Copy)]
pub struct HostViews<D>(PhantomData<fn() -> D>);

impl<D: Space> Space for HostViews<D> {
    type Buffer = D::Buffer;
    type View<'a> = HostView<'a>;
    type ViewMut<'a> = HostViewMut<'a>;
    type Event = D::Event;

    const HAS_PARTS: bool = D::HAS_PARTS;
    const HOST_TENSORS: bool = true;

    fn size(buffer: &D::Buffer) -> u64 {
        D::size(buffer)
    }

    fn part(buffer: &D::Buffer, bytes: Range<u64>) -> Option<D::Buffer> {
        D::part(buffer, bytes)
    }

    fn reborrow<'short>(view: &'short HostView<'_>) -> HostView<'short> {
        view.reborrow()
    }

    fn host_view_mut<'short>(view: &'short mut HostViewMut<'_>) -> Option<HostViewMut<'short>> {
        Some(view.reborrow())
    }

    fn describe(view: &HostView<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }

    fn describe_mut(view: &HostViewMut<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }
}

impl<D: StagedSpace> StagedSpace for HostViews<D> {
    type Copier = D::Copier;
    type Download = D::Download;
    type Upload = D::Upload;

    fn download(
        copier: &mut D::Copier,
        from: &D::Buffer,
        ready: &D::Event,
        ranges: &[Range<u64>],
        into: HostBuffer,
    ) -> Result<D::Download> {
        D::download(copier, from, ready, ranges, into)
    }

    fn downloaded(copier: &mut D::Copier, copy: &mut D::Download) -> Result<Option<HostBuffer>> {
        D::downloaded(copier, copy)
    }

    fn upload(
        copier: &mut D::Copier,
        from: HostBuffer,
        into: D::Buffer,
        ranges: &[Range<u64>],
    ) -> Result<D::Upload> {
        D::upload(copier, from, into, ranges)
    }

    fn uploaded(
        copier: &mut D::Copier,
        copy: &mut D::Upload,
    ) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        let Some((host, arrived)) = D::uploaded(copier, copy)? else { return Ok(None) };
        // the same buffer and event, of another space
        Ok(Some((host, Arrived { buffer: arrived.buffer, ready: arrived.ready })))
    }
}

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

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<Self::Workspace> {
        let inner = self.inner.workspace(shard, passes)?;
        Ok(OnHostWorkspace { inner, tensors: Tensors::new(self.context.clone()) })
    }
}

/// Workspace of [`OnHost`]: the device's, and the tensors of the pass on the device. They are
/// allocated by the first pass and kept.
pub struct OnHostWorkspace<W, D: DeviceSpace> {
    inner: W,
    tensors: Tensors<D>,
}

/// A tensor on the device, allocated when it is first used and again when its shape changes.
struct Slot<D: DeviceSpace>(Option<D::Tensor>);

impl<D: DeviceSpace> Slot<D> {
    /// Returns a tensor of this type and shape; its contents are unspecified.
    fn reserve(
        &mut self,
        context: &D::Context,
        (dtype, shape): (DType, [usize; 4]),
    ) -> Result<&mut D::Tensor> {
        let tensor = match self.0.take() {
            Some(tensor) if D::describe(&D::view(&tensor)) == (dtype, shape) => tensor,
            _ => D::tensor(context, dtype, shape)?,
        };
        Ok(self.0.insert(tensor))
    }

    /// Uploads a tensor and returns its view.
    fn upload<'a>(&'a mut self, context: &D::Context, from: HostView<'_>) -> Result<D::View<'a>> {
        let tensor = self.reserve(context, (from.dtype(), from.shape()))?;
        D::upload(context, from, tensor)?;
        Ok(D::view(tensor))
    }

    fn upload_optional<'a>(
        &'a mut self,
        context: &D::Context,
        from: Option<HostView<'_>>,
    ) -> Result<Option<D::View<'a>>> {
        from.map(|from| self.upload(context, from)).transpose()
    }
}

/// The tensors of a pass. Outputs of the forward pass are inputs of the backward pass and share
/// their slots.
struct Tensors<D: DeviceSpace> {
    context: D::Context,
    inputs: InputSlots<D>,
    out: Slot<D>,
    lse: Slot<D>,
    max: Slot<D>,
    sum: Slot<D>,
    ties: Slot<D>,
    dout: Slot<D>,
    dlse: Slot<D>,
    gradients: GradientSlots<D>,
}

struct InputSlots<D: DeviceSpace> {
    q: Slot<D>,
    k: Slot<D>,
    v: Slot<D>,
    bias: Slot<D>,
    sinks: Slot<D>,
}

struct GradientSlots<D: DeviceSpace> {
    dq: Slot<D>,
    dk: Slot<D>,
    dv: Slot<D>,
    dbias: Slot<D>,
    dsinks: Slot<D>,
}

impl<D: DeviceSpace> Tensors<D> {
    fn new(context: D::Context) -> Self {
        let slot = || Slot(None);
        Self {
            context,
            inputs: InputSlots { q: slot(), k: slot(), v: slot(), bias: slot(), sinks: slot() },
            out: slot(),
            lse: slot(),
            max: slot(),
            sum: slot(),
            ties: slot(),
            dout: slot(),
            dlse: slot(),
            gradients: GradientSlots {
                dq: slot(),
                dk: slot(),
                dv: slot(),
                dbias: slot(),
                dsinks: slot(),
            },
        }
    }
}

impl<D: DeviceSpace> InputSlots<D> {
    fn upload<'a>(
        &'a mut self,
        context: &D::Context,
        inputs: &Inputs<'_, HostViews<D>>,
    ) -> Result<Inputs<'a, D>> {
        Ok(Inputs {
            q: self.q.upload(context, inputs.q)?,
            k: self.k.upload(context, inputs.k)?,
            v: self.v.upload(context, inputs.v)?,
            bias: self.bias.upload_optional(context, inputs.bias)?,
            sinks: self.sinks.upload_optional(context, inputs.sinks)?,
        })
    }
}

impl<W: Workspace<Space = D>, D: DeviceSpace> Workspace for OnHostWorkspace<W, D> {
    type Space = HostViews<D>;
    type Forward<'p> = OnHostForward<'p, W::Forward<'p>, D>;
    type Backward<'p> = OnHostBackward<'p, W::Backward<'p>, D>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        self.inner.update(shard)
    }

    fn forward<'p>(&'p mut self, inputs: Inputs<'p, HostViews<D>>) -> Result<Self::Forward<'p>> {
        let Tensors { context, inputs: slots, out, lse, max, sum, ties, .. } = &mut self.tensors;
        let inputs = slots.upload(context, &inputs)?;
        let outputs = OutputSlots { out, lse, max, sum, ties };
        Ok(OnHostForward { pass: self.inner.forward(inputs)?, context, outputs })
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<'p, HostViews<D>>,
        mode: BackwardMode,
    ) -> Result<Self::Backward<'p>> {
        let Tensors { context, inputs: slots, out, lse, max, ties, dout, dlse, gradients, .. } =
            &mut self.tensors;
        let inputs = BackwardInputs {
            forward: slots.upload(context, &inputs.forward)?,
            out: out.upload(context, inputs.out)?,
            lse: lse.upload(context, inputs.lse)?,
            max: max.upload_optional(context, inputs.max)?,
            ties: ties.upload_optional(context, inputs.ties)?,
            dout: dout.upload(context, inputs.dout)?,
            dlse: dlse.upload_optional(context, inputs.dlse)?,
        };
        Ok(OnHostBackward { pass: self.inner.backward(inputs, mode)?, context, gradients })
    }
}

struct OutputSlots<'p, D: DeviceSpace> {
    out: &'p mut Slot<D>,
    lse: &'p mut Slot<D>,
    max: &'p mut Slot<D>,
    sum: &'p mut Slot<D>,
    ties: &'p mut Slot<D>,
}

/// Forward pass of [`OnHost`].
pub struct OnHostForward<'p, P, D: DeviceSpace> {
    pass: P,
    context: &'p D::Context,
    outputs: OutputSlots<'p, D>,
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
        let on_device = slot.reserve(context, (on_host.dtype(), on_host.shape()))?;
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

    fn download(self, context: &D::Context) -> Result<()> {
        D::download(context, self.on_device, self.on_host)
    }
}

/// Downloads the outputs that there are.
fn download_all<D: DeviceSpace, const N: usize>(
    context: &D::Context,
    outputs: [Option<Output<'_, '_, D>>; N],
) -> Result<()> {
    outputs.into_iter().flatten().try_for_each(|output| output.download(context))
}

impl<P: ForwardPass<D>, D: DeviceSpace> ForwardPass<HostViews<D>> for OnHostForward<'_, P, D> {
    fn local_kv(&mut self, into: &mut D::Buffer, readers: Readers) -> Result<D::Event> {
        self.pass.local_kv(into, readers)
    }

    fn attend(&mut self, kv: &Block<'_, HostViews<D>>, tick: Tick<'_>) -> Result<()> {
        self.pass.attend(&on_device(kv), tick)
    }

    fn finish(self, outputs: &mut Outputs<'_, HostViews<D>>) -> Result<()> {
        let Self { pass, context, outputs: slots } = self;
        let mut out = Output::new(context, slots.out, &mut outputs.out)?;
        let mut lse = Output::new(context, slots.lse, &mut outputs.lse)?;
        let mut max = Output::optional(context, slots.max, outputs.max.as_mut())?;
        let mut sum = Output::optional(context, slots.sum, outputs.sum.as_mut())?;
        let mut ties = Output::optional(context, slots.ties, outputs.ties.as_mut())?;
        pass.finish(&mut Outputs {
            out: out.view(),
            lse: lse.view(),
            max: max.as_mut().map(Output::view),
            sum: sum.as_mut().map(Output::view),
            ties: ties.as_mut().map(Output::view),
        })?;
        download_all(context, [Some(out), Some(lse), max, sum, ties])
    }
}

/// Backward pass of [`OnHost`].
pub struct OnHostBackward<'p, P, D: DeviceSpace> {
    pass: P,
    context: &'p D::Context,
    gradients: &'p mut GradientSlots<D>,
}

impl<P: BackwardPass<D>, D: DeviceSpace> BackwardPass<HostViews<D>> for OnHostBackward<'_, P, D> {
    fn local_kv(&mut self, into: &mut D::Buffer, readers: Readers) -> Result<D::Event> {
        self.pass.local_kv(into, readers)
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

    fn finish(self, dkv: &D::Buffer, gradients: &mut Gradients<'_, HostViews<D>>) -> Result<()> {
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
        )?;
        download_all(context, [Some(dq), Some(dk), Some(dv), dbias, dsinks])
    }
}

/// The same block in the space of the device.
const fn on_device<'a, D: Space>(block: &Block<'a, HostViews<D>>) -> Block<'a, D> {
    Block { buffer: block.buffer, ready: block.ready, rows: block.rows }
}
