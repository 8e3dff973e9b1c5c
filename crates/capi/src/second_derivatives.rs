//! The JVP and the double backward.

use std::ffi::c_int;

use annulus::{BackwardViewMut, Element, Error, Result, Tensors};
use annulus_core::{Gradients, Inputs, TangentOutputs};
use ndarray::{Array3, Array4, ArrayViewMut, ArrayViewMut3, ArrayViewMut4, Dimension, Ix3, Ix4};

use crate::{
    batch::wide,
    fields::{self, Versioned},
    passes::{INPUTS, gradients, inputs, tensors, view},
    plan::{PLANS, ProcessPlan, annulus_plan, by_dtype},
    status::guard,
    tensor::{Checked, annulus_tensor, check_overlap},
};

/// The tensors of a JVP. Lengths and types: as of [`annulus_forward_args`].
///
/// [`annulus_forward_args`]: crate::annulus_forward_args
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_jvp_args {
    /// sizeof(annulus_jvp_args).
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
    /// Input as q: tangent of q.
    pub q_tangent: *const annulus_tensor,
    /// Input as k: tangent of k.
    pub k_tangent: *const annulus_tensor,
    /// Input as v: tangent of v.
    pub v_tangent: *const annulus_tensor,
    /// Input as bias: tangent of bias. NULL: 0.
    pub bias_tangent: *const annulus_tensor,
    /// Input as softmax_aux: tangent of softmax_aux. NULL: 0.
    pub softmax_aux_tangent: *const annulus_tensor,
    /// Output, as in the forward pass. NULL if it is not wanted.
    pub out: *const annulus_tensor,
    /// Output, as in the forward pass. NULL if it is not wanted.
    pub lse: *const annulus_tensor,
    /// Output as out: tangent of out.
    pub out_tangent: *const annulus_tensor,
    /// Output as lse: tangent of lse; 0 for a query without a visible key and without sinks.
    pub lse_tangent: *const annulus_tensor,
    /// Input as the batch's key_list_bias: tangent of it. NULL: 0.
    pub key_list_bias_tangent: *const annulus_tensor,
}

// SAFETY: repr(C), begins with its size, and pointers may be null
unsafe impl Versioned for annulus_jvp_args {
    const NAME: &'static str = "args";
    const FIRST_BYTES: usize = 120;
}

/// The tensors of a double backward. Lengths and types: as of [`annulus_forward_args`].
///
/// [`annulus_forward_args`]: crate::annulus_forward_args
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_double_backward_args {
    /// sizeof(annulus_double_backward_args).
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
    /// Input, as in the backward pass.
    pub dout: *const annulus_tensor,
    /// Input, as in the backward pass. NULL: 0.
    pub dlse: *const annulus_tensor,
    /// Input as q: cotangent of the dq of the backward pass.
    pub q_cotangent: *const annulus_tensor,
    /// Input as k: cotangent of its dk.
    pub k_cotangent: *const annulus_tensor,
    /// Input as v: cotangent of its dv.
    pub v_cotangent: *const annulus_tensor,
    /// Input as bias: cotangent of its dbias. NULL: 0.
    pub bias_cotangent: *const annulus_tensor,
    /// Input as softmax_aux: cotangent of its dsoftmax_aux. NULL: 0.
    pub softmax_aux_cotangent: *const annulus_tensor,
    /// Output as q: gradient with respect to q.
    pub dq: *const annulus_tensor,
    /// Output as k: gradient with respect to k.
    pub dk: *const annulus_tensor,
    /// Output as v: gradient with respect to v.
    pub dv: *const annulus_tensor,
    /// Output as bias: gradient with respect to bias. NULL without a bias.
    pub dbias: *const annulus_tensor,
    /// Output as softmax_aux: gradient with respect to softmax_aux. NULL without sinks.
    pub dsoftmax_aux: *const annulus_tensor,
    /// Output as out: gradient with respect to dout.
    pub ddout: *const annulus_tensor,
    /// Output as lse: gradient with respect to dlse.
    pub ddlse: *const annulus_tensor,
    /// Input as the batch's key_list_bias: cotangent of its gradient. NULL: 0. The gradient with
    /// respect to key_list_bias: annulus_plan_list_bias_gradient.
    pub key_list_bias_cotangent: *const annulus_tensor,
}

