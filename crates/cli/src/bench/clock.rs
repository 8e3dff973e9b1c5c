//! The least wall-clock and CPU time of a few rounds.

use std::time::{Duration, Instant};

use annulus_core::Result;
use rustix::time::{ClockId, clock_gettime};

/// Rounds go on for this long …
const BUDGET: Duration = Duration::from_millis(1500);
/// … but no more than this many …
const MOST_ROUNDS: usize = 8;
/// … and no fewer than this many.
const LEAST_ROUNDS: usize = 2;

/// What a case took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Least {
    /// Seconds on the wall.
    pub(super) wall: f64,
    /// Seconds of all threads of this process.
    pub(super) cpu: f64,
}

/// Runs `work` once to warm up and then a few times more; the least of each clock, as the peers' benches do it.
pub(super) fn least(mut work: impl FnMut() -> Result<()>) -> Result<Least> {
    work()?;
    let mut least = Least { wall: f64::INFINITY, cpu: f64::INFINITY };
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < LEAST_ROUNDS || (start.elapsed() < BUDGET && rounds < MOST_ROUNDS) {
        let (wall, cpu) = (Instant::now(), cpu_seconds());
        work()?;
        least.wall = least.wall.min(wall.elapsed().as_secs_f64());
        least.cpu = least.cpu.min(cpu_seconds() - cpu);
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
        let mut rounds = 0;
        let least = least(|| {
            rounds += 1;
            Ok(())
        });
        assert!(least.is_ok_and(|least| least.wall >= 0.0 && least.cpu >= 0.0));
        assert_eq!(rounds, 1 + MOST_ROUNDS);
        assert!(super::least(|| Err(annulus_core::Error::invalid("x", 1, 2))).is_err());
    }
}
