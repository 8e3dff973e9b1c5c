//! Blocks that circulate: receives posted ahead, and blocks forwarded when they arrive.
//!
//! Group g of a pass brings the block of step g + 1 and sends that of step g, or rows of the local
//! block on a direct route. In step t, with `ahead` from [`super::RingOptions::receive_ahead`],
//! groups before t + ahead may be posted:
//!
//! ```text
//! receives   once buffers for them are free: their blocks were used, and have been sent
//! sends      once the block of their step has arrived
//! ```
//! So with `ahead` 1 a rank receives one block while it computes on another, which takes two
//! buffers, and forwards a block when it starts to compute on it. Each further step takes one more
//! buffer, and a neighbour may be late by one more step before this rank waits for it: the block of
//! the next step has arrived already, and is forwarded between two tiles.
//!
//! The blocks of later steps on a direct route are all sends of the local block, to different
//! ranks. Sent at once they would share the link, and that of the next step would arrive last of
//! all instead of first. So a send of a later step is posted once those before it have been sent,
//! or while they have at most [`SEND_WINDOW`] bytes.
//!
//! A transport that runs groups in order ([`Transport::runs_groups_in_order`]) gets each group
//! whole, once both conditions hold.
//!
//! [`Transport::runs_groups_in_order`]: annulus_core::Transport::runs_groups_in_order

use std::{collections::VecDeque, sync::Arc};

use annulus_core::{Arrived, Block, Error, Incoming, MessageHeader, Result, Shard, Space, Tick};

use crate::span::span;

use super::{
    block_rows::BlockRows,
    buffers::find_buffer,
    in_flight::InFlight,
    plan::Agreed,
    program::{RankStep, Transfers},
};

/// A buffer and the event after which it may be read.
pub(super) type Ready<S> = (<S as Space>::Buffer, <S as Space>::Event);

/// Bytes of sends in flight below which a rank sends further blocks of the direct route ahead: what
/// a link of 20 GB/s moves between two ticks of a kernel, so that it does not become idle.
const SEND_WINDOW: u64 = 4 << 20;

/// When groups are posted.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Steps by which a receive is posted ahead, at least 1.
    pub(super) ahead: usize,
    /// True if a group is posted whole, and after those before it.
    pub(super) whole_groups: bool,
    /// True if the route sends from the local block in later steps than step 0.
    keeps_local: bool,
}

impl Pace {
    /// Returns the pace of a pass whose only messages are blocks.
    pub(super) fn new(agreed: &Agreed) -> Self {
        let &Agreed { receive_ahead: ahead, groups_in_order: whole_groups, .. } = agreed;
        let keeps_local = agreed.route.keeps_local(agreed.order.ranks().len());
        Self { ahead, whole_groups, keeps_local }
    }

    /// Returns the pace of a pass that also sends gradients: their groups follow those of blocks,
    /// so where the order counts, none of these comes early.
    pub(super) const fn with_gradients(self) -> Self {
        Self { ahead: if self.whole_groups { 1 } else { self.ahead }, ..self }
    }
}

/// The blocks of one circulation.
pub(super) struct Blocks<'a, S: Space> {
    steps: &'a [RankStep],
    /// Selects the transfers of a step: with the last block whole or in parts.
    transfers: fn(&RankStep) -> &Transfers,
    pace: Pace,
    stock: &'a mut Vec<S::Buffer>,
    /// The local block: during step 0, and until the end on a route that sends from it in later
    /// steps.
    local: Option<Ready<S>>,
    step: usize,
    /// Receives that are posted and have not arrived, with their steps, in the order of the steps.
    expected: VecDeque<(usize, MessageHeader)>,
    /// Blocks that have arrived, or parts of them, from that of the current step on, but for the
    /// local one.
    held: VecDeque<(usize, Ready<S>)>,
    /// Buffers of earlier blocks, of which some may still be sent.
    used: Vec<S::Buffer>,
    /// Groups whose receives have been posted.
    received: usize,
    /// Groups whose sends have been posted.
    sent: usize,
    /// See [`Blocks::bytes_in_flight`].
    unsent: u64,
}

impl<'a, S: Space> Blocks<'a, S> {
    /// Starts with the local block, which is packed once `ready` has passed.
    pub(super) fn new(
        local: S::Buffer,
        ready: S::Event,
        steps: &'a [RankStep],
        transfers: fn(&RankStep) -> &Transfers,
        pace: Pace,
        stock: &'a mut Vec<S::Buffer>,
    ) -> Self {
        Self {
            steps,
            transfers,
            pace,
            stock,
            local: Some((local, ready)),
            step: 0,
            expected: VecDeque::new(),
            held: VecDeque::new(),
            used: Vec::new(),
            received: 0,
            sent: 0,
            unsent: 0,
        }
    }

