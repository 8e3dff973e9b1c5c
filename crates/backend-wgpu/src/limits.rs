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
