//! The class `Plan`: a ring in this process, or one rank of a ring over MPI.

use std::{num::NonZero, sync::Arc, thread};

use annulus::{
    BackwardViewMut, Batch, DType, Dims, Element, Error, ForwardView, ForwardViewMut, Layout,
    LocalRing, Report, Result, Setup, Tensors,
    ndarray::{self, ArrayViewMut, Dimension, Ix1},
    planning::Runs,
};
#[cfg(feature = "mpi")]
use annulus_core::Control;
#[cfg(feature = "cuda")]
use annulus_core::{BackwardInputs, max_and_sum};
use annulus_core::{Gradients, Inputs, Outputs, Side};
use annulus_plan::Choice;
use pyo3::{prelude::*, types::PyDict};

#[cfg(feature = "cuda")]
use crate::device::DevicePlan;
#[cfg(feature = "mpi")]
use crate::endpoint::Carrier;
use crate::{
    Raises,
    array::{Array, array, check_outputs, needed, view, view_mut},
    config::{Lengths, PyBackend, batch, open_backend},
    option_fields::Config,
    session::{Session, by_dtype},
    signals::{Interruptible, Signals},
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
#[pyclass(frozen, module = "annulus_attention._annulus")]
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
    ) -> Raises<Self> {
        Self::new(py, &config, lengths, ranks > 1, |setup, dims, signals| {
            let backend = open_backend(&backend, threads, || machine_threads(ranks))?;
            let setup = setup.map_runtime(|runtime| runtime.backend(backend));
            let ring = LocalRing::from_plans(setup, dims, ranks, |_, setup, endpoint| {
                annulus::Plan::new(setup, dims, Interruptible::new(endpoint, Arc::clone(signals)))
            })?;
            Ok(Engine::Local(ring))
        })
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
    ) -> Raises<Self> {
        // first: all ranks share an endpoint in the same order
        let carrier = Carrier::read(communicator)?;
        Self::new(py, &config, lengths, false, |setup, dims, signals| {
            let mut endpoint = carrier.open(&setup.runtime)?;
            let backend =
                open_backend(&backend, threads, || machine_threads(node_ranks(&endpoint)));
            let backend = backend.inspect_err(|error| endpoint.abort(error))?;
            let endpoint = Interruptible::new(endpoint, Arc::clone(signals));
            let setup = setup.map_runtime(|runtime| runtime.backend(backend));
            Ok(Engine::Rank(annulus::Plan::new(setup, dims, endpoint)?))
        })
    }

    /// Plans a ring of one rank on arrays in the memory of GPU `on.0`, in stream `on.1` of it.
    #[cfg(feature = "cuda")]
    #[staticmethod]
    fn local_on_device(
        py: Python<'_>,
        config: Config<'_>,
        lengths: Lengths,
        on: (usize, usize),
    ) -> Raises<Self> {
        Self::new(py, &config, lengths, false, |setup, dims, signals| {
            let alone = annulus::comm::threads::ring(1).pop();
            let alone = alone.ok_or_else(|| Error::internal("a ring of no rank"))?;
            Ok(Engine::Device(Box::new(DevicePlan::new(&setup, dims, on, alone, signals)?)))
        })
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
    ) -> Raises<Self> {
        // first: all ranks share an endpoint in the same order
        let carrier = Carrier::read(communicator)?;
        Self::new(py, &config, lengths, false, |setup, dims, signals| {
            let endpoint = carrier.open(&setup.runtime)?;
            Ok(Engine::Device(Box::new(DevicePlan::new(&setup, dims, on, endpoint, signals)?)))
        })
    }

    /// Adapts the plan to a batch.
    fn update(&self, py: Python<'_>, given: &Bound<'_, PyDict>) -> Raises<()> {
        let batch: Batch = batch(given)?;
        self.session.with(|engine| {
            self.session.run(py, || match engine {
                Engine::Local(ring) => ring.update(&batch),
                #[cfg(feature = "mpi")]
                Engine::Rank(plan) => plan.update(&batch),
                #[cfg(feature = "cuda")]
                Engine::Device(rank) => rank.run(|plan| plan.update(&batch)),
            })
        })
    }

    /// Writes the gradient of the bias of the key lists to `dlist_bias`.
    fn list_bias_gradient(&self, arrays: &Bound<'_, PyDict>) -> Raises<()> {
        let into = needed(arrays, "dlist_bias")?;
        self.session.with(|engine| {
            let gradient = match engine {
                Engine::Local(ring) => ring.list_bias_gradient(),
                #[cfg(feature = "mpi")]
                Engine::Rank(plan) => plan.list_bias_gradient(),
                #[cfg(feature = "cuda")]
                Engine::Device(_) => None,
            };
            // SAFETY: the package passes an array of its own, which nothing else views
            let mut into = unsafe { into.view_mut::<f64, Ix1>()? };
            for (into, number) in into.iter_mut().zip(gradient.unwrap_or_default()) {
                *into = number;
            }
            Ok(())
        })
    }

    /// Computes out and lse. `arrays` names inputs and outputs.
    fn forward(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> Raises<Vec<PyReport>> {
        by_dtype!(self.dtype, T => self.forward_of::<T>(py, arrays))
    }

    /// Computes gradients. `arrays` names inputs and outputs.
    fn backward(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> Raises<Vec<PyReport>> {
        by_dtype!(self.dtype, T => self.backward_of::<T>(py, arrays))
    }

    /// Computes out, lse and their derivatives along a direction. `arrays` names inputs and outputs.
    fn jvp(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> Raises<Vec<PyReport>> {
        by_dtype!(self.dtype, T => self.jvp_of::<T>(py, arrays))
    }

    /// Computes the gradients of gradients. `arrays` names inputs and outputs.
    fn double_backward(&self, py: Python<'_>, arrays: &Bound<'_, PyDict>) -> Raises<Vec<PyReport>> {
        by_dtype!(self.dtype, T => self.double_backward_of::<T>(py, arrays))
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
            Engine::Rank(plan) => drop(plan.refuse(why)),
            #[cfg(feature = "cuda")]
            Engine::Device(rank) => drop(rank.run(|plan| Ok(plan.refuse(why)))),
        })
    }

    /// Global query rows of this process.
    fn q_rows(&self) -> Raises<PyRuns> {
        self.session.with(|engine| {
            Ok(match engine {
                Engine::Local(ring) => all_rows(ring.plan().spec().dims.q_len),
                #[cfg(any(feature = "mpi", feature = "cuda"))]
                rank => of_plan!(rank, plan => spelled_runs(plan.q_rows())),
            })
        })
    }

    /// Global key rows of this process.
    fn kv_rows(&self) -> Raises<PyRuns> {
        self.session.with(|engine| {
            Ok(match engine {
                Engine::Local(ring) => all_rows(ring.plan().spec().dims.kv_len),
                #[cfg(any(feature = "mpi", feature = "cuda"))]
                rank => of_plan!(rank, plan => spelled_runs(plan.kv_rows())),
            })
        })
    }

    /// Rank, number of ranks, layout, strategy.
    fn ring(&self) -> Raises<(usize, usize, &'static str, String)> {
        self.session.with(|engine| {
            Ok(of_plan!(engine, plan => {
                (plan.rank(), plan.ranks(), plan.layout().name(), plan.strategy().to_string())
            }))
        })
    }

    /// Fingerprint of the arithmetic.
    fn numerics(&self) -> Raises<String> {
        self.session.with(|engine| Ok(of_plan!(engine, plan => plan.numerics().to_owned())))
    }

    /// True if passes may run on another thread than this one.
    fn any_thread(&self) -> Raises<bool> {
        self.session.with(|engine| Ok(of_plan!(engine, plan => plan.any_thread())))
    }

    /// True if a backward pass reads the rounding residual of out, which a forward pass writes.
    fn has_out_residual(&self) -> Raises<bool> {
        self.session.with(|engine| Ok(of_plan!(engine, plan => plan.has_out_residual())))
    }

    /// Ends the pass that another thread runs, if it has reached the ring.
    fn interrupt(&self) {
        self.session.signals().interrupt();
    }

    /// Mask, ranks, layout, route, hops and bytes.
    fn describe(&self) -> Raises<String> {
        self.session.with(|engine| {
            Ok(match engine {
                Engine::Local(ring) => ring.to_string(),
                #[cfg(any(feature = "mpi", feature = "cuda"))]
                rank => of_plan!(rank, plan => plan.to_string()),
            })
        })
    }

    /// Frees the plan. Over MPI it waits a second at most for the other ranks to do the same.
    fn close(&self, py: Python<'_>) -> Raises<()> {
        self.session.close(py)
    }
}

