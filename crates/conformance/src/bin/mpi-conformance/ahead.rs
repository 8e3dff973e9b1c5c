//! Messages with agreed lengths: their receives start when they are posted, and before the messages
//! if the receiver is first; no control message belongs to them.
//!
//! `scripts/scale-check` counts the receives whose messages wait for them, and the announcements.

use std::time::Duration;

use annulus_comm::{
    barrier,
    mpi::{Mpi, Settings},
};
use annulus_core::{
    Channel, Control, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result, Transport,
};

use crate::{
    harness::{Harness, Verdict, ensure},
    messages::{agreed, drain, failure, wait_for},
};

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
