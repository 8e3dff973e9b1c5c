//! The same backend for those whose tensors are in host memory: files, the typed plans.
//!
//! Tensors go to the device when a pass begins, and results come back when it ends; in between, queries, accumulators, gradients and the blocks of the
//! ring stay there, whatever moves those: `annulus_comm::nccl`, `annulus_comm::Staged`, or an MPI that takes device memory.

use std::ops::Range;

use annulus_core::{
    Backend, Block, DType, Element, Error, Gradients, HostView, HostViewMut, Inputs, Local, Outputs, Result, Saved, Spec, Tick,
};
use annulus_device_cuda::{CudaBlocks, CudaBuffer, CudaSpace, CudaTensor, Event, Stream};
use ndarray::{ArrayView4, ArrayViewMut4};

use crate::{Cuda, Workspace};

/// A [`Cuda`] for tensors in host memory.
#[derive(Debug, Clone)]
pub struct Hosted {
    inner: Cuda,
}

impl Hosted {
    /// A backend on this device and stream.
    pub const fn new(inner: Cuda) -> Self {
        Self { inner }
    }

    const fn stream(&self) -> &Stream {
        self.inner.stream()
    }
}

/// What stays on the device, a pass's tensors among it.
#[derive(Debug)]
pub struct HostedWorkspace {
    inner: Workspace,
    inputs: Option<Uploaded>,
    saved: Option<UploadedSaved>,
}

#[derive(Debug)]
struct Uploaded {
    q: CudaTensor,
    k: CudaTensor,
    v: CudaTensor,
    bias: Option<CudaTensor>,
    sinks: Option<CudaTensor>,
}

#[derive(Debug)]
struct UploadedSaved {
    out: CudaTensor,
    lse: CudaTensor,
    max: Option<CudaTensor>,
    ties: Option<CudaTensor>,
    dout: CudaTensor,
    dlse: Option<CudaTensor>,
}

impl Uploaded {
    fn new(stream: &Stream, inputs: &Inputs<'_, CudaBlocks>) -> Result<Self> {
        Ok(Self {
            q: upload(stream, inputs.q)?,
            k: upload(stream, inputs.k)?,
            v: upload(stream, inputs.v)?,
            bias: inputs.bias.map(|bias| upload(stream, bias)).transpose()?,
            sinks: inputs.sinks.map(|sinks| upload(stream, sinks)).transpose()?,
        })
    }

    fn view(&self) -> Inputs<'_, CudaSpace> {
        Inputs {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            bias: self.bias.as_ref().map(CudaTensor::view),
            sinks: self.sinks.as_ref().map(CudaTensor::view),
        }
    }
}

impl UploadedSaved {
    fn new(stream: &Stream, saved: &Saved<'_, CudaBlocks>) -> Result<Self> {
        let maybe = |view: Option<HostView<'_>>| view.map(|view| upload(stream, view)).transpose();
        Ok(Self {
            out: upload(stream, saved.out)?,
            lse: upload(stream, saved.lse)?,
            max: maybe(saved.max)?,
            ties: maybe(saved.ties)?,
            dout: upload(stream, saved.dout)?,
            dlse: maybe(saved.dlse)?,
        })
    }

    fn view(&self) -> Saved<'_, CudaSpace> {
        Saved {
            out: self.out.view(),
            lse: self.lse.view(),
            max: self.max.as_ref().map(CudaTensor::view),
            ties: self.ties.as_ref().map(CudaTensor::view),
            dout: self.dout.view(),
            dlse: self.dlse.as_ref().map(CudaTensor::view),
        }
    }
}

fn upload(stream: &Stream, view: HostView<'_>) -> Result<CudaTensor> {
    fn dense<T: Element + bytemuck::Pod>(stream: &Stream, view: ArrayView4<'_, T>, dtype: DType) -> Result<CudaTensor> {
        let shape = view.dim().into();
        let dense = view.as_standard_layout();
        let elements = dense.as_slice().ok_or_else(|| fault("a tensor without a dense form"))?;
        CudaTensor::upload(stream, bytemuck::cast_slice(elements), dtype, shape)
    }
    match view {
        HostView::F64(view) => dense(stream, view, DType::F64),
        HostView::F32(view) => dense(stream, view, DType::F32),
        HostView::Bf16(view) => dense(stream, view, DType::Bf16),
        HostView::F16(view) => dense(stream, view, DType::F16),
    }
}

