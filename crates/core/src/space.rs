//! Memory spaces: the type of memory that the backend and the transport of one rank have in common.
//!
//! A device with memory of its own adds tensors that are copied from and to the host
//! ([`DeviceSpace`]), and blocks that are staged through host memory for a host transport
//! ([`StagedSpace`]).

use std::{
    any::Any,
    ops::{ControlFlow, Range},
    sync::Arc,
};

use crate::{DType, Error, HostView, HostViewMut, Result, memory};

/// Called between tiles, and between parts of the epilogue of a pass, on the thread that called the
/// backend, so that a transport without a progress thread moves data. [`ControlFlow::Break`] (a
/// peer has failed) stops the kernel as soon as possible; its results are then never read.
pub type Tick<'a> = &'a mut dyn FnMut() -> ControlFlow<()>;

/// A finished receive.
#[derive(Debug)]
pub struct Arrived<S: Space> {
    /// Buffer of the posted receive, filled.
    pub buffer: S::Buffer,
    /// Event after which the buffer may be read.
    pub ready: S::Event,
}

/// A kind of memory, with the types of blocks and of the caller's tensors in it.
///
/// A backend computes in it and a transport sends from it. They have nothing else in common.
pub trait Space: Sized + 'static {
    /// Buffer of a block, owned by the plan. A clone shares ownership of the same bytes, so that a
    /// transport can own them while they are in flight.
    type Buffer: Clone + Send + Sync + std::fmt::Debug + 'static;
    /// Tensor of the caller, borrowed for reading.
    type View<'a>: Copy;
    /// Tensor of the caller, borrowed for writing.
    type ViewMut<'a>;
    /// Event after all work enqueued so far, after which a buffer may be read. `()` if work is
    /// complete when a call returns.
    type Event: Clone + Send + std::fmt::Debug + 'static;

    /// True if [`Space::part`] returns parts that start at multiples of 8 bytes; false if it
    /// returns none.
    const HAS_PARTS: bool = false;

    /// Returns the size of a buffer in bytes.
    fn size(buffer: &Self::Buffer) -> u64;

    /// Returns true while the buffer has another owner, as a transport that sends from it. False if
    /// work that is enqueued later may overwrite it, because the queue runs in order.
    fn is_shared(buffer: &Self::Buffer) -> bool;

    /// Returns a buffer that consists of `bytes` of another one, for reading, and shares ownership
    /// of the whole. `None` if the range is out of bounds or misaligned.
    fn part(_buffer: &Self::Buffer, _bytes: Range<u64>) -> Option<Self::Buffer> {
        None
    }

    /// True if [`Space::host_view_mut`] returns a view.
    const HOST_TENSORS: bool = false;

    /// Borrows the same tensor for a shorter time.
    fn reborrow<'short>(view: &'short Self::View<'_>) -> Self::View<'short>;

    /// Borrows a tensor as a view in host memory; `None` if it is in device memory.
    fn host_view_mut<'short>(_view: &'short mut Self::ViewMut<'_>) -> Option<HostViewMut<'short>> {
        None
    }

    /// Returns element type and shape of a tensor. The ring checks them before it calls a backend.
    fn describe(view: &Self::View<'_>) -> (DType, [usize; 4]);

    /// As [`Space::describe`], for a writable tensor.
    fn describe_mut(view: &Self::ViewMut<'_>) -> (DType, [usize; 4]);
}

/// Host memory.
#[derive(Debug, Clone, Copy)]
pub struct Host;

impl Space for Host {
    type Buffer = HostBuffer;
    type View<'a> = HostView<'a>;
    type ViewMut<'a> = HostViewMut<'a>;
    type Event = ();

    const HAS_PARTS: bool = true;
    const HOST_TENSORS: bool = true;

    fn size(buffer: &HostBuffer) -> u64 {
        buffer.bytes().len() as u64
    }

    fn is_shared(buffer: &HostBuffer) -> bool {
        buffer.is_shared()
    }

    fn part(buffer: &HostBuffer, bytes: Range<u64>) -> Option<HostBuffer> {
        buffer.part(bytes)
    }

    fn reborrow<'short>(view: &'short HostView<'_>) -> HostView<'short> {
        view.reborrow()
    }

    fn host_view_mut<'short>(view: &'short mut HostViewMut<'_>) -> Option<HostViewMut<'short>> {
        Some(view.reborrow())
    }

    fn describe(view: &HostView<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }

    fn describe_mut(view: &HostViewMut<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }
}

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

    /// True if the device computes on tensors in host memory where they are, because it shares that
    /// memory: then nothing is uploaded or downloaded.
    fn shares_host_memory(_: &Self::Context) -> bool {
        false
    }

    /// Borrows a tensor in host memory for reading on a device that shares it. A pass returns from
    /// each of its calls only once its work on such tensors has ended.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] unless [`DeviceSpace::shares_host_memory`].
    fn shared_view<'a>(_: &Self::Context, _tensor: HostView<'a>) -> Result<Self::View<'a>> {
        Err(not_shared())
    }

    /// As [`DeviceSpace::shared_view`], for writing.
    ///
    /// # Errors
    /// As [`DeviceSpace::shared_view`].
    fn shared_view_mut<'a>(
        _: &Self::Context,
        _tensor: HostViewMut<'a>,
    ) -> Result<Self::ViewMut<'a>> {
        Err(not_shared())
    }
}

