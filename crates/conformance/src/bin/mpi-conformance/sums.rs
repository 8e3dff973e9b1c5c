//! Gradients that are summed over ranks by slices: the bits of a ring of threads, and the bytes of
//! the plan.

use annulus::{Attention, Dims, Division, Layout, PassKind, Plan, Report, Setup, Tensors};
use annulus_comm::mpi::{Mpi, Settings};
use annulus_core::{Result, Runs, index};
use ndarray::Array4;

use crate::harness::{Harness, Verdict, ensure};

/// Keys: with the heads more numbers than are gathered whole, and several chunks on 3 ranks.
const KEYS: usize = 15_001;
const HEADS: usize = 2;
const DIM: usize = 4;

fn tensor(seed: usize, rows: &Runs) -> Array4<f32> {
    let rows: Vec<usize> = rows.iter().map(|row| index(row.cast_unsigned())).collect();
    Array4::from_shape_fn((1, rows.len(), HEADS, DIM), |(_, row, head, element)| {
        let number = ((rows[row] * HEADS + head) * DIM + element) * 31 + seed * 17;
        (number % 101) as f32 / 50.0 - 1.0
    })
}

/// Runs both passes on one rank. Returns dbias, the report of the backward pass and the bytes that
/// the plan predicts for it.
fn run(plan: &mut Plan, q_rows: &Runs, kv_rows: &Runs) -> Result<(Array4<f32>, Report, u64)> {
    let q = tensor(1, q_rows);
    let (k, v) = (tensor(2, kv_rows), tensor(3, kv_rows));
    let bias = tensor(4, &Runs::counting(0, KEYS as u64));
    let bias = bias.slice_move(ndarray::s![.., .., .., 0..1]).permuted_axes([0, 2, 3, 1]);
    let tensors = Tensors::new(q.view(), k.view(), v.view()).with_bias(bias.view());
    let forward = plan.forward(&tensors)?;
    let backward = plan.backward(&tensors, &forward, q.view(), None)?;
    let dbias = backward.dbias.unwrap_or_default();
    Ok((dbias, backward.reports[0], plan.bytes_predicted(PassKind::Backward)))
}

pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    let ranks = harness.ranks();
    let dims = Dims::new(1, 2 * ranks, HEADS, DIM).kv_len(KEYS);
    let attention = Setup::from((
        Attention::new().bias([1, HEADS, 1, KEYS]),
        Division::new().layout(Layout::Contiguous),
    ));
    let compared = || -> Result<Verdict> {
        let mut plan = Plan::new(&attention, dims, Mpi::world(settings.clone())?)?;
        let (q_rows, kv_rows) = (plan.q_rows().clone(), plan.kv_rows().clone());
        let (dbias, report, predicted) = run(&mut plan, &q_rows, &kv_rows)?;
        let of_threads = annulus_comm::threads::each_rank(
            annulus_comm::threads::ring(ranks),
            |_, transport| {
                let mut plan = Plan::new(&attention, dims, transport)?;
                let (q_rows, kv_rows) = (plan.q_rows().clone(), plan.kv_rows().clone());
                run(&mut plan, &q_rows, &kv_rows)
            },
        )?;
        let (want, of_thread, _) = &of_threads[plan.rank()];
        let right = dbias == *want
            && dbias.iter().any(|&number| number != 0.0)
            && report.bytes_sent == predicted
            && report.bytes_sent == of_thread.bytes_sent;
        Ok(ensure(right, || {
            format!("dbias or bytes: sent {}, predicted {predicted}", report.bytes_sent)
        }))
    };
    compared().map_err(|error| error.to_string())?
}
