//! Parts of a step of the one-pass backward: tiles, reductions, and transfers of gradients.
//!
//! Final gradients are reduced into the local dK/dV in the order of their steps, which fixes the
//! bits. No step waits for them: they arrive while later steps are computed, and a rank waits for
//! the oldest one only if it needs its buffer. With as many buffers as steps that receives are
//! posted ahead ([`super::RingOptions::receive_ahead`]), the rank that sends them may be as many
//! steps behind.

use std::collections::VecDeque;

use annulus_core::{
    Arrived, BackwardPass, Block, Channel, Error, Incoming, MessageHeader, Readers, Reduction,
    Result, RowSet, Space,
};

use super::{
    block_rows::BlockRows,
    block_stock::BlockStock,
    blocks::{Blocks, Ready},
    buffers::GradientBuffers,
    home_reduce::HomeReduce,
    in_flight::InFlight,
    plan::RingPlan,
    program::RankStep,
};

/// A backward pass in which gradients follow their keys and values one ring step behind.
pub(super) struct OnePass<'a, S: Space, P> {
    pub(super) pass: P,
    pub(super) plan: &'a RingPlan,
    pub(super) in_flight: InFlight<'a, S>,
    pub(super) sums: GradientBuffers<'a, S>,
    /// dK and dV of the local keys.
    pub(super) local_dkv: &'a mut S::Buffer,
    pub(super) rows: &'a mut BlockRows,
    /// The partial sum that was posted after the step before.
    pub(super) partial_sum: Option<MessageHeader>,
    /// Final gradients that were posted and not yet reduced, in the order of their steps.
    pub(super) final_gradients: VecDeque<(MessageHeader, &'a HomeReduce)>,
}

