//! State of MPI in this process: not initialised, alive, finalised. Relies on the rules of
//! [`super::ffi`].
//!
//! `MPI_Initialized` and `MPI_Finalized` would be called before every other call, which shows up in
//! every profile of MPI. Instead an attribute with a delete callback is attached to
//! `MPI_COMM_SELF`: `MPI_Finalize` deletes it before anything else (MPI 3.1, 8.7.1). The callback
//! drops the endpoints that wait for their thread, while MPI is still alive.
//!
//! A forked child shares the connections of its parent's MPI, so calls there would disturb the
//! parent. The process in which MPI was alive first is recorded; in its children nothing calls MPI.
//!
//! Dropping a handle: see "Lifetime" in the documentation of [`super`]. A handle that was dropped on
//! a thread which may not call MPI waits for its own thread.
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{
    collections::BTreeSet,
    ffi::{c_int, c_void},
    mem, ptr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use annulus_core::{Error, HomeProcess, Result};
use annulus_mpi::ffi;

use super::{
    Mpi,
    all_gather::TreeAllGather,
    circulant::BarrierMessage,
    communicator::MpiCommunicator,
    context::ThreadLevel,
    endpoint::{MpiEndpoint, SharedEndpoint},
    ffi::{PeerStep, check, check_loaded},
    frame::{ControlFrame, Leaving},
    messages::MessageKind,
};

/// State of MPI in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lifetime {
    NotInitialized,
    Alive,
    Finalized,
}

/// No attribute is attached: the state must be queried.
const UNWATCHED: u8 = 0;
/// The attribute is attached, and MPI is alive.
const ALIVE: u8 = 1;
/// The attribute was deleted.
const FINALIZED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNWATCHED);

/// The process whose MPI was alive first.
static HOME: HomeProcess = HomeProcess::unused();

/// Serialises [`watch`].
static WATCHING: Mutex<()> = Mutex::new(());

/// Returns the state of MPI in this process.
pub(super) fn lifetime() -> Lifetime {
    match STATE.load(Ordering::Acquire) {
        ALIVE => return Lifetime::Alive,
        FINALIZED => return Lifetime::Finalized,
        _ => {}
    }
    let mut initialized = 0;
    let mut finalized = 0;
    // SAFETY: both may be called at any time, from any thread; the numbers live through the calls
    unsafe {
        ffi::MPI_Initialized(&raw mut initialized);
        ffi::MPI_Finalized(&raw mut finalized);
    }
    match (initialized != 0, finalized != 0) {
        (_, true) => Lifetime::Finalized,
        (true, false) => {
            HOME.note();
            Lifetime::Alive
        }
        (false, false) => Lifetime::NotInitialized,
    }
}

/// Checks rule 1.
///
/// # Errors
/// [`Error::Unsupported`] without an MPI, [`Error::InvalidArgument`] if it is not alive.
pub(super) fn check_alive() -> Result<()> {
    let got = match lifetime() {
        Lifetime::Alive => return Ok(()),
        Lifetime::Finalized => "MPI after MPI_Finalize",
        Lifetime::NotInitialized => "MPI before MPI_Init",
    };
    check_loaded()?;
    Err(Error::invalid("MPI", got, "MPI between MPI_Init and MPI_Finalize"))
}

/// Returns true in a process that was forked from that of MPI: it must not call MPI, and leaks
/// everything that would.
pub(super) fn is_forked() -> bool {
    HOME.is_foreign()
}

/// Checks that this process was not forked from that of MPI.
pub(super) fn check_process() -> Result<()> {
    HOME.check("MPI")
}

/// Initialises MPI with the highest thread level that it grants.
///
/// # Errors
/// [`Error::Unsupported`] without an MPI, [`Error::InvalidArgument`] if it was finalised,
/// [`Error::Comm`] if it fails.
pub(super) fn initialize() -> Result<()> {
    check_loaded()?;
    if lifetime() == Lifetime::Finalized {
        return Err(Error::invalid(
            "MPI",
            "MPI after MPI_Finalize",
            "an MPI that can be initialised",
        ));
    }
    let mut granted = 0;
    // SAFETY: MPI was not finalised, and the caller has checked that it was not initialised; null
    // argument pointers are allowed since MPI-2
    let code = unsafe {
        ffi::MPI_Init_thread(
            ptr::null_mut(),
            ptr::null_mut(),
            ffi::RSMPI_THREAD_MULTIPLE,
            &raw mut granted,
        )
    };
    check(code, PeerStep::of(0))?;
    HOME.note();
    Ok(())
}

/// Finalises MPI. Only the code that has initialised it may call this.
pub(super) fn finalize() {
    if !is_forked() && check_alive().is_ok() {
        // SAFETY: rule 1; every use of a communicator checks that MPI is alive
        unsafe { ffi::MPI_Finalize() };
    }
}

/// Ends the job on all ranks.
pub(super) fn abort_job(code: i32) -> ! {
    if !is_forked() && check_alive().is_ok() {
        // SAFETY: rule 1; the world lives as long as MPI
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
    }
    std::process::exit(code)
}

