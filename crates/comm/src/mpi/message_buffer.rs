//! Memory of a message: a host buffer, or CUDA memory for an MPI that accepts it.
//!
//! Of CUDA memory only the address is used here; MPI reads and writes it.

use std::ops::Range;

use annulus_core::{Host, HostBuffer, Space, index};
#[cfg(feature = "cuda")]
use annulus_device_cuda::CudaBuffer;

/// Bytes that MPI reads or writes, owned or co-owned. They stay in place when this value moves.
pub(super) enum MessageBuffer {
    Host(HostBuffer),
    #[cfg(feature = "cuda")]
    Device(CudaBuffer),
}

impl MessageBuffer {
    /// Returns its size in bytes.
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Host(buffer) => Host::size(buffer),
            #[cfg(feature = "cuda")]
            Self::Device(buffer) => buffer.len(),
        }
    }

    /// Returns the address of these bytes, for MPI to read; `None` if they exceed the buffer.
    pub(super) fn start(&self, bytes: &Range<u64>) -> Option<*const u8> {
        match self {
            Self::Host(buffer) => {
                buffer.bytes().get(index(bytes.start)..index(bytes.end)).map(<[u8]>::as_ptr)
            }
            #[cfg(feature = "cuda")]
            Self::Device(buffer) => address(buffer, bytes).map(<*mut u8>::cast_const),
        }
    }

    /// As [`MessageBuffer::start`], for MPI to write; `None` also while the buffer is co-owned.
    pub(super) fn start_mut(&mut self, bytes: &Range<u64>) -> Option<*mut u8> {
        match self {
            Self::Host(buffer) => buffer
                .bytes_mut()?
                .get_mut(index(bytes.start)..index(bytes.end))
                .map(<[u8]>::as_mut_ptr),
            #[cfg(feature = "cuda")]
            Self::Device(buffer) => address(buffer, bytes).filter(|_| !buffer.is_shared()),
        }
    }

    /// Returns the host buffer; `None` for device memory.
    pub(super) fn into_host(self) -> Option<HostBuffer> {
        match self {
            Self::Host(buffer) => Some(buffer),
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }
}

#[cfg(feature = "cuda")]
fn address(buffer: &CudaBuffer, bytes: &Range<u64>) -> Option<*mut u8> {
    (bytes.start <= bytes.end && bytes.end <= buffer.len())
        .then(|| std::ptr::with_exposed_provenance_mut(index(buffer.address() + bytes.start)))
}
