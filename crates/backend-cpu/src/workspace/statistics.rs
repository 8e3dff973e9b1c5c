//! Row statistics of backward: per-query quantities that forward left or that are computed before
//! the first tile.
//!
//! ```text
//! normalised:     delta = ⟨dout, out⟩ − dlse                          max, 1/sum
//! unnormalised:   delta = −dlse     share = ⟨dout, out⟩ / ties        max, 1/sum
//! ```
//! ⟨dout, out⟩ is ⟨dout, out⟩ + ⟨dout, out_residual⟩ if the caller has kept the rounding residual.
//! A row without visible keys and sinks has max = +∞ and 1/sum = 0, so that its probabilities are 0
//! whatever its scores.

use std::ops::Range;

use annulus_core::{Result, Spec, memory};

use crate::{simd::dispatch::Real, tile::aligned::Aligned};

/// `[max, 1/sum, delta, share]` of one row; see [`Spec::ROW_STATISTICS`]. `share` is 0 if the
/// output is normalised.
pub(crate) type Statistics<A> = [A; Spec::ROW_STATISTICS];

/// Row statistics of all local queries.
#[derive(Debug, Default)]
pub(crate) struct RowStatistics<A> {
    /// Local queries.
    pub(crate) rows: usize,
    /// `[b, q_heads, q rows]`.
    pub(crate) lines: Vec<Statistics<A>>,
}

impl<A: Real> RowStatistics<A> {
    pub(crate) fn new(spec: &Spec, rows: usize) -> Result<Self> {
        let len = spec.dims.batch * spec.dims.q_heads * rows;
        let lines = memory::filled("row statistics", len, [A::ZERO; Spec::ROW_STATISTICS])?;
        Ok(Self { rows, lines })
    }

    /// Returns the statistics of the rows `rows`. `head_index` is batch row · q_heads + head.
    pub(crate) fn of(&self, head_index: usize, rows: Range<usize>) -> &[Statistics<A>] {
        &self.lines[head_index * self.rows..][rows]
    }
}

/// Row statistics of up to [`crate::tile::tile_mask::TILE`] queries as the kernels read them: one
/// array per quantity of [`Statistics`].
pub(crate) type TileStatistics<A> = [Aligned<A>; Spec::ROW_STATISTICS];

/// Loads the statistics of consecutive rows.
pub(crate) fn load_statistics<A: Real>(
    into: &mut TileStatistics<A>,
    rows: impl Iterator<Item = Statistics<A>>,
) {
    for (index, row) in rows.enumerate() {
        into.iter_mut().zip(row).for_each(|(into, number)| into[index] = number);
    }
}
