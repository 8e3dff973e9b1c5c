//! Host programs: one that initialises MPI itself, with `MPI_THREAD_FUNNELED`, and passes its own
//! communicators to rings; and one whose last rank makes a ring after the others.
//!
//! | communicator of a late rank | timeout | result |
//! |---|---|---|
//! | the host's | no limit | the others wait and warn; the host's communicator works afterwards |
//! | the host's | shorter | an error on every rank, which forbids further use of it where a duplication is pending; other communicators work |
//! | a duplicate that the host made | shorter | an error on every rank; the host's communicator works |
//!
//! In the second case the communicator is lost: Open MPI duplicates it in several rounds, and would
//! match a collective operation of the host with one of these rounds.

use std::{
    ffi::{c_int, c_void},
    mem::ManuallyDrop,
    process,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use annulus::{Attention, Dims, Division, Layout, Plan, Runtime, Setup, Tensors};
use annulus_comm::{
    barrier,
    mpi::{Launch, Mpi, Settings, Timeout},
};
use annulus_core::{Control, Error, Host, Result, Transport, index};
use annulus_mpi::rsmpi::{
    self as mpi, Threading, ffi,
    topology::{Color, Communicator},
    traits::AsRaw,
};
use ndarray::Array4;

use crate::{Verdict, ensure};

const DIMS: Dims =
    Dims { batch: 1, q_len: 20, kv_len: 20, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };

pub(crate) fn host(settings: &Settings) -> Verdict {
    let early = Mpi::world(settings.clone()).map(drop);
    ensure(matches!(early, Err(Error::InvalidArgument { .. })), || {
        format!("before MPI_Init: {early:?}")
    })?;
    let (universe, level) =
        mpi::initialize_with_threading(Threading::Funneled).ok_or("MPI was initialised already")?;
    let world = universe.world();
    let rank = world.rank();
    let ranks = world.size();
    let verdict = rings(settings, &world, level);
    let kept = verdict
        .as_ref()
        .ok()
        .map(|()| Mpi::world(settings.clone()).map_err(|error| error.to_string()))
        .transpose()?;
    // MPI_Finalize drops an endpoint that waits for its thread
    let parked = Mpi::world(settings.clone()).map_err(|error| error.to_string())?;
    thread::spawn(move || drop(parked)).join().map_err(|_| "a thread panicked")?;
    let launch = Launch::begin().map_err(|error| error.to_string())?;
    let borrowed = !launch.began();
    drop(launch);
    let alive = !mpi::is_finalized();
    drop(universe);
    // an endpoint may outlive MPI: its use is an error, its drop does nothing
    let late = kept.map(|mut kept| (kept.progress(Duration::ZERO), kept.start_all_gather(1, &[])));
    verdict?;
    ensure(borrowed && alive, || "a launch that did not initialise MPI ended it".to_owned())?;
    let refused = |result: &Result<()>| matches!(result, Err(Error::InvalidArgument { .. }));
    ensure(late.as_ref().is_some_and(|(a, b)| refused(a) && refused(b)), || {
        format!("after MPI_Finalize: {late:?}")
    })?;
    if rank == 0 {
        println!("ok: host on {ranks} ranks, {level:?}");
    }
    Ok(())
}

/// Runs two plans at once on two communicators: a half of the world in reverse order, and the
/// world.
#[expect(unsafe_code, reason = "the handles of live communicators")]
fn rings(settings: &Settings, world: &impl Communicator, level: Threading) -> Verdict {
    let text = |error: Error| error.to_string();
    let color = Color::with_value(world.rank() % 2);
    let part = world.split_by_color_with_key(color, -world.rank()).ok_or("no part of the world")?;
    // SAFETY: both communicators are live, and of the MPI that this program is linked with
    let made = unsafe {
        let fortran = mpi::ffi::RSMPI_Comm_c2f(world.as_raw());
        [
            Mpi::over_communicator(part.as_raw(), settings.clone()),
            Mpi::over_fortran(fortran, settings.clone()),
        ]
    };
    let [parted, whole] = made;
    let [mut parted, whole] = [parted.map_err(text)?, whole.map_err(text)?];
    ensure(parted.ranks() == (world.size() as usize + 1 - world.rank() as usize % 2) / 2, || {
        format!("{} ranks in a part", parted.ranks())
    })?;
    ensure(whole.rank() == world.rank() as usize, || "not MPI's rank number".to_owned())?;
    // Open MPI keeps MPI_TAG_UB on the world and its duplicates only; the ring must still find it.
    // With no more tags than MPI guarantees this would prove nothing
    ensure(whole.last_tag() > 32_767 && parted.last_tag() == whole.last_tag(), || {
        format!("tags of a part end at {}, of the world at {}", parted.last_tag(), whole.last_tag())
    })?;
    // another thread may use the endpoint only with MPI_THREAD_MULTIPLE
    let elsewhere = thread::scope(|scope| scope.spawn(|| parted.progress(Duration::ZERO)).join());
    let elsewhere = elsewhere.map_err(|_| "a thread panicked")?;
    let allowed = level == Threading::Multiple;
    ensure(elsewhere.is_ok() == allowed, || {
        format!("on another thread, {level:?}: {elsewhere:?}")
    })?;
    // an endpoint that is dropped elsewhere waits until its thread makes the next one:
    // `scripts/scale-check` counts the communicators that are freed
    let dropped = Mpi::world(settings.clone()).map_err(text)?;
    thread::spawn(move || drop(dropped)).join().map_err(|_| "a thread panicked")?;
    // one that the host has made for the ring, and which is freed with it
    let given = ManuallyDrop::new(world.duplicate());
    // SAFETY: live, of the MPI that this program is linked with, and used by no other code
    let mut adopted = unsafe { Mpi::adopt(given.as_raw(), settings.clone()) }.map_err(text)?;
    barrier::<Host>(&mut adopted, 1).map_err(text)?;
    drop(adopted);
    // the host may free its communicator: an endpoint uses a duplicate
    drop(part);
    // a round number that no plan uses
    barrier::<Host>(&mut parted, u64::MAX).map_err(text)?;
    let mut plans = [plan(parted).map_err(text)?, plan(whole).map_err(text)?];
    for turn in 0..3 {
        for plan in &mut plans {
            pass(plan).map_err(|error| format!("turn {turn}: {error}"))?;
        }
    }
    // SAFETY: a null handle is allowed; the function refuses it
    let null = unsafe { Mpi::over_communicator(mpi::ffi::RSMPI_COMM_NULL, settings.clone()) };
    ensure(matches!(null, Err(Error::InvalidArgument { .. })), || {
        format!("{null:?} for a null communicator")
    })
}

fn plan(transport: Mpi) -> Result<Plan> {
    let attention = Setup::from((
        Attention::new().causal(true),
        Division::new().layout(Layout::Zigzag),
        Runtime::new().deadline(Duration::from_secs(20)),
    ));
    Plan::new(&attention, DIMS, transport)
}

/// Runs forward and backward with all values 0.5: whatever the weights, every output is 0.5.
fn pass(plan: &mut Plan) -> Result<()> {
    let tensor = |heads| Array4::<f32>::from_elem((1, index(plan.q_rows().len()), heads, 4), 0.5);
    let q = tensor(2);
    let kv = tensor(1);
    let tensors = Tensors::new(q.view(), kv.view(), kv.view());
    let forward = plan.forward(&tensors)?;
    plan.backward(&tensors, &forward, q.view(), None)?;
    match forward.out.iter().find(|&&out| (out - 0.5).abs() > 1e-6) {
        Some(out) => Err(Error::Device { what: format!("a weighted mean of 0.5 is {out}") }),
        None => Ok(()),
    }
}

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
