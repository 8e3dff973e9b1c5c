//! Memory that the host does not access: copies to and from it.

use std::ops::Range;

use crate::{Arrived, DType, HostBuffer, HostView, HostViewMut, Result, Space, Tick};

/// A space whose tensors a host program can allocate, fill and read.
pub trait DeviceSpace: Space {
    /// A dense tensor on the device, last axis contiguous.
    type Tensor: Send + 'static;
    /// The device, and the order of the work on it: a queue, a stream.
    type Context: Clone + Send + std::fmt::Debug + 'static;

    /// Allocates a tensor.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], [`crate::Error::Device`], [`crate::Error::Unsupported`] of a
    /// type that the device lacks.
    fn tensor(context: &Self::Context, dtype: DType, shape: [usize; 4]) -> Result<Self::Tensor>;

    /// Copies a host tensor of the same type and shape to the device, after the work enqueued so
    /// far. Ticks during a long copy and while it waits: other ranks may wait for this one. Returns
    /// early if the tick breaks; then the contents of `into` are unspecified.
    fn upload(
        context: &Self::Context,
        from: HostView<'_>,
        into: &mut Self::Tensor,
        tick: Tick<'_>,
    ) -> Result<()>;

    /// Copies a tensor to a host tensor of the same type and shape. Waits for the work enqueued so
    /// far, however long it takes, and ticks meanwhile: other ranks may wait for this one. Returns
    /// early if the tick breaks; then the contents of `into` are unspecified.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`], [`crate::Error::Device`], also if the device counts as
    /// hung. The tick says that this rank works, so no other rank ends the wait for a device that
    /// hangs: each device has a bound of its own.
    fn download(
        context: &Self::Context,
        from: &Self::Tensor,
        into: &mut HostViewMut<'_>,
        tick: Tick<'_>,
    ) -> Result<()>;

    /// Borrows a tensor for reading.
    fn view(tensor: &Self::Tensor) -> Self::View<'_>;

    /// Borrows a tensor for writing.
    fn view_mut(tensor: &mut Self::Tensor) -> Self::ViewMut<'_>;
}

/// A space whose blocks can be copied from and to host memory without waiting for the device.
pub trait StagedSpace: Space {
    /// State of the copies: a queue, a stream, pinned memory.
    type Copier: Send;
    /// A copy to the host under way. It co-owns its source and owns its target.
    type Download: Send;
    /// A copy from the host under way. It owns both sides.
    type Upload: Send;

    /// Allocates host memory of `bytes` bytes from and to which the device copies at full speed.
    fn staging_buffer(_: &mut Self::Copier, bytes: u64) -> Result<HostBuffer> {
        HostBuffer::zeroed(bytes)
    }

    /// Starts copying byte ranges of a device buffer, after `ready`, one after another to the front
    /// of `into`, which is a [staging buffer](StagedSpace::staging_buffer).
    fn download(
        copier: &mut Self::Copier,
        from: &Self::Buffer,
        ready: &Self::Event,
        ranges: &[Range<u64>],
        into: HostBuffer,
    ) -> Result<Self::Download>;

    /// Returns the host buffer, which has no other owner, once the copy has finished. Returns it
    /// once; never waits.
    ///
    /// # Errors
    /// [`crate::Error::Device`], also if the device counts as hung: the copy may wait for kernels,
    /// during which the rank sends heartbeats, so each device has a bound of its own.
    fn downloaded(
        copier: &mut Self::Copier,
        copy: &mut Self::Download,
    ) -> Result<Option<HostBuffer>>;

    /// Starts copying the front of `from` into byte ranges of a device buffer, one after another.
    /// Fast if `from` is a [staging buffer](StagedSpace::staging_buffer). Ticks if it waits for
    /// earlier copies to the device; what is copied after a break is unspecified.
    fn upload(
        copier: &mut Self::Copier,
        from: HostBuffer,
        into: Self::Buffer,
        ranges: &[Range<u64>],
        tick: Tick<'_>,
    ) -> Result<Self::Upload>;

    /// Returns both buffers, which have no other owner, and the event after which the device may
    /// read, once the copy has finished. Returns them once; never waits.
    fn uploaded(
        copier: &mut Self::Copier,
        copy: &mut Self::Upload,
    ) -> Result<Option<(HostBuffer, Arrived<Self>)>>;
}
