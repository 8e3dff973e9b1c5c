//! Second derivatives of one attention, row by row, in dual numbers.
//!
//! A dual number is a value and its derivative along one direction in the space of q, k, v, bias and
//! sinks. The definition of attention in dual numbers has the tangents of out and lse (a JVP). The
//! definition of its gradients in dual numbers, with constant dout and dlse, has the tangents of
//! the gradients. These are the double backward along the same direction:
//!
//! ```text
//! φ(x) = ⟨dout, out(x)⟩ + ⟨dlse, lse(x)⟩        x = (q, k, v, bias, sinks), g a direction
//! gradient of ⟨g, ∇φ(x)⟩ with respect to x      = tangent of ∇φ along g, because ∂²φ is symmetric
//! gradient of ⟨g, ∇φ(x)⟩ with respect to dout   = tangent of out along g, and likewise lse
//! ```
//! No formula of a second derivative is written down here.

use std::ops::{Add, Mul, Sub};

use ndarray::{Array2, Array3, Array4, ArrayView2, ArrayView3, ArrayView4};

use super::{
    Backward, Problem, expect_shape,
    row::{Rows, Softmax, broadcast},
    vector, vector_mut,
};
use crate::{BiasOrder, Dims, Error, Result};

/// Direction of a derivative, each tensor in the shape of its input. A bias or sinks without one
/// have the direction 0.
#[derive(Debug, Clone)]
pub struct Direction<'a> {
    /// `[b, q_len, q_heads, d]`.
    pub q: ArrayView4<'a, f64>,
    /// `[b, kv_len, kv_heads, d]`.
    pub k: ArrayView4<'a, f64>,
    /// `[b, kv_len, kv_heads, dv]`.
    pub v: ArrayView4<'a, f64>,
    /// Shaped as the bias.
    pub bias: Option<ArrayView4<'a, f64>>,
    /// Shaped as the sinks.
    pub sinks: Option<ArrayView2<'a, f64>>,
}

/// Derivatives along a direction.
#[derive(Debug, Clone, PartialEq)]
pub struct Tangents {
    /// Tangent of out, `[b, q_len, q_heads, dv]`.
    pub out: Array4<f64>,
    /// Tangent of lse, `[b, q_heads, q_len]`; 0 for queries without visible keys and sinks.
    pub lse: Array3<f64>,
    /// Tangents of the gradients of ⟨dout, out⟩ + ⟨dlse, lse⟩.
    pub gradients: Backward,
}

/// Computes the tangents of out and lse, and those of the gradients of ⟨dout, out⟩ + ⟨dlse, lse⟩,
/// along `direction`. Rounding to [`crate::Spec::logits_dtype`] has the derivative 1.
///
/// # Shapes
/// dout `[b, q_len, q_heads, dv]`; dlse `[b, q_heads, q_len]`. Without dout or dlse it is 0.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the tensor whose shape does not fit the spec;
/// [`Error::Unsupported`] for an output that is not normalised.
pub fn tangents(
    problem: &Problem<'_>,
    direction: &Direction<'_>,
    dout: Option<ArrayView4<'_, f64>>,
    dlse: Option<ArrayView3<'_, f64>>,
) -> Result<Tangents> {
    let rows = Rows::new(problem)?;
    let Dims { batch, q_len, q_heads, value_dim, .. } = problem.spec.dims;
    if !problem.spec.normalize {
        return Err(Error::unsupported("unnormalized", "the oracle of second derivatives"));
    }
    let out_shape = [batch, q_len, q_heads, value_dim];
    expect_shape("tangent of q", direction.q.shape(), problem.q.shape())?;
    expect_shape("tangent of k", direction.k.shape(), problem.k.shape())?;
    expect_shape("tangent of v", direction.v.shape(), problem.v.shape())?;
    if let Some(dout) = &dout {
        expect_shape("dout", dout.shape(), &out_shape)?;
    }
    if let Some(dlse) = &dlse {
        expect_shape("dlse", dlse.shape(), &[batch, q_heads, q_len])?;
    }
    let zeros = Array4::zeros(out_shape);
    let dout = dout.unwrap_or(zeros.view());
    let mut tangents = Tangents {
        out: Array4::zeros(out_shape),
        lse: Array3::zeros((batch, q_heads, q_len)),
        gradients: Backward {
            dq: Array4::zeros(problem.q.raw_dim()),
            dk: Array4::zeros(problem.k.raw_dim()),
            dv: Array4::zeros(problem.v.raw_dim()),
            dbias: problem.bias.as_ref().map(|bias| Array4::zeros(bias.raw_dim())),
            dsinks: problem.sinks.as_ref().map(|sinks| Array2::zeros(sinks.raw_dim())),
        },
    };
    for b in 0..batch {
        for h in 0..q_heads {
            for i in 0..q_len {
                let dlse = dlse.as_ref().map_or(0.0, |dlse| dlse[[b, h, i]]);
                tangents.add_row(problem, direction, &rows.row(b, h, i), &dout, dlse);
            }
        }
    }
    Ok(tangents)
}

