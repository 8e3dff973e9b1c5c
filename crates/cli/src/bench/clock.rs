//! Measures the least time of a few rounds by the device's or the host's clock, and the least CPU
//! time.

use std::time::{Duration, Instant};

#[cfg(feature = "wgpu")]
use annulus_core::Error;
use annulus_core::Result;
use rustix::time::{ClockId, clock_gettime};

use crate::{backend::BackendChoice, failure::Outcome, job::Job};

/// Time after which no further round starts: it bounds a case of long rounds.
const BUDGET: Duration = Duration::from_millis(1500);
/// The most rounds: of short rounds the least of 8 is stable.
const MOST_ROUNDS: usize = 8;
/// The least number of rounds, so that there is a minimum even of rounds longer than the budget.
const LEAST_ROUNDS: usize = 2;

/// Clock of a measurement.
#[derive(Debug, Clone)]
pub(super) enum Clock {
    /// Wall clock of the host: the time that a caller waits.
    Host,
    /// Timestamps in the device's queue before and after all work of the pass. Includes host work
    /// only where the device waits for it.
    #[cfg(feature = "wgpu")]
    Device(annulus_wgpu::Gpu),
}

impl Clock {
    /// Chooses the device's clock if the devices of all processes have one that runs, else the
    /// host's.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(super) fn of(backend: &BackendChoice, job: &mut Job) -> Outcome<Self> {
        let own = match backend {
            #[cfg(feature = "wgpu")]
            BackendChoice::Wgpu(devices) => Self::of_device(devices),
            _ => Self::Host,
        };
        let all = job.all_gather_values(&!matches!(own, Self::Host))?;
        Ok(if all.iter().all(|&of_device| of_device) { own } else { Self::Host })
    }

    /// Chooses the device's clock if the ranks share one device and its clock runs.
    #[cfg(feature = "wgpu")]
    fn of_device(devices: &annulus::backend::WgpuDevices) -> Self {
        let alone = devices.get(0).ok().filter(|_| devices.count() == 1);
        alone.map_or(Self::Host, Self::of_gpu)
    }

    /// Chooses the device's clock if it runs.
    #[cfg(feature = "wgpu")]
    fn of_gpu(gpu: annulus_wgpu::Gpu) -> Self {
        let runs = annulus_wgpu::Stopwatch::runs(&gpu).unwrap_or(false);
        if runs { Self::Device(gpu) } else { Self::Host }
    }

    /// Name in a line.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Host => "host",
            #[cfg(feature = "wgpu")]
            Self::Device(_) => "device",
        }
    }

    /// Runs `work` and returns its time.
    pub(super) fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<Duration> {
        #[cfg(feature = "wgpu")]
        if let Self::Device(gpu) = self
            && let Some(watch) = annulus_wgpu::Stopwatch::start(gpu)?
        {
            work()?;
            let stopped =
                || Error::Device { what: format!("the clock of {} has stopped", gpu.name()) };
            return watch.stop()?.ok_or_else(stopped);
        }
        let begin = Instant::now();
        work()?;
        Ok(begin.elapsed())
    }
}

/// Least times of a case, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Least {
    /// Time of the slowest rank, by the [`Clock`].
    pub(super) wall: f64,
    /// CPU time of all threads of all processes.
    pub(super) cpu: f64,
}

/// Runs `work`, which returns the time of each rank, once to warm up and then [`LEAST_ROUNDS`] to
/// [`MOST_ROUNDS`] times. Returns the least time of each clock.
///
/// # Ordering
/// Collective over the processes.
/// # Errors
/// Those of `work`; the loss of a process.
pub(super) fn least(
    job: &mut Job,
    mut work: impl FnMut(&mut Job) -> Outcome<Vec<Duration>>,
) -> Outcome<Least> {
    work(job)?;
    let mut least = Least { wall: f64::INFINITY, cpu: f64::INFINITY };
    let mut spent = 0.0;
    let mut rounds = 0;
    // `spent` is equal on all processes, so they stop after the same round
    while rounds < LEAST_ROUNDS || (spent < BUDGET.as_secs_f64() && rounds < MOST_ROUNDS) {
        let before = cpu_seconds();
        let slowest = work(job)?.into_iter().max().unwrap_or_default();
        let own = (slowest.as_secs_f64(), cpu_seconds() - before);
        let all = job.all_gather_values(&own)?;
        let wall = all.iter().map(|(wall, _)| *wall).fold(0.0, f64::max);
        least.wall = least.wall.min(wall);
        least.cpu = least.cpu.min(all.iter().map(|(_, cpu)| cpu).sum());
        spent += wall;
        rounds += 1;
    }
    Ok(least)
}

/// CPU time of all threads of this process, in seconds.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_bounded_and_errors_returned() {
        let mut rounds = 0;
        let mut job = Job::of_threads(2);
        let least = least(&mut job, |_| {
            rounds += 1;
            Ok(vec![Duration::ZERO, Duration::from_millis(rounds)])
        });
        // the warm-up round is not measured
        assert!(least.is_ok_and(|least| least.wall == 0.002 && least.cpu >= 0.0));
        assert_eq!(rounds, 1 + MOST_ROUNDS as u64);
        assert!(
            super::least(&mut job, |_| Err(annulus_core::Error::invalid("x", 1, 2).into()))
                .is_err()
        );
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn a_device_whose_timestamps_are_0_is_timed_by_the_host() {
        if annulus_wgpu::Gpu::list().is_empty() {
            let required = std::env::var("ANNULUS_REQUIRE")
                .is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
            assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
            eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
            return;
        }
        let gpu = annulus_wgpu::Gpu::open(&annulus_wgpu::Options::default()).unwrap();
        if annulus_wgpu::Stopwatch::runs(&gpu).unwrap() {
            assert_eq!(Clock::of_gpu(gpu.clone()).name(), "device");
        }
        let stopped = gpu.without_clock().unwrap();
        let clock = Clock::of_gpu(stopped.clone());
        assert_eq!(clock.name(), "host");
        let pause = Duration::from_millis(2);
        let work = || {
            std::thread::sleep(pause);
            Ok(())
        };
        assert!(clock.time(work).unwrap() >= pause);
        // a clock that stops later has measured nothing
        if annulus_wgpu::Stopwatch::is_there(&stopped) {
            let error = Clock::Device(stopped).time(|| Ok(())).unwrap_err();
            assert!(error.to_string().contains("has stopped"), "{error}");
        }
    }
}
