//! Grids, rows of groups, and bytes against the published formula.

use std::sync::Arc;

use super::*;
use crate::{Choice, CustomLayout, Layout, Route};
use annulus_core::{
    BackwardMode, Batch, DType, Dims, Placement, Runs, Side, Spec,
    mask::{self, SharedMask},
};

const FORWARD: TrafficOptions<'static> = TrafficOptions::FORWARD;

fn dims(q_heads: usize, kv_heads: usize, len: usize) -> Dims {
    Dims { q_heads, ..Dims::new(1, len, q_heads, 64).kv_heads(kv_heads) }
}

#[test]
fn names_are_read_back() {
    let grid = Strategy::Grid { heads: 1, queries: 2, keys: 4 };
    let of_heads = Strategy::Grid { heads: 3, queries: 2, keys: 4 };
    let heads = Strategy::HeadsRing { heads: 12 };
    let [of_transport, of_nodes] = [0, 8].map(|node_ranks| Strategy::OncePerNode { node_ranks });
    let published = [Strategy::AllGather, Strategy::AllToAll, Strategy::PassQ];
    let all = [Strategy::Ring, heads, grid, of_heads, Strategy::Auto, of_transport, of_nodes];
    for strategy in all.into_iter().chain(published) {
        assert_eq!(strategy.to_string().parse(), Ok(strategy));
    }
    assert_eq!((grid.to_string(), of_heads.to_string()), ("grid:2x4".into(), "grid:3x2x4".into()));
    let heads = ["", "rings", "heads", "heads:", "heads:0", "heads:-1", "heads:x"];
    let grids = ["grid", "grid:", "grid:4", "grid:0x4", "grid:2x", "grid:2x3x4x5", "grid:2×4"];
    let nodes = ["once-per-node:", "once-per-node:0", "once per node", "allgather", "pass-q:2"];
    for wrong in heads.into_iter().chain(grids).chain(nodes) {
        let error = wrong.parse::<Strategy>().unwrap_err().to_string();
        assert!(error.starts_with(&format!("strategy: got {wrong}, want ring")), "{error}");
    }
}

#[test]
fn published_strategies_are_forms_of_the_ring_and_the_grid() {
    let dims = dims(8, 2, 64);
    let grid = |strategy, ranks| HeadGrid::of(&dims, ranks, strategy).unwrap().unwrap().strategy();
    let of_nodes = Strategy::OncePerNode { node_ranks: 2 };
    for ring in [Strategy::AllGather, of_nodes, Strategy::OncePerNode { node_ranks: 0 }] {
        assert_eq!(grid(ring, 4), Strategy::Ring);
        assert_eq!((ring.heads(), ring.published_on(4)), (Some(1), ring));
    }
    assert_eq!(Strategy::AllGather.route(), Some(Route::Direct));
    assert_eq!(of_nodes.route(), Some(Route::OncePerNode { node_ranks: 2 }));
    assert_eq!(grid(Strategy::AllToAll, 4), Strategy::HeadsRing { heads: 4 });
    assert_eq!(grid(Strategy::PassQ, 4), Strategy::Grid { heads: 1, queries: 1, keys: 4 });
    for name in [Strategy::AllToAll, Strategy::PassQ] {
        let form = grid(name, 4);
        assert_eq!(form.published_on(4), name);
        assert_eq!((form.published_on(8), name.route()), (form, None));
        assert_eq!(grid(name, 1), Strategy::Ring);
    }
    // KV heads are replicated: 8 ranks, 2 KV heads; but not 3 ranks, or more than query heads
    assert_eq!(HeadGrid::of(&dims, 8, Strategy::AllToAll).unwrap().unwrap().replicas(), 4);
    for ranks in [3, 16] {
        let error = HeadGrid::of(&dims, ranks, Strategy::AllToAll).unwrap_err().to_string();
        assert!(error.starts_with("strategy: got heads in groups of"), "{error}");
    }
    let error = HeadGrid::of(&dims, 3, of_nodes).unwrap_err().to_string();
    assert_eq!(error, "strategy: got once-per-node:2, want nodes of a divisor of 3 ranks");
}

