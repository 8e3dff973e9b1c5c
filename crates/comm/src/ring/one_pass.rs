//! Parts of a step of the one-pass backward: tiles, reductions, and transfers of gradients.
//!
//! Every wait also moves blocks on and reduces final gradients, because other ranks may wait for
//! that.
//!
//! # Final gradients
//! They are reduced into the local dK/dV in the order of their steps, which fixes the bits,
//! whenever the rank computes no tile: at the end of a step, and in every wait. No step waits for
//! one. Its receive is posted once its place is free, the first ones at the start of the pass, so
//! that a rank that is ahead need not wait for the owner of its keys.
//!
//! No rank waits forever. Of all ranks consider one in the earliest step. What it waits for was
//! sent in earlier steps, or is a sum of an earlier step that it sends to an owner. That owner has
//! places for the final gradients before it, all of which are of earlier steps and so have been
//! sent; it reduces them, in whatever step it is, and posts the receive of this one.
//!
//! A transport that runs groups in order gets the receive in the group of its step, which waits for
//! its place.
//!
//! The first records of a row are copied, which initialises the row, and all others are added.

use std::sync::Arc;

use annulus_core::{
    Arrived, BackwardPass, Block, Channel, Error, Incoming, MessageHeader, Reduction, Result,
    RowSet, Shard, Space, index,
};

use super::{
    blocks::{Blocks, Ready},
    buffers::{BlockRows, BlockStock, Places},
    in_flight::InFlight,
    program::{HomeReduce, RankProgram, RankStep},
};

/// A backward pass in which gradients follow their keys and values one ring step behind.
pub(super) struct OnePass<'a, S: Space, P> {
    pub(super) pass: P,
    pub(super) program: &'a RankProgram,
    pub(super) shards: &'a [Arc<Shard>],
    pub(super) in_flight: InFlight<'a, S>,
    pub(super) sums: Sums<'a, S>,
    /// A partial sum that arrives; after the steps, the sum of the tail.
    pub(super) arriving: &'a mut Places<S>,
    pub(super) final_gradients: FinalGradients<'a, S>,
    pub(super) rows: &'a mut BlockRows,
    /// The partial sum that was posted after the step before.
    pub(super) partial_sum: Option<MessageHeader>,
}

/// dK and dV of blocks of other ranks, which are computed here and sent.
pub(super) struct Sums<'a, S: Space> {
    places: &'a mut Places<S>,
    /// Sums that were computed.
    computed: usize,
    /// Places and buffers that were sent; free once no transport owns them.
    sent: Vec<(usize, S::Buffer)>,
}

/// A sum of dK and dV, in its place.
pub(super) struct Sum<S: Space> {
    place: usize,
    dkv: Ready<S>,
}

impl<'a, S: Space> Sums<'a, S> {
    pub(super) const fn new(places: &'a mut Places<S>) -> Self {
        Self { places, computed: 0, sent: Vec::new() }
    }

    /// Takes the buffer of the next sum, with its place; `None` while an earlier one is sent from
    /// it.
    fn next(&mut self) -> Result<Option<(usize, S::Buffer)>> {
        for (place, buffer) in self.sent.extract_if(.., |(_, buffer)| !S::is_shared(buffer)) {
            self.places.put(place, buffer);
        }
        let place = self.computed % self.places.len().max(1);
        if !self.places.is_free(place) {
            return Ok(None);
        }
        self.computed += 1;
        Ok(Some((place, self.places.take(place)?)))
    }

    /// Ends the pass, of which all sends have completed.
    fn finish(&mut self) {
        for (place, buffer) in self.sent.drain(..) {
            self.places.put(place, buffer);
        }
    }
}

impl<'a, S: Space, P: BackwardPass<S>> OnePass<'a, S, P> {
    /// Waits for the block of a step, and posts what can be posted.
    pub(super) fn start_step(&mut self, number: usize, blocks: &mut Blocks<'_, S>) -> Result<()> {
        let Self { pass, in_flight, final_gradients, .. } = self;
        in_flight.start_step(number);
        blocks.start_step(number, in_flight, |in_flight| final_gradients.advance(pass, in_flight))
    }

