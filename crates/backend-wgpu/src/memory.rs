//! Memory space of a device: buffers, tensors, events.
//!
//! A buffer stores its device: wgpu identifies a buffer by a number that denotes another buffer in
//! another instance, and the stored device makes a buffer of another device a typed error.

use std::{mem, ops::ControlFlow};

use annulus_core::{
    DType, DeviceSpace, Element, Error, HostView, HostViewMut, Inputs, Result, Space, Tick, View,
};
use half::{bf16, f16};
use ndarray::{Array4, ArrayView4, ArrayViewMut4};
use wgpu::BufferUsages;

use crate::{adapter::is_forked, device::Gpu};

/// Memory of a [`Gpu`].
#[derive(Debug, Clone, Copy)]
pub struct WgpuSpace;

impl Space for WgpuSpace {
    type Buffer = GpuBuffer;
    type View<'a> = &'a Tensor;
    type ViewMut<'a> = &'a mut Tensor;
    type Event = Queued;

    fn size(buffer: &GpuBuffer) -> u64 {
        buffer.size()
    }

    /// False: transfers are copies in the one queue of the device, which runs in order.
    fn is_shared(_: &GpuBuffer) -> bool {
        false
    }

    fn reborrow<'short>(view: &'short &Tensor) -> &'short Tensor {
        view
    }

    fn describe(view: &&Tensor) -> (DType, [usize; 4]) {
        (view.dtype, view.shape)
    }

    fn describe_mut(view: &&mut Tensor) -> (DType, [usize; 4]) {
        (view.dtype, view.shape)
    }
}

impl DeviceSpace for WgpuSpace {
    type Tensor = Tensor;
    type Context = Gpu;

    /// The tensor is zero: wgpu initializes every buffer.
    fn tensor(gpu: &Gpu, dtype: DType, shape: [usize; 4]) -> Result<Tensor> {
        Tensor::zeros(gpu, shape, dtype)
    }

    fn upload(gpu: &Gpu, from: HostView<'_>, into: &mut Tensor, tick: Tick<'_>) -> Result<()> {
        into.check_matches(gpu, (from.dtype(), from.shape()))?;
        match from {
            HostView::F64(_) => Err(Error::unsupported("dtype f64", "wgpu")),
            HostView::F32(from) => into.fill(from, tick),
            HostView::Bf16(from) => into.fill(from, tick),
            HostView::F16(from) => into.fill(from, tick),
        }
    }

    fn download(
        gpu: &Gpu,
        from: &Tensor,
        into: &mut HostViewMut<'_>,
        tick: Tick<'_>,
    ) -> Result<()> {
        from.check_matches(gpu, (into.dtype(), into.shape()))?;
        match into {
            HostViewMut::F64(_) => Err(Error::unsupported("dtype f64", "wgpu")),
            HostViewMut::F32(into) => from.read_into(into, tick),
            HostViewMut::Bf16(into) => from.read_into(into, tick),
            HostViewMut::F16(into) => from.read_into(into, tick),
        }
    }

    fn view(tensor: &Tensor) -> &Tensor {
        tensor
    }

    fn view_mut(tensor: &mut Tensor) -> &mut Tensor {
        tensor
    }
}

/// Event without state: a device has one queue, which runs in order, so later work always reads
/// what earlier work wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queued;

/// Device memory owned by a plan. A clone shares the same bytes.
#[derive(Debug, Clone)]
pub struct GpuBuffer {
    pub(crate) buffer: wgpu::Buffer,
    bytes: u64,
    gpu: Gpu,
}

/// Usages of plan-owned buffers.
pub(crate) const USAGE: BufferUsages =
    BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

impl GpuBuffer {
    pub(crate) fn new(gpu: &Gpu, label: &str, bytes: u64) -> Result<Self> {
        Ok(Self { gpu: gpu.clone(), buffer: gpu.create_buffer(label, bytes, USAGE)?, bytes })
    }

    pub(crate) const fn size(&self) -> u64 {
        self.bytes
    }

    /// Checks that the buffer belongs to this device.
    pub(crate) fn check_on(&self, gpu: &Gpu) -> Result<()> {
        check_same("block", &self.gpu, gpu)
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        if is_forked() {
            mem::forget(self.buffer.clone());
        }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if is_forked() {
            mem::forget(self.buffer.clone());
        }
    }
}

