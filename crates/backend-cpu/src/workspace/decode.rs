//! Memory of split-KV decode: partial results of the splits, and scratch of a thread.
//!
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

use crate::{
    decode::packed_queries::MAX_PACKED,
    simd::dispatch::{IsaToken, Real},
    tile::{aligned::Aligned, geometry::Geometry, pack::padded_dim, tile_mask::TILE},
};

/// Maximum splits of a block of keys. More splits balance better over threads; fewer need less
/// memory for partial results.
const MAX_SPLITS: usize = 64;

/// Minimum keys of a split, except the last, so that merging costs little beside reading.
const MIN_SPLIT_KEYS: usize = 512;

/// Partial result of one split.
#[derive(Debug)]
pub(crate) struct SplitPartial<A> {
    /// `[packed rows]`: query heads, and the queries of each.
    pub(crate) max: Aligned<A>,
    pub(crate) sum: Aligned<A>,
    /// `[KV heads]` of packed queries (`decode/kernels.rs`) of vectors of length value_dim.
    pub(crate) out: Aligned<A>,
}

/// Partial results of all splits of one workspace.
#[derive(Debug)]
pub(crate) struct Decode<A> {
    pub(crate) partials: Vec<SplitPartial<A>>,
}

/// Scratch of one thread for decode.
#[derive(Debug)]
pub(crate) struct DecodeScratch<A> {
    /// `[KV heads]` of packed queries (`decode/kernels.rs`) of vectors of length head_dim.
    pub(crate) q: Aligned<A>,
    /// Scores, then probabilities: `[packed rows][keys of a tile]`.
    pub(crate) tile: Aligned<A>,
    /// `[packed rows of a block][lanes][lanes]`: products with as many keys as a vector has lanes,
    /// summed over dims but not across lanes.
    pub(crate) products: Aligned<A>,
    /// `[packed rows]`: e^{m − m'}, by which the accumulator is rescaled.
    pub(crate) rescale: Aligned<A>,
}

/// True if a pass of `queries` queries runs as split-KV decode.
pub(crate) fn is_decode<A: Real>(
    token: IsaToken,
    spec: &Spec,
    queries: usize,
    backward: bool,
) -> bool {
    // a full vector of queries is faster with queries in lanes; with few registers, half a vector
    // is
    let enough = if token.max_vectors() > 1 { A::WIDTH } else { A::WIDTH / 2 };
    // decode sums scores in another order, so that the bits would depend on the number of queries
    let any_order = spec.leaf_rows.is_none();
    !backward && any_order && spec.normalize && (1..enough).contains(&queries)
}

/// Returns the keys of a tile: the lanes of a strip.
pub(crate) const fn tile_keys(geometry: &Geometry) -> usize {
    geometry.with_tile_aligned_strips().strip_lanes()
}

impl<A: Real> DecodeScratch<A> {
    /// Allocates scratch for `queries` queries (0: none).
    pub(crate) fn new(geometry: &Geometry, queries: usize) -> Result<Self> {
        let packed = geometry.dims.q_heads * queries;
        Ok(Self {
            q: Aligned::zeroed(packed * padded_dim::<A>(geometry.dims.head_dim))?,
            tile: Aligned::zeroed(packed * tile_keys(geometry))?,
            products: Aligned::zeroed(packed.min(MAX_PACKED) * A::WIDTH * A::WIDTH)?,
            rescale: Aligned::zeroed(packed)?,
        })
    }
}

/// Returns the keys of each split of a block of `keys` keys.
pub(crate) fn split_keys(keys: usize) -> usize {
    keys.div_ceil(MAX_SPLITS).next_multiple_of(TILE).max(MIN_SPLIT_KEYS)
}

impl<A: Real> Decode<A> {
    /// Allocates partial results for `queries` queries and blocks of up to `keys` keys.
    pub(crate) fn new(geometry: &Geometry, queries: usize, keys: usize) -> Result<Self> {
        let dims = geometry.dims;
        let splits = keys.div_ceil(split_keys(keys));
        let packed = dims.q_heads * queries;
        let partial = || {
            let out = Aligned::zeroed(packed * padded_dim::<A>(dims.value_dim))?;
            Ok(SplitPartial { max: Aligned::zeroed(packed)?, sum: Aligned::zeroed(packed)?, out })
        };
        Ok(Self { partials: (0..splits * dims.batch).map(|_| partial()).collect::<Result<_>>()? })
    }
}

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