    /// Starts step `step`: waits for its block, or for the first part of it, and posts what can be
    /// posted.
    pub(super) fn start_step(
        &mut self,
        step: usize,
        in_flight: &mut InFlight<'_, S>,
    ) -> Result<()> {
        self.step = step;
        if step > 0 && !(self.transfers)(&self.steps[step - 1]).receives.is_empty() {
            self.wait(in_flight)
        } else {
            self.advance(in_flight)
        }
    }

    /// Waits for the next part of the block of the current step.
    pub(super) fn wait(&mut self, in_flight: &mut InFlight<'_, S>) -> Result<()> {
        in_flight.wait_until(|in_flight| {
            // before `advance`, which then finds the buffers of all sends free
            let sends = in_flight.sends();
            self.advance(in_flight)?;
            let is_here = self.held.front().is_some_and(|&(step, _)| step == self.step);
            if !is_here && self.expected.is_empty() && !sends {
                return Err(Error::internal("all buffers of the plan are in flight"));
            }
            Ok(is_here.then_some(()))
        })
    }

    /// Waits until the sends of the current step have been posted. They are, unless groups are
    /// posted whole and the buffers of their receives are in use.
    pub(super) fn post_sends(&mut self, in_flight: &mut InFlight<'_, S>) -> Result<()> {
        if self.sent > self.step {
            return in_flight.check();
        }
        in_flight.wait_until(|in_flight| {
            self.advance(in_flight)?;
            Ok((self.sent > self.step).then_some(()))
        })
    }

    /// Returns the block of the current step, or the next part of it; `None` if the step has none.
    /// The caller drops it before [`Blocks::release`].
    pub(super) fn current(&self) -> Option<Ready<S>> {
        if self.step == 0 {
            return self.local.clone();
        }
        self.held.front().filter(|&&(step, _)| step == self.step).map(|(_, ready)| ready.clone())
    }

    /// Ends the use of the current block or part, of which all sends have been posted.
    pub(super) fn release(&mut self) {
        let used = if self.step == 0 {
            let local = &mut self.local;
            if self.pace.keeps_local { None } else { local.take() }
        } else if self.held.front().is_some_and(|&(step, _)| step == self.step) {
            self.held.pop_front().map(|(_, used)| used)
        } else {
            None
        };
        match used {
            Some((buffer, _)) if S::is_shared(&buffer) => self.used.push(buffer),
            used => self.stock.extend(used.map(|(buffer, _)| buffer)),
        }
    }

    /// Takes blocks that have arrived, and posts what can be posted.
    pub(super) fn advance(&mut self, in_flight: &mut InFlight<'_, S>) -> Result<()> {
        while let Some((_, header)) = self.expected.front() {
            let Some(Arrived { buffer, ready }) = in_flight.take(header)? else { break };
            if let Some((step, _)) = self.expected.pop_front() {
                self.held.push_back((step, (buffer, ready)));
            }
        }
        self.stock.extend(self.used.extract_if(.., |buffer| !S::is_shared(buffer)));
        let end = (self.step + self.pace.ahead).min(self.steps.len());
        loop {
            let may_send = self.sent < end && self.may_send(self.sent, in_flight);
            let in_order = !self.pace.whole_groups || (may_send && self.sent == self.received);
            let buffers = if self.received < end && in_order {
                self.take_buffers(self.received)
            } else {
                None
            };
            let may_send = may_send && (!self.pace.whole_groups || buffers.is_some());
            if buffers.is_none() && !may_send {
                return Ok(());
            }
            self.post(buffers, may_send, in_flight)?;
        }
    }

    /// Returns true if the sends of a group may be posted.
    fn may_send(&mut self, group: usize, in_flight: &InFlight<'_, S>) -> bool {
        let step = &self.steps[group];
        if !step.sends_local {
            return self.has_arrived(group);
        }
        if group <= self.step || self.pace.whole_groups {
            return true;
        }
        let unsent = self.bytes_in_flight(in_flight);
        unsent == 0 || unsent + (self.transfers)(step).bytes_sent() <= SEND_WINDOW
    }

    /// Returns the bytes of the sends that have been posted since none was in flight.
    fn bytes_in_flight(&mut self, in_flight: &InFlight<'_, S>) -> u64 {
        if !in_flight.sends() {
            self.unsent = 0;
        }
        self.unsent
    }

    /// Returns true if the block of `step` has arrived, or there is none.
    fn has_arrived(&self, step: usize) -> bool {
        step <= self.received && self.expected.front().is_none_or(|&(first, _)| first > step)
    }

