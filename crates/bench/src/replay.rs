//! Calls of a rank's kernels in the ring, recorded, and run again by one thread alone.
//!
//! In a ring of many threads on few cores, a rank's data leaves the caches between two calls, in
//! which other ranks run. A rank that has its own core keeps them, and so does a replay: the calls
//! of one rank follow each other, on blocks that lie where they arrived.

use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex, PoisonError},
};

use annulus::{Backward, Cpu, Error, Forward, Result};
use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, ForwardPass, Gradients, Host,
    HostBuffer, HostView, HostViewMut, Inputs, Outputs, Passes, RankShard, RowSet, Rows, Tick,
    Workspace,
};
use ndarray::{Array4, Axis};
use rustix::time::{ClockId, clock_gettime};

use crate::wrapped_tiles::{FORWARD, TileCalls};

/// Calls of a rank, recorded while it runs in a ring.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallLog(Arc<Mutex<Calls>>);

/// Blocks of the calls of one pass of each kind.
#[derive(Debug, Default)]
struct Calls {
    shard: Option<RankShard>,
    forward: Vec<Recorded>,
    backward: Vec<Recorded>,
}

/// A copy of a block. Of a local one ([`Block::first_local`]) the pass reads its inputs instead.
#[derive(Debug)]
struct Recorded {
    buffer: HostBuffer,
    rows: Rows,
    first_local: Option<usize>,
}

impl TileCalls for CallLog {
    fn adopt(&self, shard: &RankShard) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).shard = Some(shard.clone());
    }

    fn run(
        &self,
        block: &Block<'_, Host>,
        products: f64,
        tick: Tick<'_>,
        work: impl FnOnce(Tick<'_>) -> Result<()>,
    ) -> Result<()> {
        let bytes = block.buffer.bytes();
        let mut buffer = HostBuffer::zeroed(bytes.len() as u64)?;
        buffer.write(0..bytes.len() as u64, &mut |into| {
            into.copy_from_slice(bytes);
            Ok(())
        })?;
        let Block { rows, first_local, .. } = *block;
        let recorded = Recorded { buffer, rows: rows.clone(), first_local };
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if products == FORWARD { &mut calls.forward } else { &mut calls.backward }.push(recorded);
        drop(calls);
        work(tick)
    }
}

/// Recorded calls of a rank, and what they need to run again.
pub(crate) struct Replay {
    calls: Calls,
    workspace: annulus_cpu::Workspace,
    /// q, k, v, dout.
    inputs: [Array4<f32>; 4],
    /// As the ring computed them.
    forward: Forward<f32>,
    /// dq, dk, dv. Of these dq alone has the bits of the ring's: no gradient of another rank is
    /// received.
    gradients: [Array4<f32>; 3],
    out: Array4<f32>,
    lse: Array4<f32>,
    local_kv: HostBuffer,
    dkv: HostBuffer,
}

impl Replay {
    /// Takes the calls out of `log`.
    ///
    /// # Errors
    /// [`Error::Internal`] if a replay has other results than the ring.
    pub(crate) fn new(
        log: &CallLog,
        inputs: [Array4<f32>; 4],
        forward: Forward<f32>,
        backward: &Backward<f32>,
    ) -> Result<Self> {
        let calls = std::mem::take(&mut *log.0.lock().unwrap_or_else(PoisonError::into_inner));
        let missing = || Error::internal("a workspace without a shard");
        let shard = calls.shard.as_ref().ok_or_else(missing)?;
        let most = calls.backward.iter().map(|call| call.rows.len()).max().unwrap_or(0);
        let rows = most.max(shard.keys.len()) as u64;
        let local_bytes = shard.spec.kv_row_layout().bytes() * shard.keys.len() as u64;
        let workspace = Cpu::new(1)?.workspace(shard, Passes::Both)?;
        let out = Array4::zeros(forward.out.dim());
        let lse = Array4::zeros(forward.lse.view().insert_axis(Axis(3)).dim());
        let gradients =
            [&backward.dq, &backward.dk, &backward.dv].map(|of| Array4::zeros(of.dim()));
        let local_kv = HostBuffer::zeroed(local_bytes)?;
        let dkv = HostBuffer::zeroed(shard.spec.gradient_row_layout().bytes() * rows)?;
        let mut replay =
            Self { calls, workspace, inputs, forward, gradients, out, lse, local_kv, dkv };
        replay.run(false)?;
        let is_same = replay.out == replay.forward.out
            && replay.lse.index_axis(Axis(3), 0) == replay.forward.lse
            && replay.gradients[0] == backward.dq;
        is_same.then_some(replay).ok_or_else(|| Error::internal("a replay with other results"))
    }

