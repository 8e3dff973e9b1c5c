//! Page-locked host memory, for asynchronous copies.

use annulus_core::{Error, HostMemory, Result};
use cudarc::driver::sys::CUresult;

use crate::{Device, context::Retired};

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
        Self::bytes(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        Self::bytes_mut(self)
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
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                return Err(Error::out_of_memory("a pinned buffer", len as u64));
            }
            error => return Err(device.fail_in("cuMemAllocHost", error)),
        }
        // SAFETY: the driver has just allocated these bytes.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(Self { device: device.clone(), start: start.cast(), len })
    }

    /// Borrows the bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialized bytes that this owns.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Borrows the bytes mutably.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
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
