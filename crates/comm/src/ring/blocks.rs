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
//! On a route that sends from the local block in later steps (direct), `ahead` only bounds memory:
//! any group may be posted, as long as there are buffers ([`block_buffers`]) and
//!
//! ```text
//! sends      those before it have been sent, or at most SEND_WINDOW bytes are in flight
//! ```
//! because sends to different ranks at once would share the link, and that of the next step would
//! arrive last of all instead of first.
//!
//! A transport that runs groups in order ([`Transport::runs_groups_in_order`]) gets each group
//! whole, once both conditions hold, and on every route in step t only groups before t + ahead.
//!
//! [`block_buffers`]: annulus_plan::block_buffers
//! [`Transport::runs_groups_in_order`]: annulus_core::Transport::runs_groups_in_order

use std::{collections::VecDeque, sync::Arc};

use annulus_core::{Arrived, Block, Error, Incoming, MessageHeader, Result, Shard, Space, Tick};

use super::{
    buffers::{BlockRows, BlockStock},
    in_flight::InFlight,
    plan::GroupPace,
    program::{MessageGroup, RankStep},
};
use crate::profiler::span;

/// A buffer and the event after which it may be read.
pub(super) type Ready<S> = (<S as Space>::Buffer, <S as Space>::Event);

/// Bytes of sends in flight below which a rank sends further blocks of the direct route ahead: what
/// a link of 20 GB/s moves between two ticks of a kernel, so that it does not become idle.
const SEND_WINDOW: u64 = 4 << 20;

/// A block, or part of one, whose receive is posted.
struct ExpectedBlock {
    step: usize,
    /// Place of its buffer in the stock.
    place: usize,
    header: MessageHeader,
}

/// A block, or part of one, that has arrived.
struct HeldBlock<S: Space> {
    step: usize,
    /// Place of its buffer in the stock.
    place: usize,
    ready: Ready<S>,
}

/// The blocks of one circulation.
pub(super) struct Blocks<'a, S: Space> {
    steps: &'a [RankStep],
    /// Selects the transfers of a step: with the last block whole or in parts.
    transfers: fn(&RankStep) -> &MessageGroup,
    pace: GroupPace,
    stock: &'a mut BlockStock<S>,
    /// The local block: during step 0, and until the end on a route that sends from it in later
    /// steps.
    local: Option<Ready<S>>,
    step: usize,
    /// Receives that are posted and have not arrived, in the order of their steps.
    expected: VecDeque<ExpectedBlock>,
    /// Blocks that have arrived, or parts of them, from that of the current step on, but for the
    /// local one.
    held: VecDeque<HeldBlock<S>>,
    /// Places and buffers of earlier blocks, of which some may still be sent.
    used: Vec<(usize, S::Buffer)>,
    /// Groups whose receives have been posted.
    received: usize,
    /// Blocks of those groups.
    received_blocks: usize,
    /// Groups whose sends have been posted.
    sent: usize,
    /// See [`Blocks::bytes_in_flight`].
    unsent: u64,
}

impl<'a, S: Space> Blocks<'a, S> {
    /// Starts with the local block, which `pack` writes. Returns the event after that.
    pub(super) fn new(
        steps: &'a [RankStep],
        transfers: fn(&RankStep) -> &MessageGroup,
        pace: GroupPace,
        stock: &'a mut BlockStock<S>,
        pack: impl FnOnce(&mut S::Buffer) -> Result<S::Event>,
    ) -> Result<Self> {
        let mut local = stock.take(stock.local())?;
        let ready = pack(&mut local)?;
        Ok(Self {
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
            received_blocks: 0,
            sent: 0,
            unsent: 0,
        })
    }

