//! Messages with agreed lengths: their receives start when they are posted, and before the messages
//! if the receiver is first; no control message belongs to them. And gradients that are summed over
//! ranks by slices: the bits of a ring of threads, and the bytes of the plan.
//!
//! `scripts/scale-check` counts the receives whose messages wait for them, and the announcements.

use std::time::Duration;

use annulus::{
    Attention, Dims, Division, Layout, Plan, Report, Setup, Tensors, comm::ring::PassKind,
};
use annulus_comm::{
    barrier,
    mpi::{Mpi, Settings},
};
use annulus_conformance::suite::messages::{agreed, drain, failure, wait_for};
use annulus_core::{
    Channel, Control, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result, Runs, Transport,
    index,
};
use ndarray::Array4;

use crate::{Harness, Verdict, ensure};

/// Groups of messages of each rank.
const GROUPS: u64 = 20;
/// Lengths of the messages of a group: below and above the eager limits of MPIs.
const LENGTHS: [u64; 3] = [100, 10_000, 1_000_000];

/// Every rank posts all receives of a group, and its sends after those of all ranks.
pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    let work = || -> Result<Verdict> {
        let mut transport = Mpi::world(settings.clone())?;
        let posts_ahead = Transport::<Host>::posts_ahead(&transport);
        if posts_ahead == settings.announce {
            let what = format!("announce: {}, posts ahead: {posts_ahead}", settings.announce);
            return Ok(Err(what));
        }
        for group in 0..GROUPS {
            exchange(&mut transport, group)?;
        }
        barrier::<Host>(&mut transport, GROUPS)?;
        Ok(Ok(()))
    };
    let verdict = work().unwrap_or_else(|error| Err(error.to_string()));
    harness.share(verdict)?;
    // ranks with other settings than one of them announce, and so all do
    let odd = Settings {
        announce: settings.announce || harness.rank() == 1,
        piece_bytes: settings.piece_bytes,
        ..settings.clone()
    };
    let any = settings.announce || harness.ranks() > 1;
    let ahead = Mpi::world(odd).map(|endpoint| Transport::<Host>::posts_ahead(&endpoint));
    let right = ahead.as_ref().is_ok_and(|ahead| *ahead != any);
    harness.share(ensure(right, || format!("rank 1 announces, posts ahead: {ahead:?}")))
}

/// Sends the messages of a group to the next rank, and receives those of the previous one.
fn exchange(transport: &mut Mpi, group: u64) -> Result<()> {
    let (rank, ranks) = (transport.rank(), transport.ranks());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let header = |peer: usize, number: usize, bytes: u64| MessageHeader {
        peer,
        channel: [Channel::Kv, Channel::PartialGrad, Channel::FinalGrad][number % 3],
        tag: group,
        step: 0,
        ranges: std::iter::once(0..bytes).collect(),
        agreed: agreed(),
    };
    let lengths = || LENGTHS.into_iter().enumerate();
    let mut receives = Vec::new();
    for (number, bytes) in lengths() {
        let buffer = HostBuffer::zeroed(bytes)?;
        receives.push(Incoming { header: header(previous, number, bytes), buffer });
    }
    transport.post(&[], &mut receives)?;
    barrier::<Host>(transport, group)?;
    for (number, bytes) in lengths() {
        let mut buffer = HostBuffer::zeroed(bytes)?;
        let text = content(rank, group, number);
        buffer.bytes_mut().into_iter().flatten().for_each(|byte| *byte = text);
        let header = header(next, number, bytes);
        transport.post(&[Outgoing { header, buffer: &buffer, ready: &() }], &mut Vec::new())?;
    }
    for (number, bytes) in lengths() {
        let arrived = wait_for(transport, &header(previous, number, bytes))?;
        let want = content(previous, group, number);
        if arrived.bytes().len() as u64 != bytes || arrived.bytes().iter().any(|&b| b != want) {
            return Err(failure(format!("message {number} of group {group} has other bytes")));
        }
    }
    drain(transport)?;
    transport.progress(Duration::ZERO)
}

/// Returns the byte of which a message consists.
const fn content(rank: usize, group: u64, number: usize) -> u8 {
    (rank * 31 + number * 7 + group as usize) as u8
}

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

/// Compares dbias of a long bias, and its bytes, with those of a ring of threads.
pub(crate) fn sums(harness: &mut Harness, settings: &Settings) -> Verdict {
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
