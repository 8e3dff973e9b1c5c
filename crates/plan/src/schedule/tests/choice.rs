//! Work compared with an enumeration of all pairs, and the automatic choice for common masks.

use std::sync::Arc;

use proptest::prelude::*;

use super::{LAYOUTS, masks, needs, samples};
use crate::{Choice, CustomLayout, Layout, Needs, RingShards, Route, Schedule, Work, WorkMatrix};
use annulus_core::{
    Alignment, DType, Dims, Fingerprint, KeyIntervals, Mask, Order, Placement, Side, Spec, mask,
};

proptest! {
    #[test]
    fn work_matches_all_pairs(problem in samples::problems()) {
        let ranks = problem.shards.q.len();
        let mut pairs = vec![vec![0u128; ranks]; ranks];
        problem.pairs(|query_rank, _, key_rank, _| pairs[query_rank][key_rank] += 1);
        let samples::Problem { mask, heads, batch, shards } = &problem;
        let work = Work::of(&**mask, *heads, *batch, shards);
        let matrix = WorkMatrix::of(&**mask, *heads, *batch, shards);
        prop_assert_eq!(&matrix.pairs, &pairs);
        prop_assert_eq!(work.total(), pairs.iter().flatten().sum::<u128>());
        for route in Route::ALL {
            let schedule = Schedule::build(&Needs::everything(vec![1; ranks]), route, false);
            for (rank, steps) in schedule.steps.iter().enumerate() {
                let of_steps = (0..ranks).map(|t| matrix.of_step(route, rank, t)).sum::<u128>();
                prop_assert_eq!(work.of_rank(rank), of_steps);
                for (t, step) in steps.iter().enumerate() {
                    prop_assert_eq!(matrix.of_step(route, rank, t), pairs[rank][step.owner]);
                }
            }
        }
    }
}

fn work(mask: &dyn Mask, len: usize, layout: &Layout, ranks: usize) -> Work {
    Work::of(mask, 3, 2, &samples::plain(len, layout, ranks))
}

fn work_matrix(mask: &dyn Mask, len: usize, layout: &Layout, ranks: usize) -> WorkMatrix {
    WorkMatrix::of(mask, 3, 2, &samples::plain(len, layout, ranks))
}

#[test]
fn zigzag_balances_causal_work_in_every_step() {
    let causal = mask::Causal::default();
    let ranks = 8;
    let len = 1024;
    let zigzag = work(&causal, len, &Layout::Zigzag, ranks);
    assert_eq!(zigzag.total(), 3 * 2 * (len * (len + 1) / 2) as u128);
    assert_eq!(zigzag.max_over_mean(), 1.0);
    let matrix = work_matrix(&causal, len, &Layout::Zigzag, ranks);
    for t in 1..ranks {
        let first = matrix.of_step(Route::RelayDown, 0, t);
        assert!((0..ranks).all(|rank| matrix.of_step(Route::RelayDown, rank, t) == first));
    }
    let contiguous = work(&causal, len, &Layout::Contiguous, ranks).max_over_mean();
    assert!((contiguous - 15.0 / 8.0).abs() < 0.01, "{contiguous}");
}

#[test]
fn no_work_is_balanced_and_ranks_outside_the_ring_have_none() {
    let nothing = work(&mask::Everything, 0, &Layout::Striped, 3);
    assert_eq!((nothing.total(), nothing.max_over_mean()), (0, 1.0));
    assert_eq!(nothing.of_rank(3), 0);
    let matrix = work_matrix(&mask::Everything, 9, &Layout::Striped, 3);
    assert_eq!((matrix.of_step(Route::Direct, 0, 3), matrix.of_step(Route::Direct, 3, 0)), (0, 0));
}

fn spec(mask: Arc<dyn Mask>, len: usize) -> Spec {
    Spec { mask, ..Spec::new(Dims::new(2, len, 4, 8), DType::F32) }
}

