//! The transport's contract, message by message.

use std::time::{Duration, Instant};

use annulus_comm::{
    Deadline, all_gather, barrier,
    mpi::{Mpi, Settings},
};
use annulus_conformance::device::patterns::{groups, play};
use annulus_core::{
    AgreedLengths, Channel, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing,
    Result, Transport,
};

use crate::{Harness, Verdict, ensure};

/// Longest wait of one `progress`; short, so that errors and limits are checked often.
const GLANCE: Duration = Duration::from_millis(20);
/// Longest time of any check: longer means that it hangs.
const LIMIT: Duration = Duration::from_secs(30);

type Check = fn(Mpi, usize) -> Result<Verdict>;

pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    let checks: [(&str, usize, Check); 12] = [
        ("patterns", 1, |mut mpi, _| patterns(&mut mpi, 0, None).map(Ok)),
        ("patterns that are received ahead", 1, |mut mpi, _| {
            patterns(&mut mpi, 1, agreed()).map(Ok)
        }),
        ("gathers", 1, gathers),
        ("a message shorter than its receive", 2, |mpi, rank| wrong_length(mpi, rank, 8, 16)),
        ("a message longer than its receive", 2, |mpi, rank| wrong_length(mpi, rank, 70_000, 16)),
        ("another length than that of a receive ahead", 2, other_length_ahead),
        ("a duplicate", 2, duplicate),
        ("an early duplicate", 2, early_duplicate),
        ("an abort", 2, abort),
        ("a dropped endpoint", 2, |mpi, rank| dropped(mpi, rank, None)),
        ("a dropped endpoint of a receive ahead", 2, |mpi, rank| dropped(mpi, rank, agreed())),
        ("bad arguments", 1, bad_arguments),
    ];
    for (name, least, check) in checks {
        if harness.ranks() >= least {
            let verdict = Mpi::world(settings.clone()).and_then(|mpi| check(mpi, harness.rank()));
            let verdict = verdict.unwrap_or_else(|error| Err(error.to_string()));
            harness.share(verdict.map_err(|wrong| format!("{name}: {wrong}")))?;
        }
    }
    harness.share(many_in_turn(settings))
}

/// Sends and receives this rank's messages of random groups, in any order.
fn patterns(mpi: &mut Mpi, seed: u64, agreed: Option<AgreedLengths>) -> Result<()> {
    let groups = groups(mpi.ranks(), seed, 30, &[40, 40, 5000, 300_000]);
    play(mpi, &groups, seed, agreed)
}

/// Returns the proof of messages that all ranks derive alike, as those of a test.
pub(crate) fn agreed() -> Option<AgreedLengths> {
    AgreedLengths::of_total(0)
}

/// Returns a failure of a check as an error.
pub(crate) fn failure(what: String) -> Error {
    Error::Device { what }
}

pub(crate) fn wait_for(transport: &mut Mpi, header: &MessageHeader) -> Result<HostBuffer> {
    let started = Instant::now();
    loop {
        if let Some(arrived) = transport.take(header)? {
            return Ok(arrived.buffer);
        }
        if started.elapsed() > LIMIT {
            return Err(failure(format!("{header:?} did not arrive")));
        }
        transport.progress(GLANCE)?;
    }
}

pub(crate) fn drain(transport: &mut Mpi) -> Result<()> {
    let started = Instant::now();
    while transport.pending() {
        if started.elapsed() > LIMIT {
            return Err(failure("sends did not end".to_owned()));
        }
        transport.progress(GLANCE)?;
    }
    Ok(())
}

fn wait_for_error(transport: &mut Mpi) -> Result<Error> {
    let started = Instant::now();
    while started.elapsed() < LIMIT {
        if let Err(error) = transport.progress(GLANCE) {
            return Ok(error);
        }
    }
    Err(failure("nothing went wrong".to_owned()))
}

/// All-gathers of very different lengths, two of them started before either is complete.
fn gathers(mut transport: Mpi, rank: usize) -> Result<Verdict> {
    let part = |rank: usize, round: u64| {
        vec![rank as u8 ^ round as u8; (rank * 77_777 * round as usize) % 400_000]
    };
    for round in [1, 2, 3] {
        let first = 2 * round;
        let second = first + 1;
        transport.start_all_gather(second, &part(rank, second))?;
        let missing = transport.stragglers(first);
        if !missing.contains(&rank) {
            return Ok(Err(format!(
                "gather {first} waits for {missing:?}, but rank {rank} has not started it"
            )));
        }
        for (number, all) in [
            (first, all_gather::<Host>(&mut transport, first, &part(rank, first))?),
            (second, collect(&mut transport, second)?),
        ] {
            if all != (0..transport.ranks()).map(|rank| part(rank, number)).collect::<Vec<_>>() {
                return Ok(Err(format!("gather {number} returned wrong bytes")));
            }
        }
    }
    Ok(Ok(()))
}