    /// Waits until `result` returns a value; moves blocks on and reduces final gradients meanwhile.
    fn wait_until<T>(
        &mut self,
        blocks: &mut Blocks<'_, S>,
        mut result: impl FnMut(&mut InFlight<'_, S>, &mut Sums<'_, S>) -> Result<Option<T>>,
    ) -> Result<T> {
        let Self { pass, in_flight, sums, final_gradients, .. } = self;
        in_flight.wait_until(|in_flight| {
            blocks.advance(in_flight)?;
            final_gradients.advance(pass, in_flight)?;
            result(in_flight, sums)
        })
    }

    /// Computes on the head rows of the local block.
    pub(super) fn attend_head(
        &mut self,
        step: &RankStep,
        blocks: &mut Blocks<'_, S>,
    ) -> Result<Option<Sum<S>>> {
        let Some((buffer, ready)) = blocks.current() else { return Ok(None) };
        let head_rows = self.program.head_rows;
        let set;
        let head = match step.rows.ranges() {
            // all local rows, as on a ring of one rank: a set that need not be allocated
            [all] if *all == (0..head_rows) => &step.rows,
            _ => {
                set = RowSet::all(head_rows);
                &set
            }
        };
        let rows = self.rows.expand(&self.shards[step.owner], head)?;
        let block = Block { buffer: &buffer, ready: &ready, rows, first_local: Some(0) };
        let Self { pass, final_gradients, in_flight, .. } = self;
        in_flight.compute(step.owner, [head.count(), step.rows.count()], |in_flight| {
            pass.attend_kv(&block, Some(&mut *final_gradients.local_dkv), &mut || {
                in_flight.tick_with(|in_flight| blocks.advance(in_flight))
            })
        })?;
        Ok(None)
    }

    /// Computes on the block of another rank. Returns the sum of dK and dV that is to be sent.
    pub(super) fn attend(
        &mut self,
        step: &RankStep,
        blocks: &mut Blocks<'_, S>,
    ) -> Result<Option<Sum<S>>> {
        let Some((buffer, ready)) = blocks.current() else { return Ok(None) };
        let (place, mut sum) = match self.sums.next()? {
            Some(free) => free,
            None => self.wait_until(blocks, |_, sums| sums.next())?,
        };
        let rows = self.rows.expand(&self.shards[step.owner], &step.rows)?;
        let block = Block { buffer: &buffer, ready: &ready, rows, first_local: None };
        let Self { pass, in_flight, .. } = self;
        let ready = in_flight.compute(step.owner, [step.rows.count(); 2], |in_flight| {
            pass.attend_kv(&block, Some(&mut sum), &mut || {
                in_flight.tick_with(|in_flight| blocks.advance(in_flight))
            })
        })?;
        Ok(Some(Sum { place, dkv: (sum, ready) }))
    }

    /// Waits for the partial sum that was posted after the step before, and adds it to `sum`;
    /// reduces the final gradients that have arrived.
    pub(super) fn receive(
        &mut self,
        step: &RankStep,
        blocks: &mut Blocks<'_, S>,
        sum: Option<&mut Sum<S>>,
    ) -> Result<()> {
        self.in_flight.check()?;
        if let Some(message) = self.partial_sum.take() {
            let Some(Sum { dkv: (dkv, ready), .. }) = sum else { return Err(unexpected(&message)) };
            let arrived = self.wait_until(blocks, |in_flight, _| in_flight.take(&message))?;
            let Arrived { buffer, ready: came } = arrived;
            *ready = self.pass.reduce(dkv, &buffer, &came, &step.partial_sum, Reduction::Add)?;
            self.arriving.put(0, buffer);
        }
        let Self { pass, in_flight, final_gradients, .. } = self;
        final_gradients.advance(pass, in_flight)
    }

