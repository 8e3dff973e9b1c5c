//! The reproducible order: leaves of key rows, and the binary tree that merges their partial
//! results.
//!
//! Rows are divided into leaves by row number: leaf i holds the rows i·L to (i + 1)·L − 1. A leaf
//! is folded from an empty partial result, in ascending order of its rows. Node (level, i) of the
//! tree covers the leaves i·2^level to (i + 1)·2^level − 1, and merges node (level − 1, 2·i), the
//! left operand, with node (level − 1, 2·i + 1), the right one. An empty operand returns the other
//! unchanged. The grouping of the terms therefore depends neither on the order in which leaves
//! arrive at a rank nor on leaves that do not arrive because they are masked.
//!
//! [`LeafMerges`] is the part of the tree that one rank executes, as data: after each leaf that
//! arrives, the merges that have become possible. It is derived when a plan is made, so the memory
//! of the partial results that wait for a sibling is known before a pass runs.
//!
//! ```text
//! arrivals 2 3 0 1     leaf 2: store in slot 0
//!                      leaf 3: merge slot 0 (left) with it; store in slot 0     (level 1, 1)
//!                      leaf 0: store in slot 1
//!                      leaf 1: merge slot 1 (left); merge slot 0 (right)        the root
//! ```

use std::{collections::HashMap, ops::Range};

use crate::{Dims, Error, Result, RowSet, Runs, Spec, memory};

/// Rows of a leaf of [`Spec::leaf_rows`] in the public interface.
///
/// A multiple of the KV tile of every backend (64 on the CPU, at most 128 on a GPU). Larger leaves
/// need fewer merges; smaller ones divide a sequence more evenly between ranks.
pub const LEAF_ROWS: u64 = 256;

/// Merge of the current partial result with a stored one. The slot is free afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeafMerge {
    /// Slot of the stored partial result.
    pub slot: usize,
    /// True if the stored partial result is the left operand.
    pub slot_is_left: bool,
}

/// A leaf that arrives, and what follows when it is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeafStep {
    /// Number of the leaf.
    pub leaf: u64,
    /// Its merges, as a range of the list of all merges.
    merges: Range<usize>,
    /// Slot that receives the result, unless it is the root.
    pub store: Option<usize>,
}

/// Merges of one rank, in the order in which leaves arrive.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeafMerges {
    steps: Vec<LeafStep>,
    merges: Vec<LeafMerge>,
    slots: usize,
}

impl LeafMerges {
    /// Derives the merges for leaves that arrive in this order. Each leaf arrives once, but may be
    /// repeated by the arrival right after it, if it arrives in pieces.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Internal`] for a leaf that arrives again later.
    pub fn of_arrivals(arrivals: impl IntoIterator<Item = u64>) -> Result<Self> {
        const WHAT: &str = "the leaves of a plan";
        let mut order: Vec<u64> = Vec::new();
        for leaf in arrivals {
            if order.last() != Some(&leaf) {
                memory::reserve(WHAT, &mut order, 1)?;
                order.push(leaf);
            }
        }
        let mut present: Vec<u64> = memory::list(WHAT, order.len())?;
        present.extend(&order);
        present.sort_unstable();
        if let Some(twice) = present.windows(2).find(|two| two[0] == two[1]) {
            return Err(Error::internal(format!("leaf {} arrives twice", twice[0])));
        }
        let mut builder = Builder { present, ..Builder::default() };
        let mut merges = Self::default();
        memory::reserve(WHAT, &mut merges.steps, order.len())?;
        for leaf in order {
            let step = builder.arrive(leaf, &mut merges.merges);
            merges.steps.push(step);
        }
        merges.slots = builder.slots;
        Ok(merges)
    }

    /// Returns the same merges for leaves of other numbers, in the order of their arrival: a wrong
    /// tree, from which a test learns that wrong merges are found.
    #[doc(hidden)]
    pub fn with_leaves(mut self, leaves: impl IntoIterator<Item = u64>) -> Self {
        self.steps.iter_mut().zip(leaves).for_each(|(step, leaf)| step.leaf = leaf);
        self
    }

    /// Returns the leaves in the order of their arrival.
    pub fn steps(&self) -> &[LeafStep] {
        &self.steps
    }

    /// Returns the merges of the leaf number `step`, in order.
    pub fn merges(&self, step: usize) -> &[LeafMerge] {
        self.steps.get(step).map_or(&[], |step| &self.merges[step.merges.clone()])
    }

    /// Returns the number of slots: the most partial results that wait for a sibling at one time.
    pub const fn slots(&self) -> usize {
        self.slots
    }
}

/// State of the derivation.
#[derive(Default)]
struct Builder {
    /// Leaves that arrive, ascending.
    present: Vec<u64>,
    /// Slot of each complete node whose sibling is not complete.
    stored: HashMap<(u32, u64), usize>,
    free: Vec<usize>,
    slots: usize,
}

