// dK and dV of one block of keys, on tensor cores or matrix cores (backward_matrix.cuh).
//
// A block of four warps owns 64 keys of a KV head, with 256 dims 32. Two warps own the same 32 rows
// (16): one computes Sᵀ and dV, the other dPᵀ and dK, so that each holds the accumulators of one of
// them.
//
//   for each part of a visible tile of queries, which is a stage with its rows of Q and dO:
//       warp of dV:  Sᵀ = K·Qᵀ  → exchange        warp of dK:  dPᵀ = V·dOᵀ
//       barrier
//       warp of dV:  P from Sᵀ;  dV += Pᵀ·dO      warp of dK:  P from the exchange, dX from P and
//                                                              dPᵀ;  dK += dXᵀ·Q
//
// On AMD GPUs warps are waves of 32 rows, and a block owns 64 keys with any dims. The rows of K or
// V are in registers. A part has one place, in which the rows of Q and dO are replaced by their
// transpose behind that barrier (PairStream of matrix_amd.cuh).
//
// Both compute P, because Sᵀ is complete a barrier earlier than P, and exponentials are not what
// limits the kernel.
//
//                       64 dims    128 dims   256 dims
//   rows of K, V        16 KB      32 KB      32 KB      shared memory
//   stages of Q, dO     2 × 8 KB   2 × 16 KB  2 × 16 KB
//   exchange            8 KB       8 KB       2 KB
//   dK or dV            64         128        128        registers of a thread
//   Sᵀ or dPᵀ           32         32         8
//
// On AMD GPUs:
//
//   part of Q, dO       8 KB       16 KB      32 KB      shared memory
//   exchange            8 KB       8 KB       8 KB
//   K or V              16         32         64         registers of a thread
//   dK or dV            32         64         128
//   Sᵀ or dPᵀ           16         16         16
//   rows on the way     8          16         32
#pragma once

#include "backward_matrix.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Rows of a block, and groups of 32 (16) rows, each of two warps.
#define KEYS_ROWS (WARP_ROWS * BACKWARD_ROW_TILES * KEYS_GROUPS)
#define KEYS_GROUPS (BACKWARD_WARPS / 2)
// Queries whose scores a warp holds at once, and their MMA tiles.
#define KEYS_QUERIES (ANNULUS_DIM <= 128 || WARP_ROWS == 32 ? 32 : 16)
#define KEYS_COLUMNS (KEYS_QUERIES / 8)

#ifdef ANNULUS_AMD
typedef PairStream<BACKWARD_THREADS, KEYS_QUERIES> KeysStream;
#define KEYS_STAGES 1
#else
typedef Stream<KEYS, BACKWARD_THREADS, 2, KEYS_QUERIES, CHUNKS> KeysStream;
#define KEYS_STAGES 2
#endif
typedef RowScores<BACKWARD_ROW_TILES, KEYS_COLUMNS> KeysScores;
typedef RowPairs<BACKWARD_ROW_TILES, KEYS_COLUMNS> KeysPairs;
typedef VisibleBits<BACKWARD_ROW_TILES> KeysVisible;

// Stored and loaded by one instruction.
struct alignas(16) ScoreQuad {
    float of[4];
};
struct alignas(4 * FRAGMENT_COLUMNS) QueryGroup {
    float of[FRAGMENT_COLUMNS];
};

// Dynamic shared memory of a block; `Variant::dynamic_shared_bytes` (src/variant.rs) has its size.
struct KeysStorage {
#ifndef ANNULUS_AMD
    u16 keys[KEYS_ROWS * ANNULUS_DIM], values[KEYS_ROWS * ANNULUS_DIM];
#endif
    u16 stages[KEYS_STAGES * KeysStream::stage_elements];
    // S of a lane: the partner's lane has the same elements of dP
    ScoreQuad exchange[KEYS_GROUPS][BACKWARD_ROW_TILES][KEYS_COLUMNS][WARP_LANES];
    // QueryStatistics of the tile's queries
    QueryGroup exponent[TILE / FRAGMENT_COLUMNS], delta[TILE / FRAGMENT_COLUMNS],
        base[TILE / FRAGMENT_COLUMNS];
};
static_assert(sizeof(KeysStorage) <= MATRIX_SHARED_BYTES, "shared memory of a block");

