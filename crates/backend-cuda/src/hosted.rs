//! The same backend for those whose tensors and blocks are in host memory: files, the typed plans, host transports without staging.
//!
//! Queries, accumulators and gradients of queries stay on the device across the ring; blocks go to it as they arrive, and gradients of keys come back
//! from it, for which the host waits. Who has tensors on the device uses [`Cuda`] over `annulus_comm::Staged` instead.

use std::{ops::Range, time::Duration};

use annulus_core::{
    Backend, Block, DType, Element, Error, Gradients, Host, HostBuffer, HostView, HostViewMut, Inputs, Local, Outputs, Result, Saved, Spec,
    Tick, index,
};
use annulus_device_cuda::{CudaBuffer, CudaSpace, CudaTensor, Stream};
use ndarray::{ArrayView4, ArrayViewMut4};

use crate::{Cuda, Workspace};

/// No copy waits longer than this for the work before it.
const DEADLINE: Duration = Duration::from_secs(120);

/// A [`Cuda`] whose space is host memory.
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

/// What stays on the device, and room for what comes and goes.
#[derive(Debug)]
pub struct HostedWorkspace {
    inner: Workspace,
    inputs: Option<Uploaded>,
    saved: Option<UploadedSaved>,
    /// A block of keys and values, or of queries.
    block: CudaBuffer,
    /// Gradients of a block, or of this rank's keys.
    fresh: CudaBuffer,
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
    fn new(stream: &Stream, inputs: &Inputs<'_, Host>) -> Result<Self> {
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
    fn new(stream: &Stream, saved: &Saved<'_, Host>) -> Result<Self> {
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

impl HostedWorkspace {
    fn new(inner: &Cuda, local: &Local, backward: bool) -> Result<Self> {
        let spec = &local.spec;
        let keys = local.most_block_rows.max(local.keys.len() as u64);
        let queries = local.most_query_rows.max(local.queries.len() as u64);
        let block = (keys * spec.kv_record().bytes()).max(if backward { queries * spec.query_record().bytes() } else { 0 });
        let fresh = if backward { keys * spec.gradient_record().bytes() } else { 0 };
        let (block, fresh) = (inner.allocate(block)?, inner.allocate(fresh)?);
        Ok(Self { inner: inner.workspace(local, backward)?, inputs: None, saved: None, block, fresh })
    }
}

fn begun(inputs: &Option<Uploaded>) -> Result<Inputs<'_, CudaSpace>> {
    inputs.as_ref().map(Uploaded::view).ok_or_else(|| fault("a pass that was not begun"))
}

fn begun_backward(saved: &Option<UploadedSaved>) -> Result<Saved<'_, CudaSpace>> {
    saved.as_ref().map(UploadedSaved::view).ok_or_else(|| fault("a backward pass that was not begun"))
}

/// Copies the first `bytes` bytes of a host buffer to the device.
fn send(stream: &Stream, from: &HostBuffer, into: &CudaBuffer, bytes: u64) -> Result<()> {
    let whole = from.bytes().get(..index(bytes)).filter(|_| bytes <= into.len());
    let whole = whole.ok_or_else(|| fault("a block of another size than its rows"))?;
    // SAFETY: both sides hold so many bytes, and all work on `into` is in this stream.
    unsafe { stream.copy_to_device(into.address(), whole) }
}

/// Copies the first `bytes` bytes of a device buffer to the host, and waits for them.
fn receive(stream: &Stream, from: &CudaBuffer, into: &mut HostBuffer, bytes: u64) -> Result<()> {
    let place = into.bytes_mut().ok_or_else(|| fault("a block buffer is still in flight"))?;
    let place = place.get_mut(..index(bytes)).filter(|_| bytes <= from.len());
    let place = place.ok_or_else(|| fault("a block buffer that is too small"))?;
    // SAFETY: both sides hold so many bytes, and all work on `from` is in this stream.
    unsafe { stream.copy_to_host(place, from.address(), DEADLINE) }
}

fn fault(what: &str) -> Error {
    Error::Device { what: what.into() }
}

impl Backend for Hosted {
    type Space = Host;
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

    fn allocate(&self, bytes: u64) -> Result<HostBuffer> {
        HostBuffer::zeroed(bytes)
    }

    fn workspace(&self, local: &Local, backward: bool) -> Result<HostedWorkspace> {
        HostedWorkspace::new(&self.inner, local, backward)
    }

    fn update(&self, workspace: &mut HostedWorkspace, local: &Local) -> Result<()> {
        let backward = workspace.inner.backward.is_some();
        *workspace = HostedWorkspace::new(&self.inner, local, backward)?;
        Ok(())
    }

    fn pack(&self, workspace: &mut HostedWorkspace, _: &Inputs<'_, Host>, into: &mut HostBuffer) -> Result<()> {
        let HostedWorkspace { inner, inputs, block, .. } = workspace;
        let bytes = inner.local.keys.len() as u64 * inner.local.spec.kv_record().bytes();
        self.inner.pack(inner, &begun(inputs)?, block)?;
        receive(self.stream(), block, into, bytes)
    }

    fn begin(&self, workspace: &mut HostedWorkspace, inputs: &Inputs<'_, Host>) -> Result<()> {
        let uploaded = workspace.inputs.insert(Uploaded::new(self.stream(), inputs)?);
        self.inner.begin(&mut workspace.inner, &uploaded.view())
    }

