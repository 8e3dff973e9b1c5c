//! The forward and the backward pass.

use std::ffi::c_int;

use annulus::{
    BackwardViewMut, Element, ForwardView, ForwardViewMut, Result, Tensors, overlapped::Overlapped,
};
use annulus_core::{Gradients, Inputs, Outputs};
use ndarray::{ArrayView, ArrayView3, ArrayView4, ArrayViewMut, Dimension};

use crate::{
    fields::{self, Versioned, check_pointer},
    plan::{PLANS, ProcessPlan, annulus_plan, by_dtype},
    status::guard,
    tensor::{Checked, annulus_tensor, check_overlap},
};

/// The tensors of a forward pass. q_len and kv_len are those of the whole sequence in an in-process
/// ring, and the numbers of this rank's rows otherwise. T is the type of the options; A is f64 for
/// f64 and f32 for the others.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_forward_args {
    /// sizeof(annulus_forward_args).
    pub struct_size: u64,
    /// Input `[batch, q_len, q_heads, head_dim]`, T.
    pub q: *const annulus_tensor,
    /// Input `[batch, kv_len, kv_heads, head_dim]`, T.
    pub k: *const annulus_tensor,
    /// Input `[batch, kv_len, kv_heads, value_dim]`, T.
    pub v: *const annulus_tensor,
    /// Input, A: options.bias_dims, with this rank's queries and all keys. NULL without a bias.
    pub bias: *const annulus_tensor,
    /// Input `[q_heads or 1, sinks, 1, 1]`, A. NULL without sinks.
    pub softmax_aux: *const annulus_tensor,
    /// Output `[batch, q_len, q_heads, value_dim]`, T.
    pub out: *const annulus_tensor,
    /// Output `[batch, q_heads, q_len, 1]`, A: natural logarithm of the row sum of e^score.
    pub lse: *const annulus_tensor,
    /// Output as lse: row maximum. NULL without sum, of a normalised output. A backward pass that
    /// is given max and sum is exact also in rows whose scores share a large constant.
    pub max: *const annulus_tensor,
    /// Output as lse: row sum of e^(score - max). NULL without max, of a normalised output.
    pub sum: *const annulus_tensor,
    /// Output as lse: number of keys and sinks that share the maximum. NULL unless
    /// options.unnormalized is set.
    pub ties: *const annulus_tensor,
    /// Output as out: rounding residual of out, which is out before it was rounded - out, rounded.
    /// NULL if it is not wanted; of f16 and bf16 only. A backward pass that is given it has no
    /// error of the rounding of out.
    pub out_residual: *const annulus_tensor,
    /// Output `[batch, q_heads, q_len, 3]`, A: of each row the largest scale * q * k before bias and
    /// soft cap, the largest score after them, and the entropy of the probabilities. NULL unless
    /// options.statistics is set.
    pub statistics: *const annulus_tensor,
    /// Output `[q_heads, 3, 2, 1]`, A: maximum and mean of each of these over the rows of all ranks
    /// that have a visible key. NULL unless options.statistics is set.
    pub head_statistics: *const annulus_tensor,
}

// SAFETY: repr(C), begins with its size, and pointers may be null
unsafe impl Versioned for annulus_forward_args {
    const NAME: &'static str = "args";
    const FIRST_BYTES: usize = 88;
}

