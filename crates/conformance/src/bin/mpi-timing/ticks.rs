//! What moving messages from within tiles costs where there are none: the time on a core of one look at the transport, as a tick takes it.

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

/// The least time between two looks of a kernel: `TICK_EVERY` of the ring.
const EVERY: Duration = Duration::from_micros(200);
/// Looks of a round.
const LOOKS: u32 = 20_000;

/// Prints the median over rounds, and the share of the time between two looks.
pub(crate) fn measure(problem: &Problem) -> Result<()> {
    let mut everybody = Everybody::new()?;
    let mut idle: Deadline<Mpi, Host> =
        Deadline::new(Mpi::world(Settings::default())?, Duration::from_secs(60))?;
    let mut looks = Vec::new();
    // the first round warms up
    for round in 0..=problem.rounds {
        let (taken, ()) = everybody.time(|| {
            (0..LOOKS).try_for_each(|_| {
                idle.heartbeat(true);
                idle.progress(Duration::ZERO)
            })
        })?;
        if round > 0 {
            looks.push(taken.core_seconds / everybody.ranks() as f64 / f64::from(LOOKS));
        }
    }
    let (look, spread) = middle(&looks);
    if everybody.rank() == 0 {
        let line = json!({
            "what": "ticks", "ranks": everybody.ranks(), "rounds": problem.rounds, "microseconds_a_look": look * 1e6, "spread": spread * 1e6,
            "share_of_time": look / EVERY.as_secs_f64(),
        });
        println!("{line}");
    }
    Ok(())
}
