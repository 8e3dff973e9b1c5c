//! The ring loop: forward, backward in one pass, backward in two.
//!
//! From `Plan::forward` to the kernel:
//!
//! | file | step of the walk |
//! |---|---|
//! | `annulus/src/plan.rs` | the caller's arrays become [`Inputs`] and [`Outputs`] |
//! | `annulus/src/engine.rs` | the ring, or a grid of heads × queries × keys whose columns are rings |
//! | `comm/src/ring/mod.rs` | checks the arguments; all ranks agree that they make the same call |
//! | `comm/src/ring/ring_loop.rs` | **this file**: one block of keys and values after another |
//! | `comm/src/ring/blocks.rs` | `circulate`: receives the next block, sends this one, attends |
//! | `backend-cpu/src/pass.rs` | the block goes to split-KV decode or, by tiles, to all threads |
//! | `backend-cpu/src/forward/tiles.rs` | S = K·Qᵀ, online softmax, Oᵀ += Vᵀ·P of each tile |
//! | `backend-cpu/src/tile/gemm.rs` | the micro-kernel |
//!
//! The loops:
//!
//! ```text
//! forward                          backward, one pass                 backward, two passes
//! kv = pack(k, v)                  kv = pack(k, v)                    kv = pack(k, v)
//! for each ring step:              for each ring step:                for each ring step:
//!   post: kv →, next kv ←            post: kv →, next kv ←              post: kv →, next kv ←
//!   (m, l, acc) += attend(q, kv)     dq += …, dkv = attend(q, kv)       dq += attend(q, kv)
//!   wait for next kv                 wait for next kv                   wait for next kv
//! out, lse = finish                  dkv += partial sum that arrived  q = pack(q, dout, statistics)
//!                                    post: dkv → next user or owner   for each ring step:
//!                                  dk, dv = local dkv + final           post: q →, next q ←
//!                                           gradients                   dkv += attend(q, k, v)
//!                                                                       wait for next q
//! ```
//! A post returns at once, so transfers overlap the tiles of the same step. No step waits for its
//! sends: `blocks.rs` says when buffers are free and groups are posted. The accumulators of the
//! queries never leave the device between the start and the finish of a pass. In one pass, the
//! dK/dV accumulator of a KV shard is created on the first remote rank that needs it, follows the
//! shard one ring step behind, and is sent from the last such rank directly back to the owner.
//!
//! # Source
//! Liu et al. 2023, Ring Attention with Blockwise Transformers, section 3, without the last hop and
//! with final gradients that are sent directly to the owner. The loop of
//! zhuzilin/ring-flash-attention (`ring_flash_attn_forward`, `ring_flash_attn_backward`) is the
//! one-pass case of relay up without a mask-aware schedule.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Error, ForwardPass, Gradients, Inputs,
    LeafSums, Outputs, Result, Shard, Space, View, ViewMut, Workspace,
};

use super::{
    Ring,
    blocks::{Blocks, circulate},
    buffers::{BlockRows, BlockStock, GradientStock},
    in_flight::InFlight,
    one_pass::{FinalGradients, OnePass, Sums},
    overlap,
    plan::{GroupPace, RingPlan},
    program::{self, RankProgram},
    step_events::{CirculationKind, PassKind},
};
use crate::profiler::span;

impl<B: Backend> Ring<B> {
    /// Runs the forward pass, within a call of all ranks. Returns the exposed communication.
    pub(crate) fn forward_loop(
        &mut self,
        inputs: &Inputs<View<'_, B::Space>>,
        outputs: &mut Outputs<ViewMut<'_, B::Space>>,
    ) -> Result<Duration> {
        let first_tag = self.take_tags();
        let Self { agreed, workspace, transport, plan, buffers, watch, ring_index, .. } = self;
        let start = Instant::now();
        let observer = plan.observer(watch, CirculationKind::Forward, start, agreed, *ring_index);
        let mut in_flight = InFlight::new(transport.as_mut(), first_tag, plan.lengths, observer);
        let mut pass =
            workspace.forward(inputs.as_ref().map(B::Space::reborrow), &mut || in_flight.tick())?;
        in_flight.check()?;

        let steps = &plan.program.steps;
        let pace = GroupPace::new(agreed, plan);
        let pack = |kv: &mut _| pass.local_kv(kv, &plan.program.sent);
        let blocks = Blocks::new(steps, |step| &step.kv_in_parts, pace, &mut buffers.blocks, pack)?;
        let shards = &plan.shards.kv;
        circulate(shards, blocks, &mut in_flight, &mut buffers.rows, |block, kv, tick| {
            if block.is_last { pass.attend_last(kv, outputs, tick) } else { pass.attend(kv, tick) }
        })?;

        pass.finish(outputs, &mut || in_flight.tick())?;
        in_flight.check()?;
        Ok(in_flight.waited())
    }

