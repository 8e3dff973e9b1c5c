//! The extension module `annulus_attention._annulus`: plans over arrays that Python owns.
//!
//! | file | content |
//! |---|---|
//! | `array.rs` | views of arrays, and the checks that make them sound |
//! | `cache.rs` | the class `Cache` |
//! | `config.rs` | parameters of attentions and plans, from `_attention.py`; backends |
//! | `device.rs` | arrays in the memory of an NVIDIA GPU, and plans of them |
//! | `endpoint.rs` | the class `Endpoint` |
//! | `masks.rs` | masks and bias functions |
//! | `plan.rs` | the class `Plan` |
//! | `session.rs` | lock, signals and callbacks of a plan or a cache |
//! | `signals.rs` | Ctrl-C during a pass |
//! | `xla.rs` | the function that compiled JAX programs call |
//!
//! The module is private. The package around it checks and names arguments, allocates outputs
//! and converts arrays; this module checks again whatever memory safety depends on.

mod array;
mod cache;
mod config;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "mpi")]
mod endpoint;
mod masks;
#[rustfmt::skip]
mod option_fields;
mod plan;
mod session;
mod signals;
mod xla;

use annulus::Error;
use pyo3::prelude::*;

/// Plans over arrays that Python owns.
#[pyo3::pymodule]
mod _annulus {
    use annulus::backend::BackendName;
    use pyo3::prelude::*;

    #[cfg(feature = "mpi")]
    use super::Raises;

    #[pymodule_export]
    use super::cache::Cache;
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use super::device::DeviceArray;
    #[cfg(feature = "mpi")]
    #[pymodule_export]
    use super::endpoint::Endpoint;
    #[pymodule_export]
    use super::masks::{BiasFunction, Mask};
    #[pymodule_export]
    use super::plan::{Plan, boxes, graph, shard};
    #[pymodule_export]
    use super::xla::{XlaBuffer, xla_handler};

    /// True if the module was built with the feature `mpi`.
    #[pymodule_export]
    const HAS_MPI: bool = cfg!(feature = "mpi");

    /// Returns the names of the backends that the module was built with.
    #[pyfunction]
    fn backends() -> Vec<&'static str> {
        let built = BackendName::ALL.into_iter().filter(|name| name.is_built());
        built.map(BackendName::name).collect()
    }

    /// True if the module is linked with an MPI, false if it loads one.
    #[cfg(feature = "mpi")]
    #[pymodule_export]
    const LINKS_MPI: bool = annulus::comm::mpi::IS_LINKED;

    /// Source of the shim that an MPI without the standard ABI needs.
    #[cfg(feature = "mpi")]
    #[pymodule_export]
    const MPI_SHIM: &str = annulus::comm::mpi::SHIM_SOURCE;

    /// Returns the text with which the MPI of this module names itself, and true if it is
    /// initialised. mpi4py initialises and finalises it, never this module.
    #[cfg(feature = "mpi")]
    #[pyfunction]
    fn mpi_library() -> Raises<(String, bool)> {
        Ok((annulus::comm::mpi::library()?, annulus::comm::mpi::is_alive()))
    }

    /// Fails in a process that was forked from one with MPI: calls of MPI there would disturb the
    /// parent. Called before each collective operation, and before the fork of a process that has
    /// mpi4py, so that this module knows of an MPI that it has not used yet.
    #[cfg(feature = "mpi")]
    #[pyfunction]
    fn check_mpi_process() -> Raises<()> {
        // it records the process of an MPI that is alive
        annulus::comm::mpi::is_alive();
        Ok(annulus::comm::mpi::check_process()?)
    }
}

/// An exception: of Python, or of an error of annulus, then one of `annulus_attention/_errors.py`.
#[derive(Debug)]
pub(crate) struct Raised(PyErr);

/// Result of a function that Python calls.
pub(crate) type Raises<T> = Result<T, Raised>;

impl From<PyErr> for Raised {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<Error> for Raised {
    fn from(error: Error) -> Self {
        Python::attach(|py| Self(exception(py, &error)))
    }
}

impl From<Raised> for PyErr {
    fn from(raised: Raised) -> Self {
        raised.0
    }
}

/// Builds the exception of an error: its class, message, stable code and, where there is one, the
/// argument's name.
fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let argument = match error {
        Error::InvalidArgument { argument, .. } => Some(argument.as_str()),
        _ => None,
    };
    let made = py
        .import("annulus_attention._errors")
        .and_then(|module| module.getattr("from_code"))
        .and_then(|make| make.call1((error.code(), error.to_string(), argument)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(failed) => failed,
    }
}
