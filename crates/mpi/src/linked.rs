//! The MPI that this program is linked with.

use std::ffi::c_int;

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

/// Returns true if MPI reports that it accepts CUDA memory, or `None` if it lacks the function that
/// reports it.
pub fn query_cuda_support() -> Option<bool> {
    let program = Library::this();
    // SAFETY: every MPI that has a function of this name declares it without arguments and with an
    // int as its result
    let call =
        unsafe { program.get::<unsafe extern "C" fn() -> c_int>(super::QUERY_CUDA_SUPPORT).ok()? };
    // SAFETY: it returns a fact about the library, and may be called at any time
    Some(unsafe { call() } != 0)
}