/// The tensors of a backward pass. Lengths and types: as of [`annulus_forward_args`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_backward_args {
    /// sizeof(annulus_backward_args).
    pub struct_size: u64,
    /// Input, as in the forward pass.
    pub q: *const annulus_tensor,
    /// Input, as in the forward pass.
    pub k: *const annulus_tensor,
    /// Input, as in the forward pass.
    pub v: *const annulus_tensor,
    /// Input, as in the forward pass.
    pub bias: *const annulus_tensor,
    /// Input, as in the forward pass.
    pub softmax_aux: *const annulus_tensor,
    /// Input: output of the forward pass.
    pub out: *const annulus_tensor,
    /// Input: output of the forward pass.
    pub lse: *const annulus_tensor,
    /// Input: output of the forward pass. NULL without sum, of a normalised output: probabilities
    /// are then e^(score - lse), wrong by a factor e^x with |x| up to 2^-24 |lse| in f32.
    pub max: *const annulus_tensor,
    /// Input: output of the forward pass. NULL unless options.unnormalized is set.
    pub ties: *const annulus_tensor,
    /// Input as out: gradient of the loss by out.
    pub dout: *const annulus_tensor,
    /// Input as lse: gradient of the loss by lse. NULL: 0.
    pub dlse: *const annulus_tensor,
    /// Output as q.
    pub dq: *const annulus_tensor,
    /// Output as k.
    pub dk: *const annulus_tensor,
    /// Output as v.
    pub dv: *const annulus_tensor,
    /// Output as bias. NULL without a bias.
    pub dbias: *const annulus_tensor,
    /// Output as softmax_aux. NULL without sinks.
    pub dsoftmax_aux: *const annulus_tensor,
    /// Input: output of the forward pass. NULL without max, of a normalised output.
    pub sum: *const annulus_tensor,
    /// Input: output of the forward pass. NULL: 0, so that dq of f16 and bf16 is off where all keys
    /// share a large component.
    pub out_residual: *const annulus_tensor,
}

// SAFETY: repr(C), begins with its size, and pointers may be null
unsafe impl Versioned for annulus_backward_args {
    const NAME: &'static str = "args";
    const FIRST_BYTES: usize = 136;
}

/// Computes out and lse, in place. Reads and writes the caller's tensors and copies none of them,
/// except the rows of an in-process ring whose ranks hold several ranges of rows (zigzag).
///
/// Collective over the ranks. Outputs share no element with another tensor of the call.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT here and ANNULUS_REFUSED elsewhere if a tensor does not fit the plan,
/// and ANNULUS_RANK_MISMATCH: nothing was written, the plan lives. ANNULUS_ARRIVAL_TIMEOUT:
/// likewise, and the call is to be made again with the same arguments, before the other ranks judge
/// this one to be silent (options.deadline_seconds). ANNULUS_COMM, ANNULUS_TIMEOUT,
/// ANNULUS_PEER_LOST, ANNULUS_ABORTED, ANNULUS_DEVICE and ANNULUS_INTERNAL end the plan: later
/// calls return ANNULUS_POISONED. A handle that is not alive is refused locally, without the other
/// ranks.
///
/// # Safety
/// `args` points to initialised arguments, which point to tensors whose elements are allocated and
/// which nobody else writes to during the call; outputs are not read either.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_forward(
    plan: *mut annulus_plan,
    args: *const annulus_forward_args,
) -> c_int {
    guard(|| {
        // SAFETY: as the caller promises
        PLANS.with(plan, |state| unsafe { state.plan_mut()?.forward(ForwardArgs::read(args)) })
    })
}

/// Computes the gradients, in place, from the inputs and outputs of the forward pass.
///
/// dsoftmax_aux, and dbias if it is broadcast over queries, are sums over all ranks, unless
/// options.local_gradients is set. Collective over the ranks. Outputs share no element with another
/// tensor of the call.
///
/// # Errors
/// As [`annulus_forward`]; ANNULUS_INVALID_ARGUMENT also of a plan with options.forward_only.
///
/// # Safety
/// As [`annulus_forward`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_backward(
    plan: *mut annulus_plan,
    args: *const annulus_backward_args,
) -> c_int {
    guard(|| {
        // SAFETY: as the caller promises
        PLANS.with(plan, |state| unsafe { state.plan_mut()?.backward(BackwardArgs::read(args)) })
    })
}

/// Names of the inputs of both passes.
pub(crate) const INPUTS: [&str; 5] = ["q", "k", "v", "bias", "softmax_aux"];

