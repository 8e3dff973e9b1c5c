//! Query blocks, the unit of state, and query tasks, the unit of work of the passes over queries.
//!
//! Row statistics of backward: per-query quantities that forward left or that are computed before
//! the first tile.
//!
//! ```text
//! normalised:     delta = ⟨dout, out⟩ − dlse                          max, 1/sum
//! unnormalised:   delta = −dlse     share = ⟨dout, out⟩ / ties        max, 1/sum
//! ```
//! ⟨dout, out⟩ is ⟨dout, out⟩ + ⟨dout, out_residual⟩ if the caller has kept the rounding residual.
//! A row without visible keys and sinks has max = +∞ and 1/sum = 0, so that its probabilities are 0
//! whatever its scores.

use std::ops::Range;

use annulus_core::{LeafMerge, LeafMerges, Result, Spec, memory};

use crate::{
    simd::dispatch::Real,
    tile::{
        aligned::{Aligned, list_bytes},
        geometry::{Geometry, TileCoord},
        softmax::{MergeSoftmax, Partial},
    },
    workspace::leaves::{BlockLeaves, unify},
};

/// Accumulators and softmax statistics of one KV head's query heads, for a range of rows of one
/// batch row.
#[derive(Debug)]
pub(crate) struct QueryBlock<A> {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    /// Local query rows.
    pub(crate) rows: Range<usize>,
    /// Lanes of one head: `rows.len()` rounded up to whole vectors.
    pub(crate) lanes: usize,
    /// Index of the owner of the dbias elements that this block adds to; see
    /// [`crate::workspace::bias_gradient::owner`].
    pub(crate) owner: usize,
    /// Statistics as `[heads of the group][lanes]`. Sums forward: unnormalised Oᵀ as `[heads of the
    /// group][strips][dims][lanes]`. Backward: unscaled dq in a
    /// [`crate::workspace::state::DqLayout`].
    pub(crate) partial: Partial<Aligned<A>>,
    /// Partial results of leaves, in the reproducible order.
    pub(crate) leaves: BlockLeaves<A>,
    pub(crate) kept_q: KeptQueries<A>,
}

/// Packed strips of the queries of a block, kept for all calls of a forward pass. Calls of a ring
/// of short shards compute one or two tiles per strip: packing it for each would take as long as a
/// tenth of their products.
#[derive(Debug, Default)]
pub(crate) struct KeptQueries<A> {
    /// `[heads of the group][strips][rows of a packed strip][lanes]`; empty if strips are packed
    /// for each call.
    strips: Aligned<A>,
    /// True for strips that are packed: one element per vector of lanes, that of the strip's first
    /// lane.
    filled: Vec<bool>,
}

impl<A: Real> KeptQueries<A> {
    /// Maximum rows of a shard whose packed queries are kept: as much memory as their accumulators.
    pub(crate) const MAX_ROWS: usize = 512;

    /// Allocates the strips of `lanes` lanes of all heads, unless they are.
    pub(crate) fn allocate(&mut self, lanes: usize, packed_rows: usize) -> Result<()> {
        if self.strips.is_empty() {
            self.filled = memory::filled("packed queries", lanes.div_ceil(A::WIDTH), false)?;
            self.strips = Aligned::zeroed(lanes * packed_rows)?;
        }
        Ok(())
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.strips.bytes() + list_bytes(&self.filled)
    }

    /// Invalidates all strips at the start of a pass.
    pub(crate) fn begin(&mut self) {
        self.filled.fill(false);
    }

    /// Returns the strip of the lanes `lanes`, if strips are kept.
    pub(crate) fn strip(&self, lanes: &Range<usize>, packed_rows: usize) -> Option<&[A]> {
        let is_kept = !self.strips.is_empty();
        is_kept.then(|| &self.strips[lanes.start * packed_rows..lanes.end * packed_rows])
    }

    /// As [`KeptQueries::strip`], with the mark that it is packed.
    pub(crate) fn strip_mut(
        &mut self,
        lanes: &Range<usize>,
        packed_rows: usize,
    ) -> Option<(&mut [A], &mut bool)> {
        let filled = self.filled.get_mut(lanes.start / A::WIDTH)?;
        Some((&mut self.strips[lanes.start * packed_rows..lanes.end * packed_rows], filled))
    }
}

impl<A> QueryBlock<A> {
    /// Returns the lane of row `first_row` of the group's head number `head`, in statistics.
    pub(crate) const fn lane(&self, head: usize, first_row: usize) -> usize {
        head * self.lanes + first_row
    }
}

