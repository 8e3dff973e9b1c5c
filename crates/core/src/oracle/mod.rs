//! The truth: O(q_len · kv_len) attention and its gradients in f64, written to be obviously right.
//!
//! ```text
//! for every batch row b, query head h, query row i:
//!     s_j   = logit of every key row j that i sees            (row.rs, from sight.rs)
//!     m     = max(max_j s_j, max_t a_t)
//!     sum   = Σ_j e^{s_j − m} + Σ_t e^{a_t − m}
//!     out_i = Σ_j keep_j · e^{s_j − m} · v_j   (/ sum)         lse_i = m + ln sum
//! ```
//!
//! It shares nothing with what it judges: no spans, tiles, shards or ranks. Positions and segment ids are read straight from the [`Batch`], and
//! who sees whom is asked of [`crate::Mask::visible`]. A pair that is not visible is *skipped*, never multiplied by zero, so what stands in a hidden
//! row cannot be felt. Memory is O(kv_len) beyond inputs and outputs.
//!
//! One rounding is the meaning and not an error: q·k to [`Spec::logits_dtype`] where that is narrower than the sums. Where it is the
//! sums' own type the oracle stays exact.

mod backward;
mod dropping;
mod row;
mod sight;
#[cfg(test)]
mod tests;

use ndarray::{Array3, Array4, ArrayRef4, ArrayView1, ArrayView2, ArrayView4, ArrayViewMut1, Axis};

use crate::{Batch, Dims, Error, Result, Spec};

pub use backward::{Backward, backward};
pub use row::Row;
pub use sight::Sight;

/// One attention with all its tensors, whole (unsharded) and widened to f64.
#[derive(Debug, Clone)]
pub struct Problem<'a> {
    /// What is computed.
    pub spec: &'a Spec,
    /// Segment ids, positions, dense masks, packed lengths of the whole batch.
    pub batch: &'a Batch,
    /// `[b, q_len, q_heads, d]`.
    pub q: ArrayView4<'a, f64>,
    /// `[b, kv_len, kv_heads, d]`.
    pub k: ArrayView4<'a, f64>,
    /// `[b, kv_len, kv_heads, dv]`.
    pub v: ArrayView4<'a, f64>,
    /// `[b|1, q_heads|1, q_len|1, kv_len|1]`.
    pub bias: Option<ArrayView4<'a, f64>>,
    /// `[q_heads|1, sinks]`.
    pub sinks: Option<ArrayView2<'a, f64>>,
}

/// What forward gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// `[b, q_len, q_heads, dv]`; 0 where a row sees nothing.
    pub out: Array4<f64>,
    /// `[b, q_heads, q_len]`, natural logarithm; −∞ where a row sees nothing and has no sinks.
    pub lse: Array3<f64>,
    /// Largest logit a row, sinks included, shaped as lse; −∞ where there is none.
    pub max: Array3<f64>,
    /// Σ e^{s − max} a row, sinks included, shaped as lse; 0 where there is none.
    pub sum: Array3<f64>,
    /// How many keys and sinks share the largest logit, shaped as lse.
    pub ties: Array3<f64>,
}

/// Computes attention.
///
/// # Shapes
/// As the fields of [`Problem`] and [`Forward`] say.
/// # Errors
/// [`Error::InvalidArgument`] naming the tensor whose shape does not fit the spec.
/// # Source
/// Vaswani et al. 2017, §3.2.1, row by row.
pub fn forward(problem: &Problem<'_>) -> Result<Forward> {
    let rows = row::Rows::new(problem)?;
    let Dims { batch, q_len, q_heads, value_dim, .. } = problem.spec.dims;
    let statistics = || Array3::zeros((batch, q_heads, q_len));
    let mut forward = Forward {
        out: Array4::zeros((batch, q_len, q_heads, value_dim)),
        lse: statistics(),
        max: statistics(),
        sum: statistics(),
        ties: statistics(),
    };
    for b in 0..batch {
        for h in 0..q_heads {
            for i in 0..q_len {
                let row = rows.row(b, h, i).finish(problem);
                vector_mut(&mut forward.out, [b, i, h]).assign(&row.out);
                forward.lse[[b, h, i]] = row.lse;
                forward.max[[b, h, i]] = row.max;
                forward.sum[[b, h, i]] = row.sum;
                forward.ties[[b, h, i]] = row.ties;
            }
        }
    }
    Ok(forward)
}