/// Reads the tensors of these names: the inputs, or a direction of them.
///
/// # Safety
/// As [`Checked::read`], for each.
pub(crate) unsafe fn inputs(
    names: [&'static str; 5],
    [q, k, v, bias, sinks]: [*const annulus_tensor; 5],
) -> Result<Inputs<Checked>> {
    // SAFETY: as the caller promises
    unsafe {
        Ok(Inputs {
            q: Checked::read(names[0], q)?,
            k: Checked::read(names[1], k)?,
            v: Checked::read(names[2], v)?,
            bias: Checked::read_optional(names[3], bias)?,
            sinks: Checked::read_optional(names[4], sinks)?,
        })
    }
}

/// Reads `[dq, dk, dv, dbias, dsoftmax_aux]`.
///
/// # Safety
/// As [`Checked::read`], for each.
pub(crate) unsafe fn gradients(
    [dq, dk, dv, dbias, dsinks]: [*const annulus_tensor; 5],
) -> Result<Gradients<Checked>> {
    // SAFETY: as the caller promises
    unsafe {
        Ok(Gradients {
            dq: Checked::read("dq", dq)?,
            dk: Checked::read("dk", dk)?,
            dv: Checked::read("dv", dv)?,
            dbias: Checked::read_optional("dbias", dbias)?,
            dsinks: Checked::read_optional("dsoftmax_aux", dsinks)?,
        })
    }
}

/// Reads `[out, lse, max, sum, ties, out_residual]`.
///
/// # Safety
/// As [`Checked::read`], for each.
unsafe fn outputs(
    [out, lse, max, sum, ties, out_residual]: [*const annulus_tensor; 6],
) -> Result<Outputs<Checked>> {
    // SAFETY: as the caller promises
    unsafe {
        Ok(Outputs {
            out: Checked::read("out", out)?,
            lse: Checked::read("lse", lse)?,
            max: Checked::read_optional("max", max)?,
            sum: Checked::read_optional("sum", sum)?,
            ties: Checked::read_optional("ties", ties)?,
            out_residual: Checked::read_optional("out_residual", out_residual)?,
            statistics: None,
            head_statistics: None,
        })
    }
}

/// Tensors of a forward pass. No output shares an element with another tensor.
struct ForwardArgs {
    inputs: Inputs<Checked>,
    outputs: Outputs<Checked>,
}

impl ForwardArgs {
    /// Reads and checks the arguments.
    ///
    /// # Safety
    /// As [`annulus_forward`].
    unsafe fn read(args: *const annulus_forward_args) -> Result<Self> {
        // SAFETY: as the caller promises
        let (inputs, outputs) = unsafe {
            let args = fields::read(args)?;
            let written =
                outputs([args.out, args.lse, args.max, args.sum, args.ties, args.out_residual])?;
            let written = Outputs {
                statistics: Checked::read_optional("statistics", args.statistics)?,
                head_statistics: Checked::read_optional("head_statistics", args.head_statistics)?,
                ..written
            };
            (inputs(INPUTS, [args.q, args.k, args.v, args.bias, args.softmax_aux])?, written)
        };
        check_overlap(|| inputs.into_tensors(), || outputs.into_tensors())?;
        Ok(Self { inputs, outputs })
    }
}

/// Tensors of a backward pass. No gradient shares an element with another tensor.
struct BackwardArgs {
    inputs: Inputs<Checked>,
    /// Outputs of the forward pass.
    forward: Outputs<Checked>,
    dout: Checked,
    dlse: Option<Checked>,
    gradients: Gradients<Checked>,
}

impl BackwardArgs {
    /// Reads and checks the arguments.
    ///
    /// # Safety
    /// As [`annulus_backward`].
    unsafe fn read(args: *const annulus_backward_args) -> Result<Self> {
        // SAFETY: as the caller promises
        let read = unsafe {
            let args = fields::read(args)?;
            Self {
                inputs: inputs(INPUTS, [args.q, args.k, args.v, args.bias, args.softmax_aux])?,
                forward: outputs([
                    args.out,
                    args.lse,
                    args.max,
                    args.sum,
                    args.ties,
                    args.out_residual,
                ])?,
                dout: Checked::read("dout", args.dout)?,
                dlse: Checked::read_optional("dlse", args.dlse)?,
                gradients: gradients([args.dq, args.dk, args.dv, args.dbias, args.dsoftmax_aux])?,
            }
        };
        let given = || {
            let of_forward = read.inputs.into_tensors().chain(read.forward.into_tensors());
            of_forward.chain([read.dout]).chain(read.dlse)
        };
        check_overlap(given, || read.gradients.into_tensors())?;
        Ok(read)
    }
}

/// Views an input that there may be.
///
/// # Safety
/// As [`Checked::view`].
pub(crate) unsafe fn view<'a, T: Element, D: Dimension>(
    tensor: Option<Checked>,
) -> Result<Option<ArrayView<'a, T, D>>> {
    // SAFETY: as the caller promises
    tensor.map(|tensor| unsafe { tensor.view() }).transpose()
}

