//! CUDA memory as a memory space.

use annulus_core::{DType, Space};

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
