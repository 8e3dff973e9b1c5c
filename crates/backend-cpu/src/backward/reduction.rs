//! Accumulators of dq and dbias of the fused backward: shared by threads, or those of one plane.
//! Partition of the fused backward into tasks: whole planes, or split keys.

use std::{
    ops::{Range, RangeInclusive},
    sync::Mutex,
};

use annulus_core::{Rows, Spec};

use crate::{
    simd::dispatch::Real,
    threads::{
        ordered_reduction::{TaskSlot, lock},
        team::Ticker,
    },
    tile::{
        aligned::Aligned,
        ds_tile::DqUpdate,
        geometry::Geometry,
        pack::{PanelView, padded},
        tile_mask::TILE,
    },
    workspace::{bias_gradient::BiasGradient, query_block::QueryBlock, scratch::ThreadScratch},
};

/// Minimum tasks per thread where planes are split, if there are enough tiles of keys: one long and
/// one short task under a causal mask balance each other.
const MIN_TASKS_PER_THREAD: usize = 2;

/// Partition of the (batch row, KV head) planes into tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvSplit {
    /// Planes that are one task each.
    pub(crate) whole: usize,
    /// All planes.
    pub(crate) planes: usize,
    /// Keys of the block.
    pub(crate) len: usize,
    /// Tasks of each split plane. They hold runs of key tiles of equal length, or one tile more in
    /// the first tasks.
    pub(crate) tasks: usize,
    /// True if planes share elements of dbias, so that all tasks form one chain.
    pub(crate) chained: bool,
}

impl KvSplit {
    /// Partitions a block of `len` keys.
    pub(crate) fn new(spec: &Spec, geometry: &Geometry, threads: usize, len: usize) -> Self {
        // a block without keys has no tasks, however many planes there are
        let planes = if len == 0 { 0 } else { spec.dims.batch * spec.dims.kv_heads };
        let [batches, heads, _, bias_keys] = spec.pair_bias().unwrap_or([0; 4]);
        let chained = batches == 1 && spec.dims.batch > 1 || heads == 1 && spec.dims.kv_heads > 1;
        let whole = if chained { 0 } else { planes / threads * threads };
        let mut tasks = len.div_ceil(geometry.key_block());
        // a dbias summed over heads and keys has its terms in task order: tasks must not depend on
        // the thread count
        let fixed = heads == 1 && bias_keys == 1;
        if !fixed && threads > 1 && planes > whole {
            // the same number of tasks for each thread balances tasks of equal length; under a
            // causal mask, early long tasks and late short ones balance each other
            let rest = planes - whole;
            let even =
                (1..=threads).find(|count| (rest * count).is_multiple_of(threads)).unwrap_or(1);
            tasks =
                tasks.max((MIN_TASKS_PER_THREAD * threads).div_ceil(rest)).next_multiple_of(even);
        }
        Self { whole, planes, len, tasks: tasks.min(len.div_ceil(TILE)), chained }
    }

    /// Iterates over the tasks: number, plane and keys.
    pub(crate) fn tasks(self) -> impl Iterator<Item = (usize, usize, Range<usize>)> + Send {
        let Self { whole, planes, len, tasks, .. } = self;
        let split = move |plane| {
            (0..tasks).map(move |task| (plane, self.first_key(task)..self.first_key(task + 1)))
        };
        let tasks =
            (0..whole).map(move |plane| (plane, 0..len)).chain((whole..planes).flat_map(split));
        tasks.enumerate().map(|(task, (plane, keys))| (task, plane, keys))
    }

    /// Returns the first key of a task of a split plane.
    fn first_key(self, task: usize) -> usize {
        let tiles = self.len.div_ceil(TILE);
        self.len.min((task * (tiles / self.tasks) + task.min(tiles % self.tasks)) * TILE)
    }

    /// Returns the number of the first task of a split plane.
    pub(crate) const fn first_task(self, plane: usize) -> usize {
        self.whole + (plane - self.whole) * self.tasks
    }
}

/// Task: a range of keys of one (batch row, KV head) plane.
pub(crate) struct KeyTask {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) keys: Range<usize>,
}