/// A tensor on the device, and where it goes in the end.
struct Returning<'v, 'a> {
    tensor: CudaTensor,
    view: &'v mut HostViewMut<'a>,
}

impl<'v, 'a> Returning<'v, 'a> {
    fn new(stream: &Stream, view: &'v mut HostViewMut<'a>) -> Result<Self> {
        Ok(Self { tensor: CudaTensor::uninitialized(stream, view.dtype(), view.shape())?, view })
    }

    fn maybe(stream: &Stream, view: Option<&'v mut HostViewMut<'a>>) -> Result<Option<Self>> {
        view.map(|view| Self::new(stream, view)).transpose()
    }

    /// Waits for it and copies it.
    fn land(self) -> Result<()> {
        fn put<T: Element + bytemuck::Pod>(bytes: &[u8], view: &mut ArrayViewMut4<'_, T>) {
            let elements = bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>);
            view.iter_mut().zip(elements).for_each(|(place, element)| *place = element);
        }
        let bytes = self.tensor.download()?;
        match self.view {
            HostViewMut::F64(view) => put(&bytes, view),
            HostViewMut::F32(view) => put(&bytes, view),
            HostViewMut::Bf16(view) => put(&bytes, view),
            HostViewMut::F16(view) => put(&bytes, view),
        }
        Ok(())
    }
}

fn begun(inputs: &Option<Uploaded>) -> Result<Inputs<'_, CudaSpace>> {
    inputs.as_ref().map(Uploaded::view).ok_or_else(|| fault("a pass that was not begun"))
}

fn begun_backward(saved: &Option<UploadedSaved>) -> Result<Saved<'_, CudaSpace>> {
    saved.as_ref().map(UploadedSaved::view).ok_or_else(|| fault("a backward pass that was not begun"))
}

fn fault(what: &str) -> Error {
    Error::Device { what: what.into() }
}

impl Backend for Hosted {
    type Space = CudaBlocks;
    type Workspace = HostedWorkspace;

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn arithmetic(&self) -> String {
        self.inner.arithmetic()
    }

    /// As [`Cuda`].
    ///
    /// # Errors
    /// As [`Cuda`].
    fn supports(&self, spec: &Spec) -> Result<()> {
        self.inner.supports(spec)
    }

    fn allocate(&self, bytes: u64) -> Result<CudaBuffer> {
        self.inner.allocate(bytes)
    }

    fn workspace(&self, local: &Local, backward: bool) -> Result<HostedWorkspace> {
        Ok(HostedWorkspace { inner: self.inner.workspace(local, backward)?, inputs: None, saved: None })
    }

    fn update(&self, workspace: &mut HostedWorkspace, local: &Local) -> Result<()> {
        self.inner.update(&mut workspace.inner, local)
    }

    fn pack(&self, workspace: &mut HostedWorkspace, _: &Inputs<'_, CudaBlocks>, into: &mut CudaBuffer) -> Result<Event> {
        let HostedWorkspace { inner, inputs, .. } = workspace;
        self.inner.pack(inner, &begun(inputs)?, into)
    }

    fn begin(&self, workspace: &mut HostedWorkspace, inputs: &Inputs<'_, CudaBlocks>) -> Result<()> {
        let uploaded = workspace.inputs.insert(Uploaded::new(self.stream(), inputs)?);
        self.inner.begin(&mut workspace.inner, &uploaded.view())
    }

    fn attend(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, CudaBlocks>,
        block: &Block<'_, CudaBlocks>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let HostedWorkspace { inner, inputs, .. } = workspace;
        self.inner.attend(inner, &begun(inputs)?, &on_device(block), tick)
    }

    fn finish(&self, workspace: &mut HostedWorkspace, _: &Inputs<'_, CudaBlocks>, outputs: &mut Outputs<'_, CudaBlocks>) -> Result<()> {
        let (HostedWorkspace { inner, inputs, .. }, stream) = (workspace, self.stream());
        let mut out = Returning::new(stream, &mut outputs.out)?;
        let mut lse = Returning::new(stream, &mut outputs.lse)?;
        let mut max = Returning::maybe(stream, outputs.max.as_mut())?;
        let mut sum = Returning::maybe(stream, outputs.sum.as_mut())?;
        let mut ties = Returning::maybe(stream, outputs.ties.as_mut())?;
        let mut on_device = Outputs {
            out: out.tensor.view_mut(),
            lse: lse.tensor.view_mut(),
            max: max.as_mut().map(|max| max.tensor.view_mut()),
            sum: sum.as_mut().map(|sum| sum.tensor.view_mut()),
            ties: ties.as_mut().map(|ties| ties.tensor.view_mut()),
        };
        self.inner.finish(inner, &begun(inputs)?, &mut on_device)?;
        [Some(out), Some(lse), max, sum, ties].into_iter().flatten().try_for_each(Returning::land)
    }

