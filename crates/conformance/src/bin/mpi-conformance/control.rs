//! Control messages of many ranks: a rank that is late, one that aborts, one that leaves. Every
//! other rank gets the same error, also those that are not neighbours of that rank.
//!
//! `scripts/scale-check` counts the messages meanwhile.

use std::time::Duration;

use annulus_comm::{
    Deadline, all_gather, barrier,
    mpi::{Mpi, Settings},
};
use annulus_core::{Control, Error, Host, Result, Transport};

use crate::harness::{Harness, Verdict, ensure};

/// Deadline of every endpoint here. `scripts/scale-check` derives the number of heartbeats from it.
const DEADLINE: Duration = Duration::from_secs(8);
/// Delay of a late rank: long enough for several heartbeats.
const LATE: Duration = Duration::from_secs(4);

pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    for (name, case) in [
        ("late", late as fn(Deadline<Mpi, Host>) -> Result<Verdict>),
        ("aborted", aborted),
        ("gone", gone),
    ] {
        let endpoint =
            Mpi::world(settings.clone()).and_then(|endpoint| Deadline::new(endpoint, DEADLINE));
        let verdict = endpoint.and_then(case).unwrap_or_else(|error| Err(error.to_string()));
        harness.share(verdict.map_err(|wrong| format!("{name}: {wrong}")))?;
    }
    Ok(())
}

/// The last rank is late by half of the deadline: nothing fails.
fn late(mut endpoint: Deadline<Mpi, Host>) -> Result<Verdict> {
    barrier(&mut endpoint, 1)?;
    if endpoint.rank() + 1 == endpoint.ranks() {
        std::thread::sleep(LATE);
    }
    barrier(&mut endpoint, 2)?;
    Ok(Ok(()))
}

/// A rank aborts: all others get its abort at once, with its rank.
fn aborted(mut endpoint: Deadline<Mpi, Host>) -> Result<Verdict> {
    let origin = endpoint.ranks() / 2;
    let cause = Error::Device { what: "broke".to_owned() };
    let entered = barrier(&mut endpoint, 1);
    if endpoint.rank() == origin {
        endpoint.abort(&cause);
        return entered.map(Ok);
    }
    let want = Err(Error::Aborted { rank: origin, what: cause.to_string() });
    // the abort may overtake the last message of the first barrier
    let got = entered.and_then(|()| barrier(&mut endpoint, 2));
    Ok(ensure(got == want, || format!("got {got:?}, want {want:?}")))
}

/// The last rank leaves before a collective call: all others name it, long before the deadline.
fn gone(mut endpoint: Deadline<Mpi, Host>) -> Result<Verdict> {
    barrier(&mut endpoint, 1)?;
    let last = endpoint.ranks() - 1;
    if endpoint.rank() == last {
        return Ok(Ok(()));
    }
    let got = all_gather(&mut endpoint, 2, &[1]);
    // until every rank has the error: one that leaves earlier would itself be lost to the others
    let left = std::time::Instant::now();
    while left.elapsed() < DEADLINE / 16 {
        drop(endpoint.progress(Duration::from_millis(1)));
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(ensure(matches!(got, Err(Error::PeerLost { peer, .. }) if peer == last), || {
        format!("got {got:?}, want rank {last} lost")
    }))
}
