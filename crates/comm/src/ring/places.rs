//! Buffers in numbered places.

use annulus_core::{Backend, Error, Result, Space};

/// Buffers of a plan, each in a place of its own, from which the messages of a pass take it.
pub(super) struct Places<S: Space>(Vec<Option<S::Buffer>>);

impl<S: Space> Places<S> {
    /// Allocates buffers of these sizes.
    pub(super) fn allocate<B: Backend<Space = S>>(
        backend: &B,
        sizes: impl IntoIterator<Item = u64>,
    ) -> Result<Self> {
        let buffer = |bytes| backend.allocate(bytes).map(Some);
        sizes.into_iter().map(buffer).collect::<Result<_>>().map(Self)
    }

    /// Returns no places.
    pub(super) const fn none() -> Self {
        Self(Vec::new())
    }

    /// Returns the number of places.
    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if the buffer of a place is free.
    pub(super) fn is_free(&self, place: usize) -> bool {
        self.0.get(place).is_some_and(Option::is_some)
    }

    /// Takes the buffer of a place.
    ///
    /// # Errors
    /// [`Error::Internal`] if it is not free.
    pub(super) fn take(&mut self, place: usize) -> Result<S::Buffer> {
        let buffer = self.0.get_mut(place).and_then(Option::take);
        buffer.ok_or_else(|| Error::internal("a buffer of the plan is in use"))
    }

    /// Returns the buffer of a place.
    pub(super) fn put(&mut self, place: usize, buffer: S::Buffer) {
        if let Some(empty) = self.0.get_mut(place) {
            *empty = Some(buffer);
        }
    }

    /// Returns the bytes of all free buffers: of all, between passes.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().flatten().map(S::size).sum()
    }

    /// Returns true if the buffer of a place is free and has so many bytes.
    pub(super) fn holds(&self, place: usize, bytes: u64) -> bool {
        let buffer = self.0.get(place).and_then(Option::as_ref);
        buffer.is_some_and(|buffer| S::size(buffer) >= bytes)
    }

    /// Returns true if the first `count` places hold messages of these sizes, number j in place j %
    /// `count`.
    pub(super) fn hold(&self, count: usize, sizes: &[u64]) -> bool {
        let holds = |(number, &bytes): (usize, &u64)| self.holds(number % count.max(1), bytes);
        sizes.iter().enumerate().all(holds)
    }
}
