//! Plans of the facade.
//!
//! * `forward_into` and `backward_into` write the caller's tensors, whatever their strides and the
//!   layout, and the same bits as the calls that return new tensors.
//! * `Strategy::Auto` on a machine: the least predicted time, and machines that are refused.
//! * Sums of gradients over ranks that are long enough to be made by slices: their bits are those
//!   of sums in ring order, and their bytes are predicted.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use annulus::{
    Attention, Backward, BackwardViewMut, DType, Dims, Division, Error, Forward, ForwardViewMut,
    Layout, LocalRing, Plan, Report, Result, Runtime, Setup, SinkShape, Strategy, Tensors,
    comm::threads::{each_rank, ring},
    ndarray::{Array2, Array4, Axis},
    planning::{ComputeRate, Link, Machine},
};

const LEN: usize = 60;

fn tensor(heads: usize, step: f64) -> Array4<f64> {
    Array4::from_shape_fn((2, LEN, heads, 8), |(b, i, h, c)| {
        (step * (b * 97 + i * 31 + h * 7 + c) as f64).sin()
    })
}

/// Returns the same numbers in another memory order, in which no vector is contiguous.
fn scattered(tensor: &Array4<f64>) -> Array4<f64> {
    let memory = tensor.view().permuted_axes([0, 2, 3, 1]).as_standard_layout().into_owned();
    memory.permuted_axes([0, 3, 1, 2])
}

#[test]
fn the_callers_tensors_get_the_bits_of_new_ones() {
    let [q, k, v, dout] =
        [(4, 0.3), (2, 0.7), (2, 1.1), (4, 0.9)].map(|(heads, step)| tensor(heads, step));
    let sinks = Array2::from_elem((4, 1), 0.2);
    for (layout, ranks, unnormalized, bias_rows) in [
        (Layout::Contiguous, 1, true, LEN),
        (Layout::Contiguous, 3, false, LEN),
        (Layout::Zigzag, 3, true, LEN),
        (Layout::Striped, 4, false, 1),
    ] {
        let bias = Array4::from_shape_fn((1, 4, bias_rows, LEN), |(_, h, i, j)| {
            ((h + i + 2 * j) as f64).cos()
        });
        let attention = Attention::new()
            .dtype(annulus::DType::F64)
            .causal(true)
            .bias([1, 4, bias_rows, LEN])
            .softmax_aux(SinkShape::per_head(1))
            .unnormalized(unnormalized);
        let setup = (attention, Division::new().layout(layout.clone()));
        let mut ring = LocalRing::new(setup, Dims::new(2, LEN, 4, 8).kv_heads(2), ranks).unwrap();
        let with =
            |q, k, v| Tensors::new(q, k, v).with_bias(bias.view()).with_softmax_aux(sinks.view());
        let tensors = with(q.view(), k.view(), v.view());
        let new = ring.forward(&tensors).unwrap();
        let new_gradients = ring.backward(&tensors, &new, dout.view(), None).unwrap();

        // numbers that must be overwritten
        let [q, k, v] = [&q, &k, &v].map(scattered);
        let strided = with(q.view(), k.view(), v.view());
        let mut got = Forward { out: scattered(&new.out), ..new.clone() };
        got.out.fill(f64::NAN);
        let statistics = [&mut got.max, &mut got.sum, &mut got.ties].into_iter().flatten();
        statistics.chain([&mut got.lse]).for_each(|of| of.fill(f64::NAN));
        let reports = ring.forward_into(&strided, got.view_mut()).unwrap();
        assert_eq!(reports.len(), ranks);
        assert_eq!(got, new, "{layout:?} on {ranks}");
        let [dq, dk, dv] =
            [&q, &k, &v].map(|tensor| scattered(&Array4::from_elem(tensor.raw_dim(), f64::NAN)));
        let mut gradients = Backward { dq, dk, dv, ..new_gradients.clone() };
        gradients.dbias.as_mut().unwrap().fill(f64::NAN);
        gradients.dsoftmax_aux.as_mut().unwrap().fill(f64::NAN);
        let into = gradients.view_mut();
        ring.backward_into(&strided, &got.view(), dout.view(), None, into).unwrap();
        assert_eq!(gradients, new_gradients, "{layout:?} on {ranks}");
    }
}