// Work of a thread's warp.
struct KeysLane {
    RowLane rows;
    u32 group;
    bool of_dk;  // computes dP and dK, else S and dV

    METHOD const ScoreQuad& quad(const KeysStorage& memory, u32 m, u32 n) const {
        return memory.exchange[group][m][n][rows.lane];
    }
};

DEVICE KeysLane keys_lane_of_thread() {
    KeysLane at;
    u32 warp = thread_index() / WARP_LANES;
    at.group = warp / 2;
    at.of_dk = warp % 2;
    at.rows = row_lane_of_thread<BACKWARD_ROW_TILES>(at.group);
    return at;
}

// The left operand of the first product.
#ifdef ANNULUS_AMD

struct KeysRows {
    RowFragments fragments;

    METHOD void load(KeysStorage&, u32 b, u32 kv_head, u32 first_key, const KeysLane& lane,
                     const Attention& a) {
        load_row(fragments,
                 lane.of_dk ? operand_of(a.v, b, kv_head, a.keys, a.value_dim)
                            : operand_of(a.k, b, kv_head, a.keys, a.head_dim),
                 first_key + lane.rows.row_of(0, 0));
    }
    METHOD const RowFragments& left(const KeysStorage&, const KeysLane&) const {
        return fragments;
    }
};

#else

struct KeysRows {
    METHOD void load(KeysStorage& memory, u32 b, u32 kv_head, u32 first_key, const KeysLane&,
                     const Attention& a) {
        load_left_rows<BACKWARD_THREADS, KEYS_ROWS>(
            memory.keys, operand_of(a.k, b, kv_head, a.keys, a.head_dim), first_key);
        load_left_rows<BACKWARD_THREADS, KEYS_ROWS>(
            memory.values, operand_of(a.v, b, kv_head, a.keys, a.value_dim), first_key);
    }
    METHOD const u16* left(const KeysStorage& memory, const KeysLane& lane) const {
        return lane.of_dk ? memory.values : memory.keys;
    }
};

#endif

// products ← left·rightᵀ, of rows of the block and one operand of a stage.
template <typename Left>
DEVICE void stage_nt(KeysScores& products, const Left& left, const u16* right, u32 dim,
                     const RowLane& lane) {
    clear(products);
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
        if (panel * CHUNK < dim)
            panel_nt(products, left_panel<KEYS_ROWS>(left, panel),
                     right + panel * KEYS_QUERIES * CHUNK, lane);
}

// acc += left·right, of one operand of a stage.
DEVICE void stage_nn(RowAccumulators<BACKWARD_ROW_TILES>& acc, KeysPairs& left, const u16* right,
                     u32 dim, bool fixup, const RowLane& lane) {
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
        if (panel * CHUNK < dim)
            panel_nn(acc[panel], left, right + panel * KEYS_QUERIES * CHUNK, fixup, lane);
}

DEVICE void write_exchange(KeysStorage& memory, const KeysScores& scores, const KeysLane& lane) {
    UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m)
        UNROLL for (u32 n = 0; n < KEYS_COLUMNS; ++n) {
            ScoreQuad quad;
            UNROLL for (u32 e = 0; e < 4; ++e) quad.of[e] = scores[m][n][e];
            memory.exchange[lane.group][m][n][lane.rows.lane] = quad;
        }
}

// Writes the statistics of the query that is this thread's.
DEVICE void write_statistics(KeysStorage& memory, const QueryStatistics& own) {
    u32 group = thread_index() / FRAGMENT_COLUMNS, c = thread_index() % FRAGMENT_COLUMNS;
    memory.exponent[group].of[c] = own.exponent;
    memory.base[group].of[c] = own.base;
    memory.delta[group].of[c] = own.delta;
}

