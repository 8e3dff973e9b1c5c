//! Accumulators of dq and dbias of the fused backward: shared by threads, or those of one plane.

use std::{ops::Range, sync::Mutex};

use annulus_core::{LeafMerges, Rows};

use crate::{
    backward::kv_split::KvSplit,
    simd::dispatch::{IsaToken, Real},
    threads::{
        ordered_reduction::{TaskSlot, lock},
        team::Ticker,
    },
    tile::{
        aligned::Aligned,
        ds_tile::DqUpdate,
        pack::{PanelView, padded},
        tile_mask::TILE,
    },
    workspace::{bias_gradient::BiasGradient, query_block::QueryBlock, scratch::ThreadScratch},
};

/// Task: a range of keys of one (batch row, KV head) plane.
pub(crate) struct KeyTask {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) keys: Range<usize>,
}

/// Accumulators of dq and dbias that a task of the fused backward adds to.
pub(crate) trait DqSums<A> {
    /// Waits until the tasks before this one have passed `step`. Returns false on a stop.
    fn wait_for_step(&mut self, step: usize, ticker: &mut Ticker<'_>) -> bool;

    /// Computes dQ += dS·K for a tile of queries of one head and the tile of keys that starts at
    /// key `first_key` of the task. dS and K are in `scratch`.
    fn accumulate_dq(
        &mut self,
        scratch: &ThreadScratch<A>,
        head: usize,
        task: &KeyTask,
        first_key: usize,
        queries: &Range<usize>,
    );

    /// Returns the accumulator of dbias.
    fn bias(&self) -> Option<&BiasGradient<A>>;
}

/// dq and dbias accumulators that all threads share.
pub(crate) struct GroupGradients<'a, A> {
    pub(super) token: IsaToken,
    /// Elements of a row of dq.
    pub(super) width: usize,
    /// Query heads per KV head.
    pub(super) group: usize,
    /// Numbers of batch rows and KV heads.
    pub(super) batch_and_kv_heads: (usize, usize),
    pub(super) blocks: &'a [QueryBlock<A>],
    /// dq of each block, behind a lock.
    pub(super) sums: &'a [Mutex<Aligned<A>>],
    /// See [`crate::workspace::state::PassState::block_index`].
    pub(super) block_index: &'a [usize],
    /// Rows of every block but the last of a plane.
    pub(super) q_rows: usize,
    pub(crate) bias: Option<&'a BiasGradient<A>>,
    pub(super) split: KvSplit,
}

/// A task's access to the shared accumulators, in task order.
pub(crate) struct TaskReduction<'a, A> {
    pub(crate) to: &'a GroupGradients<'a, A>,
    pub(super) slot: TaskSlot<'a>,
    pub(super) plane: usize,
    /// Keys of the task, if they are read in place instead of packed.
    pub(super) keys_in_place: Option<PanelView<'a, A>>,
}

impl<A: Real> DqSums<A> for TaskReduction<'_, A> {
    fn wait_for_step(&mut self, step: usize, ticker: &mut Ticker<'_>) -> bool {
        self.slot.wait_for_step(step, ticker)
    }

    fn accumulate_dq(
        &mut self,
        scratch: &ThreadScratch<A>,
        head: usize,
        task: &KeyTask,
        first_key: usize,
        queries: &Range<usize>,
    ) {
        let to = self.to;
        let mut first = queries.start;
        // a tile may span blocks, all of which start at whole register tiles
        while first < queries.end {
            let index = to.block_index[(first / to.q_rows * to.batch_and_kv_heads.0 + task.batch)
                * to.batch_and_kv_heads.1
                + task.kv_head];
            let block = &to.blocks[index];
            let rows = first..block.rows.end.min(queries.end);
            let at = block.lane(head % to.group, first - block.rows.start);
            first = rows.end;
            let of = TileRows { token: to.token, width: to.width, queries, rows, first_key };
            let panel = self.keys_in_place.unwrap_or_else(|| scratch.rows_key.view());
            of.accumulate(scratch, panel, task, at, &mut lock(&to.sums[index]));
        }
    }

    fn bias(&self) -> Option<&BiasGradient<A>> {
        self.to.bias
    }
}

