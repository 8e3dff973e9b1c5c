// Backward step of one score tile: from scores S and dP to P, dS and dX.
//
//   e = e^{s − max},  p = e·(1 / sum)
//   normalized output:     ds = p·(keep·dp − Δ),  p_dropped = keep·p
//   unnormalized output:   ds = e·keep·dp − [s = max]·share − p·Δ,  p_dropped = keep·e
//   dx = ds · ∂s/∂x        gradient of the scaled product, before soft cap and bias
//
// keep is the dropout factor, Δ = rowsum(dO∘O) − dlse. `share` is the gradient that flows through
// the row maximum of an unnormalized output, divided by the number of ties. Scores are bitwise
// those of forward, so `s = max` holds for the same pairs.
#pragma once

#include "tile.cuh"

struct Statistics {
    Sum max, inverse_sum, delta, share;
};

DEVICE const u16* statistics_of(const Attention& a, u32 b, u32 h, u32 i) {
    return reinterpret_cast<const u16*>(offset<u16>(a.statistics, b, i, h, 0));
}

DEVICE Statistics load_statistics(const Attention& a, u32 b, u32 h, u32 i) {
    const u16* from = statistics_of(a, b, h, i);
    const u32 apart = sizeof(Sum) / 2;
    return {load_sum(from), load_sum(from + apart), load_sum(from + 2 * apart),
            load_sum(from + 3 * apart)};
}

// In: scores s, dprobs ⟨dout_i, v_j⟩, dx ∂s/∂x. Out: scores p_dropped (the factor of dout in dV),
// dprobs ds, dx dx. Returns the bits of the visible pairs.
DEVICE u32 gradients(ScoreTile& scores, ScoreTile& dprobs, ScoreTile& dx, u32 visible_bits,
                     const TileCoord& coord, const Attention& a) {
    UNROLL for (u32 r = 0; r < M; ++r) {
        u32 i = coord.first_query + query_of(r);
        bool exists = i < a.queries;
        Statistics row = {};
        if (exists) row = load_statistics(a, coord.b, coord.h, i);
        UNROLL for (u32 c = 0; c < M; ++c) {
            // a row without a visible key (max = +∞) has no gradient
            if (!exists || row.max == Sum(infinity())) visible_bits &= ~(1u << (r * M + c));
            if (!is_visible(visible_bits, r, c)) {
                scores[r][c] = dprobs[r][c] = dx[r][c] = 0;
                continue;
            }
            Sum keep = 1;
            if (a.flags & HAS_DROPOUT)
                keep = keep_factor(a, coord.b, coord.h, i, coord.first_key + key_of(c));
            Sum s = scores[r][c], dp = keep * dprobs[r][c], e = exponential(s - row.max),
                p = e * row.inverse_sum, ds, p_dropped;
            if (a.flags & UNNORMALIZED) {
                ds = e * dp - (s == row.max ? row.share : Sum(0)) - p * row.delta;
                p_dropped = keep * e;
            } else {
                ds = p * (dp - row.delta);
                p_dropped = keep * p;
            }
            scores[r][c] = p_dropped;
            dprobs[r][c] = ds;
            dx[r][c] *= ds;
        }
    }
    return visible_bits;
}
