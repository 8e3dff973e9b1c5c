//! Inputs and outputs of a pass, as ndarray tensors.

use annulus_comm::ring::Report;
use annulus_core::Element;
use ndarray::{
    Array2, Array3, Array4, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut2, ArrayViewMut3,
    ArrayViewMut4, Axis,
};

/// Inputs of a forward and of a backward pass, borrowed. Any strides.
///
/// # Shapes
/// q `[batch, q_len, q_heads, d]` · k `[batch, kv_len, kv_heads, d]` ·
/// v `[batch, kv_len, kv_heads, dv]` · bias `[batch|1, q_heads|1, q_len|1, kv_len|1]` ·
/// softmax_aux `[q_heads|1, sinks]`
///
/// For a [`crate::Plan`] q_len, and kv_len of k and v, count the rows of this rank; bias has this
/// rank's queries and **all** keys.
#[derive(Debug, Clone)]
pub struct Tensors<'a, T: Element> {
    /// Queries.
    pub q: ArrayView4<'a, T>,
    /// Keys.
    pub k: ArrayView4<'a, T>,
    /// Values.
    pub v: ArrayView4<'a, T>,
    /// Additive bias. −∞ masks its pair.
    pub bias: Option<ArrayView4<'a, T::Accumulator>>,
    /// Scores of the attention sinks: one row shared by all heads, or one row per query head.
    pub softmax_aux: Option<ArrayView2<'a, T::Accumulator>>,
}

impl<'a, T: Element> Tensors<'a, T> {
    /// Borrows queries, keys and values, without bias and sinks.
    pub const fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>, v: ArrayView4<'a, T>) -> Self {
        Self { q, k, v, bias: None, softmax_aux: None }
    }

    /// Borrows the same tensors for a shorter time.
    pub fn reborrow(&self) -> Tensors<'_, T> {
        Tensors {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            bias: self.bias.as_ref().map(|bias| bias.view()),
            softmax_aux: self.softmax_aux.as_ref().map(|sinks| sinks.view()),
        }
    }

    /// Adds the bias that [`crate::Attention::bias`] declared.
    #[must_use]
    pub fn with_bias(mut self, bias: ArrayView4<'a, T::Accumulator>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Adds the table `[q_heads|1, entries]` that [`crate::Attention::bias_table`] declared, as the
    /// bias `[1, q_heads|1, 1, entries]`.
    #[must_use]
    pub fn with_bias_table(self, table: ArrayView2<'a, T::Accumulator>) -> Self {
        self.with_bias(table.insert_axis(Axis(1)).insert_axis(Axis(0)))
    }

    /// Adds the sinks that [`crate::Attention::softmax_aux`] declared.
    #[must_use]
    pub fn with_softmax_aux(mut self, sinks: ArrayView2<'a, T::Accumulator>) -> Self {
        self.softmax_aux = Some(sinks);
        self
    }
}

