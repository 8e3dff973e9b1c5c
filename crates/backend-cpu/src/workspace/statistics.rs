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

/// Row statistics of all local queries, each `[b, q_heads, q rows]`; see [`Spec::ROW_STATISTICS`].
/// `share` is empty if the output is normalised.
#[derive(Debug, Default)]
pub(crate) struct RowStatistics<A> {
    pub(crate) rows: usize,
    pub(crate) max: Vec<A>,
    pub(crate) inverse_sum: Vec<A>,
    pub(crate) delta: Vec<A>,
    pub(crate) share: Vec<A>,
}

impl<A: Real> RowStatistics<A> {
    pub(crate) fn new(spec: &Spec, rows: usize) -> Result<Self> {
        let head_count = spec.dims.batch * spec.dims.q_heads;
        let list = |wanted: bool| {
            let len = if wanted { head_count * rows } else { 0 };
            memory::filled("row statistics", len, A::ZERO)
        };
        Ok(Self {
            rows,
            max: list(true)?,
            inverse_sum: list(true)?,
            delta: list(true)?,
            share: list(!spec.normalize)?,
        })
    }

    /// Returns `[max, 1/sum, delta, share]` of one row, with 0 for a share that is not stored.
    /// `head_index` is batch row · q_heads + head.
    pub(crate) fn of(&self, head_index: usize, row: usize) -> [A; Spec::ROW_STATISTICS] {
        let at = |list: &[A]| list.get(head_index * self.rows + row).copied().unwrap_or(A::ZERO);
        [at(&self.max), at(&self.inverse_sum), at(&self.delta), at(&self.share)]
    }

    /// Loads the statistics of rows `rows` of one head.
    pub(crate) fn load(&self, head_index: usize, rows: Range<usize>, into: &mut TileStatistics<A>) {
        for (index, row) in rows.enumerate() {
            into.set(index, self.of(head_index, row));
        }
    }
}

/// Row statistics of up to [`crate::tile::tile_mask::TILE`] queries as the kernels read them: one
/// array per quantity of [`annulus_core::Spec::ROW_STATISTICS`].
#[derive(Debug)]
pub(crate) struct TileStatistics<A> {
    pub(crate) max: Aligned<A>,
    pub(crate) inverse_sum: Aligned<A>,
    pub(crate) delta: Aligned<A>,
    pub(crate) share: Aligned<A>,
}

impl<A: Real> TileStatistics<A> {
    pub(crate) fn new(rows: usize) -> Result<Self> {
        let lane = || Aligned::zeroed(rows);
        Ok(Self { max: lane()?, inverse_sum: lane()?, delta: lane()?, share: lane()? })
    }

    /// Stores the statistics of one row.
    pub(crate) fn set(
        &mut self,
        index: usize,
        [max, inverse_sum, delta, share]: [A; Spec::ROW_STATISTICS],
    ) {
        self.max[index] = max;
        self.inverse_sum[index] = inverse_sum;
        self.delta[index] = delta;
        self.share[index] = share;
    }
}
