//! The leaf that calls MPI about communicators: which may be called, what a return code means, whose a communicator is.
//!
//! Rules, on which every `SAFETY` text here and in [`super::requests`] leans:
//!
//! 1. **Alive.** MPI is called only between `MPI_Init` and `MPI_Finalize` ([`check_alive`]); the exceptions are the three inquiries that MPI
//!    allows at any time. A host program that finalises on another thread during a call of ours breaks its own contract with MPI.
//! 2. **Thread.** Below `MPI_THREAD_MULTIPLE` a [`Communicator`] is made on MPI's main thread only, and used and freed on that thread only
//!    ([`Communicator::enter`]): then no two of our calls are ever concurrent, and `MPI_THREAD_FUNNELED` is enough.
//! 3. **Handles.** A [`Communicator`] holds a handle that `MPI_Comm_idup` gave to it alone. It is freed once at most, by [`Communicator::free`],
//!    which consumes it; dropping one frees nothing.
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use annulus_core::{Error, Result};
use mpi::ffi;

use super::launch::{GpuAwareness, ThreadLevel};
use crate::observed::ObservedClock;

/// How a failing call is reported: the peer that it was about.
pub(super) type About = (usize, usize);

/// The code of success, and two classes of failure, as C compares them.
const SUCCESS: c_int = ffi::MPI_SUCCESS as c_int;
const TRUNCATE: c_int = ffi::MPI_ERR_TRUNCATE as c_int;

/// What a return code says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// The message was longer than the receive.
    Long,
    /// The other end is gone, as an MPI with fault tolerance says.
    Lost,
    /// Anything else, in MPI's words.
    Other(String),
}

impl Fault {
    /// The fault that a return code stands for.
    pub(super) fn of(code: c_int) -> Result<(), Self> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut length = 0;
        let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
        // SAFETY: rule 1 (a code comes from a call that was allowed); MPI writes at most MPI_MAX_ERROR_STRING characters, which `text` has
        // room for, and the number, which lives through the call
        let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut length) };
        if class(code) == TRUNCATE {
            return Err(Self::Long);
        }
        let length =
            if told == SUCCESS { usize::try_from(length).unwrap_or(0).min(text.len()) } else { 0 };
        let text: Vec<u8> = text[..length].iter().map(|&letter| letter.to_ne_bytes()[0]).collect();
        let text = String::from_utf8_lossy(&text).into_owned();
        Err(if text.contains("PROC_FAILED") {
            Self::Lost
        } else {
            Self::Other(format!("MPI error {code}: {text}"))
        })
    }

    /// The error for the caller.
    pub(super) fn into_error(self, (peer, step): About) -> Error {
        match self {
            Self::Long => Error::Comm {
                peer,
                step,
                what: "message truncated: longer than the receive".to_owned(),
            },
            Self::Lost => Error::PeerLost { peer, step },
            Self::Other(what) => Error::Comm { peer, step, what },
        }
    }
}

/// The class of a return code.
fn class(code: c_int) -> c_int {
    let mut class = SUCCESS;
    // SAFETY: rule 1 (a code comes from a call that was allowed); the number lives through the call
    unsafe { ffi::MPI_Error_class(code, &raw mut class) };
    class
}

/// Whether a return code says that each status tells how its own request fared.
pub(super) fn is_in_statuses(code: c_int) -> bool {
    code != SUCCESS && class(code) == ffi::MPI_ERR_IN_STATUS as c_int
}

/// `Ok` for the code of success.
pub(super) fn check(code: c_int, about: About) -> Result<()> {
    Fault::of(code).map_err(|fault| fault.into_error(about))
}

/// Whether MPI was initialised, and whether it was finalised.
pub(super) fn state() -> (bool, bool) {
    let (mut initialized, mut finalized) = (0, 0);
    // SAFETY: both may be called at any time, from any thread; the numbers live through the calls
    unsafe {
        ffi::MPI_Initialized(&raw mut initialized);
        ffi::MPI_Finalized(&raw mut finalized);
    }
    (initialized != 0, finalized != 0)
}

/// Rule 1.
fn check_alive() -> Result<()> {
    match state() {
        (true, false) => Ok(()),
        (initialized, _) => {
            let got = if initialized { "MPI after MPI_Finalize" } else { "MPI before MPI_Init" };
            Err(Error::invalid("MPI", got, "MPI between MPI_Init and MPI_Finalize"))
        }
    }
}

