//! One rank of a grid of heads × queries × keys: an exchange in groups of ranks, and a ring over
//! groups.
//!
//! With one key column it is heads × ring:
//!
//! ```text
//! exchange   own rows of all heads        -> own heads of all rows of the group     q, k, v
//! ring       over the ranks with the same heads of all groups
//! exchange   own heads of all rows        -> own rows of all heads                  out, lse
//! ```
//! A backward pass sends out, lse, dout and dlse with the inputs, and returns dq, dk and dv. A JVP
//! and a double backward also send the direction of the inputs.
//!
//! With several key columns, a group has a part of the queries, and its ranks have the keys of a
//! column each (here 2 groups × 3 columns, ring index = 3 · group + column):
//!
//! ```text
//!            keys 0      keys 1      keys 2
//! group 0    rank 0      rank 1      rank 2      all-gather of q, reduce-scatter of (out, lse)
//! group 1    rank 3      rank 4      rank 5
//!            ring of     ring of     ring of
//!            0 and 3     1 and 4     2 and 5
//!
//! exchange   own query rows               -> all query rows of the group            q
//! ring       over the ranks of the column: partial results over its keys
//! exchange   partial results of all rows  -> own rows, merged over the columns      out, lse
//! ```
//! Partial results are in the accumulator's type; they are rounded once, after the merge in f64. A
//! backward pass sends q, dout, lse and −delta, from which every rank of the group computes the
//! same probabilities, and sums the partial dq; dk and dv are complete after the ring. Of an output
//! that is not normalised it sends dlse, max and the share of each maximum in place of −delta. Keys
//! and values are exchanged only if heads are divided too, with the members of the own column.
//!
//! | file | content |
//! |---|---|
//! | `subset.rs` | the transport of one inner ring: some ranks of a transport, renumbered |
//! | `exchange.rs` | the messages within a group |
//! | `shard_tensors.rs` | the tensors of the own heads, and of key columns |
//! | `passes.rs` | forward and backward |
//! | `inner_ring.rs` | their rings; dsinks, and dbias without a query axis, of all heads |
//! | `prepare.rs` | planning of one rank, and a new batch |
//! | `group_batch.rs` | the batch of a group |
//!
//! The ring is a [`Ring`] like any other, whose passes run within the calls of this engine. All
//! agreements are between all ranks; those of the inner rings on a plan or a batch come after them
//! and so cannot differ from ring to ring. All-gathers of an inner ring are
//! all-gathers of all ranks, which every inner ring makes in the same order.

mod exchange;
mod group_batch;
mod inner_ring;
mod passes;
mod prepare;
mod shard_tensors;
mod subset;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use annulus_core::{
    AgreedLengths, Backend, BackwardInputs, Batch, Control, Error, Gradients, Host, HostTensors,
    HostView, HostViewMut, Inputs, Outputs, Result, Runs, Side, Space, Spec, TangentInputs,
    TangentOutputs, Transport,
};
use annulus_plan::{ExchangeFields, GroupLayout, HeadField, HeadGrid, Layout, Route, Strategy};

use self::{
    exchange::HeadExchange,
    prepare::{PreparedGrid, check},
    shard_tensors::{PassFields, PassTensor, ShardTensors},
    subset::Subset,
};
use crate::{
    agreement::{self, Descriptor},
    calls::{Calls, Collective, Report, caught},
    head_statistics,
    profiler::span,
    ring::{
        PassKind, Ring, RingOptions, StepEvent, StepHook,
        check::{self, Shapes, forward_only, has_residual},
        planning::PlanningTicks,
    },
};

/// All-gathers of a plan before its first call: entry, allocation, status.
const PLAN_ROUNDS: u64 = 3;

