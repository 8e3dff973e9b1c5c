//! Times computed by hand, and times that must not grow.

mod recorded;

use std::sync::Arc;

use proptest::{prelude::*, strategy::Strategy as _};

use super::{prediction::Network, *};
use crate::{HeadGrid, Layout, Route, Strategy, StrategyTraffic, TrafficOptions};
use annulus_core::{BackwardMode, Batch, Dims, Spec, mask};

/// Both passes with the layout and the route that are chosen.
const BOTH: TrafficOptions<'static> =
    TrafficOptions { backward: true, kv_tile: 64, ..TrafficOptions::FORWARD };
const FORWARD: TrafficOptions<'static> = TrafficOptions { backward: false, ..BOTH };

/// Rows of the plans below: a block of a rank has 262,144 bytes, and the pairs of two ranks
/// 67,108,864 FLOPs.
const LEN: usize = 1024;
const BLOCK_BYTES: f64 = 512.0 * 2.0 * 64.0 * 4.0;
const BLOCK_FLOPS: f64 = 512.0 * 512.0 * 4.0 * 64.0;

pub(super) fn link(latency: f64, bandwidth: f64) -> Link {
    Link { latency, bandwidth }
}

/// Nodes of one rank.
pub(super) fn machine(link: Link, flops: f64) -> Machine {
    Machine {
        ranks_per_node: 1,
        inside_node: None,
        between_nodes: Some(link),
        node_bandwidth: Some(1e30),
        rates: vec![ComputeRate {
            dtype: DType::F32,
            head_dim: 64,
            forward: flops,
            backward: flops,
        }],
        memory: 1 << 40,
    }
}

fn traffic_of(
    spec: &Spec,
    ranks: usize,
    heads: usize,
    options: &TrafficOptions<'_>,
) -> StrategyTraffic {
    let grid = HeadGrid::new(&spec.dims, ranks, heads).unwrap();
    StrategyTraffic::of(spec, grid, options, &mut || ()).unwrap()
}

fn predict(
    machine: &Machine,
    spec: &Spec,
    ranks: usize,
    options: &TrafficOptions<'_>,
) -> Prediction {
    let traffic = traffic_of(spec, ranks, 1, options);
    Prediction::of(&traffic, spec, options, machine, &mut || ()).unwrap()
}

pub(super) fn is_near(got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-9 * want.abs(), "got {got}, want {want}");
}

/// Seconds of the agreements before and after a pass.
fn agreements(ranks: usize, latency: f64) -> f64 {
    2.0 * (ranks as f64).log2().ceil() * latency
}

#[test]
fn messages_hide_under_the_tiles_of_a_step() {
    let spec = Spec::new(Dims::new(1, LEN, 1, 64), DType::F32);
    // tiles of a block take 1 s, 2.5 s backward; its bytes 4 s; a latency 0.1 s
    let agreed = agreements(2, 0.1);
    let slow_links = machine(link(0.1, BLOCK_BYTES / 4.0), BLOCK_FLOPS);
    let forward = predict(&slow_links, &spec, 2, &FORWARD);
    is_near(forward.seconds, agreed + 1.0 + 4.1);
    is_near(forward.exposed, agreed + 1.0 + 4.1 - 2.0);
    let both = predict(&slow_links, &spec, 2, &BOTH);
    // block and gradients are in different steps, of tiles of 5/3 s
    is_near(both.seconds - forward.seconds, agreed + 4.1 + 5.0 / 3.0 + 4.0);
    assert_eq!(both.bytes_between_nodes, 6 * BLOCK_BYTES as u128);
    assert_eq!(both.bytes_inside_nodes, 0);
    // under tiles that take longer an eighth of a message remains
    let slow_ranks = machine(link(0.1, BLOCK_BYTES / 4.0), BLOCK_FLOPS / 10.0);
    let forward = predict(&slow_ranks, &spec, 2, &FORWARD);
    is_near(forward.seconds, agreed + 20.0 + 4.1 / 8.0);
    is_near(forward.exposed, agreed + 4.1 / 8.0);
    // of three ranks the later blocks wait
    let spec = Spec::new(Dims::new(1, 3 * 512, 1, 64), DType::F32);
    let options = TrafficOptions { layout: Some(&Layout::Contiguous), ..FORWARD };
    let of = |options| predict(&slow_links, &spec, 3, options).seconds;
    is_near(of(&options), agreements(3, 0.1) + 1.0 + 8.2);
    // causal: the last rank computes 2.5 s in three steps, and receives 8.2 s. Receives that are
    // posted two steps ahead hide under the tiles of two
    let causal = Spec { mask: Arc::new(mask::Causal::default()), ..spec.clone() };
    let of = |receive_ahead| {
        let options = TrafficOptions { receive_ahead, ..options };
        predict(&slow_links, &causal, 3, &options).seconds
    };
    let tiles = (2.0 + 513.0 / 1024.0) / 3.0;
    is_near(of(1), agreements(3, 0.1) + tiles + 8.2);
    is_near(of(2), of(1));
}