/// Initialises MPI with the highest thread level that it grants.
///
/// # Errors
/// [`Error::InvalidArgument`] if it was finalised, [`Error::Comm`] if it fails.
pub(super) fn initialize() -> Result<()> {
    if state().1 {
        return Err(Error::invalid(
            "MPI",
            "MPI after MPI_Finalize",
            "an MPI that can be initialised",
        ));
    }
    let mut granted = 0;
    // SAFETY: MPI was not finalised, and the caller saw that it was not initialised; null argument pointers are allowed since MPI-2
    check(
        unsafe {
            ffi::MPI_Init_thread(
                ptr::null_mut(),
                ptr::null_mut(),
                ffi::RSMPI_THREAD_MULTIPLE,
                &raw mut granted,
            )
        },
        (0, 0),
    )
}

/// Finalises MPI. Only for whoever initialised it.
pub(super) fn finalize() {
    if check_alive().is_ok() {
        // SAFETY: rule 1; every communicator of ours checks for itself whether MPI still lives
        unsafe { ffi::MPI_Finalize() };
    }
}

/// Ends the job on all ranks.
pub(super) fn abort_job(code: i32) -> ! {
    if check_alive().is_ok() {
        // SAFETY: rule 1; the world lives as long as MPI
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
    }
    std::process::exit(code)
}

/// A communicator to be duplicated.
#[derive(Clone, Copy)]
pub(super) struct Foreign {
    raw: ffi::MPI_Comm,
    /// Made here, so that nobody else begins collective operations on it.
    ours: bool,
}

impl Foreign {
    /// All ranks of the job.
    pub(super) fn world() -> Self {
        // SAFETY: a constant of the linked MPI
        Self { raw: unsafe { ffi::RSMPI_COMM_WORLD }, ours: false }
    }

    /// # Safety
    /// The handle is null or that of a communicator which lives until it has been duplicated.
    pub(super) const unsafe fn of(raw: ffi::MPI_Comm) -> Self {
        Self { raw, ours: false }
    }

    /// # Safety
    /// As [`Foreign::of`]. MPI must be alive.
    pub(super) unsafe fn of_fortran(handle: ffi::RSMPI_Fint) -> Self {
        // SAFETY: the caller says that the handle is good and that MPI lives
        Self { raw: unsafe { ffi::RSMPI_Comm_f2c(handle) }, ours: false }
    }
}

/// A communicator of our own, with errors returned.
pub(super) struct Communicator {
    raw: ffi::MPI_Comm,
    rank: usize,
    ranks: usize,
    last_tag: u64,
    /// The only thread that may use it, where MPI does not grant `MPI_THREAD_MULTIPLE`.
    home: Option<ThreadId>,
}

