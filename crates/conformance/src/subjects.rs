//! The pairs of backend and transport that the suite examines.

use std::time::Duration;

use annulus_comm::{Checksum, Deadline, Staged, Threads, threads};
use annulus_core::{BackwardMode, Result};
use annulus_cpu::{Cpu, Isa};

use crate::{
    Answer, Case, HostMemory, RankSetup, RingSubject, Setting, Subject,
    device::{Device, Fault, MockBackend, MockSpace, Pairwise, device_ring},
    ring_subject::{RankJob, run_rank, run_ranks},
};

/// Longest wait for a silent peer: far above any test's time, so that only a deadlock reaches it.
const DEADLINE: Duration = Duration::from_secs(60);

/// The mock device; blocks are copied from device to device.
pub fn mock() -> impl Subject {
    RingSubject::new(
        "mock over device copies",
        |ranks| -> Result<Vec<RankSetup<Device, MockBackend>>> {
            let devices: Vec<Device> = (0..ranks).map(|_| Device::new()).collect();
            let endpoints = device_ring(&devices).into_iter().zip(devices);
            endpoints
                .map(|(transport, memory)| {
                    let backend = MockBackend::new(memory.clone());
                    Ok(RankSetup {
                        memory,
                        backend,
                        transport: Box::new(Deadline::new(transport, DEADLINE)?),
                    })
                })
                .collect()
        },
    )
}

/// The mock device; blocks are staged through host memory and verified on arrival, each message
/// delayed by up to `delay`.
pub fn mock_staged(delay: Duration) -> impl Subject {
    RingSubject::new(
        "mock over staged threads",
        move |ranks| -> Result<Vec<RankSetup<Device, MockBackend>>> {
            threads::ring(ranks)
                .into_iter()
                .enumerate()
                .map(|(rank, transport)| mock_rank(rank, transport, delay))
                .collect()
        },
    )
}

/// The smallest complete backend over a ring of threads.
pub fn pairwise() -> impl Subject {
    RingSubject::new("pairwise over threads", |ranks| {
        let setup = |transport| -> Result<RankSetup<HostMemory, Pairwise>> {
            let transport = Box::new(Deadline::new(transport, DEADLINE)?);
            Ok(RankSetup { memory: HostMemory, backend: Pairwise, transport })
        };
        threads::ring(ranks).into_iter().map(setup).collect()
    })
}

/// The CPU over a ring of threads.
pub fn cpu() -> impl Subject {
    RingSubject::new("cpu over threads", |ranks| -> Result<Vec<RankSetup<HostMemory, Cpu>>> {
        let setup = |transport| {
            let transport = Box::new(Deadline::new(transport, DEADLINE)?);
            Ok(RankSetup { memory: HostMemory, backend: Cpu::new(1)?, transport })
        };
        threads::ring(ranks).into_iter().map(setup).collect()
    })
}

/// The CPU with a fixed instruction set over a ring of threads.
pub fn cpu_with_isa(isa: Isa) -> impl Subject {
    let name = format!("{isa} over threads");
    RingSubject::new(name, move |ranks| -> Result<Vec<RankSetup<HostMemory, Cpu>>> {
        let setup = |transport| {
            let transport = Box::new(Deadline::new(transport, DEADLINE)?);
            Ok(RankSetup { memory: HostMemory, backend: Cpu::new(1)?.with_isa(isa)?, transport })
        };
        threads::ring(ranks).into_iter().map(setup).collect()
    })
}

/// The CPU with two threads a rank over a ring of threads; messages are verified on arrival and
/// each is delayed by up to `delay`.
pub fn cpu_delayed(delay: Duration) -> impl Subject {
    RingSubject::new(
        "cpu over delayed threads",
        move |ranks| -> Result<Vec<RankSetup<HostMemory, Cpu>>> {
            threads::ring(ranks)
                .into_iter()
                .enumerate()
                .map(|(rank, transport)| cpu_rank(rank, transport, delay))
                .collect()
        },
    )
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
                let setup = mock_rank(rank, transport, Duration::ZERO)?;
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
    let late = Checksum::new(Fault::random_delays(transport, rank as u64, delay));
    Ok(RankSetup {
        memory: HostMemory,
        backend: Cpu::new(2)?,
        transport: Box::new(Deadline::new(late, DEADLINE)?),
    })
}

fn mock_rank(
    rank: usize,
    transport: Threads,
    delay: Duration,
) -> Result<RankSetup<Device, MockBackend>> {
    let memory = Device::new();
    let backend = MockBackend::new(memory.clone());
    let late = Checksum::new(Fault::random_delays(transport, rank as u64, delay));
    let staged = Staged::<_, MockSpace>::new(late, memory.clone());
    Ok(RankSetup { memory, backend, transport: Box::new(Deadline::new(staged, DEADLINE)?) })
}
