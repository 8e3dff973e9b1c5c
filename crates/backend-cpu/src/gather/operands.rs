//! What the kernels of listed rows read: packed rows of a head, and lists of rows.
//!
//! **Rows** of two tensors, K and V or Q and dO, side by side. In the caller's tensors the rows of a
//! head lie heads × dim elements apart: each is in another page, and rows at a power of two share
//! few cache sets. The rows that some pair needs are copied once for each head, O(rows), so that
//! O(pairs) reads find them close together.
//!
//! **Lists** of four neighbouring rows, merged where they have most of their elements in common.
//!
//! ```text
//! rows 0..4 of a window    {3 4 5} {4 5 6} {5 6 7} {6 7 8}
//! merged                   3 4 5 6 7 8, each with one bit a row
//! ```
//! A kernel reads a row of a merged list once for four rows of its own side. Where lists have
//! little in common, as scattered ones, most bits would be 0, and they stay apart.

use std::{
    iter::zip,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use annulus_core::{Result, memory};

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

/// Rows whose lists are merged.
pub(crate) const GROUP: usize = 4;

/// Time of an element of a merged list in units of an element of a list of one row: it takes four
/// products of each kind, but one read.
const MERGED_COST: f64 = 2.2;

/// Merged lists of `[planes, rows]`.
#[derive(Debug, Default)]
pub(crate) struct MergedLists {
    groups_of_plane: usize,
    /// Pairs of the merged lists.
    pub(crate) pairs: usize,
    /// One for each group.
    spans: Vec<Span>,
    elements: Vec<u32>,
    /// For each 64 elements of a list one word for each row of the group.
    words: Vec<[u64; GROUP]>,
}

/// Place of a merged list.
#[derive(Debug, Clone, Copy)]
struct Span {
    first: usize,
    first_word: usize,
    /// 0: the lists are not merged.
    len: usize,
}

/// Elements of a list and, if it is merged, the rows of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MergedList<'a> {
    pub(crate) elements: &'a [u32],
    pub(crate) words: &'a [[u64; GROUP]],
}

impl MergedLists {
    /// Merges the lists of `planes` planes of `rows` rows, where that saves time and `is_wanted`.
    /// The list of plane p and row r is `list(p · rows + r)`, with distinct elements below `count`.
    ///
    /// # Errors
    /// [`annulus_core::Error::OutOfMemory`].
    pub(crate) fn refill<'l>(
        &mut self,
        [planes, rows]: [usize; 2],
        count: usize,
        is_wanted: bool,
        list: impl Fn(usize) -> &'l [u32],
    ) -> Result<()> {
        const WHAT: &str = "merged lists of visible pairs";
        self.groups_of_plane = rows.div_ceil(GROUP);
        self.pairs = 0;
        self.spans.clear();
        self.elements.clear();
        self.words.clear();
        let groups = planes * self.groups_of_plane;
        memory::reserve(WHAT, &mut self.spans, groups)?;
        // the group that has marked an element last, and the element's place in its list
        let mut marks: Vec<[usize; 2]> = memory::filled(WHAT, count, [0; 2])?;
        for group in 0..groups {
            let (first, first_word) = (self.elements.len(), self.words.len());
            let start = group % self.groups_of_plane * GROUP;
            let plane = group / self.groups_of_plane;
            let lists = (start..rows.min(start + GROUP)).map(|row| list(plane * rows + row));
            let total: usize = lists.clone().map(<[u32]>::len).sum();
            memory::reserve(WHAT, &mut self.elements, total)?;
            memory::reserve(WHAT, &mut self.words, total.div_ceil(64))?;
            for (row, list) in lists.enumerate().filter(|_| is_wanted) {
                for &element in list {
                    let mark = &mut marks[element as usize];
                    if mark[0] != group + 1 {
                        *mark = [group + 1, self.elements.len() - first];
                        self.elements.push(element);
                        if mark[1].is_multiple_of(64) {
                            self.words.push([0; GROUP]);
                        }
                    }
                    self.words[first_word + mark[1] / 64][row] |= 1 << (mark[1] % 64);
                }
            }
            let mut len = self.elements.len() - first;
            if len as f64 * MERGED_COST > total as f64 {
                len = 0;
                self.elements.truncate(first);
                self.words.truncate(first_word);
            } else if is_wanted {
                self.pairs += total;
            }
            self.spans.push(Span { first, first_word, len });
        }
        Ok(())
    }

    /// Returns the merged list of the group that begins with row `row` of a plane, if there is one.
    pub(crate) fn get(&self, plane: usize, row: usize) -> Option<MergedList<'_>> {
        let span = self.spans.get(plane * self.groups_of_plane + row / GROUP)?;
        let elements = &self.elements[span.first..][..span.len];
        let words = &self.words[span.first_word..][..span.len.div_ceil(64)];
        (!elements.is_empty()).then_some(MergedList { elements, words })
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.spans.capacity() * size_of::<Span>()
            + self.elements.capacity() * 4
            + self.words.capacity() * size_of::<[u64; GROUP]>()
    }
}

impl<'a> MergedList<'a> {
    /// Returns the list of one row, which is not merged.
    pub(crate) const fn of_row(elements: &'a [u32]) -> Self {
        Self { elements, words: &[] }
    }

    /// Returns the number of rows of the group.
    pub(crate) const fn rows(&self) -> usize {
        if self.words.is_empty() { 1 } else { GROUP }
    }

    /// Iterates over the parts of at most `len` elements, a multiple of 64, and their ranges.
    pub(crate) fn parts(self, len: usize) -> impl Iterator<Item = (Range<usize>, Self)> {
        let Self { elements, words } = self;
        (0..elements.len()).step_by(len).map(move |first| {
            let end = elements.len().min(first + len);
            let words = words.get(first / 64..end.div_ceil(64)).unwrap_or_default();
            (first..end, Self { elements: &elements[first..end], words })
        })
    }
}