// Sᵀ becomes Pᵀ, or dPᵀ becomes dXᵀ, in a plain tile (is_plain), whose pairs need no test.
// `part_query`: first query in the tile.
DEVICE void plain_pairs(KeysScores& products, const KeysStorage& memory, u32 part_query,
                        const KeysLane& lane, const Attention& a) {
    const float unit = float(a.scale) * LOG2_E;
    UNROLL for (u32 n = 0; n < KEYS_COLUMNS; ++n) {
        const u32 query = (part_query + 8 * n + lane.rows.column) / FRAGMENT_COLUMNS;
        const QueryGroup exponent = memory.exponent[query];
        if (!lane.of_dk) {
            UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m)
                UNROLL for (u32 e = 0; e < 4; ++e)
                    products[m][n][e] =
                        fused_prob(products[m][n][e], unit, exponent.of[e % FRAGMENT_COLUMNS]);
            continue;
        }
        const QueryGroup delta = memory.delta[query];
        UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m) {
            const ScoreQuad scores = lane.quad(memory, m, n);
            UNROLL for (u32 e = 0; e < 4; ++e) {
                const u32 c = e % FRAGMENT_COLUMNS;
                products[m][n][e] = fused_prob(scores.of[e], unit, exponent.of[c]) *
                                    (products[m][n][e] - delta.of[c]);
            }
        }
    }
}

// As plain_pairs in any tile, 0 for masked pairs. Both warps read S from the exchange; to that of
// dV, the product is of no use. `first_row`: first key of the block in the tile.
DEVICE void masked_pairs(KeysScores& products, KeysVisible& visible, const KeysStorage& memory,
                         u32 part_query, u32 first_row, const KeysLane& lane,
                         const TileCoord& coord, const Attention& a) {
    NOT_UNROLLED for (u32 n = 0; n < KEYS_COLUMNS; ++n) {
        const u32 query = part_query + 8 * n + lane.rows.column;
        u64 lines[FRAGMENT_COLUMNS];
        UNROLL for (u32 c = 0; c < FRAGMENT_COLUMNS; ++c)
            lines[c] = mask_row(a, coord, query + c);
        UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m) {
            const ScoreQuad scores = lane.quad(memory, m, n);
            UNROLL for (u32 e = 0; e < 4; ++e) {
                const u32 c = e % FRAGMENT_COLUMNS, group = query / FRAGMENT_COLUMNS;
                const u32 key = first_row + lane.rows.row_of(m, e / FRAGMENT_COLUMNS);
                const RowExponent row = {memory.exponent[group].of[c], memory.delta[group].of[c]};
                auto minus_base = [&](float s) { return s - memory.base[group].of[c]; };
                float p, dx;
                bool contributes = backward_pair(p, dx, scores.of[e], products[m][0][e], lines[c],
                                                 query + c, key, row, minus_base, coord, a);
                products[m][0][e] = lane.of_dk ? dx : p;
                visible[m] |= u32(contributes) << (4 * n + e);
            }
            rotate(products[m]);
        }
    }
}

// Writes scale·acc to rows of dK or dV, or adds it.
DEVICE void store_gradients(const RowAccumulators<BACKWARD_ROW_TILES>& acc, float scale,
                            const Tensor& to, u32 b, u32 head, u32 first_key, u32 dim,
                            const RowLane& lane, const Attention& a) {
    UNROLL for (u32 m = 0; m < BACKWARD_ROW_TILES; ++m)
        UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
            u32 row = first_key + lane.row_of(m, r);
            if (row >= a.keys) continue;
            UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                    UNROLL for (u32 c = 0; c < FRAGMENT_COLUMNS; ++c) {
                        u32 x = panel * CHUNK + 8 * n + lane.column + c;
                        if (x >= dim) continue;
                        float* element =
                            reinterpret_cast<float*>(offset<float>(to, b, row, head, x));
                        *element = (a.flags & ADD ? *element : 0.0f) +
                                   scale * acc[panel][m][n][FRAGMENT_COLUMNS * r + c];
                    }
        }
}

