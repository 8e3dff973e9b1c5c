//! Score gradients of a tile, for queries or keys in lanes: two products, then dS.
//!
//! ```text
//! S = rows·lanesᵀ, epilogue      dP = rows·lanesᵀ
//! dS, and the probabilities that multiply dO, from both
//! ```

use std::ops::Range;

use annulus_core::BiasOrder;

use crate::{
    simd::dispatch::Real,
    tile::{
        ds_tile::ScoreGradient,
        gemm::gemm_nn,
        geometry::TileCoord,
        pack::PanelView,
        prefetch::PrefetchCursor,
        scores::Scores,
        softmax::MultiplyTile,
        tile_mask::{LaneAxis, TileMask},
    },
    workspace::{query_block::TileStatistics, scratch::Tiles},
};

/// Operands of a tile's products, as (rows, lanes): for the scores and for dP.
pub(crate) struct DsOperands<'a, A> {
    pub(crate) s: (PanelView<'a, A>, &'a [A]),
    pub(crate) dp: (PanelView<'a, A>, &'a [A]),
}

/// Computes dS in `tiles.s`, the probabilities that multiply dout in `tiles.dp` and, under a soft
/// cap, ∂s/∂x in `tiles.soft_cap_slope`, for the visible rows of a tile.
pub(crate) fn score_gradients<A: Real>(
    scores: &Scores<'_, A>,
    coord: &TileCoord,
    tile_mask: &mut TileMask,
    operands: DsOperands<'_, A>,
    statistics: &TileStatistics<A>,
    tiles: &mut Tiles<A>,
    cursor: &mut PrefetchCursor<'_>,
) {
    let token = scores.token;
    let vectors = coord.vectors;
    let (panel, lanes) = operands.s;
    gemm_nn((token, vectors), tile_mask, panel, lanes, &mut tiles.s, None, cursor);
    scores.finish(
        coord,
        tile_mask,
        &mut tiles.s,
        Some(&mut tiles.soft_cap_slope),
        &mut tiles.extra,
    );
    let (panel, lanes) = operands.dp;
    gemm_nn((token, vectors), tile_mask, panel, lanes, &mut tiles.dp, None, cursor);
    let span = coord.span(tile_mask.rows());
    let keep = scores
        .fill_keep(coord, tile_mask.rows(), &mut tiles.extra)
        .then(|| &tiles.extra[span.clone()]);
    let by_row = coord.lane_axis == LaneAxis::Keys;
    // with queries in rows, the products are restricted to the visible rows, and so are the
    // statistics
    let used = if by_row { tile_mask.rows().clone() } else { 0..coord.width };
    let gradient = ScoreGradient {
        s: &mut tiles.s[span.clone()],
        scale: scores.deferred_scale(),
        dp: &mut tiles.dp[span],
        keep,
        by_row,
        statistics: statistics.each_ref().map(|list| &list[used.clone()]),
        normalize: scores.spec.normalize,
        words: tile_mask.words(),
    };
    A::run_kernel(token, vectors, gradient);
}

/// Multiplies dS by ∂s/∂x under a soft cap, and calls `add_bias` where dS is the gradient of the
/// bias: before the multiplication, or after it if the bias is added before the cap.
pub(crate) fn apply_soft_cap_slope<A: Real>(
    scores: &Scores<'_, A>,
    coord: &TileCoord,
    span: &Range<usize>,
    tiles: &mut Tiles<A>,
    mut add_bias: impl FnMut(&[A]),
) {
    let bias_before_cap = scores.spec.bias_order == BiasOrder::BeforeSoftCap;
    if !bias_before_cap {
        add_bias(&tiles.s);
    }
    if scores.has_soft_cap_slope() {
        A::run_kernel(
            scores.token,
            coord.vectors,
            MultiplyTile {
                tile: &mut tiles.s[span.clone()],
                by: &tiles.soft_cap_slope[span.clone()],
            },
        );
    }
    if bias_before_cap {
        add_bias(&tiles.s);
    }
}