impl Builder {
    fn arrive(&mut self, leaf: u64, merges: &mut Vec<LeafMerge>) -> LeafStep {
        let first = merges.len();
        let height = self.present.last().map_or(0, |last| u64::BITS - last.leading_zeros());
        let mut level = 0;
        let mut store = None;
        while level < height {
            let node = leaf >> level;
            let sibling = node ^ 1;
            if let Some(slot) = self.stored.remove(&(level, sibling)) {
                merges.push(LeafMerge { slot, slot_is_left: sibling < node });
                self.free.push(slot);
            } else if self.arrives(level, sibling) {
                store = Some(self.take_slot());
                break;
            }
            level += 1;
        }
        if let Some(slot) = store {
            self.stored.insert((level, leaf >> level), slot);
        }
        LeafStep { leaf, merges: first..merges.len(), store }
    }

    /// Returns true if a leaf of the node arrives, earlier or later.
    fn arrives(&self, level: u32, node: u64) -> bool {
        let first = self.present.partition_point(|&leaf| leaf >> level < node);
        self.present.get(first).is_some_and(|&leaf| leaf >> level == node)
    }

    fn take_slot(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.slots += 1;
            self.slots - 1
        })
    }
}

/// Leaves that arrive at one rank, for its backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankLeaves {
    /// Rows of a leaf.
    pub rows: u64,
    /// Merges of this rank's queries, over leaves of keys.
    pub keys: LeafMerges,
    /// Merges of this rank's keys in a backward pass, over leaves of queries. Each arrives in one
    /// block, of which every KV tile of row numbers is whole.
    pub queries: LeafMerges,
    /// True if queries are sent to other ranks in a backward pass.
    pub sends_queries: bool,
}

impl RankLeaves {
    /// Returns the number of slots and the bytes of the partial results in them, for `queries`
    /// local queries: value_dim accumulators, maximum and sum, and for an output that is not
    /// normalised the ties. With a backward pass dq uses the same memory, and the larger dim
    /// counts. A backend may round dims and rows up.
    pub fn bytes(&self, spec: &Spec, queries: u64, backward: bool) -> u64 {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = spec.dims;
        let dim = if backward { head_dim.max(value_dim) } else { value_dim };
        let numbers = dim + 2 + usize::from(!spec.normalize);
        (self.keys.slots() * batch * q_heads * numbers * spec.dtype.accumulator().bytes()) as u64
            * queries
    }

    /// As [`RankLeaves::bytes`], of dK and dV of `keys` local keys.
    pub fn gradient_bytes(&self, spec: &Spec, keys: u64) -> u64 {
        self.queries.slots() as u64 * keys * spec.gradient_row_layout().bytes()
    }
}

