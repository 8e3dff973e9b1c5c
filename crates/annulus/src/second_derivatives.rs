//! Second derivatives: the JVP and the double backward of plans and of rings in one process.

use std::sync::Arc;

use annulus_comm::{ring::Report, threads::each_rank};
use annulus_core::{
    Dims, Element, Error, KeyLists, Result, TangentInputs, TangentOutputs, index, memory,
};
use ndarray::{Array3, Array4, ArrayView3, ArrayView4, Axis};

use crate::{
    Backward, LocalRing, Plan, Tensors,
    local_ring::entries_of,
    plan::{gradient_views, inputs, rows, rows_mut, zero_gradients},
    rank_tensors::{RankTensors, get_rows, put_rows},
};

/// Outputs of a JVP: out, lse, and their derivatives along the tangents of the inputs.
///
/// # Shapes
/// out, out_tangent `[batch, q_len, q_heads, dv]` · lse, lse_tangent `[batch, q_heads, q_len]`
#[derive(Debug, Clone, PartialEq)]
pub struct Jvp<T: Element> {
    /// The output.
    pub out: Array4<T>,
    /// lse, as [`crate::Forward::lse`].
    pub lse: Array3<T::Accumulator>,
    /// Tangent of out.
    pub out_tangent: Array4<T>,
    /// Tangent of lse; 0 for a query without a visible key and without sinks.
    pub lse_tangent: Array3<T::Accumulator>,
    /// Times and bytes, one report per rank of this process.
    pub reports: Vec<Report>,
}

/// Gradients of a double backward, each with the shape and type of its input.
#[derive(Debug, Clone, PartialEq)]
pub struct DoubleBackward<T: Element> {
    /// Gradients with respect to q, k, v, bias and softmax_aux, with the reports of the pass.
    pub inputs: Backward<T>,
    /// Gradient with respect to dout: the tangent of out along the cotangents.
    pub ddout: Array4<T>,
    /// Gradient with respect to dlse: the tangent of lse along the cotangents.
    pub ddlse: Array3<T::Accumulator>,
}

impl Plan {
    /// Computes out, lse and their derivatives along `tangents`, by forward-mode differentiation. A
    /// bias or sinks without a tangent have the tangent 0; so has the bias of the key lists without
    /// `list_bias_tangent`.
    ///
    /// # Shapes
    /// [`Tensors`] and [`Jvp`], with this rank's rows; `tangents` as `tensors`; `list_bias_tangent`
    /// `[listed pairs]` of this rank's queries, in the order of
    /// [`KeyLists`](crate::mask::KeyLists).
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::forward`]; [`Error::InvalidArgument`] also of a plan without
    /// [`Attention::second_derivatives`](crate::Attention::second_derivatives).
    ///
    /// # Source
    /// Griewank and Walther 2008, section 3.1, applied to the online softmax; derived in
    /// `docs/semantics.md` in the repository.
    ///
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    pub fn jvp<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        tangents: &Tensors<'_, T>,
        list_bias_tangent: Option<&[f64]>,
    ) -> Result<Jvp<T>> {
        let zeros = zero_jvp(self);
        let mut jvp = zeros.map_err(|error| self.engine.refuse(error))?;
        let inputs = TangentInputs {
            primal: inputs(tensors),
            tangent: inputs(tangents),
            dout: None,
            dlse: None,
        };
        let mut outputs = TangentOutputs {
            out_tangent: T::view_mut(jvp.out_tangent.view_mut()),
            lse_tangent: rows_mut::<T>(jvp.lse_tangent.view_mut()),
            out: Some(T::view_mut(jvp.out.view_mut())),
            lse: Some(rows_mut::<T>(jvp.lse.view_mut())),
        };
        let report = self.engine.jvp(inputs, list_bias_tangent, &mut outputs)?;
        jvp.reports.push(report);
        Ok(jvp)
    }

    /// Computes the gradients of [`Plan::backward`]'s gradients: those of ⟨`cotangents`, (dq, dk,
    /// dv, dbias, dsoftmax_aux)⟩ with respect to the inputs, dout and dlse. A bias or sinks without
    /// a cotangent have the cotangent 0; so has the bias of the key lists without
    /// `list_bias_cotangent`, whose gradient [`Plan::list_bias_gradient`] then has.
    ///
    /// It needs no result of a forward pass, which it computes again.
    ///
    /// The gradients of sinks, and of a bias that is broadcast over queries, are summed over all
    /// ranks as those of [`Plan::backward`] are. Their cotangents are the same on all ranks.
    ///
    /// # Shapes
    /// `cotangents` as `tensors`, dout and dlse as of [`Plan::backward`]; [`DoubleBackward`] with
    /// this rank's rows; `list_bias_cotangent` as `list_bias_tangent` of [`Plan::jvp`].
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::jvp`]; [`Error::InvalidArgument`] also of a plan that is forward only.
    ///
    /// # Source
    /// Pearlmutter 1994, Fast Exact Multiplication by the Hessian: the tangent of the gradient.
    ///
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    pub fn double_backward<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
        cotangents: &Tensors<'_, T>,
        list_bias_cotangent: Option<&[f64]>,
    ) -> Result<DoubleBackward<T>> {
        let zeros = zero_double_backward(self, tensors);
        let mut double = zeros.map_err(|error| self.engine.refuse(error))?;
        let inputs = TangentInputs {
            primal: inputs(tensors),
            tangent: inputs(cotangents),
            dout: Some(T::view(dout)),
            dlse: dlse.map(rows::<T>),
        };
        let mut outputs = TangentOutputs {
            out_tangent: T::view_mut(double.ddout.view_mut()),
            lse_tangent: rows_mut::<T>(double.ddlse.view_mut()),
            out: None,
            lse: None,
        };
        let mut gradients = gradient_views(double.inputs.view_mut());
        let list_bias = list_bias_cotangent;
        let report =
            self.engine.double_backward(inputs, list_bias, &mut outputs, &mut gradients)?;
        double.inputs.reports.push(report);
        Ok(double)
    }
}

