//! NCCL between processes: if one rank cannot join or dies, every other rank gets an error before
//! the deadline.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use annulus::{
    Error, Result,
    comm::{
        mpi::{Launch, Mpi, Settings},
        nccl::Nccl,
    },
};
use annulus_core::Control;
use annulus_cuda::device::{
    Device,
    nccl::{Config, NcclSymbols, RawCommunicator, Status, UniqueId},
};
use annulus_cuda_emulator::{self as emulator, nccl_symbols};

use crate::rings;

/// Deadline of ranks that receive messages from each other.
const DEADLINE: Duration = Duration::from_secs(20);
/// Deadline of ranks that wait for a silent one.
const SILENCE: Duration = Duration::from_secs(2);

fn wrong(what: impl ToString) -> Error {
    Error::internal(what)
}

unsafe extern "C" fn refuse(
    _: *mut RawCommunicator,
    _: c_int,
    _: UniqueId,
    _: c_int,
    _: *mut Config,
) -> Status {
    2
}

/// The last rank cannot create its communicator: it reports the cause, and so do the others at
/// once.
pub(crate) fn refused() -> Result<String> {
    let mpi = Mpi::world(Settings::default())?;
    let rank = mpi.rank();
    let last = mpi.ranks() - 1;
    let device = Device::with_symbols(emulator::symbols(), 0)?;
    let symbols = if rank == last {
        NcclSymbols { init_rank: refuse, ..nccl_symbols() }
    } else {
        nccl_symbols()
    };
    let began = Instant::now();
    let text = Nccl::with_symbols(mpi, &device, Ok(symbols), DEADLINE)
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default();
    let took = began.elapsed();
    let why = "ncclCommInitRankConfig: unhandled system error (status 2)";
    let right =
        text.contains(why) && (rank == last || text.starts_with(&format!("rank {last} aborted: ")));
    if !right || took > DEADLINE / 2 {
        return Err(wrong(format!(
            "rank {rank} of a ring of which rank {last} cannot join: {text:?} after {took:?}"
        )));
    }
    Ok(if rank == 0 {
        format!("nccl between processes: {} ranks, one of which cannot join", last + 1)
    } else {
        String::new()
    })
}

/// NCCL groups that this process has started, and the group before which it dies.
static GROUPS: AtomicU64 = AtomicU64::new(0);
static LAST: AtomicU64 = AtomicU64::new(u64::MAX);

fn die() {
    // SIGKILL: no handler and no destructor runs
    let killed =
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    eprintln!("this process could not be killed: {killed:?}");
}

unsafe extern "C" fn die_joining(
    made: *mut RawCommunicator,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> Status {
    die();
    // SAFETY: the arguments are those of NCCL's function.
    unsafe { (nccl_symbols().init_rank)(made, ranks, id, rank, config) }
}

unsafe extern "C" fn start_or_die() -> Status {
    if GROUPS.fetch_add(1, Ordering::Relaxed) == LAST.load(Ordering::Relaxed) {
        die();
    }
    // SAFETY: no arguments.
    unsafe { (nccl_symbols().group_start)() }
}

/// Runs forward and backward; returns the number of groups of each pass.
fn groups() -> Result<[u64; 2]> {
    GROUPS.store(0, Ordering::Relaxed);
    let mut forward = 0;
    let plan = rings::plan_over_nccl(
        NcclSymbols { group_start: start_or_die, ..nccl_symbols() },
        DEADLINE,
    )?;
    rings::attend(plan, || forward = GROUPS.load(Ordering::Relaxed))?;
    Ok([forward, GROUPS.load(Ordering::Relaxed) - forward])
}

/// Rank 1 is killed while joining, or in the middle of a pass; the others must report it.
pub(crate) fn lost(launch: Launch, moment: &str) -> Result<String> {
    let rank = Mpi::world(Settings::default())?.rank();
    // a complete ring first, to count its groups
    let [forward, backward] = groups()?;
    let at = match moment {
        "joining" => None,
        "forward" => Some(forward / 2),
        "backward" => Some(forward + backward / 2),
        _ => return Err(Error::invalid("moment", moment, "joining, forward or backward")),
    };
    if rank == 1 {
        LAST.store(at.unwrap_or(u64::MAX), Ordering::Relaxed);
    }
    let began = Instant::now();
    let result = if at.is_some() {
        groups().map(drop)
    } else {
        let init_rank = if rank == 1 { die_joining } else { nccl_symbols().init_rank };
        rings::plan_over_nccl(NcclSymbols { init_rank, ..nccl_symbols() }, SILENCE).map(drop)
    };
    let took = began.elapsed();
    let named = match &result {
        // a rank that has not joined is reported as a timeout; one that had joined, by NCCL, on
        // this rank or on another
        Err(Error::Timeout { .. } | Error::Aborted { .. } | Error::PeerLost { .. })
            if at.is_none() =>
        {
            true
        }
        Err(Error::Comm { what, .. }) if at.is_none() => {
            what.contains("did not end before the deadline")
        }
        Err(error) => error.to_string().contains("remote process exited"),
        Ok(()) => false,
    };
    let in_time = took < if at.is_some() { DEADLINE / 2 } else { SILENCE + Duration::from_secs(2) };
    let right = named && in_time && forward > 0 && backward > 0;
    println!("{} rank {rank}: {result:?} after {took:?}", if right { "survivor" } else { "WRONG" });
    // MPI_Finalize would wait for the dead rank
    launch.abandon();
    std::process::exit(i32::from(!right))
}