    /// Starts step `step`: waits for its block, or for the first part of it, and posts what can be
    /// posted. A wait calls `also`.
    pub(super) fn start_step(
        &mut self,
        step: usize,
        in_flight: &mut InFlight<'_, S>,
        also: impl FnMut(&mut InFlight<'_, S>) -> Result<()>,
    ) -> Result<()> {
        self.step = step;
        if step > 0 && !(self.transfers)(&self.steps[step - 1]).receives.is_empty() {
            self.wait(in_flight, also)
        } else {
            self.advance(in_flight)
        }
    }

    /// Waits for the next part of the block of the current step. Calls `also` meanwhile.
    pub(super) fn wait(
        &mut self,
        in_flight: &mut InFlight<'_, S>,
        mut also: impl FnMut(&mut InFlight<'_, S>) -> Result<()>,
    ) -> Result<()> {
        in_flight.wait_until(|in_flight| {
            also(in_flight)?;
            // before `advance`, which then finds the buffers of all sends free
            let sends = in_flight.sends();
            self.advance(in_flight)?;
            let is_here = self.held.front().is_some_and(|held| held.step == self.step);
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
        self.held.front().filter(|held| held.step == self.step).map(|held| held.ready.clone())
    }

    /// Ends the use of the current block or part, of which all sends have been posted.
    pub(super) fn release(&mut self) {
        let used = if self.step == 0 {
            let local = if self.pace.keeps_local { None } else { self.local.take() };
            local.map(|(buffer, _)| (self.stock.local(), buffer))
        } else if self.held.front().is_some_and(|held| held.step == self.step) {
            self.held.pop_front().map(|held| (held.place, held.ready.0))
        } else {
            None
        };
        match used {
            Some((place, buffer)) if S::is_shared(&buffer) => self.used.push((place, buffer)),
            Some((place, buffer)) => self.stock.put(place, buffer),
            None => {}
        }
    }

    /// Takes blocks that have arrived, and posts what can be posted.
    pub(super) fn advance(&mut self, in_flight: &mut InFlight<'_, S>) -> Result<()> {
        while let Some(ExpectedBlock { header, .. }) = self.expected.front() {
            let Some(Arrived { buffer, ready }) = in_flight.take(header)? else { break };
            if let Some(ExpectedBlock { step, place, .. }) = self.expected.pop_front() {
                self.held.push_back(HeldBlock { step, place, ready: (buffer, ready) });
            }
        }
        for (place, buffer) in self.used.extract_if(.., |(_, buffer)| !S::is_shared(buffer)) {
            self.stock.put(place, buffer);
        }
        let end = match self.pace {
            pace if pace.is_unbounded() => self.steps.len(),
            pace => (self.step + pace.ahead).min(self.steps.len()),
        };
        loop {
            let may_send = self.sent < end && self.may_send(self.sent, in_flight);
            let in_order = !self.pace.whole_groups || (may_send && self.sent == self.received);
            let may_receive = self.received < end && in_order && self.has_buffers(self.received);
            let may_send = may_send && (!self.pace.whole_groups || may_receive);
            if !may_receive && !may_send {
                return Ok(());
            }
            self.post(may_receive, may_send, in_flight)?;
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

    /// Returns the bytes of the sends that have been posted since none was in flight. In host
    /// memory, the only one with parts, sends of gradients do not count: they last as long as the
    /// owner is late. In other memory a transport may have copied a block that it still sends.
    fn bytes_in_flight(&mut self, in_flight: &InFlight<'_, S>) -> u64 {
        let is_owned = |(local, _): &Ready<S>| S::HAS_PARTS && !S::is_shared(local);
        if !in_flight.sends() || self.local.as_ref().is_some_and(is_owned) {
            self.unsent = 0;
        }
        self.unsent
    }

    /// Returns true if the block of `step` has arrived, or there is none.
    fn has_arrived(&self, step: usize) -> bool {
        step <= self.received && self.expected.front().is_none_or(|first| first.step > step)
    }

    /// Returns true if the buffers of the receives of a group are free.
    fn has_buffers(&self, group: usize) -> bool {
        let receives = &(self.transfers)(&self.steps[group]).receives;
        let place = |part| self.stock.place(self.received_blocks, part);
        (0..receives.len()).all(|part| self.stock.is_free(place(part)))
    }

    /// Posts the receives of the next group, and the sends of the next group.
    fn post(&mut self, receives: bool, sends: bool, in_flight: &mut InFlight<'_, S>) -> Result<()> {
        let mut incoming = Vec::new();
        if receives {
            let headers = &(self.transfers)(&self.steps[self.received]).receives;
            self.received += 1;
            for (part, header) in headers.iter().enumerate() {
                let header = in_flight.tagged(header);
                let place = self.stock.place(self.received_blocks, part);
                let buffer = self.stock.take(place)?;
                let step = self.received;
                self.expected.push_back(ExpectedBlock { step, place, header: header.clone() });
                incoming.push(Incoming { header, buffer });
            }
            self.received_blocks += usize::from(!headers.is_empty());
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
                self.held.iter().find(|held| held.step == self.sent).map(|held| &held.ready)
            };
            self.sent += 1;
        }
        in_flight.start(headers, source, incoming)
    }

    /// Ends the pass: waits for all sends, and returns every buffer to the stock.
    pub(super) fn finish(mut self, in_flight: &mut InFlight<'_, S>) -> Result<()> {
        in_flight.wait_sends()?;
        self.put_back();
        if let Some((buffer, _)) = self.local.take() {
            self.stock.put(self.stock.local(), buffer);
        }
        Ok(())
    }

    /// Ends the circulation: waits for the sends of all blocks but the local one, and returns their
    /// buffers to the stock, except that of the local block if the route kept it. A wait calls
    /// `also`.
    pub(super) fn finish_all_but_local(
        mut self,
        in_flight: &mut InFlight<'_, S>,
        mut also: impl FnMut(&mut InFlight<'_, S>) -> Result<()>,
    ) -> Result<Option<Ready<S>>> {
        let is_sent = |used: &[(usize, S::Buffer)]| !used.iter().any(|(_, of)| S::is_shared(of));
        if !is_sent(&self.used) {
            in_flight.wait_until(|in_flight| {
                also(in_flight)?;
                Ok(is_sent(&self.used).then_some(()))
            })?;
        }
        self.put_back();
        Ok(self.local)
    }

    fn put_back(&mut self) {
        for (place, buffer) in self.used.drain(..) {
            self.stock.put(place, buffer);
        }
        for held in self.held.drain(..) {
            self.stock.put(held.place, held.ready.0);
        }
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
        blocks.start_step(number, in_flight, |_| Ok(()))?;
        let whole = std::slice::from_ref(&step.rows);
        let parts = if step.parts.is_empty() { whole } else { &step.parts };
        for (part, part_rows) in parts.iter().enumerate() {
            if part > 0 {
                blocks.wait(in_flight, |_| Ok(()))?;
            }
            let Some((buffer, ready)) = blocks.current() else { break };
            let rows = rows.expand(&shards[step.owner], part_rows)?;
            let first_local = (number == 0).then_some(0);
            let block = Block { buffer: &buffer, ready: &ready, rows, first_local };
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
