//! Partial results of leaves, in the reproducible order ([`annulus_core::LeafMerges`]).
//!
//! The accumulators and statistics of a query block are the partial result of the current leaf.
//! Results that wait for a sibling lie in slots, and are exchanged with the current one without a
//! copy. A block without a visible key in a leaf is neither reset nor merged.
//!
//! Partial dK and dV of leaves of queries, and dbias summed over queries, in the reproducible
//! order.
//!
//! Each task over keys has partial results of its own, in the layout of its sums in scratch. A task
//! computes all leaves of a block one after another, so that its packed keys and partial results
//! stay in a near cache, and no thread waits for another.

use std::ops::Range;

use annulus_core::{Error, LeafMerges, RankLeaves, RankShard, Result, Rows, Spec, memory};

use crate::{
    simd::dispatch::Real,
    tile::{
        aligned::{Aligned, list_bytes},
        geometry::Geometry,
        softmax::{Partial, PartialLens},
        tile_mask::TILE,
    },
};

/// Partial result of one query block.
#[derive(Debug)]
pub(crate) struct LeafSlot<A> {
    pub(crate) partial: Partial<Aligned<A>>,
    /// False if no key was visible to the block; the lists are then unspecified.
    pub(crate) filled: bool,
}

/// Partial results of one query block.
#[derive(Debug)]
pub(crate) struct BlockLeaves<A> {
    pub(crate) slots: Vec<LeafSlot<A>>,
    /// [`LeafSlot::filled`] of the current partial result.
    pub(crate) filled: bool,
}

impl<A: Real> BlockLeaves<A> {
    /// Allocates `slots` slots of lists of these lengths.
    pub(crate) fn new(slots: usize, lens: PartialLens) -> Result<Self> {
        let mut all = memory::list("the partial results of leaves", slots)?;
        for _ in 0..slots {
            all.push(LeafSlot { partial: Partial::new(lens)?, filled: false });
        }
        Ok(Self { slots: all, filled: false })
    }

    /// Starts a pass.
    pub(crate) const fn begin(&mut self) {
        self.filled = false;
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let of_slots = self.slots.iter().map(|slot| slot.partial.bytes());
        list_bytes(&self.slots) + of_slots.sum::<usize>()
    }
}

/// Leaf, or piece of a leaf, of a block of keys.
#[derive(Debug)]
pub(crate) struct LeafKeys {
    /// Number of the step whose leaf is complete when this one starts.
    pub(crate) closes: Option<usize>,
    /// Keys of the block.
    pub(crate) keys: Range<usize>,
    /// KV tiles, as a range of [`LeafArrivals::tiles`].
    tiles: Range<usize>,
}

/// Leaves of one block of keys, and the leaf that the pass has reached.
#[derive(Debug, Default)]
pub(crate) struct LeafArrivals {
    /// Number of the step whose leaf is current.
    open: Option<usize>,
    leaves: Vec<LeafKeys>,
    /// Keys of the block with row numbers i·64 to (i + 1)·64 − 1, for each such i.
    tiles: Vec<Range<usize>>,
}

/// The leaves of keys of one block, and the merges of the pass that they arrive at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArrivingKeys<'a> {
    pub(crate) merges: &'a LeafMerges,
    pub(crate) arrivals: &'a LeafArrivals,
}

/// Part of a block of keys that a task over queries computes at once: a leaf, or the whole block if
/// the order is not reproducible.
pub(crate) struct BlockPart<'a> {
    /// Leaf that is complete when this one starts: the merges, and the number of its step.
    pub(crate) closes: Option<(&'a LeafMerges, usize)>,
    /// KV tiles of the leaf.
    pub(crate) tiles: Option<&'a [Range<usize>]>,
}

impl<'a> BlockPart<'a> {
    /// Iterates over the parts of a block.
    pub(crate) fn of(arriving: Option<ArrivingKeys<'a>>) -> impl Iterator<Item = Self> {
        let whole = arriving.is_none().then_some(Self { closes: None, tiles: None });
        let leaves = arriving.into_iter().flat_map(|ArrivingKeys { merges, arrivals }| {
            arrivals.leaves().iter().map(move |leaf| Self {
                closes: leaf.closes.map(|step| (merges, step)),
                tiles: Some(&arrivals.tiles[leaf.tiles.clone()]),
            })
        });
        whole.into_iter().chain(leaves)
    }
}

impl LeafArrivals {
    /// Starts a pass.
    pub(crate) const fn begin(&mut self) {
        self.open = None;
    }

