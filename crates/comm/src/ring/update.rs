//! A new batch, on all ranks or on none.
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

use std::sync::Arc;

use annulus_core::{
    Backend, Batch, DenseMask, Error, Passes, RankShard, Result, Side, Space, Workspace, memory,
};

use super::{
    Ring,
    buffers::Buffers,
    check, describe,
    plan::{self, Agreed, RingPlan},
    planning::PlanningTicks,
};
use crate::agreement::{self, all_gather};

/// Bytes that planning allocates per byte of an encoded shard: [`Batch::planning_bytes`] per run,
/// and an encoded run has at least three bytes.
const BYTES_PER_ENCODED: u64 = 86;

/// A new batch before all ranks have agreed to put it in force.
struct StagedBatch<S: Space> {
    plan: RingPlan,
    shard: RankShard,
    /// Present if those of the batch in force are too small.
    buffers: Option<Buffers<S>>,
}

impl<B: Backend> Ring<B> {
    /// Checks this rank's part of a batch.
    pub(crate) fn check_batch(&self, batch: &Batch) -> Result<()> {
        let Agreed { spec, layout, .. } = &self.agreed;
        spec.validate_batch(batch, self.shard.queries.len(), self.shard.keys.len())?;
        layout.validate_batch(batch, &spec.dims, self.ring_index, self.ranks)?;
        check::two_pass_mask(spec, batch, self.ranks)?;
        memory::check_available("segment ids and positions", batch.planning_bytes())
    }

    /// Adapts the plan to `batch`; an error that is not fatal leaves the old batch in force.
    pub(super) fn try_update(&mut self, batch: &Batch, checked: Result<()>) -> Result<()> {
        let described = checked.map(|()| describe::batch(batch));
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
        let mut ticks = PlanningTicks::new(self.transport.as_mut());
        let mut tick = || ticks.tick();
        let mask = batch.attention_mask.as_ref().map(DenseMask::shape);
        let plan = derive::<B::Space>(&self.agreed, self.ring_index, &gathered, mask, &mut tick);
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
        let shard = plan.rank_shard(mask.map(Arc::new));
        let buffers = if self.buffers.fit(&self.agreed, &plan) {
            None
        } else {
            Some(Buffers::allocate(&self.backend, &self.agreed, &plan)?)
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

/// Derives the plan of the rank at `ring_index` from the encoded shards of all ranks.
fn derive<S: Space>(
    agreed: &Agreed,
    ring_index: usize,
    gathered: &[Vec<u8>],
    attention_mask: Option<[usize; 4]>,
    tick: &mut dyn FnMut(),
) -> Result<RingPlan> {
    let bytes = gathered.iter().map(|shards| shards.len() as u64).sum::<u64>();
    memory::check_available("the rows of all ranks", bytes.saturating_mul(BYTES_PER_ENCODED))?;
    let shards = plan::decode_shards(gathered, &agreed.order)?;
    RingPlan::derive::<S>(agreed, ring_index, shards, attention_mask, tick)
}
