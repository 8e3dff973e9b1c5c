// Probabilities P of a tile of scores on tensor cores (mma.sync), forward: score epilogue, tile
// mask and online softmax. `Shape` is the division of the tile (ForwardShape of forward_matrix.cuh).
//
// Scores scale·s with a positive scale are never formed: e^{scale·s − m} is one multiply-add and
// one ex2.
#pragma once

#include "forward_state.cuh"
#include "row_tiles.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// True if every pair has an epilogue of its own: bias, soft cap or rounding; or a scale that is not
// positive, or so small that products with it may leave the normal range of f32.
DEVICE bool has_epilogue(const Attention& a) {
    return (a.flags & (HAS_BIAS | HAS_SLOPES | HAS_CAP)) || a.rounding != ROUND_NOT ||
           !(float(a.scale) > 1e-30f);
}

// Bits of the pairs that are visible by the tile mask, and exist.
template <typename Shape>
DEVICE void mask_scores(typename Shape::Visible& visible, const TileCoord& coord,
                        const RowLane& lane, const Attention& a) {
    u32 first = coord.first_key / TILE * TILE, keys_left = a.keys - first;
    u64 existing = keys_left < TILE ? (1ull << keys_left) - 1 : ~0ull;
    UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m) {
        visible[m] = 0;
        UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
            PackedRow packed = packed_row<Shape::rows>(a, coord.h, lane.row_of(m, r));
            bool exists = packed.exists && coord.first_query + packed.query < a.queries;
            u64 line = 0;
            if (exists) line = mask_row(a, coord, packed.query, packed_queries<Shape::rows>(a));
            line = (line & existing) >> (coord.first_key - first + lane.column);
            UNROLL for (u32 n = 0; n < Shape::columns; ++n)
                visible[m] |= u32(line >> 8 * n & ((1 << FRAGMENT_COLUMNS) - 1))
                              << (4 * n + FRAGMENT_COLUMNS * r);
        }
    }
}

// Score epilogue of all visible pairs; a bias of −∞ masks its pair.
template <typename Shape>
DEVICE void apply_epilogue(typename Shape::Scores& scores, typename Shape::Visible& visible,
                           const TileCoord& coord, const RowLane& lane, const Attention& a) {
    NOT_UNROLLED for (u32 n = 0; n < Shape::columns; ++n) {
        UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m) {
            UNROLL for (u32 e = 0; e < 4; ++e) {
                PackedRow packed =
                    packed_row<Shape::rows>(a, coord.h, lane.row_of(m, e / FRAGMENT_COLUMNS));
                TileCoord row_coord = coord;
                row_coord.h = packed.h;
                float derivative;
                bool unmasked =
                    score_of_pair(scores[m][0][e], derivative, is_visible(visible, m, n, e),
                                  packed.query, 8 * n + lane.column + e % FRAGMENT_COLUMNS,
                                  row_coord, a);
                if (!unmasked) visible[m] &= ~(1u << (4 * n + e));
            }
            rotate(scores[m]);
        }
    }
}

template <typename Shape>
DEVICE void apply_dropout(typename Shape::Scores& probs, const TileCoord& coord,
                          const RowLane& lane, const Attention& a) {
    NOT_UNROLLED for (u32 n = 0; n < Shape::columns; ++n)
        UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m) {
            UNROLL for (u32 e = 0; e < 4; ++e) {
                PackedRow packed =
                    packed_row<Shape::rows>(a, coord.h, lane.row_of(m, e / FRAGMENT_COLUMNS));
                probs[m][0][e] *=
                    keep_factor(a, coord.b, packed.h, coord.first_query + packed.query,
                                coord.first_key + 8 * n + lane.column + e % FRAGMENT_COLUMNS);
            }
            rotate(probs[m]);
        }
}

// Exponent of a probability, or of one that is scaled: matrix units of AMD GPUs may flush subnormal
// numbers of f16, so that P is scaled by 2¹⁰ there, and with it the sums ℓ and O.
#if defined(ANNULUS_AMD) && ANNULUS_DTYPE == 3
#define PROBS_SCALE 1024.0f
DEVICE float scaled_exponent(float exponent) { return exponent + 10.0f; }
#else
#define PROBS_SCALE 1.0f
DEVICE float scaled_exponent(float exponent) { return exponent; }
#endif

