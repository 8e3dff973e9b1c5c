//! Partial dK and dV of leaves of queries, and dbias summed over queries, in the reproducible
//! order.
//!
//! Each task over keys has partial results of its own, in the layout of its sums in scratch. A task
//! computes all leaves of a block one after another, so that its packed keys and partial results
//! stay in a near cache, and no thread waits for another.

use std::ops::Range;

use annulus_core::{Error, LeafMerges, RankLeaves, Result, Rows, Spec, memory};

use crate::{
    simd::dispatch::Real,
    tile::{
        aligned::{Aligned, list_bytes},
        geometry::Geometry,
    },
    workspace::leaves::query_leaves,
};

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

/// Partial results of all tasks.
#[derive(Debug)]
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
    /// Returns none, for an order that is not reproducible.
    pub(crate) const fn none() -> Self {
        Self { tasks: Vec::new(), next: 0, steps: Vec::new() }
    }

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