// SAFETY: a handle is a number or a pointer to memory of MPI's, which belongs to no thread. Which thread may call MPI with it is checked at
// every call by `enter` (rule 2), not by the type.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Duplicates `foreign`, within `patience` at most.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a null or an inter-communicator or an MPI that is not alive, [`Error::Unsupported`] on a thread that may
    /// not call MPI, [`Error::Comm`] if it fails or not all of its ranks come in time.
    pub(super) fn duplicate(of: Foreign, patience: Duration) -> Result<Self> {
        let foreign = of.raw;
        check_alive()?;
        let home = home()?;
        let (mut inter, mut rank, mut ranks) = (0, 0, 0);
        // SAFETY: a constant of the linked MPI
        if foreign == unsafe { ffi::RSMPI_COMM_NULL } {
            return Err(Error::invalid("communicator", "MPI_COMM_NULL", "a communicator"));
        }
        // SAFETY: rules 1 and 2 were just checked; whoever made `foreign` vouches for the handle; the numbers live through the calls
        unsafe {
            check(ffi::MPI_Comm_test_inter(foreign, &raw mut inter), (0, 0))?;
            check(ffi::MPI_Comm_rank(foreign, &raw mut rank), (0, 0))?;
            check(ffi::MPI_Comm_size(foreign, &raw mut ranks), (0, 0))?;
        }
        if inter != 0 {
            return Err(Error::invalid(
                "communicator",
                "an inter-communicator",
                "an intra-communicator",
            ));
        }
        let (rank, ranks) = (count(rank), count(ranks));
        let raw = idup(of, rank, patience)?;
        // SAFETY: rules 1 and 2; `raw` is ours alone since a moment
        check(unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) }, (rank, 0))?;
        Ok(Self { raw, rank, ranks, last_tag: last_tag(raw), home })
    }

    pub(super) const fn rank(&self) -> usize {
        self.rank
    }

    pub(super) const fn ranks(&self) -> usize {
        self.ranks
    }

    /// The highest tag that this MPI can send.
    pub(super) const fn last_tag(&self) -> u64 {
        self.last_tag
    }

    /// Whether any thread may use it.
    pub(super) const fn any_thread(&self) -> bool {
        self.home.is_none()
    }

    /// The handle. Who calls MPI with it has called [`Communicator::enter`] before.
    pub(super) const fn raw(&self) -> ffi::MPI_Comm {
        self.raw
    }

    /// Makes sure that this thread may call MPI now (rules 1 and 2).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] before `MPI_Init` or after `MPI_Finalize`, [`Error::Unsupported`] on another thread than the communicator's.
    pub(super) fn enter(&self) -> Result<()> {
        check_alive()?;
        if self.home.is_some_and(|home| home != thread::current().id()) {
            return Err(Error::unsupported(
                "MPI on a thread other than its main thread",
                "an MPI without MPI_THREAD_MULTIPLE",
            ));
        }
        Ok(())
    }

    /// The first `count` of its ranks as a communicator of their own; `None` where this rank is not among them.
    ///
    /// Collective, and MPI has no form of it that can be left: call it right after all ranks were seen.
    ///
    /// # Errors
    /// As [`Communicator::enter`]; [`Error::Comm`] if it fails.
    pub(super) fn first_ranks(&self, count: usize) -> Result<Option<Self>> {
        self.enter()?;
        // SAFETY: constants of the linked MPI
        let (mut raw, undefined) = unsafe { (ffi::RSMPI_COMM_NULL, ffi::RSMPI_UNDEFINED) };
        let (color, key) = (
            if self.rank < count { 0 } else { undefined },
            c_int::try_from(self.rank).unwrap_or(c_int::MAX),
        );
        // SAFETY: rules 1 and 2 were just checked; the handle is ours and alive (rule 3); the new one lives through the call
        check(unsafe { ffi::MPI_Comm_split(self.raw, color, key, &raw mut raw) }, (self.rank, 0))?;
        if self.rank >= count {
            return Ok(None);
        }
        // SAFETY: rules 1 and 2; `raw` is ours alone since a moment
        let code = unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) };
        check(code, (self.rank, 0))?;
        Ok(Some(Self {
            raw,
            rank: self.rank,
            ranks: count.min(self.ranks),
            last_tag: self.last_tag,
            home: self.home,
        }))
    }

    /// This communicator, to be duplicated in its turn.
    pub(super) const fn as_foreign(&self) -> Foreign {
        Foreign { raw: self.raw, ours: true }
    }

    /// Frees it. Nothing may be in flight on it, here or at any other rank.
    pub(super) fn free(mut self) {
        if self.enter().is_ok() {
            // SAFETY: rules 1, 2 and 3; `self` is gone afterwards, so the handle is never used again
            unsafe { ffi::MPI_Comm_free(&raw mut self.raw) };
        }
    }
}

/// Rule 2: the thread to stay on, if there is such a rule in this MPI.
fn home() -> Result<Option<ThreadId>> {
    let level = thread_level()?;
    let mut main = 0;
    // SAFETY: MPI is alive (`thread_level` has checked); any thread may inquire; the number lives through the call
    check(unsafe { ffi::MPI_Is_thread_main(&raw mut main) }, (0, 0))?;
    match (level == ThreadLevel::Multiple, main != 0) {
        (true, _) => Ok(None),
        (false, true) => Ok(Some(thread::current().id())),
        (false, false) => Err(Error::unsupported(
            "MPI on a thread other than its main thread",
            "an MPI without MPI_THREAD_MULTIPLE",
        )),
    }
}

/// `MPI_Comm_idup`, so that a rank that never comes costs no more than `patience`.
fn idup(of: Foreign, rank: usize, patience: Duration) -> Result<ffi::MPI_Comm> {
    // SAFETY: constants of the linked MPI
    let (null, mut request) = unsafe { (ffi::RSMPI_COMM_NULL, ffi::RSMPI_REQUEST_NULL) };
    // on the heap and leaked if it fails: MPI may write there whenever the last rank comes
    let made = Box::leak(Box::new(null));
    // SAFETY: `duplicate` checked rules 1 and 2 and the handle; `made` lives until the request is
    // complete, or for ever
    check(unsafe { ffi::MPI_Comm_idup(of.raw, &raw mut *made, &raw mut request) }, (rank, 0))?;
    let late = |error| match error {
        // MPI would match the host's next collective operation with the one that is pending
        Error::Comm { peer, step, what } if !of.ours => Error::Comm {
            peer,
            step,
            what: format!("{what}; begin no collective operation on it any more"),
        },
        error => error,
    };
    complete(&mut request, rank, patience, "the communicator could not be duplicated")
        .map_err(late)?;
    let raw = *made;
    // SAFETY: `made` came out of `Box::leak`, and the operation that wrote to it is complete
    drop(unsafe { Box::from_raw(made) });
    Ok(raw)
}

