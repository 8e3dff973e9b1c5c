//! Host-visible buffers for uploads and downloads, pooled per device.
//!
//! An upload buffer waits in the pool mapped. It is filled, unmapped, read by queued work, and
//! mapped again, which completes after that work. A download buffer is written by queued work,
//! mapped, read, and returned to the pool unmapped. Tensors pass through in pieces of
//! [`PIECE_BYTES`].

use std::{
    ops::{ControlFlow, Range},
    sync::{Arc, Mutex, atomic::Ordering},
};

use annulus_core::{Error, Result, Tick, index};
use wgpu::{BufferUsages, MapMode};

use crate::{
    adapter::lock,
    device::Gpu,
    pacing::{QueueSilence, Receipt, StagingPools, keep, take_fitting},
};

/// Bytes of a staging buffer for tensors: large beside the cost of a submission (64 MiB take 4 ms
/// over PCIe 3), small beside the memory of a host.
pub(crate) const PIECE_BYTES: u64 = 64 << 20;

/// Uploads that may be in the queue, in bytes.
const MAX_UPLOADING: u64 = 4 * PIECE_BYTES;

/// Bytes of a download that contain the counter of batches.
const COUNTER_BYTES: u64 = 4;

/// Bytes copied between host and device, as returned by [`Gpu::transfers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TransferredBytes {
    /// Tensors and blocks. Not counted: parameters of kernels, and their block-sparse masks
    /// ([`Gpu::mask_bytes`]).
    pub to_device: u64,
    /// Tensors, blocks and timestamps.
    pub to_host: u64,
}

/// A filled upload buffer.
#[derive(Debug)]
pub(crate) struct UploadBuffer(pub(crate) wgpu::Buffer);

impl UploadBuffer {
    /// Returns the buffer to the pool once queued work has read it.
    pub(crate) fn return_to_pool(self, gpu: &Gpu) -> Result<()> {
        let pool = Arc::clone(&gpu.staging().uploads);
        let uploading = Arc::clone(&gpu.staging().uploading);
        let buffer = self.0.clone();
        uploading.fetch_add(buffer.size(), Ordering::Relaxed);
        gpu.guard(|_, _| {
            self.0.map_async(MapMode::Write, .., move |mapped| {
                uploading.fetch_sub(buffer.size(), Ordering::Relaxed);
                // mapping fails only if the device is lost
                if mapped.is_ok() {
                    keep(&mut lock(&pool), buffer);
                }
            });
        })
    }
}

/// A copy to the host in progress.
#[derive(Debug)]
pub(crate) struct PendingRead {
    buffer: wgpu::Buffer,
    /// Bytes before the counter.
    bytes: u64,
    receipt: Receipt,
    mapped: Arc<Mutex<Option<Result<(), String>>>>,
    /// Time without a completed submission, for waits that poll.
    silence: Mutex<QueueSilence>,
    /// Keeps the device open.
    _gpu: Gpu,
}

impl Gpu {
    /// Returns the bytes copied through this handle and its clones so far, in whole words of 4
    /// bytes.
    pub fn transfers(&self) -> TransferredBytes {
        let StagingPools { bytes_to_device, bytes_to_host, .. } = self.staging();
        TransferredBytes {
            to_device: bytes_to_device.load(Ordering::Relaxed),
            to_host: bytes_to_host.load(Ordering::Relaxed),
        }
    }

    /// Returns the bytes of block-sparse masks copied to the device so far.
    pub fn mask_bytes(&self) -> u64 {
        self.staging().mask_bytes.load(Ordering::Relaxed)
    }

    /// Returns an upload buffer of at least `bytes` bytes from the pool, or a new one.
    fn upload_buffer(&self, bytes: u64) -> Result<wgpu::Buffer> {
        if let Some(buffer) = take_fitting(&mut lock(&self.staging().uploads), bytes) {
            return Ok(buffer);
        }
        let descriptor = wgpu::BufferDescriptor {
            label: Some("upload"),
            size: self.rounded_size(bytes),
            usage: BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC,
            mapped_at_creation: true,
        };
        self.guard(|device, _| device.create_buffer(&descriptor)).map_err(|error| match error {
            Error::OutOfMemory { .. } => Error::out_of_memory("an upload to the device", bytes),
            other => other,
        })
    }

    /// Fills an upload buffer with pieces of memory, in order.
    fn fill_all(&self, pieces: &[&[u8]]) -> Result<UploadBuffer> {
        let total: usize = pieces.iter().map(|piece| piece.len()).sum();
        let size = (total as u64).max(4).next_multiple_of(4);
        let buffer = self.upload_buffer(size)?;
        {
            let mut view =
                buffer.slice(..size).get_mapped_range_mut().map_err(|error| self.explain(error))?;
            let mut at = 0;
            for piece in pieces {
                view.slice(at..at + piece.len()).copy_from_slice(piece);
                at += piece.len();
            }
        }
        self.guard(|_, _| buffer.unmap())?;
        Ok(UploadBuffer(buffer))
    }

