// Backward on tensor cores (mma.sync), 16-bit elements: two passes, dQ by query tiles, dK and dV by
// key tiles. Accumulators are f32; P and dX are rounded to the element type for the last products.
//
//   for each visible tile of the other side:
//       S = left·rightᵀ of Q and K;  dP = left·rightᵀ of dO and V;  P, dX (gradient.cuh)
//       dQ pass:     dQ += dX·K
//       dK/dV pass:  dV += Pᵀ·dO;  dK += dXᵀ·Q
//
// The dK/dV pass computes Sᵀ and dPᵀ to begin with, so the block's own rows are always the left
// operand. S and dP stay in registers. One thread block owns an accumulator tile and adds in a
// fixed order: no atomics, bitwise reproducible. Unnormalized outputs use level 0.
//
// Source: Dao 2023 (FlashAttention-2), algorithm 2.
#pragma once

#include "gradient.cuh"
#include "backward_pair.cuh"
#include "matrix.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Queries of a thread: two rows of a tile if queries are the left operand, else its columns.
template <u32 pass>
DEVICE constexpr u32 query_count() {
    return pass == KEYS ? 2 * N_TILES : 2;
}
template <u32 pass>
DEVICE u32 query_offset(u32 index, const Lane& lane) {
    return pass == KEYS ? lane.half * 32 + index / 2 * 8 + lane.column + index % 2
                        : lane.row + 8 * index;
}

template <u32 pass, bool aligned>
DEVICE void load_query_statistics(QueryStatistics (&to)[2 * N_TILES], u32 b, u32 h, u32 first,
                                  const Lane& lane, const Attention& a) {
    const u16* head = statistics_of(a, b, h, 0);
    UNROLL for (u32 index = 0; index < query_count<pass>(); ++index) {
        u32 i = first + query_offset<pass>(index, lane);
        // beyond the end the last row is read, so that the loads need no branch
        const u16* from = head + i64(i < a.queries ? i : a.queries - 1) * a.statistics.row;
        const float* sums = reinterpret_cast<const float*>(from);
        to[index].lse = aligned ? sums[0] : load_sum(from);
        to[index].delta = aligned ? sums[2] : load_sum(from + 4);
        if (i >= a.queries) to[index] = {-infinity(), 0.0f};
    }
}

// Reads the statistics of a thread's queries of the tile that begins at `first`. Queries beyond the
// end get those of a row without gradient.
template <u32 pass>
DEVICE void read_query_statistics(QueryStatistics (&to)[2 * N_TILES], u32 b, u32 h, u32 first,
                                  const Lane& lane, const Attention& a) {
    const Tensor& rows = a.statistics;
    // records of dims that are not even put the statistics at odd multiples of two bytes
    if (rows.at % sizeof(float) == 0 && (rows.batch | rows.row | rows.head) % 2 == 0)
        load_query_statistics<pass, true>(to, b, h, first, lane, a);
    else
        load_query_statistics<pass, false>(to, b, h, first, lane, a);
}

// Computes P and dX from S and dP, and stores them to shared memory as left operands of gemm_nn. In
// a plain tile (is_plain) no pair is tested.
template <u32 pass, bool plain>
DEVICE void store_p_and_dx(u16* shared_p, u16* shared_dx, const ScoreFragments& scores,
                           const ScoreFragments& dprobs,
                           const QueryStatistics (&statistics)[2 * N_TILES], const TileCoord& coord,
                           const Lane& lane, const Attention& a) {
    UNROLL for (u32 r = 0; r < 2; ++r)
        UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile) {
            u32 left_row = lane.row + 8 * r, right_row = lane.half * 32 + n_tile * 8 + lane.column;
            bool visible[2] = {true, true};
            float p_dropped[2], dx[2];
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 query = pass == KEYS ? right_row + c : left_row,
                    key = pass == KEYS ? left_row : right_row + c;
                const QueryStatistics& row = statistics[pass == KEYS ? 2 * n_tile + c : r];
                float score = scores[n_tile][2 * r + c], dprob = dprobs[n_tile][2 * r + c];
                if (plain) {
                    p_dropped[c] = fast_exp(float(a.scale) * score - row.lse);
                    dx[c] = p_dropped[c] * (dprob - row.delta);
                    continue;
                }
                u64 line = mask_row(a, coord, query);
#ifdef PLANTED_BACKWARD_MASK_OFF_BY_ONE
                if (pass == PLANTED_BACKWARD_MASK_OFF_BY_ONE) line = line << 1 | 1;
#endif
                visible[c] = backward_pair(p_dropped[c], dx[c], score, dprob, line, query, key, row,
                                           coord, a);
            }
            u32 index = swizzled(left_row, right_row);
            if (pass == KEYS) {
                u32 pair = narrow_pair(p_dropped[0], p_dropped[1]);
                *reinterpret_cast<u32*>(shared_p + index) =
                    plain || coord.is_full ? pair : mark_masked(pair, visible[0], visible[1]);
            }
            u32 pair = narrow_pair(dx[0], dx[1]);
            *reinterpret_cast<u32*>(shared_dx + index) =
                plain || coord.is_full ? pair : mark_masked(pair, visible[0], visible[1]);
        }
}

// As store_p_and_dx. Chooses the code of a plain tile if all queries of the thread have a gradient:
// a query without one (lse = −∞) needs the test of its pairs.
template <u32 pass>
DEVICE void store_tile(u16* shared_p, u16* shared_dx, const ScoreFragments& scores,
                       const ScoreFragments& dprobs,
                       const QueryStatistics (&statistics)[2 * N_TILES], const TileCoord& coord,
                       const Lane& lane, const Attention& a) {
    bool plain = is_plain(coord, a);
    UNROLL for (u32 index = 0; index < query_count<pass>(); ++index)
        plain &= statistics[index].lse != -infinity();
    if (plain)
        store_p_and_dx<pass, true>(shared_p, shared_dx, scores, dprobs, statistics, coord, lane, a);
    else
        store_p_and_dx<pass, false>(shared_p, shared_dx, scores, dprobs, statistics, coord, lane,
                                    a);
}

