//! The class `Cache`: a KV cache in this process, or one rank of one over MPI.

use std::sync::Arc;

use annulus::{
    CacheShape, DType, Division, Element, LocalCache,
    ndarray::{Ix3, Ix4},
};
#[cfg(feature = "mpi")]
use annulus_core::Control;
use pyo3::{prelude::*, types::PyDict};

use crate::{
    array::{Outputs, Plain},
    backend::{self, PyBackend},
    config::Lengths,
    errors::raise,
    option_fields::Config,
    plan::{PyReport, PyRuns, array, machine_threads, needed, spelled, spelled_runs, view},
    session::{Session, by_dtype},
    signals::Interruptible,
};
#[cfg(feature = "mpi")]
use crate::{endpoint::Carrier, plan::node_ranks};

/// The ranks that a cache has in this process.
enum Engine {
    Local(LocalCache),
    #[cfg(feature = "mpi")]
    Rank(Box<annulus::Cache>),
}

/// Evaluates an expression for either engine.
macro_rules! either {
    ($engine:expr, $of:ident => $body:expr) => {
        match $engine {
            Engine::Local($of) => $body,
            #[cfg(feature = "mpi")]
            Engine::Rank($of) => $body,
        }
    };
}

/// A KV cache.
#[pyclass(frozen, module = "annulus._annulus")]
pub(crate) struct Cache {
    session: Session<Engine>,
    dtype: DType,
}

/// Refuses parameters of a division, which a cache does not have.
fn refuse_division(division: &Division) -> annulus::Result<()> {
    match division.first_set() {
        Some(name) => Err(annulus::Error::unsupported(name, "the KV cache")),
        None => Ok(()),
    }
}

#[pymethods]
impl Cache {
    /// Creates an empty cache of `ranks` ranks in this process.
    #[staticmethod]
    fn local(
        py: Python<'_>,
        config: Config<'_>,
        lengths: Lengths,
        page_rows: u64,
        ranks: usize,
        backend: PyBackend,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let (setup, callbacks) = config.setup(py)?;
        let (dtype, shape) = (config.element(py)?, CacheShape::from(lengths).page_rows(page_rows));
        let session = Session::new("cache", callbacks, ranks > 1);
        let signals = session.signals();
        let cache = session.run(py, || {
            let backend = backend::open(&backend, threads, || machine_threads(ranks))?;
            refuse_division(&setup.division)?;
            let runtime = setup.runtime.backend(backend);
            LocalCache::from_caches(&runtime, ranks, |_, runtime, endpoint| {
                let endpoint = Interruptible::new(endpoint, Arc::clone(signals));
                annulus::Cache::new(&setup.attention, runtime, shape, endpoint)
            })
        })?;
        Ok(Self { session: session.filled(Engine::Local(cache)), dtype })
    }

    /// Creates this process's rank of an empty cache over a communicator, named as Fortran names
    /// it, or over an `Endpoint`.
    ///
    /// The caller has compared `mpi_library` with the MPI of the communicator.
    #[cfg(feature = "mpi")]
    #[staticmethod]
    fn over_mpi(
        py: Python<'_>,
        config: Config<'_>,
        lengths: Lengths,
        page_rows: u64,
        communicator: &Bound<'_, PyAny>,
        backend: PyBackend,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        // first: all ranks share an endpoint in the same order
        let carrier = Carrier::read(communicator)?;
        let (setup, callbacks) = config.setup(py)?;
        let (dtype, shape) = (config.element(py)?, CacheShape::from(lengths).page_rows(page_rows));
        let session = Session::new("cache", callbacks, false);
        let signals = session.signals();
        let cache = session.run(py, || {
            let mut endpoint = carrier.open(&setup.runtime)?;
            refuse_division(&setup.division).inspect_err(|error| endpoint.abort(error))?;
            let backend =
                backend::open(&backend, threads, || machine_threads(node_ranks(&endpoint)));
            let backend = backend.inspect_err(|error| endpoint.abort(error))?;
            let endpoint = Interruptible::new(endpoint, Arc::clone(signals));
            let runtime = setup.runtime.backend(backend);
            annulus::Cache::new(&setup.attention, &runtime, shape, endpoint)
        })?;
        Ok(Self { session: session.filled(Engine::Rank(Box::new(cache))), dtype })
    }

    /// Appends rows: all of them, or with `own` the rows of this rank among the next `own` rows.
    /// `arrays` names key and value.
    fn append(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyDict>,
        own: Option<usize>,
    ) -> PyResult<()> {
        by_dtype!(self.dtype, T => self.append_of::<T>(py, arrays, own))
    }

