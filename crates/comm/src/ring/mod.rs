//! The ring engine: one rank of attention over keys and values that circulate.
//!
//! | file | content |
//! |---|---|
//! | `ring_loop.rs` | the loops: forward, backward in one pass, backward in two |
//! | `one_pass.rs` | a step of the one-pass backward; gradients that arrive, and their reduction |
//! | `blocks.rs` | receives ahead and forwarding of blocks |
//! | `buffers.rs` | the plan's memory |
//! | `in_flight.rs` | transfers in flight; the only place that waits |
//! | `plan.rs`, `program.rs` | from rows to the messages of one rank |
//! | `planning.rs` | a plan or a new batch on all ranks; the proof that all lengths match |
//! | `overlap.rs` | overlap of the last block, and of the last gradients |
//! | `reduce.rs` | sums of dsinks and dbias over ranks, or over leaves |
//! | `tangents.rs` | JVP and double backward |
//! | `slices.rs` | the reduce-scatter of long sums |
//! | `step_events.rs` | events for a caller that shows progress |
//! | `check.rs` | arguments, before anything is sent; what ranks compare; the plan as text |
//!
//! The engine is independent of what a tile computes ([`Backend`]) and of how bytes move
//! ([`Transport`]).

mod blocks;
mod buffers;
pub(crate) mod check;
pub(crate) mod in_flight;
mod leaf_owners;
mod listed;
mod one_pass;
pub(crate) mod overlap;
mod plan;
pub(crate) mod planning;
pub(crate) mod program;
pub(crate) mod reduce;
mod ring_loop;
pub(crate) mod slices;
pub(crate) mod step_events;
mod tangents;

use std::{
    num::NonZeroUsize,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, BackwardInputs, Batch, Error, Gradients, Inputs, Order, Outputs, RankShard, Result,
    Runs, Space, Spec, Transport, View, ViewMut, Workspace,
};
use annulus_plan::{Layout, Machine, Route, Schedule, Work};

pub use crate::calls::Report;
use crate::{
    calls::{Calls, Collective, caught},
    head_statistics,
    profiler::span,
};
use buffers::RingBuffers;
use plan::{Agreed, RingPlan};
use planning::PlannedRing;
use step_events::StepWatch;
pub use step_events::{Activity, PassKind, StepEvent, StepHook};

/// One rank of a ring: a plan that is created once and used for many forward and backward passes.
///
/// Every method that takes `&mut self` is collective: all ranks call it in the same order, and it
/// succeeds on all ranks or fails on all.
pub struct Ring<B: Backend> {
    backend: B,
    transport: Box<dyn Transport<B::Space>>,
    agreed: Agreed,
    rank: usize,
    ranks: usize,
    /// Index of this rank on the ring.
    ring_index: usize,
    plan: RingPlan,
    shard: RankShard,
    workspace: B::Workspace,
    buffers: RingBuffers<B::Space>,
    calls: Calls,
    watch: StepWatch,
}

/// Options of a [`Ring`] besides the spec.
#[derive(Debug, Clone, Default)]
pub struct RingOptions {
    /// The layout, or `None` to choose one from the mask.
    pub layout: Option<Layout>,
    /// The route, or `None` to choose one from the mask.
    pub route: Option<Route>,
    /// True to plan for backward passes too.
    pub backward: bool,
    /// True to plan for JVPs and, with `backward`, for double backwards.
    pub second_derivatives: bool,
    /// True to leave the sums over ranks of dsinks, and of dbias broadcast over queries, to the
    /// caller: every rank then returns its own part.
    pub local_gradients: bool,
    /// Hint: rows at multiples of which a KV block is split, so that computing on one part overlaps
    /// receiving the next. It is rounded up to the KV tile of the backends, which is the default.
    /// All ranks use the largest of theirs. Results change by rounding at most.
    pub kv_block_size: Option<u64>,
    /// Ring steps by which the receive of a block is posted ahead of the step that computes on it,
    /// and by which the block may be forwarded ahead. Each step but the first takes one more buffer
    /// for a block and, up to [`GRADIENT_BUFFERS`](annulus_plan::GRADIENT_BUFFERS), two for its
    /// gradients in a one-pass backward. On routes that keep the local block
    /// ([`Route::keeps_local`](annulus_plan::Route)), more receives are posted ahead if they fit
    /// into the same memory ([`block_buffers`](annulus_plan::block_buffers)).
    /// Default: 1, whatever the layout; [`Layout::receive_ahead`] is what `Attention` asks for.
    pub receive_ahead: Option<NonZeroUsize>,
    /// Deadline that the environment sets, 0 for none; equal on all ranks.
    pub deadline_variable: Option<Duration>,
    /// Machine by which the strategy was chosen, of which ranks compare the fingerprints.
    pub machine: Option<Arc<Machine>>,
}

