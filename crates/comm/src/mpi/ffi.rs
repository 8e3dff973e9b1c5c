//! Calls of MPI that concern the library: its presence and version and return codes.
//!
//! Rules, on which every `SAFETY` comment here, in [`super::lifetime`], [`super::communicator`],
//! [`super::nodes`] and [`super::requests`] relies:
//!
//! 1. **Alive.** MPI is called only between `MPI_Init` and `MPI_Finalize`
//!    ([`check_alive`](super::lifetime::check_alive)). The exceptions are the inquiries that MPI
//!    allows at any time. A host program that finalises MPI on another thread during one of these
//!    calls violates its own contract with MPI.
//! 2. **Thread.** Below `MPI_THREAD_MULTIPLE` a communicator is created on MPI's main thread only,
//!    and used and freed on that thread only (`Communicator::enter`). So no two calls from here are
//!    ever concurrent, and `MPI_THREAD_FUNNELED` suffices.
//! 3. **Handles.** An `MpiCommunicator` holds a handle that MPI returned to it alone, or that the
//!    host has given to it (`Communicator::adopt`). It is freed at most once, by
//!    `Communicator::free`, which consumes it. Dropping one frees nothing.
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::ffi::{c_char, c_int};

use annulus_core::{Error, Result};
use annulus_mpi::ffi;

/// Peer and ring step that an error is reported with.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeerStep {
    pub(super) peer: usize,
    pub(super) step: usize,
}

impl PeerStep {
    /// `peer`, outside of any ring step.
    pub(super) const fn of(peer: usize) -> Self {
        Self { peer, step: 0 }
    }
}

/// Return codes and error classes, in the type of C's return values.
const SUCCESS: c_int = ffi::MPI_SUCCESS as c_int;
const TRUNCATE: c_int = ffi::MPI_ERR_TRUNCATE as c_int;

/// Meaning of a return code other than success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MpiError {
    /// The message has another length than its receive.
    Length,
    /// The peer has failed, as a fault-tolerant MPI reports.
    PeerLost,
    /// Anything else, with MPI's error string.
    Other(String),
}

impl MpiError {
    /// Converts a return code.
    pub(super) fn check(code: c_int) -> Result<(), Self> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut length = 0;
        let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
        // SAFETY: rule 1 (a code comes from a call that was allowed); MPI writes at most
        // MPI_MAX_ERROR_STRING characters, for which `text` has space, and the length, which lives
        // through the call
        let status = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut length) };
        if class(code) == TRUNCATE {
            return Err(Self::Length);
        }
        let length = if status == SUCCESS { count(length).min(text.len()) } else { 0 };
        let text: Vec<u8> = text[..length].iter().map(|&letter| letter.to_ne_bytes()[0]).collect();
        let text = String::from_utf8_lossy(&text).into_owned();
        Err(if text.contains("PROC_FAILED") {
            Self::PeerLost
        } else {
            Self::Other(format!("MPI error {code}: {text}"))
        })
    }

    /// Converts to the error that a caller gets.
    pub(super) fn into_error(self, PeerStep { peer, step }: PeerStep) -> Error {
        match self {
            Self::Length => Error::Comm {
                peer,
                step,
                what: "message truncated: longer than the receive".to_owned(),
            },
            Self::PeerLost => Error::PeerLost { peer, step },
            Self::Other(what) => Error::Comm { peer, step, what },
        }
    }
}

/// Returns the error class of a return code.
fn class(code: c_int) -> c_int {
    let mut class = SUCCESS;
    // SAFETY: rule 1 (a code comes from a call that was allowed); the number lives through the call
    unsafe { ffi::MPI_Error_class(code, &raw mut class) };
    class
}

/// Returns true for `MPI_ERR_IN_STATUS`: each status holds the return code of its own request.
pub(super) fn is_error_in_status(code: c_int) -> bool {
    code != SUCCESS && class(code) == ffi::MPI_ERR_IN_STATUS as c_int
}

/// Converts a return code to the error that a caller gets.
pub(super) fn check(code: c_int, at: PeerStep) -> Result<()> {
    MpiError::check(code).map_err(|error| error.into_error(at))
}

/// Checks that there is an MPI. Only one that is loaded at run time can be missing.
///
/// # Errors
/// [`Error::Unsupported`] with the loader's reason.
pub(super) fn check_loaded() -> Result<()> {
    annulus_mpi::loaded().map_err(|why| Error::unsupported("MPI", format!("this machine: {why}")))
}

/// Converts a count of MPI's, which is never negative.
pub(super) fn count(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// Returns name and version of the MPI library.
pub(super) fn library() -> Result<String> {
    check_loaded()?;
    // SAFETY: a constant of the linked MPI
    let capacity = count(unsafe { ffi::RSMPI_MAX_LIBRARY_VERSION_STRING });
    let mut text = vec![0u8; capacity + 1];
    let mut length = 0;
    // SAFETY: may be called at any time; MPI writes at most `capacity` characters and the length
    let code = unsafe {
        ffi::MPI_Get_library_version(text.as_mut_ptr().cast::<c_char>(), &raw mut length)
    };
    check(code, PeerStep::of(0))?;
    text.truncate(count(length).min(capacity));
    Ok(String::from_utf8_lossy(&text).trim_end_matches(['\0', '\n']).to_owned())
}
