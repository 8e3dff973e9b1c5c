//! Gathering and scattering on the device: messages of several byte ranges of CUDA memory are
//! transferred in one range, because sender and receiver may divide them differently.

#![expect(
    unsafe_code,
    reason = "copies of device memory, whose addresses the compiler cannot check"
)]

use annulus_core::{MessageHeader, Result};
use annulus_device_cuda::{CudaBuffer, RangeDirection, RangeTransfer, Stream};

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

/// Returns the bytes of a staging buffer for a message: its own, then room for the list of ranges.
pub(crate) fn staged_bytes(header: &MessageHeader) -> u64 {
    table_start(header) + RangeTransfer::table_bytes(header.ranges.len())
}

fn table_start(header: &MessageHeader) -> u64 {
    header.bytes().next_multiple_of(8)
}

/// Copies the ranges of `header` in `buffer` to the front of `staged`, in one launch.
pub(crate) fn gather(
    stream: &Stream,
    header: &MessageHeader,
    buffer: &CudaBuffer,
    staged: &CudaBuffer,
) -> Result<()> {
    copy(stream, header, buffer, staged, RangeDirection::Gather)
}

/// Copies the front of `staged` to the ranges of `header` in `buffer`, in one launch.
pub(crate) fn scatter(
    stream: &Stream,
    header: &MessageHeader,
    buffer: &CudaBuffer,
    staged: &CudaBuffer,
) -> Result<()> {
    copy(stream, header, buffer, staged, RangeDirection::Scatter)
}

fn copy(
    stream: &Stream,
    header: &MessageHeader,
    buffer: &CudaBuffer,
    staged: &CudaBuffer,
    direction: RangeDirection,
) -> Result<()> {
    let transfer = RangeTransfer {
        buffer: buffer.address(),
        ranges: &header.ranges,
        packed: staged.address(),
        table: staged.address() + table_start(header),
        direction,
    };
    // SAFETY: the ranges lie within `buffer`, as was checked when they were posted; their bytes and
    // their list lie within `staged`, which has `staged_bytes`. Both are kept until the work is
    // done, and work on `staged` is in this stream.
    unsafe { stream.copy_ranges(&transfer) }
}
