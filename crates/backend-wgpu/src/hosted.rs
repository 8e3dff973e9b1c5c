//! The same backend for those whose tensors and blocks are in host memory: files, and host transports without staging.
//!
//! Queries, accumulators and gradients of queries stay on the device across the ring; blocks go to it as they arrive, and gradients of keys come
//! back from it, which waits for the device. Who has tensors on the device uses [`Wgpu`] over [`annulus_comm::Staged`] instead.

use std::ops::Range;

use annulus_core::{Backend, Block, DType, Error, Gradients, Host, HostBuffer, Inputs, Local, Outputs, Result, Saved, Spec, Tick, index};

use crate::{
    Gpu, Wgpu, WgpuSpace, Workspace,
    fault::fault,
    memory::{GpuBuffer, Queued},
    rooms::{Returning, Rooms, Uploaded, UploadedSaved},
};

/// A [`Wgpu`] whose space is host memory.
#[derive(Debug, Clone)]
pub struct Hosted {
    inner: Wgpu,
}

impl Hosted {
    /// A backend on this device. Several ranks may share one.
    pub const fn new(gpu: Gpu) -> Self {
        Self { inner: Wgpu::new(gpu) }
    }

    /// The device.
    pub const fn gpu(&self) -> &Gpu {
        self.inner.gpu()
    }
}

/// What stays on the device, and room for what comes and goes.
#[derive(Debug)]
pub struct HostedWorkspace {
    inner: Workspace,
    rooms: Rooms,
    inputs: Option<Uploaded>,
    saved: Option<UploadedSaved>,
    /// A block of keys and values, or of queries.
    block: GpuBuffer,
    /// Gradients of a block, or of this rank's keys.
    fresh: Option<GpuBuffer>,
}

impl HostedWorkspace {
    fn new(inner: &Wgpu, local: &Local, backward: bool) -> Result<Self> {
        let spec = &local.spec;
        let keys = local.most_block_rows.max(local.keys.len() as u64);
        let queries = local.most_query_rows.max(local.queries.len() as u64);
        let block = (keys * spec.kv_record().bytes()).max(if backward { queries * spec.query_record().bytes() } else { 0 });
        let fresh = backward.then(|| inner.allocate(keys * spec.gradient_record().bytes())).transpose()?;
        Ok(Self {
            inner: inner.workspace(local, backward)?,
            rooms: Rooms::default(),
            inputs: None,
            saved: None,
            block: inner.allocate(block)?,
            fresh,
        })
    }

    /// Copies what a pass is given.
    fn put(&mut self, gpu: &Gpu, inputs: &Inputs<'_, Host>) -> Result<()> {
        self.inputs.take().into_iter().for_each(|old| old.into_rooms(&mut self.rooms));
        self.inputs = Some(Uploaded::new(gpu, &mut self.rooms, inputs)?);
        Ok(())
    }

    /// Copies what a backward pass is given besides.
    fn put_saved(&mut self, gpu: &Gpu, saved: &Saved<'_, Host>) -> Result<()> {
        self.saved.take().into_iter().for_each(|old| old.into_rooms(&mut self.rooms));
        self.saved = Some(UploadedSaved::new(gpu, &mut self.rooms, saved)?);
        Ok(())
    }

    fn inputs(inputs: &Option<Uploaded>) -> Result<Inputs<'_, WgpuSpace>> {
        inputs.as_ref().map(Uploaded::view).ok_or_else(|| fault("a pass that was not begun"))
    }

    fn saved(saved: &Option<UploadedSaved>) -> Result<Saved<'_, WgpuSpace>> {
        saved.as_ref().map(UploadedSaved::view).ok_or_else(|| fault("a backward pass that was not begun"))
    }

    fn fresh(fresh: &mut Option<GpuBuffer>) -> Result<&mut GpuBuffer> {
        fresh.as_mut().ok_or_else(|| Error::invalid("backward", "a workspace made for forward only", "one made with backward"))
    }
}

