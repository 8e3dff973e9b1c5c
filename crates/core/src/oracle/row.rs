//! One row of attention: its logits, and what becomes of them.

use ndarray::Array1;

use super::{Problem, dropping::dropped, sight::Sight, vector};
use crate::{BiasOrder, Result};

/// One finished row of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// `[dv]`.
    pub out: Array1<f64>,
    /// Natural logarithm; −∞ where the row sees nothing and has no sinks.
    pub lse: f64,
    /// Largest logit, sinks included.
    pub max: f64,
    /// Σ e^{s − max}, sinks included.
    pub sum: f64,
    /// How many keys and sinks share the largest logit.
    pub ties: f64,
}

/// One visible pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    /// Key row.
    pub(super) j: usize,
    /// s_ij.
    pub(super) logit: f64,
    /// ∂s_ij/∂x_ij: 1, or 1 − tanh² under a soft cap.
    pub(super) slope: f64,
    /// 1/(1 − p), or 0 where dropped; 1 without dropout.
    pub(super) keep: f64,
}

/// The logits of one row and their running softmax.
#[derive(Debug)]
pub(super) struct Softmax {
    pub(super) at: (usize, usize, usize),
    /// None of them if the row is empty.
    pub(super) pairs: Vec<Pair>,
    /// `(t, a_t)` of the sinks that are not −∞.
    pub(super) sinks: Vec<(usize, f64)>,
    pub(super) max: f64,
    pub(super) sum: f64,
    pub(super) ties: f64,
}

/// Makes rows of one problem.
pub(super) struct Rows<'p, 'a> {
    problem: &'p Problem<'a>,
    sight: Sight<'p>,
}

impl<'p, 'a> Rows<'p, 'a> {
    pub(super) fn new(problem: &'p Problem<'a>) -> Result<Self> {
        Ok(Self { problem, sight: problem.sight()? })
    }

    pub(super) fn row(&self, b: usize, h: usize, i: usize) -> Softmax {
        let pairs: Vec<Pair> = (0..self.problem.spec.dims.kv_len).filter_map(|j| self.pair(b, h, i, j)).collect();
        let sinks = self.problem.sinks_of(h);
        let logits = || pairs.iter().map(|pair| pair.logit).chain(sinks.iter().map(|&(_, sink)| sink));
        // a NaN, once met, stays: no later logit is larger
        let max = logits().fold(f64::NEG_INFINITY, |max, logit| if logit > max || logit.is_nan() { logit } else { max });
        if max == f64::NEG_INFINITY {
            return Softmax { at: (b, h, i), pairs: Vec::new(), sinks: Vec::new(), max, sum: 0.0, ties: 0.0 };
        }
        let sum = logits().map(|logit| (logit - max).exp()).sum();
        let ties = logits().filter(|&logit| logit == max).count() as f64;
        Softmax { at: (b, h, i), pairs, sinks, max, sum, ties }
    }

    /// The logit of one pair; `None` if it is hidden.
    fn pair(&self, b: usize, h: usize, i: usize, j: usize) -> Option<Pair> {
        let Problem { spec, q, k, .. } = self.problem;
        if !self.sight.visible(b, h, i, j) {
            return None;
        }
        let bias = self.bias(b, h, i, j)?;
        let dot = vector(q, [b, i, h]).dot(&vector(k, [b, j, spec.dims.kv_head(h)]));
        let product = if spec.logits_dtype == spec.dtype.accumulator() { dot } else { spec.logits_dtype.round(dot) };
        let x = spec.scale * product;
        let (before, after) = match spec.bias_order {
            BiasOrder::BeforeSoftCap => (bias, 0.0),
            BiasOrder::AfterSoftCap => (0.0, bias),
        };
        let (capped, slope) = match spec.soft_cap {
            None => (x + before, 1.0),
            Some(cap) => {
                let tanh = ((x + before) / cap).tanh();
                (cap * tanh, 1.0 - tanh * tanh)
            }
        };
        let keep = match spec.dropout {
            None => 1.0,
            Some(dropout) if dropped(&spec.dims, dropout, b, h, i, j) => 0.0,
            Some(dropout) => 1.0 / (1.0 - dropout.probability),
        };
        Some(Pair { j, logit: capped + after, slope, keep })
    }

    /// Tensor and function together; `None` where either is −∞, which hides the pair.
    fn bias(&self, b: usize, h: usize, i: usize, j: usize) -> Option<f64> {
        let tensor = self.problem.bias.as_ref().map_or(0.0, |bias| bias[broadcast(bias.dim().into(), [b, h, i, j])]);
        let function = self.problem.spec.bias_function.as_ref();
        let (query, key) = (self.sight.query(b, h, i)?, self.sight.key(b, j)?);
        let computed = function.map_or(0.0, |function| function.bias(&query, &key));
        (tensor != f64::NEG_INFINITY && computed != f64::NEG_INFINITY).then_some(tensor + computed)
    }
}

impl Softmax {
    /// e^{s − m} of a logit of this row.
    pub(super) fn weight(&self, logit: f64) -> f64 {
        (logit - self.max).exp()
    }

    /// out, normalised or not as the spec says.
    pub(super) fn out(&self, problem: &Problem<'_>) -> Array1<f64> {
        let (b, h, _) = self.at;
        let dims = &problem.spec.dims;
        let mut out = Array1::zeros(dims.value_dim);
        for pair in &self.pairs {
            out.scaled_add(pair.keep * self.weight(pair.logit), &vector(&problem.v, [b, pair.j, dims.kv_head(h)]));
        }
        // an empty row has the sum 0 and stays 0
        if problem.spec.normalize && self.sum != 0.0 { out / self.sum } else { out }
    }

    pub(super) fn finish(&self, problem: &Problem<'_>) -> Row {
        Row { out: self.out(problem), lse: self.max + self.sum.ln(), max: self.max, sum: self.sum, ties: self.ties }
    }
}

impl Problem<'_> {
    /// `(t, a_t)` of the head's sinks; one of −∞ is none.
    fn sinks_of(&self, h: usize) -> Vec<(usize, f64)> {
        let Some(sinks) = &self.sinks else { return Vec::new() };
        let line = sinks.row(if sinks.nrows() == 1 { 0 } else { h });
        line.iter().copied().enumerate().filter(|&(_, sink)| sink != f64::NEG_INFINITY).collect()
    }
}

/// The element of a tensor whose axes of length 1 stand for every index.
pub(super) fn broadcast(shape: [usize; 4], index: [usize; 4]) -> [usize; 4] {
    std::array::from_fn(|axis| if shape[axis] == 1 { 0 } else { index[axis] })
}
