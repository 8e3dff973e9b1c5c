//! The ring engine: one rank's share of attention whose keys and values travel.
//!
//! ```text
//!  rank r, step t           blocks                       gradients (backward)
//!  ───────────────          ──────                       ────────────────────
//!  post before(t)           block t+1 comes, block t goes
//!  tiles of block t         ← overlaps the transfers →   dq += …, fresh ← this rank's dk, dv of block t
//!  land                     wait for everything posted   travelling sum of block t has arrived: fresh += it
//!  post after(t)                                         fresh goes on to the next rank, or home from its last user
//!  after the last step
//!  late tiles of block 0    ← overlap the last gradients      (backward; see `split.rs`)
//! ```
//!
//! The accumulator stays unnormalised on the device from [`Backend::begin`] to [`Backend::finish`]. Nothing here knows what a tile
//! computes or how bytes move; the schedule says who sends what, and `flight.rs` is the only place that waits.
//!
//! # Source
//! Liu et al. 2023, Ring Attention with Blockwise Transformers, §3, without the last hop and with gradients that go straight home.

mod backward;
mod blocks;
mod buffers;
mod check;
mod describe;
mod flight;
mod forward;
mod legs;
pub(crate) mod parts;
mod shared;
mod split;
mod two_pass;

use std::{
    panic::{self, AssertUnwindSafe},
    sync::Arc,
    time::Instant,
};

use annulus_core::{
    Backend, Batch, Choice, Coordinates, Error, Gradients, Inputs, Layout, Local, Order, Outputs, Result, Route, Runs, Saved, Schedule,
    Shard, Side, Spec, Transport, Work,
};

use crate::agreement::{self, gather};
use buffers::Buffers;
use shared::Shared;

/// What one call did.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Report {
    /// Wall-clock time of the call.
    pub seconds: f64,
    /// Of which this rank waited for others.
    pub waiting_seconds: f64,
    /// Payload bytes that this rank sent, counted at the transport.
    pub bytes_sent: u64,
    /// Payload bytes that the schedule says it sends.
    pub bytes_predicted: u64,
}

/// One rank of a ring: a plan that is made once and used for many forward and backward passes.
///
/// Every method that takes `&mut self` is collective: all ranks call it in the same order. It succeeds on all ranks or fails on all.
pub struct Ring<B: Backend> {
    backend: B,
    transport: Box<dyn Transport<B::Space>>,
    spec: Arc<Spec>,
    layout: Layout,
    route: Route,
    order: Order,
    rank: usize,
    /// Where this rank stands on the ring.
    place: usize,
    ranks: usize,
    with_backward: bool,
    shared: Shared,
    local: Local,
    workspace: B::Workspace,
    buffers: Buffers<B::Space>,
    next_tag: u64,
    next_round: u64,
    poisoned: Option<String>,
    reduce_gradients: bool,
}

/// How a [`Ring`] is made, besides the spec.
#[derive(Debug, Clone, Default)]
pub struct RingOptions {
    /// The layout, or `None` to choose one from the mask.
    pub layout: Option<Layout>,
    /// The route, or `None` to choose one from the mask.
    pub route: Option<Route>,
    /// Whether backward passes will be asked for.
    pub backward: bool,
    /// Whether sums over ranks (dsinks, dbias broadcast over queries) are left to the caller: then every rank returns its local part.
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
    pub fn new(backend: B, mut transport: Box<dyn Transport<B::Space>>, spec: Result<Spec>, options: RingOptions) -> Result<Self> {
        let (rank, ranks) = (transport.control().rank(), transport.control().ranks());
        let checked = spec.and_then(|spec| {
            spec.validate()?;
            backend.supports(&spec)?;
            check::two_pass(&spec, ranks)?;
            options.layout.as_ref().map_or(Ok(()), |layout| layout.validate(spec.dims.q_len, spec.dims.kv_len, ranks))?;
            Ok(spec)
        });
        let placement = transport.control().placement().cloned();
        agreement::agree(
            transport.as_mut(),
            0,
            checked.as_ref().map_err(Error::clone).map(|spec| describe::plan(spec, &options, &backend.arithmetic(), placement.as_ref())),
        )?;
        let spec = checked?;

        let Choice { layout, route, order } = Choice::auto(&spec, ranks, options.layout.as_ref(), placement.as_ref());
        let route = options.route.unwrap_or(route);
        let (spec, place) = (Arc::new(spec), order.place(rank));
        let coordinates = Coordinates::plain(&spec.dims, spec.alignment, &layout, ranks);
        let shared = Shared::derive::<B::Space>(&spec, route, &order, place, coordinates, options.backward);
        let local = shared.local(&spec, None);
        let made = backend.workspace(&local, options.backward).and_then(|workspace| {
            let buffers = Buffers::allocate(&backend, &spec, &shared, &local, route, options.backward)?;
            Ok((workspace, buffers))
        });
        agreement::close(transport.as_mut(), 1, made.as_ref().map_err(Error::clone).map(|_| ()))?;
        let (workspace, buffers) = made?;
        Ok(Self {
            backend,
            transport,
            spec,
            layout,
            route,
            order,
            rank,
            place,
            ranks,
            with_backward: options.backward,
            shared,
            local,
            workspace,
            buffers,
            next_tag: 1,
            next_round: 2,
            poisoned: None,
            reduce_gradients: !options.local_gradients,
        })
    }