    /// Runs the backward pass of this plan's mode. A ring of one rank always takes one pass.
    /// Returns the exposed communication.
    pub(super) fn backward_loop(
        &mut self,
        inputs: &BackwardInputs<View<'_, B::Space>>,
        gradients: &mut Gradients<ViewMut<'_, B::Space>>,
    ) -> Result<Duration> {
        let first_tag = self.take_tags();
        let mut local_dkv = self
            .buffers
            .local_dkv
            .take()
            .ok_or_else(|| Error::internal("the plan has no gradient buffer"))?;
        let waited = if self.has_two_passes() {
            self.backward_two_pass(inputs, &mut local_dkv, gradients, first_tag)?
        } else {
            self.backward_one_pass(inputs, &mut local_dkv, gradients, first_tag)?
        };
        self.buffers.local_dkv = Some(local_dkv);
        Ok(waited)
    }

    fn backward_one_pass(
        &mut self,
        inputs: &BackwardInputs<View<'_, B::Space>>,
        local_dkv: &mut <B::Space as Space>::Buffer,
        gradients: &mut Gradients<ViewMut<'_, B::Space>>,
        first_tag: u64,
    ) -> Result<Duration> {
        let Self { agreed, workspace, transport, plan, buffers, watch, ring_index, .. } = self;
        let start = Instant::now();
        let observer = plan.observer(watch, CirculationKind::OnePass, start, agreed, *ring_index);
        let mut in_flight = InFlight::new(transport.as_mut(), first_tag, plan.lengths, observer);
        let mode = BackwardMode::OnePass;
        let pass =
            workspace.backward(inputs.as_ref().map(B::Space::reborrow), mode, &mut || {
                in_flight.tick()
            })?;
        in_flight.check()?;

        let circulation = OnePassCirculation {
            program: &plan.program,
            shards: &plan.shards.kv,
            ring_index: *ring_index,
            pace: GroupPace::new(agreed, plan).with_gradients(),
            blocks: &mut buffers.blocks,
            gradients: &mut buffers.gradients,
            rows: &mut buffers.rows,
        };
        let (pass, mut in_flight, local_dkv) = circulation.run(pass, in_flight, local_dkv)?;
        let leaf_sums = plan.has_leaf_sums().then_some(&mut buffers.leaf_sums);
        finish_backward(pass, local_dkv, leaf_sums, gradients, &mut in_flight)?;
        Ok(in_flight.waited())
    }

    fn backward_two_pass(
        &mut self,
        inputs: &BackwardInputs<View<'_, B::Space>>,
        local_dkv: &mut <B::Space as Space>::Buffer,
        gradients: &mut Gradients<ViewMut<'_, B::Space>>,
        first_tag: u64,
    ) -> Result<Duration> {
        let Self { agreed, workspace, transport, plan, buffers, watch, ring_index, ranks, .. } =
            self;
        let start = Instant::now();
        let observer = plan.observer(watch, CirculationKind::TwoPassKv, start, agreed, *ring_index);
        let rows = &mut buffers.rows;
        let reproducible = agreed.spec.leaf_rows.is_some();
        let mut in_flight = InFlight::new(transport.as_mut(), first_tag, plan.lengths, observer);
        let mode = BackwardMode::TwoPass;
        let mut pass =
            workspace.backward(inputs.as_ref().map(B::Space::reborrow), mode, &mut || {
                in_flight.tick()
            })?;
        in_flight.check()?;
        let steps = &plan.program.steps;
        let pace = GroupPace::new(agreed, plan);
        let pack = |kv: &mut _| pass.local_kv(kv, &plan.program.sent);
        let blocks = Blocks::new(steps, |step| &step.kv_in_parts, pace, &mut buffers.blocks, pack)?;
        let shards = &plan.shards.kv;
        circulate(shards, blocks, &mut in_flight, rows, |block, kv, tick| {
            // the local queries add to the local dK and dV here, so the second pass skips them; in
            // the reproducible order they are leaves like those of other ranks
            let dkv = (block.step == 0 && !reproducible).then_some(&mut *local_dkv);
            pass.attend_kv(kv, dkv, tick).map(drop)
        })?;
        let waited = in_flight.waited();

        let second_tag = first_tag + overlap::tags(*ranks);
        let circulation = CirculationKind::TwoPassQueries;
        let observer = plan.observer(watch, circulation, start, agreed, *ring_index);
        let mut in_flight = InFlight::new(transport.as_mut(), second_tag, plan.lengths, observer);
        let steps = &plan.query_steps;
        let pack = |q: &mut _| pass.local_queries(q);
        let blocks =
            Blocks::new(steps, |step| &step.kv_in_parts, pace, &mut buffers.queries, pack)?;
        let shards = &plan.shards.q;
        circulate(shards, blocks, &mut in_flight, rows, |block, q, tick| match block.step {
            0 if !reproducible => Ok(()),
            _ => pass.attend_queries(q, local_dkv, tick),
        })?;

        let leaf_sums = plan.has_leaf_sums().then_some(&mut buffers.leaf_sums);
        finish_backward(pass, local_dkv, leaf_sums, gradients, &mut in_flight)?;
        Ok(waited + in_flight.waited())
    }