/// Refuses memory of another device, or of the same adapter opened a second time.
fn check_same(argument: &str, has: &Gpu, wants: &Gpu) -> Result<()> {
    if has.is(wants) {
        return Ok(());
    }
    let what = |gpu: &Gpu| format!("memory of {}", gpu.name());
    let want = if has.name() == wants.name() {
        "memory of the plan's own opening of that device".to_owned()
    } else {
        what(wants)
    };
    Err(Error::invalid(argument, what(has), want))
}

/// A dense tensor in device memory, last axis contiguous.
#[derive(Debug)]
pub struct Tensor {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) dtype: DType,
    pub(crate) shape: [usize; 4],
    gpu: Gpu,
}

impl Tensor {
    /// Allocates a tensor of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`], [`Error::Unsupported`] for f64.
    pub fn zeros(gpu: &Gpu, shape: [usize; 4], dtype: DType) -> Result<Self> {
        let bytes = bytes_of(dtype, shape)?;
        // wgpu zero-initializes buffers
        let buffer = gpu.create_buffer("tensor", bytes, USAGE)?;
        Ok(Self { gpu: gpu.clone(), buffer, dtype, shape })
    }

    /// Wraps a caller's buffer: a dense tensor from its start, with the usages storage, copy source
    /// and copy target. The buffer must belong to `gpu`'s device, which cannot be checked.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the buffer is too small or lacks a usage,
    /// [`Error::Unsupported`] for f64.
    pub fn adopt(gpu: &Gpu, buffer: wgpu::Buffer, shape: [usize; 4], dtype: DType) -> Result<Self> {
        let bytes = bytes_of(dtype, shape)?;
        if buffer.size() < bytes.max(4).next_multiple_of(4) {
            let got = format!("{} bytes", buffer.size());
            return Err(Error::invalid("buffer", got, format!("{bytes}, in whole words")));
        }
        if !buffer.usage().contains(USAGE) {
            let got = format!("{:?}", buffer.usage());
            return Err(Error::invalid("buffer", got, format!("{USAGE:?}")));
        }
        Ok(Self { gpu: gpu.clone(), buffer, dtype, shape })
    }

    /// Uploads a host tensor.
    ///
    /// # Errors
    /// As [`Tensor::zeros`].
    pub fn upload<T: Element>(gpu: &Gpu, tensor: ArrayView4<'_, T>) -> Result<Self> {
        let new = Self::zeros(gpu, tensor.dim().into(), T::DTYPE)?;
        new.fill(tensor, &mut || ControlFlow::Continue(()))?;
        Ok(new)
    }

    /// Uploads a host tensor of the same shape and type into this one, after all work queued so
    /// far. Ticks meanwhile; returns early if the tick breaks.
    fn fill<T: Element>(&self, tensor: ArrayView4<'_, T>, tick: Tick<'_>) -> Result<()> {
        let dense = tensor.as_standard_layout();
        let elements = dense
            .as_slice()
            .ok_or_else(|| Error::internal("a dense copy of a tensor is not contiguous"))?;
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        // an upload of 0 bytes has no pieces
        let size = (bytes.len() as u64).next_multiple_of(4);
        self.gpu.write(&self.buffer, bytes, &[(0..size, 0)], tick)
    }

