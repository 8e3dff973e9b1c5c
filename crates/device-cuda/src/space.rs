//! CUDA memory as a memory space: all of it, or the blocks of a ring alone.

use annulus_core::{DType, HostView, HostViewMut, Space};

use crate::{CudaBuffer, CudaView, CudaViewMut, Event};

/// The memory of a CUDA device.
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

    fn describe(view: &CudaView<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }

    fn describe_mut(view: &CudaViewMut<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }
}

/// Blocks in the memory of a CUDA device, a caller's tensors in host memory.
#[derive(Debug, Clone, Copy)]
pub struct CudaBlocks;

impl Space for CudaBlocks {
    type Buffer = CudaBuffer;
    type View<'a> = HostView<'a>;
    type ViewMut<'a> = HostViewMut<'a>;
    type Event = Event;

    fn size(buffer: &CudaBuffer) -> u64 {
        buffer.len()
    }

    fn describe(view: &HostView<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }

    fn describe_mut(view: &HostViewMut<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }
}
