//! Time of work on a device.

use std::time::{Duration, Instant};

use annulus_core::Result;
use annulus_wgpu::{Gpu, Stopwatch};
use rustix::time::{ClockId, clock_gettime};

/// Mean times of one repetition.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Took {
    /// Device time by its timestamps, or time by the host's clock if it writes none.
    pub(crate) seconds: f64,
    /// CPU time of all threads of this process, in seconds; on a software adapter also of the
    /// threads that compute.
    pub(crate) cpu: f64,
    /// Clock of `seconds`: "device" or "host".
    pub(crate) clock: &'static str,
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns the number of repetitions that take about `seconds`. The first run compiles the kernels
/// and is not timed.
pub(crate) fn repetitions(
    gpu: &Gpu,
    seconds: f64,
    mut work: impl FnMut() -> Result<()>,
) -> Result<u32> {
    work()?;
    gpu.synchronize()?;
    let start = Instant::now();
    work()?;
    gpu.synchronize()?;
    let once = start.elapsed().max(Duration::from_micros(1)).as_secs_f64();
    Ok((seconds / once).ceil().clamp(1.0, 1000.0) as u32)
}

/// Measures the mean over `times` repetitions.
pub(crate) fn time(gpu: &Gpu, times: u32, mut work: impl FnMut() -> Result<()>) -> Result<Took> {
    gpu.synchronize()?;
    let watch = Stopwatch::start(gpu)?;
    let start = Instant::now();
    let before = cpu_seconds();
    (0..times).try_for_each(|_| work())?;
    gpu.synchronize()?;
    let host = start.elapsed();
    let cpu = cpu_seconds() - before;
    let device = watch.map_or(Ok(None), Stopwatch::stop)?;
    let (all, clock) = device.map_or((host, "host"), |device| (device, "device"));
    let each = |all: f64| all / f64::from(times);
    Ok(Took { seconds: each(all.as_secs_f64()), cpu: each(cpu), clock })
}

/// Returns the median; of an even number, the mean of the middle two.
pub(crate) fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    let middle = of.len() / 2;
    match of.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => of[middle],
        _ => (of[middle - 1] + of[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use annulus_wgpu::Options;

    use super::*;

    #[test]
    fn a_device_whose_timestamps_are_0_is_timed_by_the_host() {
        if Gpu::list().is_empty() {
            let required = std::env::var("ANNULUS_REQUIRE")
                .is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
            assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
            eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
            return;
        }
        let gpu = Gpu::open(&Options::default()).unwrap();
        let pause = Duration::from_millis(2);
        let work = || {
            std::thread::sleep(pause);
            Ok(())
        };
        if Stopwatch::runs(&gpu).unwrap() {
            assert_eq!(time(&gpu, 2, work).unwrap().clock, "device");
        }
        let took = time(&gpu.without_clock().unwrap(), 2, work).unwrap();
        assert_eq!(took.clock, "host");
        assert!(took.seconds >= pause.as_secs_f64(), "{took:?}");
    }
}
