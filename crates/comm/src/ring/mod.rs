//! The ring engine: one rank's part of attention whose keys and values travel.
//!
//! | file | content |
//! |---|---|
//! | `ring_loop.rs` | the loops: forward, backward in one pass, backward in two |
//! | `blocks.rs`, `buffers.rs` | double buffering of blocks; the plan's memory |
//! | `in_flight.rs` | transfers in flight; the only place that waits |
//! | `plan.rs`, `program.rs`, `planning.rs`, `update.rs` | from rows to the messages of one rank |
//! | `block_parts.rs`, `tail_overlap.rs` | overlap of the last block, and of the last gradients |
//! | `reduce.rs` | sums of dsinks and dbias over ranks |
//! | `check.rs`, `describe.rs` | arguments, before anything is sent |
//!
//! The engine is independent of what a tile computes ([`Backend`]) and of how bytes move
//! ([`Transport`]).

pub(crate) mod block_parts;
mod blocks;
mod buffers;
mod check;
mod describe;
mod in_flight;
mod plan;
mod planning;
mod program;
mod reduce;
mod ring_loop;
mod tail_overlap;
mod update;

use std::{
    panic::{self, AssertUnwindSafe},
    time::Instant,
};

use annulus_core::{
    Backend, BackwardInputs, Batch, Error, Gradients, Inputs, Layout, Order, Outputs, RankShard,
    Result, Route, Runs, Schedule, Spec, Transport, Work,
};

use crate::{agreement, span::span};
use buffers::Buffers;
use plan::{Agreed, RingPlan};
use planning::Planned;

/// Times and bytes of one pass on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Report {
    /// Wall-clock time of the call.
    pub seconds: f64,
    /// Exposed communication: time in which this rank waited for others.
    pub waiting_seconds: f64,
    /// Payload bytes that this rank sent, counted at the transport.
    pub bytes_sent: u64,
    /// Payload bytes that this rank sends by the schedule.
    pub bytes_predicted: u64,
}

impl Report {
    /// Adds a later part of the same pass.
    fn followed_by(self, next: Self) -> Self {
        Self {
            waiting_seconds: self.waiting_seconds + next.waiting_seconds,
            bytes_predicted: self.bytes_predicted + next.bytes_predicted,
            ..self
        }
    }
}

/// One rank of a ring: a plan that is made once and used for many forward and backward passes.
///
/// Every method that takes `&mut self` is collective: all ranks call it in the same order. It succeeds on all ranks or fails on all.
pub struct Ring<B: Backend> {
    backend: B,
    transport: Box<dyn Transport<B::Space>>,
    agreed: Agreed,
    rank: usize,
    ranks: usize,
    /// Index of this rank on the ring.
    ring_index: usize,
    plan: RingPlan,
    shard: RankShard,
    workspace: B::Workspace,
    buffers: Buffers<B::Space>,
    next_tag: u64,
    next_round: u64,
    /// Error that ended the plan.
    poisoned: Option<String>,
    /// True if a backward pass sums dsinks and a shared dbias over ranks.
    reduces: bool,
}

/// Options of a [`Ring`] besides the spec.
#[derive(Debug, Clone, Default)]
pub struct RingOptions {
    /// The layout, or `None` to choose one from the mask.
    pub layout: Option<Layout>,
    /// The route, or `None` to choose one from the mask.
    pub route: Option<Route>,
    /// True to plan for backward passes too.
    pub backward: bool,
    /// True to leave the sums over ranks of dsinks, and of dbias broadcast over queries, to the
    /// caller: every rank then returns its own part.
    pub local_gradients: bool,
}

