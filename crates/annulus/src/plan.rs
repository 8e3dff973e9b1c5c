//! One rank of a ring, with typed tensors in host memory.

use std::thread::Scope;

use annulus_comm::{
    Cancellation, Deadline,
    ring::{PassKind, Report, RingOptions},
};
use annulus_core::{
    Backend, BackwardInputs, Batch, Dims, Element, Error, Gradients, Host, HostTensors, HostView,
    HostViewMut, Inputs, Outputs, ProcessOwned, Result, Runs, Space, Spec, Transport, View,
    ViewMut, index, max_and_sum, memory,
};
use annulus_plan::{Layout, Route, Schedule, Strategy, Work};
use ndarray::{Array, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut3, Axis, IntoDimension};

use crate::{
    Backward, BackwardViewMut, Division, Forward, ForwardView, ForwardViewMut, Runtime, Setup,
    Tensors,
    backend::{Cpu, Opened, or_abort},
    engine::{self, Engine, RankEngine},
    overlapped::{OverlapPlan, StartedPass},
};

/// Plan of one rank of a ring, made once and used for many passes.
///
/// An MPI process holds one. Tensors have this rank's rows only ([`Plan::q_rows`],
/// [`Plan::kv_rows`]).
///
/// A forked child cannot use the plans of its parent: collective methods return
/// [`Error::InvalidArgument`], and a drop frees nothing. It makes its own.
///
/// # Ordering
/// Every `&mut self` method is collective: all ranks call it in the same order.
///
/// # Examples
/// A ring of two ranks, each of which holds its own rows and nothing else. Here a rank is a thread.
/// A process of an MPI program runs the body of `rank` with its own transport.
/// ```
/// use annulus::{
///     Attention, Dims, Plan, Result, Tensors,
///     comm::threads::{Threads, each_rank, ring},
/// };
/// use ndarray::Array4;
///
/// fn rank(transport: Threads) -> Result<f32> {
///     let dims = Dims::new(1, 64, 4, 16); // of the whole sequence, the same on every rank
///     let attention = Attention::new().causal(true);
///     let mut plan = Plan::new(&attention, dims, transport)?; // on one CPU thread
///
///     // the rows that the layout assigns to this rank, in the order of its tensors
///     let rows: Vec<i64> = plan.q_rows().iter().collect();
///     let x = Array4::from_shape_fn((1, rows.len(), 4, 16), |(_, i, h, c)| {
///         ((rows[i] as usize * 7 + h * 3 + c) % 11) as f32 * 0.1
///     });
///     let tensors = Tensors::new(x.view(), x.view(), x.view());
///
///     let forward = plan.forward(&tensors)?; // of these queries, over the keys of all ranks
///     let gradients = plan.backward(&tensors, &forward, x.view(), None)?;
///     assert_eq!(gradients.dk.dim(), x.dim());
///     Ok(forward.lse.sum())
/// }
///
/// let sums = each_rank(ring(2), |_, transport| rank(transport))?;
/// assert!(sums.iter().all(|sum| sum.is_finite()));
/// # Ok::<(), annulus::Error>(())
/// ```
///
/// `S` is the space of the tensors: host memory, or with [`Plan::on_device`] that of the backend.
#[derive(Debug)]
pub struct Plan<S: Space = Host> {
    pub(crate) engine: ProcessOwned<Box<dyn RankEngine<S>>>,
    /// The strategy that was given or, of [`Strategy::Auto`], chosen.
    strategy: Strategy,
    cancellation: Cancellation,
}

