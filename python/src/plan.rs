//! The class `Plan`: a ring in this process, or one rank of a ring over MPI.

use std::{num::NonZero, sync::Arc, thread};

#[cfg(feature = "cuda")]
use annulus::backend::cuda::device::{CudaView, CudaViewMut};
use annulus::{
    BackwardViewMut, Batch, DType, Dims, Element, ForwardView, ForwardViewMut, Layout, LocalRing,
    Report, Tensors,
    ndarray::{ArrayView4, Dimension, Ix2, Ix3, Ix4},
    planning::Runs,
};
#[cfg(feature = "mpi")]
use annulus_core::Control;
use annulus_core::Side;
use annulus_plan::Choice;
use pyo3::{prelude::*, types::PyDict};

#[cfg(feature = "cuda")]
use crate::device::DevicePlan;
#[cfg(feature = "mpi")]
use crate::endpoint::Carrier;
use crate::{
    array::{Array, Outputs, Plain},
    backend::{self, PyBackend},
    config::{Lengths, batch},
    errors::{invalid, raise},
    option_fields::Config,
    session::{Session, by_dtype},
    signals::Interruptible,
};

/// The ranks that a plan has in this process.
enum Engine {
    Local(LocalRing),
    #[cfg(feature = "mpi")]
    Rank(annulus::Plan),
    #[cfg(feature = "cuda")]
    Device(Box<DevicePlan>),
}

/// Evaluates an expression for the plan of the first rank of this process.
macro_rules! of_plan {
    ($engine:expr, $plan:ident => $body:expr) => {
        match $engine {
            Engine::Local(ring) => {
                let $plan = ring.plan();
                $body
            }
            #[cfg(feature = "mpi")]
            Engine::Rank($plan) => $body,
            #[cfg(feature = "cuda")]
            Engine::Device(rank) => {
                let $plan = rank.plan();
                $body
            }
        }
    };
}

/// Start, step and count of every run of rows.
pub(crate) type PyRuns = Vec<(i64, i64, u64)>;

/// Seconds, waiting seconds, bytes sent and bytes predicted of one rank.
pub(crate) type PyReport = (f64, f64, u64, u64);

/// A plan, made once and used for many passes.
#[pyclass(frozen, module = "annulus._annulus")]
pub(crate) struct Plan {
    session: Session<Engine>,
    dtype: DType,
}

#[pymethods]
impl Plan {
    /// Plans a ring of `ranks` ranks in this process.
    #[staticmethod]
    fn local(
        py: Python<'_>,
        config: Config<'_>,
        lengths: Lengths,
        ranks: usize,
        backend: PyBackend,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let (setup, callbacks) = config.setup(py)?;
        let (dtype, dims) = (config.element(py)?, Dims::from(lengths));
        let session = Session::new("plan", callbacks, ranks > 1);
        let signals = session.signals();
        let ring = session.run(py, || {
            let backend = backend::open(&backend, threads, || machine_threads(ranks))?;
            let setup = setup.map_runtime(|runtime| runtime.backend(backend));
            LocalRing::from_plans(setup, dims, ranks, |_, setup, endpoint| {
                annulus::Plan::new(setup, dims, Interruptible::new(endpoint, Arc::clone(signals)))
            })
        })?;
        Ok(Self { session: session.filled(Engine::Local(ring)), dtype })
    }

    /// Plans this process as one rank of the ring over a communicator, named as Fortran names it,
    /// or over an `Endpoint`.
    ///
    /// The caller has compared `mpi_library` with the MPI of the communicator.
    #[cfg(feature = "mpi")]
    #[staticmethod]
    fn over_mpi(
        py: Python<'_>,
        config: Config<'_>,
        lengths: Lengths,
        communicator: &Bound<'_, PyAny>,
        backend: PyBackend,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        // first: all ranks share an endpoint in the same order
        let carrier = Carrier::read(communicator)?;
        let (setup, callbacks) = config.setup(py)?;
        let (dtype, dims) = (config.element(py)?, Dims::from(lengths));
        let session = Session::new("plan", callbacks, false);
        let signals = session.signals();
        let plan = session.run(py, || {
            let mut endpoint = carrier.open(&setup.runtime)?;
            let backend =
                backend::open(&backend, threads, || machine_threads(node_ranks(&endpoint)));
            let backend = backend.inspect_err(|error| endpoint.abort(error))?;
            let endpoint = Interruptible::new(endpoint, Arc::clone(signals));
            let setup = setup.map_runtime(|runtime| runtime.backend(backend));
            annulus::Plan::new(setup, dims, endpoint)
        })?;
        Ok(Self { session: session.filled(Engine::Rank(plan)), dtype })
    }

