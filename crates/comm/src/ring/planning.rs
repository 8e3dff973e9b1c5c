//! Planning: agreement on what is computed, then everything that a plan keeps.
//!
//! A rank that plans sends heartbeats ([`PlanningTicks`]), because the others wait for it in the
//! agreement at the end, and a caller's mask may be slow. Only the creation of the backend's
//! workspace sends none.
//!
//! A new batch is set on all ranks or on none:
//!
//! ```text
//!  agree              same kind of batch, valid arguments         a refusal here changes nothing
//!  all-gather         ids and positions of all ranks
//!  stage              schedule, rows, buffers: new ones beside the old ones
//!  Workspace::update  in place
//!  close              all succeeded?   yes: commit                no: the workspace is restored
//! ```
//! A rank that cannot restore its workspace aborts: then the plan is dead on all ranks. So no
//! forward pass ever combines queries of one batch with keys of another.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, BackwardMode, Batch, Capabilities, DenseMask, Error, MessageBalance, Order, Passes,
    Placement, RankShard, Result, Side, Space, Spec, Transport, Workspace, memory,
};
use annulus_plan::{Choice, RingShards, Route, Strategy};

use super::{
    Ring, RingOptions,
    buffers::RingBuffers,
    check, listed,
    overlap::SplitSize,
    plan::{self, Agreed, RingPlan},
    reduce::{self, slices_of_pass},
    slices::SliceExchange,
};
use crate::agreement::{self, all_gather};

/// Minimum time between two heartbeats of a rank that plans. Planning ticks after some
/// microseconds, far more often than deadlines require.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(1);

/// Heartbeats of a rank that plans: the others wait for it meanwhile, and their deadline measures
/// silence.
pub(crate) struct PlanningTicks<'a, S: Space> {
    transport: &'a mut dyn Transport<S>,
    last: Instant,
    failure: Option<Error>,
}

impl<'a, S: Space> PlanningTicks<'a, S> {
    pub(crate) fn new(transport: &'a mut dyn Transport<S>) -> Self {
        Self { transport, last: Instant::now(), failure: None }
    }

    /// Sends a heartbeat and moves messages, if the last time is long enough ago.
    pub(crate) fn tick(&mut self) {
        if self.failure.is_none() && self.last.elapsed() >= HEARTBEAT_INTERVAL {
            self.last = Instant::now();
            self.transport.control().heartbeat(true);
            self.failure = self.transport.progress(Duration::ZERO).err();
        }
    }

    /// Returns the result of planning, or the error of the transport if a tick met one.
    pub(crate) fn finish<T>(self, planned: Result<T>) -> Result<T> {
        self.failure.map_or(planned, Err)
    }
}

/// Checks a plan of `ranks` ranks. Returns the spec with the form of the backward pass that it will
/// have, and the properties of the backend.
pub(crate) fn check_plan<B: Backend>(
    backend: &B,
    spec: Spec,
    options: &RingOptions,
    ranks: usize,
) -> Result<(Spec, Capabilities)> {
    spec.validate()?;
    let capabilities = backend.capabilities(&spec)?;
    check::reproducible(&spec, &capabilities)?;
    // no accumulator is sent in the reproducible order: terms are summed by their owner
    let two_pass = spec.leaf_rows.is_some() && options.backward;
    let backward = if two_pass { BackwardMode::TwoPass } else { spec.backward };
    let spec = Spec { backward, ..spec };
    check::two_pass(&spec, ranks)?;
    check::second_derivatives(&spec, options, &capabilities)?;
    check::bias_table(&spec, &capabilities)?;
    check::statistics::<B::Space>(&spec, options, &capabilities)?;
    check::reduction::<B::Space>(&spec, options, ranks)?;
    if let Some(layout) = &options.layout {
        let (q_len, kv_len) = (spec.dims.q_len, spec.dims.kv_len);
        if spec.partial {
            layout.validate_partial(q_len, kv_len, ranks)?;
        } else {
            layout.validate(q_len, kv_len, ranks)?;
        }
        if let Some(rows) = spec.leaf_rows {
            layout.validate_leaves(spec.dims.q_len, spec.dims.kv_len, rows)?;
        }
    }
    Ok((spec, capabilities))
}

