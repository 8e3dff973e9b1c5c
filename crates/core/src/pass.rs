//! Tensors and blocks of one pass on one rank, in the memory space of its backend.

use std::sync::Arc;

use crate::{DenseMask, Error, RankLeaves, Result, RowLayout, Rows, Space, Spec, Visibility};

/// One rank's part of the attention, fixed when a plan is made or updated.
#[derive(Debug, Clone)]
pub struct RankShard {
    /// Definition of the attention.
    pub spec: Arc<Spec>,
    /// Query rows of this rank, in local order.
    pub queries: Arc<Rows>,
    /// Key rows of this rank, in local order.
    pub keys: Arc<Rows>,
    /// Dense mask `[b|1, heads|1, local q_len, global kv_len]`.
    pub attention_mask: Option<Arc<DenseMask>>,
    /// Maximum rows of a KV block, this rank's own included.
    pub most_block_rows: u64,
    /// Maximum rows of a query block, this rank's own included (two-pass backward).
    pub most_query_rows: u64,
    /// Leaves in the order of their arrival, of a spec with [`Spec::leaf_rows`]. Blocks then arrive
    /// in this order, and each contains leaves in ascending local order; a leaf may lack rows that
    /// are masked for all local queries, and may be divided between blocks that follow each other,
    /// at a multiple of [`crate::Capabilities::kv_tile`] of its row numbers.
    pub leaves: Option<Arc<RankLeaves>>,
}

impl RankShard {
    /// Returns the wire format of one query row in the two-pass backward. In the reproducible order
    /// a query that is sent to other ranks has its rows of a bias and of a dense mask with it.
    pub fn query_row_layout(&self) -> RowLayout {
        if self.leaves.as_ref().is_some_and(|leaves| leaves.sends_queries) {
            self.spec.whole_query_row_layout(self.attention_mask.as_ref().map(|mask| mask.shape()))
        } else {
            self.spec.query_row_layout()
        }
    }

    /// Returns the complete mask between `queries` and `keys`. The rows of a dense mask are this
    /// rank's, so that with one `queries` must be this rank's.
    pub fn visibility<'a>(&'a self, queries: &'a Rows, keys: &'a Rows) -> Visibility<'a> {
        let attention_mask = self.attention_mask.as_deref();
        Visibility { mask: self.spec.mask.as_ref(), attention_mask, queries, keys }
    }
}

/// Inputs of a forward pass. q_len and kv_len of q, k and v count the rows of this rank.
pub struct Inputs<'a, S: Space> {
    /// `[b, local q_len, q_heads, d]`.
    pub q: S::View<'a>,
    /// `[b, local kv_len, kv_heads, d]`.
    pub k: S::View<'a>,
    /// `[b, local kv_len, kv_heads, dv]`.
    pub v: S::View<'a>,
    /// `[b|1, q_heads|1, local q_len|1, global kv_len|1]`, in the accumulator's type.
    pub bias: Option<S::View<'a>>,
    /// `[q_heads|1, sinks, 1, 1]`, in the accumulator's type.
    pub sinks: Option<S::View<'a>>,
}

impl<S: Space> Inputs<'_, S> {
    /// Borrows the same tensors for a shorter time. A pass borrows its inputs and its workspace for
    /// one lifetime, and `Inputs` is invariant in its own.
    pub fn reborrow(&self) -> Inputs<'_, S> {
        Inputs {
            q: S::reborrow(&self.q),
            k: S::reborrow(&self.k),
            v: S::reborrow(&self.v),
            bias: self.bias.as_ref().map(S::reborrow),
            sinks: self.sinks.as_ref().map(S::reborrow),
        }
    }
}

/// Outputs of a forward pass. Their contents before the pass have no effect.
pub struct Outputs<'a, S: Space> {
    /// `[b, local q_len, q_heads, dv]`, in the inputs' type.
    pub out: S::ViewMut<'a>,
    /// `[b, q_heads, local q_len, 1]`, in the accumulator's type, natural logarithm. −∞ for a query
    /// without a visible key and without sinks.
    pub lse: S::ViewMut<'a>,
    /// Row maximum of the scores, shaped as lse: −∞ for an empty row. `max` and `sum` are both
    /// present or both absent; of an output that is not normalised they are present.
    pub max: Option<S::ViewMut<'a>>,
    /// Row sum Σ e^(s − max), shaped as lse: 0 for an empty row.
    pub sum: Option<S::ViewMut<'a>>,
    /// Number of keys and sinks that share the row maximum, shaped as lse. Present if and only if
    /// the output is not normalised.
    pub ties: Option<S::ViewMut<'a>>,
    /// Rounding residual of out: out before it was rounded − out, rounded too; 0 where out is not
    /// finite. Shaped and typed as out. Only of 16-bit inputs, and of backends with
    /// [`crate::Capabilities::out_residual`].
    pub out_residual: Option<S::ViewMut<'a>>,
}

