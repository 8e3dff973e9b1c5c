//! The handle of a plan: creation over each kind of ring, queries, update, destruction.

use std::ffi::{c_char, c_int};

use annulus::{
    Batch, Error, Layout, LocalRing, Plan, Result, Route, Spec, Strategy,
    comm::{Cancellation, ring::PassKind, threads},
    overlapped::{OverlapPlan, Overlapped},
    planning::Runs,
};
use annulus_core::{Host, Transport};

#[cfg(feature = "cuda")]
use crate::cuda::{self, DevicePlan};
#[cfg(feature = "mpi")]
use crate::endpoint::MPI_Comm;
use crate::{
    attention::{self, annulus_attention},
    batch::{self, annulus_batch},
    callbacks::{ANNULUS_PASS_BACKWARD, ANNULUS_PASS_FORWARD},
    endpoint::{self, Communicator, Endpoint, annulus_endpoint},
    fields::{length, write_list, write_numbers, write_rows},
    handle::Handles,
    option_fields::{
        ANNULUS_LAYOUT_BALANCED, ANNULUS_LAYOUT_CONTIGUOUS, ANNULUS_LAYOUT_CUSTOM,
        ANNULUS_LAYOUT_STRIPED, ANNULUS_LAYOUT_ZIGZAG, ANNULUS_ROUTE_DIRECT,
        ANNULUS_ROUTE_ONCE_PER_NODE, ANNULUS_ROUTE_RAILS_DOWN, ANNULUS_ROUTE_RAILS_UP,
        ANNULUS_ROUTE_RELAY_DOWN, ANNULUS_ROUTE_RELAY_UP, ANNULUS_STRATEGY_GRID,
        ANNULUS_STRATEGY_HEADS_RING, ANNULUS_STRATEGY_RING,
    },
    options::Description,
    status::guard,
};

/// A plan: made once, used for many passes. Opaque.
pub struct annulus_plan {
    _opaque: [u8; 0],
}

pub(crate) static PLANS: Handles<Overlapped<ProcessPlan, ()>> = Handles::new("plan");

/// Plan of either kind of ring.
pub(crate) enum ProcessPlan {
    /// All ranks, as threads of this process, over whole tensors.
    Ring(LocalRing),
    /// One rank, over its own rows.
    Rank(Box<Plan>),
    /// One rank, over its own rows in device memory.
    #[cfg(feature = "cuda")]
    Device(Box<DevicePlan>),
}

/// Evaluates an expression for the plan of this process's first rank.
macro_rules! of_plan {
    ($planned:expr, $plan:ident => $body:expr) => {
        match $planned {
            $crate::plan::ProcessPlan::Ring(ring) => {
                let $plan = ring.plan();
                $body
            }
            $crate::plan::ProcessPlan::Rank($plan) => $body,
            #[cfg(feature = "cuda")]
            $crate::plan::ProcessPlan::Device($plan) => $body,
        }
    };
}

/// Evaluates the sum of a number over the plans of the ranks of this process.
macro_rules! sum_over_ranks {
    ($planned:expr, $plan:ident => $number:expr) => {
        match $planned {
            ProcessPlan::Ring(ring) => ring.plans().map(|$plan| $number).sum::<u64>(),
            ProcessPlan::Rank($plan) => $number,
            #[cfg(feature = "cuda")]
            ProcessPlan::Device($plan) => $number,
        }
    };
}

/// Evaluates `$call` with `$element` bound to the element type of a plan or a cache.
macro_rules! by_dtype {
    ($planned:expr, $element:ident => $call:expr) => {
        match $planned.spec().dtype {
            annulus::DType::F32 => by_dtype!(@ $element, f32, $call),
            annulus::DType::F64 => by_dtype!(@ $element, f64, $call),
            annulus::DType::F16 => by_dtype!(@ $element, annulus::half::f16, $call),
            annulus::DType::Bf16 => by_dtype!(@ $element, annulus::half::bf16, $call),
        }
    };
    (@ $element:ident, $type:ty, $call:expr) => {{
        type $element = $type;
        $call
    }};
}
pub(crate) use by_dtype;

impl OverlapPlan for ProcessPlan {
    fn any_thread(&self) -> bool {
        of_plan!(self, plan => plan.any_thread())
    }

