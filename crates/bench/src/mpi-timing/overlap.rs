//! The part of the communication that the tiles hide: hidden = 1 − (T_ring − T_compute) / T_comm,
//! each the median of interleaved rounds.
//!
//! | time | measured on every rank |
//! |---|---|
//! | T_ring | the pass |
//! | T_compute | the same pass with its tiles, gathers and buffers, but without messages ([`NoMessages`]) |
//! | T_comm | the same pass without tiles, less its time without tiles and without messages |
//!
//! T_ring is measured twice: with progress by the kernels' ticks, and by nothing until a step ends.
//! The cost of the ticks is T_compute against the same with
//! kernels that never tick.

use annulus::Forward;
use annulus_comm::mpi::{Mpi, Settings};
use annulus_core::Result;
use annulus_cpu::Cpu;
use serde_json::json;

use crate::{
    Problem,
    parts::{NoMessages, Pace, Tiles, WrappedTiles},
    ring::{Everybody, Timed, middle},
};

/// The variants of the pass, in the order of a round.
const WAYS: [&str; 6] =
    ["ticks", "nothing", "compute", "compute without ticks", "messages", "neither"];

/// Prints one line for the forward and one for the backward pass.
pub(crate) fn measure(problem: &Problem) -> Result<()> {
    let mut everybody = Everybody::new()?;
    let mut rings = rings(problem)?;
    let [mut forward, mut backward] = [const { Vec::<Round>::new() }; 2];
    for round in 0..=problem.rounds {
        let [mut of_forward, mut of_backward] = [Round::default(); 2];
        let mut real: Option<Forward<f32>> = None;
        for (way, ring) in rings.iter_mut().enumerate() {
            let (taken, result) = everybody.time(|| ring.forward())?;
            of_forward.note(way, taken.seconds, &mut everybody, &result.reports)?;
            // backward needs the results of a forward pass with tiles, which the first variant is
            let saved = real.get_or_insert(result);
            let (taken, result) = everybody.time(|| ring.backward(saved))?;
            of_backward.note(way, taken.seconds, &mut everybody, &result.reports)?;
        }
        // the first round warms up
        if round > 0 {
            forward.push(of_forward);
            backward.push(of_backward);
        }
    }
    if everybody.rank() == 0 {
        print(problem, everybody.ranks(), "forward", &forward);
        print(problem, everybody.ranks(), "backward", &backward);
    }
    Ok(())
}

fn rings(problem: &Problem) -> Result<Vec<Timed>> {
    // with a full mask every rank attends to every key
    let pace = |milliseconds: usize| Tiles::Paced(milliseconds as f64 / 1e3 / problem.q_len as f64);
    let tiles = problem.paced_ms.map_or(Tiles::Real, pace);
    let backend = |tiles, ticks| {
        let inner = Cpu::new(problem.threads)?;
        Ok(WrappedTiles { inner, calls: Pace { tiles, ticks } })
    };
    let mpi = || Mpi::world(Settings::default());
    Ok(vec![
        Timed::new(problem, backend(tiles, true)?, mpi()?)?,
        Timed::new(problem, backend(tiles, false)?, mpi()?)?,
        Timed::new(problem, backend(tiles, true)?, NoMessages::new(mpi()?))?,
        Timed::new(problem, backend(tiles, false)?, NoMessages::new(mpi()?))?,
        Timed::new(problem, backend(Tiles::Absent, true)?, mpi()?)?,
        Timed::new(problem, backend(Tiles::Absent, true)?, NoMessages::new(mpi()?))?,
    ])
}

/// One round of one pass, by variant: the slowest rank's seconds, the longest wait, the most bytes
/// sent.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    seconds: [f64; WAYS.len()],
    waited: [f64; WAYS.len()],
    bytes: [f64; WAYS.len()],
}

impl Round {
    fn note(
        &mut self,
        way: usize,
        seconds: f64,
        everybody: &mut Everybody,
        reports: &[annulus::Report],
    ) -> Result<()> {
        let waited = reports.iter().map(|report| report.waiting_seconds).sum();
        let bytes = reports.iter().map(|report| report.bytes_sent as f64).sum();
        [self.waited[way], self.bytes[way]] = everybody.most([waited, bytes])?;
        self.seconds[way] = seconds;
        Ok(())
    }

    /// Returns the hidden part of the communication in one of the first two variants.
    fn hidden(&self, way: usize) -> f64 {
        let [.., compute, _, messages, neither] = self.seconds;
        1.0 - (self.seconds[way] - compute) / (messages - neither)
    }
}

fn print(problem: &Problem, ranks: usize, what: &str, rounds: &[Round]) {
    let median = |of: &dyn Fn(&Round) -> f64| middle(&rounds.iter().map(of).collect::<Vec<_>>());
    let seconds = |way: usize| median(&|round| round.seconds[way]).0;
    let [compute, without_ticks, messages, neither] = [2, 3, 4, 5].map(seconds);
    let communication = messages - neither;
    let ways: serde_json::Map<_, _> = WAYS[..2]
        .iter()
        .enumerate()
        .map(|(way, name)| {
            let (ring, spread) = median(&|round| round.seconds[way]);
            let (of_rounds, of_rounds_spread) = median(&|round| round.hidden(way));
            let numbers = json!({
                "ring_seconds": ring,
                "ring_spread": spread,
                "waiting_seconds": median(&|round| round.waited[way]).0,
                "hidden": 1.0 - (ring - compute) / communication,
                "hidden_median_of_rounds": of_rounds,
                "hidden_spread": of_rounds_spread,
            });
            ((*name).to_owned(), numbers)
        })
        .collect();
    println!(
        "{}",
        json!({
            "what": what,
            "ranks": ranks,
            "threads_of_a_rank": problem.threads,
            "q_len": problem.q_len,
            "heads": problem.heads,
            "head_dim": problem.dim,
            "causal": problem.causal,
            "layout": problem.layout.name(),
            "dtype": "f32",
            "rounds": problem.rounds,
            "paced_ms": problem.paced_ms,
            "bytes_sent": median(&|round| round.bytes[0]).0,
            "compute_seconds": compute,
            "communication_seconds": communication,
            "compute_of_communication": compute / communication,
            "compute_without_ticks_seconds": without_ticks,
            "ticks_cost": median(&|round| round.seconds[2] / round.seconds[3] - 1.0).0,
            "moved_by": ways,
        })
    );
}
