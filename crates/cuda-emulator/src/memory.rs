//! Emulated device memory: initialized with NaN, with guards at both ends.

use std::{
    alloc::{Layout, alloc, dealloc},
    collections::BTreeMap,
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