impl<A: Real> QueryBlock<A> {
    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.partial.bytes() + self.leaves.bytes() + self.kept_q.bytes()
    }

    /// Resets the statistics before the first visible tile of a leaf. Sums are zeroed with the
    /// first tile of each strip.
    pub(crate) fn fill_leaf(&mut self) {
        if !std::mem::replace(&mut self.leaves.filled, true) {
            self.partial.reset();
        }
    }

    /// Zeroes dq, and dbias summed over keys, before the first visible tile of a leaf.
    pub(crate) fn fill_dq_leaf(&mut self) {
        if !std::mem::replace(&mut self.leaves.filled, true) {
            self.partial.sums.fill(A::ZERO);
            self.partial.sum.fill(A::ZERO);
        }
    }

    /// Adds the rows of a dS tile with queries in lanes, ascending, to dbias summed over keys.
    /// `first_row` is the strip's first row in the block.
    pub(crate) fn add_over_keys(
        &mut self,
        coord: &TileCoord,
        first_row: usize,
        group: usize,
        rows: &[A],
    ) {
        let first = self.lane(coord.head % group, first_row);
        let sums = &mut self.partial.sum[first..first + coord.width];
        for row in rows.chunks_exact(coord.width) {
            sums.iter_mut().zip(row).for_each(|(sum, &ds)| *sum += ds);
        }
    }

    /// Merges the current partial result, that of the complete leaf of step number `step`, with
    /// those that wait for it, and stores the result unless it is the root. `merge` merges a slot
    /// into the current partial result.
    fn close_leaf(
        &mut self,
        merges: &LeafMerges,
        step: usize,
        merge: impl Fn(&mut Self, &LeafMerge),
    ) {
        for at in merges.merges(step) {
            match (self.leaves.filled, self.leaves.slots[at.slot].filled) {
                (_, false) => {}
                (false, true) => self.exchange(at.slot),
                (true, true) => merge(self, at),
            }
            self.leaves.slots[at.slot].filled = false;
        }
        if let Some(slot) = merges.steps().get(step).and_then(|step| step.store) {
            self.exchange(slot);
            self.leaves.filled = false;
        }
    }

    /// Closes a leaf of a forward pass.
    pub(crate) fn close_forward_leaf(
        &mut self,
        geometry: &Geometry,
        merges: &LeafMerges,
        step: usize,
    ) {
        self.close_leaf(merges, step, |block, at| {
            block.merge(geometry, at.slot, at.slot_is_left);
        });
    }

    /// Closes a leaf of the dq pass, whose merge is a sum.
    pub(crate) fn close_dq_leaf(&mut self, merges: &LeafMerges, step: usize) {
        self.close_leaf(merges, step, |block, at| {
            let (into, stored) = (&mut block.partial, &block.leaves.slots[at.slot].partial);
            for (sums, stored) in [(&mut into.sums, &stored.sums), (&mut into.sum, &stored.sum)] {
                sums.iter_mut().zip(&stored[..]).for_each(|(sum, &stored)| *sum += stored);
            }
        });
    }

    /// Makes the root the current partial result of every row, also of those without a visible key.
    pub(crate) fn finish_forward_leaves(&mut self) {
        self.fill_leaf();
        unify(&mut self.partial.sums);
    }

    /// As [`QueryBlock::finish_forward_leaves`], of dq.
    pub(crate) fn finish_dq_leaves(&mut self) {
        self.fill_dq_leaf();
        unify(&mut self.partial.sums);
        unify(&mut self.partial.sum);
    }

    fn exchange(&mut self, slot: usize) {
        let Self { partial, leaves, .. } = self;
        let slot = &mut leaves.slots[slot];
        std::mem::swap(partial, &mut slot.partial);
        std::mem::swap(&mut leaves.filled, &mut slot.filled);
    }

    /// Merges slot `slot` into the current partial result, strip by strip.
    fn merge(&mut self, geometry: &Geometry, slot: usize, slot_is_left: bool) {
        let value_rows = geometry.value_rows();
        for head in 0..geometry.dims.group() {
            for strip in geometry.strips(self.rows.len()) {
                let first = self.lane(head, strip.rows.start);
                let lanes = first..first + strip.width;
                let rows = lanes.start * value_rows..lanes.end * value_rows;
                let (into, other) = (&mut self.partial, &self.leaves.slots[slot].partial);
                let of = |list: &[A]| if list.is_empty() { 0..0 } else { lanes.clone() };
                let ties = of(&into.ties);
                let score_sum = of(&into.score_sum);
                let max_product = of(&into.max_product);
                let other = Partial {
                    sums: &other.sums[rows.clone()],
                    max: &other.max[lanes.clone()],
                    sum: &other.sum[lanes.clone()],
                    ties: &other.ties[ties.clone()],
                    score_sum: &other.score_sum[score_sum.clone()],
                    max_product: &other.max_product[max_product.clone()],
                };
                let into = Partial {
                    sums: &mut into.sums[rows],
                    max: &mut into.max[lanes.clone()],
                    sum: &mut into.sum[lanes],
                    ties: &mut into.ties[ties],
                    score_sum: &mut into.score_sum[score_sum],
                    max_product: &mut into.max_product[max_product],
                };
                let kernel = MergeSoftmax { into, other, other_is_left: slot_is_left };
                A::run_kernel(geometry.token, strip.vectors, kernel);
            }
        }
    }
}