/// One rank of a grid of heads × queries × keys: a plan that is created once and used for many
/// passes. Its calls are those of [`Ring`].
pub struct HeadsRing<B: Backend> {
    /// The ring of this rank's heads and key column, over groups.
    ring: Ring<B>,
    transport: Subset<B::Space>,
    spec: Spec,
    options: RingOptions,
    grid: HeadGrid,
    layout: GroupLayout,
    rank: usize,
    ranks: usize,
    ring_index: usize,
    q_rows: Runs,
    kv_rows: Runs,
    exchange: HeadExchange,
    tensors: ShardTensors,
    forward: PassFields,
    backward: PassFields,
    /// Of a JVP and of a double backward, of a plan with them.
    tangents: Vec<PassFields>,
    /// Rounding residual of out, if it is exchanged when callers ask for it: of 16-bit types and
    /// one key column. With several, the merge of the columns computes it.
    residual: Option<HeadField>,
    /// Proof that all ranks derive the same messages, if transports make use of it.
    lengths: Option<AgreedLengths>,
    calls: Calls,
    /// The batch in force, with the rows of the group.
    batch: Batch,
    hook: Option<StepHook>,
    /// Nanoseconds from the start of the pass to that of its ring, for events.
    ring_began: Arc<AtomicU64>,
}

impl<B: Backend<Space: HostTensors>> HeadsRing<B> {
    /// Creates a plan of `strategy`, after an agreement of all ranks. An error in `spec` enters the
    /// agreement too.
    ///
    /// With a fixed layout the rows of a rank are those of the layout, as in a ring. Otherwise they
    /// are those of the layout that a ring over the groups × key columns would have, and the ranks
    /// of a group are on one node if possible.
    ///
    /// # Ordering
    /// Collective over the transport's ranks.
    ///
    /// # Errors
    /// As [`Ring::new`]; [`Error::InvalidArgument`] also if `strategy` does not fit the ranks and
    /// heads ([`HeadGrid::of`]) or is [`Strategy::Auto`], and [`Error::Unsupported`] in the
    /// cases of [`HeadGrid::check`].
    pub fn new(
        backend: B,
        transport: Box<dyn Transport<B::Space>>,
        spec: Result<Spec>,
        options: RingOptions,
        strategy: Strategy,
    ) -> Result<Self> {
        let mut transport = Subset::whole(transport);
        let result = caught(|| Self::plan(backend, &mut transport, spec, options, strategy));
        result.inspect_err(|error| {
            if error.is_fatal() {
                transport.control().abort(error);
            }
        })
    }

    fn plan(
        backend: B,
        transport: &mut Subset<B::Space>,
        spec: Result<Spec>,
        options: RingOptions,
        strategy: Strategy,
    ) -> Result<Self> {
        let rank = transport.control().rank();
        let ranks = transport.control().ranks();
        let checked = spec.and_then(|spec| check(&backend, spec, &options, ranks, strategy));
        let placement = transport.control().placement().cloned();
        let described = checked.as_ref().map_err(Error::clone);
        let described =
            described.map(|(spec, grid, capabilities)| (spec, capabilities, grid.strategy()));
        let posts_ahead = check::agree_on_plan(transport, described, &options, 0)?.posts_ahead;
        let (spec, grid, _) = checked?;

        let mut ticks = PlanningTicks::new(&mut *transport);
        let placed = placement.as_ref();
        let prepared = PreparedGrid::new(&spec, grid, &options, rank, placed, &mut || ticks.tick());
        let prepared = ticks.finish(prepared).map(|prepared| {
            let balance = prepared.message_balance(&spec, &options, rank);
            (prepared, balance)
        });
        let balance = prepared.as_ref().map(|(_, balance)| balance).map_err(Error::clone);
        let lengths = agreement::close_plan(transport, 1, || 2, balance)?;
        let (prepared, _) = prepared?;
        let PreparedGrid { layout, ring_index, forward, backward, tangents, exchange, tensors } =
            prepared;

        let member = grid.member(ring_index);
        let rank_of = |group| layout.order.rank(grid.ring_index(group, member));
        let ring_ranks: Vec<usize> = (0..grid.groups()).map(rank_of).collect();
        let of_ring = transport.subset(ring_ranks, grid.group(ring_index));
        let inner = RingOptions {
            layout: Some(layout.of_member(&grid, member).clone()),
            // only the first column has sinks: their gradients are summed over all ranks at once
            local_gradients: options.local_gradients || grid.columns() > 1,
            ..options.clone()
        };
        let residual = prepare::residual(&spec, &grid, &forward.fields);
        let of_member = grid.spec_of(&spec, member);
        // all arguments are agreed upon, so that all inner rings make the same all-gathers
        let ring = Ring::new(backend, Box::new(of_ring), Ok(of_member), inner);
        let status = ring.as_ref().map_err(Error::clone).map(|_| ());
        agreement::close(transport, 2, status)?;
        let rows = |side, len| layout.of_ranks.shard(side, len, ring_index, ranks);
        Ok(Self {
            ring: ring?,
            transport: transport.handle(),
            q_rows: rows(Side::Q, spec.dims.q_len),
            kv_rows: rows(Side::Kv, spec.dims.kv_len),
            spec,
            options,
            grid,
            layout,
            rank,
            ranks,
            ring_index,
            exchange,
            tensors,
            forward,
            backward,
            tangents,
            residual,
            lengths: posts_ahead.then_some(lengths),
            calls: Calls::new(PLAN_ROUNDS),
            batch: Batch::default(),
            hook: None,
            ring_began: Arc::default(),
        })
    }

