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

mod gpu;
#[cfg(feature = "link-mpi")]
mod linked;
#[cfg(not(feature = "link-mpi"))]
#[path = "loaded/mod.rs"]
mod loaded_library;

pub use self::gpu::{query_gpu_kind, query_gpu_support};
#[cfg(feature = "link-mpi")]
pub use self::linked::{ffi, loaded, rsmpi};
#[cfg(not(feature = "link-mpi"))]
pub use self::loaded_library::{ffi, loaded};

/// Source of the shim. The feature `link-mpi` has no use for it.
pub const SHIM_SOURCE: &str = include_str!("../shim/annulus_mpi_shim.c");