/// Accumulators of dq and dbias that a task of the fused backward adds to.
pub(crate) trait DqSums<A> {
    /// Starts the first step of `steps`, and waits until the tasks before this one have passed the
    /// last. Returns false on a stop.
    fn wait_for_steps(&mut self, steps: RangeInclusive<usize>, ticker: &mut Ticker<'_>) -> bool;

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
    pub(super) geometry: &'a Geometry,
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
    fn wait_for_steps(&mut self, steps: RangeInclusive<usize>, ticker: &mut Ticker<'_>) -> bool {
        self.slot.wait_for_steps(steps, ticker)
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
        let panel = self.keys_in_place.unwrap_or_else(|| scratch.rows_key.view());
        let of = TileRows { geometry: to.geometry, head, queries, panel, task, first_key };
        let mut first = queries.start;
        // a tile may span blocks, all of which start at whole register tiles
        while first < queries.end {
            let index = block_of(to.geometry, to.block_index, to.q_rows, task, first);
            first = of.accumulate(scratch, &to.blocks[index], first, &mut lock(&to.sums[index]));
        }
    }

    fn bias(&self) -> Option<&BiasGradient<A>> {
        self.to.bias
    }
}

/// Returns the index of the block of a task's plane that holds query row `row`; see
/// [`crate::workspace::state::PassState::block_index`].
fn block_of(
    geometry: &Geometry,
    block_index: &[usize],
    q_rows: usize,
    task: &KeyTask,
    row: usize,
) -> usize {
    let plane = row / q_rows * geometry.dims.batch + task.batch;
    block_index[plane * geometry.dims.kv_heads + task.kv_head]
}

/// A tile of queries of one head, and the tile of the task's keys that starts at key `first_key`.
struct TileRows<'a, A> {
    geometry: &'a Geometry,
    head: usize,
    queries: &'a Range<usize>,
    /// The task's keys.
    panel: PanelView<'a, A>,
    task: &'a KeyTask,
    first_key: usize,
}

impl<A: Real> TileRows<'_, A> {
    /// Adds dS·K to `sums`, dq of `block`, for its queries from `first` on. Returns their end.
    fn accumulate(
        &self,
        scratch: &ThreadScratch<A>,
        block: &QueryBlock<A>,
        first: usize,
        sums: &mut [A],
    ) -> usize {
        let Self { geometry, head, queries, panel, task, first_key } = *self;
        let rows = first..block.rows.end.min(queries.end);
        let at = block.lane(head % geometry.dims.group(), first - block.rows.start);
        let width = geometry.padded_head_dim();
        let of = DqUpdate {
            first_row: rows.start - queries.start,
            panel,
            keys: first_key..task.keys.len().min(first_key + TILE),
            into: &mut sums[at * width..(at + padded(rows.len())) * width],
            width,
        };
        scratch.ds_tile.accumulate_dq(geometry.token, of);
        rows.end
    }
}

/// dq of one (batch row, KV head) plane in the reproducible order. One thread computes all tasks of
/// the plane.
pub(super) struct PlaneLeaves<'a, A> {
    pub(super) geometry: &'a Geometry,
    /// Number of the plane's first block.
    pub(super) first_block: usize,
    /// Blocks of the plane.
    pub(super) blocks: &'a mut [QueryBlock<A>],
    /// See [`crate::workspace::state::PassState::block_index`].
    pub(super) block_index: &'a [usize],
    /// Rows of every block but the last.
    pub(super) q_rows: usize,
}

impl<A: Real> DqSums<A> for PlaneLeaves<'_, A> {
    /// Returns true: tasks of other threads add to other planes.
    fn wait_for_steps(&mut self, _: RangeInclusive<usize>, _: &mut Ticker<'_>) -> bool {
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
        let geometry = self.geometry;
        let panel = scratch.rows_key.view();
        let of = TileRows { geometry, head, queries, panel, task, first_key };
        let mut first = queries.start;
        while first < queries.end {
            let index = block_of(geometry, self.block_index, self.q_rows, task, first);
            let block = &mut self.blocks[index - self.first_block];
            block.fill_dq_leaf();
            let mut sums = std::mem::take(&mut block.partial.sums);
            first = of.accumulate(scratch, block, first, &mut sums);
            block.partial.sums = sums;
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

#[cfg(test)]
mod tests {
    use annulus_core::{DType, Dims};

    use super::*;
    use crate::simd::{dispatch::IsaToken, isa::Isa};

    #[test]
    fn tasks_give_all_threads_about_equal_work() {
        let token = IsaToken::new(Isa::Portable).unwrap();
        for (planes, threads, len) in [(1, 2, 2048), (1, 7, 2048), (3, 4, 777), (8, 3, 64)] {
            let spec = Spec::new(Dims::new(1, len, planes, 64), DType::F32);
            let split = KvSplit::new(&spec, &Geometry::new::<f32>(&spec, token), threads, len);
            let mut tiles = vec![0; threads];
            for (_, _, keys) in split.tasks() {
                // the least loaded thread takes the next task
                *tiles.iter_mut().min().unwrap() += keys.len().div_ceil(TILE);
            }
            let most = tiles.iter().max().copied().unwrap();
            let even = tiles.iter().sum::<usize>().div_ceil(threads);
            assert!(most <= even + 1, "{planes} planes, {threads} threads: {tiles:?}");
        }
    }

    #[test]
    fn a_bias_shared_by_heads_and_keys_is_split_alike_for_any_thread_count() {
        let token = IsaToken::new(Isa::Portable).unwrap();
        let spec =
            Spec { bias: Some([1, 1, 900, 1]), ..Spec::new(Dims::new(1, 900, 2, 64), DType::F32) };
        let geometry = Geometry::new::<f32>(&spec, token);
        let [one, many] = [1, 7].map(|threads| KvSplit::new(&spec, &geometry, threads, 900));
        assert!(one == many && one.chained && one.whole == 0);
    }
}