    /// Computes out and lse of this rank's queries over all keys, as [`Ring::forward`].
    ///
    /// # Shapes
    /// [`Inputs`] and [`Outputs`], with this rank's rows of all heads.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::forward`].
    pub fn forward(
        &mut self,
        inputs: &Inputs<HostView<'_>>,
        outputs: &mut Outputs<HostViewMut<'_>>,
    ) -> Result<Report> {
        let shapes = self.shapes();
        let checked = shapes
            .inputs(&inputs.as_ref().map(Host::describe))
            .and_then(|()| shapes.outputs(&outputs.as_ref().map(Host::describe_mut)));
        let has_residual = outputs.out_residual.is_some();
        self.call(PassKind::Forward, checked, has_residual, |plan, start| {
            let waited = plan.forward_pass(inputs, outputs, start)?;
            if let (Some(rows), Some(heads)) =
                (&mut outputs.statistics, &mut outputs.head_statistics)
            {
                let HeadsRing { transport, calls, .. } = plan;
                head_statistics::write(transport, &mut calls.entries, rows, heads)?;
            }
            Ok(waited)
        })
    }

    /// Computes the gradients of this rank's rows, as [`Ring::backward`].
    ///
    /// # Shapes
    /// [`BackwardInputs`] and [`Gradients`], with this rank's rows of all heads.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::backward`].
    pub fn backward(
        &mut self,
        inputs: &BackwardInputs<HostView<'_>>,
        gradients: &mut Gradients<HostViewMut<'_>>,
    ) -> Result<Report> {
        let shapes = self.shapes();
        let checked = if self.options.backward {
            shapes
                .backward_inputs(&inputs.as_ref().map(Host::describe))
                .and_then(|()| shapes.gradients(&gradients.as_ref().map(Host::describe_mut)))
        } else {
            Err(forward_only())
        };
        let has_residual = inputs.out_residual.is_some();
        self.call(PassKind::Backward, checked, has_residual, |plan, start| {
            let waited = plan.backward_pass(inputs, gradients, start)?;
            Ok(waited + plan.sum_gradients(gradients)?)
        })
    }

