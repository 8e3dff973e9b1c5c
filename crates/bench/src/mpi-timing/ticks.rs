//! The cost of message progress from within tiles while there are no messages: the CPU time of one
//! check of the transport, as a tick makes it.

use std::time::Duration;

use annulus_comm::{
    Deadline,
    mpi::{Mpi, Settings},
};
use annulus_core::{Control, Host, Result, Transport};
use serde_json::json;

use crate::{
    Problem,
    ring::{Everybody, middle},
};

/// Least time between two checks of a kernel: `TICK_EVERY` of the ring.
const TICK_EVERY: Duration = Duration::from_micros(200);
/// Checks in a round.
const CHECKS: u32 = 20_000;

/// Prints the median over rounds, and its fraction of the time between two checks.
pub(crate) fn measure(problem: &Problem) -> Result<()> {
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