    /// Computes out and lse. `arrays` names inputs and outputs.
    fn attend(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> PyResult<Vec<PyReport>> {
        by_dtype!(self.dtype, T => self.attend_of::<T>(py, arrays))
    }

    /// Removes the rows from `len` on.
    fn truncate(&self, py: Python<'_>, len: u64) -> PyResult<()> {
        let mut guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_mut())?;
        either!(engine, of => of.truncate(len)).map_err(|error| raise(py, &error))
    }

    /// Rows of this process among the next `count` rows.
    fn own_rows(&self, py: Python<'_>, count: usize) -> PyResult<PyRuns> {
        let guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_ref())?;
        let rows = either!(engine, of => of.own_rows(count));
        rows.map(|rows| spelled_runs(&rows)).map_err(|error| raise(py, &error))
    }

    /// Begins a call, of which the arguments are yet to be checked.
    fn begin(&self) {
        self.session.begin();
    }

    /// Ends a call whose arguments were refused: over MPI, takes part in it so that the other ranks
    /// do not wait. Does nothing if the call has reached the ring.
    fn refuse(&self, py: Python<'_>, argument: String, got: String, want: String) -> PyResult<()> {
        self.session.refuse(py, [argument, got, want], |engine, why| match engine {
            // the ranks of this process have not been called
            Engine::Local(_) => drop(why),
            // the caller raises what it has refused
            #[cfg(feature = "mpi")]
            Engine::Rank(cache) => drop(cache.refuse(why)),
        })
    }

    /// Numbers of cached rows, of all ranks and of those in this process.
    fn lengths(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let guard = self.session.lock(py)?;
        Ok(match self.session.opened(guard.as_ref())? {
            Engine::Local(cache) => (cache.len(), cache.len()),
            #[cfg(feature = "mpi")]
            Engine::Rank(cache) => (cache.len(), cache.local_len()),
        })
    }

    /// Rank and number of ranks.
    fn ring(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        let guard = self.session.lock(py)?;
        Ok(match self.session.opened(guard.as_ref())? {
            Engine::Local(cache) => (0, cache.ranks().len()),
            #[cfg(feature = "mpi")]
            Engine::Rank(cache) => (cache.rank(), cache.ranks()),
        })
    }

    /// Payload bytes that the ranks of this process send in a call with `queries` queries.
    fn bytes_predicted(&self, py: Python<'_>, queries: usize) -> PyResult<u64> {
        let guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_ref())?;
        Ok(either!(engine, of => of.bytes_predicted(queries)))
    }

    /// Bytes of keys, values and message buffers of the ranks of this process.
    fn buffer_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        let guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_ref())?;
        Ok(either!(engine, of => of.buffer_bytes()))
    }

    /// Frees the cache. Over MPI it waits a second at most for the other ranks to do the same.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.session.close(py)
    }
}

impl Cache {
    fn append_of<T: Element + Plain>(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyDict>,
        own: Option<usize>,
    ) -> PyResult<()> {
        let (key, value) = (needed(arrays, "key")?, needed(arrays, "value")?);
        let (k, v) = (key.view::<T, Ix4>()?, value.view::<T, Ix4>()?);
        let mut guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_mut())?;
        let appended = py.detach(|| match (engine, own) {
            // the package has compared the rows: those of this process are all
            (Engine::Local(cache), _) => cache.append(k, v),
            #[cfg(feature = "mpi")]
            (Engine::Rank(cache), None) => cache.append(k, v),
            #[cfg(feature = "mpi")]
            (Engine::Rank(cache), Some(count)) => cache.append_own(count, k, v),
        });
        appended.map_err(|error| raise(py, &error))
    }

    fn attend_of<T>(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> PyResult<Vec<PyReport>>
    where
        T: Element + Plain,
        T::Accumulator: Plain,
    {
        let (query, sinks) = (needed(arrays, "query")?, array(arrays, "softmax_aux")?);
        let (out, lse) = (needed(arrays, "out")?, needed(arrays, "lse")?);
        let mut read = vec![&query];
        read.extend(&sinks);
        Outputs(vec![&out, &lse]).check(&read)?;
        let (q, softmax_aux) = (query.view::<T, Ix4>()?, view(&sinks)?);
        // SAFETY: `check` has accepted the arrays, and each is viewed once
        let (out, lse) =
            unsafe { (out.view_mut::<T, Ix4>()?, lse.view_mut::<T::Accumulator, Ix3>()?) };
        let mut guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_mut())?;
        let reports = self.session.run(py, || match engine {
            Engine::Local(cache) => cache.attend_into(q, softmax_aux, out, lse),
            #[cfg(feature = "mpi")]
            Engine::Rank(cache) => {
                cache.attend_into(q, softmax_aux, out, lse).map(|report| vec![report])
            }
        })?;
        Ok(reports.iter().map(spelled).collect())
    }
}
