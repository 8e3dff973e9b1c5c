//! Planning of one rank: its arguments, its layout, and the memory of its exchange.
//!
//! A new batch is set on all ranks or on none:
//!
//! ```text
//!  agree      same kind of batch, valid arguments             a refusal here changes nothing
//!  exchange   ids, positions and mask rows of the group
//!  agree      the batch of every group is valid               likewise
//!  update     of every inner ring
//!  close      all succeeded?   yes: commit                    no: every ring gets the old batch
//! ```

use std::{fmt, time::Instant};

use annulus_core::{
    Backend, Batch, Capabilities, Error, HostTensors, MessageBalance, Placement, Result, Spec,
    index, memory,
};
use annulus_plan::{ExchangeFields, GroupLayout, HeadField, HeadGrid, Strategy};

use super::{
    HeadsRing,
    exchange::{HeadExchange, MessageBuffers, Messages},
    group_batch::GroupBatch,
    inner_ring::add_sums_to,
    passes::later_tags,
    shard_tensors::{PassFields, ShardTensors},
};
use crate::{
    agreement,
    calls::{Collective, caught},
    delegate::HostMessages,
    ring::{
        PassKind, RingOptions,
        check::{self, has_residual},
        in_flight::InFlight,
        planning::check_plan,
        step_events::Observer,
    },
};

/// Number of the first pass with tangents in a balance: after the others and their sums.
const TANGENT_PASS: u64 = 8;

/// Part of a plan that a rank derives and allocates alone, before ranks agree that all succeeded.
pub(super) struct PreparedGrid {
    pub(super) layout: GroupLayout,
    pub(super) ring_index: usize,
    pub(super) forward: PassFields,
    pub(super) backward: PassFields,
    /// Of a JVP and of a double backward, of a plan with them.
    pub(super) tangents: Vec<PassFields>,
    pub(super) exchange: HeadExchange,
    pub(super) tensors: ShardTensors,
}

impl PreparedGrid {
    /// Chooses the layout and allocates the tensors and messages of this rank.
    pub(super) fn new(
        spec: &Spec,
        grid: HeadGrid,
        options: &RingOptions,
        rank: usize,
        placement: Option<&Placement>,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let first = grid.spec_of(spec, 0);
        let layout = GroupLayout::choose(&first, &grid, options.layout.as_ref(), placement, tick);
        let ring_index = layout.order.ring_index(rank);
        let forward = PassFields::forward(spec, &grid);
        let backward = PassFields::backward(spec, &grid);
        let doubles = [false, true].into_iter().take(1 + usize::from(options.backward));
        let tangents = doubles.filter(|_| options.second_derivatives);
        let tangents: Vec<_> = tangents.map(|of| PassFields::tangents(spec, &grid, of)).collect();
        let passes = std::iter::once(&forward).chain(options.backward.then_some(&backward));
        let passes: Vec<&PassFields> = passes.chain(&tangents).collect();
        let fields = passes.iter().map(|pass| &pass.fields);
        let exchange = HeadExchange::new(spec, grid, &layout, ring_index, fields)?;
        let tensors = ShardTensors::new(spec, &exchange, &passes, options.backward)?;
        Ok(Self { layout, ring_index, forward, backward, tangents, exchange, tensors })
    }

