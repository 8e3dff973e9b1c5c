//! The contract of a transport, message by message: any kind of it must pass every check of
//! [`CONTRACT`].

use std::time::{Duration, Instant};

use annulus_comm::{all_gather, barrier};
use annulus_core::{
    AgreedLengths, Channel, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result,
    Transport,
};

use super::{Verdict, ensure};

/// Longest wait of one `progress`; short, so that errors and limits are checked often.
pub const GLANCE: Duration = Duration::from_millis(20);
/// Longest time of any check: longer means that it hangs.
pub const LIMIT: Duration = Duration::from_secs(30);

/// One rank of a check on an endpoint of its own. Collective; the outer error is unexpected.
pub type Check = fn(&mut dyn Transport<Host>) -> Result<Verdict>;

/// The checks: name, the least number of ranks, and what each rank does.
pub const CONTRACT: [(&str, usize, Check); 10] = [
    ("gathers", 1, gathers),
    ("a message shorter than its receive", 2, |transport| wrong_length(transport, 8, 16)),
    ("a message longer than its receive", 2, |transport| wrong_length(transport, 70_000, 16)),
    ("a duplicate", 2, duplicate),
    ("an early duplicate", 2, early_duplicate),
    ("an abort", 2, abort),
    ("a dropped endpoint", 2, |transport| dropped(transport, None)),
    ("bad arguments", 1, bad_arguments),
    ("a tag below an earlier one", 1, |transport| tags(transport, &[5, 3], &[4])),
    ("a tag twice", 1, |transport| tags(transport, &[3], &[4, 4])),
];

/// Returns the proof of messages that all ranks derive alike, as those of a test.
pub fn agreed() -> Option<AgreedLengths> {
    AgreedLengths::of_total(0)
}

/// Returns a failure of a check as an error.
pub fn failure(what: String) -> Error {
    Error::Device { what }
}

/// Progresses until the posted receive has arrived.
pub fn wait_for(transport: &mut dyn Transport<Host>, header: &MessageHeader) -> Result<HostBuffer> {
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

/// Progresses until every send has completed.
pub fn drain(transport: &mut dyn Transport<Host>) -> Result<()> {
    let started = Instant::now();
    while transport.pending() {
        if started.elapsed() > LIMIT {
            return Err(failure("sends did not end".to_owned()));
        }
        transport.progress(GLANCE)?;
    }
    Ok(())
}

fn wait_for_error(transport: &mut dyn Transport<Host>) -> Result<Error> {
    let started = Instant::now();
    while started.elapsed() < LIMIT {
        if let Err(error) = transport.progress(GLANCE) {
            return Ok(error);
        }
    }
    Err(failure("nothing went wrong".to_owned()))
}

/// All-gathers of very different lengths, two of them started before either is complete.
fn gathers(transport: &mut dyn Transport<Host>) -> Result<Verdict> {
    let rank = transport.rank();
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
            (first, all_gather(transport, first, &part(rank, first))?),
            (second, collect(transport, second)?),
        ] {
            if all != (0..transport.ranks()).map(|rank| part(rank, number)).collect::<Vec<_>>() {
                return Ok(Err(format!("gather {number} returned wrong bytes")));
            }
        }
    }
    Ok(Ok(()))
}

fn collect(transport: &mut dyn Transport<Host>, round: u64) -> Result<Vec<Vec<u8>>> {
    loop {
        if let Some(all) = transport.try_all_gather(round)? {
            return Ok(all);
        }
        transport.progress(GLANCE)?;
    }
}

/// Returns the header of a message of this many bytes in step 5.
pub fn block(peer: usize, tag: u64, bytes: u64) -> MessageHeader {
    MessageHeader {
        peer,
        channel: Channel::Kv,
        tag,
        step: 5,
        ranges: std::iter::once(0..bytes).collect(),
        agreed: None,
    }
}

fn send(transport: &mut dyn Transport<Host>, header: MessageHeader) -> Result<()> {
    let buffer = HostBuffer::zeroed(header.bytes())?;
    transport.post(&[Outgoing { header, buffer: &buffer, ready: &() }], &mut Vec::new())
}

fn receive(transport: &mut dyn Transport<Host>, header: &MessageHeader) -> Result<()> {
    transport.post(
        &[],
        &mut vec![Incoming { header: header.clone(), buffer: HostBuffer::zeroed(header.bytes())? }],
    )
}

/// Keeps the endpoint until some rank aborts: dropped earlier, its sent messages could be lost.
fn stay(transport: &mut dyn Transport<Host>) -> Result<Verdict> {
    let error = wait_for_error(transport)?;
    Ok(ensure(matches!(error, Error::Aborted { .. } | Error::PeerLost { .. }), || {
        format!("{error}")
    }))
}