    fn cancellations(&self) -> Vec<Cancellation> {
        match self {
            Self::Ring(ring) => ring.cancellations(),
            Self::Rank(plan) => plan.cancellations(),
            #[cfg(feature = "cuda")]
            Self::Device(plan) => plan.cancellations(),
        }
    }
}

impl ProcessPlan {
    /// The definition that the ranks agreed on.
    pub(crate) fn spec(&self) -> &Spec {
        of_plan!(self, plan => plan.spec())
    }

    /// Returns the arguments of a collective call. If they were refused, so is the call on the
    /// other ranks, which make it and must not wait for this one.
    pub(crate) fn admit<T>(&mut self, arguments: Result<T>) -> Result<T> {
        arguments.map_err(|error| match self {
            Self::Ring(_) => error,
            Self::Rank(plan) => plan.refuse(error),
            #[cfg(feature = "cuda")]
            Self::Device(plan) => plan.refuse(error),
        })
    }

    fn update(&mut self, batch: Result<Batch>) -> Result<()> {
        let batch = self.admit(batch)?;
        match self {
            Self::Ring(ring) => ring.update(&batch),
            Self::Rank(plan) => plan.update(&batch),
            #[cfg(feature = "cuda")]
            Self::Device(plan) => plan.update(&batch),
        }
    }
}

/// Makes the handle of a plan.
///
/// # Safety
/// As [`Handles::create`].
unsafe fn create(
    plan: *mut *mut annulus_plan,
    make: impl FnOnce() -> Result<ProcessPlan>,
) -> c_int {
    // SAFETY: as the caller promises
    unsafe { PLANS.create(plan, || make().map(Overlapped::new)) }
}

/// Copies the description behind a handle, for a plan.
fn description(attention: *const annulus_attention) -> Result<Description> {
    let description = attention::description(attention)?;
    description.check_plan()?;
    Ok(description)
}

/// Plans one rank over MPI.
fn over_mpi(description: &Description, ring: Endpoint) -> Result<ProcessPlan> {
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    if let Some(stream) = description.host_stream {
        return Ok(ProcessPlan::Device(Box::new(cuda::over_mpi(description, stream, ring)?)));
    }
    over(description, ring)
}

/// Plans one rank over a transport of host memory.
fn over<T: Transport<Host> + 'static>(
    description: &Description,
    transport: T,
) -> Result<ProcessPlan> {
    #[cfg(feature = "cuda")]
    if let Some(stream) = description.host_stream {
        return Ok(ProcessPlan::Device(Box::new(cuda::over(description, stream, transport)?)));
    }
    let plan = Plan::new(&description.setup, description.dims, transport)?;
    Ok(ProcessPlan::Rank(Box::new(plan)))
}

/// Plans a ring of `ranks` ranks in this process, over whole tensors.
///
/// Every pass starts one thread per rank (none for one rank), each of which computes with
/// `options.threads` threads, and returns when all have ended. `*plan` is NULL if the call fails.
///
/// Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, ANNULUS_UNSUPPORTED, ANNULUS_OUT_OF_MEMORY.
///
/// # Safety
/// `plan` points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_create_threads(
    attention: *const annulus_attention,
    ranks: i64,
    plan: *mut *mut annulus_plan,
) -> c_int {
    let make = || {
        let description = description(attention)?;
        let ranks = length("ranks", ranks)?;
        if description.host_stream.is_some() && ranks == 1 {
            let alone = threads::ring(1).pop().ok_or_else(|| Error::internal("no rank"))?;
            return over(&description, alone);
        }
        description.check_host_tensors("an in-process ring of other than one rank")?;
        let ring = LocalRing::new(description.setup, description.dims, ranks)?;
        Ok(ProcessPlan::Ring(ring))
    };
    // SAFETY: as the caller promises
    unsafe { create(plan, make) }
}

