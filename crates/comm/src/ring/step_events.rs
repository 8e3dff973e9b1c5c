//! Events of ring steps: what a rank did, for a function of the caller's that shows progress.
//!
//! ```text
//! for each ring step:   Compute   tiles of the step's block, or of each part of it
//!                       Wait      time until the block or the gradients of the step had arrived
//!                       Send      messages that were posted together
//! ```
//! Without a function no clock is read and nothing is counted.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{Dims, Spec};
use annulus_plan::{RingShards, WorkMatrix};

/// A forward or a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassKind {
    /// Computes out and lse.
    Forward,
    /// Computes gradients.
    Backward,
}

impl PassKind {
    /// Returns the name of the call: `forward` or `backward`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}

/// Activity of a rank in a ring step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Tiles of one block, or of one part of it.
    Compute,
    /// Messages that were posted together, from their post until this rank found them sent.
    Send,
    /// Exposed communication: this rank waited for messages.
    Wait,
}

/// One activity of one rank in a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct StepEvent {
    /// The rank.
    pub rank: usize,
    /// The pass.
    pub pass: PassKind,
    /// Ring step. A two-pass backward counts from 0 twice.
    pub step: usize,
    /// The activity.
    pub activity: Activity,
    /// Payload bytes of [`Activity::Send`], otherwise 0. Their sum over a pass is
    /// [`Report::bytes_predicted`](super::Report::bytes_predicted).
    pub bytes: u64,
    /// Floating-point operations of [`Activity::Compute`], otherwise 0: two for each multiply-add
    /// of the matrix products, for visible pairs only. Pairs are counted as [`WorkMatrix`] counts
    /// them, and divided among the parts of a block in proportion to their rows.
    pub flops: f64,
    /// Start, as time since the start of the pass on this rank.
    pub begin: Duration,
    /// End, as time since the start of the pass on this rank.
    pub end: Duration,
}

/// The caller's function. It is called on the thread of the rank, between tiles and messages.
pub type StepHook = Arc<dyn Fn(StepEvent) + Send + Sync>;

/// The caller's function, if there is one, and the visible pairs of this rank.
#[derive(Default)]
pub(super) struct StepWatch {
    hook: Option<StepHook>,
    /// Counted by the first pass after a change.
    pairs: Option<VisiblePairs>,
}

/// Visible pairs of this rank's rows with those of each ring index.
struct VisiblePairs {
    /// This rank's queries with the keys of each.
    kv: Vec<f64>,
    /// This rank's keys with the queries of each.
    queries: Vec<f64>,
}

impl VisiblePairs {
    fn count(spec: &Spec, shards: &RingShards, ring_index: usize) -> Self {
        let mine = |shards: &[_]| vec![Arc::clone(&shards[ring_index])];
        let count = |shards: RingShards| {
            let Dims { batch, q_heads, .. } = spec.dims;
            let pairs = WorkMatrix::of(spec.mask.as_ref(), q_heads, batch, &shards).pairs;
            pairs.into_iter().flatten().map(|pairs| pairs as f64).collect()
        };
        Self {
            kv: count(RingShards { q: mine(&shards.q), kv: shards.kv.clone() }),
            queries: count(RingShards { q: shards.q.clone(), kv: mine(&shards.kv) }),
        }
    }
}

/// Blocks that circulate, which determine the matrix products of a pair.
#[derive(Clone, Copy)]
pub(super) enum CirculationKind {
    /// Forward: S and P·V.
    Forward,
    /// Backward in one pass: S, dP, dQ, dK and dV.
    OnePass,
    /// First blocks of a two-pass backward: S, dP and dQ; of the local block all five, S and dP
    /// twice.
    TwoPassKv,
    /// Second blocks of a two-pass backward: S, dP, dK and dV. The local block is skipped.
    TwoPassQueries,
    /// JVP, and the first blocks of a double backward: S, its tangent (2), P·V and its tangent (2).
    Tangents,
    /// Second blocks of a double backward: S, dP, dQ, dK, and of each the tangent (2, of dP 1), and
    /// the tangent of dV. S is computed again.
    TangentGradients,
}

impl StepWatch {
    /// Sets the function.
    pub(super) fn set(&mut self, hook: StepHook) {
        self.hook = Some(hook);
    }

    /// Returns the function.
    pub(super) fn hook(&self) -> Option<&StepHook> {
        self.hook.as_ref()
    }

