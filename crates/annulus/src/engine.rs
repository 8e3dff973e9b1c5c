//! The engine of one rank: a ring, or a grid of heads × queries × keys. [`RankEngine`] hides the
//! backend, so that a plan has the same type on each.
//!
//! | engine | strategies | tensors |
//! |---|---|---|
//! | [`Engine`] | all | in host memory |
//! | [`DeviceRing`] | the ring | in the memory of the backend |
//!
//! Programs that use plans (the command, C, Python) are therefore compiled once, not once for each
//! backend. A pass makes one virtual call.

use std::{fmt, num::NonZeroUsize};

use annulus_comm::{
    heads_ring::HeadsRing,
    ring::{PassKind, Report, Ring, RingOptions, StepHook},
};
use annulus_core::{
    Backend, BackwardInputs, Batch, Error, Gradients, Host, HostTensors, HostView, HostViewMut,
    Inputs, Outputs, Result, Runs, Space, Spec, TangentInputs, TangentOutputs, Transport, View,
    ViewMut, Workspace,
};
use annulus_plan::{
    HeadGrid, Layout, Route, Schedule, Strategy, StrategyTraffic, TrafficOptions, Work,
};

use crate::Division;

/// One rank of a plan whose tensors are in the space `S`, on any backend. Methods are as those of
/// [`crate::Plan`].
pub(crate) trait RankEngine<S: Space>: fmt::Debug + fmt::Display + Send {
    fn facts(&self) -> RankFacts<'_>;
    fn figures(&self) -> RankFigures;
    fn schedule(&self) -> Schedule;
    fn list_bias_gradient(&self) -> Option<Vec<f64>>;
    fn set_list_bias_direction(&mut self, direction: Vec<f64>);
    fn work(&self) -> (Work, usize);
    fn bytes_predicted(&self, pass: PassKind) -> u64;
    /// Returns the strategy that was given or, of [`Strategy::Auto`], chosen.
    fn given_strategy(&self) -> Strategy;
    fn on_step(&mut self, hook: StepHook);
    fn update(&mut self, batch: &Batch) -> Result<()>;
    fn forward(
        &mut self,
        inputs: Inputs<View<'_, S>>,
        outputs: &mut Outputs<ViewMut<'_, S>>,
    ) -> Result<Report>;
    fn backward(
        &mut self,
        inputs: BackwardInputs<View<'_, S>>,
        gradients: &mut Gradients<ViewMut<'_, S>>,
    ) -> Result<Report>;
    fn jvp(
        &mut self,
        inputs: TangentInputs<View<'_, S>>,
        outputs: &mut TangentOutputs<ViewMut<'_, S>>,
    ) -> Result<Report>;
    fn double_backward(
        &mut self,
        inputs: TangentInputs<View<'_, S>>,
        outputs: &mut TangentOutputs<ViewMut<'_, S>>,
        gradients: &mut Gradients<ViewMut<'_, S>>,
    ) -> Result<Report>;
    fn refuse(&mut self, why: Error) -> Error;
}

/// Properties of a plan, named as the methods of [`crate::Plan`].
pub(crate) struct RankFacts<'a> {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) spec: &'a Spec,
    pub(crate) layout: &'a Layout,
    pub(crate) route: Route,
    pub(crate) strategy: Strategy,
    pub(crate) any_thread: bool,
    pub(crate) has_out_residual: bool,
    pub(crate) ring_index: usize,
    pub(crate) q_rows: &'a Runs,
    pub(crate) kv_rows: &'a Runs,
    pub(crate) numerics: &'a str,
}

/// Figures of a plan that are summed up on request, named as the methods of [`crate::Plan`].
pub(crate) struct RankFigures {
    pub(crate) buffer_bytes: u64,
    pub(crate) workspace_bytes: u64,
    pub(crate) leaf_bytes: u64,
    pub(crate) blocks_computed: [usize; 2],
}

fn facts_of_ring<B: Backend>(ring: &Ring<B>) -> RankFacts<'_> {
    RankFacts {
        rank: ring.rank(),
        ranks: ring.ranks(),
        spec: ring.spec(),
        layout: ring.layout(),
        route: ring.route(),
        strategy: Strategy::Ring,
        any_thread: ring.any_thread(),
        has_out_residual: ring.has_out_residual(),
        ring_index: ring.order().ring_index(ring.rank()),
        q_rows: ring.q_rows(),
        kv_rows: ring.kv_rows(),
        numerics: ring.numerics(),
    }
}

fn figures_of_ring<B: Backend>(ring: &Ring<B>) -> RankFigures {
    RankFigures {
        buffer_bytes: ring.buffer_bytes(),
        workspace_bytes: ring.workspace().bytes(),
        leaf_bytes: ring.leaf_bytes(),
        blocks_computed: ring.blocks_computed(),
    }
}