/// Returns the thread level that MPI has granted.
pub(super) fn thread_level() -> Result<ThreadLevel> {
    check_alive()?;
    check_process()?;
    let mut level = 0;
    // SAFETY: MPI is alive; any thread may inquire; the number lives through the call
    check(unsafe { ffi::MPI_Query_thread(&raw mut level) }, PeerStep::of(0))?;
    // SAFETY: constants of the linked MPI, which ascend
    let [funneled, serialized, multiple] = unsafe {
        [ffi::RSMPI_THREAD_FUNNELED, ffi::RSMPI_THREAD_SERIALIZED, ffi::RSMPI_THREAD_MULTIPLE]
    };
    Ok(match level {
        level if level >= multiple => ThreadLevel::Multiple,
        level if level >= serialized => ThreadLevel::Serialized,
        level if level >= funneled => ThreadLevel::Funneled,
        _ => ThreadLevel::Single,
    })
}

/// Attaches the attribute, once. The caller has checked rules 1 and 2.
pub(super) fn watch() -> Result<()> {
    let _one = WATCHING.lock().unwrap_or_else(PoisonError::into_inner);
    if STATE.load(Ordering::Acquire) != UNWATCHED {
        return Ok(());
    }
    let mut key = 0;
    // SAFETY: rules 1 and 2 (the caller has checked them); the functions live as long as the
    // program and have the types that MPI calls; the number lives through the calls; freeing the
    // key only forbids further uses of it
    let codes = unsafe {
        [
            ffi::MPI_Comm_create_keyval(
                Some(is_not_copied),
                Some(is_deleted),
                &raw mut key,
                ptr::null_mut(),
            ),
            ffi::MPI_Comm_set_attr(ffi::RSMPI_COMM_SELF, key, ptr::null_mut()),
            ffi::MPI_Comm_free_keyval(&raw mut key),
        ]
    };
    codes.into_iter().try_for_each(|code| check(code, PeerStep::of(0)))?;
    STATE.store(ALIVE, Ordering::Release);
    Ok(())
}

/// Called by MPI when `MPI_COMM_SELF` is duplicated.
unsafe extern "C" fn is_not_copied(
    _: ffi::MPI_Comm,
    _: c_int,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    copies: *mut c_int,
) -> c_int {
    // SAFETY: MPI passes a pointer to a flag
    unsafe { copies.write(0) };
    ffi::MPI_SUCCESS as c_int
}

/// Called by `MPI_Finalize`, on its thread, before anything else.
unsafe extern "C" fn is_deleted(
    _: ffi::MPI_Comm,
    _: c_int,
    _: *mut c_void,
    _: *mut c_void,
) -> c_int {
    if !is_forked() {
        drop_deferred();
    }
    STATE.store(FINALIZED, Ordering::Release);
    ffi::MPI_SUCCESS as c_int
}

/// Time for which a rank that failed stays to send its last frames and to cancel its receives:
/// enough for short messages, and short beside the least deadline of 1 s.
const LAST_FRAMES: Duration = Duration::from_millis(100);

impl Drop for Mpi {
    fn drop(&mut self) {
        if is_forked() {
            // the communicators and messages are those of the parent
            return mem::forget(Arc::clone(&self.shared));
        }
        drop_context(&self.shared, self.context);
    }
}

/// Drops a context, and with the last one the endpoint. On a thread that may not use the endpoint,
/// leaves that to its own thread.
fn drop_context(shared: &Arc<SharedEndpoint>, context: u64) {
    let mut endpoint = shared.lock();
    if endpoint.is_on_another_thread() {
        let shared = Arc::clone(shared);
        defer(move || drop_context(&shared, context));
        return;
    }
    if endpoint.enter().is_err() {
        return;
    }
    match endpoint.leave(context) {
        Left::PlanContext => {}
        Left::FailedEndpoint => endpoint.cancel(),
        Left::MpiEndpoint => {
            drop(endpoint);
            if wait_for_all_to_leave(shared) {
                let mut endpoint = shared.lock();
                let communicators = [endpoint.data.take(), endpoint.control.take()];
                communicators.into_iter().flatten().for_each(MpiCommunicator::free);
            }
        }
    }
}

/// Rest of an endpoint of which a context was dropped.
enum Left {
    /// Other contexts.
    PlanContext,
    /// The endpoint, which takes part in the barrier.
    MpiEndpoint,
    /// The endpoint, which has failed.
    FailedEndpoint,
}

/// Waits until every rank has left and nothing is in flight. Only if it returns true may the
/// communicators be freed.
fn wait_for_all_to_leave(shared: &SharedEndpoint) -> bool {
    let started = Instant::now();
    let mut seen = {
        let mut endpoint = shared.lock();
        let messages = endpoint.barrier.enter();
        if endpoint.send_barrier(messages).is_err() {
            return false;
        }
        endpoint.moves
    };
    loop {
        {
            let endpoint = shared.lock();
            // the last frames of neighbours are the only ones that may arrive after the barrier
            let is_done = endpoint.barrier.is_complete()
                && endpoint.peers.staying().is_empty()
                && endpoint.requests.is_empty()
                && endpoint.contexts.is_empty();
            if is_done {
                return !endpoint.has_unmatched;
            }
            // a rank that has failed does not enter the barrier
            if endpoint.peers.has_failed_neighbour()
                || started.elapsed() >= endpoint.settings.drop_patience
            {
                return false;
            }
        }
        if shared.wait(Duration::from_millis(10), &mut seen).is_err() {
            return false;
        }
    }
}

