//! The class `Cache`: a KV cache in this process, or one rank of one over MPI.

use std::sync::Arc;

use annulus::{CacheShape, DType, Element, Error, LocalCache, Result, Setup, ndarray::Ix4};
#[cfg(feature = "mpi")]
use annulus_core::Control;
use pyo3::{prelude::*, types::PyDict};

use crate::{
    Raises,
    array::{array, check_outputs, needed, view},
    config::{Lengths, PyBackend, open_backend},
    option_fields::Config,
    plan::{PyReport, PyRuns, machine_threads, spelled, spelled_runs},
    session::{Session, by_dtype},
    signals::{Interruptible, Signals},
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
#[pyclass(frozen, module = "annulus_attention._annulus")]
pub(crate) struct Cache {
    session: Session<Engine>,
    dtype: DType,
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
    ) -> Raises<Self> {
        let shape = CacheShape::from(lengths).page_rows(page_rows);
        Self::new(py, &config, ranks > 1, |setup, signals| {
            let backend = open_backend(&backend, threads, || machine_threads(ranks))?;
            refuse_division(&setup)?;
            let runtime = setup.runtime.backend(backend);
            let cache = LocalCache::from_caches(&runtime, ranks, |_, runtime, endpoint| {
                let endpoint = Interruptible::new(endpoint, Arc::clone(signals));
                annulus::Cache::new(&setup.attention, runtime, shape, endpoint)
            })?;
            Ok(Engine::Local(cache))
        })
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
    ) -> Raises<Self> {
        // first: all ranks share an endpoint in the same order
        let carrier = Carrier::read(communicator)?;
        let shape = CacheShape::from(lengths).page_rows(page_rows);
        Self::new(py, &config, false, |setup, signals| {
            let mut endpoint = carrier.open(&setup.runtime)?;
            let backend = refuse_division(&setup).and_then(|()| {
                open_backend(&backend, threads, || machine_threads(node_ranks(&endpoint)))
            });
            let backend = backend.inspect_err(|error| endpoint.abort(error))?;
            let endpoint = Interruptible::new(endpoint, Arc::clone(signals));
            let runtime = setup.runtime.backend(backend);
            let cache = annulus::Cache::new(&setup.attention, &runtime, shape, endpoint)?;
            Ok(Engine::Rank(Box::new(cache)))
        })
    }

    /// Appends rows: all of them, or with `own` the rows of this rank among the next `own` rows.
    /// `arrays` names key and value.
    fn append(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>, own: Option<usize>) -> Raises<()> {
        by_dtype!(self.dtype, T => self.append_of::<T>(py, arrays, own))
    }

    /// Computes out and lse. `arrays` names inputs and outputs.
    fn attend(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> Raises<Vec<PyReport>> {
        by_dtype!(self.dtype, T => self.attend_of::<T>(py, arrays))
    }

    /// Removes the rows from `len` on.
    fn truncate(&self, len: u64) -> Raises<()> {
        self.session.with(|engine| Ok(either!(engine, of => of.truncate(len))?))
    }

    /// Rows of this process among the next `count` rows.
    fn own_rows(&self, count: usize) -> Raises<PyRuns> {
        self.session.with(|engine| Ok(spelled_runs(&either!(engine, of => of.own_rows(count))?)))
    }

    /// Begins a call, of which the arguments are yet to be checked.
    fn begin(&self) {
        self.session.begin();
    }

    /// Ends a call whose arguments were refused: over MPI, takes part in it so that the other ranks
    /// do not wait. Does nothing if the call has reached the ring.
    fn refuse(&self, py: Python<'_>, argument: String, got: String, want: String) -> Raises<()> {
        self.session.refuse(py, [argument, got, want], |engine, why| match engine {
            // the ranks of this process have not been called
            Engine::Local(_) => drop(why),
            // the caller raises what it has refused
            #[cfg(feature = "mpi")]
            Engine::Rank(cache) => drop(cache.refuse(why)),
        })
    }

    /// Numbers of cached rows, of all ranks and of those in this process.
    fn lengths(&self) -> Raises<(u64, u64)> {
        self.session.with(|engine| {
            Ok(match engine {
                Engine::Local(cache) => (cache.len(), cache.len()),
                #[cfg(feature = "mpi")]
                Engine::Rank(cache) => (cache.len(), cache.local_len()),
            })
        })
    }

    /// Rank and number of ranks.
    fn ring(&self) -> Raises<(usize, usize)> {
        self.session.with(|engine| {
            Ok(match engine {
                Engine::Local(cache) => (0, cache.ranks().len()),
                #[cfg(feature = "mpi")]
                Engine::Rank(cache) => (cache.rank(), cache.ranks()),
            })
        })
    }

    /// Payload bytes that the ranks of this process send in a call with `queries` queries.
    fn bytes_predicted(&self, queries: usize) -> Raises<u64> {
        self.session.with(|engine| Ok(either!(engine, of => of.bytes_predicted(queries))))
    }

    /// Bytes of keys, values and message buffers of the ranks of this process.
    fn buffer_bytes(&self) -> Raises<u64> {
        self.session.with(|engine| Ok(either!(engine, of => of.buffer_bytes())))
    }

    /// Frees the cache. Over MPI it waits a second at most for the other ranks to do the same.
    fn close(&self, py: Python<'_>) -> Raises<()> {
        self.session.close(py)
    }
}

impl Cache {
    /// Makes a cache, whose engine `make` returns. `elsewhere`: its ranks are threads of their own.
    fn new(
        py: Python<'_>,
        config: &Config<'_>,
        elsewhere: bool,
        make: impl FnOnce(Setup, &Arc<Signals>) -> Result<Engine> + Send,
    ) -> Raises<Self> {
        let (setup, callbacks) = config.setup()?;
        let make = |signals: &Arc<Signals>| make(setup, signals);
        let dtype = config.element()?;
        Ok(Self { session: Session::new(py, "cache", callbacks, elsewhere, make)?, dtype })
    }

    fn append_of<T: Element>(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyDict>,
        own: Option<usize>,
    ) -> Raises<()> {
        let (key, value) = (needed(arrays, "key")?, needed(arrays, "value")?);
        let (k, v) = (key.view::<T, Ix4>()?, value.view::<T, Ix4>()?);
        self.session.with(|engine| {
            let appended = py.detach(|| match (engine, own) {
                // the package has compared the rows: those of this process are all
                (Engine::Local(cache), _) => cache.append(k, v),
                #[cfg(feature = "mpi")]
                (Engine::Rank(cache), None) => cache.append(k, v),
                #[cfg(feature = "mpi")]
                (Engine::Rank(cache), Some(count)) => cache.append_own(count, k, v),
            });
            Ok(appended?)
        })
    }

    fn attend_of<T: Element>(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyDict>,
    ) -> Raises<Vec<PyReport>> {
        let (query, sinks) = (needed(arrays, "query")?, array(arrays, "softmax_aux")?);
        let (out, lse) = (needed(arrays, "out")?, needed(arrays, "lse")?);
        let read: Vec<_> = [&query].into_iter().chain(&sinks).collect();
        check_outputs(&[&out, &lse], &read)?;
        let (q, softmax_aux) = (query.view::<T, Ix4>()?, view(&sinks)?);
        // SAFETY: `check_outputs` has accepted the arrays, and each is viewed once
        let (out, lse) = unsafe { (out.view_mut()?, lse.view_mut()?) };
        self.session.with(|engine| {
            let reports = self.session.run(py, || match engine {
                Engine::Local(cache) => cache.attend_into(q, softmax_aux, out, lse),
                #[cfg(feature = "mpi")]
                Engine::Rank(cache) => {
                    cache.attend_into(q, softmax_aux, out, lse).map(|report| vec![report])
                }
            })?;
            Ok(reports.iter().map(spelled).collect())
        })
    }
}

/// Refuses parameters of a division, which a cache does not have.
fn refuse_division(setup: &Setup) -> Result<()> {
    match setup.division.first_set() {
        Some(name) => Err(Error::unsupported(name, "the KV cache")),
        None => Ok(()),
    }
}
