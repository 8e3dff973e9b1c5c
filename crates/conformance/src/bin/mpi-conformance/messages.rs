//! The transport's contract, and what of it MPI alone has: receives that are posted ahead.

use std::time::{Duration, Instant};

use annulus_comm::{
    Deadline, barrier,
    mpi::{Mpi, Settings},
};
use annulus_conformance::{
    device::patterns::{groups, play},
    suite::messages::{CONTRACT, Check, GLANCE, LIMIT, agreed, block, dropped},
};
use annulus_core::{
    AgreedLengths, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result,
    Transport,
};

use crate::{Harness, Verdict, ensure};

const OF_MPI: [(&str, usize, Check); 3] = [
    ("patterns", 1, |mpi| patterns(mpi, 0, None).map(Ok)),
    ("patterns that are received ahead", 1, |mpi| patterns(mpi, 1, agreed()).map(Ok)),
    ("a dropped endpoint of a receive ahead", 2, |mpi| dropped(mpi, agreed())),
];

pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    let mut share = |name: &str, verdict: Result<Verdict>| {
        let verdict = verdict.unwrap_or_else(|error| Err(error.to_string()));
        harness.share(verdict.map_err(|wrong| format!("{name}: {wrong}")))
    };
    let ranks = Mpi::world(settings.clone()).map_err(|error| error.to_string())?.ranks();
    for (name, _, check) in CONTRACT.into_iter().chain(OF_MPI).filter(|of| ranks >= of.1) {
        share(name, Mpi::world(settings.clone()).and_then(|mut mpi| check(&mut mpi)))?;
    }
    if ranks > 1 {
        let verdict = Mpi::world(settings.clone()).and_then(other_length_ahead);
        share("another length than that of a receive ahead", verdict)?;
    }
    harness.share(many_in_turn(settings))
}

/// Sends and receives this rank's messages of random groups, in any order.
fn patterns(mpi: &mut dyn Transport<Host>, seed: u64, agreed: Option<AgreedLengths>) -> Result<()> {
    let groups = groups(mpi.ranks(), seed, 30, &[40, 40, 5000, 300_000]);
    play(mpi, &groups, seed, agreed)
}

/// A message that is received ahead, although its length differs, does not match the receive: a
/// rank that waits for it fails at its deadline, and no byte is written.
fn other_length_ahead(transport: Mpi) -> Result<Verdict> {
    const DEADLINE: Duration = Duration::from_secs(1);
    let mut transport = Deadline::<_, Host>::new(transport, DEADLINE)?;
    barrier(&mut transport, 1)?;
    let rank = transport.rank();
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
