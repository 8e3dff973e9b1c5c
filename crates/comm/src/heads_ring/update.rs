//! A new batch, on all ranks or on none.
//!
//! ```text
//!  agree      same kind of batch, valid arguments             a refusal here changes nothing
//!  exchange   ids, positions and mask rows of the group
//!  agree      the batch of every group is valid               likewise
//!  update     of every inner ring
//!  close      all succeeded?   yes: commit                    no: every ring gets the old batch
//! ```

use std::time::Instant;

use annulus_core::{Backend, Batch, Error, HostTensors, Result, index, memory};

use super::{
    HeadsRing,
    exchange::{MessageBuffers, Messages},
    group_batch::GroupBatch,
};
use crate::{
    agreement,
    calls::{Collective, caught},
    host_messages::HostMessages,
    ring::{PassKind, check, describe, in_flight::InFlight, step_events::Observer},
};

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
        let described = prepared.as_ref().map_err(Error::clone).map(|_| describe::batch(own));
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
