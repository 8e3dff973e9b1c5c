//! Masks and bias functions, as objects that Python combines and passes to plans.

use std::{
    fmt,
    panic::resume_unwind,
    sync::{Arc, Mutex, PoisonError},
};

use annulus::{
    bias::Alibi,
    mask::{
        Causal, ChunkedCausal, Dense, DenseMask, Everything, Fingerprint, Key, KeyIntervals,
        Mask as Visibility, Neighborhood, PerHead, Prefix, Query, SharedMask, Window, and, or,
    },
    ndarray::Ix4,
};
use pyo3::{exceptions::PyTypeError, prelude::*};

use crate::{Raises, array::Array};

/// A function of Python's that kernels call, and the first exception that it raised.
pub(crate) struct Callback {
    name: String,
    function: Py<PyAny>,
    /// Key intervals of a query position, for a mask.
    intervals: Option<Py<PyAny>>,
    raised: Mutex<Option<PyErr>>,
}

impl Callback {
    /// Takes the exception that ended the last pass.
    pub(crate) fn take_raised(&self) -> Option<PyErr> {
        self.raised.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns a text that identifies the functions as long as they live.
    fn key(&self) -> String {
        let intervals = self.intervals.as_ref().map(|function| function.as_ptr());
        format!("{:?} {intervals:?}", self.function.as_ptr())
    }

    /// Calls Python. An exception is kept and unwinds to the ring, which ends the pass.
    fn call<T>(&self, call: impl FnOnce(Python<'_>) -> PyResult<T>) -> T {
        Python::attach(call).unwrap_or_else(|error| {
            let message = format!("{} raised {error}", self.name);
            self.raised.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            resume_unwind(Box::new(message))
        })
    }
}

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A mask that is a function of positions.
#[derive(Debug)]
struct OfPositions(Arc<Callback>);

impl Visibility for OfPositions {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("python mask").text(&self.0.name)
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        self.0
            .call(|py| self.0.function.bind(py).call1((query.position, key.position))?.is_truthy())
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let intervals = self.0.intervals.as_ref()?;
        let ranges: Vec<(i64, i64)> =
            self.0.call(|py| intervals.bind(py).call1((query.position,))?.extract());
        Some(ranges.into_iter().map(|(low, high)| low..high).collect())
    }
}

/// A bias that is a function of head and positions.
#[derive(Debug)]
struct BiasOfPositions(Arc<Callback>);

impl annulus::bias::BiasFunction for BiasOfPositions {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("python bias").text(&self.0.name)
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        self.0.call(|py| {
            let arguments = (query.head, query.position, key.position);
            self.0.function.bind(py).call1(arguments)?.extract()
        })
    }
}

/// A mask over positions. `a & b` and `a | b` combine masks.
#[pyclass(frozen, weakref, module = "annulus_attention._annulus")]
pub(crate) struct Mask {
    pub(crate) mask: SharedMask,
    /// Functions of Python's in it.
    pub(crate) callbacks: Vec<Arc<Callback>>,
}

impl Mask {
    fn of(mask: impl Visibility) -> Self {
        Self { mask: Arc::new(mask), callbacks: Vec::new() }
    }

    fn both(&self, other: &Self) -> Vec<Arc<Callback>> {
        self.callbacks.iter().chain(&other.callbacks).cloned().collect()
    }
}

#[pymethods]
impl Mask {
    #[staticmethod]
    fn full() -> Self {
        Self::of(Everything)
    }

    #[staticmethod]
    fn causal(offset: i64) -> Self {
        Self::of(Causal { offset })
    }

    #[staticmethod]
    fn local(left: Option<u64>, right: Option<u64>, first_visible: u64, offset: i64) -> Self {
        Self::of(Window { left, right, first_visible, offset })
    }

    #[staticmethod]
    fn chunked_causal(size: u64) -> Self {
        Self::of(ChunkedCausal { size })
    }

    #[staticmethod]
    fn prefix(len: u64) -> Self {
        Self::of(Prefix { len })
    }

    #[staticmethod]
    fn neighborhood(text: &str) -> Raises<Self> {
        Ok(Self::of(text.parse::<Neighborhood>()?))
    }

