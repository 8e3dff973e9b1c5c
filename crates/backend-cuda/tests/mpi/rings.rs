//! Rings of processes: over every transport, each rank's rows are those of one rank alone.
//!
//! NCCL between processes: if one rank dies, every other rank gets an error before the deadline.

use std::{
    ffi::c_int,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use annulus::{
    Attention, Dims, Division, Error, Layout, LocalRing, Plan, Result, Runtime, Setup, Tensors,
    backend::cuda_rank_over_mpi,
    comm::{
        Staged,
        mpi::{DeviceMpi, Launch, Mpi, Settings},
        nccl::Nccl,
    },
};
use annulus_core::{Control, HostViews, Transport};
use annulus_cuda::{
    Cuda,
    device::{
        Api, Compiler, CudaCopier, CudaSpace, Device, ImageCache, Status as DriverStatus, Stream,
        Symbols,
        nccl::{Config, NcclSymbols, RawCommunicator, Status, UniqueId},
    },
};
use annulus_cuda_emulator::{self as emulator, nccl_symbols, rccl_symbols};
use ndarray::{Array4, Axis};

/// Transport of the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Staged,
    /// MPI with device memory.
    Direct,
    /// Staged on odd ranks, direct on even ranks.
    Mixed,
    /// NCCL or RCCL; MPI carries its unique id and small messages.
    Nccl,
}

const LEN: usize = 150;
/// Longest wait for a silent rank.
const DEADLINE: Duration = Duration::from_secs(60);

fn numbers(heads: usize, shift: usize) -> Array4<f32> {
    Array4::from_shape_fn((1, LEN, heads, 16), |(_, i, h, c)| {
        ((i * 7 + h * 3 + c * 5 + shift) % 13) as f32 * 0.1 - 0.5
    })
}

/// Fails allocations of pinned memory, which only staged transports need.
unsafe extern "C" fn none(_: *mut *mut std::ffi::c_void, _: usize) -> DriverStatus {
    DriverStatus::OUT_OF_MEMORY
}

/// The driver of an interface.
fn driver(api: Api) -> Symbols {
    match api {
        Api::Cuda => emulator::symbols(),
        Api::Hip => emulator::hip_symbols::<0x942>(),
    }
}

/// Plan of this rank.
fn plan(api: Api, layout: Layout, link: Link) -> Result<Plan> {
    let mpi = Mpi::world(Settings::default())?;
    let staged = link == Link::Staged || link == Link::Mixed && !mpi.rank().is_multiple_of(2);
    let symbols = if staged { driver(api) } else { Symbols { allocate_host: none, ..driver(api) } };
    let device = Device::with_symbols(symbols, 0)?;
    let transport: Box<dyn Transport<HostViews<CudaSpace>>> = match link {
        Link::Nccl => {
            let table = if api == Api::Cuda { nccl_symbols() } else { rccl_symbols() };
            Box::new(Nccl::with_symbols(mpi, &device, Ok(table), DEADLINE)?)
        }
        _ if staged => Box::new(Staged::new(mpi, CudaCopier::new(&device)?)),
        _ => Box::new(DeviceMpi::new(mpi, &device)?),
    };
    plan_over(layout, &device, transport, DEADLINE)
}

/// Plan of this rank over these NCCL functions.
pub(crate) fn plan_over_nccl(symbols: NcclSymbols, deadline: Duration) -> Result<Plan> {
    let device = Device::with_symbols(emulator::symbols(), 0)?;
    let nccl =
        Nccl::with_symbols(Mpi::world(Settings::default())?, &device, Ok(symbols), deadline)?;
    plan_over(Layout::Contiguous, &device, Box::new(nccl), deadline)
}

fn compiler(api: Api) -> Result<Compiler> {
    let symbols = match api {
        Api::Cuda => emulator::compiler_symbols(),
        Api::Hip => emulator::hip_compiler_symbols(),
    };
    let cache = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels");
    Compiler::with_symbols(symbols, Some(ImageCache::new(cache)))
}

fn plan_over(
    layout: Layout,
    device: &Device,
    transport: Box<dyn Transport<HostViews<CudaSpace>>>,
    deadline: Duration,
) -> Result<Plan> {
    let cuda = Cuda::on(Stream::new(device)?, compiler(device.api())?);
    let attention = Setup::from((
        Attention::new().causal(true),
        Division::new().layout(layout),
        Runtime::new().deadline(deadline),
    ));
    Plan::with_backend(
        &attention,
        Dims { kv_heads: 1, ..Dims::new(1, LEN, 2, 16) },
        cuda.on_host(),
        transport,
    )
}

