//! Transports and their wrappers, tested through the trait `Transport` alone. Every ring runs under
//! a watchdog, so no test hangs. This file also tests agreement: all ranks derive the same verdict.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::single_range_in_vec_init, reason = "a message of one byte range is meant")]

mod deadline;
mod patterns;
mod staged;
mod threads;

use std::{
    ops::Range,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use annulus_comm::{Descriptor, Threads, agree, barrier, close};
use annulus_core::{
    Channel, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result, Transport,
};

/// Time limit of a test. A ring that exceeds it is stuck.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(30);

/// Runs `body` on every rank, each in its own thread, and joins them all. Returns the results; a
/// body may return its endpoint to keep it alive.
///
/// # Panics
/// If some rank panics or exceeds [`WATCHDOG`].
pub(crate) fn on_ring<T, R: Send + 'static>(
    ranks: usize,
    wrap: impl Fn(Threads) -> T + Send + Sync + 'static,
    body: impl Fn(T) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let started = Instant::now();
    let (wrap, body) = (Arc::new(wrap), Arc::new(body));
    let (report, reports) = mpsc::channel();
    let handles: Vec<_> = (annulus_comm::threads::ring(ranks).into_iter().enumerate())
        .map(|(rank, endpoint)| {
            let (wrap, body, report) = (Arc::clone(&wrap), Arc::clone(&body), report.clone());
            thread::spawn(move || drop(report.send((rank, body(wrap(endpoint))))))
        })
        .collect();
    drop(report);
    let mut results: Vec<Option<R>> = (0..ranks).map(|_| None).collect();
    for _ in 0..ranks {
        match reports.recv_timeout(WATCHDOG.saturating_sub(started.elapsed())) {
            Ok((rank, result)) => results[rank] = Some(result),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let stuck: Vec<usize> =
                    (0..ranks).filter(|&rank| results[rank].is_none()).collect();
                panic!("ranks {stuck:?} of {ranks} are stuck");
            }
        }
    }
    handles.into_iter().for_each(|handle| handle.join().expect("a rank panicked"));
    results.into_iter().map(|result| result.expect("a rank panicked")).collect()
}

/// As [`on_ring`], with bare endpoints.
pub(crate) fn on_threads<R: Send + 'static>(
    ranks: usize,
    body: impl Fn(Threads) -> R + Send + Sync + 'static,
) -> Vec<R> {
    on_ring(ranks, |endpoint| endpoint, body)
}