/// dbias is that of a bias which was not declared: its rows are dealt to the ranks, so the ring must
/// refuse it before the ranks start.
#[test]
fn outputs_that_do_not_fit_are_refused_by_name_and_the_plan_still_works() {
    let x = tensor(2, 0.3);
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    for layout in [Layout::Contiguous, Layout::Zigzag] {
        let attention = Attention::new().dtype(annulus::DType::F64);
        let setup = (attention, Division::new().layout(layout.clone()));
        let mut ring = LocalRing::new(setup, Dims::new(2, LEN, 2, 8), 3).unwrap();
        let forward = ring.forward(&tensors).unwrap();
        let mut good = forward.clone();
        let mut gradients = ring.backward(&tensors, &forward, x.view(), None).unwrap();
        let mut short = Array4::zeros((2, LEN - 1, 2, 8));
        let mut extra = good.lse.clone();
        let mut dbias = Array4::zeros((2, 4, 4, 8));
        let outputs = ForwardViewMut { out: short.view_mut(), ..good.view_mut() };
        let of_out = ring.forward_into(&tensors, outputs).map(drop);
        let outputs = ForwardViewMut { ties: Some(extra.view_mut()), ..good.view_mut() };
        let of_ties = ring.forward_into(&tensors, outputs).map(drop);
        let outputs = ForwardViewMut { sum: None, ..good.view_mut() };
        let of_sum = ring.forward_into(&tensors, outputs).map(drop);
        let outputs = BackwardViewMut { dbias: Some(dbias.view_mut()), ..gradients.view_mut() };
        let view = forward.view();
        let of_dbias = ring.backward_into(&tensors, &view, x.view(), None, outputs).map(drop);
        for (name, refused) in
            [("out", of_out), ("ties", of_ties), ("sum", of_sum), ("dbias", of_dbias)]
        {
            let error = refused.expect_err(name);
            let named =
                matches!(&error, Error::InvalidArgument { argument, .. } if argument == name);
            assert!(named, "{name}: {error}");
        }
        assert!(ring.forward(&tensors).is_ok());
    }
}

#[test]
fn threads_are_those_of_a_backend_that_is_given() {
    let dims = Dims::new(1, 8, 1, 4);
    let setup = Setup::from((Attention::new(), Division::new(), Runtime::new().threads(2)));
    let own = LocalRing::from_plans(setup, dims, 2, |_, setup, endpoint| {
        Plan::with_backend(setup, dims, annulus::backend::Cpu::new(1)?, endpoint)
    });
    assert!(matches!(own, Err(Error::InvalidArgument { argument, .. }) if argument == "threads"));
}

#[test]
fn a_block_size_changes_messages_and_no_result() {
    let q = tensor(2, 0.3);
    let tensors = Tensors::new(q.view(), q.view(), q.view());
    let dims = Dims::new(2, LEN, 2, 8);
    let attention = Attention::new().dtype(annulus::DType::F64);
    let contiguous = Division::new().layout(Layout::Contiguous);
    let outputs = |size: Option<u64>| {
        let division = contiguous.clone().kv_block_size(size);
        let mut ring = LocalRing::new((&attention, division), dims, 2).unwrap();
        let forward = ring.forward(&tensors).unwrap();
        let gradients = ring.backward(&tensors, &forward, q.view(), None).unwrap();
        (forward.out, gradients.dq, gradients.dk)
    };
    // a tile holds the whole block, which by default travels in parts of less than a tile
    let one_part = outputs(Some(1));
    assert_eq!(outputs(Some(u64::MAX)), one_part);
    let default = outputs(None);
    assert_ne!(one_part.0, default.0, "the order of sums is another");
    let pairs = [(&one_part.0, &default.0), (&one_part.1, &default.1), (&one_part.2, &default.2)];
    assert!(pairs.iter().all(|(a, b)| (*a - *b).iter().all(|difference| difference.abs() < 1e-13)));
    let refused =
        LocalRing::new((&attention, Division::new().kv_block_size(0)), dims, 2).unwrap_err();
    assert!(refused.to_string().contains("kv_block_size"), "{refused}");
}

/// 64 query and 8 KV heads.
const DIMS: Dims =
    Dims { batch: 1, q_len: 512, kv_len: 512, q_heads: 64, kv_heads: 8, head_dim: 8, value_dim: 8 };
const RANKS: usize = 8;

fn link(latency: f64, bandwidth: f64) -> Link {
    Link { latency, bandwidth }
}

/// Two nodes of four ranks.
fn machine(inside: Link, between: Link, flops: f64) -> Machine {
    Machine {
        ranks_per_node: 4,
        inside_node: Some(inside),
        between_nodes: Some(between),
        node_bandwidth: Some(4.0 * between.bandwidth),
        rates: vec![ComputeRate {
            dtype: DType::F32,
            head_dim: 64,
            forward: flops,
            backward: flops,
        }],
        memory: 1 << 40,
    }
}

/// Tiles take longer than messages, which are hidden in a ring.
fn slow_ranks() -> Machine {
    machine(link(1e-6, 1e9), link(1e-6, 1e9), 1e9)
}

/// Messages between nodes take longer than all else.
fn slow_network() -> Machine {
    machine(link(1e-6, 1e11), link(1e-3, 1e6), 1e13)
}

