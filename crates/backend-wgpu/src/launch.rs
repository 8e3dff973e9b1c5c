//! Command batches: kernels with their uniform parameters and lists, submitted to the queue
//! together.

use std::sync::Arc;

use annulus_core::{Error, Result};
use wgpu::BufferUsages;

use crate::{device::Gpu, kernels::Variant, pipelines::Pipeline};

/// Memory for uniform parameters and lists, on host and device. Reused by every batch, which is
/// safe because the queue runs them in order.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    bytes: Vec<u8>,
    buffer: Option<wgpu::Buffer>,
}

/// Resource of a binding.
#[derive(Debug, Clone)]
pub(crate) enum BoundResource {
    /// Part of the arena.
    Arena { offset: u64, size: u64 },
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

    /// Returns the binding and the offset of the first element in it, in elements.
    pub(crate) fn bind(self, gpu: &Gpu, buffer: &wgpu::Buffer) -> Result<(BoundResource, u32)> {
        let start = self.first * self.bytes;
        let offset = start / gpu.alignment() * gpu.alignment();
        let end = ((self.first + self.count) * self.bytes).next_multiple_of(4).max(offset + 4);
        let size = end - offset;
        if size > gpu.max_binding_bytes() || end > buffer.size() {
            return Err(Error::internal(format!(
                "{size} bytes from {offset} do not fit a binding of a buffer of {}",
                buffer.size()
            )));
        }
        let base = u32::try_from((start - offset) / self.bytes).map_err(Error::internal)?;
        Ok((BoundResource::Buffer { buffer: buffer.clone(), offset, size }, base))
    }
}

struct Launch {
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
    launches: Vec<Launch>,
}

impl<'a> Commands<'a> {
    /// Starts an empty batch.
    pub(crate) fn new(gpu: &'a Gpu, arena: &'a mut Arena) -> Self {
        arena.bytes.clear();
        Self { gpu, arena, clears: Vec::new(), launches: Vec::new() }
    }

    /// Appends words that kernels read.
    pub(crate) fn data(&mut self, words: &[u32]) -> BoundResource {
        let offset = self.append(bytemuck::cast_slice(words));
        BoundResource::Arena { offset, size: (words.len() as u64 * 4).max(4) }
    }

    /// Zeros a buffer before the first kernel of the batch runs.
    pub(crate) fn clear(&mut self, buffer: &wgpu::Buffer) {
        self.clears.push(buffer.clone());
    }

    /// Appends a kernel. `params` computes its parameters from the width of the grid.
    pub(crate) fn launch<N: bytemuck::Pod>(
        &mut self,
        variant: Variant,
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
        self.launches.push(Launch { pipeline, params, bindings, grid });
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> u64 {
        let alignment = annulus_core::index(self.gpu.alignment());
        let offset = self.arena.bytes.len().next_multiple_of(alignment);
        self.arena.bytes.resize(offset, 0);
        self.arena.bytes.extend_from_slice(bytes);
        // bindings are whole words and not empty
        let end = self.arena.bytes.len().max(offset + 4).next_multiple_of(4);
        self.arena.bytes.resize(end, 0);
        offset as u64
    }

    /// Submits the batch.
    pub(crate) fn submit(self) -> Result<()> {
        let Self { gpu, arena, clears, launches } = self;
        if launches.is_empty() && clears.is_empty() {
            return Ok(());
        }
        let size = arena.bytes.len() as u64;
        let buffer = match &arena.buffer {
            Some(buffer) if buffer.size() >= size => buffer.clone(),
            _ => {
                let usage = BufferUsages::STORAGE | BufferUsages::UNIFORM | BufferUsages::COPY_DST;
                let buffer = gpu.create_buffer(
                    "params and lists",
                    size.next_power_of_two().max(4096),
                    usage,
                )?;
                arena.buffer = Some(buffer.clone());
                buffer
            }
        };
        let filled = gpu.fill(&arena.bytes)?;
        gpu.guard(|device, queue| {
            let groups: Vec<_> =
                launches.iter().map(|launch| bind_group(gpu, device, &buffer, launch)).collect();
            let mut encoder = device
                .create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("annulus") });
            if size > 0 {
                encoder.copy_buffer_to_buffer(&filled.0, 0, &buffer, 0, size);
            }
            clears.iter().for_each(|buffer| encoder.clear_buffer(buffer, 0, None));
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                    label: Some("annulus"),
                    timestamp_writes: None,
                });
                for (launch, group) in launches.iter().zip(&groups) {
                    pass.set_pipeline(&launch.pipeline.pipeline);
                    pass.set_bind_group(0, group, &[]);
                    pass.dispatch_workgroups(launch.grid.0, launch.grid.1, 1);
                }
            }
            queue.submit([encoder.finish()]);
        })?;
        filled.return_to_pool(gpu)
    }
}

fn bind_group(
    gpu: &Gpu,
    device: &wgpu::Device,
    arena: &wgpu::Buffer,
    launch: &Launch,
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
        BoundResource::Arena { offset, size } => (None, *offset, *size),
        BoundResource::Buffer { buffer, offset, size } => (Some(buffer.clone()), *offset, *size),
        BoundResource::Unused => (Some(gpu.nothing().clone()), 0, gpu.nothing().size()),
    };
    let resources: Vec<_> = launch.bindings.iter().map(bound).collect();
    let storage = resources
        .iter()
        .map(|(buffer, offset, size)| part(buffer.as_ref().unwrap_or(arena), *offset, *size));
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
