//! The least time of a few rounds, by the device's clock or the host's, and their least CPU time.

use std::time::{Duration, Instant};

use annulus_core::Result;
use rustix::time::{ClockId, clock_gettime};

use crate::{crew::Crew, engine::Engine, failure::Outcome};

/// Rounds go on for this long …
const BUDGET: Duration = Duration::from_millis(1500);
/// … but no more than this many …
const MOST_ROUNDS: usize = 8;
/// … and no fewer than this many.
const LEAST_ROUNDS: usize = 2;

/// Whose clock tells how long a pass takes.
#[derive(Debug, Clone)]
pub(super) enum Clock {
    /// That of the host: what a caller waits.
    Host,
    /// That of the device: from a timestamp in its queue before all work of the pass to one after it. Of what the host does, what the device waits for is in it.
    #[cfg(feature = "wgpu")]
    Device(annulus_wgpu::Gpu),
}

impl Clock {
    /// That of what computes, if all processes have one.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// The loss of a process.
    pub(super) fn of(engine: &Engine, crew: &mut Crew) -> Outcome<Self> {
        let own = match engine {
            #[cfg(feature = "wgpu")]
            Engine::Wgpu(gpu) if annulus_wgpu::Stopwatch::is_there(gpu) => {
                Self::Device(gpu.clone())
            }
            _ => Self::Host,
        };
        let all = crew.share_numbers(&[f64::from(u8::from(!matches!(own, Self::Host)))])?;
        Ok(if all.iter().flatten().all(|&has| has != 0.0) { own } else { Self::Host })
    }

    /// Its name in a line.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Host => "host",
            #[cfg(feature = "wgpu")]
            Self::Device(_) => "device",
        }
    }

    /// How long `work` takes.
    pub(super) fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<Duration> {
        #[cfg(feature = "wgpu")]
        if let Self::Device(gpu) = self
            && let Some(watch) = annulus_wgpu::Stopwatch::start(gpu)?
        {
            work()?;
            return watch.stop();
        }
        let begin = Instant::now();
        work()?;
        Ok(begin.elapsed())
    }
}

/// What a case took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Least {
    /// Seconds by the [`Clock`], of the slowest rank.
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
pub(super) fn least(
    crew: &mut Crew,
    mut work: impl FnMut(&mut Crew) -> Outcome<Vec<Duration>>,
) -> Outcome<Least> {
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
        assert!(
            super::least(&mut crew, |_| Err(annulus_core::Error::invalid("x", 1, 2).into()))
                .is_err()
        );
    }
}
