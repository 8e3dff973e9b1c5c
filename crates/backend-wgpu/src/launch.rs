//! Command batches: kernels with their uniform parameters and lists, submitted to the queue
//! together, and counted on the device when they have run.
//!
//! Device time: two timestamps in the queue, around the work between them.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use annulus_core::{Error, Result};
use wgpu::{BufferUsages, ComputePassTimestampWrites, Features, QuerySet};

use crate::{
    adapter::is_forked,
    device::Gpu,
    kernels::{KernelVariant, params::StepParams},
    pacing::Receipt,
    pipelines::Pipeline,
    staging::UploadBuffer,
};

/// Memory for uniform parameters, on host and device, and for lists on the device. Reused by every
/// batch, which is safe because the queue runs them in order.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    bytes: Vec<u8>,
    buffer: Option<wgpu::Buffer>,
    lists: Option<wgpu::Buffer>,
    /// Accumulators and statistics of ranges of keys.
    partial_results: [Option<wgpu::Buffer>; 2],
}

impl Drop for Arena {
    fn drop(&mut self) {
        if is_forked() {
            mem::forget(mem::take(self));
        }
    }
}

impl Arena {
    /// Returns the bytes of its buffers on the device.
    pub(crate) fn bytes(&self) -> u64 {
        let Self { buffer, lists, partial_results: [acc, statistics], .. } = self;
        [buffer, lists, acc, statistics].into_iter().flatten().map(wgpu::Buffer::size).sum()
    }

    /// Returns buffers of at least these bytes for accumulators and statistics of ranges of keys.
    pub(crate) fn partial_results(
        &mut self,
        gpu: &Gpu,
        [acc_bytes, statistics_bytes]: [u64; 2],
    ) -> Result<[wgpu::Buffer; 2]> {
        let [acc, statistics] = &mut self.partial_results;
        Ok([
            of_size(gpu, acc, "partial accumulators", acc_bytes)?,
            of_size(gpu, statistics, "partial statistics", statistics_bytes)?,
        ])
    }
}

/// Returns the buffer in `slot` if it holds `bytes`, else a new one.
fn of_size(
    gpu: &Gpu,
    slot: &mut Option<wgpu::Buffer>,
    label: &str,
    bytes: u64,
) -> Result<wgpu::Buffer> {
    if let Some(buffer) = slot.as_ref().filter(|buffer| buffer.size() >= bytes) {
        return Ok(buffer.clone());
    }
    let usage = BufferUsages::STORAGE | BufferUsages::UNIFORM | BufferUsages::COPY_DST;
    let buffer = gpu.create_buffer(label, gpu.rounded_size(bytes), usage)?;
    Ok(slot.insert(buffer).clone())
}

/// Resource of a binding.
#[derive(Debug, Clone)]
pub(crate) enum BoundResource {
    /// Part of a buffer.
    Buffer { buffer: wgpu::Buffer, offset: u64, size: u64 },
    /// Unused by this plan: the placeholder buffer.
    Unused,
}

impl BoundResource {
    /// Binds a whole buffer.
    pub(crate) fn whole(buffer: &wgpu::Buffer) -> Self {
        Self::Buffer { buffer: buffer.clone(), offset: 0, size: buffer.size() }
    }
}

/// A range of elements of a buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ElementRange {
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// Bytes per element.
    pub(crate) bytes: u64,
}

impl ElementRange {
    /// Upper bound of the bytes of a binding of the range, at any alignment.
    pub(crate) const fn bound_bytes(count: u64, bytes: u64, alignment: u64) -> u64 {
        (count * bytes).next_multiple_of(4) + alignment
    }

    /// True if a binding of the range fits the device, at any alignment.
    pub(crate) fn fits(self, gpu: &Gpu) -> bool {
        Self::bound_bytes(self.count, self.bytes, gpu.chunk_limits().alignment)
            <= gpu.chunk_limits().binding_bytes
    }

    /// Returns the binding and the offset of the first element in it, in elements.
    pub(crate) fn bind(self, gpu: &Gpu, buffer: &wgpu::Buffer) -> Result<(BoundResource, u32)> {
        let start = self.first * self.bytes;
        let offset = start / gpu.chunk_limits().alignment * gpu.chunk_limits().alignment;
        let end = ((self.first + self.count) * self.bytes).next_multiple_of(4).max(offset + 4);
        let size = end - offset;
        if size > gpu.chunk_limits().binding_bytes || end > buffer.size() {
            return Err(Error::internal(format!(
                "{size} bytes from {offset} do not fit a binding of a buffer of {}",
                buffer.size()
            )));
        }
        let base = u32::try_from((start - offset) / self.bytes).map_err(Error::internal)?;
        Ok((BoundResource::Buffer { buffer: buffer.clone(), offset, size }, base))
    }
}

struct KernelLaunch {
    pipeline: Arc<Pipeline>,
    params: u64,
    bindings: Vec<BoundResource>,
    grid: (u32, u32),
}

/// Kernels that are submitted together, in order.
pub(crate) struct Commands<'a> {
    gpu: &'a Gpu,
    arena: &'a mut Arena,
    clears: Vec<wgpu::Buffer>,
    /// Filled staging buffers, their targets and sizes.
    uploads: Vec<(UploadBuffer, wgpu::Buffer, u64)>,
    launches: Vec<KernelLaunch>,
}

impl<'a> Commands<'a> {
    /// Starts an empty batch.
    pub(crate) fn new(gpu: &'a Gpu, arena: &'a mut Arena) -> Self {
        arena.bytes.clear();
        Self { gpu, arena, clears: Vec::new(), uploads: Vec::new(), launches: Vec::new() }
    }

