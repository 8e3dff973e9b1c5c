//! The forward and the backward pass.

use std::ffi::c_int;

#[cfg(feature = "cuda")]
use annulus::Error;
use annulus::{BackwardViewMut, Element, ForwardView, ForwardViewMut, Result, Tensors};
use ndarray::{ArrayView3, ArrayView4};

use crate::{
    overlap,
    plan::{PLANS, Pass, ProcessPlan, annulus_plan},
    status::guard,
    tensor::{Checked, annulus_tensor},
    versioned::{self, Versioned},
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
}

// SAFETY: repr(C), begins with its size, and pointers may be null
unsafe impl Versioned for annulus_forward_args {
    const NAME: &'static str = "args";
    const FIRST_BYTES: usize = 88;
}

// fields are appended, never removed
const _: () = assert!(size_of::<annulus_forward_args>() >= annulus_forward_args::FIRST_BYTES);

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

// fields are appended, never removed
const _: () = assert!(size_of::<annulus_backward_args>() >= annulus_backward_args::FIRST_BYTES);

/// Evaluates `$call` with `$element` bound to the element type of a plan or a cache.
macro_rules! by_dtype {
    ($planned:expr, $element:ident => $call:expr) => {
        match $planned.spec().dtype {
            annulus::DType::F32 => by_dtype!(@ $element, f32, $call),
            annulus::DType::F64 => by_dtype!(@ $element, f64, $call),
            annulus::DType::F16 => by_dtype!(@ $element, annulus::half::f16, $call),
            annulus::DType::Bf16 => by_dtype!(@ $element, annulus::half::bf16, $call),
        }
    };
    (@ $element:ident, $type:ty, $call:expr) => {{
        type $element = $type;
        $call
    }};
}
pub(crate) use by_dtype;

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
        // SAFETY: as the caller promises, for all four
        PLANS.with(plan, |state| unsafe {
            let planned = state.planned()?;
            #[cfg(feature = "cuda")]
            if planned.is_on_device() {
                let viewed =
                    ForwardArgs::read(args).and_then(|args| args.on_device(planned.spec()));
                return planned.forward_on_device(viewed);
            }
            by_dtype!(planned, T => planned.forward(forward_tensors::<T>(args)))
        })
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
        // SAFETY: as the caller promises, for all four
        PLANS.with(plan, |state| unsafe {
            let planned = state.planned()?;
            #[cfg(feature = "cuda")]
            if planned.is_on_device() {
                let viewed =
                    BackwardArgs::read(args).and_then(|args| args.on_device(planned.spec()));
                return planned.backward_on_device(viewed);
            }
            by_dtype!(planned, T => planned.backward(backward_tensors::<T>(args)))
        })
    })
}

/// Inputs of both passes.
struct GivenInputs {
    q: Checked,
    k: Checked,
    v: Checked,
    bias: Option<Checked>,
    softmax_aux: Option<Checked>,
}

impl GivenInputs {
    /// Reads `[q, k, v, bias, softmax_aux]`.
    ///
    /// # Safety
    /// As [`Checked::read`], for each.
    unsafe fn read([q, k, v, bias, softmax_aux]: [*const annulus_tensor; 5]) -> Result<Self> {
        // SAFETY: as the caller promises
        unsafe {
            Ok(Self {
                q: Checked::read("q", q)?,
                k: Checked::read("k", k)?,
                v: Checked::read("v", v)?,
                bias: Checked::read_optional("bias", bias)?,
                softmax_aux: Checked::read_optional("softmax_aux", softmax_aux)?,
            })
        }
    }

    const fn all(&self) -> [Option<Checked>; 5] {
        [Some(self.q), Some(self.k), Some(self.v), self.bias, self.softmax_aux]
    }