impl Plan {
    /// Plans one rank over a transport of host memory, on the backend of the runtime
    /// ([`Runtime::backend`]). With the default layout and route, the ranks of a node are adjacent
    /// on the ring.
    ///
    /// Blocks of a GPU are staged through host memory, except that over MPI, an NVIDIA GPU sends
    /// them from device memory if the library takes it.
    ///
    /// # Shapes
    /// `dims` are the global lengths, the same on every rank.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::Unsupported`] here, then [`Error::Refused`]
    /// elsewhere; [`Error::RankMismatch`] on all ranks; [`Error::OutOfMemory`];
    /// [`Error::ArrivalTimeout`]. Those of the device: then [`Error::Aborted`] on the other ranks.
    ///
    /// [`Error::Aborted`]: crate::Error::Aborted
    /// [`Error::ArrivalTimeout`]: crate::Error::ArrivalTimeout
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    /// [`Error::RankMismatch`]: crate::Error::RankMismatch
    /// [`Error::Refused`]: crate::Error::Refused
    /// [`Error::Unsupported`]: crate::Error::Unsupported
    pub fn new<T: Transport<Host> + 'static>(
        setup: impl Into<Setup>,
        dims: Dims,
        mut transport: T,
    ) -> Result<Self> {
        let mut setup = setup.into();
        let opened = or_abort(setup.runtime.backend_of(None), &mut transport)?;
        // the opened backend has them
        setup.runtime = setup.runtime.backend(None).threads(None);
        match &opened.0 {
            Opened::Cpu(threads) => {
                let cpu = or_abort(Cpu::new(*threads), &mut transport)?;
                Self::with_backend(setup, dims, cpu, transport)
            }
            #[cfg(feature = "wgpu")]
            Opened::Wgpu(devices) => {
                let (backend, transport) = devices.rank(transport)?;
                Self::with_backend(setup, dims, backend, transport)
            }
            #[cfg(feature = "cuda")]
            Opened::Cuda(devices) => {
                let cuda = or_abort(devices.of_rank(&transport), &mut transport)?;
                let (backend, transport) = crate::devices::cuda_rank_over(cuda, transport)?;
                Self::with_backend(setup, dims, backend, transport)
            }
        }
    }

    /// Plans one rank as [`Plan::new`] does, on a backend of the program's own and a transport of
    /// its blocks. [`Runtime::backend`] and [`Runtime::threads`] are refused.
    ///
    /// # Shapes
    /// As [`Plan::new`].
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_backend<B, T>(
        setup: impl Into<Setup>,
        dims: Dims,
        backend: B,
        transport: T,
    ) -> Result<Self>
    where
        B: Backend<Space: HostTensors>,
        T: Transport<B::Space> + 'static,
    {
        Self::of(&setup.into(), dims, transport, |transport, spec, options, division| {
            engine::on_host(backend, Box::new(transport), spec, options, division)
        })
    }

    /// Computes out and lse of this rank's queries over the keys of all ranks.
    ///
    /// # Shapes
    /// [`Tensors`] and [`Forward`], with this rank's rows.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] here and [`Error::Refused`] elsewhere if a tensor does not fit
    /// the plan, and [`Error::RankMismatch`]: nothing was done on any rank.
    /// [`Error::ArrivalTimeout`]: nothing was done, make the same call again
    /// ([`Runtime::arrival_deadline`]). [`Error::Comm`],
    /// [`Error::Timeout`], [`Error::PeerLost`], [`Error::Aborted`], [`Error::Device`] and
    /// [`Error::Internal`] end the plan; later calls return [`Error::Poisoned`].
    ///
    /// # Source
    /// Liu et al. 2023, Ring Attention with Blockwise Transformers, section 3.
    ///
    /// [`Error::Aborted`]: crate::Error::Aborted
    /// [`Error::ArrivalTimeout`]: crate::Error::ArrivalTimeout
    /// [`Error::Comm`]: crate::Error::Comm
    /// [`Error::Device`]: crate::Error::Device
    /// [`Error::Internal`]: crate::Error::Internal
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    /// [`Error::PeerLost`]: crate::Error::PeerLost
    /// [`Error::Poisoned`]: crate::Error::Poisoned
    /// [`Error::RankMismatch`]: crate::Error::RankMismatch
    /// [`Error::Refused`]: crate::Error::Refused
    /// [`Error::Timeout`]: crate::Error::Timeout
    pub fn forward<T: Element>(&mut self, tensors: &Tensors<'_, T>) -> Result<Forward<T>> {
        let mut forward = self.zero_outputs().map_err(|error| self.engine.refuse(error))?;
        let report = self.forward_into(tensors, forward.view_mut())?;
        forward.reports.push(report);
        Ok(forward)
    }

    /// Computes out and lse as [`Plan::forward`] does, into tensors of the caller's. Copies no
    /// tensor; a warm call on a CPU backend allocates no tensor either.
    ///
    /// # Shapes
    /// [`Tensors`] and [`ForwardViewMut`], with this rank's rows. Any strides.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::forward`].
    pub fn forward_into<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        outputs: ForwardViewMut<'_, T>,
    ) -> Result<Report> {
        let ForwardViewMut { out, lse, max, sum, ties, out_residual, statistics, head_statistics } =
            outputs;
        let mut outputs = Outputs {
            out: T::view_mut(out),
            lse: rows_mut::<T>(lse),
            max: max.map(rows_mut::<T>),
            sum: sum.map(rows_mut::<T>),
            ties: ties.map(rows_mut::<T>),
            out_residual: out_residual.map(T::view_mut),
            statistics: statistics.map(T::Accumulator::view_mut),
            head_statistics: head_statistics.map(rows_mut::<T>),
        };
        self.engine.forward(inputs(tensors), &mut outputs)
    }

    /// Computes this rank's gradients from the result of [`Plan::forward`], ∂L/∂out and ∂L/∂lse.
    ///
    /// dsoftmax_aux, and dbias if it is broadcast over queries, are summed over all ranks, unless
    /// [`Attention::local_gradients`](crate::Attention::local_gradients) is set.
    ///
    /// # Shapes
    /// `dout` as out, `dlse` as lse; [`Backward`] with this rank's rows. `None` as `dlse` is 0.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::forward`]. [`Error::InvalidArgument`] also of a plan that is forward only.
    ///
    /// # Source
    /// Dao 2023, FlashAttention-2, algorithm 2.
    ///
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    pub fn backward<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        forward: &Forward<T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
    ) -> Result<Backward<T>> {
        let mut gradients = zero_gradients(tensors).map_err(|error| self.engine.refuse(error))?;
        let report =
            self.backward_into(tensors, &forward.view(), dout, dlse, gradients.view_mut())?;
        gradients.reports.push(report);
        Ok(gradients)
    }

    /// Computes the gradients as [`Plan::backward`] does, into tensors of the caller's. Copies no
    /// tensor; a warm call on a CPU backend allocates no tensor either.
    ///
    /// # Shapes
    /// As [`Plan::backward`], and [`BackwardViewMut`] with this rank's rows. Any strides.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::backward`].
    pub fn backward_into<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        forward: &ForwardView<'_, T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
        gradients: BackwardViewMut<'_, T>,
    ) -> Result<Report> {
        let statistics = max_and_sum(&forward.lse, forward.max.as_ref(), forward.sum.as_ref());
        let (max, sum) = statistics.map_err(|error| self.engine.refuse(error))?;
        let inputs = BackwardInputs {
            forward: inputs(tensors),
            out: T::view(forward.out.view()),
            max: rows::<T>(max.view()),
            sum: sum.map(|sum| rows::<T>(sum.view())),
            ties: forward.ties.as_ref().map(|ties| rows::<T>(ties.view())),
            out_residual: forward.out_residual.as_ref().map(|of| T::view(of.view())),
            dout: T::view(dout),
            dlse: dlse.map(rows::<T>),
        };
        self.engine.backward(inputs, &mut gradient_views(gradients))
    }

    /// Computes the gradients as [`Plan::backward`] does, after computing out and lse again.
    ///
    /// It saves the memory of [`Forward`] between the passes.
    ///
    /// # Shapes
    /// As [`Plan::backward`].
    ///
    /// # Ordering
    /// Collective: a forward and a backward pass.
    ///
    /// # Errors
    /// As [`Plan::forward`].
    pub fn backward_recomputed<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
    ) -> Result<Backward<T>> {
        let forward = self.forward(tensors)?;
        self.backward(tensors, &forward, dout, dlse)
    }

    /// Returns zeros for this rank's rows of every output of a forward pass.
    fn zero_outputs<T: Element>(&self) -> Result<Forward<T>> {
        zero_outputs(self.spec(), index(self.q_rows().len()), self.has_out_residual())
    }
}

