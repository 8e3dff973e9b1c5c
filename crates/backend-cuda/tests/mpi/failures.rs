//! NCCL between processes, when one of them cannot join or dies: every other rank has an error before the deadline.

use std::{
    ffi::c_int,
    process::Command,
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
    emulator::{self, nccl_symbols},
    nccl::{Config, NcclSymbols, RawCommunicator, Status, UniqueId},
};

use crate::rings;

/// Of ranks that hear from each other.
const DEADLINE: Duration = Duration::from_secs(20);
/// Of ranks that wait for one of which nothing is heard.
const SILENCE: Duration = Duration::from_secs(2);

fn wrong(what: impl Into<String>) -> Error {
    Error::Device { what: what.into() }
}

unsafe extern "C" fn refuse(_: *mut RawCommunicator, _: c_int, _: UniqueId, _: c_int, _: *mut Config) -> Status {
    2
}

/// The last rank's communicator cannot be made: it says why, and so do the others, at once.
pub(crate) fn refused() -> Result<String> {
    let mpi = Mpi::world(Settings::default())?;
    let (rank, last) = (mpi.rank(), mpi.ranks() - 1);
    let device = Device::with_symbols(emulator::symbols(), 0)?;
    let symbols = if rank == last { NcclSymbols { init_rank: refuse, ..nccl_symbols() } } else { nccl_symbols() };
    let began = Instant::now();
    let said = Nccl::with_symbols(mpi, &device, Ok(symbols), DEADLINE).err().map(|error| error.to_string()).unwrap_or_default();
    let took = began.elapsed();
    let why = "ncclCommInitRankConfig: unhandled system error (status 2)";
    let right = said.contains(why) && (rank == last || said.starts_with(&format!("rank {last} aborted: ")));
    if !right || took > DEADLINE / 2 {
        return Err(wrong(format!("rank {rank} of a ring of which rank {last} cannot join: {said:?} after {took:?}")));
    }
    Ok(if rank == 0 { format!("nccl between processes: {} ranks, one of which cannot join", last + 1) } else { String::new() })
}

/// Groups of messages that this process has begun, and the one before which it dies.
static GROUPS: AtomicU64 = AtomicU64::new(0);
static LAST: AtomicU64 = AtomicU64::new(u64::MAX);

fn die() {
    // no signal handler sees it, no destructor runs
    let killed = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
    eprintln!("this process could not be killed: {killed:?}");
}

unsafe extern "C" fn die_joining(made: *mut RawCommunicator, ranks: c_int, id: UniqueId, rank: c_int, config: *mut Config) -> Status {
    die();
    // SAFETY: as NCCL's function is given.
    unsafe { (nccl_symbols().init_rank)(made, ranks, id, rank, config) }
}

unsafe extern "C" fn start_or_die() -> Status {
    if GROUPS.fetch_add(1, Ordering::Relaxed) == LAST.load(Ordering::Relaxed) {
        die();
    }
    // SAFETY: no arguments.
    unsafe { (nccl_symbols().group_start)() }
}

/// Forward and backward; the groups of each pass.
fn groups() -> Result<[u64; 2]> {
    GROUPS.store(0, Ordering::Relaxed);
    let mut forward = 0;
    let plan = rings::plan_over_nccl(NcclSymbols { group_start: start_or_die, ..nccl_symbols() }, DEADLINE)?;
    rings::attend(plan, || forward = GROUPS.load(Ordering::Relaxed))?;
    Ok([forward, GROUPS.load(Ordering::Relaxed) - forward])
}

/// Rank 1 is killed as it joins, or in the middle of a pass; the others report.
pub(crate) fn lost(launch: Launch, moment: &str) -> Result<String> {
    let rank = Mpi::world(Settings::default())?.rank();
    // a ring that is whole first
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
        // of a rank that has not come nothing is known but that; of one that was there NCCL says that it has gone, here or on another rank
        Err(Error::Timeout { .. } | Error::Aborted { .. } | Error::PeerLost { .. }) if at.is_none() => true,
        Err(Error::Comm { what, .. }) if at.is_none() => what.contains("did not end before the deadline"),
        Err(error) => error.to_string().contains("remote process exited"),
        Ok(()) => false,
    };
    let in_time = took < if at.is_some() { DEADLINE / 2 } else { SILENCE + Duration::from_secs(2) };
    let right = named && in_time && forward > 0 && backward > 0;
    println!("{} rank {rank}: {result:?} after {took:?}", if right { "survivor" } else { "WRONG" });
    // finalising would wait for the dead
    launch.abandon();
    std::process::exit(i32::from(!right))
}
