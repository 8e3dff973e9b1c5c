//! Memory whose rows of 64 bytes lie in one cache line each.

use std::ops::{Deref, DerefMut};

use annulus_core::{Error, Result};

use crate::real::Real;

/// Zeroed elements, the first of them at a multiple of 64 bytes.
#[derive(Debug, Default)]
pub(crate) struct Aligned<A> {
    elements: Vec<A>,
    first: usize,
    len: usize,
}

impl<A: Real> Aligned<A> {
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        let spare = A::WIDTH;
        let mut elements = Vec::new();
        let asked = (len as u64 + spare as u64) * size_of::<A>() as u64;
        elements.try_reserve_exact(len + spare).map_err(|_| Error::OutOfMemory { asked, free: None })?;
        elements.resize(len + spare, A::ZERO);
        // a Vec's memory does not move while it is not resized, and nothing resizes it
        let first = elements.as_ptr().align_offset(64).min(spare);
        Ok(Self { elements, first, len })
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
