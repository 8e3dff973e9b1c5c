//! The memory space of CUDA devices, and its tensors.
//!
//! CUtensorMap: layout of a tensor in global memory, for TMA (compute capability 9.0).

use std::{marker::PhantomData, ops::ControlFlow};

use annulus_core::{
    DType, DeviceSpace, Element, Error, HostView, HostViewMut, Result, Space, Tick, memory,
};
use cudarc::driver::sys::{
    CUdeviceptr, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use ndarray::{ArrayView4, ArrayViewMut4};

use crate::{
    CudaBuffer, Device, Event, Status, Stream,
    symbols::{driver_error, missing},
};

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
    is_in_host_memory: bool,
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
            is_in_host_memory: false,
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
        Self { address, dtype, shape, strides, is_in_host_memory: false, borrow: PhantomData }
    }

    /// True for a tensor in memory of the host's, which ends with the borrow: then a call that
    /// enqueues work on it also waits for that work.
    pub const fn is_in_host_memory(&self) -> bool {
        self.is_in_host_memory
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

    /// Borrows the view immutably.
    pub const fn view(&self) -> CudaView<'_> {
        self.0
    }
}

/// Blocks and tensors in device memory.
#[derive(Debug, Clone, Copy)]
pub struct CudaSpace;

impl Space for CudaSpace {
    type Buffer = CudaBuffer;
    type View<'a> = CudaView<'a>;
    type ViewMut<'a> = CudaViewMut<'a>;
    type Event = Event;

    fn size(buffer: &CudaBuffer) -> u64 {
        buffer.len()
    }

    fn is_shared(buffer: &CudaBuffer) -> bool {
        buffer.is_shared()
    }

    fn reborrow<'short>(view: &'short CudaView<'_>) -> CudaView<'short> {
        *view
    }

    fn describe(view: &CudaView<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }

    fn describe_mut(view: &CudaViewMut<'_>) -> (DType, [usize; 4]) {
        Self::describe(&view.view())
    }
}

/// Tensors are copied in the order of a stream. A host tensor whose elements are not contiguous in
/// index order is copied through a dense list.
impl DeviceSpace for CudaSpace {
    type Tensor = CudaTensor;
    type Context = Stream;

    fn tensor(stream: &Stream, dtype: DType, shape: [usize; 4]) -> Result<CudaTensor> {
        CudaTensor::uninitialized(stream, dtype, shape)
    }

    fn upload(
        stream: &Stream,
        from: HostView<'_>,
        into: &mut CudaTensor,
        tick: Tick<'_>,
    ) -> Result<()> {
        check_same(&into.view(), from.dtype(), from.shape())?;
        let write = |bytes: &[u8]| into.write(stream, bytes, tick);
        match from {
            HostView::F64(view) => with_bytes(view, write),
            HostView::F32(view) => with_bytes(view, write),
            HostView::Bf16(view) => with_bytes(view, write),
            HostView::F16(view) => with_bytes(view, write),
        }
    }

    fn download(
        stream: &Stream,
        from: &CudaTensor,
        into: &mut HostViewMut<'_>,
        tick: Tick<'_>,
    ) -> Result<()> {
        check_same(&from.view(), into.dtype(), into.shape())?;
        let read = |bytes: &mut [u8]| from.read(stream, bytes, tick);
        match into {
            HostViewMut::F64(view) => with_bytes_mut(view, read),
            HostViewMut::F32(view) => with_bytes_mut(view, read),
            HostViewMut::Bf16(view) => with_bytes_mut(view, read),
            HostViewMut::F16(view) => with_bytes_mut(view, read),
        }
    }

    fn view(tensor: &CudaTensor) -> CudaView<'_> {
        tensor.view()
    }

    fn view_mut(tensor: &mut CudaTensor) -> CudaViewMut<'_> {
        tensor.view_mut()
    }

    fn shares_host_memory(stream: &Stream) -> bool {
        stream.device().shares_host_memory()
    }

    fn shared_view<'a>(stream: &Stream, tensor: HostView<'a>) -> Result<CudaView<'a>> {
        let placed = match &tensor {
            HostView::F64(view) => Placed::new(view.as_ptr(), view.strides()),
            HostView::F32(view) => Placed::new(view.as_ptr(), view.strides()),
            HostView::Bf16(view) => Placed::new(view.as_ptr(), view.strides()),
            HostView::F16(view) => Placed::new(view.as_ptr(), view.strides()),
        };
        placed.view(stream, tensor.dtype(), tensor.shape())
    }

    fn shared_view_mut<'a>(stream: &Stream, tensor: HostViewMut<'a>) -> Result<CudaViewMut<'a>> {
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let placed = match tensor {
            HostViewMut::F64(mut view) => Placed::new(view.as_mut_ptr(), view.strides()),
            HostViewMut::F32(mut view) => Placed::new(view.as_mut_ptr(), view.strides()),
            HostViewMut::Bf16(mut view) => Placed::new(view.as_mut_ptr(), view.strides()),
            HostViewMut::F16(mut view) => Placed::new(view.as_mut_ptr(), view.strides()),
        };
        placed.view(stream, dtype, shape).map(CudaViewMut)
    }
}

/// Address of the first element of a host tensor, and strides in elements.
struct Placed {
    address: CUdeviceptr,
    strides: [i64; 4],
}

