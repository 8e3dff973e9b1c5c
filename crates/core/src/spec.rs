//! What is computed: every number and choice that all ranks must share.

use std::sync::Arc;

use crate::{Batch, BiasFunction, DType, Dims, Error, Mask, Result, RowField, RowLayout};

/// Where query row i stands among the keys when lengths differ and no explicit positions are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Alignment {
    /// i' = i.
    #[default]
    TopLeft,
    /// i' = i + kv_len − q_len: the last query sees what the last key sees.
    BottomRight,
}

/// Whether the bias is added before or after the soft cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BiasOrder {
    /// cap·tanh((x + bias)/cap).
    BeforeSoftCap,
    /// cap·tanh(x/cap) + bias.
    #[default]
    AfterSoftCap,
}

/// How products of f32 inputs are formed on matrix units; and whether weights and gradients of logits of bf16 inputs may be rounded to bf16 before
/// they are multiplied, which `Default` allows where vectors multiply f32 at best half as fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Precision {
    /// True f32.
    #[default]
    Highest,
    /// Three-term split.
    High,
    /// One tf32 product.
    Default,
}

/// How the backward pass crosses the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackwardMode {
    /// Keys and values travel again, their gradients one step behind.
    #[default]
    OnePass,
    /// Keys and values travel for dq, then queries travel for dk and dv; no accumulator crosses the ring.
    TwoPass,
}

/// Shape of the learnable sink logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkShape {
    /// Whether each query head has its own (`[q_heads, count]`), or all share (`[1, count]`).
    pub per_head: bool,
    /// Sinks a head.
    pub count: usize,
}

impl SinkShape {
    /// `count` sinks shared by all heads: `[1, count]`.
    pub const fn shared(count: usize) -> Self {
        Self { per_head: false, count }
    }

    /// `count` sinks for each query head: `[q_heads, count]`.
    pub const fn per_head(count: usize) -> Self {
        Self { per_head: true, count }
    }
}

/// Dropout of attention weights; the mask is a pure function of seed, batch row, head and row numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Share of weights dropped, in `0 ≤ p < 1`.
    pub probability: f64,
    /// Seed.
    pub seed: u64,
}

/// The whole definition of one attention, without its tensors.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Global lengths.
    pub dims: Dims,
    /// Element type of q, k, v, out and their gradients.
    pub dtype: DType,
    /// Who sees whom by position and row number; segment ids, dense masks and `cum_seqlens` come with a [`Batch`].
    pub mask: Arc<dyn Mask>,
    /// Positions of queries when lengths differ.
    pub alignment: Alignment,
    /// Multiplies q·k; any finite number.
    pub scale: f64,
    /// cap in cap·tanh(x/cap), finite and > 0.
    pub soft_cap: Option<f64>,
    /// Global shape `[b|1, q_heads|1, q_len|1, kv_len|1]` of the additive bias tensor, if there is one.
    pub bias: Option<[usize; 4]>,
    /// A bias computed from positions, added to the tensor if both are given. No gradient.
    pub bias_function: Option<Arc<dyn BiasFunction>>,
    /// Whether biases come before or after the soft cap.
    pub bias_order: BiasOrder,
    /// Learnable sink logits, if there are any.
    pub sinks: Option<SinkShape>,
    /// Whether out is divided by the sum; if not, max and sum are returned too.
    pub normalize: bool,
    /// Dropout of weights, if any.
    pub dropout: Option<Dropout>,
    /// Type to which q·k is rounded before scale, bias and cap.
    pub logits_dtype: DType,
    /// Of products on matrix units.
    pub precision: Precision,
    /// How the backward pass crosses the ring.
    pub backward: BackwardMode,
}

impl Spec {
    /// Full attention over `dims`: scale 1/√head_dim and nothing else.
    pub fn new(dims: Dims, dtype: DType) -> Self {
        Self {
            dims,
            dtype,
            mask: Arc::new(crate::mask::Everything),
            alignment: Alignment::default(),
            scale: 1.0 / (dims.head_dim as f64).sqrt(),
            soft_cap: None,
            bias: None,
            bias_function: None,
            bias_order: BiasOrder::default(),
            sinks: None,
            normalize: true,
            dropout: None,
            logits_dtype: dtype.accumulator(),
            precision: Precision::default(),
            backward: BackwardMode::default(),
        }
    }

    /// Checks every number against its meaning.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the field.
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
            if shape.iter().zip(full).any(|(&got, full)| got != full && got != 1) {
                return Err(Error::invalid(
                    "bias",
                    format!("{shape:?}"),
                    format!("{full:?}, or 1 in place of any length"),
                ));
            }
        }
        if let Some(sinks) = self.sinks.filter(|sinks| sinks.count == 0) {
            let of = if sinks.per_head { "of each head" } else { "shared by all heads" };
            return Err(Error::invalid(
                "softmax_aux",
                format!("0 sinks {of}"),
                "at least one sink, or no softmax_aux",
            ));
        }
        if let Some(dropout) =
            self.dropout.filter(|dropout| !(0.0..1.0).contains(&dropout.probability))
        {
            return Err(Error::invalid("dropout_prob", dropout.probability, "0 ≤ p < 1"));
        }
        Ok(())
    }

    /// What travels for one key row: k and v in the inputs' type.
    pub fn kv_row_layout(&self) -> RowLayout {
        self.pair_record(self.dtype)
    }

    /// What travels for one key row's gradient: dk and dv in the accumulator's type.
    pub fn gradient_row_layout(&self) -> RowLayout {
        self.pair_record(self.dtype.accumulator())
    }

    /// What travels for one query row in the two-pass backward: q and dout in the inputs' type, and [`Spec::ROW_STATISTICS`]
    /// numbers a head in the accumulator's.
    pub fn query_row_layout(&self) -> RowLayout {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = self.dims;
        let field = |dim, dtype| RowField { heads: q_heads, dim, dtype };
        RowLayout::new(
            batch,
            vec![
                field(head_dim, self.dtype),
                field(value_dim, self.dtype),
                field(Self::ROW_STATISTICS, self.dtype.accumulator()),
            ],
        )
    }

    /// Numbers that backward keeps for one query row and head: `[lse, max, delta, share]`.
    ///
    /// Normalised: delta = ⟨dout, out⟩ − dlse, the others unused. Unnormalised: delta = −dlse, share = ⟨dout, out⟩ / ties
    /// (what each of the row's largest logits loses).
    pub const ROW_STATISTICS: usize = 4;

    /// Checks what this rank was given of a batch against the spec; `q_rows` and `kv_rows` are the rows it holds.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the tensor.
    pub fn validate_batch(&self, batch: &Batch, q_rows: usize, kv_rows: usize) -> Result<()> {
        batch.validate(&self.dims, q_rows, kv_rows)
    }

    fn pair_record(&self, dtype: DType) -> RowLayout {
        let Dims { batch, kv_heads: heads, head_dim, value_dim, .. } = self.dims;
        RowLayout::new(
            batch,
            vec![
                RowField { heads, dim: head_dim, dtype },
                RowField { heads, dim: value_dim, dtype },
            ],
        )
    }
}