/// Expects this error on rank 1, which then aborts; all other ranks wait for the abort.
fn expect(transport: &mut dyn Transport<Host>, what: &str) -> Result<Verdict> {
    if transport.rank() != 1 {
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

fn wrong_length(transport: &mut dyn Transport<Host>, sent: u64, wanted: u64) -> Result<Verdict> {
    match transport.rank() {
        0 => send(transport, block(1, 3, sent))?,
        // refused at once if the announcement has arrived; `expect` reads the error again
        1 => drop(receive(transport, &block(0, 3, wanted))),
        _ => {}
    }
    expect(transport, &format!("message Kv 3 truncated: got {sent} bytes, want {wanted}"))
}

fn duplicate(transport: &mut dyn Transport<Host>) -> Result<Verdict> {
    match transport.rank() {
        0 => {
            send(transport, block(1, 3, 100))?;
            send(transport, block(1, 3, 100))?;
        }
        1 => {
            receive(transport, &block(0, 3, 100))?;
            // the duplicate may be refused before the first message is taken
            drop(wait_for(transport, &block(0, 3, 100)));
        }
        _ => {}
    }
    expect(transport, "duplicate message Kv 3")
}

fn early_duplicate(transport: &mut dyn Transport<Host>) -> Result<Verdict> {
    if transport.rank() == 0 {
        send(transport, block(1, 3, 100))?;
        send(transport, block(1, 3, 100))?;
    }
    expect(transport, "duplicate message Kv 3")
}

fn abort(transport: &mut dyn Transport<Host>) -> Result<Verdict> {
    let last = transport.ranks() - 1;
    let cause = Error::Device { what: "broke".to_owned() };
    if transport.rank() == last {
        transport.abort(&cause);
        return Ok(ensure(transport.progress(GLANCE) == Err(cause), || {
            "progress after an abort does not return its cause".to_owned()
        }));
    }
    let error = wait_for_error(transport)?;
    let want = Error::Aborted { rank: last, what: cause.to_string() };
    // aborts again, as the ring loop does: the first rank that failed remains the origin
    transport.abort(&error);
    let again = transport.try_all_gather(1).map(drop);
    Ok(ensure(error == want && again == Err(error.clone()), || {
        format!("got {error:?} and {again:?}, want {want:?}")
    }))
}

/// The last rank leaves, and the others wait for its message.
pub fn dropped(
    transport: &mut dyn Transport<Host>,
    agreed: Option<AgreedLengths>,
) -> Result<Verdict> {
    barrier(transport, 1)?;
    let last = transport.ranks() - 1;
    if transport.rank() == last {
        // until the others wait
        std::thread::sleep(Duration::from_millis(20));
        return Ok(Ok(()));
    }
    let started = Instant::now();
    receive(transport, &MessageHeader { agreed, ..block(last, 1, 100) })?;
    let error = wait_for_error(transport)?;
    let named = error == Error::PeerLost { peer: last, step: 5 };
    Ok(ensure(named && started.elapsed() < Duration::from_secs(5), || {
        format!("got {error:?} after {:?}", started.elapsed())
    }))
}

/// Refused without effect.
fn bad_arguments(transport: &mut dyn Transport<Host>) -> Result<Verdict> {
    let (rank, ranks) = (transport.rank(), transport.ranks());
    let ranges =
        |range| MessageHeader { ranges: std::iter::once(range).collect(), ..block(rank, 1, 0) };
    let backwards = std::ops::Range { start: 3, end: 2 };
    let buffer = HostBuffer::zeroed(100)?;
    let mut refused = Vec::new();
    for (argument, header) in [
        ("header.peer", block(ranks, 1, 1)),
        ("header.ranges", ranges(0..101)),
        ("header.ranges", ranges(backwards)),
    ] {
        let send = Outgoing { header, buffer: &buffer, ready: &() };
        refused.push((argument, transport.post(&[send], &mut Vec::new())));
    }
    let outside = Incoming { header: ranges(99..101), buffer: HostBuffer::zeroed(100)? };
    refused.push(("header.ranges", transport.post(&[], &mut vec![outside])));
    refused.push(("header", transport.take(&block(rank, 1, 1)).map(drop)));
    refused.push(("round", transport.try_all_gather(77).map(drop)));
    transport.start_all_gather(1, &[])?;
    refused.push(("round", transport.start_all_gather(1, &[])));
    collect(transport, 1)?;
    for (argument, result) in refused {
        let is_named =
            matches!(&result, Err(Error::InvalidArgument { argument: of, .. }) if of == argument);
        if !is_named {
            return Ok(Err(format!("{result:?} for a bad argument, {argument}")));
        }
    }
    let sent = transport.bytes_sent();
    // the endpoint still works
    barrier(transport, 2)?;
    Ok(ensure(!transport.pending() && sent == 0, || format!("{sent} bytes were sent")))
}

/// Receives of one group, in any order, and then those of a group that is refused.
fn tags(transport: &mut dyn Transport<Host>, good: &[u64], bad: &[u64]) -> Result<Verdict> {
    let rank = transport.rank();
    let mut post = |tags: &[u64]| {
        let receive = |&tag: &u64| {
            Ok(Incoming { header: block(rank, tag, 8), buffer: HostBuffer::zeroed(8)? })
        };
        transport.post(&[], &mut tags.iter().map(receive).collect::<Result<_>>()?)
    };
    post(good)?;
    let error = post(bad);
    Ok(ensure(
        matches!(&error, Err(Error::Comm { what, .. }) if what.contains("tags only grow")),
        || format!("{error:?}"),
    ))
}