    /// Rounds numbers to `dtype` and uploads them.
    ///
    /// # Errors
    /// As [`Tensor::zeros`].
    pub fn upload_rounded(gpu: &Gpu, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<Self> {
        match dtype {
            DType::F64 => Err(Error::unsupported("dtype f64", "wgpu")),
            DType::F32 => Self::upload(gpu, numbers.mapv(<f32 as Element>::from_f64).view()),
            DType::Bf16 => Self::upload(gpu, numbers.mapv(<bf16 as Element>::from_f64).view()),
            DType::F16 => Self::upload(gpu, numbers.mapv(<f16 as Element>::from_f64).view()),
        }
    }

    /// Downloads the tensor, after all work queued so far.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the element type differs, [`Error::Device`].
    pub fn download<T: Element>(&self) -> Result<Array4<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::invalid("dtype", T::DTYPE, self.dtype));
        }
        let mut elements = Vec::with_capacity(self.shape.iter().product());
        self.gpu.read(&self.buffer, bytes_of(self.dtype, self.shape)?, |bytes| {
            let begin = elements.len();
            elements.resize(begin + bytes.len() / size_of::<T>(), T::zeroed());
            bytemuck::cast_slice_mut(&mut elements[begin..]).copy_from_slice(bytes);
            Ok(())
        })?;
        Array4::from_shape_vec(self.shape, elements).map_err(Error::internal)
    }

    /// Downloads the tensor into a host tensor of the same type and shape. Ticks meanwhile; returns
    /// early if the tick breaks.
    fn read_into<T: Element>(&self, into: &mut ArrayViewMut4<'_, T>, tick: Tick<'_>) -> Result<()> {
        let bytes = bytes_of(self.dtype, self.shape)?;
        if let Some(elements) = into.as_slice_mut() {
            let mut rest: &mut [u8] = bytemuck::cast_slice_mut(elements);
            return self.gpu.read_with(&self.buffer, bytes, tick, |bytes| {
                let (part, after) = std::mem::take(&mut rest)
                    .split_at_mut_checked(bytes.len())
                    .ok_or_else(|| Error::internal("a download is longer than its tensor"))?;
                part.copy_from_slice(bytes);
                rest = after;
                Ok(())
            });
        }
        let mut elements = into.iter_mut();
        self.gpu.read_with(&self.buffer, bytes, tick, |bytes| {
            for (bytes, into) in bytes.chunks_exact(size_of::<T>()).zip(&mut elements) {
                *into = bytemuck::pod_read_unaligned(bytes);
            }
            Ok(())
        })
    }

    /// Downloads the tensor and widens it to f64.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn download_widened(&self) -> Result<Array4<f64>> {
        match self.dtype {
            DType::F64 => Err(Error::unsupported("dtype f64", "wgpu")),
            DType::F32 => Ok(self.download::<f32>()?.mapv(Element::to_f64)),
            DType::Bf16 => Ok(self.download::<bf16>()?.mapv(Element::to_f64)),
            DType::F16 => Ok(self.download::<f16>()?.mapv(Element::to_f64)),
        }
    }

    /// Checks that the tensor belongs to this device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `argument`.
    pub(crate) fn check_on(&self, gpu: &Gpu, argument: &str) -> Result<()> {
        check_same(argument, &self.gpu, gpu)
    }

    /// Checks that the tensor belongs to this device and has the type and shape of a host tensor.
    fn check_matches(&self, gpu: &Gpu, host: (DType, [usize; 4])) -> Result<()> {
        self.check_on(gpu, "tensor")?;
        let device = (self.dtype, self.shape);
        if device == host {
            return Ok(());
        }
        let describe = |(dtype, shape): (DType, [usize; 4])| format!("{shape:?} of {dtype}");
        Err(Error::invalid("tensor", describe(host), describe(device)))
    }
}

/// Returns the bytes of a dense tensor.
///
/// # Errors
/// [`Error::Unsupported`] for f64.
fn bytes_of(dtype: DType, shape: [usize; 4]) -> Result<u64> {
    if dtype == DType::F64 {
        return Err(Error::unsupported("dtype f64", "wgpu"));
    }
    Ok(shape.iter().map(|&len| len as u64).product::<u64>() * dtype.bytes() as u64)
}

/// Checks that all tensors belong to this device.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the first that does not.
pub(crate) fn check_tensors<'a>(
    gpu: &Gpu,
    tensors: impl IntoIterator<Item = (&'a str, Option<&'a Tensor>)>,
) -> Result<()> {
    tensors
        .into_iter()
        .try_for_each(|(name, tensor)| tensor.map_or(Ok(()), |tensor| tensor.check_on(gpu, name)))
}

/// As [`check_tensors`], of the inputs of a forward pass.
pub(crate) fn check_inputs(gpu: &Gpu, inputs: &Inputs<View<'_, WgpuSpace>>) -> Result<()> {
    check_tensors(
        gpu,
        [
            ("query", Some(inputs.q)),
            ("key", Some(inputs.k)),
            ("value", Some(inputs.v)),
            ("bias", inputs.bias),
            ("softmax_aux", inputs.sinks),
        ],
    )
}
