//! Cache-line alignment: a 64-byte vector of such memory never straddles two cache lines.

use std::ops::{Deref, DerefMut};

use annulus_core::{Result, memory};

use crate::simd::dispatch::Real;

/// Returns the heap bytes of a list.
pub(crate) const fn list_bytes<T>(list: &Vec<T>) -> usize {
    list.capacity() * size_of::<T>()
}

/// Requests large pages, 2 MiB on Linux, for memory of at least 4 MiB that nothing has accessed yet.
///
/// Otherwise the first access to each 4 KiB is a page fault of about 1 µs: those of 32 MiB take
/// several times as long as copying rows into them. A hint, without effect elsewhere.
///
/// # Source
/// NumPy advises the system in the same way, from the same size on.
pub fn prefer_large_pages<T>(memory: &[T]) {
    #[cfg(target_os = "linux")]
    if size_of_val(memory) >= 4 << 20 {
        // whole pages of every page size of Linux
        let pages = 1 << 16;
        let skipped = memory.as_ptr().addr().next_multiple_of(pages) - memory.as_ptr().addr();
        let bytes = (size_of_val(memory) - skipped) / pages * pages;
        // SAFETY: the range lies in `memory`. The advice changes no contents.
        unsafe {
            let first = memory.as_ptr().byte_add(skipped);
            libc::madvise(first.cast_mut().cast(), bytes, libc::MADV_HUGEPAGE);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

/// Zeroed elements, the first at an address that is a multiple of 64 bytes.
#[derive(Debug, Default)]
pub(crate) struct Aligned<A> {
    elements: Vec<A>,
    first: usize,
    len: usize,
}

impl<A: Real> Aligned<A> {
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        let spare = A::WIDTH;
        let mut elements = memory::list("the workspace", len.saturating_add(spare))?;
        prefer_large_pages(elements.spare_capacity_mut());
        elements.resize(len.saturating_add(spare), A::ZERO);
        // the offset stays valid: the Vec is never resized, so its memory does not move
        let first = elements.as_ptr().align_offset(64).min(spare);
        Ok(Self { elements, first, len })
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        list_bytes(&self.elements)
    }
}

impl<A> Deref for Aligned<A> {
    type Target = [A];

    fn deref(&self) -> &[A] {
        &self.elements[self.first..self.first + self.len]
    }
}

impl<A> DerefMut for Aligned<A> {
    fn deref_mut(&mut self) -> &mut [A] {
        &mut self.elements[self.first..self.first + self.len]
    }
}
