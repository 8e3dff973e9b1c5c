//! CPU ranks whose updates fail by a script, and a transport that refuses one all-gather.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, Control, Error, Host, HostView, Inputs, Passes,
    RankShard, Result, Tick, Transport, Workspace,
};
use annulus_cpu::Cpu;

/// Action of a rank in one call of [`Workspace::update`] or, once planned, of
/// [`Backend::workspace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// The call succeeds.
    Apply,
    /// The call fails before it changes anything.
    Refuse,
    /// The call fails after it changed everything.
    ApplyThenRefuse,
    /// The device fails.
    Break,
}

/// The next acts, in order; after them every call succeeds. Clones share one script.
#[derive(Debug, Clone, Default)]
pub(crate) struct Script(Arc<Mutex<VecDeque<Act>>>);

impl Script {
    pub(crate) fn set(&self, acts: &[Act]) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = acts.iter().copied().collect();
    }

    fn next(&self) -> Act {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front().unwrap_or(Act::Apply)
    }
}

/// A CPU rank that follows a script.
pub(crate) struct Refusing {
    pub(crate) inner: Cpu,
    pub(crate) script: Script,
}

fn refused() -> Error {
    Error::out_of_memory("a workspace", 1 << 40)
}

/// Runs or refuses `work` by the script.
fn follow<T>(act: Act, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match act {
        Act::Apply => work(),
        Act::Refuse => Err(refused()),
        Act::ApplyThenRefuse => work().and(Err(refused())),
        Act::Break => Err(Error::Device { what: "the device fell off".into() }),
    }
}

/// The workspace of a CPU rank that follows a script.
pub(crate) struct RefusingWorkspace {
    inner: annulus_cpu::CpuWorkspace,
    script: Script,
}

impl Backend for Refusing {
    type Space = Host;
    type Workspace = RefusingWorkspace;

    annulus_core::forward_backend! { capabilities allocate write_block }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<RefusingWorkspace> {
        let inner = follow(self.script.next(), || self.inner.workspace(shard, passes))?;
        Ok(RefusingWorkspace { inner, script: self.script.clone() })
    }
}

impl Workspace for RefusingWorkspace {
    type Space = Host;
    type Forward<'p> = annulus_cpu::CpuForward<'p>;
    type Backward<'p> = annulus_cpu::CpuBackward<'p>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        follow(self.script.next(), || self.inner.update(shard))
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<HostView<'p>>,
        tick: Tick<'_>,
    ) -> Result<Self::Forward<'p>> {
        self.inner.forward(inputs, tick)
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<HostView<'p>>,
        mode: BackwardMode,
        tick: Tick<'_>,
    ) -> Result<Self::Backward<'p>> {
        self.inner.backward(inputs, mode, tick)
    }
}

/// A transport that refuses this rank's part of one all-gather, as MPI refuses one that is too
/// long.
pub(crate) struct Choking<T> {
    pub(crate) inner: T,
    pub(crate) round: Option<u64>,
}

impl<T: Transport<Host>> Transport<Host> for Choking<T> {
    annulus_comm::forward_transport! {
        post progress take pending bytes_sent posts_ahead runs_groups_in_order
    }
}

impl<T: Control> Control for Choking<T> {
    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        if self.round == Some(round) {
            return Err(Error::unsupported("a gather of so many bytes", "this transport"));
        }
        self.inner.start_all_gather(round, bytes)
    }

    annulus_comm::forward_control! {
        rank ranks try_all_gather stragglers abort heartbeat placement last_heard
        last_work
    }
}
