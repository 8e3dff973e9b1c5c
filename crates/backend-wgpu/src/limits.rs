//! Limits of a device that the launches of tile kernels obey.

use crate::RegisterTile;

/// Limits of a device that chunks obey.
#[derive(Debug, Clone)]
pub(crate) struct ChunkLimits {
    /// Name of the device.
    pub(crate) device: String,
    /// Upper bound of a binding in bytes.
    pub(crate) binding_bytes: u64,
    /// Alignment of binding offsets in bytes.
    pub(crate) alignment: u64,
    /// Upper bound of loop iterations per kernel, if any.
    pub(crate) loop_steps: Option<u64>,
    /// Upper bound of the work of a part in FLOPs, if it is less than the default.
    pub(crate) part_work: Option<u64>,
    /// Register tile of the kernels, which determines their work.
    pub(crate) register_tile: RegisterTile,
}

/// Returns the upper bound of a binding in bytes. Kernels compute offsets within a binding in 32
/// bits, in elements of at least 2 bytes: a bound of 2^32 bytes leaves half of the range to offsets
/// of rows beyond the last, which are computed before they are clamped.
pub(crate) fn binding_bytes(limits: &wgpu::Limits) -> u64 {
    limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(1 << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_within_a_binding_have_31_bits() {
        let limits = |binding, buffer| wgpu::Limits {
            max_storage_buffer_binding_size: binding,
            max_buffer_size: buffer,
            ..wgpu::Limits::default()
        };
        for large in [1 << 32, 1 << 33, 1 << 40] {
            assert_eq!((binding_bytes(&limits(large, large)) / 2 - 1) >> 31, 0, "{large}");
        }
        assert_eq!(binding_bytes(&limits(1000, 1 << 40)), 1000);
        assert_eq!(binding_bytes(&limits(1 << 40, 1000)), 1000);
    }
}