/// The longest time between two polls of a collective operation that counts in full: below it a
/// process was busy, above it suspended.
const LONGEST_POLL: Duration = Duration::from_millis(250);

/// Waits for a collective operation of this rank's, for `patience` of observed time at most. The caller has entered its communicator.
pub(super) fn complete(
    request: &mut ffi::MPI_Request,
    rank: usize,
    patience: Duration,
    what: &str,
) -> Result<()> {
    let started = Instant::now();
    let mut observed = ObservedClock::new(started, LONGEST_POLL, patience);
    loop {
        let mut done = 0;
        // SAFETY: rules 1 and 2 (the caller has entered); the request is the caller's and active, or null once done
        let code =
            unsafe { ffi::MPI_Test(&raw mut *request, &raw mut done, ffi::RSMPI_STATUS_IGNORE) };
        check(code, (rank, 0))?;
        if done != 0 {
            return Ok(());
        }
        let now = Instant::now();
        observed.poll(now);
        if observed.elapsed(started, now) >= patience {
            return Err(Error::Comm {
                peer: rank,
                step: 0,
                what: format!("{what} within {patience:?}: not all of its ranks came"),
            });
        }
        thread::sleep(Duration::from_micros(100));
    }
}

/// The value of `MPI_TAG_UB`, or the least that MPI promises.
///
/// It is an attribute of the world (MPI 3.1, 8.1.2). Open MPI has it there and on duplicates of the
/// world, but on no communicator that was split.
fn last_tag(raw: ffi::MPI_Comm) -> u64 {
    let attribute = |communicator: ffi::MPI_Comm| {
        let mut value = ptr::null_mut::<c_int>();
        let mut found = 0;
        let key = ffi::MPI_TAG_UB as c_int;
        // SAFETY: called by `duplicate` under rules 1 and 2 with the world, which lives as long as
        // MPI, or a handle of ours; MPI stores a pointer to a C int of its own in `value`, which is
        // read at once
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

/// A count of MPI's, which is never negative.
pub(super) fn count(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// MPI's name and version, as it says itself.
pub(super) fn library() -> Result<String> {
    check_alive()?;
    // SAFETY: a constant of the linked MPI
    let room = count(unsafe { ffi::RSMPI_MAX_LIBRARY_VERSION_STRING });
    let (mut text, mut length) = (vec![0u8; room + 1], 0);
    // SAFETY: may be called at any time; MPI writes at most `room` characters and the number
    let code = unsafe {
        ffi::MPI_Get_library_version(text.as_mut_ptr().cast::<c_char>(), &raw mut length)
    };
    check(code, (0, 0))?;
    text.truncate(count(length).min(room));
    Ok(String::from_utf8_lossy(&text).trim_end_matches(['\0', '\n']).to_owned())
}

/// The thread level that MPI has granted.
pub(super) fn thread_level() -> Result<ThreadLevel> {
    check_alive()?;
    let mut level = 0;
    // SAFETY: MPI is alive; any thread may inquire; the number lives through the call
    check(unsafe { ffi::MPI_Query_thread(&raw mut level) }, (0, 0))?;
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

/// What the MPI that is loaded says, if it has the call by which some can say it.
pub(super) fn gpu_awareness() -> GpuAwareness {
    unsafe extern "C" {
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    let ask = |name: &std::ffi::CStr| {
        // SAFETY: a null library means everything that is loaded; the name ends with a zero
        let found = unsafe { dlsym(ptr::null_mut(), name.as_ptr()) };
        // SAFETY: every MPI that has a function of these names has it take nothing and give an int
        let call = unsafe {
            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn() -> c_int>>(found)
        };
        // SAFETY: it asks for a fact about the library, and may be called at any time
        call.map(|call| unsafe { call() } != 0)
    };
    match ask(c"MPIX_Query_cuda_support") {
        None => GpuAwareness::Unknown,
        Some(true) => GpuAwareness::Yes,
        Some(false) => GpuAwareness::No,
    }
}