    /// Views them.
    ///
    /// # Safety
    /// As [`Checked::view4`], for each.
    unsafe fn view<'a, T: Element>(&self) -> Result<Tensors<'a, T>> {
        // SAFETY: as the caller promises
        unsafe {
            Ok(Tensors {
                q: self.q.view4()?,
                k: self.k.view4()?,
                v: self.v.view4()?,
                bias: self.bias.map(|bias| bias.view4()).transpose()?,
                softmax_aux: self.softmax_aux.map(|sinks| sinks.view2()).transpose()?,
            })
        }
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

/// Tensors of a forward pass. No output shares an element with another tensor.
struct ForwardArgs {
    inputs: GivenInputs,
    out: Checked,
    lse: Checked,
    max: Option<Checked>,
    sum: Option<Checked>,
    ties: Option<Checked>,
    out_residual: Option<Checked>,
}

impl ForwardArgs {
    /// Reads and checks the arguments.
    ///
    /// # Safety
    /// As [`annulus_forward`].
    unsafe fn read(args: *const annulus_forward_args) -> Result<Self> {
        // SAFETY: as the caller promises
        unsafe {
            let args = versioned::read(args)?;
            let read = Self {
                inputs: GivenInputs::read([args.q, args.k, args.v, args.bias, args.softmax_aux])?,
                out: Checked::read("out", args.out)?,
                lse: Checked::read("lse", args.lse)?,
                max: Checked::read_optional("max", args.max)?,
                sum: Checked::read_optional("sum", args.sum)?,
                ties: Checked::read_optional("ties", args.ties)?,
                out_residual: Checked::read_optional("out_residual", args.out_residual)?,
            };
            let Self { inputs, out, lse, max, sum, ties, out_residual } = &read;
            let outputs = [Some(*out), Some(*lse), *max, *sum, *ties, *out_residual];
            overlap::check(&inputs.all(), &outputs)?;
            Ok(read)
        }
    }
}

/// Tensors of a backward pass. No gradient shares an element with another tensor.
struct BackwardArgs {
    inputs: GivenInputs,
    out: Checked,
    lse: Checked,
    max: Option<Checked>,
    sum: Option<Checked>,
    ties: Option<Checked>,
    out_residual: Option<Checked>,
    dout: Checked,
    dlse: Option<Checked>,
    dq: Checked,
    dk: Checked,
    dv: Checked,
    dbias: Option<Checked>,
    dsoftmax_aux: Option<Checked>,
}

impl BackwardArgs {
    /// Reads and checks the arguments.
    ///
    /// # Safety
    /// As [`annulus_backward`].
    unsafe fn read(args: *const annulus_backward_args) -> Result<Self> {
        // SAFETY: as the caller promises
        unsafe {
            let args = versioned::read(args)?;
            let read = Self {
                inputs: GivenInputs::read([args.q, args.k, args.v, args.bias, args.softmax_aux])?,
                out: Checked::read("out", args.out)?,
                lse: Checked::read("lse", args.lse)?,
                max: Checked::read_optional("max", args.max)?,
                sum: Checked::read_optional("sum", args.sum)?,
                ties: Checked::read_optional("ties", args.ties)?,
                out_residual: Checked::read_optional("out_residual", args.out_residual)?,
                dout: Checked::read("dout", args.dout)?,
                dlse: Checked::read_optional("dlse", args.dlse)?,
                dq: Checked::read("dq", args.dq)?,
                dk: Checked::read("dk", args.dk)?,
                dv: Checked::read("dv", args.dv)?,
                dbias: Checked::read_optional("dbias", args.dbias)?,
                dsoftmax_aux: Checked::read_optional("dsoftmax_aux", args.dsoftmax_aux)?,
            };
            let Self { inputs, out, lse, max, sum, ties, out_residual, dout, dlse, .. } = &read;
            let gradients =
                [Some(read.dq), Some(read.dk), Some(read.dv), read.dbias, read.dsoftmax_aux];
            overlap::check(&inputs.all(), &gradients)?;
            let forward = [Some(*out), Some(*lse), *max, *sum, *ties, *out_residual];
            overlap::check(&forward, &gradients)?;
            overlap::check(&[Some(*dout), *dlse], &gradients)?;
            Ok(read)
        }
    }
}

/// Checks and views the tensors of a forward pass.
///
/// # Safety
/// As [`annulus_forward`].
unsafe fn forward_tensors<'a, T: Element>(
    args: *const annulus_forward_args,
) -> Result<ForwardCall<'a, T>> {
    // SAFETY: as the caller promises; the views of outputs share no element with another view
    unsafe {
        let ForwardArgs { inputs, out, lse, max, sum, ties, out_residual } =
            ForwardArgs::read(args)?;
        let outputs = ForwardViewMut {
            out: out.view4_mut()?,
            lse: lse.view3_mut()?,
            max: max.map(|max| max.view3_mut()).transpose()?,
            sum: sum.map(|sum| sum.view3_mut()).transpose()?,
            ties: ties.map(|ties| ties.view3_mut()).transpose()?,
            out_residual: out_residual.map(|residual| residual.view4_mut()).transpose()?,
        };
        Ok((inputs.view()?, outputs))
    }
}

