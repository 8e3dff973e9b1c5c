//! The mathematics of one attention: masks, scores, outputs, precision.

use std::sync::Arc;

use annulus_comm::kv_cache::KvCache;
use annulus_core::{
    Alignment, BackwardMode, BiasFunction, BiasOrder, BiasTable, DType, Dims, Dropout, Error,
    LEAF_ROWS, Mask, Precision, Result, SinkShape, Spec,
    mask::{Causal, ChunkedCausal, Everything, Prefix, Window, and},
};

use crate::backend::Cpu;

/// Builds the definition of one attention: full attention, then one parameter per method.
///
/// How the ranks divide it is a [`Division`](crate::Division); threads, deadlines and hooks are a
/// [`Runtime`](crate::Runtime). Neither changes the result by more than rounding.
///
/// Setters take values, and `None` where the default is none, so that parameters pass through
/// without branches. A later call replaces an earlier one, except of [`Attention::mask`].
///
/// A pair (query, key) is visible if every mask that was added allows it. i' and j' below are the
/// positions of query i and key j; `docs/semantics.md` in the repository defines every parameter.
/// The constructors of plans and caches check the parameters.
///
/// # Examples
/// ```
/// use annulus::{Attention, Dims, LocalRing, Tensors};
/// use ndarray::Array4;
///
/// let dims = Dims::new(1, 64, 4, 16); // batch, length, heads, head dim
/// let x = Array4::<f32>::from_shape_fn((1, 64, 4, 16), |(_, i, h, c)| {
///     ((i * 7 + h * 3 + c) % 11) as f32 * 0.1
/// });
/// let attention = Attention::new().causal(true);
/// let mut ring = LocalRing::new(&attention, dims, 4)?; // 4 ranks in this process
/// let tensors = Tensors::new(x.view(), x.view(), x.view());
/// let forward = ring.forward(&tensors)?;
/// let gradients = ring.backward(&tensors, &forward, x.view(), None)?;
/// assert_eq!(forward.out.dim(), (1, 64, 4, 16));
/// assert_eq!(gradients.dq.dim(), (1, 64, 4, 16));
/// # Ok::<(), annulus::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Attention {
    dtype: Option<DType>,
    causal: bool,
    sliding_window: (Option<u64>, Option<u64>),
    attention_sink_size: u64,
    chunk_size: Option<u64>,
    prefix_len: Option<u64>,
    masks: Vec<Arc<dyn Mask>>,
    alignment: Alignment,
    softmax_scale: Option<f64>,
    logits_soft_cap: Option<f64>,
    bias: Option<[usize; 4]>,
    bias_table: Option<BiasTable>,
    bias_function: Option<Arc<dyn BiasFunction>>,
    bias_order: BiasOrder,
    softmax_aux: Option<SinkShape>,
    unnormalized: bool,
    statistics: bool,
    dropout: Option<Dropout>,
    logits_dtype: Option<DType>,
    precision: Precision,
    backward: BackwardMode,
    pub(crate) forward_only: bool,
    pub(crate) second_derivatives: bool,
    reproducible: bool,
    pub(crate) local_gradients: bool,
}

impl Attention {
    /// Starts with full attention in f32: scale 1/√head_dim and nothing else.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the element type of q, k, v, out and their gradients. Default: f32.
    ///
    /// Accumulators, lse, bias and sinks are f32, or f64 for f64.
    #[must_use]
    pub const fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Causal mask: visible only if j' ≤ i'. Default: false.
    #[must_use]
    pub const fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sliding window: visible only if i' − left ≤ j' ≤ i' + right. `None` opens a side. Default:
    /// both open.
    ///
    /// # Examples
    /// ```
    /// use annulus::Attention;
    /// let itself_and_1023_before = Attention::new().sliding_window(1023, 0);
    /// let all_before_and_one_after = Attention::new().sliding_window(None, 1);
    /// ```
    #[must_use]
    pub fn sliding_window(
        mut self,
        left: impl Into<Option<u64>>,
        right: impl Into<Option<u64>>,
    ) -> Self {
        self.sliding_window = (left.into(), right.into());
        self
    }