/// Runs a test that simulates several ranks, or that starts its own threads, under the same
/// watchdog.
///
/// # Panics
/// If it panics or exceeds [`WATCHDOG`].
pub(crate) fn watched(body: impl FnOnce() + Send + 'static) {
    let (report, done) = mpsc::channel();
    let handle = thread::spawn(move || {
        body();
        // the receiver is gone if the watchdog has fired
        report.send(()).ok();
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = done.recv_timeout(WATCHDOG) {
        panic!("the test is stuck");
    }
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

pub(crate) fn header(
    peer: usize,
    channel: Channel,
    tag: u64,
    ranges: &[Range<u64>],
) -> MessageHeader {
    MessageHeader {
        peer,
        channel,
        tag,
        step: usize::try_from(tag).unwrap(),
        ranges: ranges.into(),
        agreed: None,
    }
}

pub(crate) fn buffer(bytes: &[u8]) -> HostBuffer {
    let mut buffer = HostBuffer::zeroed(bytes.len() as u64).unwrap();
    buffer.bytes_mut().unwrap().copy_from_slice(bytes);
    buffer
}

pub(crate) fn send(
    transport: &mut dyn Transport<Host>,
    header: MessageHeader,
    buffer: &HostBuffer,
) -> Result<()> {
    transport.post(&[Outgoing { header, buffer, ready: &() }], &mut Vec::new())
}

pub(crate) fn receive(
    transport: &mut dyn Transport<Host>,
    header: &MessageHeader,
    bytes: u64,
) -> Result<()> {
    transport.post(
        &[],
        &mut vec![Incoming { header: header.clone(), buffer: HostBuffer::zeroed(bytes)? }],
    )
}

/// Progresses until the posted receive has arrived.
pub(crate) fn wait_for(
    transport: &mut dyn Transport<Host>,
    header: &MessageHeader,
) -> Result<HostBuffer> {
    loop {
        if let Some(arrived) = transport.take(header)? {
            return Ok(arrived.buffer);
        }
        transport.progress(Duration::from_millis(20))?;
    }
}

/// Progresses until every send has completed.
pub(crate) fn drain(transport: &mut dyn Transport<Host>) -> Result<()> {
    while transport.pending() {
        transport.progress(Duration::from_millis(20))?;
    }
    Ok(())
}

/// Progresses until it fails, and returns the error.
pub(crate) fn wait_for_error(transport: &mut dyn Transport<Host>) -> Error {
    loop {
        if let Err(error) = transport.progress(Duration::from_millis(20)) {
            return error;
        }
    }
}

/// Returns the result of one agreement on every rank of a ring.
fn verdicts(ranks: usize, local: fn(usize) -> Result<Descriptor>) -> Vec<Result<Vec<u64>>> {
    on_threads(ranks, move |mut endpoint| {
        let local = local(endpoint.rank());
        agree(&mut endpoint, 5, local)
    })
}

#[test]
fn the_first_field_and_the_lowest_rank_are_named_on_all_ranks() {
    let local = |rank: usize| {
        let scale = if rank == 4 { "0.5" } else { "0.25" };
        let descriptor = Descriptor::new().field("q_len", if rank == 3 { 65 } else { 64 });
        Ok(descriptor.field("kv_len", if rank == 1 { 7 } else { 8 }).field_as(
            "scale",
            scale.len() as u64,
            scale,
        ))
    };
    let mismatch = Error::RankMismatch {
        field: "q_len".into(),
        rank: 3,
        got: "65".into(),
        rank0: "64".into(),
    };
    assert_eq!(verdicts(5, local), vec![Err(mismatch); 5]);
    let local = |rank: usize| {
        Ok(Descriptor::new().field_as(
            "scale",
            2 + rank as u64 / 2,
            ["half", "half", "third", "third"][rank],
        ))
    };
    let mismatch = Error::RankMismatch {
        field: "scale".into(),
        rank: 2,
        got: "third".into(),
        rank0: "half".into(),
    };
    assert_eq!(verdicts(4, local), vec![Err(mismatch); 4]);
}

#[test]
fn other_fields_are_a_mismatch_too() {
    let local = |rank: usize| {
        Ok(if rank == 1 {
            Descriptor::new().field("a", 1)
        } else {
            Descriptor::new().field("b", 1)
        })
    };
    for verdict in verdicts(3, local) {
        let Err(Error::RankMismatch { field, rank: 1, .. }) = verdict else {
            panic!("{verdict:?}")
        };
        assert_eq!(field, "set of fields");
    }
}

#[test]
fn a_rank_keeps_its_own_refusal_and_the_others_name_it() {
    fn refusal(rank: usize) -> Error {
        Error::invalid("softmax_scale", format!("NaN on rank {rank}"), "a finite number")
    }
    let local = |rank: usize| match rank {
        2 | 3 => Err(refusal(rank)),
        _ => Ok(Descriptor::new().field("rank", rank as u64)),
    };
    for (rank, verdict) in verdicts(5, local).into_iter().enumerate() {
        let named = Error::Refused { rank: 2, what: refusal(2).to_string() };
        assert_eq!(verdict, Err(if rank == 2 || rank == 3 { refusal(rank) } else { named }));
    }
}

#[test]
fn a_close_returns_the_failure_of_any_rank_on_all_ranks() {
    let outcomes = |failure: Option<Error>| {
        on_threads(4, move |mut endpoint| {
            barrier(&mut endpoint, 1).unwrap();
            let mine =
                if endpoint.rank() == 2 { failure.clone().map_or(Ok(()), Err) } else { Ok(()) };
            close(&mut endpoint, 2, mine)
        })
    };
    assert_eq!(outcomes(None), vec![Ok(()); 4]);
    let dead = Error::Device { what: "hot".into() };
    let refused = Error::out_of_memory("dbias", 5);
    let aborted = Error::Aborted { rank: 2, what: dead.to_string() };
    let full = Error::Refused { rank: 2, what: refused.to_string() };
    assert_eq!(
        outcomes(Some(dead.clone())),
        [Err(aborted.clone()), Err(aborted.clone()), Err(dead), Err(aborted)]
    );
    assert_eq!(
        outcomes(Some(refused.clone())),
        [Err(full.clone()), Err(full.clone()), Err(refused), Err(full)]
    );
}
