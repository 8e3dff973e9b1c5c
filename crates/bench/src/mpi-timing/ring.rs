//! One rank of a timed ring, and the common start and exchange of times of all ranks of a
//! measurement.
//!
//! `tax`: the cost of a ring: forward and backward on all ranks, in turn with rank 0 alone, which
//! then has as many threads as all ranks together.
//!
//! `ticks`: the cost of message progress from within tiles while there are no messages: the CPU
//! time of one check of the transport, as a tick makes it.

use std::time::{Duration, Instant};

use annulus::{Attention, Backward, Dims, Division, Forward, Plan, Runtime, Tensors};
use annulus_bench::cpu_seconds;
use annulus_comm::{
    Deadline, all_gather,
    mpi::{Mpi, Settings},
    threads,
};
use annulus_core::{Backend, Control, Error, Host, Result, Transport};
use annulus_cpu::Cpu;
use ndarray::Array4;
use serde_json::json;

use crate::Problem;

/// Longest wait for a silent peer.
const DEADLINE: Duration = Duration::from_secs(60);

impl Problem {
    fn dims(&self) -> Dims {
        Dims::new(1, self.q_len, self.heads, self.dim)
    }

    fn attention(&self) -> Attention {
        Attention::new().causal(self.causal)
    }

    /// Returns the FLOPs of the matrix products of a forward pass: 4·heads·dim for each visible
    /// pair.
    pub(crate) fn forward_flops(&self) -> f64 {
        let n = self.q_len as f64;
        let pairs = if self.causal { n * (n + 1.0) / 2.0 } else { n * n };
        4.0 * pairs * (self.heads * self.dim) as f64
    }
}

/// One rank's plan and its tensors.
pub(crate) struct Timed {
    plan: Plan,
    /// q, k, v, dout.
    tensors: [Array4<f32>; 4],
}

impl Timed {
    pub(crate) fn new<B: Backend<Space = Host>, T: Transport<Host> + 'static>(
        problem: &Problem,
        backend: B,
        transport: T,
    ) -> Result<Self> {
        let plan = Plan::with_backend(
            (
                problem.attention(),
                Division::new().layout(problem.layout.clone()),
                Runtime::new().deadline(DEADLINE),
            ),
            problem.dims(),
            backend,
            transport,
        )?;
        let rows: Vec<i64> = plan.q_rows().iter().collect();
        let tensors = std::array::from_fn(|which| {
            Array4::from_shape_fn(
                (1, rows.len(), problem.heads, problem.dim),
                |(_, row, head, at)| number([which as i64, rows[row], head as i64, at as i64]),
            )
        });
        Ok(Self { plan, tensors })
    }

    pub(crate) fn forward(&mut self) -> Result<Forward<f32>> {
        let [q, k, v, _] = &self.tensors;
        self.plan.forward(&Tensors::new(q.view(), k.view(), v.view()))
    }

    pub(crate) fn backward(&mut self, forward: &Forward<f32>) -> Result<Backward<f32>> {
        let [q, k, v, dout] = &self.tensors;
        self.plan.backward(&Tensors::new(q.view(), k.view(), v.view()), forward, dout.view(), None)
    }
}

/// Returns a number in −1…1 that is a hash of `of`, so that a row has the same numbers on any rank.
fn number(of: [i64; 4]) -> f32 {
    let mixed = of.into_iter().fold(0x9e37_79b9_7f4a_7c15u64, |mixed, part| {
        let mixed = (mixed ^ part.cast_unsigned()).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ mixed >> 32
    });
    (mixed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// The ranks of a measurement.
pub(crate) struct Everybody {
    endpoint: Deadline<Mpi, Host>,
    round: u64,
}

impl Everybody {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { endpoint: Deadline::new(Mpi::world(Settings::default())?, DEADLINE)?, round: 0 })
    }

    pub(crate) fn rank(&self) -> usize {
        self.endpoint.rank()
    }

    pub(crate) fn ranks(&self) -> usize {
        self.endpoint.ranks()
    }

    /// Returns every rank's numbers, in the order of ranks. Collective.
    fn numbers<const N: usize>(&mut self, numbers: [f64; N]) -> Result<Vec<[f64; N]>> {
        self.round += 1;
        let bytes: Vec<u8> = numbers.into_iter().flat_map(f64::to_le_bytes).collect();
        let decode = |bytes: Vec<u8>| {
            let mut numbers = bytes
                .chunks_exact(8)
                .map(|bytes| bytes.try_into().map_or(f64::NAN, f64::from_le_bytes));
            std::array::from_fn(|_| numbers.next().unwrap_or(f64::NAN))
        };
        Ok(all_gather::<Host>(&mut self.endpoint, self.round, &bytes)?
            .into_iter()
            .map(decode)
            .collect())
    }

    /// Returns the largest of all ranks' numbers, element by element. Collective.
    pub(crate) fn most<const N: usize>(&mut self, numbers: [f64; N]) -> Result<[f64; N]> {
        let all = self.numbers(numbers)?;
        Ok(std::array::from_fn(|n| {
            all.iter().map(|numbers| numbers[n]).fold(f64::NEG_INFINITY, f64::max)
        }))
    }

    /// Times `work`, which starts on all ranks together. Collective.
    pub(crate) fn time<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<(Taken, T)> {
        self.most([0.0])?;
        let start = Instant::now();
        let core_start = cpu_seconds();
        let done = work()?;
        let all = self.numbers([start.elapsed().as_secs_f64(), cpu_seconds() - core_start])?;
        let seconds = all.iter().map(|numbers| numbers[0]).fold(0.0, f64::max);
        Ok((Taken { seconds, core_seconds: all.iter().map(|numbers| numbers[1]).sum() }, done))
    }
}

