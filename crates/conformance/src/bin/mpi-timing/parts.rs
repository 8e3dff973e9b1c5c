//! A ring with something taken out of it, so that what is left can be timed: tiles that compute nothing or never tick, messages that never travel.

use std::{
    ops::{ControlFlow, Range},
    thread,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Backend, Block, Control, Error, Gradients, Hop, Host, HostBuffer, Incoming, Inputs, Local, Outgoing, Outputs, Placement,
    Result, Saved, Spec, Tick, Transport,
};
use annulus_cpu::Cpu;

/// What the tiles of a timed ring do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Tiles {
    /// Compute.
    Real,
    /// Take this many seconds for each key of a block in forward, 2.5 times as many in backward, and no core: as if a device did the work.
    Paced(f64),
    /// Nothing.
    Absent,
}

/// The CPU backend with such tiles.
#[derive(Debug)]
pub(crate) struct Timed {
    cpu: Cpu,
    tiles: Tiles,
    /// Whether they tick.
    ticks: bool,
}

/// Products of a pass over those of forward.
const FORWARD: f64 = 1.0;
const BACKWARD: f64 = 2.5;

/// How often a paced tile ticks: as often as the CPU's tiles do at most.
const BEAT: Duration = Duration::from_micros(200);

impl Timed {
    pub(crate) const fn new(cpu: Cpu, tiles: Tiles, ticks: bool) -> Self {
        Self { cpu, tiles, ticks }
    }

    /// Does `work`, or what stands for it, with the tick that tiles get.
    fn work(&self, block: &Block<'_, Host>, products: f64, tick: Tick<'_>, work: impl FnOnce(Tick<'_>) -> Result<()>) -> Result<()> {
        let mut none = || ControlFlow::Continue(());
        let tick = if self.ticks { tick } else { &mut none };
        match self.tiles {
            Tiles::Real => work(tick),
            Tiles::Paced(seconds) => {
                let (start, whole) = (Instant::now(), Duration::from_secs_f64(seconds * products * block.rows.len() as f64));
                while let Some(left) = whole.checked_sub(start.elapsed())
                    && tick().is_continue()
                {
                    thread::sleep(left.min(BEAT));
                }
                Ok(())
            }
            Tiles::Absent => Ok(()),
        }
    }
}

impl Backend for Timed {
    type Space = Host;
    type Workspace = <Cpu as Backend>::Workspace;

    fn name(&self) -> &'static str {
        self.cpu.name()
    }

    fn arithmetic(&self) -> String {
        self.cpu.arithmetic()
    }

    fn supports(&self, spec: &Spec) -> Result<()> {
        self.cpu.supports(spec)
    }

    fn allocate(&self, bytes: u64) -> Result<HostBuffer> {
        self.cpu.allocate(bytes)
    }

    fn workspace(&self, local: &Local, backward: bool) -> Result<Self::Workspace> {
        self.cpu.workspace(local, backward)
    }

    fn update(&self, workspace: &mut Self::Workspace, local: &Local) -> Result<()> {
        self.cpu.update(workspace, local)
    }

    fn pack(&self, workspace: &mut Self::Workspace, inputs: &Inputs<'_, Host>, into: &mut HostBuffer) -> Result<()> {
        self.cpu.pack(workspace, inputs, into)
    }

    fn begin(&self, workspace: &mut Self::Workspace, inputs: &Inputs<'_, Host>) -> Result<()> {
        self.cpu.begin(workspace, inputs)
    }

    fn attend(&self, workspace: &mut Self::Workspace, inputs: &Inputs<'_, Host>, block: &Block<'_, Host>, tick: Tick<'_>) -> Result<()> {
        self.work(block, FORWARD, tick, |tick| self.cpu.attend(workspace, inputs, block, tick))
    }

    fn finish(&self, workspace: &mut Self::Workspace, inputs: &Inputs<'_, Host>, outputs: &mut Outputs<'_, Host>) -> Result<()> {
        self.cpu.finish(workspace, inputs, outputs)
    }

