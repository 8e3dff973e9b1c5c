// dK and dV of one block of keys, on warpgroups (backward_warpgroup.cuh): a thread block owns 128
// keys of one KV head and streams 64 queries at a time, of all query heads of the group in turn. Of
// Sᵀ = K·Qᵀ a thread has two keys and, of every eight queries, two.
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

// Elements of Sᵀ of one thread: two keys × 16 queries.
#define KEYS_PAIRS NarrowStorage::pairs

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
            RowExponent row = {statistics.exponent[query], statistics.delta[query]};
            auto minus_base = [&](float s) { return s - statistics.base[query]; };
            float p, dx;
            visible |= u32(backward_pair(p, dx, scores[c], dprobs[c], line, query, key, row,
                                         minus_base, pairs, a))
                       << (e + c);
            scores[c] = p;
            dprobs[c] = dx;
        }
        rotate<2>(scores);
        rotate<2>(dprobs);
    }
    return visible;
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
    consumer_wait(memory, state);
    issue_nt<Storage>(scores, k, memory.streamed[0][0]);
    await_s(scores);

    for (;;) {
        // uniform: descriptors then need no per-thread arithmetic
        const u32 stage = uniform(state.stage());
        const u16 *queries = memory.streamed[0][stage], *douts = memory.streamed[1][stage];
        const StatisticsTile* statistics = statistics_of_stage(memory, stage);
        float dprobs[KEYS_PAIRS];
        issue_nt<Storage>(dprobs, v, douts);

        BackwardTile coord = {b, tiles.tiles.h, tiles.first_row(a), first_key, 0, 0, 0, false};
        coord.mask_index = tiles.tiles.entry(a).mask_index;
        coord.mask_row = tiles.part * Storage::rows;
        coord.mask_word = at.group;
        coord.is_full = is_full_tile(a, coord.mask_index);
        // the same for all threads of the consumers
        const bool finite =
            coord.is_full ||
            !named_barrier_any(WARPGROUP_BARRIER(at.group), WARPGROUP,
                               part_non_finite(queries, Storage::elements, at) ||
                                   part_non_finite(douts, Storage::elements, at));
        const bool plain =
            coord.mask_index == FULL_TILE && are_fused<Storage>(statistics, at);
        u64 visible = ~0ull;
        if (epilogue) {
            wgmma_wait<0>();
            fence_operand(dprobs);
            visible = keys_pair_epilogue(scores, dprobs, *statistics, coord, at, a);
        } else if (plain) {
            fused_key_probs<Storage>(scores, statistics, unit, at);
        } else {
            visible = visible_queries<Storage>(a, coord, statistics, at);
            masked_key_probs<Storage>(scores, statistics, visible, at, a);
        }
        if (!finite) {
            wgmma_wait<0>();
            fence_operand(dprobs);
            if (!epilogue)
                key_score_gradients<false, Storage>(dprobs, scores, statistics, visible, at);
            nn_nonfinite_fixup<Storage>(dv, scores, visible, douts, lane_again(at));
            nn_nonfinite_fixup<Storage>(dk, dprobs, visible, queries, lane_again(at));
            zero_streamed(memory, stage, 2);
        }
        narrow_left(p, scores);
        issue_nn<Storage>(dv, p, douts);
        // of the groups of dP and dV, that of dP is complete
        wgmma_wait<1>();
        fence_operand(dprobs);
        if (!epilogue && finite && plain)
            key_score_gradients<true, Storage>(dprobs, scores, statistics, visible, at);
        else if (!epilogue && finite)
            key_score_gradients<false, Storage>(dprobs, scores, statistics, visible, at);
        narrow_left(dx, dprobs);
        issue_nn<Storage>(dk, dx, queries);
        tiles.next(a, a.queries);
        if (!tiles.more()) break;
        ++state.tile;
        consumer_wait(memory, state);
        const u32 next_stage = uniform(state.stage());
        // an array of its own: P does not flow into the accumulators of S
        float next_scores[KEYS_PAIRS];
        issue_nt<Storage>(next_scores, k, memory.streamed[0][next_stage]);
        await_s(next_scores);
        UNROLL for (u32 e = 0; e < KEYS_PAIRS; ++e) scores[e] = next_scores[e];
        fence_operand(dk);
        fence_operand(dv);
        // the products have read P and dX until here. Pinning their registers ties narrow_left to
        // the wait.
        fence_operand(p);
        fence_operand(dx);
        consumer_release(memory, stage, at);
    }
    wgmma_wait<0>();
    fence_operand(dk);
    fence_operand(dv);
    store_key_rows(dk, float(a.scale), a.dk, b, kv_head, first_key, a.head_dim, at, a);
    store_key_rows(dv, 1.0f, a.dv, b, kv_head, first_key, a.value_dim, at, a);
}

template <bool epilogue>
DEVICE void backward_keys_block(const BackwardAttention& arguments) {
    const Attention& a = arguments.attention;
    const OwnTile own = own_tile_of(arguments, block_x(), a.kv_heads);
    u32 tile = own.tile, kv_head = own.head, b = own.b, group = a.q_heads / a.kv_heads;
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
                producer_acquire(memory, state);
                load_tile(memory, arguments, state, row, h, b,
                          statistics_of_head(arguments, b, h) + row / 64);
            }
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        backward_key_rows<epilogue>(memory, arguments, b, kv_head, tile, tiles);
    }
}

// Grid: as many blocks as tiles of 128 keys × KV heads × batch rows. The block mask lists query
// tiles by key tile. Under a causal mask the first tiles have the most queries.
KERNEL(backward_keys_warpgroup, BackwardAttention) { backward_keys_block<false>(a); }
// As backward_keys_warpgroup, for scores with an epilogue.
KERNEL(backward_keys_warpgroup_epilogue, BackwardAttention) { backward_keys_block<true>(a); }
