//! Work that is put together on the host and handed to the queue at once: kernels, their numbers, and what the host has to tell them.

use std::sync::Arc;

use annulus_core::{Error, Result};
use wgpu::BufferUsages;

use crate::{
    device::{Gpu, Pipeline},
    fault::fault,
    kernels::Variant,
};

/// Memory for numbers and lists, on both sides, used again by every job: the queue keeps its order.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    bytes: Vec<u8>,
    buffer: Option<wgpu::Buffer>,
}

/// What a binding is bound to.
#[derive(Debug, Clone)]
pub(crate) enum Bound {
    /// A part of the arena.
    Arena { offset: u64, size: u64 },
    /// A part of a buffer.
    Buffer { buffer: wgpu::Buffer, offset: u64, size: u64 },
    /// This plan has nothing for it.
    Nothing,
}

impl Bound {
    /// A whole buffer.
    pub(crate) fn whole(buffer: &wgpu::Buffer) -> Self {
        Self::Buffer { buffer: buffer.clone(), offset: 0, size: buffer.size() }
    }
}

/// A stretch of elements of a buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stretch {
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// Bytes of an element.
    pub(crate) bytes: u64,
}

impl Stretch {
    /// Bytes that a binding of it takes, wherever it begins.
    pub(crate) const fn bound_bytes(count: u64, bytes: u64, alignment: u64) -> u64 {
        (count * bytes).next_multiple_of(4) + alignment
    }

    /// The binding, and the place of the first element in it, in elements.
    pub(crate) fn bind(self, gpu: &Gpu, buffer: &wgpu::Buffer) -> Result<(Bound, u32)> {
        let start = self.first * self.bytes;
        let offset = start / gpu.alignment() * gpu.alignment();
        let end = ((self.first + self.count) * self.bytes).next_multiple_of(4).max(offset + 4);
        let size = end - offset;
        if size > gpu.most_binding() || end > buffer.size() {
            return Err(fault(format!("{size} bytes from {offset} do not fit a binding of a buffer of {} (a defect)", buffer.size())));
        }
        let base = u32::try_from((start - offset) / self.bytes).map_err(fault)?;
        Ok((Bound::Buffer { buffer: buffer.clone(), offset, size }, base))
    }
}

struct Launch {
    pipeline: Arc<Pipeline>,
    numbers: u64,
    bindings: Vec<Bound>,
    grid: (u32, u32),
}

/// Kernels that are queued together, in order.
pub(crate) struct Job<'a> {
    gpu: &'a Gpu,
    arena: &'a mut Arena,
    clears: Vec<wgpu::Buffer>,
    launches: Vec<Launch>,
}

impl<'a> Job<'a> {
    /// Nothing yet.
    pub(crate) fn new(gpu: &'a Gpu, arena: &'a mut Arena) -> Self {
        arena.bytes.clear();
        Self { gpu, arena, clears: Vec::new(), launches: Vec::new() }
    }

    /// Words that kernels read.
    pub(crate) fn data(&mut self, words: &[u32]) -> Bound {
        let offset = self.append(bytemuck::cast_slice(words));
        Bound::Arena { offset, size: (words.len() as u64 * 4).max(4) }
    }

    /// Sets all bytes of a buffer to 0 before the first kernel runs.
    pub(crate) fn clear(&mut self, buffer: &wgpu::Buffer) {
        self.clears.push(buffer.clone());
    }

    /// Adds a kernel. `numbers` is made of what its grid's width is.
    pub(crate) fn launch<N: bytemuck::Pod>(
        &mut self,
        variant: Variant,
        groups: u64,
        bindings: Vec<Bound>,
        numbers: impl FnOnce(u32) -> N,
    ) -> Result<()> {
        if groups == 0 {
            return Ok(());
        }
        let too_many = || Error::unsupported(format!("{groups} workgroups of {}", variant.name()), self.gpu.name());
        let grid = u32::try_from(groups).ok().and_then(|groups| self.gpu.grid(groups)).ok_or_else(too_many)?;
        let pipeline = self.gpu.pipeline(variant)?;
        let numbers = numbers(grid.0);
        let bytes = bytemuck::bytes_of(&numbers);
        if bytes.len() != pipeline.numbers {
            return Err(fault(format!("{} was given the numbers of another kernel (a defect)", variant.name())));
        }
        let numbers = self.append(bytes);
        self.launches.push(Launch { pipeline, numbers, bindings, grid });
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> u64 {
        let alignment = annulus_core::index(self.gpu.alignment());
        let offset = self.arena.bytes.len().next_multiple_of(alignment);
        self.arena.bytes.resize(offset, 0);
        self.arena.bytes.extend_from_slice(bytes);
        // what is bound is whole words, and never nothing
        let end = self.arena.bytes.len().max(offset + 4).next_multiple_of(4);
        self.arena.bytes.resize(end, 0);
        offset as u64
    }

    /// Queues everything.
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
                let buffer = gpu.create_buffer("numbers and lists", size.next_power_of_two().max(4096), usage)?;
                arena.buffer = Some(buffer.clone());
                buffer
            }
        };
        let filled = gpu.fill(&arena.bytes)?;
        gpu.guard(|device, queue| {
            let groups: Vec<_> = launches.iter().map(|launch| bind_group(gpu, device, &buffer, launch)).collect();
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("annulus") });
            if size > 0 {
                encoder.copy_buffer_to_buffer(&filled.0, 0, &buffer, 0, size);
            }
            clears.iter().for_each(|buffer| encoder.clear_buffer(buffer, 0, None));
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some("annulus"), timestamp_writes: None });
                for (launch, group) in launches.iter().zip(&groups) {
                    pass.set_pipeline(&launch.pipeline.pipeline);
                    pass.set_bind_group(0, group, &[]);
                    pass.dispatch_workgroups(launch.grid.0, launch.grid.1, 1);
                }
            }
            queue.submit([encoder.finish()]);
        })?;
        filled.recall(gpu)
    }
}

fn bind_group(gpu: &Gpu, device: &wgpu::Device, arena: &wgpu::Buffer, launch: &Launch) -> wgpu::BindGroup {
    let part =
        |buffer, offset, size| wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset, size: std::num::NonZero::new(size) });
    let numbers = part(arena, launch.numbers, launch.pipeline.numbers as u64);
    let bound = |bound: &'_ Bound| match bound {
        Bound::Arena { offset, size } => (None, *offset, *size),
        Bound::Buffer { buffer, offset, size } => (Some(buffer.clone()), *offset, *size),
        Bound::Nothing => (Some(gpu.nothing().clone()), 0, gpu.nothing().size()),
    };
    let places: Vec<_> = launch.bindings.iter().map(bound).collect();
    let storage = places.iter().map(|(buffer, offset, size)| part(buffer.as_ref().unwrap_or(arena), *offset, *size));
    let entries: Vec<_> =
        (0..).zip(std::iter::once(numbers).chain(storage)).map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource }).collect();
    device.create_bind_group(&wgpu::BindGroupDescriptor { label: Some("annulus"), layout: &launch.pipeline.layout, entries: &entries })
}
