//! Copies between CUDA memory and host memory for host transports: in a stream of their own,
//! polled.
//!
//! ```text
//! download    device buffer ──ready──▶ copy stream ──▶ staging buffer
//! upload      staging buffer ──last use of the target──▶ copy stream ──▶ device buffer
//! ```
//! Staging buffers are pinned, and the transport sends from them and receives into them, so the host
//! copies nothing. The copies overlap kernels because they have a stream of their own. They are
//! asynchronous because the memory is pinned: a copy from or to pageable memory blocks the calling
//! thread.

use std::ops::Range;

use annulus_core::{Arrived, Error, HostBuffer, Result, StagedSpace, Tick, index};

use crate::{CudaBuffer, CudaSpace, Device, Event, PinnedBuffer, Stream};

/// Stream of the copies.
#[derive(Debug)]
pub struct CudaCopier {
    stream: Stream,
}

impl CudaCopier {
    /// Creates a copier for this device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { stream: Stream::new(device)? })
    }
}

/// A copy to the host in progress.
#[derive(Debug)]
pub struct CudaDownload {
    done: Event,
    into: Option<HostBuffer>,
    /// Co-owned until the copy is done.
    _from: CudaBuffer,
}

/// A copy from the host in progress.
#[derive(Debug)]
pub struct CudaUpload {
    done: Event,
    buffers: Option<(HostBuffer, CudaBuffer)>,
}

impl StagedSpace for CudaSpace {
    type Copier = CudaCopier;
    type Download = CudaDownload;
    type Upload = CudaUpload;

    fn staging_buffer(copier: &mut CudaCopier, bytes: u64) -> Result<HostBuffer> {
        HostBuffer::foreign(PinnedBuffer::zeroed(copier.stream.device(), index(bytes))?)
    }

    fn download(
        copier: &mut CudaCopier,
        from: &CudaBuffer,
        ready: &Event,
        ranges: &[Range<u64>],
        into: HostBuffer,
    ) -> Result<CudaDownload> {
        let bytes = total(ranges, from)?;
        let not_pinned = || Error::internal("a staging buffer is shared, too small or not pinned");
        let pinned = into
            .foreign_memory::<PinnedBuffer>()
            .filter(|pinned| pinned.bytes().len() as u64 >= bytes && !into.is_shared());
        let pinned = pinned.ok_or_else(not_pinned)?.address();
        copier.stream.wait_for(ready)?;
        let mut offset = 0;
        for range in ranges {
            let len = index(range.end - range.start);
            let source = from.address() + range.start;
            // SAFETY: the range lies within `from`, and all of them together within `into`, which
            // has no other owner; both are kept until the copy is done.
            unsafe { copier.stream.copy_to_pinned(pinned.add(offset), source, len)? };
            offset += len;
        }
        let done = copier.stream.record()?;
        Ok(CudaDownload { done, into: Some(into), _from: from.clone() })
    }

    fn downloaded(_: &mut CudaCopier, copy: &mut CudaDownload) -> Result<Option<HostBuffer>> {
        if !copy.done.passed_in_time()? {
            return Ok(None);
        }
        let into = copy.into.take();
        into.map(Some).ok_or_else(|| Error::internal("a download was returned twice"))
    }

    fn upload(
        copier: &mut CudaCopier,
        from: HostBuffer,
        into: CudaBuffer,
        ranges: &[Range<u64>],
        _: Tick<'_>,
    ) -> Result<CudaUpload> {
        let bytes = index(total(ranges, &into)?);
        let front = from.bytes().get(..bytes);
        let front = front.ok_or_else(|| Error::internal("a staging buffer is too small"))?;
        let is_pinned = from.foreign_memory::<PinnedBuffer>().is_some();
        // kernels that were queued earlier may still read an earlier message in this buffer
        into.wait_on(&copier.stream)?;
        let mut offset = 0;
        for range in ranges {
            let len = index(range.end - range.start);
            let target = into.address() + range.start;
            let source = &front[offset..offset + len];
            // SAFETY: the range lies within `into`; pinned memory, which is read until the copy is
            // done, and `into` are kept until then, and `from` has no other owner.
            unsafe {
                if is_pinned {
                    copier.stream.copy_from_pinned(target, source.as_ptr(), len)?;
                } else {
                    // the inner transport has received into memory of its own
                    copier.stream.copy_to_device(target, source)?;
                }
            };
            offset += len;
        }
        let done = copier.stream.record()?;
        into.touched_before(&done);
        Ok(CudaUpload { done, buffers: Some((from, into)) })
    }

    fn uploaded(
        _: &mut CudaCopier,
        copy: &mut CudaUpload,
    ) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        if !copy.done.passed_in_time()? {
            return Ok(None);
        }
        let buffers = copy.buffers.take();
        let (from, buffer) =
            buffers.ok_or_else(|| Error::internal("an upload was returned twice"))?;
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