fn auto(machine: Option<Machine>) -> Setup {
    let division = Division::new().strategy(Strategy::Auto).machine(machine);
    Setup::from((Attention::new().causal(true), division))
}

#[test]
fn the_least_predicted_time_is_taken() {
    let of = |machine: Option<Machine>| {
        let ring = LocalRing::new(auto(machine), DIMS, RANKS).unwrap();
        ring.plan().strategy()
    };
    assert_eq!(of(Some(slow_ranks())), Strategy::Ring);
    assert_eq!(of(Some(slow_network())), Strategy::HeadsRing { heads: 4 });
    // the fewest bytes
    assert_eq!(of(None), Strategy::Ring);
    // a strategy that is not auto would ignore the machine
    let ring = Division::new().machine(slow_network());
    let refused = LocalRing::new((Attention::new(), ring), DIMS, RANKS).unwrap_err().to_string();
    assert_eq!(
        refused,
        "machine: got one, for ring, want none: the strategy auto alone depends on it"
    );
}

#[test]
fn machines_that_do_not_fit_are_refused() {
    // also where it has no effect
    let wrong = Machine { memory: 0, ..slow_network() };
    let refused = LocalRing::new((Attention::new(), Division::new().machine(wrong)), DIMS, RANKS);
    assert!(refused.unwrap_err().to_string().starts_with("machine.memory: got 0"));
}

const HEADS: usize = 4;

fn value(seed: usize, index: usize) -> f32 {
    let mixed = (index * 2_654_435_761 + seed * 40_503) % 1_000_003;
    mixed as f32 / 500_001.5 - 1.0
}

/// dbias and dsinks of one rank, its report and its bytes by the plan.
struct Gradients {
    dbias: Array4<f32>,
    dsinks: Array2<f32>,
    report: Report,
}

/// Gradients of every rank: summed over ranks, or its own parts.
fn gradients(ranks: usize, kv_len: usize, layout: &Layout, local: bool) -> Vec<Gradients> {
    gradients_by(Strategy::Ring, ranks, kv_len, layout, local)
}

fn gradients_by(
    strategy: Strategy,
    ranks: usize,
    kv_len: usize,
    layout: &Layout,
    local: bool,
) -> Vec<Gradients> {
    // few queries, so that the pass is short, and a key bias that is longer than a chunk
    let q_len = 2 * ranks;
    let dims = Dims::new(1, q_len, HEADS, 8).kv_len(kv_len);
    let attention = Setup::from((
        Attention::new()
            .bias([1, HEADS, 1, kv_len])
            .softmax_aux(SinkShape::per_head(1))
            .local_gradients(local),
        Division::new().layout(layout.clone()).strategy(strategy),
    ));
    each_rank(ring(ranks), |_, transport| -> Result<Gradients> {
        let mut plan = Plan::new(&attention, dims, transport)?;
        let rows = |seed, rows: &annulus::planning::Runs| {
            let rows: Vec<usize> = rows.iter().map(|row| row as usize).collect();
            Array4::from_shape_fn((1, rows.len(), HEADS, 8), |(_, row, head, element)| {
                value(seed, (rows[row] * HEADS + head) * 8 + element)
            })
        };
        let q = rows(1, plan.q_rows());
        let [k, v] = [2, 3].map(|seed| rows(seed, plan.kv_rows()));
        let bias = Array4::from_shape_fn((1, HEADS, 1, kv_len), |(_, head, _, key)| {
            value(4, head * kv_len + key)
        });
        let sinks = Array2::from_shape_fn((HEADS, 1), |(head, _)| value(5, head));
        let tensors = Tensors::new(q.view(), k.view(), v.view())
            .with_bias(bias.view())
            .with_softmax_aux(sinks.view());
        let forward = plan.forward(&tensors)?;
        let backward = plan.backward(&tensors, &forward, q.view(), None)?;
        let report = backward.reports[0];
        let predicted = plan.bytes_predicted(annulus::comm::ring::PassKind::Backward);
        assert_eq!(report.bytes_predicted, predicted);
        assert_eq!(report.bytes_sent, predicted);
        let (dbias, dsinks) = (backward.dbias.unwrap(), backward.dsoftmax_aux.unwrap());
        Ok(Gradients { dbias, dsinks, report })
    })
    .unwrap()
}

