//! NCCL between processes, when one of them cannot join or dies: every other rank has an error before the deadline.

use std::{
    ffi::c_int,
    process::Command,
    sync::atomic::{AtomicI64, Ordering},
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

/// Groups of messages until this process dies.
static LEFT: AtomicI64 = AtomicI64::new(i64::MAX);

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
    if LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
        die();
    }
    // SAFETY: no arguments.
    unsafe { (nccl_symbols().group_start)() }
}

/// Rank 1 is killed as it joins, or before its n-th group of messages; the others report.
pub(crate) fn lost(launch: Launch, moment: &str) -> Result<String> {
    let rank = Mpi::world(Settings::default())?.rank();
    let joining = moment == "joining";
    let mut symbols = nccl_symbols();
    if rank == 1 && joining {
        symbols.init_rank = die_joining;
    } else if rank == 1 {
        let groups = moment.parse().map_err(|_| Error::invalid("moment", moment, "joining or a number of groups"))?;
        LEFT.store(groups, Ordering::Relaxed);
        symbols.group_start = start_or_die;
    }
    let deadline = if joining { SILENCE } else { DEADLINE };
    let began = Instant::now();
    let result = rings::plan_over_nccl(symbols, deadline).and_then(rings::attend).map(drop);
    let took = began.elapsed();
    let named = match &result {
        // of a rank that has not come nothing is known but that; of one that was there NCCL says that it has gone, here or on another rank
        Err(Error::Timeout { .. } | Error::Aborted { .. } | Error::PeerLost { .. }) if joining => true,
        Err(Error::Comm { what, .. }) if joining => what.contains("did not end before the deadline"),
        Err(error) => error.to_string().contains("remote process exited"),
        Ok(()) => false,
    };
    let in_time = if joining { took < SILENCE + Duration::from_secs(2) } else { took < DEADLINE };
    let right = named && in_time;
    println!("{} rank {rank}: {result:?} after {took:?}", if right { "survivor" } else { "WRONG" });
    // finalising would wait for the dead
    launch.abandon();
    std::process::exit(i32::from(!right))
}
