// dQ from one block of keys, on tensor cores or matrix cores (backward_matrix.cuh).
//
// A block of four warps owns 128 rows of queries, with 256 dims 64. A warp owns 32 rows (16) and
// all keys of a tile, above 64 dims half of them after the other. K is streamed twice: once more
// costs less than the shared memory that keeping it would take from a second block per
// multiprocessor.
//
//                     64 dims    128 dims    256 dims
//   rows of Q, dO     32 KB      64 KB       64 KB       shared memory
//   stages of K, V    2 × 8 KB   2 × 8 KB    2 × 8 KB
//   dQ                64         128         128         registers of a thread
//   S, dP             2 × 64     2 × 32      2 × 16
//
// On AMD GPUs a block of four waves owns 128 rows, a wave 32. K and V pass through registers; of K,
// the second time, the transpose is stored (matrix_amd.cuh).
//
//   stages of K, V    2 × 4 KB   2 × 8 KB    2 × 8 KB    shared memory
//   Q, dO             16, 16     32, 32      64, 64      registers of a thread
//   dQ                32         64          128
//   S, dP             2 × 16     2 × 16      2 × 16
//   rows on the way   4          8           8
#pragma once

#include "backward_matrix.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

#define QUERIES_ROWS (WARP_ROWS * BACKWARD_ROW_TILES * BACKWARD_WARPS)
// Keys whose scores a warp holds at once, and their MMA tiles.
#define QUERIES_KEYS (ANNULUS_DIM <= 64 && WARP_ROWS == 16 ? 64 : 32)
#define QUERIES_COLUMNS (QUERIES_KEYS / 8)

typedef Stream<QUERIES, BACKWARD_THREADS, 2, QUERIES_KEYS> QueriesStream;
typedef RowScores<BACKWARD_ROW_TILES, QUERIES_COLUMNS> QueriesScores;
typedef RowPairs<BACKWARD_ROW_TILES, QUERIES_COLUMNS> QueriesPairs;
typedef VisibleBits<BACKWARD_ROW_TILES> QueriesVisible;

// Dynamic shared memory of a block; `Variant::dynamic_shared_bytes` (src/variant.rs) has its size.
#ifdef ANNULUS_AMD

struct QueriesStorage {
    u16 stages[2 * QueriesStream::stage_elements];
};

// Rows of Q and dO and statistics of a thread's row, in registers.
struct QueriesRows {
    RowFragments queries, douts;
    QueryStatistics statistics;
    bool fused;  // of all rows of the wave: their base is 0

    METHOD void load(QueriesStorage&, u32 b, u32 h, u32 first_query, const RowLane& lane,
                     const Attention& a) {
        const u32 i = first_query + lane.row_of(0, 0);
        load_row(queries, operand_of(a.q, b, h, a.queries, a.head_dim), i);
        load_row(douts, operand_of(a.dout, b, h, a.queries, a.value_dim), i);
        statistics = fused_statistics(load_query_statistics(a, b, h, i));
        fused = !any_of_wave(!is_fused(statistics.base));
    }
    METHOD const RowExponent& of_row(u32) const { return statistics; }
    METHOD float minus_base(float score, const TileCoord&, u32, const Attention&) const {
        return score - statistics.base;
    }
};

#else

struct QueriesStorage {
    u16 queries[QUERIES_ROWS * ANNULUS_DIM], douts[QUERIES_ROWS * ANNULUS_DIM];
    u16 stages[2 * QueriesStream::stage_elements];
    // Of the block's rows: in registers they would take what S and dP need. There is no room for
    // their base, which is 0 for all of them, or else their maximum, in global memory.
    RowExponent statistics[QUERIES_ROWS];
};
static_assert(sizeof(QueriesStorage) <= MATRIX_SHARED_BYTES, "shared memory of a block");

// Maximum of a row, from the statistics of this rank's rows; beyond the end, of the last one. The
// strides of a.statistics, in 64 bits, would take registers that masked_dx does not have.
DEVICE float row_max(const Attention& a, const TileCoord& coord, u32 query) {
    u32 i = coord.first_query + query;
    if (i >= a.queries) i = a.queries - 1;
    const u64 line = recomputed(coord.b) * a.queries + i;
    return reinterpret_cast<const float*>(a.statistics.at)[(line * a.q_heads + coord.h) * 4];
}

