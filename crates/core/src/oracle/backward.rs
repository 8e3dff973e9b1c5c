//! Gradients of one attention, row by row.
//!
//! ```text
//! e_j  = e^{s_j − m}        p_j = e_j / sum        dp_j = keep_j · ⟨dout_i, v_j⟩
//!
//! ds_j = p_j · (dp_j − ⟨dout_i, out_i⟩ + dlse_i)                             normalised
//! ds_j = e_j · dp_j − [s_j = m]/ties · ⟨dout_i, out_i⟩ + p_j · dlse_i        not normalised
//! dx_j = ds_j · ∂s_j/∂x_j
//!
//! dq_i += scale · dx_j · k_j
//! dk_j += scale · dx_j · q_i
//! dv_j += keep_j · p_j · dout_i                                              normalised
//! dv_j += keep_j · e_j · dout_i                                              not normalised
//! dbias_ij += ds_j, or dx_j if the bias is added before the soft cap
//! ```
//!
//! A sink is a key without a value: dp = 0, and its score does not depend on q, k or bias.

use ndarray::{Array2, Array4, ArrayView3, ArrayView4};

use super::{
    Problem, expect_shape,
    row::{Rows, Softmax, broadcast},
    vector, vector_mut,
};
use crate::{BiasOrder, Dims, Result};

/// Gradients, each in the shape of its input.
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    /// `[b, q_len, q_heads, d]`.
    pub dq: Array4<f64>,
    /// `[b, kv_len, kv_heads, d]`.
    pub dk: Array4<f64>,
    /// `[b, kv_len, kv_heads, dv]`.
    pub dv: Array4<f64>,
    /// Summed over the broadcast axes of the bias; `None` without a bias tensor.
    pub dbias: Option<Array4<f64>>,
    /// Summed over all rows that share a sink; `None` without sinks.
    pub dsinks: Option<Array2<f64>>,
}

/// Computes the gradients of ⟨dout, out⟩ + ⟨dlse, lse⟩.
///
/// # Shapes
/// dout `[b, q_len, q_heads, dv]`; dlse `[b, q_heads, q_len]`. Without dlse it is 0. dlse is
/// ignored for queries without visible keys and sinks.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] naming the tensor whose shape does not fit the spec.
pub fn backward(
    problem: &Problem<'_>,
    dout: ArrayView4<'_, f64>,
    dlse: Option<ArrayView3<'_, f64>>,
) -> Result<Backward> {
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
                gradients.add_row(
                    problem,
                    &row,
                    &dout,
                    dlse.as_ref().map_or(0.0, |dlse| dlse[[b, h, i]]),
                );
            }
        }
    }
    Ok(gradients)
}

impl Backward {
    /// Adds the contribution of one query row.
    fn add_row(
        &mut self,
        problem: &Problem<'_>,
        row: &Softmax,
        dout: &ArrayView4<'_, f64>,
        dlse: f64,
    ) {
        let (b, h, i) = row.at;
        let spec = problem.spec;
        let kv_head = spec.dims.kv_head(h);
        let dout = vector(dout, [b, i, h]);
        let dout_out = dout.dot(&row.out(problem));
        // ds of a score, given dp of its pair (0 for a sink)
        let score_gradient = |score: f64, dp: f64| {
            let unnormalised = row.unnormalised(score);
            let probability = unnormalised / row.sum;
            if spec.normalize {
                return probability * (dp - dout_out + dlse);
            }
            let through_max = if score == row.max { dout_out / row.ties } else { 0.0 };
            unnormalised * dp - through_max + probability * dlse
        };
        for pair in &row.pairs {
            let k = vector(&problem.k, [b, pair.j, kv_head]);
            let v = vector(&problem.v, [b, pair.j, kv_head]);
            let ds = score_gradient(pair.score, pair.keep * dout.dot(&v));
            let dx = ds * pair.soft_cap_slope;
            let probability =
                row.unnormalised(pair.score) / if spec.normalize { row.sum } else { 1.0 };
            vector_mut(&mut self.dq, [b, i, h]).scaled_add(spec.scale * dx, &k);
            vector_mut(&mut self.dk, [b, pair.j, kv_head])
                .scaled_add(spec.scale * dx, &vector(&problem.q, [b, i, h]));
            vector_mut(&mut self.dv, [b, pair.j, kv_head])
                .scaled_add(pair.keep * probability, &dout);
            if let Some(dbias) = &mut self.dbias {
                let at = broadcast(dbias.dim().into(), [b, h, i, pair.bias_column]);
                dbias[at] += if spec.bias_order == BiasOrder::BeforeSoftCap { dx } else { ds };
            }
        }
        if let Some(dsinks) = &mut self.dsinks {
            let sink_row = if dsinks.nrows() == 1 { 0 } else { h };
            for &(t, sink) in &row.sinks {
                dsinks[[sink_row, t]] += score_gradient(sink, 0.0);
            }
        }
    }
}