fn auto(mask: Arc<dyn Mask>, len: usize, ranks: usize) -> (&'static str, Route) {
    let Choice { layout, route, .. } =
        Choice::auto(&spec(mask, len), ranks, None, None, &mut || ());
    (layout.name(), route)
}

#[test]
fn equal_choices_give_the_first_route_and_then_the_first_layout() {
    let [full, causal, ..] = masks(32).map(|(_, mask)| mask);
    // on two ranks both relays send the same rows
    assert_eq!(auto(causal, 128, 2), ("zigzag", Route::RelayUp));
    assert_eq!(auto(full.clone(), 128, 1), ("contiguous", Route::RelayUp));
    assert_eq!(auto(full, 0, 4), ("contiguous", Route::RelayUp));
}

#[test]
fn a_mask_without_intervals_is_counted_by_its_bound() {
    let opaque: Arc<dyn Mask> =
        Arc::new(mask::Predicate::of_positions("odd sums", |i, j| (i + j) % 2 == 1));
    assert_eq!(auto(opaque.clone(), 256, 4), ("contiguous", Route::RelayUp));
    assert_eq!(
        auto(mask::and(Arc::new(mask::Causal::default()), opaque), 256, 4),
        ("zigzag", Route::RelayDown)
    );
}

#[test]
fn a_fixed_layout_chooses_only_the_route() {
    let causal: Arc<dyn Mask> = Arc::new(mask::Causal::default());
    let route = |layout: &Layout| {
        let choice = Choice::auto(&spec(causal.clone(), 256), 8, Some(layout), None, &mut || ());
        assert_eq!(&choice.layout, layout);
        choice.route
    };
    assert_eq!(route(&Layout::Contiguous), Route::RelayUp);
    assert_eq!(route(&Layout::Zigzag), Route::RelayDown);
    // contiguous in reverse rank order: relay down is to it what relay up is to contiguous
    let reversed: Vec<_> =
        (0..8).rev().map(|rank| Layout::Contiguous.shard(Side::Q, 256, rank, 8)).collect();
    assert_eq!(
        route(&Layout::Custom(Arc::new(CustomLayout { q: reversed.clone(), kv: reversed }))),
        Route::RelayDown
    );
}

#[test]
fn the_choice_follows_its_rule() {
    // every layout and route, with complete schedules and exact work
    for ranks in 1..9 {
        for (name, mask) in masks(5) {
            let spec = spec(mask, 11 * ranks + 1);
            let candidates: Vec<(Layout, Route, u128, f64)> = LAYOUTS
                .iter()
                .flat_map(|layout| {
                    let shards = RingShards::plain(&spec.dims, Alignment::TopLeft, layout, ranks);
                    let needs = Needs::of_queries(&*spec.mask, 4, 2, &shards);
                    let imbalance = Work::of(&*spec.mask, 4, 2, &shards).max_over_mean();
                    Route::ALL.map(|route| {
                        let rows = Schedule::build(&needs, route, false).sent().block_rows;
                        (layout.clone(), route, rows, imbalance)
                    })
                })
                .collect();
            let least_imbalance =
                candidates.iter().map(|candidate| candidate.3).fold(f64::INFINITY, f64::min);
            let balanced =
                || candidates.iter().filter(|candidate| candidate.3 <= 1.25 * least_imbalance);
            let fewest = balanced().map(|candidate| candidate.2).min().unwrap();
            let best = Route::ALL
                .iter()
                .find_map(|&route| {
                    balanced().find(|candidate| candidate.1 == route && candidate.2 == fewest)
                })
                .unwrap();
            let choice = Choice::auto(&spec, ranks, None, None, &mut || ());
            assert_eq!(
                (choice.layout, choice.route),
                (best.0.clone(), best.1),
                "{name}, {ranks} ranks"
            );
        }
    }
}