/// Returns the route that is given, with the ranks of a node.
fn route_of(
    given: Route,
    ranks: usize,
    placement: Option<&Placement>,
    order: &Order,
) -> Result<Route> {
    let of_nodes = placement.and_then(|placement| placement.node_ranks(order));
    let route = given.with_node_ranks(of_nodes.unwrap_or(0));
    if route.fits(ranks) {
        return Ok(route);
    }
    let want = match given {
        _ if given.node_ranks() == Some(0) => {
            "several nodes with as many ranks each, which are neighbours on the ring".to_owned()
        }
        _ => format!("nodes of a divisor of {ranks} ranks"),
    };
    Err(Error::invalid("route", given.name(), want))
}

/// The parts of a [`super::Ring`] that all ranks have agreed upon.
pub(super) struct PlannedRing<B: Backend> {
    pub(super) agreed: Agreed,
    pub(super) plan: RingPlan,
    pub(super) shard: RankShard,
    pub(super) workspace: B::Workspace,
    pub(super) buffers: RingBuffers<B::Space>,
}

impl<B: Backend> PlannedRing<B> {
    /// Plans, in all-gathers 0 and 1 of the transport.
    pub(super) fn new(
        backend: &B,
        transport: &mut dyn Transport<B::Space>,
        spec: Result<Spec>,
        options: &RingOptions,
    ) -> Result<Self> {
        let rank = transport.control().rank();
        let ranks = transport.control().ranks();
        let checked = spec.and_then(|spec| check_plan(backend, spec, options, ranks));
        let placement = transport.control().placement().cloned();
        let described = checked.as_ref().map_err(Error::clone);
        let described = described.map(|(spec, capabilities)| (spec, capabilities, Strategy::Ring));
        let combined = check::agree_on_plan(transport, described, options, 0)?;
        let (spec, capabilities) = checked?;

        let mut ticks = PlanningTicks::new(&mut *transport);
        let mut tick = || ticks.tick();
        let fixed = options.layout.clone();
        let fixed = spec.leaf_rows.map_or(fixed.clone(), |rows| fixed.map(|of| of.at_leaves(rows)));
        let Choice { layout, route, order } =
            Choice::auto(&spec, ranks, fixed.as_ref(), placement.as_ref(), &mut tick);
        let whole_tiles = spec.leaf_rows.is_some();
        let route = options
            .route
            .map_or(Ok(route), |given| route_of(given, ranks, placement.as_ref(), &order));
        // an error on all ranks, which the closing status reports
        let route_error = route.as_ref().err().cloned();
        let reduces = reduce::is_needed(&spec, options, ranks);
        let agreed = Agreed {
            spec: Arc::new(spec),
            layout,
            route: route.unwrap_or(Route::RelayUp),
            given_route: options.route,
            order,
            split: SplitSize {
                kv_tile: combined.kv_tile.max(1),
                kv_block: combined.kv_block_size,
                whole_tiles,
            },
            posts_ahead: combined.posts_ahead,
            groups_in_order: combined.groups_in_order,
            receive_ahead: options.receive_ahead_steps().min(ranks.saturating_sub(1).max(1)),
            reduces,
            backward: options.backward,
            second_derivatives: options.second_derivatives,
            no_out_residual: (!capabilities.out_residual).then_some(capabilities.name),
            numerics: capabilities.numerics_id,
        };
        let planned = match route_error {
            Some(error) => Err(error),
            None => Self::locally(backend, agreed, rank, ranks, &mut tick),
        };
        let planned = ticks.finish(planned).map(|planned| {
            let balance = planned.plan.message_balance(&planned.agreed, rank);
            (planned, balance)
        });
        let balance = planned.as_ref().map(|(_, balance)| balance).map_err(Error::clone);
        let lengths = agreement::close_plan(transport, 1, || 2, balance)?;
        let (mut planned, _) = planned?;
        planned.plan.agree_on_lengths(&planned.agreed, lengths);
        Ok(planned)
    }