impl Plan {
    /// Makes a plan, whose engine `make` returns. `elsewhere`: its ranks are threads of their own.
    fn new(
        py: Python<'_>,
        config: &Config<'_>,
        lengths: Lengths,
        elsewhere: bool,
        make: impl FnOnce(Setup, Dims, &Arc<Signals>) -> Result<Engine> + Send,
    ) -> Raises<Self> {
        let (setup, callbacks) = config.setup()?;
        let (dtype, dims) = (config.element()?, Dims::from(lengths));
        let make = |signals: &Arc<Signals>| make(setup, dims, signals);
        Ok(Self { session: Session::new(py, "plan", callbacks, elsewhere, make)?, dtype })
    }

    fn forward_of<T: Element>(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyDict>,
    ) -> Raises<Vec<PyReport>> {
        let (inputs, outputs) = (inputs(arrays)?, outputs(arrays)?);
        let read: Vec<_> = inputs.as_ref().into_tensors().collect();
        let written: Vec<_> = outputs.as_ref().into_tensors().collect();
        check_outputs(&written, &read)?;
        self.session.with(|engine| {
            #[cfg(feature = "cuda")]
            if let Engine::Device(rank) = engine {
                let on = rank.number();
                let given = inputs.as_ref().try_map(|array| array.device_view(on))?;
                // SAFETY: `check_outputs` has accepted the arrays, and each is viewed once
                let views = outputs.as_ref().try_map(|array| unsafe { array.device_view_mut(on) });
                let mut views = views?;
                let run = || rank.run(|plan| plan.forward_in_place(given, &mut views));
                return Ok(vec![spelled(&self.session.run(py, run)?)]);
            }
            let tensors = tensors::<T>(&inputs)?;
            // SAFETY: `check_outputs` has accepted the arrays, and each is viewed once
            let views = unsafe {
                ForwardViewMut {
                    out: outputs.out.view_mut()?,
                    lse: outputs.lse.view_mut()?,
                    max: view_mut(&outputs.max)?,
                    sum: view_mut(&outputs.sum)?,
                    ties: view_mut(&outputs.ties)?,
                    out_residual: view_mut(&outputs.out_residual)?,
                    statistics: view_mut(&outputs.statistics)?,
                    head_statistics: view_mut(&outputs.head_statistics)?,
                }
            };
            let reports = self.session.run(py, || match engine {
                Engine::Local(ring) => ring.forward_into(&tensors, views).map(<[_]>::to_vec),
                #[cfg(feature = "mpi")]
                Engine::Rank(plan) => plan.forward_into(&tensors, views).map(|report| vec![report]),
                #[cfg(feature = "cuda")]
                Engine::Device(_) => Err(Error::internal("tensors in host memory")),
            })?;
            Ok(reports.iter().map(spelled).collect())
        })
    }