/// Returns the properties of a grid; those that it does not have itself are of its inner ring.
fn facts_of_grid<B: Backend<Space: HostTensors>>(grid: &HeadsRing<B>) -> RankFacts<'_> {
    RankFacts {
        rank: grid.rank(),
        ranks: grid.ranks(),
        spec: grid.spec(),
        layout: grid.layout(),
        route: grid.route(),
        strategy: grid.strategy(),
        any_thread: grid.any_thread(),
        has_out_residual: grid.has_out_residual(),
        ring_index: grid.ring_index(),
        q_rows: grid.q_rows(),
        kv_rows: grid.kv_rows(),
        ..facts_of_ring(grid.ring())
    }
}

/// A ring whose tensors are in the memory of its backend.
pub(crate) struct DeviceRing<B: Backend> {
    ring: Ring<B>,
    strategy: Strategy,
}

impl<B: Backend> DeviceRing<B> {
    /// Plans on this rank of `transport`. The only strategy is the ring.
    ///
    /// # Ordering
    /// Collective.
    pub(crate) fn new(
        backend: B,
        transport: Box<dyn Transport<B::Space>>,
        spec: Result<Spec>,
        options: RingOptions,
        division: &Division,
    ) -> Result<Self> {
        let strategy = division.given_strategy();
        let ranks = transport.ranks();
        let form = spec.and_then(|spec| {
            HeadGrid::of(&spec.dims, ranks, strategy)?;
            Ok((strategy.on_ranks(ranks), spec))
        });
        let spec = match form {
            Ok((Strategy::Ring | Strategy::Auto, spec)) => Ok(spec),
            Err(error) => Err(error),
            // it enters the agreement of the ring
            Ok(_) => {
                Err(Error::unsupported(format!("strategy {strategy}"), "tensors in device memory"))
            }
        };
        // there is no other to choose from
        let strategy = if strategy == Strategy::Auto { Strategy::Ring } else { strategy };
        let ring = Ring::new(backend, transport, spec, options);
        Ok(Self { ring: ring.map_err(|error| of_strategy(error, division))?, strategy })
    }
}

impl<B: Backend> fmt::Debug for DeviceRing<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.ring, f)
    }
}

impl<B: Backend> fmt::Display for DeviceRing<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.ring, f)
    }
}

impl<B: Backend> RankEngine<B::Space> for DeviceRing<B> {
    fn facts(&self) -> RankFacts<'_> {
        facts_of_ring(&self.ring)
    }

    fn figures(&self) -> RankFigures {
        figures_of_ring(&self.ring)
    }

    fn schedule(&self) -> Schedule {
        self.ring.schedule()
    }

    fn list_bias_gradient(&self) -> Option<Vec<f64>> {
        self.ring.list_bias_gradient()
    }

    fn set_list_bias_direction(&mut self, direction: Vec<f64>) {
        self.ring.set_list_bias_direction(direction);
    }

    fn work(&self) -> (Work, usize) {
        (self.ring.work(), self.facts().ring_index)
    }

    fn bytes_predicted(&self, pass: PassKind) -> u64 {
        self.ring.bytes_predicted(pass)
    }

    fn given_strategy(&self) -> Strategy {
        self.strategy
    }

    fn on_step(&mut self, hook: StepHook) {
        self.ring.on_step(hook);
    }

    fn update(&mut self, batch: &Batch) -> Result<()> {
        self.ring.update(batch)
    }

    fn forward(
        &mut self,
        inputs: Inputs<View<'_, B::Space>>,
        outputs: &mut Outputs<ViewMut<'_, B::Space>>,
    ) -> Result<Report> {
        self.ring.forward(&inputs, outputs)
    }

    fn backward(
        &mut self,
        inputs: BackwardInputs<View<'_, B::Space>>,
        gradients: &mut Gradients<ViewMut<'_, B::Space>>,
    ) -> Result<Report> {
        self.ring.backward(&inputs, gradients)
    }

    fn jvp(
        &mut self,
        inputs: TangentInputs<View<'_, B::Space>>,
        outputs: &mut TangentOutputs<ViewMut<'_, B::Space>>,
    ) -> Result<Report> {
        self.ring.jvp(&inputs, outputs)
    }

    fn double_backward(
        &mut self,
        inputs: TangentInputs<View<'_, B::Space>>,
        outputs: &mut TangentOutputs<ViewMut<'_, B::Space>>,
        gradients: &mut Gradients<ViewMut<'_, B::Space>>,
    ) -> Result<Report> {
        self.ring.double_backward(&inputs, outputs, gradients)
    }

    fn refuse(&mut self, why: Error) -> Error {
        self.ring.refuse(why)
    }
}