impl<S: Space> Plan<S> {
    /// Plans one rank as [`Plan::with_backend`] does, of tensors in the memory of the backend. The
    /// only strategy is the ring.
    ///
    /// # Shapes
    /// As [`Plan::new`].
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::new`]; [`Error::Unsupported`] for another strategy.
    ///
    /// [`Error::Unsupported`]: crate::Error::Unsupported
    pub fn on_device<B, T>(
        setup: impl Into<Setup>,
        dims: Dims,
        backend: B,
        transport: T,
    ) -> Result<Self>
    where
        B: Backend<Space = S>,
        T: Transport<S> + 'static,
    {
        Self::of(&setup.into(), dims, transport, |transport, spec, options, division| {
            engine::on_device(backend, Box::new(transport), spec, options, division)
        })
    }

    /// Plans with the engine that `make` returns.
    fn of<T: Transport<N> + 'static, N: Space>(
        setup: &Setup,
        dims: Dims,
        transport: T,
        make: impl FnOnce(Deadline<T, N>, Result<Spec>, RingOptions, &Division) -> Result<Engine<S>>,
    ) -> Result<Self> {
        // a value that cannot be read enters the agreement, so that no rank waits for this one
        let variable = Runtime::deadline_variable();
        let deadline_variable = variable.clone().unwrap_or_default();
        let cancellation = Cancellation::default();
        let transport = setup.runtime.bounded(transport, deadline_variable)?;
        let transport = transport.with_cancellation(cancellation.clone());
        let spec = variable.and_then(|_| setup.runtime.check_own_backend());
        let spec = spec.and_then(|()| setup.spec(dims));
        let options = RingOptions { deadline_variable, ..setup.ring_options() };
        let (strategy, mut engine) = make(transport, spec, options, &setup.division)?;
        if let Some(hook) = setup.runtime.step_hook() {
            engine.on_step(hook);
        }
        Ok(Self { engine: ProcessOwned::new(engine), strategy, cancellation })
    }

    /// Starts `pass` on a thread of its own, so that it overlaps with the program: a forward or a
    /// backward pass of any form.
    ///
    /// # Ordering
    /// Collective over the ranks, which may start the pass or call it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if MPI forbids another thread (below `MPI_THREAD_MULTIPLE`), and
    /// [`Error::Device`] if no thread starts. The pass is not started, and the other ranks get no
    /// message: they wait for this one's call.
    ///
    /// [`Error::Device`]: crate::Error::Device
    /// [`Error::Unsupported`]: crate::Error::Unsupported
    pub fn start<'scope, R: Send + 'scope>(
        &'scope mut self,
        scope: &'scope Scope<'scope, '_>,
        pass: impl FnOnce(&mut Self) -> Result<R> + Send + 'scope,
    ) -> Result<StartedPass<'scope, R>> {
        self.engine.process().check("plan")?;
        StartedPass::of(self, scope, pass)
    }

    /// Adapts the plan to a new batch: segment ids, positions, dense mask, packed lengths.
    ///
    /// The layout and the route stay; the schedule is derived anew, O(ranks²).
    ///
    /// # Shapes
    /// As [`Batch`], with this rank's rows; `cum_seqlens` whole, and all keys in `attention_mask`.
    ///
    /// # Ordering
    /// Collective. Ranks exchange the ids and positions of their rows as runs.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], which names the tensor, [`Error::Unsupported`] and
    /// [`Error::OutOfMemory`] here, [`Error::Refused`] elsewhere; [`Error::RankMismatch`]: the old
    /// batch stays in force on all ranks. As [`Plan::forward`] if communication fails.
    ///
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    /// [`Error::RankMismatch`]: crate::Error::RankMismatch
    /// [`Error::Refused`]: crate::Error::Refused
    /// [`Error::Unsupported`]: crate::Error::Unsupported
    pub fn update(&mut self, batch: &Batch) -> Result<()> {
        self.engine.update(batch)
    }

    /// Computes out and lse as [`Plan::forward`] does, of tensors in the plan's space. With tensors
    /// in device memory, the results are complete in the order of the backend's stream or queue.
    ///
    /// # Shapes
    /// [`Inputs`] and [`Outputs`], with this rank's rows.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::forward`].
    pub fn forward_in_place(
        &mut self,
        inputs: Inputs<View<'_, S>>,
        outputs: &mut Outputs<ViewMut<'_, S>>,
    ) -> Result<Report> {
        self.engine.forward(inputs, outputs)
    }

    /// Computes the gradients as [`Plan::backward`] does, of tensors in the plan's space, as
    /// [`Plan::forward_in_place`].
    ///
    /// # Shapes
    /// [`BackwardInputs`] and [`Gradients`], with this rank's rows.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::backward`].
    pub fn backward_in_place(
        &mut self,
        inputs: BackwardInputs<View<'_, S>>,
        gradients: &mut Gradients<ViewMut<'_, S>>,
    ) -> Result<Report> {
        self.engine.backward(inputs, gradients)
    }

    /// Returns the gradient of the bias of this rank's key lists that the last backward pass or
    /// double backward has computed.
    ///
    /// # Shapes
    /// `[listed pairs]`, in the order of [`KeyLists`](crate::mask::KeyLists); `None` without a bias.
    ///
    /// # Ordering
    /// Local.
    pub fn list_bias_gradient(&self) -> Option<Vec<f64>> {
        self.engine.list_bias_gradient()
    }

    /// Returns the global query rows of this rank, in the order of its tensors.
    pub fn q_rows(&self) -> &Runs {
        self.engine.facts().q_rows
    }

    /// Returns the global key rows of this rank, in the order of its tensors.
    pub fn kv_rows(&self) -> &Runs {
        self.engine.facts().kv_rows
    }

    /// Returns the fingerprint of this rank's arithmetic
    /// ([`Attention::reproducible`](crate::Attention::reproducible)).
    pub fn numerics(&self) -> &str {
        self.engine.facts().numerics
    }

    /// Refuses the call that the other ranks make, on a rank that cannot make it, as
    /// [`crate::comm::ring::Ring::refuse`].
    ///
    /// # Ordering
    /// Collective, in place of the call.
    pub fn refuse(&mut self, why: Error) -> Error {
        self.engine.refuse(why)
    }

    /// Returns true if the plan has a backward pass whose error of dq the rounding residual of out
    /// removes ([`Forward::out_residual`]): of bf16 and f16 on the CPU, and on grids of several key
    /// columns on every backend.
    pub fn has_out_residual(&self) -> bool {
        self.engine.facts().has_out_residual
    }

    /// Returns true if passes may run on another thread than the one that made the plan: false over
    /// an MPI below `MPI_THREAD_MULTIPLE`.
    pub fn any_thread(&self) -> bool {
        self.engine.facts().any_thread
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.engine.facts().rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.engine.facts().ranks
    }

    /// Returns the definition of the attention.
    pub fn spec(&self) -> &Spec {
        self.engine.facts().spec
    }

    /// Returns the strategy in force, never [`Strategy::Auto`].
    pub fn strategy(&self) -> Strategy {
        self.engine.facts().strategy
    }

    /// Returns the strategy in force under its published name: as [`Plan::strategy`], but a
    /// published strategy instead of its form, however it was given or chosen.
    /// [`Strategy::OncePerNode`] has the ranks of a node.
    ///
    /// # Examples
    /// ```
    /// use annulus::{Attention, Dims, Division, LocalRing, Strategy};
    ///
    /// let (attention, dims) = (Attention::new(), Dims::new(1, 64, 2, 16));
    /// let division = Division::new().strategy(Strategy::AllGather);
    /// let ring = LocalRing::new((&attention, division), dims, 4)?;
    /// assert_eq!(ring.plan().strategy(), Strategy::Ring);
    /// assert_eq!(ring.plan().named_strategy(), Strategy::AllGather);
    ///
    /// let columns = Strategy::Grid { heads: 1, queries: 1, keys: 4 };
    /// let division = Division::new().strategy(columns);
    /// let ring = LocalRing::new((&attention, division), dims, 4)?;
    /// assert_eq!(ring.plan().strategy(), columns);
    /// assert_eq!(ring.plan().named_strategy(), Strategy::PassQ);
    /// # Ok::<(), annulus::Error>(())
    /// ```
    pub fn named_strategy(&self) -> Strategy {
        match self.strategy {
            Strategy::OncePerNode { node_ranks } => Strategy::OncePerNode {
                node_ranks: self.route().node_ranks().unwrap_or(node_ranks),
            },
            given if given.route().is_some() => given,
            _ => self.strategy().published_on(self.ranks()),
        }
    }

    /// Returns the layout of the rows, by ring index ([`Plan::ring_index`]).
    pub fn layout(&self) -> &Layout {
        self.engine.facts().layout
    }

    /// Returns the index of this rank in the layout.
    pub fn ring_index(&self) -> usize {
        self.engine.facts().ring_index
    }

    /// Returns the route of the blocks.
    pub fn route(&self) -> Route {
        self.engine.facts().route
    }

    /// Returns the payload bytes that this rank sends in a pass.
    pub fn bytes_predicted(&self, pass: PassKind) -> u64 {
        self.engine.bytes_predicted(pass)
    }

    /// Returns the bytes of this rank's message buffers; with a strategy other than the ring also
    /// those of the tensors of its group and heads.
    pub fn buffer_bytes(&self) -> u64 {
        self.engine.figures().buffer_bytes
    }

    /// Returns the visible (query, key) pairs that the ranks of this rank's ring compute, of the
    /// heads that they have, and the index of this rank among them.
    pub fn work(&self) -> (Work, usize) {
        self.engine.work()
    }

    /// Returns the bytes of memory that this rank's backend keeps between passes, on its device or
    /// the host: accumulators, row statistics, scratch. The first pass of each kind may add to it,
    /// later passes do not.
    pub fn workspace_bytes(&self) -> u64 {
        self.engine.figures().workspace_bytes
    }

    /// Returns the bytes of the partial results of leaves that wait to be merged, as
    /// [`crate::comm::ring::Ring::leaf_bytes`]; 0 unless the order is reproducible.
    pub fn leaf_bytes(&self) -> u64 {
        self.engine.figures().leaf_bytes
    }

    /// Returns the blocks that this rank computes on in a forward and a backward pass, as
    /// [`crate::comm::ring::Ring::blocks_computed`].
    pub fn blocks_computed(&self) -> [usize; 2] {
        self.engine.figures().blocks_computed
    }

    /// Derives the schedule of keys and values, as [`crate::comm::ring::Ring::schedule`]. With a
    /// grid, the schedule of the ring over the groups, for this rank's heads and key column.
    pub fn schedule(&self) -> Schedule {
        self.engine.schedule()
    }
}

