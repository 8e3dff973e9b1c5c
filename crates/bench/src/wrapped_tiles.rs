//! The CPU backend with a wrapper around the calls that compute tiles.

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, ForwardPass, Gradients, Host,
    HostBuffer, Inputs, Outputs, Passes, RangePairs, RankShard, Reduction, Result, RowSet, Tick,
    Workspace,
};
use annulus_cpu::Cpu;

/// Matrix products of a pass / 2, the products of a forward pass. A backward pass has 5.
pub(crate) const FORWARD: f64 = 1.0;
const BACKWARD: f64 = 2.5;

/// Runs the tiles of a block.
pub(crate) trait TileCalls: Clone + Send + 'static {
    /// Notes the shard of a workspace, for its current batch.
    fn adopt(&self, _shard: &RankShard) {}

    /// Calls `work` on `block`, or replaces it. `products` are the matrix products, in units of a
    /// forward pass.
    fn run(
        &self,
        block: &Block<'_, Host>,
        products: f64,
        tick: Tick<'_>,
        work: impl FnOnce(Tick<'_>) -> Result<()>,
    ) -> Result<()>;
}

/// The CPU backend, whose tiles `calls` runs.
#[derive(Debug)]
pub(crate) struct WrappedTiles<C> {
    pub(crate) inner: Cpu,
    pub(crate) calls: C,
}

/// Workspace of [`WrappedTiles`].
#[derive(Debug)]
pub(crate) struct WrappedWorkspace<C> {
    inner: annulus_cpu::CpuWorkspace,
    calls: C,
}

/// A pass of [`WrappedTiles`].
pub(crate) struct WrappedPass<P, C> {
    inner: P,
    calls: C,
}

impl<C: TileCalls> Backend for WrappedTiles<C> {
    type Space = Host;
    type Workspace = WrappedWorkspace<C>;

    annulus_core::forward_backend! { capabilities allocate write_block }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<Self::Workspace> {
        let inner = self.inner.workspace(shard, passes)?;
        self.calls.adopt(shard);
        Ok(WrappedWorkspace { inner, calls: self.calls.clone() })
    }
}

impl<C: TileCalls> Workspace for WrappedWorkspace<C> {
    type Space = Host;
    type Forward<'p> = WrappedPass<annulus_cpu::CpuForward<'p>, C>;
    type Backward<'p> = WrappedPass<annulus_cpu::CpuBackward<'p>, C>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        self.inner.update(shard)?;
        self.calls.adopt(shard);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<'p, Host>,
        tick: Tick<'_>,
    ) -> Result<Self::Forward<'p>> {
        Ok(WrappedPass { inner: self.inner.forward(inputs, tick)?, calls: self.calls.clone() })
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<'p, Host>,
        mode: BackwardMode,
        tick: Tick<'_>,
    ) -> Result<Self::Backward<'p>> {
        Ok(WrappedPass {
            inner: self.inner.backward(inputs, mode, tick)?,
            calls: self.calls.clone(),
        })
    }
}

impl<P: ForwardPass<Host>, C: TileCalls> ForwardPass<Host> for WrappedPass<P, C> {
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
        outputs: &mut Outputs<'_, Host>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let Self { inner, calls } = self;
        calls.run(kv, FORWARD, tick, |tick| inner.attend_last(kv, outputs, tick))
    }

    fn finish(self, outputs: &mut Outputs<'_, Host>, tick: Tick<'_>) -> Result<()> {
        self.inner.finish(outputs, tick)
    }
}

impl<P: BackwardPass<Host>, C: TileCalls> BackwardPass<Host> for WrappedPass<P, C> {
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
        gradients: &mut Gradients<'_, Host>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.inner.finish(dkv, gradients, tick)
    }
}