/// Computes the rows `(batch, head, query row)` alone: O(rows · kv_len), to verify a sample of a long sequence.
///
/// # Errors
/// As [`forward`]; also [`Error::InvalidArgument`] naming `rows` if one does not exist.
pub fn forward_rows(problem: &Problem<'_>, rows: &[(usize, usize, usize)]) -> Result<Vec<Row>> {
    let all = row::Rows::new(problem)?;
    rows.iter().map(|&(b, h, i)| problem.check_row(b, h, i).map(|()| all.row(b, h, i).finish(problem))).collect()
}

impl Problem<'_> {
    /// Checks that spec, batch and tensors fit each other.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming what does not fit.
    pub fn validate(&self) -> Result<()> {
        self.spec.validate()?;
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.spec.dims;
        self.spec.validate_batch(self.batch, q_len, kv_len)?;
        expect_shape("query", self.q.shape(), &[batch, q_len, q_heads, head_dim])?;
        expect_shape("key", self.k.shape(), &[batch, kv_len, kv_heads, head_dim])?;
        expect_shape("value", self.v.shape(), &[batch, kv_len, kv_heads, value_dim])?;
        match (&self.bias, self.spec.bias) {
            (Some(bias), Some(shape)) => expect_shape("bias", bias.shape(), &shape)?,
            (None, None) => {}
            (bias, want) => return Err(Error::invalid("bias", presence(bias.is_some()), presence(want.is_some()))),
        }
        match (&self.sinks, self.spec.sinks) {
            (Some(sinks), Some(shape)) => {
                expect_shape("softmax_aux", sinks.shape(), &[if shape.per_head { q_heads } else { 1 }, shape.count])
            }
            (None, None) => Ok(()),
            (sinks, want) => Err(Error::invalid("softmax_aux", presence(sinks.is_some()), presence(want.is_some()))),
        }
    }

    /// Who sees whom.
    ///
    /// # Errors
    /// As [`Problem::validate`].
    pub fn sight(&self) -> Result<Sight<'_>> {
        self.validate()?;
        Ok(Sight::new(self.spec, self.batch))
    }

    fn check_row(&self, b: usize, h: usize, i: usize) -> Result<()> {
        let Dims { batch, q_len, q_heads, .. } = self.spec.dims;
        if b < batch && h < q_heads && i < q_len {
            return Ok(());
        }
        let want = format!("batch rows 0..{batch}, heads 0..{q_heads}, query rows 0..{q_len}");
        Err(Error::invalid("rows", format!("batch row {b}, head {h}, query row {i}"), want))
    }
}

/// Refuses a tensor of another shape.
fn expect_shape(argument: &str, got: &[usize], want: &[usize]) -> Result<()> {
    if got == want { Ok(()) } else { Err(Error::invalid(argument, format!("{got:?}"), format!("{want:?}"))) }
}

const fn presence(given: bool) -> &'static str {
    if given { "a tensor" } else { "none" }
}

/// The last axis at three indices.
fn vector(tensor: &ArrayRef4<f64>, [b, row, head]: [usize; 3]) -> ArrayView1<'_, f64> {
    tensor.index_axis(Axis(0), b).index_axis_move(Axis(0), row).index_axis_move(Axis(0), head)
}

/// The last axis at three indices, for writing.
fn vector_mut(tensor: &mut ArrayRef4<f64>, [b, row, head]: [usize; 3]) -> ArrayViewMut1<'_, f64> {
    tensor.index_axis_mut(Axis(0), b).index_axis_move(Axis(0), row).index_axis_move(Axis(0), head)
}