/// One visible pair.
struct DualPair {
    j: usize,
    /// Column of the bias tensor.
    bias_column: usize,
    score: Dual,
    /// ∂score/∂(scale·q·k).
    slope: Dual,
    keep: f64,
    k: Vec<Dual>,
    v: Vec<Dual>,
}

impl Tangents {
    /// Adds the contribution of one query row.
    fn add_row(
        &mut self,
        problem: &Problem<'_>,
        direction: &Direction<'_>,
        row: &Softmax,
        dout: &ArrayView4<'_, f64>,
        dlse: f64,
    ) {
        let (b, h, i) = row.at;
        let spec = problem.spec;
        let kv_head = spec.dims.kv_head(h);
        let scale = Dual::from(spec.scale);
        let q = duals(&problem.q, &direction.q, [b, i, h]);
        let pairs: Vec<DualPair> = row
            .pairs
            .iter()
            .map(|pair| {
                let at = [b, pair.j, kv_head];
                let k = duals(&problem.k, &direction.k, at);
                let v = duals(&problem.v, &direction.v, at);
                let product = sum(q.iter().zip(&k).map(|(&q, &k)| q * k));
                let at = [b, h, i, pair.bias_column];
                let bias = direction.bias.as_ref();
                let bias = bias.map_or(0.0, |bias| bias[broadcast(bias.dim().into(), at)]);
                let [before, after] = match spec.bias_order {
                    BiasOrder::BeforeSoftCap => [bias, 0.0],
                    BiasOrder::AfterSoftCap => [0.0, bias],
                };
                // the values have the bias, its function and the rounding of products already
                let tangent = (scale * product).tangent + before;
                let x = Dual { value: pair.uncapped, tangent };
                let (capped, slope) = match spec.soft_cap {
                    None => (x, Dual::from(1.0)),
                    Some(cap) => {
                        let tanh = (x * Dual::from(1.0 / cap)).tanh();
                        (Dual::from(cap) * tanh, Dual::from(1.0) - tanh * tanh)
                    }
                };
                let score = Dual { value: pair.score, tangent: capped.tangent + after };
                DualPair {
                    j: pair.j,
                    bias_column: pair.bias_column,
                    score,
                    slope,
                    keep: pair.keep,
                    k,
                    v,
                }
            })
            .collect();
        let sink_row = |rows: usize| if rows == 1 { 0 } else { h };
        let sinks: Vec<(usize, Dual)> = row
            .sinks
            .iter()
            .map(|&(t, value)| {
                let tangent = direction.sinks.as_ref();
                let tangent = tangent.map_or(0.0, |sinks| sinks[[sink_row(sinks.nrows()), t]]);
                (t, Dual { value, tangent })
            })
            .collect();
        if pairs.is_empty() && sinks.is_empty() {
            return;
        }
        // the result does not depend on the number that is subtracted, so it is a constant
        let max = Dual::from(row.max);
        let weights: Vec<Dual> = pairs.iter().map(|pair| (pair.score - max).exp()).collect();
        let of_sinks: Vec<Dual> = sinks.iter().map(|&(_, sink)| (sink - max).exp()).collect();
        let total = sum(weights.iter().chain(&of_sinks).copied());
        let inverse = total.inverse();
        let mut out = vec![Dual::from(0.0); spec.dims.value_dim];
        for (pair, &weight) in pairs.iter().zip(&weights) {
            let probability = Dual::from(pair.keep) * (weight * inverse);
            out.iter_mut().zip(&pair.v).for_each(|(out, &v)| *out = *out + probability * v);
        }
        self.lse[[b, h, i]] = total.tangent * inverse.value;
        let dout: Vec<Dual> = vector(dout, [b, i, h]).iter().map(|&dout| dout.into()).collect();
        let delta = sum(dout.iter().zip(&out).map(|(&dout, &out)| dout * out)) - dlse.into();
        let tangents = out.iter().map(|out| out.tangent);
        vector_mut(&mut self.out, [b, i, h]).iter_mut().zip(tangents).for_each(|(a, b)| *a = b);

        let gradients = &mut self.gradients;
        for (pair, &weight) in pairs.iter().zip(&weights) {
            let at = [b, pair.j, kv_head];
            let probability = weight * inverse;
            let keep = Dual::from(pair.keep);
            let dp = keep * sum(dout.iter().zip(&pair.v).map(|(&dout, &v)| dout * v));
            let ds = probability * (dp - delta);
            let dx = ds * pair.slope;
            add(&mut gradients.dq, [b, i, h], pair.k.iter().map(|&k| scale * dx * k));
            add(&mut gradients.dk, at, q.iter().map(|&q| scale * dx * q));
            add(&mut gradients.dv, at, dout.iter().map(|&dout| keep * probability * dout));
            if let Some(dbias) = &mut gradients.dbias {
                let at = broadcast(dbias.dim().into(), [b, h, i, pair.bias_column]);
                let before = spec.bias_order == BiasOrder::BeforeSoftCap;
                dbias[at] += if before { dx } else { ds }.tangent;
            }
        }
        if let Some(dsinks) = &mut gradients.dsinks {
            let sink_row = sink_row(dsinks.nrows());
            for (&(t, _), &weight) in sinks.iter().zip(&of_sinks) {
                dsinks[[sink_row, t]] += (weight * inverse * (Dual::from(0.0) - delta)).tangent;
            }
        }
    }
}

