// dQ from one block of keys, on tensor cores (backward_matrix.cuh).
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
#pragma once

#include "backward_matrix.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

#define QUERIES_ROWS (16 * BACKWARD_ROW_TILES * BACKWARD_THREADS / 32)
// Keys whose scores a warp holds at once, and their MMA tiles.
#define QUERIES_KEYS (ANNULUS_DIM <= 64 ? 64 : 32)
#define QUERIES_COLUMNS (QUERIES_KEYS / 8)

typedef Stream<QUERIES, BACKWARD_THREADS, 2, QUERIES_KEYS> QueriesStream;
typedef RowScores<BACKWARD_ROW_TILES, QUERIES_COLUMNS> QueriesScores;
typedef RowPairs<BACKWARD_ROW_TILES, QUERIES_COLUMNS> QueriesPairs;
typedef VisibleBits<BACKWARD_ROW_TILES> QueriesVisible;

// Dynamic shared memory of a block; `Variant::dynamic_shared_bytes` (src/variant.rs) has its size.
struct QueriesStorage {
    u16 queries[QUERIES_ROWS * ANNULUS_DIM], douts[QUERIES_ROWS * ANNULUS_DIM];
    u16 stages[2 * QueriesStream::stage_elements];
    // Of the block's rows: in registers they would take what S and dP need. There is no room for
    // their base, which is 0 for all of them, or else their maximum, in global memory.
    RowExponent statistics[QUERIES_ROWS];
};
static_assert(sizeof(QueriesStorage) <= MATRIX_SHARED_BYTES, "shared memory of a block");

// S becomes dX in a plain tile (is_plain), whose pairs need no test.
DEVICE void plain_dx(QueriesScores& scores, const QueriesScores& dprobs,
                     const RowExponent* statistics, const RowLane& lane, const Attention& a) {
    const float unit = float(a.scale) * LOG2_E;
    UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            const RowExponent row = statistics[lane.row_of(m, r)];
            UNROLL for (u32 n = 0; n < QUERIES_COLUMNS; ++n)
                UNROLL for (u32 e = 2 * r; e < 2 * r + 2; ++e)
                    scores[m][n][e] = fused_prob(scores[m][n][e], unit, row.exponent) *
                                      (dprobs[m][n][e] - row.delta);
        }
}

// Maximum of a row, from the statistics of this rank's rows; beyond the end, of the last one. The
// strides of a.statistics, in 64 bits, would take registers that masked_dx does not have.
DEVICE float row_max(const Attention& a, const TileCoord& coord, u32 query) {
    u32 i = coord.first_query + query;
    if (i >= a.queries) i = a.queries - 1;
    const u64 line = recomputed(coord.b) * a.queries + i;
    return reinterpret_cast<const float*>(a.statistics.at)[(line * a.q_heads + coord.h) * 4];
}

// S becomes dX in any tile, 0 for masked pairs. `part_key`: first key of the part in the tile;
// `fused`: the base of all rows is 0.
DEVICE void masked_dx(QueriesScores& scores, QueriesScores& dprobs, QueriesVisible& visible,
                      const RowExponent* statistics, bool fused, const TileCoord& coord,
                      u32 part_key, const RowLane& lane, const Attention& a) {
    NOT_UNROLLED for (u32 n = 0; n < QUERIES_COLUMNS; ++n) {
        NOT_UNROLLED for (u32 c = 0; c < 2; ++c) {
            // otherwise addresses and statistics of all rows were kept during the loop
            const RowLane at = recomputed(lane);
            const u32 key = part_key + 8 * n + at.column + c;
            UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m)
                UNROLL for (u32 r = 0; r < 2; ++r) {
                    const u32 query = at.row_of(m, r);
                    const u64 line = mask_row(a, coord, query, QUERIES_ROWS);
                    // a subtraction on a branch of its own: a base of 0 would take registers
                    auto minus_base = [&](float score) {
                        if (!fused) score -= row_max(a, coord, query);
                        return score;
                    };
                    float(&pair)[4] = scores[m][0], p, dx;
                    bool contributes =
                        backward_pair(p, dx, pair[2 * r], dprobs[m][0][2 * r], line, query, key,
                                      statistics[query], minus_base, coord, a);
                    visible[m] |= u32(contributes) << (4 * n + 2 * r + c);
                    // the elements of a row take turns at the first place
                    pair[2 * r] = pair[2 * r + 1];
                    pair[2 * r + 1] = dx;
                    dprobs[m][0][2 * r] = dprobs[m][0][2 * r + 1];
                }
        }
        UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m) {
            rotate(scores[m]);
            rotate(dprobs[m]);
        }
    }
}

