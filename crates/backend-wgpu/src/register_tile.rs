//! Register tiles of the kernels of multiply-adds.

use annulus_core::Result;

use crate::forced::forced;

/// Pairs of a 32 × 32 tile that one invocation computes with multiply-adds.
///
/// All compute the same sums in the same order, so results have the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegisterTile {
    /// 4 × 4 pairs, workgroups of 64 invocations. For every four elements of a product an
    /// invocation reads 8 vectors of 4 from workgroup memory and issues 64 multiply-adds. Of tiles
    /// of 64 queries it computes 8 × 4 pairs ([`crate::QueryTile::Of64`]).
    FourRows,
    /// 2 × 4 pairs, workgroups of 128 invocations: half of the accumulators, and half of the loads
    /// in flight, in each. 6 vectors for 32 multiply-adds. For GPUs whose invocations have 128
    /// registers. Kernels that would still exceed them have one row (`TileVariant::fitting_tile`).
    TwoRows,
    /// 1 × 4 pairs, workgroups of 256 invocations, the most that every device of WebGPU has. 5
    /// vectors for 16 multiply-adds.
    OneRow,
}

impl RegisterTile {
    /// All register tiles.
    pub const ALL: [Self; 3] = [Self::FourRows, Self::TwoRows, Self::OneRow];

    /// Environment variable that names the register tile, if the caller requests none.
    pub const VARIABLE: &'static str = "ANNULUS_WGPU_REGISTER_TILE";

    /// Reads the register tile from [`RegisterTile::VARIABLE`]; `None` if it is not set.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if its value names none.
    pub fn forced() -> Result<Option<Self>> {
        forced(Self::VARIABLE, Self::ALL, Self::name)
    }

    /// Name in [`RegisterTile::VARIABLE`] and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FourRows => "4x4",
            Self::TwoRows => "2x4",
            Self::OneRow => "1x4",
        }
    }

    /// Rows of the register tile, of 4 columns each.
    pub(crate) const fn rows(self) -> usize {
        match self {
            Self::FourRows => 4,
            Self::TwoRows => 2,
            Self::OneRow => 1,
        }
    }

    /// Invocations of a workgroup. Kernels of one row in place of two have twice as many.
    pub const fn invocations(self) -> u32 {
        match self {
            Self::FourRows => 64,
            Self::TwoRows => 128,
            Self::OneRow => 256,
        }
    }

    /// Most invocations of a workgroup of any kernel.
    pub(crate) const fn max_invocations(self) -> u32 {
        match self {
            Self::FourRows => 64,
            Self::TwoRows | Self::OneRow => 256,
        }
    }

    /// Upper bound of the registers of an invocation that hold sums of dV and dK. The rest of a
    /// kernel of four rows takes 75 to 120 of up to 256 registers, that of a kernel of two rows or
    /// one about 80 of 128.
    pub(crate) const fn max_accumulators(self) -> usize {
        match self {
            Self::FourRows => 128,
            Self::TwoRows | Self::OneRow => 32,
        }
    }

    /// Distance of the rows of which an invocation loads four elements each. Eight invocations load
    /// the 32 elements of a row.
    pub(crate) const fn load_step(self) -> usize {
        self.invocations() as usize / 8
    }

    /// Number of these rows.
    pub(crate) const fn loads(self) -> usize {
        32 / self.load_step()
    }
}
