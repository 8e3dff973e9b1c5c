//! How [`annulus_comm::Staged`] reaches a device: copies that are started, then polled.

use std::ops::Range;

use annulus_comm::StagedSpace;
use annulus_core::{Arrived, HostBuffer, Result, index};

use crate::{
    copy::{Line, copy_raw},
    device::{Gpu, fault},
    launch::Arena,
    memory::{GpuBuffer, Queued, USAGE, WgpuSpace},
    staging::Coming,
};

/// What it takes to copy: the device, and scratch of its own.
#[derive(Debug)]
pub struct Copier {
    gpu: Gpu,
    arena: Arena,
}

impl Copier {
    /// For the memory of `gpu`.
    pub fn new(gpu: Gpu) -> Self {
        Self { gpu, arena: Arena::default() }
    }
}

/// A copy to the host under way.
#[derive(Debug)]
pub struct Download {
    coming: Coming,
    /// What is wanted of each range that was copied: ranges are widened to whole words.
    wanted: Vec<Range<usize>>,
    into: Option<HostBuffer>,
}

/// A copy from the host, queued.
#[derive(Debug)]
pub struct Upload {
    sides: Option<(HostBuffer, GpuBuffer)>,
}

impl StagedSpace for WgpuSpace {
    type Copier = Copier;
    type Download = Download;
    type Upload = Upload;

    fn download(copier: &mut Copier, from: &GpuBuffer, _: &Queued, ranges: &[Range<u64>], into: HostBuffer) -> Result<Download> {
        let (mut words, mut wanted, mut at) = (Vec::with_capacity(ranges.len()), Vec::with_capacity(ranges.len()), 0);
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let whole = range.start / 4 * 4..range.end.next_multiple_of(4);
            let first = at + index(range.start - whole.start);
            wanted.push(first..first + index(range.end - range.start));
            at += index(whole.end - whole.start);
            words.push(whole);
        }
        Ok(Download { coming: copier.gpu.fetch(&from.buffer, &words)?, wanted, into: Some(into) })
    }

    fn downloaded(copier: &mut Copier, copy: &mut Download) -> Result<Option<HostBuffer>> {
        let Some(into) = copy.into.as_mut() else { return Err(fault("a download was asked for twice")) };
        let wanted = &copy.wanted;
        let came = copier.gpu.came(&copy.coming, |bytes| {
            let mut rest = into.bytes_mut().ok_or_else(|| fault("a staging buffer that is shared"))?;
            for range in wanted {
                let (part, after) = rest.split_at_mut_checked(range.len()).ok_or_else(|| fault("a staging buffer that is too small"))?;
                part.copy_from_slice(&bytes[range.clone()]);
                rest = after;
            }
            Ok(())
        })?;
        Ok(came.and_then(|()| copy.into.take()))
    }

    fn upload(copier: &mut Copier, from: HostBuffer, into: GpuBuffer, ranges: &[Range<u64>]) -> Result<Upload> {
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let bytes = from.bytes().get(..index(total)).ok_or_else(|| fault("a staging buffer that is too small"))?;
        let aligned = ranges.iter().all(|range| range.start % 4 == 0 && range.end % 4 == 0);
        if total == 0 {
        } else if aligned {
            let mut at = 0;
            let place = |range: &Range<u64>| {
                let part = at..at + (range.end - range.start);
                at = part.end;
                (part, range.start)
            };
            let places: Vec<_> = ranges.iter().filter(|range| !range.is_empty()).map(place).collect();
            copier.gpu.write(&into.buffer, bytes, &places)?;
        } else {
            // elements of 2 bytes share words at the ends of ranges: a kernel puts them in place
            let staged = copier.gpu.create_buffer("unaligned upload", total, USAGE)?;
            copier.gpu.write(&staged, bytes, &[(0..total.next_multiple_of(4), 0)])?;
            let mut lines = Vec::with_capacity(ranges.len());
            let mut at = 0;
            for range in ranges {
                let count = (range.end - range.start) / 2;
                lines.push(Line { from: at, into: range.start / 2, count });
                at += count;
            }
            copy_raw(&copier.gpu, &mut copier.arena, &staged, &into.buffer, &lines)?;
        }
        Ok(Upload { sides: Some((from, into)) })
    }

    fn uploaded(_: &mut Copier, copy: &mut Upload) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        // the bytes were taken over when the copy was queued, and the queue keeps its order
        let (from, buffer) = copy.sides.take().ok_or_else(|| fault("an upload was asked for twice"))?;
        Ok(Some((from, Arrived { buffer, ready: Queued })))
    }
}