impl<B: Backend> Ring<B> {
    /// Makes a plan. Agrees with every rank on every field first, so that nothing differs by accident; an error in making this rank's `spec`
    /// enters the agreement too, so that the other ranks do not wait for it.
    ///
    /// # Ordering
    /// Collective over the transport's ranks.
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::Unsupported`] here and [`Error::Refused`] on the other ranks; [`Error::RankMismatch`] on all
    /// ranks; [`Error::OutOfMemory`].
    pub fn new(
        backend: B,
        mut transport: Box<dyn Transport<B::Space>>,
        spec: Result<Spec>,
        options: RingOptions,
    ) -> Result<Self> {
        let rank = transport.control().rank();
        let ranks = transport.control().ranks();
        let reduces = spec.as_ref().is_ok_and(|spec| reduce::is_needed(spec, &options, ranks));
        let planned = caught(|| Planned::new(&backend, transport.as_mut(), spec, &options));
        let Planned { agreed, plan, shard, workspace, buffers } = planned.inspect_err(|error| {
            if error.is_fatal() {
                transport.control().abort(error);
            }
        })?;
        Ok(Self {
            backend,
            transport,
            ring_index: agreed.order.ring_index(rank),
            agreed,
            rank,
            ranks,
            plan,
            shard,
            workspace,
            buffers,
            next_tag: 1,
            next_round: 2,
            poisoned: None,
            reduces,
        })
    }

    /// Adapts the plan to a new batch: segment ids, positions, dense mask, packed lengths of this rank's rows.
    ///
    /// # Ordering
    /// Collective. Ranks exchange their rows' ids and positions as runs; the layout and the route stay.
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::OutOfMemory`] here and [`Error::Refused`] elsewhere,
    /// [`Error::RankMismatch`]: the old batch stays in force on all ranks.
    /// As [`Ring::forward`] if communication fails, or if the old batch cannot be restored.
    pub fn update(&mut self, batch: &Batch) -> Result<()> {
        self.alive()?;
        let result = caught(|| self.try_update(batch));
        if let Err(error) = &result
            && error.is_fatal()
        {
            self.transport.control().abort(error);
        }
        self.remember(result)
    }

    /// Computes out and lse of this rank's queries over all keys.
    ///
    /// # Shapes
    /// As [`Inputs`] and [`Outputs`] say, with this rank's rows.
    /// # Ordering
    /// Collective.
    /// # Errors
    /// [`Error::InvalidArgument`] here and [`Error::Refused`] elsewhere, [`Error::RankMismatch`]: nothing was written, the plan lives.
    /// [`Error::Comm`], [`Error::Timeout`], [`Error::PeerLost`], [`Error::Aborted`], [`Error::Device`]: the plan is dead.
    pub fn forward(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        outputs: &mut Outputs<'_, B::Space>,
    ) -> Result<Report> {
        let shapes = check::Shapes::of(&self.shard);
        let checked = shapes.inputs(inputs).and_then(|()| shapes.outputs(outputs));
        self.call("forward", checked, |ring, first_tag| {
            ring.forward_loop(inputs, outputs, first_tag)
        })
    }

    /// Computes the gradients of this rank's rows.
    ///
    /// dsinks, and dbias of a bias that is broadcast over queries, are summed over ranks, unless
    /// [`RingOptions::local_gradients`] is set.
    ///
    /// # Shapes
    /// [`BackwardInputs`] and [`Gradients`], with this rank's rows.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::forward`]; [`Error::InvalidArgument`] also if the plan is forward only.
    pub fn backward(
        &mut self,
        inputs: &BackwardInputs<'_, B::Space>,
        gradients: &mut Gradients<'_, B::Space>,
    ) -> Result<Report> {
        let shapes = check::Shapes::of(&self.shard);
        let checked = if self.agreed.backward {
            shapes.backward_inputs(inputs).and_then(|()| shapes.gradients(gradients))
        } else {
            let (got, want) = ("a plan made for forward only", "a plan made with backward");
            Err(Error::invalid("backward", got, want))
        };
        self.call("backward", checked, |ring, first_tag| {
            let report = ring.backward_loop(inputs, gradients, first_tag)?;
            ring.reduce_gradients(gradients)?;
            Ok(report)
        })
    }

    /// Takes part in the call that the other ranks make, as a rank that cannot make it, for want of
    /// memory for what the call is given. Gives back why: the other ranks' error is
    /// [`Error::Refused`], nothing is done, and the plan lives.
    ///
    /// # Ordering
    /// Collective, in place of [`Ring::forward`] or [`Ring::backward`].
    pub fn refuse(&mut self, why: Error) -> Error {
        if let Err(poisoned) = self.alive() {
            return poisoned;
        }
        let round = self.round();
        let agreed = agreement::agree(self.transport.as_mut(), round, Err(why.clone()));
        self.remember(agreed).err().unwrap_or(why)
    }

    /// This rank.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// What is computed.
    pub fn spec(&self) -> &Spec {
        &self.agreed.spec
    }

    /// Layout: assignment of rows to ranks.
    pub const fn layout(&self) -> &Layout {
        &self.agreed.layout
    }

    /// Route of the blocks.
    pub const fn route(&self) -> Route {
        self.agreed.route
    }

    /// Rank of each ring index. Layout, schedule and work count ring indices, messages name ranks.
    /// The two differ only where ranks of several nodes alternate.
    pub const fn order(&self) -> &Order {
        &self.agreed.order
    }

    /// Global query rows of this rank, in the order of its tensors.
    pub fn q_rows(&self) -> &Runs {
        &self.plan.shards.q[self.ring_index].rows
    }

    /// Global key rows of this rank, in the order of its tensors.
    pub fn kv_rows(&self) -> &Runs {
        &self.plan.shards.kv[self.ring_index].rows
    }

    /// Returns the bytes of this rank's message buffers: blocks of keys, values and queries, and
    /// their gradients in flight. The backend's own memory is not in it.
    pub fn buffer_bytes(&self) -> u64 {
        self.buffers.bytes()
    }

    /// Derives the schedule of keys and values, by ring index. A plan keeps only its own rank's
    /// steps.
    pub fn schedule(&self) -> Schedule {
        plan::kv_schedule(&self.agreed, &self.plan.shards)
    }

    /// Counts the visible (query, key) pairs of every ring index, by the spec's mask and the
    /// batch's segment ids and positions.
    pub fn work(&self) -> Work {
        let spec = &self.agreed.spec;
        Work::of(spec.mask.as_ref(), spec.dims.q_heads, spec.dims.batch, &self.plan.shards)
    }

    /// Runs one pass: all ranks make the same call with valid arguments, or none starts; all
    /// succeed, or none does.
    fn call(
        &mut self,
        name: &str,
        checked: Result<()>,
        pass: impl FnOnce(&mut Self, u64) -> Result<Report>,
    ) -> Result<Report> {
        self.alive()?;
        span!("pass", name, rank = self.rank);
        let start = Instant::now();
        let round = self.round();
        let agreed = agreement::agree(
            self.transport.as_mut(),
            round,
            checked.map(|()| describe::call(name)),
        );
        self.remember(agreed)?;
        // a gather is exposed communication
        let mut gathering = start.elapsed();
        let (first_tag, sent_before) = (self.next_tag, self.transport.bytes_sent());
        // a two-pass backward circulates two kinds of blocks
        self.next_tag += 2 * block_parts::tags(self.ranks);
        let result = caught(|| pass(self, first_tag));
        if let Err(error) = &result {
            // its buffers are where the pass left them, so any error ends the plan
            self.poisoned = Some(error.to_string());
            self.transport.control().abort(error);
        }
        let (round, closing) = (self.round(), Instant::now());
        let result = result.and_then(|report| {
            agreement::close(self.transport.as_mut(), round, Ok(())).map(|()| report)
        });
        let mut report = self.remember(result)?;
        gathering += closing.elapsed();
        report.waiting_seconds += gathering.as_secs_f64();
        report.seconds = start.elapsed().as_secs_f64();
        report.bytes_sent = self.transport.bytes_sent() - sent_before;
        Ok(report)
    }

    fn round(&mut self) -> u64 {
        self.next_round += 1;
        self.next_round - 1
    }

    fn alive(&self) -> Result<()> {
        self.poisoned.as_ref().map_or(Ok(()), |first| Err(Error::Poisoned { first: first.clone() }))
    }

    fn remember<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && error.is_fatal()
        {
            self.poisoned = Some(error.to_string());
        }
        result
    }
}

