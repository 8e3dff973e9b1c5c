//! Reference implementation of attention and its gradients in f64, O(q_len · kv_len), that follows
//! the definition literally.
//!
//! ```text
//! for every batch row b, query head h, query row i:
//!     s_j   = score of every key row j that i attends to     (row.rs)
//!     m     = max(max_j s_j, max_t a_t)                      a_t: the sinks
//!     sum   = Σ_j e^{s_j − m} + Σ_t e^{a_t − m}
//!     out_i = Σ_j keep_j · e^{s_j − m} · v_j   (/ sum)
//!     lse_i = m + ln sum
//! ```
//!
//! The oracle shares no code with the implementations that are tested against it: it has no key
//! intervals, tiles, shards or ranks. It reads positions and segment ids from the [`Batch`] and
//! evaluates [`crate::Mask::visible`] for every pair. It *skips* a masked pair instead of
//! multiplying by zero, so NaN and ∞ in masked rows have no effect. Beyond inputs and outputs it
//! uses O(kv_len) memory.
//!
//! Rounding q·k to [`Spec::logits_dtype`] is part of the definition of attention if that type is
//! narrower than the accumulator. If it is the accumulator's type, the oracle does not round.

mod backward;
mod row;
mod tangents;

use ndarray::{Array3, Array4, ArrayRef4, ArrayView1, ArrayView2, ArrayView4, ArrayViewMut1, Axis};

use crate::{Batch, Dims, Error, Result, Spec};

pub use backward::{Backward, backward};
pub use row::PairVisibility;
pub use row::Row;
pub use tangents::{Direction, Tangents, tangents};

/// One attention with all its tensors, unsharded and converted to f64.
#[derive(Debug, Clone)]
pub struct Problem<'a> {
    /// Definition of the attention.
    pub spec: &'a Spec,
    /// Segment ids, positions, dense masks and packed lengths of the whole batch.
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

/// Results of the forward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// `[b, q_len, q_heads, dv]`; 0 for queries without visible keys.
    pub out: Array4<f64>,
    /// `[b, q_heads, q_len]`, natural logarithm; −∞ for queries without visible keys and sinks.
    pub lse: Array3<f64>,
    /// Row maximum of the scores, including sinks, in lse's shape; −∞ without scores.
    pub max: Array3<f64>,
    /// Row sum Σ e^{s − max}, including sinks, in lse's shape; 0 without scores.
    pub sum: Array3<f64>,
    /// Number of keys and sinks whose score is the row maximum, in lse's shape.
    pub ties: Array3<f64>,
    /// `[b, q_heads, q_len, 3]`: see [`Spec::SCORE_STATISTICS`].
    pub statistics: Array4<f64>,
}

/// Computes attention.
///
/// # Shapes
/// As documented at the fields of [`Problem`] and [`Forward`].
///
/// # Errors
/// [`Error::InvalidArgument`] naming the tensor whose shape does not fit the spec.
///
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
        statistics: Array4::zeros((batch, q_heads, q_len, Spec::SCORE_STATISTICS)),
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
                vector_mut(&mut forward.statistics, [b, h, i])
                    .assign(&ArrayView1::from(&row.statistics));
            }
        }
    }
    Ok(forward)
}

/// Computes only the rows `(batch, head, query row)`, in O(rows · kv_len), to verify samples of a
/// long sequence.
///
/// # Errors
/// As [`forward`]; also [`Error::InvalidArgument`] naming `rows` if one does not exist.
pub fn forward_rows(problem: &Problem<'_>, rows: &[(usize, usize, usize)]) -> Result<Vec<Row>> {
    let all = row::Rows::new(problem)?;
    rows.iter()
        .map(|&(b, h, i)| problem.check_row(b, h, i).map(|()| all.row(b, h, i).finish(problem)))
        .collect()
}

impl Problem<'_> {
    /// Checks that spec, batch and tensors are consistent.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the argument that is inconsistent with the others.
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
            (bias, want) => {
                return Err(Error::invalid(
                    "bias",
                    presence(bias.is_some()),
                    presence(want.is_some()),
                ));
            }
        }
        match (&self.sinks, self.spec.sinks) {
            (Some(sinks), Some(shape)) => expect_shape(
                "softmax_aux",
                sinks.shape(),
                &[if shape.per_head { q_heads } else { 1 }, shape.count],
            ),
            (None, None) => Ok(()),
            (sinks, want) => Err(Error::invalid(
                "softmax_aux",
                presence(sinks.is_some()),
                presence(want.is_some()),
            )),
        }
    }

    /// Returns the visible pairs.
    ///
    /// # Errors
    /// As [`Problem::validate`].
    pub fn visibility(&self) -> Result<PairVisibility<'_>> {
        self.validate()?;
        Ok(PairVisibility::new(self.spec, self.batch))
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

/// Returns an error that names `argument` unless the shapes are equal.
fn expect_shape(argument: &str, got: &[usize], want: &[usize]) -> Result<()> {
    if got == want {
        Ok(())
    } else {
        Err(Error::invalid(argument, format!("{got:?}"), format!("{want:?}")))
    }
}

const fn presence(given: bool) -> &'static str {
    if given { "a tensor" } else { "none" }
}

/// Returns a view of the last axis at three indices.
fn vector(tensor: &ArrayRef4<f64>, [b, row, head]: [usize; 3]) -> ArrayView1<'_, f64> {
    // taking axes away one by one would cost more than the sums over short vectors
    if let Some(elements) = tensor.as_slice() {
        let (_, rows, heads, length) = tensor.dim();
        let start = ((b * rows + row) * heads + head) * length;
        return ArrayView1::from(&elements[start..start + length]);
    }
    tensor.index_axis(Axis(0), b).index_axis_move(Axis(0), row).index_axis_move(Axis(0), head)
}

/// As [`vector`], mutable.
fn vector_mut(tensor: &mut ArrayRef4<f64>, [b, row, head]: [usize; 3]) -> ArrayViewMut1<'_, f64> {
    if tensor.is_standard_layout() {
        let (_, rows, heads, length) = tensor.dim();
        let start = ((b * rows + row) * heads + head) * length;
        let elements = tensor.as_slice_mut().unwrap_or_default();
        return ArrayViewMut1::from(&mut elements[start..start + length]);
    }
    tensor.index_axis_mut(Axis(0), b).index_axis_move(Axis(0), row).index_axis_move(Axis(0), head)
}
