//! The mock device over its own transport: nothing between the seams assumes host memory, or that work is done when a call returns.

use annulus_conformance::{
    RingSubject, Station, Subject,
    device::{Device, MockBackend, device_ring},
    suite,
};
use annulus_core::Result;

fn mock() -> impl Subject {
    RingSubject::new("mock over device copies", |ranks| -> Result<Vec<Station<Device, MockBackend>>> {
        let devices: Vec<Device> = (0..ranks).map(|_| Device::new()).collect();
        let station = |(transport, device): (_, &Device)| Station {
            memory: device.clone(),
            backend: MockBackend::new(device.clone()),
            transport: Box::new(transport),
        };
        Ok(device_ring(&devices).into_iter().zip(&devices).map(station).collect())
    })
}

#[test]
fn random_cases_hold_on_the_mock_device() {
    suite::random_cases(&mock(), 0..300).unwrap();
}

#[test]
fn a_sample_of_the_matrix_holds_on_the_mock_device() {
    suite::matrix(&mock(), suite::Scale::OneIn(5)).unwrap();
}
