//! Status codes, the message of the last error, and the guard against unwinding.

use std::{
    any::Any,
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int},
    panic::{self, AssertUnwindSafe},
    sync::OnceLock,
};

use annulus::{Error, Result};

/// The call succeeded.
pub const ANNULUS_SUCCESS: i32 = 0;
/// An argument has a value or shape without meaning. Nothing was written; the plan lives.
pub const ANNULUS_INVALID_ARGUMENT: i32 = 1;
/// A meaningful combination that this build cannot compute. Nothing was written; the plan lives.
pub const ANNULUS_UNSUPPORTED: i32 = 2;
/// A collective call was given different arguments on different ranks. The same error on every
/// rank; nothing was written; the plan lives.
pub const ANNULUS_RANK_MISMATCH: i32 = 3;
/// Another rank refused its arguments. Nothing was written; the plan lives.
pub const ANNULUS_REFUSED: i32 = 4;
/// Memory could not be allocated.
pub const ANNULUS_OUT_OF_MEMORY: i32 = 20;
/// A file could not be read or written.
pub const ANNULUS_IO: i32 = 21;
/// A rank has not made a collective call within the arrival deadline. Nothing was done; the plan
/// lives, and this rank makes the same call again.
pub const ANNULUS_ARRIVAL_TIMEOUT: i32 = 22;
/// A device or a thread failed. The plan is dead.
pub const ANNULUS_DEVICE: i32 = 40;
/// A transfer failed. The plan is dead.
pub const ANNULUS_COMM: i32 = 41;
/// Within a call a rank was silent, or the whole ring made no progress, for the deadline. The plan
/// is dead.
pub const ANNULUS_TIMEOUT: i32 = 42;
/// The connection to a rank is lost. The plan is dead.
pub const ANNULUS_PEER_LOST: i32 = 43;
/// Another rank failed and ended the call. The plan is dead.
pub const ANNULUS_ABORTED: i32 = 44;
/// An earlier call ended this plan.
pub const ANNULUS_POISONED: i32 = 45;
/// A defect of annulus, to be reported. The plan is dead.
pub const ANNULUS_INTERNAL: i32 = 46;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs the body of an export: its status, with the message of its error kept for
/// [`annulus_last_error`]. A panic becomes [`Error::Internal`].
pub(crate) fn guard(body: impl FnOnce() -> Result<()>) -> c_int {
    let error = match panic::catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return ANNULUS_SUCCESS,
        Ok(Err(error)) => error,
        Err(panic) => Error::internal(format!("a panic: {}", text_of(panic.as_ref()))),
    };
    // a message with a zero byte ends there
    let bytes: Vec<u8> = error.to_string().bytes().take_while(|&byte| byte != 0).collect();
    let message = CString::new(bytes).unwrap_or_default();
    // a thread that is ending has no place for messages any more
    let kept = LAST_ERROR.try_with(|last| last.replace(message));
    drop(kept);
    error.code()
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a text")
}

/// Returns the message of the last call that failed on the calling thread, as UTF-8; empty if none
/// has. It names the argument, what was given and what would have been accepted.
///
/// The text lives until the next call that fails on this thread. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_last_error() -> *const c_char {
    // the string is on the heap and stays there until it is replaced
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns a short text for a status, which never has to be freed; "unknown status" for a number
/// that is no status. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_error_string(status: c_int) -> *const c_char {
    text(status).as_ptr()
}

