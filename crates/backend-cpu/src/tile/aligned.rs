//! Cache-line alignment: a 64-byte vector of such memory never straddles two cache lines.

use std::ops::{Deref, DerefMut};

use annulus_core::{Result, memory};

use crate::simd::dispatch::Real;

/// Returns the heap bytes of a list.
pub(crate) const fn list_bytes<T>(list: &Vec<T>) -> usize {
    list.capacity() * size_of::<T>()
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
        let elements = memory::filled("the workspace", len.saturating_add(spare), A::ZERO)?;
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
