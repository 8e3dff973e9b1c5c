//! Score gradients of a tile, for queries or keys in lanes: two products, then dS.
//!
//! ```text
//! S = rows·lanesᵀ, epilogue      dP = rows·lanesᵀ
//! dS, and the probabilities that multiply dO, from both
//! ```

use std::ops::Range;

use crate::{
    simd::dispatch::Real,
    tile::{
        ds_tile::{QueryStatistics, ScoreGradient},
        gemm::gemm_nn,
        geometry::TileCoord,
        pack::PanelView,
        prefetch::PrefetchCursor,
        scores::Scores,
        softmax::MultiplyTile,
        tile_mask::{LaneAxis, TileMask},
    },
    workspace::{decode::TileStatistics, scratch::Tiles},
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
    let queries = QueryStatistics {
        by_row,
        max: &statistics.max[used.clone()],
        inverse_sum: &statistics.inverse_sum[used.clone()],
        delta: &statistics.delta[used.clone()],
        share: &statistics.share[used],
    };
    let s = &mut tiles.s[span.clone()];
    let dp = &mut tiles.dp[span];
    let normalize = scores.spec.normalize;
    let scale = scores.deferred_scale();
    A::run_kernel(
        token,
        vectors,
        ScoreGradient { s, scale, dp, keep, queries, normalize, words: tile_mask.words() },
    );
}

/// Multiplies dS by ∂s/∂x under a soft cap.
pub(crate) fn apply_soft_cap_slope<A: Real>(
    scores: &Scores<'_, A>,
    coord: &TileCoord,
    span: &Range<usize>,
    tiles: &mut Tiles<A>,
) {
    if scores.has_soft_cap_slope() {
        A::run(
            scores.token,
            coord.vectors,
            MultiplyTile {
                tile: &mut tiles.s[span.clone()],
                by: &tiles.soft_cap_slope[span.clone()],
            },
        );
    }
}