/// Names the tangent of a tensor, as a plan of one rank does.
fn of_tangent(error: Error) -> Error {
    match error {
        Error::InvalidArgument { argument, got, want } => {
            Error::invalid(format!("tangent of {argument}"), got, want)
        }
        error => error,
    }
}

impl LocalRing {
    /// Computes out, lse and their derivatives along `tangents`, as [`Plan::jvp`].
    ///
    /// # Shapes
    /// [`Tensors`] and [`Jvp`], with all rows; `tangents` as `tensors`; `list_bias_tangent` of all
    /// listed pairs.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// As [`LocalRing::forward`] and [`Plan::jvp`].
    pub fn jvp<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        tangents: &Tensors<'_, T>,
        list_bias_tangent: Option<&[f64]>,
    ) -> Result<Jvp<T>> {
        self.check(tensors)?;
        self.check(tangents).map_err(of_tangent)?;
        let list_bias = self.list_bias_direction(list_bias_tangent)?;
        // for the same time
        let (tensors, tangents) = (&tensors.reborrow(), &tangents.reborrow());
        let parts = each_rank(&mut self.ranks, |_, plan| {
            let of_rank = |whole| RankTensors::of(whole, plan.q_rows(), plan.kv_rows());
            match of_rank(tensors).and_then(|of| Ok((of, of_rank(tangents)?))) {
                Ok((tensors, tangents)) => {
                    let list_bias = of_listed_pairs(plan, list_bias.as_ref());
                    plan.jvp(&tensors.tensors(), &tangents.tensors(), list_bias.as_deref())
                }
                Err(error) => Err(plan.engine.refuse(error)),
            }
        })?;
        let mut whole = zero_outputs(self.plan(), self.plan().spec().dims.q_len)?;
        for (part, plan) in parts.iter().zip(&self.ranks) {
            let rows = plan.q_rows();
            put_rows(&mut whole.out.view_mut(), Axis(1), rows, part.out.view());
            put_rows(&mut whole.out_tangent.view_mut(), Axis(1), rows, part.out_tangent.view());
            put_rows(&mut whole.lse.view_mut(), Axis(2), rows, part.lse.view());
            put_rows(&mut whole.lse_tangent.view_mut(), Axis(2), rows, part.lse_tangent.view());
        }
        whole.reports = parts.into_iter().flat_map(|part| part.reports).collect();
        Ok(whole)
    }

    /// Computes the gradients of [`LocalRing::backward`]'s gradients, as [`Plan::double_backward`].
    ///
    /// # Shapes
    /// As [`Plan::double_backward`], with all rows.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// As [`LocalRing::forward`] and [`Plan::double_backward`].
    pub fn double_backward<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
        cotangents: &Tensors<'_, T>,
        list_bias_cotangent: Option<&[f64]>,
    ) -> Result<DoubleBackward<T>> {
        self.check(tensors)?;
        self.check(cotangents).map_err(of_tangent)?;
        let dlse_shape = dlse.as_ref().map(|dlse| dlse.shape());
        self.check_rows([("dout", Some(dout.shape())), ("dlse", dlse_shape)])?;
        let list_bias = self.list_bias_direction(list_bias_cotangent)?;
        let (tensors, cotangents) = (&tensors.reborrow(), &cotangents.reborrow());
        let parts = each_rank(&mut self.ranks, |_, plan| {
            let of_rank = || {
                let of = |whole| RankTensors::of(whole, plan.q_rows(), plan.kv_rows());
                let dlse = dlse.map(|dlse| get_rows("dlse", dlse, Axis(2), plan.q_rows()));
                let dout = get_rows("dout", dout, Axis(1), plan.q_rows())?;
                Ok((of(tensors)?, of(cotangents)?, dout, dlse.transpose()?))
            };
            match of_rank() {
                Ok((tensors, cotangents, dout, dlse)) => {
                    let dlse = dlse.as_ref().map(|dlse| dlse.view());
                    let (tensors, cotangents) = (&tensors.tensors(), &cotangents.tensors());
                    let list_bias = of_listed_pairs(plan, list_bias.as_ref());
                    plan.double_backward(
                        tensors,
                        dout.view(),
                        dlse,
                        cotangents,
                        list_bias.as_deref(),
                    )
                }
                Err(error) => Err(plan.engine.refuse(error)),
            }
        })?;
        let jvp = zero_outputs::<T>(self.plan(), self.plan().spec().dims.q_len)?;
        let mut ddout = jvp.out_tangent;
        let mut ddlse = jvp.lse_tangent;
        let mut whole = zero_gradients(tensors)?;
        let bias_is_shared = tensors.bias.as_ref().is_some_and(|bias| bias.dim().2 == 1);
        for (part, plan) in parts.iter().zip(&self.ranks) {
            let DoubleBackward { inputs, .. } = part;
            let (q_rows, kv_rows) = (plan.q_rows(), plan.kv_rows());
            put_rows(&mut ddout.view_mut(), Axis(1), q_rows, part.ddout.view());
            put_rows(&mut ddlse.view_mut(), Axis(2), q_rows, part.ddlse.view());
            put_rows(&mut whole.dq.view_mut(), Axis(1), q_rows, inputs.dq.view());
            put_rows(&mut whole.dk.view_mut(), Axis(1), kv_rows, inputs.dk.view());
            put_rows(&mut whole.dv.view_mut(), Axis(1), kv_rows, inputs.dv.view());
            // every rank has the whole of a gradient that is summed over ranks
            match (&mut whole.dbias, &inputs.dbias) {
                (Some(dbias), Some(part)) if bias_is_shared => dbias.assign(part),
                (Some(dbias), Some(part)) => {
                    put_rows(&mut dbias.view_mut(), Axis(2), q_rows, part.view());
                }
                _ => {}
            }
            if let (Some(dsinks), Some(part)) = (&mut whole.dsoftmax_aux, &inputs.dsoftmax_aux) {
                dsinks.assign(part);
            }
        }
        whole.reports = parts.into_iter().flat_map(|part| part.inputs.reports).collect();
        Ok(DoubleBackward { inputs: whole, ddout, ddlse })
    }
}

