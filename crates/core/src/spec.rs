//! Definition of one attention: every number and option that must be equal on all ranks. The
//! attention of a part of the heads: everything that depends on a head keeps its number in the
//! whole attention (masks, bias functions, dropout).

use std::{ops::Range, sync::Arc};

use crate::{
    Batch, BiasFunction, BiasTable, DType, Dims, Error, Fingerprint, KeyIntervals, Mask, Result,
    RowField, RowLayout,
    mask::{Band, Key, Query, SharedMask},
};

/// Position i' of query row i, if q_len and kv_len differ and the batch has no explicit positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Alignment {
    /// i' = i.
    #[default]
    TopLeft,
    /// i' = i + kv_len − q_len: the last query has the position of the last key.
    BottomRight,
}

/// Order of bias and soft cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BiasOrder {
    /// cap·tanh((x + bias)/cap).
    BeforeSoftCap,
    /// cap·tanh(x/cap) + bias.
    #[default]
    AfterSoftCap,
}

/// Rounding that backends are permitted to add to matrix products.
///
/// For f32 inputs the precisions are those of matrix units; all present backends compute these
/// products in f32 at every precision.
///
/// No precision keeps 16-bit inputs from the matrix units of GPUs, whose products require P and dS
/// in 16 bits: CUDA above its level `plain` rounds both to the inputs' type, and wgpu at its level
/// `matrix` rounds both to f16 for f16 inputs. Lower levels of these backends do not round. On the
/// CPU [`Precision::Default`] permits rounding P and dS of bf16 inputs to bf16, on processors that
/// multiply bf16 at least twice as fast as f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Precision {
    /// No rounding: products of f32, except on the matrix units of GPUs with 16-bit inputs.
    #[default]
    Highest,
    /// Three products of narrower terms into which f32 operands are split.
    High,
    /// One product of tf32.
    Default,
}

/// Number of times that the backward pass passes blocks around the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackwardMode {
    /// KV blocks travel again, and their dK/dV accumulators follow one step behind.
    #[default]
    OnePass,
    /// KV blocks travel for dQ, then query blocks travel for dK and dV. No accumulator is sent.
    TwoPass,
}

/// Shape of the learnable sink logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkShape {
    /// True if each query head has its own sinks (`[q_heads, count]`), false if all heads share
    /// them (`[1, count]`).
    pub per_head: bool,
    /// Number of sinks per head.
    pub count: usize,
}

impl SinkShape {
    /// Returns the shape of `count` sinks shared by all heads: `[1, count]`.
    pub const fn shared(count: usize) -> Self {
        Self { per_head: false, count }
    }

    /// Returns the shape of `count` sinks per query head: `[q_heads, count]`.
    pub const fn per_head(count: usize) -> Self {
        Self { per_head: true, count }
    }
}

/// Dropout of probabilities. The dropout mask is a pure function of seed, batch row, head and row
/// numbers (see [`crate::DropoutMask`]), so it does not depend on layout or number of ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Probability with which an element of P is dropped, 0 ≤ p < 1.
    pub probability: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// The definition of one attention without its tensors. Equal on all ranks.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Lengths of the global tensors.
    pub dims: Dims,
    /// Element type of q, k, v, out and their gradients.
    pub dtype: DType,
    /// Visible pairs by position and row number. Segment ids, dense masks and `cum_seqlens` belong
    /// to a [`Batch`].
    pub mask: Arc<dyn Mask>,
    /// Positions of queries if q_len and kv_len differ.
    pub alignment: Alignment,
    /// Factor of q·k, any finite number.
    pub scale: f64,
    /// cap in cap·tanh(x/cap), finite and > 0. `None`: no soft cap.
    pub soft_cap: Option<f64>,
    /// Global shape `[b|1, q_heads|1, q_len|1, kv_len|1]` of the additive bias tensor. `None`: no
    /// tensor.
    pub bias: Option<[usize; 4]>,
    /// The bias tensor is a table, of the shape of [`BiasTable::shape`]: the bias of a pair is the
    /// element of the column [`BiasTable::index`]. `None`: the columns are keys.
    pub bias_table: Option<BiasTable>,
    /// Bias computed from positions. Added to the tensor if both are given. It has no gradient.
    pub bias_function: Option<Arc<dyn BiasFunction>>,
    /// Order of biases and soft cap.
    pub bias_order: BiasOrder,
    /// Shape of the learnable sink logits. `None`: no sinks.
    pub sinks: Option<SinkShape>,
    /// True if out is divided by the row sum. If false, row maximum and row sum are outputs too.
    pub normalize: bool,
    /// True if forward passes write [`Outputs::statistics`](crate::Outputs::statistics) and
    /// [`Outputs::head_statistics`](crate::Outputs::head_statistics).
    pub statistics: bool,
    /// Dropout of probabilities. `None`: no dropout.
    pub dropout: Option<Dropout>,
    /// Type to which q·k is rounded before scale, bias and soft cap.
    pub logits_dtype: DType,
    /// Permitted rounding of matrix products.
    pub precision: Precision,
    /// Number of passes around the ring in the backward pass.
    pub backward: BackwardMode,
    /// Rows of a leaf of the reproducible order, with which the bits of the results depend neither
    /// on the number of ranks nor on the layout. `None`: the order of arrival.
    pub leaf_rows: Option<u64>,
    /// The query heads as a part of a whole attention's, whose numbers masks, bias functions and
    /// dropout use. `None`: they are all heads.
    pub head_shard: Option<HeadShard>,
    /// True if the results are partial, over the keys of the layout alone, which may lack some of
    /// them: ranks with other keys have the other terms. out and dq are then in the accumulator's
    /// type. A backward pass reads the statistics of all keys: lse, and −delta in place of dlse, so
    /// that it does not read out.
    pub partial: bool,
}

