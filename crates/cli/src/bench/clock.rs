//! The least wall-clock and CPU time of a few rounds.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::{crew::Crew, failure::Outcome};

/// Rounds go on for this long …
const BUDGET: Duration = Duration::from_millis(1500);
/// … but no more than this many …
const MOST_ROUNDS: usize = 8;
/// … and no fewer than this many.
const LEAST_ROUNDS: usize = 2;

/// What a case took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Least {
    /// Seconds on the wall, of the slowest rank.
    pub(super) wall: f64,
    /// Seconds of all threads of all processes.
    pub(super) cpu: f64,
}

/// Runs `work`, which gives each rank's time, once to warm up and then a few times more; the least of each clock, as the peers' benches do it.
///
/// # Ordering
/// Collective over the processes.
/// # Errors
/// Those of `work`; the loss of a process.
pub(super) fn least(crew: &mut Crew, mut work: impl FnMut(&mut Crew) -> Outcome<Vec<Duration>>) -> Outcome<Least> {
    work(crew)?;
    let mut least = Least { wall: f64::INFINITY, cpu: f64::INFINITY };
    let (mut spent, mut rounds) = (0.0, 0);
    // all processes know the same numbers, so they stop in the same round
    while rounds < LEAST_ROUNDS || (spent < BUDGET.as_secs_f64() && rounds < MOST_ROUNDS) {
        let before = cpu_seconds();
        let slowest = work(crew)?.into_iter().max().unwrap_or_default();
        let all = crew.share_numbers(&[slowest.as_secs_f64(), cpu_seconds() - before])?;
        let wall = all.iter().map(|of| of[0]).fold(0.0, f64::max);
        least.wall = least.wall.min(wall);
        least.cpu = least.cpu.min(all.iter().map(|of| of[1]).sum());
        spent += wall;
        rounds += 1;
    }
    Ok(least)
}

/// CPU time of this process, all threads.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_done_and_its_error_is_told() {
        let (mut rounds, mut crew) = (0, Crew::of_threads(2));
        let least = least(&mut crew, |_| {
            rounds += 1;
            Ok(vec![Duration::ZERO, Duration::from_millis(rounds)])
        });
        // the first round only warms up
        assert!(least.is_ok_and(|least| least.wall == 0.002 && least.cpu >= 0.0));
        assert_eq!(rounds, 1 + MOST_ROUNDS as u64);
        assert!(super::least(&mut crew, |_| Err(annulus_core::Error::invalid("x", 1, 2).into())).is_err());
    }
}