    /// Fills an upload buffer.
    pub(crate) fn fill(&self, bytes: &[u8]) -> Result<UploadBuffer> {
        self.fill_all(&[bytes])
    }

    /// Starts copying byte ranges (multiples of 4) of `from`, concatenated, to the host.
    pub(crate) fn start_read(
        &self,
        from: &wgpu::Buffer,
        ranges: &[Range<u64>],
    ) -> Result<PendingRead> {
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let size = bytes + COUNTER_BYTES;
        let free = take_fitting(&mut lock(&self.staging().downloads), size);
        let buffer = match free {
            Some(buffer) => buffer,
            None => self.create_buffer(
                "download",
                self.rounded_size(size),
                BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            )?,
        };
        let receipt = self.submit(false, |device| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor {
                label: Some("download"),
            });
            let mut at = 0;
            for range in ranges {
                let bytes = range.end - range.start;
                encoder.copy_buffer_to_buffer(from, range.start, &buffer, at, bytes);
                at += bytes;
            }
            let counter = &self.submissions().counter;
            encoder.copy_buffer_to_buffer(counter, 0, &buffer, at, COUNTER_BYTES);
            encoder
        })?;
        let mapped = Arc::new(Mutex::new(None));
        let result_slot = Arc::clone(&mapped);
        self.guard(|_, _| {
            buffer.map_async(MapMode::Read, .., move |result| {
                *lock(&result_slot) = Some(result.map_err(|error| error.to_string()))
            });
        })?;
        self.staging().bytes_to_host.fetch_add(bytes, Ordering::Relaxed);
        let silence = Mutex::new(self.silence());
        Ok(PendingRead { buffer, bytes, receipt, mapped, silence, _gpu: self.clone() })
    }

    /// Calls `read` with the bytes if the copy is complete and all kernels before it ran. Never
    /// waits.
    ///
    /// # Errors
    /// [`Error::Device`] as [`Gpu::synchronize`], so that a wait which polls ends.
    pub(crate) fn try_read<T>(
        &self,
        copy: &PendingRead,
        read: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<Option<T>> {
        self.poll_once()?;
        match lock(&copy.mapped).take() {
            None => {
                self.check_silence(&mut lock(&copy.silence))?;
                return Ok(None);
            }
            Some(Err(what)) => return Err(self.explain(what)),
            Some(Ok(())) => {}
        }
        let result = {
            let view =
                copy.buffer.slice(..).get_mapped_range().map_err(|error| self.explain(error))?;
            let too_short = || Error::internal("a download is too short");
            let (bytes, counter) =
                view.split_at_checked(index(copy.bytes)).ok_or_else(too_short)?;
            let counter = counter.first_chunk().ok_or_else(too_short)?;
            self.check_counter(u32::from_ne_bytes(*counter), copy.receipt)?;
            read(bytes)
        };
        self.guard(|_, _| copy.buffer.unmap())?;
        keep(&mut lock(&self.staging().downloads), copy.buffer.clone());
        result.map(Some)
    }

    /// Waits for a copy and calls `read` with its bytes. Returns `Break`, without a call, if the
    /// tick did.
    fn finish_read(
        &self,
        copy: &PendingRead,
        tick: Tick<'_>,
        read: impl FnOnce(&[u8]) -> Result<()>,
    ) -> Result<ControlFlow<()>> {
        let is_mapped = || lock(&copy.mapped).is_some();
        let flow = self.wait_until(is_mapped, tick)?;
        if flow.is_continue() {
            let twice = || Error::internal("a download was read twice");
            self.try_read(copy, read)?.ok_or_else(twice)?;
        }
        Ok(flow)
    }

    /// Waits until all queued work is done, and checks that it ran.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails, skipped work without an error, or completes nothing
    /// for [`crate::PATIENCE`].
    pub fn synchronize(&self) -> Result<()> {
        let copy = self.start_read(self.nothing(), &[])?;
        self.finish_read(&copy, &mut || ControlFlow::Continue(()), |_| Ok(())).map(drop)
    }

    /// Downloads the first `bytes` bytes of a buffer. Calls `read` with each piece of them, in
    /// order; a piece is a multiple of 8 bytes long, but for the last one.
    pub(crate) fn read(
        &self,
        from: &wgpu::Buffer,
        bytes: u64,
        read: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        self.read_with(from, bytes, &mut || ControlFlow::Continue(()), read)
    }

    /// As [`Gpu::read`]; ticks while it waits and between pieces, and returns early if the tick
    /// breaks.
    pub(crate) fn read_with(
        &self,
        from: &wgpu::Buffer,
        bytes: u64,
        tick: Tick<'_>,
        mut read: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let piece = |start: u64| start..(start + PIECE_BYTES).min(bytes);
        let start_read = |part: &Range<u64>| {
            let words = part.start..part.end.next_multiple_of(4);
            self.start_read(from, std::slice::from_ref(&words))
        };
        let mut part = piece(0);
        let mut copy = start_read(&part)?;
        loop {
            // the next piece is copied while this one is read
            let next = piece(part.end);
            let following = if next.is_empty() { None } else { Some(start_read(&next)?) };
            let flow = self.finish_read(&copy, &mut *tick, |view| {
                let whole = view.get(..index(part.end - part.start));
                read(whole.ok_or_else(|| Error::internal("a download is too short"))?)
            })?;
            // a piece that is there already is read without a wait
            let goes_on = flow.is_continue() && tick().is_continue();
            let Some(following) = following.filter(|_| goes_on) else { return Ok(()) };
            (part, copy) = (next, following);
        }
    }

    /// Starts uploading: pairs of (range of `bytes`, offset in `into`), whole words; a range may
    /// exceed `bytes` by up to 3. Ticks while it waits and between pieces; returns early if the
    /// tick breaks.
    pub(crate) fn write(
        &self,
        into: &wgpu::Buffer,
        bytes: &[u8],
        copies: &[(Range<u64>, u64)],
        tick: Tick<'_>,
    ) -> Result<()> {
        let mut pieces: Vec<(Range<u64>, u64)> = Vec::new();
        let mut total = 0;
        for (part, at) in copies {
            let mut start = part.start;
            while start < part.end {
                let end = part.end.min(start + (PIECE_BYTES - total));
                pieces.push((start..end, at + (start - part.start)));
                total += end - start;
                start = end;
                if total == PIECE_BYTES {
                    if self.write_piece(into, bytes, &pieces, &mut *tick)?.is_break() {
                        return Ok(());
                    }
                    pieces.clear();
                    total = 0;
                }
            }
        }
        if !pieces.is_empty() {
            let _last = self.write_piece(into, bytes, &pieces, tick)?;
        }
        Ok(())
    }

    /// As [`Gpu::write`], through one staging buffer. Waits while too many are in the queue.
    /// Returns `Break` if the tick did; then the piece may not have been copied.
    fn write_piece(
        &self,
        into: &wgpu::Buffer,
        bytes: &[u8],
        copies: &[(Range<u64>, u64)],
        tick: Tick<'_>,
    ) -> Result<ControlFlow<()>> {
        let has_room = || self.staging().uploading.load(Ordering::Relaxed) < MAX_UPLOADING;
        if tick().is_break() || self.wait_until(has_room, tick)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        let piece = |part: &Range<u64>| {
            let end = part.end.min(bytes.len() as u64);
            bytes.get(index(part.start)..index(end)).ok_or_else(|| {
                Error::internal(format!("an upload of {part:?} of {} bytes", bytes.len()))
            })
        };
        let pieces: Vec<&[u8]> =
            copies.iter().map(|(part, _)| piece(part)).collect::<Result<_>>()?;
        let filled = self.fill_all(&pieces)?;
        let mut from = 0;
        self.submit(false, |device| {
            let mut encoder = device
                .create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("upload") });
            for (part, at) in copies {
                let length = part.end - part.start;
                encoder.copy_buffer_to_buffer(&filled.0, from, into, *at, length);
                from += length;
            }
            encoder
        })?;
        self.staging().bytes_to_device.fetch_add(from, Ordering::Relaxed);
        filled.return_to_pool(self)?;
        Ok(ControlFlow::Continue(()))
    }
}

