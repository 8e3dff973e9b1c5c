// dQ from one block of keys, on warpgroups (backward_warpgroup.cuh): a thread block owns 128
// queries of one head and streams tiles of keys.
#pragma once

#include "backward_warpgroup.cuh"

// Visible pairs of a thread, one bit each; a row without gradient has none.
template <typename Storage>
DEVICE u64 visible_keys(const Attention& a, const BackwardTile& coord,
                        const QueryStatistics (&rows)[2], const ConsumerLane& at) {
    u64 visible = 0;
    UNROLL for (u32 word = 0; word < Storage::rows / 64; ++word)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u64 line = backward_mask_row(a, coord, at.row + 8 * r, word);
            line = rows[r].exponent == -infinity() ? 0 : line >> at.column;
            UNROLL for (u32 n_tile = 0; n_tile < 8; ++n_tile)
                visible |= (line >> 8 * n_tile & 3) << (4 * (8 * word + n_tile) + 2 * r);
        }
    return visible;
}

// S becomes P and dP becomes dX, each pair with its own epilogue. Returns the visible pairs.
template <typename Storage>
DEVICE u64 queries_pair_epilogue(float (&scores)[Storage::pairs], float (&dprobs)[Storage::pairs],
                                 const QueryStatistics (&rows)[2],
                                 const BackwardTile& coord, const ConsumerLane& at,
                                 const Attention& a) {
    u64 visible = 0;
    NOT_UNROLLED for (u32 e = 0; e < Storage::pairs; e += 2) {
        u32 r = e / 2 % 2, query = at.row_of(e), key = at.column_of(e);
        TileCoord pairs = pair_coord(coord, key / 64);
        u64 line = backward_mask_row(a, coord, query, key / 64);
        QueryStatistics row = rows[0];
        if (r) row = rows[1];
        auto minus_base = [&](float s) { return s - row.base; };
        UNROLL for (u32 c = 0; c < 2; ++c) {
            float p, dx;
            visible |= u64(backward_pair(p, dx, scores[c], dprobs[c], line, query, key % 64 + c,
                                         row, minus_base, pairs, a))
                       << (e + c);
            scores[c] = p;
            dprobs[c] = dx;
        }
        rotate<2>(scores);
        rotate<2>(dprobs);
    }
    return visible;
}

