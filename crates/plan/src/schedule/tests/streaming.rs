//! The steps of one rank and the sums over ranks, compared with the schedule of all ranks.

use std::sync::Arc;

use proptest::prelude::*;

use super::{super::ring_traffic::estimated_block_rows, LAYOUTS, masks, samples, some_routes};
use crate::{Layout, NeedsIndex, RankSchedule, RingShards, RingTraffic, Route, Schedule, Work};
use annulus_core::{Fingerprint, KeyIntervals, Mask, mask};

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
fn a_plan_of_many_ranks_needs_no_set_for_each_pair_of_them() {
    // sets for each pair of these ranks would need 400 GB
    let ranks = 1 << 16;
    let len = ranks * 1024;
    let causal = mask::Causal::default();
    let shards = samples::plain(len, &Layout::Zigzag, ranks);
    let mut ticks = 0;
    let needs = NeedsIndex::of_queries(&causal, 1, 1, &shards, &mut || ticks += 1);
    assert_eq!(ticks, ranks);
    let mut ticks = 0;
    let steps = RankSchedule::derive(&needs, Route::RelayDown, true, 17, &mut || ticks += 1);
    assert!(ticks >= ranks, "{ticks}");
    let sends = steps.steps.iter().flat_map(|step| &step.before.sends);
    let sent: u64 = sends.map(|message| message.rows.count()).sum();
    // of the blocks of later ranks, which come first, both chunks; of those of earlier ones, whose
    // first chunk no later rank on the relay lacks, the same; but its last one has no user
    let chunk = len as u64 / (2 * ranks as u64);
    assert!((chunk * ranks as u64..=2 * chunk * ranks as u64).contains(&sent), "{sent}");
}

#[test]
fn sums_over_many_ranks_have_a_limit() {
    let ranks = RingTraffic::MOST_RANKS;
    assert_eq!(RingTraffic::check_ranks(ranks), Ok(()));
    let error = RingTraffic::check_ranks(ranks + 1).unwrap_err().to_string();
    assert!(error.starts_with("ranks: got 1025, want at most 1024 for sums"), "{error}");
    let len = ranks * 4;
    let shards = samples::plain(len, &Layout::Zigzag, ranks);
    let causal = mask::Causal::default();
    let needs = NeedsIndex::of_queries(&causal, 1, 1, &shards, &mut || ());
    let traffic = RingTraffic::of(&needs, Route::RelayDown, &mut || ());
    // three quarters of the full ring
    let full = (ranks as u128 - 1) * len as u128;
    assert_eq!(traffic.total().block_rows * 4, full * 3);
    assert_eq!(traffic.total().gradient_rows() * 4, full * 3);
    assert_eq!(traffic.hops, ranks - 1);
    let sent = |rank: usize| {
        let steps = RankSchedule::derive(&needs, Route::RelayDown, true, rank, &mut || ()).steps;
        let sends = steps.iter().flat_map(|step| &step.before.sends);
        sends.map(|message| u128::from(message.rows.count())).sum::<u128>()
    };
    for rank in [0, 17, ranks - 1] {
        assert_eq!(traffic.of_rank[rank].block_rows, sent(rank), "rank {rank}");
    }
}

#[test]
fn rows_of_many_ranks_are_estimated_from_some() {
    for (ranks, most_error) in [(24, 0.0), (600, 0.1)] {
        for layout in &LAYOUTS {
            let shards = samples::plain(3 * ranks, layout, ranks);
            for (name, mask) in masks(3) {
                let needs = NeedsIndex::of_queries(&*mask, 1, 1, &shards, &mut || ());
                for route in [
                    Route::RailsUp { node_ranks: 8 },
                    Route::RailsDown { node_ranks: 8 },
                    Route::OncePerNode { node_ranks: 8 },
                ] {
                    let sent = RingTraffic::of(&needs, route, &mut || ()).total().block_rows as f64;
                    let got = estimated_block_rows(&needs, route, &mut || ()) as f64;
                    let name =
                        format!("{name}, {layout:?}, {route:?}, {ranks} ranks: {got} {sent}");
                    assert!((got - sent).abs() <= most_error * sent, "{name}");
                }
            }
        }
    }
}