    /// Does the part of planning that needs no other rank.
    fn locally(
        backend: &B,
        agreed: Agreed,
        rank: usize,
        ranks: usize,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let spec = &agreed.spec;
        let shards = RingShards::plain(&spec.dims, spec.alignment, &agreed.layout, ranks);
        let ring_index = agreed.order.ring_index(rank);
        let plan = RingPlan::derive::<B::Space>(&agreed, ring_index, shards, None, None, tick)?;
        let shard = plan.rank_shard(None, None);
        let passes = if agreed.backward { Passes::Both } else { Passes::Forward };
        let workspace = backend.workspace(&shard, passes)?;
        let buffers = RingBuffers::allocate(backend, &agreed, &plan)?;
        Ok(Self { agreed, plan, shard, workspace, buffers })
    }
}

impl RingPlan {
    /// Returns the balance of the messages of all passes of `rank`, by which all ranks prove that
    /// their lengths match.
    pub(super) fn message_balance(&self, agreed: &Agreed, rank: usize) -> MessageBalance {
        let mut balance = MessageBalance::of_rank(rank);
        for (list, slices) in (4..).zip(slices_of_pass(agreed, self)) {
            let exchange = SliceExchange::new(&slices, &agreed.order, rank, 0);
            exchange.all_transfers().add_to(&mut balance, list);
        }
        let of_keys = self
            .program
            .steps
            .iter()
            .flat_map(|step| [(0, &step.kv), (1, &step.kv_in_parts), (2, &step.gradients)]);
        let of_tangents = self.tangents.iter().flat_map(|program| &program.steps);
        let of_tangents = of_tangents
            .flat_map(|step| [(8, &step.kv), (9, &step.kv_in_parts), (10, &step.gradients)]);
        let of_queries = self.query_steps.iter().map(|step| (3, &step.kv_in_parts));
        for (list, transfers) in of_keys.chain(of_queries).chain(of_tangents) {
            transfers.add_to(&mut balance, list);
        }
        balance
    }
}

/// Bytes that planning allocates per byte of an encoded shard: [`Batch::planning_bytes`] per run,
/// and an encoded run has at least three bytes.
const BYTES_PER_ENCODED: u64 = 86;

/// A new batch before all ranks have agreed to put it in force.
struct StagedBatch<S: Space> {
    plan: RingPlan,
    shard: RankShard,
    /// Present if those of the batch in force are too small.
    buffers: Option<RingBuffers<S>>,
}

impl<B: Backend> Ring<B> {
    /// Checks this rank's part of a batch.
    pub(crate) fn check_batch(&self, batch: &Batch) -> Result<()> {
        let Agreed { spec, layout, .. } = &self.agreed;
        spec.validate_batch(batch, self.shard.queries.len(), self.shard.keys.len())?;
        layout.validate_batch(batch, &spec.dims, self.ring_index, self.ranks)?;
        check::two_pass_mask(spec, batch, self.ranks)?;
        listed::check(&self.agreed, batch, self.ranks)?;
        if let Some(lists) = &batch.key_lists {
            self.workspace.check_lists(lists, self.agreed.sends_queries(self.ranks))?;
        }
        memory::check_available("segment ids and positions", batch.planning_bytes())
    }

