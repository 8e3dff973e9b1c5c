//! Rings with a part removed, so that the rest can be timed: tiles that compute nothing or never
//! tick, and a transport that sends nothing.

use std::{
    ops::ControlFlow,
    thread,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Backend, BackwardInputs, BackwardMode, BackwardPass, Block, Control, ForwardPass,
    Gradients, Host, HostBuffer, HostView, HostViewMut, Incoming, Inputs, MessageHeader, Outgoing,
    Outputs, Passes, RangePairs, RankShard, Reduction, Result, RowSet, Tick, Transport, Workspace,
};
use annulus_cpu::Cpu;

/// The work of the tiles of a timed ring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Tiles {
    /// The CPU backend's.
    Real,
    /// A wait without a core, as if a device computed: this many seconds for each key of a block in
    /// forward, 2.5 times as many in backward.
    Paced(f64),
    /// None.
    Absent,
}

/// The execution of the tiles of a timed ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    pub(crate) tiles: Tiles,
    /// True if the tiles call the ring's tick.
    pub(crate) ticks: bool,
}

/// Interval of the ticks of a paced tile: the least interval of the CPU's tiles.
const TICK_EVERY: Duration = Duration::from_micros(200);

impl Pace {
    /// Does `work`, or waits instead, with the ring's tick or one that does nothing.
    fn run(
        &self,
        block: &Block<'_, Host>,
        products: f64,
        tick: Tick<'_>,
        work: impl FnOnce(Tick<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut none = || ControlFlow::Continue(());
        let tick = if self.ticks { tick } else { &mut none };
        match self.tiles {
            Tiles::Real => work(tick),
            Tiles::Paced(seconds) => {
                let start = Instant::now();
                let whole = Duration::from_secs_f64(seconds * products * block.rows.len() as f64);
                while let Some(left) = whole.checked_sub(start.elapsed())
                    && tick().is_continue()
                {
                    thread::sleep(left.min(TICK_EVERY));
                }
                Ok(())
            }
            Tiles::Absent => Ok(()),
        }
    }
}

/// A transport without messages: a send ends at once, and a receive arrives at once with the bytes
/// that its buffer had. All-gathers use the inner transport.
pub(crate) struct NoMessages<T> {
    inner: T,
    arrived: Vec<Incoming<Host>>,
}

impl<T> NoMessages<T> {
    pub(crate) const fn new(inner: T) -> Self {
        Self { inner, arrived: Vec::new() }
    }
}

impl<T: Transport<Host>> Transport<Host> for NoMessages<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, _: &[Outgoing<'_, Host>], receives: &mut Vec<Incoming<Host>>) -> Result<()> {
        self.arrived.append(receives);
        Ok(())
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.inner.progress(if self.arrived.is_empty() { timeout } else { Duration::ZERO })
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let found = self.arrived.iter().position(|incoming| incoming.header == *header);
        Ok(found.map(|found| Arrived { buffer: self.arrived.swap_remove(found).buffer, ready: () }))
    }

    annulus_core::messages_are_blocks! {}

    fn pending(&self) -> bool {
        false
    }

    fn bytes_sent(&self) -> u64 {
        0
    }

    fn posts_ahead(&self) -> bool {
        false
    }

    fn runs_groups_in_order(&self) -> bool {
        false
    }
}

impl<T: Control> Control for NoMessages<T> {
    annulus_comm::forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement last_heard
        last_work
    }
}

/// Matrix products of a pass / 2, the products of a forward pass. A backward pass has 5.
pub(crate) const FORWARD: f64 = 1.0;
const BACKWARD: f64 = 2.5;

/// The CPU backend, whose tiles `calls` runs.
#[derive(Debug)]
pub(crate) struct WrappedTiles {
    pub(crate) inner: Cpu,
    pub(crate) calls: Pace,
}

/// Workspace of [`WrappedTiles`].
#[derive(Debug)]
pub(crate) struct WrappedWorkspace {
    inner: annulus_cpu::CpuWorkspace,
    calls: Pace,
}

/// A pass of [`WrappedTiles`].
pub(crate) struct WrappedPass<P> {
    inner: P,
    calls: Pace,
}

impl Backend for WrappedTiles {
    type Space = Host;
    type Workspace = WrappedWorkspace;

    annulus_core::forward_backend! { capabilities allocate write_block }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<Self::Workspace> {
        let inner = self.inner.workspace(shard, passes)?;
        Ok(WrappedWorkspace { inner, calls: self.calls })
    }
}

impl Workspace for WrappedWorkspace {
    type Space = Host;
    type Forward<'p> = WrappedPass<annulus_cpu::CpuForward<'p>>;
    type Backward<'p> = WrappedPass<annulus_cpu::CpuBackward<'p>>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        self.inner.update(shard)?;
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<HostView<'p>>,
        tick: Tick<'_>,
    ) -> Result<Self::Forward<'p>> {
        Ok(WrappedPass { inner: self.inner.forward(inputs, tick)?, calls: self.calls })
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<HostView<'p>>,
        mode: BackwardMode,
        tick: Tick<'_>,
    ) -> Result<Self::Backward<'p>> {
        Ok(WrappedPass { inner: self.inner.backward(inputs, mode, tick)?, calls: self.calls })
    }
}

impl<P: ForwardPass<Host>> ForwardPass<Host> for WrappedPass<P> {
    fn local_kv(&mut self, into: &mut HostBuffer, sent: &RowSet) -> Result<()> {
        self.inner.local_kv(into, sent)
    }

    fn attend(&mut self, kv: &Block<'_, Host>, tick: Tick<'_>) -> Result<()> {
        let Self { inner, calls } = self;
        calls.run(kv, FORWARD, tick, |tick| inner.attend(kv, tick))
    }

    fn attend_last(
        &mut self,
        kv: &Block<'_, Host>,
        outputs: &mut Outputs<HostViewMut<'_>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let Self { inner, calls } = self;
        calls.run(kv, FORWARD, tick, |tick| inner.attend_last(kv, outputs, tick))
    }

    fn finish(self, outputs: &mut Outputs<HostViewMut<'_>>, tick: Tick<'_>) -> Result<()> {
        self.inner.finish(outputs, tick)
    }
}

impl<P: BackwardPass<Host>> BackwardPass<Host> for WrappedPass<P> {
    fn local_kv(&mut self, into: &mut HostBuffer, sent: &RowSet) -> Result<()> {
        self.inner.local_kv(into, sent)
    }

    fn local_queries(&mut self, into: &mut HostBuffer) -> Result<()> {
        self.inner.local_queries(into)
    }

    fn attend_kv(
        &mut self,
        kv: &Block<'_, Host>,
        dkv: Option<&mut HostBuffer>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let products = if dkv.is_some() { BACKWARD } else { BACKWARD / 2.0 };
        let Self { inner, calls } = self;
        calls.run(kv, products, tick, |tick| inner.attend_kv(kv, dkv, tick))
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, Host>,
        dkv: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        let Self { inner, calls } = self;
        calls.run(queries, BACKWARD / 2.0, tick, |tick| inner.attend_queries(queries, dkv, tick))
    }

    fn reduce(
        &mut self,
        into: &mut HostBuffer,
        from: &HostBuffer,
        ready: &(),
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<()> {
        self.inner.reduce(into, from, ready, pairs, reduction)
    }

    fn finish(
        self,
        dkv: &HostBuffer,
        gradients: &mut Gradients<HostViewMut<'_>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.inner.finish(dkv, gradients, tick)
    }
}
