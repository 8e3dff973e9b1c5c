//! Every schedule that is built passes the checker: each number of ranks up to 32 and some up to
//! 64, any needs and every route, with and without gradients.

use proptest::prelude::*;

use super::{needs, random_needs, samples, some_routes};
use crate::{Group, Layout, Needs, Route, Schedule};
use annulus_core::mask;

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