/// Views an output that there may be.
///
/// # Safety
/// As [`Checked::view_mut`].
unsafe fn view_mut<'a, T: Element, D: Dimension>(
    tensor: Option<Checked>,
) -> Result<Option<ArrayViewMut<'a, T, D>>> {
    // SAFETY: as the caller promises
    tensor.map(|tensor| unsafe { tensor.view_mut() }).transpose()
}

/// Views the inputs of both passes.
///
/// # Safety
/// As [`Checked::view`], for each.
pub(crate) unsafe fn tensors<'a, T: Element>(inputs: &Inputs<Checked>) -> Result<Tensors<'a, T>> {
    // SAFETY: as the caller promises
    unsafe {
        Ok(Tensors {
            q: inputs.q.view()?,
            k: inputs.k.view()?,
            v: inputs.v.view()?,
            bias: view(inputs.bias)?,
            softmax_aux: view(inputs.sinks)?,
        })
    }
}

/// Views of a forward pass.
type ForwardCall<'a, T> = (Tensors<'a, T>, ForwardViewMut<'a, T>);

/// Views of a backward pass.
struct BackwardCall<'a, T: Element> {
    tensors: Tensors<'a, T>,
    forward: ForwardView<'a, T>,
    dout: ArrayView4<'a, T>,
    dlse: Option<ArrayView3<'a, T::Accumulator>>,
    gradients: BackwardViewMut<'a, T>,
}

impl ForwardArgs {
    /// Views the tensors in host memory.
    ///
    /// # Safety
    /// As [`annulus_forward`].
    unsafe fn on_host<'a, T: Element>(&self) -> Result<ForwardCall<'a, T>> {
        let Outputs { out, lse, max, sum, ties, out_residual, statistics, head_statistics } =
            self.outputs;
        // SAFETY: as the caller promises; the views of outputs share no element with another view
        unsafe {
            let outputs = ForwardViewMut {
                out: out.view_mut()?,
                lse: lse.view_mut()?,
                max: view_mut(max)?,
                sum: view_mut(sum)?,
                ties: view_mut(ties)?,
                out_residual: view_mut(out_residual)?,
                statistics: view_mut(statistics)?,
                head_statistics: view_mut(head_statistics)?,
            };
            Ok((tensors(&self.inputs)?, outputs))
        }
    }
}

impl BackwardArgs {
    /// Views the tensors in host memory.
    ///
    /// # Safety
    /// As [`annulus_backward`].
    unsafe fn on_host<'a, T: Element>(&self) -> Result<BackwardCall<'a, T>> {
        let Outputs { out, lse, max, sum, ties, out_residual, .. } = self.forward;
        let Gradients { dq, dk, dv, dbias, dsinks } = self.gradients;
        // SAFETY: as of `ForwardArgs::on_host`
        unsafe {
            Ok(BackwardCall {
                tensors: tensors(&self.inputs)?,
                forward: ForwardView {
                    out: out.view()?,
                    lse: lse.view()?,
                    max: view(max)?,
                    sum: view(sum)?,
                    ties: view(ties)?,
                    out_residual: view(out_residual)?,
                },
                dout: self.dout.view()?,
                dlse: view(self.dlse)?,
                gradients: BackwardViewMut {
                    dq: dq.view_mut()?,
                    dk: dk.view_mut()?,
                    dv: dv.view_mut()?,
                    dbias: view_mut(dbias)?,
                    dsoftmax_aux: view_mut(dsinks)?,
                },
            })
        }
    }
}

