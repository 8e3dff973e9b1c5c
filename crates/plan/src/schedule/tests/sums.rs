//! Rows, bytes and pairs that are summed over ranks: the documented shares of the full ring, runs
//! of queries against single ones, many ranks.

use std::sync::Arc;

use super::{super::ring_traffic::estimated_block_rows, LAYOUTS, masks, routes, samples};
use crate::{
    Layout, Needs, NeedsIndex, RankSchedule, RingShards, RingTraffic, Route, Schedule, Traffic,
    Work,
};
use annulus_core::{DType, Dims, Fingerprint, KeyIntervals, Mask, RowLayout, Spec, mask};

fn index<'a>(mask: &'a dyn Mask, shards: &RingShards) -> NeedsIndex<'a> {
    NeedsIndex::of_queries(mask, 1, 1, shards, &mut || ())
}

fn traffic(needs: &NeedsIndex<'_>, route: Route) -> RingTraffic {
    RingTraffic::of(needs, route, &mut || ())
}

#[test]
fn blocks_and_gradients_are_the_documented_share_of_the_full_ring() {
    let [_, causal, ..] = masks(1).map(|(_, mask)| mask);
    let window = |left: u64| masks(left)[2].1.clone();
    let [.., symmetric, _] = masks(16).map(|(_, mask)| mask);
    let mut cases = Vec::new();
    for ranks in [2, 3, 4, 8, 16, 64] {
        let of = |layout, route, share| (causal.clone(), 4, layout, ranks, route, share, ranks - 1);
        cases.push(of(Layout::Contiguous, Route::RelayUp, 0.5));
        cases.push(of(Layout::Zigzag, Route::RelayDown, 0.75));
    }
    // a window within a shard of 16 rows is one hop
    for (left, share) in [(16, 0.125), (8, 0.0625), (1, 0.125 / 16.0)] {
        for route in [Route::RelayUp, Route::Direct] {
            cases.push((window(left), 16, Layout::Contiguous, 8, route, share, 1));
        }
    }
    cases.push((symmetric.clone(), 16, Layout::Contiguous, 8, Route::Direct, 0.25, 2));
    for (mask, rows, layout, ranks, route, share, hops) in cases {
        let shards = samples::plain(rows * ranks, &layout, ranks);
        let traffic = traffic(&index(&*mask, &shards), route);
        let full = Traffic::full_ring(&vec![rows as u64; ranks], true);
        let Traffic { block_rows, .. } = traffic.total();
        let blocks = block_rows as f64 / full.block_rows as f64;
        let gradients = traffic.total().gradient_rows() as f64 / full.gradient_rows() as f64;
        let got = (blocks, gradients, traffic.hops);
        assert_eq!(got, (share, share, hops), "{mask:?}, {layout:?}, {ranks} ranks, {route:?}");
    }
    // other routes send more
    let shares = |mask: &dyn Mask, layout: &Layout, ranks: usize| {
        let shards = samples::plain(16 * ranks, layout, ranks);
        let sent = traffic(&index(mask, &shards), Route::RelayUp).total().block_rows;
        sent as f64 / Traffic::full_ring(&vec![16; ranks], true).block_rows as f64
    };
    assert!((shares(&*symmetric, &Layout::Contiguous, 8) - 0.893).abs() < 0.0005);
    assert!(shares(&*causal, &Layout::Zigzag, 8) > 0.75);
}

#[test]
fn everything_is_the_full_ring_on_every_route() {
    for route in routes(4) {
        let needs = Needs::everything(vec![3, 0, 5, 2]);
        let schedule = Schedule::build(&needs, route, true);
        let full = Traffic::full_ring(&needs.held, true);
        assert_eq!(
            full,
            Traffic { block_rows: 30, partial_gradient_rows: 30, final_gradient_rows: 0 }
        );
        assert_eq!(schedule.sent().block_rows, 30);
        assert_eq!(schedule.sent().gradient_rows(), 30);
        // the owner receives each row's gradient once on a relay, from every other rank if direct,
        // and from each node with another rank once per node
        let of_nodes = |node_ranks: usize| match node_ranks {
            // the owner of a row is the only rank of its node
            1 => 3,
            4 => 1,
            _ => 2,
        };
        let final_rows = match route {
            Route::Direct => 30,
            Route::OncePerNode { node_ranks } => 10 * of_nodes(node_ranks),
            _ => 10,
        };
        assert_eq!(schedule.sent().final_gradient_rows, final_rows);
        assert_eq!(schedule.sent_by(4), Traffic::default());
        assert_eq!(Traffic::full_ring(&needs.held, false).gradient_rows(), 0);
    }
    assert_eq!(Traffic::full_ring(&[], true), Traffic::default());
}

