//! Times computed by hand, and times that must not grow.

mod execution;
mod fields;
mod large;
mod receive_ahead;
mod token;

use std::sync::Arc;

use proptest::{prelude::*, strategy::Strategy as _};

use super::{
    network::{Network, Transfer},
    *,
};
use crate::{
    BackwardMode, Batch, Dims, HeadGrid, Layout, Route, Spec, Strategy, StrategyTraffic,
    TrafficOptions, mask,
};

/// Both passes with the layout and the route that are chosen.
const BOTH: TrafficOptions<'static> =
    TrafficOptions { backward: true, kv_tile: 64, ..TrafficOptions::FORWARD };
const FORWARD: TrafficOptions<'static> = TrafficOptions { backward: false, ..BOTH };

/// Rows of the plans below: a block of a rank has 262,144 bytes, and the pairs of two ranks
/// 67,108,864 FLOPs.
const LEN: usize = 1024;
const BLOCK_BYTES: f64 = 512.0 * 2.0 * 64.0 * 4.0;
const BLOCK_FLOPS: f64 = 512.0 * 512.0 * 4.0 * 64.0;

fn link(latency: f64, bandwidth: f64) -> Link {
    Link { latency, bandwidth, is_full_duplex: true }
}

/// Nodes of one rank.
fn machine(link: Link, flops: f64) -> Machine {
    Machine {
        ranks_per_node: 1,
        inside_node: None,
        between_nodes: Some(link),
        node_bandwidth: Some(1e30),
        message_overhead: 0.0,
        overlap: 1.0,
        merge_bandwidth: None,
        rates: vec![ComputeRate {
            dtype: DType::F32,
            head_dim: 64,
            forward: flops,
            backward: flops,
            token: None,
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

fn is_near(got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-9 * want.abs(), "got {got}, want {want}");
}

/// Seconds of the agreements before and after a pass.
fn agreements(ranks: usize, latency: f64) -> f64 {
    2.0 * (ranks as f64).log2().ceil() * latency
}

fn slow_rates(machine: &Machine) -> Vec<ComputeRate> {
    let half = |rate: &ComputeRate| ComputeRate { backward: rate.backward / 2.0, ..*rate };
    machine.rates.iter().map(half).collect()
}

#[test]
fn messages_delay_the_tiles_of_their_step() {
    let spec = Spec::new(Dims::new(1, LEN, 2, 64), DType::F32);
    // tiles of a block of two heads take 2 s, 5 s backward; its bytes no time, but delay tiles
    // by 0.05 s where they are sent and where they are received
    let without = machine(link(0.1, 1e30), BLOCK_FLOPS);
    let with = Machine { message_overhead: 0.05 / (2.0 * BLOCK_BYTES), ..without.clone() };
    let agreed = agreements(2, 0.1);
    let [of_none, of_some] = [&without, &with].map(|of| predict(of, &spec, 2, &BOTH));
    is_near(of_none.forward.seconds, agreed + 4.0);
    is_near(of_some.forward.seconds, agreed + 4.0 + 0.1);
    is_near(of_some.forward.exposed, agreed + 0.1);
    // blocks, then gradients
    is_near(of_none.backward.seconds, agreed + 10.0);
    is_near(of_some.backward.seconds, agreed + 10.0 + 0.2);
    assert_ne!(with.fingerprint(), without.fingerprint());

    // no tiles are computed under an exchange of heads
    let traffic = traffic_of(&spec, 2, 2, &BOTH);
    let of = |machine| Prediction::of(&traffic, &spec, &BOTH, machine, &mut || ()).unwrap();
    assert_eq!(of(&with), of(&without));

    for wrong in [-1e-9, f64::NAN, f64::INFINITY] {
        let machine = Machine { message_overhead: wrong, ..without.clone() };
        let error = machine.check().unwrap_err().to_string();
        let want = format!("message_overhead: got {wrong}, want a finite number of at least 0");
        assert_eq!(error, want);
    }
}

#[test]
fn two_ranks_with_slow_links() {
    let spec = Spec::new(Dims::new(1, LEN, 1, 64), DType::F32);
    // tiles of a block take 1 s, 2.5 s backward; its bytes 4 s; a latency 0.1 s. Times below are
    // from the end of the first agreement
    let agreed = agreements(2, 0.1);
    let machine = machine(link(0.1, BLOCK_BYTES / 4.0), BLOCK_FLOPS);
    let predicted = predict(&machine, &spec, 2, &BOTH);
    // parts arrive at 2.1, 3.1, 3.6 and 4.1 s; tiles of 1/2, 1/4, 1/8 and 1/8 s end at 2.6, 3.35,
    // 3.725 and 4.225 s
    is_near(predicted.forward.seconds, agreed + 4.225);
    is_near(predicted.forward.exposed, agreed + 4.225 - 2.0);
    // half of the local tiles under the block, the other's, half under the gradients
    is_near(predicted.backward.seconds, agreed + 4.1 + 2.5 + 4.1);
    is_near(predicted.backward.exposed, agreed + (4.1 - 1.25) * 2.0);
    is_near(predicted.seconds(), 2.0 * agreed + 4.225 + 10.7);
    is_near(predicted.bytes.between_nodes, 2.0 * BLOCK_BYTES * 3.0);
    assert_eq!(predicted.bytes.inside_node, 0.0);

    // ranks of half the rate: 5 s backward, of which 2.5 s hide under each transfer
    let slow = Machine { rates: slow_rates(&machine), ..machine.clone() };
    let seconds = predict(&slow, &spec, 2, &BOTH).backward.seconds;
    is_near(seconds, agreed + 4.1 + 5.0 + 4.1);

    let half = Link { is_full_duplex: false, ..link(0.1, BLOCK_BYTES / 4.0) };
    let machine = Machine { between_nodes: Some(half), ..machine };
    // the bytes take 8 s: the last part arrives at 8.1 s
    let seconds = predict(&machine, &spec, 2, &FORWARD).forward.seconds;
    is_near(seconds, agreed + 8.1 + 0.125);
}

#[test]
fn blocks_that_are_forwarded_hide_under_whole_steps() {
    let spec = Spec::new(Dims::new(1, 3 * 512, 1, 64), DType::F32);
    let options = TrafficOptions { layout: Some(&Layout::Contiguous), ..FORWARD };
    let machine = machine(link(0.1, BLOCK_BYTES / 4.0), BLOCK_FLOPS);
    // after the agreement of two rounds the first block arrives at 4.1 s; the tiles of it end at
    // 5.1 s, and the parts of the second arrive at 6.2, 7.2, 7.7 and 8.2 s
    let predicted = predict(&machine, &spec, 3, &options);
    let agreed = agreements(3, 0.1);
    is_near(agreed, 0.4);
    is_near(predicted.forward.seconds, agreed + 8.2 + 0.125);
    is_near(predicted.forward.exposed, agreed + 8.325 - 3.0);
    assert_eq!(predicted.backward, PassTime::default());
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
    is_near(half.forward.seconds, agreed + 1.0);
    assert_eq!(half.bytes, LinkBytes::default());
    // the middle one of 256, 512 and 256 rows is on both ranks: 256 rows of its keys, half a block,
    // arrive by 2.1 s. Its 256² pairs with the other rank take 0.25 s, those of the last part of 1/8
    // come after it
    let middle = time(&batch(&[0, 256, 768, 1024]));
    is_near(middle.forward.seconds, agreed + 2.1 + 0.25 / 8.0);
    is_near(middle.bytes.between_nodes, BLOCK_BYTES);
}

#[test]
fn latency_alone_and_compute_alone() {
    for ranks in [2, 4, 8] {
        let spec = Spec::new(Dims::new(1, 64 * ranks, 1, 64), DType::F32);
        let predicted = predict(&machine(link(0.5, 1e30), 1e30), &spec, ranks, &FORWARD);
        let latencies = agreements(ranks, 0.5) + 0.5 * (ranks - 1) as f64;
        is_near(predicted.forward.seconds, latencies);
        is_near(predicted.forward.exposed, latencies);

        let predicted = predict(&machine(link(1e-30, 1e30), 1e6), &spec, ranks, &BOTH);
        let flops = 64.0 * (64 * ranks) as f64 * 4.0 * 64.0;
        is_near(predicted.forward.seconds, flops / 1e6);
        is_near(predicted.backward.seconds, 2.5 * flops / 1e6);
        assert!(predicted.exposed() < 1e-9, "{predicted:?}");

        // 7 products in place of 5; the local block has 5 in the first pass
        let spec = Spec { backward: BackwardMode::TwoPass, ..spec };
        let predicted = predict(&machine(link(1e-30, 1e30), 1e6), &spec, ranks, &BOTH);
        let products = (5.0 + 7.0 * (ranks - 1) as f64) / ranks as f64;
        is_near(predicted.backward.seconds, products / 2.0 * flops / 1e6);
    }
}

#[test]
fn an_exchange_has_a_message_for_each_member() {
    let spec = Spec::new(Dims::new(1, 256, 4, 64), DType::F32);
    let traffic = traffic_of(&spec, 4, 4, &FORWARD);
    let of = |machine: &Machine| {
        Prediction::of(&traffic, &spec, &FORWARD, machine, &mut || ()).unwrap().forward
    };
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
    let of = |machine: &Machine| {
        Prediction::of(&traffic, &spec, &FORWARD, machine, &mut || ()).unwrap().forward
    };
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
    is_near(of(&two_nodes).forward.seconds, block / 1000.0);
    is_near(of(&two_nodes).bytes.between_nodes, 4.0 * block);
    let shared = Machine { node_bandwidth: Some(1500.0), ..two_nodes.clone() };
    is_near(of(&shared).forward.seconds, 2.0 * block / 1500.0);
    // the exchange is between ranks of one node: 64 rows, q, k and v of two heads, out, lse, maximum
    // and sum
    let exchanged = 64.0 * 2.0 * (3.0 * 64.0 * 4.0 + 67.0 * 4.0);
    is_near(of(&two_nodes).bytes.inside_node, 4.0 * exchanged);

    // a placement replaces the order of numbers, and makes the ranks of a node neighbours
    let placement = Placement::new(vec![0, 1, 0, 1]);
    let placed = TrafficOptions { placement: Some(&placement), ..FORWARD };
    let traffic = traffic_of(&spec, 4, 2, &placed);
    let predicted = Prediction::of(&traffic, &spec, &placed, &two_nodes, &mut || ()).unwrap();
    assert_eq!(predicted, of(&two_nodes));
}

#[test]
fn messages_share_the_ports_of_both_ends() {
    let seconds = |machine: &Machine, transfers: &[[usize; 2]]| -> Vec<f64> {
        let network = Network::new(machine, &[5, 5, 7, 9]).unwrap();
        let transfer = |&[from, to]: &[usize; 2]| Transfer::in_step(from, to, 600.0);
        let transfers: Vec<Transfer> = transfers.iter().map(transfer).collect();
        let all = network.seconds(&transfers);
        assert!(all.iter().all(|&[latency, _]| latency == 0.5));
        all.into_iter().map(|[_, seconds]| seconds).collect()
    };
    let full = Machine {
        inside_node: Some(link(0.5, 6000.0)),
        node_bandwidth: Some(1e30),
        ..machine(link(0.5, 600.0), 1.0)
    };
    // different kinds of links share nothing
    assert_eq!(seconds(&full, &[[0, 1], [0, 2], [3, 0]]), [0.1, 1.0, 1.0]);
    assert_eq!(seconds(&full, &[[0, 2], [0, 3]]), [2.0, 2.0]);
    assert_eq!(seconds(&full, &[[0, 3], [2, 3], [1, 2]]), [2.0, 2.0, 1.0]);
    let half = Link { is_full_duplex: false, ..link(0.5, 600.0) };
    let half = Machine { between_nodes: Some(half), ..full.clone() };
    assert_eq!(seconds(&half, &[[0, 2], [3, 0], [1, 0]]), [2.0, 2.0, 0.1]);
    assert_eq!(seconds(&half, &[[2, 0], [0, 3], [1, 0]]), [2.0, 2.0, 0.1]);
    // of a node, leaving or entering
    let shared = Machine { node_bandwidth: Some(800.0), ..full };
    assert_eq!(seconds(&shared, &[[0, 2], [1, 3], [3, 2]]), [2.0, 1.5, 2.0]);
    assert_eq!(seconds(&shared, &[[2, 0], [3, 1]]), [1.5, 1.5]);
}

#[test]
fn blocks_of_queries_meet_the_keys_that_they_attend_to() {
    let spec = Spec {
        mask: Arc::new(mask::Causal::default()),
        backward: BackwardMode::TwoPass,
        ..Spec::new(Dims::new(1, LEN, 1, 64), DType::F32)
    };
    let options = TrafficOptions { layout: Some(&Layout::Contiguous), ..BOTH };
    // a product of a block takes 1 s, the bytes of a block of queries 4 s
    let bandwidth = 512.0 * spec.query_row_layout().bytes() as f64 / 4.0;
    let machine = machine(link(1e-30, bandwidth), BLOCK_FLOPS / 2.0);
    let predicted = predict(&machine, &spec, 2, &options);
    let half = 513.0 / 1024.0;
    // rank 1: half a block of its own, then the block of rank 0; its last part arrives late
    is_near(predicted.forward.seconds, BLOCK_BYTES / bandwidth + 0.25);
    // backward it has arrived in time; rank 0 then computes on parts of the queries of rank 1,
    // which arrive after 2, 3, 3.5 and 4 s
    is_near(predicted.backward.seconds, 5.0 * half + 3.0 + 6.0);
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
        let least = predictions.iter().map(Prediction::seconds).fold(f64::INFINITY, f64::min);
        assert_eq!(predictions[index].seconds(), least);
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
fn partial_results_of_columns_are_merged() {
    const COLUMNS: usize = 4;
    let spec = Spec::new(Dims::new(1, LEN, 2, 64), DType::Bf16);
    let free = link(1e-30, 1e30);
    let machine = Machine {
        merge_bandwidth: Some(1e3),
        rates: vec![ComputeRate {
            dtype: DType::Bf16,
            head_dim: 64,
            forward: 1e30,
            backward: 1e30,
            token: None,
        }],
        ..machine(free, 1.0)
    };
    let grid = HeadGrid::with_columns(&spec.dims, COLUMNS, 1, COLUMNS).unwrap();
    let traffic = StrategyTraffic::of(&spec, grid, &BOTH, &mut || ()).unwrap();
    let predict =
        |machine: &Machine| Prediction::of(&traffic, &spec, &BOTH, machine, &mut || ()).unwrap();
    let got = predict(&machine);
    // own rows of both heads: out, maximum and sum, dq, of every column, as f32
    let numbers = (LEN / COLUMNS * 2 * COLUMNS) as f64;
    is_near(got.forward.seconds, numbers * (64.0 + 2.0) * 4.0 / 1e3);
    is_near(got.backward.seconds, numbers * 64.0 * 4.0 / 1e3);
    // they are the bytes that all ranks send after a pass, and a rank's own
    let fields = crate::ExchangeFields::of_forward(&spec, &grid);
    let rows = [(LEN / COLUMNS) as u64; 2];
    let part = crate::ExchangeFields::bytes_between(&fields.outputs, &grid, [0, 1], rows);
    is_near(got.forward.seconds, COLUMNS as f64 * part as f64 / 1e3);
    // the merge of all parts but the last and the own hides under slow messages
    let part = part as f64 / 1e3;
    let slow = Machine { between_nodes: Some(link(1e-30, part * 1e3 / (2.0 * part))), ..machine };
    let without = Machine { merge_bandwidth: None, ..slow.clone() };
    let forward = |machine| predict(machine).forward.seconds;
    is_near(forward(&slow), forward(&without) + 2.0 * part);
    // nothing is merged without columns
    let ring = |machine: &Machine| {
        let traffic = traffic_of(&spec, COLUMNS, 1, &FORWARD);
        Prediction::of(&traffic, &spec, &FORWARD, machine, &mut || ()).unwrap()
    };
    assert_eq!(ring(&slow), ring(&without));
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
            let bytes = predicted.bytes.inside_node + predicted.bytes.between_nodes;
            prop_assert_eq!(bytes, traffic.total() as f64, "{}", traffic.strategy);
            let one_node = ranks <= ranks_per_node;
            prop_assert!(!one_node || predicted.bytes.between_nodes == 0.0);
            prop_assert_eq!(predicted.backward.seconds > 0.0, backward);
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
            prop_assert!(fast.seconds() <= slow.seconds() * (1.0 + 1e-12), "{:?} {:?}", slow, fast);
            prop_assert_eq!(slow.bytes, fast.bytes);
            // a pass has at least the tiles of a mean rank
            prop_assert!(slow.exposed() <= slow.seconds());
        }
    }
}
