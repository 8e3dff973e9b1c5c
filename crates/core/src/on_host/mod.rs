//! Host tensors in front of a device backend.
//!
//! ```text
//! host tensors ──upload──▶ q, k, v, …    pass on the device    out, … ──download──▶ host tensors
//!                                        blocks: device buffers, for any transport of the space
//! ```
//! Inputs are uploaded when a pass starts and outputs are downloaded when it finishes. Between them
//! nothing is copied: queries, accumulators, gradients and blocks stay on the device. A device that
//! shares the memory of the host reads and writes the host tensors themselves.

use std::{marker::PhantomData, ops::Range};

use crate::{
    Arrived, Backend, BackwardInputs, BackwardMode, BackwardPass, Block, DType, DeviceSpace,
    ForwardPass, Gradients, HostBuffer, HostView, HostViewMut, Inputs, Outputs, Passes, RangePairs,
    RankShard, Reduction, Result, RowSet, Space, StagedSpace, Tick, Workspace,
};

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

    crate::forward_backend! { capabilities allocate write_block }

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
            .try_map(|(slot, tensor)| slot.input(context, tensor, &mut *tick))?;
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
        let Outputs { out, lse, max: _, sum, ties, out_residual, .. } = outputs.as_mut();
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
            slots.zip(inputs).try_map(|(slot, tensor)| slot.input(context, tensor, &mut *tick))?;
        Ok(OnHostBackward { pass: self.inner.backward(inputs, mode, tick)?, context, gradients })
    }
}

/// Forward pass of [`crate::OnHost`].
pub struct OnHostForward<'p, P, D: DeviceSpace> {
    pass: P,
    context: &'p D::Context,
    outputs: &'p mut Outputs<Slot<D>>,
}

/// An output of the pass on the device and the caller's tensor that it is downloaded to.
struct Output<'a, 'b, D: DeviceSpace> {
    /// `None` if the device writes to the caller's tensor.
    on_device: Option<&'a mut D::Tensor>,
    on_host: &'a mut HostViewMut<'b>,
}

impl<'a, 'b, D: DeviceSpace> Output<'a, 'b, D> {
    fn new(
        context: &D::Context,
        slot: &'a mut Slot<D>,
        on_host: &'a mut HostViewMut<'b>,
    ) -> Result<Self> {
        if D::shares_host_memory(context) {
            return Ok(Self { on_device: None, on_host });
        }
        let on_device = Some(slot.reserve(context, on_host.dtype(), on_host.shape())?);
        Ok(Self { on_device, on_host })
    }

    fn view(&mut self, context: &D::Context) -> Result<D::ViewMut<'_>> {
        match &mut self.on_device {
            Some(tensor) => Ok(D::view_mut(tensor)),
            None => D::shared_view_mut(context, self.on_host.reborrow()),
        }
    }

    fn download(self, context: &D::Context, tick: Tick<'_>) -> Result<()> {
        let Some(on_device) = self.on_device else { return Ok(()) };
        D::download(context, on_device, self.on_host, tick)
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
        pass.finish(&mut outputs.as_mut().try_map(|output| output.view(context))?, &mut *tick)?;
        outputs.into_tensors().try_for_each(|output| output.download(context, &mut *tick))
    }
}

/// Backward pass of [`crate::OnHost`].
pub struct OnHostBackward<'p, P, D: DeviceSpace> {
    pass: P,
    context: &'p D::Context,
    gradients: &'p mut Gradients<Slot<D>>,
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
        pass.finish(
            dkv,
            &mut outputs.as_mut().try_map(|output| output.view(context))?,
            &mut *tick,
        )?;
        outputs.into_tensors().try_for_each(|output| output.download(context, &mut *tick))
    }
}

/// The same block in the space of the device.
const fn on_device<'a, D: Space>(block: &Block<'a, HostViews<D>>) -> Block<'a, D> {
    let &Block { buffer, ready, rows, first_local } = block;
    Block { buffer, ready, rows, first_local }
}

/// A tensor on the device, allocated when it is first used and again when its shape changes.
struct Slot<D: DeviceSpace>(Option<D::Tensor>);

impl<D: DeviceSpace> Slot<D> {
    /// Returns a tensor of this type and shape; its contents are unspecified.
    fn reserve(
        &mut self,
        context: &D::Context,
        dtype: DType,
        shape: [usize; 4],
    ) -> Result<&mut D::Tensor> {
        let tensor = match self.0.take() {
            Some(tensor) if D::describe(&D::view(&tensor)) == (dtype, shape) => tensor,
            _ => D::tensor(context, dtype, shape)?,
        };
        Ok(self.0.insert(tensor))
    }

    /// Uploads a tensor, unless the device shares the memory that it is in; returns its view.
    fn input<'a>(
        &'a mut self,
        context: &D::Context,
        from: HostView<'a>,
        tick: Tick<'_>,
    ) -> Result<D::View<'a>> {
        if D::shares_host_memory(context) {
            return D::shared_view(context, from);
        }
        let tensor = self.reserve(context, from.dtype(), from.shape())?;
        D::upload(context, from, tensor, tick)?;
        Ok(D::view(tensor))
    }

    fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |tensor| {
            let (dtype, shape) = D::describe(&D::view(tensor));
            shape.iter().product::<usize>() as u64 * dtype.bytes() as u64
        })
    }
}

/// The tensors of passes, with a slot for every optional one. Outputs of the forward pass are
/// inputs of the backward pass and share their slots.
struct PassTensors<D: DeviceSpace> {
    context: D::Context,
    inputs: Inputs<Slot<D>>,
    outputs: Outputs<Slot<D>>,
    dout: Slot<D>,
    dlse: Slot<D>,
    gradients: Gradients<Slot<D>>,
}

impl<D: DeviceSpace> PassTensors<D> {
    fn new(context: D::Context) -> Self {
        let slot = || Slot(None);
        let optional = || Some(slot());
        Self {
            context,
            inputs: Inputs { q: slot(), k: slot(), v: slot(), bias: optional(), sinks: optional() },
            outputs: Outputs {
                out: slot(),
                lse: slot(),
                max: optional(),
                sum: optional(),
                ties: optional(),
                out_residual: optional(),
                // no device backend writes statistics (`Capabilities::statistics`)
                statistics: None,
                head_statistics: None,
            },
            dout: slot(),
            dlse: slot(),
            gradients: Gradients {
                dq: slot(),
                dk: slot(),
                dv: slot(),
                dbias: optional(),
                dsinks: optional(),
            },
        }
    }

    /// Returns the bytes of all tensors that there are.
    fn bytes(&self) -> u64 {
        let Self { context: _, inputs, outputs, dout, dlse, gradients } = self;
        let passes = inputs.as_ref().into_tensors().chain(outputs.as_ref().into_tensors());
        let slots = passes.chain(gradients.as_ref().into_tensors()).chain([dout, dlse]);
        slots.map(Slot::bytes).sum()
    }
}

/// The space of [`crate::OnHost`]: tensors in host memory, blocks and events of the device space
/// `D`.
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

    fn is_shared(buffer: &D::Buffer) -> bool {
        D::is_shared(buffer)
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

    fn staging_buffer(copier: &mut D::Copier, bytes: u64) -> Result<HostBuffer> {
        D::staging_buffer(copier, bytes)
    }

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
        tick: Tick<'_>,
    ) -> Result<D::Upload> {
        D::upload(copier, from, into, ranges, tick)
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