    /// Plans a ring of one rank on arrays in the memory of GPU `on.0`, in stream `on.1` of it.
    #[cfg(feature = "cuda")]
    #[staticmethod]
    fn local_on_device(
        py: Python<'_>,
        config: Config<'_>,
        lengths: Lengths,
        on: (usize, usize),
    ) -> PyResult<Self> {
        let (setup, callbacks) = config.setup(py)?;
        let (dtype, dims) = (config.element(py)?, Dims::from(lengths));
        let session = Session::new("plan", callbacks, false);
        let signals = session.signals();
        let plan = session.run(py, || {
            let alone = annulus::comm::threads::ring(1).pop();
            let alone = alone.ok_or_else(|| annulus::Error::internal("a ring of no rank"))?;
            DevicePlan::new(&setup, dims, on, alone, signals)
        })?;
        Ok(Self { session: session.filled(Engine::Device(Box::new(plan))), dtype })
    }

    /// Plans this process as one rank over a communicator, on arrays in the memory of a GPU.
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    #[staticmethod]
    fn over_mpi_on_device(
        py: Python<'_>,
        config: Config<'_>,
        lengths: Lengths,
        communicator: &Bound<'_, PyAny>,
        on: (usize, usize),
    ) -> PyResult<Self> {
        // first: all ranks share an endpoint in the same order
        let carrier = Carrier::read(communicator)?;
        let (setup, callbacks) = config.setup(py)?;
        let (dtype, dims) = (config.element(py)?, Dims::from(lengths));
        let session = Session::new("plan", callbacks, false);
        let signals = session.signals();
        let plan = session.run(py, || {
            DevicePlan::new(&setup, dims, on, carrier.open(&setup.runtime)?, signals)
        })?;
        Ok(Self { session: session.filled(Engine::Device(Box::new(plan))), dtype })
    }

    /// Adapts the plan to a batch.
    fn update(&self, py: Python<'_>, given: &Bound<'_, PyDict>) -> PyResult<()> {
        let batch: Batch = batch(py, given)?;
        let mut guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_mut())?;
        self.session.run(py, || match engine {
            Engine::Local(ring) => ring.update(&batch),
            #[cfg(feature = "mpi")]
            Engine::Rank(plan) => plan.update(&batch),
            #[cfg(feature = "cuda")]
            Engine::Device(rank) => rank.run(|plan| plan.update(&batch)),
        })
    }

    /// Computes out and lse. `arrays` names inputs and outputs.
    fn forward(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> PyResult<Vec<PyReport>> {
        by_dtype!(self.dtype, T => self.forward_of::<T>(py, arrays))
    }

    /// Computes gradients. `arrays` names inputs and outputs.
    fn backward(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> PyResult<Vec<PyReport>> {
        by_dtype!(self.dtype, T => self.backward_of::<T>(py, arrays))
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
            Engine::Rank(plan) => drop(plan.refuse(why)),
            #[cfg(feature = "cuda")]
            Engine::Device(rank) => drop(rank.run(|plan| Ok(plan.refuse(why)))),
        })
    }

    /// Global query rows of this process.
    fn q_rows(&self, py: Python<'_>) -> PyResult<PyRuns> {
        self.rows(py, Side::Q)
    }

    /// Global key rows of this process.
    fn kv_rows(&self, py: Python<'_>) -> PyResult<PyRuns> {
        self.rows(py, Side::Kv)
    }

    /// Rank, number of ranks, layout, strategy.
    fn ring(&self, py: Python<'_>) -> PyResult<(usize, usize, &'static str, String)> {
        let guard = self.session.lock(py)?;
        Ok(of_plan!(self.session.opened(guard.as_ref())?, plan => {
            (plan.rank(), plan.ranks(), plan.layout().name(), plan.strategy().to_string())
        }))
    }

    /// Fingerprint of the arithmetic.
    fn numerics(&self, py: Python<'_>) -> PyResult<String> {
        let guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_ref())?;
        Ok(of_plan!(engine, plan => plan.numerics().to_owned()))
    }

    /// True if passes may run on another thread than this one.
    fn any_thread(&self, py: Python<'_>) -> PyResult<bool> {
        let guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_ref())?;
        Ok(of_plan!(engine, plan => plan.any_thread()))
    }

    /// True if a backward pass reads the rounding residual of out, which a forward pass writes.
    fn has_out_residual(&self, py: Python<'_>) -> PyResult<bool> {
        let guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_ref())?;
        Ok(of_plan!(engine, plan => plan.has_out_residual()))
    }

    /// Ends the pass that another thread runs, if it has reached the ring.
    fn interrupt(&self) {
        self.session.signals().interrupt();
    }

    /// Mask, ranks, layout, route, hops and bytes.
    fn describe(&self, py: Python<'_>) -> PyResult<String> {
        let guard = self.session.lock(py)?;
        Ok(match self.session.opened(guard.as_ref())? {
            Engine::Local(ring) => ring.to_string(),
            #[cfg(feature = "mpi")]
            Engine::Rank(plan) => plan.to_string(),
            #[cfg(feature = "cuda")]
            Engine::Device(rank) => rank.plan().to_string(),
        })
    }

    /// Frees the plan. Over MPI it waits a second at most for the other ranks to do the same.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.session.close(py)
    }
}

