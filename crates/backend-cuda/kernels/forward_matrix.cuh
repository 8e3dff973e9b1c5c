// Forward over one block of keys on tensor cores (mma.sync), 16-bit elements. Same algorithm as
// forward.cuh; S and O accumulate in f32, P is rounded to the element type for the P·V product. A
// row's columns are split over two warps, which exchange row maximum and row sum through shared
// memory. With GQA packing a tile's rows are (query, head) pairs.
//
// Unnormalized outputs use level 0: their backward pass must recompute the row maximum bit for bit.
//
// Source: Dao 2023 (FlashAttention-2).
#pragma once

#include "forward_state.cuh"
#include "matrix.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Blocks per multiprocessor. The barriers of a block separate its products from its softmax, so
// that only another block can overlap them. At 64 dims 128 registers a thread suffice for two.
#define FORWARD_BLOCKS (ANNULUS_DIM <= 64 ? 2 : 1)

// Score epilogue of a thread's products, and the maximum of each of its two rows over its columns.
// Returns the bits of the visible pairs. A plain tile (is_plain) needs no test of a pair.
template <bool plain>
DEVICE u32 forward_scores(ScoreFragments& scores, float (&tile_max)[2], const TileCoord& coord,
                          const Lane& lane, const Attention& a) {
    u32 visible_bits = plain ? ~0u : 0;
    UNROLL for (u32 r = 0; r < 2; ++r) {
        TileCoord row_coord = coord;
        u32 query = lane.row + 8 * r;
        u64 line = plain ? ~0ull : packed_mask_row(row_coord, query, a);
        tile_max[r] = -infinity();
        UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                float& score = scores[n_tile][2 * r + c];
                if (plain) {
                    score *= float(a.scale);
                    tile_max[r] = larger(tile_max[r], score);
                    continue;
                }
                float derivative;
                u32 key = lane.half * 32 + n_tile * 8 + lane.column + c;
                bool visible = pair_epilogue(score, derivative, line, query, key, row_coord, a);
                if (visible) tile_max[r] = larger(tile_max[r], score);
                visible_bits |= u32(visible) << (n_tile * 4 + 2 * r + c);
            }
    }
    return visible_bits;
}

// Probabilities of one row of a thread, as 16-bit elements to shared memory. Returns their sum.
template <bool plain>
DEVICE float forward_probs(u16* probs, const ScoreFragments& scores, u32 visible_bits, float max,
                           u32 r, const TileCoord& coord, const PackedRow& packed,
                           const Lane& lane, const Attention& a) {
    // every score so far is −∞: a base of 0 gives probabilities 0 instead of NaN
    float base = max == -infinity() ? 0.0f : max, sum = 0;
    UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile) {
        u32 key = lane.half * 32 + n_tile * 8 + lane.column;
        bool visible[2];
        float prob[2];
        UNROLL for (u32 c = 0; c < 2; ++c) {
            visible[c] = plain || (visible_bits >> (n_tile * 4 + 2 * r + c) & 1);
            prob[c] = visible[c] ? fast_exp(scores[n_tile][2 * r + c] - base) : 0.0f;
            sum += prob[c];
            if (!plain && visible[c] && (a.flags & HAS_DROPOUT))
                prob[c] *= keep_factor(a, coord.b, packed.h, coord.first_query + packed.query,
                                       coord.first_key + key + c);
        }
        u32 pair = narrow_pair(prob[0], prob[1]);
        if (!plain && !coord.is_full) pair = mark_masked(pair, visible[0], visible[1]);
        *reinterpret_cast<u32*>(probs + swizzled(lane.row + 8 * r, key)) = pair;
    }
    return sum;
}

