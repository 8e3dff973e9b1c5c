//! The pairs of backend and transport that the suite examines.
//!
//! And what tests wrap: a transport that reports an invented placement of its ranks and records the
//! blocks that cross nodes, and the CPU backend with other capabilities or shards than the ring's,
//! for mistakes that tests plant.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use annulus_comm::{Deadline, Staged, Threads, threads};
use annulus_core::{
    Backend, BackwardMode, Capabilities, Channel, Control, Host, Incoming, MessageHeader, Outgoing,
    Passes, Placement, RankShard, Result, Space, Spec, Transport,
};
use annulus_cpu::{Cpu, Isa};

use crate::{
    Answer, Case, HostMemory, RankSetup, RingSubject, Setting, Subject, TensorMemory,
    device::{Device, Fault, MockBackend, MockSpace, Pairwise},
    ring_subject::{RankJob, run_rank, run_ranks},
};

/// Longest wait for a silent peer: far above any test's time, so that only a deadlock reaches it.
const DEADLINE: Duration = Duration::from_secs(60);

/// The mock device; blocks are staged through host memory.
pub fn mock() -> impl Subject {
    mock_staged(Duration::ZERO)
}

/// A ring of threads whose ranks are those of `rank(rank, endpoint)`.
pub fn over_threads<M: TensorMemory, B: Backend<Space = M::Space>>(
    name: impl Into<String>,
    rank: impl Fn(usize, Threads) -> Result<RankSetup<M, B>>,
) -> impl Subject {
    RingSubject::new(name, move |ranks| {
        let endpoints = threads::ring(ranks).into_iter().enumerate();
        endpoints.map(|(number, endpoint)| rank(number, endpoint)).collect::<Result<Vec<_>>>()
    })
}

/// The mock device; blocks are staged through host memory and verified on arrival, each message
/// delayed by up to `delay`.
pub fn mock_staged(delay: Duration) -> impl Subject {
    over_threads("mock over staged threads", move |rank, end| {
        mock_rank(Device::new(), rank, end, delay)
    })
}

/// The smallest complete backend over a ring of threads.
pub fn pairwise() -> impl Subject {
    over_threads("pairwise over threads", |_, endpoint| {
        let transport = Box::new(Deadline::new(endpoint, DEADLINE)?);
        Ok(RankSetup { memory: HostMemory, backend: Pairwise, transport })
    })
}

/// The CPU over a ring of threads.
pub fn cpu() -> impl Subject {
    over_threads("cpu over threads", |_, endpoint| {
        let transport = Box::new(Deadline::new(endpoint, DEADLINE)?);
        Ok(RankSetup { memory: HostMemory, backend: Cpu::new(1)?, transport })
    })
}

/// The CPU with a fixed instruction set over a ring of threads.
pub fn cpu_with_isa(isa: Isa) -> impl Subject {
    over_threads(format!("{isa} over threads"), move |_, endpoint| {
        let transport = Box::new(Deadline::new(endpoint, DEADLINE)?);
        Ok(RankSetup { memory: HostMemory, backend: Cpu::new(1)?.with_isa(isa)?, transport })
    })
}

/// The CPU with two threads a rank over a ring of threads; messages are verified on arrival and
/// each is delayed by up to `delay`.
pub fn cpu_delayed(delay: Duration) -> impl Subject {
    over_threads("cpu over delayed threads", move |rank, end| cpu_rank(rank, end, delay))
}

/// A ring whose even ranks compute on the CPU and odd ranks on a mock device: the wire format
/// belongs to the schedule, not to a backend.
///
/// An unnormalised two-pass backward is run in one pass: its second pass finds the row maximum
/// again by comparing bits, and another backend rounds its logits otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Mixed;

impl Subject for Mixed {
    fn name(&self) -> String {
        "cpu and mock in one ring".into()
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let mut case = case.clone();
        if !case.spec.normalize {
            case.spec.backward = BackwardMode::OnePass;
        }
        let case = &case;
        let job = |(rank, transport): (usize, Threads)| -> Result<RankJob<'_>> {
            if rank.is_multiple_of(2) {
                let setup = cpu_rank(rank, transport, Duration::ZERO)?;
                Ok(Box::new(move || run_rank(case, setting, setup, times)))
            } else {
                let setup = mock_rank(Device::new(), rank, transport, Duration::ZERO)?;
                Ok(Box::new(move || run_rank(case, setting, setup, times)))
            }
        };
        let jobs = threads::ring(setting.ranks)
            .into_iter()
            .enumerate()
            .map(job)
            .collect::<Result<Vec<_>>>()?;
        run_ranks(case, times, jobs)
    }
}

fn cpu_rank(
    rank: usize,
    transport: Threads,
    delay: Duration,
) -> Result<RankSetup<HostMemory, Cpu>> {
    let late = Fault::random_delays(transport, rank as u64, delay);
    Ok(RankSetup {
        memory: HostMemory,
        backend: Cpu::new(2)?,
        transport: Box::new(Deadline::new(late, DEADLINE)?),
    })
}

/// A rank on a mock device: see [`mock_staged`].
pub fn mock_rank(
    memory: Device,
    rank: usize,
    transport: Threads,
    delay: Duration,
) -> Result<RankSetup<Device, MockBackend>> {
    let backend = MockBackend::new(memory.clone());
    let late = Fault::random_delays(transport, rank as u64, delay);
    let staged = Staged::<_, MockSpace>::new(late, memory.clone());
    Ok(RankSetup { memory, backend, transport: Box::new(Deadline::new(staged, DEADLINE)?) })
}

/// The (sender, receiver) pairs on different nodes between which KV blocks were sent. Clones share
/// one set.
#[derive(Debug, Clone, Default)]
pub struct Crossings(Arc<Mutex<BTreeSet<(usize, usize)>>>);

impl Crossings {
    /// Returns the pairs recorded so far.
    pub fn pairs(&self) -> BTreeSet<(usize, usize)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Reports `placement` instead of the inner transport's and forwards everything else.
#[derive(Debug)]
pub struct Placed<T> {
    inner: T,
    placement: Placement,
    crossings: Crossings,
}

impl<T> Placed<T> {
    /// Wraps `inner`; the blocks that this rank sends are recorded in `crossings`.
    pub const fn new(inner: T, placement: Placement, crossings: Crossings) -> Self {
        Self { inner, placement, crossings }
    }
}

impl<T: Control> Placed<T> {
    /// Records the blocks of `headers` that are sent to another node.
    fn record<'h>(&self, headers: impl Iterator<Item = &'h MessageHeader>) {
        let rank = self.inner.rank();
        let nodes = self.placement.nodes();
        let crosses = |header: &&MessageHeader| {
            header.channel == Channel::Kv && nodes.get(header.peer) != nodes.get(rank)
        };
        let pairs = headers.filter(crosses).map(|header| (rank, header.peer));
        self.crossings.0.lock().unwrap_or_else(PoisonError::into_inner).extend(pairs);
    }
}

impl<S: Space, T: Transport<S>> Transport<S> for Placed<T> {
    annulus_comm::forward_transport! {
        of S: progress take take_host pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        self.record(sends.iter().map(|send| &send.header));
        self.inner.post(sends, receives)
    }

    fn post_host(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.record(sends.iter().map(|send| &send.header));
        self.inner.post_host(sends, receives)
    }
}

impl<T: Control> Control for Placed<T> {
    annulus_comm::forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat last_heard
        last_work
    }

    fn placement(&self) -> Option<&Placement> {
        Some(&self.placement)
    }

    fn any_thread(&self) -> bool {
        self.inner.any_thread()
    }
}

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