    /// Sends `sum` to the next rank that adds to it, or to the owner, and posts the receives of
    /// this step.
    pub(super) fn post_gradients(
        &mut self,
        step: &RankStep,
        sum: Option<Sum<S>>,
        whole_groups: bool,
    ) -> Result<()> {
        let mut receives = Vec::with_capacity(step.gradients.receives.len());
        for message in &step.gradients.receives {
            match message.channel {
                Channel::Kv => return Err(unexpected(message)),
                Channel::PartialGrad => {
                    let header = self.in_flight.tagged(message);
                    self.partial_sum = Some(header.clone());
                    receives.push(Incoming { header, buffer: self.arriving.take(0)? });
                }
                Channel::FinalGrad if whole_groups => {
                    let Self { pass, in_flight, final_gradients, .. } = self;
                    receives.push(final_gradients.next_of_group(pass, in_flight)?);
                }
                // posted already, or once its place is free
                Channel::FinalGrad => {}
            }
        }
        let source = sum.as_ref().map(|sum| &sum.dkv);
        self.in_flight.start(&step.gradients.sends, source, receives)?;
        self.sums.sent.extend(sum.map(|sum| (sum.place, sum.dkv.0)));
        Ok(())
    }

    /// Ends the circulation of blocks. Returns the local one if the route kept it.
    pub(super) fn finish_blocks(&mut self, blocks: Blocks<'_, S>) -> Result<Option<Ready<S>>> {
        let Self { pass, in_flight, final_gradients, .. } = self;
        blocks.finish_all_but_local(in_flight, |in_flight| final_gradients.advance(pass, in_flight))
    }

    /// Computes on the tail rows of the local block, if it has any. Returns their dK and dV. Packs
    /// the block again, now for this rank alone, unless the route kept it as `local_kv`; its buffer
    /// returns to `stock`.
    pub(super) fn attend_tail(
        &mut self,
        ring_index: usize,
        local_kv: Option<Ready<S>>,
        stock: &mut BlockStock<S>,
    ) -> Result<Option<Arrived<S>>> {
        let program = self.program;
        if program.tail_rows() == 0 {
            if let Some((kv, _)) = local_kv {
                stock.put(stock.local(), kv);
            }
            return Ok(None);
        }
        let (kv, ready) = match local_kv {
            Some(packed) => packed,
            None => {
                let mut kv = stock.take(stock.local())?;
                let ready = self.pass.local_kv(&mut kv, &RowSet::new())?;
                (kv, ready)
            }
        };
        let part = program.tail_of::<S>(&kv)?;
        let rows = self.rows.expand(&self.shards[ring_index], &program.tail_set())?;
        let first_local = Some(index(program.head_rows));
        let block = Block { buffer: &part, ready: &ready, rows, first_local };
        // no partial sum arrives any more
        let mut sum = self.arriving.take(0)?;
        let Self { pass, in_flight, .. } = self;
        let rows = [program.tail_rows(), program.local_rows];
        let ready = in_flight.compute(ring_index, rows, |in_flight| {
            pass.attend_kv(&block, Some(&mut sum), &mut || in_flight.tick())
        })?;
        drop(part);
        stock.put(stock.local(), kv);
        Ok(Some(Arrived { buffer: sum, ready }))
    }

    /// Waits for the last final gradients, and reduces them and the tail's into the local dK/dV.
    pub(super) fn receive_last(&mut self, tail: Option<Arrived<S>>) -> Result<()> {
        let Self { pass, in_flight, final_gradients, .. } = self;
        final_gradients.advance(pass, in_flight)?;
        if !final_gradients.is_done() {
            in_flight.wait_until(|in_flight| {
                final_gradients.advance(pass, in_flight)?;
                Ok(final_gradients.is_done().then_some(()))
            })?;
        }
        in_flight.wait_sends()?;
        if let Some(tail) = tail {
            self.program.tail_reduce.run(pass, final_gradients.local_dkv, &tail)?;
            self.arriving.put(0, tail.buffer);
        }
        self.sums.finish();
        Ok(())
    }
}

