//! Forms of tall tiles ([`super::tall_tiles`]): what holds their queries, and their workgroup memory.

use super::vectors::{HALF_STEP, PRODUCT_STEP};
use crate::level::Matrices;

/// A tall tile, by what holds its queries during the loop over keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum TallTile {
    /// Matrices of the subgroups that multiply them.
    Held,
    /// Workgroup memory.
    Kept {
        /// Groups of 32 elements.
        groups: usize,
    },
    /// Nothing: they are loaded again for each tile of keys, 64 elements at a time.
    Reloaded,
}

impl TallTile {
    /// Queries.
    pub(crate) const ROWS: usize = 64;

    /// Invocations of a workgroup.
    pub(crate) const INVOCATIONS: usize = 2 * Self::ROWS;

    /// Elements of K or V that are staged at once.
    pub(super) const CHUNK: usize = 64;

    /// Most groups of 32 elements that matrices hold: in subgroups of 32 a quarter of the elements
    /// of Q, two a register, takes 32 registers of an invocation.
    const MAX_HELD: usize = 4;

    /// Selects the form of kernels of dims with `head_groups` groups for a device with these
    /// matrices and this much workgroup memory; `None` if it has too little.
    ///
    /// Subgroups of any size, whose matrices the text does not know, hold none.
    pub(crate) fn fitting(
        head_groups: usize,
        matrices: Matrices,
        memory_bytes: usize,
    ) -> Option<Self> {
        let can_hold = head_groups <= Self::MAX_HELD && !matrices.has_smaller_subgroups();
        let kept = [Self::Kept { groups: head_groups }, Self::Reloaded];
        let forms = can_hold.then_some(Self::Held).into_iter().chain(kept);
        forms.into_iter().find(|form| form.memory_bytes() <= memory_bytes)
    }

    /// Upper bound of the bytes of workgroup memory of a kernel.
    pub(crate) const fn memory_bytes(self) -> usize {
        let staged = 8 * HALF_STEP * (Self::ROWS + Self::CHUNK);
        let products = 16 * PRODUCT_STEP * Self::ROWS;
        let mask = 4 * Self::ROWS;
        // number of matrices and flag of non-finite elements
        8 * self.own_vectors() + staged + products + mask + 32
    }

    /// Distance of rows of `own_half` in vectors of 4. Two more than a row has, as of
    /// [`HALF_STEP`]: 36 + 32·n words of 4 bytes, so that eight rows begin in different banks.
    pub(super) const fn own_step(self) -> usize {
        let chunks = match self {
            Self::Held | Self::Reloaded => 1,
            Self::Kept { groups } => (32 * groups).div_ceil(Self::CHUNK),
        };
        chunks * Self::CHUNK / 4 + 2
    }

    const fn own_vectors(self) -> usize {
        match self {
            Self::Held => 0,
            Self::Kept { .. } | Self::Reloaded => Self::ROWS * self.own_step(),
        }
    }

    /// Generates the declaration of `own_half`.
    pub(super) fn declaration(self) -> String {
        match self.own_vectors() {
            0 => String::new(),
            vectors => format!("var<workgroup> own_half: array<vec4<f16>, {vectors}>;\n"),
        }
    }
}
