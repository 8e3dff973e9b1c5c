//! What work takes, in rounds in which the levels take turns.

use std::time::{Duration, Instant};

use annulus_core::Result;
use annulus_wgpu::{Gpu, Stopwatch};
use rustix::time::{ClockId, clock_gettime};

/// What one piece of work took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Took {
    /// By the device's timestamps, or by the host's clock where it has none.
    pub(crate) seconds: f64,
    /// Of all threads of this process: on a software adapter those that compute among them.
    pub(crate) cpu: f64,
    /// Whose clock told `seconds`.
    pub(crate) clock: &'static str,
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// How often work has to be done to take about so many seconds; the first time, which compiles, is not looked at.
pub(crate) fn repetitions(gpu: &Gpu, seconds: f64, mut work: impl FnMut() -> Result<()>) -> Result<u32> {
    work()?;
    gpu.synchronize()?;
    let start = Instant::now();
    work()?;
    gpu.synchronize()?;
    let once = start.elapsed().max(Duration::from_micros(1)).as_secs_f64();
    Ok((seconds / once).ceil().clamp(1.0, 1000.0) as u32)
}

/// The mean over so many repetitions.
pub(crate) fn time(gpu: &Gpu, times: u32, mut work: impl FnMut() -> Result<()>) -> Result<Took> {
    gpu.synchronize()?;
    let watch = Stopwatch::start(gpu)?;
    let (start, before) = (Instant::now(), cpu_seconds());
    (0..times).try_for_each(|_| work())?;
    gpu.synchronize()?;
    let (host, cpu) = (start.elapsed(), cpu_seconds() - before);
    let (all, clock) = watch.map_or(Ok((host, "host")), |watch| watch.stop().map(|told| (told, "device")))?;
    let each = |all: f64| all / f64::from(times);
    Ok(Took { seconds: each(all.as_secs_f64()), cpu: each(cpu), clock })
}

/// The middle one, or the mean of both.
pub(crate) fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    let middle = of.len() / 2;
    match of.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => of[middle],
        _ => (of[middle - 1] + of[middle]) / 2.0,
    }
}
