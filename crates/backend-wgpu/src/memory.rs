//! The memory space: blocks, tensors and events of one device.

use annulus_core::{DType, Element, Error, Result, Space};
use half::{bf16, f16};
use ndarray::{Array4, ArrayView4};
use wgpu::BufferUsages;

use crate::{device::Gpu, fault::fault};

/// Memory of a [`Gpu`].
#[derive(Debug, Clone, Copy)]
pub struct WgpuSpace;

impl Space for WgpuSpace {
    type Buffer = GpuBuffer;
    type View<'a> = &'a Tensor;
    type ViewMut<'a> = &'a mut Tensor;
    type Event = Queued;

    fn size(buffer: &GpuBuffer) -> u64 {
        buffer.bytes
    }

    fn describe(view: &&Tensor) -> (DType, [usize; 4]) {
        (view.dtype, view.shape)
    }

    fn describe_mut(view: &&mut Tensor) -> (DType, [usize; 4]) {
        (view.dtype, view.shape)
    }
}

/// "After all work that was queued so far." A device has one queue, which keeps its order: whoever reads later, reads what was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queued;

/// Plan-owned bytes of a device. A clone co-owns them.
#[derive(Debug, Clone)]
pub struct GpuBuffer {
    gpu: Gpu,
    pub(crate) buffer: wgpu::Buffer,
    bytes: u64,
}

/// What plan-owned memory is used for.
pub(crate) const USAGE: BufferUsages = BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

impl GpuBuffer {
    pub(crate) fn new(gpu: &Gpu, label: &str, bytes: u64) -> Result<Self> {
        Ok(Self { gpu: gpu.clone(), buffer: gpu.create_buffer(label, bytes, USAGE)?, bytes })
    }

    /// Whether it is memory of this device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    pub(crate) fn check_on(&self, gpu: &Gpu) -> Result<()> {
        if self.gpu.is(gpu) { Ok(()) } else { Err(elsewhere("block", &self.gpu, gpu)) }
    }
}

/// Memory of one device for another, which may be the same one opened a second time.
fn elsewhere(argument: &str, has: &Gpu, wants: &Gpu) -> Error {
    let what = |gpu: &Gpu| format!("memory of {}", gpu.name());
    let want = if has.name() == wants.name() { "memory of the plan's own opening of that device".to_owned() } else { what(wants) };
    Error::invalid(argument, what(has), want)
}

/// A dense tensor in a device's memory, the last axis fastest.
#[derive(Debug)]
pub struct Tensor {
    gpu: Gpu,
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) dtype: DType,
    pub(crate) shape: [usize; 4],
}

impl Tensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`], [`Error::Unsupported`] for f64.
    pub fn zeros(gpu: &Gpu, shape: [usize; 4], dtype: DType) -> Result<Self> {
        if dtype == DType::F64 {
            return Err(Error::unsupported("f64", "wgpu"));
        }
        let bytes = shape.iter().map(|&len| len as u64).product::<u64>() * dtype.bytes() as u64;
        // wgpu hands out memory that is zero
        let buffer = gpu.create_buffer("tensor", bytes, USAGE)?;
        Ok(Self { gpu: gpu.clone(), buffer, dtype, shape })
    }

    /// Uses memory that the caller has on the device: a dense tensor from the start of `buffer`, which has the usages storage, copy source
    /// and copy target. It must be memory of `gpu`'s own device: that alone cannot be asked of a buffer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the buffer is too small or lacks a usage, [`Error::Unsupported`] for f64.
    pub fn adopt(gpu: &Gpu, buffer: wgpu::Buffer, shape: [usize; 4], dtype: DType) -> Result<Self> {
        if dtype == DType::F64 {
            return Err(Error::unsupported("f64", "wgpu"));
        }
        let bytes = shape.iter().map(|&len| len as u64).product::<u64>() * dtype.bytes() as u64;
        if buffer.size() < bytes.max(4).next_multiple_of(4) {
            return Err(Error::invalid("buffer", format!("{} bytes", buffer.size()), format!("{bytes}, in whole words")));
        }
        if !buffer.usage().contains(USAGE) {
            return Err(Error::invalid("buffer", format!("{:?}", buffer.usage()), format!("{USAGE:?}")));
        }
        Ok(Self { gpu: gpu.clone(), buffer, dtype, shape })
    }

    /// Copies a host tensor to the device.
    ///
    /// # Errors
    /// As [`Tensor::zeros`].
    pub fn upload<T: Element>(gpu: &Gpu, tensor: ArrayView4<'_, T>) -> Result<Self> {
        let new = Self::zeros(gpu, tensor.dim().into(), T::DTYPE)?;
        new.fill(tensor)?;
        Ok(new)
    }

    /// Copies a host tensor of the same shape and type over this one, after all work that was queued before.
    pub(crate) fn fill<T: Element>(&self, tensor: ArrayView4<'_, T>) -> Result<()> {
        let dense = tensor.as_standard_layout();
        let elements = dense.as_slice().ok_or_else(|| fault("a tensor that is not dense"))?;
        self.write(bytemuck::cast_slice(elements))
    }

    /// Rounds numbers to `dtype` and copies them to the device.
    ///
    /// # Errors
    /// As [`Tensor::zeros`].
    pub fn upload_rounded(gpu: &Gpu, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<Self> {
        match dtype {
            DType::F64 => Err(Error::unsupported("f64", "wgpu")),
            DType::F32 => Self::upload(gpu, numbers.mapv(<f32 as Element>::from_f64).view()),
            DType::Bf16 => Self::upload(gpu, numbers.mapv(<bf16 as Element>::from_f64).view()),
            DType::F16 => Self::upload(gpu, numbers.mapv(<f16 as Element>::from_f64).view()),
        }
    }

    /// Copies the tensor to the host, after all work that was queued before.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has another element type, [`Error::Device`].
    pub fn download<T: Element>(&self) -> Result<Array4<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::invalid("dtype", T::DTYPE, self.dtype));
        }
        let bytes = self.gpu.read(&self.buffer, self.bytes())?;
        let elements = bytemuck::pod_collect_to_vec::<u8, T>(&bytes);
        Array4::from_shape_vec(self.shape, elements).map_err(fault)
    }

    /// Copies the tensor to the host and widens it.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn download_widened(&self) -> Result<Array4<f64>> {
        match self.dtype {
            DType::F64 => Err(Error::unsupported("f64", "wgpu")),
            DType::F32 => Ok(self.download::<f32>()?.mapv(Element::to_f64)),
            DType::Bf16 => Ok(self.download::<bf16>()?.mapv(Element::to_f64)),
            DType::F16 => Ok(self.download::<f16>()?.mapv(Element::to_f64)),
        }
    }

    /// Whether it is in the memory of this device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `argument`.
    pub(crate) fn check_on(&self, gpu: &Gpu, argument: &str) -> Result<()> {
        if self.gpu.is(gpu) { Ok(()) } else { Err(elsewhere(argument, &self.gpu, gpu)) }
    }

    fn bytes(&self) -> u64 {
        self.shape.iter().map(|&len| len as u64).product::<u64>() * self.dtype.bytes() as u64
    }

    fn write(&self, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let size = (bytes.len() as u64).next_multiple_of(4);
        self.gpu.write(&self.buffer, bytes, &[(0..size, 0)])
    }
}
