//! Query blocks, the unit of state, and query tasks, the unit of work of the passes over queries.

use std::ops::Range;

use crate::tile::aligned::Aligned;

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
    /// Forward: unnormalised Oᵀ as `[heads of the group][strips][dims][lanes]`. Backward: unscaled
    /// dq in a [`crate::workspace::state::DqLayout`].
    pub(crate) sums: Aligned<A>,
    /// Running maximum m, `[heads of the group][lanes]`.
    pub(crate) max: Aligned<A>,
    /// Running sum ℓ, shaped as `max`.
    pub(crate) sum: Aligned<A>,
    /// Number of scores equal to the running maximum, shaped as `max`. Empty if the output is
    /// normalised.
    pub(crate) ties: Aligned<A>,
}

impl<A> QueryBlock<A> {
    /// Returns the lane of row `first_row` of the group's head number `head`, in `max`, `sum` and
    /// `ties`.
    pub(crate) const fn lane(&self, head: usize, first_row: usize) -> usize {
        head * self.lanes + first_row
    }
}

/// Unit of work of the passes over queries: adjacent blocks of one (batch row, KV head) plane.
pub(crate) struct QueryTask<'a, A> {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) rows: Range<usize>,
    /// All blocks but the last have as many rows as the first.
    blocks: &'a mut [QueryBlock<A>],
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

    /// Returns the block that holds row `row` of the task, and the row's index in that block.
    pub(crate) fn block(&mut self, row: usize) -> (&mut QueryBlock<A>, usize) {
        let rows = self.blocks[0].rows.len();
        (&mut self.blocks[row / rows], row % rows)
    }
}
