//! Queues of work, and marks in them.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{Error, Result};
use cudarc::driver::sys::{CUdeviceptr, CUevent, CUstream};

use crate::Device;

/// Work in order. A clone is the same stream.
#[derive(Clone)]
pub struct Stream(Arc<StreamParts>);

struct StreamParts {
    device: Device,
    handle: CUstream,
    owned: bool,
}

// SAFETY: a stream is a handle that any thread may use.
unsafe impl Send for StreamParts {}
// SAFETY: as above; the driver orders calls on one stream from several threads.
unsafe impl Sync for StreamParts {}

/// "All work that was in the stream when this was recorded." A clone is the same mark.
#[derive(Clone)]
pub struct Event(Arc<EventParts>);

struct EventParts {
    device: Device,
    handle: CUevent,
}

// SAFETY: an event is a handle that any thread may use.
unsafe impl Send for EventParts {}
// SAFETY: as above; it is recorded once, before it is shared.
unsafe impl Sync for EventParts {}

/// Streams do not wait for the default stream.
const NON_BLOCKING: u32 = 1;
/// Events carry no time.
const NO_TIMING: u32 = 2;
/// How often an event is asked.
const POLL: Duration = Duration::from_micros(50);

impl Stream {
    /// A new stream.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(device: &Device) -> Result<Self> {
        let mut handle: CUstream = std::ptr::null_mut();
        // SAFETY: `handle` is a local of the right type.
        device.call("cuStreamCreate", |symbols| unsafe { (symbols.stream_create)(&raw mut handle, NON_BLOCKING) })?;
        Ok(Self(Arc::new(StreamParts { device: device.clone(), handle, owned: true })))
    }

    /// A caller's stream, borrowed: it is never destroyed.
    ///
    /// # Safety
    /// `handle` is a stream of the device's context and outlives everything made of this.
    pub unsafe fn borrowed(device: &Device, handle: CUstream) -> Self {
        Self(Arc::new(StreamParts { device: device.clone(), handle, owned: false }))
    }

    /// Whose it is.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The driver's handle.
    pub fn handle(&self) -> CUstream {
        self.0.handle
    }

    /// A mark after all work so far.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn record(&self) -> Result<Event> {
        let device = &self.0.device;
        let mut handle: CUevent = std::ptr::null_mut();
        // SAFETY: `handle` is a local of the right type.
        device.call("cuEventCreate", |symbols| unsafe { (symbols.event_create)(&raw mut handle, NO_TIMING) })?;
        let event = Event(Arc::new(EventParts { device: device.clone(), handle }));
        // SAFETY: both handles are alive.
        device.call("cuEventRecord", |symbols| unsafe { (symbols.event_record)(handle, self.0.handle) })?;
        Ok(event)
    }

    /// Work from here on waits for `event`.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive; the driver keeps what it needs of an event that is destroyed later.
        self.0.device.call("cuStreamWaitEvent", |symbols| unsafe { (symbols.stream_wait)(self.0.handle, event.0.handle, 0) })
    }

    /// Waits on the host until all work so far is done, but no longer than `deadline`.
    ///
    /// # Errors
    /// [`Error::Device`] if work failed or did not end in time.
    pub fn synchronize(&self, deadline: Duration) -> Result<()> {
        let event = self.record()?;
        let until = Instant::now() + deadline;
        while !event.passed()? {
            if Instant::now() > until {
                let what = format!("work on {} did not end within {:.1} s", self.0.device.name(), deadline.as_secs_f64());
                return Err(self.0.device.fail(Error::Device { what }));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Copies host bytes to the device; they may be dropped at once.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// `to` is the address of at least as many bytes of this device's memory, which nothing else touches until the work is done.
    pub unsafe fn copy_to_device(&self, to: CUdeviceptr, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: `from` is pageable memory, which the driver has read when the call returns; `to` as promised.
        let copy = |symbols: &crate::Symbols| unsafe { (symbols.copy_to_device)(to, from.as_ptr().cast(), from.len(), self.0.handle) };
        self.0.device.call("cuMemcpyHtoDAsync", copy)
    }

    /// Copies device bytes to the host and waits for them, but no longer than `deadline`.
    ///
    /// # Errors
    /// [`Error::Device`] if work failed or did not end in time.
    ///
    /// # Safety
    /// `from` is the address of at least as many bytes of this device's memory.
    pub unsafe fn copy_to_host(&self, to: &mut [u8], from: CUdeviceptr, deadline: Duration) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        // the copy itself blocks, as `to` is pageable: so what comes before it is waited for with a deadline
        self.synchronize(deadline)?;
        // SAFETY: `to` is borrowed until the copy has ended; `from` as promised.
        let copy = |symbols: &crate::Symbols| unsafe { (symbols.copy_to_host)(to.as_mut_ptr().cast(), from, to.len(), self.0.handle) };
        self.0.device.call("cuMemcpyDtoHAsync", copy)?;
        self.synchronize(deadline)
    }

    /// As [`Stream::copy_to_device`], from pinned memory: the copy reads it when its turn comes.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Stream::copy_to_device`]; `from` is the address of as many pinned bytes, which nobody writes or frees until the copy is done.
    pub unsafe fn copy_from_pinned(&self, to: CUdeviceptr, from: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as promised.
        let copy = |symbols: &crate::Symbols| unsafe { (symbols.copy_to_device)(to, from.cast(), bytes, self.0.handle) };
        self.0.device.call("cuMemcpyHtoDAsync", copy)
    }

    /// Copies device bytes to pinned memory when its turn comes.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// `from` is the address of as many bytes of this device's memory, `to` of pinned memory, which nobody touches until the copy is done.
    pub unsafe fn copy_to_pinned(&self, to: *mut u8, from: CUdeviceptr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as promised.
        let copy = |symbols: &crate::Symbols| unsafe { (symbols.copy_to_host)(to.cast(), from, bytes, self.0.handle) };
        self.0.device.call("cuMemcpyDtoHAsync", copy)
    }

    /// Copies bytes within the device.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// Both are addresses of as many bytes of this device's memory, which nothing else writes until the work is done.
    pub unsafe fn copy_on_device(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as promised.
        self.0.device.call("cuMemcpyDtoDAsync", |symbols| unsafe { (symbols.copy_on_device)(to, from, bytes, self.0.handle) })
    }

    /// Sets bytes.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Stream::copy_to_device`].
    pub unsafe fn fill(&self, to: CUdeviceptr, byte: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as promised.
        self.0.device.call("cuMemsetD8Async", |symbols| unsafe { (symbols.fill)(to, byte, bytes, self.0.handle) })
    }
}

impl Event {
    /// Whether the work before it is done. Never waits.
    ///
    /// # Errors
    /// [`Error::Device`] if work failed.
    pub fn passed(&self) -> Result<bool> {
        // SAFETY: the handle is alive.
        self.0.device.ask("cuEventQuery", |symbols| unsafe { (symbols.event_query)(self.0.handle) })
    }
}

impl Drop for StreamParts {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: made by this; work in it goes on by itself.
            self.device.plain(|symbols| unsafe { (symbols.stream_destroy)(self.handle) });
        }
    }
}

impl Drop for EventParts {
    fn drop(&mut self) {
        // SAFETY: made by this; the driver keeps what waits for it.
        self.device.plain(|symbols| unsafe { (symbols.event_destroy)(self.handle) });
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?}, {:p})", self.0.device, self.0.handle)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:p})", self.0.handle)
    }
}
