//! Submissions of a device: their order, the parts in the queue, and the proof that kernels ran.
//!
//! wgpu ignores the status of a Metal command buffer, so one that the system ends early looks
//! complete. The last kernel of each batch therefore adds 1 to a counter on the device (kernel:
//! `count.wgsl`; Metal runs the kernels of a pass in order). Every download includes the counter,
//! and is an error unless it equals the number of batches submitted before.
//!
//! Idle staging buffers of one device.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use annulus_core::Result;
use wgpu::{BufferUsages, Device};

use crate::{errors::with_error_scopes, kernels::KernelVariant, open_device::lock, pacing::Pacer};

/// Submissions of a device, shared by all its handles.
#[derive(Debug)]
pub(crate) struct Submissions {
    order: Mutex<QueueOrder>,
    /// Number of the latest submission known to be complete.
    completed: Arc<AtomicU64>,
    pacer: Mutex<Pacer>,
    /// Number of kernel batches that ran.
    pub(crate) counter: wgpu::Buffer,
}

/// Numbers of submissions, in the order of the queue.
#[derive(Debug, Default)]
struct QueueOrder {
    submissions: u64,
    /// Submissions that count themselves.
    batches: u32,
}

/// Place of a submission in the queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Receipt {
    pub(crate) submission: u64,
    /// Batches up to this submission.
    pub(crate) batches: u32,
}

impl Submissions {
    /// Creates the counter. No part will have more than `most_work` FLOPs.
    ///
    /// # Errors
    /// [`annulus_core::Error::OutOfMemory`], [`annulus_core::Error::Device`].
    pub(crate) fn new(device: &Device, most_work: Option<u64>) -> Result<Self> {
        let descriptor = wgpu::BufferDescriptor {
            label: Some("counter"),
            size: 4,
            usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        };
        // wgpu initializes it to 0
        let (counter, errors) = with_error_scopes(device, || device.create_buffer(&descriptor));
        errors.into_error().map_or(Ok(()), Err)?;
        Ok(Self {
            order: Mutex::default(),
            completed: Arc::default(),
            pacer: Mutex::new(Pacer::new(most_work, Instant::now())),
            counter,
        })
    }

    /// Numbers a submission that `send` passes to the queue, with a function to call when it is
    /// complete. `counts`: its last kernel counts it.
    ///
    /// # Errors
    /// Those of `send`; the submission then has no number.
    pub(crate) fn submit(
        &self,
        counts: bool,
        send: impl FnOnce(Box<dyn FnOnce() + Send>) -> Result<()>,
    ) -> Result<Receipt> {
        let mut order = lock(&self.order);
        let submission = order.submissions + 1;
        let completed = Arc::clone(&self.completed);
        send(Box::new(move || {
            completed.fetch_max(submission, Ordering::Release);
        }))?;
        order.submissions = submission;
        order.batches = order.batches.wrapping_add(u32::from(counts));
        Ok(Receipt { submission, batches: order.batches })
    }

    /// Returns the number of the latest submission known to be complete.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// Records a submission as a part of a tile kernel of `work` FLOPs.
    pub(crate) fn add_part(&self, receipt: Receipt, variant: KernelVariant, work: u64) {
        lock(&self.pacer).add(receipt.submission, variant, work, Instant::now());
    }

    /// Returns the bound of the next part of a kernel in FLOPs.
    pub(crate) fn part_budget(&self, variant: KernelVariant) -> u64 {
        lock(&self.pacer).budget(variant)
    }

    /// True if another part of a tile kernel may be submitted.
    pub(crate) fn has_room(&self) -> bool {
        lock(&self.pacer).has_room()
    }

    /// Records a poll of the device.
    pub(crate) fn note_poll(&self) {
        // read before the lock, so that the latest poll recorded is not later than this one
        let completed = self.completed();
        lock(&self.pacer).poll(completed, Instant::now());
    }

    /// Number of parts in the queue.
    #[cfg(test)]
    pub(crate) fn queued_parts(&self) -> usize {
        lock(&self.pacer).queued()
    }

    /// Number of batches submitted.
    #[cfg(test)]
    pub(crate) fn batches(&self) -> u32 {
        lock(&self.order).batches
    }

    /// Counts a batch that never runs, as one that the system ends early.
    #[cfg(test)]
    pub(crate) fn lose_a_batch(&self) {
        lock(&self.order).batches += 1;
    }
}

/// Upper bound of the buffers of a pool: a few plans at a time, each with a few in the queue.
pub(crate) const MAX_IDLE: usize = 8;

/// Pools of one device, and the bytes that went through them.
#[derive(Debug, Default)]
pub(crate) struct StagingPools {
    /// Mapped for writing.
    pub(crate) uploads: Arc<Mutex<Vec<wgpu::Buffer>>>,
    /// Unmapped.
    pub(crate) downloads: Mutex<Vec<wgpu::Buffer>>,
    /// Bytes of upload buffers that queued work has not read.
    pub(crate) uploading: Arc<AtomicU64>,
    pub(crate) bytes_to_device: AtomicU64,
    pub(crate) bytes_to_host: AtomicU64,
    pub(crate) mask_bytes: AtomicU64,
}

/// Removes the smallest buffer of a pool that holds `bytes`.
pub(crate) fn take_fitting(pool: &mut Vec<wgpu::Buffer>, bytes: u64) -> Option<wgpu::Buffer> {
    let fitting = pool.iter().enumerate().filter(|(_, buffer)| buffer.size() >= bytes);
    let index = fitting.min_by_key(|(_, buffer)| buffer.size()).map(|(index, _)| index)?;
    Some(pool.swap_remove(index))
}

/// Returns a buffer to its pool. Drops the smallest one if there are too many, because large ones
/// take longest to create.
pub(crate) fn keep(pool: &mut Vec<wgpu::Buffer>, buffer: wgpu::Buffer) {
    pool.push(buffer);
    if pool.len() > MAX_IDLE {
        let sizes = pool.iter().map(wgpu::Buffer::size).enumerate();
        if let Some((smallest, _)) = sizes.min_by_key(|&(_, size)| size) {
            pool.swap_remove(smallest);
        }
    }
}