#[test]
fn a_route_of_a_strategy_is_planned_for_the_ring_alone() {
    let spec =
        Spec { mask: Arc::new(mask::Causal::default()), ..Spec::new(dims(4, 4, 64), DType::F32) };
    let placement = Placement::new(vec![0, 0, 1, 1]);
    let options = TrafficOptions { backward: true, placement: Some(&placement), ..FORWARD };
    let of = |options: &TrafficOptions<'_>| {
        let all = StrategyTraffic::of_routes(&spec, 4, options, &mut || ()).unwrap();
        all.into_iter().map(|of| of.strategy).collect::<Vec<_>>()
    };
    let once_per_node = Strategy::OncePerNode { node_ranks: 2 };
    assert_eq!(of(&options), [Strategy::AllGather, once_per_node]);
    assert_eq!(of(&TrafficOptions { placement: None, ..options }), [Strategy::AllGather]);
    let given = TrafficOptions { route: Some(Route::RelayUp), ..options };
    assert_eq!(of(&given), []);
    // all-gather has the fewest rows of any route, in the memory of all blocks
    let all = StrategyTraffic::of_routes(&spec, 4, &options, &mut || ()).unwrap();
    let ring = StrategyTraffic::of(&spec, all[0].grid, &options, &mut || ()).unwrap();
    assert!(all[0].total() <= ring.total());
    assert!(all[0].memory_max_rank > ring.memory_max_rank);
}

#[test]
fn members_divide_ranks_and_heads() {
    let error = |q_heads, kv_heads, ranks, members| {
        HeadGrid::new(&dims(q_heads, kv_heads, 8), ranks, members).unwrap_err().to_string()
    };
    assert!(error(8, 8, 8, 0).contains("divides the 8 ranks"));
    assert!(error(8, 8, 6, 4).contains("divides the 6 ranks"));
    assert!(error(6, 6, 8, 4).contains("divides the 6 query heads"));
    assert!(error(12, 6, 8, 4).contains("divides the KV heads, or is a multiple of them (6)"));
    for (q_heads, kv_heads, members) in [(8, 8, 4), (8, 2, 4), (12, 3, 6), (6, 6, 3), (8, 1, 8)] {
        let dims = dims(q_heads, kv_heads, 8);
        let grid = HeadGrid::new(&dims, 2 * members, members).unwrap();
        assert_eq!(grid.replicas(), (members / kv_heads).max(1));
        let mut next = 0;
        for member in 0..members {
            let heads = grid.q_heads(member);
            assert_eq!(heads.start, next);
            next = heads.end;
            let kv = grid.kv_heads(member);
            let shard = Dims { q_heads: heads.len(), kv_heads: kv.len(), ..dims };
            shard.validate().unwrap();
            for (local, head) in heads.enumerate() {
                assert_eq!(kv.start + shard.kv_head(local), dims.kv_head(head));
            }
        }
        assert_eq!(next, q_heads);
    }
}

#[test]
fn a_grid_has_as_many_parts_as_ranks() {
    let of = |heads, queries, keys| {
        HeadGrid::of(&dims(6, 3, 8), 12, Strategy::Grid { heads, queries, keys })
    };
    let grid = of(3, 2, 2).unwrap().unwrap();
    assert_eq!((grid.groups(), grid.members(), grid.columns(), grid.head_parts()), (2, 6, 2, 3));
    assert_eq!(grid.strategy(), Strategy::Grid { heads: 3, queries: 2, keys: 2 });
    let columns: Vec<usize> = (0..6).map(|member| grid.column(member)).collect();
    assert_eq!(columns, [0, 0, 0, 1, 1, 1]);
    assert_eq!((grid.q_heads(1), grid.q_heads(4), grid.kv_heads(5)), (2..4, 2..4, 2..3));
    assert!(grid.shares(Side::Kv, 3, 5) && !grid.shares(Side::Kv, 2, 3));
    assert!(grid.shares(Side::Q, 2, 3));
    // the simplest of equal strategies
    assert_eq!(of(3, 4, 1).unwrap().unwrap().strategy(), Strategy::HeadsRing { heads: 3 });
    assert_eq!(of(1, 12, 1).unwrap().unwrap().strategy(), Strategy::Ring);
    let error = |heads, queries, keys| of(heads, queries, keys).unwrap_err().to_string();
    assert_eq!(error(1, 2, 3), "strategy: got grid:2x3, want a grid of 12 parts, one per rank");
    assert_eq!(error(usize::MAX, 2, 2).matches("want a grid of 12 parts").count(), 1);
    assert!(error(4, 3, 1).contains("divides the 6 query heads"));
    assert!(error(2, 3, 2).contains("divides the KV heads, or is a multiple of them (3)"));
    assert_eq!(HeadGrid::of(&dims(6, 3, 8), 12, Strategy::Auto), Ok(None));
}

