//! The mock device: no code between the backend and transport traits assumes host memory, or that
//! work is done when a call returns. A fifth of the matrix, 300 random cases, and every rule; with
//! delayed messages a smaller sample. And host tensors for a device backend: [`OnHost`] over the
//! mock device.

use std::time::Duration;

use annulus::{LocalRing, Plan};
use annulus_comm::Staged;
use annulus_conformance::{
    Case, FacadeOn, Setting, Subject,
    device::{Device, MockBackend, MockSpace},
    subjects::{mock, mock_rank, mock_staged, over_threads, pairwise},
    suite::{self, Poison, Scale},
};
use annulus_core::{DType, HostViews, OnHost};
use annulus_plan::Layout;

#[test]
fn random_cases_hold_on_the_mock_device() {
    suite::random_cases(&mock(), 0..300).unwrap();
}

#[test]
fn a_sample_of_the_matrix_holds_on_the_mock_device() {
    suite::matrix(&mock(), Scale::OneIn(5)).unwrap();
}

#[test]
fn a_sample_holds_on_the_smallest_backend() {
    suite::random_cases(&pairwise(), 2000..2020).unwrap();
    suite::matrix(&pairwise(), Scale::OneIn(59)).unwrap();
    suite::independent_rows(&pairwise()).unwrap();
}

/// One element type and few settings, as of the next test: what the rules demand of arithmetic is a
/// matter of each backend, and that of the mock device is a test's own.
#[test]
fn the_numeric_rules_hold_on_the_mock_device() {
    for setting in [Setting::ALONE, Setting::new(3, Layout::Zigzag)] {
        suite::numeric_rules_on(&mock(), DType::F32, &setting).unwrap();
    }
}

#[test]
fn a_visible_nan_does_not_depend_on_the_ranks_on_the_mock_device() {
    let settings = [1, 3, 4].map(|ranks| Setting::new(ranks, Layout::Striped));
    suite::nonfinite_on(&mock(), Poison::NanAndInfinities, DType::F32, &settings).unwrap();
    suite::infinite_scores_on(&mock(), DType::F32, &settings).unwrap();
}

#[test]
fn rows_that_are_independent_have_the_same_bits_on_the_mock_device() {
    suite::independent_rows(&mock()).unwrap();
}

#[test]
fn bits_repeat_on_the_mock_device() {
    suite::same_bits_over_repeats(&mock(), 5).unwrap();
}

#[test]
fn receives_further_ahead_change_no_bit() {
    suite::same_bits_received_ahead(&mock()).unwrap();
}

#[test]
fn a_sample_holds_on_the_mock_device_with_delayed_messages() {
    let staged = mock_staged(Duration::from_micros(300));
    suite::random_cases(&staged, 1000..1060).unwrap();
    suite::matrix(&staged, Scale::OneIn(29)).unwrap();
}

#[test]
fn messages_that_overtake_each_other_change_no_bit_on_the_mock_device() {
    suite::same_bits_under_delay(&mock(), &mock_staged(Duration::from_millis(1)), 5).unwrap();
}

#[test]
fn a_dropped_plan_frees_its_memory() {
    let devices: Vec<Device> = (0..3).map(|_| Device::new()).collect();
    let kept = devices.clone();
    let ring = over_threads("mock", move |rank, endpoint| {
        mock_rank(devices[rank].clone(), rank, endpoint, Duration::ZERO)
    });
    ring.run(&Case::random(4), &Setting::new(3, Layout::Zigzag), 2).unwrap();
    for device in kept {
        device.synchronize().unwrap();
        assert_eq!(device.allocations(), 0);
    }
}

/// The facade for tensors in host memory, with blocks on the mock device.
fn for_host_tensors() -> impl Subject {
    let dtypes = [DType::F32, DType::F64, DType::Bf16, DType::F16];
    FacadeOn::new("facade on the mock device", &dtypes, |setup, dims, ranks| {
        LocalRing::from_plans(setup, dims, ranks, |_, setup, endpoint| {
            let device = Device::new();
            let staged = Staged::<_, HostViews<MockSpace>>::new(endpoint, device.clone());
            let backend = OnHost::new(MockBackend::new(device.clone()), device);
            Plan::with_backend(setup, dims, backend, staged)
        })
    })
}

#[test]
fn strategies_hold_for_host_tensors() {
    suite::head_strategies(&for_host_tensors(), 0..24).unwrap();
}

#[test]
fn random_cases_hold_for_host_tensors() {
    suite::random_cases(&for_host_tensors(), 3000..3100).unwrap();
}

#[test]
fn bits_repeat_for_host_tensors() {
    suite::same_bits_over_repeats(&for_host_tensors(), 10).unwrap();
}

#[test]
fn receives_further_ahead_change_no_bit_for_host_tensors() {
    suite::same_bits_received_ahead(&for_host_tensors()).unwrap();
}
