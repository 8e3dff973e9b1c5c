//! A rank that takes longer than the deadline to wait for a GPU, in the middle of a pass or at its
//! end. It sends heartbeats meanwhile, so the
//! ranks that wait for it go on. A GPU that hangs is an error of its own rank, and ends the call on
//! all.

use std::time::{Duration, Instant};

use annulus::{
    Attention, Dims, Division, Error, Layout, Plan, Result, Runtime, Setup, Tensors,
    comm::{Staged, threads},
};
use annulus_conformance::device::{Device, MockBackend, MockSpace};
use annulus_core::{BackwardMode, HostViews, OnHost};
use ndarray::Array4;

const RANKS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(1);
/// Time that rank 1 waits for its device.
const SLOW: Duration = Duration::from_millis(1_700);
/// Time of each tile kernel of rank 1, of which a pass has several.
const SLOW_KERNEL: Duration = Duration::from_millis(1_250);
const DIMS: Dims = Dims::new(1, 24, 2, 4);

/// Runs forward and backward of one rank on a device, whose blocks are staged through host memory.
fn run_staged(mode: BackwardMode, device: Device, endpoint: threads::Threads) -> Result<()> {
    let attention = Setup::from((
        Attention::new().backward_mode(mode),
        Division::new().layout(Layout::Contiguous),
        Runtime::new().deadline(DEADLINE),
    ));
    let staged = Staged::<_, HostViews<MockSpace>>::new(endpoint, device.clone());
    let backend = OnHost::new(MockBackend::new(device.clone()), device);
    let mut plan = Plan::with_backend(&attention, DIMS, backend, staged)?;
    let rows = annulus_core::index(plan.q_rows().len());
    let tensor = Array4::<f32>::from_elem((1, rows, 2, 4), 0.5);
    let tensors = Tensors::new(tensor.view(), tensor.view(), tensor.view());
    let forward = plan.forward(&tensors)?;
    plan.backward(&tensors, &forward, tensor.view(), None).map(drop)
}

/// Calls `rank` on a thread for each rank.
fn on_each_rank(rank: impl Fn(usize, threads::Threads) -> Result<()> + Sync) -> Vec<Result<()>> {
    let results = threads::each_rank(threads::ring(RANKS), |number, end| Ok(rank(number, end)));
    results.expect("no rank panics")
}

/// The passes of rank 1 wait in `finish`, whose ticks send heartbeats.
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