impl<'a, S: Space, P: BackwardPass<S>> OnePass<'a, S, P> {
    /// Computes on the head rows of the local block.
    pub(super) fn attend_head(
        &mut self,
        step: &RankStep,
        blocks: &mut Blocks<'_, S>,
    ) -> Result<Option<Ready<S>>> {
        let Some((buffer, ready)) = blocks.current() else { return Ok(None) };
        let head_rows = self.plan.program.head_rows;
        let set;
        let head = match step.rows.ranges() {
            // all local rows, as on a ring of one rank: a set that need not be allocated
            [all] if *all == (0..head_rows) => &step.rows,
            _ => {
                set = RowSet::all(head_rows);
                &set
            }
        };
        let rows = self.rows.expand(&self.plan.shards.kv[step.owner], head)?;
        let block = Block { buffer: &buffer, ready: &ready, rows };
        let Self { pass, local_dkv, in_flight, .. } = self;
        in_flight.compute(step.owner, [head.count(), step.rows.count()], |in_flight| {
            pass.attend_kv(&block, Some(&mut **local_dkv), &mut || {
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
    ) -> Result<Option<Ready<S>>> {
        let Some((buffer, ready)) = blocks.current() else { return Ok(None) };
        let bytes = self.plan.gradient_bytes(step.rows.count());
        let mut sum = self.take_sum(blocks, |sums| sums.take(bytes))?;
        let rows = self.rows.expand(&self.plan.shards.kv[step.owner], &step.rows)?;
        let block = Block { buffer: &buffer, ready: &ready, rows };
        let Self { pass, in_flight, .. } = self;
        let ready = in_flight.compute(step.owner, [step.rows.count(); 2], |in_flight| {
            pass.attend_kv(&block, Some(&mut sum), &mut || {
                in_flight.tick_with(|in_flight| blocks.advance(in_flight))
            })
        })?;
        Ok(Some((sum, ready)))
    }

    /// Takes a gradient buffer with `take`, after those in flight have been sent if there is none.
    fn take_sum(
        &mut self,
        blocks: &mut Blocks<'_, S>,
        take: impl Fn(&mut GradientBuffers<'_, S>) -> Option<S::Buffer>,
    ) -> Result<S::Buffer> {
        let Self { in_flight, sums, .. } = self;
        if let Some(sum) = take(sums) {
            return Ok(sum);
        }
        in_flight.wait_until(|in_flight| {
            // before `take`, which then finds the buffers of all sends free
            let sends = in_flight.sends();
            blocks.advance(in_flight)?;
            match take(sums) {
                None if !sends => Err(Error::internal("all gradient buffers are in flight")),
                sum => Ok(sum),
            }
        })
    }

    /// Waits for the partial sum that was posted after the step before, and adds it to `dkv`;
    /// reduces the final gradients that have arrived.
    pub(super) fn receive(
        &mut self,
        step: &RankStep,
        blocks: &mut Blocks<'_, S>,
        dkv: Option<&mut Ready<S>>,
    ) -> Result<()> {
        self.in_flight.check()?;
        if let Some(message) = self.partial_sum.take() {
            let Some((sum, ready)) = dkv else { return Err(unexpected(&message)) };
            let arrived = self.in_flight.wait_until(|in_flight| {
                blocks.advance(in_flight)?;
                in_flight.take(&message)
            })?;
            let Arrived { buffer, ready: came } = arrived;
            *ready = self.pass.reduce(sum, &buffer, &came, &step.partial_sum, Reduction::Add)?;
            self.sums.put_back(buffer);
        }
        while let Some((message, _)) = self.final_gradients.front() {
            let Some(arrived) = self.in_flight.take(message)? else { break };
            self.reduce_final(arrived)?;
        }
        Ok(())
    }

    /// Reduces the oldest final gradient, which has arrived, into the local dK/dV.
    fn reduce_final(&mut self, arrived: Arrived<S>) -> Result<()> {
        if let Some((_, reduce)) = self.final_gradients.pop_front() {
            reduce.run(&mut self.pass, self.local_dkv, &arrived)?;
        }
        self.sums.put_back_final(arrived.buffer);
        Ok(())
    }

    /// Takes a buffer for a final gradient, after the oldest one has been reduced if there is none.
    fn take_final(&mut self, bytes: u64, blocks: &mut Blocks<'_, S>) -> Result<S::Buffer> {
        if let Some(buffer) = self.sums.take_final(bytes) {
            return Ok(buffer);
        }
        let missing = || Error::internal("a final gradient has no buffer");
        let (message, _) = self.final_gradients.front().ok_or_else(missing)?;
        let arrived = self.in_flight.wait_until(|in_flight| {
            blocks.advance(in_flight)?;
            in_flight.take(message)
        })?;
        self.reduce_final(arrived)?;
        self.sums.take_final(bytes).ok_or_else(missing)
    }

    /// Sends `dkv` to the next rank that adds to it, or to the owner, and posts the receives of
    /// gradients.
    pub(super) fn post_gradients(
        &mut self,
        step: &'a RankStep,
        blocks: &mut Blocks<'_, S>,
        dkv: Option<Ready<S>>,
    ) -> Result<()> {
        let mut reduces = step.home_reduces.iter();
        let mut receives = Vec::with_capacity(step.gradients.receives.len());
        for message in &step.gradients.receives {
            let header = self.in_flight.tagged(message);
            let bytes = message.bytes();
            let buffer = match message.channel {
                Channel::Kv => return Err(unexpected(message)),
                Channel::PartialGrad => {
                    self.partial_sum = Some(header.clone());
                    self.take_sum(blocks, |sums| sums.take(bytes))?
                }
                Channel::FinalGrad => {
                    let reduce = reduces.next().ok_or_else(|| unexpected(message))?;
                    let buffer = self.take_final(bytes, blocks)?;
                    self.final_gradients.push_back((header.clone(), reduce));
                    buffer
                }
            };
            receives.push(Incoming { header, buffer });
        }
        self.in_flight.start(&step.gradients.sends, dkv.as_ref(), receives)?;
        self.sums.sent(dkv);
        Ok(())
    }

    /// Computes on the tail rows of the local block, if it has any. Returns their dK and dV. Packs
    /// the block again unless the route kept it as `local_kv`; its buffer returns to `stock`.
    pub(super) fn attend_tail(
        &mut self,
        ring_index: usize,
        local_kv: Option<Ready<S>>,
        stock: &mut BlockStock<S>,
    ) -> Result<Option<Arrived<S>>> {
        let plan = self.plan;
        if plan.tail_rows() == 0 {
            if let Some((kv, _)) = local_kv {
                stock.put(stock.local(), kv);
            }
            return Ok(None);
        }
        let (kv, ready) = match local_kv {
            Some(packed) => packed,
            None => {
                let mut kv = stock.take(stock.local())?;
                let ready = self.pass.local_kv(&mut kv, Readers::Ring)?;
                (kv, ready)
            }
        };
        let part = plan.tail_of::<S>(&kv)?;
        let rows = self.rows.expand(&plan.shards.kv[ring_index], &plan.tail_set())?;
        let block = Block { buffer: &part, ready: &ready, rows };
        let bytes = plan.gradient_bytes(plan.tail_rows());
        let mut sum = match self.sums.take(bytes) {
            Some(sum) => sum,
            None => self.in_flight.wait_until(|in_flight| {
                let sends = in_flight.sends();
                match self.sums.take(bytes) {
                    None if !sends => Err(Error::internal("all gradient buffers are in flight")),
                    sum => Ok(sum),
                }
            })?,
        };
        let Self { pass, in_flight, .. } = self;
        let rows = [plan.tail_rows(), plan.keys.len() as u64];
        let ready = in_flight.compute(ring_index, rows, |in_flight| {
            pass.attend_kv(&block, Some(&mut sum), &mut || in_flight.tick())
        })?;
        drop(part);
        stock.put(stock.local(), kv);
        Ok(Some(Arrived { buffer: sum, ready }))
    }

    /// Waits for the last final gradients, and reduces them and the tail's into the local dK/dV.
    pub(super) fn receive_last(&mut self, tail: Option<Arrived<S>>) -> Result<()> {
        while let Some((message, _)) = self.final_gradients.front() {
            let arrived = self.in_flight.wait_until(|in_flight| in_flight.take(message))?;
            self.reduce_final(arrived)?;
        }
        self.in_flight.wait_sends()?;
        if let Some(tail) = tail {
            self.plan.program.tail_reduce.run(&mut self.pass, self.local_dkv, &tail)?;
            self.sums.put_back(tail.buffer);
        }
        self.sums.finish();
        Ok(())
    }
}

fn unexpected(message: &MessageHeader) -> Error {
    let what = format!("a {:?} message that no step expects", message.channel);
    Error::Comm { peer: message.peer, step: message.step, what }
}
