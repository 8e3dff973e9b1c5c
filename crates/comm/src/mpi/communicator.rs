//! Communicators: duplicated, adopted, split and freed, and the waits for the ranks of a program
//! while an endpoint is made. Relies on the rules of [`super::ffi`].
//!
//! A collective operation on the host's communicator must not be abandoned, because MPI would match
//! it with the host's next one. So the one duplication waits as long as the host does, unless the
//! caller sets a limit; the error then says that the operation stays pending.
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{
    ffi::{CStr, c_int, c_void},
    fmt, ptr,
    sync::Arc,
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use annulus_core::{Error, Result};
use annulus_mpi::ffi;

use super::{
    ffi::{PeerStep, check, count},
    lifetime::{ThreadLevel, check_alive, drop_deferred, thread_level, watch},
};
use crate::observed::ObservedClock;

/// Longest interval between two polls of a collective operation that counts in full: a process with
/// a shorter one was busy, one with a longer one suspended.
const LONGEST_POLL: Duration = Duration::from_millis(250);

/// A communicator to duplicate or to adopt.
#[derive(Clone, Copy)]
pub(super) struct ParentCommunicator {
    raw: ffi::MPI_Comm,
    /// True if it was created here, so that no other code starts collective operations on it.
    private: bool,
}

impl ParentCommunicator {
    /// All ranks of the job.
    pub(super) fn world() -> Self {
        // SAFETY: a constant of the linked MPI
        Self { raw: unsafe { ffi::RSMPI_COMM_WORLD }, private: false }
    }

    /// Wraps a handle of C.
    ///
    /// # Safety
    /// The handle is null or that of a communicator which lives until it has been duplicated.
    pub(super) const unsafe fn from_raw(raw: ffi::MPI_Comm) -> Self {
        Self { raw, private: false }
    }

    /// Wraps a handle of Fortran.
    ///
    /// # Safety
    /// As [`ParentCommunicator::from_raw`]. MPI must be alive.
    pub(super) unsafe fn from_fortran(handle: ffi::RSMPI_Fint) -> Self {
        // SAFETY: the caller promises that the handle is valid and that MPI is alive
        Self { raw: unsafe { ffi::RSMPI_Comm_f2c(handle) }, private: false }
    }
}

/// A communicator created here, with errors returned.
pub(super) struct MpiCommunicator {
    raw: ffi::MPI_Comm,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// Highest tag that this MPI can send.
    pub(super) last_tag: u64,
    /// The only thread that may use it, where MPI does not grant `MPI_THREAD_MULTIPLE`.
    owner: Option<ThreadId>,
}

// SAFETY: a handle is a number or a pointer to memory of MPI's, which belongs to no thread. The
// thread that calls MPI with it is checked at every call by `enter` (rule 2), not by the type.
unsafe impl Send for MpiCommunicator {}

impl MpiCommunicator {
    /// Duplicates `parent` within `timeout`, under a name that debuggers and profilers show.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a null or an inter-communicator or an MPI that is not alive,
    /// [`Error::Unsupported`] on a thread that may not call MPI, [`Error::Comm`] if MPI fails or
    /// not all ranks of `parent` come in time.
    pub(super) fn duplicate(
        parent: ParentCommunicator,
        name: &CStr,
        timeout: &Timeout,
    ) -> Result<Self> {
        let Self { rank, ranks, owner, .. } = Self::inspect(parent)?;
        let raw = idup(parent, rank, timeout)?;
        Self { raw, rank, ranks, last_tag: 0, owner }.prepare(name)
    }

    /// Takes over a communicator that no other code uses. Local.
    pub(super) fn adopt(communicator: ParentCommunicator, name: &CStr) -> Result<Self> {
        Self::inspect(communicator)?.prepare(name)
    }

    /// Checks that `parent` can carry messages and that this thread may use it.
    fn inspect(parent: ParentCommunicator) -> Result<Self> {
        check_alive()?;
        let owner = owner_thread()?;
        watch()?;
        drop_deferred();
        // SAFETY: a constant of the linked MPI
        if parent.raw == unsafe { ffi::RSMPI_COMM_NULL } {
            return Err(Error::invalid("communicator", "MPI_COMM_NULL", "a communicator"));
        }
        let mut inter = 0;
        let mut rank = 0;
        let mut ranks = 0;
        // SAFETY: rules 1 and 2 were just checked; the creator of `parent` promised that the handle
        // is valid; the numbers live through the calls
        unsafe {
            check(ffi::MPI_Comm_test_inter(parent.raw, &raw mut inter), PeerStep::of(0))?;
            check(ffi::MPI_Comm_rank(parent.raw, &raw mut rank), PeerStep::of(0))?;
            check(ffi::MPI_Comm_size(parent.raw, &raw mut ranks), PeerStep::of(0))?;
        }
        if inter != 0 {
            return Err(Error::invalid(
                "communicator",
                "an inter-communicator",
                "an intra-communicator",
            ));
        }
        let (rank, ranks) = (count(rank), count(ranks));
        Ok(Self { raw: parent.raw, rank, ranks, last_tag: 0, owner })
    }

    /// Names a communicator, and has MPI return its errors.
    fn prepare(self, name: &CStr) -> Result<Self> {
        return_errors(self.raw, self.rank)?;
        // SAFETY: rules 1 and 2 (`inspect` has checked them); the handle is alive and in use here
        // alone; the name ends with a zero, and MPI copies it
        let code = unsafe { ffi::MPI_Comm_set_name(self.raw, name.as_ptr()) };
        check(code, PeerStep::of(self.rank))?;
        let last_tag = last_tag(self.raw);
        Ok(Self { last_tag, ..self })
    }

    /// Returns true if any thread may use it.
    pub(super) const fn any_thread(&self) -> bool {
        self.owner.is_none()
    }

    /// Returns the handle. Before calling MPI with it, call [`MpiCommunicator::enter`].
    pub(super) const fn raw(&self) -> ffi::MPI_Comm {
        self.raw
    }

    /// Checks that this thread may call MPI now (rules 1 and 2).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] before `MPI_Init` or after `MPI_Finalize`, [`Error::Unsupported`]
    /// on another thread than the communicator's.
    pub(super) fn enter(&self) -> Result<()> {
        check_alive()?;
        if self.is_on_another_thread() {
            return Err(wrong_thread());
        }
        Ok(())
    }

    /// Returns true on a thread that may not use it.
    pub(super) fn is_on_another_thread(&self) -> bool {
        self.owner.is_some_and(|owner| owner != thread::current().id())
    }

    /// Creates a communicator of its first `count` ranks; `None` on the other ranks.
    ///
    /// Collective, by a function of MPI that cannot be cancelled: call it right after all ranks
    /// have taken part in another collective operation.
    pub(super) fn first_ranks(&self, count: usize) -> Result<Option<Self>> {
        self.enter()?;
        // SAFETY: constants of the linked MPI
        let (null, undefined) = unsafe { (ffi::RSMPI_COMM_NULL, ffi::RSMPI_UNDEFINED) };
        let mut raw = null;
        let color = if self.rank < count { 0 } else { undefined };
        let key = c_int::try_from(self.rank).unwrap_or(c_int::MAX);
        // SAFETY: rules 1 and 2 were just checked; the handle is alive (rule 3), and the new one
        // lives through the call
        let code = unsafe { ffi::MPI_Comm_split(self.raw, color, key, &raw mut raw) };
        check(code, PeerStep::of(self.rank))?;
        if self.rank >= count {
            return Ok(None);
        }
        let ranks = count.min(self.ranks);
        Self { raw, ranks, ..*self }.prepare(c"annulus ranks").map(Some)
    }

    /// Returns this communicator as one to duplicate.
    pub(super) const fn as_parent(&self) -> ParentCommunicator {
        ParentCommunicator { raw: self.raw, private: true }
    }

    /// Frees it. Nothing may be in flight on it, on this or any other rank.
    pub(super) fn free(mut self) {
        if self.enter().is_ok() {
            // SAFETY: rules 1, 2 and 3; `self` is consumed, so the handle is never used again
            unsafe { ffi::MPI_Comm_free(&raw mut self.raw) };
        }
    }
}

/// Sets the error handler of a new communicator, so that its errors are returned. The caller has
/// checked rules 1 and 2.
fn return_errors(raw: ffi::MPI_Comm, rank: usize) -> Result<()> {
    // SAFETY: rules 1 and 2; MPI has just returned `raw` to the caller alone (rule 3)
    let code = unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) };
    check(code, PeerStep::of(rank))
}

