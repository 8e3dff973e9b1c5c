//! The engine of one rank: a ring, or a grid of heads × queries × keys.

use annulus_comm::{
    heads_ring::HeadsRing,
    ring::{PassKind, Report, Ring, RingOptions, StepHook},
};
use annulus_core::{
    Backend, BackwardInputs, Batch, Error, Gradients, HeadGrid, HostTensors, Inputs, Layout,
    Outputs, Result, Route, Runs, Space, Spec, Strategy, StrategyTraffic, TrafficOptions,
    Transport, Work,
};

/// One rank of a plan under its strategy.
#[derive(Debug)]
pub(crate) enum Engine<B: Backend<Space: HostTensors>> {
    Ring(Box<Ring<B>>),
    HeadsRing(Box<HeadsRing<B>>),
}

/// Evaluates an expression for either engine.
macro_rules! either {
    ($engine:expr, $of:ident => $body:expr) => {
        match $engine {
            Engine::Ring($of) => $body,
            Engine::HeadsRing($of) => $body,
        }
    };
}

impl<B: Backend<Space: HostTensors>> Engine<B> {
    /// Plans on this rank of `transport`.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::new`] and [`HeadsRing::new`].
    pub(crate) fn new(
        backend: B,
        transport: Box<dyn Transport<B::Space>>,
        spec: Result<Spec>,
        options: RingOptions,
        strategy: Strategy,
    ) -> Result<Self> {
        let chosen = match strategy {
            Strategy::Auto => choose(&backend, transport.as_ref(), &spec, &options),
            fixed => Ok(fixed),
        };
        // an error enters the agreement of the ring
        let (strategy, spec) = match (chosen, spec) {
            (Err(error), Ok(_)) => (Strategy::Ring, Err(error)),
            (chosen, spec) => (chosen.unwrap_or(Strategy::Ring), spec),
        };
        let ranks = transport.ranks();
        let grid = spec.as_ref().map(|spec| HeadGrid::of(&spec.dims, ranks, strategy));
        // a grid of one member is a ring; a wrong one is refused by the other engine
        let is_ring = match grid {
            Ok(Ok(Some(grid))) => grid.members() == 1,
            _ => strategy == Strategy::Ring,
        };
        Ok(if is_ring {
            Self::Ring(Box::new(Ring::new(backend, transport, spec, options)?))
        } else {
            let engine = HeadsRing::new(backend, transport, spec, options, strategy)?;
            Self::HeadsRing(Box::new(engine))
        })
    }

    pub(crate) fn on_step(&mut self, hook: StepHook) {
        either!(self, of => of.on_step(hook));
    }

    pub(crate) fn update(&mut self, batch: &Batch) -> Result<()> {
        either!(self, of => of.update(batch))
    }

    pub(crate) fn forward(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        outputs: &mut Outputs<'_, B::Space>,
    ) -> Result<Report> {
        either!(self, of => of.forward(inputs, outputs))
    }

    pub(crate) fn backward(
        &mut self,
        inputs: &BackwardInputs<'_, B::Space>,
        gradients: &mut Gradients<'_, B::Space>,
    ) -> Result<Report> {
        either!(self, of => of.backward(inputs, gradients))
    }

    pub(crate) fn refuse(&mut self, why: Error) -> Error {
        either!(self, of => of.refuse(why))
    }

    pub(crate) const fn rank(&self) -> usize {
        either!(self, of => of.rank())
    }

    pub(crate) const fn ranks(&self) -> usize {
        either!(self, of => of.ranks())
    }

    pub(crate) fn spec(&self) -> &Spec {
        either!(self, of => of.spec())
    }

    pub(crate) const fn layout(&self) -> &Layout {
        either!(self, of => of.layout())
    }

    pub(crate) const fn route(&self) -> Route {
        either!(self, of => of.route())
    }

    pub(crate) fn q_rows(&self) -> &Runs {
        either!(self, of => of.q_rows())
    }

    pub(crate) fn kv_rows(&self) -> &Runs {
        either!(self, of => of.kv_rows())
    }

    pub(crate) fn buffer_bytes(&self) -> u64 {
        either!(self, of => of.buffer_bytes())
    }

    pub(crate) fn bytes_predicted(&self, pass: PassKind) -> u64 {
        either!(self, of => of.bytes_predicted(pass))
    }

    pub(crate) const fn strategy(&self) -> Strategy {
        match self {
            Self::Ring(_) => Strategy::Ring,
            Self::HeadsRing(of) => of.strategy(),
        }
    }

    pub(crate) fn ring_index(&self) -> usize {
        match self {
            Self::Ring(ring) => ring.order().ring_index(ring.rank()),
            Self::HeadsRing(of) => of.ring_index(),
        }
    }

    /// Returns the visible pairs of the (query, key) pairs of each rank of this rank's ring, and
    /// its index there.
    pub(crate) fn work(&self) -> (Work, usize) {
        let index = match self {
            Self::Ring(_) => self.ring_index(),
            Self::HeadsRing(of) => of.grid().group(of.ring_index()),
        };
        (self.ring().work(), index)
    }

    pub(crate) const fn ring(&self) -> &Ring<B> {
        match self {
            Self::Ring(ring) => ring,
            Self::HeadsRing(of) => of.ring(),
        }
    }
}

impl<B: Backend<Space: HostTensors>> std::fmt::Display for Engine<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        either!(self, of => std::fmt::Display::fmt(of, f))
    }
}

/// Returns the strategy with the least predicted time on a machine, or that sends the fewest bytes:
/// the ring if an argument is wrong, which the ring then reports. It depends on nothing that ranks
/// do not agree upon: the strategy itself is a field of the agreement.
///
/// # Errors
/// As [`annulus_core::Machine::choose`].
fn choose<B: Backend>(
    backend: &B,
    transport: &dyn Transport<B::Space>,
    spec: &Result<Spec>,
    options: &RingOptions,
) -> Result<Strategy> {
    let ranks = transport.ranks();
    let Ok(spec) = spec else { return Ok(Strategy::Ring) };
    if !B::Space::HOST_BUFFERS || ranks == 1 {
        return Ok(Strategy::Ring);
    }
    let (q_len, kv_len) = (spec.dims.q_len, spec.dims.kv_len);
    let layout = options.layout.as_ref();
    let layout_fits = layout.is_none_or(|layout| {
        let leaves = spec.leaf_rows.map(|rows| layout.validate_leaves(q_len, kv_len, rows));
        layout.validate(q_len, kv_len, ranks).is_ok() && leaves.is_none_or(|fits| fits.is_ok())
    });
    let (true, Ok(capabilities)) = (layout_fits, backend.capabilities(spec)) else {
        return Ok(Strategy::Ring);
    };
    let traffic = TrafficOptions {
        backward: options.backward,
        layout,
        route: options.route,
        placement: transport.placement(),
        kv_tile: capabilities.kv_tile.max(1),
    };
    let all = StrategyTraffic::of_all(spec, ranks, &traffic, &mut || ());
    let chosen = match &options.machine {
        Some(machine) => all.get(machine.choose(&all, spec, &traffic, &mut || ())?.0),
        None => StrategyTraffic::cheapest(&all).ok(),
    };
    Ok(chosen.map_or(Strategy::Ring, |best| best.strategy))
}
