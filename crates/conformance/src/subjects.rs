//! The pairs of backend and transport that are examined here.

use std::time::Duration;

use annulus_comm::{Checksum, Deadline, Fault, Staged, threads};
use annulus_core::Result;

use crate::{
    RingSubject, Station, Subject,
    device::{Device, DeviceSpace, MockBackend, device_ring},
};

/// No test waits longer than this for a peer that is silent.
const DEADLINE: Duration = Duration::from_secs(60);

/// The mock device, its blocks copied from device to device.
pub fn mock() -> impl Subject {
    RingSubject::new("mock over device copies", |ranks| -> Result<Vec<Station<Device, MockBackend>>> {
        let devices: Vec<Device> = (0..ranks).map(|_| Device::new()).collect();
        let endpoints = device_ring(&devices).into_iter().zip(devices);
        endpoints
            .map(|(transport, memory)| {
                let backend = MockBackend::new(memory.clone());
                Ok(Station { memory, backend, transport: Box::new(Deadline::new(transport, DEADLINE)?) })
            })
            .collect()
    })
}

/// The mock device, its blocks staged through host memory and checked on arrival, each message up to `delay` late.
pub fn mock_staged(delay: Duration) -> impl Subject {
    RingSubject::new("mock over staged threads", move |ranks| -> Result<Vec<Station<Device, MockBackend>>> {
        let station = |(rank, transport)| {
            let memory = Device::new();
            let backend = MockBackend::new(memory.clone());
            let late = Fault::random_delays(transport, rank as u64, delay);
            let staged = Staged::<_, DeviceSpace>::new(Checksum::new(late), memory.clone());
            Ok(Station { memory, backend, transport: Box::new(Deadline::new(staged, DEADLINE)?) })
        };
        threads::ring(ranks).into_iter().enumerate().map(station).collect()
    })
}
