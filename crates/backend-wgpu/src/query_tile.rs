//! Queries of a tile of forward.

use annulus_core::Result;
use wgpu::AdapterInfo;

use crate::{Level, forced::forced};

/// Queries of a workgroup of the forward kernels. Both give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueryTile {
    /// 32 queries.
    Of32,
    /// 64 queries, so that K and V serve twice as many, for kernels with cooperative matrices: 128
    /// invocations in place of 64, and Q is loaded once, up to dim 128: a third of the loads for
    /// each product.
    /// Kernels without matrices have 32.
    Of64,
}

/// Vendors of the GPUs on which tiles of 64 queries were measured to be right and faster: NVIDIA,
/// whose H200 took 0.59 to 0.82 of the time (benches/record/wgpu.md).
///
/// By RADV's estimate AMD's gain 2 to 5 % without a bias and lose up to 30 % with one, because fewer
/// workgroups fit workgroup memory (benches/record/wgpu-compilers.md).
const MEASURED: &[u32] = &[0x10de];

/// Largest head and value dim of tiles of 64 queries by default. Beyond it matrices hold Q no
/// longer: with 256 an H200 took 1.13 times as long as with tiles of 32.
const MAX_DIM: usize = 128;

/// Least number of workgroups of 64 queries by default: as many as fill a GPU (`split_kv.rs`), or
/// it would be idle in part where twice as many workgroups of 32 queries keep it busy.
const MIN_WORKGROUPS: usize = 512;

/// Shape of a forward launch by which the tile is chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaunchShape {
    /// The larger of head and value dim.
    pub(crate) dim: usize,
    /// Workgroups of 64 queries.
    pub(crate) workgroups: usize,
}

impl QueryTile {
    /// All tiles.
    pub const ALL: [Self; 2] = [Self::Of32, Self::Of64];

    /// Environment variable that names the tile, if the caller requests none.
    pub const VARIABLE: &'static str = "ANNULUS_WGPU_QUERY_TILE";

    /// Reads the tile from [`QueryTile::VARIABLE`]; `None` if it is not set.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if its value names none.
    pub fn forced() -> Result<Option<Self>> {
        forced(Self::VARIABLE, Self::ALL, Self::name)
    }

    /// Name in [`QueryTile::VARIABLE`] and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Of32 => "32",
            Self::Of64 => "64",
        }
    }

    /// Selects the tile of large launches on an adapter at a level.
    pub(crate) fn of_adapter(info: &AdapterInfo, level: Level) -> Self {
        let is_measured = level == Level::Matrix && MEASURED.contains(&info.vendor);
        if is_measured { Self::Of64 } else { Self::Of32 }
    }

    /// True if a launch of this shape gains by 64 queries, on adapters that do.
    pub(crate) const fn suits(shape: LaunchShape) -> bool {
        let LaunchShape { dim, workgroups } = shape;
        dim > 32 && dim <= MAX_DIM && workgroups >= MIN_WORKGROUPS
    }
}

/// Tile of forward launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileChoice {
    /// Requested: of all launches that can have it.
    Forced(QueryTile),
    /// Of launches that it suits.
    Default(QueryTile),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_measured_vendors_have_64_queries_by_default() {
        for (vendor, wanted) in [
            (0x10de, QueryTile::Of64),
            (0x1002, QueryTile::Of32),
            (0x8086, QueryTile::Of32),
            (0x10005, QueryTile::Of32),
            (0, QueryTile::Of32),
        ] {
            let kind = wgpu::DeviceType::DiscreteGpu;
            let info = AdapterInfo { vendor, ..AdapterInfo::new(kind, wgpu::Backend::Vulkan) };
            assert_eq!(QueryTile::of_adapter(&info, Level::Matrix), wanted, "{vendor:#x}");
            let at_plain = QueryTile::of_adapter(&info, Level::Plain);
            assert_eq!(at_plain, QueryTile::Of32, "{vendor:#x}");
        }
    }

    #[test]
    fn large_launches_of_medium_dims_suit_64_queries() {
        let suits = |dim, workgroups| QueryTile::suits(LaunchShape { dim, workgroups });
        assert!(suits(64, 512) && suits(128, 4096));
        assert!(!suits(64, 511) && !suits(32, 4096) && !suits(129, 4096));
    }
}
