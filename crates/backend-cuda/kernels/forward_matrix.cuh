// Forward over one block of keys on tensor cores (mma.sync), 16-bit elements. Same algorithm as
// forward.cuh; S and O accumulate in f32, P is rounded to the element type for the P·V product. A
// row's columns are split over two warps, which exchange row maximum and row sum through shared
// memory. With GQA packing a tile's rows are (query, head) pairs.
//
// Unnormalized outputs use level 0: their backward pass must recompute the row maximum bit for bit.
//
// Source: Dao 2023 (FlashAttention-2).
#pragma once

#include "matrix.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Grid: query tiles × groups of packed_heads query heads × batch rows. Tiles run in reverse order:
// under a causal mask the last ones have the most visible keys.
KERNEL(forward_matrix, Attention) {
    u32 tile = a.block_mask.tiles - 1 - block_x(), first_head = block_y() * a.packed_heads,
        b = block_z();
    u32 first_query = tile * packed_queries(a);
    HeadTileIterator tiles;
    tiles.begin(a, b, tile, first_head, first_head + 1);
    if (!tiles.more()) return;
    Lane lane = lane_of_thread();

    SHARED(u16, stages, STAGES * CHUNK_ELEMENTS);
    SHARED(u16, probs, TILE * TILE);
    SHARED(float, half_max, 2 * TILE);
    SHARED(float, half_sum, 2 * TILE);

    Stream<FORWARD> stream;
    stream.begin(a, stages, tiles);
    LeftRows<true> queries;
    queries.begin(operand_of(a.q, b, first_head, a.queries, a.head_dim), first_query, lane, a);

    float* acc = reinterpret_cast<float*>(a.acc);
    Accumulators o;
    float max[2], sum[2];
    UNROLL for (u32 r = 0; r < 2; ++r) {
        PackedRow packed = packed_row(a, first_head, lane.row + 8 * r);
        u64 i = first_query + packed.query;
        bool exists = packed.exists && i < a.queries;
        u64 index = (u64(b) * a.q_heads + packed.h) * a.queries + i;
        max[r] = exists ? reinterpret_cast<const float*>(a.max)[index] : -infinity();
        sum[r] = exists ? reinterpret_cast<const float*>(a.sum)[index] : 0.0f;
        const float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + packed.h) * a.value_dim;
        UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = chunk * CHUNK + lane.half * 32 + n_tile * 8 + lane.column + c;
                    o[chunk][n_tile][2 * r + c] = exists && x < a.value_dim ? line[x] : 0.0f;
                }
    }

    for (; tiles.more(); tiles.next(a)) {
        TileEntry entry = tiles.entry(a);
        TileCoord coord = tile_coord<true>(a, b, first_head, tile, entry.tile, entry);
        ScoreFragments scores;
        gemm_nt(scores, queries, stream, a.head_dim, lane, a);

        // score epilogue, and row maximum over both halves
        u32 visible_bits = 0;
        UNROLL for (u32 r = 0; r < 2; ++r) {
            TileCoord row_coord = coord;
            u32 query = lane.row + 8 * r;
            u64 line = packed_mask_row(row_coord, query, a);
            float tile_max = -infinity();
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    float derivative;
                    u32 key = lane.half * 32 + n_tile * 8 + lane.column + c;
                    bool visible = pair_epilogue(scores[n_tile][2 * r + c], derivative, line, query,
                                                 key, row_coord, a);
                    if (visible) tile_max = larger(tile_max, scores[n_tile][2 * r + c]);
                    visible_bits |= u32(visible) << (n_tile * 4 + 2 * r + c);
                }
            tile_max = larger(tile_max, shuffle_xor(tile_max, 1));
            tile_max = larger(tile_max, shuffle_xor(tile_max, 2));
            if (lane.lane % 4 == 0) half_max[lane.half * TILE + lane.row + 8 * r] = tile_max;
        }
        barrier();

        // probabilities, and row sum over both halves
        float rescale[2];
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u32 row = lane.row + 8 * r;
            PackedRow packed = packed_row(a, first_head, row);
            float new_max = larger(max[r], larger(half_max[row], half_max[TILE + row]));
            bool all_masked = new_max == -infinity();
            rescale[r] = new_max == max[r] ? 1.0f : fast_exp(max[r] - new_max);
            float partial_sum = 0;
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile) {
                u32 key = lane.half * 32 + n_tile * 8 + lane.column;
                bool visible[2];
                float prob[2];
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    visible[c] = visible_bits >> (n_tile * 4 + 2 * r + c) & 1;
                    prob[c] = visible[c] && !all_masked
                                  ? fast_exp(scores[n_tile][2 * r + c] - new_max)
                                  : 0.0f;
                    partial_sum += prob[c];
                    if (visible[c] && (a.flags & HAS_DROPOUT))
                        prob[c] *= keep_factor(a, b, packed.h, first_query + packed.query,
                                               coord.first_key + key + c);
                }
                u32 pair = narrow_pair(prob[0], prob[1]);
                if (!coord.is_full) pair = mark_masked(pair, visible[0], visible[1]);
                *reinterpret_cast<u32*>(probs + swizzled(row, key)) = pair;
            }
            partial_sum += shuffle_xor(partial_sum, 1);
            partial_sum += shuffle_xor(partial_sum, 2);
            if (lane.lane % 4 == 0) half_sum[lane.half * TILE + row] = partial_sum;
            max[r] = new_max;
        }
        UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
                UNROLL for (u32 e = 0; e < 4; ++e) o[chunk][n_tile][e] *= rescale[e / 2];

        // Barriers in the stream order the writes to shared memory before gemm_nn's reads, and
        // those reads before the next tile's writes.
        gemm_nn(o, probs, stream, a.value_dim, coord.is_full, lane, a);
        UNROLL for (u32 r = 0; r < 2; ++r)
            sum[r] = sum[r] * rescale[r] +
                     (half_sum[lane.row + 8 * r] + half_sum[TILE + lane.row + 8 * r]);
    }

    UNROLL for (u32 r = 0; r < 2; ++r) {
        PackedRow packed = packed_row(a, first_head, lane.row + 8 * r);
        u64 i = first_query + packed.query;
        if (!packed.exists || i >= a.queries) continue;
        if (lane.half == 0 && lane.lane % 4 == 0) {
            u64 index = (u64(b) * a.q_heads + packed.h) * a.queries + i;
            reinterpret_cast<float*>(a.max)[index] = max[r];
            reinterpret_cast<float*>(a.sum)[index] = sum[r];
        }
        float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + packed.h) * a.value_dim;
        UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = chunk * CHUNK + lane.half * 32 + n_tile * 8 + lane.column + c;
                    if (x < a.value_dim) line[x] = o[chunk][n_tile][2 * r + c];
                }
    }
}

#endif