/// Rows of a tile of queries that lie in one block.
struct TileRows<'a> {
    token: IsaToken,
    /// Elements of a row of dq.
    width: usize,
    queries: &'a Range<usize>,
    rows: Range<usize>,
    first_key: usize,
}

impl TileRows<'_> {
    /// Adds dS·K to `sums`, dq of a block, from its row `at` on. `panel` are the task's keys.
    fn accumulate<A: Real>(
        self,
        scratch: &ThreadScratch<A>,
        panel: PanelView<'_, A>,
        task: &KeyTask,
        at: usize,
        sums: &mut [A],
    ) {
        let Self { token, width, queries, rows, first_key } = self;
        let of = DqUpdate {
            first_row: rows.start - queries.start,
            panel,
            keys: first_key..task.keys.len().min(first_key + TILE),
            into: &mut sums[at * width..(at + padded(rows.len())) * width],
            width,
        };
        scratch.ds_tile.accumulate_dq(token, of);
    }
}

/// dq of one (batch row, KV head) plane in the reproducible order. One thread computes all tasks of
/// the plane.
pub(super) struct PlaneLeaves<'a, A> {
    pub(super) token: IsaToken,
    /// Elements of a row of dq.
    pub(super) width: usize,
    /// Query heads per KV head.
    pub(super) group: usize,
    /// Number of the plane, and of planes.
    pub(super) plane: (usize, usize),
    /// Blocks of the plane, which follow those of the planes before it.
    pub(super) blocks: &'a mut [QueryBlock<A>],
    /// See [`crate::workspace::state::PassState::block_index`].
    pub(super) block_index: &'a [usize],
    /// Rows of every block but the last.
    pub(super) q_rows: usize,
}

impl<A: Real> PlaneLeaves<'_, A> {
    /// Merges dq of the complete leaf of step number `step`.
    pub(super) fn close_leaf(&mut self, merges: &LeafMerges, step: usize) {
        self.blocks.iter_mut().for_each(|block| block.close_dq_leaf(merges, step));
    }
}

impl<A: Real> DqSums<A> for PlaneLeaves<'_, A> {
    /// Returns true: tasks of other threads add to other planes.
    fn wait_for_step(&mut self, _step: usize, _ticker: &mut Ticker<'_>) -> bool {
        true
    }

    fn accumulate_dq(
        &mut self,
        scratch: &ThreadScratch<A>,
        head: usize,
        task: &KeyTask,
        first_key: usize,
        queries: &Range<usize>,
    ) {
        let (plane, planes) = self.plane;
        let before = plane * self.blocks.len();
        let mut first = queries.start;
        while first < queries.end {
            let index = self.block_index[first / self.q_rows * planes + plane] - before;
            let block = &mut self.blocks[index];
            block.fill_dq_leaf();
            let rows = first..block.rows.end.min(queries.end);
            let at = block.lane(head % self.group, first - block.rows.start);
            first = rows.end;
            let of = TileRows { token: self.token, width: self.width, queries, rows, first_key };
            of.accumulate(scratch, scratch.rows_key.view(), task, at, &mut block.sums);
        }
    }

    /// Returns `None`: with a gradient of bias, dq is computed apart from dk and dv.
    fn bias(&self) -> Option<&BiasGradient<A>> {
        None
    }
}

impl<A: Real> TaskReduction<'_, A> {
    /// Releases the tasks behind this one after its last tile, and adds its sums over all queries
    /// to dbias. Returns false on a stop.
    pub(super) fn finish(
        &self,
        scratch: &ThreadScratch<A>,
        task: &KeyTask,
        keys: &Rows,
        ticker: &mut Ticker<'_>,
    ) -> bool {
        self.slot.complete_before(usize::MAX);
        let Some(bias) = self.to.bias.filter(|bias| bias.over_queries()) else { return true };
        // another plane, or other keys of this one, may add to the same elements
        let first = match (bias.over_keys(), self.to.split.chained) {
            (false, false) => None,
            (false, true) => Some(self.to.split.first_task(self.plane)),
            (true, _) => Some(self.slot.task()),
        };
        if first.is_some_and(|first| !self.slot.wait_for_tasks_before(first, ticker)) {
            return false;
        }
        bias.add_sums(
            &scratch.sums_bias,
            (task.batch, task.kv_head),
            &keys.rows()[task.keys.clone()],
        );
        true
    }
}
