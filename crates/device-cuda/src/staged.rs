//! Copies between CUDA memory and host memory for host transports: in a stream of their own,
//! polled.
//!
//! ```text
//! download    device buffer ──ready──▶ copy stream ──▶ staging buffer
//! upload      staging buffer ──last use of the target──▶ copy stream ──▶ device buffer
//! ```
//! Staging buffers are pinned, and the transport sends from them and receives into them, so the
//! host copies nothing. The copies overlap kernels because they have a stream of their own. They
//! are asynchronous because the memory is pinned: a copy from or to pageable memory blocks the
//! calling thread.
//!
//! Copies of several byte ranges of a buffer to the front of another one, or back, in one launch:
//! `copy_ranges` of `records.cuh` of annulus-cuda.
//!
//! The kernel is that of the backend which computes in the same context. Without one, each range is
//! a copy of its own.

use std::{ops::Range, sync::Mutex};

use annulus_core::{Arrived, Error, HostBuffer, HostMemory, Result, StagedSpace, Tick, index};
use cudarc::driver::sys::CUdeviceptr;

use crate::{
    CudaBuffer, CudaSpace, Device, Event, Kernel, PinnedBuffer, Stream, context::lock,
    module::WeakKernel,
};

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
        // kernels that were queued earlier may still read an earlier message in this buffer
        into.wait_on(&copier.stream)?;
        let mut offset = 0;
        for range in ranges {
            let len = index(range.end - range.start);
            let target = into.address() + range.start;
            // SAFETY: the range lies within `into`; pinned memory, which is read until the copy is
            // done, and `into` are kept until then, and `from` has no other owner. The memory is
            // not pinned if the inner transport has received into memory of its own.
            unsafe { copier.stream.copy_to_device(target, &front[offset..offset + len])? };
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

/// Ranges that the arguments of a launch hold; a longer list is uploaded first. Most messages have
/// fewer, and the arguments stay below the 4 KB that every GPU accepts.
const FEW: usize = 32;
/// Bytes of a range for one block: 16 for each of its threads, four times.
const PART_BYTES: u64 = 4 * 16 * 256;
/// Upper bound of the grid: as `MAX_BLOCKS` of annulus-cuda.
const MAX_BLOCKS: u64 = 4096;

/// Mirrors `ByteRange` of `arguments.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct ByteRange {
    start: u64,
    at: u64,
    bytes: u64,
}

/// Mirrors `RangeCopy` of `arguments.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct RangeCopy {
    buffer: u64,
    packed: u64,
    table: u64,
    gathers: u32,
    reserved: u32,
    few: [ByteRange; FEW],
}

const _: () = assert!(size_of::<RangeCopy>() == 800);

/// Direction of a copy of ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeDirection {
    /// From the ranges of the buffer to the front of the other one.
    Gather,
    /// Back.
    Scatter,
}

/// Copy of several byte ranges of a buffer in device memory to the front of another one, or back,
/// by [`Stream::copy_ranges`].
#[derive(Debug, Clone, Copy)]
pub struct RangeTransfer<'a> {
    /// Address of the buffer that has the ranges.
    pub buffer: CUdeviceptr,
    /// Byte ranges of the buffer.
    pub ranges: &'a [Range<u64>],
    /// Address of the packed bytes: one range after another.
    pub packed: CUdeviceptr,
    /// Address of [`RangeTransfer::table_bytes`] bytes, a multiple of 8.
    pub table: CUdeviceptr,
    /// Direction.
    pub direction: RangeDirection,
}

impl RangeTransfer<'_> {
    /// Bytes of device memory for the list of `ranges` ranges.
    pub const fn table_bytes(ranges: usize) -> u64 {
        if ranges <= FEW { 0 } else { (ranges * size_of::<ByteRange>()) as u64 }
    }

    fn list(&self) -> Vec<ByteRange> {
        let mut at = 0;
        let listed = self.ranges.iter().map(|range| {
            let bytes = range.end - range.start;
            let listed = ByteRange { start: range.start, at, bytes };
            at += bytes;
            listed
        });
        listed.collect()
    }
}

/// The kernel that copies ranges in one context and its threads per block, if a backend has loaded
/// one.
#[derive(Debug, Default)]
struct RangeCopyKernel(Mutex<Option<(WeakKernel, u32)>>);

impl Device {
    /// Makes transfers in this context use `kernel`, as long as its module is loaded.
    pub fn set_range_copy(&self, kernel: &Kernel, threads: u32) {
        *lock(&self.0.state.shared::<RangeCopyKernel>().0) = Some((kernel.downgrade(), threads));
    }

    /// Returns the kernel that copies ranges, and its threads per block, if it is loaded.
    fn range_copy(&self) -> Option<(Kernel, u32)> {
        let of_context = self.0.state.shared::<RangeCopyKernel>();
        let of_context = lock(&of_context.0);
        of_context.as_ref().and_then(|(kernel, threads)| Some((kernel.upgrade()?, *threads)))
    }
}

impl Stream {
    /// Queues a copy of ranges: one launch, after an upload of the list if it is long.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    ///
    /// # Safety
    /// * the ranges lie within device memory at `buffer`, their sum within memory at `packed`, and
    ///   nothing else writes either until the work is done;
    /// * only work of this stream uses the memory of the table.
    pub unsafe fn copy_ranges(&self, transfer: &RangeTransfer<'_>) -> Result<()> {
        let RangeTransfer { buffer, packed, table, direction, .. } = *transfer;
        let list = transfer.list();
        let Some((kernel, threads)) = self.device().range_copy() else {
            for ByteRange { start, at, bytes } in list {
                let (in_buffer, in_packed) = (buffer + start, packed + at);
                let (to, from) = match direction {
                    RangeDirection::Gather => (in_packed, in_buffer),
                    RangeDirection::Scatter => (in_buffer, in_packed),
                };
                // SAFETY: as required of the caller.
                unsafe { self.copy_on_device(to, from, index(bytes))? };
            }
            return Ok(());
        };
        let mut few = [ByteRange::default(); FEW];
        let is_short = list.len() <= FEW;
        if is_short {
            few[..list.len()].copy_from_slice(&list);
        } else {
            let words = list.iter().flat_map(|range| [range.start, range.at, range.bytes]);
            let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
            // SAFETY: the table has as many bytes, and earlier launches that read it are earlier
            // in this stream.
            unsafe { self.copy_to_device(table, &bytes)? };
        }
        let arguments = RangeCopy {
            buffer,
            packed,
            table: if is_short { 0 } else { table },
            gathers: (direction == RangeDirection::Gather).into(),
            reserved: 0,
            few,
        };
        let ranges = list.len() as u64;
        let longest = list.iter().map(|range| range.bytes).max().unwrap_or(0);
        let parts = longest.div_ceil(PART_BYTES).min(MAX_BLOCKS / ranges.max(1)).max(1);
        // SAFETY: as required of the caller; the memory is freed only after queued work.
        unsafe { kernel.launch(self, [ranges, parts, 1], threads, &arguments) }
    }
}
