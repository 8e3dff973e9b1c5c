//! The builder: the parameters of an attention, under the names that errors and files use.

use std::{
    num::{NonZero, NonZeroUsize},
    sync::Arc,
    thread,
    time::Duration,
};

use annulus_comm::{
    Deadline, Silence, deadline,
    kv_cache::KvCache,
    ring::{RingOptions, StepEvent, StepHook},
};
use annulus_core::{
    Alignment, BackwardMode, Batch, BiasFunction, BiasOrder, Choice, DType, Dims, Dropout, Error,
    LEAF_ROWS, Layout, Machine, Mask, Precision, Result, Route, SinkShape, Space, Spec, Strategy,
    Transport,
    mask::{Causal, ChunkedCausal, Prefix, Window, and},
};

use crate::{CacheShape, Cpu, LocalCache, LocalRing, hook::Hook};

/// Builds the definition of one attention: full attention, then one parameter per method.
///
/// Setters take values, and `None` where the default is none, so that parameters pass through
/// without branches. A later call replaces an earlier one, except of [`Attention::mask`].
///
/// A pair (query, key) is visible if every mask that was added allows it. i' and j' below are the
/// positions of query i and key j; `docs/semantics.md` in the repository defines every parameter.
/// [`Attention::local_ring`] and [`crate::Plan::new`] check the parameters.
///
/// # Examples
/// ```
/// use annulus::{Attention, Dims, Tensors};
/// use ndarray::Array4;
///
/// let dims = Dims::new(1, 64, 4, 16); // batch, length, heads, head dim
/// let x = Array4::<f32>::from_shape_fn((1, 64, 4, 16), |(_, i, h, c)| {
///     ((i * 7 + h * 3 + c) % 11) as f32 * 0.1
/// });
/// let mut ring = Attention::new().causal(true).local_ring(dims, 4)?; // 4 ranks in this process
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
    bias_function: Option<Arc<dyn BiasFunction>>,
    bias_order: BiasOrder,
    softmax_aux: Option<SinkShape>,
    unnormalized: bool,
    dropout: Option<Dropout>,
    logits_dtype: Option<DType>,
    precision: Precision,
    backward: BackwardMode,
    forward_only: bool,
    reproducible: bool,
    local_gradients: bool,
    layout: Option<Layout>,
    pub(crate) route: Option<Route>,
    pub(crate) strategy: Strategy,
    machine: Option<Arc<Machine>>,
    /// Batch of [`Attention::documents`].
    pub(crate) documents: Option<Arc<Batch>>,
    /// Route that [`Attention::balanced`] has chosen.
    pub(crate) balanced_route: Option<Route>,
    /// Batch of [`Attention::balanced`].
    pub(crate) balanced_documents: Option<Arc<Batch>>,
    kv_block_size: Option<u64>,
    receive_ahead: Option<usize>,
    deadline: Option<Duration>,
    arrival_deadline: Option<Duration>,
    silence_hook: Option<Hook<Silence>>,
    step_hook: Option<Hook<StepEvent>>,
    threads: Option<usize>,
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
    /// use annulus::{Attention, Dims, Tensors};
    /// use ndarray::Array4;
    ///
    /// let dims = Dims::new(1, 600, 2, 16);
    /// let x = Array4::<f32>::from_shape_fn((1, 600, 2, 16), |(_, i, h, c)| {
    ///     ((i * 7 + h * 3 + c) % 11) as f32 * 0.1
    /// });
    /// let attention = Attention::new().causal(true).reproducible(true);
    /// let tensors = Tensors::new(x.view(), x.view(), x.view());
    /// let gradients = |ranks| {
    ///     let mut ring = attention.local_ring(dims, ranks)?;
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

    /// Assignment of rows to ranks. Default: chosen by the mask, balanced work first, then the
    /// fewest bytes.
    #[must_use]
    pub fn layout(mut self, layout: impl Into<Option<Layout>>) -> Self {
        self.layout = layout.into();
        self.balanced_route = None;
        self.balanced_documents = None;
        self
    }

    /// Sets the layout for a batch, and the route unless the caller sets one.
    pub(crate) fn with_balanced(self, choice: Choice, batch: Batch) -> Self {
        let Choice { layout, route, .. } = choice;
        let (layout, balanced_route) = (Some(layout), Some(route));
        Self { layout, balanced_route, balanced_documents: Some(Arc::new(batch)), ..self }
    }

    /// Route of the blocks. Default: chosen by the mask and by the nodes of the transport: a relay,
    /// or over several nodes with as many ranks each rails ([`Route::RailsUp`]), whose results
    /// differ from a relay's by rounding.
    ///
    /// Rails with 0 `node_ranks` are over the nodes of the transport, and a typed error if these do
    /// not have as many ranks each.
    #[must_use]
    pub fn route(mut self, route: impl Into<Option<Route>>) -> Self {
        self.route = route.into();
        self
    }

    /// Division of the attention among ranks. Default: [`Strategy::Ring`].
    ///
    /// [`Strategy::HeadsRing`] divides the heads among groups of ranks, which sends fewer bytes
    /// than a ring if there are many KV heads: a quarter with 32 query and KV heads on 8 ranks.
    /// [`Strategy::Grid`] divides the keys too, which sends fewer bytes on many ranks: 2.7 % of the
    /// ring's with 32 heads of bf16 on 256 ranks. Results differ from those of the ring by rounding
    /// at most. Both need memory for the tensors of a rank once more, and blocks in host memory.
    /// `docs/semantics.md` in the repository lists what they do not support.
    ///
    /// [`Strategy::AllGather`], [`Strategy::AllToAll`], [`Strategy::OncePerNode`] and
    /// [`Strategy::PassQ`] are published names of forms of these: a plan has the form as its
    /// strategy, and the route.
    ///
    /// # Examples
    /// Groups of two ranks, each of which has half of the heads, and a ring over two groups.
    /// ```
    /// use annulus::{Attention, Dims, Strategy, Tensors};
    /// use ndarray::Array4;
    ///
    /// let x = Array4::<f32>::ones((1, 64, 4, 8));
    /// let attention = Attention::new().causal(true).strategy(Strategy::HeadsRing { heads: 2 });
    /// let mut ring = attention.local_ring(Dims::new(1, 64, 4, 8), 4)?;
    /// let forward = ring.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
    /// assert!(forward.reports.iter().all(|report| report.bytes_sent == report.bytes_predicted));
    /// # Ok::<(), annulus::Error>(())
    /// ```
    ///
    /// # Source
    /// Jacobs et al. 2023, DeepSpeed Ulysses; Fang, Zhao 2024, USP; ATTENTION2D 2025, arXiv
    /// 2503.15758.
    #[must_use]
    pub const fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Machine on which [`Strategy::Auto`] takes the strategy of the least predicted time whose
    /// buffers fit the memory of a rank. Default: none, and the strategy that sends the fewest
    /// bytes. `annulus measure` writes the figures of a machine to a file.
    ///
    /// All ranks have the same machine. With another strategy it is refused.
    ///
    /// # Examples
    /// Four ranks on two nodes with a slow network. A block of keys and values crosses the network
    /// three times in a ring, and once in a ring over groups, which are the nodes. The ranks of a
    /// node then divide the keys.
    /// ```
    /// use annulus::{Attention, ComputeRate, DType, Dims, Link, Machine, Strategy};
    ///
    /// let link = |bandwidth| Some(Link { latency: 1e-6, bandwidth });
    /// let machine = Machine {
    ///     ranks_per_node: 2,
    ///     inside_node: link(1e11),
    ///     between_nodes: link(1e7),
    ///     node_bandwidth: Some(2e7),
    ///     rates: vec![ComputeRate {
    ///         dtype: DType::F32,
    ///         head_dim: 8,
    ///         forward: 1e13,
    ///         backward: 1e13,
    ///         token: None,
    ///     }],
    ///     memory: 1 << 30,
    /// };
    /// let attention = Attention::new().strategy(Strategy::Auto).machine(machine);
    /// let ring = attention.local_ring(Dims::new(1, 64, 4, 8), 4)?;
    /// assert_eq!(ring.plan().strategy(), Strategy::Grid { heads: 1, queries: 2, keys: 2 });
    /// # Ok::<(), annulus::Error>(())
    /// ```
    #[must_use]
    pub fn machine(mut self, machine: impl Into<Option<Machine>>) -> Self {
        self.machine = machine.into().map(Arc::new);
        self
    }

    /// Hint: rows at multiples of which a KV block is split into messages, so that computing on one
    /// part overlaps receiving the next. Default: the KV tile of the backend (64 on the CPU), to
    /// multiples of which it is rounded up.
    ///
    /// Larger parts make fewer and longer messages. Results change by rounding at most. Ranks may
    /// differ: all use the largest. The tile sizes of the kernels are fixed when they are compiled.
    #[must_use]
    pub fn kv_block_size(mut self, rows: impl Into<Option<u64>>) -> Self {
        self.kv_block_size = rows.into();
        self
    }

    /// Ring steps by which a rank posts the receive of a block ahead of the step that computes on
    /// it, and may forward the block ahead, equal on all ranks. Default: 1, so that a rank receives
    /// one block while it computes on another, and 4 on a balanced layout
    /// ([`Attention::balanced`]), whose steps are uneven.
    ///
    /// With 2 a rank whose neighbour is late by less than a step does not wait for it. Each step
    /// but the first takes the memory of one more block. On a direct route, more receives are
    /// posted ahead if blocks are so small that they fit into the same memory
    /// ([`annulus_core::block_buffers`]). In a one-pass backward each of the first four steps also
    /// takes two buffers of gradients: where they are computed, and where they arrive
    /// ([`Plan::buffer_bytes`](crate::Plan)). Messages and results are the same, bit for bit. Over
    /// NCCL a one-pass backward receives one step ahead.
    #[must_use]
    pub fn receive_ahead(mut self, steps: impl Into<Option<usize>>) -> Self {
        self.receive_ahead = steps.into();
        self
    }

    /// Longest silence of a rank within a call before the call fails, at least 1 s. Default: 120 s.
    /// [`environment::DEADLINE`](crate::environment::DEADLINE) replaces it.
    #[must_use]
    pub fn deadline(mut self, deadline: impl Into<Option<Duration>>) -> Self {
        self.deadline = deadline.into();
        self
    }

    /// Longest wait at the entry of a collective call (a plan, an update, a pass) for ranks that
    /// have not made it, at least 1 s. Default: no limit, because a rank whose program is busy
    /// elsewhere has not failed; in a [`LocalRing`], whose ranks begin together, the deadline.
    ///
    /// A pass or an update that ends at this deadline returns [`Error::ArrivalTimeout`]. It has
    /// changed nothing, and this rank makes the same call again. Ranks that enter meanwhile count
    /// this one as entered, so it has until their [`Attention::deadline`] to do so. A plan that
    /// ends at it is not made; the other ranks get [`Error::PeerLost`].
    #[must_use]
    pub fn arrival_deadline(mut self, deadline: impl Into<Option<Duration>>) -> Self {
        self.arrival_deadline = deadline.into();
        self
    }

    /// Calls `hook`, on a rank that waits, when a peer has been silent for a quarter of the
    /// deadline: once per silence. At the entry of a call it is called in every quarter of the
    /// deadline, with the lowest rank that has not made the call. Over MPI a rank reports only the
    /// ranks that it watches, so of many ranks some report a late one and others none.
    ///
    /// It is called on the thread that waits. Default: no hook.
    #[must_use]
    pub fn on_silence(mut self, hook: impl Fn(Silence) + Send + Sync + 'static) -> Self {
        self.silence_hook = Some(Hook(Arc::new(hook)));
        self
    }

    /// Calls `hook` with every activity of a pass: tiles of a block, messages, waits
    /// ([`StepEvent`]).
    ///
    /// It is called on the thread of the rank, by several ranks of a [`LocalRing`] at once, between
    /// tiles and messages, so a slow hook delays the ring. A hook that panics ends the plan.
    /// Default: no hook, and then no clock is read.
    ///
    /// # Examples
    /// ```
    /// use annulus::{Activity, Attention, Dims, Tensors};
    /// use ndarray::Array4;
    /// use std::sync::{Arc, atomic::{AtomicU64, Ordering}};
    ///
    /// let sent = Arc::new(AtomicU64::new(0));
    /// let sum = Arc::clone(&sent);
    /// let attention = Attention::new().on_step(move |event| {
    ///     if event.activity == Activity::Send {
    ///         sum.fetch_add(event.bytes, Ordering::Relaxed);
    ///     }
    /// });
    /// let x = Array4::<f32>::ones((1, 8, 2, 4));
    /// let mut ring = attention.local_ring(Dims::new(1, 8, 2, 4), 2)?;
    /// let forward = ring.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
    /// let predicted = forward.reports.iter().map(|report| report.bytes_predicted).sum();
    /// assert_eq!(sent.load(Ordering::Relaxed), predicted);
    /// # Ok::<(), annulus::Error>(())
    /// ```
    #[must_use]
    pub fn on_step(mut self, hook: impl Fn(StepEvent) + Send + Sync + 'static) -> Self {
        self.step_hook = Some(Hook(Arc::new(hook)));
        self
    }

    /// Threads of each CPU rank of [`Attention::local_ring`]. Default: the cores of this machine,
    /// divided by the ranks.
    ///
    /// Plans with a backend of the caller's refuse it: their threads are the backend's
    /// ([`crate::Cpu::new`]).
    #[must_use]
    pub fn threads(mut self, threads: impl Into<Option<usize>>) -> Self {
        self.threads = threads.into();
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
        let spec = Spec {
            mask: self.whole_mask()?,
            alignment: self.alignment,
            soft_cap: self.logits_soft_cap,
            bias: self.bias,
            bias_function: self.bias_function.clone(),
            bias_order: self.bias_order,
            sinks: self.softmax_aux,
            normalize: !self.unnormalized,
            dropout: self.dropout,
            logits_dtype: self.logits_dtype.unwrap_or(dtype.accumulator()),
            precision: self.precision,
            backward: self.backward,
            leaf_rows: self.reproducible.then_some(LEAF_ROWS),
            ..Spec::new(dims, dtype)
        };
        let spec = Spec { scale: self.softmax_scale.unwrap_or(spec.scale), ..spec };
        spec.validate()?;
        if self.kv_block_size == Some(0) {
            return Err(Error::invalid("kv_block_size", 0, "at least 1"));
        }
        if self.receive_ahead == Some(0) {
            return Err(Error::invalid("receive_ahead", 0, "at least 1"));
        }
        if let (Some(given), Some(route)) = (self.route, self.strategy.route())
            && given != route
        {
            let want = format!("none, or {}: that of strategy {}", route.name(), self.strategy);
            return Err(Error::invalid("route", given.name(), want));
        }
        if let Some(machine) = &self.machine {
            machine.check().map_err(of_machine)?;
        }
        let of_auto =
            [("machine", self.machine.is_some()), ("documents", self.documents.is_some())];
        if let Some((name, _)) = of_auto.iter().find(|(_, is_given)| *is_given)
            && self.strategy != Strategy::Auto
        {
            let got = format!("one, for {}", self.strategy);
            return Err(Error::invalid(*name, got, "none: the strategy auto alone depends on it"));
        }
        if let Some(documents) = &self.documents {
            spec.validate_batch(documents, dims.q_len, dims.kv_len)?;
        }
        let deadlines = [("deadline", self.deadline), ("arrival_deadline", self.arrival_deadline)];
        for (name, deadline) in deadlines {
            if let Some(deadline) = deadline.filter(|&deadline| deadline < deadline::LEAST) {
                let want = format!("at least {:?}", deadline::LEAST);
                return Err(Error::invalid(name, format!("{deadline:?}"), want));
            }
        }
        Ok(spec)
    }

    /// Plans an in-process ring of `ranks` CPU ranks over whole tensors.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`], [`annulus_core::Error::Unsupported`],
    /// [`annulus_core::Error::OutOfMemory`].
    pub fn local_ring(&self, dims: Dims, ranks: usize) -> Result<LocalRing> {
        LocalRing::of_cpus(self, dims, ranks)
    }

    /// Creates an empty KV cache of `ranks` CPU ranks in this process.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] and [`annulus_core::Error::Unsupported`], which
    /// name the parameter; [`annulus_core::Error::OutOfMemory`].
    pub fn local_cache(&self, shape: CacheShape, ranks: usize) -> Result<LocalCache> {
        LocalCache::of_cpus(self, shape, ranks)
    }

    /// Returns the options of the ring engine, for a [`crate::Ring`] made by hand.
    pub fn ring_options(&self) -> RingOptions {
        RingOptions {
            layout: self.layout.clone(),
            route: self.route.or(self.strategy.route()).or(self.balanced_route),
            backward: !self.forward_only,
            local_gradients: self.local_gradients,
            kv_block_size: self.kv_block_size,
            receive_ahead: self
                .receive_ahead
                .and_then(NonZeroUsize::new)
                .or(self.strategy.receive_ahead())
                .or(self.layout.as_ref().map(Layout::receive_ahead)),
            deadline_variable: None,
            machine: self.machine.clone(),
        }
    }

    /// Returns the deadline in force: the given one, or 120 s.
    ///
    /// Also 120 s where the given one is below 1 s, which [`Attention::spec`] refuses.
    pub fn effective_deadline(&self) -> Duration {
        self.deadline.filter(|&deadline| deadline >= deadline::LEAST).unwrap_or(deadline::DEFAULT)
    }

    /// Returns the arrival deadline, or this default.
    pub(crate) fn arrival_deadline_or(&self, default: Duration) -> Duration {
        self.arrival_deadline.unwrap_or(default)
    }

    /// Bounds every wait of `transport` by the deadlines in force, with the hook for silent peers.
    /// `variable` is the deadline that the environment sets.
    pub(crate) fn bounded<T: Transport<S>, S: Space>(
        &self,
        transport: T,
        variable: Option<Duration>,
    ) -> Result<Deadline<T, S>> {
        let bounded = match variable {
            Some(Duration::ZERO) => Deadline::new(transport, self.effective_deadline())?.endless(),
            variable => {
                let deadline = variable.unwrap_or_else(|| self.effective_deadline());
                let arrival = self.arrival_deadline.map(|own| variable.unwrap_or(own));
                Deadline::new(transport, deadline)?.with_arrival_deadline(arrival)
            }
        };
        Ok(match self.silence_hook.clone() {
            Some(Hook(hook)) => bounded.with_warning(move |silence| hook(silence)),
            None => bounded,
        })
    }

    /// Returns the default number of rows of a page of a KV cache.
    pub(crate) const fn default_page_rows(&self) -> u64 {
        if self.reproducible { LEAF_ROWS } else { KvCache::<Cpu>::PAGE_ROWS }
    }

    /// Refuses parameters that a KV cache does not have.
    pub(crate) fn check_cache(&self) -> Result<()> {
        self.check_threads()?;
        let refusals = [
            (self.layout.is_some(), "layout"),
            (self.route.is_some(), "route"),
            (self.strategy != Strategy::Ring, "strategy"),
            (self.machine.is_some(), "machine"),
            (self.documents.is_some(), "documents"),
            (self.kv_block_size.is_some(), "kv_block_size"),
            (self.receive_ahead.is_some(), "receive_ahead"),
            (self.step_hook.is_some(), "on_step"),
            (self.backward != BackwardMode::OnePass, "backward_mode"),
            (self.local_gradients, "local_gradients"),
            (self.bias.is_some(), "bias"),
            (self.unnormalized, "unnormalized"),
        ];
        match refusals.into_iter().find(|(given, _)| *given) {
            Some((_, what)) => Err(Error::unsupported(what, "the KV cache")),
            None => Ok(()),
        }
    }

    /// Returns the hook for the activities of a pass.
    pub(crate) fn step_hook(&self) -> Option<StepHook> {
        self.step_hook.clone().map(|Hook(hook)| hook)
    }

    /// Returns the threads of each of `ranks` ranks in this process: those that were set, or the
    /// cores divided by the ranks.
    pub(crate) fn rank_threads(&self, ranks: usize) -> Result<usize> {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let default = cores.checked_div(ranks).unwrap_or(1).max(1);
        match self.threads.unwrap_or(default) {
            0 => Err(Error::invalid("threads", 0, "at least 1")),
            threads => Ok(threads),
        }
    }

    /// Refuses [`Attention::threads`] for a backend that has its own.
    pub(crate) fn check_threads(&self) -> Result<()> {
        match self.threads {
            Some(threads) => Err(Error::invalid(
                "threads",
                threads,
                "no threads here: the plan's backend was made with its own",
            )),
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
        Ok(all.into_iter().reduce(and).unwrap_or_else(|| Arc::new(annulus_core::mask::Everything)))
    }
}

/// Names the machine in an error of one of its fields.
fn of_machine(error: Error) -> Error {
    match error {
        Error::InvalidArgument { argument, got, want } => {
            Error::InvalidArgument { argument: format!("machine.{argument}"), got, want }
        }
        other => other,
    }
}