/// Numbers of idle upload and download buffers.
#[cfg(test)]
pub(crate) fn pooled(gpu: &Gpu) -> (usize, usize) {
    (lock(&gpu.staging().uploads).len(), lock(&gpu.staging().downloads).len())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use annulus_core::{DType, DeviceSpace, HostView};
    use ndarray::Array4;

    use super::*;
    use crate::{Options, PATIENCE, Tensor, WgpuSpace, queue::tests::gpu};

    #[test]
    fn a_tensor_near_the_limit_of_a_buffer_is_copied() {
        // the next power of two exceeds the limit, as 2 GiB do with wgpu's cap of 2 GiB − 1
        let Some(gpu) = gpu(&Options { most_buffer_bytes: Some(100_000), ..Options::default() })
        else {
            return;
        };
        let from = Array4::from_shape_fn((1, 30, 40, 20), |(_, a, b, c)| (a + 7 * b + c) as f32);
        let tensor = Tensor::upload(&gpu, from.view()).unwrap();
        assert_eq!(tensor.download::<f32>().unwrap(), from);
    }

    #[test]
    fn an_upload_ticks_while_256_mib_are_in_the_queue() {
        let Some(gpu) = gpu(&Options::default()) else { return };
        let uploading = &gpu.staging().uploading;
        let from = Array4::<f32>::ones((1, 1, 1, 8));
        let mut tensor = Tensor::zeros(&gpu, [1, 1, 1, 8], DType::F32).unwrap();
        // four staging buffers of 64 MiB: more would take the memory of a small host
        uploading.fetch_add(256 << 20, Ordering::Relaxed);
        let mut upload = |tick: Tick<'_>| {
            WgpuSpace::upload(&gpu, HostView::F32(from.view()), &mut tensor, tick).unwrap();
            tensor.download::<f32>().unwrap()
        };
        // a break ends the wait, and nothing is copied
        let mut ticks = 0;
        let into = upload(&mut || {
            ticks += 1;
            if ticks < 10 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        assert_eq!((ticks, into.sum()), (10, 0.0));
        // the wait ends once there is room
        let into = upload(&mut || {
            ticks += 1;
            if ticks == 20 {
                uploading.fetch_sub(256 << 20, Ordering::Relaxed);
            }
            ControlFlow::Continue(())
        });
        assert!(ticks >= 20 && into == from, "{ticks} ticks, {into}");
    }

    #[test]
    fn a_polled_copy_ends_after_60_s_without_a_completed_submission() {
        let Some(gpu) = gpu(&Options::default()) else { return };
        let mut copy = gpu.start_read(gpu.nothing(), &[]).unwrap();
        // nothing is in the queue after it, so no submission completes any more
        gpu.synchronize().unwrap();
        copy.mapped = Arc::default();
        assert!(gpu.try_read(&copy, |_| Ok(())).unwrap().is_none());
        let since = Instant::now().checked_sub(PATIENCE + Duration::from_secs(1)).unwrap();
        copy.silence = Mutex::new(QueueSilence::new(gpu.submissions().completed(), since));
        let error = gpu.try_read(&copy, |_| Ok(())).unwrap_err();
        let named = |what: &str| what.contains("completed nothing for 60 s");
        assert!(matches!(&error, Error::Device { what } if named(what)), "{error:?}");
    }

    #[test]
    fn a_tensor_larger_than_a_staging_buffer_is_copied_in_pieces() {
        let Some(gpu) = gpu(&Options::default()) else { return };
        let each = index(PIECE_BYTES / 2);
        let mut from = Array4::<half::f16>::zeros((1, 1, 2, each + 5));
        // around the ends of the pieces, and at the end of the tensor
        let marked: Vec<usize> = [0, each, 2 * each, 2 * each + 10]
            .into_iter()
            .flat_map(|at| at.saturating_sub(2)..(at + 2).min(2 * each + 10))
            .collect();
        let elements = from.as_slice_mut().unwrap();
        marked.iter().for_each(|&at| elements[at] = half::f16::from_f32(1.0 + at as f32 / 7e7));
        let tensor = Tensor::upload(&gpu, from.view()).unwrap();
        let before = gpu.transfers();
        let into = tensor.download::<half::f16>().unwrap();
        let bytes = (2 * from.len() as u64).next_multiple_of(4);
        assert_eq!(gpu.transfers().to_host - before.to_host, bytes);
        assert_eq!(before.to_device, bytes);
        let bits = |of: &Array4<half::f16>| -> u64 {
            bytemuck::cast_slice::<_, u64>(&of.as_slice().unwrap()[..2 * each])
                .iter()
                .fold(0, |all, bits| all.rotate_left(1) ^ bits)
        };
        assert_eq!(bits(&into), bits(&from));
        for at in marked {
            assert_eq!(into.as_slice().unwrap()[at], from.as_slice().unwrap()[at], "{at}");
        }
        // a tick that breaks ends a download after a piece at the latest
        let mut part = Array4::<half::f16>::zeros(from.dim());
        let host = &mut annulus_core::HostViewMut::F16(part.view_mut());
        let mut ticks = 0;
        let tick = &mut || {
            ticks += 1;
            ControlFlow::Break(())
        };
        WgpuSpace::download(&gpu, &tensor, host, tick).unwrap();
        assert_eq!(ticks, 1);
        assert!(part.iter().skip(2 * each).all(|&element| element == half::f16::ZERO));
        // idle staging memory is bounded
        gpu.synchronize().unwrap();
        let (uploads, downloads) = pooled(&gpu);
        assert!(uploads <= 3 && downloads <= 3, "{uploads} {downloads}");
    }
}
