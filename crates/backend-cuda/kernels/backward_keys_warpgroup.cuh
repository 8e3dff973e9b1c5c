// dK and dV of one block of keys, on warpgroups (backward_warpgroup.cuh): a thread block owns 128
// keys of one KV head and streams 64 queries at a time, of all query heads of the group in turn.
#pragma once

#include "backward_key_rows.cuh"

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
