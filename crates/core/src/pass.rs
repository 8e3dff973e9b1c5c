//! Tensors and blocks of one pass on one rank, in the memory space of its backend.

use std::sync::Arc;

use crate::{
    DenseMask, Error, KeyLists, ListedKeys, RankLeaves, ReceivedLists, Result, RowLayout, Rows,
    Space, Spec, Visibility,
};

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
    /// Key lists `[b|1, groups, local q_len]` of global key rows.
    pub key_lists: Option<Arc<KeyLists>>,
    /// Key lists of the queries that others send (two-pass backward).
    pub received_lists: Option<Arc<ReceivedLists>>,
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

    /// Returns the complete mask between `queries` and `keys`. The rows of a dense mask and of key
    /// lists are this rank's, so that with one `queries` must be this rank's.
    pub fn visibility<'a>(&'a self, queries: &'a Rows, keys: &'a Rows) -> Visibility<'a> {
        let attention_mask = self.attention_mask.as_deref();
        let q_heads = self.spec.dims.q_heads;
        let key_lists = self.key_lists.as_deref().map(|lists| ListedKeys::new(lists, q_heads));
        Visibility { mask: self.spec.mask.as_ref(), attention_mask, key_lists, queries, keys }
    }
}

/// Tensor of the caller in the space `S`, borrowed for reading.
pub type View<'a, S> = <S as Space>::View<'a>;
/// Tensor of the caller in the space `S`, borrowed for writing.
pub type ViewMut<'a, S> = <S as Space>::ViewMut<'a>;

/// Inputs of a forward pass. q_len and kv_len of q, k and v count the rows of this rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Inputs<V> {
    /// `[b, local q_len, q_heads, d]`.
    pub q: V,
    /// `[b, local kv_len, kv_heads, d]`.
    pub k: V,
    /// `[b, local kv_len, kv_heads, dv]`.
    pub v: V,
    /// `[b|1, q_heads|1, local q_len|1, global kv_len|1]`, in the accumulator's type.
    pub bias: Option<V>,
    /// `[q_heads|1, sinks, 1, 1]`, in the accumulator's type.
    pub sinks: Option<V>,
}

/// Outputs of a forward pass. Their contents before the pass have no effect.
#[derive(Debug, Clone, Copy)]
pub struct Outputs<V> {
    /// `[b, local q_len, q_heads, dv]`, in the inputs' type.
    pub out: V,
    /// `[b, q_heads, local q_len, 1]`, in the accumulator's type, natural logarithm. −∞ for a query
    /// without a visible key and without sinks.
    pub lse: V,
    /// Row maximum of the scores, shaped as lse: −∞ for an empty row. `max` and `sum` are both
    /// present or both absent; of an output that is not normalised they are present.
    pub max: Option<V>,
    /// Row sum Σ e^(s − max), shaped as lse: 0 for an empty row.
    pub sum: Option<V>,
    /// Number of keys and sinks that share the row maximum, shaped as lse. Present if and only if
    /// the output is not normalised.
    pub ties: Option<V>,
    /// Rounding residual of out: out before it was rounded − out, rounded too; 0 where out is not
    /// finite. Shaped and typed as out. Only of 16-bit inputs, and of backends with
    /// [`crate::Capabilities::out_residual`].
    pub out_residual: Option<V>,
    /// Statistics of the scores of each row, `[b, q_heads, local q_len, 3]` in the accumulator's
    /// type: see [`Spec::SCORE_STATISTICS`]. NaN where lse is. Present if and only if the spec has
    /// [`Spec::statistics`].
    pub statistics: Option<V>,
    /// Maximum and mean of each statistic of each head over all batch rows, and over all rows with
    /// a visible key of all ranks, `[q_heads, 3, 2, 1]` in the accumulator's type: −∞ and NaN of a
    /// head without such a row. Present as `statistics`. The ring writes it, not the backend.
    pub head_statistics: Option<V>,
}

