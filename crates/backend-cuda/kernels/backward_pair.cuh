// Backward step of one pair of a normalized output, 16-bit elements: P and dX from S and dP, as in
// gradient.cuh.
#pragma once

#include "tile.cuh"
#include "probs.cuh"

#if ANNULUS_DTYPE >= 2

// Row statistics of one query that both passes need: P = 2^{(s − base)·log₂e + exponent}.
//
//   |lse|·log₂e ≤ FUSED_EXPONENT_LIMIT   base = 0,    exponent = −lse·log₂e  (fused_prob)
//   else                                 base = max,  exponent = −log₂ sum: a sum of both would
//                                        round the smaller one away
//   a row without a visible key          base = +∞: it has no gradient
struct QueryStatistics {
    float base, exponent, delta;
};

DEVICE QueryStatistics query_statistics(float max, float inverse_sum, float delta) {
    const float exponent = log2_approx(inverse_sum);
    const float fused = multiply_add(max, -LOG2_E, exponent);
    if (fused <= FUSED_EXPONENT_LIMIT && fused >= -FUSED_EXPONENT_LIMIT) return {0, fused, delta};
    return {max, exponent, delta};
}

// True if probabilities of a row with this base may be computed by fused_prob.
DEVICE bool is_fused(float base) { return base == 0; }

// P of one pair of a row for which is_fused holds, as one multiply-add and one ex2: `product` is
// that of q and k, unit = scale·log₂e.
DEVICE float fused_prob(float product, float unit, float exponent) {
    return exp2_approx(multiply_add(product, unit, exponent));
}
// P of one visible pair of any row with a gradient.
DEVICE float prob_of(float score, const QueryStatistics& row) {
    return exp2_approx(multiply_add(score - row.base, LOG2_E, row.exponent));
}

// Computes P and dX of one pair: `score` is the product of q and k, `dprob` that of dO and v.
// Returns true if the pair is visible and its row has a gradient.
DEVICE bool backward_pair(float& p_dropped, float& dx, float score, float dprob, u64 line,
                          u32 query, u32 key, const QueryStatistics& row, const TileCoord& coord,
                          const Attention& a) {
    float derivative;
    p_dropped = dx = 0;
    // a row without a visible key (base = +∞) has no gradient
    if (!pair_epilogue(score, derivative, line, query, key, coord, a) || row.base == infinity())
        return false;
    float keep = 1;
    if (a.flags & HAS_DROPOUT)
        keep = keep_factor(a, coord.b, coord.h, coord.first_query + query, coord.first_key + key);
    float p = prob_of(score, row);
    p_dropped = keep * p;
    dx = p * (keep * dprob - row.delta) * derivative;
    return true;
}

#endif