/// Checks rule 2 and returns the thread that a new communicator is bound to, if MPI requires one.
fn owner_thread() -> Result<Option<ThreadId>> {
    let level = thread_level()?;
    let mut main = 0;
    // SAFETY: MPI is alive (`thread_level` has checked); any thread may inquire; the number lives
    // through the call
    check(unsafe { ffi::MPI_Is_thread_main(&raw mut main) }, PeerStep::of(0))?;
    match (level == ThreadLevel::Multiple, main != 0) {
        (true, _) => Ok(None),
        (false, true) => Ok(Some(thread::current().id())),
        (false, false) => Err(wrong_thread()),
    }
}

fn wrong_thread() -> Error {
    Error::unsupported(
        "MPI on a thread other than its main thread",
        "an MPI without MPI_THREAD_MULTIPLE",
    )
}

/// Calls `MPI_Comm_idup`, so that the wait for a rank that does not come can warn and end.
fn idup(parent: ParentCommunicator, rank: usize, timeout: &Timeout) -> Result<ffi::MPI_Comm> {
    // SAFETY: constants of the linked MPI
    let (null, mut request) = unsafe { (ffi::RSMPI_COMM_NULL, ffi::RSMPI_REQUEST_NULL) };
    // on the heap, and leaked if it fails: MPI may write there whenever the last rank comes
    let duplicate = Box::leak(Box::new(null));
    // SAFETY: `Communicator::duplicate` checked rules 1 and 2 and the handle; `duplicate` lives
    // until the request is complete, or for ever
    let code = unsafe { ffi::MPI_Comm_idup(parent.raw, &raw mut *duplicate, &raw mut request) };
    check(code, PeerStep::of(rank))?;
    let late = |error| match error {
        // MPI would match the host's next collective operation with the one that is pending
        Error::Comm { peer, step, what } if !parent.private => Error::Comm {
            peer,
            step,
            what: format!("{what}; begin no collective operation on it any more"),
        },
        error => error,
    };
    complete(&mut request, rank, timeout, "the communicator could not be duplicated")
        .map_err(late)?;
    let raw = *duplicate;
    // SAFETY: `duplicate` came out of `Box::leak`, and the operation that wrote to it is complete
    drop(unsafe { Box::from_raw(duplicate) });
    Ok(raw)
}

