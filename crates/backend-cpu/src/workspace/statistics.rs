//! Row statistics of backward: per-query quantities that forward left or that are computed before
//! the first tile.
//!
//! ```text
//! normalised:     delta = ⟨dout, out⟩ − dlse                          lse
//! unnormalised:   delta = −dlse     share = ⟨dout, out⟩ / ties        lse, max
//! ```
//! A row without visible keys and sinks has lse = −∞. Kernels receive +∞ instead, so that its
//! probabilities are 0 whatever its scores.

use std::ops::Range;

use annulus_core::{Result, Spec, memory};

use crate::{simd::dispatch::Real, tile::aligned::Aligned};

/// Row statistics of all local queries, each `[b, q_heads, q rows]`; see [`Spec::ROW_STATISTICS`].
/// `max` and `share` are empty if the output is normalised.
#[derive(Debug, Default)]
pub(crate) struct RowStatistics<A> {
    pub(crate) rows: usize,
    pub(crate) lse: Vec<A>,
    pub(crate) max: Vec<A>,
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
        let unnormalised = !spec.normalize;
        Ok(Self {
            rows,
            lse: list(true)?,
            max: list(unnormalised)?,
            delta: list(true)?,
            share: list(unnormalised)?,
        })
    }

    /// Returns `[lse, max, delta, share]` of one row, with 0 for quantities that are not stored.
    /// `head_index` is batch row · q_heads + head.
    pub(crate) fn of(&self, head_index: usize, row: usize) -> [A; Spec::ROW_STATISTICS] {
        let at = |list: &[A]| list.get(head_index * self.rows + row).copied().unwrap_or(A::ZERO);
        [at(&self.lse), at(&self.max), at(&self.delta), at(&self.share)]
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
    pub(crate) lse: Aligned<A>,
    pub(crate) max: Aligned<A>,
    pub(crate) delta: Aligned<A>,
    pub(crate) share: Aligned<A>,
}

impl<A: Real> TileStatistics<A> {
    pub(crate) fn new(rows: usize) -> Result<Self> {
        let lane = || Aligned::zeroed(rows);
        Ok(Self { lse: lane()?, max: lane()?, delta: lane()?, share: lane()? })
    }

    /// Stores the statistics of one row, with −∞ replaced by +∞ for empty rows.
    pub(crate) fn set(
        &mut self,
        index: usize,
        [lse, max, delta, share]: [A; Spec::ROW_STATISTICS],
    ) {
        let empty = lse == -A::INFINITY;
        self.lse[index] = if empty { A::INFINITY } else { lse };
        self.max[index] = if empty { A::INFINITY } else { max };
        self.delta[index] = delta;
        self.share[index] = share;
    }
}
