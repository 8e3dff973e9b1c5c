//! Host-visible buffers that everything passes through which goes to the device or comes from it, used again and again.
//!
//! A buffer for uploads is mapped while it waits in the pool. It is filled, unmapped, copied from by queued work, and mapped again for the next
//! one; the mapping succeeds when that work is done. A buffer for downloads is copied into by queued work and then mapped; it goes back to the
//! pool unmapped.

use std::{
    ops::Range,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use annulus_core::{Error, Result, index};
use wgpu::{BufferUsages, MapMode};

use crate::{
    device::{Gpu, PATIENCE, lock},
    fault::fault,
};

/// How often a copy that is waited for is looked after.
const POLL: Duration = Duration::from_micros(50);

/// The pools of one device.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    uploads: Arc<Mutex<Vec<wgpu::Buffer>>>,
    downloads: Mutex<Vec<wgpu::Buffer>>,
}

/// A filled buffer on its way to the device.
pub(crate) struct Filled(pub(crate) wgpu::Buffer);

impl Filled {
    /// Gives it back once the work that was queued has read it.
    pub(crate) fn recall(self, gpu: &Gpu) -> Result<()> {
        let (pool, buffer) = (Arc::clone(&gpu.staging().uploads), self.0.clone());
        gpu.guard(|_, _| {
            self.0.map_async(MapMode::Write, .., move |mapped| {
                // one that cannot be mapped is gone, with its device
                if mapped.is_ok() {
                    lock(&pool).push(buffer);
                }
            });
        })
    }
}

/// A copy to the host under way.
#[derive(Debug)]
pub(crate) struct Coming {
    buffer: wgpu::Buffer,
    mapped: Arc<Mutex<Option<Result<(), String>>>>,
}

/// The smallest buffer of a pool that holds `bytes`.
fn take(pool: &mut Vec<wgpu::Buffer>, bytes: u64) -> Option<wgpu::Buffer> {
    let fitting = pool.iter().enumerate().filter(|(_, buffer)| buffer.size() >= bytes);
    let place = fitting.min_by_key(|(_, buffer)| buffer.size()).map(|(place, _)| place)?;
    Some(pool.swap_remove(place))
}

impl Gpu {
    /// `bytes` in a buffer that queued work can copy from.
    pub(crate) fn fill(&self, bytes: &[u8]) -> Result<Filled> {
        let size = (bytes.len() as u64).max(4).next_multiple_of(4);
        let free = take(&mut lock(&self.staging().uploads), size);
        let buffer = match free {
            Some(buffer) => buffer,
            None => {
                let descriptor = wgpu::BufferDescriptor {
                    label: Some("upload"),
                    size: size.next_power_of_two().max(4096),
                    usage: BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC,
                    mapped_at_creation: true,
                };
                self.guard(|device, _| device.create_buffer(&descriptor)).map_err(|error| match error {
                    Error::OutOfMemory { .. } => Error::OutOfMemory { asked: size, free: None },
                    other => other,
                })?
            }
        };
        {
            let mut view = buffer.slice(..size).get_mapped_range_mut().map_err(|error| self.explain(error))?;
            view.slice(..bytes.len()).copy_from_slice(bytes);
        }
        self.guard(|_, _| buffer.unmap())?;
        Ok(Filled(buffer))
    }

    /// Starts copying byte ranges (multiples of 4) of `from`, one after another, to the host.
    pub(crate) fn fetch(&self, from: &wgpu::Buffer, ranges: &[Range<u64>]) -> Result<Coming> {
        let size = ranges.iter().map(|range| range.end - range.start).sum::<u64>().max(4);
        let free = take(&mut lock(&self.staging().downloads), size);
        let buffer = match free {
            Some(buffer) => buffer,
            None => self.create_buffer("download", size.next_power_of_two().max(4096), BufferUsages::MAP_READ | BufferUsages::COPY_DST)?,
        };
        let mapped = Arc::new(Mutex::new(None));
        let place = Arc::clone(&mapped);
        self.guard(|device, queue| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("download") });
            let mut at = 0;
            for range in ranges {
                let bytes = range.end - range.start;
                encoder.copy_buffer_to_buffer(from, range.start, &buffer, at, bytes);
                at += bytes;
            }
            queue.submit([encoder.finish()]);
            buffer.map_async(MapMode::Read, .., move |result| *lock(&place) = Some(result.map_err(|error| error.to_string())));
        })?;
        Ok(Coming { buffer, mapped })
    }

    /// Whether a copy has come; then `read` is given its bytes. Never waits.
    pub(crate) fn came<T>(&self, copy: &Coming, read: impl FnOnce(&[u8]) -> Result<T>) -> Result<Option<T>> {
        self.look()?;
        match lock(&copy.mapped).take() {
            None => return Ok(None),
            Some(Err(what)) => return Err(self.explain(what)),
            Some(Ok(())) => {}
        }
        let result = {
            let view = copy.buffer.slice(..).get_mapped_range().map_err(|error| self.explain(error))?;
            read(&view)
        };
        self.guard(|_, _| copy.buffer.unmap())?;
        lock(&self.staging().downloads).push(copy.buffer.clone());
        result.map(Some)
    }

    /// Copies bytes of a buffer to the host and waits for them.
    pub(crate) fn read(&self, from: &wgpu::Buffer, bytes: u64) -> Result<Vec<u8>> {
        let copy = self.fetch(from, std::slice::from_ref(&(0..bytes.next_multiple_of(4))))?;
        self.synchronize()?;
        // done it is, but it may be another thread's poll that tells of it
        let start = Instant::now();
        loop {
            let read = |view: &[u8]| view.get(..index(bytes)).map(<[u8]>::to_vec).ok_or_else(|| fault("a copy to the host is too short"));
            if let Some(read) = self.came(&copy, read)? {
                return Ok(read);
            }
            if start.elapsed() > PATIENCE {
                return Err(fault("a copy to the host did not come"));
            }
            thread::sleep(POLL);
        }
    }

    /// Starts copying bytes from the host to aligned places of `into`: pairs of (bytes, offset in `into`), all multiples of 4.
    pub(crate) fn write(&self, into: &wgpu::Buffer, bytes: &[u8], places: &[(Range<u64>, u64)]) -> Result<()> {
        let filled = self.fill(bytes)?;
        self.guard(|device, queue| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("upload") });
            for (part, at) in places {
                encoder.copy_buffer_to_buffer(&filled.0, part.start, into, *at, part.end - part.start);
            }
            queue.submit([encoder.finish()]);
        })?;
        filled.recall(self)
    }
}

/// Buffers for uploads and for downloads that wait in the pools.
#[cfg(test)]
pub(crate) fn pooled(gpu: &Gpu) -> (usize, usize) {
    (lock(&gpu.staging().uploads).len(), lock(&gpu.staging().downloads).len())
}