    fn backward_of<T: Element>(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyDict>,
    ) -> Raises<Vec<PyReport>> {
        let (inputs, forward) = (inputs(arrays)?, outputs(arrays)?);
        let (dout, dlse) = (needed(arrays, "dout")?, array(arrays, "dlse")?);
        let gradients = gradients(arrays)?;
        let read = inputs.as_ref().into_tensors().chain(forward.as_ref().into_tensors());
        let read: Vec<_> = read.chain([&dout]).chain(&dlse).collect();
        let written: Vec<_> = gradients.as_ref().into_tensors().collect();
        check_outputs(&written, &read)?;
        self.session.with(|engine| {
            #[cfg(feature = "cuda")]
            if let Engine::Device(rank) = engine {
                let on = rank.number();
                let (max, sum) =
                    max_and_sum(&forward.lse, forward.max.as_ref(), forward.sum.as_ref())?;
                let given = BackwardInputs {
                    forward: inputs.as_ref(),
                    out: &forward.out,
                    max,
                    sum,
                    ties: forward.ties.as_ref(),
                    out_residual: forward.out_residual.as_ref(),
                    dout: &dout,
                    dlse: dlse.as_ref(),
                };
                let given = given.try_map(|array| array.device_view(on))?;
                // SAFETY: `check_outputs` has accepted the arrays, and each is viewed once
                let views =
                    gradients.as_ref().try_map(|array| unsafe { array.device_view_mut(on) });
                let mut views = views?;
                let run = || rank.run(|plan| plan.backward_in_place(given, &mut views));
                return Ok(vec![spelled(&self.session.run(py, run)?)]);
            }
            let tensors = tensors::<T>(&inputs)?;
            let forward = ForwardView {
                out: forward.out.view()?,
                lse: forward.lse.view()?,
                max: view(&forward.max)?,
                sum: view(&forward.sum)?,
                ties: view(&forward.ties)?,
                out_residual: view(&forward.out_residual)?,
            };
            let (dout, dlse) = (dout.view()?, view(&dlse)?);
            // SAFETY: `check_outputs` has accepted the arrays, and each is viewed once
            let views = unsafe {
                BackwardViewMut {
                    dq: gradients.dq.view_mut()?,
                    dk: gradients.dk.view_mut()?,
                    dv: gradients.dv.view_mut()?,
                    dbias: view_mut(&gradients.dbias)?,
                    dsoftmax_aux: view_mut(&gradients.dsinks)?,
                }
            };
            let reports = self.session.run(py, || match engine {
                Engine::Local(ring) => {
                    ring.backward_into(&tensors, &forward, dout, dlse, views).map(<[_]>::to_vec)
                }
                #[cfg(feature = "mpi")]
                Engine::Rank(plan) => plan
                    .backward_into(&tensors, &forward, dout, dlse, views)
                    .map(|report| vec![report]),
                #[cfg(feature = "cuda")]
                Engine::Device(_) => Err(Error::internal("tensors in host memory")),
            })?;
            Ok(reports.iter().map(spelled).collect())
        })
    }

