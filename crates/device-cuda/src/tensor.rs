//! A caller's tensors in device memory.

use std::{marker::PhantomData, time::Duration};

use annulus_core::{DType, Error, Result};
use cudarc::driver::sys::CUdeviceptr;

use crate::{CudaBuffer, Stream};

/// No copy of a tensor waits longer than this for the work before it.
const DEADLINE: Duration = Duration::from_secs(120);

/// A dense tensor of four axes in device memory.
#[derive(Debug)]
pub struct CudaTensor {
    buffer: CudaBuffer,
    stream: Stream,
    dtype: DType,
    shape: [usize; 4],
}

/// A tensor borrowed for reading: an address, a type, lengths and strides in elements.
#[derive(Debug, Clone, Copy)]
pub struct CudaView<'a> {
    address: CUdeviceptr,
    dtype: DType,
    shape: [usize; 4],
    strides: [i64; 4],
    borrow: PhantomData<&'a CudaTensor>,
}

/// A tensor borrowed for writing.
#[derive(Debug)]
pub struct CudaViewMut<'a>(CudaView<'a>);

impl CudaTensor {
    /// Copies elements, little-endian, one after another, to the device.
    ///
    /// # Shapes
    /// `bytes` holds the product of `shape` elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it does not; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn upload(stream: &Stream, bytes: &[u8], dtype: DType, shape: [usize; 4]) -> Result<Self> {
        let want = shape.iter().product::<usize>() * dtype.bytes();
        if bytes.len() != want {
            return Err(Error::invalid("tensor", format!("{} bytes", bytes.len()), format!("{want} bytes for {shape:?} of {dtype}")));
        }
        let buffer = CudaBuffer::new(stream.device(), want as u64)?;
        // SAFETY: the buffer is new, and as long as `bytes`.
        unsafe { stream.copy_to_device(buffer.address(), bytes)? };
        Ok(Self { buffer, stream: stream.clone(), dtype, shape })
    }

    /// A tensor with anything in it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn uninitialized(stream: &Stream, dtype: DType, shape: [usize; 4]) -> Result<Self> {
        let bytes = shape.iter().map(|&len| len as u64).product::<u64>() * dtype.bytes() as u64;
        Ok(Self { buffer: CudaBuffer::new(stream.device(), bytes)?, stream: stream.clone(), dtype, shape })
    }

    /// Waits for the work of its stream and copies the elements to the host.
    ///
    /// # Errors
    /// [`Error::Device`] if work failed or did not end within two minutes.
    pub fn download(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; annulus_core::index(self.buffer.len())];
        // SAFETY: the buffer is as long as `bytes`.
        unsafe { self.stream.copy_to_host(&mut bytes, self.buffer.address(), DEADLINE)? };
        Ok(bytes)
    }

    /// Borrows it for reading.
    pub fn view(&self) -> CudaView<'_> {
        let mut strides = [1; 4];
        for axis in (0..3).rev() {
            strides[axis] = strides[axis + 1] * self.shape[axis + 1].cast_signed() as i64;
        }
        CudaView { address: self.buffer.address(), dtype: self.dtype, shape: self.shape, strides, borrow: PhantomData }
    }

    /// Borrows it for writing.
    pub fn view_mut(&mut self) -> CudaViewMut<'_> {
        CudaViewMut(self.view())
    }
}

impl CudaView<'_> {
    /// A caller's memory as a tensor.
    ///
    /// # Safety
    /// * every element that lengths and strides (in elements, of any sign) reach from `address` is memory of the device, aligned to its type,
    ///   for as long as the view is used and until the work that reads it is done;
    /// * work that writes it comes earlier in the backend's stream.
    pub const unsafe fn from_raw(address: CUdeviceptr, dtype: DType, shape: [usize; 4], strides: [i64; 4]) -> Self {
        Self { address, dtype, shape, strides, borrow: PhantomData }
    }

    /// Address of the first element.
    pub const fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Lengths.
    pub const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements.
    pub const fn strides(&self) -> [i64; 4] {
        self.strides
    }
}

impl CudaViewMut<'_> {
    /// A caller's memory as a tensor that is written.
    ///
    /// # Safety
    /// As [`CudaView::from_raw`]; no two elements are the same memory, and nothing else touches it until the work that writes it is done.
    pub const unsafe fn from_raw(address: CUdeviceptr, dtype: DType, shape: [usize; 4], strides: [i64; 4]) -> Self {
        // SAFETY: as promised.
        Self(unsafe { CudaView::from_raw(address, dtype, shape, strides) })
    }

    /// Address of the first element.
    pub const fn address(&self) -> CUdeviceptr {
        self.0.address
    }

    /// Element type.
    pub const fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Lengths.
    pub const fn shape(&self) -> [usize; 4] {
        self.0.shape
    }

    /// Strides in elements.
    pub const fn strides(&self) -> [i64; 4] {
        self.0.strides
    }
}