/// Unit of work of the passes over queries: adjacent blocks of one (batch row, KV head) plane.
pub(crate) struct QueryTask<'a, A> {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) rows: Range<usize>,
    /// All blocks but the last have as many rows as the first.
    pub(crate) blocks: &'a mut [QueryBlock<A>],
}

impl<'a, A> QueryTask<'a, A> {
    /// Returns a predicate that is true for blocks of the same task, for tasks of `rows` rows (a
    /// multiple of the block's rows).
    pub(crate) fn same_task(
        rows: usize,
    ) -> impl Fn(&QueryBlock<A>, &QueryBlock<A>) -> bool + Clone {
        let of = move |block: &QueryBlock<A>| (block.batch, block.kv_head, block.rows.start / rows);
        move |a, b| of(a) == of(b)
    }

    /// Creates the task of these blocks; `None` if there are none.
    pub(crate) fn new(blocks: &'a mut [QueryBlock<A>]) -> Option<Self> {
        let first = blocks.first()?;
        let last = blocks.last()?;
        Some(Self {
            batch: first.batch,
            kv_head: first.kv_head,
            rows: first.rows.start..last.rows.end,
            blocks,
        })
    }

    /// Exchanges the accumulator of the task, if it is one block, for `sums`, which is at least as
    /// long.
    pub(crate) fn swap_sums(&mut self, sums: &mut Aligned<A>) {
        if let [block] = &mut *self.blocks {
            std::mem::swap(&mut block.partial.sums, sums);
        }
    }

    /// Returns the block that holds row `row` of the task, and the row's index in that block.
    pub(crate) fn block(&mut self, row: usize) -> (&mut QueryBlock<A>, usize) {
        let rows = self.blocks[0].rows.len();
        (&mut self.blocks[row / rows], row % rows)
    }
}

/// `[max, 1/sum, delta, share]` of one row; see [`Spec::ROW_STATISTICS`]. `share` is 0 if the
/// output is normalised.
pub(crate) type Statistics<A> = [A; Spec::ROW_STATISTICS];

/// Row statistics of all local queries.
#[derive(Debug, Default)]
pub(crate) struct RowStatistics<A> {
    /// Local queries.
    pub(crate) rows: usize,
    /// `[b, q_heads, q rows]`.
    pub(crate) lines: Vec<Statistics<A>>,
}

impl<A: Real> RowStatistics<A> {
    pub(crate) fn new(spec: &Spec, rows: usize) -> Result<Self> {
        let len = spec.dims.batch * spec.dims.q_heads * rows;
        let lines = memory::filled("row statistics", len, [A::ZERO; Spec::ROW_STATISTICS])?;
        Ok(Self { rows, lines })
    }

    /// Returns the statistics of the rows `rows`. `head_index` is batch row · q_heads + head.
    pub(crate) fn of(&self, head_index: usize, rows: Range<usize>) -> &[Statistics<A>] {
        &self.lines[head_index * self.rows..][rows]
    }
}

/// Row statistics of up to [`crate::tile::tile_mask::TILE`] queries as the kernels read them: one
/// array per quantity of [`Statistics`].
pub(crate) type TileStatistics<A> = [Aligned<A>; Spec::ROW_STATISTICS];

/// Loads the statistics of consecutive rows.
pub(crate) fn load_statistics<A: Real>(
    into: &mut TileStatistics<A>,
    rows: impl Iterator<Item = Statistics<A>>,
) {
    for (index, row) in rows.enumerate() {
        into.iter_mut().zip(row).for_each(|(into, number)| into[index] = number);
    }
}