impl ProcessPlan {
    /// Computes a forward pass, or refuses it on all ranks.
    ///
    /// # Safety
    /// As [`annulus_forward`].
    unsafe fn forward(&mut self, args: Result<ForwardArgs>) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Self::Device(plan) = self {
            // SAFETY: as the caller promises
            let viewed = args.and_then(|args| unsafe { args.on_device() });
            let (inputs, mut outputs) = viewed.map_err(|error| plan.refuse(error))?;
            return plan.forward_in_place(inputs, &mut outputs).map(drop);
        }
        by_dtype!(self, T => {
            // SAFETY: as the caller promises
            let viewed = args.and_then(|args| unsafe { args.on_host::<T>() });
            let (tensors, outputs) = self.admit(viewed)?;
            match self {
                Self::Ring(ring) => ring.forward_into(&tensors, outputs).map(drop),
                Self::Rank(plan) => plan.forward_into(&tensors, outputs).map(drop),
                #[cfg(feature = "cuda")]
                Self::Device(_) => Err(annulus::Error::internal("tensors in host memory")),
            }
        })
    }

    /// Computes a backward pass, or refuses it on all ranks.
    ///
    /// # Safety
    /// As [`annulus_backward`].
    unsafe fn backward(&mut self, args: Result<BackwardArgs>) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Self::Device(plan) = self {
            // SAFETY: as the caller promises
            let viewed = args.and_then(|args| unsafe { args.on_device() });
            let (inputs, mut gradients) = viewed.map_err(|error| plan.refuse(error))?;
            return plan.backward_in_place(inputs, &mut gradients).map(drop);
        }
        by_dtype!(self, T => {
            // SAFETY: as the caller promises
            let viewed = args.and_then(|args| unsafe { args.on_host::<T>() });
            let BackwardCall { tensors, forward, dout, dlse, gradients } = self.admit(viewed)?;
            match self {
                Self::Ring(ring) => {
                    ring.backward_into(&tensors, &forward, dout, dlse, gradients).map(drop)
                }
                Self::Rank(plan) => {
                    plan.backward_into(&tensors, &forward, dout, dlse, gradients).map(drop)
                }
                #[cfg(feature = "cuda")]
                Self::Device(_) => Err(annulus::Error::internal("tensors in host memory")),
            }
        })
    }
}

/// Passes on tensors in device memory.
#[cfg(feature = "cuda")]
mod on_device {
    use annulus::backend::cuda::device::{CudaView, CudaViewMut};
    use annulus_core::{BackwardInputs, Gradients, Inputs, Outputs, max_and_sum};

    use super::{BackwardArgs, Checked, ForwardArgs, Result};

    type Forward = (Inputs<CudaView<'static>>, Outputs<CudaViewMut<'static>>);
    type Backward = (BackwardInputs<CudaView<'static>>, Gradients<CudaViewMut<'static>>);

    impl ForwardArgs {
        /// Views the tensors. The plan checks their element types and shapes.
        ///
        /// # Safety
        /// As [`Checked::device_view`] and [`Checked::device_view_mut`].
        pub(super) unsafe fn on_device(&self) -> Result<Forward> {
            // SAFETY: as the caller promises
            let read = |tensor: Checked| unsafe { tensor.device_view() };
            // SAFETY: as the caller promises
            let written = |tensor: Checked| unsafe { tensor.device_view_mut() };
            Ok((self.inputs.try_map(read)?, self.outputs.try_map(written)?))
        }
    }