/// Plans this rank of a ring over the ranks of a communicator of MPI, given as Fortran and
/// MPI_Comm_c2f have it.
///
/// Collective over the communicator. It is duplicated and neither changed nor freed; its error
/// handler stays. Ranks wait for each other without a limit, as in any collective operation of MPI.
/// With options.adopt_communicator the plan takes the communicator over instead, and ranks wait up
/// to options.arrival_deadline_seconds, if that is set; then the call returns ANNULUS_COMM. MPI
/// must be initialised, with MPI_THREAD_FUNNELED at least; below MPI_THREAD_MULTIPLE the plan is
/// made and used on MPI's main thread. A handle that is not alive is refused locally, without the
/// other ranks. `*plan` is NULL if the call fails.
///
/// # Errors
/// ANNULUS_UNSUPPORTED in a library without the feature mpi (annulus_features).
/// ANNULUS_INVALID_ARGUMENT before MPI_Init and after MPI_Finalize, and for a null or an
/// inter-communicator. ANNULUS_REFUSED, ANNULUS_RANK_MISMATCH, ANNULUS_OUT_OF_MEMORY, ANNULUS_COMM.
///
/// # Safety
/// The handle is that of MPI_COMM_NULL or of a communicator that lives; with
/// options.adopt_communicator no other code uses or frees it. `plan` points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_create_mpi_f(
    attention: *const annulus_attention,
    communicator: i32,
    plan: *mut *mut annulus_plan,
) -> c_int {
    let make = || {
        let description = description(attention)?;
        // SAFETY: as the caller promises
        let ring = unsafe { Communicator::Fortran(communicator).open(&description) }?;
        over_mpi(&description, ring)
    };
    // SAFETY: as the caller promises
    unsafe { create(plan, make) }
}

/// As [`annulus_plan_create_mpi_f`], of a communicator as C has it.
///
/// Only in a library with the feature mpi. The header declares it where ANNULUS_WITH_MPI is
/// defined, and then includes mpi.h.
///
/// # Errors
/// As [`annulus_plan_create_mpi_f`].
///
/// # Safety
/// As [`annulus_plan_create_mpi_f`].
#[cfg(feature = "mpi")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_create_mpi(
    attention: *const annulus_attention,
    communicator: MPI_Comm,
    plan: *mut *mut annulus_plan,
) -> c_int {
    let make = || {
        let description = description(attention)?;
        // SAFETY: as the caller promises
        let ring = unsafe { Communicator::C(communicator).open(&description) }?;
        over_mpi(&description, ring)
    };
    // SAFETY: as the caller promises
    unsafe { create(plan, make) }
}

/// Plans this rank of a ring over an endpoint, which several plans and caches share.
///
/// Collective over the ranks of the endpoint: all of them make its plans and caches in the same
/// order. Plans over one endpoint are used and destroyed independently of each other, but an error
/// that ends a plan (from 40 on) ends all of them. options.adopt_communicator has no effect here.
/// `*plan` is NULL if the call fails.
///
/// # Errors
/// As [`annulus_plan_create_mpi_f`]; the error that ended the endpoint.
///
/// # Safety
/// `plan` points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_create_endpoint(
    attention: *const annulus_attention,
    endpoint: *const annulus_endpoint,
    plan: *mut *mut annulus_plan,
) -> c_int {
    let make = || {
        let ring = endpoint::share(endpoint)?;
        over_mpi(&description(attention)?, ring)
    };
    // SAFETY: as the caller promises
    unsafe { create(plan, make) }
}

/// Plans one rank over a transport, as the functions over MPI do, for tests.
#[doc(hidden)]
pub fn plan_over<T: Transport<Host> + 'static>(
    attention: *const annulus_attention,
    transport: T,
    plan: &mut *mut annulus_plan,
) -> c_int {
    // SAFETY: a reference to a writable pointer
    unsafe { create(plan, || over(&description(attention)?, transport)) }
}

/// Writes numbers to the places that `outs` name, computed from the plan.
///
/// # Safety
/// The places are NULL, misaligned or writable.
unsafe fn answer<T, const N: usize>(
    plan: *const annulus_plan,
    outs: [(&str, *mut T); N],
    of: impl FnOnce(&ProcessPlan) -> Result<[T; N]>,
) -> c_int {
    // SAFETY: as the caller promises
    guard(|| unsafe { write_numbers(outs, || PLANS.with(plan, |state| of(state.plan_mut()?))) })
}

/// Writes this rank to `*rank`; 0 for an in-process ring. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `rank` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_rank(plan: *const annulus_plan, rank: *mut i64) -> c_int {
    // SAFETY: as the caller promises
    unsafe {
        answer(plan, [("rank", rank)], |planned| {
            Ok([of_plan!(planned, plan => plan.rank() as i64)])
        })
    }
}