impl<S: Space> OverlapPlan for Plan<S> {
    fn any_thread(&self) -> bool {
        Self::any_thread(self)
    }

    fn cancellations(&self) -> Vec<Cancellation> {
        vec![self.cancellation.clone()]
    }
}

impl<S: Space> std::fmt::Display for Plan<S> {
    /// Writes mask, ranks, strategy, layout, route and bytes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&*self.engine, f)
    }
}

/// Returns a tensor of zeros, in large pages where possible.
pub(crate) fn zeros<T: Element, S: IntoDimension>(
    what: &str,
    shape: S,
) -> Result<Array<T, S::Dim>> {
    let zeros = memory::zeros(what, shape)?;
    annulus_cpu::prefer_large_pages(zeros.as_slice_memory_order().unwrap_or_default());
    Ok(zeros)
}

/// Zeros of the shapes of the outputs of `q_len` queries, with `has_residual` also of the rounding
/// residual of out.
pub(crate) fn zero_outputs<T: Element>(
    spec: &Spec,
    q_len: usize,
    has_residual: bool,
) -> Result<Forward<T>> {
    let Dims { batch, q_heads, value_dim, .. } = spec.dims;
    let residual = || zeros("out_residual", (batch, q_len, q_heads, value_dim));
    let statistics = |name| memory::zeros(name, (batch, q_heads, q_len));
    Ok(Forward {
        max: Some(statistics("max")?),
        sum: Some(statistics("sum")?),
        ties: (!spec.normalize).then(|| statistics("ties")).transpose()?,
        out_residual: has_residual.then(residual).transpose()?,
        statistics: spec
            .statistics
            .then(|| memory::zeros("statistics", (batch, q_heads, q_len, Spec::SCORE_STATISTICS)))
            .transpose()?,
        head_statistics: spec
            .statistics
            .then(|| memory::zeros("head_statistics", (q_heads, Spec::SCORE_STATISTICS, 2)))
            .transpose()?,
        ..zero_results(spec, q_len)?
    })
}