    /// Takes the buffers of the receives of a group; `None` if one of them is in use.
    fn take_buffers(&mut self, group: usize) -> Option<Vec<S::Buffer>> {
        let receives = &(self.transfers)(&self.steps[group]).receives;
        let mut buffers = Vec::with_capacity(receives.len());
        for header in receives {
            match find_buffer::<S>(self.stock, header.bytes()) {
                Some(index) => buffers.push(self.stock.swap_remove(index)),
                None => {
                    self.stock.append(&mut buffers);
                    return None;
                }
            }
        }
        Some(buffers)
    }

    /// Posts the receives of the next group into `buffers`, and the sends of the next group.
    fn post(
        &mut self,
        buffers: Option<Vec<S::Buffer>>,
        sends: bool,
        in_flight: &mut InFlight<'_, S>,
    ) -> Result<()> {
        let mut receives = Vec::new();
        if let Some(buffers) = buffers {
            let headers = &(self.transfers)(&self.steps[self.received]).receives;
            self.received += 1;
            for (header, buffer) in headers.iter().zip(buffers) {
                let header = in_flight.tagged(header);
                self.expected.push_back((self.received, header.clone()));
                receives.push(Incoming { header, buffer });
            }
        }
        let mut headers: &[MessageHeader] = &[];
        let mut source = None;
        if sends {
            let steps = self.steps;
            let transfers = (self.transfers)(&steps[self.sent]);
            self.unsent = self.bytes_in_flight(in_flight) + transfers.bytes_sent();
            headers = &transfers.sends;
            source = if self.sent == 0 || self.steps[self.sent].sends_local {
                self.local.as_ref()
            } else {
                self.held.iter().find(|&&(step, _)| step == self.sent).map(|(_, ready)| ready)
            };
            self.sent += 1;
        }
        in_flight.start(headers, source, receives)
    }

    /// Ends the pass: waits for all sends, and returns every buffer to the stock.
    pub(super) fn finish(mut self, in_flight: &mut InFlight<'_, S>) -> Result<()> {
        in_flight.wait_sends()?;
        self.put_back();
        self.stock.extend(self.local.take().map(|(buffer, _)| buffer));
        Ok(())
    }

    /// Ends the circulation, of which no send is in flight that reads another block than the local
    /// one: returns the buffers to the stock, except that of the local block if the route kept it.
    pub(super) fn finish_all_but_local(
        mut self,
        in_flight: &mut InFlight<'_, S>,
    ) -> Result<Option<Ready<S>>> {
        if self.used.iter().any(S::is_shared) {
            in_flight.wait_until(|_| Ok((!self.used.iter().any(S::is_shared)).then_some(())))?;
        }
        self.put_back();
        Ok(self.local)
    }

    fn put_back(&mut self) {
        self.stock.append(&mut self.used);
        self.stock.extend(self.held.drain(..).map(|(_, (buffer, _))| buffer));
    }
}

/// Block of a pass, or part of one, that reaches this rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockIndex {
    /// Number of its ring step.
    pub(super) step: usize,
    /// True if the rank attends to no further block.
    pub(super) is_last: bool,
}

/// Brings one block after another to this rank and calls `attend` with each. `shards` are those
/// whose rows circulate.
pub(super) fn circulate<S: Space>(
    shards: &[Arc<Shard>],
    mut blocks: Blocks<'_, S>,
    in_flight: &mut InFlight<'_, S>,
    rows: &mut BlockRows,
    mut attend: impl FnMut(BlockIndex, &Block<'_, S>, Tick<'_>) -> Result<()>,
) -> Result<()> {
    let steps = blocks.steps;
    for (number, step) in steps.iter().enumerate() {
        span!("step", step = number, owner = step.owner);
        in_flight.start_step(number);
        blocks.start_step(number, in_flight)?;
        let whole = std::slice::from_ref(&step.rows);
        let parts = if step.parts.is_empty() { whole } else { &step.parts };
        for (part, part_rows) in parts.iter().enumerate() {
            if part > 0 {
                blocks.wait(in_flight)?;
            }
            let Some((buffer, ready)) = blocks.current() else { break };
            let rows = rows.expand(&shards[step.owner], part_rows)?;
            let block = Block { buffer: &buffer, ready: &ready, rows };
            let is_last = number + 1 == steps.len() && part + 1 == parts.len();
            let index = BlockIndex { step: number, is_last };
            let of_block = [part_rows.count(), step.rows.count()];
            in_flight.compute(step.owner, of_block, |in_flight| {
                attend(index, &block, &mut || {
                    in_flight.tick_with(|in_flight| blocks.advance(in_flight))
                })
            })?;
            drop(buffer);
            blocks.post_sends(in_flight)?;
            blocks.release();
        }
    }
    blocks.finish(in_flight)
}