#[test]
fn key_columns_refuse_what_they_do_not_merge() {
    let spec = Spec::new(dims(4, 4, 64), DType::F32);
    let grid = HeadGrid::with_columns(&spec.dims, 4, 1, 2).unwrap();
    grid.check(&spec, true).unwrap();
    let has_columns =
        |spec: &Spec| HeadGrid::candidates(spec, 8, true).iter().any(|grid| grid.columns() > 1);
    // columns of an output that is not normalised are merged by their maxima
    let unnormalized = Spec { normalize: false, ..spec.clone() };
    grid.check(&unnormalized, true).unwrap();
    assert!(has_columns(&spec) && has_columns(&unnormalized));
    let reproducible = Spec { leaf_rows: Some(16), ..spec };
    assert_eq!(
        grid.check(&reproducible, false).unwrap_err().to_string(),
        "reproducible is not supported by keys in 2 columns of ranks"
    );
    assert!(!has_columns(&reproducible));
}

/// Bytes of tensors and statistics, against those of the formula: heads × query parts × key columns
/// h × a × b. Partial outputs are in f32.
#[test]
fn bytes_are_those_of_the_published_formula() {
    for (q_heads, kv_heads, ranks) in
        [(32, 32, 8), (32, 32, 64), (64, 8, 8), (64, 8, 64), (8, 1, 8)]
    {
        let len = 64 * ranks;
        let spec = Spec::new(dims(q_heads, kv_heads, len), DType::Bf16);
        for traffic in StrategyTraffic::of_all(&spec, ranks, &FORWARD, &mut || ()).unwrap() {
            let grid = traffic.grid;
            let p = ranks as f64;
            let [h, a, b] =
                [grid.head_parts(), grid.groups(), grid.columns()].map(|parts| parts as f64);
            let out_bytes = if grid.columns() == 1 { 2.0 } else { 4.0 };
            // a KV head cannot be divided
            let kv = (kv_heads as f64 / h).max(1.0);
            let q = q_heads as f64 / h;
            let queries = len as f64 * q * (1.0 / a - 1.0 / p);
            let keys = len as f64 * kv * (1.0 / b - 1.0 / p);
            // maximum and sum, and lse where no columns are merged
            let statistics = if grid.columns() == 1 { 3.0 } else { 2.0 };
            let want =
                queries * (64.0 * (2.0 + out_bytes) + statistics * 4.0) + keys * 2.0 * 64.0 * 2.0;
            assert_eq!(traffic.forward.len(), ranks);
            for &sent in &traffic.forward {
                assert_eq!(sent, want.round() as u128, "{q_heads}:{kv_heads} {ranks} {grid:?}");
            }
        }
    }
}

/// A grid that sends fewer bytes may have key columns of unequal work.
#[test]
fn a_grid_for_documents_is_as_balanced_as_the_ring() {
    let mut left_out = 0;
    for (q_heads, long) in [(1, 700), (1, 2000), (2, 1500), (2, 3000)] {
        for ranks in [8, 16] {
            let mut starts = vec![0, long];
            while let Some(&last) = starts.last()
                && last < 4096
            {
                starts.push((last + 40 + last * 37 % 211).min(4096));
            }
            let batch = Batch { cum_seqlens_q: Some(starts), ..Batch::default() };
            let mask = Arc::new(mask::Causal::default());
            let spec = Spec { mask, ..Spec::new(dims(q_heads, 1, 4096), DType::F32) };
            let balanced = Layout::balanced(&spec, &batch, ranks).unwrap();
            for layout in [balanced, Layout::Contiguous] {
                let options =
                    TrafficOptions { layout: Some(&layout), batch: Some(&batch), ..FORWARD };
                let tick = &mut || ();
                let all = StrategyTraffic::of_all(&spec, ranks, &options, tick).unwrap();
                let balance = |of: &StrategyTraffic| of.balance(&spec, &options, &mut || ());
                let work: Vec<f64> =
                    all.iter().map(|of| balance(of).unwrap().work_max_over_mean).collect();
                let limit = work[0].max(1.02);
                let chosen = StrategyTraffic::choose(&all, &spec, &options, tick).unwrap();
                assert!(work[chosen] <= limit, "{work:?}, {}", all[chosen].strategy);
                for (of, work) in all.iter().zip(&work) {
                    let is_cheaper = of.total() < all[chosen].total();
                    assert!(!is_cheaper || *work > limit, "{}", of.strategy);
                    left_out += usize::from(is_cheaper);
                }
            }
        }
    }
    assert!(left_out > 0);
}