/// Inputs of a backward pass.
///
/// Probabilities are P = e^(s − max) / sum. The maximum and the sum are two numbers, because one,
/// lse = max + ln sum, rounds ln sum away where the maximum is large: in f32 half of it at −10⁷ and
/// all of it at −10⁹, which programs add to scores to mask them.
///
/// ⟨dout, out⟩ is a small difference of large terms where all keys share a large component, and out
/// in 16 bits has lost that difference. With `out_residual` it is ⟨dout, out⟩ + ⟨dout,
/// out_residual⟩.
#[derive(Debug, Clone, Copy)]
pub struct BackwardInputs<V> {
    /// Inputs of the forward pass.
    pub forward: Inputs<V>,
    /// Output of the forward pass.
    pub out: V,
    /// Row maximum of the forward pass; without `sum` its lse. −∞ marks an empty row.
    pub max: V,
    /// Row sum of the forward pass; `None` is 1. Present if the output is not normalised.
    pub sum: Option<V>,
    /// Ties of the forward pass. Present if and only if the output is not normalised.
    pub ties: Option<V>,
    /// Rounding residual of out; `None` is 0. As [`Outputs::out_residual`].
    pub out_residual: Option<V>,
    /// ∂L/∂out, shaped and typed as out.
    pub dout: V,
    /// ∂L/∂lse, shaped and typed as max; `None` is 0. Ignored for rows without a visible key and
    /// without sinks.
    pub dlse: Option<V>,
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

/// Outputs of a backward pass. Their contents before the pass have no effect.
#[derive(Debug, Clone, Copy)]
pub struct Gradients<V> {
    /// Shaped and typed as q.
    pub dq: V,
    /// Shaped and typed as k.
    pub dk: V,
    /// Shaped and typed as v.
    pub dv: V,
    /// This rank's part of ∂L/∂bias, shaped and typed as its bias. Present if and only if there is
    /// a bias.
    pub dbias: Option<V>,
    /// This rank's part of ∂L/∂sinks, shaped and typed as the sinks. Present if and only if there
    /// are sinks.
    pub dsinks: Option<V>,
}

/// Inputs of a JVP and of a double backward: the inputs of a forward pass, and a direction in their
/// space.
///
/// Of a JVP the direction is the tangent. Of a double backward it is the cotangents of the first
/// backward pass: that of dq in the place of q, and so on.
#[derive(Debug, Clone, Copy, Default)]
pub struct TangentInputs<V> {
    /// Inputs of the forward pass.
    pub primal: Inputs<V>,
    /// The direction, shaped and typed as `primal`. Its bias and its sinks may be `None`: 0.
    pub tangent: Inputs<V>,
    /// ∂L/∂out of the first backward pass, shaped and typed as out. Present if and only if the pass
    /// is a double backward.
    pub dout: Option<V>,
    /// ∂L/∂lse of the first backward pass, `[b, q_heads, local q_len, 1]` in the accumulator's type;
    /// `None` is 0.
    pub dlse: Option<V>,
}

/// Outputs of a JVP, which are also results of a double backward: ∂L/∂dout and ∂L/∂dlse are the
/// tangents of out and lse along the cotangents. Their contents before the pass have no effect.
#[derive(Debug, Clone, Copy)]
pub struct TangentOutputs<V> {
    /// Tangent of out, `[b, local q_len, q_heads, dv]`, in the inputs' type.
    pub out_tangent: V,
    /// Tangent of lse, `[b, q_heads, local q_len, 1]`, in the accumulator's type.
    pub lse_tangent: V,
    /// out, as [`Outputs::out`]; of a JVP only.
    pub out: Option<V>,
    /// lse, as [`Outputs::lse`]; of a JVP only.
    pub lse: Option<V>,
}

impl<V> Inputs<V> {
    /// Creates a set without bias and sinks.
    pub const fn new(q: V, k: V, v: V) -> Self {
        Self { q, k, v, bias: None, sinks: None }
    }
}

impl<V> Outputs<V> {
    /// Creates a set of the output and lse alone.
    pub const fn new(out: V, lse: V) -> Self {
        Self {
            out,
            lse,
            max: None,
            sum: None,
            ties: None,
            out_residual: None,
            statistics: None,
            head_statistics: None,
        }
    }
}

impl<V> Gradients<V> {
    /// Creates a set without dbias and dsinks.
    pub const fn new(dq: V, dk: V, dv: V) -> Self {
        Self { dq, dk, dv, dbias: None, dsinks: None }
    }
}

/// Implements the conversions of a set of tensors: nested sets, tensors, optional tensors.
macro_rules! tensor_set {
    ($set:ident { $($nested:ident)* } { $($field:ident)* } { $($optional:ident)* }) => {
        impl<V> $set<V> {
            /// Borrows every tensor.
            pub fn as_ref(&self) -> $set<&V> {
                $set {
                    $($nested: self.$nested.as_ref(),)*
                    $($field: &self.$field,)*
                    $($optional: self.$optional.as_ref(),)*
                }
            }

            /// Borrows every tensor for writing.
            pub fn as_mut(&mut self) -> $set<&mut V> {
                $set {
                    $($nested: self.$nested.as_mut(),)*
                    $($field: &mut self.$field,)*
                    $($optional: self.$optional.as_mut(),)*
                }
            }

            /// Converts every tensor.
            pub fn map<W>(self, mut convert: impl FnMut(V) -> W) -> $set<W> {
                $set {
                    $($nested: self.$nested.map(&mut convert),)*
                    $($field: convert(self.$field),)*
                    $($optional: self.$optional.map(&mut convert),)*
                }
            }

            /// Converts every tensor, in the order of the fields, up to the first error.
            ///
            /// # Errors
            /// Those of `convert`.
            pub fn try_map<W>(
                self,
                mut convert: impl FnMut(V) -> Result<W>,
            ) -> Result<$set<W>> {
                Ok($set {
                    $($nested: self.$nested.try_map(&mut convert)?,)*
                    $($field: convert(self.$field)?,)*
                    $($optional: self.$optional.map(&mut convert).transpose()?,)*
                })
            }

            /// Pairs every tensor with that of `other`. An optional one is present if both are.
            pub fn zip<W>(self, other: $set<W>) -> $set<(V, W)> {
                $set {
                    $($nested: self.$nested.zip(other.$nested),)*
                    $($field: (self.$field, other.$field),)*
                    $($optional: self.$optional.zip(other.$optional),)*
                }
            }

            /// Returns the tensors that there are, in the order of the fields.
            pub fn into_tensors(self) -> impl Iterator<Item = V> {
                let nested = std::iter::empty();
                $(let nested = nested.chain(self.$nested.into_tensors());)*
                nested
                    .chain([$(self.$field),*])
                    .chain([$(self.$optional),*].into_iter().flatten())
            }
        }
    };
}

tensor_set!(Inputs {} { q k v } { bias sinks });
tensor_set!(Outputs {} { out lse } { max sum ties out_residual statistics head_statistics });
tensor_set!(BackwardInputs { forward } { out max dout } { sum ties out_residual dlse });
tensor_set!(Gradients {} { dq dk dv } { dbias dsinks });
tensor_set!(TangentInputs { primal tangent } {} { dout dlse });
tensor_set!(TangentOutputs {} { out_tangent lse_tangent } { out lse });

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
