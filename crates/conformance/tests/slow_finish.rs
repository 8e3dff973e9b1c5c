//! A rank whose pass takes longer to finish than the deadline, as one of very many sinks, or one
//! that waits for a GPU: it ticks meanwhile, so the ranks that wait for the end of the call go on.

use std::{
    ops::ControlFlow,
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, Cpu, Dims, Layout, Plan, Result, Tensors,
    comm::{Staged, threads},
};
use annulus_conformance::device::{Device, MockBackend, MockSpace};
use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, ForwardPass, Gradients, Host,
    HostBuffer, HostTensors, HostViews, Inputs, OnHost, Outputs, Passes, RangePairs, RankShard,
    Readers, Reduction, Tick, Transport, Workspace,
};
use ndarray::Array4;

const RANKS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(1);
/// Time that rank 1 takes to finish, or to wait for its device.
const SLOW: Duration = Duration::from_millis(1_700);
const DIMS: Dims = Dims::new(1, 24, 2, 4);

/// The CPU backend, with passes that take `delay` to finish.
struct SlowFinish {
    inner: Cpu,
    delay: Duration,
}

struct SlowWorkspace {
    inner: annulus_cpu::Workspace,
    delay: Duration,
}

struct SlowPass<P> {
    inner: P,
    delay: Duration,
}

impl<P> SlowPass<P> {
    /// Ticks for the time of the delay, or until a tick breaks.
    fn wait(&self, tick: Tick<'_>) -> ControlFlow<()> {
        let start = Instant::now();
        while start.elapsed() < self.delay {
            tick()?;
            thread::sleep(Duration::from_millis(5));
        }
        ControlFlow::Continue(())
    }
}

impl Backend for SlowFinish {
    type Space = Host;
    type Workspace = SlowWorkspace;

    annulus_core::forward_backend! { capabilities allocate write_block }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<SlowWorkspace> {
        Ok(SlowWorkspace { inner: self.inner.workspace(shard, passes)?, delay: self.delay })
    }
}

impl Workspace for SlowWorkspace {
    type Space = Host;
    type Forward<'p> = SlowPass<annulus_cpu::Forward<'p>>;
    type Backward<'p> = SlowPass<annulus_cpu::Backward<'p>>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        self.inner.update(shard)
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn forward<'p>(&'p mut self, inputs: Inputs<'p, Host>) -> Result<Self::Forward<'p>> {
        Ok(SlowPass { inner: self.inner.forward(inputs)?, delay: self.delay })
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<'p, Host>,
        mode: BackwardMode,
    ) -> Result<Self::Backward<'p>> {
        Ok(SlowPass { inner: self.inner.backward(inputs, mode)?, delay: self.delay })
    }
}

impl<P: ForwardPass<Host>> ForwardPass<Host> for SlowPass<P> {
    fn local_kv(&mut self, into: &mut HostBuffer, readers: Readers) -> Result<()> {
        self.inner.local_kv(into, readers)
    }

    fn attend(&mut self, kv: &Block<'_, Host>, tick: Tick<'_>) -> Result<()> {
        self.inner.attend(kv, tick)
    }

    fn attend_last(
        &mut self,
        kv: &Block<'_, Host>,
        outputs: &mut Outputs<'_, Host>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.inner.attend_last(kv, outputs, tick)
    }

    fn finish(self, outputs: &mut Outputs<'_, Host>, tick: Tick<'_>) -> Result<()> {
        match self.wait(&mut *tick) {
            ControlFlow::Continue(()) => self.inner.finish(outputs, tick),
            ControlFlow::Break(()) => Ok(()),
        }
    }
}

impl<P: BackwardPass<Host>> BackwardPass<Host> for SlowPass<P> {
    fn local_kv(&mut self, into: &mut HostBuffer, readers: Readers) -> Result<()> {
        self.inner.local_kv(into, readers)
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
        self.inner.attend_kv(kv, dkv, tick)
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, Host>,
        dkv: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.inner.attend_queries(queries, dkv, tick)
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
        match self.wait(&mut *tick) {
            ControlFlow::Continue(()) => self.inner.finish(dkv, gradients, tick),
            ControlFlow::Break(()) => Ok(()),
        }
    }
}

/// Runs forward and backward of one rank.
fn run_rank<B, T>(mode: BackwardMode, backend: B, transport: T) -> Result<()>
where
    B: Backend<Space: HostTensors>,
    T: Transport<B::Space> + 'static,
{
    let attention = Attention::new().deadline(DEADLINE).layout(Layout::Contiguous);
    let attention = attention.backward_mode(mode);
    let mut plan = Plan::new(&attention, DIMS, backend, transport)?;
    let rows = annulus_core::index(plan.q_rows().len());
    let tensor = Array4::<f32>::from_elem((1, rows, 2, 4), 0.5);
    let tensors = Tensors::new(tensor.view(), tensor.view(), tensor.view());
    let forward = plan.forward(&tensors)?;
    plan.backward(&tensors, &forward, tensor.view(), None).map(drop)
}

/// Calls `rank` on a thread for each rank.
fn on_each_rank(rank: impl Fn(usize, threads::Threads) -> Result<()> + Sync) -> Vec<Result<()>> {
    thread::scope(|scope| {
        let ranks: Vec<_> = threads::ring(RANKS)
            .into_iter()
            .enumerate()
            .map(|(number, endpoint)| {
                let rank = &rank;
                scope.spawn(move || rank(number, endpoint))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

#[test]
fn a_rank_that_finishes_slowly_and_ticks_is_not_silent() {
    for mode in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        let results = on_each_rank(|rank, endpoint| {
            let delay = if rank == 1 { SLOW } else { Duration::ZERO };
            run_rank(mode, SlowFinish { inner: Cpu::new(1)?, delay }, endpoint)
        });
        assert!(results.iter().all(Result::is_ok), "{mode:?}: {results:?}");
    }
}

#[test]
fn a_rank_whose_download_waits_for_long_is_not_silent() {
    for mode in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        let results = on_each_rank(|rank, endpoint| {
            let device = if rank == 1 { Device::busy(SLOW) } else { Device::new() };
            let staged = Staged::<_, HostViews<MockSpace>>::new(endpoint, device.clone());
            run_rank(mode, OnHost::new(MockBackend::new(device.clone()), device), staged)
        });
        assert!(results.iter().all(Result::is_ok), "{mode:?}: {results:?}");
    }
}