/// Returns out, dQ, dK, dV of this rank's rows, and the same rows of one rank alone. Calls
/// `between` between the passes.
pub(crate) fn attend(mut plan: Plan, between: impl FnOnce()) -> Result<[[Array4<f32>; 4]; 2]> {
    let [q_rows, kv_rows] = [plan.q_rows(), plan.kv_rows()]
        .map(|rows| rows.iter().map(|row| row as usize).collect::<Vec<_>>());
    let q = numbers(2, 0);
    let k = numbers(1, 1);
    let v = numbers(1, 2);
    let dout = numbers(2, 3);
    let of = |whole: &Array4<f32>, rows: &[usize]| whole.select(Axis(1), rows);
    let share = (of(&q, &q_rows), of(&k, &kv_rows), of(&v, &kv_rows), of(&dout, &q_rows));
    let tensors = Tensors::new(share.0.view(), share.1.view(), share.2.view());
    let forward = plan.forward(&tensors)?;
    between();
    let backward = plan.backward(&tensors, &forward, share.3.view(), None)?;
    let mut alone = LocalRing::new(
        Attention::new().causal(true),
        Dims { kv_heads: 1, ..Dims::new(1, LEN, 2, 16) },
        1,
    )?;
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let want = alone.forward(&tensors)?;
    let wanted = alone.backward(&tensors, &want, dout.view(), None)?;
    let wanted = [
        of(&want.out, &q_rows),
        of(&wanted.dq, &q_rows),
        of(&wanted.dk, &kv_rows),
        of(&wanted.dv, &kv_rows),
    ];
    Ok([[forward.out, backward.dq, backward.dk, backward.dv], wanted])
}

/// Runs every layout over every transport, forward and backward: results are correct and bitwise
/// the same. Returns a summary.
pub(crate) fn all() -> Result<String> {
    let mut rings = 0;
    let here = Mpi::world(Settings::default())?;
    for (api, layout) in
        [(Api::Cuda, Layout::Contiguous), (Api::Hip, Layout::Zigzag), (Api::Cuda, Layout::Striped)]
    {
        let mut first: Option<[Array4<f32>; 4]> = None;
        for link in [Link::Staged, Link::Direct, Link::Mixed, Link::Nccl] {
            let [got, want] = attend(plan(api, layout.clone(), link)?, || ())?;
            for (name, (got, want)) in
                ["out", "dq", "dk", "dv"].into_iter().zip(got.iter().zip(&want))
            {
                let error =
                    got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
                // NaN would pass a comparison of `error` alone
                let close = error < 1e-4 && got.iter().all(|number| number.is_finite());
                if !close || got.dim() != want.dim() {
                    return Err(Error::internal(format!(
                        "{name} of {layout:?}, {link:?}: error {error}"
                    )));
                }
            }
            let same = first
                .get_or_insert_with(|| got.clone())
                .iter()
                .zip(&got)
                .all(|(first, got)| first == got);
            rings += 1;
            if !same {
                return Err(Error::internal(format!(
                    "other bits than staged: {layout:?}, {link:?}"
                )));
            }
        }
    }
    let summary = format!(
        "device memory over mpi: {rings} rings of {} ranks, staged, from device memory, mixed, \
         by nccl or rccl",
        here.ranks()
    );
    Ok(if here.rank() == 0 { summary } else { String::new() })
}

/// Requires that memory of `runtime` alone is passed to MPI: the library reports so of it.
pub(crate) fn decides(runtime: &str) -> Result<String> {
    for api in [Api::Cuda, Api::Hip] {
        let device = Device::with_symbols(driver(api), 0)?;
        let cuda = Cuda::on(Stream::new(&device)?, compiler(api)?);
        let (_, is_passed) = cuda_rank_over_mpi(cuda, Mpi::world(Settings::default())?)?;
        if is_passed != api.name().eq_ignore_ascii_case(runtime) {
            return Err(Error::internal(format!("{}: passed is {is_passed}", api.name())));
        }
    }
    Ok(String::new())
}

/// Deadline of ranks that receive messages from each other.
const FAILURE_DEADLINE: Duration = Duration::from_secs(20);
/// Deadline of ranks that wait for a silent one.
const SILENCE: Duration = Duration::from_secs(2);

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
    let plan = plan_over_nccl(
        NcclSymbols { group_start: start_or_die, ..nccl_symbols() },
        FAILURE_DEADLINE,
    )?;
    attend(plan, || forward = GROUPS.load(Ordering::Relaxed))?;
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
        plan_over_nccl(NcclSymbols { init_rank, ..nccl_symbols() }, SILENCE).map(drop)
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
    let in_time =
        took < if at.is_some() { FAILURE_DEADLINE / 2 } else { SILENCE + Duration::from_secs(2) };
    let right = named && in_time && forward > 0 && backward > 0;
    println!("{} rank {rank}: {result:?} after {took:?}", if right { "survivor" } else { "WRONG" });
    // MPI_Finalize would wait for the dead rank
    launch.abandon();
    std::process::exit(i32::from(!right))
}