#[test]
fn documents_on_one_rank_each_send_nothing() {
    let spec = Spec::new(Dims::new(1, LEN, 1, 64), DType::F32);
    let machine = machine(link(0.1, BLOCK_BYTES / 4.0), BLOCK_FLOPS);
    let batch = |lens: &[i64]| Batch { cum_seqlens_q: Some(lens.to_vec()), ..Batch::default() };
    let time = |batch: &Batch| {
        let options =
            TrafficOptions { layout: Some(&Layout::Contiguous), batch: Some(batch), ..FORWARD };
        predict(&machine, &spec, 2, &options)
    };
    // a document of 512 rows on each rank: its own tiles of 1 s
    let half = time(&batch(&[0, 512, 1024]));
    let agreed = agreements(2, 0.1);
    is_near(half.seconds, agreed + 1.0);
    assert_eq!([half.bytes_inside_nodes, half.bytes_between_nodes], [0, 0]);
    // the middle one of 256, 512 and 256 rows is on both ranks: 256 rows of its keys, half a block,
    // arrive in 2.1 s. A rank has 3 · 256² pairs, 0.75 s, in two steps
    let middle = time(&batch(&[0, 256, 768, 1024]));
    is_near(middle.seconds, agreed + 0.75 / 2.0 + 2.1);
    assert_eq!(middle.bytes_between_nodes, BLOCK_BYTES as u128);
}

#[test]
fn latency_alone_and_compute_alone() {
    for ranks in [2, 4, 8] {
        let spec = Spec::new(Dims::new(1, 64 * ranks, 1, 64), DType::F32);
        let predicted = predict(&machine(link(0.5, 1e30), 1e30), &spec, ranks, &FORWARD);
        let latencies = agreements(ranks, 0.5) + 0.5 * (ranks - 1) as f64;
        is_near(predicted.seconds, latencies);
        is_near(predicted.exposed, latencies);

        let free = machine(link(1e-30, 1e30), 1e6);
        let flops = 64.0 * (64 * ranks) as f64 * 4.0 * 64.0;
        is_near(predict(&free, &spec, ranks, &FORWARD).seconds, flops / 1e6);
        let predicted = predict(&free, &spec, ranks, &BOTH);
        is_near(predicted.seconds, 3.5 * flops / 1e6);
        assert!(predicted.exposed < 1e-9, "{predicted:?}");

        // 7 products in place of 5
        let spec = Spec { backward: BackwardMode::TwoPass, ..spec };
        is_near(predict(&free, &spec, ranks, &BOTH).seconds, 4.5 * flops / 1e6);
    }
    // a ring of one rank takes one pass
    let alone = Spec::new(Dims::new(1, 64, 1, 64), DType::F32);
    let alone = Spec { backward: BackwardMode::TwoPass, ..alone };
    let predicted = predict(&machine(link(0.5, 1.0), 1e6), &alone, 1, &BOTH);
    is_near(predicted.seconds, 3.5 * 64.0 * 64.0 * 4.0 * 64.0 / 1e6);
}

