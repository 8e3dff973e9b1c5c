//! Blocks that circulate: double buffering of the current block and the one that arrives.

use std::sync::Arc;

use annulus_core::{Arrived, Block, Result, Route, Rows, Shard, Space, Tick};

use crate::span::span;

use super::{
    buffers::take_buffer,
    in_flight::InFlight,
    program::{RankStep, Transfers},
};

/// Double buffering of blocks. A relay needs two buffers (current, arriving) and reuses that of the
/// local block as soon as it is sent; the direct route sends all from the local block, which it
/// keeps, and needs three.
pub(super) struct Blocks<'a, S: Space> {
    stock: &'a mut Vec<S::Buffer>,
    local: Option<(S::Buffer, S::Event)>,
    current: Option<(S::Buffer, S::Event)>,
    next: Option<(S::Buffer, S::Event)>,
    first: bool,
}

impl<'a, S: Space> Blocks<'a, S> {
    /// Starts with the local block, which is packed once `ready` has passed.
    pub(super) fn new(
        local: S::Buffer,
        ready: S::Event,
        route: Route,
        stock: &'a mut Vec<S::Buffer>,
    ) -> Self {
        let kept = (route == Route::Direct).then(|| (local.clone(), ready.clone()));
        Self { stock, local: kept, current: Some((local, ready)), next: None, first: true }
    }

    /// Posts the transfers that bring the next step's block.
    pub(super) fn post_next(
        &mut self,
        transfers: &Transfers,
        in_flight: &mut InFlight<'_, S>,
    ) -> Result<()> {
        let source = self.local.as_ref().or(self.current.as_ref());
        in_flight.post(transfers, source, |message| take_buffer::<S>(self.stock, message.bytes()))
    }

    /// Returns the block of this step; `None` if the step has none.
    pub(super) fn current(&self) -> Option<(&S::Buffer, &S::Event)> {
        self.current.as_ref().map(|(buffer, ready)| (buffer, ready))
    }

    /// Stores the block of the next step.
    pub(super) fn arrive(&mut self, arrived: Arrived<S>) {
        self.next = Some((arrived.buffer, arrived.ready));
    }

    /// Ends a step. All transfers have completed, so the current buffer is free unless it holds the
    /// local block of a direct route.
    pub(super) fn advance(&mut self) {
        let done = std::mem::replace(&mut self.current, self.next.take());
        let kept = std::mem::replace(&mut self.first, false) && self.local.is_some();
        if let Some((buffer, _)) = done.filter(|_| !kept) {
            self.stock.push(buffer);
        }
    }

    /// Ends the pass: returns every buffer to the stock.
    pub(super) fn put_back(mut self) {
        let local = self.local.take();
        self.stock.extend(local.into_iter().chain(self.current).map(|(buffer, _)| buffer));
    }

    /// Returns the buffers to the stock, except that of the local block if the route kept it.
    pub(super) fn put_back_all_but_local(mut self) -> Option<(S::Buffer, S::Event)> {
        let local = self.local.take();
        self.put_back();
        local
    }
}

/// Brings one block after another to this rank and calls `attend` with the step and the block.
/// `shards` are those whose rows circulate.
pub(super) fn circulate<S: Space>(
    steps: &[RankStep],
    shards: &[Arc<Shard>],
    mut blocks: Blocks<'_, S>,
    in_flight: &mut InFlight<'_, S>,
    rows: &mut Rows,
    mut attend: impl FnMut(usize, &Block<'_, S>, Tick<'_>) -> Result<()>,
) -> Result<()> {
    for (number, step) in steps.iter().enumerate() {
        span!("step", step = number, owner = step.owner);
        in_flight.start_step(number);
        blocks.post_next(&step.kv_in_parts, in_flight)?;
        let block_rows = step.rows.count();
        if let Some((buffer, ready)) = blocks.current() {
            shards[step.owner].expand(&step.rows, rows)?;
            let block = Block { buffer, ready, rows };
            in_flight.compute(step.owner, [block_rows; 2], |in_flight| {
                attend(number, &block, &mut || in_flight.tick())
            })?;
        }
        for part in &step.parts {
            let arrived = in_flight.wait_next()?;
            shards[step.owner].expand(part, rows)?;
            let block = Block { buffer: &arrived.buffer, ready: &arrived.ready, rows };
            in_flight.compute(step.owner, [part.count(), block_rows], |in_flight| {
                attend(number, &block, &mut || in_flight.tick())
            })?;
            blocks.stock.push(arrived.buffer);
        }
        if steps.get(number + 1).is_some_and(|next| !next.parts.is_empty()) {
            // the parts are the last receives of the pass, so no later one writes to a buffer that
            // is still being sent: sends need not complete here
            in_flight.check()?;
        } else {
            for (_, arrived) in in_flight.wait_all()? {
                blocks.arrive(arrived);
            }
        }
        blocks.advance();
    }
    blocks.put_back();
    Ok(())
}