impl Plan {
    /// Rows as runs of start, step and count: all rows of a ring in this process.
    fn rows(&self, py: Python<'_>, side: Side) -> PyResult<PyRuns> {
        let guard = self.session.lock(py)?;
        let rows = match self.session.opened(guard.as_ref())? {
            Engine::Local(ring) => {
                let Dims { q_len, kv_len, .. } = ring.plan().spec().dims;
                Runs::counting(0, if side == Side::Q { q_len } else { kv_len } as u64)
            }
            #[cfg(feature = "mpi")]
            Engine::Rank(plan) if side == Side::Q => plan.q_rows().clone(),
            #[cfg(feature = "mpi")]
            Engine::Rank(plan) => plan.kv_rows().clone(),
            #[cfg(feature = "cuda")]
            Engine::Device(rank) if side == Side::Q => rank.plan().q_rows().clone(),
            #[cfg(feature = "cuda")]
            Engine::Device(rank) => rank.plan().kv_rows().clone(),
        };
        Ok(spelled_runs(&rows))
    }

    fn forward_of<T>(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> PyResult<Vec<PyReport>>
    where
        T: Element + Plain,
        T::Accumulator: Plain,
    {
        let inputs = Inputs::read(arrays)?;
        let outputs = Statistics::read(arrays)?;
        Outputs(outputs.all()).check(&inputs.all())?;
        let mut guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_mut())?;
        #[cfg(feature = "cuda")]
        if let Engine::Device(rank) = engine {
            let number = rank.number();
            let given = inputs.on_device::<T>(number)?;
            // SAFETY: `check` has accepted the arrays, and each is viewed once
            let mut views = unsafe { outputs.on_device::<T>(number)? };
            let run = || rank.run(|plan| plan.forward_in_place(given, &mut views));
            return Ok(vec![spelled(&self.session.run(py, run)?)]);
        }
        let tensors = inputs.tensors::<T>()?;
        // SAFETY: `check` has accepted the arrays, and each is viewed once
        let views = unsafe {
            ForwardViewMut {
                out: outputs.out.view_mut::<T, Ix4>()?,
                lse: outputs.lse.view_mut::<T::Accumulator, Ix3>()?,
                max: view_mut(&outputs.max)?,
                sum: view_mut(&outputs.sum)?,
                ties: view_mut(&outputs.ties)?,
                out_residual: view_mut::<T, Ix4>(&outputs.out_residual)?,
            }
        };
        let reports = self.session.run(py, || match engine {
            Engine::Local(ring) => ring.forward_into(&tensors, views).map(<[_]>::to_vec),
            #[cfg(feature = "mpi")]
            Engine::Rank(plan) => plan.forward_into(&tensors, views).map(|report| vec![report]),
            #[cfg(feature = "cuda")]
            Engine::Device(_) => Err(annulus::Error::internal("tensors in host memory")),
        })?;
        Ok(reports.iter().map(spelled).collect())
    }