// SAFETY: repr(C), begins with its size, and pointers may be null
unsafe impl Versioned for annulus_double_backward_args {
    const NAME: &'static str = "args";
    const FIRST_BYTES: usize = 160;
}

/// Computes out, lse and their derivatives along the tangents of the inputs, by forward-mode
/// differentiation: a Jacobian-vector product.
///
/// Collective over the ranks. Outputs share no element with another tensor of the call.
///
/// # Errors
/// As [`annulus_forward`]; ANNULUS_INVALID_ARGUMENT also of a plan without
/// options.second_derivatives.
///
/// # Safety
/// As [`annulus_forward`].
///
/// [`annulus_forward`]: crate::annulus_forward
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_jvp(
    plan: *mut annulus_plan,
    args: *const annulus_jvp_args,
) -> c_int {
    guard(|| {
        // SAFETY: as the caller promises
        PLANS.with(plan, |state| unsafe { state.plan_mut()?.jvp(JvpArgs::read(args)) })
    })
}

/// Computes the gradients of [`annulus_backward`]'s gradients: those of the product of its dq, dk,
/// dv, dbias and dsoftmax_aux with their cotangents, with respect to the inputs, dout and dlse. It
/// needs no result of a forward pass.
///
/// dsoftmax_aux and dbias are summed over ranks as in the backward pass; their cotangents are then
/// the same on all ranks. Collective over the ranks. Outputs share no element with another tensor
/// of the call.
///
/// # Errors
/// As [`annulus_jvp`]; ANNULUS_INVALID_ARGUMENT also of a plan with options.forward_only.
///
/// # Safety
/// As [`annulus_forward`].
///
/// [`annulus_backward`]: crate::annulus_backward
/// [`annulus_forward`]: crate::annulus_forward
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_double_backward(
    plan: *mut annulus_plan,
    args: *const annulus_double_backward_args,
) -> c_int {
    guard(|| {
        // SAFETY: as the caller promises
        PLANS.with(plan, |state| unsafe {
            state.plan_mut()?.double_backward(DoubleBackwardArgs::read(args))
        })
    })
}

/// Tensors of a JVP. No output shares an element with another tensor.
struct JvpArgs {
    inputs: Inputs<Checked>,
    tangents: Inputs<Checked>,
    list_bias: Option<Vec<f64>>,
    outputs: TangentOutputs<Checked>,
}

impl JvpArgs {
    /// Reads and checks the arguments.
    ///
    /// # Safety
    /// As [`annulus_jvp`].
    unsafe fn read(args: *const annulus_jvp_args) -> Result<Self> {
        // SAFETY: as the caller promises
        let read = unsafe {
            let args = fields::read(args)?;
            let names =
                ["q_tangent", "k_tangent", "v_tangent", "bias_tangent", "softmax_aux_tangent"];
            let tangents = [
                args.q_tangent,
                args.k_tangent,
                args.v_tangent,
                args.bias_tangent,
                args.softmax_aux_tangent,
            ];
            Self {
                inputs: inputs(INPUTS, [args.q, args.k, args.v, args.bias, args.softmax_aux])?,
                tangents: inputs(names, tangents)?,
                list_bias: wide("key_list_bias_tangent", args.key_list_bias_tangent)?,
                outputs: TangentOutputs {
                    out_tangent: Checked::read("out_tangent", args.out_tangent)?,
                    lse_tangent: Checked::read("lse_tangent", args.lse_tangent)?,
                    out: Checked::read_optional("out", args.out)?,
                    lse: Checked::read_optional("lse", args.lse)?,
                },
            }
        };
        let given = || read.inputs.into_tensors().chain(read.tangents.into_tensors());
        check_overlap(given, || read.outputs.into_tensors())?;
        Ok(read)
    }
}

/// Tensors of a double backward. No output shares an element with another tensor.
struct DoubleBackwardArgs {
    inputs: Inputs<Checked>,
    cotangents: Inputs<Checked>,
    list_bias: Option<Vec<f64>>,
    dout: Checked,
    dlse: Option<Checked>,
    gradients: Gradients<Checked>,
    ddout: Checked,
    ddlse: Checked,
}

