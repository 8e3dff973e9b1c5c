//! The functions of MPI that annulus calls.
//!
//! | feature `link-mpi` | MPI | [`ffi`] |
//! |---|---|---|
//! | yes | the one of `$MPICC`, chosen at build | bindings of the crate `mpi` |
//! | no | any one, loaded at the first call | the standard ABI of MPI 5.0: `loaded/` |
//!
//! Both have the same names, so that code above is written once. Without `link-mpi`, an MPI whose
//! library has the standard ABI (`libmpi_abi`) is loaded as it is. Any other MPI needs the shim
//! `shim/annulus_mpi_shim.c`, which the MPI's own compiler wrapper compiles and whose functions
//! translate handles and constants. The variable `ANNULUS_MPI_LIBRARY` names either.
//!
//! [`loaded`] returns the error of a missing library. Functions of [`ffi`] that are called without
//! one return an error code, so no call can be wrong before the error was read.
//!
//! Linking is the feature, and not loading, because Cargo unites the features of all crates of a
//! program: if one crate links MPI, all of them use the linked one.

#[cfg(feature = "link-mpi")]
mod linked {
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
}
#[cfg(not(feature = "link-mpi"))]
#[path = "loaded/mod.rs"]
mod loaded_library;

use std::ffi::{CStr, c_int};

#[cfg(feature = "link-mpi")]
use self::linked::extension;
#[cfg(feature = "link-mpi")]
pub use self::linked::{ffi, loaded, rsmpi};
#[cfg(not(feature = "link-mpi"))]
use self::loaded_library::extension;
#[cfg(not(feature = "link-mpi"))]
pub use self::loaded_library::{ffi, loaded};

/// Source of the shim. The feature `link-mpi` has no use for it.
pub const SHIM_SOURCE: &str = include_str!("../shim/annulus_mpi_shim.c");

// Extensions by which an MPI reports that it accepts the memory of GPUs. None is in the standard,
// so each is looked up by its name.

/// Returns the report of `name`, an `MPIX_Query_*_support`, or `None` if no MPI is loaded or it
/// lacks the function.
pub fn query_gpu_support(name: &CStr) -> Option<bool> {
    // SAFETY: every MPI that has a function of such a name declares it without arguments and with
    // an int as its result
    let call = unsafe { extension::<unsafe extern "C" fn() -> c_int>(name)? };
    // SAFETY: it returns a fact about the library, and may be called at any time
    Some(unsafe { call() } != 0)
}

/// Returns the report of `MPIX_GPU_query_support` on a kind of GPU, or `None` if no MPI is loaded,
/// or it lacks the function or does not know the kind.
pub fn query_gpu_kind(kind: c_int) -> Option<bool> {
    type Query = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;
    // SAFETY: MPICH and its derivatives, which have the function, declare it so
    let call = unsafe { extension::<Query>(c"MPIX_GPU_query_support")? };
    let mut supported = 0;
    // SAFETY: the number lives through the call; before MPI_Init the function returns an error code
    let code = unsafe { call(kind, &raw mut supported) };
    (code == 0).then_some(supported != 0)
}
