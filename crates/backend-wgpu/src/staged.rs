//! How [`annulus_comm::Staged`] reaches a device: copies that are started, then polled.

use std::ops::Range;

use annulus_comm::StagedSpace;
use annulus_core::{Arrived, HostBuffer, Result, index};

use crate::{
    copy::{Line, copy_raw},
    device::Gpu,
    fault::fault,
    launch::Arena,
    memory::{GpuBuffer, Queued, USAGE, WgpuSpace},
    staging::Coming,
};

/// What it takes to copy: the device, and scratch of its own.
#[derive(Debug)]
pub struct Copier {
    gpu: Gpu,
    arena: Arena,
    /// What comes in elements of 2 bytes, before a kernel puts it in place; used again by every upload: the queue keeps its order.
    unaligned: Option<wgpu::Buffer>,
}

impl Copier {
    /// For the memory of `gpu`.
    pub fn new(gpu: Gpu) -> Self {
        Self { gpu, arena: Arena::default(), unaligned: None }
    }

    /// Device memory of at least `bytes` bytes.
    fn unaligned(&mut self, bytes: u64) -> Result<wgpu::Buffer> {
        if let Some(buffer) = self.unaligned.as_ref().filter(|buffer| buffer.size() >= bytes) {
            return Ok(buffer.clone());
        }
        let buffer = self.gpu.create_buffer("unaligned upload", bytes.next_power_of_two(), USAGE)?;
        Ok(self.unaligned.insert(buffer).clone())
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
        from.check_on(&copier.gpu)?;
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
        into.check_on(&copier.gpu)?;
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
            let staged = copier.unaligned(total.next_multiple_of(4))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, staging::pooled};

    /// A device, or nothing where there is none.
    fn gpu() -> Option<Gpu> {
        if Gpu::list().is_empty() {
            let required = std::env::var("ANNULUS_REQUIRE").is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
            assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
            eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
            return None;
        }
        Some(Gpu::open(&Options::default()).unwrap())
    }

    fn host(bytes: impl Iterator<Item = u8>) -> HostBuffer {
        let bytes: Vec<u8> = bytes.collect();
        let mut buffer = HostBuffer::zeroed(bytes.len() as u64).unwrap();
        buffer.bytes_mut().unwrap().copy_from_slice(&bytes);
        buffer
    }

    fn downloaded(copier: &mut Copier, from: &GpuBuffer, ranges: &[Range<u64>]) -> Vec<u8> {
        let bytes = ranges.iter().map(|range| range.end - range.start).sum();
        let mut copy = WgpuSpace::download(copier, from, &Queued, ranges, HostBuffer::zeroed(bytes).unwrap()).unwrap();
        let start = std::time::Instant::now();
        loop {
            if let Some(buffer) = WgpuSpace::downloaded(copier, &mut copy).unwrap() {
                return buffer.bytes()[..index(bytes)].to_vec();
            }
            assert!(start.elapsed() < crate::PATIENCE);
            std::thread::yield_now();
        }
    }

    /// What a ring does step by step, in whole words and in halves of them: the bytes come back, and after the first steps no buffer is made.
    #[test]
    fn what_is_staged_passes_through_the_same_buffers_again_and_again() {
        let Some(gpu) = gpu() else { return };
        let mut copier = Copier::new(gpu.clone());
        let into = GpuBuffer::new(&gpu, "block", 1000).unwrap();
        let ways: [&[Range<u64>]; 2] = [&[0..400, 600..604], &[2..306, 410..412, 700..798]];
        let (mut buffers, mut scratch) = (Vec::new(), Vec::new());
        for step in 0..40_u64 {
            let ranges = ways[index(step % 2)];
            let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            let bytes = (0..total).map(|at| (at * 7 + step) as u8);
            let mut upload = WgpuSpace::upload(&mut copier, host(bytes.clone()), into.clone(), ranges).unwrap();
            assert!(WgpuSpace::uploaded(&mut copier, &mut upload).unwrap().is_some());
            assert!(downloaded(&mut copier, &into, ranges).into_iter().eq(bytes), "step {step}");
            gpu.synchronize().unwrap();
            buffers.push(pooled(&gpu));
            scratch.extend(copier.unaligned.clone());
        }
        assert!(buffers[4].0 >= 1 && buffers[4].1 >= 1 && buffers[4..].iter().all(|now| *now == buffers[4]), "{buffers:?}");
        assert!(scratch.iter().all(|buffer| *buffer == scratch[0]));
    }
}