/// Query heads of a spec as a part of a whole attention's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShard {
    /// Number of the first head in the whole attention.
    pub first: usize,
    /// Query heads of the whole attention.
    pub q_heads: usize,
}

impl Spec {
    /// Creates the spec of full attention over `dims` with scale 1/√head_dim and default options.
    pub fn new(dims: Dims, dtype: DType) -> Self {
        Self {
            dims,
            dtype,
            mask: Arc::new(crate::mask::Everything),
            alignment: Alignment::default(),
            scale: 1.0 / (dims.head_dim as f64).sqrt(),
            soft_cap: None,
            bias: None,
            bias_table: None,
            bias_function: None,
            bias_order: BiasOrder::default(),
            sinks: None,
            normalize: true,
            statistics: false,
            dropout: None,
            logits_dtype: dtype.accumulator(),
            precision: Precision::default(),
            backward: BackwardMode::default(),
            leaf_rows: None,
            head_shard: None,
            partial: false,
        }
    }

    /// Checks the range of every field.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the argument of the public interface.
    pub fn validate(&self) -> Result<()> {
        self.dims.validate()?;
        self.mask.validate(&self.dims)?;
        if !self.scale.is_finite() {
            return Err(Error::invalid("softmax_scale", self.scale, "a finite number"));
        }
        if let Some(cap) = self.soft_cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(Error::invalid("logits_soft_cap", cap, "a finite number above 0"));
        }
        if let Some(shape) = self.bias {
            let Dims { batch, q_heads, q_len, kv_len, .. } = self.dims;
            let full = [batch, q_heads, q_len, kv_len];
            if let Some(table) = &self.bias_table {
                let want = table.shape(q_heads);
                if shape != want {
                    return Err(Error::invalid(
                        "bias_table",
                        format!("a bias of shape {shape:?}"),
                        format!("{want:?}"),
                    ));
                }
            } else if shape.iter().zip(full).any(|(&got, full)| got != full && got != 1) {
                return Err(Error::invalid(
                    "bias",
                    format!("{shape:?}"),
                    format!("{full:?}, where any length may be 1"),
                ));
            }
        }
        if self.bias_table.is_some() && self.bias.is_none() {
            return Err(Error::invalid("bias_table", "no bias", "the table as the bias"));
        }
        if let Some(sinks) = self.sinks.filter(|sinks| sinks.count == 0) {
            let owner = if sinks.per_head { "per head" } else { "shared by all heads" };
            return Err(Error::invalid(
                "softmax_aux",
                format!("0 sinks {owner}"),
                "at least one sink, or no softmax_aux",
            ));
        }
        if let Some(dropout) =
            self.dropout.filter(|dropout| !(0.0..1.0).contains(&dropout.probability))
        {
            return Err(Error::invalid("dropout_prob", dropout.probability, "0 ≤ p < 1"));
        }
        if self.leaf_rows == Some(0) {
            return Err(Error::invalid("leaf_rows", 0, "at least 1"));
        }
        Ok(())
    }

    /// Returns the wire format of one key row: k and v in the inputs' type.
    pub fn kv_row_layout(&self) -> RowLayout {
        self.key_and_value_layout(self.dtype)
    }

    /// Returns the wire format of one key row with its tangents: for each KV head k and its tangent,
    /// then for each v and its tangent, in the inputs' type.
    ///
    /// A vector and its tangent are adjacent, so that ⟨k, q̇⟩ + ⟨k̇, q⟩ is one product over 2·head_dim
    /// elements.
    pub fn tangent_row_layout(&self) -> RowLayout {
        let Dims { batch, kv_heads: heads, head_dim, value_dim, .. } = self.dims;
        let field = |dim| RowField { batch, heads, dim: 2 * dim, dtype: self.dtype };
        RowLayout::new([head_dim, value_dim].map(field))
    }

    /// Returns the wire format of the gradients of one key row: dk and dv in the accumulator's
    /// type. In the reproducible order, where gradients are not sent, dbias of a bias that is
    /// broadcast over queries follows: see [`Spec::bias_heads_per_kv_head`].
    pub fn gradient_row_layout(&self) -> RowLayout {
        let dtype = self.dtype.accumulator();
        let Dims { batch, kv_heads: heads, head_dim, value_dim, .. } = self.dims;
        match (self.leaf_rows, self.pair_bias()) {
            (Some(_), Some([_, _, 1, _])) => {
                let dims = [head_dim, value_dim, self.bias_heads_per_kv_head()];
                RowLayout::new(dims.map(|dim| RowField { batch, heads, dim, dtype }))
            }
            _ => self.key_and_value_layout(dtype),
        }
    }

    /// Returns the shape of the bias if its columns are keys, not the entries of a table.
    pub fn pair_bias(&self) -> Option<[usize; 4]> {
        self.bias.filter(|_| self.bias_table.is_none())
    }

    /// Returns true if dbias is that of a table in the reproducible order, whose sums are exact
    /// ([`crate::LeafSums`]).
    pub const fn sums_bias_exactly(&self) -> bool {
        self.bias_table.is_some() && self.leaf_rows.is_some()
    }

    /// Returns the number of bias gradients per KV head of a query or a key: one for each query
    /// head of the group, or one if the heads share the bias.
    pub fn bias_heads_per_kv_head(&self) -> usize {
        match self.bias {
            Some([_, 1, _, _]) => 1,
            _ => self.dims.group(),
        }
    }

    /// Returns the wire format of one query row in the two-pass backward: q and dout in the inputs'
    /// type, and [`Spec::ROW_STATISTICS`] numbers per head in the accumulator's type.
    pub fn query_row_layout(&self) -> RowLayout {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = self.dims;
        let field = |dim, dtype| RowField { batch, heads: q_heads, dim, dtype };
        RowLayout::new([
            field(head_dim, self.dtype),
            field(value_dim, self.dtype),
            field(Self::ROW_STATISTICS, self.dtype.accumulator()),
        ])
    }

    /// Returns the wire format of one query row with its row of a bias that has a query axis, and
    /// of a dense mask of shape `attention_mask`, 64 keys in 8 bytes. Ranks send it in the
    /// reproducible order: see [`crate::RankShard::query_row_layout`].
    pub fn whole_query_row_layout(&self, attention_mask: Option<[usize; 4]>) -> RowLayout {
        let field = |[batch, heads, _, keys]: [usize; 4], dtype| RowField {
            batch,
            heads,
            dim: keys,
            dtype,
        };
        let bias = self.bias.filter(|shape| shape[2] != 1).unwrap_or_default();
        let mask = attention_mask.unwrap_or_default();
        let words = [mask[0], mask[1], mask[2], mask[3].div_ceil(64)];
        let bias = field(bias, self.dtype.accumulator());
        self.query_row_layout().with_extra([bias, field(words, DType::F64)])
    }

    /// Number of row statistics of one query row and head in the backward pass:
    /// `[max, 1/sum, delta, share]`, where P = e^(s − max)·(1/sum). An empty row has max = +∞, so
    /// that its probabilities are 0 whatever its scores.
    ///
    /// | output | delta | share |
    /// |---|---|---|
    /// | normalised | ⟨dout, out⟩ − dlse | unused |
    /// | not normalised | −dlse | ⟨dout, out⟩ / ties |
    ///
    /// `share` is subtracted from dS of each score that equals the row maximum, because the output
    /// depends on the maximum too.
    pub const ROW_STATISTICS: usize = 4;

    /// Number of statistics of the scores of one row ([`crate::Outputs::statistics`]):
    /// `[max_product, max_score, entropy]`.
    ///
    /// | statistic | formula, over the visible keys | a row without a visible key |
    /// |---|---|---|
    /// | max_product | max scale·q·k, before bias and soft cap | −∞ |
    /// | max_score | max s, after bias and soft cap | −∞ |
    /// | entropy | lse − Σ p·s, where the sinks are scores, too | that of the sinks; 0 without |
    pub const SCORE_STATISTICS: usize = 3;

    /// Refuses a part of another attention: of its heads, or of its keys.
    ///
    /// # Errors
    /// [`Error::Unsupported`] by `backend`.
    pub fn check_whole(&self, backend: &str) -> Result<()> {
        if self.head_shard.is_some() {
            return Err(Error::unsupported("a part of the heads", backend));
        }
        self.check_complete(backend)
    }

    /// Refuses partial results, of a part of the keys.
    ///
    /// # Errors
    /// [`Error::Unsupported`] by `backend`.
    pub fn check_complete(&self, backend: &str) -> Result<()> {
        if self.partial {
            return Err(Error::unsupported("partial results", backend));
        }
        Ok(())
    }

    /// Returns the type of out and dq: the element type, or the accumulator's if the results are
    /// partial.
    pub fn results_dtype(&self) -> DType {
        if self.partial { self.dtype.accumulator() } else { self.dtype }
    }

    /// Checks this rank's part of a batch against the spec. The rank owns `q_rows` query rows and
    /// `kv_rows` key rows.
    ///
    /// # Errors
    /// As [`Batch::validate`].
    pub fn validate_batch(&self, batch: &Batch, q_rows: usize, kv_rows: usize) -> Result<()> {
        batch.validate(&self.dims, q_rows, kv_rows)
    }

    /// Returns the layout of one vector per KV head of the keys' dim, then of the values' dim.
    fn key_and_value_layout(&self, dtype: DType) -> RowLayout {
        let Dims { batch, kv_heads: heads, head_dim, value_dim, .. } = self.dims;
        RowLayout::new([head_dim, value_dim].map(|dim| RowField { batch, heads, dim, dtype }))
    }

    /// Returns the number of query head `head` in the whole attention and the number of its query
    /// heads, which determine the dropout mask.
    pub fn whole_head(&self, head: usize) -> (usize, usize) {
        let HeadShard { first, q_heads } =
            self.head_shard.unwrap_or(HeadShard { first: 0, q_heads: self.dims.q_heads });
        (first + head, q_heads)
    }
}