/// Inputs of a backward pass.
///
/// Probabilities are P = e^(s − max) / sum. The maximum and the sum are two numbers, because one,
/// lse = max + ln sum, rounds ln sum away where the maximum is large: in f32 half of it at −10⁷ and
/// all of it at −10⁹, which programs add to scores to mask them.
///
/// ⟨dout, out⟩ is a small difference of large terms where all keys share a large component, and out
/// in 16 bits has lost that difference. With `out_residual` it is ⟨dout, out⟩ + ⟨dout, out_residual⟩.
pub struct BackwardInputs<'a, S: Space> {
    /// Inputs of the forward pass.
    pub forward: Inputs<'a, S>,
    /// Output of the forward pass.
    pub out: S::View<'a>,
    /// Row maximum of the forward pass; without `sum` its lse. −∞ marks an empty row.
    pub max: S::View<'a>,
    /// Row sum of the forward pass; `None` is 1. Present if the output is not normalised.
    pub sum: Option<S::View<'a>>,
    /// Ties of the forward pass. Present if and only if the output is not normalised.
    pub ties: Option<S::View<'a>>,
    /// Rounding residual of out; `None` is 0. As [`Outputs::out_residual`].
    pub out_residual: Option<S::View<'a>>,
    /// ∂L/∂out, shaped and typed as out.
    pub dout: S::View<'a>,
    /// ∂L/∂lse, shaped and typed as max; `None` is 0. Ignored for rows without a visible key and
    /// without sinks.
    pub dlse: Option<S::View<'a>>,
}

/// Returns the maximum and the sum of a backward pass from the results of a forward pass that a
/// caller has kept: both, or neither, and then lse with a sum of 1.
///
/// # Errors
/// [`Error::InvalidArgument`] for one without the other.
pub fn max_and_sum<V>(lse: V, max: Option<V>, sum: Option<V>) -> Result<(V, Option<V>)> {
    match (max, sum) {
        (Some(max), Some(sum)) => Ok((max, Some(sum))),
        (None, None) => Ok((lse, None)),
        (Some(_), None) => Err(Error::invalid("sum", "nothing", "one, since max is given")),
        (None, Some(_)) => Err(Error::invalid("max", "nothing", "one, since sum is given")),
    }
}

impl<S: Space> BackwardInputs<'_, S> {
    /// Borrows the same tensors for a shorter time, as [`Inputs::reborrow`].
    pub fn reborrow(&self) -> BackwardInputs<'_, S> {
        BackwardInputs {
            forward: self.forward.reborrow(),
            out: S::reborrow(&self.out),
            max: S::reborrow(&self.max),
            sum: self.sum.as_ref().map(S::reborrow),
            ties: self.ties.as_ref().map(S::reborrow),
            out_residual: self.out_residual.as_ref().map(S::reborrow),
            dout: S::reborrow(&self.dout),
            dlse: self.dlse.as_ref().map(S::reborrow),
        }
    }
}

/// Outputs of a backward pass. Their contents before the pass have no effect.
pub struct Gradients<'a, S: Space> {
    /// Shaped and typed as q.
    pub dq: S::ViewMut<'a>,
    /// Shaped and typed as k.
    pub dk: S::ViewMut<'a>,
    /// Shaped and typed as v.
    pub dv: S::ViewMut<'a>,
    /// This rank's part of ∂L/∂bias, shaped and typed as its bias. Present if and only if there is
    /// a bias.
    pub dbias: Option<S::ViewMut<'a>>,
    /// This rank's part of ∂L/∂sinks, shaped and typed as the sinks. Present if and only if there
    /// are sinks.
    pub dsinks: Option<S::ViewMut<'a>>,
}

/// A block of rows in wire order: records of [`Spec::kv_row_layout`] or [`Spec::query_row_layout`].
pub struct Block<'a, S: Space> {
    /// At least `rows.len()` records.
    pub buffer: &'a S::Buffer,
    /// Event after which the buffer may be read.
    pub ready: &'a S::Event,
    /// Positions, segment ids and row numbers of the records, in the same order.
    pub rows: &'a Rows,
    /// Local index of the first row if they are consecutive rows of this rank: of keys, a pass may
    /// read K and V from its inputs instead of `buffer`. `None` if they are another rank's.
    pub first_local: Option<usize>,
}