/// The least value of the formula of docs/semantics.md over all grids of `ranks` ranks that divide
/// the heads: bytes that a rank receives in a forward pass, without lse.
fn least_bytes(q_heads: usize, kv_heads: usize, len: usize, ranks: usize, dtype: DType) -> f64 {
    let divisors = |n: usize| (1..=n).filter(move |part| n.is_multiple_of(*part));
    let head_parts = divisors(ranks).filter(|h| {
        q_heads.is_multiple_of(*h) && (kv_heads.is_multiple_of(*h) || h.is_multiple_of(kv_heads))
    });
    let bytes = |h: usize, b: usize| {
        let part = |parts: usize| 1.0 / parts as f64 - 1.0 / ranks as f64;
        // partial outputs are in the accumulator's type
        let out = if b > 1 { dtype.accumulator() } else { dtype };
        let queries = q_heads as f64 / h as f64 * part(ranks / h / b);
        let keys = (kv_heads as f64 / h as f64).max(1.0) * part(b);
        let widths = [dtype.bytes() + out.bytes(), 2 * dtype.bytes()].map(|width| width as f64);
        (len * 64) as f64 * (queries * widths[0] + keys * widths[1])
    };
    let grids = head_parts.flat_map(|h| divisors(ranks / h).map(move |b| bytes(h, b)));
    grids.fold(f64::INFINITY, f64::min)
}

#[test]
fn the_choice_is_within_a_tenth_of_the_best_grid() {
    for (q_heads, kv_heads) in [(32, 32), (64, 8), (8, 1)] {
        for ranks in [8, 64, 512] {
            for dtype in [DType::F32, DType::Bf16] {
                let len = 64 * ranks;
                let spec = Spec::new(dims(q_heads, kv_heads, len), dtype);
                let all = StrategyTraffic::of_all(&spec, ranks, &FORWARD, &mut || ()).unwrap();
                let chosen =
                    &all[StrategyTraffic::choose(&all, &spec, &FORWARD, &mut || ()).unwrap()];
                let sent = chosen.total() as f64 / ranks as f64;
                let ratio = sent / least_bytes(q_heads, kv_heads, len, ranks, dtype);
                let name = format!("{q_heads}:{kv_heads}, {ranks} ranks, {}", chosen.strategy);
                assert!((1.0..=1.1).contains(&ratio), "{name}: {ratio}");
            }
        }
    }
    // elements of a row, in units of len · 64, as published
    let elements = |q_heads, kv_heads, ranks| {
        let len = 64 * ranks;
        least_bytes(q_heads, kv_heads, len, ranks, DType::F32) / (len * 64 * 4) as f64
    };
    for (got, want) in [
        (elements(32, 32, 8), 14.0),
        (elements(32, 32, 64), 2.9375),
        (elements(64, 8, 256), 1.9297),
        (elements(64, 8, 1024), 0.9824),
    ] {
        assert!((got - want).abs() < 1e-3, "{got}, {want}");
    }
}

#[test]
fn sums_over_heads_are_refused_in_the_reproducible_order() {
    let spec = Spec { leaf_rows: Some(256), ..Spec::new(dims(8, 2, 512), DType::F32) };
    let sizes = |spec: &Spec, backward| -> Vec<usize> {
        HeadGrid::candidates(spec, 8, backward).iter().map(HeadGrid::members).collect()
    };
    assert_eq!(sizes(&spec, false), [1, 2, 4, 8]);
    assert_eq!(sizes(&spec, true), [1, 2]);
    let shared = Spec { sinks: Some(annulus_core::SinkShape::shared(1)), ..spec.clone() };
    assert_eq!(sizes(&shared, true), [1]);
    let per_head = Spec { sinks: Some(annulus_core::SinkShape::per_head(1)), ..spec.clone() };
    assert_eq!(sizes(&per_head, true), [1, 2]);
    let bias = |heads| Spec { bias: Some([1, heads, 1, 512]), ..spec.clone() };
    assert_eq!(sizes(&bias(1), true), [1]);
    assert_eq!(sizes(&bias(8), true), [1, 2]);
    let error = HeadGrid::new(&spec.dims, 8, 4).unwrap().check(&spec, true).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a reproducible backward pass with fewer KV heads than ranks of a group is not supported \
         by heads in groups of 4 ranks"
    );
}