impl DoubleBackwardArgs {
    /// Reads and checks the arguments.
    ///
    /// # Safety
    /// As [`annulus_double_backward`].
    unsafe fn read(args: *const annulus_double_backward_args) -> Result<Self> {
        // SAFETY: as the caller promises
        let read = unsafe {
            let args = fields::read(args)?;
            let names = [
                "q_cotangent",
                "k_cotangent",
                "v_cotangent",
                "bias_cotangent",
                "softmax_aux_cotangent",
            ];
            let cotangents = [
                args.q_cotangent,
                args.k_cotangent,
                args.v_cotangent,
                args.bias_cotangent,
                args.softmax_aux_cotangent,
            ];
            Self {
                inputs: inputs(INPUTS, [args.q, args.k, args.v, args.bias, args.softmax_aux])?,
                cotangents: inputs(names, cotangents)?,
                list_bias: wide("key_list_bias_cotangent", args.key_list_bias_cotangent)?,
                dout: Checked::read("dout", args.dout)?,
                dlse: Checked::read_optional("dlse", args.dlse)?,
                gradients: gradients([args.dq, args.dk, args.dv, args.dbias, args.dsoftmax_aux])?,
                ddout: Checked::read("ddout", args.ddout)?,
                ddlse: Checked::read("ddlse", args.ddlse)?,
            }
        };
        let given = || {
            let of_inputs = read.inputs.into_tensors().chain(read.cotangents.into_tensors());
            of_inputs.chain([read.dout]).chain(read.dlse)
        };
        let written = || read.gradients.into_tensors().chain([read.ddout, read.ddlse]);
        check_overlap(given, written)?;
        Ok(read)
    }
}

/// Views an output whose shape follows from the inputs.
///
/// # Safety
/// As [`Checked::view_mut`].
unsafe fn output<'a, T: Element, D: Dimension>(
    tensor: Checked,
    shape: &[usize],
) -> Result<ArrayViewMut<'a, T, D>> {
    // SAFETY: as the caller promises
    let view: ArrayViewMut<'a, T, D> = unsafe { tensor.view_mut()? };
    if view.shape() == shape {
        return Ok(view);
    }
    let got = format!("{:?}", view.shape());
    Err(Error::invalid(format!("{}.dims", tensor.name), got, format!("{shape:?}")))
}

/// Views an output for each input that there is.
///
/// # Safety
/// As [`Checked::view_mut`].
unsafe fn optional_output<'a, T: Element, D: Dimension>(
    name: &str,
    tensor: Option<Checked>,
    shape: Option<&[usize]>,
) -> Result<Option<ArrayViewMut<'a, T, D>>> {
    match (tensor, shape) {
        // SAFETY: as the caller promises
        (Some(tensor), Some(shape)) => unsafe { output(tensor, shape).map(Some) },
        (None, None) => Ok(None),
        (Some(_), None) => Err(Error::invalid(name, "a tensor", "NULL: it has no input")),
        (None, Some(_)) => Err(Error::invalid(name, "NULL", "a tensor, as of its input")),
    }
}

/// Returns the shapes of out and lse.
fn shapes_of_outputs<T: Element>(tensors: &Tensors<'_, T>) -> ([usize; 4], [usize; 3]) {
    let (batch, q_len, q_heads, _) = tensors.q.dim();
    ([batch, q_len, q_heads, tensors.v.dim().3], [batch, q_heads, q_len])
}

impl ProcessPlan {
    /// Computes a JVP, or refuses it on all ranks.
    ///
    /// # Safety
    /// As [`annulus_jvp`].
    unsafe fn jvp(&mut self, args: Result<JvpArgs>) -> Result<()> {
        by_dtype!(self, T => {
            // SAFETY: as the caller promises; the views of outputs share no element with another
            let viewed = args.and_then(|JvpArgs { inputs, tangents, list_bias, outputs: to }| unsafe {
                let tensors = tensors::<T>(&inputs)?;
                let (vectors, rows) = shapes_of_outputs(&tensors);
                let out = to.out.map(|out| output::<T, Ix4>(out, &vectors)).transpose()?;
                let lse = to.lse.map(|lse| output::<_, Ix3>(lse, &rows)).transpose()?;
                let out_tangent = output::<T, Ix4>(to.out_tangent, &vectors)?;
                let lse_tangent = output(to.lse_tangent, &rows)?;
                let outputs = TangentViews { out_tangent, lse_tangent };
                let tangents = (self::tensors::<T>(&tangents)?, list_bias);
                Ok((tensors, tangents, out, lse, outputs))
            });
            let (tensors, (tangents, list_bias), out, lse, outputs) = self.admit(viewed)?;
            let list_bias = list_bias.as_deref();
            let jvp = match self {
                Self::Ring(ring) => ring.jvp(&tensors, &tangents, list_bias),
                Self::Rank(plan) => plan.jvp(&tensors, &tangents, list_bias),
                #[cfg(feature = "cuda")]
                Self::Device(_) => Err(on_device()),
            }?;
            if let Some(mut out) = out {
                out.assign(&jvp.out);
            }
            if let Some(mut lse) = lse {
                lse.assign(&jvp.lse);
            }
            outputs.assign(&jvp.out_tangent, &jvp.lse_tangent);
            Ok(())
        })
    }

