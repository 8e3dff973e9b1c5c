//! Copies of several byte ranges of a buffer to the front of another one, or back, in one launch:
//! `copy_ranges` of `records.cuh` of annulus-cuda.
//!
//! The kernel is that of the backend which computes in the same context. Without one, each range is
//! a copy of its own.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use annulus_core::{Result, index};
use cudarc::driver::sys::CUdeviceptr;

use crate::{Device, Kernel, Stream, module::WeakKernel};

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

/// A kernel that copies ranges, and its threads per block.
#[derive(Debug)]
struct RangeCopyKernel {
    kernel: WeakKernel,
    threads: u32,
}

/// The kernel of one context, if a backend has loaded one.
#[derive(Debug, Default)]
struct KernelOfContext(Mutex<Option<RangeCopyKernel>>);

impl Device {
    /// Makes transfers in this context use `kernel`, as long as its module is loaded.
    pub fn set_range_copy(&self, kernel: &Kernel, threads: u32) {
        let kernel = RangeCopyKernel { kernel: kernel.downgrade(), threads };
        let of_context = self.0.state.shared::<KernelOfContext>();
        *of_context.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(kernel);
    }

    /// Returns the kernel that copies ranges, and its threads per block, if it is loaded.
    fn range_copy(&self) -> Option<(Kernel, u32)> {
        let of_context = self.0.state.shared::<KernelOfContext>();
        let kernel = of_context.0.lock().unwrap_or_else(PoisonError::into_inner);
        kernel.as_ref().and_then(RangeCopyKernel::upgrade)
    }
}

impl RangeCopyKernel {
    fn upgrade(&self) -> Option<(Kernel, u32)> {
        Some((self.kernel.upgrade()?, self.threads))
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