    fn jvp_of<T: Element>(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyDict>,
    ) -> Raises<Vec<PyReport>> {
        let (inputs, tangents) = (inputs(arrays)?, direction(arrays)?);
        let list_bias = list_bias_direction(arrays)?;
        let [out, lse, out_tangent, lse_tangent] = [
            needed(arrays, "out")?,
            needed(arrays, "lse")?,
            needed(arrays, "out_tangent")?,
            needed(arrays, "lse_tangent")?,
        ];
        let read: Vec<_> =
            inputs.as_ref().into_tensors().chain(tangents.as_ref().into_tensors()).collect();
        check_outputs(&[&out, &lse, &out_tangent, &lse_tangent], &read)?;
        self.session.with(|engine| {
            let (tensors, tangents) = (tensors::<T>(&inputs)?, tensors::<T>(&tangents)?);
            let jvp = self.session.run(py, || match engine {
                Engine::Local(ring) => ring.jvp(&tensors, &tangents, list_bias.as_deref()),
                #[cfg(feature = "mpi")]
                Engine::Rank(plan) => plan.jvp(&tensors, &tangents, list_bias.as_deref()),
                #[cfg(feature = "cuda")]
                Engine::Device(_) => Err(no_second_derivatives()),
            })?;
            // SAFETY: `check_outputs` has accepted the arrays, and each is viewed once
            unsafe {
                assign(&out, &jvp.out)?;
                assign(&lse, &jvp.lse)?;
                assign(&out_tangent, &jvp.out_tangent)?;
                assign(&lse_tangent, &jvp.lse_tangent)?;
            }
            Ok(jvp.reports.iter().map(spelled).collect())
        })
    }

