//! Extensions by which an MPI reports that it accepts the memory of GPUs. None is in the standard,
//! so each is looked up by its name.

use std::ffi::{CStr, c_int};

#[cfg(feature = "link-mpi")]
use crate::linked::extension;
#[cfg(not(feature = "link-mpi"))]
use crate::loaded_library::extension;

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