impl Spec {
    /// Returns the spec of the query heads `heads`, which have `kv_heads` KV heads.
    #[must_use]
    pub fn of_heads(&self, heads: Range<usize>, kv_heads: usize) -> Self {
        let q_heads = self.dims.q_heads;
        if heads.len() == q_heads {
            return self.clone();
        }
        let Range { start: first, .. } = heads;
        let dims = Dims { q_heads: heads.len(), kv_heads, ..self.dims };
        let mask: SharedMask = if self.mask.per_head() {
            Arc::new(HeadShardMask { whole: Arc::clone(&self.mask), first, q_heads })
        } else {
            Arc::clone(&self.mask)
        };
        let bias_function = self.bias_function.as_ref().map(|function| {
            let whole = Arc::clone(function);
            Arc::new(HeadShardBias { whole, first }) as Arc<dyn BiasFunction>
        });
        let bias = self.bias.map(|[batch, of_heads, queries, keys]| {
            [batch, if of_heads == 1 { 1 } else { heads.len() }, queries, keys]
        });
        let head_shard = Some(HeadShard { first, q_heads });
        Self { dims, mask, bias_function, bias, head_shard, ..self.clone() }
    }
}

/// The mask of the heads from `first` on of a whole attention.
#[derive(Debug)]
struct HeadShardMask {
    whole: SharedMask,
    first: usize,
    /// Query heads of the whole attention.
    q_heads: usize,
}

