//! A rank that joins a ring after the others stopped waiting. Every rank gets an error. On ranks
//! that stopped waiting it forbids further use of the communicator. All other communicators work.
//!
//! The communicator itself is lost: Open MPI duplicates it in several rounds, and matches a
//! collective operation that the host starts meanwhile with one of them.

use std::{
    ffi::{c_int, c_void},
    process, thread,
    time::{Duration, Instant},
};

use annulus_comm::mpi::{Mpi, Settings};
use annulus_core::Error;
use mpi::{ffi, topology::Communicator};

use crate::harness::{Verdict, ensure};

/// Time that ranks wait for each other.
const PATIENCE: Duration = Duration::from_secs(2);
/// Further delay of the last rank.
const LATE: Duration = Duration::from_secs(1);
/// Limit for a sum over another communicator: longer means that it hangs.
const HANGS: Duration = Duration::from_secs(10);

pub(crate) fn host_late(settings: &Settings) -> Verdict {
    let universe = mpi::initialize().ok_or("MPI was initialised already")?;
    let world = universe.world();
    // never freed: that would be another collective operation
    let host = world.duplicate();
    let verdict = late(settings, &host).and_then(|()| sum(&world));
    std::mem::forget(host);
    if verdict.is_ok() && world.rank() == 0 {
        println!("ok: host-late on {} ranks", world.size());
    }
    verdict
}

#[expect(unsafe_code, reason = "the handle of a live communicator")]
fn late(settings: &Settings, host: &impl Communicator) -> Verdict {
    let last = host.rank() == host.size() - 1;
    if last {
        thread::sleep(PATIENCE + LATE);
    }
    let settings = Settings { patience: PATIENCE, ..settings.clone() };
    // SAFETY: the communicator is live, and of the MPI that this program is linked with
    let error = match unsafe { Mpi::over_communicator(host.as_raw(), settings) } {
        Ok(_) => return Err("a ring was made without its late rank".to_owned()),
        Err(error) => error,
    };
    let warns = error.to_string().contains("begin no collective operation on it any more");
    let fails = matches!(error, Error::Comm { .. });
    // the last rank joins the others' duplication, and times out in the next one, which is
    // annulus's
    ensure(fails && warns != last, || format!("rank {}: {error}", host.rank()))
}

/// Sums all ranks + 1 over a communicator that no ring uses. It also drives MPI on the ranks that
/// stopped waiting, so that the late one can join their duplication.
#[expect(unsafe_code, reason = "a collective operation with a time limit, which rsmpi lacks")]
fn sum(world: &impl Communicator) -> Verdict {
    let mine: c_int = world.rank() + 1;
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
            world.as_raw(),
            &raw mut request,
        );
    }
    let started = Instant::now();
    let mut done = 0;
    while done == 0 {
        if started.elapsed() > HANGS {
            eprintln!("mpi-conformance host-late: rank {}: the world's sum hangs", world.rank());
            process::exit(1);
        }
        // SAFETY: the request was made above and is active
        unsafe { ffi::MPI_Test(&raw mut request, &raw mut done, ffi::RSMPI_STATUS_IGNORE) };
        thread::sleep(Duration::from_micros(100));
    }
    let want = world.size() * (world.size() + 1) / 2;
    ensure(all == want, || format!("rank {}: the world's sum is {all}, want {want}", world.rank()))
}
