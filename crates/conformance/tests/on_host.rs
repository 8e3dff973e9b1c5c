//! Host tensors for a device backend: [`OnHost`] over the mock device, whose memory the host cannot
//! access and whose work is asynchronous.

use std::time::Duration;

use annulus::{LocalRing, Plan};
use annulus_comm::{Checksum, Deadline, Staged, threads};
use annulus_conformance::{
    FacadeOn, HostViewMemory, RankSetup, RingSubject, Subject,
    device::{Device, MockBackend, MockSpace},
    suite,
};
use annulus_core::{DType, HostViews, OnHost, Result};

/// Tensors in host memory, blocks on the mock device.
type Rank = RankSetup<HostViewMemory<MockSpace>, OnHost<MockBackend>>;

fn subject() -> impl Subject {
    RingSubject::new("mock for host tensors", |ranks| -> Result<Vec<Rank>> {
        let rank = |transport| {
            let device = Device::new();
            let staged =
                Staged::<_, HostViews<MockSpace>>::new(Checksum::new(transport), device.clone());
            Ok(RankSetup {
                memory: HostViewMemory::new(),
                backend: OnHost::new(MockBackend::new(device.clone()), device),
                transport: Box::new(Deadline::new(staged, Duration::from_secs(60))?),
            })
        };
        threads::ring(ranks).into_iter().map(rank).collect()
    })
}

/// The facade for host tensors.
fn facade() -> impl Subject {
    let dtypes = [DType::F32, DType::F64, DType::Bf16, DType::F16];
    FacadeOn::new("facade on the mock device", &dtypes, |attention, dims, ranks| {
        LocalRing::from_plans(attention, dims, ranks, |_, setup, endpoint| {
            let device = Device::new();
            let staged =
                Staged::<_, HostViews<MockSpace>>::new(Checksum::new(endpoint), device.clone());
            Plan::with_backend(
                setup,
                dims,
                OnHost::new(MockBackend::new(device.clone()), device),
                staged,
            )
        })
    })
}

#[test]
fn strategies_hold_for_host_tensors() {
    suite::head_strategies(&facade(), 0..24).unwrap();
}

#[test]
fn random_cases_hold_for_host_tensors() {
    suite::random_cases(&subject(), 3000..3100).unwrap();
}

#[test]
fn bits_repeat_for_host_tensors() {
    suite::same_bits_over_repeats(&subject(), 10).unwrap();
}

#[test]
fn receives_further_ahead_change_no_bit() {
    suite::same_bits_received_ahead(&subject()).unwrap();
}