    fn begin_backward(&self, workspace: &mut Self::Workspace, inputs: &Inputs<'_, Host>, saved: &Saved<'_, Host>) -> Result<()> {
        self.cpu.begin_backward(workspace, inputs, saved)
    }

    fn attend_queries(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Host>,
        saved: &Saved<'_, Host>,
        block: &Block<'_, Host>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.work(block, BACKWARD / 2.0, tick, |tick| self.cpu.attend_queries(workspace, inputs, saved, block, tick))
    }

    fn attend_keys(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Host>,
        saved: &Saved<'_, Host>,
        block: &Block<'_, Host>,
        fresh: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.work(block, BACKWARD / 2.0, tick, |tick| self.cpu.attend_keys(workspace, inputs, saved, block, fresh, tick))
    }

    fn attend_backward(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Host>,
        saved: &Saved<'_, Host>,
        block: &Block<'_, Host>,
        fresh: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.work(block, BACKWARD, tick, |tick| self.cpu.attend_backward(workspace, inputs, saved, block, fresh, tick))
    }

    fn pack_queries(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Host>,
        saved: &Saved<'_, Host>,
        into: &mut HostBuffer,
    ) -> Result<()> {
        self.cpu.pack_queries(workspace, inputs, saved, into)
    }

    fn attend_keys_home(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Host>,
        queries: &Block<'_, Host>,
        home: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.work(queries, BACKWARD / 2.0, tick, |tick| self.cpu.attend_keys_home(workspace, inputs, queries, home, tick))
    }

    fn combine(
        &self,
        workspace: &mut Self::Workspace,
        into: &mut HostBuffer,
        from: &HostBuffer,
        ready: &(),
        places: &[(Range<u64>, Range<u64>)],
        add: bool,
    ) -> Result<()> {
        self.cpu.combine(workspace, into, from, ready, places, add)
    }

    fn finish_backward(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Host>,
        home: &HostBuffer,
        gradients: &mut Gradients<'_, Host>,
    ) -> Result<()> {
        self.cpu.finish_backward(workspace, inputs, home, gradients)
    }
}

/// A transport whose blocks never travel: a send is gone at once, a receive arrives at once with whatever its buffer held. Gathers do travel.
pub(crate) struct Void<T> {
    inner: T,
    arrived: Vec<Incoming<Host>>,
}

impl<T> Void<T> {
    pub(crate) const fn new(inner: T) -> Self {
        Self { inner, arrived: Vec::new() }
    }
}

impl<T: Transport<Host>> Transport<Host> for Void<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, _: &[Outgoing<'_, Host>], receives: &mut Vec<Incoming<Host>>) -> Result<()> {
        self.arrived.append(receives);
        Ok(())
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.inner.progress(if self.arrived.is_empty() { patience } else { Duration::ZERO })
    }

    fn take(&mut self, hop: &Hop) -> Result<Option<Arrived<Host>>> {
        let place = self.arrived.iter().position(|incoming| incoming.hop == *hop);
        Ok(place.map(|place| Arrived { buffer: self.arrived.swap_remove(place).buffer, ready: () }))
    }

    fn pending(&self) -> bool {
        false
    }

    fn bytes_sent(&self) -> u64 {
        0
    }
}

impl<T: Control> Control for Void<T> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn offer(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.inner.offer(round, bytes)
    }

    fn collect(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.inner.collect(round)
    }

    fn missing(&self, round: u64) -> Vec<usize> {
        self.inner.missing(round)
    }

    fn abort(&mut self, error: &Error) {
        self.inner.abort(error);
    }

    fn beat(&mut self, working: bool) {
        self.inner.beat(working);
    }

    fn placement(&self) -> Option<&Placement> {
        self.inner.placement()
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.inner.last_heard(peer)
    }

    fn last_work(&self) -> Instant {
        self.inner.last_work()
    }
}