impl Placed {
    fn new<T>(first: *const T, strides: &[isize]) -> Self {
        let mut of_axes = [0; 4];
        of_axes.iter_mut().zip(strides).for_each(|(of_axis, stride)| *of_axis = *stride as i64);
        Self { address: first.expose_provenance() as CUdeviceptr, strides: of_axes }
    }

    /// Views the tensor on a device that shares the memory of the host.
    fn view<'a>(self, stream: &Stream, dtype: DType, shape: [usize; 4]) -> Result<CudaView<'a>> {
        let device = stream.device();
        if !device.shares_host_memory() {
            return Err(Error::unsupported("a tensor in host memory", device.name()));
        }
        let Self { address, strides } = self;
        let borrow = PhantomData;
        Ok(CudaView { address, dtype, shape, strides, is_in_host_memory: true, borrow })
    }
}

/// Checks that a host tensor has the type and shape of a device tensor.
fn check_same(on_device: &CudaView<'_>, dtype: DType, shape: [usize; 4]) -> Result<()> {
    if (on_device.dtype(), on_device.shape()) == (dtype, shape) {
        return Ok(());
    }
    let want = format!("{:?} of {}", on_device.shape(), on_device.dtype());
    Err(Error::invalid("host tensor", format!("{shape:?} of {dtype}"), want))
}

/// Calls `write` with the elements in index order.
fn with_bytes<T: Element>(
    view: ArrayView4<'_, T>,
    write: impl FnOnce(&[u8]) -> Result<()>,
) -> Result<()> {
    if let Some(elements) = view.as_slice() {
        return write(bytemuck::cast_slice(elements));
    }
    let elements = memory::collect("a dense copy of a tensor", view.len(), view.iter().copied())?;
    write(bytemuck::cast_slice(&elements))
}

/// Calls `read` to write the elements in index order.
fn with_bytes_mut<T: Element>(
    view: &mut ArrayViewMut4<'_, T>,
    read: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<()> {
    if let Some(elements) = view.as_slice_mut() {
        return read(bytemuck::cast_slice_mut(elements));
    }
    let mut elements: Vec<T> = memory::zeroed("a dense copy of a tensor", view.len())?;
    read(bytemuck::cast_slice_mut(&mut elements))?;
    view.iter_mut().zip(elements).for_each(|(element, value)| *element = value);
    Ok(())
}

/// Tensor map of 16-bit elements `[batch, head, row, dim]` with boxes of 64 dims × `rows` rows of
/// one head: rows of 128 bytes in shared memory with the 128-byte swizzle. Part of a kernel's
/// arguments.
///
/// Aligned to 128 bytes, as `CUtensorMap` in `cuda.h` of CUDA 13 (64 before).
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy)]
pub struct TensorMap([u64; 16]);

const _: () = assert!(align_of::<TensorMap>() == 128 && size_of::<TensorMap>() == 128);

impl TensorMap {
    /// Dims per box: 128 bytes, the width of the swizzle.
    pub const DIMS: u32 = 64;

    /// Stands for the map of an operand that a kernel does not load.
    pub const UNUSED: Self = Self([0; 16]);

    /// Encodes a tensor map; the memory is not read.
    ///
    /// # Shapes
    /// `lengths` of dims, rows, heads, batches; `strides` in bytes of rows, heads, batches.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a layout that TMA does not support: an address or a stride
    /// that is not a multiple of 16 bytes, or more than 256 rows; [`Error::Unsupported`] unless
    /// [`Device::has_tensor_maps`].
    pub fn new(
        device: &Device,
        address: CUdeviceptr,
        lengths: [u64; 4],
        strides: [u64; 3],
        rows: u32,
    ) -> Result<Self> {
        if !address.is_multiple_of(16)
            || strides.iter().any(|stride| !stride.is_multiple_of(16) || *stride >= 1 << 40)
        {
            let got = format!("address {address:#x}, strides {strides:?}");
            return Err(Error::invalid(
                "tensor map",
                got,
                "multiples of 16 bytes, strides below 2⁴⁰",
            ));
        }
        if lengths.iter().any(|&length| length == 0 || length > 1 << 32)
            || !(1..=256).contains(&rows)
        {
            let got = format!("lengths {lengths:?}, boxes of {rows} rows");
            return Err(Error::invalid(
                "tensor map",
                got,
                "lengths from 1 to 2³², boxes of 1 to 256 rows",
            ));
        }
        let box_lengths = [Self::DIMS, rows, 1, 1];
        let box_strides = [1; 4];
        let mut map = Self([0; 16]);
        let absent = || missing("TMA", "the driver has no cuTensorMapEncodeTiled");
        let encode = device.symbols().tensor_map.ok_or_else(absent)?;
        // SAFETY: `map` is a local of the size and the alignment of CUtensorMap; every list has the
        // length for four axes.
        let made = device.call_unchecked(|_| unsafe {
            encode(
                (&raw mut map).cast::<CUtensorMap>(),
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
                4,
                address as *mut _,
                lengths.as_ptr(),
                strides.as_ptr(),
                box_lengths.as_ptr(),
                box_strides.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        });
        match made {
            Status::SUCCESS => Ok(map),
            error => Err(driver_error(device.api(), "cuTensorMapEncodeTiled", error)),
        }
    }
}
