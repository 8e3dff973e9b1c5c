//! Shared accumulators of the fused backward: dq behind locks and dbias, added to in task order.

use std::{ops::Range, sync::Mutex};

use annulus_core::Rows;

use crate::{
    backward::kv_split::KvSplit,
    simd::dispatch::{IsaToken, Real},
    threads::{lock::lock, ordered_reduction::TaskSlot, team::Ticker},
    tile::{aligned::Aligned, ds_tile::DqUpdate, pack::padded, tile_mask::TILE},
    workspace::{bias_gradient::BiasGradient, query_block::QueryBlock, scratch::Scratch},
};

/// Task: a range of keys of one (batch row, KV head) plane.
pub(crate) struct KeyTask {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) keys: Range<usize>,
}

/// dq and dbias accumulators that all threads share.
pub(crate) struct SharedGradients<'a, A> {
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
    /// See [`crate::workspace::state::State::block_index`].
    pub(super) block_index: &'a [usize],
    /// Rows of every block but the last of a plane.
    pub(super) q_rows: usize,
    pub(crate) bias: Option<&'a BiasGradient<A>>,
    pub(super) split: KvSplit,
}

/// A task's access to the shared accumulators, in task order.
pub(crate) struct TaskReduction<'a, A> {
    pub(crate) to: &'a SharedGradients<'a, A>,
    pub(super) slot: TaskSlot<'a>,
    pub(super) plane: usize,
}

impl<A: Real> TaskReduction<'_, A> {
    /// Waits until the tasks before this one have passed `step`. Returns false on a stop.
    pub(crate) fn wait_for_step(&self, step: usize, ticker: &mut Ticker<'_>) -> bool {
        self.slot.wait_for_step(step, ticker)
    }

    /// Computes dQ += dS·K for a tile of queries of one head and the tile of keys that starts at
    /// key `first_key` of the task.
    pub(crate) fn accumulate_dq(
        &self,
        scratch: &Scratch<A>,
        head: usize,
        task: &KeyTask,
        first_key: usize,
        queries: &Range<usize>,
    ) {
        let to = self.to;
        let Scratch { rows_key, ds_tile, .. } = scratch;
        let keys = first_key..task.keys.len().min(first_key + TILE);
        let mut first = queries.start;
        // a tile may span blocks, all of which start at whole register tiles
        while first < queries.end {
            let index = to.block_index[(first / to.q_rows * to.batch_and_kv_heads.0 + task.batch)
                * to.batch_and_kv_heads.1
                + task.kv_head];
            let block = &to.blocks[index];
            let end = block.rows.end.min(queries.end);
            let rows = padded(end - first);
            let at = block.lane(head % to.group, first - block.rows.start);
            let into = &mut lock(&to.sums[index])[at * to.width..(at + rows) * to.width];
            let of = DqUpdate {
                first_row: first - queries.start,
                panel: rows_key,
                keys: keys.clone(),
                into,
                width: to.width,
            };
            ds_tile.accumulate_dq(to.token, of);
            first = end;
        }
    }

    /// Releases the tasks behind this one after its last tile, and adds its sums over all queries
    /// to dbias. Returns false on a stop.
    pub(super) fn finish(
        &self,
        scratch: &Scratch<A>,
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
