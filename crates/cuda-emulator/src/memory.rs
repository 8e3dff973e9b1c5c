//! Emulated device memory: initialized with NaN, with guards at both ends.
//!
//! Emulated tensor maps, in a layout that `warpgroup_host.h` of the kernels decodes.

use std::{
    alloc::{Layout, alloc, dealloc},
    collections::BTreeMap,
    ffi::{c_uint, c_void},
};

use annulus_device_cuda::Status;
use annulus_device_cuda::cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};

/// Bytes of each guard; also the alignment of every address, as cuMemAlloc guarantees.
const GUARD: usize = 256;
const GUARD_BYTE: u8 = 0xa5;
/// Byte of new memory: floats of every width that consist of it are NaN.
const POISON: u8 = 0xff;

/// Memory of one device.
#[derive(Default)]
pub(super) struct Memory {
    /// Length in bytes by address.
    allocations: BTreeMap<u64, usize>,
    bytes: usize,
    most_bytes: usize,
}

impl Memory {
    /// Allocates poisoned memory between guards.
    pub(super) fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let layout = layout(bytes)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return None;
        }
        // SAFETY: all writes are within the allocation.
        unsafe {
            std::ptr::write_bytes(start, GUARD_BYTE, layout.size());
            std::ptr::write_bytes(start.add(GUARD), POISON, bytes);
        }
        let address = start as u64 + GUARD as u64;
        self.allocations.insert(address, bytes);
        self.bytes += bytes;
        self.most_bytes = self.most_bytes.max(self.bytes);
        Some(address)
    }

    /// Frees memory. Returns false if it was not allocated or a guard was overwritten.
    pub(super) fn free(&mut self, address: u64) -> bool {
        let Some(bytes) = self.allocations.remove(&address) else { return false };
        self.bytes -= bytes;
        let Some(layout) = layout(bytes) else { return false };
        let start = (address as usize - GUARD) as *mut u8;
        // SAFETY: allocated with this layout, and still in the list, so not freed since.
        unsafe {
            let guards = [
                std::slice::from_raw_parts(start, GUARD),
                std::slice::from_raw_parts(start.add(GUARD + bytes), GUARD),
            ];
            let whole = guards.concat().iter().all(|&byte| byte == GUARD_BYTE);
            dealloc(start, layout);
            whole
        }
    }

    /// True if the bytes lie within one allocation.
    pub(super) fn holds(&self, address: u64, bytes: usize) -> bool {
        let before = self.allocations.range(..=address).next_back();
        before.is_some_and(|(start, len)| address + bytes as u64 <= start + *len as u64)
    }

    /// Peak of allocated bytes.
    pub(super) const fn most_bytes(&self) -> usize {
        self.most_bytes
    }

    /// Number of allocations.
    pub(super) fn len(&self) -> usize {
        self.allocations.len()
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.checked_add(2 * GUARD)?, GUARD).ok()
}

/// First word of a map.
const MAGIC: u64 = 0x0070_616d_736e_6e61;
/// Bytes per element.
const ELEMENT: u64 = 2;

/// Encodes a four-axis tensor of 16-bit elements with the 128-byte swizzle; rejects what the driver
/// rejects.
pub(super) unsafe extern "C" fn tensor_map(
    map: *mut CUtensorMap,
    element: CUtensorMapDataType,
    axes: c_uint,
    address: *mut c_void,
    lengths: *const u64,
    strides: *const u64,
    box_lengths: *const c_uint,
    box_strides: *const c_uint,
    interleave: CUtensorMapInterleave,
    swizzle: CUtensorMapSwizzle,
    _: CUtensorMapL2promotion,
    beyond: CUtensorMapFloatOOBfill,
) -> Status {
    let supported = element == CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16
        && axes == 4
        && interleave == CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE
        && swizzle == CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B
        && beyond == CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    if !supported {
        return Status::NOT_SUPPORTED;
    }
    // alignas(128) in cuda.h of CUDA 13
    if !(map as usize).is_multiple_of(128) {
        return Status::INVALID_VALUE;
    }
    // SAFETY: the caller passes a number for each of the four axes, and strides for all but the
    // first.
    let (lengths, strides, box_lengths, box_strides) = unsafe {
        let of_four = |list: *const c_uint| std::slice::from_raw_parts(list, 4);
        (
            std::slice::from_raw_parts(lengths, 4),
            std::slice::from_raw_parts(strides, 3),
            of_four(box_lengths),
            of_four(box_strides),
        )
    };
    let address = address as u64;
    let allowed = address.is_multiple_of(16)
        && (map as u64).is_multiple_of(64)
        && lengths.iter().all(|&length| length > 0 && length <= 1 << 32)
        && strides.iter().all(|&stride| stride.is_multiple_of(16) && stride < 1 << 40)
        && box_lengths.iter().all(|&side| side > 0 && side <= 256)
        && box_strides.iter().all(|&one| one == 1)
        // a row of the box fits the swizzle
        && u64::from(box_lengths[0]) * ELEMENT <= 128;
    if !allowed {
        return Status::INVALID_VALUE;
    }
    let mut words = [0; 16];
    words[..2].copy_from_slice(&[MAGIC, address]);
    words[2..6].copy_from_slice(lengths);
    words[6] = ELEMENT;
    words[7..10].copy_from_slice(strides);
    for (pair, word) in box_lengths.chunks_exact(2).zip(&mut words[10..12]) {
        *word = u64::from(pair[0]) | u64::from(pair[1]) << 32;
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { (*map).opaque = words };
    Status::SUCCESS
}
