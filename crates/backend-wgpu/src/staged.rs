//! Copies of blocks from and to host memory for host transports: started, then polled.

use std::ops::Range;

use annulus_core::{Arrived, Error, HostBuffer, Result, StagedSpace, Tick, index};

use crate::{
    copy::{LinearCopy, copy_raw},
    device::Gpu,
    launch::Arena,
    memory::{GpuBuffer, Queued, USAGE, WgpuSpace},
    staging::PendingRead,
};

/// Device and scratch memory for copies.
#[derive(Debug)]
pub struct Copier {
    arena: Arena,
    /// Target of uploads of unaligned ranges, before a kernel scatters them. Reused by every
    /// upload, because the queue runs in order.
    unaligned: Option<wgpu::Buffer>,
    gpu: Gpu,
}

impl Copier {
    /// Copies to and from memory of `gpu`.
    pub fn new(gpu: Gpu) -> Self {
        Self { gpu, arena: Arena::default(), unaligned: None }
    }

    /// Returns scratch memory of at least `bytes` bytes.
    fn unaligned(&mut self, bytes: u64) -> Result<wgpu::Buffer> {
        if let Some(buffer) = self.unaligned.as_ref().filter(|buffer| buffer.size() >= bytes) {
            return Ok(buffer.clone());
        }
        let buffer =
            self.gpu.create_buffer("unaligned upload", self.gpu.rounded_size(bytes), USAGE)?;
        Ok(self.unaligned.insert(buffer).clone())
    }

    /// Starts copying the front of `bytes` into ranges of a block, one after another. Ticks if it
    /// waits; what is copied after a break is unspecified.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::OutOfMemory`]; [`Error::InvalidArgument`] for a block of another
    /// device; [`Error::Internal`] if there are too few bytes, or a range is not in the block.
    pub(crate) fn write(
        &mut self,
        into: &GpuBuffer,
        ranges: &[Range<u64>],
        bytes: &[u8],
        tick: Tick<'_>,
    ) -> Result<()> {
        into.check_on(&self.gpu)?;
        let is_outside = |range: &&Range<u64>| range.start > range.end || range.end > into.size();
        if let Some(range) = ranges.iter().find(is_outside) {
            let what = format!("bytes {range:?} of a block of {} bytes", into.size());
            return Err(Error::internal(what));
        }
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let bytes = bytes
            .get(..index(total))
            .ok_or_else(|| Error::internal("a staging buffer is too small"))?;
        let aligned = ranges.iter().all(|range| range.start % 4 == 0 && range.end % 4 == 0);
        if total == 0 {
            Ok(())
        } else if aligned {
            let mut at = 0;
            let copy_of = |range: &Range<u64>| {
                let part = at..at + (range.end - range.start);
                at = part.end;
                (part, range.start)
            };
            let copies: Vec<_> =
                ranges.iter().filter(|range| !range.is_empty()).map(copy_of).collect();
            self.gpu.write(&into.buffer, bytes, &copies, tick)
        } else {
            // 2-byte elements share words at the ends of ranges: a kernel scatters them
            let staged = self.unaligned(total.next_multiple_of(4))?;
            self.gpu.write(&staged, bytes, &[(0..total.next_multiple_of(4), 0)], tick)?;
            let mut lines = Vec::with_capacity(ranges.len());
            let mut at = 0;
            for range in ranges {
                let count = (range.end - range.start) / 2;
                lines.push(LinearCopy { from: at, into: range.start / 2, count });
                at += count;
            }
            copy_raw(&self.gpu, &mut self.arena, &staged, &into.buffer, &lines)
        }
    }
}

/// A copy to the host in progress.
#[derive(Debug)]
pub struct Download {
    coming: PendingRead,
    /// Requested bytes within the copied ones, which are extended to whole words.
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

