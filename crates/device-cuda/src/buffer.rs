//! Plan-owned device memory.

use std::sync::{Arc, Mutex, PoisonError};

use annulus_core::{Error, Result};
use cudarc::driver::sys::{CUdeviceptr, CUresult};

use crate::{Device, Event, Stream, device::fault};

/// Bytes on a device. A clone co-owns the same bytes.
///
/// A buffer remembers the last work that touches it, so that whoever writes it from another stream (a transport) can wait for that.
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
    /// `len` bytes, with anything in them.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn new(device: &Device, len: u64) -> Result<Self> {
        if let Some(failure) = device.failure() {
            return Err(failure);
        }
        let out_of_memory = || Error::OutOfMemory { asked: len, free: device.free_bytes().ok() };
        // the driver knows no buffer of 0 bytes
        let bytes = usize::try_from(len.max(1)).map_err(|_| out_of_memory())?;
        let mut address: CUdeviceptr = 0;
        // SAFETY: `address` is a local of the right type.
        match device.plain(|symbols| unsafe { (symbols.allocate)(&raw mut address, bytes) }) {
            CUresult::CUDA_SUCCESS => Ok(Self(Arc::new(Allocation { device: device.clone(), address, len, last_use: Mutex::default() }))),
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(out_of_memory()),
            error => Err(device.fail(fault("cuMemAlloc", error))),
        }
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Its address.
    pub fn address(&self) -> CUdeviceptr {
        self.0.address
    }

    /// Its bytes.
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Whether somebody else co-owns it.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Remembers that work before `event` touches it.
    pub fn touched_before(&self, event: &Event) {
        *self.0.last_use.lock().unwrap_or_else(PoisonError::into_inner) = Some(event.clone());
    }

    /// Lets `stream` wait until the last work that touches it is done.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn wait_on(&self, stream: &Stream) -> Result<()> {
        let last = self.0.last_use.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.map_or(Ok(()), |event| stream.wait_for(&event))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated by this, once. The driver frees it when work that was queued before is done.
        self.device.plain(|symbols| unsafe { (symbols.free)(self.address) });
    }
}