/// Writes the number of ranks to `*ranks`. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `ranks` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_ranks(plan: *const annulus_plan, ranks: *mut i64) -> c_int {
    // SAFETY: as the caller promises
    unsafe {
        answer(plan, [("ranks", ranks)], |planned| {
            Ok([of_plan!(planned, plan => plan.ranks() as i64)])
        })
    }
}

/// Writes the layout in force to `*layout`, a constant ANNULUS_LAYOUT_* other than AUTO. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `layout` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_layout(plan: *const annulus_plan, layout: *mut i32) -> c_int {
    let of = |planned: &ProcessPlan| {
        Ok([match of_plan!(planned, plan => plan.layout()).without_leaves() {
            Layout::Contiguous => ANNULUS_LAYOUT_CONTIGUOUS,
            Layout::Zigzag => ANNULUS_LAYOUT_ZIGZAG,
            Layout::Striped => ANNULUS_LAYOUT_STRIPED,
            Layout::Custom(_) => ANNULUS_LAYOUT_CUSTOM,
            Layout::Balanced(_) => ANNULUS_LAYOUT_BALANCED,
            other => {
                let what = format!("the layout {} has no number", other.name());
                return Err(Error::internal(what));
            }
        }])
    };
    // SAFETY: as the caller promises
    unsafe { answer(plan, [("layout", layout)], of) }
}

/// Writes the route in force to `*route`, a constant ANNULUS_ROUTE_* other than AUTO. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `route` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_route(plan: *const annulus_plan, route: *mut i32) -> c_int {
    let of = |planned: &ProcessPlan| {
        Ok([match of_plan!(planned, plan => plan.route()) {
            Route::RelayUp => ANNULUS_ROUTE_RELAY_UP,
            Route::RelayDown => ANNULUS_ROUTE_RELAY_DOWN,
            Route::Direct => ANNULUS_ROUTE_DIRECT,
            Route::RailsUp { .. } => ANNULUS_ROUTE_RAILS_UP,
            Route::RailsDown { .. } => ANNULUS_ROUTE_RAILS_DOWN,
            Route::OncePerNode { .. } => ANNULUS_ROUTE_ONCE_PER_NODE,
        }])
    };
    // SAFETY: as the caller promises
    unsafe { answer(plan, [("route", route)], of) }
}

/// Writes the strategy in force to `*strategy`: ANNULUS_STRATEGY_RING, HEADS_RING or GRID, which
/// are the forms of all others. `*heads` is the ranks of a group, 1 for the ring, or the parts of
/// the heads of ANNULUS_STRATEGY_GRID. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `strategy` and `heads` point to writable numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_strategy(
    plan: *const annulus_plan,
    strategy: *mut i32,
    heads: *mut i32,
) -> c_int {
    let of = |planned: &ProcessPlan| {
        let in_force = of_plan!(planned, plan => plan.strategy());
        let members = in_force.heads().and_then(|members| i32::try_from(members).ok());
        match (in_force, members) {
            (Strategy::Ring, _) => Ok([ANNULUS_STRATEGY_RING, 1]),
            (Strategy::HeadsRing { .. }, Some(members)) => {
                Ok([ANNULUS_STRATEGY_HEADS_RING, members])
            }
            (Strategy::Grid { .. }, Some(parts)) => Ok([ANNULUS_STRATEGY_GRID, parts]),
            (other, _) => Err(Error::internal(format!("the strategy {other} has no number"))),
        }
    };
    // SAFETY: as the caller promises
    unsafe { answer(plan, [("strategy", strategy), ("heads", heads)], of) }
}

/// Writes the parts into which the strategy in force divides queries and keys: the parts over which
/// keys and values circulate, and 1 unless the strategy is ANNULUS_STRATEGY_GRID. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `queries` and `keys` point to writable numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_grid(
    plan: *const annulus_plan,
    queries: *mut i32,
    keys: *mut i32,
) -> c_int {
    let of = |planned: &ProcessPlan| {
        let (in_force, ranks) = of_plan!(planned, plan => (plan.strategy(), plan.ranks()));
        let (queries, keys) = match in_force {
            Strategy::Grid { queries, keys, .. } => (queries, keys),
            other => (ranks / other.heads().unwrap_or(1).max(1), 1),
        };
        let number = |parts: usize| i32::try_from(parts).map_err(Error::internal);
        Ok([number(queries)?, number(keys)?])
    };
    // SAFETY: as the caller promises
    unsafe { answer(plan, [("queries", queries), ("keys", keys)], of) }
}