impl RingOptions {
    /// Returns [`RingOptions::receive_ahead`], or its default.
    pub(crate) fn receive_ahead_steps(&self) -> usize {
        self.receive_ahead.map_or(1, NonZeroUsize::get)
    }
}

impl<B: Backend> Ring<B> {
    /// Creates a plan, after an agreement of all ranks on every field of the spec and the options.
    /// An error in `spec` enters the agreement too, so that the other ranks do not wait for this
    /// one.
    ///
    /// # Ordering
    /// Collective over the transport's ranks.
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::Unsupported`] or [`Error::OutOfMemory`] here and
    /// [`Error::Refused`] on the other ranks; [`Error::RankMismatch`] on all ranks.
    pub fn new(
        backend: B,
        mut transport: Box<dyn Transport<B::Space>>,
        spec: Result<Spec>,
        options: RingOptions,
    ) -> Result<Self> {
        let rank = transport.control().rank();
        let ranks = transport.control().ranks();
        let planned = caught(|| PlannedRing::new(&backend, transport.as_mut(), spec, &options));
        let PlannedRing { agreed, plan, shard, workspace, buffers } =
            planned.inspect_err(|error| {
                if error.is_fatal() {
                    transport.control().abort(error);
                }
            })?;
        Ok(Self {
            backend,
            transport,
            ring_index: agreed.order.ring_index(rank),
            agreed,
            rank,
            ranks,
            plan,
            shard,
            workspace,
            buffers,
            calls: Calls::new(2),
            watch: StepWatch::default(),
        })
    }

    /// Adapts the plan to a new batch: segment ids, positions, dense mask, packed lengths of this
    /// rank's rows.
    ///
    /// # Ordering
    /// Collective. Ranks exchange their rows' ids and positions as runs; the layout and the route
    /// stay.
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::OutOfMemory`] here and [`Error::Refused`] elsewhere,
    /// [`Error::RankMismatch`]: the old batch stays in force on all ranks.
    /// As [`Ring::forward`] if communication fails, or if the old batch cannot be restored.
    pub fn update(&mut self, batch: &Batch) -> Result<()> {
        let checked = self.check_batch(batch);
        self.update_checked(batch, checked)
    }

    /// Updates the plan as [`Ring::update`] does, with a batch that was checked.
    pub(crate) fn update_checked(&mut self, batch: &Batch, checked: Result<()>) -> Result<()> {
        self.calls.alive()?;
        self.watch.batch_changed();
        let result = caught(|| self.try_update(batch, checked));
        self.or_end(result)
    }

    /// Computes out and lse of this rank's queries over all keys.
    ///
    /// # Shapes
    /// [`Inputs`] and [`Outputs`], with this rank's rows.
    /// # Ordering
    /// Collective.
    /// # Errors
    /// [`Error::InvalidArgument`] here and [`Error::Refused`] elsewhere, [`Error::RankMismatch`]:
    /// nothing was written, and the plan can still be used. [`Error::ArrivalTimeout`]: likewise;
    /// the caller makes the same call again, before the ranks that have entered it judge this one
    /// to be silent (see [`Deadline`](crate::Deadline)). [`Error::Comm`], [`Error::Timeout`],
    /// [`Error::PeerLost`], [`Error::Aborted`], [`Error::Device`]: the plan is dead.
    pub fn forward(
        &mut self,
        inputs: &Inputs<View<'_, B::Space>>,
        outputs: &mut Outputs<ViewMut<'_, B::Space>>,
    ) -> Result<Report> {
        let shapes = check::Shapes::of(&self.shard).on(self.agreed.no_out_residual);
        let checked = shapes
            .inputs(&inputs.as_ref().map(B::Space::describe))
            .and_then(|()| shapes.outputs(&outputs.as_ref().map(B::Space::describe_mut)));
        self.call(PassKind::Forward, checked, |ring| {
            let waited = ring.forward_loop(inputs, outputs)?;
            if ring.agreed.spec.statistics {
                ring.write_head_statistics(outputs)?;
            }
            Ok(waited)
        })
    }

    /// Writes the statistics by head over all ranks.
    fn write_head_statistics(
        &mut self,
        outputs: &mut Outputs<ViewMut<'_, B::Space>>,
    ) -> Result<()> {
        let mut views = outputs.as_mut().map(B::Space::host_view_mut);
        let (Some(Some(rows)), Some(Some(heads))) =
            (&mut views.statistics, &mut views.head_statistics)
        else {
            return Err(Error::internal("statistics in device memory"));
        };
        head_statistics::write(self.transport.as_mut(), &mut self.calls.entries, rows, heads)
    }

    /// Computes the gradients of this rank's rows.
    ///
    /// dsinks, and dbias of a bias that is broadcast over queries, are summed over ranks, unless
    /// [`RingOptions::local_gradients`] is set.
    ///
    /// # Shapes
    /// [`BackwardInputs`] and [`Gradients`], with this rank's rows.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::forward`]; [`Error::InvalidArgument`] also if the plan is forward only.
    pub fn backward(
        &mut self,
        inputs: &BackwardInputs<View<'_, B::Space>>,
        gradients: &mut Gradients<ViewMut<'_, B::Space>>,
    ) -> Result<Report> {
        let shapes = check::Shapes::of(&self.shard).on(self.agreed.no_out_residual);
        let checked = if self.agreed.backward {
            shapes
                .backward_inputs(&inputs.as_ref().map(B::Space::describe))
                .and_then(|()| shapes.gradients(&gradients.as_ref().map(B::Space::describe_mut)))
        } else {
            Err(check::forward_only())
        };
        self.call(PassKind::Backward, checked, |ring| ring.compute_gradients(inputs, gradients))
    }

    /// Computes the gradients within a call of all ranks. Returns the exposed communication.
    pub(crate) fn compute_gradients(
        &mut self,
        inputs: &BackwardInputs<View<'_, B::Space>>,
        gradients: &mut Gradients<ViewMut<'_, B::Space>>,
    ) -> Result<Duration> {
        let waited = self.backward_loop(inputs, gradients)?;
        Ok(waited + self.reduce_gradients(gradients)?)
    }

    /// Calls `hook` with every activity of this rank in the passes to come. A hook that panics ends
    /// the plan. Default: no hook.
    pub fn on_step(&mut self, hook: StepHook) {
        self.watch.set(hook);
    }

    /// Refuses the call that the other ranks make, on a rank that cannot make it, for example
    /// because it lacks the memory for its arguments. Returns `why`, or the error of a dead plan.
    /// The other ranks get [`Error::Refused`], nothing is computed, and the plan can still be used.
    ///
    /// # Ordering
    /// Collective, in place of [`Ring::forward`] or [`Ring::backward`].
    pub fn refuse(&mut self, why: Error) -> Error {
        self.refuse_call(why)
    }

    /// Returns the next tag of this ring's messages. The tags of rings of the same size that make
    /// the same calls are equal.
    pub(crate) const fn next_tag_mut(&mut self) -> &mut u64 {
        &mut self.calls.next_tag
    }

    /// Returns this rank.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the spec.
    pub fn spec(&self) -> &Spec {
        &self.agreed.spec
    }

    /// Returns the layout.
    pub const fn layout(&self) -> &Layout {
        &self.agreed.layout
    }

    /// Returns the route of the blocks: of a batch with key lists the direct one.
    pub const fn route(&self) -> Route {
        self.plan.route
    }

    /// Returns the rank of each ring index. Layout, schedule and work count ring indices, messages
    /// name ranks. The two differ only where ranks of several nodes alternate.
    pub const fn order(&self) -> &Order {
        &self.agreed.order
    }

    /// Returns the global query rows of this rank, in the order of its tensors.
    pub fn q_rows(&self) -> &Runs {
        &self.plan.shards.q[self.ring_index].rows
    }

    /// Returns the global key rows of this rank, in the order of its tensors.
    pub fn kv_rows(&self) -> &Runs {
        &self.plan.shards.kv[self.ring_index].rows
    }

    /// Returns the bytes of this rank's message buffers: blocks of keys, values and queries, and
    /// their gradients in flight. The backend's own memory is not in it: see [`Ring::workspace`].
    pub fn buffer_bytes(&self) -> u64 {
        self.buffers.bytes()
    }

    /// Returns the bytes of the partial results of leaves that wait to be merged; 0 unless the
    /// order is reproducible. The backend may round dims and rows up.
    pub fn leaf_bytes(&self) -> u64 {
        self.plan.leaf_bytes(self.agreed.backward)
    }

    /// Returns true if passes may run on another thread than the one that made the plan.
    pub fn any_thread(&self) -> bool {
        self.transport.any_thread()
    }

    /// Returns the fingerprint of this rank's arithmetic. Reproducible results have the same bits
    /// on all machines with the same one; ranks with different ones are refused then.
    pub fn numerics(&self) -> &str {
        &self.agreed.numerics
    }

    /// Returns the name of the backend if it has no rounding residual of out.
    pub(crate) const fn no_out_residual(&self) -> Option<&'static str> {
        self.agreed.no_out_residual
    }

    /// Returns true if forward passes write the rounding residual of out on request
    /// ([`Outputs::out_residual`]), and there are backward passes, which read it.
    pub fn has_out_residual(&self) -> bool {
        let Agreed { spec, backward, no_out_residual, .. } = &self.agreed;
        *backward && check::has_residual(spec.dtype) && no_out_residual.is_none()
    }

    /// Returns the gradient of the bias of this rank's key lists that the last backward pass or
    /// double backward has computed, one number for each listed pair; `None` without such a bias.
    pub fn list_bias_gradient(&self) -> Option<Vec<f64>> {
        self.workspace.list_bias_gradient()
    }

    /// Returns the memory that the backend keeps between passes.
    pub const fn workspace(&self) -> &B::Workspace {
        &self.workspace
    }

    /// Derives the schedule of keys and values, by ring index. A plan keeps only its own rank's
    /// steps. With key lists no rank knows the messages between two others, and they are left out.
    pub fn schedule(&self) -> Schedule {
        plan::kv_schedule(&self.agreed, &self.plan)
    }

    /// Counts the visible (query, key) pairs of every ring index, by the spec's mask and the
    /// batch's segment ids and positions: not by a dense mask or key lists.
    pub fn work(&self) -> Work {
        let spec = &self.agreed.spec;
        Work::of(spec.mask.as_ref(), spec.dims.q_heads, spec.dims.batch, &self.plan.shards)
    }

    /// Runs one pass: all ranks make the same call with valid arguments, or none starts; all
    /// succeed, or none does.
    fn call(
        &mut self,
        kind: PassKind,
        checked: Result<()>,
        pass: impl FnOnce(&mut Self) -> Result<Duration>,
    ) -> Result<Report> {
        self.call_named(kind.name(), self.bytes_predicted(kind), checked, pass)
    }

    /// As [`Ring::call`], of a pass by the name of the call.
    fn call_named(
        &mut self,
        name: &'static str,
        bytes_predicted: u64,
        checked: Result<()>,
        pass: impl FnOnce(&mut Self) -> Result<Duration>,
    ) -> Result<Report> {
        self.calls.alive()?;
        span!("pass", name, rank = self.rank);
        let start = Instant::now();
        let agreed = self.agree_on_call(name, checked);
        self.entered(agreed)?;
        self.run(start, bytes_predicted, pass)
    }

    /// Agrees with all ranks that they make call `name` with valid arguments. A ring of one rank
    /// allocates nothing here: it polls its transport, whose endpoint may be dead.
    fn agree_on_call(&mut self, name: &str, checked: Result<()>) -> Result<()> {
        if self.ranks == 1 {
            return checked.and_then(|()| self.transport.progress(Duration::ZERO));
        }
        let described = checked.map(|()| check::describe_call(name));
        self.calls.entries.enter(self.transport.as_mut(), &described).map(drop)
    }

    /// Takes the tags of a pass. A two-pass backward circulates two kinds of blocks.
    pub(super) const fn take_tags(&mut self) -> u64 {
        self.calls.take_tags(2 * overlap::tags(self.ranks))
    }
}

impl<B: Backend> Collective for Ring<B> {
    type Space = B::Space;

    fn calls_and_transport(&mut self) -> (&mut Calls, &mut dyn Transport<B::Space>) {
        (&mut self.calls, self.transport.as_mut())
    }
}
