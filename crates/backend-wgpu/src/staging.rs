//! Host-visible buffers for uploads and downloads, pooled per device.
//!
//! An upload buffer waits in the pool mapped. It is filled, unmapped, read by queued work, and
//! mapped again, which completes after that work. A download buffer is written by queued work,
//! mapped, read, and returned to the pool unmapped.

use std::{
    ops::Range,
    sync::{Arc, Mutex, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use annulus_core::{Error, Result, index};
use wgpu::{BufferUsages, MapMode};

use crate::{
    device::{Gpu, PATIENCE, lock},
    errors::device_error,
    pools::{StagingPools, take_fitting},
};

/// Interval between polls of a copy: a trade-off between latency and load on the host.
const POLL: Duration = Duration::from_micros(50);

/// Bytes copied between host and device, as returned by [`Gpu::transfers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Transfers {
    /// Tensors and blocks. Parameters of kernels and their block-sparse masks are not counted.
    pub to_device: u64,
    /// Tensors, blocks and timestamps.
    pub to_host: u64,
}

/// A filled upload buffer.
pub(crate) struct UploadBuffer(pub(crate) wgpu::Buffer);

impl UploadBuffer {
    /// Returns the buffer to the pool once queued work has read it.
    pub(crate) fn return_to_pool(self, gpu: &Gpu) -> Result<()> {
        let pool = Arc::clone(&gpu.staging().uploads);
        let buffer = self.0.clone();
        gpu.guard(|_, _| {
            self.0.map_async(MapMode::Write, .., move |mapped| {
                // mapping fails only if the device is lost
                if mapped.is_ok() {
                    lock(&pool).push(buffer);
                }
            });
        })
    }
}

/// A copy to the host in progress.
#[derive(Debug)]
pub(crate) struct PendingRead {
    buffer: wgpu::Buffer,
    mapped: Arc<Mutex<Option<Result<(), String>>>>,
}

impl Gpu {
    /// Returns the bytes copied through this handle and its clones so far, in whole words of 4
    /// bytes.
    pub fn transfers(&self) -> Transfers {
        let StagingPools { bytes_to_device, bytes_to_host, .. } = self.staging();
        Transfers {
            to_device: bytes_to_device.load(Ordering::Relaxed),
            to_host: bytes_to_host.load(Ordering::Relaxed),
        }
    }

    /// Fills an upload buffer.
    pub(crate) fn fill(&self, bytes: &[u8]) -> Result<UploadBuffer> {
        let size = (bytes.len() as u64).max(4).next_multiple_of(4);
        let free = take_fitting(&mut lock(&self.staging().uploads), size);
        let buffer = match free {
            Some(buffer) => buffer,
            None => {
                let descriptor = wgpu::BufferDescriptor {
                    label: Some("upload"),
                    size: size.next_power_of_two().max(4096),
                    usage: BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC,
                    mapped_at_creation: true,
                };
                self.guard(|device, _| device.create_buffer(&descriptor)).map_err(|error| {
                    match error {
                        Error::OutOfMemory { .. } => {
                            Error::out_of_memory("an upload to the device", size)
                        }
                        other => other,
                    }
                })?
            }
        };
        {
            let mut view =
                buffer.slice(..size).get_mapped_range_mut().map_err(|error| self.explain(error))?;
            view.slice(..bytes.len()).copy_from_slice(bytes);
        }
        self.guard(|_, _| buffer.unmap())?;
        Ok(UploadBuffer(buffer))
    }

    /// Starts copying byte ranges (multiples of 4) of `from`, concatenated, to the host.
    pub(crate) fn start_read(
        &self,
        from: &wgpu::Buffer,
        ranges: &[Range<u64>],
    ) -> Result<PendingRead> {
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let size = total.max(4);
        let free = take_fitting(&mut lock(&self.staging().downloads), size);
        let buffer = match free {
            Some(buffer) => buffer,
            None => self.create_buffer(
                "download",
                size.next_power_of_two().max(4096),
                BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            )?,
        };
        let mapped = Arc::new(Mutex::new(None));
        let result_slot = Arc::clone(&mapped);
        self.guard(|device, queue| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor {
                label: Some("download"),
            });
            let mut at = 0;
            for range in ranges {
                let bytes = range.end - range.start;
                encoder.copy_buffer_to_buffer(from, range.start, &buffer, at, bytes);
                at += bytes;
            }
            queue.submit([encoder.finish()]);
            buffer.map_async(MapMode::Read, .., move |result| {
                *lock(&result_slot) = Some(result.map_err(|error| error.to_string()))
            });
        })?;
        self.staging().bytes_to_host.fetch_add(total, Ordering::Relaxed);
        Ok(PendingRead { buffer, mapped })
    }

    /// Calls `read` with the bytes if the copy is complete. Never waits.
    pub(crate) fn try_read<T>(
        &self,
        copy: &PendingRead,
        read: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<Option<T>> {
        self.poll_once()?;
        match lock(&copy.mapped).take() {
            None => return Ok(None),
            Some(Err(what)) => return Err(self.explain(what)),
            Some(Ok(())) => {}
        }
        let result = {
            let view =
                copy.buffer.slice(..).get_mapped_range().map_err(|error| self.explain(error))?;
            read(&view)
        };
        self.guard(|_, _| copy.buffer.unmap())?;
        lock(&self.staging().downloads).push(copy.buffer.clone());
        result.map(Some)
    }

    /// Downloads bytes of a buffer, waits for them, and calls `read` with them, once.
    pub(crate) fn read<T>(
        &self,
        from: &wgpu::Buffer,
        bytes: u64,
        mut read: impl FnMut(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let copy = self.start_read(from, std::slice::from_ref(&(0..bytes.next_multiple_of(4))))?;
        self.synchronize()?;
        // the work is done, but another thread's poll may run the mapping callback
        let start = Instant::now();
        loop {
            let done = self.try_read(&copy, |view| {
                let whole = view.get(..index(bytes));
                read(whole.ok_or_else(|| Error::internal("a download is too short"))?)
            })?;
            if let Some(done) = done {
                return Ok(done);
            }
            if start.elapsed() > PATIENCE {
                return Err(device_error("a download did not complete"));
            }
            thread::sleep(POLL);
        }
    }

    /// Starts uploading: pairs of (bytes, offset in `into`), all multiples of 4.
    pub(crate) fn write(
        &self,
        into: &wgpu::Buffer,
        bytes: &[u8],
        copies: &[(Range<u64>, u64)],
    ) -> Result<()> {
        let filled = self.fill(bytes)?;
        self.guard(|device, queue| {
            let mut encoder = device
                .create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("upload") });
            for (part, at) in copies {
                encoder.copy_buffer_to_buffer(
                    &filled.0,
                    part.start,
                    into,
                    *at,
                    part.end - part.start,
                );
            }
            queue.submit([encoder.finish()]);
        })?;
        let total: u64 = copies.iter().map(|(part, _)| part.end - part.start).sum();
        self.staging().bytes_to_device.fetch_add(total, Ordering::Relaxed);
        filled.return_to_pool(self)
    }
}

/// Numbers of idle upload and download buffers.
#[cfg(test)]
pub(crate) fn pooled(gpu: &Gpu) -> (usize, usize) {
    (lock(&gpu.staging().uploads).len(), lock(&gpu.staging().downloads).len())
}
