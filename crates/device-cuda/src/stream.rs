//! Streams and events.

use std::{
    fmt,
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{Result, Tick};
use cudarc::driver::sys::{CUdeviceptr, CUevent, CUstream};

use crate::{
    Device, Status, Symbols,
    context::{OpenStream, POLL, Retired, SPIN},
    symbols::NO_TIMING,
};

/// A CUDA stream. A clone refers to the same stream.
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

impl OpenStream for StreamParts {
    fn handle(&self) -> CUstream {
        self.handle
    }
}

/// A CUDA event, recorded once. A clone refers to the same event.
#[derive(Clone)]
pub struct Event(Arc<EventParts>);

struct EventParts {
    device: Device,
    handle: CUevent,
    recorded: Instant,
}

// SAFETY: an event is a handle that any thread may use.
unsafe impl Send for EventParts {}
// SAFETY: as above; it is recorded once, before it is shared.
unsafe impl Sync for EventParts {}

/// CU_STREAM_NON_BLOCKING: no implicit ordering with the default stream.
const NON_BLOCKING: u32 = 1;

/// Interval of ticks during a wait: far below any deadline, and long beside a tick. A shorter wait
/// does not tick.
const TICK_INTERVAL: Duration = Duration::from_millis(1);

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    pub fn new(device: &Device) -> Result<Self> {
        let mut handle: CUstream = std::ptr::null_mut();
        // SAFETY: `handle` is a local of the right type.
        device.call("cuStreamCreate", |symbols| unsafe {
            (symbols.stream_create)(&raw mut handle, NON_BLOCKING)
        })?;
        Ok(Self::of(StreamParts { device: device.clone(), handle, owned: true }))
    }

    /// Borrows a caller's stream, which is never destroyed.
    ///
    /// # Safety
    /// `handle` is a stream of the device's context and outlives everything created from this.
    pub unsafe fn borrowed(device: &Device, handle: CUstream) -> Self {
        Self::of(StreamParts { device: device.clone(), handle, owned: false })
    }

    fn of(parts: StreamParts) -> Self {
        let parts = Arc::new(parts);
        let open = Arc::downgrade(&parts);
        parts.device.0.state.add_stream(open);
        Self(parts)
    }

    /// Device of the stream.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Handle for driver calls.
    pub fn handle(&self) -> CUstream {
        self.0.handle
    }

    /// Records an event after all work queued so far.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    pub fn record(&self) -> Result<Event> {
        let device = &self.0.device;
        let mut handle: CUevent = std::ptr::null_mut();
        // SAFETY: `handle` is a local of the right type.
        device.call("cuEventCreate", |symbols| unsafe {
            (symbols.event_create)(&raw mut handle, NO_TIMING)
        })?;
        let recorded = Instant::now();
        let event = Event(Arc::new(EventParts { device: device.clone(), handle, recorded }));
        // SAFETY: both handles are alive.
        device.call("cuEventRecord", |symbols| unsafe {
            (symbols.event_record)(handle, self.0.handle)
        })?;
        Ok(event)
    }

    /// Makes later work of this stream wait for `event`.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are valid; the driver keeps what it needs of an event destroyed
        // later.
        self.0.device.call("cuStreamWaitEvent", |symbols| unsafe {
            (symbols.stream_wait)(self.0.handle, event.0.handle, 0)
        })
    }

    /// Blocks the host until all work queued so far is done, at most for `deadline`.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`] if work failed or the deadline expired.
    pub fn synchronize(&self, deadline: Duration) -> Result<()> {
        self.wait(deadline, &mut || ControlFlow::Continue(())).map(drop)
    }

    /// As [`Stream::synchronize`]; ticks about every millisecond. Returns `Break` if the tick did.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`] if work failed or the deadline expired.
    pub fn wait(&self, deadline: Duration, tick: Tick<'_>) -> Result<ControlFlow<()>> {
        let event = self.record()?;
        let began = Instant::now();
        let mut next_tick = TICK_INTERVAL;
        while !event.passed()? {
            let waited = began.elapsed();
            if waited >= next_tick {
                if tick().is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                next_tick = waited + TICK_INTERVAL;
            }
            if waited > deadline {
                return Err(self.0.device.fail_as_hung(deadline));
            }
            if waited < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(POLL);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Queues a copy of host bytes to the device. Pageable memory is read when the call returns.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    ///
    /// # Safety
    /// `to` is the address of at least as many bytes of this device's memory, which nothing else
    /// accesses until the work is done. Until then pinned memory is neither written nor freed.
    pub unsafe fn copy_to_device(&self, to: CUdeviceptr, from: &[u8]) -> Result<()> {
        // SAFETY: as required of the caller.
        self.queue("cuMemcpyHtoDAsync", from.len(), |symbols, bytes| unsafe {
            (symbols.copy_to_device)(to, from.as_ptr().cast(), bytes, self.0.handle)
        })
    }

    /// Copies device bytes to the host; blocks for at most `deadline`.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`] if work failed or the deadline expired.
    ///
    /// # Safety
    /// `from` is the address of at least as many bytes of this device's memory.
    pub unsafe fn copy_to_host(
        &self,
        to: &mut [u8],
        from: CUdeviceptr,
        deadline: Duration,
    ) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        // a copy to pageable memory blocks without a deadline, so the work before it is awaited
        // first
        self.synchronize(deadline)?;
        // SAFETY: `to` is borrowed until the copy has ended; `from` as required of the caller.
        unsafe { self.copy_to_pinned(to.as_mut_ptr(), from, to.len())? };
        self.synchronize(deadline)
    }

    /// Queues a copy of device bytes to pinned memory.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    ///
    /// # Safety
    /// `from` is the address of as many bytes of this device's memory, `to` of as many pinned
    /// bytes, which nothing else accesses until the copy is done.
    pub unsafe fn copy_to_pinned(
        &self,
        to: *mut u8,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: as required of the caller.
        self.queue("cuMemcpyDtoHAsync", bytes, |symbols, bytes| unsafe {
            (symbols.copy_to_host)(to.cast(), from, bytes, self.0.handle)
        })
    }

    /// Queues a copy within the device.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    ///
    /// # Safety
    /// Both are addresses of as many bytes of this device's memory, which nothing else writes until
    /// the work is done.
    pub unsafe fn copy_on_device(
        &self,
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: as required of the caller.
        self.queue("cuMemcpyDtoDAsync", bytes, |symbols, bytes| unsafe {
            (symbols.copy_on_device)(to, from, bytes, self.0.handle)
        })
    }

    /// Calls a driver function that queues a copy, unless it is of 0 bytes.
    fn queue(
        &self,
        name: &str,
        bytes: usize,
        copy: impl FnOnce(&Symbols, usize) -> Status,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.0.device.call(name, |symbols| copy(symbols, bytes))
    }
}

impl Event {
    /// True if the work before the event is done. Never blocks.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`] if work failed.
    pub fn passed(&self) -> Result<bool> {
        // SAFETY: the handle is alive.
        self.0
            .device
            .query("cuEventQuery", |symbols| unsafe { (symbols.event_query)(self.0.handle) })
    }

    /// As [`Event::passed`], in a wait that polls: it ends [`Device::hang_bound`] after the event
    /// was recorded.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`] if work failed or did not end within that bound.
    pub fn passed_in_time(&self) -> Result<bool> {
        let has_passed = self.passed()?;
        let bound = self.0.device.hang_bound();
        if !has_passed && self.0.recorded.elapsed() > bound {
            return Err(self.0.device.fail_as_hung(bound));
        }
        Ok(has_passed)
    }
}

impl Drop for StreamParts {
    fn drop(&mut self) {
        if self.owned {
            // created by `new`, destroyed once
            self.device.0.retire(Retired::Stream(self.handle));
        }
    }
}

impl Drop for EventParts {
    fn drop(&mut self) {
        // SAFETY: created by `record`, destroyed once; the driver keeps what waiting streams need.
        self.device.call_unchecked(|symbols| unsafe { (symbols.event_destroy)(self.handle) });
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
