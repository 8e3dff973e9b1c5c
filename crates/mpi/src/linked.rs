//! The MPI that this program is linked with.

use std::ffi::CStr;

use libloading::os::unix::Library;
/// The crate that binds it, for programs that initialise MPI themselves.
pub use mpi as rsmpi;
pub use mpi::ffi;

/// Returns `Ok`, because the loader of the program has loaded this MPI.
///
/// # Errors
/// None.
pub const fn loaded() -> Result<(), String> {
    Ok(())
}

/// Returns a function of MPI that the standard does not have, or `None` if this MPI lacks it.
///
/// # Safety
/// `F` is the type of a pointer to the function of this name.
pub(crate) unsafe fn extension<F: Copy>(name: &CStr) -> Option<F> {
    // SAFETY: as the caller promises; the program is never unloaded
    unsafe { Library::this().get::<F>(name.to_bytes_with_nul()).ok().map(|function| *function) }
}