    fn backward_of<T>(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> PyResult<Vec<PyReport>>
    where
        T: Element + Plain,
        T::Accumulator: Plain,
    {
        let inputs = Inputs::read(arrays)?;
        let forward = Statistics::read(arrays)?;
        let (dout, dlse) = (needed(arrays, "dout")?, array(arrays, "dlse")?);
        let names = ["dq", "dk", "dv"].map(|name| needed(arrays, name));
        let [dq, dk, dv] = names;
        let (dq, dk, dv) = (dq?, dk?, dv?);
        let (dbias, dsinks) = (array(arrays, "dbias")?, array(arrays, "dsoftmax_aux")?);
        let mut read = inputs.all();
        read.extend(forward.all());
        read.push(&dout);
        read.extend(&dlse);
        let mut written = vec![&dq, &dk, &dv];
        written.extend(&dbias);
        written.extend(&dsinks);
        Outputs(written).check(&read)?;
        let mut guard = self.session.lock(py)?;
        let engine = self.session.opened(guard.as_mut())?;
        #[cfg(feature = "cuda")]
        if let Engine::Device(rank) = engine {
            let on = rank.number();
            let given = inputs.on_device::<T>(on)?;
            let out = forward.out.device_view::<T>(on)?;
            let lse = forward.lse.device_view::<T::Accumulator>(on)?;
            let [max, sum, ties, dlse] = [&forward.max, &forward.sum, &forward.ties, &dlse]
                .map(|array| device_view::<T::Accumulator>(array, on));
            let (max, sum, ties, dlse) = (max?, sum?, ties?, dlse?);
            let out_residual = device_view::<T>(&forward.out_residual, on)?;
            let dout = dout.device_view::<T>(on)?;
            // SAFETY: `check` has accepted the arrays, and each is viewed once
            let mut gradients = unsafe {
                annulus_core::Gradients {
                    dq: dq.device_view_mut::<T>(on)?,
                    dk: dk.device_view_mut::<T>(on)?,
                    dv: dv.device_view_mut::<T>(on)?,
                    dbias: device_view_mut::<T::Accumulator>(&dbias, on)?,
                    dsinks: device_view_mut::<T::Accumulator>(&dsinks, on)?,
                }
            };
            let run = || {
                rank.run(|plan| {
                    let statistics = annulus_core::max_and_sum(lse, max, sum);
                    let (max, sum) = statistics.map_err(|error| plan.refuse(error))?;
                    let inputs = annulus_core::BackwardInputs {
                        forward: given,
                        out,
                        max,
                        sum,
                        ties,
                        out_residual,
                        dout,
                        dlse,
                    };
                    plan.backward_in_place(inputs, &mut gradients)
                })
            };
            return Ok(vec![spelled(&self.session.run(py, run)?)]);
        }
        let tensors = inputs.tensors::<T>()?;
        let forward = ForwardView {
            out: forward.out.view::<T, Ix4>()?,
            lse: forward.lse.view::<T::Accumulator, Ix3>()?,
            max: view(&forward.max)?,
            sum: view(&forward.sum)?,
            ties: view(&forward.ties)?,
            out_residual: view::<T, Ix4>(&forward.out_residual)?,
        };
        let dout: ArrayView4<'_, T> = dout.view()?;
        let dlse = view::<T::Accumulator, Ix3>(&dlse)?;
        // SAFETY: `check` has accepted the arrays, and each is viewed once
        let views = unsafe {
            BackwardViewMut {
                dq: dq.view_mut::<T, Ix4>()?,
                dk: dk.view_mut::<T, Ix4>()?,
                dv: dv.view_mut::<T, Ix4>()?,
                dbias: view_mut(&dbias)?,
                dsoftmax_aux: view_mut::<T::Accumulator, Ix2>(&dsinks)?,
            }
        };
        let reports = self.session.run(py, || match engine {
            Engine::Local(ring) => {
                ring.backward_into(&tensors, &forward, dout, dlse, views).map(<[_]>::to_vec)
            }
            #[cfg(feature = "mpi")]
            Engine::Rank(plan) => {
                plan.backward_into(&tensors, &forward, dout, dlse, views).map(|report| vec![report])
            }
            #[cfg(feature = "cuda")]
            Engine::Device(_) => Err(annulus::Error::internal("tensors in host memory")),
        })?;
        Ok(reports.iter().map(spelled).collect())
    }
}

/// q, k, v, bias and sinks.
struct Inputs<'py> {
    q: Array<'py>,
    k: Array<'py>,
    v: Array<'py>,
    bias: Option<Array<'py>>,
    softmax_aux: Option<Array<'py>>,
}

impl<'py> Inputs<'py> {
    fn read(arrays: &Bound<'py, PyDict>) -> PyResult<Self> {
        Ok(Self {
            q: needed(arrays, "query")?,
            k: needed(arrays, "key")?,
            v: needed(arrays, "value")?,
            bias: array(arrays, "bias")?,
            softmax_aux: array(arrays, "softmax_aux")?,
        })
    }

