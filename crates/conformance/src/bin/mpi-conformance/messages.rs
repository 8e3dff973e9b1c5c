//! The transport's contract, message by message.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_comm::{
    Deadline, all_gather, barrier,
    mpi::{Mpi, Settings},
};
use annulus_conformance::Draw;
use annulus_core::{
    AgreedLengths, Channel, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing,
    Result, Transport, index,
};

use crate::harness::{Harness, Verdict, ensure};

const CHANNELS: [Channel; 3] = [Channel::Kv, Channel::PartialGrad, Channel::FinalGrad];
/// Longest wait of one `progress`; short, so that errors and limits are checked often.
const GLANCE: Duration = Duration::from_millis(20);
/// Longest time of any check: longer means that it hangs.
const LIMIT: Duration = Duration::from_secs(30);

type Check = fn(Mpi, usize) -> Result<Verdict>;

pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    let checks: [(&str, usize, Check); 13] = [
        ("patterns", 1, |mut mpi, _| patterns(&mut mpi, 0..30, None).map(Ok)),
        ("patterns that are received ahead", 1, |mut mpi, _| {
            patterns(&mut mpi, 30..60, agreed()).map(Ok)
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
        ("an all-gather that a rank never joins", 2, left_out),
        ("bad arguments", 1, bad_arguments),
    ];
    for (name, least, check) in checks {
        if harness.ranks() >= least {
            let verdict = Mpi::world(settings.clone()).and_then(|mpi| check(mpi, harness.rank()));
            let verdict = verdict.unwrap_or_else(|error| Err(error.to_string()));
            harness.share(verdict.map_err(|wrong| format!("{name}: {wrong}")))?;
        }
    }
    let verdict = two_at_once(settings).map_err(|error| format!("two rings: {error}"));
    harness.share(verdict)?;
    harness.share(many_in_turn(settings))
}

/// One message; `cuts` are the lengths of its ranges on the sender and on the receiver.
struct Message {
    from: usize,
    to: usize,
    channel: Channel,
    tag: u64,
    cuts: [Vec<u64>; 2],
}

/// Draws random messages among all ranks, also of a rank to itself; the same on every rank. The
/// tags of a channel increase.
fn group(ranks: usize, draw: &mut Draw, tag: &mut u64) -> Vec<Message> {
    let count = draw.below(12);
    (0..count)
        .map(|_| {
            *tag += 1 + draw.below(3) as u64;
            let most = draw.pick(&[40, 40, 5000, 300_000]);
            let mut cuts = [(); 2]
                .map(|()| (0..draw.below(4)).map(|_| draw.below(most) as u64).collect::<Vec<_>>());
            let [sent, received] = [0, 1].map(|side| cuts[side].iter().sum::<u64>());
            let shorter = usize::from(sent > received);
            cuts[shorter].push(sent.abs_diff(received));
            Message {
                from: draw.below(ranks),
                to: draw.below(ranks),
                channel: draw.pick(&CHANNELS),
                tag: *tag,
                cuts,
            }
        })
        .collect()
}

/// Returns ranges of these lengths with a gap of three bytes before each, except every third.
fn ranges(cuts: &[u64]) -> Arc<[Range<u64>]> {
    let mut end = 0;
    let range = |(number, &length): (usize, &u64)| {
        let start = end + if number % 3 == 2 { 0 } else { 3 };
        end = start + length;
        start..end
    };
    cuts.iter().enumerate().map(range).collect()
}

/// Returns byte number `n` of a message, different for every message.
fn byte(message: &Message, n: usize) -> u8 {
    let mix =
        (message.from as u64) << 56 ^ (message.to as u64) << 48 ^ message.tag << 32 ^ n as u64;
    (mix.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Returns a buffer with the message in its ranges on one side.
fn bytes(message: &Message, side: usize) -> Result<HostBuffer> {
    let ranges = ranges(&message.cuts[side]);
    let mut buffer = HostBuffer::zeroed(ranges.last().map_or(0, |range| range.end))?;
    if let Some(bytes) = buffer.bytes_mut() {
        ranges
            .iter()
            .cloned()
            .flatten()
            .enumerate()
            .for_each(|(n, at)| bytes[index(at)] = byte(message, n));
    }
    Ok(buffer)
}

fn header(
    message: &Message,
    peer: usize,
    side: usize,
    agreed: Option<AgreedLengths>,
) -> MessageHeader {
    MessageHeader {
        peer,
        channel: message.channel,
        tag: message.tag,
        step: 0,
        ranges: ranges(&message.cuts[side]),
        agreed,
    }
}

/// Sends and receives this rank's messages of random groups, in any order, receives before or after
/// sends.
fn patterns(transport: &mut Mpi, seeds: Range<u64>, agreed: Option<AgreedLengths>) -> Result<()> {
    let rank = transport.rank();
    let ranks = transport.ranks();
    let mut tag = 0;
    let mut payload = transport.bytes_sent();
    for seed in seeds {
        let messages = group(ranks, &mut Draw::new(seed), &mut tag);
        let own = &mut Draw::new(seed << 8 | rank as u64);
        let outgoing: Vec<&Message> =
            messages.iter().filter(|message| message.from == rank).collect();
        let incoming: Vec<&Message> =
            messages.iter().filter(|message| message.to == rank).collect();
        let buffers =
            outgoing.iter().map(|message| bytes(message, 0)).collect::<Result<Vec<_>>>()?;
        let mut sends: Vec<_> = outgoing
            .iter()
            .zip(&buffers)
            .map(|(message, buffer)| Outgoing {
                header: header(message, message.to, 0, agreed),
                buffer,
                ready: &(),
            })
            .collect();
        let receive = |message: &&Message| {
            let header = header(message, message.from, 1, agreed);
            let buffer = HostBuffer::zeroed(header.ranges.last().map_or(0, |range| range.end))?;
            Ok(Incoming { header, buffer })
        };
        let mut receives = incoming.iter().map(receive).collect::<Result<Vec<_>>>()?;
        if own.once_in(2) {
            sends.reverse();
        }
        if own.once_in(2) {
            transport.post(&sends, &mut receives)?;
        } else {
            transport.post(&sends, &mut Vec::new())?;
            if own.once_in(2) {
                transport.progress(Duration::from_millis(2))?;
            }
            transport.post(&[], &mut receives)?;
        }
        payload += sends.iter().map(|send| send.header.bytes()).sum::<u64>();
        for message in incoming {
            let buffer = wait_for(transport, &header(message, message.from, 1, agreed))?;
            if buffer.bytes() != bytes(message, 1)?.bytes() {
                return Err(failure(format!(
                    "seed {seed}: a message from {} to {rank} arrived with wrong bytes",
                    message.from
                )));
            }
        }
        drain(transport)?;
        drop(sends);
        if buffers.iter().any(HostBuffer::is_shared) {
            // a send that was staged or received must release the caller's buffer
            return Err(failure(format!("seed {seed}: a buffer is shared after its send ended")));
        }
    }
    if transport.bytes_sent() != payload {
        return Err(failure(format!("{} bytes counted, {payload} sent", transport.bytes_sent())));
    }
    Ok(())
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

/// A rank that needs the last rank's bytes, directly or through others, gets an error that names
/// it.
fn left_out(mut transport: Mpi, rank: usize) -> Result<Verdict> {
    barrier::<Host>(&mut transport, 1)?;
    let last = transport.ranks() - 1;
    if rank == last {
        return Ok(Ok(()));
    }
    let lost = all_gather::<Host>(&mut transport, 2, &[1; 10]).map(drop);
    // until every rank has the error: one that leaves earlier would itself be lost to the others
    std::thread::sleep(Duration::from_millis(50));
    Ok(ensure(matches!(lost, Err(Error::PeerLost { peer, .. }) if peer == last), || {
        format!("got {lost:?}, want rank {last} lost")
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

/// Two rings over the same ranks match their messages separately.
fn two_at_once(settings: &Settings) -> Result<()> {
    let mut rings = [Mpi::world(settings.clone())?, Mpi::world(settings.clone())?];
    let rank = rings[0].rank();
    let ranks = rings[0].ranks();
    let next = (rank + 1) % ranks;
    let previous = (rank + ranks - 1) % ranks;
    for (number, ring) in rings.iter_mut().enumerate() {
        receive(ring, &block(previous, 1, 1000 + number as u64))?;
    }
    for (number, ring) in rings.iter_mut().enumerate().rev() {
        send(ring, block(next, 1, 1000 + number as u64))?;
    }
    for (number, ring) in rings.iter_mut().enumerate() {
        wait_for(ring, &block(previous, 1, 1000 + number as u64))?;
        drain(ring)?;
    }
    Ok(())
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