DEVICE void clear(Accumulators& acc) {
    UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
        UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
            UNROLL for (u32 e = 0; e < 4; ++e) acc[chunk][n_tile][e] = 0;
}

// Grid: query tiles × query heads × batch rows, tiles in reverse order (forward_matrix.cuh).
KERNEL(backward_queries_matrix, Attention) {
    u32 tile = a.block_mask.lists - 1 - block_x(), h = block_y(), b = block_z();
    TileIterator tiles;
    tiles.begin(a, b, h, tile);
    if (!tiles.more()) return;
    Lane lane = lane_of_thread();

    SHARED(u16, stages, STAGES * CHUNK_ELEMENTS);
    SHARED(u16, shared_dx, TILE * TILE);

    QueriesStream stream;
    stream.begin(a, stages, tiles);
    LeftRows queries, douts;
    queries.begin(operand_of(a.q, b, h, a.queries, a.head_dim), tile * TILE, lane);
    douts.begin(operand_of(a.dout, b, h, a.queries, a.value_dim), tile * TILE, lane);
    QueryStatistics statistics[2 * N_TILES];
    read_query_statistics<QUERIES>(statistics, b, h, tile * TILE, lane, a);
    Accumulators acc;
    clear(acc);

    for (; tiles.more(); tiles.next(a)) {
        TileEntry entry = tiles.entry(a);
        TileCoord coord = tile_coord(a, b, h, tile, entry.tile, entry);
        ScoreFragments scores, dprobs;
        gemm_nt(scores, queries, stream, a.head_dim, lane, a);
        gemm_nt(dprobs, douts, stream, a.value_dim, lane, a);
        // Barriers in the stream order the writes to shared memory before gemm_nn's reads, and
        // those reads before the next tile's writes.
        store_tile<QUERIES>(nullptr, shared_dx, scores, dprobs, statistics, coord, lane, a);
        gemm_nn(acc, shared_dx, stream, a.head_dim, coord.is_full, lane, a);
    }

    UNROLL for (u32 r = 0; r < 2; ++r) {
        u64 i = u64(tile) * TILE + lane.row + 8 * r;
        if (i >= a.queries) continue;
        float* line = reinterpret_cast<float*>(a.dq) +
                      ((u64(b) * a.queries + i) * a.q_heads + h) * a.head_dim;
        UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = chunk * CHUNK + lane.half * 32 + n_tile * 8 + lane.column + c;
                    if (x < a.head_dim) line[x] += float(a.scale) * acc[chunk][n_tile][2 * r + c];
                }
    }
}

DEVICE void store_accumulators(const Accumulators& acc, float scale, const Tensor& to, u32 b,
                               u32 head, u32 first, const Lane& lane, u32 dim, const Attention& a) {
    UNROLL for (u32 r = 0; r < 2; ++r) {
        u32 row = first + lane.row + 8 * r;
        if (row >= a.keys) continue;
        UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = chunk * CHUNK + lane.half * 32 + n_tile * 8 + lane.column + c;
                    if (x >= dim) continue;
                    float* element = reinterpret_cast<float*>(offset<float>(to, b, row, head, x));
                    *element =
                        (a.flags & ADD ? *element : 0.0f) + scale * acc[chunk][n_tile][2 * r + c];
                }
    }
}

// Grid: key tiles × KV heads × batch rows. The block mask lists query tiles by key tile.
KERNEL(backward_keys_matrix, Attention) {
    u32 tile = block_x(), kv_head = block_y(), b = block_z(), group = a.q_heads / a.kv_heads;
    HeadTileIterator tiles;
    tiles.begin(a, b, tile, kv_head * group, (kv_head + 1) * group);
    Lane lane = lane_of_thread();

    SHARED(u16, stages, STAGES * CHUNK_ELEMENTS);
    SHARED(u16, shared_p, TILE * TILE);
    SHARED(u16, shared_dx, TILE * TILE);

    KeysStream stream;
    stream.begin(a, stages, tiles);
    LeftRows keys, values;
    keys.begin(operand_of(a.k, b, kv_head, a.keys, a.head_dim), tile * TILE, lane);
    values.begin(operand_of(a.v, b, kv_head, a.keys, a.value_dim), tile * TILE, lane);
    Accumulators dk, dv;
    clear(dk);
    clear(dv);

    for (; tiles.more(); tiles.next(a)) {
        TileEntry entry = tiles.entry(a);
        TileCoord coord = tile_coord(a, b, tiles.h, entry.tile, tile, entry);
        ScoreFragments scores, dprobs;
        gemm_nt(scores, keys, stream, a.head_dim, lane, a);
        gemm_nt(dprobs, values, stream, a.value_dim, lane, a);
        QueryStatistics statistics[2 * N_TILES];
        read_query_statistics<KEYS>(statistics, b, tiles.h, coord.first_query, lane, a);
        store_tile<KEYS>(shared_p, shared_dx, scores, dprobs, statistics, coord, lane, a);
        gemm_nn(dv, shared_p, stream, a.value_dim, coord.is_full, lane, a);
        gemm_nn(dk, shared_dx, stream, a.head_dim, coord.is_full, lane, a);
    }

    store_accumulators(dk, float(a.scale), a.dk, b, kv_head, tile * TILE, lane, a.head_dim, a);
    store_accumulators(dv, 1.0f, a.dv, b, kv_head, tile * TILE, lane, a.value_dim, a);
}

#endif
