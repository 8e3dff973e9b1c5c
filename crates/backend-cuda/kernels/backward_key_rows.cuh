// Rows of keys of the backward kernels on warpgroups that own keys: of Sᵀ = K·Qᵀ a thread has two
// keys and, of every eight queries, two. Probabilities, score gradients, dK and dV.
#pragma once

#include "backward_warpgroup.cuh"

// A thread's two adjacent columns.
struct alignas(8) ColumnPair {
    float of[2];
};
// Of 8 queries, number `n_tile` of a stage.
DEVICE ColumnPair column_pair(const float (&statistics)[64], u32 n_tile, const ConsumerLane& at) {
    return *reinterpret_cast<const ColumnPair*>(statistics + n_tile % 8 * 8 + at.column);
}
DEVICE ColumnPair base_pair(const StatisticsTile* statistics, u32 n_tile, const ConsumerLane& at) {
    return column_pair(statistics[n_tile / 8].base, n_tile, at);
}
DEVICE ColumnPair exponent_pair(const StatisticsTile* statistics, u32 n_tile,
                                const ConsumerLane& at) {
    return column_pair(statistics[n_tile / 8].exponent, n_tile, at);
}
DEVICE ColumnPair delta_pair(const StatisticsTile* statistics, u32 n_tile, const ConsumerLane& at) {
    return column_pair(statistics[n_tile / 8].delta, n_tile, at);
}

// True if is_fused holds for all queries of a stage. All lanes of the warp call it.
template <typename Storage>
DEVICE bool are_fused(const StatisticsTile* statistics, const ConsumerLane& at) {
    bool fused = true;
    UNROLL for (u32 row = 0; row < Storage::rows; row += 32)
        fused = fused && is_fused(statistics[row / 64].base[row % 64 + at.lane]);
    return !warp_any(!fused);
}

// Visible pairs of a thread, one bit each; a query without gradient has none.
template <typename Storage>
DEVICE u64 visible_queries(const Attention& a, const BackwardTile& coord,
                           const StatisticsTile* statistics, const ConsumerLane& at) {
    u64 visible = 0;
    // 64 queries at a time: with more the compiler would load more lines of the mask at once than
    // there are registers
    NOT_UNROLLED for (u32 first = 0; first < Storage::rows; first += 64) {
        u32 bits = 0;
        UNROLL for (u32 n_tile = 0; n_tile < 8; ++n_tile) {
            ColumnPair exponent = exponent_pair(statistics + first / 64, n_tile, at);
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u64 line = backward_mask_row(a, coord, first + 8 * n_tile + at.column + c, 0);
                line = exponent.of[c] == -infinity() ? 0 : line >> at.row;
                UNROLL for (u32 r = 0; r < 2; ++r)
                    bits |= u32(line >> 8 * r & 1) << (4 * n_tile + 2 * r + c);
            }
        }
        visible |= u64(bits) << first / 2;
    }
    return visible;
}

// S becomes P, for a tile of which all pairs are visible and is_fused holds for all queries.
template <typename Storage>
DEVICE void fused_key_probs(float (&scores)[Storage::pairs], const StatisticsTile* statistics,
                            float unit, const ConsumerLane& at) {
    UNROLL for (u32 n_tile = 0; n_tile < Storage::pairs / 4; ++n_tile) {
        ColumnPair exponent = exponent_pair(statistics, n_tile, at);
        UNROLL for (u32 e = 0; e < 4; ++e)
            scores[4 * n_tile + e] = fused_prob(scores[4 * n_tile + e], unit, exponent.of[e % 2]);
    }
}

// S becomes P, for any tile.
template <typename Storage>
DEVICE void masked_key_probs(float (&scores)[Storage::pairs], const StatisticsTile* statistics,
                             u64 visible, const ConsumerLane& at, const Attention& a) {
    UNROLL for (u32 n_tile = 0; n_tile < Storage::pairs / 4; ++n_tile) {
        ColumnPair base = base_pair(statistics, n_tile, at);
        ColumnPair exponent = exponent_pair(statistics, n_tile, at);
        UNROLL for (u32 e = 0; e < 4; ++e) {
            const QueryStatistics row = {{exponent.of[e % 2], 0}, base.of[e % 2]};
            float& score = scores[4 * n_tile + e];
            score = masked_prob(score, visible >> (4 * n_tile + e) & 1, row, a);
        }
    }
}

// dP becomes dX, without epilogue.
template <bool plain, typename Storage>
DEVICE void key_score_gradients(float (&dprobs)[Storage::pairs],
                                const float (&probs)[Storage::pairs],
                                const StatisticsTile* statistics, u64 visible,
                                const ConsumerLane& at) {
    UNROLL for (u32 n_tile = 0; n_tile < Storage::pairs / 4; ++n_tile) {
        ColumnPair delta = delta_pair(statistics, n_tile, at);
        UNROLL for (u32 e = 4 * n_tile; e < 4 * n_tile + 4; ++e) {
            float ds = probs[e] * (dprobs[e] - delta.of[e % 2]);
            dprobs[e] = plain || (visible >> e & 1) ? ds : 0.0f;
        }
    }
}

// Writes or adds (ADD) the accumulators of a consumer's 64 keys.
DEVICE void store_key_rows(const float (&acc)[ACC_REGISTERS], float scale, const Tensor& to, u32 b,
                           u32 head, u32 first_key, u32 dim, const ConsumerLane& at,
                           const Attention& a) {
    UNROLL for (u32 r = 0; r < 2; ++r) {
        u32 row = first_key + at.row + 8 * r;
        if (row >= a.keys) continue;
        UNROLL for (u32 n_tile = 0; n_tile < ANNULUS_DIM / 8; ++n_tile)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = 8 * n_tile + at.column + c;
                if (x >= dim) continue;
                float* element = reinterpret_cast<float*>(offset<float>(to, b, row, head, x));
                *element = (a.flags & ADD ? *element : 0.0f) + scale * acc[4 * n_tile + 2 * r + c];
            }
    }
}

// Writes zeros to dK and dV of a tile that no query attends to, unless the pass adds.
DEVICE void store_no_gradient(const Attention& a, u32 b, u32 kv_head, u32 tile) {
    if (a.flags & ADD) return;
    for (u32 row = tile * BACKWARD_TILE; row < (tile + 1) * BACKWARD_TILE && row < a.keys; ++row) {
        for (u32 x = thread_index(); x < a.head_dim; x += THREADS)
            *reinterpret_cast<float*>(offset<float>(a.dk, b, row, kv_head, x)) = 0;
        for (u32 x = thread_index(); x < a.value_dim; x += THREADS)
            *reinterpret_cast<float*>(offset<float>(a.dv, b, row, kv_head, x)) = 0;
    }
}