    fn double_backward_of<T: Element>(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyDict>,
    ) -> Raises<Vec<PyReport>> {
        let (inputs, cotangents) = (inputs(arrays)?, direction(arrays)?);
        let list_bias = list_bias_direction(arrays)?;
        let (dout, dlse) = (needed(arrays, "dout")?, array(arrays, "dlse")?);
        let gradients = gradients(arrays)?;
        let (ddout, ddlse) = (needed(arrays, "ddout")?, needed(arrays, "ddlse")?);
        let read = inputs.as_ref().into_tensors().chain(cotangents.as_ref().into_tensors());
        let read: Vec<_> = read.chain([&dout]).chain(&dlse).collect();
        let written: Vec<_> = gradients.as_ref().into_tensors().chain([&ddout, &ddlse]).collect();
        check_outputs(&written, &read)?;
        self.session.with(|engine| {
            let (tensors, cotangents) = (tensors::<T>(&inputs)?, tensors::<T>(&cotangents)?);
            let (dout, dlse) = (dout.view()?, view(&dlse)?);
            let list_bias = list_bias.as_deref();
            let double = self.session.run(py, || match engine {
                Engine::Local(ring) => {
                    ring.double_backward(&tensors, dout, dlse, &cotangents, list_bias)
                }
                #[cfg(feature = "mpi")]
                Engine::Rank(plan) => {
                    plan.double_backward(&tensors, dout, dlse, &cotangents, list_bias)
                }
                #[cfg(feature = "cuda")]
                Engine::Device(_) => Err(no_second_derivatives()),
            })?;
            let of_inputs = &double.inputs;
            // SAFETY: `check_outputs` has accepted the arrays, and each is viewed once
            unsafe {
                assign(&gradients.dq, &of_inputs.dq)?;
                assign(&gradients.dk, &of_inputs.dk)?;
                assign(&gradients.dv, &of_inputs.dv)?;
                if let (Some(array), Some(dbias)) = (&gradients.dbias, &of_inputs.dbias) {
                    assign(array, dbias)?;
                }
                if let (Some(array), Some(dsinks)) = (&gradients.dsinks, &of_inputs.dsoftmax_aux) {
                    assign(array, dsinks)?;
                }
                assign(&ddout, &double.ddout)?;
                assign(&ddlse, &double.ddlse)?;
            }
            Ok(of_inputs.reports.iter().map(spelled).collect())
        })
    }
}

/// Copies a result to the array of a caller.
///
/// # Safety
/// As [`Array::view_mut`].
unsafe fn assign<T: Element, D: Dimension>(
    into: &Array<'_>,
    from: &ndarray::Array<T, D>,
) -> Result<()> {
    // SAFETY: as the caller promises
    let mut view: ArrayViewMut<'_, T, D> = unsafe { into.view_mut()? };
    if view.shape() != from.shape() {
        let got = format!("shape {:?}", view.shape());
        return Err(into.refuse(got, format!("{:?}", from.shape())));
    }
    view.assign(from);
    Ok(())
}

/// The refusal of second derivatives of tensors in device memory, which their plan repeats.
#[cfg(feature = "cuda")]
fn no_second_derivatives() -> Error {
    Error::unsupported("second_derivatives", "tensors in the memory of a GPU")
}