    /// Uploads words that kernels of this batch and of later ones read, until the arena's next
    /// lists.
    pub(crate) fn lists(&mut self, words: &[u32]) -> Result<BoundResource> {
        let size = (words.len() as u64 * 4).max(4);
        let buffer = of_size(self.gpu, &mut self.arena.lists, "lists", size)?;
        let filled = self.gpu.fill(bytemuck::cast_slice(words))?;
        self.uploads.push((filled, buffer.clone(), size));
        self.gpu.staging().mask_bytes.fetch_add(size, Ordering::Relaxed);
        Ok(BoundResource::Buffer { buffer, offset: 0, size })
    }

    /// Zeros a buffer before the first kernel of the batch runs.
    pub(crate) fn clear(&mut self, buffer: &wgpu::Buffer) {
        self.clears.push(buffer.clone());
    }

    /// Appends a kernel. `params` computes its parameters from the width of the grid.
    pub(crate) fn launch<N: bytemuck::Pod>(
        &mut self,
        variant: KernelVariant,
        groups: u64,
        bindings: Vec<BoundResource>,
        params: impl FnOnce(u32) -> N,
    ) -> Result<()> {
        if groups == 0 {
            return Ok(());
        }
        let too_many = || {
            Error::unsupported(
                format!("{groups} workgroups of {}", variant.name()),
                self.gpu.name(),
            )
        };
        let grid = u32::try_from(groups)
            .ok()
            .and_then(|groups| self.gpu.grid(groups))
            .ok_or_else(too_many)?;
        let pipeline = self.gpu.pipeline(variant)?;
        let params = params(grid.0);
        let bytes = bytemuck::bytes_of(&params);
        if bytes.len() != pipeline.params {
            return Err(Error::internal(format!(
                "{}: parameters of another kernel",
                variant.name()
            )));
        }
        let params = self.append(bytes);
        self.launches.push(KernelLaunch { pipeline, params, bindings, grid });
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> u64 {
        let alignment = annulus_core::index(self.gpu.chunk_limits().alignment);
        let offset = self.arena.bytes.len().next_multiple_of(alignment);
        self.arena.bytes.resize(offset, 0);
        self.arena.bytes.extend_from_slice(bytes);
        // bindings are whole words and not empty
        let end = self.arena.bytes.len().max(offset + 4).next_multiple_of(4);
        self.arena.bytes.resize(end, 0);
        offset as u64
    }

    /// Submits the batch, whose last kernel counts it. Returns its place in the queue; `None` if it
    /// is empty.
    pub(crate) fn submit(self) -> Result<Option<Receipt>> {
        if self.launches.is_empty() && self.clears.is_empty() {
            return Ok(None);
        }
        self.submit_with(None).map(Some)
    }

    /// As [`Commands::submit`], with timestamps and also if it is empty.
    pub(crate) fn submit_timed(self, writes: ComputePassTimestampWrites<'_>) -> Result<Receipt> {
        self.submit_with(Some(writes))
    }

    fn submit_with(
        mut self,
        timestamp_writes: Option<ComputePassTimestampWrites<'_>>,
    ) -> Result<Receipt> {
        let counter = BoundResource::whole(&self.gpu.submissions().counter);
        self.launch(KernelVariant::Count, 1, vec![counter], |_| StepParams { step: 1 })?;
        let Self { gpu, arena, clears, mut uploads, launches } = self;
        let size = arena.bytes.len() as u64;
        let buffer = of_size(gpu, &mut arena.buffer, "parameters", size)?;
        uploads.push((gpu.fill(&arena.bytes)?, buffer.clone(), size));
        let receipt = gpu.submit(true, |device| {
            let groups: Vec<_> =
                launches.iter().map(|launch| bind_group(gpu, device, &buffer, launch)).collect();
            let mut encoder = device
                .create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("annulus") });
            for (from, into, size) in &uploads {
                encoder.copy_buffer_to_buffer(&from.0, 0, into, 0, *size);
            }
            clears.iter().for_each(|buffer| encoder.clear_buffer(buffer, 0, None));
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                    label: Some("annulus"),
                    timestamp_writes,
                });
                for (launch, group) in launches.iter().zip(&groups) {
                    pass.set_pipeline(&launch.pipeline.pipeline);
                    pass.set_bind_group(0, group, &[]);
                    pass.dispatch_workgroups(launch.grid.0, launch.grid.1, 1);
                }
            }
            encoder
        })?;
        uploads.into_iter().try_for_each(|(filled, ..)| filled.return_to_pool(gpu))?;
        Ok(receipt)
    }
}

fn bind_group(
    gpu: &Gpu,
    device: &wgpu::Device,
    arena: &wgpu::Buffer,
    launch: &KernelLaunch,
) -> wgpu::BindGroup {
    let part = |buffer, offset, size| {
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer,
            offset,
            size: std::num::NonZero::new(size),
        })
    };
    let params = part(arena, launch.params, launch.pipeline.params as u64);
    let bound = |bound: &'_ BoundResource| match bound {
        BoundResource::Buffer { buffer, offset, size } => (buffer.clone(), *offset, *size),
        BoundResource::Unused => (gpu.nothing().clone(), 0, gpu.nothing().size()),
    };
    let resources: Vec<_> = launch.bindings.iter().map(bound).collect();
    let storage = resources.iter().map(|(buffer, offset, size)| part(buffer, *offset, *size));
    let entries: Vec<_> = (0..)
        .zip(std::iter::once(params).chain(storage))
        .map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource })
        .collect();
    device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some("annulus"),
        layout: &launch.pipeline.layout,
        entries: &entries,
    })
}

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
