// Backward step of one pair of a normalized output, 16-bit elements: P and dX from S and dP, as in
// gradient.cuh.
#pragma once

#include "tile.cuh"
#include "numbers.cuh"

#if ANNULUS_DTYPE >= 2

// Row statistics of one query that both passes need: P = 2^{(s − base)·log₂e + exponent}.
//
//   |lse|·log₂e ≤ FUSED_EXPONENT_LIMIT   base = 0,    exponent = −lse·log₂e  (fused_prob)
//   else                                 base = max,  exponent = −log₂ sum: a sum of both would
//                                        round the smaller one away
//   a row without a visible key          exponent = −∞: it has no gradient
struct RowExponent {
    float exponent, delta;
};
struct QueryStatistics : RowExponent {
    float base;
};

// With base = max, from the row statistics in memory (gradient.cuh).
DEVICE QueryStatistics load_exact_statistics(const u16* from) {
    return {{log2_approx(load_sum(from + 2)), load_sum(from + 4)}, load_sum(from)};
}

// With base = 0, if the exponent is small enough for it.
DEVICE QueryStatistics fused_statistics(const QueryStatistics& exact) {
    const float exponent = multiply_add(exact.base, -LOG2_E, exact.exponent);
    const bool fits = exponent <= FUSED_EXPONENT_LIMIT && exponent >= -FUSED_EXPONENT_LIMIT;
    if (fits) return {{exponent, exact.delta}, 0};
    return exact;
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

// Computes P and dX of one pair: `score` is the product of q and k, `dprob` that of dO and v;
// minus_base(s) is s − base of the row. Returns true if the pair is visible and its row has a
// gradient.
template <typename MinusBase>
DEVICE bool backward_pair(float& p_dropped, float& dx, float score, float dprob, u64 line,
                          u32 query, u32 key, const RowExponent& row,
                          const MinusBase& minus_base, const TileCoord& coord, const Attention& a) {
    float derivative;
    p_dropped = dx = 0;
    if (!pair_epilogue(score, derivative, line, query, key, coord, a) ||
        row.exponent == -infinity())
        return false;
    float keep = 1;
    if (a.flags & HAS_DROPOUT)
        keep = keep_factor(a, coord.b, coord.h, coord.first_query + query, coord.first_key + key);
    float p = exp2_approx(multiply_add(minus_base(score), LOG2_E, row.exponent));
    p_dropped = keep * p;
    dx = p * (keep * dprob - row.delta) * derivative;
    return true;
}

#endif
