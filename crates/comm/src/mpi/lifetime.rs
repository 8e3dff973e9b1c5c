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
//! A handle that was dropped on a thread which may not call MPI waits here for its own thread.
//!
//! [`Launch`] initialises and finalises MPI, for a program whose host has not done so.
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{
    ffi::{c_int, c_void},
    fmt, ptr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
};

use annulus_core::{Error, HomeProcess, Result};
use annulus_mpi::ffi;

use super::ffi::{PeerStep, check, check_loaded, library};

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

/// Threads of a process that may call MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadLevel {
    /// The process has one thread.
    Single,
    /// Only the main thread.
    Funneled,
    /// Any thread, one at a time.
    Serialized,
    /// Any thread at any time.
    Multiple,
}

impl fmt::Display for ThreadLevel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Single => "MPI_THREAD_SINGLE",
            Self::Funneled => "MPI_THREAD_FUNNELED",
            Self::Serialized => "MPI_THREAD_SERIALIZED",
            Self::Multiple => "MPI_THREAD_MULTIPLE",
        })
    }
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

/// MPI from initialisation to finalisation: held by `main` of a program under a launcher. Does
/// nothing if the host program has initialised MPI.
///
/// Dropping it finalises MPI if it has initialised it. If the thread panics, it ends the job on all
/// ranks with status 101 instead, because the other ranks would wait for this one without end. In a
/// forked child it does nothing.
///
/// Below `MPI_THREAD_MULTIPLE` it belongs on the main thread, like every call of MPI.
#[derive(Debug)]
pub struct Launch {
    began: bool,
}

impl Launch {
    /// Initialises MPI with the highest thread level that it grants, unless it is initialised.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if MPI was finalised already,
    /// [`annulus_core::Error::Unsupported`] in a forked child of a process that uses MPI,
    /// [`annulus_core::Error::Comm`] if it fails.
    pub fn begin() -> Result<Self> {
        if lifetime() == Lifetime::Alive {
            check_process()?;
            return Ok(Self { began: false });
        }
        initialize()?;
        Ok(Self { began: true })
    }

    /// Returns true if this has initialised MPI.
    pub const fn began(&self) -> bool {
        self.began
    }

    /// Returns name and version of the MPI library.
    ///
    /// # Errors
    /// [`annulus_core::Error::Comm`] if MPI fails.
    pub fn library(&self) -> Result<String> {
        library()
    }

    /// Returns the thread level that MPI has granted.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if MPI was finalised.
    pub fn thread_level(&self) -> Result<ThreadLevel> {
        thread_level()
    }

    /// Ends the job on all ranks with this status.
    pub fn abort(&self, status: i32) -> ! {
        abort_job(status)
    }

    /// Drops this without finalising MPI. For a rank that has lost another one: `MPI_Finalize`
    /// would wait for it.
    pub fn abandon(mut self) {
        self.began = false;
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        if self.began && std::thread::panicking() {
            abort_job(101);
        }
        if self.began {
            finalize();
        }
    }
}