#[test]
fn sampling_a_long_sequence_gives_the_same_choice() {
    let [full, causal, window, symmetric, chunked] = masks(4096).map(|(_, mask)| mask);
    let ranks = 8;
    let len = ranks * 4096 * 8;
    assert_eq!(auto(full, len, ranks), ("contiguous", Route::RelayUp));
    assert_eq!(auto(causal, len, ranks), ("zigzag", Route::RelayDown));
    assert_eq!(auto(window, len, ranks), ("contiguous", Route::RelayUp));
    assert_eq!(auto(symmetric, len, ranks), ("contiguous", Route::Direct));
    assert_eq!(auto(chunked, len, ranks), ("contiguous", Route::RelayUp));
}

#[test]
fn a_placement_changes_the_ring_order_and_a_relay_to_rails() {
    let spec = spec(Arc::new(mask::Causal::default()), 256);
    let round_robin = Placement::new(vec![0, 1, 2, 0, 1, 2]);
    let plain = Choice::auto(&spec, 6, None, None, &mut || ());
    let placed = Choice::auto(&spec, 6, None, Some(&round_robin), &mut || ());
    assert_eq!(plain.route, Route::RelayDown);
    let route = Route::RailsDown { node_ranks: 2 };
    assert_eq!(placed, Choice { order: round_robin.order(), route, ..plain.clone() });
    assert_eq!((round_robin.crossings(&plain.order), round_robin.crossings(&placed.order)), (6, 3));
    // a fixed layout, or a placement of another number of ranks, keeps ascending ranks
    assert_eq!(
        Choice::auto(&spec, 6, Some(&plain.layout), Some(&round_robin), &mut || ()).order,
        Order::ascending(6)
    );
    assert_eq!(
        Choice::auto(&spec, 4, None, Some(&round_robin), &mut || ()).order,
        Order::ascending(4)
    );
}

#[test]
fn rails_are_chosen_over_equal_nodes_of_several_ranks_unless_blocks_move_much_further() {
    let chosen = |mask: Arc<dyn Mask>, layout: Option<&Layout>, nodes: &[usize]| {
        let placement = Placement::new(nodes.to_vec());
        let spec = spec(mask, 256);
        Choice::auto(&spec, nodes.len(), layout, Some(&placement), &mut || ()).route
    };
    let full: Arc<dyn Mask> = Arc::new(mask::Everything);
    let rails = Route::RailsUp { node_ranks: 4 };
    assert_eq!(chosen(full.clone(), None, &[0, 0, 0, 0, 1, 1, 1, 1]), rails);
    assert_eq!(chosen(full.clone(), None, &[7, 2, 7, 2, 7, 2, 7, 2]), rails);
    let contiguous = Some(&Layout::Contiguous);
    assert_eq!(chosen(full.clone(), contiguous, &[0, 0, 0, 0, 1, 1, 1, 1]), rails);
    // ring indices are ranks, of which neighbours are on different nodes
    assert_eq!(chosen(full.clone(), contiguous, &[7, 2, 7, 2, 7, 2, 7, 2]), Route::RelayUp);
    for nodes in [&[0; 8][..], &[0, 1, 2, 3], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 0, 0, 1]] {
        assert_eq!(chosen(full.clone(), None, nodes), Route::RelayUp, "{nodes:?}");
    }
    // one hop on the relay, from the last rank of a node to the first of the next
    let window = Arc::new(mask::Window::new(Some(31), Some(0)));
    assert_eq!(chosen(window, contiguous, &[0, 0, 0, 0, 1, 1, 1, 1]), Route::RelayUp);
}