// dQ += scale·acc.
DEVICE void add_dq(const RowAccumulators<BACKWARD_ROW_TILES>& acc, u32 b, u32 h, u32 first_query,
                   const RowLane& lane, const Attention& a) {
    UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u64 i = u64(first_query) + lane.row_of(m, r);
            if (i >= a.queries) continue;
            float* line = reinterpret_cast<float*>(a.dq) +
                          ((u64(b) * a.queries + i) * a.q_heads + h) * a.head_dim;
            UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                    UNROLL for (u32 c = 0; c < 2; ++c) {
                        u32 x = panel * CHUNK + 8 * n + lane.column + c;
                        if (x < a.head_dim)
                            line[x] += float(a.scale) * acc[panel][m][n][2 * r + c];
                    }
        }
}

// Grid: query tiles × query heads × batch rows, tiles in reverse order (forward_state.cuh).
KERNEL_OF(BACKWARD_THREADS, 2, backward_queries_matrix, Attention) {
    u32 tile = a.block_mask.lists - 1 - block_x(), h = block_y(), b = block_z();
    u32 first_query = tile * QUERIES_ROWS;
    TileIterator tiles;
    tiles.begin(a, b, h, tile);
    if (!tiles.more()) return;
    RowLane lane = row_lane_of_thread<BACKWARD_ROW_TILES>(thread_index() / 32);
    QueriesStorage& memory = *reinterpret_cast<QueriesStorage*>(dynamic_shared());

    QueriesStream stream;
    load_left_rows<BACKWARD_THREADS, QUERIES_ROWS>(
        memory.queries, operand_of(a.q, b, h, a.queries, a.head_dim), first_query);
    load_left_rows<BACKWARD_THREADS, QUERIES_ROWS>(
        memory.douts, operand_of(a.dout, b, h, a.queries, a.value_dim), first_query);
    stream.begin(a, memory.stages, tiles);
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
    RowAccumulators<BACKWARD_ROW_TILES> acc;
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel) clear(acc[panel]);

    while (stream.has_tile()) {
        TileEntry entry = stream.prefetch_tiles.entry(a);
        TileCoord coord = tile_coord(a, b, h, tile, entry.tile, entry, QUERIES_ROWS);
        const bool plain = fused && is_plain(coord, a) && coord.first_key + TILE <= a.keys;
        NOT_UNROLLED for (u32 key = 0; key < TILE; key += QUERIES_KEYS) {
            QueriesScores scores, dprobs;
            QueriesPairs dx;
            gemm_nt<QUERIES_ROWS, 0>(scores, memory.queries, stream, a.head_dim, lane, a);
            gemm_nt<QUERIES_ROWS, 1>(dprobs, memory.douts, stream, a.value_dim, lane, a);
            QueriesVisible visible = {};
            if (plain)
                plain_dx(scores, dprobs, memory.statistics, lane, a);
            else
                masked_dx(scores, dprobs, visible, memory.statistics, fused, coord, key, lane, a);
            narrow_left(dx, scores);
            if (!coord.is_full) mark_left(dx, visible);
            gemm_nn<2>(acc, dx, stream, a.head_dim, coord.is_full, lane, a);
        }
    }
    add_dq(acc, b, h, first_query, recomputed(lane), a);
}

#endif