/// Outputs of a forward pass, which are inputs of the backward pass.
///
/// # Shapes
/// out `[batch, q_len, q_heads, dv]` · lse, max, sum, ties `[batch, q_heads, q_len]`
#[derive(Debug, Clone, PartialEq)]
pub struct Forward<T: Element> {
    /// The output.
    pub out: Array4<T>,
    /// lse = m + ln ℓ, natural logarithm. −∞ for a query without a visible key and without sinks.
    pub lse: Array3<T::Accumulator>,
    /// Row maximum m of the scores and sinks; −∞ where lse is. `None` of a KV cache.
    pub max: Option<Array3<T::Accumulator>>,
    /// Row sum ℓ = Σ e^(s − m); 0 where lse is −∞. `None` of a KV cache.
    pub sum: Option<Array3<T::Accumulator>>,
    /// Number of keys and sinks that share the maximum. Only of an unnormalised output.
    pub ties: Option<Array3<T::Accumulator>>,
    /// Rounding residual of out, `[batch, q_len, q_heads, dv]`: out before it was rounded − out,
    /// rounded. Of plans with [`Plan::has_out_residual`].
    ///
    /// [`Plan::has_out_residual`]: crate::Plan::has_out_residual
    pub out_residual: Option<Array4<T>>,
    /// Statistics of the scores of each row, `[batch, q_heads, q_len, 3]`: the largest scale·q·k
    /// before bias and soft cap, the largest score after them, and the entropy of the
    /// probabilities. −∞, −∞ and 0 of a query without a visible key and without sinks. With
    /// [`Attention::statistics`].
    ///
    /// [`Attention::statistics`]: crate::Attention::statistics
    pub statistics: Option<Array4<T::Accumulator>>,
    /// Maximum and mean of each of these over all batch rows, and over all queries of all ranks that
    /// have a visible key, `[q_heads, 3, 2]`; −∞ and NaN of a head without one.
    pub head_statistics: Option<Array3<T::Accumulator>>,
    /// Times and bytes, one report per rank of this process.
    pub reports: Vec<Report>,
}

/// Outputs of a forward pass, borrowed as inputs of the backward pass. Any strides.
///
/// The backward pass computes probabilities from the maximum and the sum. Of a normalised output
/// both may be `None`: then from lse, whose rounding makes them wrong by a factor e^ε, where |ε| is
/// up to 2⁻²⁴·|lse| in f32 and 2⁻⁵³·|lse| in f64. Scores are rounded as much themselves, except in
/// rows whose scores share a large constant, such as −10⁹ for masked keys.
///
/// It computes ⟨dout, out⟩ from out and its rounding residual. Without the residual ⟨dout, out⟩ of
/// bf16 and f16 has the error of the rounding of out, and dq that error times the mean of the keys:
/// see "Gradients" in `docs/semantics.md`.
///
/// # Shapes
/// As [`Forward`].
#[derive(Debug, Clone)]
pub struct ForwardView<'a, T: Element> {
    /// As [`Forward::out`].
    pub out: ArrayView4<'a, T>,
    /// As [`Forward::lse`].
    pub lse: ArrayView3<'a, T::Accumulator>,
    /// As [`Forward::max`].
    pub max: Option<ArrayView3<'a, T::Accumulator>>,
    /// As [`Forward::sum`].
    pub sum: Option<ArrayView3<'a, T::Accumulator>>,
    /// As [`Forward::ties`].
    pub ties: Option<ArrayView3<'a, T::Accumulator>>,
    /// As [`Forward::out_residual`]; `None` is 0.
    pub out_residual: Option<ArrayView4<'a, T>>,
}

impl<T: Element> ForwardView<'_, T> {
    /// Borrows the same tensors for a shorter time.
    pub fn reborrow(&self) -> ForwardView<'_, T> {
        ForwardView {
            out: self.out.view(),
            lse: self.lse.view(),
            max: self.max.as_ref().map(|max| max.view()),
            sum: self.sum.as_ref().map(|sum| sum.view()),
            ties: self.ties.as_ref().map(|ties| ties.view()),
            out_residual: self.out_residual.as_ref().map(|of| of.view()),
        }
    }
}

/// Tensors of the caller's that a forward pass writes. Any strides; the contents are overwritten.
///
/// Of a normalised output max and sum are both given or both `None`.
///
/// # Shapes
/// As [`Forward`].
#[derive(Debug)]
pub struct ForwardViewMut<'a, T: Element> {
    /// As [`Forward::out`].
    pub out: ArrayViewMut4<'a, T>,
    /// As [`Forward::lse`].
    pub lse: ArrayViewMut3<'a, T::Accumulator>,
    /// As [`Forward::max`].
    pub max: Option<ArrayViewMut3<'a, T::Accumulator>>,
    /// As [`Forward::sum`].
    pub sum: Option<ArrayViewMut3<'a, T::Accumulator>>,
    /// As [`Forward::ties`].
    pub ties: Option<ArrayViewMut3<'a, T::Accumulator>>,
    /// As [`Forward::out_residual`]; `None` if there is no use for it.
    pub out_residual: Option<ArrayViewMut4<'a, T>>,
    /// As [`Forward::statistics`].
    pub statistics: Option<ArrayViewMut4<'a, T::Accumulator>>,
    /// As [`Forward::head_statistics`].
    pub head_statistics: Option<ArrayViewMut3<'a, T::Accumulator>>,
}

