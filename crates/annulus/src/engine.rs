//! The engine of one rank: a ring, or a grid of heads × queries × keys. [`RankEngine`] hides the
//! backend, so that a plan has the same type on each.
//!
//! | engine | strategies | tensors |
//! |---|---|---|
//! | [`Ring`] | the ring | in host memory, or in the memory of the backend |
//! | [`HeadsRing`] | grids | in host memory |
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
    fn work(&self) -> (Work, usize);
    fn bytes_predicted(&self, pass: PassKind) -> u64;
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
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<ViewMut<'_, S>>,
    ) -> Result<Report>;
    fn double_backward(
        &mut self,
        inputs: TangentInputs<View<'_, S>>,
        list_bias: Option<&[f64]>,
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

impl<S: Space, B: Backend> RankEngine<S> for Ring<B>
where
    B::Space: for<'a> Space<View<'a> = S::View<'a>, ViewMut<'a> = S::ViewMut<'a>>,
{
    fn facts(&self) -> RankFacts<'_> {
        facts_of_ring(self)
    }

    fn figures(&self) -> RankFigures {
        figures_of_ring(self)
    }

    fn schedule(&self) -> Schedule {
        self.schedule()
    }

    fn list_bias_gradient(&self) -> Option<Vec<f64>> {
        self.list_bias_gradient()
    }

    fn work(&self) -> (Work, usize) {
        (self.work(), facts_of_ring(self).ring_index)
    }

    fn bytes_predicted(&self, pass: PassKind) -> u64 {
        self.bytes_predicted(pass)
    }

    fn on_step(&mut self, hook: StepHook) {
        self.on_step(hook);
    }

    fn update(&mut self, batch: &Batch) -> Result<()> {
        self.update(batch)
    }

    fn forward(
        &mut self,
        inputs: Inputs<View<'_, S>>,
        outputs: &mut Outputs<ViewMut<'_, S>>,
    ) -> Result<Report> {
        self.forward(&inputs, outputs)
    }

    fn backward(
        &mut self,
        inputs: BackwardInputs<View<'_, S>>,
        gradients: &mut Gradients<ViewMut<'_, S>>,
    ) -> Result<Report> {
        self.backward(&inputs, gradients)
    }

    fn jvp(
        &mut self,
        inputs: TangentInputs<View<'_, S>>,
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<ViewMut<'_, S>>,
    ) -> Result<Report> {
        self.jvp(&inputs, list_bias, outputs)
    }

    fn double_backward(
        &mut self,
        inputs: TangentInputs<View<'_, S>>,
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<ViewMut<'_, S>>,
        gradients: &mut Gradients<ViewMut<'_, S>>,
    ) -> Result<Report> {
        self.double_backward(&inputs, list_bias, outputs, gradients)
    }

    fn refuse(&mut self, why: Error) -> Error {
        self.refuse(why)
    }
}