    /// Discards the counts of an earlier batch.
    pub(super) fn batch_changed(&mut self) {
        self.pairs = None;
    }

    /// Returns the observer of one circulation of a pass that began at `start`.
    pub(super) fn observer(
        &mut self,
        circulation: CirculationKind,
        start: Instant,
        spec: &Spec,
        shards: &RingShards,
        [rank, ring_index]: [usize; 2],
    ) -> Observer<'_> {
        let pass = match circulation {
            CirculationKind::Forward | CirculationKind::Tangents => PassKind::Forward,
            _ => PassKind::Backward,
        };
        let Some(hook) = &self.hook else {
            return Observer { hook: None, rank, pass, start, flops: Vec::new() };
        };
        let pairs = self.pairs.get_or_insert_with(|| VisiblePairs::count(spec, shards, ring_index));
        let flops = block_flops(circulation, &spec.dims, pairs, ring_index);
        Observer { hook: Some(hook), rank, pass, start, flops }
    }
}

/// Returns the floating-point operations of the block of each ring index.
fn block_flops(
    circulation: CirculationKind,
    dims: &Dims,
    pairs: &VisiblePairs,
    ring_index: usize,
) -> Vec<f64> {
    // products over head_dim and over value_dim: of S, dQ and dK, and of P·V, dP and dV
    let products =
        |head: usize, value: usize| 2.0 * (head * dims.head_dim + value * dims.value_dim) as f64;
    let [others, local] = match circulation {
        CirculationKind::Forward => [products(1, 1); 2],
        CirculationKind::OnePass => [products(3, 2); 2],
        CirculationKind::TwoPassKv => [products(2, 1), products(2, 1) + products(2, 2)],
        CirculationKind::TwoPassQueries => [products(2, 2), 0.0],
        CirculationKind::Tangents => [products(3, 3); 2],
        CirculationKind::TangentGradients => [products(7, 3); 2],
    };
    let pairs = match circulation {
        CirculationKind::TwoPassQueries => &pairs.queries,
        _ => &pairs.kv,
    };
    let of = |(index, pairs)| pairs * if index == ring_index { local } else { others };
    pairs.iter().enumerate().map(of).collect()
}

/// Makes the events of one circulation.
pub(crate) struct Observer<'a> {
    hook: Option<&'a StepHook>,
    rank: usize,
    pass: PassKind,
    start: Instant,
    /// Of the block of each ring index.
    flops: Vec<f64>,
}

impl<'a> Observer<'a> {
    /// Makes the events of messages of a pass that began at `start`, outside of a ring.
    pub(crate) const fn of_messages(
        hook: Option<&'a StepHook>,
        rank: usize,
        pass: PassKind,
        start: Instant,
    ) -> Self {
        Self { hook, rank, pass, start, flops: Vec::new() }
    }

    /// Returns the time, if there is a function to which events are passed.
    pub(super) fn now(&self) -> Option<Instant> {
        self.hook.map(|_| Instant::now())
    }

    /// Makes the event of the tiles of `rows` of the `block_rows` rows of `owner`'s block.
    pub(super) fn computed(
        &self,
        step: usize,
        owner: usize,
        [rows, block_rows]: [u64; 2],
        began: Option<Instant>,
    ) {
        let flops = self.flops.get(owner).copied().unwrap_or_default();
        let share = rows as f64 / block_rows.max(1) as f64;
        self.emit(Activity::Compute, step, 0, flops * share, began);
    }

    /// Makes the event of messages of `bytes` bytes that have been sent.
    pub(super) fn sent(&self, step: usize, bytes: u64, posted: Instant) {
        self.emit(Activity::Send, step, bytes, 0.0, Some(posted));
    }

    /// Makes the event of a wait.
    pub(super) fn waited(&self, step: usize, began: Instant) {
        self.emit(Activity::Wait, step, 0, 0.0, Some(began));
    }

    fn emit(
        &self,
        activity: Activity,
        step: usize,
        bytes: u64,
        flops: f64,
        began: Option<Instant>,
    ) {
        let (Some(hook), Some(began)) = (self.hook, began) else { return };
        hook(StepEvent {
            rank: self.rank,
            pass: self.pass,
            step,
            activity,
            bytes,
            flops,
            begin: began.saturating_duration_since(self.start),
            end: self.start.elapsed(),
        });
    }
}