/// Checks and views the tensors of a backward pass.
///
/// # Safety
/// As [`annulus_backward`].
unsafe fn backward_tensors<'a, T: Element>(
    args: *const annulus_backward_args,
) -> Result<BackwardCall<'a, T>> {
    // SAFETY: as of `forward_tensors`
    unsafe {
        let args = BackwardArgs::read(args)?;
        Ok(BackwardCall {
            tensors: args.inputs.view()?,
            forward: ForwardView {
                out: args.out.view4()?,
                lse: args.lse.view3()?,
                max: args.max.map(|max| max.view3()).transpose()?,
                sum: args.sum.map(|sum| sum.view3()).transpose()?,
                ties: args.ties.map(|ties| ties.view3()).transpose()?,
                out_residual: args.out_residual.map(|residual| residual.view4()).transpose()?,
            },
            dout: args.dout.view4()?,
            dlse: args.dlse.map(|dlse| dlse.view3()).transpose()?,
            gradients: BackwardViewMut {
                dq: args.dq.view4_mut()?,
                dk: args.dk.view4_mut()?,
                dv: args.dv.view4_mut()?,
                dbias: args.dbias.map(|dbias| dbias.view4_mut()).transpose()?,
                dsoftmax_aux: args.dsoftmax_aux.map(|dsinks| dsinks.view2_mut()).transpose()?,
            },
        })
    }
}

impl ProcessPlan {
    fn forward<T: Element>(&mut self, viewed: Result<ForwardCall<'_, T>>) -> Result<()> {
        let (tensors, outputs) = self.admit(viewed)?;
        match self {
            Self::Ring(ring) => ring.forward_into(&tensors, outputs).map(drop),
            Self::Rank(plan) => plan.forward_into(&tensors, outputs).map(drop),
            #[cfg(feature = "cuda")]
            Self::Device(_) => Err(Error::internal("tensors in host memory")),
        }
    }

    fn backward<T: Element>(&mut self, viewed: Result<BackwardCall<'_, T>>) -> Result<()> {
        let BackwardCall { tensors, forward, dout, dlse, gradients } = self.admit(viewed)?;
        match self {
            Self::Ring(ring) => {
                ring.backward_into(&tensors, &forward, dout, dlse, gradients).map(drop)
            }
            Self::Rank(plan) => {
                plan.backward_into(&tensors, &forward, dout, dlse, gradients).map(drop)
            }
            #[cfg(feature = "cuda")]
            Self::Device(_) => Err(Error::internal("tensors in host memory")),
        }
    }
}

/// Passes on tensors in device memory.
#[cfg(feature = "cuda")]
mod on_device {
    use annulus::{
        Spec,
        backend::cuda::device::{CudaView, CudaViewMut},
    };
    use annulus_core::{BackwardInputs, Gradients, Inputs, Outputs, max_and_sum};

    use super::{BackwardArgs, Checked, Error, ForwardArgs, ProcessPlan, Result};

    type Forward = (Inputs<CudaView<'static>>, Outputs<CudaViewMut<'static>>);
    type Backward = (BackwardInputs<CudaView<'static>>, Gradients<CudaViewMut<'static>>);

