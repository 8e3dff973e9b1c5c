//! What one thread works in: O(tile), made with the workspace and used by every task.

use std::ops::Range;

use annulus_core::{QueryTile, Result, Spec, TileBits};

use crate::{
    ahead::Ahead,
    aligned::Aligned,
    bias_gradient::BiasGradient,
    decode::FewScratch,
    geometry::Geometry,
    pack::Panel,
    real::Real,
    sight::{Sight, Sights, TILE},
    whole_tile::WholeTile,
};

/// Row statistics of up to [`TILE`] queries: what [`annulus_core::Spec::ROW_STATISTICS`] says, as kernels use them.
#[derive(Debug)]
pub(crate) struct RowStatistics<A> {
    pub(crate) lse: Aligned<A>,
    pub(crate) max: Aligned<A>,
    pub(crate) delta: Aligned<A>,
    pub(crate) share: Aligned<A>,
}

impl<A: Real> RowStatistics<A> {
    pub(crate) fn new(rows: usize) -> Result<Self> {
        let lane = || Aligned::zeroed(rows);
        Ok(Self { lse: lane()?, max: lane()?, delta: lane()?, share: lane()? })
    }
}

/// Tiles of one thread: [`TILE`] rows, one strip wide.
#[derive(Debug)]
pub(crate) struct Tiles<A> {
    /// Logits, then weights, or gradients of logits.
    pub(crate) s: Aligned<A>,
    /// Gradients of weights, then weights.
    pub(crate) dp: Aligned<A>,
    /// ∂s/∂x under a soft cap.
    pub(crate) slope: Aligned<A>,
    /// Biases, then dropout.
    pub(crate) extra: Aligned<A>,
}

/// What one thread works in.
#[derive(Debug)]
pub(crate) struct Scratch<A> {
    /// Vectors of length head_dim, one a row: keys, or queries where keys lie in lanes.
    pub(crate) rows_head: Panel<A>,
    /// Vectors of length value_dim: values, or dout.
    pub(crate) rows_value: Panel<A>,
    /// Keys, one a row of whole vectors.
    pub(crate) rows_key: Panel<A>,
    /// Gradients of the logits of a whole tile.
    pub(crate) whole_tile: WholeTile<A>,
    /// Strips of vectors of length head_dim, one a lane.
    pub(crate) lanes_head: Aligned<A>,
    /// Strips of vectors of length value_dim.
    pub(crate) lanes_value: Aligned<A>,
    /// Strips of dk, where keys lie in lanes.
    pub(crate) sums_head: Aligned<A>,
    /// Strips of dv.
    pub(crate) sums_value: Aligned<A>,
    /// Of a task's keys, for each head with a gradient of the bias of its own: dS summed along all queries, where that is wanted.
    pub(crate) sums_bias: Aligned<A>,
    pub(crate) tiles: Tiles<A>,
    /// The largest logit of each lane of a tile.
    pub(crate) largest: Aligned<A>,
    pub(crate) rescale: Aligned<A>,
    pub(crate) statistics: RowStatistics<A>,
    /// For few queries.
    pub(crate) few: FewScratch<A>,
    pub(crate) ahead: Ahead,
    /// Which rows, of which batch row and head, `whole` and `parts` are of.
    pub(crate) looked: Option<(usize, usize, Range<usize>)>,
    /// Which strips of lanes have been filled.
    pub(crate) filled: Vec<bool>,
    /// All queries of the task.
    pub(crate) whole: QueryTile,
    /// Those of each strip.
    pub(crate) parts: Vec<QueryTile>,
    pub(crate) bits: TileBits,
    pub(crate) sight: Sight,
    /// What the rows of `looked` were seen to see.
    pub(crate) sights: Sights,
    pub(crate) sight_of_head: Sight,
}

impl<A: Real> Scratch<A> {
    /// For tasks of `q_rows` queries and `k_rows` keys; with `backward`, for gradients too; for a pass of `few` queries, or 0.
    pub(crate) fn new(spec: &Spec, geometry: &Geometry, q_rows: usize, k_rows: usize, backward: bool, few: usize) -> Result<Self> {
        let (head, value) = (geometry.dims.head_dim, geometry.dims.value_dim);
        let strip = geometry.strip_lanes();
        let q_lanes = q_rows * geometry.dims.group();
        let k_lanes = if backward { k_rows.max(geometry.keys_together()) } else { 0 };
        let lanes = q_lanes.max(k_lanes);
        let gradient = |elements: usize| if backward { elements } else { 0 };
        let tile = |wanted: bool| Aligned::zeroed(if wanted { TILE * strip } else { 0 });
        Ok(Self {
            rows_head: Panel::new(head, geometry.form(backward))?,
            rows_value: Panel::new(value, geometry.form(true))?,
            rows_key: Panel::with_stride(gradient(geometry.keys_together()), head, geometry.query_width(), geometry.form(true))?,
            whole_tile: WholeTile::new(geometry, backward)?,
            lanes_head: Aligned::zeroed(lanes * geometry.depth(head))?,
            lanes_value: Aligned::zeroed(gradient(lanes * geometry.depth(value)))?,
            sums_head: Aligned::zeroed(k_lanes * geometry.head_rows())?,
            sums_value: Aligned::zeroed(k_lanes * geometry.value_rows())?,
            sums_bias: Aligned::zeroed(gradient(BiasGradient::<A>::lanes(spec, geometry.keys_together())))?,
            tiles: Tiles { s: tile(true)?, dp: tile(backward)?, slope: tile(backward)?, extra: tile(true)? },
            largest: Aligned::zeroed(strip)?,
            rescale: Aligned::zeroed(strip)?,
            statistics: RowStatistics::new(gradient(TILE.max(strip)))?,
            few: FewScratch::new(geometry, few)?,
            ahead: Ahead::default(),
            looked: None,
            filled: vec![false; (lanes / strip).max(geometry.keys_together() / A::WIDTH)],
            whole: QueryTile::default(),
            parts: (0..q_rows / strip).map(|_| QueryTile::default()).collect(),
            bits: TileBits::default(),
            sight: Sight::default(),
            sights: Sights::new(),
            sight_of_head: Sight::default(),
        })
    }
}
