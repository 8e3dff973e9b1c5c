//! The steps of one rank and the sums over ranks, compared with the schedule of all ranks.

use std::sync::Arc;

use proptest::prelude::*;

use super::{LAYOUTS, masks, samples, some_routes};
use crate::{
    Fingerprint, KeyIntervals, Layout, Mask, NeedsIndex, RankSchedule, RingShards, RingTraffic,
    Route, Schedule, Work, mask,
};

/// Compares all ranks' steps and the sums on every route.
fn compare(name: &str, index: &NeedsIndex<'_>, of_queries: bool) {
    let needs = index.to_needs();
    for route in some_routes(needs.held.len()) {
        for gradients in [true, false] {
            let schedule = Schedule::build(&needs, route, gradients);
            // of many ranks some, to save time
            for rank in (0..needs.held.len()).step_by(needs.held.len().div_ceil(20)) {
                let derived = RankSchedule::derive(index, route, gradients, rank, &mut || ());
                assert_eq!(derived, schedule.of_rank(rank), "{name}, {route:?}, rank {rank}");
            }
            if gradients && of_queries {
                let traffic = RingTraffic::of(index, route, &mut || ());
                let sent: Vec<_> =
                    (0..needs.held.len()).map(|rank| schedule.sent_by(rank)).collect();
                assert_eq!(traffic.of_rank, sent, "{name}, {route:?}");
                assert_eq!(traffic.hops, schedule.hops(), "{name}, {route:?}");
                assert_eq!(traffic.total(), schedule.sent());
            }
        }
    }
    let cheapest = |limit| Route::cheapest(index, limit, &mut || ());
    let sent =
        Route::ALL.map(|route| (route, Schedule::build(&needs, route, false).block_rows_sent()));
    let least = sent.iter().map(|&(_, rows)| rows).min().unwrap_or_default();
    let first = sent.into_iter().find(|&(_, rows)| rows == least);
    if of_queries {
        assert_eq!(cheapest(u128::MAX), first, "{name}");
        assert_eq!(cheapest(least), first, "{name}");
        assert_eq!(least.checked_sub(1).and_then(cheapest), None, "{name}");
    }
}

fn compare_all(name: &str, mask: &dyn Mask, heads: usize, batch: usize, shards: &RingShards) {
    compare(name, &NeedsIndex::of_queries(mask, heads, batch, shards, &mut || ()), true);
    compare(name, &NeedsIndex::of_keys(mask, heads, batch, shards, &mut || ()), false);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
    #[test]
    fn steps_and_sums_of_any_problem_are_those_of_all_ranks(problem in samples::problems()) {
        let samples::Problem { mask, heads, batch, shards } = &problem;
        compare_all("problem", mask, *heads, *batch, shards);
    }
}

#[test]
fn steps_and_sums_of_up_to_64_ranks_are_those_of_all_ranks() {
    for ranks in [1, 2, 3, 8, 17, 64] {
        let len = 2 * ranks + 3;
        for layout in &LAYOUTS {
            for (name, mask) in masks(2) {
                compare_all(name, &*mask, 1, 1, &samples::plain(len, layout, ranks));
            }
            let packed = samples::packed(len, 5, 2, layout, ranks);
            compare_all("packed", &mask::Causal::default(), 1, 1, &packed);
            let few = samples::plain(ranks / 2, layout, ranks);
            compare_all("few rows", &mask::Causal::default(), 1, 1, &few);
        }
    }
}

/// A mask without its band.
#[derive(Debug)]
struct QueryByQuery(Arc<dyn Mask>);

impl Mask for QueryByQuery {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        self.0.fingerprint(into)
    }

    fn visible(&self, query: &mask::Query, key: &mask::Key) -> bool {
        self.0.visible(query, key)
    }

    fn intervals(&self, query: &mask::Query) -> Option<KeyIntervals> {
        self.0.intervals(query)
    }
}

