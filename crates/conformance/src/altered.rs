//! The CPU backend with other capabilities, or with other shards than those that the ring plans:
//! for mistakes that tests plant.

use annulus_core::{Backend, Capabilities, Host, Passes, RankShard, Result, Spec};
use annulus_cpu::Cpu;

/// The CPU backend, whose capabilities `capabilities` changes, and whose workspaces get the shard
/// that `shard` returns.
pub struct Altered<C, S> {
    inner: Cpu,
    capabilities: C,
    shard: S,
}

impl<C, S> Altered<C, S>
where
    C: Fn(Capabilities) -> Capabilities,
    S: Fn(&RankShard) -> Result<RankShard>,
{
    /// Creates a backend of one thread.
    ///
    /// # Errors
    /// As [`Cpu::new`].
    pub fn new(capabilities: C, shard: S) -> Result<Self> {
        Ok(Self { inner: Cpu::new(1)?, capabilities, shard })
    }
}

impl<C, S> Backend for Altered<C, S>
where
    C: Fn(Capabilities) -> Capabilities + Send + 'static,
    S: Fn(&RankShard) -> Result<RankShard> + Send + 'static,
{
    type Space = Host;
    type Workspace = <Cpu as Backend>::Workspace;

    fn capabilities(&self, spec: &Spec) -> Result<Capabilities> {
        Ok((self.capabilities)(self.inner.capabilities(spec)?))
    }

    annulus_core::forward_backend! { allocate write_block }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<Self::Workspace> {
        self.inner.workspace(&(self.shard)(shard)?, passes)
    }
}