/// Error of a device with memory of its own.
fn not_shared() -> Error {
    Error::unsupported("a tensor in host memory", "a device with memory of its own")
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

/// A space whose tensors are in host memory. Its blocks may be in device memory.
pub trait HostTensors:
    for<'a> Space<View<'a> = HostView<'a>, ViewMut<'a> = HostViewMut<'a>>
{
}

impl<S: for<'a> Space<View<'a> = HostView<'a>, ViewMut<'a> = HostViewMut<'a>>> HostTensors for S {}

/// Host memory that another crate allocates, such as page-locked memory from which a device copies.
pub trait HostMemory: Any + Send + Sync + std::fmt::Debug {
    /// Returns the bytes. They do not move, and start at a multiple of 8.
    fn bytes(&self) -> &[u8];

    /// Returns the same bytes for writing.
    fn bytes_mut(&mut self) -> &mut [u8];
}

#[derive(Debug)]
enum Memory {
    Words(Vec<u64>),
    Foreign(Box<dyn HostMemory>),
}

/// Bytes in host memory, aligned to 8, with shared ownership. They can be written only while they
/// have one owner.
#[derive(Debug, Clone)]
pub struct HostBuffer {
    memory: Arc<Memory>,
    /// Offset of the first byte, a multiple of 8.
    start: usize,
    len: usize,
}

impl HostBuffer {
    /// Allocates `len` bytes of zeros.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn zeroed(len: u64) -> Result<Self> {
        let bytes = crate::index(len);
        let words = memory::filled("a buffer of the ring", bytes.div_ceil(8), 0)?;
        Ok(Self { memory: Arc::new(Memory::Words(words)), start: 0, len: bytes })
    }

    /// Takes ownership of memory of another crate.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] if it does not start at a multiple of 8.
    pub fn foreign(memory: impl HostMemory) -> Result<Self> {
        let bytes = memory.bytes();
        let address = bytes.as_ptr() as usize;
        if !address.is_multiple_of(8) {
            return Err(crate::Error::invalid("host memory", address, "a multiple of 8"));
        }
        let len = bytes.len();
        Ok(Self { memory: Arc::new(Memory::Foreign(Box::new(memory))), start: 0, len })
    }

    /// Returns the memory of a [foreign](HostBuffer::foreign) buffer of this type, unless the
    /// buffer is a part of it.
    pub fn foreign_memory<T: HostMemory>(&self) -> Option<&T> {
        match &*self.memory {
            Memory::Foreign(memory) if self.start == 0 => {
                let memory: &dyn Any = &**memory;
                memory.downcast_ref::<T>().filter(|memory| memory.bytes().len() == self.len)
            }
            _ => None,
        }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        let bytes = match &*self.memory {
            Memory::Words(words) => bytemuck::cast_slice(words),
            Memory::Foreign(memory) => memory.bytes(),
        };
        &bytes[self.start..self.start + self.len]
    }

    /// Writes `bytes` by `fill`: [`crate::Backend::write_block`] of a backend in host memory.
    ///
    /// # Errors
    /// As there.
    pub fn write(
        &mut self,
        bytes: Range<u64>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let len = self.len;
        let range = crate::index(bytes.start)..crate::index(bytes.end);
        let into = self.bytes_mut().and_then(|all| all.get_mut(range));
        fill(into.ok_or_else(|| {
            let what = format!("bytes {bytes:?} of a block of {len} bytes, or of a shared one");
            crate::Error::internal(what)
        })?)
    }

    /// Returns the bytes for writing; `None` while they have another owner.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let bytes = match Arc::get_mut(&mut self.memory)? {
            Memory::Words(words) => bytemuck::cast_slice_mut(words),
            Memory::Foreign(memory) => memory.bytes_mut(),
        };
        Some(&mut bytes[self.start..self.start + self.len])
    }

    /// Returns a buffer of the bytes `bytes` that shares their ownership; `None` if the range is
    /// out of bounds or its start is not a multiple of 8.
    pub fn part(&self, bytes: Range<u64>) -> Option<Self> {
        let start = usize::try_from(bytes.start).ok()?;
        let end = usize::try_from(bytes.end).ok()?;
        let fits = start <= end && end <= self.len && start.is_multiple_of(8);
        fits.then(|| Self {
            memory: Arc::clone(&self.memory),
            start: self.start + start,
            len: end - start,
        })
    }

    /// Returns true if the bytes have another owner: a transfer in flight or a part.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.memory) > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_bytes_of_its_range_and_makes_the_whole_read_only() {
        let mut whole = HostBuffer::zeroed(40).unwrap();
        whole.bytes_mut().unwrap().iter_mut().zip(0..).for_each(|(byte, number)| *byte = number);
        let part = whole.part(8..37).unwrap();
        assert_eq!(part.bytes(), (8..37).collect::<Vec<u8>>());
        assert_eq!(part.part(16..20).unwrap().bytes(), [24, 25, 26, 27]);
        assert!(whole.is_shared() && whole.bytes_mut().is_none());
        drop(part);
        assert!(whole.bytes_mut().is_some());
        for outside in [4..12, 8..41, 40..48] {
            assert!(whole.part(outside).is_none());
        }
    }
}