#[test]
fn a_long_sum_has_the_bits_of_one_in_ring_order_and_its_bytes_are_predicted() {
    // one chunk of all numbers, several with a rest that is gathered whole, and a rest of slices
    for (ranks, kv_len) in [(3, 2049), (3, 6145), (3, 9000), (5, 10_241), (7, 30_001)] {
        for layout in [Layout::Contiguous, Layout::Zigzag] {
            let parts = gradients(ranks, kv_len, &layout, true);
            let sums = gradients(ranks, kv_len, &layout, false);
            let numbers = HEADS * kv_len;
            let sum_of = |part: &dyn Fn(&Gradients) -> Vec<f32>| -> Vec<f32> {
                let mut sum = vec![0.0f64; part(&parts[0]).len()];
                for of_rank in &parts {
                    let terms = part(of_rank);
                    sum.iter_mut().zip(terms).for_each(|(sum, term)| *sum += f64::from(term));
                }
                sum.into_iter().map(|sum| sum as f32).collect()
            };
            let dbias = |of: &Gradients| of.dbias.iter().copied().collect::<Vec<_>>();
            let dsinks = |of: &Gradients| of.dsinks.iter().copied().collect::<Vec<_>>();
            let (want_dbias, want_dsinks) = (sum_of(&dbias), sum_of(&dsinks));
            assert!(want_dbias.iter().any(|&number| number != 0.0));
            for (of_rank, own) in sums.iter().zip(&parts) {
                assert!(dbias(of_rank) == want_dbias, "{ranks} ranks, {kv_len} keys");
                assert_eq!(dsinks(of_rank), want_dsinks);
                // not the numbers of all ranks: of each chunk a rank sends all slices but its own
                let sent = of_rank.report.bytes_sent - own.report.bytes_sent;
                let most = 8 * (numbers - numbers / ranks + ranks * 8) as u64;
                assert!(sent > 0 && sent <= most, "{sent} bytes, at most {most}");
            }
            let sent = |of: &[Gradients]| of.iter().map(|of| of.report.bytes_sent).sum::<u64>();
            let chunk = ranks * 8192;
            let in_slices = match numbers % chunk {
                rest if rest <= 8192 => numbers - rest,
                _ => numbers,
            };
            let want = 8 * (ranks as u64 - 1) * in_slices as u64;
            assert_eq!(sent(&sums) - sent(&parts), want, "{ranks} ranks, {kv_len} keys");
        }
    }
}

#[test]
fn two_ranks_and_short_sums_send_no_slices() {
    for (ranks, kv_len) in [(2, 4099), (3, 2048)] {
        let parts = gradients(ranks, kv_len, &Layout::Contiguous, true);
        let sums = gradients(ranks, kv_len, &Layout::Contiguous, false);
        for (sum, part) in sums.iter().zip(&parts) {
            assert_eq!(sum.report.bytes_sent, part.report.bytes_sent);
        }
        assert_eq!(sums[0].dbias.sum_axis(Axis(3)).dim(), (1, HEADS, 1));
    }
}

/// Grids sum over all ranks, to the bits of a ring, and predict the bytes of their slices.
#[test]
fn grids_sum_by_slices_too() {
    const RANKS: usize = 6;
    for kv_len in [9000, 2048] {
        let numbers = HEADS * kv_len;
        let ring = gradients(RANKS, kv_len, &Layout::Contiguous, false);
        for (heads, queries, keys) in [(2, 3, 1), (1, 3, 2), (2, 1, 3), (1, 1, 6)] {
            let grid = match keys {
                1 => Strategy::HeadsRing { heads },
                _ => Strategy::Grid { heads, queries, keys },
            };
            let of_grid = |local| gradients_by(grid, RANKS, kv_len, &Layout::Contiguous, local);
            let (sums, parts) = (of_grid(false), of_grid(true));
            for (sum, of_ring) in sums.iter().zip(&ring) {
                let is_close = |a: f32, b: f32| (a - b).abs() < 1e-5;
                let mut pairs = sum.dbias.iter().zip(&of_ring.dbias);
                assert!(pairs.all(|(&a, &b)| is_close(a, b)), "{grid}, {kv_len} keys");
                let mut pairs = sum.dsinks.iter().zip(&of_ring.dsinks);
                assert!(pairs.all(|(&a, &b)| is_close(a, b)), "{grid}, {kv_len} keys");
                assert_eq!(sum.dbias, sums[0].dbias);
                assert_eq!(sum.dsinks, sums[0].dsinks);
            }
            let sent = |of: &[Gradients]| of.iter().map(|of| of.report.bytes_sent).sum::<u64>();
            // also those that the rings of one key column have summed over groups
            let over_groups = if keys == 1 && numbers > 8192 * heads {
                let groups = RANKS / heads;
                if groups > 2 { (groups - 1) * numbers } else { 0 }
            } else {
                0
            };
            let over_ranks = if numbers > 8192 { (RANKS - 1) * numbers } else { 0 };
            let want = 8 * (over_groups + over_ranks) as u64;
            assert_eq!(sent(&sums) - sent(&parts), want, "{grid}, {kv_len} keys");
        }
    }
}