/// Reads q, k, v, bias and sinks.
fn inputs<'py>(arrays: &Bound<'py, PyDict>) -> Raises<Inputs<Array<'py>>> {
    Ok(Inputs {
        q: needed(arrays, "query")?,
        k: needed(arrays, "key")?,
        v: needed(arrays, "value")?,
        bias: array(arrays, "bias")?,
        sinks: array(arrays, "softmax_aux")?,
    })
}

/// Reads the direction of a JVP or a double backward.
fn direction<'py>(arrays: &Bound<'py, PyDict>) -> Raises<Inputs<Array<'py>>> {
    Ok(Inputs {
        q: needed(arrays, "query_direction")?,
        k: needed(arrays, "key_direction")?,
        v: needed(arrays, "value_direction")?,
        bias: array(arrays, "bias_direction")?,
        sinks: array(arrays, "softmax_aux_direction")?,
    })
}

/// Reads the direction of the bias of the key lists.
fn list_bias_direction(arrays: &Bound<'_, PyDict>) -> Raises<Option<Vec<f64>>> {
    let Some(numbers) = array(arrays, "list_bias_direction")? else { return Ok(None) };
    Ok(Some(numbers.view::<f64, Ix1>()?.to_vec()))
}

/// Reads the gradients of inputs, which a pass writes.
fn gradients<'py>(arrays: &Bound<'py, PyDict>) -> Raises<Gradients<Array<'py>>> {
    Ok(Gradients {
        dq: needed(arrays, "dq")?,
        dk: needed(arrays, "dk")?,
        dv: needed(arrays, "dv")?,
        dbias: array(arrays, "dbias")?,
        dsinks: array(arrays, "dsoftmax_aux")?,
    })
}

/// Reads the outputs of a forward pass, which a backward pass reads.
fn outputs<'py>(arrays: &Bound<'py, PyDict>) -> Raises<Outputs<Array<'py>>> {
    Ok(Outputs {
        out: needed(arrays, "out")?,
        lse: needed(arrays, "lse")?,
        max: array(arrays, "max")?,
        sum: array(arrays, "sum")?,
        ties: array(arrays, "ties")?,
        out_residual: array(arrays, "out_residual")?,
        statistics: array(arrays, "statistics")?,
        head_statistics: array(arrays, "head_statistics")?,
    })
}

/// Views inputs in host memory.
fn tensors<'a, T: Element>(inputs: &'a Inputs<Array<'_>>) -> Result<Tensors<'a, T>> {
    Ok(Tensors {
        q: inputs.q.view()?,
        k: inputs.k.view()?,
        v: inputs.v.view()?,
        bias: view(&inputs.bias)?,
        softmax_aux: view(&inputs.sinks)?,
    })
}

fn all_rows(len: usize) -> PyRuns {
    spelled_runs(&Runs::counting(0, len as u64))
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
) -> Raises<Bound<'py, PyDict>> {
    let (setup, _) = config.setup()?;
    let dims = Dims::from(lengths);
    let batch = batch(documents)?;
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
        Ok::<_, Error>((local(Side::Q), local(Side::Kv), layout, route))
    });
    let (q, kv, layout, route) = placed?;
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

/// Returns the rows of every rank in boxes of a grid.
#[pyfunction]
pub(crate) fn boxes(shape: Vec<u64>, ranks: usize) -> Raises<Vec<PyRuns>> {
    Ok(rows_of_ranks(&Layout::boxes(&shape, ranks)?, ranks))
}

/// Returns the rows of every rank of a graph.
#[pyfunction]
pub(crate) fn graph(indptr: Vec<i64>, indices: Vec<i64>, ranks: usize) -> Raises<Vec<PyRuns>> {
    Ok(rows_of_ranks(&Layout::graph(&indptr, &indices, ranks)?, ranks))
}

/// Returns the rows of every rank of a layout that lists them.
fn rows_of_ranks(layout: &Layout, ranks: usize) -> Vec<PyRuns> {
    (0..ranks).map(|rank| spelled_runs(&layout.shard(Side::Q, 0, rank, ranks))).collect()
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