#[test]
fn heads_keep_their_numbers() {
    let masks = (0..4).map(|h| Arc::new(mask::Causal { offset: h }) as mask::SharedMask).collect();
    let spec = Spec {
        mask: Arc::new(mask::PerHead(masks)),
        bias_function: Some(Arc::new(annulus_core::Alibi { slopes: vec![1.0, 2.0, 3.0] })),
        ..Spec::new(dims(4, 4, 16), DType::F32)
    };
    let grid = HeadGrid::new(&spec.dims, 4, 2).unwrap();
    let shard = grid.spec_of(&spec, 1);
    shard.validate().unwrap();
    assert_eq!(shard.whole_head(1), (3, 4));
    assert_eq!(spec.whole_head(1), (1, 4));
    let query = |head| mask::Query { batch: 0, head, row: 5, position: 5 };
    let key = |position| mask::Key { row: 0, position };
    assert!(shard.mask.visible(&query(1), &key(8)) && !shard.mask.visible(&query(0), &key(8)));
    assert_eq!(shard.mask.band(0, 1), spec.mask.band(0, 3));
    assert_eq!(shard.mask.intervals(&query(0)), spec.mask.intervals(&query(2)));
    let bias = shard.bias_function.as_ref().unwrap();
    assert_eq!(bias.distance_slopes(), Some(&[3.0][..]));
    assert_eq!([0, 1].map(|head| bias.bias(&query(head), &key(7))), [-6.0, 0.0]);
    // a fixed ring has the route that is chosen for it
    let groups = GroupLayout::choose(&shard, &grid, None, None, &mut || ());
    let again = Choice::auto(&shard, 2, Some(&groups.of_columns[0]), None, &mut || ());
    assert_eq!(again.layout, groups.of_columns[0]);
}

/// Documents of 40, 3 and 77 rows on 4 ranks.
#[test]
fn strategies_of_documents_have_the_same_pairs_and_a_balance_of_their_own() -> Result<()> {
    let starts = Some(vec![0, 40, 43, 120]);
    let batch = Batch { cum_seqlens_q: starts.clone(), cum_seqlens_k: starts, ..Batch::default() };
    let mask: SharedMask = Arc::new(mask::Causal::default());
    let spec = Spec { mask, ..Spec::new(Dims::new(1, 120, 4, 8), DType::F32) };
    let pairs = 4 * [40u128, 3, 77].map(|rows| rows * (rows + 1) / 2).iter().sum::<u128>();
    let tick = &mut || ();
    let options =
        TrafficOptions { layout: Some(&Layout::Contiguous), batch: Some(&batch), ..FORWARD };
    let of = |heads, columns, options: &TrafficOptions<'_>, tick: &mut dyn FnMut()| {
        let grid = HeadGrid::with_columns(&spec.dims, 4, heads, columns)?;
        StrategyTraffic::of(&spec, grid, options, tick)
    };
    for traffic in StrategyTraffic::of_all(&spec, 4, &options, tick)? {
        let of_ranks = traffic.pairs_of_ranks(&spec, &options)?;
        assert_eq!(of_ranks.iter().sum::<u128>(), pairs, "{}", traffic.strategy);
        let most = of_ranks.iter().max().map_or(0.0, |&most| most as f64);
        let balance = traffic.balance(&spec, &options, tick)?;
        assert_eq!(balance.work_max_over_mean, most * 4.0 / pairs as f64, "{}", traffic.strategy);
        assert_eq!(balance.rows_max_over_mean, 1.0);
    }
    // all heads of all rows divided: equal work; no ring, no rows
    let all_to_all = of(4, 1, &options, tick)?;
    let balance = all_to_all.balance(&spec, &options, tick)?;
    assert_eq!((balance.work_max_over_mean, balance.redundancy), (1.0, 1.0));
    // 30 rows a rank: rank 1 needs rows 0 to 30 of the first document, rank 2 rows 43 to 60 of the
    // last, and rank 3 these and rows 60 to 90
    assert_eq!(of(1, 1, &options, tick)?.ring_rows, RingRows { sent: 94, needed: 94 });
    let direct = TrafficOptions { route: Some(Route::Direct), ..options };
    assert_eq!(of(1, 1, &direct, tick)?.ring_rows.sent, 94);
    // down the ranks, blocks pass those that need none of them
    let down = TrafficOptions { route: Some(Route::RelayDown), ..options };
    let down = of(1, 1, &down, tick)?;
    let RingRows { sent, needed } = down.ring_rows;
    assert_eq!((sent, needed), (30 * 3 + 17 * 3 + 30 * 3, 94));
    assert_eq!(down.balance(&spec, &options, tick)?.redundancy, sent as f64 / 94.0);
    // two rings of two groups, each of which has two heads
    let halves = of(2, 1, &options, tick)?;
    assert_eq!(halves.ring_rows, RingRows { sent: 2 * 17, needed: 2 * 17 });
    Ok(())
}

