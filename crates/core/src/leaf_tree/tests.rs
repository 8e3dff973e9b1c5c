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
            current = if at.slot_is_left { merge(stored, current) } else { merge(current, stored) };
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
            let owner = |leaf: usize| if is_strided { leaf % ranks } else { leaf * ranks / all.len() };
            let shard = |rank| -> Runs {
                let own = (0..len).filter(|row| owner(row / ROWS as usize) == rank);
                own.map(|row| row as i64).collect()
            };
            for rank in 0..ranks {
                let mut arrivals = Vec::new();
                for step in 0..ranks {
                    let rows = shard((rank + ranks - step) % ranks);
                    leaves_of(&rows, &RowSet::all(rows.len()), ROWS, |leaf| arrivals.push(leaf));
                }
                let merges = LeafMerges::of_arrivals(arrivals).unwrap();
                prop_assert_eq!(&execute(&merges), &want, "{} rank {}", is_strided, rank);
            }
        }
    }
}

#[test]
fn merges_of_another_order_of_terms_differ() {
    // both mistakes that the tests above must find: operands exchanged, and merges in the order of
    // arrival
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
    // rank 3 of 8 on a contiguous ring: its own 8 leaves, then those of the ranks before it. While
    // leaves 32 to 39 are folded, 0..32, 48..64 and 40..48 wait, and three results within them
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