// Online softmax of one tile: scores, to be multiplied by `natural`, become probabilities; state
// and O get the new maximum. Masked pairs have the score −∞ and so the probability 0.
template <typename Shape>
DEVICE void online_softmax(typename Shape::Scores& scores, typename Shape::Accumulators& o,
                           typename Shape::State& state, float natural) {
    float base[Shape::row_tiles][FRAGMENT_ROWS], rescale[Shape::row_tiles][FRAGMENT_ROWS];
    bool fused = true, changed = false;
    UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m)
        UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
            float tile_max = -infinity();
            UNROLL for (u32 n = 0; n < Shape::columns; ++n)
                UNROLL for (u32 c = 0; c < FRAGMENT_COLUMNS; ++c)
                    tile_max =
                        larger_score(tile_max, scores[m][n][FRAGMENT_COLUMNS * r + c]);
            tile_max = row_max(tile_max);
            float& max = state.max[m][r];
            // with a positive scale the maximum of the products is that of the scores
            float new_max = larger_score(max, natural * tile_max);
            rescale[m][r] = new_max == max ? 1.0f : fast_exp(max - new_max);
            changed |= rescale[m][r] != 1.0f;
            // every score so far is −∞: a base of 0 gives probabilities 0 instead of NaN
            base[m][r] = new_max == -infinity() ? 0.0f : new_max;
            fused &= base[m][r] <= FUSED_EXPONENT_LIMIT / LOG2_E &&
                     base[m][r] >= -FUSED_EXPONENT_LIMIT / LOG2_E;
            max = new_max;
        }
    if (fused) {
        float unit = natural * LOG2_E;
        UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m)
            UNROLL for (u32 e = 0; e < 4; ++e) {
                float offset = scaled_exponent(-base[m][e / FRAGMENT_COLUMNS] * LOG2_E);
                UNROLL for (u32 n = 0; n < Shape::columns; ++n)
                    scores[m][n][e] = exp2_approx(multiply_add(scores[m][n][e], unit, offset));
            }
    } else {
        // one product for the maximum and the scores: the difference is 0 at the maximum
        UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m)
            UNROLL for (u32 n = 0; n < Shape::columns; ++n)
                UNROLL for (u32 e = 0; e < 4; ++e)
                    scores[m][n][e] = exp2_approx(scaled_exponent(
                        (natural * scores[m][n][e] - base[m][e / FRAGMENT_COLUMNS]) * LOG2_E));
    }
    UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m)
        UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
            float sum = 0;
            UNROLL for (u32 n = 0; n < Shape::columns; ++n)
                UNROLL for (u32 c = 0; c < FRAGMENT_COLUMNS; ++c)
                    sum += scores[m][n][FRAGMENT_COLUMNS * r + c];
            state.sum[m][r] = state.sum[m][r] * rescale[m][r] + sum;
        }
    // in long sequences a maximum rarely changes
    if (!changed) return;
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
        UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m)
            UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                UNROLL for (u32 e = 0; e < 4; ++e)
                    o[panel][m][n][e] *= rescale[m][e / FRAGMENT_COLUMNS];
}

// Scale of the scores, and their options.
struct ScoreOptions {
    float scale;
    bool has_epilogue, has_dropout;
};

DEVICE ScoreOptions score_options(const Attention& a) {
    ScoreOptions options;
    options.scale = float(a.scale);
    options.has_epilogue = has_epilogue(a);
    options.has_dropout = a.flags & HAS_DROPOUT;
    return options;
}

// Score epilogue, mask and online softmax of one tile. Returns P in the layout of a left operand.
template <typename Shape>
DEVICE void forward_probs(typename Shape::Probs& probs, typename Shape::Scores& scores,
                          typename Shape::Accumulators& o, typename Shape::State& state,
                          const TileCoord& coord, const ScoreOptions& options,
                          const RowLane& lane, const Attention& a) {
    typename Shape::Visible visible = {};
    float natural = options.scale;
    // the pairs of a full tile need no test
    if (!coord.is_full || coord.first_key + Shape::keys > a.keys || options.has_epilogue) {
        mask_scores<Shape>(visible, coord, lane, a);
        if (options.has_epilogue) {
            apply_epilogue<Shape>(scores, visible, coord, lane, a);
            natural = 1;
        }
        UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m)
            UNROLL for (u32 n = 0; n < Shape::columns; ++n)
                UNROLL for (u32 e = 0; e < 4; ++e)
                    if (!is_visible(visible, m, n, e)) scores[m][n][e] = -infinity();
    }
    online_softmax<Shape>(scores, o, state, natural);
    if (options.has_dropout) apply_dropout<Shape>(scores, coord, lane, a);
    narrow_left<true>(probs, scores);
    if (!coord.is_full) mark_left(probs, visible);
}

#endif