// Grid: query tiles, each with its ranges of keys × groups of packed_heads query heads × batch rows.
KERNEL_OF(FORWARD_BLOCKS, forward_matrix, Attention) {
    const ForwardTile place = forward_tile(a);
    u32 tile = place.tile, first_head = block_y() * a.packed_heads, b = block_z();
    u32 first_query = tile * packed_queries(a);
    HeadTileIterator tiles;
    tiles.begin(a, b, place.list, first_head, first_head + 1);
    if (!tiles.more() && keeps_state(a)) return;
    Lane lane = lane_of_thread();
    // in decoding most warps have no rows: they copy, and neither read shared memory nor multiply
    PackedRow first_row = packed_row(a, first_head, lane.first_row);
    lane.has_rows = first_row.exists && first_query + first_row.query < a.queries;

    SHARED(u16, stages, STAGES * CHUNK_ELEMENTS);
    SHARED(u16, probs, TILE * TILE);
    SHARED(float, half_max, 2 * TILE);
    SHARED(float, half_sum, 2 * TILE);

    Stream<FORWARD> stream;
    stream.begin(a, stages, tiles);
    LeftRows<true> queries;
    queries.begin(operand_of(a.q, b, first_head, a.queries, a.head_dim), first_query, lane, a);

    Accumulators o;
    float max[2], sum[2];
    UNROLL for (u32 r = 0; r < 2; ++r) {
        PackedRow packed = packed_row(a, first_head, lane.row + 8 * r);
        u64 i = first_query + packed.query;
        bool exists = packed.exists && i < a.queries && !starts_empty(a);
        u64 index = statistics_row(a, 0, b, packed.h, i);
        max[r] = exists ? reinterpret_cast<const float*>(a.max)[index] : -infinity();
        sum[r] = exists ? reinterpret_cast<const float*>(a.sum)[index] : 0.0f;
        const float* line = acc_row(a, 0, b, packed.h, i);
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
        bool plain = is_plain(coord, a);
        float tile_max[2];
        u32 visible_bits = 0;
        if (lane.has_rows)
            visible_bits = plain ? forward_scores<true>(scores, tile_max, coord, lane, a)
                                 : forward_scores<false>(scores, tile_max, coord, lane, a);
        if (lane.has_rows)
            UNROLL for (u32 r = 0; r < 2; ++r) {
                tile_max[r] = larger(tile_max[r], shuffle_xor(tile_max[r], 1));
                tile_max[r] = larger(tile_max[r], shuffle_xor(tile_max[r], 2));
                if (lane.lane % 4 == 0)
                    half_max[lane.half * TILE + lane.row + 8 * r] = tile_max[r];
            }
        barrier();

        // probabilities, and row sum over both halves
        float rescale[2] = {1.0f, 1.0f};
        if (lane.has_rows) {
            UNROLL for (u32 r = 0; r < 2; ++r) {
                u32 row = lane.row + 8 * r;
                PackedRow packed = packed_row(a, first_head, row);
                float new_max = larger(max[r], larger(half_max[row], half_max[TILE + row]));
                rescale[r] = new_max == max[r] ? 1.0f : fast_exp(max[r] - new_max);
                float partial_sum =
                    plain ? forward_probs<true>(probs, scores, visible_bits, new_max, r, coord,
                                                packed, lane, a)
                          : forward_probs<false>(probs, scores, visible_bits, new_max, r, coord,
                                                 packed, lane, a);
                partial_sum += shuffle_xor(partial_sum, 1);
                partial_sum += shuffle_xor(partial_sum, 2);
                if (lane.lane % 4 == 0) half_sum[lane.half * TILE + row] = partial_sum;
                max[r] = new_max;
            }
            UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
                UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
                    UNROLL for (u32 e = 0; e < 4; ++e) o[chunk][n_tile][e] *= rescale[e / 2];
        }

        // Barriers in the stream order the writes to shared memory before gemm_nn's reads, and
        // those reads before the next tile's writes.
        gemm_nn(o, probs, stream, a.value_dim, coord.is_full, lane, a);
        if (lane.has_rows)
            UNROLL for (u32 r = 0; r < 2; ++r)
                sum[r] = sum[r] * rescale[r] +
                         (half_sum[lane.row + 8 * r] + half_sum[TILE + lane.row + 8 * r]);
    }

    const bool write_outputs = a.flags & WRITE_OUTPUTS, in_pairs = stores_pairs(a);
    UNROLL for (u32 r = 0; r < 2; ++r) {
        PackedRow packed = packed_row(a, first_head, lane.row + 8 * r);
        u64 i = first_query + packed.query;
        if (!packed.exists || i >= a.queries) continue;
        RowOutput output = row_output(max[r], sum[r]);
        bool is_first = lane.half == 0 && lane.lane % 4 == 0;
        if (is_first && write_outputs) store_lse(a, b, packed.h, i, output.lse);
        if (is_first && !write_outputs) {
            u64 index = statistics_row(a, place.split, b, packed.h, i);
            reinterpret_cast<float*>(a.max)[index] = max[r];
            reinterpret_cast<float*>(a.sum)[index] = sum[r];
        }
        float* line = acc_row(a, place.split, b, packed.h, i);
        UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile) {
                u32 x = chunk * CHUNK + lane.half * 32 + n_tile * 8 + lane.column;
                const float* pair = o[chunk][n_tile] + 2 * r;
                if (write_outputs)
                    store_output_pair(a, output, b, packed.h, i, x, pair[0], pair[1], in_pairs);
                else
                    UNROLL for (u32 c = 0; c < 2; ++c)
                        if (x + c < a.value_dim) line[x + c] = pair[c];
            }
    }
}

#endif
