//! Device time: two timestamps in the queue, around the work between them.

use std::time::Duration;

use annulus_core::Result;
use wgpu::{BufferUsages, ComputePassTimestampWrites, Features, QuerySet};

use crate::device::Gpu;

/// A running measurement of device time.
#[derive(Debug)]
pub struct Stopwatch {
    gpu: Gpu,
    queries: QuerySet,
}

impl Stopwatch {
    /// True if the device supports timestamps.
    pub fn is_there(gpu: &Gpu) -> bool {
        gpu.device().features().contains(Features::TIMESTAMP_QUERY)
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

    /// Waits for all work queued since the start, and returns the device time it took.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`].
    pub fn stop(self) -> Result<Duration> {
        self.mark(1)?;
        let resolved = self.gpu.create_buffer(
            "timestamps",
            16,
            BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC,
        )?;
        self.gpu.guard(|device, queue| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor {
                label: Some("stopwatch"),
            });
            encoder.resolve_query_set(&self.queries, 0..2, &resolved, 0);
            queue.submit([encoder.finish()]);
        })?;
        let ticks = self
            .gpu
            .read(&resolved, 16, |bytes| Ok(bytemuck::pod_collect_to_vec::<u8, u64>(bytes)))?;
        let passed =
            ticks.last().zip(ticks.first()).map_or(0, |(last, first)| last.saturating_sub(*first));
        Ok(Duration::from_nanos(
            (passed as f64 * f64::from(self.gpu.queue().get_timestamp_period())) as u64,
        ))
    }

    /// Writes a timestamp with an empty pass, which every device with timestamps supports.
    fn mark(&self, number: u32) -> Result<()> {
        self.gpu.guard(|device, queue| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor {
                label: Some("stopwatch"),
            });
            let (beginning, end) = if number == 0 { (None, Some(0)) } else { (Some(number), None) };
            let writes = ComputePassTimestampWrites {
                query_set: &self.queries,
                beginning_of_pass_write_index: beginning,
                end_of_pass_write_index: end,
            };
            drop(encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some("stopwatch"),
                timestamp_writes: Some(writes),
            }));
            queue.submit([encoder.finish()]);
        })
    }
}
