//! Parts of a step of the one-pass backward: tiles, reductions, and transfers of gradients.

use annulus_core::{
    Arrived, BackwardPass, Block, Channel, Error, MessageHeader, Readers, Reduction, Result,
    RowSet, Rows, Space,
};

use super::{
    blocks::Blocks,
    buffers::{GradientBuffers, take_buffer},
    home_reduce::HomeReduce,
    in_flight::InFlight,
    plan::RingPlan,
    program::RankStep,
};

/// A block or a gradient, and the event after which it may be read.
type Ready<S> = (<S as Space>::Buffer, <S as Space>::Event);

/// A backward pass in which gradients follow their keys and values one ring step behind.
pub(super) struct OnePass<'a, S: Space, P> {
    pub(super) pass: P,
    pub(super) plan: &'a RingPlan,
    pub(super) in_flight: InFlight<'a, S>,
    pub(super) sums: GradientBuffers<'a, S>,
    /// dK and dV of the local keys.
    pub(super) local_dkv: &'a mut S::Buffer,
    pub(super) rows: &'a mut Rows,
}

impl<S: Space, P: BackwardPass<S>> OnePass<'_, S, P> {
    /// Computes on the head rows of the local block.
    pub(super) fn attend_head(
        &mut self,
        step: &RankStep,
        (buffer, ready): (&S::Buffer, &S::Event),
    ) -> Result<Option<Ready<S>>> {
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
        self.plan.shards.kv[step.owner].expand(head, self.rows)?;
        let block = Block { buffer, ready, rows: self.rows };
        let Self { pass, local_dkv, in_flight, .. } = self;
        in_flight.compute(step.owner, [head.count(), step.rows.count()], |in_flight| {
            pass.attend_kv(&block, Some(&mut **local_dkv), &mut || in_flight.tick())
        })?;
        Ok(None)
    }

    /// Computes on the block of another rank. Returns the sum of dK and dV that is to be sent.
    pub(super) fn attend(
        &mut self,
        step: &RankStep,
        (buffer, ready): (&S::Buffer, &S::Event),
    ) -> Result<Option<Ready<S>>> {
        self.plan.shards.kv[step.owner].expand(&step.rows, self.rows)?;
        let block = Block { buffer, ready, rows: self.rows };
        let mut sum = self.sums.take(self.plan.gradient_bytes(step.rows.count()))?;
        let Self { pass, in_flight, .. } = self;
        let ready = in_flight.compute(step.owner, [step.rows.count(); 2], |in_flight| {
            pass.attend_kv(&block, Some(&mut sum), &mut || in_flight.tick())
        })?;
        Ok(Some((sum, ready)))
    }

    /// Waits for the messages of a step: stores the next block, adds the partial sum that arrived
    /// to `dkv`, and reduces final gradients into the local dK/dV.
    pub(super) fn receive(
        &mut self,
        step: &RankStep,
        reduces: &[HomeReduce],
        blocks: &mut Blocks<'_, S>,
        mut dkv: Option<&mut Ready<S>>,
    ) -> Result<()> {
        let mut reduces = reduces.iter();
        for (message, arrived) in self.in_flight.wait_all()? {
            match message.channel {
                Channel::Kv => blocks.arrive(arrived),
                Channel::PartialGrad => {
                    let (sum, ready) = dkv.as_mut().ok_or_else(|| unexpected(&message))?;
                    *ready = self.pass.reduce(
                        sum,
                        &arrived.buffer,
                        &arrived.ready,
                        &step.partial_sum,
                        Reduction::Add,
                    )?;
                    self.sums.put_back(arrived.buffer);
                }
                Channel::FinalGrad => {
                    let reduce = reduces.next().ok_or_else(|| unexpected(&message))?;
                    reduce.run(&mut self.pass, self.local_dkv, &arrived)?;
                    self.sums.put_back_final(arrived.buffer);
                }
            }
        }
        Ok(())
    }

    /// Sends `dkv` to the next rank that adds to it, or to the owner, and posts the receives of
    /// gradients. The sends of the step before must have completed.
    pub(super) fn post_gradients(&mut self, step: &RankStep, dkv: Option<Ready<S>>) -> Result<()> {
        self.sums.recycle_sent();
        let Self { in_flight, sums, .. } = self;
        in_flight.post(&step.gradients, dkv.as_ref(), |message| sums.take_for(message))?;
        self.sums.sent(dkv);
        Ok(())
    }

    /// Computes on the tail rows of the local block, if it has any. Returns their dK and dV. Packs
    /// the block again unless the route kept it as `local_kv`; its buffer returns to `stock`.
    pub(super) fn attend_tail(
        &mut self,
        ring_index: usize,
        local_kv: Option<Ready<S>>,
        stock: &mut Vec<S::Buffer>,
    ) -> Result<Option<Arrived<S>>> {
        let plan = self.plan;
        if plan.tail_rows() == 0 {
            stock.extend(local_kv.map(|(kv, _)| kv));
            return Ok(None);
        }
        let (kv, ready) = match local_kv {
            Some(packed) => packed,
            None => {
                let mut kv = take_buffer::<S>(stock, plan.local_kv_bytes())?;
                let ready = self.pass.local_kv(&mut kv, Readers::Ring)?;
                (kv, ready)
            }
        };
        let part = plan.tail_of::<S>(&kv)?;
        plan.shards.kv[ring_index].expand(&plan.tail_set(), self.rows)?;
        let block = Block { buffer: &part, ready: &ready, rows: self.rows };
        let mut sum = self.sums.take(plan.gradient_bytes(plan.tail_rows()))?;
        let Self { pass, in_flight, .. } = self;
        let rows = [plan.tail_rows(), plan.keys.len() as u64];
        let ready = in_flight.compute(ring_index, rows, |in_flight| {
            pass.attend_kv(&block, Some(&mut sum), &mut || in_flight.tick())
        })?;
        drop(part);
        stock.push(kv);
        Ok(Some(Arrived { buffer: sum, ready }))
    }

    /// Waits for the last final gradients, and reduces them and the tail's into the local dK/dV.
    pub(super) fn receive_last(
        &mut self,
        reduces: &[HomeReduce],
        tail: Option<Arrived<S>>,
    ) -> Result<()> {
        for ((_, arrived), reduce) in self.in_flight.wait_all()?.into_iter().zip(reduces) {
            reduce.run(&mut self.pass, self.local_dkv, &arrived)?;
            self.sums.put_back_final(arrived.buffer);
        }
        if let Some(tail) = tail {
            self.plan.program.tail_reduce.run(&mut self.pass, self.local_dkv, &tail)?;
            self.sums.put_back(tail.buffer);
        }
        self.sums.recycle_sent();
        Ok(())
    }
}

fn unexpected(message: &MessageHeader) -> Error {
    let what = format!("a {:?} message that no step expects", message.channel);
    Error::Comm { peer: message.peer, step: message.step, what }
}
