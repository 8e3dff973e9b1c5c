//! Forward pass over one block of keys in the reproducible order.
//!
//! ```text
//! for each task (batch row, KV head, range of queries):                      parallel
//!     for each leaf of the block:
//!         close the leaf before: merge it with the partial results that wait for it, or store it
//!         for each tile of 64 row numbers of the leaf, ascending:
//!             as in `tiles.rs`, into the partial result of the leaf
//! ```
//! The result of a row does not depend on the other rows of its strip or task: every operation on a
//! lane depends on that lane alone, and a tile that is empty for the strip changes no bit of a
//! lane. Probabilities are not rounded to bf16 in this order: `VDPBF16PS` adds pairs of rows of a
//! block, so that a result would depend on the blocks.
//!
//! # Source
//! The merge of partial results: Milakov and Gimelshein 2018, section 3.1.

use annulus_core::Tick;

use crate::{
    forward::query_pass::ForwardQueryPass,
    simd::dispatch::Real,
    threads::team::{Team, Ticker},
    tile::input::{Acc, TileInput},
    workspace::{
        leaves::ArrivingKeys,
        query_block::{QueryBlock, QueryTask},
        scratch::ThreadScratch,
        state::{PassState, Summed},
    },
};

impl<E: TileInput<Accumulator: Summed>> ForwardQueryPass<'_, E> {
    /// Attends to the block leaf by leaf, with all queries.
    pub(crate) fn attend_leaves(
        &self,
        team: &Team,
        scratch: &mut [ThreadScratch<Acc<E>>],
        blocks: &mut [QueryBlock<Acc<E>>],
        (task_rows, arriving): (usize, ArrivingKeys<'_>),
        tick: Tick<'_>,
    ) {
        let tasks = blocks.chunk_by_mut(QueryTask::same_task(task_rows)).filter_map(QueryTask::new);
        team.run(scratch, tasks, Some(tick), |scratch, mut task, ticker| {
            self.attend_task_leaves(scratch, &mut task, arriving, ticker);
        });
    }

    /// Attends to all leaves of the block for one task.
    fn attend_task_leaves(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        task: &mut QueryTask<'_, Acc<E>>,
        ArrivingKeys { merges, arrivals }: ArrivingKeys<'_>,
        ticker: &mut Ticker<'_>,
    ) {
        scratch.filled.fill(false);
        scratch.mask_cache.rewind();
        for leaf in arrivals.leaves() {
            if let Some(step) = leaf.closes {
                for block in task.blocks() {
                    block.close_forward_leaf(self.geometry, merges, step);
                }
            }
            for heads in self.heads_with_one_mask(task.kv_head) {
                self.update_task_tile(scratch, task.batch, heads.start, &task.rows);
                let whole = std::mem::take(&mut scratch.task_tile);
                if self.visibility.may_attend(&whole, &leaf.keys) {
                    for keys in arrivals.tiles(leaf) {
                        if ticker.should_stop() {
                            break;
                        }
                        if self.visibility.may_attend(&whole, keys) {
                            task.blocks().iter_mut().for_each(QueryBlock::fill_leaf);
                            let next = self.adjacent_tile(task.kv_head, keys);
                            self.attend_kv_tile(scratch, task, &heads, (keys, next), None);
                        }
                    }
                }
                scratch.task_tile = whole;
            }
        }
    }
}

/// Closes the last leaf, so that the root of the tree is the result of every query. Does nothing if
/// the order is not reproducible.
pub(crate) fn finish_leaves<A: Real>(team: &Team, state: &mut PassState<A>, tick: Tick<'_>) {
    let PassState { shard, geometry, blocks, scratch, arrivals, .. } = state;
    let Some(plan) = &shard.leaves else { return };
    team.run(scratch, blocks.iter_mut(), Some(tick), |_, block, _| {
        if let Some(step) = arrivals.open() {
            block.close_forward_leaf(geometry, &plan.keys, step);
        }
        block.finish_forward_leaves();
    });
}