    fn begin_backward(
        &self,
        workspace: &mut HostedWorkspace,
        inputs: &Inputs<'_, CudaBlocks>,
        saved: &Saved<'_, CudaBlocks>,
    ) -> Result<()> {
        let uploaded = workspace.inputs.insert(Uploaded::new(self.stream(), inputs)?);
        let saved = workspace.saved.insert(UploadedSaved::new(self.stream(), saved)?);
        self.inner.begin_backward(&mut workspace.inner, &uploaded.view(), &saved.view())
    }

    fn attend_queries(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, CudaBlocks>,
        _: &Saved<'_, CudaBlocks>,
        block: &Block<'_, CudaBlocks>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let HostedWorkspace { inner, inputs, saved } = workspace;
        self.inner.attend_queries(inner, &begun(inputs)?, &begun_backward(saved)?, &on_device(block), tick)
    }

    fn attend_keys(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, CudaBlocks>,
        _: &Saved<'_, CudaBlocks>,
        block: &Block<'_, CudaBlocks>,
        fresh: &mut CudaBuffer,
        tick: Tick<'_>,
    ) -> Result<Event> {
        let HostedWorkspace { inner, inputs, saved } = workspace;
        self.inner.attend_keys(inner, &begun(inputs)?, &begun_backward(saved)?, &on_device(block), fresh, tick)
    }

    fn pack_queries(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, CudaBlocks>,
        _: &Saved<'_, CudaBlocks>,
        into: &mut CudaBuffer,
    ) -> Result<Event> {
        let HostedWorkspace { inner, inputs, saved } = workspace;
        self.inner.pack_queries(inner, &begun(inputs)?, &begun_backward(saved)?, into)
    }

    fn attend_keys_home(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, CudaBlocks>,
        queries: &Block<'_, CudaBlocks>,
        home: &mut CudaBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        let HostedWorkspace { inner, inputs, .. } = workspace;
        self.inner.attend_keys_home(inner, &begun(inputs)?, &on_device(queries), home, tick)
    }

    fn combine(
        &self,
        workspace: &mut HostedWorkspace,
        into: &mut CudaBuffer,
        from: &CudaBuffer,
        ready: &Event,
        places: &[(Range<u64>, Range<u64>)],
        add: bool,
    ) -> Result<Event> {
        self.inner.combine(&mut workspace.inner, into, from, ready, places, add)
    }

    fn finish_backward(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, CudaBlocks>,
        home: &CudaBuffer,
        gradients: &mut Gradients<'_, CudaBlocks>,
    ) -> Result<()> {
        let (HostedWorkspace { inner, inputs, .. }, stream) = (workspace, self.stream());
        let mut dq = Returning::new(stream, &mut gradients.dq)?;
        let mut dk = Returning::new(stream, &mut gradients.dk)?;
        let mut dv = Returning::new(stream, &mut gradients.dv)?;
        let mut dbias = Returning::maybe(stream, gradients.dbias.as_mut())?;
        let mut dsinks = Returning::maybe(stream, gradients.dsinks.as_mut())?;
        let mut on_device = Gradients {
            dq: dq.tensor.view_mut(),
            dk: dk.tensor.view_mut(),
            dv: dv.tensor.view_mut(),
            dbias: dbias.as_mut().map(|dbias| dbias.tensor.view_mut()),
            dsinks: dsinks.as_mut().map(|dsinks| dsinks.tensor.view_mut()),
        };
        self.inner.finish_backward(inner, &begun(inputs)?, home, &mut on_device)?;
        [Some(dq), Some(dk), Some(dv), dbias, dsinks].into_iter().flatten().try_for_each(Returning::land)
    }
}

/// The same block for the backend whose tensors are on the device, too.
const fn on_device<'a>(block: &Block<'a, CudaBlocks>) -> Block<'a, CudaSpace> {
    Block { buffer: block.buffer, ready: block.ready, rows: block.rows }
}