/// Zeros of the shapes of out and lse of `q_len` queries, without what a backward pass needs.
pub(crate) fn zero_results<T: Element>(spec: &Spec, q_len: usize) -> Result<Forward<T>> {
    let Dims { batch, q_heads, value_dim, .. } = spec.dims;
    Ok(Forward {
        out: zeros("out", (batch, q_len, q_heads, value_dim))?,
        lse: memory::zeros("lse", (batch, q_heads, q_len))?,
        max: None,
        sum: None,
        ties: None,
        out_residual: None,
        statistics: None,
        head_statistics: None,
        reports: Vec::new(),
    })
}

/// Zeros of the shapes of the gradients.
pub(crate) fn zero_gradients<T: Element>(tensors: &Tensors<'_, T>) -> Result<Backward<T>> {
    let Tensors { q, k, v, bias, softmax_aux } = tensors;
    let dsinks =
        |sinks: &ArrayView2<'_, T::Accumulator>| memory::zeros("dsoftmax_aux", sinks.dim());
    Ok(Backward {
        dq: zeros("dq", q.dim())?,
        dk: zeros("dk", k.dim())?,
        dv: zeros("dv", v.dim())?,
        dbias: bias.as_ref().map(|bias| memory::zeros("dbias", bias.dim())).transpose()?,
        dsoftmax_aux: softmax_aux.as_ref().map(dsinks).transpose()?,
        reports: Vec::new(),
    })
}