    fn attend(&self, workspace: &mut HostedWorkspace, _: &Inputs<'_, Host>, block: &Block<'_, Host>, tick: Tick<'_>) -> Result<()> {
        let HostedWorkspace { inner, inputs, block: room, .. } = workspace;
        send(self.stream(), block.buffer, room, block.rows.len() as u64 * inner.local.spec.kv_record().bytes())?;
        let ready = self.stream().record()?;
        let block = Block { buffer: &*room, ready: &ready, rows: block.rows };
        self.inner.attend(inner, &begun(inputs)?, &block, tick)
    }

    fn finish(&self, workspace: &mut HostedWorkspace, _: &Inputs<'_, Host>, outputs: &mut Outputs<'_, Host>) -> Result<()> {
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

    fn begin_backward(&self, workspace: &mut HostedWorkspace, inputs: &Inputs<'_, Host>, saved: &Saved<'_, Host>) -> Result<()> {
        let uploaded = workspace.inputs.insert(Uploaded::new(self.stream(), inputs)?);
        let saved = workspace.saved.insert(UploadedSaved::new(self.stream(), saved)?);
        self.inner.begin_backward(&mut workspace.inner, &uploaded.view(), &saved.view())
    }

    fn attend_queries(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, Host>,
        _: &Saved<'_, Host>,
        block: &Block<'_, Host>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let HostedWorkspace { inner, inputs, saved, block: room, .. } = workspace;
        send(self.stream(), block.buffer, room, block.rows.len() as u64 * inner.local.spec.kv_record().bytes())?;
        let ready = self.stream().record()?;
        let block = Block { buffer: &*room, ready: &ready, rows: block.rows };
        self.inner.attend_queries(inner, &begun(inputs)?, &begun_backward(saved)?, &block, tick)
    }

    fn attend_keys(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, Host>,
        _: &Saved<'_, Host>,
        block: &Block<'_, Host>,
        fresh: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        let HostedWorkspace { inner, inputs, saved, block: room, fresh: made } = workspace;
        let rows = block.rows.len() as u64;
        send(self.stream(), block.buffer, room, rows * inner.local.spec.kv_record().bytes())?;
        let ready = self.stream().record()?;
        let block = Block { buffer: &*room, ready: &ready, rows: block.rows };
        self.inner.attend_keys(inner, &begun(inputs)?, &begun_backward(saved)?, &block, made, tick)?;
        receive(self.stream(), made, fresh, rows * inner.local.spec.gradient_record().bytes())
    }

    fn pack_queries(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, Host>,
        _: &Saved<'_, Host>,
        into: &mut HostBuffer,
    ) -> Result<()> {
        let HostedWorkspace { inner, inputs, saved, block, .. } = workspace;
        let bytes = inner.local.queries.len() as u64 * inner.local.spec.query_record().bytes();
        self.inner.pack_queries(inner, &begun(inputs)?, &begun_backward(saved)?, block)?;
        receive(self.stream(), block, into, bytes)
    }

    fn attend_keys_home(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, Host>,
        queries: &Block<'_, Host>,
        home: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        let HostedWorkspace { inner, inputs, block: room, fresh, .. } = workspace;
        let spec = inner.local.spec.clone();
        let bytes = inner.local.keys.len() as u64 * spec.gradient_record().bytes();
        send(self.stream(), queries.buffer, room, queries.rows.len() as u64 * spec.query_record().bytes())?;
        send(self.stream(), home, fresh, bytes)?;
        let ready = self.stream().record()?;
        let block = Block { buffer: &*room, ready: &ready, rows: queries.rows };
        self.inner.attend_keys_home(inner, &begun(inputs)?, &block, fresh, tick)?;
        receive(self.stream(), fresh, home, bytes)
    }

    fn combine(
        &self,
        workspace: &mut HostedWorkspace,
        into: &mut HostBuffer,
        from: &HostBuffer,
        (): &(),
        places: &[(Range<u64>, Range<u64>)],
        add: bool,
    ) -> Result<()> {
        let (record, sums) = (workspace.inner.local.spec.gradient_record().bytes(), workspace.inner.sums());
        let target = into.bytes_mut().ok_or_else(|| fault("a block buffer is still in flight"))?;
        for (to, source) in places {
            let [to, source] = [to, source].map(|rows| index(rows.start * record)..index(rows.end * record));
            let (Some(to), Some(source)) = (target.get_mut(to), from.bytes().get(source)) else {
                return Err(fault("gradient records past the end"));
            };
            if to.len() != source.len() {
                return Err(fault("gradient records of two lengths"));
            }
            match (add, sums) {
                (false, _) => to.copy_from_slice(source),
                (true, DType::F64) => add_numbers::<f64>(to, source),
                (true, _) => add_numbers::<f32>(to, source),
            }
        }
        Ok(())
    }

    fn finish_backward(
        &self,
        workspace: &mut HostedWorkspace,
        _: &Inputs<'_, Host>,
        home: &HostBuffer,
        gradients: &mut Gradients<'_, Host>,
    ) -> Result<()> {
        let stream = self.stream();
        let HostedWorkspace { inner, inputs, fresh, .. } = workspace;
        send(stream, home, fresh, inner.local.keys.len() as u64 * inner.local.spec.gradient_record().bytes())?;
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
        self.inner.finish_backward(inner, &begun(inputs)?, fresh, &mut on_device)?;
        [Some(dq), Some(dk), Some(dv), dbias, dsinks].into_iter().flatten().try_for_each(Returning::land)
    }
}

/// to += from, number by number.
fn add_numbers<T: bytemuck::Pod + std::ops::Add<Output = T>>(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.chunks_exact_mut(size_of::<T>()).zip(from.chunks_exact(size_of::<T>())) {
        let sum = bytemuck::pod_read_unaligned::<T>(to) + bytemuck::pod_read_unaligned::<T>(from);
        to.copy_from_slice(bytemuck::bytes_of(&sum));
    }
}