#[test]
fn an_exchange_has_a_message_for_each_member() {
    let spec = Spec::new(Dims::new(1, 256, 4, 64), DType::F32);
    let traffic = traffic_of(&spec, 4, 4, &FORWARD);
    let of =
        |machine: &Machine| Prediction::of(&traffic, &spec, &FORWARD, machine, &mut || ()).unwrap();
    // 3 messages before the pass and 3 after it
    is_near(of(&machine(link(0.5, 1e30), 1e30)).seconds, agreements(4, 0.5) + 3.0);
    // 64 rows of one head: q, k and v there, out, lse, maximum and sum back
    let bytes = 3.0 * 64.0 * (3.0 * 64.0 * 4.0 + 67.0 * 4.0);
    is_near(of(&machine(link(1e-30, 1000.0), 1e30)).seconds, bytes / 1000.0);
    is_near(of(&machine(link(1e-30, 1000.0), 1e30)).exposed, bytes / 1000.0);
}

#[test]
fn a_grid_of_queries_and_keys_has_exchanges_around_its_ring() {
    let spec = Spec::new(Dims::new(1, 256, 1, 64), DType::F32);
    let grid = HeadGrid::with_columns(&spec.dims, 4, 1, 2).unwrap();
    let traffic = StrategyTraffic::of(&spec, grid, &FORWARD, &mut || ()).unwrap();
    let of =
        |machine: &Machine| Prediction::of(&traffic, &spec, &FORWARD, machine, &mut || ()).unwrap();
    let latencies = agreements(4, 0.5) + 3.0 * 0.5;
    is_near(of(&machine(link(0.5, 1e30), 1e30)).seconds, latencies);
    // 64 rows: q there, k and v to the other rank of the column, partial out, maximum and
    // sum back
    let bytes = 64.0 * 4.0 * (64.0 + 128.0 + 66.0);
    is_near(of(&machine(link(1e-30, 1000.0), 1e30)).seconds, bytes / 1000.0);
    // a rank computes 128 queries × 128 keys
    let flops = 128.0 * 128.0 * 4.0 * 64.0;
    is_near(of(&machine(link(1e-30, 1e30), 1e6)).seconds, flops / 1e6);
}

#[test]
fn ranks_of_a_node_share_its_network() {
    let spec = Spec::new(Dims::new(1, 256, 4, 64), DType::F32);
    let traffic = traffic_of(&spec, 4, 2, &FORWARD);
    let two_nodes = Machine {
        ranks_per_node: 2,
        inside_node: Some(link(1e-30, 1e30)),
        ..machine(link(1e-30, 1000.0), 1e30)
    };
    let of =
        |machine: &Machine| Prediction::of(&traffic, &spec, &FORWARD, machine, &mut || ()).unwrap();
    // the ring over two groups sends 128 rows of two heads from each rank
    let block = 128.0 * 2.0 * 2.0 * 64.0 * 4.0;
    is_near(of(&two_nodes).seconds, block / 1000.0);
    is_near(of(&two_nodes).bytes_between_nodes as f64, 4.0 * block);
    let shared = Machine { node_bandwidth: Some(1500.0), ..two_nodes.clone() };
    is_near(of(&shared).seconds, 2.0 * block / 1500.0);
    // the exchange is between ranks of one node: 64 rows, q, k and v of two heads, out, lse,
    // maximum and sum
    let exchanged = 64.0 * 2.0 * (3.0 * 64.0 * 4.0 + 67.0 * 4.0);
    is_near(of(&two_nodes).bytes_inside_nodes as f64, 4.0 * exchanged);

    // a placement replaces the order of numbers, and makes the ranks of a node neighbours
    let placement = Placement::new(vec![0, 1, 0, 1]);
    let placed = TrafficOptions { placement: Some(&placement), ..FORWARD };
    let traffic = traffic_of(&spec, 4, 2, &placed);
    let predicted = Prediction::of(&traffic, &spec, &placed, &two_nodes, &mut || ()).unwrap();
    assert_eq!(predicted, of(&two_nodes));
}