    impl BackwardArgs {
        /// Views the tensors. The plan checks their element types and shapes.
        ///
        /// # Safety
        /// As [`Checked::device_view`] and [`Checked::device_view_mut`].
        pub(super) unsafe fn on_device(&self) -> Result<Backward> {
            let Outputs { out, lse, max, sum, ties, out_residual, .. } = self.forward;
            let (max, sum) = max_and_sum(lse, max, sum)?;
            let (forward, dout, dlse) = (self.inputs, self.dout, self.dlse);
            let inputs = BackwardInputs { forward, out, max, sum, ties, out_residual, dout, dlse };
            // SAFETY: as the caller promises
            let read = |tensor: Checked| unsafe { tensor.device_view() };
            // SAFETY: as the caller promises
            let written = |tensor: Checked| unsafe { tensor.device_view_mut() };
            Ok((inputs.try_map(read)?, self.gradients.try_map(written)?))
        }
    }
}

/// Starts [`annulus_forward`] on a thread of its own, so that the program can do something else.
///
/// [`annulus_plan_test`] or [`annulus_plan_wait`] ends the pass and returns its status, also that
/// of tensors that do not fit. Until then no other call uses the plan. `args` and its tensor
/// structs are copied; the elements are not.
///
/// Collective over the ranks, which may start or call the pass. Over MPI it needs
/// MPI_THREAD_MULTIPLE.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT for a plan that is not alive or has a pass under way,
/// ANNULUS_UNSUPPORTED below MPI_THREAD_MULTIPLE, ANNULUS_DEVICE if no thread starts: the pass is
/// not started, and the other ranks get no message.
///
/// # Safety
/// As [`annulus_forward`]; the elements live, and nobody else writes inputs or touches outputs,
/// until the pass has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_forward_start(
    plan: *mut annulus_plan,
    args: *const annulus_forward_args,
) -> c_int {
    guard(|| {
        PLANS.with(plan, |state| {
            state.plan_mut()?;
            // SAFETY: as the caller promises; checked now, viewed when the pass runs
            let read = unsafe { ForwardArgs::read(args) };
            // SAFETY: as the caller promises: the elements live until the pass has ended
            state.start(move |planned| unsafe { planned.forward(read) })
        })
    })
}

/// Starts [`annulus_backward`] on a thread of its own. Rules: as of [`annulus_forward_start`].
///
/// # Errors
/// As [`annulus_forward_start`].
///
/// # Safety
/// As [`annulus_forward_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_backward_start(
    plan: *mut annulus_plan,
    args: *const annulus_backward_args,
) -> c_int {
    guard(|| {
        PLANS.with(plan, |state| {
            state.plan_mut()?;
            // SAFETY: as the caller promises; checked now, viewed when the pass runs
            let read = unsafe { BackwardArgs::read(args) };
            // SAFETY: as the caller promises: the elements live until the pass has ended
            state.start(move |planned| unsafe { planned.backward(read) })
        })
    })
}

/// Writes 1 to `*done` and returns the status of the pass if the pass that was started has ended;
/// else writes 0 and returns 0. Does not wait. Local.
///
/// # Errors
/// Those of the pass; ANNULUS_INVALID_ARGUMENT if none is under way.
///
/// # Safety
/// `done` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_plan_test(plan: *mut annulus_plan, done: *mut i32) -> c_int {
    guard(|| {
        let done = check_pointer("done", done.cast_const())?;
        PLANS.with(plan, |state| {
            let has_ended = state.test();
            // SAFETY: not NULL, aligned, writable as the caller promises
            unsafe { done.write(has_ended.into()) };
            if has_ended { state.wait() } else { Ok(()) }
        })
    })
}

/// Waits for the pass that was started, and returns its status.
///
/// # Errors
/// Those of the pass; ANNULUS_INVALID_ARGUMENT if none is under way.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_plan_wait(plan: *mut annulus_plan) -> c_int {
    guard(|| PLANS.with(plan, Overlapped::wait))
}