    /// Computes out, lse and their tangents, as [`Ring::jvp`].
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::jvp`].
    pub fn jvp(
        &mut self,
        inputs: &TangentInputs<HostView<'_>>,
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<HostViewMut<'_>>,
    ) -> Result<Report> {
        self.call_tangents("jvp", (inputs, list_bias), outputs, None)
    }

    /// Computes the gradients of the gradients, as [`Ring::double_backward`].
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::double_backward`].
    pub fn double_backward(
        &mut self,
        inputs: &TangentInputs<HostView<'_>>,
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<HostViewMut<'_>>,
        gradients: &mut Gradients<HostViewMut<'_>>,
    ) -> Result<Report> {
        self.call_tangents("double_backward", (inputs, list_bias), outputs, Some(gradients))
    }

    /// Runs a JVP or, with `gradients`, a double backward, as [`HeadsRing::call`].
    fn call_tangents(
        &mut self,
        name: &'static str,
        (inputs, list_bias): (&TangentInputs<HostView<'_>>, Option<&[f64]>),
        outputs: &mut TangentOutputs<HostViewMut<'_>>,
        gradients: Option<&mut Gradients<HostViewMut<'_>>>,
    ) -> Result<Report> {
        let is_double = gradients.is_some();
        let options = [self.options.second_derivatives, self.options.backward];
        let checked = check::plan_of_tangents(options, is_double).and_then(|()| {
            // its ring has no lists
            self.ring.check_list_bias_direction(list_bias)?;
            let of_gradients = gradients.as_ref().map(|of| of.as_ref().map(Host::describe_mut));
            let inputs = inputs.as_ref().map(Host::describe);
            let outputs = outputs.as_ref().map(Host::describe_mut);
            self.shapes().tangents(&inputs, &outputs, of_gradients.as_ref())
        });
        let exchanged = self.tangents.get(usize::from(is_double));
        let exchanged = exchanged.map_or(0, |pass| self.exchange.bytes_sent(&pass.fields));
        let sums = if is_double { self.sum_bytes() + self.ring.reduce_bytes() } else { 0 };
        let bytes = exchanged + self.ring.tangent_bytes(is_double) + sums;
        let described = checked.map(|()| check::describe_call(name));
        self.call_described(name, described, bytes, |plan, start| {
            plan.tangent_pass(inputs, outputs, gradients, start)
        })
    }

    /// Refuses the call that the other ranks make, as [`Ring::refuse`].
    ///
    /// # Ordering
    /// Collective, in place of [`HeadsRing::forward`] or [`HeadsRing::backward`].
    pub fn refuse(&mut self, why: Error) -> Error {
        self.refuse_call(why)
    }

    /// Calls `hook` with every activity of this rank in the passes to come, as [`Ring::on_step`].
    /// Messages of the exchange before the ring belong to step 0, those after it to the step after
    /// the ring's last.
    pub fn on_step(&mut self, hook: StepHook) {
        let rank = self.rank;
        let began = Arc::clone(&self.ring_began);
        let of_caller = Arc::clone(&hook);
        self.ring.on_step(Arc::new(move |event: StepEvent| {
            let before = Duration::from_nanos(began.load(Ordering::Relaxed));
            let begin = event.begin + before;
            let end = event.end + before;
            of_caller(StepEvent { rank, begin, end, ..event });
        }));
        self.hook = Some(hook);
    }

    /// Returns this rank.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the spec of all heads.
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Returns true if passes may run on another thread, as [`Ring::any_thread`].
    pub fn any_thread(&self) -> bool {
        self.transport.any_thread()
    }

    /// Returns the strategy.
    pub const fn strategy(&self) -> Strategy {
        self.grid.strategy()
    }

    /// Returns the grid of the ranks.
    pub const fn grid(&self) -> &HeadGrid {
        &self.grid
    }

    /// Returns the layout of the ranks.
    pub const fn layout(&self) -> &Layout {
        &self.layout.of_ranks
    }

    /// Returns the route of the blocks between groups.
    pub const fn route(&self) -> Route {
        self.ring.route()
    }

    /// Returns the index of this rank in the layout: group · members + member.
    pub const fn ring_index(&self) -> usize {
        self.ring_index
    }

    /// Returns the ring of this rank's heads and key column, whose ranks are groups.
    pub const fn ring(&self) -> &Ring<B> {
        &self.ring
    }

    /// Returns the global query rows of this rank, in the order of its tensors.
    pub const fn q_rows(&self) -> &Runs {
        &self.q_rows
    }

    /// Returns the global key rows of this rank, in the order of its tensors.
    pub const fn kv_rows(&self) -> &Runs {
        &self.kv_rows
    }

    /// Returns the bytes of this rank's message buffers and of the tensors of its group.
    pub fn buffer_bytes(&self) -> u64 {
        self.ring.buffer_bytes() + self.exchange.buffer_bytes() + self.tensors.bytes()
    }

    /// Returns the payload bytes that this rank sends in a pass.
    pub fn bytes_predicted(&self, pass: PassKind) -> u64 {
        let (fields, sums) = match pass {
            PassKind::Forward => (&self.forward.fields, 0),
            PassKind::Backward if !self.options.backward => return 0,
            PassKind::Backward => (&self.backward.fields, self.sum_bytes()),
        };
        self.exchange.bytes_sent(fields) + self.ring.bytes_predicted(pass) + sums
    }

    /// Returns the tensors that a pass exchanges.
    const fn fields_of(&self, kind: PassKind) -> &PassFields {
        match kind {
            PassKind::Forward => &self.forward,
            PassKind::Backward => &self.backward,
        }
    }

    fn shapes(&self) -> Shapes {
        let index = annulus_core::index;
        let shapes = Shapes::new(&self.spec, index(self.q_rows.len()), index(self.kv_rows.len()));
        shapes.on(self.no_out_residual())
    }

    /// Returns the name of the backend if it lacks the rounding residual of out and computes out.
    fn no_out_residual(&self) -> Option<&'static str> {
        self.ring.no_out_residual().filter(|_| self.grid.columns() == 1)
    }

    /// Returns true if passes write and read the rounding residual of out, as
    /// [`Ring::has_out_residual`].
    pub fn has_out_residual(&self) -> bool {
        self.options.backward && has_residual(self.spec.dtype) && self.no_out_residual().is_none()
    }

    /// Returns the payload bytes that this rank sends of the residual in a pass.
    fn residual_bytes(&self, pass: PassKind) -> u64 {
        let field = || self.residual.into_iter().collect();
        let fields = match pass {
            PassKind::Forward => ExchangeFields { inputs: Vec::new(), outputs: field() },
            PassKind::Backward => ExchangeFields { inputs: field(), outputs: Vec::new() },
        };
        self.exchange.bytes_sent(&fields)
    }

    /// Runs one pass, as the ring does: all ranks make the same call with valid arguments, or none
    /// starts; all succeed, or none does.
    fn call(
        &mut self,
        kind: PassKind,
        checked: Result<()>,
        has_residual: bool,
        pass: impl FnOnce(&mut Self, Instant) -> Result<Duration>,
    ) -> Result<Report> {
        let name = kind.name();
        let reserved = checked.and_then(|()| self.reserve_residual(has_residual));
        // a message of its own, which all ranks send or none
        let described = reserved.map(|()| {
            check::describe_call(name).field_as(
                "out_residual",
                u64::from(has_residual),
                has_residual,
            )
        });
        let residual = if has_residual { self.residual_bytes(kind) } else { 0 };
        self.call_described(name, described, self.bytes_predicted(kind) + residual, pass)
    }

    /// Runs one pass that `described` compares between ranks.
    fn call_described(
        &mut self,
        name: &'static str,
        described: Result<Descriptor>,
        bytes_predicted: u64,
        pass: impl FnOnce(&mut Self, Instant) -> Result<Duration>,
    ) -> Result<Report> {
        self.calls.alive()?;
        span!("pass", name, rank = self.rank);
        let start = Instant::now();
        let agreed = self.calls.entries.enter(&mut self.transport, &described).map(drop);
        self.entered(agreed)?;
        self.run(start, bytes_predicted, |plan| pass(plan, start))
    }

    /// Allocates the residual of the own heads in the first pass that exchanges it.
    fn reserve_residual(&mut self, is_wanted: bool) -> Result<()> {
        let Some(field) = self.residual.filter(|_| is_wanted) else { return Ok(()) };
        self.tensors.add(PassTensor::OutResidual, &field, &self.exchange)
    }
}

impl<B: Backend> Collective for HeadsRing<B> {
    type Space = B::Space;

    fn calls_and_transport(&mut self) -> (&mut Calls, &mut dyn Transport<B::Space>) {
        (&mut self.calls, &mut self.transport)
    }
}