impl<T: Element> Forward<T> {
    /// Borrows the outputs for a backward pass.
    pub fn view(&self) -> ForwardView<'_, T> {
        ForwardView {
            out: self.out.view(),
            lse: self.lse.view(),
            max: self.max.as_ref().map(|max| max.view()),
            sum: self.sum.as_ref().map(|sum| sum.view()),
            ties: self.ties.as_ref().map(|ties| ties.view()),
            out_residual: self.out_residual.as_ref().map(|of| of.view()),
        }
    }

    /// Borrows the outputs for a forward pass that overwrites them.
    pub fn view_mut(&mut self) -> ForwardViewMut<'_, T> {
        ForwardViewMut {
            out: self.out.view_mut(),
            lse: self.lse.view_mut(),
            max: self.max.as_mut().map(|max| max.view_mut()),
            sum: self.sum.as_mut().map(|sum| sum.view_mut()),
            ties: self.ties.as_mut().map(|ties| ties.view_mut()),
            out_residual: self.out_residual.as_mut().map(|of| of.view_mut()),
            statistics: self.statistics.as_mut().map(|of| of.view_mut()),
            head_statistics: self.head_statistics.as_mut().map(|of| of.view_mut()),
        }
    }
}

/// Gradients of a backward pass, each with the shape and type of its input.
#[derive(Debug, Clone, PartialEq)]
pub struct Backward<T: Element> {
    /// ∂L/∂q.
    pub dq: Array4<T>,
    /// ∂L/∂k.
    pub dk: Array4<T>,
    /// ∂L/∂v.
    pub dv: Array4<T>,
    /// ∂L/∂bias, if there is a bias.
    pub dbias: Option<Array4<T::Accumulator>>,
    /// ∂L/∂softmax_aux, if there are sinks.
    pub dsoftmax_aux: Option<Array2<T::Accumulator>>,
    /// Times and bytes, one report per rank of this process.
    pub reports: Vec<Report>,
}

/// Tensors of the caller's that a backward pass writes. Any strides; the contents are overwritten.
///
/// # Shapes
/// As [`Backward`].
#[derive(Debug)]
pub struct BackwardViewMut<'a, T: Element> {
    /// As [`Backward::dq`].
    pub dq: ArrayViewMut4<'a, T>,
    /// As [`Backward::dk`].
    pub dk: ArrayViewMut4<'a, T>,
    /// As [`Backward::dv`].
    pub dv: ArrayViewMut4<'a, T>,
    /// As [`Backward::dbias`].
    pub dbias: Option<ArrayViewMut4<'a, T::Accumulator>>,
    /// As [`Backward::dsoftmax_aux`].
    pub dsoftmax_aux: Option<ArrayViewMut2<'a, T::Accumulator>>,
}

impl<T: Element> Backward<T> {
    /// Borrows the gradients for a backward pass that overwrites them.
    pub fn view_mut(&mut self) -> BackwardViewMut<'_, T> {
        BackwardViewMut {
            dq: self.dq.view_mut(),
            dk: self.dk.view_mut(),
            dv: self.dv.view_mut(),
            dbias: self.dbias.as_mut().map(|dbias| dbias.view_mut()),
            dsoftmax_aux: self.dsoftmax_aux.as_mut().map(|dsinks| dsinks.view_mut()),
        }
    }
}
