//! Operands and results of the products of [`crate::tile::gemm`].

use crate::{
    simd::dispatch::Real,
    tile::{bf16_pairs::as_pairs, terms::RowPositions, tile_mask::RowRanges},
};

/// Work after each register tile of a product: short, and without a result that the next tile waits
/// for.
pub(crate) trait GemmEpilogue {
    /// Called after each register tile.
    fn after_register_tile(&mut self);
}

/// No epilogue.
impl GemmEpilogue for () {
    #[inline(always)]
    fn after_register_tile(&mut self) {}
}

/// Contents of a tile after [`crate::tile::gemm::gemm_nn`].
#[derive(Debug, Default)]
pub(crate) struct TileProducts {
    /// True if `tile_max` holds the maximum of each lane's visible products.
    pub(crate) max_known: bool,
    /// True if masked pairs in the computed rows are −∞.
    pub(crate) masked: bool,
    /// For each vector of lanes the range of rows that was computed, counted from the first visible
    /// row; `None` if every visible row was computed for all lanes.
    pub(crate) row_ranges: Option<RowRanges>,
}

/// Use that a product makes of the previous contents of C.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Previous<'a, A> {
    /// C ← sums. C may be uninitialised memory of an earlier pass.
    Overwrite,
    /// C ← C + sums.
    Add,
    /// C ← C·rescale + sums, with one factor per lane.
    Rescale(&'a [A]),
}

impl<'a, A> Previous<'a, A> {
    /// Returns the factors of C, if they are not 1.
    pub(crate) const fn rescale(self) -> Option<&'a [A]> {
        match self {
            Self::Rescale(rescale) => Some(rescale),
            Self::Add | Self::Overwrite => None,
        }
    }
}

impl<'a, A: Real> Previous<'a, A> {
    /// Views the factors as f32, which they are wherever pairs exist.
    pub(crate) fn as_pairs(self) -> Previous<'a, f32> {
        match self {
            Self::Overwrite => Previous::Overwrite,
            Self::Add => Previous::Add,
            Self::Rescale(rescale) => Previous::Rescale(as_pairs(rescale)),
        }
    }
}

/// Factors of the rows of a panel: P or dS.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weights<'a, A> {
    /// From the first visible row on, or on tiles as [`crate::tile::terms::SplitWeights`] writes
    /// them.
    pub(crate) elements: &'a [A],
    /// Powers of two by which lanes on tiles were multiplied. Empty: 1.
    pub(crate) factors: &'a [A],
    /// Of rows on tiles.
    pub(crate) positions: RowPositions<'a>,
}

impl<'a, A> From<&'a [A]> for Weights<'a, A> {
    fn from(elements: &'a [A]) -> Self {
        Self { elements, factors: &[], positions: RowPositions::default() }
    }
}