/// One rank of a plan under its strategy, of tensors in host memory.
pub(crate) struct Engine<B: Backend<Space: HostTensors>> {
    form: Form<B>,
    strategy: Strategy,
}

/// The strategy as a ring or a grid.
enum Form<B: Backend<Space: HostTensors>> {
    Ring(Box<Ring<B>>),
    HeadsRing(Box<HeadsRing<B>>),
}

/// Evaluates an expression for either form.
macro_rules! either {
    ($form:expr, $of:ident => $body:expr) => {
        match $form {
            Form::Ring($of) => $body,
            Form::HeadsRing($of) => $body,
        }
    };
}

impl<B: Backend<Space: HostTensors>> Engine<B> {
    /// Plans on this rank of `transport`.
    ///
    /// # Ordering
    /// Collective.
    pub(crate) fn new(
        backend: B,
        transport: Box<dyn Transport<B::Space>>,
        spec: Result<Spec>,
        options: RingOptions,
        division: &Division,
    ) -> Result<Self> {
        let chosen = match division.given_strategy() {
            Strategy::Auto => choose(&backend, transport.as_ref(), &spec, &options, division),
            fixed => Ok(Chosen { strategy: fixed, route: None }),
        };
        // an error enters the agreement of the ring
        let (chosen, spec) = match (chosen, spec) {
            (Err(error), Ok(_)) => (Chosen::RING, Err(error)),
            (chosen, spec) => (chosen.unwrap_or(Chosen::RING), spec),
        };
        let strategy = chosen.strategy;
        // the route of a strategy that is named is among the options
        let options = match chosen.route {
            Some(route) => RingOptions {
                route: Some(route),
                receive_ahead: options.receive_ahead.or(strategy.receive_ahead()),
                ..options
            },
            None => options,
        };
        let ranks = transport.ranks();
        let grid = spec.as_ref().map(|spec| HeadGrid::of(&spec.dims, ranks, strategy));
        // a grid of one member is a ring; a wrong one is refused by the other engine
        let is_ring = match grid {
            Ok(Ok(Some(grid))) => grid.members() == 1,
            Ok(Err(_)) => false,
            _ => strategy.on_ranks(ranks) == Strategy::Ring,
        };
        let form = if is_ring {
            let ring = Ring::new(backend, transport, spec, options);
            Form::Ring(Box::new(ring.map_err(|error| of_strategy(error, division))?))
        } else {
            let engine = HeadsRing::new(backend, transport, spec, options, strategy)?;
            Form::HeadsRing(Box::new(engine))
        };
        Ok(Self { form, strategy })
    }
}

impl<B: Backend<Space: HostTensors>> RankEngine<Host> for Engine<B> {
    fn facts(&self) -> RankFacts<'_> {
        match &self.form {
            Form::Ring(of) => facts_of_ring(of),
            Form::HeadsRing(of) => facts_of_grid(of),
        }
    }

    fn figures(&self) -> RankFigures {
        match &self.form {
            Form::Ring(of) => figures_of_ring(of),
            Form::HeadsRing(of) => {
                let buffer_bytes = of.buffer_bytes();
                RankFigures { buffer_bytes, ..figures_of_ring(of.ring()) }
            }
        }
    }

    fn list_bias_gradient(&self) -> Option<Vec<f64>> {
        match &self.form {
            Form::Ring(ring) => ring.list_bias_gradient(),
            // it has refused the lists
            Form::HeadsRing(_) => None,
        }
    }

    fn set_list_bias_direction(&mut self, direction: Vec<f64>) {
        if let Form::Ring(ring) = &mut self.form {
            ring.set_list_bias_direction(direction);
        }
    }

    fn schedule(&self) -> Schedule {
        match &self.form {
            Form::Ring(of) => of.schedule(),
            Form::HeadsRing(of) => of.ring().schedule(),
        }
    }

    fn work(&self) -> (Work, usize) {
        let index = self.facts().ring_index;
        match &self.form {
            Form::Ring(of) => (of.work(), index),
            Form::HeadsRing(of) => (of.ring().work(), of.grid().group(index)),
        }
    }

    fn bytes_predicted(&self, pass: PassKind) -> u64 {
        either!(&self.form, of => of.bytes_predicted(pass))
    }

    fn given_strategy(&self) -> Strategy {
        self.strategy
    }

    fn on_step(&mut self, hook: StepHook) {
        either!(&mut self.form, of => of.on_step(hook));
    }

    fn update(&mut self, batch: &Batch) -> Result<()> {
        either!(&mut self.form, of => of.update(batch))
    }

    fn forward(
        &mut self,
        inputs: Inputs<HostView<'_>>,
        outputs: &mut Outputs<HostViewMut<'_>>,
    ) -> Result<Report> {
        either!(&mut self.form, of => of.forward(&inputs, outputs))
    }

    fn backward(
        &mut self,
        inputs: BackwardInputs<HostView<'_>>,
        gradients: &mut Gradients<HostViewMut<'_>>,
    ) -> Result<Report> {
        either!(&mut self.form, of => of.backward(&inputs, gradients))
    }

    fn jvp(
        &mut self,
        inputs: TangentInputs<HostView<'_>>,
        outputs: &mut TangentOutputs<HostViewMut<'_>>,
    ) -> Result<Report> {
        either!(&mut self.form, of => of.jvp(&inputs, outputs))
    }

    fn double_backward(
        &mut self,
        inputs: TangentInputs<HostView<'_>>,
        outputs: &mut TangentOutputs<HostViewMut<'_>>,
        gradients: &mut Gradients<HostViewMut<'_>>,
    ) -> Result<Report> {
        either!(&mut self.form, of => of.double_backward(&inputs, outputs, gradients))
    }

    fn refuse(&mut self, why: Error) -> Error {
        either!(&mut self.form, of => of.refuse(why))
    }
}

