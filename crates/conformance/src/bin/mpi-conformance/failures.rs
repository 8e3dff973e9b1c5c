//! Failures of ranks, not of messages: slow, panicking, killed and stopped ranks.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use annulus::{Attention, Dims, Division, Layout, Plan, Runtime, Setup, Tensors};
use annulus_comm::{
    Deadline, Silence, barrier,
    mpi::{Launch, Mpi, Settings},
};
use annulus_core::{Control, Error, Host, Result, index};
use ndarray::Array4;

use crate::{
    harness::{Harness, Verdict, ensure},
    mortal::{self, End, Moment, Mortal},
};

const DIMS: Dims =
    Dims { batch: 1, q_len: 24, kv_len: 24, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };
/// Deadline of the plans that lose a rank.
const DEADLINE: Duration = Duration::from_secs(1);
/// Deadline of the ring with a slow rank, which is silent for half of it.
const SLOW_DEADLINE: Duration = Duration::from_secs(3);

fn tensor(rows: usize, heads: usize) -> Array4<f32> {
    Array4::from_elem((1, rows, heads, 4), 0.5)
}

/// The last rank is silent for half of the deadline: every rank that watches it warns of it once,
/// at a quarter, and nothing fails.
pub(crate) fn slow(harness: &mut Harness, settings: &Settings) -> Verdict {
    let last = harness.ranks() - 1;
    let warnings: Arc<Mutex<Vec<Silence>>> = Arc::default();
    let warned = Arc::clone(&warnings);
    let mut watches_last = false;
    let wait = || -> Result<Duration> {
        let mut endpoint = Deadline::<_, Host>::new(Mpi::world(settings.clone())?, SLOW_DEADLINE)?
            .with_warning(move |silence| {
                warned.lock().unwrap_or_else(PoisonError::into_inner).push(silence)
            });
        watches_last = endpoint.watched().is_none_or(|watched| watched.contains(&last));
        barrier(&mut endpoint, 1)?;
        let started = Instant::now();
        if harness.rank() == last {
            std::thread::sleep(SLOW_DEADLINE / 2);
        }
        barrier(&mut endpoint, 2)?;
        Ok(started.elapsed())
    };
    let waited = wait().map_err(|error| error.to_string());
    let warnings = warnings.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let expected = match &warnings[..] {
        [Silence { peer, waited, .. }] => {
            *peer == last && (SLOW_DEADLINE / 4..SLOW_DEADLINE / 2).contains(waited)
        }
        warnings => warnings.is_empty() && (harness.rank() == last || !watches_last),
    };
    harness
        .share(ensure(expected && waited.is_ok(), || format!("{waited:?}, warnings {warnings:?}")))
}

/// The last rank panics while the others wait for it.
pub(crate) fn panic(harness: &mut Harness, settings: &Settings) -> Verdict {
    let mut transport = Mpi::world(settings.clone()).map_err(|error| error.to_string())?;
    let last = harness.ranks() - 1;
    assert!(harness.rank() != last, "rank {last} panics on purpose");
    barrier::<Host>(&mut transport, 1).map_err(|error| error.to_string())?;
    harness.share(Ok(()))
}

/// Round of the agreement on the first call of a plan.
const FIRST_ENTRY: u64 = 2;

/// Rank 1 is killed before its first, a middle or its last transfer of a pass, or stopped for ever,
/// there or after it has entered a pass for which the last rank is late; every other rank reports
/// the loss and exits without `MPI_Finalize`.
pub(crate) fn lost(
    launch: Launch,
    mut harness: Harness,
    settings: &Settings,
    pass: &str,
    moment: &str,
) -> Verdict {
    // with full attention every rank posts the same number of sends and receives
    let counts = plan(settings, None, Duration::from_secs(30))
        .and_then(|mut plan| passes(&mut plan))
        .map_err(|error| error.to_string());
    harness.share(counts.as_ref().map(drop).map_err(Clone::clone))?;
    let [forward, both] = counts?;
    let at = |transfer, end| (Moment::Transfer(transfer), end);
    let end = match (pass, moment) {
        ("forward", "first") => at(0, End::Killed),
        ("forward", "middle") => at(forward / 2, End::Killed),
        ("forward", "last") => at(forward - 1, End::Killed),
        ("forward", "stopped") => at(forward / 2, End::Stopped),
        ("backward", "first") => at(forward, End::Killed),
        ("backward", "middle") => at(forward.midpoint(both), End::Killed),
        ("backward", "last") => at(both - 1, End::Killed),
        ("entry", "stopped") => (Moment::Entry(FIRST_ENTRY), End::Stopped),
        _ => {
            let want = "forward|backward first|middle|last, forward stopped or entry stopped";
            return Err(format!("want {want}"));
        }
    };
    let is_late = pass == "entry" && harness.rank() == harness.ranks() - 1;
    let end = (harness.rank() == 1).then_some(end);
    let mut plan = plan(settings, end, DEADLINE).map_err(|error| error.to_string())?;
    if is_late {
        std::thread::sleep(DEADLINE * 2);
    }
    let started = Instant::now();
    let result = passes(&mut plan).map(drop);
    let took = started.elapsed();
    let named = match &result {
        Err(Error::Timeout { peer: 1, .. } | Error::PeerLost { peer: 1, .. }) => true,
        Err(Error::Aborted { what, .. }) => what.contains("rank 1 ") && what.contains("step "),
        _ => false,
    };
    let right = named && took <= DEADLINE + Duration::from_secs(1);
    println!(
        "{} rank {}: {result:?} after {took:?}",
        if right { "survivor" } else { "WRONG" },
        harness.rank()
    );
    // endpoints wait for no rank after a failure; the harness has not failed, so it is not dropped
    drop(plan);
    std::mem::forget(harness);
    launch.abandon();
    std::process::exit(i32::from(!right))
}

fn plan(settings: &Settings, end: Option<(Moment, End)>, deadline: Duration) -> Result<Plan> {
    let transport = Mortal::new(Mpi::world(settings.clone())?, end);
    Plan::new(
        &Setup::from((
            Attention::new(),
            Division::new().layout(Layout::Contiguous),
            Runtime::new().deadline(deadline),
        )),
        DIMS,
        transport,
    )
}

/// Runs forward and backward of full attention; returns the number of sends and receives posted
/// after each.
fn passes(plan: &mut Plan) -> Result<[u64; 2]> {
    let rows = index(plan.q_rows().len());
    let q = tensor(rows, 2);
    let kv = tensor(rows, 1);
    let tensors = Tensors::new(q.view(), kv.view(), kv.view());
    let forward = plan.forward(&tensors)?;
    let after_forward = mortal::transfers();
    plan.backward(&tensors, &forward, q.view(), None)?;
    Ok([after_forward, mortal::transfers()])
}
