//! Tensors of the host on the device: copied to it, or room for what comes back, in memory that the next pass uses again.

use annulus_core::{DType, Element, Error, Host, HostView, HostViewMut, Inputs, Result, Saved};

use crate::{Gpu, Tensor, WgpuSpace};

/// Tensors of earlier passes, to be used again: the queue keeps its order.
#[derive(Debug, Default)]
pub(crate) struct Rooms(Vec<Tensor>);

impl Rooms {
    /// A tensor for anything.
    fn take(&mut self, gpu: &Gpu, shape: [usize; 4], dtype: DType) -> Result<Tensor> {
        let place = self.0.iter().position(|tensor| (tensor.shape, tensor.dtype) == (shape, dtype));
        place.map_or_else(|| Tensor::zeros(gpu, shape, dtype), |place| Ok(self.0.swap_remove(place)))
    }

    /// Copies a tensor to the device.
    fn upload(&mut self, gpu: &Gpu, view: HostView<'_>) -> Result<Tensor> {
        let tensor = self.take(gpu, view.shape(), view.dtype())?;
        match view {
            HostView::F64(_) => return Err(Error::unsupported("f64", "wgpu")),
            HostView::F32(view) => tensor.fill(view)?,
            HostView::Bf16(view) => tensor.fill(view)?,
            HostView::F16(view) => tensor.fill(view)?,
        }
        Ok(tensor)
    }

    fn upload_if(&mut self, gpu: &Gpu, view: Option<HostView<'_>>) -> Result<Option<Tensor>> {
        view.map(|view| self.upload(gpu, view)).transpose()
    }

    fn give(&mut self, tensors: impl IntoIterator<Item = Option<Tensor>>) {
        self.0.extend(tensors.into_iter().flatten());
    }
}

/// What a pass is given, on the device.
#[derive(Debug)]
pub(crate) struct Uploaded {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Option<Tensor>,
    sinks: Option<Tensor>,
}

/// What a backward pass is given besides.
#[derive(Debug)]
pub(crate) struct UploadedSaved {
    out: Tensor,
    lse: Tensor,
    max: Option<Tensor>,
    ties: Option<Tensor>,
    dout: Tensor,
    dlse: Option<Tensor>,
}

impl Uploaded {
    pub(crate) fn new(gpu: &Gpu, rooms: &mut Rooms, inputs: &Inputs<'_, Host>) -> Result<Self> {
        Ok(Self {
            q: rooms.upload(gpu, inputs.q)?,
            k: rooms.upload(gpu, inputs.k)?,
            v: rooms.upload(gpu, inputs.v)?,
            bias: rooms.upload_if(gpu, inputs.bias)?,
            sinks: rooms.upload_if(gpu, inputs.sinks)?,
        })
    }

    pub(crate) fn into_rooms(self, rooms: &mut Rooms) {
        rooms.give([Some(self.q), Some(self.k), Some(self.v), self.bias, self.sinks]);
    }

    pub(crate) const fn view(&self) -> Inputs<'_, WgpuSpace> {
        Inputs { q: &self.q, k: &self.k, v: &self.v, bias: self.bias.as_ref(), sinks: self.sinks.as_ref() }
    }
}

impl UploadedSaved {
    pub(crate) fn new(gpu: &Gpu, rooms: &mut Rooms, saved: &Saved<'_, Host>) -> Result<Self> {
        Ok(Self {
            out: rooms.upload(gpu, saved.out)?,
            lse: rooms.upload(gpu, saved.lse)?,
            max: rooms.upload_if(gpu, saved.max)?,
            ties: rooms.upload_if(gpu, saved.ties)?,
            dout: rooms.upload(gpu, saved.dout)?,
            dlse: rooms.upload_if(gpu, saved.dlse)?,
        })
    }

    pub(crate) fn into_rooms(self, rooms: &mut Rooms) {
        rooms.give([Some(self.out), Some(self.lse), self.max, self.ties, Some(self.dout), self.dlse]);
    }

    pub(crate) const fn view(&self) -> Saved<'_, WgpuSpace> {
        Saved {
            out: &self.out,
            lse: &self.lse,
            max: self.max.as_ref(),
            ties: self.ties.as_ref(),
            dout: &self.dout,
            dlse: self.dlse.as_ref(),
        }
    }
}

fn download(tensor: &Tensor, into: &mut HostViewMut<'_>) -> Result<()> {
    fn copy<T: Element>(tensor: &Tensor, into: &mut ndarray::ArrayViewMut4<'_, T>) -> Result<()> {
        into.assign(&tensor.download::<T>()?);
        Ok(())
    }
    match into {
        HostViewMut::F64(_) => Err(Error::unsupported("f64", "wgpu")),
        HostViewMut::F32(view) => copy(tensor, view),
        HostViewMut::Bf16(view) => copy(tensor, view),
        HostViewMut::F16(view) => copy(tensor, view),
    }
}

/// What is on its way back, and whereto.
pub(crate) struct Returning<'v, 'a> {
    pub(crate) tensor: Tensor,
    view: &'v mut HostViewMut<'a>,
}

impl<'v, 'a> Returning<'v, 'a> {
    pub(crate) fn new(gpu: &Gpu, rooms: &mut Rooms, view: &'v mut HostViewMut<'a>) -> Result<Self> {
        Ok(Self { tensor: rooms.take(gpu, view.shape(), view.dtype())?, view })
    }

    pub(crate) fn maybe(gpu: &Gpu, rooms: &mut Rooms, view: Option<&'v mut HostViewMut<'a>>) -> Result<Option<Self>> {
        view.map(|view| Self::new(gpu, rooms, view)).transpose()
    }

    pub(crate) fn land(self, rooms: &mut Rooms) -> Result<()> {
        download(&self.tensor, self.view)?;
        rooms.give([Some(self.tensor)]);
        Ok(())
    }
}