    /// Exempts keys with j' < count from the sliding window, and from nothing else. Default: 0.
    ///
    /// Without a window it is refused.
    ///
    /// # Source
    /// Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks.
    #[must_use]
    pub const fn attention_sink_size(mut self, count: u64) -> Self {
        self.attention_sink_size = count;
        self
    }

    /// Chunked causal attention: visible only if ⌊i'/size⌋ = ⌊j'/size⌋ and j' ≤ i'. Default: none.
    ///
    /// # Source
    /// Llama 4's chunked attention.
    #[must_use]
    pub fn chunk_size(mut self, size: impl Into<Option<u64>>) -> Self {
        self.chunk_size = size.into();
        self
    }

    /// Prefix-LM mask: visible only if j' < len or j' ≤ i'. Default: none.
    ///
    /// With [`Attention::causal`] it means the same: the prefix is exempt from the causal mask.
    ///
    /// # Source
    /// Raffel et al. 2020, section 3.2.1.
    #[must_use]
    pub fn prefix_len(mut self, len: impl Into<Option<u64>>) -> Self {
        self.prefix_len = len.into();
        self
    }

    /// Adds a mask of the caller's ([`Mask`]), as one more condition.
    ///
    /// # Examples
    /// Every second key, and causal.
    /// ```
    /// use annulus::{Attention, mask::Predicate};
    /// use std::sync::Arc;
    ///
    /// let even = Predicate::of_positions("even keys", |_query, key| key % 2 == 0);
    /// let attention = Attention::new().causal(true).mask(Arc::new(even));
    /// ```
    #[must_use]
    pub fn mask(mut self, mask: Arc<dyn Mask>) -> Self {
        self.masks.push(mask);
        self
    }

    /// Sets the positions of queries where q_len ≠ kv_len. Default: [`Alignment::TopLeft`].
    #[must_use]
    pub const fn align(mut self, alignment: Alignment) -> Self {
        self.alignment = alignment;
        self
    }

