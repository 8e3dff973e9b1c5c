//! Host memory that the device copies from and to by itself.

use annulus_core::{Error, Result};
use cudarc::driver::sys::CUresult;

use crate::{Device, device::fault};

/// Page-locked host bytes.
#[derive(Debug)]
pub struct PinnedBuffer {
    device: Device,
    start: *mut u8,
    len: usize,
}

// SAFETY: it owns its bytes, which any thread may touch.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// `len` zero bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn zeroed(device: &Device, len: usize) -> Result<Self> {
        let mut start = std::ptr::null_mut();
        let bytes = len.max(1);
        // SAFETY: `start` is a local of the right type.
        match device.plain(|symbols| unsafe { (symbols.allocate_host)(&raw mut start, bytes) }) {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(Error::OutOfMemory { asked: len as u64, free: None }),
            error => return Err(device.fail(fault("cuMemAllocHost", error))),
        }
        // SAFETY: the driver has just given these bytes to this alone.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(Self { device: device.clone(), start: start.cast(), len })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes that this owns and that were initialised.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// Their address.
    pub const fn address(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by this, once; whoever has the device copy from or to it keeps it until that is done.
        self.device.plain(|symbols| unsafe { (symbols.free_host)(self.start.cast()) });
    }
}
