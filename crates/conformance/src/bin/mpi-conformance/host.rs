//! A host program that initialises MPI itself, with `MPI_THREAD_FUNNELED`, and passes its own
//! communicators to rings.

use std::{mem::ManuallyDrop, thread, time::Duration};

use annulus::{Attention, Dims, Division, Layout, Plan, Runtime, Setup, Tensors};
use annulus_comm::{
    barrier,
    mpi::{Launch, Mpi, Settings},
};
use annulus_core::{Control, Error, Host, Result, Transport, index};
use annulus_mpi::rsmpi::{
    self as mpi, Threading,
    topology::{Color, Communicator},
    traits::AsRaw,
};
use ndarray::Array4;

use crate::harness::{Verdict, ensure};

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