    /// Adapts the plan to `batch`; an error that is not fatal leaves the old batch in force.
    pub(super) fn try_update(&mut self, batch: &Batch, checked: Result<()>) -> Result<()> {
        let described = checked.map(|()| check::describe_batch(batch));
        self.calls.entries.enter(self.transport.as_mut(), &described)?;

        let dims = self.agreed.spec.dims;
        let agreed = &self.agreed;
        let shard = |side| {
            let alignment = agreed.spec.alignment;
            let layout = &agreed.layout;
            layout.local_shard(&dims, alignment, side, self.ring_index, self.ranks, batch)
        };
        let message = plan::encode_shards([Side::Q, Side::Kv].map(shard));
        let round = self.calls.entries.round();
        // from here to the closing status no rank may return: the others would wait for it
        let gathered = all_gather(self.transport.as_mut(), round, &message);
        let gathered = gathered.map_err(agreement::mid_call)?;
        let shards = decode(&self.agreed, &gathered);
        let (shards, listed) = match &batch.key_lists {
            Some(lists) => {
                let pairs = shards.and_then(|shards| {
                    let pairs =
                        listed::pairs_by_owner(&self.agreed, batch, &shards, self.ring_index)?;
                    Ok((shards, pairs))
                });
                let none = vec![listed::OwnerPairs::default(); self.ranks];
                let pairs_of = pairs.as_ref().map_or(&none, |(_, pairs)| pairs);
                let listed = self.exchange_needs(pairs_of, lists);
                let listed = listed.map_err(agreement::mid_call)?;
                (pairs.map(|(shards, _)| shards), Some(listed))
            }
            None => (shards, None),
        };
        let mut ticks = PlanningTicks::new(self.transport.as_mut());
        let mut tick = || ticks.tick();
        let mask = batch.attention_mask.as_ref().map(DenseMask::shape);
        let plan = shards.and_then(|shards| {
            let ring_index = self.ring_index;
            RingPlan::derive::<B::Space>(&self.agreed, ring_index, shards, mask, listed, &mut tick)
        });
        let staged = ticks.finish(plan).and_then(|plan| self.stage(batch, plan));
        // the workspace comes last, because it is the only part that is changed in place
        let touched = staged.is_ok();
        let staged = staged.and_then(|staged| {
            self.workspace.update(&staged.shard)?;
            Ok(staged)
        });
        let balance =
            staged.as_ref().map(|staged| staged.plan.message_balance(&self.agreed, self.rank));
        let status = balance.as_ref().map_err(|&error| Error::clone(error));
        let round = self.calls.entries.round();
        let transport = self.transport.as_mut();
        let closed = agreement::close_plan(transport, round, || self.calls.entries.round(), status);
        match (closed, staged) {
            (Ok(lengths), Ok(mut staged)) => {
                staged.plan.agree_on_lengths(&self.agreed, lengths);
                self.commit(staged);
                Ok(())
            }
            (Err(refusal), _) | (_, Err(refusal)) => {
                if touched && !refusal.is_fatal() {
                    self.restore_workspace(&refusal)?;
                }
                Err(refusal)
            }
        }
    }

    /// Creates everything that a new batch needs besides its plan, and changes nothing of the batch
    /// in force.
    fn stage(&self, batch: &Batch, plan: RingPlan) -> Result<StagedBatch<B::Space>> {
        let mask = batch.attention_mask.as_ref().map(DenseMask::try_clone).transpose()?;
        let shard = plan.rank_shard(mask.map(Arc::new), batch.key_lists.clone());
        let buffers = if self.buffers.fit(&self.agreed, &plan) {
            None
        } else {
            Some(RingBuffers::allocate(&self.backend, &self.agreed, &plan)?)
        };
        Ok(StagedBatch { plan, shard, buffers })
    }

    /// Puts a new batch in force. Cannot fail: all ranks have agreed to do this.
    fn commit(&mut self, staged: StagedBatch<B::Space>) {
        let StagedBatch { plan, shard, buffers } = staged;
        self.plan = plan;
        self.shard = shard;
        if let Some(buffers) = buffers {
            self.buffers = buffers;
        }
    }

    /// Adapts the workspace to the batch in force again, after an update that some rank refused.
    ///
    /// # Errors
    /// [`Error::Device`], which ends the plan: the workspace serves neither batch.
    fn restore_workspace(&mut self, refusal: &Error) -> Result<()> {
        let restored = self.workspace.update(&self.shard).or_else(|_| {
            let passes = if self.agreed.backward { Passes::Both } else { Passes::Forward };
            self.workspace = self.backend.workspace(&self.shard, passes)?;
            Ok(())
        });
        let lost = |error: Error| {
            let what = format!(
                "the old batch could not be restored: {error}; the new one failed: {refusal}"
            );
            Error::Device { what }
        };
        restored.map_err(lost)
    }
}

/// Decodes the shards of all ranks.
fn decode(agreed: &Agreed, gathered: &[Vec<u8>]) -> Result<RingShards> {
    let bytes = gathered.iter().map(|shards| shards.len() as u64).sum::<u64>();
    memory::check_available("the rows of all ranks", bytes.saturating_mul(BYTES_PER_ENCODED))?;
    plan::decode_shards(gathered, &agreed.order)
}