#[test]
fn messages_share_the_links_of_both_ends() {
    let seconds = |machine: &Machine, messages: &[[usize; 2]]| -> Vec<[f64; 2]> {
        let network = Network::new(machine, &[5, 5, 7, 9]).unwrap();
        let mut loads = network.loads();
        messages.iter().for_each(|&ends| loads.add(ends, 600.0, true));
        (0..4).map(|rank| loads.seconds(rank)).collect()
    };
    let machine = Machine {
        inside_node: Some(link(0.5, 6000.0)),
        node_bandwidth: Some(1e30),
        ..machine(link(0.25, 600.0), 1.0)
    };
    // the receiver waits for the latency; links of different kinds share nothing
    let all = seconds(&machine, &[[0, 1], [0, 2], [3, 0]]);
    assert_eq!(all, [[0.1, 1.25], [0.6, 0.0], [0.0, 1.25], [0.0, 1.0]]);
    // two messages that are sent, or received
    assert_eq!(seconds(&machine, &[[0, 2], [0, 3]])[0], [0.0, 2.0]);
    assert_eq!(seconds(&machine, &[[0, 3], [2, 3]])[3], [0.0, 2.5]);
    // all ranks of a node, leaving or entering
    let shared = Machine { node_bandwidth: Some(800.0), ..machine };
    let all = seconds(&shared, &[[0, 2], [1, 3]]);
    assert_eq!(all, [[0.0, 1.5], [0.0, 1.5], [0.0, 1.25], [0.0, 1.25]]);
    assert_eq!(seconds(&shared, &[[2, 0], [3, 1]])[1], [0.0, 1.75]);
}

/// 64 query and 8 KV heads on 8 ranks of two nodes.
fn grouped() -> Spec {
    let dims = Dims { q_heads: 64, ..Dims::new(1, 8192, 64, 64).kv_heads(8) };
    Spec { mask: Arc::new(mask::Causal::default()), ..Spec::new(dims, DType::F32) }
}

fn two_nodes(inside: Link, between: Link, flops: f64) -> Machine {
    Machine {
        ranks_per_node: 4,
        inside_node: Some(inside),
        node_bandwidth: Some(4.0 * between.bandwidth),
        ..machine(between, flops)
    }
}

#[test]
fn the_least_time_is_chosen() {
    let spec = grouped();
    let all = StrategyTraffic::of_all(&spec, 8, &BOTH, &mut || ()).unwrap();
    let chosen = |machine: &Machine| {
        let (index, predictions) = machine.choose(&all, &spec, &BOTH, &mut || ()).unwrap();
        let least = predictions.iter().map(|of| of.seconds).fold(f64::INFINITY, f64::min);
        assert!(predictions[index].seconds <= 1.01 * least);
        all[index].strategy
    };
    // communication hides under tiles in a ring, and never in an exchange
    let fast = link(1e-6, 1e9);
    assert_eq!(chosen(&two_nodes(fast, fast, 1e11)), Strategy::Ring);
    // few blocks cross a slow network if the ranks of a node divide the heads
    let slow = link(1e-3, 1e6);
    let by_heads = two_nodes(link(1e-6, 1e11), slow, 1e13);
    assert_eq!(chosen(&by_heads), Strategy::HeadsRing { heads: 4 });
    // the fewest bytes are those of the ring
    let chosen = StrategyTraffic::choose(&all, &spec, &BOTH, &mut || ()).unwrap();
    assert_eq!(all[chosen].strategy, Strategy::Ring);
}

#[test]
fn buffers_must_fit_the_memory() {
    let spec = grouped();
    let all = StrategyTraffic::of_all(&spec, 8, &BOTH, &mut || ()).unwrap();
    let machine = two_nodes(link(1e-6, 1e11), link(1e-3, 1e6), 1e13);
    let memory = |index: usize| u64::try_from(all[index].memory_max_rank).unwrap();
    let fastest = machine.choose(&all, &spec, &BOTH, &mut || ()).unwrap().0;
    assert!(fastest > 0 && memory(fastest) > memory(0), "{fastest}");
    let small = Machine { memory: memory(fastest) - 1, ..machine.clone() };
    let (chosen, predictions) = small.choose(&all, &spec, &BOTH, &mut || ()).unwrap();
    assert!(chosen != fastest && predictions[chosen].fits && !predictions[fastest].fits);
    let tiny = Machine { memory: 1, ..machine };
    let (chosen, predictions) = tiny.choose(&all, &spec, &BOTH, &mut || ()).unwrap();
    assert!(predictions.iter().all(|of| !of.fits));
    assert_eq!(memory(chosen), (0..all.len()).map(memory).min().unwrap());
}

