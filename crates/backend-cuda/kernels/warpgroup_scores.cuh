// Score epilogue and dropout on warpgroups, in registers.
//
//   x = scale·round(⟨q, k⟩) + bias     (bias before the cap, if so ordered)
//   s = cap·tanh(x / cap) + bias       (else after it)
//
// A register array cannot be indexed at run time, so that loops over the scores of a thread are
// unrolled, each under the flag of its feature.
#pragma once

#include "warpgroup_tile.cuh"

// Adds the bias and applies the soft cap, in the order of the spec, as pair_epilogue does for one
// pair. Bits of pairs with a bias of −∞ are cleared.
DEVICE void bias_and_cap(float (&scores)[S_REGISTERS], VisiblePairs& visible_pairs,
                         const WarpgroupTile& coord, const ConsumerLane& at, const Attention& a) {
    const u32 bias_pass = a.flags & BIAS_BEFORE_CAP ? 0 : 1;
    // not unrolled, because its bodies are unrolled over the scores of a thread
    NOT_UNROLLED for (u32 pass = 0; pass < 2; ++pass) {
        if ((a.flags & (HAS_BIAS | HAS_SLOPES)) && pass == bias_pass)
            UNROLL for (u32 e = 0; e < S_REGISTERS; ++e) {
                if (!visible_pairs.get(e)) continue;
                const PackedRow row =
                    consumer_row(a, coord.first_head, at.group, at.row_of(e));
                float bias = bias_of(a, coord.b, row.h, coord.first_query + row.query,
                                     coord.first_key + at.column_of(e));
                // a bias of −∞ masks the pair
                if (bias == -infinity()) visible_pairs.set(e, false);
                scores[e] += bias;
            }
        if (pass == 0 && (a.flags & HAS_CAP)) {
            const float inverse = 1.0f / float(a.cap);
            UNROLL for (u32 e = 0; e < S_REGISTERS; ++e)
                scores[e] = float(a.cap) * tanh_approx(scores[e] * inverse);
        }
    }
}

// Score epilogue of a tile: products become scores, −∞ where masked.
DEVICE void score_epilogue_in_registers(float (&scores)[S_REGISTERS], VisiblePairs& visible_pairs,
                                        const WarpgroupTile& coord, const ConsumerLane& at,
                                        const Attention& a) {
    UNROLL for (u32 r = 0; r < 2; ++r)
        UNROLL for (u32 word = 0; word < MASK_WORDS; ++word) {
            const u32 row = at.row + 8 * r;
            const PackedRow packed = consumer_row(a, coord.first_head, at.group, row);
            u64 line = packed.exists && coord.first_query + packed.query < a.queries
                           ? warpgroup_mask_row(a, coord, at.group, row, word) >> at.column
                           : 0;
            UNROLL for (u32 n_tile = 0; n_tile < 8; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c)
                    visible_pairs.set(4 * (8 * word + n_tile) + 2 * r + c,
                                      line >> (8 * n_tile + c) & 1);
        }
    if (a.rounding != ROUND_NOT)
        UNROLL for (u32 e = 0; e < S_REGISTERS; ++e)
            scores[e] = rounded_product(scores[e], a.rounding);
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e) scores[e] *= float(a.scale);
    bias_and_cap(scores, visible_pairs, coord, at, a);
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e)
        if (!visible_pairs.get(e)) scores[e] = -infinity();
}

// Applies dropout to the probabilities. The loop is not unrolled, so it collects bits: a register
// array cannot be indexed at run time.
DEVICE void apply_dropout(float (&probs)[S_REGISTERS], const WarpgroupTile& coord,
                          const ConsumerLane& at, const Attention& a) {
    VisiblePairs kept;
    UNROLL for (u32 word = 0; word < (S_REGISTERS + 31) / 32; ++word) {
        u32 bits = 0;
        NOT_UNROLLED for (u32 bit = 0; bit < 32; ++bit) {
            u32 e = word * 32 + bit;
            const PackedRow row = consumer_row(a, coord.first_head, at.group, at.row_of(e));
            u32 i = coord.first_query + row.query, j = coord.first_key + at.column_of(e);
            if (row.exists && i < a.queries && j < a.keys)
                bits |= u32(keep_factor(a, coord.b, row.h, i, j) != 0.0f) << bit;
        }
        kept.words[word] = bits;
    }
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e)
        probs[e] = kept.get(e) ? probs[e] * float(a.keep_scale) : 0.0f;
}
