//! Device time: two timestamps in the queue, around the work between them.

use std::time::Duration;

use annulus_core::Result;
use wgpu::{BufferUsages, ComputePassTimestampWrites, Features, QuerySet};

use crate::{
    device::Gpu,
    launch::{Arena, Commands},
};

/// A running measurement of device time.
#[derive(Debug)]
pub struct Stopwatch {
    queries: QuerySet,
    gpu: Gpu,
}

impl Stopwatch {
    /// True if the device supports timestamps.
    pub fn is_there(gpu: &Gpu) -> bool {
        gpu.device().features().contains(Features::TIMESTAMP_QUERY)
    }

    /// True if the device has timestamps and writes them.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    pub fn runs(gpu: &Gpu) -> Result<bool> {
        Ok(Self::start(gpu)?.map_or(Ok(None), Self::stop)?.is_some())
    }

    /// Starts after all work queued so far; `None` if the device has no timestamps.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    pub fn start(gpu: &Gpu) -> Result<Option<Self>> {
        if !Self::is_there(gpu) {
            return Ok(None);
        }
        let descriptor = wgpu::QuerySetDescriptor {
            label: Some("stopwatch"),
            ty: wgpu::QueryType::Timestamp,
            count: 2,
        };
        let queries = gpu.guard(|device, _| device.create_query_set(&descriptor))?;
        let watch = Self { gpu: gpu.clone(), queries };
        watch.mark(0)?;
        Ok(Some(watch))
    }

    /// Waits for all work queued since the start, and returns the device time it took; `None` if
    /// the driver wrote no timestamps (Metal writes 0 for some passes).
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    pub fn stop(self) -> Result<Option<Duration>> {
        self.mark(1)?;
        // some drivers write a timestamp after the commands that resolve it, if both are queued
        self.gpu.synchronize()?;
        let resolved = self.gpu.create_buffer(
            "timestamps",
            16,
            BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC,
        )?;
        self.gpu.submit(false, |device| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor {
                label: Some("stopwatch"),
            });
            encoder.resolve_query_set(&self.queries, 0..2, &resolved, 0);
            encoder
        })?;
        let mut ticks = Vec::new();
        self.gpu.read(&resolved, 16, |bytes| {
            ticks.extend(bytemuck::pod_collect_to_vec::<u8, u64>(bytes));
            Ok(())
        })?;
        if self.gpu.lacks_clock() {
            ticks.fill(0);
        }
        Ok(passed(&ticks, self.gpu.queue().get_timestamp_period()))
    }

    /// Writes a timestamp in a pass with a kernel, because drivers write none in an empty pass.
    fn mark(&self, number: u32) -> Result<()> {
        let (beginning, end) = if number == 0 { (None, Some(0)) } else { (Some(number), None) };
        let writes = ComputePassTimestampWrites {
            query_set: &self.queries,
            beginning_of_pass_write_index: beginning,
            end_of_pass_write_index: end,
        };
        Commands::new(&self.gpu, &mut Arena::default()).submit_timed(writes).map(drop)
    }
}

/// Returns the time between two timestamps in units of `period` ns; `None` if they are not of a
/// clock that runs.
fn passed(ticks: &[u64], period: f32) -> Option<Duration> {
    let &[first, last] = ticks else { return None };
    (first != 0 && last >= first && period > 0.0)
        .then(|| Duration::from_nanos(((last - first) as f64 * f64::from(period)) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_does_not_run_measures_nothing() {
        assert_eq!(passed(&[1000, 3000], 0.5), Some(Duration::from_micros(1)));
        for ticks in [[0, 0], [0, 3000], [3000, 0], [3000, 2999]] {
            assert_eq!(passed(&ticks, 1.0), None, "{ticks:?}");
        }
        assert_eq!(passed(&[1, 2], 0.0), None);
        assert_eq!(passed(&[], 1.0), None);
    }
}
