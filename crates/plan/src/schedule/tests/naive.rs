//! The steps that a rank derives, compared with a derivation that knows only pairs of rows: every
//! visible pair is enumerated, and each row of an owner follows its route by itself.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{samples, some_routes};
use crate::{Group, Message, NeedsIndex, RankSchedule, RingTraffic, Route, Schedule, Step};
use annulus_core::{Channel, RowSet};

/// (user, owner, local row of the owner) of every pair of a row and a rank that needs it.
struct NaiveNeeds {
    /// Rows of each owner.
    held: Vec<u64>,
    needed: BTreeSet<(usize, usize, u64)>,
}

impl NaiveNeeds {
    /// Needs of keys by queries, and of queries by keys.
    fn of(problem: &samples::Problem) -> [Self; 2] {
        let shards = &problem.shards;
        let held = |side: &[std::sync::Arc<annulus_core::Shard>]| {
            side.iter().map(|shard| shard.rows.len()).collect()
        };
        let mut of_queries = Self { held: held(&shards.kv), needed: BTreeSet::new() };
        let mut of_keys = Self { held: held(&shards.q), needed: BTreeSet::new() };
        problem.pairs(|query_rank, query, key_rank, key| {
            of_queries.needed.insert((query_rank, key_rank, key));
            of_keys.needed.insert((key_rank, query_rank, query));
        });
        [of_queries, of_keys]
    }

    /// Derives all messages of a pass.
    fn schedule(&self, route: Route, gradients: bool) -> Schedule {
        let ranks = self.held.len();
        let step = |rank: usize, t| Step {
            owner: route.owner(rank, t, ranks),
            rows: if t == 0 { RowSet::all(self.held[rank]) } else { RowSet::new() },
            before: Group::default(),
            after: Group::default(),
        };
        let steps = (0..ranks).map(|rank| (0..ranks).map(|t| step(rank, t)).collect()).collect();
        let mut schedule = Schedule { route, steps };
        for owner in 0..ranks {
            for t in 1..ranks {
                self.post_step(&mut schedule, owner, t, gradients);
            }
        }
        schedule
    }

    /// Adds the messages with which step `t` of the block of `owner` begins, and those with its
    /// gradients.
    fn post_step(&self, schedule: &mut Schedule, owner: usize, t: usize, gradients: bool) {
        let route = schedule.route;
        let ranks = self.held.len();
        let user = |t| route.user(owner, t, ranks);
        let needs = |t, row| self.needed.contains(&(user(t), owner, row));
        // the block of step t + 1 is that of step t, not sent by the owner once more
        let goes_on = |t: usize| t + 1 < ranks && route.forwards(t + 1, ranks);
        // a row is at the user of step t if that user or a later one on the same way needs it
        let is_at = |t: usize, row| {
            let last = (t..).find(|&last| !goes_on(last)).unwrap_or(t);
            (t..=last).any(|t| needs(t, row))
        };
        // its gradient has a contribution if that user or an earlier one on the same way needs it
        let has_gradient = |t: usize, row| {
            let first = (1..=t).rev().find(|&first| first == 1 || !goes_on(first - 1));
            (first.unwrap_or(t)..=t).any(|t| needs(t, row))
        };
        let rows = |holds: &dyn Fn(u64) -> bool| -> RowSet {
            (0..self.held[owner]).filter(|&row| holds(row)).map(|row| row..row + 1).collect()
        };
        let mut post = |group: usize, from: usize, to, channel, rows: RowSet| {
            if rows.is_empty() {
                return;
            }
            let message = |peer| Message { peer, channel, owner, rows: rows.clone() };
            group_of(&mut schedule.steps[from][group], channel).sends.push(message(to));
            group_of(&mut schedule.steps[to][group], channel).receives.push(message(from));
        };
        let from = if route.forwards(t, ranks) { user(t - 1) } else { owner };
        let present = rows(&|row| is_at(t, row));
        post(t - 1, from, user(t), Channel::Kv, present.clone());
        if gradients {
            let later = |row| goes_on(t) && is_at(t + 1, row);
            if t + 1 < ranks {
                let partial = rows(&|row| has_gradient(t, row) && later(row));
                post(t, user(t), user(t + 1), Channel::PartialGrad, partial);
            }
            let last = rows(&|row| needs(t, row) && !later(row));
            post(t, user(t), owner, Channel::FinalGrad, last);
        }
        schedule.steps[user(t)][t].rows = present;
    }
}

fn group_of(step: &mut Step, channel: Channel) -> &mut Group {
    match channel {
        Channel::Kv => &mut step.before,
        Channel::PartialGrad | Channel::FinalGrad => &mut step.after,
    }
}