/// Adds tangents to a vector of a gradient.
fn add(gradient: &mut Array4<f64>, at: [usize; 3], terms: impl Iterator<Item = Dual>) {
    vector_mut(gradient, at).iter_mut().zip(terms).for_each(|(into, term)| *into += term.tangent);
}

/// Returns a vector of a tensor with its direction.
fn duals(value: &ArrayView4<'_, f64>, tangent: &ArrayView4<'_, f64>, at: [usize; 3]) -> Vec<Dual> {
    let pairs = vector(value, at).into_iter().zip(vector(tangent, at));
    pairs.map(|(&value, &tangent)| Dual { value, tangent }).collect()
}

fn sum(terms: impl Iterator<Item = Dual>) -> Dual {
    terms.fold(Dual::from(0.0), Add::add)
}

/// A number and its derivative.
#[derive(Debug, Clone, Copy)]
struct Dual {
    value: f64,
    tangent: f64,
}

impl From<f64> for Dual {
    fn from(value: f64) -> Self {
        Self { value, tangent: 0.0 }
    }
}

impl Add for Dual {
    type Output = Self;

    fn add(self, b: Self) -> Self {
        Self { value: self.value + b.value, tangent: self.tangent + b.tangent }
    }
}

impl Sub for Dual {
    type Output = Self;

    fn sub(self, b: Self) -> Self {
        Self { value: self.value - b.value, tangent: self.tangent - b.tangent }
    }
}

impl Mul for Dual {
    type Output = Self;

    fn mul(self, b: Self) -> Self {
        let tangent = self.tangent * b.value + self.value * b.tangent;
        Self { value: self.value * b.value, tangent }
    }
}

impl Dual {
    fn exp(self) -> Self {
        let value = self.value.exp();
        Self { value, tangent: value * self.tangent }
    }

    fn tanh(self) -> Self {
        let value = self.value.tanh();
        Self { value, tangent: (1.0 - value * value) * self.tangent }
    }

    fn inverse(self) -> Self {
        let value = 1.0 / self.value;
        Self { value, tangent: -value * value * self.tangent }
    }
}
