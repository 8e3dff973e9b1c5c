//! Device memory owned by a plan.
//!
//! Page-locked host memory, for asynchronous copies.

use std::sync::{Arc, Mutex};

use annulus_core::{Error, HostMemory, Result};
use cudarc::driver::sys::CUdeviceptr;

use crate::{
    Device, Event, Status, Stream,
    context::{Retired, lock},
};

/// Device memory, reference counted: a clone shares the same bytes.
///
/// A buffer records the last work that uses it, so that another stream (a transport) can wait for
/// that work before it writes.
#[derive(Debug, Clone)]
pub struct CudaBuffer(Arc<Allocation>);

#[derive(Debug)]
struct Allocation {
    device: Device,
    address: CUdeviceptr,
    len: u64,
    last_use: Mutex<Option<Event>>,
}

impl CudaBuffer {
    /// Allocates `len` bytes, uninitialized.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn new(device: &Device, len: u64) -> Result<Self> {
        if let Some(failure) = device.failure() {
            return Err(failure);
        }
        let out_of_memory = || Error::OutOfMemory {
            what: "a device buffer".into(),
            asked: len,
            free: device.free_bytes().ok(),
        };
        // the driver rejects an allocation of 0 bytes
        let bytes = usize::try_from(len.max(1)).map_err(|_| out_of_memory())?;
        let mut address: CUdeviceptr = 0;
        let mut allocate = || {
            // SAFETY: `address` is a local of the right type.
            device.call_unchecked(|symbols| unsafe { (symbols.allocate)(&raw mut address, bytes) })
        };
        let mut allocated = allocate();
        // memory that was dropped may wait for the work that uses it
        if allocated == Status::OUT_OF_MEMORY && device.0.make_room() {
            allocated = allocate();
        }
        match allocated {
            Status::SUCCESS => Ok(Self(Arc::new(Allocation {
                device: device.clone(),
                address,
                len,
                last_use: Mutex::default(),
            }))),
            Status::OUT_OF_MEMORY => Err(out_of_memory()),
            error => Err(device.fail_in("cuMemAlloc", error)),
        }
    }

    /// Allocates a buffer of these bytes, which are copied in the order of `stream`.
    ///
    /// # Errors
    /// As [`CudaBuffer::new`].
    pub fn filled(stream: &Stream, bytes: &[u8]) -> Result<Self> {
        let buffer = Self::new(stream.device(), bytes.len() as u64)?;
        // SAFETY: the buffer is new and as long as the bytes.
        unsafe { stream.copy_to_device(buffer.address(), bytes)? };
        Ok(buffer)
    }

    /// Device of the memory.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Device address.
    pub fn address(&self) -> CUdeviceptr {
        self.0.address
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// True if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// True if there is another owner.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Copies `bytes` from the host, to the bytes from `first` on: in the order of `stream`, after
    /// the last use of the buffer. Returns the event after the copy.
    ///
    /// # Errors
    /// [`Error::Internal`] if the bytes are not in the buffer; [`Error::InvalidArgument`] for a
    /// stream of another device; [`Error::Device`].
    pub fn write(&mut self, stream: &Stream, first: u64, bytes: &[u8]) -> Result<Event> {
        let end = first.checked_add(bytes.len() as u64).filter(|&end| end <= self.len());
        if end.is_none() {
            let count = bytes.len();
            let what = format!("{count} bytes from {first} on of a block of {}", self.len());
            return Err(Error::internal(what));
        }
        if stream.device() != self.device() {
            let got = format!("a stream of {:?}", stream.device());
            return Err(Error::invalid("stream", got, "a stream of the buffer's device"));
        }
        self.wait_on(stream)?;
        // SAFETY: the bytes are in the buffer, which is on the device of the stream. Earlier work
        // on them precedes the copy, and later work waits for the event that is recorded.
        unsafe { stream.copy_to_device(self.address() + first, bytes)? };
        let done = stream.record()?;
        self.touched_before(&done);
        Ok(done)
    }

    /// Records `event` as the last use of the buffer.
    pub fn touched_before(&self, event: &Event) {
        *lock(&self.0.last_use) = Some(event.clone());
    }

    /// Returns the event after the last use of the buffer, if there was one.
    pub fn last_use(&self) -> Option<Event> {
        lock(&self.0.last_use).clone()
    }

    /// Makes later work of `stream` wait for the last use of the buffer.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn wait_on(&self, stream: &Stream) -> Result<()> {
        self.last_use().map_or(Ok(()), |event| stream.wait_for(&event))
    }
}

impl Drop for Allocation {
    /// Frees the memory once no work may use it.
    fn drop(&mut self) {
        // allocated by `new`, freed once
        self.device.0.retire(Retired::Memory(self.address));
    }
}

/// Page-locked host memory.
#[derive(Debug)]
pub struct PinnedBuffer {
    device: Device,
    start: *mut u8,
    len: usize,
}

// SAFETY: it owns its bytes, which any thread may access.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; a shared reference only reads them.
unsafe impl Sync for PinnedBuffer {}

impl HostMemory for PinnedBuffer {
    fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialized bytes that this owns.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl PinnedBuffer {
    /// Allocates `len` zero bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn zeroed(device: &Device, len: usize) -> Result<Self> {
        let mut start = std::ptr::null_mut();
        let bytes = len.max(1);
        let allocated = device.call_unchecked(|symbols| {
            // SAFETY: `start` is a local of the right type.
            unsafe { (symbols.allocate_host)(&raw mut start, bytes) }
        });
        match allocated {
            Status::SUCCESS => {}
            Status::OUT_OF_MEMORY => {
                return Err(Error::out_of_memory("a pinned buffer", len as u64));
            }
            error => return Err(device.fail_in("cuMemAllocHost", error)),
        }
        // SAFETY: the driver has just allocated these bytes.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(Self { device: device.clone(), start: start.cast(), len })
    }

    /// Address of the bytes.
    pub const fn address(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for PinnedBuffer {
    /// Frees the memory once no work may use it.
    fn drop(&mut self) {
        // allocated by `zeroed`, freed once
        self.device.0.retire(Retired::Pinned(self.start.cast()));
    }
}
