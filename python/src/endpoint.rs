//! The class `Endpoint`: a duplicate of a communicator that several plans and caches share.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use annulus::{
    Runtime,
    comm::mpi::{self, Mpi, Settings, Timeout},
};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use crate::Raises;

/// A duplicate of a communicator.
#[pyclass(frozen, module = "annulus_attention._annulus")]
pub(crate) struct Endpoint(Mutex<Option<Mpi>>);

#[pymethods]
impl Endpoint {
    /// Duplicates a communicator, named as Fortran names it.
    ///
    /// The caller has compared `mpi_library` with the MPI of the communicator.
    #[staticmethod]
    fn over_mpi(py: Python<'_>, communicator: i32) -> Raises<Self> {
        // the package has made the ranks agree on it within their deadline
        let made = py.detach(|| over_communicator(communicator, Timeout::unlimited()))?;
        Ok(Self(Mutex::new(Some(made))))
    }

    /// Drops this handle. Plans and caches over the endpoint live on. Does nothing in a forked
    /// child, where another thread of the parent may have held the lock.
    fn close(&self, py: Python<'_>) {
        if mpi::check_process().is_err() {
            return;
        }
        let handle = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(handle));
    }
}

/// Transport of a plan or a cache over MPI: a communicator, or a handle to an endpoint.
pub(crate) enum Carrier {
    Communicator(i32),
    Shared(Box<Mpi>),
}

impl Carrier {
    /// Reads an `Endpoint`, of which it makes a further handle, or the number of a communicator.
    pub(crate) fn read(given: &Bound<'_, PyAny>) -> Raises<Self> {
        let Ok(endpoint) = given.cast::<Endpoint>() else {
            return Ok(Self::Communicator(given.extract()?));
        };
        mpi::check_process()?;
        let endpoint = endpoint.get().0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(endpoint) = endpoint.as_ref() else {
            return Err(PyRuntimeError::new_err("the endpoint is closed").into());
        };
        Ok(Self::Shared(Box::new(endpoint.share()?)))
    }

    /// Returns the transport of this process's rank. The other ranks make it within the deadline of
    /// `runtime`.
    pub(crate) fn open(self, runtime: &Runtime) -> annulus::Result<Mpi> {
        match self {
            Self::Communicator(communicator) => {
                let timeout = match Runtime::deadline_variable()? {
                    Some(Duration::ZERO) => Timeout::unlimited(),
                    variable => {
                        Timeout::at_most(variable.unwrap_or_else(|| runtime.effective_deadline()))
                    }
                };
                over_communicator(communicator, timeout)
            }
            Self::Shared(endpoint) => Ok(*endpoint),
        }
    }
}

fn over_communicator(communicator: i32, timeout: Timeout) -> annulus::Result<Mpi> {
    let settings = Settings { timeout, ..Settings::default() };
    // SAFETY: the package passes `comm.py2f()` of a communicator object that it holds, of the MPI
    // that this module is linked with, which it has compared
    unsafe { Mpi::over_fortran(communicator, settings) }
}