    /// Runs the calls of a forward and a backward pass. Returns the milliseconds of CPU time in
    /// them. With `cached`, reads each block before its call.
    pub(crate) fn run(&mut self, cached: bool) -> Result<f64> {
        Ok((self.run_forward(cached)? + self.run_backward(cached)?) as f64 * 1e-6)
    }

    fn run_forward(&mut self, cached: bool) -> Result<u64> {
        let Self { calls, workspace, inputs: [q, k, v, _], out, lse, local_kv, .. } = self;
        let mut pass =
            workspace.forward(inputs_of([q, k, v]), &mut || ControlFlow::Continue(()))?;
        pass.local_kv(local_kv, &RowSet::new())?;
        let mut outputs = Outputs {
            out: HostViewMut::F32(out.view_mut()),
            lse: HostViewMut::F32(lse.view_mut()),
            max: None,
            sum: None,
            ties: None,
            out_residual: None,
        };
        let mut taken = 0;
        let last = calls.forward.len().saturating_sub(1);
        for (index, recorded) in calls.forward.iter().enumerate() {
            if cached {
                read(recorded, [k, v]);
            }
            let Recorded { buffer, rows, first_local } = recorded;
            let block = Block { buffer, ready: &(), rows, first_local: *first_local };
            let tick: Tick<'_> = &mut || ControlFlow::Continue(());
            let start = thread_nanoseconds();
            if index == last {
                pass.attend_last(&block, &mut outputs, tick)?;
            } else {
                pass.attend(&block, tick)?;
            }
            taken += thread_nanoseconds() - start;
        }
        pass.finish(&mut outputs, &mut || ControlFlow::Continue(()))?;
        Ok(taken)
    }

    fn run_backward(&mut self, cached: bool) -> Result<u64> {
        let Self { calls, workspace, inputs: [q, k, v, dout], forward, local_kv, dkv, .. } = self;
        let inputs = BackwardInputs {
            forward: inputs_of([q, k, v]),
            out: HostView::F32(forward.out.view()),
            max: HostView::F32(forward.lse.view().insert_axis(Axis(3))),
            sum: None,
            ties: None,
            dout: HostView::F32(dout.view()),
            dlse: None,
            out_residual: None,
        };
        let mut pass =
            workspace.backward(inputs, BackwardMode::OnePass, &mut || ControlFlow::Continue(()))?;
        pass.local_kv(local_kv, &RowSet::new())?;
        let mut taken = 0;
        for recorded in &calls.backward {
            if cached {
                read(recorded, [k, v]);
            }
            let Recorded { buffer, rows, first_local } = recorded;
            let block = Block { buffer, ready: &(), rows, first_local: *first_local };
            let start = thread_nanoseconds();
            pass.attend_kv(&block, Some(dkv), &mut || ControlFlow::Continue(()))?;
            taken += thread_nanoseconds() - start;
        }
        let [dq, dk, dv] = &mut self.gradients;
        let mut gradients = Gradients {
            dq: HostViewMut::F32(dq.view_mut()),
            dk: HostViewMut::F32(dk.view_mut()),
            dv: HostViewMut::F32(dv.view_mut()),
            dbias: None,
            dsinks: None,
        };
        pass.finish(dkv, &mut gradients, &mut || ControlFlow::Continue(()))?;
        Ok(taken)
    }

    /// Returns the number of calls of both passes.
    pub(crate) fn calls(&self) -> usize {
        self.calls.forward.len() + self.calls.backward.len()
    }

    /// Returns the sum of all lse.
    pub(crate) fn sum_of_lse(&self) -> f64 {
        self.forward.lse.iter().map(|&lse| f64::from(lse)).sum()
    }
}

/// Reads K and V of a block, local ones in the inputs, so that they are in the caches as far as they
/// fit.
fn read(block: &Recorded, inputs: [&Array4<f32>; 2]) {
    if block.first_local.is_none() {
        std::hint::black_box(block.buffer.bytes().iter().fold(0u8, |all, &byte| all ^ byte));
        return;
    }
    for input in inputs {
        std::hint::black_box(input.iter().fold(0u32, |all, element| all ^ element.to_bits()));
    }
}

fn inputs_of([q, k, v]: [&Array4<f32>; 3]) -> Inputs<'_, Host> {
    let [q, k, v] = [q, k, v].map(|tensor| HostView::F32(tensor.view()));
    Inputs { q, k, v, bias: None, sinks: None }
}

/// Returns the CPU time of the calling thread: a backend of one thread computes on it.
fn thread_nanoseconds() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