#[test]
fn missing_links_and_rates_are_named() {
    let spec = Spec::new(Dims::new(1, 64, 1, 64), DType::F32);
    let traffic = traffic_of(&spec, 4, 1, &FORWARD);
    let error = |machine: &Machine, spec: &Spec| {
        let predicted = Prediction::of(&traffic, spec, &FORWARD, machine, &mut || ());
        predicted.unwrap_err().to_string()
    };
    let ends = machine(link(1.0, 1.0), 1.0);
    let one_node = Machine {
        ranks_per_node: 2,
        inside_node: Some(link(1.0, 1.0)),
        between_nodes: None,
        node_bandwidth: None,
        ..ends.clone()
    };
    assert_eq!(
        error(&one_node, &spec),
        "machine: got no link between_nodes, want one that has it: 4 ranks are on 2 nodes"
    );
    let bf16 = Spec::new(spec.dims, DType::Bf16);
    assert!(error(&ends, &bf16).starts_with("machine: got no rate of bf16, want"));
    let placement = Placement::new(vec![0, 0, 1, 2]);
    let placed = TrafficOptions { placement: Some(&placement), ..FORWARD };
    let error = Prediction::of(&traffic, &spec, &placed, &ends, &mut || ()).unwrap_err();
    assert!(error.to_string().contains("no link inside_node"), "{error}");
}