const fn text(status: i32) -> &'static CStr {
    match status {
        ANNULUS_SUCCESS => c"success",
        ANNULUS_INVALID_ARGUMENT => c"invalid argument",
        ANNULUS_UNSUPPORTED => c"not supported",
        ANNULUS_RANK_MISMATCH => c"arguments differ between ranks",
        ANNULUS_REFUSED => c"another rank refused the call",
        ANNULUS_OUT_OF_MEMORY => c"out of memory",
        ANNULUS_IO => c"input or output failed",
        ANNULUS_ARRIVAL_TIMEOUT => c"a rank has not made the call within the arrival deadline",
        ANNULUS_DEVICE => c"device failed",
        ANNULUS_COMM => c"communication failed",
        ANNULUS_TIMEOUT => c"a rank did not deliver within the deadline",
        ANNULUS_PEER_LOST => c"the connection to a rank is lost",
        ANNULUS_ABORTED => c"another rank aborted the call",
        ANNULUS_POISONED => c"the plan is poisoned by an earlier failure",
        ANNULUS_INTERNAL => c"internal error",
        _ => c"unknown status",
    }
}

/// Version of the binary interface: the number in the SONAME of the library.
///
/// It changes when a function, a constant or a field of a struct changes or disappears. Added
/// functions, and fields at the end of structs that begin with their size, do not change it.
pub const ANNULUS_ABI_VERSION: i32 = 1;

/// Returns [`ANNULUS_ABI_VERSION`] of the library that is loaded. A program compares it with that
/// of its header.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_abi_version() -> c_int {
    ANNULUS_ABI_VERSION
}

/// Returns the version of the library, such as "0.1.0", which never has to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_version() -> *const c_char {
    const VERSION: &[u8] = concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes();
    VERSION.as_ptr().cast()
}

/// Returns the features that the library was built with, separated by spaces: "mpi" for rings over
/// MPI, and "mpi-abi" if that is loaded at run time; "cuda" and "wgpu" for the backends, "nccl" for
/// communicators of NCCL. The text never has to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_features() -> *const c_char {
    static FEATURES: OnceLock<CString> = OnceLock::new();
    let features = FEATURES.get_or_init(|| {
        let all = [
            ("mpi", cfg!(feature = "mpi")),
            ("mpi-abi", cfg!(all(feature = "mpi", not(feature = "link-mpi")))),
            ("cuda", cfg!(feature = "cuda")),
            ("nccl", cfg!(feature = "nccl")),
            ("wgpu", cfg!(feature = "wgpu")),
        ];
        let built = all.iter().filter(|(_, is_built)| *is_built).map(|(name, _)| *name);
        CString::new(built.collect::<Vec<_>>().join(" ")).unwrap_or_default()
    });
    features.as_ptr()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn last() -> String {
        // SAFETY: never NULL, ends with a zero byte, and nothing fails on this thread meanwhile
        unsafe { CStr::from_ptr(annulus_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_a_status() {
        let status = guard(|| panic!("number {}", 7));
        assert_eq!((status, last().as_str()), (46, "internal error: a panic: number 7"));
        assert_eq!(guard(|| Ok(())), 0);
        // as errno: a call that succeeds leaves it
        assert_eq!(last(), "internal error: a panic: number 7");
        assert_eq!(guard(|| Err(Error::invalid("a\0b", 1, 2))), 1);
        assert_eq!(last(), "a");
    }

    #[test]
    fn every_error_has_a_text_and_the_code_of_its_constant() {
        let codes = [
            (Error::invalid("", "", ""), ANNULUS_INVALID_ARGUMENT),
            (Error::unsupported("", ""), ANNULUS_UNSUPPORTED),
            (Error::out_of_memory("", 1), ANNULUS_OUT_OF_MEMORY),
            (Error::ArrivalTimeout { peer: 0, waited: Duration::ZERO }, ANNULUS_ARRIVAL_TIMEOUT),
            (Error::Device { what: String::new() }, ANNULUS_DEVICE),
            (Error::Comm { peer: 0, step: 0, what: String::new() }, ANNULUS_COMM),
            (Error::PeerLost { peer: 0, step: 0 }, ANNULUS_PEER_LOST),
            (Error::Poisoned { first: String::new() }, ANNULUS_POISONED),
            (Error::internal(""), ANNULUS_INTERNAL),
        ];
        for (error, code) in codes {
            assert_eq!(error.code(), code);
            assert_ne!(text(code), text(-1));
        }
        assert_eq!(text(99), c"unknown status");
    }
}
