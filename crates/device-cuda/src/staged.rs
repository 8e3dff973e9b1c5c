//! Copies between CUDA memory and host memory for host transports: in a stream of their own,
//! through pinned memory, polled.
//!
//! ```text
//! download    device buffer ──ready──▶ copy stream ──▶ pinned ──memcpy──▶ host buffer
//! upload      host buffer ──memcpy──▶ pinned ──last use of the target──▶ copy stream
//!             ──▶ device buffer
//! ```
//! The copies overlap kernels because they have a stream of their own. They are asynchronous
//! because the memory is pinned: a copy from or to pageable memory blocks the calling thread.

use std::ops::Range;

use annulus_core::{Arrived, Error, HostBuffer, Result, StagedSpace, index};

use crate::{CudaBuffer, CudaSpace, Device, Event, PinnedBuffer, Stream};

/// Stream of the copies, and pinned buffers that are reused.
#[derive(Debug)]
pub struct CudaCopier {
    stream: Stream,
    free: Vec<PinnedBuffer>,
}

impl CudaCopier {
    /// Creates a copier for this device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { stream: Stream::new(device)?, free: Vec::new() })
    }

    /// Returns the smallest free pinned buffer of at least `bytes`, or allocates one.
    fn pinned(&mut self, bytes: u64) -> Result<PinnedBuffer> {
        let bytes = index(bytes);
        let fitting =
            self.free.iter().enumerate().filter(|(_, pinned)| pinned.bytes().len() >= bytes);
        match fitting.min_by_key(|(_, pinned)| pinned.bytes().len()) {
            Some((index, _)) => Ok(self.free.swap_remove(index)),
            None => PinnedBuffer::zeroed(self.stream.device(), bytes),
        }
    }
}

/// A copy to the host in progress.
#[derive(Debug)]
pub struct CudaDownload {
    done: Event,
    bytes: u64,
    buffers: Option<(PinnedBuffer, HostBuffer)>,
    /// Co-owned until the copy is done.
    _from: CudaBuffer,
}

/// A copy from the host in progress.
#[derive(Debug)]
pub struct CudaUpload {
    done: Event,
    buffers: Option<(PinnedBuffer, HostBuffer, CudaBuffer)>,
}

impl StagedSpace for CudaSpace {
    type Copier = CudaCopier;
    type Download = CudaDownload;
    type Upload = CudaUpload;

    fn download(
        copier: &mut CudaCopier,
        from: &CudaBuffer,
        ready: &Event,
        ranges: &[Range<u64>],
        into: HostBuffer,
    ) -> Result<CudaDownload> {
        let bytes = total(ranges, from)?;
        let pinned = copier.pinned(bytes)?;
        copier.stream.wait_for(ready)?;
        let mut offset = 0;
        for range in ranges {
            let len = index(range.end - range.start);
            let source = from.address() + range.start;
            // SAFETY: the range lies within `from`, and all of them together within `pinned`; both
            // are kept until the copy is done.
            unsafe { copier.stream.copy_to_pinned(pinned.address().add(offset), source, len)? };
            offset += len;
        }
        let done = copier.stream.record()?;
        Ok(CudaDownload { done, bytes, buffers: Some((pinned, into)), _from: from.clone() })
    }

    fn downloaded(copier: &mut CudaCopier, copy: &mut CudaDownload) -> Result<Option<HostBuffer>> {
        if !copy.done.passed()? {
            return Ok(None);
        }
        let buffers = copy.buffers.take();
        let (pinned, mut into) =
            buffers.ok_or_else(|| Error::internal("a download was returned twice"))?;
        let bytes = index(copy.bytes);
        let front = into.bytes_mut().and_then(|into| into.get_mut(..bytes));
        front
            .ok_or_else(|| Error::internal("a staging buffer is shared or too small"))?
            .copy_from_slice(&pinned.bytes()[..bytes]);
        copier.free.push(pinned);
        Ok(Some(into))
    }

    fn upload(
        copier: &mut CudaCopier,
        from: HostBuffer,
        into: CudaBuffer,
        ranges: &[Range<u64>],
    ) -> Result<CudaUpload> {
        let bytes = total(ranges, &into)?;
        let mut pinned = copier.pinned(bytes)?;
        let bytes = index(bytes);
        let front = from.bytes().get(..bytes);
        let front = front.ok_or_else(|| Error::internal("a staging buffer is too small"))?;
        pinned.bytes_mut()[..bytes].copy_from_slice(front);
        // kernels that were queued earlier may still read an earlier message in this buffer
        into.wait_on(&copier.stream)?;
        let mut offset = 0;
        for range in ranges {
            let len = index(range.end - range.start);
            let target = into.address() + range.start;
            // SAFETY: the range lies within `into`, and all of them together within `pinned`; both
            // are kept until the copy is done.
            unsafe { copier.stream.copy_from_pinned(target, pinned.address().add(offset), len)? };
            offset += len;
        }
        let done = copier.stream.record()?;
        into.touched_before(&done);
        Ok(CudaUpload { done, buffers: Some((pinned, from, into)) })
    }

    fn uploaded(
        copier: &mut CudaCopier,
        copy: &mut CudaUpload,
    ) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        if !copy.done.passed()? {
            return Ok(None);
        }
        let buffers = copy.buffers.take();
        let (pinned, from, buffer) =
            buffers.ok_or_else(|| Error::internal("an upload was returned twice"))?;
        copier.free.push(pinned);
        Ok(Some((from, Arrived { buffer, ready: copy.done.clone() })))
    }
}

/// Sums the bytes of all ranges, which the transport has checked against the buffer.
fn total(ranges: &[Range<u64>], buffer: &CudaBuffer) -> Result<u64> {
    let is_outside = |range: &&Range<u64>| range.start > range.end || range.end > buffer.len();
    if let Some(range) = ranges.iter().find(is_outside) {
        let len = buffer.len();
        return Err(Error::internal(format!("bytes {range:?} of a buffer of {len} bytes")));
    }
    Ok(ranges.iter().map(|range| range.end - range.start).sum())
}
