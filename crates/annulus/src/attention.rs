//! The builder: every parameter of the field under its usual name.

use std::{sync::Arc, time::Duration};

use annulus_comm::{Deadline, Silence, deadline, ring::RingOptions};
use annulus_core::{
    Alignment, BackwardMode, BiasFunction, BiasOrder, DType, Dims, Dropout, Error, Layout, Mask, Precision, Result, Route, SinkShape,
    Space, Spec, Transport,
    mask::{Causal, ChunkedCausal, Prefix, Window, and},
};

use crate::Plan;

/// What attention to compute. Starts as full attention; every method adds one thing; [`Attention::plan`] makes it runnable.
///
/// All masks are and-ed. `docs/semantics.md` in the repository says what each parameter means, to the inequality; i' and j' below are the
/// positions of query i and key j.
///
/// # Examples
/// ```
/// use annulus::{Attention, Dims, Tensors};
/// use ndarray::Array4;
///
/// let dims = Dims::new(1, 64, 4, 16); // batch, length, heads, head dim
/// let x = Array4::<f32>::from_shape_fn((1, 64, 4, 16), |(_, i, h, c)| ((i * 7 + h * 3 + c) % 11) as f32 * 0.1);
/// let mut plan = Attention::new().causal().plan(dims, 4, None)?; // a ring of 4 ranks in this process
/// let tensors = Tensors::new(x.view(), x.view(), x.view());
/// let forward = plan.forward(&tensors)?;
/// let gradients = plan.backward(&tensors, &forward, x.view(), None)?;
/// assert_eq!(forward.out.dim(), (1, 64, 4, 16));
/// assert_eq!(gradients.dq.dim(), (1, 64, 4, 16));
/// # Ok::<(), annulus::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Attention {
    dtype: Option<DType>,
    causal: bool,
    window: Option<(Option<u64>, Option<u64>)>,
    first_visible: u64,
    chunk: Option<u64>,
    prefix: Option<u64>,
    masks: Vec<Arc<dyn Mask>>,
    alignment: Alignment,
    scale: Option<f64>,
    soft_cap: Option<f64>,
    bias: Option<[usize; 4]>,
    bias_function: Option<Arc<dyn BiasFunction>>,
    bias_order: BiasOrder,
    sinks: Option<SinkShape>,
    unnormalized: bool,
    dropout: Option<Dropout>,
    logits_dtype: Option<DType>,
    precision: Precision,
    backward: BackwardMode,
    forward_only: bool,
    local_gradients: bool,
    route: Option<Route>,
    deadline: Option<Duration>,
    silence_hook: Option<SilenceHook>,
    threads: Option<usize>,
}

/// What is called when a rank has been silent for a quarter of the deadline.
#[derive(Clone)]
struct SilenceHook(Arc<dyn Fn(Silence) + Send + Sync>);

impl std::fmt::Debug for SilenceHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SilenceHook")
    }
}

impl Attention {
    /// Full attention in f32: scale 1/√head_dim and nothing else.
    pub fn new() -> Self {
        Self::default()
    }

    /// Element type of q, k, v, out and their gradients; f32 if not said.
    #[must_use]
    pub const fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Key j' is visible to query i' only if j' ≤ i'.
    #[must_use]
    pub const fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Sliding window: i' − left ≤ j' ≤ i' + right, both ends included; `None` leaves a side unbounded.
    ///
    /// # Examples
    /// ```
    /// use annulus::Attention;
    /// let itself_and_1023_before = Attention::new().window(1023, 0);
    /// let all_before_and_one_after = Attention::new().window(None, 1);
    /// ```
    #[must_use]
    pub fn window(mut self, left: impl Into<Option<u64>>, right: impl Into<Option<u64>>) -> Self {
        self.window = Some((left.into(), right.into()));
        self
    }

    /// Keys at positions below `count` are exempt from the window (not from causality): `attention_sink_size`. Without a window there is
    /// nothing to be exempt from.
    #[must_use]
    pub const fn first_visible(mut self, count: u64) -> Self {
        self.first_visible = count;
        self
    }

