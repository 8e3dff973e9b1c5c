//! The cost of a ring: forward and backward on all ranks, in turn with rank 0 alone, which then has
//! as many threads as all ranks together.

use annulus_comm::{
    mpi::{Mpi, Settings},
    threads,
};
use annulus_core::{Error, Result};
use annulus_cpu::Cpu;
use serde_json::json;

use crate::{
    Problem,
    ring::{Everybody, Timed, middle},
};

/// Prints the medians of times and ratios, and the ratio of every round.
pub(crate) fn measure(problem: &Problem) -> Result<()> {
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
        print(problem, ranks, &times);
    }
    Ok(())
}

/// Prints the line of a measurement. `times` are seconds of the ring, seconds alone and their
/// ratio, then the same of CPU seconds.
fn print(problem: &Problem, ranks: usize, times: &[Vec<f64>; 6]) {
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
