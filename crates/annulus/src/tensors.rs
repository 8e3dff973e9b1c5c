//! What goes in and what comes out, as ndarray tensors.

use annulus_comm::ring::Report;
use annulus_core::Element;
use ndarray::{Array2, Array3, Array4, ArrayView2, ArrayView4};

/// The tensors of one attention.
///
/// # Shapes
/// q `[batch, q_len, q_heads, d]` · k `[batch, kv_len, kv_heads, d]` · v `[batch, kv_len, kv_heads, dv]` · bias
/// `[batch|1, q_heads|1, q_len|1, kv_len|1]` · sinks `[q_heads|1, sinks]`. On one rank of a ring, q_len and the kv_len of k and v are the rows
/// that this rank holds, while bias has this rank's queries and **all** keys.
#[derive(Debug, Clone)]
pub struct Tensors<'a, T: Element> {
    /// Queries.
    pub q: ArrayView4<'a, T>,
    /// Keys.
    pub k: ArrayView4<'a, T>,
    /// Values.
    pub v: ArrayView4<'a, T>,
    /// Additive bias; −∞ hides its pair.
    pub bias: Option<ArrayView4<'a, T::Accumulator>>,
    /// Learnable sink logits: one row shared by all heads, or a row a head.
    pub sinks: Option<ArrayView2<'a, T::Accumulator>>,
}

impl<'a, T: Element> Tensors<'a, T> {
    /// Queries, keys and values, and nothing else.
    pub const fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>, v: ArrayView4<'a, T>) -> Self {
        Self { q, k, v, bias: None, sinks: None }
    }

    /// With an additive bias.
    #[must_use]
    pub fn with_bias(mut self, bias: ArrayView4<'a, T::Accumulator>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// With learnable sinks.
    #[must_use]
    pub fn with_sinks(mut self, sinks: ArrayView2<'a, T::Accumulator>) -> Self {
        self.sinks = Some(sinks);
        self
    }
}

/// What a forward pass gives, and what backward wants back.
///
/// # Shapes
/// out `[batch, q_len, q_heads, dv]` · lse, max, sum, ties `[batch, q_heads, q_len]`
#[derive(Debug, Clone, PartialEq)]
pub struct Forward<T: Element> {
    /// The output.
    pub out: Array4<T>,
    /// ln of the sum of exponentials (natural logarithm); −∞ where a row sees nothing and has no sinks.
    pub lse: Array3<T::Accumulator>,
    /// Largest logit of each row; only where the output is not normalised.
    pub max: Option<Array3<T::Accumulator>>,
    /// Σ e^{s − max}; only where the output is not normalised.
    pub sum: Option<Array3<T::Accumulator>>,
    /// How many keys and sinks share the largest logit; only where the output is not normalised.
    pub ties: Option<Array3<T::Accumulator>>,
    /// What the call did, one report a rank that ran here.
    pub reports: Vec<Report>,
}

/// What a backward pass gives, each shaped and typed as its input.
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
    /// ∂L/∂sinks, if there are sinks.
    pub dsinks: Option<Array2<T::Accumulator>>,
    /// What the call did, one report a rank that ran here.
    pub reports: Vec<Report>,
}
