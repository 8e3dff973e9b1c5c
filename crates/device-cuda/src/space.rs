//! The memory space of CUDA devices: blocks and tensors.

use annulus_core::{
    DType, DeviceSpace, Element, Error, HostView, HostViewMut, Result, Space, Tick, memory,
};
use ndarray::{ArrayView4, ArrayViewMut4};

use crate::{CudaBuffer, CudaTensor, CudaView, CudaViewMut, Event, Stream};

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
        (view.dtype(), view.shape())
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
