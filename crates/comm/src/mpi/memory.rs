//! What a message lies in. Of a device's memory nothing but the address is used here: only an MPI that says so, or is said to, can read it.

use std::ops::Range;

use annulus_core::{Host, HostBuffer, Space, index};
#[cfg(feature = "cuda")]
use annulus_device_cuda::CudaBuffer;

/// Bytes that MPI reads or writes, owned or co-owned. They do not move when this moves.
pub(super) enum Memory {
    Host(HostBuffer),
    #[cfg(feature = "cuda")]
    Device(CudaBuffer),
}

impl Memory {
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Host(buffer) => Host::size(buffer),
            #[cfg(feature = "cuda")]
            Self::Device(buffer) => buffer.len(),
        }
    }

    /// Where these bytes begin, for MPI to read; `None` if it has not all of them.
    pub(super) fn start(&self, bytes: &Range<u64>) -> Option<*const u8> {
        match self {
            Self::Host(buffer) => {
                buffer.bytes().get(index(bytes.start)..index(bytes.end)).map(<[u8]>::as_ptr)
            }
            #[cfg(feature = "cuda")]
            Self::Device(buffer) => address(buffer, bytes).map(<*mut u8>::cast_const),
        }
    }

    /// As [`Memory::start`], for MPI to write; `None` also while somebody else co-owns them.
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

    /// Itself, if it is the host's.
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