    /// Chunked causal: ⌊i'/chunk⌋ = ⌊j'/chunk⌋ and j' ≤ i'.
    #[must_use]
    pub const fn chunk(mut self, chunk: u64) -> Self {
        self.chunk = Some(chunk);
        self
    }

    /// Prefix-LM: j' < len or j' ≤ i'. Do not add `causal`, which would hide the rest of the prefix.
    #[must_use]
    pub const fn prefix(mut self, len: u64) -> Self {
        self.prefix = Some(len);
        self
    }

    /// Any mask, and-ed with the others.
    #[must_use]
    pub fn mask(mut self, mask: Arc<dyn Mask>) -> Self {
        self.masks.push(mask);
        self
    }

    /// Where queries stand among the keys when lengths differ; top-left if not said.
    #[must_use]
    pub const fn align(mut self, alignment: Alignment) -> Self {
        self.alignment = alignment;
        self
    }

    /// Multiplies q·k, any finite number; 1/√head_dim if not said.
    #[must_use]
    pub const fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Logits become cap·tanh(x/cap); cap is finite and above 0.
    #[must_use]
    pub const fn soft_cap(mut self, cap: f64) -> Self {
        self.soft_cap = Some(cap);
        self
    }

    /// There will be an additive bias ([`crate::Tensors::with_bias`]) of this global shape, `[batch|1, q_heads|1, q_len|1, kv_len|1]`.
    #[must_use]
    pub const fn bias(mut self, shape: [usize; 4]) -> Self {
        self.bias = Some(shape);
        self
    }

    /// An additive bias computed from positions, such as [`annulus_core::Alibi`].
    #[must_use]
    pub fn bias_function(mut self, function: Arc<dyn BiasFunction>) -> Self {
        self.bias_function = Some(function);
        self
    }

    /// Whether the bias comes before or after the soft cap; after if not said.
    #[must_use]
    pub const fn bias_order(mut self, order: BiasOrder) -> Self {
        self.bias_order = order;
        self
    }

    /// There will be `count` sink logits shared by all heads ([`crate::Tensors::with_sinks`], `[1, count]`).
    #[must_use]
    pub const fn shared_sinks(mut self, count: usize) -> Self {
        self.sinks = Some(SinkShape { per_head: false, count });
        self
    }

    /// There will be `count` sink logits for every query head ([`crate::Tensors::with_sinks`], `[q_heads, count]`).
    #[must_use]
    pub const fn sinks_per_head(mut self, count: usize) -> Self {
        self.sinks = Some(SinkShape { per_head: true, count });
        self
    }

    /// out = Σ e^{s − max}·v, undivided; max and sum are returned too.
    #[must_use]
    pub const fn unnormalized(mut self) -> Self {
        self.unnormalized = true;
        self
    }

    /// Drops each weight with this probability, 0 ≤ probability < 1; what is dropped depends on the seed, batch row, head and global row
    /// numbers only.
    #[must_use]
    pub const fn dropout(mut self, probability: f64, seed: u64) -> Self {
        self.dropout = Some(Dropout { probability, seed });
        self
    }

    /// Rounds q·k to this type before scale, bias and cap.
    #[must_use]
    pub const fn logits_dtype(mut self, dtype: DType) -> Self {
        self.logits_dtype = Some(dtype);
        self
    }

    /// How exactly products of f32 inputs are formed on matrix units; the CPU always forms those in full. With [`Precision::Default`] it may round
    /// weights and gradients of logits of bf16 inputs to bf16 before it multiplies them, on processors that are twice as fast at that; all ranks do
    /// or none.
    #[must_use]
    pub const fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// How the backward pass crosses the ring.
    #[must_use]
    pub const fn backward_mode(mut self, mode: BackwardMode) -> Self {
        self.backward = mode;
        self
    }

    /// Plans for forward passes only: less memory.
    #[must_use]
    pub const fn forward_only(mut self) -> Self {
        self.forward_only = true;
        self
    }

    /// Leaves dsinks, and dbias broadcast over queries, as each rank's own part instead of the sum over ranks.
    #[must_use]
    pub const fn local_gradients(mut self) -> Self {
        self.local_gradients = true;
        self
    }

