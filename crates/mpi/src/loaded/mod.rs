//! An MPI that is loaded at run time.
//!
//! | content | file |
//! |---|---|
//! | finding the library | `library.rs` |
//! | its functions, under their names | `functions.rs` |
//! | types and constants of the standard ABI | `abi.rs` |

mod abi;
mod functions;
mod library;

use std::ffi::c_int;

/// Types, constants and functions of MPI, under the names of the crate `mpi`.
pub mod ffi {
    pub use super::{abi::*, functions::*};
}

/// Loads MPI at the first call.
///
/// # Errors
/// The text of the reason, if no library can be loaded, if it lacks a function, or if its ABI has
/// another version. Every call returns the same result.
pub fn loaded() -> Result<(), String> {
    functions::table().map(|_| ()).map_err(ToOwned::to_owned)
}

/// Returns true if MPI reports that it accepts CUDA memory, or `None` if no MPI is loaded or it lacks
/// the function that reports it.
pub fn query_cuda_support() -> Option<bool> {
    let library = library::opened().as_ref().ok()?;
    // SAFETY: every MPI that has a function of this name declares it without arguments and with an
    // int as its result; a shim depends on its MPI, so the search includes that
    let call = unsafe {
        library.library.get::<unsafe extern "C" fn() -> c_int>(super::QUERY_CUDA_SUPPORT).ok()?
    };
    // SAFETY: it returns a fact about the library, and may be called at any time
    Some(unsafe { call() } != 0)
}
