// One tile of the backward pass: from logits and dP to dS, dX and the weight of dout in dV.
//
//   p = e^{s − lse}        normalised:  ds = p·(keep·dp − Δ)                                weight = keep·p
//   e = e^{s − max}      unnormalised:  ds = e·keep·dp − [s = max]·share − p·Δ              weight = keep·e
//   dx = ds · ∂s/∂x
//
// Logits are those of forward to the bit, so that `s = max` finds the same pairs.
#pragma once

#include "tile.cuh"

struct Statistics {
    Sum lse, max, delta, share;
};

DEVICE const u16* statistics_of(const Attention& a, u32 b, u32 h, u32 i) {
    return reinterpret_cast<const u16*>(offset<u16>(a.statistics, b, i, h, 0));
}

DEVICE Statistics load_statistics(const Attention& a, u32 b, u32 h, u32 i) {
    const u16* from = statistics_of(a, b, h, i);
    const u32 apart = sizeof(Sum) / 2;
    return {load_sum(from), load_sum(from + apart), load_sum(from + 2 * apart), load_sum(from + 3 * apart)};
}

// pairs: logits in, weights out; products: ⟨dout_i, v_j⟩ in, ds out; slope: ∂s/∂x in, dx out. Bits of the pairs that are seen.
DEVICE u32 gradients(Pairs& pairs, Pairs& products, Pairs& slope, u32 seen, const Site& site, const Attention& a) {
    UNROLL for (u32 r = 0; r < M; ++r) {
        u32 i = site.first_query + query_of(r);
        bool there = i < a.queries;
        Statistics row = {};
        if (there) row = load_statistics(a, site.b, site.h, i);
        UNROLL for (u32 c = 0; c < M; ++c) {
            // a row that saw nothing has no gradient
            if (!there || row.lse == -Sum(infinity())) seen &= ~(1u << (r * M + c));
            if (!is_seen(seen, r, c)) {
                pairs[r][c] = products[r][c] = slope[r][c] = 0;
                continue;
            }
            Sum keep = 1;
            if (a.flags & HAS_DROPOUT) keep = kept(a, site.b, site.h, i, site.first_key + key_of(c));
            Sum s = pairs[r][c], dp = keep * products[r][c], p = exponential(s - row.lse), ds, weight;
            if (a.flags & UNNORMALIZED) {
                Sum e = exponential(s - row.max);
                ds = e * dp - (s == row.max ? row.share : Sum(0)) - p * row.delta;
                weight = keep * e;
            } else {
                ds = p * (dp - row.delta);
                weight = keep * p;
            }
            pairs[r][c] = weight;
            products[r][c] = ds;
            slope[r][c] *= ds;
        }
    }
    return seen;
}