    impl super::GivenInputs {
        /// Views them.
        ///
        /// # Safety
        /// As [`Checked::device_view`], for each.
        unsafe fn on_device(&self, spec: &Spec) -> Result<Inputs<CudaView<'static>>> {
            let (element, sums) = (spec.dtype, spec.dtype.accumulator());
            // SAFETY: as the caller promises
            let of_sums = |tensor: Checked| unsafe { tensor.device_view(sums) };
            // SAFETY: as the caller promises
            unsafe {
                Ok(Inputs {
                    q: self.q.device_view(element)?,
                    k: self.k.device_view(element)?,
                    v: self.v.device_view(element)?,
                    bias: self.bias.map(of_sums).transpose()?,
                    sinks: self.softmax_aux.map(of_sums).transpose()?,
                })
            }
        }
    }

    impl ForwardArgs {
        /// Views the tensors.
        ///
        /// # Safety
        /// As [`Checked::device_view`] and [`Checked::device_view_mut`].
        pub(super) unsafe fn on_device(&self, spec: &Spec) -> Result<Forward> {
            let sums = spec.dtype.accumulator();
            // SAFETY: as the caller promises
            let of_sums = |tensor: Checked| unsafe { tensor.device_view_mut(sums) };
            // SAFETY: as the caller promises
            unsafe {
                let outputs = Outputs {
                    out: self.out.device_view_mut(spec.dtype)?,
                    lse: of_sums(self.lse)?,
                    max: self.max.map(of_sums).transpose()?,
                    sum: self.sum.map(of_sums).transpose()?,
                    ties: self.ties.map(of_sums).transpose()?,
                    out_residual: self
                        .out_residual
                        .map(|residual| residual.device_view_mut(spec.dtype))
                        .transpose()?,
                };
                Ok((self.inputs.on_device(spec)?, outputs))
            }
        }
    }

    impl BackwardArgs {
        /// Views the tensors.
        ///
        /// # Safety
        /// As [`Checked::device_view`] and [`Checked::device_view_mut`].
        pub(super) unsafe fn on_device(&self, spec: &Spec) -> Result<Backward> {
            let (element, sums) = (spec.dtype, spec.dtype.accumulator());
            // SAFETY: as the caller promises
            let read = |tensor: Checked| unsafe { tensor.device_view(sums) };
            // SAFETY: as the caller promises
            let written = |tensor: Checked| unsafe { tensor.device_view_mut(sums) };
            // SAFETY: as the caller promises
            unsafe {
                let optional = |tensor: Option<Checked>| tensor.map(read).transpose();
                let (max, sum) =
                    max_and_sum(read(self.lse)?, optional(self.max)?, optional(self.sum)?)?;
                let inputs = BackwardInputs {
                    forward: self.inputs.on_device(spec)?,
                    out: self.out.device_view(element)?,
                    max,
                    sum,
                    ties: optional(self.ties)?,
                    dout: self.dout.device_view(element)?,
                    dlse: optional(self.dlse)?,
                    out_residual: self
                        .out_residual
                        .map(|residual| residual.device_view(element))
                        .transpose()?,
                };
                let gradients = Gradients {
                    dq: self.dq.device_view_mut(element)?,
                    dk: self.dk.device_view_mut(element)?,
                    dv: self.dv.device_view_mut(element)?,
                    dbias: self.dbias.map(written).transpose()?,
                    dsinks: self.dsoftmax_aux.map(written).transpose()?,
                };
                Ok((inputs, gradients))
            }
        }
    }

    impl ProcessPlan {
        /// True if the tensors are in device memory.
        pub(super) const fn is_on_device(&self) -> bool {
            matches!(self, Self::Device(_))
        }

        pub(super) fn forward_on_device(&mut self, viewed: Result<Forward>) -> Result<()> {
            let (inputs, mut outputs) = self.admit(viewed)?;
            match self {
                Self::Device(plan) => plan.forward_in_place(inputs, &mut outputs).map(drop),
                _ => Err(Error::internal("tensors in device memory")),
            }
        }

        pub(super) fn backward_on_device(&mut self, viewed: Result<Backward>) -> Result<()> {
            let (inputs, mut gradients) = self.admit(viewed)?;
            match self {
                Self::Device(plan) => plan.backward_in_place(inputs, &mut gradients).map(drop),
                _ => Err(Error::internal("tensors in device memory")),
            }
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
        // SAFETY: as the caller promises, for all four
        PLANS.with(plan, |state| unsafe {
            let planned = state.planned()?;
            #[cfg(feature = "cuda")]
            if planned.is_on_device() {
                let viewed =
                    ForwardArgs::read(args).and_then(|args| args.on_device(planned.spec()));
                return state.start(Box::new(move |planned| planned.forward_on_device(viewed)));
            }
            let pass: Pass = by_dtype!(planned, T => {
                // checked now; the elements live until the pass has ended
                let viewed = forward_tensors::<'static, T>(args);
                Box::new(move |planned: &mut ProcessPlan| planned.forward(viewed))
            });
            state.start(pass)
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
        // SAFETY: as the caller promises, for all four
        PLANS.with(plan, |state| unsafe {
            let planned = state.planned()?;
            #[cfg(feature = "cuda")]
            if planned.is_on_device() {
                let viewed =
                    BackwardArgs::read(args).and_then(|args| args.on_device(planned.spec()));
                return state.start(Box::new(move |planned| planned.backward_on_device(viewed)));
            }
            let pass: Pass = by_dtype!(planned, T => {
                // checked now; the elements live until the pass has ended
                let viewed = backward_tensors::<'static, T>(args);
                Box::new(move |planned: &mut ProcessPlan| planned.backward(viewed))
            });
            state.start(pass)
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
        let done = versioned::check_pointer("done", done.cast_const())?;
        PLANS.with(plan, |state| {
            // SAFETY: not NULL, aligned, writable as the caller promises
            unsafe { done.write(0) };
            let ended = state.finish(false);
            if !matches!(ended, Ok(None)) {
                // SAFETY: as above
                unsafe { done.write(1) };
            }
            ended.map(drop)
        })
    })
}

/// Waits for the pass that was started, and returns its status.
///
/// # Errors
/// Those of the pass; ANNULUS_INVALID_ARGUMENT if none is under way.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_plan_wait(plan: *mut annulus_plan) -> c_int {
    guard(|| PLANS.with(plan, |state| state.finish(true).map(drop)))
}
