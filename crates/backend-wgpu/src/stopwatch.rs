//! Time as the device tells it: two timestamps in its queue, around the work that is queued between them.

use std::time::Duration;

use annulus_core::Result;
use wgpu::{BufferUsages, ComputePassTimestampWrites, Features, QuerySet};

use crate::device::Gpu;

/// A stretch of a device's time that has begun.
#[derive(Debug)]
pub struct Stopwatch {
    gpu: Gpu,
    queries: QuerySet,
}

impl Stopwatch {
    /// Whether the device has timestamps.
    pub fn is_there(gpu: &Gpu) -> bool {
        gpu.device().features().contains(Features::TIMESTAMP_QUERY)
    }

    /// Begins after everything that was queued so far; `None` if the device has no timestamps.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    pub fn start(gpu: &Gpu) -> Result<Option<Self>> {
        if !Self::is_there(gpu) {
            return Ok(None);
        }
        let descriptor = wgpu::QuerySetDescriptor { label: Some("stopwatch"), ty: wgpu::QueryType::Timestamp, count: 2 };
        let queries = gpu.guard(|device, _| device.create_query_set(&descriptor))?;
        let watch = Self { gpu: gpu.clone(), queries };
        watch.mark(0)?;
        Ok(Some(watch))
    }

    /// What passed on the device until everything that was queued since is done, which is waited for.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    pub fn stop(self) -> Result<Duration> {
        self.mark(1)?;
        let told = self.gpu.create_buffer("timestamps", 16, BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC)?;
        self.gpu.guard(|device, queue| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("stopwatch") });
            encoder.resolve_query_set(&self.queries, 0..2, &told, 0);
            queue.submit([encoder.finish()]);
        })?;
        let ticks = bytemuck::pod_collect_to_vec::<u8, u64>(&self.gpu.read(&told, 16)?);
        let passed = ticks.last().zip(ticks.first()).map_or(0, |(last, first)| last.saturating_sub(*first));
        Ok(Duration::from_nanos((passed as f64 * f64::from(self.gpu.queue().get_timestamp_period())) as u64))
    }

    /// Writes a timestamp: an empty pass, which any device that has timestamps can stamp.
    fn mark(&self, number: u32) -> Result<()> {
        self.gpu.guard(|device, queue| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("stopwatch") });
            let (beginning, end) = if number == 0 { (None, Some(0)) } else { (Some(number), None) };
            let writes = ComputePassTimestampWrites {
                query_set: &self.queries,
                beginning_of_pass_write_index: beginning,
                end_of_pass_write_index: end,
            };
            drop(encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some("stopwatch"), timestamp_writes: Some(writes) }));
            queue.submit([encoder.finish()]);
        })
    }
}
