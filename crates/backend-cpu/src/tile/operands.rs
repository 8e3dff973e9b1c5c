//! Operands and results of the products of [`crate::tile::gemm`].

use crate::tile::tile_mask::RowRanges;

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

/// Factors of the rows of a panel: P or dS.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weights<'a, A> {
    pub(crate) elements: &'a [A],
    /// Terms that are added to the elements, if they are sums of two bf16.
    pub(crate) errors: Option<&'a [A]>,
}

impl<'a, A> From<&'a [A]> for Weights<'a, A> {
    fn from(elements: &'a [A]) -> Self {
        Self { elements, errors: None }
    }
}
