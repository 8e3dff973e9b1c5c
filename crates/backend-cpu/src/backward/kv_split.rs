//! Partition of the fused backward into tasks: whole planes, or split keys.

use std::ops::Range;

use annulus_core::Spec;

use crate::tile::{geometry::Geometry, tile_mask::TILE};

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
        let [batches, heads, _, bias_keys] = spec.bias.unwrap_or([0; 4]);
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

#[cfg(test)]
mod tests {
    use annulus_core::{DType, Dims};

    use super::*;
    use crate::simd::{dispatch::IsaToken, isa::Isa};

    #[test]
    fn tasks_cover_all_keys_once_and_evenly() {
        let token = IsaToken::new(Isa::Portable).unwrap();
        for (planes, threads, len) in [
            (1, 2, 2048),
            (1, 7, 2048),
            (3, 2, 1000),
            (3, 4, 777),
            (5, 1, 130),
            (8, 3, 64),
            (2, 3, 1),
            (1, 2, 0),
        ] {
            let spec = Spec::new(Dims::new(1, len, planes, 64), DType::F32);
            let geometry = Geometry::new::<f32>(&spec, token);
            let split = KvSplit::new(&spec, &geometry, threads, len);
            let mut ends = vec![0; planes];
            let mut tiles = vec![0; threads];
            for (number, (task, plane, keys)) in split.tasks().enumerate() {
                assert_eq!((number, ends[plane]), (task, keys.start), "{planes} planes");
                assert!(
                    plane < split.whole || keys.len() <= geometry.key_block() && !keys.is_empty()
                );
                ends[plane] = keys.end;
                // the least loaded thread takes the next task
                if let Some(least) = tiles.iter_mut().min() {
                    *least += keys.len().div_ceil(TILE);
                }
            }
            assert!(ends.iter().all(|&end| end == len), "{ends:?}");
            let all = tiles.iter().sum::<usize>();
            let most = tiles.iter().max().copied().unwrap();
            assert!(
                most <= all.div_ceil(threads) + 1,
                "{planes} planes, {threads} threads: {tiles:?}"
            );
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