    /// Factor of q·k, any finite number. Default: 1/√head_dim.
    #[must_use]
    pub fn softmax_scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.softmax_scale = scale.into();
        self
    }

    /// Soft cap of the scores: cap·tanh(x/cap), with cap finite and above 0. Default: none.
    #[must_use]
    pub fn logits_soft_cap(mut self, cap: impl Into<Option<f64>>) -> Self {
        self.logits_soft_cap = cap.into();
        self
    }

    /// Declares an additive bias tensor, which every pass then needs
    /// ([`crate::Tensors::with_bias`]). Default: none.
    ///
    /// # Shapes
    /// Global: `[batch|1, q_heads|1, q_len|1, kv_len|1]`.
    #[must_use]
    pub fn bias(mut self, shape: impl Into<Option<[usize; 4]>>) -> Self {
        self.bias = shape.into();
        self
    }

    /// Declares a learned bias that depends on relative positions, whose values are a table that
    /// every pass then needs ([`crate::Tensors::with_bias_table`]), in place of a bias tensor. Its
    /// gradient is the gradient of the bias, summed over all pairs and ranks. Default: none.
    ///
    /// It takes the memory of the table, not of a tensor of all pairs. On the CPU.
    ///
    /// # Shapes
    /// The table: `[q_heads|1, entries]`; the bias and its gradient `[1, q_heads|1, 1, entries]`,
    /// which [`Attention::bias`] may declare too.
    ///
    /// # Examples
    /// T5's relative positions, over three ranks.
    /// ```
    /// use annulus::{Attention, Dims, LocalRing, Tensors, bias::BiasTable};
    /// use ndarray::{Array2, Array4};
    ///
    /// let x = Array4::<f32>::from_shape_fn((1, 64, 2, 16), |(_, i, h, c)| {
    ///     ((i * 7 + h * 3 + c) % 11) as f32 * 0.1
    /// });
    /// let table = Array2::<f32>::from_shape_fn((2, 32), |(h, e)| 0.1 * (h + e) as f32);
    /// let attention = Attention::new().bias_table(BiasTable::t5(true, 32, 128)?);
    /// let mut ring = LocalRing::new(&attention, Dims::new(1, 64, 2, 16), 3)?;
    /// let tensors = Tensors::new(x.view(), x.view(), x.view()).with_bias_table(table.view());
    /// let forward = ring.forward(&tensors)?;
    /// let gradients = ring.backward(&tensors, &forward, x.view(), None)?;
    /// assert_eq!(gradients.dbias.unwrap().dim(), (1, 2, 1, 32));
    /// # Ok::<(), annulus::Error>(())
    /// ```
    #[must_use]
    pub fn bias_table(mut self, table: impl Into<Option<BiasTable>>) -> Self {
        self.bias_table = table.into();
        self
    }

    /// Adds a bias that is computed from positions, such as [`annulus_core::Alibi`]. No gradient.
    #[must_use]
    pub fn bias_function(mut self, function: Arc<dyn BiasFunction>) -> Self {
        self.bias_function = Some(function);
        self
    }

    /// Sets the order of bias and soft cap. Default: [`BiasOrder::AfterSoftCap`].
    #[must_use]
    pub const fn bias_order(mut self, order: BiasOrder) -> Self {
        self.bias_order = order;
        self
    }

    /// Declares attention sinks, which every pass then needs
    /// ([`crate::Tensors::with_softmax_aux`]). Default: none.
    ///
    /// # Shapes
    /// [`SinkShape::shared`]: `[1, count]`. [`SinkShape::per_head`]: `[q_heads, count]`.
    #[must_use]
    pub fn softmax_aux(mut self, sinks: impl Into<Option<SinkShape>>) -> Self {
        self.softmax_aux = sinks.into();
        self
    }

    /// Returns out = Σ e^(s − max)·v without the division by the sum, with max and sum. Default:
    /// false.
    #[must_use]
    pub const fn unnormalized(mut self, unnormalized: bool) -> Self {
        self.unnormalized = unnormalized;
        self
    }

    /// Returns statistics of the scores with every forward pass: of each row and, over all ranks,
    /// of each head ([`crate::Forward::statistics`], [`crate::Forward::head_statistics`]). Default:
    /// false.
    ///
    /// They cost two or three numbers for each query and head, and in the reproducible order have
    /// the same bits for every number of ranks. Refused by other backends than the CPU's, by a KV
    /// cache and with [`Attention::second_derivatives`].
    ///
    /// # Examples
    /// QK-clip: the factor of W_q and W_k of every head whose largest score exceeds τ.
    /// ```
    /// use annulus::{Attention, Dims, LocalRing, Tensors};
    /// use ndarray::{Array4, s};
    ///
    /// let x = Array4::<f32>::from_shape_fn((1, 64, 2, 16), |(_, i, h, c)| {
    ///     ((i * 7 + h * 3 + c) % 11) as f32 * 0.5
    /// });
    /// let attention = Attention::new().causal(true).statistics(true);
    /// let mut ring = LocalRing::new(&attention, Dims::new(1, 64, 2, 16), 3)?;
    /// let forward = ring.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
    /// let tau = 30.0;
    /// let largest = forward.head_statistics.as_ref().unwrap();
    /// let clip = largest.slice(s![.., 0, 0]).mapv(|max| (tau / max.max(tau)).sqrt());
    /// // scaled by it, queries and keys of each head have scores of at most τ
    /// let clipped = &x * &clip.to_shape((1, 1, 2, 1)).unwrap();
    /// let forward = ring.forward(&Tensors::new(clipped.view(), clipped.view(), x.view()))?;
    /// let largest = forward.head_statistics.as_ref().unwrap();
    /// assert!(largest.slice(s![.., 0, 0]).iter().all(|&max| max <= tau * 1.0001));
    /// # Ok::<(), annulus::Error>(())
    /// ```
    ///
    /// # Source
    /// Kimi Team 2025, Kimi K2, section 2.1 (MuonClip).
    #[must_use]
    pub const fn statistics(mut self, statistics: bool) -> Self {
        self.statistics = statistics;
        self
    }

    /// Dropout of the attention probabilities, 0 ≤ probability < 1. Default: 0.
    ///
    /// The decision depends on the seed, batch row, head and global row numbers only, so neither
    /// ranks nor layout nor backend change it.
    ///
    /// # Source
    /// Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (Philox4×32-10).
    #[must_use]
    pub fn dropout(mut self, probability: f64, seed: u64) -> Self {
        self.dropout = (probability != 0.0).then_some(Dropout { probability, seed });
        self
    }

    /// Rounds q·k to this type before scale, bias and cap. Default: the accumulator's type.
    #[must_use]
    pub const fn logits_dtype(mut self, dtype: DType) -> Self {
        self.logits_dtype = Some(dtype);
        self
    }

    /// Permits rounding of products. Default: [`Precision::Highest`], which permits none, except of
    /// 16-bit inputs on matrix units of GPUs: those round at every precision.
    ///
    /// Every backend forms products of f32 inputs in full f32 today, whatever is permitted. With
    /// [`Precision::Default`] the CPU rounds probabilities and score gradients of bf16 inputs to
    /// bf16, on processors that multiply bf16 twice as fast as f32. All ranks round, or none.
    #[must_use]
    pub const fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets the form of the backward pass. Default: [`BackwardMode::OnePass`].
    #[must_use]
    pub const fn backward_mode(mut self, mode: BackwardMode) -> Self {
        self.backward = mode;
        self
    }

    /// Plans for forward passes only, which needs less memory. Default: false.
    #[must_use]
    pub const fn forward_only(mut self, forward_only: bool) -> Self {
        self.forward_only = forward_only;
        self
    }

    /// Plans for second derivatives too: [`crate::Plan::jvp`] and, unless the plan is forward only,
    /// [`crate::Plan::double_backward`]. Default: false. They take memory for blocks of keys and
    /// values with their tangents, twice that of a forward pass.
    ///
    /// On the CPU, for every mask, layout and route. Refused with several key columns, in the
    /// reproducible order, and of an unnormalised output.
    ///
    /// # Examples
    /// The derivative of the outputs along one direction of the queries.
    /// ```
    /// use annulus::{Attention, Dims, LocalRing, Tensors};
    /// use ndarray::Array4;
    ///
    /// let x = Array4::<f32>::from_shape_fn((1, 64, 2, 16), |(_, i, h, c)| {
    ///     ((i * 7 + h * 3 + c) % 11) as f32 * 0.1
    /// });
    /// let zero = Array4::<f32>::zeros(x.dim());
    /// let attention = Attention::new().causal(true).second_derivatives(true);
    /// let mut ring = LocalRing::new(&attention, Dims::new(1, 64, 2, 16), 3)?;
    /// let tensors = Tensors::new(x.view(), x.view(), x.view());
    /// let along_v = Tensors::new(zero.view(), zero.view(), x.view());
    /// let jvp = ring.jvp(&tensors, &along_v, None)?;
    /// // out is linear in v, and v is the direction
    /// let apart = &jvp.out_tangent - &jvp.out;
    /// assert!(apart.iter().all(|x| x.abs() < 1e-5));
    /// # Ok::<(), annulus::Error>(())
    /// ```
    #[must_use]
    pub const fn second_derivatives(mut self, second_derivatives: bool) -> Self {
        self.second_derivatives = second_derivatives;
        self
    }

    /// Computes results whose bits depend on the inputs, the parameters and the arithmetic of the
    /// machine ([`crate::Plan::numerics`]) only: not on the number of ranks, layout, route,
    /// transport or threads. Default: false, which is faster, above all in the backward pass.
    ///
    /// Layouts then divide the sequence at multiples of [`annulus_core::LEAF_ROWS`] rows, and a
    /// custom layout must. Ranks with different arithmetic are refused, as are other backends than
    /// the CPU's. Over several ranks the backward pass takes two passes around the ring, whatever
    /// [`Attention::backward_mode`] is. `docs/semantics.md` in the repository defines the order of
    /// the sums.
    ///
    /// # Examples
    /// ```
    /// use annulus::{Attention, Dims, LocalRing, Tensors};
    /// use ndarray::Array4;
    ///
    /// let dims = Dims::new(1, 600, 2, 16);
    /// let x = Array4::<f32>::from_shape_fn((1, 600, 2, 16), |(_, i, h, c)| {
    ///     ((i * 7 + h * 3 + c) % 11) as f32 * 0.1
    /// });
    /// let attention = Attention::new().causal(true).reproducible(true);
    /// let tensors = Tensors::new(x.view(), x.view(), x.view());
    /// let gradients = |ranks| {
    ///     let mut ring = LocalRing::new(&attention, dims, ranks)?;
    ///     let forward = ring.forward(&tensors)?;
    ///     let gradients = ring.backward(&tensors, &forward, x.view(), None)?;
    ///     Ok::<_, annulus::Error>((forward.out, gradients.dq, gradients.dk, gradients.dv))
    /// };
    /// assert_eq!(gradients(1)?, gradients(3)?);
    /// # Ok::<(), annulus::Error>(())
    /// ```
    #[must_use]
    pub const fn reproducible(mut self, reproducible: bool) -> Self {
        self.reproducible = reproducible;
        self
    }

    /// Returns dsinks, and dbias broadcast over queries, as each rank's own part. Default: false,
    /// their sum over all ranks.
    #[must_use]
    pub const fn local_gradients(mut self, local: bool) -> Self {
        self.local_gradients = local;
        self
    }

    /// Returns the checked definition for tensors of these lengths.
    ///
    /// # Shapes
    /// `dims` are the global lengths, the same on every rank.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`], which names the parameter.
    pub fn spec(&self, dims: Dims) -> Result<Spec> {
        let dtype = self.dtype.unwrap_or(DType::F32);
        // a bias of one head is a table that heads share; another shape is refused
        let shared = self.bias.is_some_and(|shape| shape[1] == 1);
        let table = self.bias_table.clone();
        let table = table.map(|table| if shared { table.shared_by_heads() } else { table });
        let of_table = table.as_ref().map(|table| table.shape(dims.q_heads));
        let spec = Spec {
            mask: self.whole_mask()?,
            alignment: self.alignment,
            soft_cap: self.logits_soft_cap,
            bias: self.bias.or(of_table),
            bias_table: table,
            bias_function: self.bias_function.clone(),
            bias_order: self.bias_order,
            sinks: self.softmax_aux,
            normalize: !self.unnormalized,
            statistics: self.statistics,
            dropout: self.dropout,
            logits_dtype: self.logits_dtype.unwrap_or(dtype.accumulator()),
            precision: self.precision,
            backward: self.backward,
            leaf_rows: self.reproducible.then_some(LEAF_ROWS),
            ..Spec::new(dims, dtype)
        };
        let spec = Spec { scale: self.softmax_scale.unwrap_or(spec.scale), ..spec };
        spec.validate()?;
        Ok(spec)
    }

    /// Returns the default number of rows of a page of a KV cache.
    pub(crate) const fn default_page_rows(&self) -> u64 {
        if self.reproducible { LEAF_ROWS } else { KvCache::<Cpu>::PAGE_ROWS }
    }

    /// Refuses parameters that a KV cache does not have.
    pub(crate) fn check_cache(&self) -> Result<()> {
        let refusals = [
            (self.backward != BackwardMode::OnePass, "backward_mode"),
            (self.local_gradients, "local_gradients"),
            (self.second_derivatives, "second_derivatives"),
            (self.bias.is_some(), "bias"),
            (self.bias_table.is_some(), "bias_table"),
            (self.unnormalized, "unnormalized"),
            (self.statistics, "statistics"),
        ];
        match refusals.into_iter().find(|(given, _)| *given) {
            Some((_, what)) => Err(Error::unsupported(what, "the KV cache")),
            None => Ok(()),
        }
    }

    fn whole_mask(&self) -> Result<Arc<dyn Mask>> {
        let (left, right) = self.sliding_window;
        let windowed = left.is_some() || right.is_some();
        if self.attention_sink_size > 0 && !windowed {
            return Err(Error::invalid(
                "attention_sink_size",
                self.attention_sink_size,
                "0, or a sliding_window, from which the first keys are exempt",
            ));
        }
        let mut all = self.masks.clone();
        match (self.prefix_len, self.causal) {
            (Some(len), _) => all.push(Arc::new(Prefix { len })),
            (None, true) => all.push(Arc::new(Causal { offset: 0 })),
            (None, false) => {}
        }
        if windowed {
            let first_visible = self.attention_sink_size;
            all.push(Arc::new(Window { left, right, first_visible, offset: 0 }));
        }
        if let Some(size) = self.chunk_size {
            all.push(Arc::new(ChunkedCausal { size }));
        }
        Ok(all.into_iter().reduce(and).unwrap_or_else(|| Arc::new(Everything)))
    }
}
