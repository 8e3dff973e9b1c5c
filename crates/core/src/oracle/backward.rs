//! Gradients of one attention, row by row.
//!
//! ```text
//! dp_j = keep_j · ⟨dout_i, v_j⟩          p_j = e^{s_j − m} / sum
//! ds_j = p_j · (dp_j − ⟨dout_i, out_i⟩ + dlse_i)                                        normalised
//!      | e_j · dp_j − [j = argmax]/ties · ⟨dout_i, out_i⟩ + p_j · dlse_i                unnormalised, e_j = e^{s_j − m}
//! dx_j = ds_j · slope_j                  dbias_ij += ds_j, or dx_j where the bias comes before the cap
//! dq_i += scale · dx_j · k_j             dk_j += scale · dx_j · q_i        dv_j += keep_j · p_j (or e_j) · dout_i
//! ```
//!
//! A sink is a key without a value: dp = 0, and no q, k or bias behind its logit.

use ndarray::{Array2, Array4, ArrayView3, ArrayView4};

use super::{
    Problem, expect_shape,
    row::{Rows, Softmax, broadcast},
    vector, vector_mut,
};
use crate::{BiasOrder, Dims, Result};

/// What backward gives, each shaped as what it is the gradient of.
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    /// `[b, q_len, q_heads, d]`.
    pub dq: Array4<f64>,
    /// `[b, kv_len, kv_heads, d]`.
    pub dk: Array4<f64>,
    /// `[b, kv_len, kv_heads, dv]`.
    pub dv: Array4<f64>,
    /// Summed over the axes along which the bias is broadcast; present if there is a bias tensor.
    pub dbias: Option<Array4<f64>>,
    /// Summed over everything that shares a sink; present if there are sinks.
    pub dsinks: Option<Array2<f64>>,
}

/// Computes the gradients of ⟨dout, out⟩ + ⟨dlse, lse⟩.
///
/// # Shapes
/// dout `[b, q_len, q_heads, dv]` · dlse `[b, q_heads, q_len]`, absent = 0, ignored for rows that see nothing and have no sinks.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] naming the tensor whose shape does not fit the spec.
pub fn backward(problem: &Problem<'_>, dout: ArrayView4<'_, f64>, dlse: Option<ArrayView3<'_, f64>>) -> Result<Backward> {
    let rows = Rows::new(problem)?;
    let Dims { batch, q_len, q_heads, value_dim, .. } = problem.spec.dims;
    expect_shape("dout", dout.shape(), &[batch, q_len, q_heads, value_dim])?;
    if let Some(dlse) = &dlse {
        expect_shape("dlse", dlse.shape(), &[batch, q_heads, q_len])?;
    }
    let mut gradients = Backward {
        dq: Array4::zeros(problem.q.raw_dim()),
        dk: Array4::zeros(problem.k.raw_dim()),
        dv: Array4::zeros(problem.v.raw_dim()),
        dbias: problem.bias.as_ref().map(|bias| Array4::zeros(bias.raw_dim())),
        dsinks: problem.sinks.as_ref().map(|sinks| Array2::zeros(sinks.raw_dim())),
    };
    for b in 0..batch {
        for h in 0..q_heads {
            for i in 0..q_len {
                let row = rows.row(b, h, i);
                gradients.add_row(problem, &row, &dout, dlse.as_ref().map_or(0.0, |dlse| dlse[[b, h, i]]));
            }
        }
    }
    Ok(gradients)
}

impl Backward {
    /// Adds what one row gives. An empty row has no pairs and no sinks, so it gives nothing.
    fn add_row(&mut self, problem: &Problem<'_>, row: &Softmax, dout: &ArrayView4<'_, f64>, dlse: f64) {
        let (b, h, i) = row.at;
        let spec = problem.spec;
        let kv_head = spec.dims.kv_head(h);
        let dout = vector(dout, [b, i, h]);
        let dout_out = dout.dot(&row.out(problem));
        // ds of a logit, given dp of its pair (0 for a sink)
        let gradient = |logit: f64, dp: f64| {
            let weight = row.weight(logit);
            let share = weight / row.sum;
            if spec.normalize {
                return share * (dp - dout_out + dlse);
            }
            let through_max = if logit == row.max { dout_out / row.ties } else { 0.0 };
            weight * dp - through_max + share * dlse
        };
        for pair in &row.pairs {
            let k = vector(&problem.k, [b, pair.j, kv_head]);
            let v = vector(&problem.v, [b, pair.j, kv_head]);
            let ds = gradient(pair.logit, pair.keep * dout.dot(&v));
            let dx = ds * pair.slope;
            let weight = row.weight(pair.logit) / if spec.normalize { row.sum } else { 1.0 };
            vector_mut(&mut self.dq, [b, i, h]).scaled_add(spec.scale * dx, &k);
            vector_mut(&mut self.dk, [b, pair.j, kv_head]).scaled_add(spec.scale * dx, &vector(&problem.q, [b, i, h]));
            vector_mut(&mut self.dv, [b, pair.j, kv_head]).scaled_add(pair.keep * weight, &dout);
            if let Some(dbias) = &mut self.dbias {
                let at = broadcast(dbias.dim().into(), [b, h, i, pair.j]);
                dbias[at] += if spec.bias_order == BiasOrder::BeforeSoftCap { dx } else { ds };
            }
        }
        if let Some(dsinks) = &mut self.dsinks {
            let line = if dsinks.nrows() == 1 { 0 } else { h };
            for &(t, sink) in &row.sinks {
                dsinks[[line, t]] += gradient(sink, 0.0);
            }
        }
    }
}