/// Waits for a collective operation that this rank has started, as long as `timeout` allows in
/// observed time. The caller has entered its communicator.
pub(super) fn complete(
    request: &mut ffi::MPI_Request,
    rank: usize,
    timeout: &Timeout,
    failure: &str,
) -> Result<()> {
    let started = Instant::now();
    let limit = timeout.limit;
    let mut observed = ObservedClock::new(started, LONGEST_POLL, limit.unwrap_or_default());
    let mut warned = started;
    loop {
        let mut done = 0;
        // SAFETY: rules 1 and 2 (the caller has entered); the request is the caller's and active,
        // or null once done
        let code =
            unsafe { ffi::MPI_Test(&raw mut *request, &raw mut done, ffi::RSMPI_STATUS_IGNORE) };
        check(code, PeerStep::of(rank))?;
        if done != 0 {
            return Ok(());
        }
        let now = Instant::now();
        observed.poll(now);
        if let Some(limit) = limit
            && observed.elapsed(started, now) >= limit
        {
            return Err(Error::Comm {
                peer: rank,
                step: 0,
                what: format!("{failure} within {limit:?}: not all of its ranks came"),
            });
        }
        if now - warned >= timeout.warning_interval {
            warned = now;
            timeout.warn(now - started);
        }
        thread::sleep(Duration::from_micros(100));
    }
}