// Grid: key tiles, each with its blocks of KEYS_ROWS rows × KV heads × batch rows. The block mask
// lists query tiles by key tile.
KERNEL_OF(BACKWARD_THREADS, BACKWARD_BLOCKS, backward_keys_matrix, Attention) {
    u32 tile = block_x() / (TILE / KEYS_ROWS), kv_head = block_y(), b = block_z();
    // of the block, in the tile
    u32 first_row = block_x() % (TILE / KEYS_ROWS) * KEYS_ROWS;
    u32 first_key = tile * TILE + first_row, group = a.q_heads / a.kv_heads;
    HeadTileIterator tiles;
    tiles.begin(a, b, tile, kv_head * group, (kv_head + 1) * group);
    KeysLane lane = keys_lane_of_thread();
    KeysStorage& memory = *reinterpret_cast<KeysStorage*>(dynamic_shared());

    KeysStream stream;
    KeysRows rows;
    if (tiles.more()) rows.load(memory, b, kv_head, first_key, lane, a);
    stream.begin(a, memory.stages, tiles);
    RowAccumulators<BACKWARD_ROW_TILES> acc;
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel) clear(acc[panel]);
    LeftScale scale;
    // dims of this warp's first product, and of its second one
    const u32 nt_dim = lane.of_dk ? a.value_dim : a.head_dim;
    const u32 nn_dim = lane.of_dk ? a.head_dim : a.value_dim;

    while (stream.has_tile()) {
        TileEntry entry = stream.prefetch_tiles.entry(a);
        TileCoord coord = tile_coord(a, b, stream.prefetch_tiles.h, entry.tile, tile, entry);
        // loaded while the first product is computed
        QueryStatistics own = {};
#ifdef ANNULUS_AMD
        // every wave tests all queries, because an answer of the block would take a barrier
        own = fused_statistics(
            load_query_statistics(a, b, coord.h, coord.first_query + thread_index() % TILE));
        const bool fused = !any_of_wave(!is_fused(own.base));
#else
        if (thread_index() < TILE)
            own = fused_statistics(
                load_query_statistics(a, b, coord.h, coord.first_query + thread_index()));
#endif
        NOT_UNROLLED for (u32 query = 0; query < TILE; query += KEYS_QUERIES) {
            bool fixup = !coord.is_full;
            const u16* stage = stream.template next<0>(a, fixup);
            const u16* right = lane.of_dk ? stage + KeysStream::elements : stage;
            KeysScores products;
            stage_nt(products, rows.left(memory, lane), right, nt_dim, lane.rows);
            // the barrier in the stream: all warps have read the statistics of the previous tile
            // and the exchange of the previous part
            if (query == 0 && thread_index() < TILE) write_statistics(memory, own);
            if (!lane.of_dk) write_exchange(memory, products, lane);
#ifdef ANNULUS_AMD
            stream.transpose(a);
#else
            const bool fused = !barrier_any(!is_fused(own.base));
#endif
            KeysPairs pairs;
            KeysVisible visible = {};
            if (fused && is_plain(coord, a))
                plain_pairs(products, memory, query, lane, a);
            else
                masked_pairs(products, visible, memory, query, first_row, lane, coord, a);
            scale.apply(products, acc);
            narrow_left(pairs, products);
            if (!coord.is_full) mark_left(pairs, visible);
#ifdef ANNULUS_AMD
            barrier();
#endif
            right = lane.of_dk ? stage : stage + KeysStream::elements;
            stage_nn(acc, pairs, right, nn_dim, fixup, lane.rows);
        }
    }
    const RowLane last = recomputed(lane.rows);
    if (lane.of_dk)
        store_gradients(acc, float(a.scale) * scale.inverse(), a.dk, b, kv_head, first_key,
                        a.head_dim, last, a);
    else
        store_gradients(acc, scale.inverse(), a.dv, b, kv_head, first_key, a.value_dim, last, a);
}

#endif