fn backward(batch: Option<&Batch>) -> TrafficOptions<'_> {
    TrafficOptions { backward: true, kv_tile: 16, batch, ..TrafficOptions::FORWARD }
}

fn small_spec(len: usize, causal: bool) -> Spec {
    let mut spec = Spec::new(Dims::new(1, len, 12, 4).kv_heads(3), DType::F32);
    if causal {
        spec.mask = Arc::new(mask::Causal::default());
    }
    spec
}

/// Shards of 12 ranks: chunks of uneven lengths, dealt out of order.
fn uneven(len: i64) -> Layout {
    let shards: Vec<Runs> = (0..12)
        .map(|rank| {
            let chunk = |i: i64| len * i / 24..len * (i + 1) / 24;
            [(7 * rank + 5) % 24, (7 * rank + 5 + 84) % 24].map(chunk).into_iter().flatten()
        })
        .map(Iterator::collect)
        .collect();
    Layout::Custom(Arc::new(CustomLayout { q: shards.clone(), kv: shards }))
}

#[test]
fn rings_of_every_strategy_and_layout_are_right() {
    let lens: Vec<i64> = vec![0, 30, 31, 190, 240];
    let documents =
        Batch { cum_seqlens_q: Some(lens.clone()), cum_seqlens_k: Some(lens), ..Batch::default() };
    let mut checked = 0;
    for (causal, batch) in [(false, None), (true, None), (true, Some(&documents))] {
        for mode in [BackwardMode::OnePass, BackwardMode::TwoPass] {
            let spec = Spec { backward: mode, ..small_spec(240, causal) };
            let balanced = Layout::balanced(&spec, &documents, 12).unwrap();
            let given = [Layout::Contiguous, Layout::Zigzag, Layout::Striped, uneven(240)];
            for layout in given.into_iter().chain([balanced]) {
                let options = TrafficOptions { layout: Some(&layout), ..backward(batch) };
                for grid in HeadGrid::candidates(&spec, 12, true) {
                    let of = StrategyTraffic::of(&spec, grid, &options, &mut || ()).unwrap();
                    of.check(&spec, &options, &mut || ()).unwrap();
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 300, "{checked}");
    // fewer rows than ranks, and layouts that are cut at leaves
    for len in [0, 1, 5, 53, 600] {
        let spec = small_spec(len, false);
        let leaves = [Layout::Striped, Layout::Zigzag].map(|layout| layout.at_leaves(16));
        let whole = [Layout::Contiguous, Layout::Zigzag, Layout::Striped, uneven(len as i64)];
        for layout in whole.into_iter().chain(leaves) {
            let options = TrafficOptions { layout: Some(&layout), ..backward(None) };
            for grid in HeadGrid::candidates(&spec, 12, true) {
                let of = StrategyTraffic::of(&spec, grid, &options, &mut || ()).unwrap();
                of.check(&spec, &options, &mut || ()).unwrap();
            }
        }
    }
}

#[test]
fn reproducible_rings_of_members_are_right() {
    let spec = Spec { leaf_rows: Some(16), ..small_spec(240, true) };
    let options = backward(None);
    for grid in HeadGrid::candidates(&spec, 12, true) {
        let of = StrategyTraffic::of(&spec, grid, &options, &mut || ()).unwrap();
        of.check(&spec, &options, &mut || ()).unwrap();
    }
}
