//! The checker is applied to all schedules, and is itself tested with mutated schedules. Schedules
//! and sums are compared with a derivation from pairs of rows.

mod balanced;
mod choice;
mod mutations;
mod naive;
mod proof;
mod sums;

use std::sync::Arc;

use crate::{Layout, Needs, RingShards, Route, needs::tests::samples};
use annulus_core::{Mask, RowSet, mask};

const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Zigzag, Layout::Striped];

/// Common masks with their names, for shards of `shard` rows.
fn masks(shard: u64) -> [(&'static str, Arc<dyn Mask>); 5] {
    [
        ("full", Arc::new(mask::Everything)),
        ("causal", Arc::new(mask::Causal::default())),
        (
            "causal window",
            mask::and(
                Arc::new(mask::Causal::default()),
                Arc::new(mask::Window::new(Some(shard), None)),
            ),
        ),
        ("symmetric window", Arc::new(mask::Window::new(Some(shard), Some(shard)))),
        ("chunked causal", Arc::new(mask::ChunkedCausal { size: shard * 3 / 2 + 1 })),
    ]
}

/// All routes of this many ranks, with nodes of every size.
fn routes(ranks: usize) -> impl Iterator<Item = Route> {
    let sizes = (1..=ranks).filter(move |&size| ranks.is_multiple_of(size));
    let of_nodes = sizes.flat_map(|node_ranks| {
        [
            Route::RailsUp { node_ranks },
            Route::RailsDown { node_ranks },
            Route::OncePerNode { node_ranks },
        ]
    });
    Route::ALL.into_iter().chain(of_nodes)
}

/// As [`routes`], with two nodes and with nodes of two ranks, if there are such.
fn some_routes(ranks: usize) -> impl Iterator<Item = Route> {
    routes(ranks).filter(move |route| match route.node_ranks() {
        Some(node_ranks) => ranks > 2 && (node_ranks == 2 || 2 * node_ranks == ranks),
        None => true,
    })
}

fn needs(mask: &dyn Mask, shards: &RingShards) -> Needs {
    Needs::of_queries(mask, 1, 1, shards)
}

/// A random subset of rows for every (user, owner), equal in every run.
fn random_needs(ranks: usize, seed: u64) -> Needs {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let held: Vec<u64> = (0..ranks).map(|_| random(5)).collect();
    let mut subset = |count: u64| {
        let share = random(3);
        (0..count).filter(|_| random(3) <= share).map(|row| row..row + 1).collect::<RowSet>()
    };
    let rows = (0..ranks).map(|_| held.iter().map(|&count| subset(count)).collect()).collect();
    Needs { held, rows }
}
