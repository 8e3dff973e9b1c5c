// Backward step of one pair of a normalized output, 16-bit elements: P and dX from S and dP, as in
// gradient.cuh.
#pragma once

#include "tile.cuh"
#include "probs.cuh"

#if ANNULUS_DTYPE >= 2

// Row statistics of one query that both passes need.
struct QueryStatistics {
    float lse, delta;
};

// True if probabilities of this row may be computed by fused_prob, one multiply-add and one ex2.
// False if lse is −∞, of a row without gradient, or NaN.
DEVICE bool is_fused(float lse) {
    return lse * LOG2_E <= FUSED_EXPONENT_LIMIT && lse * LOG2_E >= -FUSED_EXPONENT_LIMIT;
}

// Computes P and dX of one pair: `score` is the product of q and k, `dprob` that of dO and v.
// Returns true if the pair is visible and its row has a gradient.
DEVICE bool backward_pair(float& p_dropped, float& dx, float score, float dprob, u64 line,
                          u32 query, u32 key, const QueryStatistics& row, const TileCoord& coord,
                          const Attention& a) {
    float derivative;
    p_dropped = dx = 0;
    // a row without a visible key (lse = −∞) has no gradient
    if (!pair_epilogue(score, derivative, line, query, key, coord, a) || row.lse == -infinity())
        return false;
    float keep = 1;
    if (a.flags & HAS_DROPOUT)
        keep = keep_factor(a, coord.b, coord.h, coord.first_query + query, coord.first_key + key);
    float p = fast_exp(score - row.lse);
    p_dropped = keep * p;
    dx = p * (keep * dprob - row.delta) * derivative;
    return true;
}

#endif
