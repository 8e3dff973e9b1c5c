//! Idle staging buffers of one device.

use std::sync::{Arc, Mutex, atomic::AtomicU64};

/// Pools of one device, and the bytes that went through them.
#[derive(Debug, Default)]
pub(crate) struct StagingPools {
    /// Mapped for writing.
    pub(crate) uploads: Arc<Mutex<Vec<wgpu::Buffer>>>,
    /// Unmapped.
    pub(crate) downloads: Mutex<Vec<wgpu::Buffer>>,
    pub(crate) bytes_to_device: AtomicU64,
    pub(crate) bytes_to_host: AtomicU64,
}

/// Removes the smallest buffer of a pool that holds `bytes`.
pub(crate) fn take_fitting(pool: &mut Vec<wgpu::Buffer>, bytes: u64) -> Option<wgpu::Buffer> {
    let fitting = pool.iter().enumerate().filter(|(_, buffer)| buffer.size() >= bytes);
    let index = fitting.min_by_key(|(_, buffer)| buffer.size()).map(|(index, _)| index)?;
    Some(pool.swap_remove(index))
}