impl HeadShardMask {
    const fn whole_query(&self, query: &Query) -> Query {
        Query { head: query.head + self.first, ..*query }
    }
}

impl Mask for HeadShardMask {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        self.whole.fingerprint(into.text("heads from").number(self.first as u64))
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        self.whole.visible(&self.whole_query(query), key)
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        self.whole.intervals(&self.whole_query(query))
    }

    fn bound(&self, query: &Query) -> KeyIntervals {
        self.whole.bound(&self.whole_query(query))
    }

    fn band(&self, batch: usize, head: usize) -> Option<Band> {
        self.whole.band(batch, head + self.first)
    }

    fn per_head(&self) -> bool {
        self.whole.per_head()
    }

    fn per_batch(&self) -> bool {
        self.whole.per_batch()
    }

    fn validate(&self, dims: &Dims) -> Result<()> {
        self.whole.validate(&Dims { q_heads: self.q_heads, ..*dims })
    }
}

/// The bias function of the heads from `first` on of a whole attention.
#[derive(Debug)]
struct HeadShardBias {
    whole: Arc<dyn BiasFunction>,
    first: usize,
}

impl BiasFunction for HeadShardBias {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        self.whole.fingerprint(into.text("heads from").number(self.first as u64))
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        self.whole.bias(&Query { head: query.head + self.first, ..*query }, key)
    }

    fn distance_slopes(&self) -> Option<&[f64]> {
        // heads beyond the last slope have none
        self.whole.distance_slopes().map(|slopes| slopes.get(self.first..).unwrap_or_default())
    }
}
