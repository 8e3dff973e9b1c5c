//! JVP and double backward over MPI: the bits of a ring of threads, which the suite compares with
//! the oracle, and the predicted bytes. A KV head that is shared, a causal mask, sinks, a bias that
//! is summed over ranks, dropout; every layout, heads that are divided, key lists with a bias.

use std::sync::Arc;

use annulus::{
    Attention, Batch, Dims, Division, Layout, Plan, Setup, SinkShape, Strategy, Tensors,
    mask::KeyLists,
};
use annulus_comm::{
    mpi::{Mpi, Settings},
    threads,
};
use annulus_core::{Result, Runs, index};
use ndarray::{Array2, Array4, Axis};

use crate::{Harness, Verdict, ensure};

const LEN: usize = 301;

/// Results of a rank, all numbers one after another.
type Numbers = Vec<f64>;

/// Compares both passes of a plan with those of a ring of threads.
pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    let ranks = harness.ranks();
    let heads = if ranks.is_multiple_of(2) { Strategy::HeadsRing { heads: 2 } } else { RING };
    for (layout, strategy, has_lists) in [
        (Layout::Contiguous, RING, false),
        (Layout::Striped, RING, true),
        (Layout::Zigzag, RING, false),
        (Layout::Zigzag, heads, false),
    ] {
        let attention = Attention::new()
            .dtype(annulus::DType::F64)
            .causal(true)
            .logits_soft_cap(5.0)
            .bias([1, 4, 1, LEN])
            .softmax_aux(SinkShape::per_head(2))
            .dropout(0.1, 7)
            .second_derivatives(true);
        let setup = Setup::from((attention, Division::new().layout(layout).strategy(strategy)));
        let compared = compare(ranks, &setup, has_lists, settings);
        harness.share(compared.map_err(|error| error.to_string()).flatten())?;
    }
    Ok(())
}

const RING: Strategy = Strategy::Ring;

fn compare(ranks: usize, setup: &Setup, has_lists: bool, settings: &Settings) -> Result<Verdict> {
    let dims = Dims { kv_heads: 2, value_dim: 5, ..Dims::new(1, LEN, 4, 8) };
    let mut plan = Plan::new(setup, dims, Mpi::world(settings.clone())?)?;
    let got = run(&mut plan, dims, has_lists)?;
    let of_threads = threads::each_rank(threads::ring(ranks), |_, transport| {
        run(&mut Plan::new(setup, dims, transport)?, dims, has_lists)
    })?;
    let right = got == of_threads[plan.rank()] && got.0.iter().any(|&number| number != 0.0);
    Ok(ensure(right && got.1, || "other bits or bytes than a ring of threads".to_owned()))
}

/// Returns the results of this rank, and true if it sent the predicted bytes.
fn run(plan: &mut Plan, dims: Dims, has_lists: bool) -> Result<(Numbers, bool)> {
    let (q_rows, kv_rows) = (plan.q_rows().clone(), plan.kv_rows().clone());
    let of = |seed| {
        let q = tensor(seed, &q_rows, [dims.q_heads, dims.head_dim]);
        let k = tensor(seed + 1, &kv_rows, [dims.kv_heads, dims.head_dim]);
        let v = tensor(seed + 2, &kv_rows, [dims.kv_heads, dims.value_dim]);
        let all = Runs::counting(0, LEN as u64);
        let bias = tensor(seed + 3, &all, [dims.q_heads, 1]).permuted_axes([0, 2, 3, 1]);
        let sinks = tensor(seed + 4, &Runs::counting(0, 4), [2, 1]);
        let sinks = sinks.index_axis_move(Axis(0), 0).index_axis_move(Axis(2), 0);
        ([q, k, v, bias], sinks)
    };
    let (primal, direction) = (of(0), of(10));
    let dout = tensor(20, &q_rows, [dims.q_heads, dims.value_dim]);
    let (primal, direction) = (tensors(&primal), tensors(&direction));
    let pairs = if has_lists { listed(&q_rows)? } else { KeyLists::default() };
    let list_direction: Vec<f64> = (0..pairs.len()).map(|pair| (pair % 13) as f64 - 6.0).collect();
    if has_lists {
        plan.update(&Batch { key_lists: Some(Arc::new(pairs)), ..Batch::default() })?;
    }
    let list_bias = has_lists.then_some(&list_direction[..]);
    let jvp = plan.jvp(&primal, &direction, list_bias)?;
    let double = plan.double_backward(&primal, dout.view(), None, &direction, list_bias)?;
    let sent = |report: &annulus::Report| report.bytes_sent == report.bytes_predicted;
    let as_predicted = jvp.reports.iter().chain(&double.inputs.reports).all(sent);
    let numbers = jvp.out_tangent.into_iter().chain(jvp.lse_tangent).chain(double.ddout);
    let gradients = double.inputs;
    let numbers = numbers.chain(gradients.dq).chain(gradients.dk).chain(gradients.dv);
    let numbers = numbers.chain(plan.list_bias_gradient().unwrap_or_default());
    let shared = gradients.dbias.into_iter().flatten();
    let shared = shared.chain(gradients.dsoftmax_aux.into_iter().flatten());
    Ok((numbers.chain(shared).collect(), as_predicted))
}

/// Lists of nine keys for each of the rows, with a bias.
fn listed(rows: &Runs) -> Result<KeyLists> {
    let keys_of = |row: i64| {
        let mut keys: Vec<u32> = (0..9).map(|at| (row as u32 * 3 + at * 37) % LEN as u32).collect();
        keys.sort_unstable();
        keys
    };
    let keys: Vec<u32> = rows.iter().flat_map(keys_of).collect();
    let bias = keys.iter().map(|&key| f64::from(key % 5) * 0.25 - 0.5).collect();
    KeyLists::new((0..=rows.len()).map(|row| row * 9).collect(), keys)?.with_bias(bias)
}

/// Views q, k, v and bias, and the sinks.
fn tensors(([q, k, v, bias], sinks): &([Array4<f64>; 4], Array2<f64>)) -> Tensors<'_, f64> {
    Tensors::new(q.view(), k.view(), v.view()).with_bias(bias.view()).with_softmax_aux(sinks.view())
}

/// Numbers that depend on the global row.
fn tensor(seed: usize, rows: &Runs, [heads, dim]: [usize; 2]) -> Array4<f64> {
    let rows: Vec<usize> = rows.iter().map(|row| index(row.cast_unsigned())).collect();
    Array4::from_shape_fn((1, rows.len(), heads, dim), |(_, row, head, element)| {
        let number = ((rows[row] * heads + head) * dim + element) * 31 + seed * 17;
        (number % 101) as f64 / 50.0 - 1.0
    })
}