    /// Computes a double backward, or refuses it on all ranks.
    ///
    /// # Safety
    /// As [`annulus_double_backward`].
    unsafe fn double_backward(&mut self, args: Result<DoubleBackwardArgs>) -> Result<()> {
        by_dtype!(self, T => {
            // SAFETY: as the caller promises; the views of outputs share no element with another
            let viewed = args.and_then(|args| unsafe {
                let tensors = tensors::<T>(&args.inputs)?;
                let (vectors, rows) = shapes_of_outputs(&tensors);
                let to = args.gradients;
                let bias = tensors.bias.as_ref().map(|bias| bias.shape());
                let sinks = tensors.softmax_aux.as_ref().map(|sinks| sinks.shape());
                let gradients = BackwardViewMut {
                    dq: output(to.dq, tensors.q.shape())?,
                    dk: output(to.dk, tensors.k.shape())?,
                    dv: output(to.dv, tensors.v.shape())?,
                    dbias: optional_output("dbias", to.dbias, bias)?,
                    dsoftmax_aux: optional_output("dsoftmax_aux", to.dsinks, sinks)?,
                };
                let outputs = TangentViews {
                    out_tangent: output::<T, Ix4>(args.ddout, &vectors)?,
                    lse_tangent: output(args.ddlse, &rows)?,
                };
                let cotangents = (self::tensors::<T>(&args.cotangents)?, args.list_bias);
                let cotangents_of = (cotangents, args.dout.view()?, view(args.dlse)?);
                Ok((tensors, cotangents_of, gradients, outputs))
            });
            let (tensors, (cotangents, dout, dlse), gradients, outputs) = self.admit(viewed)?;
            let (cotangents, list_bias) = cotangents;
            let list_bias = list_bias.as_deref();
            let double = match self {
                Self::Ring(ring) => {
                    ring.double_backward(&tensors, dout, dlse, &cotangents, list_bias)
                }
                Self::Rank(plan) => {
                    plan.double_backward(&tensors, dout, dlse, &cotangents, list_bias)
                }
                #[cfg(feature = "cuda")]
                Self::Device(_) => Err(on_device()),
            }?;
            let BackwardViewMut { mut dq, mut dk, mut dv, dbias, dsoftmax_aux } = gradients;
            dq.assign(&double.inputs.dq);
            dk.assign(&double.inputs.dk);
            dv.assign(&double.inputs.dv);
            if let (Some(mut into), Some(from)) = (dbias, &double.inputs.dbias) {
                into.assign(from);
            }
            if let (Some(mut into), Some(from)) = (dsoftmax_aux, &double.inputs.dsoftmax_aux) {
                into.assign(from);
            }
            outputs.assign(&double.ddout, &double.ddlse);
            Ok(())
        })
    }
}

/// Outputs that both passes have.
struct TangentViews<'a, T: Element> {
    out_tangent: ArrayViewMut4<'a, T>,
    lse_tangent: ArrayViewMut3<'a, T::Accumulator>,
}

impl<T: Element> TangentViews<'_, T> {
    fn assign(mut self, of_out: &Array4<T>, of_lse: &Array3<T::Accumulator>) {
        self.out_tangent.assign(of_out);
        self.lse_tangent.assign(of_lse);
    }
}

/// The refusal of tensors in device memory, whose plan is refused already.
#[cfg(feature = "cuda")]
fn on_device() -> Error {
    Error::unsupported("second_derivatives", "tensors in device memory")
}
