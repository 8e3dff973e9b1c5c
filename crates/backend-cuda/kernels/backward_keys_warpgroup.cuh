// dK and dV of one block of keys, on warpgroups (backward_warpgroup.cuh): a thread block owns 128
// keys of one KV head and streams 64 queries at a time, of all query heads of the group in turn.
#pragma once

#include "backward_warpgroup.cuh"

// Elements of Sᵀ of one thread: two keys × 16 queries.
#define KEYS_PAIRS NarrowStorage::pairs

// A thread's two adjacent columns.
struct alignas(8) ColumnPair {
    float of[2];
};
DEVICE ColumnPair column_pair(const float* row, u32 n_tile, const ConsumerLane& at) {
    return *reinterpret_cast<const ColumnPair*>(row + 8 * n_tile + at.column);
}

// Visible pairs of a thread, one bit each; a query without gradient has none.
DEVICE u64 visible_queries(const Attention& a, const BackwardTile& coord,
                           const StatisticsTile& statistics, const ConsumerLane& at) {
    u32 visible = 0;
    UNROLL for (u32 n_tile = 0; n_tile < KEYS_PAIRS / 4; ++n_tile) {
        ColumnPair lse = column_pair(statistics.lse, n_tile, at);
        UNROLL for (u32 c = 0; c < 2; ++c) {
            u64 line = backward_mask_row(a, coord, 8 * n_tile + at.column + c, 0);
            if (planted(DK_MASK_OFF_BY_ONE)) line = line << 1 | 1;
            line = lse.of[c] == -infinity() ? 0 : line >> at.row;
            UNROLL for (u32 r = 0; r < 2; ++r)
                visible |= u32(line >> 8 * r & 1) << (4 * n_tile + 2 * r + c);
        }
    }
    return visible;
}

// S becomes P and dP becomes dX, each pair with its own epilogue. Returns the visible pairs.
DEVICE u64 keys_pair_epilogue(float (&scores)[KEYS_PAIRS], float (&dprobs)[KEYS_PAIRS],
                              const StatisticsTile& statistics, const BackwardTile& coord,
                              const ConsumerLane& at, const Attention& a) {
    u32 visible = 0;
    TileCoord pairs = pair_coord(coord, 0);
    NOT_UNROLLED for (u32 e = 0; e < KEYS_PAIRS; e += 2) {
        u32 key = at.row_of(e), first_query = at.column_of(e);
        UNROLL for (u32 c = 0; c < 2; ++c) {
            u32 query = first_query + c;
            u64 line = backward_mask_row(a, coord, query, 0);
            QueryStatistics row = {statistics.lse[query], statistics.delta[query]};
            float p, dx;
            visible |= u32(backward_pair(p, dx, scores[c], dprobs[c], line, query, key, row, pairs,
                                         a))
                       << (e + c);
            scores[c] = p;
            dprobs[c] = dx;
        }
        rotate<2>(scores);
        rotate<2>(dprobs);
    }
    return visible;
}