fn unexpected(message: &MessageHeader) -> Error {
    let what = format!("a {:?} message that no step expects", message.channel);
    Error::Comm { peer: message.peer, step: message.step, what }
}

/// The final gradients of a pass.
pub(super) struct FinalGradients<'a, S: Space> {
    places: &'a mut Places<S>,
    /// dK and dV of the local keys.
    pub(super) local_dkv: &'a mut S::Buffer,
    /// All messages of the pass in the order of their steps.
    messages: Vec<(MessageHeader, &'a HomeReduce)>,
    posted: usize,
    reduced: usize,
    /// True if a receive is posted with the group of its step.
    whole_groups: bool,
}

impl<'a, S: Space> FinalGradients<'a, S> {
    /// Lists the final gradients of `steps`, whose messages have the tags of `in_flight`.
    pub(super) fn new(
        steps: &'a [RankStep],
        in_flight: &InFlight<'_, S>,
        places: &'a mut Places<S>,
        local_dkv: &'a mut S::Buffer,
        whole_groups: bool,
    ) -> Self {
        let of_step = |step: &'a RankStep| {
            let messages = step.gradients.receives.iter();
            let finals = messages.filter(|message| message.channel == Channel::FinalGrad);
            finals.zip(&step.home_reduces)
        };
        let messages = steps.iter().flat_map(of_step);
        let messages = messages.map(|(message, reduce)| (in_flight.tagged(message), reduce));
        Self {
            places,
            local_dkv,
            messages: messages.collect(),
            posted: 0,
            reduced: 0,
            whole_groups,
        }
    }

    /// Posts the receives whose places are free, unless they are posted with their groups.
    pub(super) fn post(&mut self, in_flight: &mut InFlight<'_, S>) -> Result<()> {
        let mut receives = Vec::new();
        while !self.whole_groups && self.posted < self.messages.len() && self.has_place() {
            receives.push(self.take()?);
        }
        in_flight.start(&[], None, receives)
    }

    /// Returns the receive of the next final gradient, whose group is posted; waits until its place
    /// is free.
    pub(super) fn next_of_group<P: BackwardPass<S>>(
        &mut self,
        pass: &mut P,
        in_flight: &mut InFlight<'_, S>,
    ) -> Result<Incoming<S>> {
        if !self.has_place() {
            in_flight.wait_until(|in_flight| {
                self.advance(pass, in_flight)?;
                Ok(self.has_place().then_some(()))
            })?;
        }
        self.take()
    }

    /// Reduces the final gradients that have arrived, and posts the receives whose places are free.
    pub(super) fn advance<P: BackwardPass<S>>(
        &mut self,
        pass: &mut P,
        in_flight: &mut InFlight<'_, S>,
    ) -> Result<()> {
        while let Some((message, reduce)) = self.messages[..self.posted].get(self.reduced) {
            let Some(arrived) = in_flight.take(message)? else { break };
            reduce.run(pass, self.local_dkv, &arrived)?;
            self.places.put(self.place(self.reduced), arrived.buffer);
            self.reduced += 1;
        }
        self.post(in_flight)
    }

    /// Returns true if all have been reduced.
    pub(super) const fn is_done(&self) -> bool {
        self.reduced == self.messages.len()
    }

    fn place(&self, number: usize) -> usize {
        number % self.places.len().max(1)
    }

    fn has_place(&self) -> bool {
        self.places.is_free(self.place(self.posted))
    }

    /// Takes the receive of the next final gradient.
    fn take(&mut self) -> Result<Incoming<S>> {
        let none = || Error::internal("more final gradients than the plan has");
        let (header, _) = self.messages.get(self.posted).ok_or_else(none)?;
        let header = header.clone();
        let buffer = self.places.take(self.place(self.posted))?;
        self.posted += 1;
        Ok(Incoming { header, buffer })
    }
}
