//! Gathering and scattering on the device: messages of several byte ranges of CUDA memory are
//! transferred in one range, because sender and receiver may divide them differently.

#![expect(
    unsafe_code,
    reason = "copies of device memory, whose addresses the compiler cannot check"
)]

use annulus_core::{MessageHeader, Result, index};
use annulus_device_cuda::{CudaBuffer, Stream};

/// Buffers on the device for such messages. All work on them is in one stream, but for the
/// transfers themselves, during which they are co-owned; so they can be reused at once.
#[derive(Default)]
pub(crate) struct DeviceStaging(Vec<CudaBuffer>);

impl DeviceStaging {
    /// Takes the smallest buffer of at least `bytes` bytes without another owner, or a new one.
    pub(crate) fn take(&mut self, bytes: u64, stream: &Stream) -> Result<CudaBuffer> {
        let fitting = self
            .0
            .iter()
            .enumerate()
            .filter(|(_, buffer)| buffer.len() >= bytes && !buffer.is_shared());
        match fitting.min_by_key(|(_, buffer)| buffer.len()) {
            Some((index, _)) => Ok(self.0.swap_remove(index)),
            None => CudaBuffer::new(stream.device(), bytes),
        }
    }

    /// Returns a buffer. It is not taken again while it has another owner.
    pub(crate) fn give(&mut self, buffer: CudaBuffer) {
        self.0.push(buffer);
    }
}

/// Copies the ranges of `header` in `buffer` to the front of `staged`.
pub(crate) fn gather(
    stream: &Stream,
    header: &MessageHeader,
    buffer: &CudaBuffer,
    staged: &CudaBuffer,
) -> Result<()> {
    for_each_range(header, buffer, staged, |range, at, bytes| {
        // SAFETY: see `for_each_range`; both buffers are kept until the work is done.
        unsafe { stream.copy_on_device(at, range, bytes) }
    })
}

/// Copies the front of `staged` to the ranges of `header` in `buffer`.
pub(crate) fn scatter(
    stream: &Stream,
    header: &MessageHeader,
    buffer: &CudaBuffer,
    staged: &CudaBuffer,
) -> Result<()> {
    for_each_range(header, buffer, staged, |range, at, bytes| {
        // SAFETY: see `for_each_range`; both buffers are kept until the work is done.
        unsafe { stream.copy_on_device(range, at, bytes) }
    })
}

/// Calls `copy` for each range with its address in `buffer`, the address of its bytes in `staged`,
/// and its length.
///
/// The ranges lie within `buffer`, as was checked when they were posted, and their sum within
/// `staged`.
fn for_each_range(
    header: &MessageHeader,
    buffer: &CudaBuffer,
    staged: &CudaBuffer,
    mut copy: impl FnMut(u64, u64, usize) -> Result<()>,
) -> Result<()> {
    let mut at = staged.address();
    for range in header.ranges.iter() {
        let bytes = range.end - range.start;
        copy(buffer.address() + range.start, at, index(bytes))?;
        at += bytes;
    }
    Ok(())
}
