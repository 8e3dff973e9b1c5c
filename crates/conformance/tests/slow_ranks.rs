//! A rank that takes longer than the deadline: to finish a pass, as one of very many sinks, or to
//! wait for a GPU, in the middle of a ring or at its end. It sends heartbeats meanwhile, so the
//! ranks that wait for it go on. A GPU that hangs is an error of its own rank, and ends the call on
//! all.

use std::{
    ops::ControlFlow,
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, Cpu, Dims, Error, Layout, Plan, Result, Tensors,
    comm::{Deadline, Staged, threads},
};
use annulus_conformance::{
    Case, Draw, Masks, RankSetup, RingSubject, Setting, Subject,
    device::{Device, MockBackend, MockSpace, device_ring},
};
use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, DType, ForwardPass, Gradients,
    Host, HostBuffer, HostTensors, HostViews, Inputs, OnHost, Outputs, Passes, RangePairs,
    RankShard, Reduction, RowSet, Spec, Tick, Transport, Workspace,
};
use ndarray::Array4;

const RANKS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(1);
/// Time that rank 1 takes to finish, or to wait for its device.
const SLOW: Duration = Duration::from_millis(1_700);
/// Time of each tile kernel of rank 1, of which a pass has several.
const SLOW_KERNEL: Duration = Duration::from_millis(1_250);
const DIMS: Dims = Dims::new(1, 24, 2, 4);

/// The CPU backend, with passes that take `delay` to finish.
struct SlowFinish {
    inner: Cpu,
    delay: Duration,
}

struct SlowWorkspace {
    inner: annulus_cpu::CpuWorkspace,
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
    type Forward<'p> = SlowPass<annulus_cpu::CpuForward<'p>>;
    type Backward<'p> = SlowPass<annulus_cpu::CpuBackward<'p>>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        self.inner.update(shard)
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<'p, Host>,
        tick: Tick<'_>,
    ) -> Result<Self::Forward<'p>> {
        Ok(SlowPass { inner: self.inner.forward(inputs, tick)?, delay: self.delay })
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<'p, Host>,
        mode: BackwardMode,
        tick: Tick<'_>,
    ) -> Result<Self::Backward<'p>> {
        Ok(SlowPass { inner: self.inner.backward(inputs, mode, tick)?, delay: self.delay })
    }
}

impl<P: ForwardPass<Host>> ForwardPass<Host> for SlowPass<P> {
    fn local_kv(&mut self, into: &mut HostBuffer, sent: &RowSet) -> Result<()> {
        self.inner.local_kv(into, sent)
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

/// Runs forward and backward of one rank on a device, whose blocks are staged through host memory.
fn run_staged(mode: BackwardMode, device: Device, endpoint: threads::Threads) -> Result<()> {
    let staged = Staged::<_, HostViews<MockSpace>>::new(endpoint, device.clone());
    run_rank(mode, OnHost::new(MockBackend::new(device.clone()), device), staged)
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
            run_staged(mode, device, endpoint)
        });
        assert!(results.iter().all(Result::is_ok), "{mode:?}: {results:?}");
    }
}

#[test]
#[ignore = "long: scripts/test --whole"]
fn a_rank_whose_staged_blocks_wait_for_long_kernels_is_not_silent() {
    for mode in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        let results = on_each_rank(|rank, endpoint| {
            let device = if rank == 1 { Device::slow(SLOW_KERNEL) } else { Device::new() };
            run_staged(mode, device, endpoint)
        });
        assert!(results.iter().all(Result::is_ok), "{mode:?}: {results:?}");
    }
}

/// The mock device over copies from device to device, with the least deadline. Tile kernels of rank
/// 1 take `kernel_time`.
fn mock_ring(kernel_time: Duration) -> impl Subject {
    RingSubject::new("mock", move |ranks| -> Result<Vec<RankSetup<Device, MockBackend>>> {
        let device = |rank| if rank == 1 { Device::slow(kernel_time) } else { Device::new() };
        let devices: Vec<Device> = (0..ranks).map(device).collect();
        let setup = |(endpoint, memory): (_, Device)| {
            let backend = MockBackend::new(memory.clone());
            let transport = Box::new(Deadline::new(endpoint, DEADLINE)?);
            Ok(RankSetup { memory, backend, transport })
        };
        device_ring(&devices).into_iter().zip(devices.clone()).map(setup).collect()
    })
}

#[test]
fn a_rank_whose_copies_between_devices_wait_for_long_kernels_is_not_silent() {
    let spec = Spec::new(DIMS, DType::F64);
    let case = Case::new("slow kernels", spec, Masks::default(), &mut Draw::new(1));
    let setting = Setting::new(RANKS, Layout::Contiguous);
    let want = mock_ring(Duration::ZERO).run(&case, &setting, 1).unwrap().remove(0);
    let slow = mock_ring(SLOW_KERNEL).run(&case, &setting, 1).unwrap().remove(0);
    slow.same_bits(&want).unwrap();
}

#[test]
fn a_device_that_hangs_in_a_ring_ends_the_call_with_its_own_error() {
    let began = Instant::now();
    let results = on_each_rank(|rank, endpoint| {
        let device = if rank == 1 { Device::hanging(2 * DEADLINE) } else { Device::new() };
        run_staged(BackwardMode::OnePass, device, endpoint)
    });
    // later than the deadline, which the heartbeats of the wait have kept
    assert!(began.elapsed() >= 2 * DEADLINE, "{:?}", began.elapsed());
    let hung = |what: &str| what.contains("did not end within");
    assert!(matches!(&results[1], Err(Error::Device { what }) if hung(what)), "{results:?}");
    for rank in [0, 2] {
        let is_abort = matches!(&results[rank], Err(Error::Aborted { rank: 1, .. }));
        assert!(is_abort, "{results:?}");
    }
}