impl MpiEndpoint {
    /// Returns true on a thread that may not use this endpoint, while MPI is alive.
    pub(super) fn is_on_another_thread(&self) -> bool {
        let data = self.data.as_ref();
        data.is_some_and(MpiCommunicator::is_on_another_thread) && check_alive().is_ok()
    }

    /// Removes a context and sends its last frame. The last one takes the endpoint with it, and one
    /// that is dropped within a call ends the others.
    fn leave(&mut self, number: u64) -> Left {
        let Some(context) = self.contexts.get_mut(&number) else { return Left::PlanContext };
        context.is_open = false;
        let is_within_a_call = !context.receives.is_empty() || thread::panicking();
        self.has_unmatched |= !context.early.is_empty();
        let waiting_for_this: BTreeSet<usize> = context
            .receives
            .iter()
            .map(|receive| receive.header.peer)
            .chain(context.send_steps.keys().copied())
            .collect();
        let has_messages_left = |(_, gather): &(&u64, &TreeAllGather)| gather.has_messages_left();
        let unfinished = context.all_gathers.iter().filter(has_messages_left);
        let unfinished = unfinished.map(|(&round, _)| round).collect();
        let (started, step) = (context.started, context.step);
        if context.has_unsent() {
            // what a send needs to complete
            context.receives.clear();
            context.early.clear();
        } else {
            self.contexts.remove(&number);
        }
        let is_last = !self.contexts.values().any(|context| context.is_open);
        let is_healthy = self.failed.is_none() && !is_within_a_call;
        let (left, leaving) = match (is_last, is_healthy) {
            (false, _) => (Left::PlanContext, Leaving::PlanContext),
            (true, true) => (Left::MpiEndpoint, Leaving::MpiEndpoint),
            (true, false) => (Left::FailedEndpoint, Leaving::FailedEndpoint),
        };
        // the last frame also to neighbours that have left: they may be waiting for it in their
        // drop
        let neighbours = if is_last { self.peers.neighbours() } else { self.peers.staying() };
        let mut peers: BTreeSet<usize> = neighbours.iter().copied().collect();
        if !is_healthy {
            peers.extend(waiting_for_this);
            peers.remove(&self.rank);
        }
        let rank = self.rank as u64;
        let frame = ControlFrame::Leave { context: number, rank, started, leaving, unfinished };
        for peer in peers {
            // a rank that does not get it fails at its deadline
            drop(self.send_to_each([peer], &frame));
        }
        if is_last {
            // frames of contexts that this rank has not created concern the others only
            self.has_unmatched |= self.contexts.values().any(|context| !context.early.is_empty());
            self.contexts.retain(|_, context| context.has_unsent());
            self.next_context = u64::MAX;
        } else if is_within_a_call && self.failed.is_none() {
            let what = "a plan that shares this endpoint was dropped within a call".to_owned();
            self.abort(&Error::Comm { peer: self.rank, step, what });
        }
        left
    }

    /// Sends messages of the barrier.
    pub(super) fn send_barrier(&mut self, messages: Vec<BarrierMessage>) -> Result<()> {
        for BarrierMessage { receiver, round } in messages {
            self.send_to_each([receiver], &ControlFrame::Barrier { round: u64::from(round) })?;
        }
        Ok(())
    }

    /// Cancels the receives of blocks, and advances MPI until they have ended and this rank's
    /// frames have left. Receives that can no longer be cancelled are leaked with their buffers.
    fn cancel(&mut self) {
        let started = Instant::now();
        let is_receive = |kind: &MessageKind| matches!(kind, MessageKind::DataReceive { .. });
        let is_awaited =
            |kind: &MessageKind| is_receive(kind) || matches!(kind, MessageKind::FrameSend { .. });
        if self.requests.cancel_receives(is_receive).is_err() {
            return;
        }
        let at = PeerStep::of(self.rank);
        while self.requests.kinds().any(is_awaited) && started.elapsed() < LAST_FRAMES {
            if self.requests.test(at).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Drops a handle, or defers it again on a thread that is not the handle's.
type DropHandle = Box<dyn FnOnce() + Send>;

static DEFERRED: Mutex<Vec<DropHandle>> = Mutex::new(Vec::new());

/// Keeps a handle until [`drop_deferred`] is called on its thread.
pub(super) fn defer(drop_handle: impl FnOnce() + Send + 'static) {
    DEFERRED.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(drop_handle));
}

/// Drops the handles that belong to this thread: when it makes the next endpoint or shares one, and
/// when MPI is finalised.
pub(super) fn drop_deferred() {
    // the list is free while they are dropped: another thread may defer one meanwhile
    let all = std::mem::take(&mut *DEFERRED.lock().unwrap_or_else(PoisonError::into_inner));
    all.into_iter().for_each(|drop_handle| drop_handle());
}