/// Compares with the naive derivation on some routes: the schedule of all ranks, what each rank
/// derives, and the sums over ranks.
fn compare(naive: &NaiveNeeds, index: &NeedsIndex<'_>, routes: impl Iterator<Item = Route>) {
    let ranks = naive.held.len();
    for route in routes {
        for gradients in [true, false] {
            let want = naive.schedule(route, gradients);
            assert_eq!(Schedule::build(&index.to_needs(), route, gradients), want, "{route:?}");
            for rank in 0..ranks {
                let got = RankSchedule::derive(index, route, gradients, rank, &mut || ());
                assert_eq!(got, want.of_rank(rank), "{route:?}, rank {rank} of {ranks}");
            }
            if gradients {
                let traffic = RingTraffic::of(index, route, &mut || ());
                let sent: Vec<_> = (0..ranks).map(|rank| want.sent_by(rank)).collect();
                assert_eq!(traffic.of_rank, sent, "{route:?}");
                assert_eq!(traffic.total(), want.sent(), "{route:?}");
                let sends = |&t: &usize| want.steps.iter().any(|of| !of[t].before.sends.is_empty());
                assert_eq!(traffic.hops, (0..ranks).filter(sends).count(), "{route:?}");
            }
        }
    }
}

/// Requires that the route with the fewest block rows is found, the first of equal ones.
fn compare_cheapest(naive: &NaiveNeeds, index: &NeedsIndex<'_>) {
    let sent = Route::ALL.map(|route| (route, naive.schedule(route, false).sent().block_rows));
    let least = sent.iter().map(|&(_, rows)| rows).min().unwrap_or_default();
    let first = sent.into_iter().find(|&(_, rows)| rows == least);
    let cheapest = |limit| Route::cheapest(index, limit, &mut || ());
    assert_eq!((cheapest(u128::MAX), cheapest(least)), (first, first));
    assert_eq!(least.checked_sub(1).and_then(cheapest), None);
}

/// Compares the needs of queries and of keys of a problem on the routes that `is_chosen` selects.
fn compare_problem(problem: &samples::Problem, is_chosen: impl Fn(usize) -> bool) {
    let samples::Problem { mask, heads, batch, shards } = problem;
    let [of_queries, of_keys] = NaiveNeeds::of(problem);
    let chosen =
        || some_routes(shards.q.len()).enumerate().filter(|(number, _)| is_chosen(*number));
    let index = NeedsIndex::of_queries(&**mask, *heads, *batch, shards, &mut || ());
    compare(&of_queries, &index, chosen().map(|(_, route)| route));
    compare_cheapest(&of_queries, &index);
    let index = NeedsIndex::of_keys(&**mask, *heads, *batch, shards, &mut || ());
    compare(&of_keys, &index, chosen().map(|(_, route)| route));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    /// Masks × layouts × documents, on up to 64 ranks and two routes.
    #[test]
    fn plans_of_up_to_64_ranks_are_those_of_all_pairs(
        problem in samples::problems_of(64, 70),
        first in 0usize..5,
    ) {
        compare_problem(&problem, |number| number % 5 == first);
    }

    #[test]
    fn plans_of_few_ranks_are_those_of_all_pairs_on_every_route(problem in samples::problems()) {
        compare_problem(&problem, |_| true);
    }
}

#[test]
fn the_naive_derivation_gives_the_example_of_the_module() {
    let needed = BTreeSet::from([(1, 0, 0), (1, 0, 1), (3, 0, 1), (3, 0, 2)]);
    let needs = NaiveNeeds { held: vec![3, 0, 0, 0], needed };
    let schedule = needs.schedule(Route::RelayUp, true);
    let sent = |rank: usize, step: usize| -> Vec<String> {
        let Step { before, after, .. } = &schedule.steps[rank][step];
        let all = before.sends.iter().chain(&after.sends);
        all.map(|of| format!("{:?} to {}: {:?}", of.channel, of.peer, of.rows.ranges())).collect()
    };
    assert_eq!(sent(0, 0), ["Kv to 1: [0..3]"]);
    assert_eq!(
        sent(1, 1),
        ["Kv to 2: [1..3]", "PartialGrad to 2: [1..2]", "FinalGrad to 0: [0..1]"]
    );
    assert_eq!(sent(2, 2), ["Kv to 3: [1..3]", "PartialGrad to 3: [1..2]"]);
    assert_eq!(sent(3, 3), ["FinalGrad to 0: [1..3]"]);
}