    fn download(
        copier: &mut Copier,
        from: &GpuBuffer,
        _: &Queued,
        ranges: &[Range<u64>],
        into: HostBuffer,
    ) -> Result<Download> {
        from.check_on(&copier.gpu)?;
        let (mut words, mut wanted, mut at) =
            (Vec::with_capacity(ranges.len()), Vec::with_capacity(ranges.len()), 0);
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let whole = range.start / 4 * 4..range.end.next_multiple_of(4);
            let first = at + index(range.start - whole.start);
            wanted.push(first..first + index(range.end - range.start));
            at += index(whole.end - whole.start);
            words.push(whole);
        }
        Ok(Download {
            coming: copier.gpu.start_read(&from.buffer, &words)?,
            wanted,
            into: Some(into),
        })
    }

    fn downloaded(copier: &mut Copier, copy: &mut Download) -> Result<Option<HostBuffer>> {
        let Some(into) = copy.into.as_mut() else {
            return Err(Error::internal("a download was collected twice"));
        };
        let wanted = &copy.wanted;
        let try_read = copier.gpu.try_read(&copy.coming, |bytes| {
            let mut rest =
                into.bytes_mut().ok_or_else(|| Error::internal("a staging buffer is shared"))?;
            for range in wanted {
                let (part, after) = rest
                    .split_at_mut_checked(range.len())
                    .ok_or_else(|| Error::internal("a staging buffer is too small"))?;
                part.copy_from_slice(&bytes[range.clone()]);
                rest = after;
            }
            Ok(())
        })?;
        Ok(try_read.and_then(|()| copy.into.take()))
    }

    fn upload(
        copier: &mut Copier,
        from: HostBuffer,
        into: GpuBuffer,
        ranges: &[Range<u64>],
        tick: Tick<'_>,
    ) -> Result<Upload> {
        copier.write(&into, ranges, from.bytes(), tick)?;
        Ok(Upload { sides: Some((from, into)) })
    }

    fn uploaded(_: &mut Copier, copy: &mut Upload) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        // the bytes were copied when the upload was queued, and the queue runs in order
        let (from, buffer) =
            copy.sides.take().ok_or_else(|| Error::internal("an upload was collected twice"))?;
        Ok(Some((from, Arrived { buffer, ready: Queued })))
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::{Options, queue::tests::gpu, staging::pooled};

    fn host(bytes: impl Iterator<Item = u8>) -> HostBuffer {
        let bytes: Vec<u8> = bytes.collect();
        let mut buffer = HostBuffer::zeroed(bytes.len() as u64).unwrap();
        buffer.bytes_mut().unwrap().copy_from_slice(&bytes);
        buffer
    }

    fn downloaded(copier: &mut Copier, from: &GpuBuffer, ranges: &[Range<u64>]) -> Vec<u8> {
        let bytes = ranges.iter().map(|range| range.end - range.start).sum();
        let mut copy =
            WgpuSpace::download(copier, from, &Queued, ranges, HostBuffer::zeroed(bytes).unwrap())
                .unwrap();
        let start = std::time::Instant::now();
        loop {
            if let Some(buffer) = WgpuSpace::downloaded(copier, &mut copy).unwrap() {
                return buffer.bytes()[..index(bytes)].to_vec();
            }
            assert!(start.elapsed() < crate::PATIENCE);
            std::thread::yield_now();
        }
    }

    /// Like ring steps, aligned and unaligned: bytes return unchanged, and after the first steps no
    /// buffer is created.
    #[test]
    fn staging_reuses_its_buffers() {
        let Some(gpu) = gpu(&Options::default()) else { return };
        let mut copier = Copier::new(gpu.clone());
        let into = GpuBuffer::new(&gpu, "block", 1000).unwrap();
        let ways: [&[Range<u64>]; 2] = [&[0..400, 600..604], &[2..306, 410..412, 700..798]];
        let mut buffers = Vec::new();
        let mut scratch = Vec::new();
        for step in 0..40_u64 {
            let ranges = ways[index(step % 2)];
            let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            let bytes = (0..total).map(|at| (at * 7 + step) as u8);
            let mut upload = WgpuSpace::upload(
                &mut copier,
                host(bytes.clone()),
                into.clone(),
                ranges,
                &mut || ControlFlow::Continue(()),
            )
            .unwrap();
            assert!(WgpuSpace::uploaded(&mut copier, &mut upload).unwrap().is_some());
            assert!(downloaded(&mut copier, &into, ranges).into_iter().eq(bytes), "step {step}");
            gpu.synchronize().unwrap();
            buffers.push(pooled(&gpu));
            scratch.extend(copier.unaligned.clone());
        }
        assert!(
            buffers[4].0 >= 1
                && buffers[4].1 >= 1
                && buffers[4..].iter().all(|now| *now == buffers[4]),
            "{buffers:?}"
        );
        assert!(scratch.iter().all(|buffer| *buffer == scratch[0]));
    }
}
