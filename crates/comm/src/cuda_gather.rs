//! Messages that lie in pieces of a buffer of CUDA memory, and travel in one: the two sides of a message may be cut differently.

#![expect(
    unsafe_code,
    reason = "copies of device memory are promises that the compiler cannot check"
)]

use annulus_core::{MessageHeader, Result, index};
use annulus_device_cuda::{CudaBuffer, Stream};

/// Buffers on the device for such messages in one piece. All work on them that is not a peer's is in one stream, so that they serve again at once.
#[derive(Default)]
pub(crate) struct Scratch(Vec<CudaBuffer>);

impl Scratch {
    /// A buffer of at least `bytes` that nobody co-owns; the smallest there is.
    pub(crate) fn take(&mut self, bytes: u64, stream: &Stream) -> Result<CudaBuffer> {
        let fitting = self
            .0
            .iter()
            .enumerate()
            .filter(|(_, buffer)| buffer.len() >= bytes && !buffer.is_shared());
        match fitting.min_by_key(|(_, buffer)| buffer.len()) {
            Some((place, _)) => Ok(self.0.swap_remove(place)),
            None => CudaBuffer::new(stream.device(), bytes),
        }
    }

    /// Gives it back. Whoever still co-owns it keeps it from being taken.
    pub(crate) fn give(&mut self, buffer: CudaBuffer) {
        self.0.push(buffer);
    }
}

/// Copies the pieces of `hop` in `pieces` to the front of `one`.
pub(crate) fn gather(
    stream: &Stream,
    hop: &MessageHeader,
    pieces: &CudaBuffer,
    one: &CudaBuffer,
) -> Result<()> {
    each(hop, pieces, one, |piece, at, bytes| {
        // SAFETY: see `each`; both are kept until the work is done.
        unsafe { stream.copy_on_device(at, piece, bytes) }
    })
}

/// Copies the front of `one` to the pieces of `hop` in `pieces`.
pub(crate) fn scatter(
    stream: &Stream,
    hop: &MessageHeader,
    pieces: &CudaBuffer,
    one: &CudaBuffer,
) -> Result<()> {
    each(hop, pieces, one, |piece, at, bytes| {
        // SAFETY: see `each`; both are kept until the work is done.
        unsafe { stream.copy_on_device(piece, at, bytes) }
    })
}

/// Calls with the address of each piece, that of its bytes in `one`, and their number. The ranges lie within `pieces`, as was checked when they were
/// posted, and together within `one`.
fn each(
    hop: &MessageHeader,
    pieces: &CudaBuffer,
    one: &CudaBuffer,
    mut copy: impl FnMut(u64, u64, usize) -> Result<()>,
) -> Result<()> {
    let mut at = one.address();
    for range in hop.ranges.iter() {
        let bytes = range.end - range.start;
        copy(pieces.address() + range.start, at, index(bytes))?;
        at += bytes;
    }
    Ok(())
}