#[test]
fn bytes_are_rows_times_row_bytes() {
    let spec = Spec::new(Dims { kv_heads: 2, value_dim: 3, ..Dims::new(2, 8, 4, 5) }, DType::Bf16);
    let traffic = Traffic { block_rows: 7, partial_gradient_rows: 2, final_gradient_rows: 1 };
    // batch 2 × heads 2 × (5 + 3) elements per row, 2 bytes each in a block, 4 in a gradient
    assert_eq!(traffic.bytes(&spec.kv_row_layout(), &spec.gradient_row_layout()), 7 * 64 + 3 * 128);
    let empty = RowLayout::new([]);
    assert_eq!(traffic.bytes(&empty, &empty), 0);
    // beyond 64 bits: 16 bytes per row of keys and values, and of their gradients
    let full = Traffic::full_ring(&vec![1 << 55; 1024], true);
    let spec = Spec::new(Dims::new(1, 1, 1, 1), DType::F64);
    assert_eq!(full.block_rows, 1023 << 65);
    assert_eq!(full.bytes(&spec.kv_row_layout(), &spec.gradient_row_layout()), 1023 << 70);
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
    for (ranks, layout) in [1, 2, 5, 12].into_iter().flat_map(|ranks| LAYOUTS.map(|of| (ranks, of)))
    {
        let check = |shards: &RingShards, masks: [(&str, Arc<dyn Mask>); 5]| {
            for (name, mask) in masks {
                let single = QueryByQuery(mask.clone());
                let needs = |mask: &dyn Mask| index(mask, shards).to_needs();
                assert_eq!(needs(&*mask), needs(&single), "{name}, {layout:?}, {ranks} ranks");
                let work = |mask: &dyn Mask| Work::of(mask, 2, 3, shards);
                assert_eq!(work(&*mask), work(&single), "{name}, {layout:?}, {ranks} ranks");
            }
        };
        for len in [ranks - 1, 7 * ranks + 2, 40 * ranks] {
            check(&samples::plain(len, &layout, ranks), masks(4));
        }
        // only ranks 0, 2, 4 … have keys, so that one interval of positions is several runs of keys
        let mut shards = samples::plain(40 * ranks, &layout, ranks);
        shards.kv.iter_mut().skip(1).step_by(2).for_each(|kv| *kv = Arc::default());
        check(&shards, masks(17));
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
    let causal = mask::Causal::default();
    let traffic =
        traffic(&index(&causal, &samples::plain(len, &Layout::Zigzag, ranks)), Route::RelayDown);
    // three quarters of the full ring
    let full = (ranks as u128 - 1) * len as u128;
    assert_eq!(traffic.total().block_rows * 4, full * 3);
    assert_eq!(traffic.total().gradient_rows() * 4, full * 3);
    assert_eq!(traffic.hops, ranks - 1);
}

#[test]
fn rows_of_many_ranks_are_estimated_from_some() {
    for (ranks, most_error) in [(24, 0.0), (400, 0.1)] {
        for layout in &LAYOUTS {
            let shards = samples::plain(3 * ranks, layout, ranks);
            for (name, mask) in masks(3) {
                let needs = index(&*mask, &shards);
                for route in [
                    Route::RailsUp { node_ranks: 8 },
                    Route::RailsDown { node_ranks: 8 },
                    Route::OncePerNode { node_ranks: 8 },
                ] {
                    let sent = traffic(&needs, route).total().block_rows as f64;
                    let got = estimated_block_rows(&needs, route, &mut || ()) as f64;
                    let name =
                        format!("{name}, {layout:?}, {route:?}, {ranks} ranks: {got} {sent}");
                    assert!((got - sent).abs() <= most_error * sent, "{name}");
                }
            }
        }
    }
}
