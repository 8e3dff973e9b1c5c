//! Rows of one head of two tensors, side by side: K and V, or Q and dO.
//!
//! In the caller's tensors the rows of a head lie heads × dim elements apart: each is in another
//! page, and rows at a power of two share few cache sets. The rows that some pair needs are copied
//! once for each head, O(rows), so that O(pairs) reads find them close together.

use std::{
    iter::zip,
    sync::atomic::{AtomicBool, Ordering},
};

use annulus_core::Result;

use crate::{
    simd::{
        dispatch::{IsaToken, Real, SimdKernel},
        element::Float,
        vector::{FOUR, Vector, unrolled},
    },
    threads::team::Team,
    tile::{
        aligned::Aligned,
        input::{Plane, TileInput},
        pack::padded_dim,
    },
};

/// Rows of a task.
const TASK_ROWS: usize = 256;

/// Tensors whose rows lie side by side.
const TWO: usize = 2;

/// Packed rows, widened to the accumulator's type; each vector is padded with zeros to whole
/// vectors.
#[derive(Debug, Default)]
pub(crate) struct PackedRows<A> {
    elements: Aligned<A>,
    /// Padded dims of the two tensors.
    dims: [usize; 2],
    is_finite: bool,
}

impl<A: Real> PackedRows<A> {
    /// Packs the rows `ids` of two planes with vectors of lengths `dims`.
    ///
    /// # Errors
    /// [`annulus_core::Error::OutOfMemory`].
    pub(crate) fn fill<E: TileInput<Accumulator = A>, S: Send>(
        &mut self,
        (token, team, scratch): (IsaToken, &Team, &mut [S]),
        planes: [Plane<'_, E>; 2],
        ids: &[u32],
        dims: [usize; 2],
    ) -> Result<()> {
        self.dims = dims.map(padded_dim::<A>);
        let stride = self.dims[0] + self.dims[1];
        if self.elements.len() < ids.len() * stride {
            self.elements = Aligned::zeroed(ids.len() * stride)?;
        }
        let is_finite = AtomicBool::new(true);
        let parts = self.elements.chunks_mut((TASK_ROWS * stride).max(1));
        let tasks = parts.zip(ids.chunks(TASK_ROWS));
        team.run(scratch, tasks, None, |_, (into, ids), _| {
            let ids = ids.iter().map(|&id| id as usize);
            let kernel = PackRows { planes, ids, dims: self.dims, into };
            if !A::run_kernel(token, 1, kernel) {
                is_finite.store(false, Ordering::Relaxed);
            }
        });
        self.is_finite = is_finite.into_inner();
        Ok(())
    }

    /// Returns the rows for kernels.
    pub(crate) fn view(&self) -> RowsView<'_, A> {
        let Self { ref elements, dims, is_finite } = *self;
        RowsView { elements, dims, is_finite }
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.elements.bytes()
    }
}

/// Rows of [`PackedRows`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowsView<'a, A> {
    elements: &'a [A],
    pub(crate) dims: [usize; 2],
    /// True if no element is NaN or infinite.
    pub(crate) is_finite: bool,
}

impl<'a, A> RowsView<'a, A> {
    /// Returns the vector of tensor `side` of a row.
    #[inline(always)]
    pub(crate) fn vector(&self, row: u32, side: usize) -> &'a [A] {
        let first = row as usize * (self.dims[0] + self.dims[1]) + side * self.dims[0];
        &self.elements[first..first + self.dims[side]]
    }
}

/// Packs rows of two planes side by side.
///
/// Few instructions a row, and no prefetches: the processor then has the reads of several rows in
/// flight at once, which hides more of their latency than a prefetch of the rows ahead.
pub(crate) struct PackRows<'a, 's, E: TileInput, I> {
    pub(crate) planes: [Plane<'s, E>; 2],
    pub(crate) ids: I,
    /// Padded dims.
    pub(crate) dims: [usize; 2],
    pub(crate) into: &'a mut [E::Accumulator],
}

impl<E: TileInput, I: Iterator<Item = usize> + Clone> SimdKernel<E::Accumulator>
    for PackRows<'_, '_, E, I>
{
    /// True if no element is NaN or infinite: Σ 0·x is NaN exactly if some x is not finite.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let Self { planes, ids, dims, into } = self;
        let zero = V::splat(E::Accumulator::ZERO);
        let mut probe = [zero; TWO];
        for (id, into) in zip(ids, into.chunks_exact_mut(dims[0] + dims[1])) {
            let (first, second) = into.split_at_mut(dims[0]);
            for (at, into) in [first, second].into_iter().enumerate() {
                let row = planes[at].slice(id).unwrap_or_default();
                let whole = row.chunks_exact(FOUR * V::WIDTH);
                let rest = whole.remainder();
                let taken = row.len() - rest.len();
                for (from, into) in zip(whole, V::strip_mut::<FOUR>(into)) {
                    unrolled!(i < FOUR, {
                        let elements = V::widen(&from[i * V::WIDTH..(i + 1) * V::WIDTH]);
                        probe[at] = elements.multiply_add(zero, probe[at]);
                        elements.store(&mut into[i]);
                    });
                }
                let into = into.get_mut(taken..).unwrap_or_default();
                for (chunk, [into]) in V::strip_mut::<1>(into).iter_mut().enumerate() {
                    let elements = V::widen(rest.get(chunk * V::WIDTH..).unwrap_or_default());
                    probe[at] = elements.multiply_add(zero, probe[at]);
                    elements.store(into);
                }
            }
        }
        let mut sum = zero;
        unrolled!(i < TWO, sum = sum.plus(probe[i]));
        sum.total() == E::Accumulator::ZERO
    }
}
