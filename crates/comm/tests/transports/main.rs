//! Transports and their wrappers, tested through the trait `Transport` alone. Every ring runs under
//! a watchdog, so no test hangs.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::single_range_in_vec_init, reason = "a message of one byte range is meant")]

mod agreement;
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

use annulus_comm::Threads;
use annulus_core::{
    Channel, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result, Transport,
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
