//! Sums of gradients over ranks that are long enough to be made by slices: their bits are those of
//! sums in ring order, and their bytes are predicted.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use annulus::{
    Attention, Dims, Division, Layout, Plan, Report, Result, Setup, SinkShape, Strategy, Tensors,
    comm::threads::{each_rank, ring},
};
use ndarray::{Array2, Array4, Axis};

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
