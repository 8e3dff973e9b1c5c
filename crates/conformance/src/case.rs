//! One attention with everything that it needs, in f64, and the truth about it.

use annulus_core::{
    Batch, DType, Dims, Result, Spec,
    oracle::{self, Backward, Forward, Problem},
};
use ndarray::{Array, Array2, Array3, Array4, Dimension};

use crate::Draw;

/// Spec, batch and global tensors.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name in failures.
    pub name: String,
    /// What is computed.
    pub spec: Spec,
    /// Of the whole sequence.
    pub batch: Batch,
    /// `[b, q_len, q_heads, d]`.
    pub q: Array4<f64>,
    /// `[b, kv_len, kv_heads, d]`.
    pub k: Array4<f64>,
    /// `[b, kv_len, kv_heads, dv]`.
    pub v: Array4<f64>,
    /// `[b|1, q_heads|1, q_len|1, kv_len|1]`.
    pub bias: Option<Array4<f64>>,
    /// `[q_heads|1, sinks]`.
    pub sinks: Option<Array2<f64>>,
    /// `[b, q_len, q_heads, dv]`.
    pub dout: Array4<f64>,
    /// `[b, q_heads, q_len]`; absent = 0.
    pub dlse: Option<Array3<f64>>,
}

/// What the oracle says of a case.
#[derive(Debug, Clone)]
pub struct Truth {
    /// Outputs.
    pub forward: Forward,
    /// Gradients.
    pub backward: Backward,
}

impl Case {
    /// A case with q, k, v and dout drawn for the dims of `spec`, and its bias, sinks where it has some.
    pub fn new(name: impl Into<String>, spec: Spec, draw: &mut Draw) -> Self {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = spec.dims;
        Self {
            name: name.into(),
            batch: Batch::default(),
            q: draw.tensor((batch, q_len, q_heads, head_dim)),
            k: draw.tensor((batch, kv_len, kv_heads, head_dim)),
            v: draw.tensor((batch, kv_len, kv_heads, value_dim)),
            bias: spec.bias.map(|shape| draw.tensor(shape)),
            sinks: spec.sinks.map(|sinks| draw.tensor((if sinks.per_head { q_heads } else { 1 }, sinks.count))),
            dout: draw.tensor((batch, q_len, q_heads, value_dim)),
            dlse: None,
            spec,
        }
    }

    /// The same case with its inputs rounded to `dtype` (bias, sinks and dlse to the accumulator's), so that the truth about it is the truth
    /// about what a computation in `dtype` is given.
    #[must_use]
    pub fn in_dtype(&self, dtype: DType) -> Self {
        fn rounded<D: Dimension>(tensor: &Array<f64, D>, dtype: DType) -> Array<f64, D> {
            tensor.mapv(|x| dtype.round(x))
        }
        let sums = dtype.accumulator();
        // a rounding that was asked for stays; one that came with the old type goes with it
        let narrowed = self.spec.logits_dtype != self.spec.dtype.accumulator();
        let logits_dtype = if narrowed { self.spec.logits_dtype } else { sums };
        Self {
            name: format!("{} {dtype}", self.name),
            spec: Spec { dtype, logits_dtype, ..self.spec.clone() },
            batch: self.batch.clone(),
            q: rounded(&self.q, dtype),
            k: rounded(&self.k, dtype),
            v: rounded(&self.v, dtype),
            bias: self.bias.as_ref().map(|bias| rounded(bias, sums)),
            sinks: self.sinks.as_ref().map(|sinks| rounded(sinks, sums)),
            dout: rounded(&self.dout, dtype),
            dlse: self.dlse.as_ref().map(|dlse| rounded(dlse, sums)),
        }
    }

    /// The case as the oracle wants it.
    pub fn problem(&self) -> Problem<'_> {
        Problem {
            spec: &self.spec,
            batch: &self.batch,
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            bias: self.bias.as_ref().map(|bias| bias.view()),
            sinks: self.sinks.as_ref().map(|sinks| sinks.view()),
        }
    }

    /// Asks the oracle.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if the parts do not fit each other.
    pub fn truth(&self) -> Result<Truth> {
        let problem = self.problem();
        let backward = oracle::backward(&problem, self.dout.view(), self.dlse.as_ref().map(|dlse| dlse.view()))?;
        Ok(Truth { forward: oracle::forward(&problem)?, backward })
    }
}