    /// `visible` holds one byte for each pair, 0 if it is masked.
    #[staticmethod]
    fn dense(visible: Bound<'_, PyAny>) -> Raises<Self> {
        Ok(Self::of(Dense(Arc::new(dense_mask(&Array::new("mask", visible)?)?))))
    }

    #[staticmethod]
    fn per_head(masks: Vec<PyRef<'_, Self>>) -> Self {
        let callbacks = masks.iter().flat_map(|mask| mask.callbacks.clone()).collect();
        let masks = masks.iter().map(|mask| Arc::clone(&mask.mask)).collect();
        Self { mask: Arc::new(PerHead(masks)), callbacks }
    }

    #[staticmethod]
    fn function(name: String, visible: Py<PyAny>, intervals: Option<Py<PyAny>>) -> Self {
        let raised = Mutex::default();
        let callback = Arc::new(Callback { name, function: visible, intervals, raised });
        Self { mask: Arc::new(OfPositions(Arc::clone(&callback))), callbacks: vec![callback] }
    }

    fn __and__(&self, other: &Bound<'_, PyAny>) -> PyResult<Self> {
        let other = operand(other)?;
        Ok(Self {
            mask: and(Arc::clone(&self.mask), Arc::clone(&other.mask)),
            callbacks: self.both(&other),
        })
    }

    fn __or__(&self, other: &Bound<'_, PyAny>) -> PyResult<Self> {
        let other = operand(other)?;
        Ok(Self {
            mask: or(Arc::clone(&self.mask), Arc::clone(&other.mask)),
            callbacks: self.both(&other),
        })
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.mask)
    }

    /// Text that is equal for masks of the same pairs, and of the same functions while they live.
    #[getter]
    fn key(&self) -> String {
        key(self.mask.fingerprint(Fingerprint::new()), &self.callbacks)
    }
}

/// Joins a digest, in which a function of Python's is a name, and the identity of the functions.
fn key(digest: Fingerprint, callbacks: &[Arc<Callback>]) -> String {
    let functions: Vec<String> = callbacks.iter().map(|callback| callback.key()).collect();
    format!("{:016x} {}", digest.finish(), functions.join(" "))
}

fn operand<'py>(other: &Bound<'py, PyAny>) -> PyResult<PyRef<'py, Mask>> {
    other.extract().map_err(|_| PyTypeError::new_err("masks combine with masks only"))
}

/// A bias that is computed from positions.
#[pyclass(frozen, weakref, module = "annulus_attention._annulus")]
pub(crate) struct BiasFunction {
    pub(crate) function: Arc<dyn annulus::bias::BiasFunction>,
    /// Functions of Python's in it.
    pub(crate) callbacks: Vec<Arc<Callback>>,
}

#[pymethods]
impl BiasFunction {
    #[staticmethod]
    fn alibi(slopes: Vec<f64>) -> Self {
        Self { function: Arc::new(Alibi { slopes }), callbacks: Vec::new() }
    }

    #[staticmethod]
    fn published_alibi(heads: usize) -> Self {
        Self { function: Arc::new(Alibi::published(heads)), callbacks: Vec::new() }
    }

    #[staticmethod]
    fn function(name: String, function: Py<PyAny>) -> Self {
        let raised = Mutex::default();
        let callback = Arc::new(Callback { name, function, intervals: None, raised });
        Self {
            function: Arc::new(BiasOfPositions(Arc::clone(&callback))),
            callbacks: vec![callback],
        }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.function)
    }

    /// Text that is equal for the same biases, and of the same function while it lives.
    #[getter]
    fn key(&self) -> String {
        key(self.function.fingerprint(Fingerprint::new()), &self.callbacks)
    }
}

/// Packs an array of bytes, one for each pair, into bits.
pub(crate) fn dense_mask(visible: &Array<'_>) -> Raises<DenseMask> {
    let view = visible.view_of::<u8, Ix4>("u1")?;
    let shape = view.dim().into();
    let packed = || DenseMask::try_from_fn(shape, |index| view[index] != 0);
    Ok(Python::attach(|py| py.detach(packed))?)
}