/// Calls `found` with the leaf of each group of local rows in `set`, in local order. `rows` are
/// the rows of a shard that consists of whole leaves.
pub fn leaves_of(rows: &Runs, set: &RowSet, leaf_rows: u64, mut found: impl FnMut(u64)) {
    let mut runs = rows.runs().iter();
    let mut run = runs.next();
    // local index of the first row of `run`
    let mut before = 0;
    for range in set.ranges() {
        for local in range.start / leaf_rows..range.end.div_ceil(leaf_rows) {
            let first = local * leaf_rows;
            while let Some(current) = run.filter(|run| first >= before + run.count) {
                before += current.count;
                run = runs.next();
            }
            if let Some(run) = run {
                found(run.at(first - before).unsigned_abs() / leaf_rows);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A partial result as text, which shows the grouping and the order of its terms.
    type Term = Option<String>;

    fn merge(left: Term, right: Term) -> Term {
        match (left, right) {
            (Some(left), Some(right)) => Some(format!("({left} {right})")),
            (left, right) => left.or(right),
        }
    }

    /// Executes the merges on terms, one per leaf.
    fn execute(merges: &LeafMerges) -> Term {
        let mut slots: Vec<Term> = vec![None; merges.slots()];
        let mut current = None;
        for (number, step) in merges.steps().iter().enumerate() {
            current = Some(step.leaf.to_string());
            for at in merges.merges(number) {
                let stored = slots[at.slot].take();
                assert!(stored.is_some(), "slot {} is empty", at.slot);
                current =
                    if at.slot_is_left { merge(stored, current) } else { merge(current, stored) };
            }
            if let Some(slot) = step.store {
                assert!(slots[slot].is_none(), "slot {slot} is in use");
                slots[slot] = current.take();
            }
        }
        assert!(slots.iter().all(Option::is_none), "{slots:?}");
        current
    }

    /// Evaluates the definition: the node of `level` that covers the leaves from `node`·2^level on.
    fn node(present: &BTreeSet<u64>, level: u32, index: u64) -> Term {
        if level == 0 {
            return present.contains(&index).then(|| index.to_string());
        }
        merge(node(present, level - 1, 2 * index), node(present, level - 1, 2 * index + 1))
    }

    proptest! {
        #[test]
        fn any_order_of_arrival_executes_the_same_tree(
            leaves in prop::collection::btree_set(0u64..70, 0..40),
            seed in any::<u64>(),
        ) {
            let want = node(&leaves, 7, 0);
            let mut order: Vec<u64> = leaves.iter().copied().collect();
            prop_assert_eq!(&execute(&LeafMerges::of_arrivals(order.clone()).unwrap()), &want);
            order.sort_unstable_by_key(|leaf| (leaf ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            prop_assert_eq!(&execute(&LeafMerges::of_arrivals(order).unwrap()), &want);
        }

        #[test]
        fn shards_of_leaves_execute_the_same_tree(
            leaves in 0usize..60,
            rest in 0usize..8,
            ranks in 1usize..17,
        ) {
            const ROWS: u64 = 8;
            let len = leaves * ROWS as usize + rest;
            let all: BTreeSet<u64> = (0..(len as u64).div_ceil(ROWS)).collect();
            let want = node(&all, 6, 0);
            // of contiguous and of strided leaves
            for is_strided in [false, true] {
                let chunk = |leaf: usize| leaf * ranks / all.len();
                let owner = |leaf: usize| if is_strided { leaf % ranks } else { chunk(leaf) };
                let shard = |rank| -> Runs {
                    let own = (0..len).filter(|row| owner(row / ROWS as usize) == rank);
                    own.map(|row| row as i64).collect()
                };
                for rank in 0..ranks {
                    let mut arrivals = Vec::new();
                    for step in 0..ranks {
                        let rows = shard((rank + ranks - step) % ranks);
                        let whole = RowSet::all(rows.len());
                        leaves_of(&rows, &whole, ROWS, |leaf| arrivals.push(leaf));
                    }
                    let merges = LeafMerges::of_arrivals(arrivals).unwrap();
                    prop_assert_eq!(&execute(&merges), &want, "{} rank {}", is_strided, rank);
                }
            }
        }
    }

    #[test]
    fn merges_of_another_order_of_terms_differ() {
        // both mistakes that the tests above must find: operands exchanged, and merges in the order
        // of arrival
        let leaves: BTreeSet<u64> = [0, 1, 2, 3].into();
        let want = node(&leaves, 2, 0);
        let mut swapped = LeafMerges::of_arrivals([2, 3, 0, 1]).unwrap();
        assert_eq!(execute(&swapped), want);
        swapped.merges[0].slot_is_left = false;
        assert_ne!(execute(&swapped), want);
        let by_arrival =
            [2u64, 3, 0, 1].iter().fold(None, |all, leaf| merge(all, Some(leaf.to_string())));
        assert_ne!(by_arrival, want);
    }

    #[test]
    fn slots_are_reused_and_few() {
        let ascending = LeafMerges::of_arrivals(0..1000).unwrap();
        assert_eq!(ascending.slots(), 9);
        // rank 3 of 8 on a contiguous ring: its own 8 leaves, then those of the ranks before it.
        // While leaves 32 to 39 are folded, 0..32, 48..64 and 40..48 wait, and three results within
        // them
        let ranks = (0..8).flat_map(|step| (0..8).map(move |leaf| (11 - step) % 8 * 8 + leaf));
        assert_eq!(LeafMerges::of_arrivals(ranks).unwrap().slots(), 6);
        assert_eq!(LeafMerges::of_arrivals([]).unwrap(), LeafMerges::default());
        assert_eq!(LeafMerges::of_arrivals([5]).unwrap().slots(), 0);
    }

    #[test]
    fn a_leaf_in_pieces_is_one_leaf_and_a_second_arrival_is_an_error() {
        let pieces = LeafMerges::of_arrivals([1, 1, 0]).unwrap();
        assert_eq!(execute(&pieces).unwrap(), "(0 1)");
        assert!(LeafMerges::of_arrivals([1, 0, 1]).is_err());
    }

    #[test]
    fn leaves_follow_from_local_rows() {
        // of a zigzag layout over two ranks: leaves 0, 5 and 6
        let rows: Runs = (0..8).chain(40..50).collect();
        let leaves = |set: RowSet| {
            let mut leaves = Vec::new();
            leaves_of(&rows, &set, 8, |leaf| leaves.push(leaf));
            leaves
        };
        assert_eq!(leaves(RowSet::all(18)), [0, 5, 6]);
        assert_eq!(leaves([3..5, 9..10, 12..13].into_iter().collect()), [0, 5, 5]);
        assert_eq!(leaves(std::iter::once(17..18).collect()), [6]);
    }
}