// Consumer warpgroup: adds the contributions of all visible KV tiles to its 64 rows of dQ.
template <typename Storage, bool epilogue>
DEVICE void backward_query_rows(Storage& memory, const BackwardAttention& arguments, u32 b, u32 h,
                                u32 tile, StreamedTiles<Storage::rows> tiles) {
    const u32 pairs = Storage::pairs;
    const Attention& a = arguments.attention;
    ConsumerLane at = consumer_lane();
    u32 first_query = tile * BACKWARD_TILE + at.group * OWN_ROWS;
    load_own_rows(memory, a.q, a.head_dim, a.dout, a.value_dim, b, h, first_query, a.queries, at);
    const StatisticsTile& statistics = statistics_of_head(arguments, b, h)[first_query / 64];
    QueryStatistics rows[2];
    UNROLL for (u32 r = 0; r < 2; ++r) {
        const u32 row = at.row + 8 * r;
        rows[r] = {{statistics.exponent[row], statistics.delta[row]}, statistics.base[row]};
    }
    const bool fused = !warp_any(!is_fused(rows[0].base) || !is_fused(rows[1].base));

    float dq[ACC_REGISTERS], scores[pairs];
    u32 dx[pairs / 8][4] = {};
    clear_acc(dq);
    const OperandLow q = OperandLow(k_major_descriptor(memory.own[0][at.group])),
                     dout = OperandLow(k_major_descriptor(memory.own[1][at.group]));
    const float unit = float(a.scale) * LOG2_E;
    StageCursor<Storage::stages> state = {0};
    consumer_wait(memory, state);
    issue_nt<Storage>(scores, q, memory.streamed[0][0]);
    await_s(scores);

    for (;;) {
        // uniform: descriptors then need no per-thread arithmetic
        const u32 stage = uniform(state.stage());
        const u16* keys = memory.streamed[0][stage];
        float dprobs[pairs];
        issue_nt<Storage>(dprobs, dout, memory.streamed[1][stage]);

        BackwardTile coord = {b, h, first_query, tiles.first_row(a), 0, 0, 0, false};
        coord.mask_index = tiles.tiles.entry(a).mask_index;
        coord.mask_row = at.group * OWN_ROWS;
        coord.mask_word = tiles.part * (Storage::rows / 64);
        coord.is_full = is_full_tile(a, coord.mask_index);
        const bool plain = fused && coord.mask_index == FULL_TILE &&
                           coord.first_key + Storage::rows <= a.keys;
        u64 visible = ~0ull;
        if (!epilogue && plain) {
            UNROLL for (u32 e = 0; e < pairs; ++e)
                scores[e] = fused_prob(scores[e], unit, rows[e / 2 % 2].exponent);
        } else if (!epilogue) {
            visible = visible_keys<Storage>(a, coord, rows, at);
            UNROLL for (u32 e = 0; e < pairs; ++e)
                scores[e] = masked_prob(scores[e], visible >> e & 1, rows[e / 2 % 2], a);
        }
        wgmma_wait<0>();
        fence_operand(dprobs);
        if (epilogue) {
            visible = queries_pair_epilogue<Storage>(scores, dprobs, rows, coord, at, a);
        } else if (plain) {
            UNROLL for (u32 e = 0; e < pairs; ++e)
                dprobs[e] = scores[e] * (dprobs[e] - rows[e / 2 % 2].delta);
        } else {
            UNROLL for (u32 e = 0; e < pairs; ++e)
                dprobs[e] =
                    visible >> e & 1 ? scores[e] * (dprobs[e] - rows[e / 2 % 2].delta) : 0.0f;
        }
        // the same for all threads of the consumers
        const bool finite =
            coord.is_full ||
            !named_barrier_any(WARPGROUP_BARRIER(at.group), WARPGROUP,
                               part_non_finite(keys, Storage::elements, at));
        if (!finite) {
            nn_nonfinite_fixup<Storage>(dq, dprobs, visible, keys, at);
            zero_streamed(memory, stage, 1);
        }
        narrow_left(dx, dprobs);
        issue_nn<Storage>(dq, dx, keys);
        tiles.next(a, a.keys);
        if (!tiles.more()) break;
        ++state.tile;
        consumer_wait(memory, state);
        const u32 next_stage = uniform(state.stage());
        // an array of its own: P does not flow into the accumulators of S
        float next_scores[pairs];
        issue_nt<Storage>(next_scores, q, memory.streamed[0][next_stage]);
        await_s(next_scores);
        UNROLL for (u32 e = 0; e < pairs; ++e) scores[e] = next_scores[e];
        fence_operand(dq);
        // dX·K has read dX until here. Pinning its registers ties narrow_left to the wait.
        fence_operand(dx);
        consumer_release(memory, stage, at);
    }
    wgmma_wait<0>();
    fence_operand(dq);

    UNROLL for (u32 r = 0; r < 2; ++r) {
        u64 i = first_query + at.row + 8 * r;
        if (i >= a.queries) continue;
        float* line = reinterpret_cast<float*>(a.dq) +
                      ((u64(b) * a.queries + i) * a.q_heads + h) * a.head_dim;
        UNROLL for (u32 n_tile = 0; n_tile < ANNULUS_DIM / 8; ++n_tile)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = 8 * n_tile + at.column + c;
                if (x < a.head_dim) line[x] += float(a.scale) * dq[4 * n_tile + 2 * r + c];
            }
    }
}

template <typename Storage, bool epilogue>
DEVICE void backward_queries_block(const BackwardAttention& arguments) {
    const Attention& a = arguments.attention;
    const OwnTile own = own_tile_of(arguments, block_x(), a.q_heads);
    u32 tile = a.block_mask.lists - 1 - own.tile, h = own.head, b = own.b;
    StreamedTiles<Storage::rows> tiles;
    tiles.begin(a, b, tile, h, h + 1);
    if (!tiles.more()) return;
    Storage& memory = *reinterpret_cast<Storage*>(dynamic_shared());
    begin_backward_storage(memory);
    if (thread_index() < WARPGROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (thread_index() == 0) {
            u32 kv_head = h / (a.q_heads / a.kv_heads);
            StageCursor<Storage::stages> state = {0};
            for (; tiles.more(); tiles.next(a, a.keys), ++state.tile) {
                producer_acquire(memory, state);
                load_tile(memory, arguments, state, tiles.first_row(a), kv_head, b, nullptr);
            }
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        backward_query_rows<Storage, epilogue>(memory, arguments, b, h, tile, tiles);
    }
}

// Grid: as many blocks as tiles of 128 queries × query heads × batch rows. Tiles run in reverse
// order: under a causal mask the last ones have the most visible keys.
KERNEL(backward_queries_warpgroup, BackwardAttention) {
    backward_queries_block<WideStorage, false>(a);
}
// As backward_queries_warpgroup, for scores with an epilogue.
KERNEL(backward_queries_warpgroup_epilogue, BackwardAttention) {
    backward_queries_block<NarrowStorage, true>(a);
}