fn collect(transport: &mut Mpi, round: u64) -> Result<Vec<Vec<u8>>> {
    loop {
        if let Some(all) = transport.try_all_gather(round)? {
            return Ok(all);
        }
        transport.progress(GLANCE)?;
    }
}

fn block(peer: usize, tag: u64, bytes: u64) -> MessageHeader {
    MessageHeader {
        peer,
        channel: Channel::Kv,
        tag,
        step: 5,
        ranges: std::iter::once(0..bytes).collect(),
        agreed: None,
    }
}

fn send(transport: &mut Mpi, header: MessageHeader) -> Result<()> {
    let buffer = HostBuffer::zeroed(header.bytes())?;
    transport.post(&[Outgoing { header, buffer: &buffer, ready: &() }], &mut Vec::new())
}

fn receive(transport: &mut Mpi, header: &MessageHeader) -> Result<()> {
    transport.post(
        &[],
        &mut vec![Incoming { header: header.clone(), buffer: HostBuffer::zeroed(header.bytes())? }],
    )
}

/// Keeps the endpoint until some rank aborts: dropped earlier, its sent messages could be lost.
fn stay(transport: &mut Mpi) -> Result<Verdict> {
    let error = wait_for_error(transport)?;
    Ok(ensure(matches!(error, Error::Aborted { .. } | Error::PeerLost { .. }), || {
        format!("{error}")
    }))
}

/// Expects this error on rank 1, which then aborts; all other ranks wait for the abort.
fn expect(transport: &mut Mpi, rank: usize, what: &str) -> Result<Verdict> {
    if rank != 1 {
        return stay(transport);
    }
    let error = wait_for_error(transport)?;
    transport.abort(&error);
    let again = transport.progress(Duration::ZERO);
    if again != Err(error.clone()) {
        return Ok(Err(format!("first {error}, then {again:?}")));
    }
    Ok(ensure(
        matches!(&error, Error::Comm { peer: 0, step: 5, what: text } if text == what),
        || format!("got {error:?}, want {what}"),
    ))
}

fn wrong_length(mut transport: Mpi, rank: usize, sent: u64, wanted: u64) -> Result<Verdict> {
    match rank {
        0 => send(&mut transport, block(1, 3, sent))?,
        // refused at once if the announcement has arrived; `expect` reads the error again
        1 => drop(receive(&mut transport, &block(0, 3, wanted))),
        _ => {}
    }
    expect(
        &mut transport,
        rank,
        &format!("message Kv 3 truncated: got {sent} bytes, want {wanted}"),
    )
}

/// A message that is received ahead, although its length differs, does not match the receive: a
/// rank that waits for it fails at its deadline, and no byte is written.
fn other_length_ahead(transport: Mpi, rank: usize) -> Result<Verdict> {
    const DEADLINE: Duration = Duration::from_secs(1);
    let mut transport = Deadline::<_, Host>::new(transport, DEADLINE)?;
    barrier(&mut transport, 1)?;
    let (peer, step) = (1 - rank.min(1), 5);
    let of = |bytes| MessageHeader { agreed: agreed(), ..block(peer, 3, bytes) };
    let started = Instant::now();
    match rank {
        0 => {
            let buffer = HostBuffer::zeroed(70_000)?;
            let send = Outgoing { header: of(70_000), buffer: &buffer, ready: &() };
            transport.post(&[send], &mut Vec::new())?;
        }
        1 => {
            let incoming = Incoming { header: of(16), buffer: HostBuffer::zeroed(16)? };
            transport.post(&[], &mut vec![incoming])?;
        }
        _ => {}
    }
    loop {
        match transport.progress(GLANCE) {
            Ok(()) if rank == 1 && transport.take(&of(16))?.is_some() => {
                return Ok(Err("a message of another length arrived".to_owned()));
            }
            Ok(()) if started.elapsed() < LIMIT => transport.heartbeat(false),
            Ok(()) => return Ok(Err("nothing went wrong".to_owned())),
            Err(error) => {
                transport.abort(&error);
                let is_named = match &error {
                    Error::Timeout { peer: of, step: at, .. } => (*of, *at) == (peer, step),
                    // of a synchronous send: the sender may be the first to fail
                    Error::Aborted { what, .. } if rank == 1 => what.contains("in step 5"),
                    Error::Aborted { .. } | Error::PeerLost { .. } => rank != 1,
                    _ => false,
                };
                return Ok(ensure(is_named && started.elapsed() < DEADLINE * 3, || {
                    format!("got {error:?} after {:?}", started.elapsed())
                }));
            }
        }
    }
}

