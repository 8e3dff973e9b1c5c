//! Work against a count of every pair, and the automatic choice for the masks that people use.

use std::sync::Arc;

use proptest::prelude::*;

use super::{LAYOUTS, masks, samples};
use crate::{
    Alignment, Choice, Coordinates, CustomLayout, DType, Dims, Layout, Mask, Needs, Order, Placement, Route, Schedule, Side, Spec, Work,
    mask,
};

proptest! {
    #[test]
    fn work_is_the_pairs(problem in samples::problems()) {
        let ranks = problem.coordinates.q.len();
        let mut pairs = vec![vec![0u64; ranks]; ranks];
        problem.pairs(|query_rank, _, key_rank, _| pairs[query_rank][key_rank] += 1);
        let work = Work::of(&problem.mask, problem.heads, problem.batch, &problem.coordinates);
        prop_assert_eq!(&work.pairs, &pairs);
        prop_assert_eq!(work.total(), pairs.iter().flatten().sum::<u64>());
        for route in Route::ALL {
            let schedule = Schedule::build(&Needs::everything(vec![1; ranks]), route, false);
            for (rank, steps) in schedule.steps.iter().enumerate() {
                prop_assert_eq!(work.of_rank(rank), (0..ranks).map(|t| work.of_step(route, rank, t)).sum::<u64>());
                for (t, step) in steps.iter().enumerate() {
                    prop_assert_eq!(work.of_step(route, rank, t), pairs[rank][step.owner]);
                }
            }
        }
    }
}

fn work(mask: &dyn Mask, len: usize, layout: &Layout, ranks: usize) -> Work {
    Work::of(mask, 3, 2, &samples::plain(len, layout, ranks))
}

#[test]
fn zigzag_balances_causal_work_in_every_step() {
    let causal = mask::Causal::default();
    let (ranks, len) = (8, 1024);
    let zigzag = work(&causal, len, &Layout::Zigzag, ranks);
    assert_eq!(zigzag.total(), 3 * 2 * (len * (len + 1) / 2) as u64);
    assert_eq!(zigzag.max_over_mean(), 1.0);
    for t in 1..ranks {
        let first = zigzag.of_step(Route::RelayDown, 0, t);
        assert!((0..ranks).all(|rank| zigzag.of_step(Route::RelayDown, rank, t) == first));
    }
    let contiguous = work(&causal, len, &Layout::Contiguous, ranks).max_over_mean();
    assert!((contiguous - 15.0 / 8.0).abs() < 0.01, "{contiguous}");
}

#[test]
fn no_work_is_even_and_ranks_that_do_not_exist_have_none() {
    let nothing = work(&mask::Everything, 0, &Layout::Striped, 3);
    assert_eq!((nothing.total(), nothing.max_over_mean()), (0, 1.0));
    assert_eq!((nothing.of_rank(3), nothing.of_step(Route::Direct, 0, 3), nothing.of_step(Route::Direct, 3, 0)), (0, 0, 0));
}

fn spec(mask: Arc<dyn Mask>, len: usize) -> Spec {
    Spec { mask, ..Spec::new(Dims::new(2, len, 4, 8), DType::F32) }
}

fn auto(mask: Arc<dyn Mask>, len: usize, ranks: usize) -> (&'static str, Route) {
    let Choice { layout, route, .. } = Choice::auto(&spec(mask, len), ranks, None, None);
    (layout.name(), route)
}

#[test]
fn layout_and_route_follow_from_the_mask() {
    let [full, causal, window, symmetric, _] = masks(32).map(|(_, mask)| mask);
    for ranks in [3, 4, 7, 8, 16] {
        let len = ranks * 64;
        assert_eq!(auto(causal.clone(), len, ranks), ("zigzag", Route::RelayDown), "{ranks}");
        assert_eq!(auto(full.clone(), len, ranks), ("contiguous", Route::RelayUp), "{ranks}");
        assert_eq!(auto(window.clone(), len, ranks), ("contiguous", Route::RelayUp), "{ranks}");
        assert_eq!(auto(symmetric.clone(), len, ranks), ("contiguous", Route::Direct), "{ranks}");
    }
    // one hop is one hop in any direction
    assert_eq!(auto(causal, 128, 2), ("zigzag", Route::RelayUp));
    // ties go to the first of each
    assert_eq!(auto(full.clone(), 128, 2), ("contiguous", Route::RelayUp));
    assert_eq!(auto(full.clone(), 128, 1), ("contiguous", Route::RelayUp));
    assert_eq!(auto(full, 0, 4), ("contiguous", Route::RelayUp));
}