    /// Returns the number of the step whose leaf is current.
    pub(crate) const fn open(&self) -> Option<usize> {
        self.open
    }

    /// Returns the leaves of the block.
    pub(crate) fn leaves(&self) -> &[LeafKeys] {
        &self.leaves
    }

    /// Divides the next block of keys into leaves, if the order is reproducible.
    pub(crate) fn arrive<'a>(
        &'a mut self,
        shard: &'a RankShard,
        rows: &Rows,
    ) -> Result<Option<ArrivingKeys<'a>>> {
        let Some(plan) = &shard.leaves else { return Ok(None) };
        self.refill(&plan.keys, plan.rows, rows)?;
        Ok(Some(ArrivingKeys { merges: &plan.keys, arrivals: self }))
    }

    /// Divides the next block of keys into leaves, and these into KV tiles, by row numbers. A block
    /// may lack masked rows, so that a tile of the block is not always a whole one.
    ///
    /// # Errors
    /// [`Error::Internal`] for a leaf that the plan does not expect here.
    fn refill(&mut self, merges: &LeafMerges, leaf_rows: u64, rows: &Rows) -> Result<()> {
        const WHAT: &str = "the leaves of a block";
        self.leaves.clear();
        self.tiles.clear();
        let tile_of = |&row: &u64| row / TILE as u64;
        let mut first = 0;
        for tile in rows.rows().chunk_by(|a, b| tile_of(a) == tile_of(b)) {
            let keys = first..first + tile.len();
            first = keys.end;
            memory::reserve(WHAT, &mut self.tiles, 1)?;
            self.tiles.push(keys.clone());
            let leaf = tile[0] / leaf_rows;
            let is = |step: usize| merges.steps().get(step).is_some_and(|at| at.leaf == leaf);
            if self.open.is_some_and(is)
                && let Some(last) = self.leaves.last_mut()
            {
                last.keys.end = keys.end;
                last.tiles.end += 1;
                continue;
            }
            // a block may go on with the leaf of the block before it
            let goes_on = self.open.is_some_and(is);
            let step = self.open.map_or(0, |open| open + usize::from(!goes_on));
            if !is(step) {
                return Err(Error::internal(format!("leaf {leaf} arrives out of order")));
            }
            let closes = self.open.filter(|_| !goes_on);
            self.open = Some(step);
            memory::reserve(WHAT, &mut self.leaves, 1)?;
            self.leaves.push(LeafKeys {
                closes,
                keys,
                tiles: self.tiles.len() - 1..self.tiles.len(),
            });
        }
        Ok(())
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        list_bytes(&self.leaves) + list_bytes(&self.tiles)
    }
}

/// Gives zeros the positive sign and all NaN the same bits. Terms of masked pairs, which a tile
/// may lack, can change the sign of a zero, and kernels differ in the NaN that they propagate.
pub(crate) fn unify<A: Real>(sums: &mut [A]) {
    let nan = A::from_f64(f64::NAN);
    for sum in sums {
        *sum = if sum.to_f64().is_nan() { nan } else { *sum + A::ZERO };
    }
}

/// Returns the leaves of a block of queries: number and range. Every tile of 64 row numbers is
/// whole, except the last of the sequence, so that the tiles of the kernels are the same ones.
///
/// # Errors
/// [`Error::Internal`] if a tile is not whole.
fn query_leaves(rows: &Rows, leaf_rows: u64) -> Result<impl Iterator<Item = (u64, Range<usize>)>> {
    let numbers = rows.rows();
    let is_tile = |tile: &[u64]| {
        tile[0].is_multiple_of(TILE as u64) && tile[tile.len() - 1] - tile[0] < TILE as u64
    };
    if !numbers.chunks(TILE).all(is_tile) {
        return Err(Error::internal("a block of queries without whole tiles"));
    }
    let mut first = 0;
    Ok(numbers.chunk_by(move |a, b| a / leaf_rows == b / leaf_rows).map(move |leaf| {
        first += leaf.len();
        (leaf[0] / leaf_rows, first - leaf.len()..first)
    }))
}

const WHAT: &str = "the partial gradients of leaves";

/// Sums of one task: dKᵀ and dVᵀ in strips, and dbias.
type TaskSums<'a, A> = [&'a mut [A]; 3];

/// Partial result of one task that waits for its sibling.
#[derive(Debug)]
struct KeySlot<A> {
    sums: [Aligned<A>; 3],
    /// False if no query attended to a key of the task; the sums are then unspecified.
    filled: bool,
}