/// Copies the first `bytes` bytes of a host buffer to the device.
fn send(gpu: &Gpu, from: &HostBuffer, into: &GpuBuffer, bytes: u64) -> Result<()> {
    let whole = from.bytes().get(..index(bytes)).ok_or_else(|| fault("a block with too few records"))?;
    if whole.is_empty() {
        return Ok(());
    }
    gpu.write(&into.buffer, whole, &[(0..bytes.next_multiple_of(4), 0)])
}

/// Copies the first `bytes` bytes of a device buffer to the host, and waits for them.
fn receive(gpu: &Gpu, from: &GpuBuffer, into: &mut HostBuffer, bytes: u64) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let place = into.bytes_mut().ok_or_else(|| fault("a block buffer is still in flight"))?;
    let place = place.get_mut(..index(bytes)).ok_or_else(|| fault("a block buffer that is too small"))?;
    place.copy_from_slice(&gpu.read(&from.buffer, bytes)?);
    Ok(())
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

    fn narrowing(&self, spec: &Spec) -> Option<DType> {
        self.inner.narrowing(spec)
    }

    /// As [`Wgpu`].
    ///
    /// # Errors
    /// As [`Wgpu`].
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
        let backward = workspace.inner.backward;
        *workspace = HostedWorkspace::new(&self.inner, local, backward)?;
        Ok(())
    }

    fn pack(&self, workspace: &mut HostedWorkspace, _: &Inputs<'_, Host>, into: &mut HostBuffer) -> Result<()> {
        let HostedWorkspace { inner, inputs, block, .. } = workspace;
        let bytes = inner.local.keys.len() as u64 * inner.local.spec.kv_record().bytes();
        self.inner.pack(inner, &HostedWorkspace::inputs(inputs)?, block)?;
        receive(self.gpu(), block, into, bytes)
    }

    fn begin(&self, workspace: &mut HostedWorkspace, inputs: &Inputs<'_, Host>) -> Result<()> {
        workspace.put(self.gpu(), inputs)?;
        self.inner.begin(&mut workspace.inner, &HostedWorkspace::inputs(&workspace.inputs)?)
    }

    fn attend(&self, workspace: &mut HostedWorkspace, _: &Inputs<'_, Host>, block: &Block<'_, Host>, tick: Tick<'_>) -> Result<()> {
        let HostedWorkspace { inner, inputs, block: room, .. } = workspace;
        send(self.gpu(), block.buffer, room, block.rows.len() as u64 * inner.local.spec.kv_record().bytes())?;
        let block = Block { buffer: &*room, ready: &Queued, rows: block.rows };
        self.inner.attend(inner, &HostedWorkspace::inputs(inputs)?, &block, tick)
    }

    fn finish(&self, workspace: &mut HostedWorkspace, _: &Inputs<'_, Host>, outputs: &mut Outputs<'_, Host>) -> Result<()> {
        let gpu = self.gpu();
        let HostedWorkspace { inner, rooms, inputs, .. } = workspace;
        let mut out = Returning::new(gpu, rooms, &mut outputs.out)?;
        let mut lse = Returning::new(gpu, rooms, &mut outputs.lse)?;
        let mut max = Returning::maybe(gpu, rooms, outputs.max.as_mut())?;
        let mut sum = Returning::maybe(gpu, rooms, outputs.sum.as_mut())?;
        let mut ties = Returning::maybe(gpu, rooms, outputs.ties.as_mut())?;
        let mut on_device = Outputs {
            out: &mut out.tensor,
            lse: &mut lse.tensor,
            max: max.as_mut().map(|max| &mut max.tensor),
            sum: sum.as_mut().map(|sum| &mut sum.tensor),
            ties: ties.as_mut().map(|ties| &mut ties.tensor),
        };
        self.inner.finish(inner, &HostedWorkspace::inputs(inputs)?, &mut on_device)?;
        [Some(out), Some(lse), max, sum, ties].into_iter().flatten().try_for_each(|each| each.land(rooms))
    }

    fn begin_backward(&self, workspace: &mut HostedWorkspace, inputs: &Inputs<'_, Host>, saved: &Saved<'_, Host>) -> Result<()> {
        workspace.put(self.gpu(), inputs)?;
        workspace.put_saved(self.gpu(), saved)?;
        let (inputs, saved) = (HostedWorkspace::inputs(&workspace.inputs)?, HostedWorkspace::saved(&workspace.saved)?);
        self.inner.begin_backward(&mut workspace.inner, &inputs, &saved)
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
        send(self.gpu(), block.buffer, room, block.rows.len() as u64 * inner.local.spec.kv_record().bytes())?;
        let block = Block { buffer: &*room, ready: &Queued, rows: block.rows };
        self.inner.attend_queries(inner, &HostedWorkspace::inputs(inputs)?, &HostedWorkspace::saved(saved)?, &block, tick)
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
        let HostedWorkspace { inner, inputs, saved, block: room, fresh: made, .. } = workspace;
        let (rows, made) = (block.rows.len() as u64, HostedWorkspace::fresh(made)?);
        send(self.gpu(), block.buffer, room, rows * inner.local.spec.kv_record().bytes())?;
        let block = Block { buffer: &*room, ready: &Queued, rows: block.rows };
        self.inner.attend_keys(inner, &HostedWorkspace::inputs(inputs)?, &HostedWorkspace::saved(saved)?, &block, made, tick)?;
        receive(self.gpu(), made, fresh, rows * inner.local.spec.gradient_record().bytes())
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
        self.inner.pack_queries(inner, &HostedWorkspace::inputs(inputs)?, &HostedWorkspace::saved(saved)?, block)?;
        receive(self.gpu(), block, into, bytes)
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
        let (fresh, spec) = (HostedWorkspace::fresh(fresh)?, inner.local.spec.clone());
        let bytes = inner.local.keys.len() as u64 * spec.gradient_record().bytes();
        send(self.gpu(), queries.buffer, room, queries.rows.len() as u64 * spec.query_record().bytes())?;
        send(self.gpu(), home, fresh, bytes)?;
        let block = Block { buffer: &*room, ready: &Queued, rows: queries.rows };
        self.inner.attend_keys_home(inner, &HostedWorkspace::inputs(inputs)?, &block, fresh, tick)?;
        receive(self.gpu(), fresh, home, bytes)
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
        let bytes = workspace.inner.local.spec.gradient_record().bytes();
        let target = into.bytes_mut().ok_or_else(|| fault("a block buffer is still in flight"))?;
        for (to, source) in places {
            let [to, source] = [to, source].map(|rows| index(rows.start * bytes)..index(rows.end * bytes));
            let (Some(to), Some(source)) = (target.get_mut(to), from.bytes().get(source)) else {
                return Err(fault("gradient records past the end"));
            };
            for (to, source) in to.chunks_exact_mut(4).zip(source.chunks_exact(4)) {
                let number = |bytes: &[u8]| bytes.try_into().map_or(f32::NAN, f32::from_le_bytes);
                let sum = if add { number(to) + number(source) } else { number(source) };
                to.copy_from_slice(&sum.to_le_bytes());
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
        let gpu = self.gpu();
        let HostedWorkspace { inner, rooms, inputs, fresh, .. } = workspace;
        let fresh = HostedWorkspace::fresh(fresh)?;
        send(gpu, home, fresh, inner.local.keys.len() as u64 * inner.local.spec.gradient_record().bytes())?;
        let mut dq = Returning::new(gpu, rooms, &mut gradients.dq)?;
        let mut dk = Returning::new(gpu, rooms, &mut gradients.dk)?;
        let mut dv = Returning::new(gpu, rooms, &mut gradients.dv)?;
        let mut dbias = Returning::maybe(gpu, rooms, gradients.dbias.as_mut())?;
        let mut dsinks = Returning::maybe(gpu, rooms, gradients.dsinks.as_mut())?;
        let mut on_device = Gradients {
            dq: &mut dq.tensor,
            dk: &mut dk.tensor,
            dv: &mut dv.tensor,
            dbias: dbias.as_mut().map(|dbias| &mut dbias.tensor),
            dsinks: dsinks.as_mut().map(|dsinks| &mut dsinks.tensor),
        };
        self.inner.finish_backward(inner, &HostedWorkspace::inputs(inputs)?, fresh, &mut on_device)?;
        [Some(dq), Some(dk), Some(dv), dbias, dsinks].into_iter().flatten().try_for_each(|each| each.land(rooms))
    }
}
