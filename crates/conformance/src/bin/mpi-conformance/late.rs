//! A rank that makes a ring after the others.
//!
//! | communicator | timeout | result |
//! |---|---|---|
//! | the host's | no limit | the others wait and warn; the host's communicator works afterwards |
//! | the host's | shorter | an error on every rank, which forbids further use of it where a duplication is pending; other communicators work |
//! | a duplicate that the host made | shorter | an error on every rank; the host's communicator works |
//!
//! In the second case the communicator is lost: Open MPI duplicates it in several rounds, and would
//! match a collective operation of the host with one of these rounds.

use std::{
    ffi::{c_int, c_void},
    process,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use annulus_comm::{
    barrier,
    mpi::{Mpi, Settings, Timeout},
};
use annulus_core::{Error, Host, Result};
use annulus_mpi::rsmpi::{self as mpi, ffi, topology::Communicator};

use crate::harness::{Verdict, ensure};

/// Time that ranks wait for each other, if that is limited.
const PATIENCE: Duration = Duration::from_secs(1);
/// Further delay of the last rank.
const LATE: Duration = Duration::from_millis(500);
/// Limit for a sum over another communicator: longer means that it hangs.
const HANGS: Duration = Duration::from_secs(10);

pub(crate) fn host_late(settings: &Settings) -> Verdict {
    let universe = mpi::initialize().ok_or("MPI was initialised already")?;
    let world = universe.world();
    // none is freed: that would be another collective operation
    let waited_for = std::mem::ManuallyDrop::new(world.duplicate());
    let abandoned = std::mem::ManuallyDrop::new(world.duplicate());
    let spared = std::mem::ManuallyDrop::new(world.duplicate());
    let given = std::mem::ManuallyDrop::new(spared.duplicate());
    let verdict = waits(settings, &*waited_for)
        .and_then(|()| sum(&*waited_for))
        .and_then(|()| gives_up(settings, &*abandoned))
        .and_then(|()| sum(&world))
        .and_then(|()| gives_up_adopted(settings, &*given))
        .and_then(|()| sum(&*spared));
    if verdict.is_ok() && world.rank() == 0 {
        println!("ok: host-late on {} ranks", world.size());
    }
    verdict
}

/// Sleeps on the last rank, longer than the others are patient. Returns true there.
fn is_late(host: &impl Communicator) -> bool {
    let last = host.rank() == host.size() - 1;
    if last {
        thread::sleep(PATIENCE + LATE);
    }
    last
}

/// Without a limit the others wait and warn.
#[expect(unsafe_code, reason = "the handle of a live communicator")]
fn waits(settings: &Settings, host: &impl Communicator) -> Verdict {
    let warnings = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&warnings);
    let timeout = Timeout::unlimited().with_warning_every(PATIENCE / 2, move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let settings = Settings { timeout, ..settings.clone() };
    let last = is_late(host);
    // SAFETY: the communicator is live, and of the MPI that this program is linked with
    let mut ring = unsafe { Mpi::over_communicator(host.as_raw(), settings) }
        .map_err(|error| format!("rank {}: {error}", host.rank()))?;
    barrier::<Host>(&mut ring, 1).map_err(|error| error.to_string())?;
    let warnings = warnings.load(Ordering::Relaxed);
    ensure(last || warnings > 0, || format!("rank {}: no warning", host.rank()))
}

/// With a limit every rank gets an error, which forbids the use of the communicator on the ranks
/// that stopped waiting: the last one joins the others' duplication, and times out in the next one,
/// which is annulus's.
#[expect(unsafe_code, reason = "the handle of a live communicator")]
fn gives_up(settings: &Settings, host: &impl Communicator) -> Verdict {
    let last = is_late(host);
    let settings = Settings { timeout: Timeout::at_most(PATIENCE), ..settings.clone() };
    // SAFETY: the communicator is live, and of the MPI that this program is linked with
    let made = unsafe { Mpi::over_communicator(host.as_raw(), settings) };
    refused(made, !last, host)
}

/// As [`gives_up`], on a communicator that the host duplicated: no error forbids the use of the
/// host's.
#[expect(unsafe_code, reason = "the handle of a live communicator")]
fn gives_up_adopted(settings: &Settings, given: &impl Communicator) -> Verdict {
    is_late(given);
    let settings = Settings { timeout: Timeout::at_most(PATIENCE), ..settings.clone() };
    // SAFETY: the communicator is live, of the MPI that this program is linked with, and used by no
    // other code
    refused(unsafe { Mpi::adopt(given.as_raw(), settings) }, false, given)
}

fn refused(made: Result<Mpi>, forbids: bool, host: &impl Communicator) -> Verdict {
    let error = match made {
        Ok(_) => return Err("a ring was made without its late rank".to_owned()),
        Err(error) => error,
    };
    let got = error.to_string().contains("begin no collective operation on it any more");
    let fails = matches!(error, Error::Comm { .. });
    ensure(fails && got == forbids, || format!("rank {}: {error}", host.rank()))
}

/// Sums all ranks + 1 over a communicator of the host's. It also drives MPI on the ranks that
/// stopped waiting, so that the late one can join their duplication.
#[expect(unsafe_code, reason = "a collective operation with a time limit, which rsmpi lacks")]
fn sum(host: &impl Communicator) -> Verdict {
    let mine: c_int = host.rank() + 1;
    let mut all: c_int = 0;
    // SAFETY: a constant of the linked MPI
    let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
    // SAFETY: the communicator is live; both numbers live until the request is complete or the
    // process ends
    unsafe {
        let from = (&raw const mine).cast::<c_void>();
        let into = (&raw mut all).cast::<c_void>();
        ffi::MPI_Iallreduce(
            from,
            into,
            1,
            ffi::RSMPI_INT32_T,
            ffi::RSMPI_SUM,
            host.as_raw(),
            &raw mut request,
        );
    }
    let started = Instant::now();
    let mut done = 0;
    while done == 0 {
        if started.elapsed() > HANGS {
            eprintln!("mpi-conformance host-late: rank {}: the host's sum hangs", host.rank());
            process::exit(1);
        }
        // SAFETY: the request was made above and is active
        unsafe { ffi::MPI_Test(&raw mut request, &raw mut done, ffi::RSMPI_STATUS_IGNORE) };
        thread::sleep(Duration::from_micros(100));
    }
    let want = host.size() * (host.size() + 1) / 2;
    ensure(all == want, || format!("rank {}: the host's sum is {all}, want {want}", host.rank()))
}