    /// How blocks find their users; chosen from the mask if not said.
    #[must_use]
    pub const fn route(mut self, route: Route) -> Self {
        self.route = Some(route);
        self
    }

    /// How long the ring may be silent before a call fails, at least 1 s; 120 s if not said.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Has `hook` called, on a rank that waits, when a peer has been silent for a quarter of the deadline: once, until it is heard again. Nobody is
    /// told if not said.
    #[must_use]
    pub fn on_silence(mut self, hook: impl Fn(Silence) + Send + Sync + 'static) -> Self {
        self.silence_hook = Some(SilenceHook(Arc::new(hook)));
        self
    }

    /// Threads of each rank; if not said, the machine's are shared among the ranks of this process.
    #[must_use]
    pub const fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// The definition for tensors of these lengths, checked.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] naming the parameter.
    pub fn spec(&self, dims: Dims) -> Result<Spec> {
        let dtype = self.dtype.unwrap_or(DType::F32);
        let spec = Spec {
            mask: self.whole_mask()?,
            alignment: self.alignment,
            soft_cap: self.soft_cap,
            bias: self.bias,
            bias_function: self.bias_function.clone(),
            bias_order: self.bias_order,
            sinks: self.sinks,
            normalize: !self.unnormalized,
            dropout: self.dropout,
            logits_dtype: self.logits_dtype.unwrap_or(dtype.accumulator()),
            precision: self.precision,
            backward: self.backward,
            ..Spec::new(dims, dtype)
        };
        let spec = Spec { scale: self.scale.unwrap_or(spec.scale), ..spec };
        spec.validate()?;
        if let Some(deadline) = self.deadline.filter(|&deadline| deadline < deadline::LEAST) {
            return Err(Error::invalid("deadline", format!("{deadline:?}"), format!("at least {:?}", deadline::LEAST)));
        }
        Ok(spec)
    }

    /// An in-process ring of `ranks` CPU ranks over whole tensors. `layout` is chosen from the mask if `None`.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`], [`annulus_core::Error::Unsupported`], [`annulus_core::Error::OutOfMemory`].
    pub fn plan(&self, dims: Dims, ranks: usize, layout: impl Into<Option<Layout>>) -> Result<Plan> {
        Plan::new(self, dims, ranks, layout.into())
    }

    /// The ring's options for this layout.
    pub fn ring_options(&self, layout: Option<Layout>) -> RingOptions {
        RingOptions { layout, route: self.route, backward: !self.forward_only, local_gradients: self.local_gradients }
    }

    /// The deadline that applies: the one that was said if it is long enough (if not, [`Attention::spec`] says so), else 120 s.
    pub fn effective_deadline(&self) -> Duration {
        self.deadline.filter(|&deadline| deadline >= deadline::LEAST).unwrap_or(deadline::DEFAULT)
    }

    /// Bounds every wait of `transport` by the deadline that applies, with the hook for silent peers.
    pub(crate) fn bounded<T: Transport<S>, S: Space>(&self, transport: T) -> Result<Deadline<T, S>> {
        let bounded = Deadline::new(transport, self.effective_deadline())?;
        Ok(match self.silence_hook.clone() {
            Some(SilenceHook(hook)) => bounded.with_warning(move |silence| hook(silence)),
            None => bounded,
        })
    }

    /// The threads of each rank, if said.
    pub const fn chosen_threads(&self) -> Option<usize> {
        self.threads
    }

    fn whole_mask(&self) -> Result<Arc<dyn Mask>> {
        let mut all = self.masks.clone();
        if self.causal {
            all.push(Arc::new(Causal { offset: 0 }));
        }
        if let Some((left, right)) = self.window {
            all.push(Arc::new(Window { left, right, first_visible: self.first_visible, offset: 0 }));
        }
        if let Some(size) = self.chunk {
            all.push(Arc::new(ChunkedCausal { size }));
        }
        if let Some(len) = self.prefix {
            all.push(Arc::new(Prefix { len }));
        }
        Ok(all.into_iter().reduce(and).unwrap_or_else(|| Arc::new(annulus_core::mask::Everything)))
    }
}