impl<B: Backend<Space: HostTensors>> RankEngine<Host> for HeadsRing<B> {
    /// Properties that a grid does not have itself are those of its inner ring.
    fn facts(&self) -> RankFacts<'_> {
        RankFacts {
            rank: self.rank(),
            ranks: self.ranks(),
            spec: self.spec(),
            layout: self.layout(),
            route: self.route(),
            strategy: self.strategy(),
            any_thread: self.any_thread(),
            has_out_residual: self.has_out_residual(),
            ring_index: self.ring_index(),
            q_rows: self.q_rows(),
            kv_rows: self.kv_rows(),
            ..facts_of_ring(self.ring())
        }
    }

    fn figures(&self) -> RankFigures {
        RankFigures { buffer_bytes: self.buffer_bytes(), ..figures_of_ring(self.ring()) }
    }

    fn schedule(&self) -> Schedule {
        self.ring().schedule()
    }

    fn list_bias_gradient(&self) -> Option<Vec<f64>> {
        // it has refused the lists
        None
    }

    fn work(&self) -> (Work, usize) {
        (self.ring().work(), self.grid().group(self.ring_index()))
    }

    fn bytes_predicted(&self, pass: PassKind) -> u64 {
        self.bytes_predicted(pass)
    }

    fn on_step(&mut self, hook: StepHook) {
        self.on_step(hook);
    }

    fn update(&mut self, batch: &Batch) -> Result<()> {
        self.update(batch)
    }

    fn forward(
        &mut self,
        inputs: Inputs<HostView<'_>>,
        outputs: &mut Outputs<HostViewMut<'_>>,
    ) -> Result<Report> {
        self.forward(&inputs, outputs)
    }

    fn backward(
        &mut self,
        inputs: BackwardInputs<HostView<'_>>,
        gradients: &mut Gradients<HostViewMut<'_>>,
    ) -> Result<Report> {
        self.backward(&inputs, gradients)
    }

    fn jvp(
        &mut self,
        inputs: TangentInputs<HostView<'_>>,
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<HostViewMut<'_>>,
    ) -> Result<Report> {
        self.jvp(&inputs, list_bias, outputs)
    }

    fn double_backward(
        &mut self,
        inputs: TangentInputs<HostView<'_>>,
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<HostViewMut<'_>>,
        gradients: &mut Gradients<HostViewMut<'_>>,
    ) -> Result<Report> {
        self.double_backward(&inputs, list_bias, outputs, gradients)
    }

    fn refuse(&mut self, why: Error) -> Error {
        self.refuse(why)
    }
}

/// An engine, and its strategy: the one that was given or, of [`Strategy::Auto`], chosen.
pub(crate) type Engine<S> = (Strategy, Box<dyn RankEngine<S>>);

/// Makes the engine of tensors in the memory of the backend.
pub(crate) fn on_device<B: Backend>(
    backend: B,
    transport: Box<dyn Transport<B::Space>>,
    spec: Result<Spec>,
    options: RingOptions,
    division: &Division,
) -> Result<Engine<B::Space>> {
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
    Ok((strategy, Box::new(ring.map_err(|error| of_strategy(error, division))?)))
}

/// Makes the engine of tensors in host memory.
pub(crate) fn on_host<B: Backend<Space: HostTensors>>(
    backend: B,
    transport: Box<dyn Transport<B::Space>>,
    spec: Result<Spec>,
    options: RingOptions,
    division: &Division,
) -> Result<Engine<Host>> {
    let chosen = match division.given_strategy() {
        Strategy::Auto => choose(&backend, transport.as_ref(), &spec, &options, division),
        fixed => Ok((fixed, None)),
    };
    // an error enters the agreement of the ring
    let ((strategy, route), spec) = match (chosen, spec) {
        (Err(error), Ok(_)) => (RING, Err(error)),
        (chosen, spec) => (chosen.unwrap_or(RING), spec),
    };
    // the route of a strategy that is named is among the options
    let options = match route {
        Some(_) => RingOptions {
            route,
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
    let engine: Box<dyn RankEngine<Host>> = if is_ring {
        let ring = Ring::new(backend, transport, spec, options);
        Box::new(ring.map_err(|error| of_strategy(error, division))?)
    } else {
        Box::new(HeadsRing::new(backend, transport, spec, options, strategy)?)
    };
    Ok((strategy, engine))
}

/// A strategy, and the route that was chosen with it.
type Chosen = (Strategy, Option<Route>);

const RING: Chosen = (Strategy::Ring, None);

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
    let Ok(spec) = spec else { return Ok(RING) };
    if ranks == 1 {
        return Ok(RING);
    }
    let (q_len, kv_len) = (spec.dims.q_len, spec.dims.kv_len);
    let layout = options.layout.as_ref();
    let layout_fits = layout.is_none_or(|layout| {
        let leaves = spec.leaf_rows.map(|rows| layout.validate_leaves(q_len, kv_len, rows));
        layout.validate(q_len, kv_len, ranks).is_ok() && leaves.is_none_or(|fits| fits.is_ok())
    });
    let (true, Ok(capabilities)) = (layout_fits, backend.capabilities(spec)) else {
        return Ok(RING);
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
    Ok(strategy.map_or(RING, |strategy| (strategy, strategy.route())))
}