#[test]
fn runs_of_queries_have_the_needs_and_the_work_of_their_queries() {
    for ranks in [1, 2, 5, 12] {
        for layout in &LAYOUTS {
            for len in [ranks - 1, 7 * ranks + 2, 40 * ranks] {
                let shards = samples::plain(len, layout, ranks);
                for (name, mask) in masks(4) {
                    let single = QueryByQuery(mask.clone());
                    let needs = |mask: &dyn Mask| {
                        NeedsIndex::of_queries(mask, 1, 1, &shards, &mut || ()).to_needs()
                    };
                    assert_eq!(needs(&*mask), needs(&single), "{name}, {layout:?}, {ranks} ranks");
                    let work = |mask: &dyn Mask| Work::of(mask, 2, 3, &shards);
                    assert_eq!(work(&*mask), work(&single), "{name}, {layout:?}, {ranks} ranks");
                }
            }
        }
    }
}

#[test]
fn keys_with_gaps_have_the_work_of_their_queries() {
    for ranks in [2, 5, 12] {
        for layout in &LAYOUTS {
            let mut shards = samples::plain(40 * ranks, layout, ranks);
            // keys of every second rank, of which those of neighbours are several runs
            shards.kv.iter_mut().skip(1).step_by(2).for_each(|kv| *kv = Arc::default());
            for (name, mask) in masks(17) {
                let single = QueryByQuery(mask.clone());
                let work = |mask: &dyn Mask| Work::of(mask, 2, 3, &shards);
                assert_eq!(work(&*mask), work(&single), "{name}, {layout:?}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn rows_of_long_shards_once_per_node_are_those_of_all_ranks() {
    for (ranks, sizes) in [(6, &[2, 3][..]), (16, &[1, 2, 4, 8, 16]), (64, &[4, 8, 32])] {
        for layout in &LAYOUTS {
            let shards = samples::plain(40 * ranks + 7, layout, ranks);
            for (name, mask) in masks(55) {
                let index = NeedsIndex::of_queries(&*mask, 1, 1, &shards, &mut || ());
                let needs = index.to_needs();
                for &node_ranks in sizes {
                    let route = Route::OncePerNode { node_ranks };
                    let schedule = Schedule::build(&needs, route, true);
                    let traffic = RingTraffic::of(&index, route, &mut || ());
                    let sent: Vec<_> = (0..ranks).map(|rank| schedule.sent_by(rank)).collect();
                    let name = format!("{name}, {layout:?}, nodes of {node_ranks} of {ranks}");
                    assert_eq!(traffic.of_rank, sent, "{name}");
                    assert_eq!(traffic.hops, schedule.hops(), "{name}");
                }
            }
        }
    }
}

#[test]
fn a_plan_of_many_ranks_needs_no_set_for_each_pair_of_them() {
    // sets for each pair of these ranks would need 100 GB
    let ranks = 1 << 15;
    let len = ranks * 1024;
    let causal = mask::Causal::default();
    let shards = samples::plain(len, &Layout::Zigzag, ranks);
    let mut ticks = 0;
    let needs = NeedsIndex::of_queries(&causal, 1, 1, &shards, &mut || ticks += 1);
    assert_eq!(ticks, ranks);
    let traffic = RingTraffic::of(&needs, Route::RelayDown, &mut || ());
    // three quarters of the full ring
    let full = (ranks as u128 - 1) * len as u128;
    assert_eq!(traffic.total().block_rows * 4, full * 3);
    assert_eq!(traffic.total().gradient_rows() * 4, full * 3);
    assert_eq!(traffic.hops, ranks - 1);
    let mut ticks = 0;
    let steps = RankSchedule::derive(&needs, Route::RelayDown, true, 17, &mut || ticks += 1);
    assert!(ticks >= ranks, "{ticks}");
    let sent: u64 = steps
        .steps
        .iter()
        .flat_map(|step| &step.before.sends)
        .map(|message| message.rows.count())
        .sum();
    assert_eq!(u128::from(sent), traffic.of_rank[17].block_rows);
    // of a full mask every node needs the rows of every other once, and relays them to 7 ranks
    let needs = NeedsIndex::of_queries(&mask::Everything, 1, 1, &shards, &mut || ());
    let traffic = RingTraffic::of(&needs, Route::OncePerNode { node_ranks: 8 }, &mut || ());
    let nodes = ranks as u128 / 8;
    let rows = len as u128;
    assert_eq!(traffic.total().block_rows, rows * (nodes - 1 + 7 * nodes));
    assert_eq!(traffic.hops, ranks - 1);
}