    /// Returns the payload bytes that this rank sends in a pass by the schedule; 0 for the backward
    /// pass of a plan that is forward only.
    pub fn bytes_predicted(&self, pass: PassKind) -> u64 {
        let RingPlan { program, query_steps, .. } = &self.plan;
        let kv = program::kv_bytes_sent(&program.steps);
        match pass {
            PassKind::Forward => kv,
            PassKind::Backward if !self.agreed.backward => 0,
            PassKind::Backward if self.has_two_passes() => {
                kv + program::kv_bytes_sent(query_steps) + self.reduce_bytes()
            }
            PassKind::Backward => kv + program.gradient_bytes_sent() + self.reduce_bytes(),
        }
    }

    /// Returns true if a backward pass sends queries around the ring after keys and values.
    pub(super) fn has_two_passes(&self) -> bool {
        self.agreed.spec.backward == BackwardMode::TwoPass && self.ranks > 1
    }
}

/// One circulation of keys and values whose gradients follow them.
pub(super) struct OnePassCirculation<'a, S: Space> {
    pub(super) program: &'a RankProgram,
    pub(super) shards: &'a [Arc<Shard>],
    pub(super) ring_index: usize,
    pub(super) pace: GroupPace,
    pub(super) blocks: &'a mut BlockStock<S>,
    pub(super) gradients: &'a mut GradientStock<S>,
    pub(super) rows: &'a mut BlockRows,
}

impl<'a, S: Space> OnePassCirculation<'a, S> {
    /// Computes dK and dV of the local keys in `local_dkv`, and dQ in the pass. Returns all three.
    pub(super) fn run<P: BackwardPass<S>>(
        self,
        mut pass: P,
        in_flight: InFlight<'a, S>,
        local_dkv: &'a mut S::Buffer,
    ) -> Result<(P, InFlight<'a, S>, &'a mut S::Buffer)> {
        let Self { program, shards, ring_index, pace, blocks: stock, gradients, rows } = self;
        let steps = &program.steps;
        let pack = |kv: &mut _| pass.local_kv(kv, &program.sent);
        let mut blocks = Blocks::new(steps, |step| &step.kv, pace, stock, pack)?;
        let GradientStock { sums, arriving, finals } = gradients;
        let final_gradients =
            FinalGradients::new(steps, &in_flight, finals, local_dkv, pace.whole_groups);
        let mut one_pass = OnePass {
            pass,
            program,
            shards,
            in_flight,
            sums: Sums::new(sums),
            arriving,
            final_gradients,
            rows,
            partial_sum: None,
        };
        one_pass.final_gradients.post(&mut one_pass.in_flight)?;
        for (number, step) in steps.iter().enumerate() {
            span!("step", step = number, owner = step.owner);
            one_pass.start_step(number, &mut blocks)?;
            let mut sum = if number == 0 {
                one_pass.attend_head(step, &mut blocks)?
            } else {
                one_pass.attend(step, &mut blocks)?
            };
            blocks.post_sends(&mut one_pass.in_flight)?;
            blocks.release();
            one_pass.receive(step, &mut blocks, sum.as_mut())?;
            one_pass.post_gradients(step, sum, pace.whole_groups)?;
        }
        let local_kv = one_pass.finish_blocks(blocks)?;
        // the tail of the local block overlaps the last final gradients; see `overlap.rs`
        let tail = one_pass.attend_tail(ring_index, local_kv, stock)?;
        one_pass.receive_last(tail)?;
        let OnePass { pass, in_flight, final_gradients, .. } = one_pass;
        Ok((pass, in_flight, final_gradients.local_dkv))
    }
}

/// Ends a backward pass: computes the terms of the sums over leaves, if there are any, and writes
/// the gradients.
fn finish_backward<S: Space, P: BackwardPass<S>>(
    mut pass: P,
    dkv: &S::Buffer,
    leaf_sums: Option<&mut LeafSums>,
    gradients: &mut Gradients<ViewMut<'_, S>>,
    in_flight: &mut InFlight<'_, S>,
) -> Result<()> {
    if let Some(sums) = leaf_sums {
        pass.leaf_sums(dkv, sums, &mut || in_flight.tick())?;
        in_flight.check()?;
    }
    pass.finish(dkv, gradients, &mut || in_flight.tick())?;
    in_flight.check()
}