impl<B: Backend> std::fmt::Display for Ring<B> {
    /// Writes mask, ranks, layout, route, and what this rank receives and sends: `Causal { offset: 0
    /// }, 8 ranks, zigzag, RelayDown, 7 hops, 1.3 GiB sent forward, 2.6 GiB backward`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let program = &self.plan.program;
        let hops = program.steps.iter().filter(|step| !step.kv.receives.is_empty()).count();
        let forward = program::kv_bytes_sent(&program.steps);
        write!(
            f,
            "{:?}, {} ranks, {}, {:?}, {hops} hops, {} sent forward",
            self.spec().mask,
            self.ranks,
            self.layout().name(),
            self.route(),
            Bytes(forward),
        )?;
        if self.agreed.backward {
            let queries = program::kv_bytes_sent(&self.plan.query_steps);
            let backward = forward + program.gradient_bytes_sent() + queries;
            write!(f, ", {} backward", Bytes(backward))?;
        }
        Ok(())
    }
}

/// A number of bytes in the largest binary unit of which it has one.
struct Bytes(u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        match (self.0.max(1).ilog2() / 10) as usize {
            0 => write!(f, "{} B", self.0),
            unit => {
                write!(f, "{:.1} {}", self.0 as f64 / (1u64 << (10 * unit)) as f64, units[unit - 1])
            }
        }
    }
}

impl<B: Backend> std::fmt::Debug for Ring<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("layout", &self.layout().name())
            .field("route", &self.route())
            .finish_non_exhaustive()
    }
}

/// Runs `work` and turns a panic in it (a caller's mask or bias function may panic) into an error,
/// so that the other ranks do not wait for this one.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned());
        let message = message.unwrap_or_else(|| "no message".to_owned());
        Err(Error::internal(format!("panicked: {message}")))
    })
}
