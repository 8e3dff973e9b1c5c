//! Tensors in device memory.

use std::{marker::PhantomData, ops::ControlFlow};

use annulus_core::{DType, Error, Result, Tick};
use cudarc::driver::sys::CUdeviceptr;

use crate::{CudaBuffer, Stream};

/// Bytes between two ticks of a copy: some milliseconds over PCIe, long beside the start of a copy.
const PIECE_BYTES: usize = 64 << 20;

/// A dense tensor of four axes in device memory.
#[derive(Debug)]
pub struct CudaTensor {
    buffer: CudaBuffer,
    stream: Stream,
    dtype: DType,
    shape: [usize; 4],
}

/// An immutable view of a tensor: address, element type, lengths, strides in elements.
#[derive(Debug, Clone, Copy)]
pub struct CudaView<'a> {
    address: CUdeviceptr,
    dtype: DType,
    shape: [usize; 4],
    strides: [i64; 4],
    borrow: PhantomData<&'a CudaTensor>,
}

/// A mutable view of a tensor.
#[derive(Debug)]
pub struct CudaViewMut<'a>(CudaView<'a>);

impl CudaTensor {
    /// Copies dense little-endian elements to the device.
    ///
    /// # Shapes
    /// `bytes` holds the product of `shape` elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the length differs; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn upload(stream: &Stream, bytes: &[u8], dtype: DType, shape: [usize; 4]) -> Result<Self> {
        let mut tensor = Self::uninitialized(stream, dtype, shape)?;
        tensor.write(stream, bytes, &mut || ControlFlow::Continue(()))?;
        Ok(tensor)
    }

    /// Allocates a tensor without initializing it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn uninitialized(stream: &Stream, dtype: DType, shape: [usize; 4]) -> Result<Self> {
        let bytes = shape.iter().map(|&len| len as u64).product::<u64>() * dtype.bytes() as u64;
        Ok(Self {
            buffer: CudaBuffer::new(stream.device(), bytes)?,
            stream: stream.clone(),
            dtype,
            shape,
        })
    }

    /// Waits for the work of its stream and copies the elements to the host.
    ///
    /// # Errors
    /// [`Error::Device`] if work failed or did not end within [`Device::hang_bound`].
    ///
    /// [`Device::hang_bound`]: crate::Device::hang_bound
    pub fn download(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; annulus_core::index(self.buffer.len())];
        self.read(&self.stream, &mut bytes, &mut || ControlFlow::Continue(()))?;
        Ok(bytes)
    }

    /// Copies all elements to the device in the order of `stream`. Ticks after each piece; returns
    /// early if the tick breaks.
    pub(crate) fn write(&mut self, stream: &Stream, bytes: &[u8], tick: Tick<'_>) -> Result<()> {
        self.check(stream, bytes.len())?;
        let mut into = self.buffer.address();
        for piece in bytes.chunks(PIECE_BYTES) {
            // SAFETY: the buffer is as long as all pieces, on the device of the stream, and
            // borrowed mutably; work of other streams on it is ordered by its user.
            unsafe { stream.copy_to_device(into, piece)? };
            into += piece.len() as u64;
            if tick().is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Copies all elements to the host, after the work of `stream`. Ticks while it waits and
    /// between pieces; returns early if the tick breaks.
    pub(crate) fn read(&self, stream: &Stream, bytes: &mut [u8], tick: Tick<'_>) -> Result<()> {
        self.check(stream, bytes.len())?;
        let bound = stream.device().hang_bound();
        let mut flow = stream.wait(bound, &mut *tick)?;
        let mut from = self.buffer.address();
        for (number, piece) in bytes.chunks_mut(PIECE_BYTES).enumerate() {
            if number > 0 && flow.is_continue() {
                // ranks that share the GPU share its stream, and may have queued kernels meanwhile
                flow = stream.wait(bound, &mut *tick)?;
            }
            if flow.is_break() {
                break;
            }
            let len = piece.len() as u64;
            // SAFETY: the buffer is as long as all pieces, and on the device of the stream.
            unsafe { stream.copy_to_host(piece, from, bound)? };
            from += len;
            flow = tick();
        }
        Ok(())
    }

    /// Checks that a copy is of all elements and on the device of the tensor.
    fn check(&self, stream: &Stream, bytes: usize) -> Result<()> {
        let Self { buffer, dtype, shape, .. } = self;
        if bytes as u64 != buffer.len() {
            return Err(Error::invalid(
                "tensor",
                format!("{bytes} bytes"),
                format!("{} bytes for {shape:?} of {dtype}", buffer.len()),
            ));
        }
        if stream.device() != buffer.device() {
            let got = format!("a stream of {:?}", stream.device());
            return Err(Error::invalid("stream", got, "a stream of the tensor's device"));
        }
        Ok(())
    }

    /// Borrows the tensor immutably.
    pub fn view(&self) -> CudaView<'_> {
        let mut strides = [1; 4];
        for axis in (0..3).rev() {
            strides[axis] = strides[axis + 1] * self.shape[axis + 1].cast_signed() as i64;
        }
        CudaView {
            address: self.buffer.address(),
            dtype: self.dtype,
            shape: self.shape,
            strides,
            borrow: PhantomData,
        }
    }

    /// Borrows the tensor mutably.
    pub fn view_mut(&mut self) -> CudaViewMut<'_> {
        CudaViewMut(self.view())
    }
}

impl CudaView<'_> {
    /// Creates a view of a caller's memory.
    ///
    /// # Safety
    /// * Every element that the lengths and strides (in elements, of any sign) reach from `address`
    ///   is memory of the device, aligned to its type, while the view is used and until the work
    ///   that reads it is done.
    /// * Work that writes it comes earlier in the backend's stream.
    pub const unsafe fn from_raw(
        address: CUdeviceptr,
        dtype: DType,
        shape: [usize; 4],
        strides: [i64; 4],
    ) -> Self {
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
    /// Creates a mutable view of a caller's memory.
    ///
    /// # Safety
    /// As [`CudaView::from_raw`]; no two elements overlap, and nothing else accesses them until the
    /// work that writes them is done.
    pub const unsafe fn from_raw(
        address: CUdeviceptr,
        dtype: DType,
        shape: [usize; 4],
        strides: [i64; 4],
    ) -> Self {
        // SAFETY: as required of the caller.
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