/// Writes the fingerprint of the arithmetic to `text`, with a zero byte at its end, and its length
/// without that byte to `*length`. Local.
///
/// With options.reproducible, machines with the same fingerprint give the same bits. It is one line
/// of ASCII, the one that the command `annulus doctor` prints as "numerics". `text` has room for
/// `capacity` bytes. With NULL as `text` and 0 as `capacity` only the length is written.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, also if there is too little room: then `*length` is written, and no
/// text.
///
/// # Safety
/// `text` points to `capacity` writable bytes, `length` to one writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_numerics(
    plan: *const annulus_plan,
    text: *mut c_char,
    capacity: i64,
    length: *mut i64,
) -> c_int {
    let of = || {
        let numerics =
            |planned: &ProcessPlan| of_plan!(planned, plan => plan.numerics().to_owned());
        let numerics = PLANS.with(plan, |state| Ok(numerics(state.plan_mut()?)))?;
        let bytes = numerics.into_bytes().into_iter();
        Ok((bytes.len(), bytes.chain([0]).map(|byte| byte as c_char)))
    };
    // SAFETY: as the caller promises
    guard(|| unsafe { write_list(("text", text), capacity, ("length", length), 1, of) })
}

/// Writes the bytes of memory that the plan keeps to `*bytes`, of all ranks in this process. Local.
///
/// Counted are the message buffers of the ring (blocks of keys, values and queries, and their
/// gradients in flight) and the memory of the kernels: accumulators, row statistics, and the
/// scratch memory of each thread; where ranks divide the heads, also the tensors of a rank's heads.
/// On a GPU they are in its memory, with a copy of the tensors. The first pass of each kind adds
/// lists of visible keys, or these copies; later passes add nothing. Not counted: row numbers and
/// positions, the schedule, stacks of threads, and rows that an in-process ring copies during a
/// pass.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `bytes` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_workspace_bytes(
    plan: *const annulus_plan,
    bytes: *mut u64,
) -> c_int {
    let of = |planned: &ProcessPlan| {
        Ok([sum_over_ranks!(planned, plan => plan.buffer_bytes() + plan.workspace_bytes())])
    };
    // SAFETY: as the caller promises
    unsafe { answer(plan, [("bytes", bytes)], of) }
}

/// Writes the payload bytes that a pass sends by the schedule to `*bytes`: those of this rank, or
/// of all ranks of an in-process ring. `pass` is an ANNULUS_PASS constant. Local.
///
/// 0 for the backward pass with options.forward_only. The agreement before a pass is not counted;
/// sums of gradients over ranks only if ranks send each other slices of them, from 8,193 numbers on
/// three ranks.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `bytes` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_predicted_bytes(
    plan: *const annulus_plan,
    pass: i32,
    bytes: *mut u64,
) -> c_int {
    let of = |planned: &ProcessPlan| {
        let pass = match pass {
            ANNULUS_PASS_FORWARD => PassKind::Forward,
            ANNULUS_PASS_BACKWARD => PassKind::Backward,
            other => return Err(Error::invalid("pass", other, "an ANNULUS_PASS constant")),
        };
        Ok([sum_over_ranks!(planned, plan => plan.bytes_predicted(pass))])
    };
    // SAFETY: as the caller promises
    unsafe { answer(plan, [("bytes", bytes)], of) }
}

/// Writes the global query rows of this rank, in the order of its tensors, to `rows`, and their
/// number to `*count`. Local.
///
/// `rows` has room for `capacity` numbers. With NULL as `rows` and 0 as `capacity` only the number
/// is written. In an in-process ring these are all rows, because its tensors are whole.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, also if there is too little room: then `*count` is written, and no
/// row.
///
/// # Safety
/// `rows` points to `capacity` writable numbers, `count` to one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_q_rows(
    plan: *const annulus_plan,
    rows: *mut i64,
    capacity: i64,
    count: *mut i64,
) -> c_int {
    let of = |planned: &ProcessPlan| match planned {
        ProcessPlan::Ring(ring) => Runs::counting(0, ring.plan().spec().dims.q_len as u64),
        rank => of_plan!(rank, plan => plan.q_rows().clone()),
    };
    let of = || PLANS.with(plan, |state| Ok(of(state.plan_mut()?)));
    // SAFETY: as the caller promises
    guard(|| unsafe { write_rows([rows, count], capacity, of) })
}