fn duplicate(mut transport: Mpi, rank: usize) -> Result<Verdict> {
    match rank {
        0 => {
            send(&mut transport, block(1, 3, 100))?;
            send(&mut transport, block(1, 3, 100))?;
        }
        1 => {
            receive(&mut transport, &block(0, 3, 100))?;
            // the duplicate may be refused before the first message is taken
            drop(wait_for(&mut transport, &block(0, 3, 100)));
        }
        _ => {}
    }
    expect(&mut transport, rank, "duplicate message Kv 3")
}

fn early_duplicate(mut transport: Mpi, rank: usize) -> Result<Verdict> {
    if rank == 0 {
        send(&mut transport, block(1, 3, 100))?;
        send(&mut transport, block(1, 3, 100))?;
    }
    expect(&mut transport, rank, "duplicate message Kv 3")
}

fn abort(mut transport: Mpi, rank: usize) -> Result<Verdict> {
    let last = transport.ranks() - 1;
    let cause = Error::Device { what: "broke".to_owned() };
    if rank == last {
        transport.abort(&cause);
        return Ok(ensure(transport.progress(GLANCE) == Err(cause), || {
            "progress after an abort does not return its cause".to_owned()
        }));
    }
    let error = wait_for_error(&mut transport)?;
    let want = Error::Aborted { rank: last, what: cause.to_string() };
    // aborts again, as the ring loop does: the first rank that failed remains the origin
    transport.abort(&error);
    Ok(ensure(error == want, || format!("got {error:?}, want {want:?}")))
}

fn dropped(mut transport: Mpi, rank: usize, agreed: Option<AgreedLengths>) -> Result<Verdict> {
    barrier::<Host>(&mut transport, 1)?;
    let last = transport.ranks() - 1;
    if rank == last {
        // until the others wait
        std::thread::sleep(Duration::from_millis(20));
        return Ok(Ok(()));
    }
    let started = Instant::now();
    receive(&mut transport, &MessageHeader { agreed, ..block(last, 1, 100) })?;
    let error = wait_for_error(&mut transport)?;
    let named = error == Error::PeerLost { peer: last, step: 5 };
    Ok(ensure(named && started.elapsed() < Duration::from_secs(5), || {
        format!("got {error:?} after {:?}", started.elapsed())
    }))
}

fn bad_arguments(mut transport: Mpi, rank: usize) -> Result<Verdict> {
    let ranks = transport.ranks();
    let outside = MessageHeader { ranges: std::iter::once(0..101).collect(), ..block(rank, 1, 0) };
    let buffer = HostBuffer::zeroed(100)?;
    let mut refused = vec![
        transport
            .post(&[Outgoing { header: outside, buffer: &buffer, ready: &() }], &mut Vec::new()),
        transport.post(
            &[Outgoing { header: block(ranks, 1, 1), buffer: &buffer, ready: &() }],
            &mut Vec::new(),
        ),
        transport.take(&block(rank, 1, 1)).map(drop),
        transport.try_all_gather(77).map(drop),
    ];
    transport.start_all_gather(1, &[])?;
    refused.push(transport.start_all_gather(1, &[]));
    collect(&mut transport, 1)?;
    if let Some(result) =
        refused.iter().find(|result| !matches!(result, Err(Error::InvalidArgument { .. })))
    {
        return Ok(Err(format!("{result:?} for a bad argument")));
    }
    // the endpoint still works
    barrier::<Host>(&mut transport, 2)?;
    receive(&mut transport, &block(rank, 4, 8))?;
    let error = receive(&mut transport, &block(rank, 4, 8));
    Ok(ensure(
        matches!(&error, Err(Error::Comm { what, .. }) if what.contains("tags only grow")),
        || format!("{error:?}"),
    ))
}

/// Endpoints created and dropped many times: their communicators are freed without a wait.
fn many_in_turn(settings: &Settings) -> Verdict {
    let started = Instant::now();
    for _ in 0..50 {
        let mut ring = Mpi::world(settings.clone()).map_err(|error| error.to_string())?;
        ring.heartbeat(true);
        barrier::<Host>(&mut ring, 1).map_err(|error| error.to_string())?;
    }
    ensure(started.elapsed() < LIMIT, || format!("50 endpoints took {:?}", started.elapsed()))
}