// The block's rows of Q and dO, and their statistics, in shared memory.
struct QueriesRows {
    u16 *queries, *douts;
    RowExponent* statistics;
    bool fused;  // the base of all rows is 0

    METHOD void load(QueriesStorage& memory, u32 b, u32 h, u32 first_query, const RowLane&,
                     const Attention& a) {
        queries = memory.queries;
        douts = memory.douts;
        statistics = memory.statistics;
        load_left_rows<BACKWARD_THREADS, QUERIES_ROWS>(
            queries, operand_of(a.q, b, h, a.queries, a.head_dim), first_query);
        load_left_rows<BACKWARD_THREADS, QUERIES_ROWS>(
            douts, operand_of(a.dout, b, h, a.queries, a.value_dim), first_query);
    }
    // `row`: of the block.
    METHOD const RowExponent& of_row(u32 row) const { return statistics[row]; }
    METHOD float minus_base(float score, const TileCoord& coord, u32 row,
                            const Attention& a) const {
        // a subtraction on a branch of its own: a base of 0 would take registers
        if (!fused) score -= row_max(a, coord, row);
        return score;
    }
};

#endif

// S becomes dX in a plain tile (is_plain), whose pairs need no test.
DEVICE void plain_dx(QueriesScores& scores, const QueriesScores& dprobs, const QueriesRows& rows,
                     const RowLane& lane, const Attention& a) {
    const float unit = float(a.scale) * LOG2_E;
    UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m)
        UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
            const RowExponent row = rows.of_row(lane.row_of(m, r));
            UNROLL for (u32 n = 0; n < QUERIES_COLUMNS; ++n)
                UNROLL for (u32 c = 0; c < FRAGMENT_COLUMNS; ++c) {
                    const u32 e = FRAGMENT_COLUMNS * r + c;
                    scores[m][n][e] = fused_prob(scores[m][n][e], unit, row.exponent) *
                                      (dprobs[m][n][e] - row.delta);
                }
        }
}

// Loop over the columns of a fragment: on AMD GPUs the elements that take turns would be copied.
#ifdef ANNULUS_AMD
#define ROW_LOOP UNROLL
#else
#define ROW_LOOP NOT_UNROLLED
#endif

// S becomes dX in any tile, 0 for masked pairs. `part_key`: first key of the part in the tile.
DEVICE void masked_dx(QueriesScores& scores, QueriesScores& dprobs, QueriesVisible& visible,
                      const QueriesRows& rows, const TileCoord& coord, u32 part_key,
                      const RowLane& lane, const Attention& a) {
    NOT_UNROLLED for (u32 n = 0; n < QUERIES_COLUMNS; ++n) {
        ROW_LOOP for (u32 c = 0; c < FRAGMENT_COLUMNS; ++c) {
            // otherwise addresses and statistics of all rows were kept during the loop
            const RowLane at = recomputed(lane);
            const u32 key = part_key + 8 * n + at.column + c;
            UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m)
                UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
                    const u32 query = at.row_of(m, r), first = FRAGMENT_COLUMNS * r;
                    const u32 last = first + FRAGMENT_COLUMNS - 1;
                    const u64 line = mask_row(a, coord, query, QUERIES_ROWS);
                    auto minus_base = [&](float score) {
                        return rows.minus_base(score, coord, query, a);
                    };
                    float(&pair)[4] = scores[m][0], p, dx;
                    bool contributes =
                        backward_pair(p, dx, pair[first], dprobs[m][0][first], line, query, key,
                                      rows.of_row(query), minus_base, coord, a);
                    visible[m] |= u32(contributes) << (4 * n + first + c);
                    // the elements of a row take turns at the first place
                    UNROLL for (u32 e = first; e < last; ++e) {
                        pair[e] = pair[e + 1];
                        dprobs[m][0][e] = dprobs[m][0][e + 1];
                    }
                    pair[last] = dx;
                }
        }
        UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m) {
            rotate(scores[m]);
            rotate(dprobs[m]);
        }
    }
}