/// Of dense masks rails send about as many rows between nodes as a relay, from all ranks of a node.
#[test]
fn every_rank_of_a_node_sends_as_many_rows_to_the_next_node() {
    let [nodes, size] = [4, 4];
    let ranks = nodes * size;
    let between = |needs: &Needs, route: Route| -> Vec<u64> {
        let schedule = Schedule::build(needs, route, false);
        let of_rank = |(rank, steps): (usize, &Vec<crate::Step>)| {
            let sends = steps.iter().flat_map(|step| &step.before.sends);
            let others = sends.filter(|message| message.peer / size != rank / size);
            others.map(|message| message.rows.count()).sum()
        };
        schedule.steps.iter().enumerate().map(of_rank).collect()
    };
    let full = Needs::everything(vec![8; ranks]);
    let rails = Route::RailsUp { node_ranks: size };
    assert_eq!(between(&full, rails), vec![8 * (nodes as u64 - 1); ranks]);
    let relay = between(&full, Route::RelayUp);
    assert_eq!(relay.iter().filter(|&&rows| rows > 0).count(), nodes);
    assert_eq!(relay.iter().max(), Some(&(8 * (ranks as u64 - 1))));
    // causal: no more rows between nodes than on the relay, and few more in all
    let shards = samples::plain(16 * ranks, &Layout::Zigzag, ranks);
    let causal = needs(&mask::Causal::default(), &shards);
    let [relay, rails] = [Route::RelayDown, Route::RailsDown { node_ranks: size }];
    let all = |route| Schedule::build(&causal, route, false).sent().block_rows;
    let sum = |route| between(&causal, route).iter().sum::<u64>();
    let most = |route| between(&causal, route).into_iter().max().unwrap();
    assert!(sum(rails) <= sum(relay), "{} {}", sum(rails), sum(relay));
    assert!(3 * most(rails) <= most(relay), "{} {}", most(rails), most(relay));
    assert!(10 * all(rails) <= 11 * all(relay), "{} {}", all(rails), all(relay));
}

#[test]
fn counts_of_pairs_beyond_64_bits_are_exact() {
    // 10⁶ queries · 10⁶ keys · 10⁸ batch rows, an eighth on each rank
    let len = 1_000_000;
    let batch = 100_000_000;
    let ranks = 8;
    let shards = samples::plain(len, &Layout::Contiguous, ranks);
    let work = Work::of(&mask::Everything, 1, batch, &shards);
    let of_rank = (len / ranks) as u128 * len as u128 * batch as u128;
    assert!((0..ranks).all(|rank| work.of_rank(rank) == of_rank));
    assert_eq!(work.total(), 8 * of_rank);
    assert_eq!(work.max_over_mean(), 1.0);
}

/// Queries attend to the own node of 128 positions and to the one two after it, of four.
#[derive(Debug)]
struct EverySecondNode;

impl Mask for EverySecondNode {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("every second node")
    }

    fn visible(&self, query: &mask::Query, key: &mask::Key) -> bool {
        self.bound(query).contains(key.position)
    }

    fn intervals(&self, query: &mask::Query) -> Option<KeyIntervals> {
        let node = query.position / 128;
        let of = |node: i64| KeyIntervals::one(node * 128, (node + 1) * 128);
        Some(of(node).or(&of((node + 2) % 4)))
    }
}

#[test]
fn once_per_node_is_chosen_in_place_of_the_direct_route_unless_blocks_move_much_further() {
    let chosen = |mask: Arc<dyn Mask>, nodes: &[usize]| {
        let placement = Placement::new(nodes.to_vec());
        let spec = spec(mask, 512);
        let layout = Some(&Layout::Contiguous);
        Choice::auto(&spec, nodes.len(), layout, Some(&placement), &mut || ()).route
    };
    let nodes = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3];
    let far: Arc<dyn Mask> = Arc::new(EverySecondNode);
    assert_eq!(chosen(far.clone(), &nodes), Route::OncePerNode { node_ranks: 4 });
    assert_eq!(chosen(far, &[0; 16]), Route::Direct);
    // to both neighbours: one of them is three ranks further in a node
    let window: Arc<dyn Mask> = Arc::new(mask::Window::new(Some(31), Some(31)));
    assert_eq!(chosen(window, &nodes), Route::Direct);
}