/// Duration of some work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Taken {
    /// Seconds of the slowest rank.
    pub(crate) seconds: f64,
    /// CPU seconds of all ranks together, which other load of the machine hardly changes.
    pub(crate) core_seconds: f64,
}

/// Returns the median and half the distance between the quartiles.
pub(crate) fn middle(numbers: &[f64]) -> (f64, f64) {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let position = share * (sorted.len().max(1) - 1) as f64;
        let number = |n: f64| sorted.get(n as usize).copied().unwrap_or(f64::NAN);
        let below = number(position.floor());
        let above = number(position.ceil());
        below + (above - below) * position.fract()
    };
    (at(0.5), (at(0.75) - at(0.25)) / 2.0)
}

/// Prints the medians of times and ratios, and the ratio of every round.
pub(crate) fn tax(problem: &Problem) -> Result<()> {
    let mut everybody = Everybody::new()?;
    let rank = everybody.rank();
    let ranks = everybody.ranks();
    let mut ring =
        Timed::new(problem, Cpu::new(problem.threads)?, Mpi::world(Settings::default())?)?;
    let mut alone = if rank == 0 {
        let single = threads::ring(1)
            .pop()
            .ok_or_else(|| Error::Device { what: "a ring of one without a rank".into() })?;
        Some(Timed::new(problem, Cpu::new(problem.threads * ranks)?, single)?)
    } else {
        None
    };
    let mut times: [Vec<f64>; 6] = Default::default();
    // the first round warms up
    for round in 0..=problem.rounds {
        let (of_ring, _) = everybody.time(|| {
            let forward = ring.forward()?;
            ring.backward(&forward)
        })?;
        let (of_alone, _) = everybody.time(|| {
            alone.as_mut().map_or(Ok(()), |alone| {
                let forward = alone.forward()?;
                alone.backward(&forward).map(|_| ())
            })
        })?;
        if round > 0 {
            for (times, time) in times.iter_mut().zip([
                of_ring.seconds,
                of_alone.seconds,
                of_alone.seconds / of_ring.seconds,
                of_ring.core_seconds,
                of_alone.core_seconds,
                of_alone.core_seconds / of_ring.core_seconds,
            ]) {
                times.push(time);
            }
        }
    }
    if rank == 0 {
        print_tax(problem, ranks, &times);
    }
    Ok(())
}

/// Prints the line of a measurement. `times` are seconds of the ring, seconds alone and their
/// ratio, then the same of CPU seconds.
fn print_tax(problem: &Problem, ranks: usize, times: &[Vec<f64>; 6]) {
    let [
        (of_ring, ring_spread),
        (of_alone, alone_spread),
        (ratio, ratio_spread),
        (ring_cores, _),
        (alone_cores, _),
        (of_cores, _),
    ] = times.each_ref().map(|times| middle(times));
    // backward has 2.5 times the products of forward
    let gflops = 3.5 * problem.forward_flops() / 1e9;
    println!(
        "{}",
        json!({
            "what": "ring-tax",
            "ranks": ranks,
            "threads_of_a_rank": problem.threads,
            "threads_alone": problem.threads * ranks,
            "q_len": problem.q_len,
            "heads": problem.heads,
            "head_dim": problem.dim,
            "causal": problem.causal,
            "layout": problem.layout.name(),
            "dtype": "f32",
            "rounds": problem.rounds,
            "ring_seconds": of_ring,
            "ring_spread": ring_spread,
            "ring_gflops": gflops / of_ring,
            "alone_seconds": of_alone,
            "alone_spread": alone_spread,
            "alone_gflops": gflops / of_alone,
            "ring_of_alone": ratio,
            "ring_of_alone_spread": ratio_spread,
            "ring_of_alone_rounds": times[2],
            "ring_core_seconds": ring_cores,
            "alone_core_seconds": alone_cores,
            "ring_of_alone_by_core_seconds": of_cores,
        })
    );
}

/// Least time between two checks of a kernel: `TICK_EVERY` of the ring.
const TICK_EVERY: Duration = Duration::from_micros(200);
/// Checks in a round.
const CHECKS: u32 = 20_000;

/// Prints the median over rounds, and its fraction of the time between two checks.
pub(crate) fn ticks(problem: &Problem) -> Result<()> {
    let mut everybody = Everybody::new()?;
    let mut idle: Deadline<Mpi, Host> =
        Deadline::new(Mpi::world(Settings::default())?, Duration::from_secs(60))?;
    let mut checks = Vec::new();
    // the first round warms up
    for round in 0..=problem.rounds {
        let (taken, ()) = everybody.time(|| {
            (0..CHECKS).try_for_each(|_| {
                idle.heartbeat(true);
                idle.progress(Duration::ZERO)
            })
        })?;
        if round > 0 {
            checks.push(taken.core_seconds / everybody.ranks() as f64 / f64::from(CHECKS));
        }
    }
    let (check, spread) = middle(&checks);
    if everybody.rank() == 0 {
        let line = json!({
            "what": "ticks",
            "ranks": everybody.ranks(),
            "rounds": problem.rounds,
            "microseconds_a_look": check * 1e6,
            "spread": spread * 1e6,
            "share_of_time": check / TICK_EVERY.as_secs_f64(),
        });
        println!("{line}");
    }
    Ok(())
}