    fn all(&self) -> Vec<&Array<'py>> {
        let mut all = vec![&self.q, &self.k, &self.v];
        all.extend(&self.bias);
        all.extend(&self.softmax_aux);
        all
    }

    fn tensors<T>(&self) -> PyResult<Tensors<'_, T>>
    where
        T: Element + Plain,
        T::Accumulator: Plain,
    {
        Ok(Tensors {
            q: self.q.view()?,
            k: self.k.view()?,
            v: self.v.view()?,
            bias: view(&self.bias)?,
            softmax_aux: view(&self.softmax_aux)?,
        })
    }
}

#[cfg(feature = "cuda")]
impl Inputs<'_> {
    /// Views the arrays in the memory of GPU `on`.
    fn on_device<T>(&self, on: usize) -> PyResult<annulus_core::Inputs<CudaView<'_>>>
    where
        T: Element + Plain,
        T::Accumulator: Element + Plain,
    {
        Ok(annulus_core::Inputs {
            q: self.q.device_view::<T>(on)?,
            k: self.k.device_view::<T>(on)?,
            v: self.v.device_view::<T>(on)?,
            bias: device_view::<T::Accumulator>(&self.bias, on)?,
            sinks: device_view::<T::Accumulator>(&self.softmax_aux, on)?,
        })
    }
}

/// Outputs of a forward pass, which a backward pass reads.
struct Statistics<'py> {
    out: Array<'py>,
    lse: Array<'py>,
    max: Option<Array<'py>>,
    sum: Option<Array<'py>>,
    ties: Option<Array<'py>>,
    out_residual: Option<Array<'py>>,
}

impl<'py> Statistics<'py> {
    fn read(arrays: &Bound<'py, PyDict>) -> PyResult<Self> {
        Ok(Self {
            out: needed(arrays, "out")?,
            lse: needed(arrays, "lse")?,
            max: array(arrays, "max")?,
            sum: array(arrays, "sum")?,
            ties: array(arrays, "ties")?,
            out_residual: array(arrays, "out_residual")?,
        })
    }

    fn all(&self) -> Vec<&Array<'py>> {
        let mut all = vec![&self.out, &self.lse];
        all.extend(&self.max);
        all.extend(&self.sum);
        all.extend(&self.ties);
        all.extend(&self.out_residual);
        all
    }
}

#[cfg(feature = "cuda")]
impl Statistics<'_> {
    /// Views the arrays in the memory of GPU `on`, for writing.
    ///
    /// # Safety
    /// As [`Array::view_mut`].
    unsafe fn on_device<T>(&self, on: usize) -> PyResult<annulus_core::Outputs<CudaViewMut<'_>>>
    where
        T: Element + Plain,
        T::Accumulator: Element + Plain,
    {
        // SAFETY: as the caller vouches
        unsafe {
            Ok(annulus_core::Outputs {
                out: self.out.device_view_mut::<T>(on)?,
                lse: self.lse.device_view_mut::<T::Accumulator>(on)?,
                max: device_view_mut::<T::Accumulator>(&self.max, on)?,
                sum: device_view_mut::<T::Accumulator>(&self.sum, on)?,
                ties: device_view_mut::<T::Accumulator>(&self.ties, on)?,
                out_residual: device_view_mut::<T>(&self.out_residual, on)?,
            })
        }
    }
}

#[cfg(feature = "cuda")]
fn device_view<'a, T: Element + Plain>(
    array: &'a Option<Array<'_>>,
    on: usize,
) -> PyResult<Option<CudaView<'a>>> {
    array.as_ref().map(|array| array.device_view::<T>(on)).transpose()
}

/// Views an output that there may be, in the memory of a GPU.
///
/// # Safety
/// As [`Array::view_mut`].
#[cfg(feature = "cuda")]
unsafe fn device_view_mut<'a, T: Element + Plain>(
    array: &'a Option<Array<'_>>,
    on: usize,
) -> PyResult<Option<CudaViewMut<'a>>> {
    // SAFETY: as the caller vouches
    array.as_ref().map(|array| unsafe { array.device_view_mut::<T>(on) }).transpose()
}

pub(crate) fn array<'py>(
    arrays: &Bound<'py, PyDict>,
    name: &'static str,
) -> PyResult<Option<Array<'py>>> {
    let given = arrays.get_item(name)?.filter(|array| !array.is_none());
    given.map(|given| Array::new(name, given)).transpose()
}