impl<B: Backend<Space: HostTensors>> fmt::Debug for Engine<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        either!(&self.form, of => fmt::Debug::fmt(of, f))
    }
}

impl<B: Backend<Space: HostTensors>> fmt::Display for Engine<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        either!(&self.form, of => fmt::Display::fmt(of, f))
    }
}

/// A strategy, and its route if it was chosen for that.
struct Chosen {
    strategy: Strategy,
    route: Option<Route>,
}

impl Chosen {
    const RING: Self = Self { strategy: Strategy::Ring, route: None };
}

/// Names the strategy in the refusal of the route that is a part of it, unless the caller set the
/// route too.
fn of_strategy(error: Error, division: &Division) -> Error {
    let strategy = division.given_strategy();
    match error {
        Error::InvalidArgument { argument, want, .. }
            if argument == "route"
                && division.given_route().is_none()
                && strategy.route().is_some() =>
        {
            Error::invalid("strategy", strategy, want)
        }
        error => error,
    }
}

/// Returns the strategy with the least predicted time on a machine, or that sends the fewest bytes:
/// the ring if an argument is wrong, which the ring then reports. It depends on nothing that ranks
/// do not agree upon: the strategy itself is a field of the agreement.
fn choose<B: Backend>(
    backend: &B,
    transport: &dyn Transport<B::Space>,
    spec: &Result<Spec>,
    options: &RingOptions,
    division: &Division,
) -> Result<Chosen> {
    let ranks = transport.ranks();
    let Ok(spec) = spec else { return Ok(Chosen::RING) };
    if ranks == 1 {
        return Ok(Chosen::RING);
    }
    let (q_len, kv_len) = (spec.dims.q_len, spec.dims.kv_len);
    let layout = options.layout.as_ref();
    let layout_fits = layout.is_none_or(|layout| {
        let leaves = spec.leaf_rows.map(|rows| layout.validate_leaves(q_len, kv_len, rows));
        layout.validate(q_len, kv_len, ranks).is_ok() && leaves.is_none_or(|fits| fits.is_ok())
    });
    let (true, Ok(capabilities)) = (layout_fits, backend.capabilities(spec)) else {
        return Ok(Chosen::RING);
    };
    let batch = division.planned_batch(&spec.dims)?;
    let traffic = TrafficOptions {
        backward: options.backward,
        layout,
        route: division.given_route(),
        balanced_route: division.balanced_route(),
        placement: transport.placement(),
        kv_tile: capabilities.kv_tile.max(1),
        receive_ahead: options.receive_ahead.map_or(1, NonZeroUsize::get),
        batch: batch.as_deref(),
    };
    // not every backend computes partial results of key columns
    let admits = |grid: &HeadGrid| backend.capabilities(&grid.spec_of(spec, 0)).is_ok();
    let tick = &mut || ();
    let grids = HeadGrid::candidates(spec, ranks, options.backward).into_iter().filter(admits);
    let all = grids.map(|grid| StrategyTraffic::of(spec, grid, &traffic, tick));
    let mut all = all.collect::<Result<Vec<_>>>()?;
    let chosen = match &options.machine {
        Some(machine) => {
            all.extend(StrategyTraffic::of_routes(spec, ranks, &traffic, tick)?);
            machine.choose(&all, spec, &traffic, tick)?.0
        }
        None => StrategyTraffic::choose(&all, spec, &traffic, tick)?,
    };
    let strategy = all.get(chosen).map(|best| best.strategy);
    Ok(strategy.map_or(Chosen::RING, |strategy| Chosen { strategy, route: strategy.route() }))
}