// dP becomes dX, without epilogue.
template <bool plain>
DEVICE void score_gradients(float (&dprobs)[KEYS_PAIRS], const float (&probs)[KEYS_PAIRS],
                            const StatisticsTile& statistics, u64 visible, const ConsumerLane& at) {
    UNROLL for (u32 n_tile = 0; n_tile < KEYS_PAIRS / 4; ++n_tile) {
        ColumnPair delta = column_pair(statistics.delta, n_tile, at);
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

// Consumer warpgroup: dK and dV of its 64 keys from all visible queries.
template <bool epilogue>
DEVICE void backward_key_rows(NarrowStorage& memory, const BackwardAttention& arguments, u32 b,
                              u32 kv_head, u32 tile, StreamedTiles<64> tiles) {
    typedef NarrowStorage Storage;
    const Attention& a = arguments.attention;
    ConsumerLane at = consumer_lane();
    u32 first_key = tile * BACKWARD_TILE + at.group * OWN_ROWS;
    load_own_rows(memory, a.k, a.head_dim, a.v, a.value_dim, b, kv_head, first_key, a.keys, at);

    float dk[ACC_REGISTERS], dv[ACC_REGISTERS], scores[KEYS_PAIRS];
    u32 p[KEYS_PAIRS / 8][4] = {}, dx[KEYS_PAIRS / 8][4] = {};
    clear_acc(dk);
    clear_acc(dv);
    const OperandLow k = OperandLow(k_major_descriptor(memory.own[0][at.group])),
                     v = OperandLow(k_major_descriptor(memory.own[1][at.group]));
    const float unit = float(a.scale) * LOG2_E;
    StageCursor<Storage::stages> state = {0};
    await_tile(memory, state);
    issue_nt<Storage>(scores, k, memory.streamed[0][0]);
    if (!planted(S_NOT_AWAITED)) wgmma_wait<0>();
    fence_operand(scores);

    for (;;) {
        // uniform: descriptors then need no per-thread arithmetic
        const u32 stage = uniform(state.stage());
        const u16 *queries = memory.streamed[0][stage], *douts = memory.streamed[1][stage];
        const StatisticsTile& statistics =
            memory.statistics[planted(STATISTICS_OF_FIRST_STAGE) ? 0 : stage][0];
        float dprobs[KEYS_PAIRS];
        issue_nt<Storage>(dprobs, v, douts);

        BackwardTile coord = {b, tiles.tiles.h, tiles.first_row(a), first_key, 0, 0, 0, false};
        coord.mask_index = tiles.tiles.entry(a).mask_index;
        coord.mask_row = tiles.part * Storage::rows;
        coord.mask_word = at.group;
        coord.is_full = is_full_tile(a, coord.mask_index);
        // the same for all threads of the warpgroup
        const bool by_wgmma =
            planted(NON_FINITE_BY_WGMMA) || coord.is_full ||
            !named_barrier_any(WARPGROUP_BARRIER(at.group), WARPGROUP,
                               part_non_finite(queries, Storage::elements, at) ||
                                   part_non_finite(douts, Storage::elements, at));
        const bool plain = coord.mask_index == FULL_TILE &&
                           !warp_any(!is_fused(statistics.lse[at.lane]) ||
                                     !is_fused(statistics.lse[at.lane + 32]));
        u64 visible = ~0ull;
        if (epilogue) {
            wgmma_wait<0>();
            fence_operand(dprobs);
            visible = keys_pair_epilogue(scores, dprobs, statistics, coord, at, a);
        } else if (plain) {
            UNROLL for (u32 n_tile = 0; n_tile < KEYS_PAIRS / 4; ++n_tile) {
                ColumnPair lse = column_pair(statistics.lse, n_tile, at);
                UNROLL for (u32 e = 0; e < 4; ++e)
                    scores[4 * n_tile + e] =
                        fused_prob(scores[4 * n_tile + e], unit, lse.of[e % 2]);
            }
        } else {
            visible = visible_queries(a, coord, statistics, at);
            UNROLL for (u32 n_tile = 0; n_tile < KEYS_PAIRS / 4; ++n_tile) {
                ColumnPair lse = column_pair(statistics.lse, n_tile, at);
                UNROLL for (u32 e = 0; e < 4; ++e)
                    scores[4 * n_tile + e] =
                        careful_prob(scores[4 * n_tile + e], visible >> (4 * n_tile + e) & 1,
                                     lse.of[e % 2], a);
            }
        }
        if (!by_wgmma) {
            wgmma_wait<0>();
            fence_operand(dprobs);
            if (!epilogue) score_gradients<false>(dprobs, scores, statistics, visible, at);
            scalar_nn<Storage>(dv, scores, visible, douts, at);
            scalar_nn<Storage>(dk, dprobs, visible, queries, at);
            visible = 0;
        }
        narrow_left(p, scores);
        issue_nn(dv, p, memory, douts, by_wgmma);
        // of the groups of dP and dV, that of dP is complete
        if (!planted(DK_DP_NOT_AWAITED)) wgmma_wait<1>();
        fence_operand(dprobs);
        if (!epilogue && plain)
            score_gradients<true>(dprobs, scores, statistics, visible, at);
        else if (!epilogue)
            score_gradients<false>(dprobs, scores, statistics, visible, at);
        narrow_left(dx, dprobs);
        issue_nn(dk, dx, memory, queries, by_wgmma);
        if (planted(BACKWARD_EARLY_RELEASE)) release_tile(memory, stage, at);
        tiles.next(a, a.queries);
        if (!tiles.more()) break;
        ++state.tile;
        await_tile(memory, state);
        const u32 next_stage = uniform(state.stage());
        // an array of its own: P does not flow into the accumulators of S
        float next_scores[KEYS_PAIRS];
        issue_nt<Storage>(next_scores, k, memory.streamed[0][next_stage]);
        if (!planted(S_NOT_AWAITED)) wgmma_wait<0>();
        fence_operand(next_scores);
        UNROLL for (u32 e = 0; e < KEYS_PAIRS; ++e) scores[e] = next_scores[e];
        fence_operand(dk);
        fence_operand(dv);
        // the products have read P and dX until here. Pinning their registers ties narrow_left to
        // the wait.
        if (!planted(DV_P_IN_FLIGHT)) fence_operand(p);
        if (!planted(DK_DX_IN_FLIGHT)) fence_operand(dx);
        if (!planted(BACKWARD_EARLY_RELEASE)) release_tile(memory, stage, at);
    }
    wgmma_wait<0>();
    fence_operand(dk);
    fence_operand(dv);
    store_key_rows(dk, float(a.scale), a.dk, b, kv_head, first_key, a.head_dim, at, a);
    store_key_rows(dv, 1.0f, a.dv, b, kv_head, first_key, a.value_dim, at, a);
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

template <bool epilogue>
DEVICE void backward_keys_block(const BackwardAttention& arguments) {
    const Attention& a = arguments.attention;
    u32 tile = block_x(), kv_head = block_y(), b = block_z(), group = a.q_heads / a.kv_heads;
    StreamedTiles<64> tiles;
    tiles.begin(a, b, tile, kv_head * group, (kv_head + 1) * group);
    if (!tiles.more()) {
        store_no_gradient(a, b, kv_head, tile);
        return;
    }
    NarrowStorage& memory = *reinterpret_cast<NarrowStorage*>(dynamic_shared());
    begin_backward_storage(memory);
    if (thread_index() < WARPGROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (thread_index() == 0) {
            StageCursor<NarrowStorage::stages> state = {0};
            for (; tiles.more(); tiles.next(a, a.queries), ++state.tile) {
                u32 h = tiles.tiles.h, row = tiles.first_row(a);
                load_tile(memory, arguments, state, row, h, b,
                          statistics_of_head(arguments, b, h) + row / 64);
            }
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        backward_key_rows<epilogue>(memory, arguments, b, kv_head, tile, tiles);
    }
}

// Grid: tiles of 128 keys × KV heads × batch rows. The block mask lists query tiles by key tile.
// Under a causal mask the first tiles have the most queries.
KERNEL(backward_keys_warpgroup, BackwardAttention) { backward_keys_block<false>(a); }
// As backward_keys_warpgroup, for scores with an epilogue.
KERNEL(backward_keys_warpgroup_epilogue, BackwardAttention) { backward_keys_block<true>(a); }