/// Returns the value of `MPI_TAG_UB`, or 32767, the least that MPI guarantees.
///
/// It is an attribute of the world (MPI 3.1, 8.1.2). Open MPI has it there and on duplicates of the
/// world, but on no communicator that was split.
fn last_tag(raw: ffi::MPI_Comm) -> u64 {
    let attribute = |communicator: ffi::MPI_Comm| {
        let mut value = ptr::null_mut::<c_int>();
        let mut found = 0;
        let key = ffi::MPI_TAG_UB as c_int;
        // SAFETY: called by `duplicate` under rules 1 and 2 with the world, which lives as long as
        // MPI, or with a communicator created here; MPI stores a pointer to a C int of its own in
        // `value`, which is read at once
        unsafe {
            let value_at = (&raw mut value).cast::<c_void>();
            ffi::MPI_Comm_get_attr(communicator, key, value_at, &raw mut found);
            if found == 0 || value.is_null() { None } else { u64::try_from(*value).ok() }
        }
    };
    // SAFETY: a constant of the linked MPI
    let world = unsafe { ffi::RSMPI_COMM_WORLD };
    attribute(world).or_else(|| attribute(raw)).unwrap_or(32_767)
}

/// Interval of warnings.
const WARNING_INTERVAL: Duration = Duration::from_secs(30);

type Warning = Arc<dyn Fn(Duration) + Send + Sync>;

/// Time to wait for the other ranks when an endpoint is created. Default: as long as it takes, as
/// any collective operation of MPI does, without warnings.
#[derive(Clone)]
pub struct Timeout {
    pub(super) limit: Option<Duration>,
    pub(super) warning_interval: Duration,
    warning: Option<Warning>,
}

impl Timeout {
    /// Waits without a limit.
    pub const fn unlimited() -> Self {
        Self { limit: None, warning_interval: WARNING_INTERVAL, warning: None }
    }

    /// Waits for at most `limit`.
    ///
    /// If it runs out, a duplication stays pending on the caller's communicator, which therefore
    /// cannot be used for collective operations any more. It has no such effect on a communicator
    /// that is adopted ([`Mpi::adopt`](super::Mpi::adopt)).
    pub const fn at_most(limit: Duration) -> Self {
        Self { limit: Some(limit), warning_interval: WARNING_INTERVAL, warning: None }
    }

    /// Calls `warning` with the time waited, every 30 s.
    #[must_use]
    pub fn with_warning(self, warning: impl Fn(Duration) + Send + Sync + 'static) -> Self {
        self.with_warning_every(WARNING_INTERVAL, warning)
    }

    /// Calls `warning` with the time waited, once in each interval.
    #[must_use]
    pub fn with_warning_every(
        self,
        interval: Duration,
        warning: impl Fn(Duration) + Send + Sync + 'static,
    ) -> Self {
        Self { warning_interval: interval, warning: Some(Arc::new(warning)), ..self }
    }

    pub(super) fn warn(&self, waited: Duration) {
        if let Some(warning) = &self.warning {
            warning(waited);
        }
    }
}

impl Default for Timeout {
    fn default() -> Self {
        Self::unlimited()
    }
}

impl fmt::Debug for Timeout {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Timeout").field("limit", &self.limit).finish_non_exhaustive()
    }
}