fn specs() -> impl proptest::strategy::Strategy<Value = Spec> {
    let masks = prop_oneof![
        Just(Arc::new(mask::Everything) as mask::SharedMask),
        Just(Arc::new(mask::Causal::default()) as mask::SharedMask),
        (1u64..200).prop_map(|left| {
            let window =
                mask::Window { left: Some(left), right: Some(0), first_visible: 0, offset: 0 };
            Arc::new(window) as mask::SharedMask
        }),
    ];
    let modes = prop_oneof![Just(BackwardMode::OnePass), Just(BackwardMode::TwoPass)];
    (64usize..400, masks, modes, any::<bool>()).prop_map(|(len, mask, backward, reproducible)| {
        let dims = Dims { q_heads: 8, ..Dims::new(1, len, 8, 16).kv_heads(4) };
        let leaf_rows = reproducible.then_some(32);
        Spec { mask, backward, leaf_rows, ..Spec::new(dims, DType::F32) }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn bytes_of_links_are_those_of_the_plan(
        spec in specs(), ranks in 1usize..9, ranks_per_node in 1usize..5, backward in any::<bool>(),
    ) {
        let options = TrafficOptions { backward, ..BOTH };
        let machine = Machine { ranks_per_node, ..two_nodes(link(1.0, 1e3), link(2.0, 1e2), 1e6) };
        for traffic in StrategyTraffic::of_all(&spec, ranks, &options, &mut || ()).unwrap() {
            let predicted = Prediction::of(&traffic, &spec, &options, &machine, &mut || ()).unwrap();
            let bytes = predicted.bytes_inside_nodes + predicted.bytes_between_nodes;
            prop_assert_eq!(bytes, traffic.total(), "{}", traffic.strategy);
            let one_node = ranks <= ranks_per_node;
            prop_assert!(!one_node || predicted.bytes_between_nodes == 0);
        }
    }

    #[test]
    fn a_better_machine_is_never_slower(
        spec in specs(), ranks in 2usize..9, better in 1.0f64..10.0, which in 0usize..6,
        bandwidth in 1e2f64..1e6, flops in 1e4f64..1e9, route in prop::option::of(0usize..3),
    ) {
        let options = TrafficOptions { route: route.map(|route| Route::ALL[route]), ..BOTH };
        let machine = two_nodes(link(1e-2, 2.0 * bandwidth), link(1e-1, bandwidth), flops);
        let mut faster = machine.clone();
        let [inside, between] = [&mut faster.inside_node, &mut faster.between_nodes];
        match (which, inside, between) {
            (0, Some(inside), _) => inside.bandwidth *= better,
            (1, Some(inside), _) => inside.latency /= better,
            (2, _, Some(between)) => between.bandwidth *= better,
            (3, _, Some(between)) => between.latency /= better,
            (4, ..) => faster.node_bandwidth = faster.node_bandwidth.map(|of| of * better),
            _ => faster.rates[0].forward *= better,
        }
        for traffic in StrategyTraffic::of_all(&spec, ranks, &options, &mut || ()).unwrap() {
            let of = |machine| Prediction::of(&traffic, &spec, &options, machine, &mut || ()).unwrap();
            let [slow, fast] = [of(&machine), of(&faster)];
            prop_assert!(fast.seconds <= slow.seconds * (1.0 + 1e-12), "{:?} {:?}", slow, fast);
            prop_assert_eq!(slow.bytes_between_nodes, fast.bytes_between_nodes);
            // a pass has at least the tiles of a mean rank
            prop_assert!(slow.exposed <= slow.seconds);
        }
    }
}

#[test]
fn wrong_fields_are_named() {
    let good = two_nodes(link(1e-6, 1e9), link(1e-5, 1e8), 1e12);
    good.check().unwrap();
    type Change = fn(&mut Machine, f64);
    let numbers: [(&str, Change); 7] = [
        ("inside_node.latency", |m, x| m.inside_node.as_mut().unwrap().latency = x),
        ("inside_node.bandwidth", |m, x| m.inside_node.as_mut().unwrap().bandwidth = x),
        ("between_nodes.latency", |m, x| m.between_nodes.as_mut().unwrap().latency = x),
        ("between_nodes.bandwidth", |m, x| m.between_nodes.as_mut().unwrap().bandwidth = x),
        ("node_bandwidth", |m, x| m.node_bandwidth = Some(x)),
        ("rates[0].forward", |m, x| m.rates[0].forward = x),
        ("rates[0].backward", |m, x| m.rates[0].backward = x),
    ];
    for (field, change) in numbers {
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let mut machine = good.clone();
            change(&mut machine, wrong);
            let error = machine.check().unwrap_err().to_string();
            let want = format!("{field}: got {wrong}, want a finite number above 0");
            assert_eq!(error, want);
        }
    }
    type Ruin = fn(&mut Machine);
    let others: [(&str, Ruin); 7] = [
        ("ranks_per_node: got 0, want at least 1", |m| m.ranks_per_node = 0),
        ("memory: got 0, want at least 1", |m| m.memory = 0),
        ("rates: got none, want at least one", |m| m.rates.clear()),
        ("rates[0].head_dim: got 0, want at least 1", |m| m.rates[0].head_dim = 0),
        ("inside_node: got null, want a link", |m| m.inside_node = None),
        ("node_bandwidth: got null, want a number", |m| m.node_bandwidth = None),
        ("node_bandwidth: got a number, want null", |m| m.between_nodes = None),
    ];
    for (want, change) in others {
        let mut machine = good.clone();
        change(&mut machine);
        let error = machine.check().unwrap_err().to_string();
        assert!(error.starts_with(want), "{error}");
        assert_ne!(machine.fingerprint(), good.fingerprint(), "{want}");
    }
    for (field, change) in numbers {
        let mut machine = good.clone();
        change(&mut machine, 3.0);
        assert_ne!(machine.fingerprint(), good.fingerprint(), "{field}");
    }
}

#[test]
fn the_nearest_head_dim_has_the_rate() {
    let rate = |head_dim, forward| ComputeRate {
        head_dim,
        forward,
        ..machine(link(1.0, 1.0), 1.0).rates[0]
    };
    let machine = Machine {
        rates: vec![rate(64, 1.0), rate(128, 2.0), rate(256, 3.0)],
        ..machine(link(1.0, 1.0), 1.0)
    };
    let of = |head_dim| machine.rate(DType::F32, head_dim).unwrap().forward;
    assert_eq!([1, 64, 90, 91, 128, 200, 512].map(of), [1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
}
