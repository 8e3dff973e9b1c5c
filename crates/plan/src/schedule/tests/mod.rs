//! The checker is applied to all schedules, and is itself tested with mutated schedules. Schedules
//! and sums are compared with a derivation from pairs of rows.
//!
//! Every schedule that is built passes the checker: each number of ranks up to 32 and some up to
//! 64, any needs and every route, with and without gradients.

mod balanced;
mod choice;
mod mutations;
mod naive;
mod sums;

use std::sync::Arc;

use annulus_core::{Mask, RowSet, mask};
use proptest::prelude::*;

use crate::{Group, Layout, Needs, RingShards, Route, Schedule, needs::tests as samples};

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

fn prove_one(name: &str, needs: &Needs, route: Route, gradients: bool) -> Schedule {
    let schedule = Schedule::build(needs, route, gradients);
    if let Err(violation) = schedule.check(needs, gradients) {
        panic!("{name}, {route:?}, {} ranks, gradients {gradients}: {violation}", needs.held.len());
    }
    assert_eq!(schedule.route, route);
    assert_eq!(schedule.sent().gradient_rows() > 0, gradients && schedule.sent().block_rows > 0);
    schedule
}

fn prove(name: &str, needs: &Needs) {
    for route in some_routes(needs.held.len()) {
        let schedule = prove_one(name, needs, route, true);
        // for many ranks, the forward pass is proven by equality with the backward pass without
        // gradients
        let forward = if needs.held.len() <= 16 {
            prove_one(name, needs, route, false)
        } else {
            Schedule::build(needs, route, false)
        };
        let mut without = schedule;
        without.steps.iter_mut().flatten().for_each(|step| step.after = Group::default());
        assert_eq!(without, forward);
    }
}

/// Numbers of ranks. All from 33 to 64 would take most of the time of this crate's tests, because
/// the checker's work grows with their square or more. Of those there are two odd and two even
/// ones, among them a power of two.
fn rank_counts() -> impl Iterator<Item = usize> {
    (1..=32).chain([47, 48, 63, 64])
}

#[test]
fn schedules_for_any_needs_are_correct() {
    for ranks in rank_counts() {
        prove("random", &random_needs(ranks, ranks as u64));
        prove("untrimmed", &Needs::everything(vec![3; ranks]));
    }
}

#[test]
fn more_than_64_ranks_are_checked() {
    let shards = samples::plain(140, &Layout::Zigzag, 70);
    prove("causal", &needs(&mask::Causal::default(), &shards));
}

/// Counts each row, and its gradient, for each pair of nodes.
#[test]
fn once_per_node_no_row_and_no_gradient_crosses_twice_between_two_nodes() {
    for (ranks, seed) in [(4, 1), (6, 2), (8, 3), (12, 4), (16, 5)] {
        let all = [random_needs(ranks, seed), Needs::everything(vec![2; ranks])];
        for (needs, node_ranks) in all.iter().flat_map(|needs| [(needs, 2), (needs, ranks / 2)]) {
            let schedule = Schedule::build(needs, Route::OncePerNode { node_ranks }, true);
            let mut crossed = std::collections::BTreeMap::new();
            for (rank, steps) in schedule.steps.iter().enumerate() {
                let groups = steps.iter().flat_map(|step| [&step.before, &step.after]);
                for sent in groups.flat_map(|group| &group.sends) {
                    let [from, to] = [rank, sent.peer].map(|rank| rank / node_ranks);
                    if from == to {
                        continue;
                    }
                    let is_block = sent.channel == annulus_core::Channel::Kv;
                    for row in sent.rows.ranges().iter().cloned().flatten() {
                        *crossed.entry((is_block, sent.owner, row, from, to)).or_insert(0) += 1;
                    }
                }
            }
            // as many gradients return as rows were sent, each once
            assert!(
                crossed.values().all(|&times| times == 1),
                "{ranks} ranks, nodes of {node_ranks}"
            );
            let blocks = crossed.keys().filter(|key| key.0).count();
            assert_eq!(2 * blocks, crossed.len());
            assert!(blocks > 0);
        }
    }
}

proptest! {
    #[test]
    fn schedules_of_any_needs_are_correct(ranks in 1usize..12, seed: u64) {
        prove("random", &random_needs(ranks, seed));
    }

    #[test]
    fn schedules_of_any_problem_are_correct(problem in samples::problems()) {
        let samples::Problem { mask, heads, batch, shards } = &problem;
        prove("problem", &Needs::of_queries(&**mask, *heads, *batch, shards));
        prove("problem, keys", &Needs::of_keys(&**mask, *heads, *batch, shards));
    }
}