/// Returns the numbers of the listed pairs of a rank's queries.
fn of_listed_pairs(plan: &Plan, whole: Option<&(Arc<KeyLists>, &[f64])>) -> Option<Vec<f64>> {
    let (lists, numbers) = whole?;
    Some(entries_of(lists, plan.q_rows()).map(|entry| numbers[entry]).collect())
}

/// Zeros of the shapes of the outputs of a JVP of this rank.
fn zero_jvp<T: Element>(plan: &Plan) -> Result<Jvp<T>> {
    zero_outputs(plan, index(plan.q_rows().len()))
}

/// Zeros of the shapes of the outputs of a JVP of `q_len` queries.
fn zero_outputs<T: Element>(plan: &Plan, q_len: usize) -> Result<Jvp<T>> {
    let Dims { batch, q_heads, value_dim, .. } = plan.spec().dims;
    let rows = |name| memory::zeros(name, (batch, q_heads, q_len));
    let vectors = |name| memory::zeros(name, (batch, q_len, q_heads, value_dim));
    Ok(Jvp {
        out: vectors("out")?,
        lse: rows("lse")?,
        out_tangent: vectors("tangent of out")?,
        lse_tangent: rows("tangent of lse")?,
        reports: Vec::new(),
    })
}

/// Zeros of the shapes of the gradients of a double backward of this rank.
fn zero_double_backward<T: Element>(
    plan: &Plan,
    tensors: &Tensors<'_, T>,
) -> Result<DoubleBackward<T>> {
    let Jvp { out_tangent: ddout, lse_tangent: ddlse, .. } = zero_jvp(plan)?;
    Ok(DoubleBackward { inputs: zero_gradients(tensors)?, ddout, ddlse })
}