#[test]
fn a_mask_without_spans_counts_as_far_as_it_is_bounded() {
    let opaque: Arc<dyn Mask> = Arc::new(mask::Predicate::of_positions("odd sums", |i, j| (i + j) % 2 == 1));
    assert_eq!(auto(opaque.clone(), 256, 4), ("contiguous", Route::RelayUp));
    assert_eq!(auto(mask::and(Arc::new(mask::Causal::default()), opaque), 256, 4), ("zigzag", Route::RelayDown));
}

#[test]
fn a_fixed_layout_chooses_only_the_route() {
    let causal: Arc<dyn Mask> = Arc::new(mask::Causal::default());
    let route = |layout: &Layout| {
        let choice = Choice::auto(&spec(causal.clone(), 256), 8, Some(layout), None);
        assert_eq!(&choice.layout, layout);
        choice.route
    };
    assert_eq!(route(&Layout::Contiguous), Route::RelayUp);
    assert_eq!(route(&Layout::Zigzag), Route::RelayDown);
    // contiguous, but the last rank has the first rows: what was upwards is downwards
    let reversed: Vec<_> = (0..8).rev().map(|rank| Layout::Contiguous.shard(Side::Q, 256, rank, 8)).collect();
    assert_eq!(route(&Layout::Custom(Arc::new(CustomLayout { q: reversed.clone(), kv: reversed }))), Route::RelayDown);
}

#[test]
fn the_choice_keeps_its_rule() {
    // every layout and route, by whole schedules and exact work
    for ranks in 1..9 {
        for (name, mask) in masks(5) {
            let spec = spec(mask, 11 * ranks + 1);
            let candidates: Vec<(Layout, Route, u64, f64)> = LAYOUTS
                .iter()
                .flat_map(|layout| {
                    let coordinates = Coordinates::plain(&spec.dims, Alignment::TopLeft, layout, ranks);
                    let needs = Needs::of_queries(&*spec.mask, 4, 2, &coordinates);
                    let imbalance = Work::of(&*spec.mask, 4, 2, &coordinates).max_over_mean();
                    Route::ALL.map(|route| {
                        let rows = Schedule::build(&needs, route, false).block_rows_sent();
                        (layout.clone(), route, rows, imbalance)
                    })
                })
                .collect();
            let least_imbalance = candidates.iter().map(|candidate| candidate.3).fold(f64::INFINITY, f64::min);
            let even = || candidates.iter().filter(|candidate| candidate.3 <= 1.25 * least_imbalance);
            let fewest = even().map(|candidate| candidate.2).min().unwrap();
            let best = Route::ALL.iter().find_map(|&route| even().find(|candidate| candidate.1 == route && candidate.2 == fewest)).unwrap();
            let choice = Choice::auto(&spec, ranks, None, None);
            assert_eq!((choice.layout, choice.route), (best.0.clone(), best.1), "{name}, {ranks} ranks");
        }
    }
}

#[test]
fn a_long_sequence_is_sampled_to_the_same_choice() {
    let [full, causal, window, symmetric, chunked] = masks(4096).map(|(_, mask)| mask);
    let (len, ranks) = (8 * 4096 * 8, 8);
    assert_eq!(auto(full, len, ranks), ("contiguous", Route::RelayUp));
    assert_eq!(auto(causal, len, ranks), ("zigzag", Route::RelayDown));
    assert_eq!(auto(window, len, ranks), ("contiguous", Route::RelayUp));
    assert_eq!(auto(symmetric, len, ranks), ("contiguous", Route::Direct));
    assert_eq!(auto(chunked, len, ranks), ("contiguous", Route::RelayUp));
}

#[test]
fn a_placement_changes_the_order_of_ranks_and_nothing_else() {
    let spec = spec(Arc::new(mask::Causal::default()), 256);
    let dealt = Placement::new(vec![0, 1, 2, 0, 1, 2]);
    let (plain, placed) = (Choice::auto(&spec, 6, None, None), Choice::auto(&spec, 6, None, Some(&dealt)));
    assert_eq!(placed, Choice { order: dealt.order(), ..plain.clone() });
    assert_eq!((dealt.crossings(&plain.order), dealt.crossings(&placed.order)), (6, 3));
    // a fixed layout says who holds what; a placement of other ranks says nothing
    assert_eq!(Choice::auto(&spec, 6, Some(&plain.layout), Some(&dealt)).order, Order::ascending(6));
    assert_eq!(Choice::auto(&spec, 4, None, Some(&dealt)).order, Order::ascending(4));
}