    /// Returns the balance of the messages that `rank` exchanges in the passes of a plan.
    pub(super) fn message_balance(
        &self,
        spec: &Spec,
        options: &RingOptions,
        rank: usize,
    ) -> MessageBalance {
        let mut balance = MessageBalance::of_rank(rank);
        let backward = options.backward.then_some((PassKind::Backward, &self.backward));
        let passes = std::iter::once((PassKind::Forward, &self.forward)).chain(backward);
        let residual = residual(spec, &self.exchange.grid, &self.forward.fields);
        for (pass, (kind, fields)) in passes.enumerate() {
            let [results_tag, residual_tag] = later_tags(kind);
            let residual = residual.as_slice();
            let of_residual = match kind {
                PassKind::Forward => self.exchange.output_bytes(residual),
                PassKind::Backward => self.exchange.input_bytes(residual),
            };
            for (tag, bytes) in [
                (0, self.exchange.input_bytes(&fields.fields.inputs)),
                (results_tag, self.exchange.output_bytes(&fields.fields.outputs)),
                (residual_tag, of_residual),
            ] {
                let HeadExchange { ranks, member, .. } = &self.exchange;
                let messages = Messages { ranks, member: *member, bytes, tag, step: 0 };
                messages.add_to(&mut balance, pass as u64);
            }
        }
        for (pass, fields) in (TANGENT_PASS..).zip(&self.tangents) {
            for (tag, bytes) in [
                (0, self.exchange.input_bytes(&fields.fields.inputs)),
                (1, self.exchange.output_bytes(&fields.fields.outputs)),
            ] {
                let HeadExchange { ranks, member, .. } = &self.exchange;
                let messages = Messages { ranks, member: *member, bytes, tag, step: 0 };
                messages.add_to(&mut balance, pass);
            }
        }
        add_sums_to(&mut balance, spec, options, &self.layout.order, rank);
        balance
    }
}

/// Returns the rounding residual of out if it is exchanged: a tensor like out, of 16-bit types and
/// one key column.
pub(super) fn residual(
    spec: &Spec,
    grid: &HeadGrid,
    forward: &ExchangeFields,
) -> Option<HeadField> {
    let out = forward.outputs.first().copied();
    out.filter(|_| grid.columns() == 1 && has_residual(spec.dtype))
}

/// Checks a plan before any rank waits for another.
pub(super) fn check<B: Backend>(
    backend: &B,
    spec: Spec,
    options: &RingOptions,
    ranks: usize,
    strategy: Strategy,
) -> Result<(Spec, HeadGrid, Capabilities)> {
    spec.validate()?;
    spec.check_whole("the exchange of heads and queries")?;
    let grid = HeadGrid::of(&spec.dims, ranks, strategy)?;
    let grid = grid.ok_or_else(|| Error::invalid("strategy", strategy, "a strategy by name"))?;
    grid.check(&spec, options.backward)?;
    if options.second_derivatives && grid.columns() > 1 {
        let by = format!("strategy {strategy}, which divides keys into columns");
        return Err(Error::unsupported("second_derivatives", by));
    }
    if let Some(layout) = &options.layout {
        layout.validate(spec.dims.q_len, spec.dims.kv_len, ranks)?;
        if let Some(rows) = spec.leaf_rows {
            layout.validate_leaves(spec.dims.q_len, spec.dims.kv_len, rows)?;
        }
    }
    let inner = RingOptions { layout: None, ..options.clone() };
    let (_, capabilities) = check_plan(backend, grid.spec_of(&spec, 0), &inner, grid.groups())?;
    Ok((spec, grid, capabilities))
}

