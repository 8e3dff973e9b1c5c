//! Idle staging buffers of one device.

use std::sync::{Arc, Mutex, atomic::AtomicU64};

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
