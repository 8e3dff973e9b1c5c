//! How [`crate::Staged`] reaches CUDA memory: copies in a stream of their own, through pinned memory, polled.

use std::ops::Range;

use annulus_core::{Arrived, Error, HostBuffer, Result, Space, index};
use annulus_device_cuda::{CudaBuffer, Device, Event, PinnedBuffer, Stream};

use crate::StagedSpace;

/// A stream for copies, and pinned memory that serves again and again.
#[derive(Debug)]
pub struct CudaCopier {
    stream: Stream,
    free: Vec<PinnedBuffer>,
}

impl CudaCopier {
    /// A copier for this device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { stream: Stream::new(device)?, free: Vec::new() })
    }

    /// Pinned memory of at least `bytes`; the smallest there is.
    fn pinned(&mut self, bytes: u64) -> Result<PinnedBuffer> {
        let bytes = index(bytes);
        let fitting = self.free.iter().enumerate().filter(|(_, pinned)| pinned.bytes().len() >= bytes);
        match fitting.min_by_key(|(_, pinned)| pinned.bytes().len()) {
            Some((place, _)) => Ok(self.free.swap_remove(place)),
            None => PinnedBuffer::zeroed(self.stream.device(), bytes),
        }
    }
}

/// A copy to the host under way.
#[derive(Debug)]
pub struct CudaDownload {
    done: Event,
    bytes: u64,
    sides: Option<(PinnedBuffer, HostBuffer)>,
    /// Co-owned until the copy is done.
    _from: CudaBuffer,
}

/// A copy from the host under way.
#[derive(Debug)]
pub struct CudaUpload {
    done: Event,
    sides: Option<(PinnedBuffer, HostBuffer, CudaBuffer)>,
}

/// Any space whose blocks are in CUDA memory, wherever a caller's tensors are.
impl<S: Space<Buffer = CudaBuffer, Event = Event>> StagedSpace for S {
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
        let mut to = 0;
        for range in ranges {
            let len = index(range.end - range.start);
            // SAFETY: the range lies within `from`, and all of them together within `pinned`; both are kept until the copy is done.
            unsafe { copier.stream.copy_to_pinned(pinned.address().add(to), from.address() + range.start, len)? };
            to += len;
        }
        let done = copier.stream.record()?;
        Ok(CudaDownload { done, bytes, sides: Some((pinned, into)), _from: from.clone() })
    }

    fn downloaded(copier: &mut CudaCopier, copy: &mut CudaDownload) -> Result<Option<HostBuffer>> {
        if !copy.done.passed()? {
            return Ok(None);
        }
        let (pinned, mut into) = copy.sides.take().ok_or_else(|| misuse("a download was asked for twice"))?;
        let bytes = index(copy.bytes);
        let place = into.bytes_mut().and_then(|place| place.get_mut(..bytes));
        place.ok_or_else(|| misuse("a staging buffer that is shared or too small"))?.copy_from_slice(&pinned.bytes()[..bytes]);
        copier.free.push(pinned);
        Ok(Some(into))
    }

    fn upload(copier: &mut CudaCopier, from: HostBuffer, into: CudaBuffer, ranges: &[Range<u64>]) -> Result<CudaUpload> {
        let bytes = total(ranges, &into)?;
        let mut pinned = copier.pinned(bytes)?;
        let bytes = index(bytes);
        let front = from.bytes().get(..bytes).ok_or_else(|| misuse("a staging buffer that is too small"))?;
        pinned.bytes_mut()[..bytes].copy_from_slice(front);
        // work that was queued on it earlier, such as sums of an earlier message, comes first
        into.wait_on(&copier.stream)?;
        let mut at = 0;
        for range in ranges {
            let len = index(range.end - range.start);
            // SAFETY: the range lies within `into`, and all of them together within `pinned`; both are kept until the copy is done.
            unsafe { copier.stream.copy_from_pinned(into.address() + range.start, pinned.address().add(at), len)? };
            at += len;
        }
        let done = copier.stream.record()?;
        into.touched_before(&done);
        Ok(CudaUpload { done, sides: Some((pinned, from, into)) })
    }

    fn uploaded(copier: &mut CudaCopier, copy: &mut CudaUpload) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        if !copy.done.passed()? {
            return Ok(None);
        }
        let (pinned, from, buffer) = copy.sides.take().ok_or_else(|| misuse("an upload was asked for twice"))?;
        copier.free.push(pinned);
        Ok(Some((from, Arrived { buffer, ready: copy.done.clone() })))
    }
}

/// Bytes of all ranges, which must lie within the buffer.
fn total(ranges: &[Range<u64>], buffer: &CudaBuffer) -> Result<u64> {
    if let Some(range) = ranges.iter().find(|range| range.start > range.end || range.end > buffer.len()) {
        return Err(Error::invalid("ranges", format!("{range:?}"), format!("ranges within {} bytes", buffer.len())));
    }
    Ok(ranges.iter().map(|range| range.end - range.start).sum())
}

fn misuse(what: &str) -> Error {
    Error::Device { what: what.into() }
}
