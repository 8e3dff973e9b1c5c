//! The pairs of backend and transport that are examined here.

use std::time::Duration;

use annulus_comm::{Checksum, Deadline, Fault, Staged, Threads, threads};
use annulus_core::{BackwardMode, Result};
use annulus_cpu::Cpu;

use crate::{
    Answer, Case, HostMemory, RingSubject, Setting, Station, Subject,
    device::{Device, MockBackend, MockSpace, device_ring},
    ring_subject::{RankJob, run_rank, run_ranks},
};

/// No test waits longer than this for a peer that is silent.
const DEADLINE: Duration = Duration::from_secs(60);

/// The mock device, its blocks copied from device to device.
pub fn mock() -> impl Subject {
    RingSubject::new(
        "mock over device copies",
        |ranks| -> Result<Vec<Station<Device, MockBackend>>> {
            let devices: Vec<Device> = (0..ranks).map(|_| Device::new()).collect();
            let endpoints = device_ring(&devices).into_iter().zip(devices);
            endpoints
                .map(|(transport, memory)| {
                    let backend = MockBackend::new(memory.clone());
                    Ok(Station {
                        memory,
                        backend,
                        transport: Box::new(Deadline::new(transport, DEADLINE)?),
                    })
                })
                .collect()
        },
    )
}

/// The mock device, its blocks staged through host memory and checked on arrival, each message up to `delay` late.
pub fn mock_staged(delay: Duration) -> impl Subject {
    RingSubject::new(
        "mock over staged threads",
        move |ranks| -> Result<Vec<Station<Device, MockBackend>>> {
            threads::ring(ranks)
                .into_iter()
                .enumerate()
                .map(|(rank, transport)| mock_station(rank, transport, delay))
                .collect()
        },
    )
}

/// The CPU over a ring of threads.
pub fn cpu() -> impl Subject {
    RingSubject::new("cpu over threads", |ranks| -> Result<Vec<Station<HostMemory, Cpu>>> {
        let station = |transport| {
            let transport = Box::new(Deadline::new(transport, DEADLINE)?);
            Ok(Station { memory: HostMemory, backend: Cpu::new(1)?, transport })
        };
        threads::ring(ranks).into_iter().map(station).collect()
    })
}

/// The CPU with two threads a rank, over a ring of threads whose messages are checked on arrival and each up to `delay` late.
pub fn cpu_delayed(delay: Duration) -> impl Subject {
    RingSubject::new(
        "cpu over delayed threads",
        move |ranks| -> Result<Vec<Station<HostMemory, Cpu>>> {
            threads::ring(ranks)
                .into_iter()
                .enumerate()
                .map(|(rank, transport)| cpu_station(rank, transport, delay))
                .collect()
        },
    )
}

/// Even ranks compute on the CPU, odd ones on a mock device: the wire format is the schedule's, not a backend's.
///
/// An unnormalised two-pass backward is done in one pass here: a row's largest logit would have to be found again by another backend, to the bit.
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
                let station = cpu_station(rank, transport, Duration::ZERO)?;
                Ok(Box::new(move || run_rank(case, setting, station, times)))
            } else {
                let station = mock_station(rank, transport, Duration::ZERO)?;
                Ok(Box::new(move || run_rank(case, setting, station, times)))
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

fn cpu_station(
    rank: usize,
    transport: Threads,
    delay: Duration,
) -> Result<Station<HostMemory, Cpu>> {
    let late = Checksum::new(Fault::random_delays(transport, rank as u64, delay));
    Ok(Station {
        memory: HostMemory,
        backend: Cpu::new(2)?,
        transport: Box::new(Deadline::new(late, DEADLINE)?),
    })
}

fn mock_station(
    rank: usize,
    transport: Threads,
    delay: Duration,
) -> Result<Station<Device, MockBackend>> {
    let memory = Device::new();
    let backend = MockBackend::new(memory.clone());
    let late = Checksum::new(Fault::random_delays(transport, rank as u64, delay));
    let staged = Staged::<_, MockSpace>::new(late, memory.clone());
    Ok(Station { memory, backend, transport: Box::new(Deadline::new(staged, DEADLINE)?) })
}