/// Partial results of one task.
#[derive(Debug)]
pub(crate) struct TaskLeaves<A>(Vec<KeySlot<A>>);

impl<A: Real> TaskLeaves<A> {
    /// Merges the sums of the complete leaf of step number `step`, which are 0 unless `filled`,
    /// with those that wait for it, and stores them unless they are the root. Returns true if a
    /// root is left in the sums.
    pub(crate) fn close_leaf(
        &mut self,
        merges: &LeafMerges,
        step: usize,
        mut filled: bool,
        mut sums: TaskSums<'_, A>,
    ) -> bool {
        for at in merges.merges(step) {
            let slot = &mut self.0[at.slot];
            if !std::mem::take(&mut slot.filled) {
                continue;
            }
            for (sums, stored) in sums.iter_mut().zip(&slot.sums) {
                if filled {
                    sums.iter_mut().zip(&stored[..]).for_each(|(sum, &stored)| *sum += stored);
                } else {
                    sums[..stored.len()].copy_from_slice(stored);
                }
            }
            filled = true;
        }
        let Some(slot) = merges.steps().get(step).and_then(|step| step.store) else { return true };
        let slot = &mut self.0[slot];
        slot.filled = filled;
        if filled {
            for (sums, into) in sums.iter().zip(&mut slot.sums) {
                let len = into.len();
                into.copy_from_slice(&sums[..len]);
            }
        }
        false
    }
}

/// Partial results of all tasks; none for an order that is not reproducible.
#[derive(Debug, Default)]
pub(crate) struct KeyLeaves<A> {
    /// One per task: keys of the first (batch row, KV head) plane in ascending order, then those of
    /// the next plane.
    pub(crate) tasks: Vec<TaskLeaves<A>>,
    /// Number of the step that arrives next.
    pub(crate) next: usize,
    /// Steps of the current block, and their queries.
    pub(crate) steps: Vec<(usize, Range<usize>)>,
}

impl<A: Real> KeyLeaves<A> {
    /// Allocates the slots of `leaves` for tasks of `k_rows` of `keys` keys.
    pub(crate) fn new(
        spec: &Spec,
        geometry: &Geometry,
        leaves: &RankLeaves,
        keys: usize,
        k_rows: usize,
        bias_lanes: usize,
    ) -> Result<Self> {
        let planes = spec.dims.batch * spec.dims.kv_heads;
        let mut tasks = memory::list(WHAT, keys.div_ceil(k_rows) * planes)?;
        for _ in 0..planes {
            for first in (0..keys).step_by(k_rows) {
                let lanes = geometry.lanes(k_rows.min(keys - first));
                let mut slots = memory::list(WHAT, leaves.queries.slots())?;
                for _ in 0..leaves.queries.slots() {
                    let sums = [
                        Aligned::zeroed(lanes * geometry.head_rows())?,
                        Aligned::zeroed(lanes * geometry.value_rows())?,
                        Aligned::zeroed(bias_lanes)?,
                    ];
                    slots.push(KeySlot { sums, filled: false });
                }
                tasks.push(TaskLeaves(slots));
            }
        }
        Ok(Self { tasks, next: 0, steps: Vec::new() })
    }

    /// Divides the next block of queries into leaves.
    ///
    /// # Errors
    /// [`annulus_core::Error::Internal`] for a leaf that the plan does not expect here, and of
    /// [`query_leaves`].
    pub(crate) fn arrive(&mut self, plan: &RankLeaves, queries: &Rows) -> Result<()> {
        self.steps.clear();
        for (leaf, queries) in query_leaves(queries, plan.rows)? {
            let number = self.next;
            if plan.queries.steps().get(number).is_none_or(|step| step.leaf != leaf) {
                return Err(Error::internal(format!(
                    "leaf {leaf} of queries arrives out of order"
                )));
            }
            self.next += 1;
            memory::reserve("the leaves of a block", &mut self.steps, 1)?;
            self.steps.push((number, queries));
        }
        Ok(())
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let of_slot = |slot: &KeySlot<A>| slot.sums.iter().map(Aligned::bytes).sum::<usize>();
        let of_task =
            |task: &TaskLeaves<A>| list_bytes(&task.0) + task.0.iter().map(of_slot).sum::<usize>();
        list_bytes(&self.tasks)
            + list_bytes(&self.steps)
            + self.tasks.iter().map(of_task).sum::<usize>()
    }
}