    /// Fits the plan to a new batch: segment ids, positions, dense mask, packed lengths of this rank's rows.
    ///
    /// # Ordering
    /// Collective. Ranks exchange their rows' ids and positions as runs; the layout and the route stay.
    /// # Errors
    /// [`Error::InvalidArgument`] here and [`Error::Refused`] elsewhere, [`Error::RankMismatch`]: the old batch stays in force.
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

    fn try_update(&mut self, batch: &Batch) -> Result<()> {
        let dims = self.spec.dims;
        let (q_rows, kv_rows) = (self.local.queries.len(), self.local.keys.len());
        let checked = self.spec.validate_batch(batch, q_rows, kv_rows).and_then(|()| {
            batch.validate_layout(&dims, &self.layout, self.place, self.ranks)?;
            check::two_pass_mask(&self.spec, batch, self.ranks)
        });
        let described = checked.as_ref().map_err(Clone::clone).map(|()| describe::batch(batch));
        let round = self.round();
        agreement::agree(self.transport.as_mut(), round, described)?;

        let shard = |side| Shard::local(&dims, self.spec.alignment, &self.layout, side, self.place, self.ranks, batch);
        let message = shared::encode_shards([Side::Q, Side::Kv].map(shard));
        let round = self.round();
        let coordinates = shared::decode_shards(&gather(self.transport.as_mut(), round, &message)?, &self.order)?;
        let shared = Shared::derive::<B::Space>(&self.spec, self.route, &self.order, self.place, coordinates, self.with_backward);
        let local = shared.local(&self.spec, batch.attention_mask.clone().map(Arc::new));
        let made = self.backend.update(&mut self.workspace, &local).and_then(|()| {
            if !self.buffers.fit(&self.spec, &shared, &local, self.route, self.with_backward) {
                self.buffers = Buffers::allocate(&self.backend, &self.spec, &shared, &local, self.route, self.with_backward)?;
            }
            Ok(())
        });
        let round = self.round();
        agreement::close(self.transport.as_mut(), round, made)?;
        self.shared = shared;
        self.local = local;
        Ok(())
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
    pub fn forward(&mut self, inputs: &Inputs<'_, B::Space>, outputs: &mut Outputs<'_, B::Space>) -> Result<Report> {
        let shapes = check::Shapes::of(&self.local);
        let checked = shapes.inputs(inputs).and_then(|()| shapes.outputs(outputs));
        self.call("forward", checked, |ring, first_tag| ring.forward_pass(inputs, outputs, first_tag))
    }

    /// Computes the gradients of this rank's rows.
    ///
    /// dbias and dsinks are this rank's parts; [`Ring::sum_over_ranks`] adds parts up.
    ///
    /// # Shapes
    /// As [`Inputs`], [`Saved`] and [`Gradients`] say, with this rank's rows.
    /// # Ordering
    /// Collective.
    /// # Errors
    /// As [`Ring::forward`]; [`Error::InvalidArgument`] also if the plan was made without backward.
    pub fn backward(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        saved: &Saved<'_, B::Space>,
        gradients: &mut Gradients<'_, B::Space>,
    ) -> Result<Report> {
        let shapes = check::Shapes::of(&self.local);
        let checked = if self.with_backward {
            shapes.inputs(inputs).and_then(|()| shapes.saved(saved)).and_then(|()| shapes.gradients(gradients))
        } else {
            Err(Error::invalid("backward", "a plan made for forward only", "a plan made with backward"))
        };
        self.call("backward", checked, |ring, first_tag| ring.backward_pass(inputs, saved, gradients, first_tag))
    }

    /// Adds up `part` over all ranks, in the order of their places, so that every rank has the same bits.
    ///
    /// # Ordering
    /// Collective.
    /// # Errors
    /// As [`Ring::forward`].
    pub fn sum_over_ranks(&mut self, part: &mut [f64]) -> Result<()> {
        self.alive()?;
        if self.ranks == 1 {
            return Ok(());
        }
        let round = self.round();
        let bytes: Vec<u8> = part.iter().flat_map(|number| number.to_le_bytes()).collect();
        let result = gather(self.transport.as_mut(), round, &bytes).and_then(|all| {
            part.fill(0.0);
            for (&peer, bytes) in self.order.ranks().iter().zip(self.order.by_place(all)) {
                if bytes.len() != part.len() * 8 {
                    return Err(Error::Comm { peer, step: 0, what: format!("{} numbers to add up, want {}", bytes.len() / 8, part.len()) });
                }
                for (sum, bytes) in part.iter_mut().zip(bytes.chunks_exact(8)) {
                    *sum += bytes.try_into().map_or(f64::NAN, f64::from_le_bytes);
                }
            }
            Ok(())
        });
        self.remember(result)
    }

    /// This rank.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// All ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// What is computed.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// How rows are dealt to ranks.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How blocks find their users.
    pub const fn route(&self) -> Route {
        self.route
    }

    /// Which rank stands where on the ring. Shards of the layout, the schedule and the work go by places, messages by ranks; only where ranks
    /// of several nodes take turns are the two different numbers.
    pub const fn order(&self) -> &Order {
        &self.order
    }

    /// The global query rows of this rank, in the order in which it gives and gets them.
    pub fn q_rows(&self) -> &Runs {
        &self.shared.coordinates.q[self.place].rows
    }

    /// The global key rows of this rank, in the order in which it gives and gets them.
    pub fn kv_rows(&self) -> &Runs {
        &self.shared.coordinates.kv[self.place].rows
    }

    /// The schedule of keys and values, by places, made anew: a plan keeps only its own rank's.
    pub fn schedule(&self) -> Schedule {
        shared::schedule(&self.spec, self.route, &self.shared.coordinates, self.with_backward)
    }

    /// Visible (query, key) pairs of every place, by the spec's mask and the batch's segment ids and positions.
    pub fn work(&self) -> Work {
        Work::of(self.spec.mask.as_ref(), self.spec.dims.q_heads, self.spec.dims.batch, &self.shared.coordinates)
    }

    /// Whether dsinks and dbias are to be summed over ranks before they are returned.
    pub const fn reduces_gradients(&self) -> bool {
        self.reduce_gradients
    }

    /// One pass: all ranks make the same call with arguments that are right, or nobody starts; all succeed, or nobody does.
    fn call(&mut self, name: &str, checked: Result<()>, pass: impl FnOnce(&mut Self, u64) -> Result<Report>) -> Result<Report> {
        self.alive()?;
        let start = Instant::now();
        let round = self.round();
        let agreed = agreement::agree(self.transport.as_mut(), round, checked.map(|()| describe::call(name)));
        self.remember(agreed)?;
        // a gather is nothing but waiting for the others
        let mut gathering = start.elapsed();
        let (first_tag, sent_before) = (self.next_tag, self.transport.bytes_sent());
        // two journeys at most
        self.next_tag += 2 * parts::tags(self.ranks);
        let result = caught(|| pass(self, first_tag));
        if let Err(error) = &result {
            // its buffers are wherever the pass left them, so whatever broke it ends the plan
            self.poisoned = Some(error.to_string());
            self.transport.control().abort(error);
        }
        let (round, closing) = (self.round(), Instant::now());
        let result = result.and_then(|report| agreement::close(self.transport.as_mut(), round, Ok(())).map(|()| report));
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

impl<B: Backend> std::fmt::Debug for Ring<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("layout", &self.layout.name())
            .field("route", &self.route)
            .field("backend", &self.backend.name())
            .finish_non_exhaustive()
    }
}

/// Runs `work`; a panic in it (a caller's mask or bias function may do so) becomes an error, so that the other ranks hear of it.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
        Err(Error::Device { what: format!("panicked: {}", said.unwrap_or_else(|| "without a word".to_owned())) })
    })
}