pub(crate) fn inputs<'a, T: Element>(tensors: &'a Tensors<'_, T>) -> Inputs<HostView<'a>> {
    let sinks = |sinks: &'a ArrayView2<'_, T::Accumulator>| {
        T::Accumulator::view(sinks.view().insert_axis(Axis(2)).insert_axis(Axis(3)))
    };
    Inputs {
        q: T::view(tensors.q.view()),
        k: T::view(tensors.k.view()),
        v: T::view(tensors.v.view()),
        bias: tensors.bias.as_ref().map(|bias| T::Accumulator::view(bias.view())),
        sinks: tensors.softmax_aux.as_ref().map(sinks),
    }
}

pub(crate) fn gradient_views<T: Element>(
    gradients: BackwardViewMut<'_, T>,
) -> Gradients<HostViewMut<'_>> {
    let BackwardViewMut { dq, dk, dv, dbias, dsoftmax_aux } = gradients;
    Gradients {
        dq: T::view_mut(dq),
        dk: T::view_mut(dk),
        dv: T::view_mut(dv),
        dbias: dbias.map(T::Accumulator::view_mut),
        dsinks: dsoftmax_aux.map(|dsinks| {
            T::Accumulator::view_mut(dsinks.insert_axis(Axis(2)).insert_axis(Axis(3)))
        }),
    }
}

/// Numbers of query rows, as a tensor of four axes.
pub(crate) fn rows<T: Element>(array: ArrayView3<'_, T::Accumulator>) -> HostView<'_> {
    T::Accumulator::view(array.insert_axis(Axis(3)))
}

pub(crate) fn rows_mut<T: Element>(array: ArrayViewMut3<'_, T::Accumulator>) -> HostViewMut<'_> {
    T::Accumulator::view_mut(array.insert_axis(Axis(3)))
}