// dQ += scale·acc.
DEVICE void add_dq(const RowAccumulators<BACKWARD_ROW_TILES>& acc, float scale, u32 b, u32 h,
                   u32 first_query, const RowLane& lane, const Attention& a) {
    UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m)
        UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
            u64 i = u64(first_query) + lane.row_of(m, r);
            if (i >= a.queries) continue;
            float* line = reinterpret_cast<float*>(a.dq) +
                          ((u64(b) * a.queries + i) * a.q_heads + h) * a.head_dim;
            UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                    UNROLL for (u32 c = 0; c < FRAGMENT_COLUMNS; ++c) {
                        u32 x = panel * CHUNK + 8 * n + lane.column + c;
                        if (x < a.head_dim)
                            line[x] += scale * acc[panel][m][n][FRAGMENT_COLUMNS * r + c];
                    }
        }
}

// Grid: query tiles × query heads × batch rows, tiles in reverse order (forward_state.cuh).
KERNEL_OF(BACKWARD_THREADS, BACKWARD_BLOCKS, backward_queries_matrix, Attention) {
    u32 tile = a.block_mask.lists - 1 - block_x(), h = block_y(), b = block_z();
    u32 first_query = tile * QUERIES_ROWS;
    TileIterator tiles;
    tiles.begin(a, b, h, tile);
    if (!tiles.more()) return;
    RowLane lane = row_lane_of_thread<BACKWARD_ROW_TILES>(thread_index() / WARP_LANES);
    QueriesStorage& memory = *reinterpret_cast<QueriesStorage*>(dynamic_shared());

    QueriesStream stream;
    QueriesRows rows;
    rows.load(memory, b, h, first_query, lane, a);
    stream.begin(a, memory.stages, tiles);
#ifndef ANNULUS_AMD
    bool fused = true;
    for (u32 row = thread_index(); row < QUERIES_ROWS; row += BACKWARD_THREADS) {
        const QueryStatistics own =
            fused_statistics(load_query_statistics(a, b, h, first_query + row));
        memory.statistics[row] = own;
        fused &= is_fused(own.base);
    }
    fused = !barrier_any(!fused);
    // a barrier of the stream follows before they are read
    for (u32 row = thread_index(); row < QUERIES_ROWS && !fused; row += BACKWARD_THREADS)
        memory.statistics[row] = load_query_statistics(a, b, h, first_query + row);
    rows.fused = fused;
#endif
    LeftScale scale;
    RowAccumulators<BACKWARD_ROW_TILES> acc;
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel) clear(acc[panel]);

    while (stream.has_tile()) {
        TileEntry entry = stream.prefetch_tiles.entry(a);
        TileCoord coord = tile_coord(a, b, h, tile, entry.tile, entry, QUERIES_ROWS);
        const bool plain = rows.fused && is_plain(coord, a) && coord.first_key + TILE <= a.keys;
        NOT_UNROLLED for (u32 key = 0; key < TILE; key += QUERIES_KEYS) {
            QueriesScores scores, dprobs;
            QueriesPairs dx;
            gemm_nt<QUERIES_ROWS, 0>(scores, rows.queries, stream, a.head_dim, lane, a);
            gemm_nt<QUERIES_ROWS, 1>(dprobs, rows.douts, stream, a.value_dim, lane, a);
            QueriesVisible visible = {};
            if (plain)
                plain_dx(scores, dprobs, rows, lane, a);
            else
                masked_dx(scores, dprobs, visible, rows, coord, key, lane, a);
            scale.apply(scores, acc);
            narrow_left(dx, scores);
            if (!coord.is_full) mark_left(dx, visible);
            gemm_nn<2>(acc, dx, stream, a.head_dim, coord.is_full, lane, a);
        }
    }
    add_dq(acc, float(a.scale) * scale.inverse(), b, h, first_query, recomputed(lane), a);
}

#endif