impl<B: Backend<Space: HostTensors>> HeadsRing<B> {
    /// Adapts the plan to a new batch of this rank's rows, as [`Ring::update`](crate::ring::Ring).
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::update`](crate::ring::Ring::update).
    pub fn update(&mut self, batch: &Batch) -> Result<()> {
        self.calls.alive()?;
        let result = caught(|| self.try_update(batch));
        self.or_end(result)
    }

    fn try_update(&mut self, own: &Batch) -> Result<()> {
        let prepared = self.check_batch(own).and_then(|()| {
            let group = GroupBatch::new(own, &self.exchange)?;
            let sizes = 0..self.grid.members();
            let bytes = |member| GroupBatch::bytes(own, &self.exchange, member);
            let sizes: Vec<[u64; 2]> = sizes.map(bytes).collect();
            let most = sizes.iter().flatten().copied().max().unwrap_or(0);
            let buffers = MessageBuffers::new(most)?;
            Ok((group, sizes, buffers))
        });
        let described = prepared.as_ref().map_err(Error::clone).map(|_| check::describe_batch(own));
        self.calls.entries.enter(&mut self.transport, &described)?;
        let (group, sizes, buffers) = prepared?;

        let batch = self.exchange_batch(own, group, sizes, buffers).map_err(agreement::mid_call)?;
        let checked = self.ring.check_batch(&batch);
        let round = self.calls.entries.round();
        agreement::close(&mut self.transport, round, checked)?;

        // all rings are updated, so the all-gathers of their entries are the same
        let updated = self.ring.update_checked(&batch, Ok(()));
        let round = self.calls.entries.round();
        match agreement::close(&mut self.transport, round, updated) {
            Ok(()) => {
                self.batch = batch;
                Ok(())
            }
            Err(refusal) if refusal.is_fatal() => Err(refusal),
            Err(refusal) => self.restore(refusal),
        }
    }

    /// Checks this rank's part of a batch.
    fn check_batch(&self, batch: &Batch) -> Result<()> {
        if batch.key_lists.is_some() {
            return Err(Error::unsupported(
                "key_lists",
                format!("strategy {}", self.grid.strategy()),
            ));
        }
        let q_rows = index(self.q_rows.len());
        let kv_rows = index(self.kv_rows.len());
        self.spec.validate_batch(batch, q_rows, kv_rows)?;
        let layout = &self.layout.of_ranks;
        layout.validate_batch(batch, &self.spec.dims, self.ring_index, self.ranks)?;
        check::two_pass_mask(self.ring.spec(), batch, self.grid.groups())?;
        memory::check_available("segment ids and positions", batch.planning_bytes())
    }

    /// Returns the batch of this rank's group.
    fn exchange_batch(
        &mut self,
        own: &Batch,
        mut group: GroupBatch,
        bytes: Vec<[u64; 2]>,
        mut buffers: MessageBuffers,
    ) -> Result<Batch> {
        let tag = self.calls.take_tags(1);
        let start = Instant::now();
        // no events: an update is no pass
        let observer = Observer::of_messages(None, self.rank, PassKind::Forward, start);
        // the lengths depend on the batch, on which no rank has agreed yet
        let mut transport = HostMessages::new(&mut self.transport);
        let mut in_flight = InFlight::new(&mut transport, tag, None, observer);
        let exchange = &self.exchange;
        let member = exchange.member;
        let messages = Messages { ranks: &exchange.ranks, member, bytes, tag: 0, step: 0 };
        messages.exchange(
            &mut buffers,
            &mut in_flight,
            |to, into| {
                GroupBatch::pack(own, &exchange.grid, [member, to], into);
                Ok(())
            },
            |from, bytes| group.unpack(from, &exchange.segments[from], bytes),
        )?;
        group.finish(exchange)
    }

    /// Puts the old batch in force again on all rings, after an update that some rank refused.
    ///
    /// # Errors
    /// `refusal`; a fatal error if a ring cannot be restored.
    fn restore(&mut self, refusal: Error) -> Result<()> {
        let restored = self.ring.update_checked(&self.batch, Ok(())).map_err(agreement::mid_call);
        let round = self.calls.entries.round();
        agreement::close(&mut self.transport, round, restored)?;
        Err(refusal)
    }
}

impl<B: Backend<Space: HostTensors>> fmt::Display for HeadsRing<B> {
    /// Writes mask, ranks, grid, layout, route, and what this rank sends: `Causal { offset: 0 }, 8
    /// ranks, heads in 2 groups of 4 ranks, zigzag, relay-down, 1048576 B sent forward, 2621440 B
    /// backward`. With key columns the grid is `1 parts of the heads × 2 query parts × 4 key
    /// columns`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self.grid.groups();
        let grid = match self.grid.columns() {
            1 => format!("heads in {groups} groups of {} ranks", self.grid.members()),
            columns => {
                let parts = self.grid.head_parts();
                format!("{parts} parts of the heads × {groups} query parts × {columns} key columns")
            }
        };
        write!(
            f,
            "{:?}, {} ranks, {grid}, {}, {}, {} B sent forward",
            self.spec.mask,
            self.ranks,
            self.layout().name(),
            self.route().name(),
            self.bytes_predicted(PassKind::Forward),
        )?;
        if self.options.backward {
            write!(f, ", {} B backward", self.bytes_predicted(PassKind::Backward))?;
        }
        Ok(())
    }
}

impl<B: Backend> fmt::Debug for HeadsRing<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeadsRing")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("grid", &self.grid)
            .finish_non_exhaustive()
    }
}