pub(crate) fn needed<'py>(arrays: &Bound<'py, PyDict>, name: &'static str) -> PyResult<Array<'py>> {
    array(arrays, name)?.ok_or_else(|| invalid(arrays.py(), name, "nothing", "an array"))
}

pub(crate) fn view<'a, T: Plain, D: Dimension>(
    array: &'a Option<Array<'_>>,
) -> PyResult<Option<annulus::ndarray::ArrayView<'a, T, D>>> {
    array.as_ref().map(Array::view).transpose()
}

/// Views an output that there may be.
///
/// # Safety
/// As [`Array::view_mut`].
unsafe fn view_mut<'a, T: Plain, D: Dimension>(
    array: &'a Option<Array<'_>>,
) -> PyResult<Option<annulus::ndarray::ArrayViewMut<'a, T, D>>> {
    // SAFETY: as the caller vouches
    array.as_ref().map(|array| unsafe { array.view_mut() }).transpose()
}

/// Returns the given layout, the one that the mask chooses for `ranks` ranks, or the balanced one
/// of a batch; and the rows of `rank` in it with their positions. Plans nothing.
#[pyfunction]
pub(crate) fn shard<'py>(
    py: Python<'py>,
    config: Config<'_>,
    lengths: Lengths,
    ranks: usize,
    rank: usize,
    documents: &Bound<'py, PyDict>,
    balanced: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let (setup, _) = config.setup(py)?;
    let dims = Dims::from(lengths);
    let batch = batch(py, documents)?;
    let placed = py.detach(|| {
        let spec = setup.spec(dims)?;
        batch.validate(&dims, dims.q_len, dims.kv_len)?;
        let (layout, route) = match setup.ring_options().layout {
            _ if balanced => {
                let Choice { layout, route, .. } = Choice::balanced(&spec, &batch, ranks)?;
                (layout, Some(route))
            }
            Some(layout) => (layout, None),
            None => {
                Layout::Contiguous.validate(dims.q_len, dims.kv_len, ranks)?;
                (Choice::auto(&spec, ranks, None, None, &mut || ()).layout, None)
            }
        };
        layout.validate(dims.q_len, dims.kv_len, ranks)?;
        // positions restart in packed documents, and do not depend on segment ids
        let packed = Batch {
            cum_seqlens_q: batch.cum_seqlens_q,
            cum_seqlens_k: batch.cum_seqlens_k,
            ..Batch::default()
        };
        let local = |side| layout.local_shard(&dims, spec.alignment, side, rank, ranks, &packed);
        Ok::<_, annulus::Error>((local(Side::Q), local(Side::Kv), layout, route))
    });
    let (q, kv, layout, route) = placed.map_err(|error| raise(py, &error))?;
    let found = PyDict::new(py);
    found.set_item("layout", layout.name())?;
    found.set_item("route", route.map(|route| route.name().replace('-', "_")))?;
    let all = |side, len| -> Vec<PyRuns> {
        (0..ranks).map(|rank| spelled_runs(&layout.shard(side, len, rank, ranks))).collect()
    };
    if balanced {
        found.set_item("rows", (all(Side::Q, dims.q_len), all(Side::Kv, dims.kv_len)))?;
    }
    for (name, shard) in [("q", &q), ("kv", &kv)] {
        found.set_item(format!("{name}_rows"), spelled_runs(&shard.rows))?;
        let positions = shard.positions.first().map(spelled_runs).unwrap_or_default();
        found.set_item(format!("{name}_positions"), positions)?;
    }
    Ok(found)
}

pub(crate) fn spelled_runs(rows: &Runs) -> PyRuns {
    rows.runs().iter().map(|run| (run.start, run.step, run.count)).collect()
}

pub(crate) fn spelled(report: &Report) -> PyReport {
    (report.seconds, report.waiting_seconds, report.bytes_sent, report.bytes_predicted)
}

/// Threads of each of `ranks` ranks on this machine.
pub(crate) fn machine_threads(ranks: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    cores.checked_div(ranks).unwrap_or(1).max(1)
}

/// Ranks of the ring on the node of this one.
#[cfg(feature = "mpi")]
pub(crate) fn node_ranks(endpoint: &annulus::comm::mpi::Mpi) -> usize {
    let locations = endpoint.nodes().locations();
    let own = locations.get(endpoint.rank()).map(|location| location.node);
    locations.iter().filter(|location| Some(location.node) == own).count()
}