/// As [`annulus_plan_q_rows`], of keys.
///
/// # Errors
/// As [`annulus_plan_q_rows`].
///
/// # Safety
/// As [`annulus_plan_q_rows`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_kv_rows(
    plan: *const annulus_plan,
    rows: *mut i64,
    capacity: i64,
    count: *mut i64,
) -> c_int {
    let of = |planned: &ProcessPlan| match planned {
        ProcessPlan::Ring(ring) => Runs::counting(0, ring.plan().spec().dims.kv_len as u64),
        rank => of_plan!(rank, plan => plan.kv_rows().clone()),
    };
    let of = || PLANS.with(plan, |state| Ok(of(state.plan_mut()?)));
    // SAFETY: as the caller promises
    guard(|| unsafe { write_rows([rows, count], capacity, of) })
}

/// Writes the gradient of the batch's key_list_bias that the last backward pass has computed to
/// `numbers`, in the order of the listed pairs, and their number to `*count`. Local.
///
/// `numbers` has room for `capacity` numbers. With NULL as `numbers` and 0 as `capacity` only the
/// number is written.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, also if there is too little room, or no key_list_bias.
///
/// # Safety
/// `numbers` points to `capacity` writable numbers, `count` to one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_list_bias_gradient(
    plan: *const annulus_plan,
    numbers: *mut f64,
    capacity: i64,
    count: *mut i64,
) -> c_int {
    let of = |planned: &ProcessPlan| match planned {
        ProcessPlan::Ring(ring) => ring.list_bias_gradient(),
        ProcessPlan::Rank(plan) => plan.list_bias_gradient(),
        #[cfg(feature = "cuda")]
        ProcessPlan::Device(_) => None,
    };
    let of = || {
        let all = PLANS.with(plan, |state| Ok(of(state.plan_mut()?)))?;
        let want = "one with a key_list_bias, after a backward pass";
        let all = all.ok_or_else(|| Error::invalid("plan", "a plan without gradients", want))?;
        Ok((all.len(), all.into_iter()))
    };
    // SAFETY: as the caller promises
    guard(|| unsafe { write_list(("numbers", numbers), capacity, ("count", count), 0, of) })
}

/// Adapts the plan to a new batch, which stays in force until the next call: segment ids,
/// positions, packed lengths, dense mask, key lists. NULL removes them all. The tensors are copied.
///
/// Collective over the ranks. Layout and route stay; the schedule is derived anew.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, with the name of the tensor (of key lists also row and entry),
/// ANNULUS_UNSUPPORTED and ANNULUS_OUT_OF_MEMORY here, ANNULUS_REFUSED elsewhere;
/// ANNULUS_RANK_MISMATCH: the old batch
/// stays in force on all ranks. As [`annulus_forward`](crate::annulus_forward) if communication
/// fails.
///
/// # Safety
/// `batch` is NULL or points to an initialised batch, whose tensors nobody writes to meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_update(
    plan: *mut annulus_plan,
    batch: *const annulus_batch,
) -> c_int {
    guard(|| {
        PLANS.with(plan, |state| {
            // SAFETY: as the caller promises
            let batch = unsafe { batch::copied(batch) };
            state.plan_mut()?.update(batch.map(Option::unwrap_or_default))
        })
    })
}

/// Destroys a plan. If a call is using it, it is destroyed when that call ends. A pass that was
/// started is cancelled, which ends it on all ranks, unless it has ended; afterwards nothing uses
/// its tensors.
///
/// Local: a rank that failed can do it alone. Over MPI it waits up to one second for
/// the other ranks to do the same, so that nothing is in flight. After MPI_Finalize it is harmless.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT for NULL, a foreign handle, or one that was destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_plan_destroy(plan: *mut annulus_plan) -> c_int {
    guard(|| PLANS.remove(plan))
}
