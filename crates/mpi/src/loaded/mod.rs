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

use std::ffi::CStr;

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

/// Returns a function of MPI that the standard does not have, or `None` if no MPI is loaded or it
/// lacks the function.
///
/// # Safety
/// `F` is the type of a pointer to the function of this name.
pub(crate) unsafe fn extension<F: Copy>(name: &CStr) -> Option<F> {
    let opened = library::opened().as_ref().ok()?;
    // SAFETY: as the caller promises; the library stays loaded. A shim depends on its MPI, so the
    // search includes that
    unsafe { opened.library.get::<F>(name.to_bytes_with_nul()).ok().map(|function| *function) }
}
