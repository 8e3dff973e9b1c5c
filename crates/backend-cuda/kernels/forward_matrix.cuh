// Forward over one block of keys on tensor cores (mma.sync), 16-bit elements. Same algorithm as
// forward.cuh; S and O accumulate in f32, P is rounded to the element type for the P·V product.
// With GQA packing a tile's rows are (query, head) pairs (gqa_packing.cuh).
//
// A block of four warps owns 128 rows of queries; with 256 dims 64, because O of 32 rows would take
// 256 registers. A warp owns 32 rows (16) and all keys of a tile, with 128 dims half of them after
// the other (row_tiles.cuh). Two blocks fit a multiprocessor, so that one computes while the other
// waits at a barrier.
//
//                     64 dims    128 dims    256 dims
//   rows of Q         16 KB      32 KB       32 KB       shared memory
//   stages of K, V    4 × 8 KB   2 × 8 KB    2 × 8 KB
//     of a range      4 × 8 KB   4 × 8 KB    4 × 8 KB
//   O                 64         128         128         registers of a thread
//   S, then P         64         32          32
//
// A pass whose tiles have several ranges of keys (split-KV decoding) is bound by the latency and
// bandwidth of memory, so that its kernel, forward_matrix_split, has more stages above 64 dims. Two
// of its blocks fit a multiprocessor of compute capability 8.0 and 9.0, one of 8.6 and 8.9.
//
// Scores scale·s with a positive scale are never formed: e^{scale·s − m} is one multiply-add and
// one ex2.
//
// Unnormalized outputs use level plain: their backward pass must recompute the row maximum bit for
// bit.
//
// Source: Dao 2023 (FlashAttention-2).
#pragma once

#include "forward_state.cuh"
#include "gqa_packing.cuh"
#include "row_tiles.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

#define FORWARD_WARPS 4
#define FORWARD_THREADS (32 * FORWARD_WARPS)
#define FORWARD_ROW_TILES (ANNULUS_DIM <= 128 ? 2 : 1)
#define FORWARD_ROWS (16 * FORWARD_ROW_TILES * FORWARD_WARPS)
#define FORWARD_STAGES (ANNULUS_DIM <= 64 ? 4 : 2)
// Of a block that computes a range of keys: three chunks of 8 KB in flight.
#define SPLIT_STAGES 4
#define FORWARD_BLOCKS 2
// Keys whose scores a warp holds at once, and their MMA tiles.
#define FORWARD_KEYS (ANNULUS_DIM == 128 ? 32 : 64)
#define FORWARD_COLUMNS (FORWARD_KEYS / 8)

// Dynamic shared memory of a block; `Variant::dynamic_shared_bytes` (src/variant.rs) has its size.
template <u32 depth>
struct ForwardStorage {
    u16 queries[FORWARD_ROWS * ANNULUS_DIM];
    u16 stages[depth * CHUNK_ELEMENTS];
};

// Shared memory of a multiprocessor: 100 KB of compute capability 8.6 and 8.9, 164 KB of 8.0. The
// system takes 1 KB of it for each block.
static_assert(FORWARD_BLOCKS * (sizeof(ForwardStorage<FORWARD_STAGES>) + 1024) <= 100 * 1024 &&
                  FORWARD_BLOCKS * (sizeof(ForwardStorage<SPLIT_STAGES>) + 1024) <= 164 * 1024,
              "shared memory of a multiprocessor");
static_assert(FORWARD_BLOCKS * FORWARD_THREADS * 256 <= 64 * 1024, "registers");

typedef RowScores<FORWARD_ROW_TILES, FORWARD_COLUMNS> ForwardScores;
typedef RowPairs<FORWARD_ROW_TILES, FORWARD_COLUMNS> ForwardProbs;

typedef VisibleBits<FORWARD_ROW_TILES> ForwardVisible;

DEVICE PackedRow forward_row(const Attention& a, u32 first_head, u32 row) {
    return packed_row<FORWARD_ROWS>(a, first_head, row);
}

// Copies the block's rows of Q to shared memory, in panels of 64 dims with the swizzle of a chunk;
// 0 beyond the ends. The copies belong to the first group of the stream that begins next.
DEVICE void load_query_rows(u16* to, const Operand& operand, u32 first_query, const Attention& a) {
    // rows of several heads
    bool aligned = operand.aligned && a.q.head % 8 == 0;
    for (u32 index = thread_index(); index < FORWARD_ROWS * ANNULUS_DIM / 8;
         index += FORWARD_THREADS) {
        u32 row = index / (ANNULUS_DIM / 8), x = index % (ANNULUS_DIM / 8) * 8;
        PackedRow packed = forward_row(a, 0, row);
        bool inside =
            packed.exists && first_query + packed.query < operand.rows && x < operand.dim;
        i64 offset = inside ? i64(first_query + packed.query) * operand.row +
                                  i64(packed.h) * a.q.head + i64(x) * operand.step
                            : 0;
        u16* piece = to + x / CHUNK * (FORWARD_ROWS * CHUNK) + swizzled(row, x % CHUNK);
        if (aligned)
            cp_async_16(piece, operand.at + offset, inside);
        else
            copy_unaligned(piece, operand.at + offset, operand.step, inside ? operand.dim - x : 0);
    }
}

// True if every pair has an epilogue of its own: bias, soft cap or rounding; or a scale that is not
// positive, or so small that products with it may leave the normal range of f32.
DEVICE bool has_epilogue(const Attention& a) {
    return (a.flags & (HAS_BIAS | HAS_SLOPES | HAS_CAP)) || a.rounding != ROUND_NOT ||
           !(float(a.scale) > 1e-30f);
}

// Bits of the pairs that are visible by the tile mask, and exist.
DEVICE void mask_scores(ForwardVisible& visible, const TileCoord& coord, const RowLane& lane,
                        const Attention& a) {
    u32 first = coord.first_key / TILE * TILE, keys_left = a.keys - first;
    u64 existing = keys_left < TILE ? (1ull << keys_left) - 1 : ~0ull;
    UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m) {
        visible[m] = 0;
        UNROLL for (u32 r = 0; r < 2; ++r) {
            PackedRow packed = forward_row(a, coord.h, lane.row_of(m, r));
            bool exists = packed.exists && coord.first_query + packed.query < a.queries;
            u64 line = 0;
            if (exists) line = mask_row(a, coord, packed.query, packed_queries<FORWARD_ROWS>(a));
            line = (line & existing) >> (coord.first_key - first + lane.column);
            UNROLL for (u32 n = 0; n < FORWARD_COLUMNS; ++n)
                visible[m] |= u32(line >> 8 * n & 3) << (4 * n + 2 * r);
        }
    }
}

// Score epilogue of all visible pairs; a bias of −∞ masks its pair.
DEVICE void apply_epilogue(ForwardScores& scores, ForwardVisible& visible, const TileCoord& coord,
                           const RowLane& lane, const Attention& a) {
    NOT_UNROLLED for (u32 n = 0; n < FORWARD_COLUMNS; ++n) {
        UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m) {
            UNROLL for (u32 e = 0; e < 4; ++e) {
                PackedRow packed = forward_row(a, coord.h, lane.row_of(m, e / 2));
                TileCoord row_coord = coord;
                row_coord.h = packed.h;
                float derivative;
                bool unmasked =
                    score_of_pair(scores[m][0][e], derivative, is_visible(visible, m, n, e),
                                  packed.query, 8 * n + lane.column + e % 2, row_coord, a);
                if (!unmasked) visible[m] &= ~(1u << (4 * n + e));
            }
            rotate(scores[m]);
        }
    }
}

DEVICE void apply_dropout(ForwardScores& probs, const TileCoord& coord, const RowLane& lane,
                          const Attention& a) {
    NOT_UNROLLED for (u32 n = 0; n < FORWARD_COLUMNS; ++n)
        UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m) {
            UNROLL for (u32 e = 0; e < 4; ++e) {
                PackedRow packed = forward_row(a, coord.h, lane.row_of(m, e / 2));
                probs[m][0][e] *=
                    keep_factor(a, coord.b, packed.h, coord.first_query + packed.query,
                                coord.first_key + 8 * n + lane.column + e % 2);
            }
            rotate(probs[m]);
        }
}

// Running maximum of a thread's rows, and sum of its own columns.
struct RowState {
    float max[FORWARD_ROW_TILES][2], sum[FORWARD_ROW_TILES][2];
};

// Online softmax of one tile: scores, to be multiplied by `natural`, become probabilities; state
// and O get the new maximum. Masked pairs have the score −∞ and so the probability 0.
DEVICE void online_softmax(ForwardScores& scores, RowAccumulators<FORWARD_ROW_TILES>& o,
                           RowState& state, float natural) {
    float base[FORWARD_ROW_TILES][2], rescale[FORWARD_ROW_TILES][2];
    bool fused = true, changed = false;
    UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            float tile_max = -infinity();
            UNROLL for (u32 n = 0; n < FORWARD_COLUMNS; ++n)
                UNROLL for (u32 c = 0; c < 2; ++c)
                    tile_max = larger(tile_max, scores[m][n][2 * r + c]);
            tile_max = larger(tile_max, shuffle_xor(tile_max, 1));
            tile_max = larger(tile_max, shuffle_xor(tile_max, 2));
            float& max = state.max[m][r];
            // with a positive scale the maximum of the products is that of the scores
            float new_max = larger(max, natural * tile_max);
            rescale[m][r] = new_max == max ? 1.0f : fast_exp(max - new_max);
            changed |= rescale[m][r] != 1.0f;
            // every score so far is −∞: a base of 0 gives probabilities 0 instead of NaN
            base[m][r] = new_max == -infinity() ? 0.0f : new_max;
            fused &= base[m][r] <= FUSED_EXPONENT_LIMIT / LOG2_E &&
                     base[m][r] >= -FUSED_EXPONENT_LIMIT / LOG2_E;
            max = new_max;
        }
    if (fused) {
        float unit = natural * LOG2_E;
        UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m)
            UNROLL for (u32 e = 0; e < 4; ++e) {
                float offset = -base[m][e / 2] * LOG2_E;
                UNROLL for (u32 n = 0; n < FORWARD_COLUMNS; ++n)
                    scores[m][n][e] = exp2_approx(multiply_add(scores[m][n][e], unit, offset));
            }
    } else {
        // one product for the maximum and the scores: the difference is 0 at the maximum
        UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m)
            UNROLL for (u32 n = 0; n < FORWARD_COLUMNS; ++n)
                UNROLL for (u32 e = 0; e < 4; ++e)
                    scores[m][n][e] = fast_exp(natural * scores[m][n][e] - base[m][e / 2]);
    }
    UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            float sum = 0;
            UNROLL for (u32 n = 0; n < FORWARD_COLUMNS; ++n)
                UNROLL for (u32 c = 0; c < 2; ++c) sum += scores[m][n][2 * r + c];
            state.sum[m][r] = state.sum[m][r] * rescale[m][r] + sum;
        }
    // in long sequences a maximum rarely changes
    if (!changed) return;
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
        UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m)
            UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                UNROLL for (u32 e = 0; e < 4; ++e) o[panel][m][n][e] *= rescale[m][e / 2];
}

// Score epilogue, mask and online softmax of one tile. Returns P in the layout of a left operand.
DEVICE void forward_probs(ForwardProbs& probs, ForwardScores& scores,
                          RowAccumulators<FORWARD_ROW_TILES>& o, RowState& state,
                          const TileCoord& coord, const RowLane& lane, const Attention& a) {
    ForwardVisible visible = {};
    float natural = float(a.scale);
    const bool epilogue = has_epilogue(a);
    // the pairs of a full tile need no test
    if (!coord.is_full || coord.first_key + FORWARD_KEYS > a.keys || epilogue) {
        mask_scores(visible, coord, lane, a);
        if (epilogue) {
            apply_epilogue(scores, visible, coord, lane, a);
            natural = 1;
        }
        UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m)
            UNROLL for (u32 n = 0; n < FORWARD_COLUMNS; ++n)
                UNROLL for (u32 e = 0; e < 4; ++e)
                    if (!is_visible(visible, m, n, e)) scores[m][n][e] = -infinity();
    }
    online_softmax(scores, o, state, natural);
    if (a.flags & HAS_DROPOUT) apply_dropout(scores, coord, lane, a);
    narrow_left(probs, scores);
    if (!coord.is_full) mark_left(probs, visible);
}

// Loads state and O of the pass. A thread's sum is that of its columns: the row's is added once.
DEVICE void load_state(RowState& state, RowAccumulators<FORWARD_ROW_TILES>& o, u32 b,
                       u32 first_head, u32 first_query, const RowLane& lane, const Attention& a) {
    UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            PackedRow packed = forward_row(a, first_head, lane.row_of(m, r));
            u64 i = first_query + packed.query;
            bool exists = packed.exists && i < a.queries && !starts_empty(a);
            u64 index = statistics_row(a, 0, b, packed.h, i);
            state.max[m][r] = exists ? reinterpret_cast<const float*>(a.max)[index] : -infinity();
            state.sum[m][r] = exists && lane.column == 0
                                  ? reinterpret_cast<const float*>(a.sum)[index]
                                  : 0.0f;
            const float* line = acc_row(a, 0, b, packed.h, i);
            UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                    UNROLL for (u32 c = 0; c < 2; ++c) {
                        u32 x = panel * CHUNK + 8 * n + lane.column + c;
                        o[panel][m][n][2 * r + c] = exists && x < a.value_dim ? line[x] : 0.0f;
                    }
        }
}

// Writes the state of the pass, partial results, or outputs: see forward_state.cuh.
DEVICE void store_rows(const RowState& state, const RowAccumulators<FORWARD_ROW_TILES>& o, u32 b,
                       u32 split, u32 first_head, u32 first_query, const RowLane& lane,
                       const Attention& a) {
    const bool write_outputs = a.flags & WRITE_OUTPUTS, in_pairs = stores_pairs(a);
    UNROLL for (u32 m = 0; m < FORWARD_ROW_TILES; ++m)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            float sum = state.sum[m][r];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            PackedRow packed = forward_row(a, first_head, lane.row_of(m, r));
            u64 i = first_query + packed.query;
            if (!packed.exists || i >= a.queries) continue;
            RowOutput output = row_output(state.max[m][r], sum);
            if (lane.column == 0 && write_outputs) store_lse(a, b, packed.h, i, output.lse);
            if (lane.column == 0 && !write_outputs) {
                u64 index = statistics_row(a, split, b, packed.h, i);
                reinterpret_cast<float*>(a.max)[index] = state.max[m][r];
                reinterpret_cast<float*>(a.sum)[index] = sum;
            }
            float* line = acc_row(a, split, b, packed.h, i);
            UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n) {
                    u32 x = panel * CHUNK + 8 * n + lane.column;
                    const float* pair = o[panel][m][n] + 2 * r;
                    if (write_outputs)
                        store_output_pair(a, output, b, packed.h, i, x, pair[0], pair[1],
                                          in_pairs);
                    else
                        UNROLL for (u32 c = 0; c < 2; ++c)
                            if (x + c < a.value_dim) line[x + c] = pair[c];
                }
        }
}

// Computes a block's tile of queries, or one range of its keys, with `depth` stages of K and V.
template <u32 depth>
DEVICE void forward_on_matrices(const Attention& a) {
    const ForwardTile work_tile = forward_tile(a);
    u32 tile = work_tile.tile, first_head = block_y() * a.packed_heads, b = block_z();
    u32 queries = packed_queries<FORWARD_ROWS>(a), first_query = tile * queries;
    TileIterator tiles;
    tiles.begin(a, b, first_head, work_tile.list);
    if (!tiles.more() && keeps_state(a)) return;
    RowLane lane = row_lane_of_thread<FORWARD_ROW_TILES>(thread_index() / 32);
    // in decoding most warps have no rows: they copy, and neither read shared memory nor multiply
    PackedRow first_row = forward_row(a, first_head, lane.first_row);
    lane.has_rows = first_row.exists && first_query + first_row.query < a.queries;

    ForwardStorage<depth>& memory = *reinterpret_cast<ForwardStorage<depth>*>(dynamic_shared());
    Stream<FORWARD, FORWARD_THREADS, depth, FORWARD_KEYS> stream;
    if (tiles.more())
        load_query_rows(memory.queries, operand_of(a.q, b, first_head, a.queries, a.head_dim),
                        first_query, a);
    stream.begin(a, memory.stages, tiles);
    RowState state;
    RowAccumulators<FORWARD_ROW_TILES> o;
    load_state(state, o, b, first_head, first_query, recomputed(lane), a);

    for (; tiles.more(); tiles.next(a)) {
        TileEntry entry = tiles.entry(a);
        TileCoord coord = tile_coord(a, b, first_head, tile, entry.tile, entry, queries);
        NOT_UNROLLED for (u32 part = 0; part < TILE / FORWARD_KEYS; ++part) {
            ForwardScores scores;
            ForwardProbs probs;
            gemm_nt<FORWARD_ROWS, 0>(scores, memory.queries, stream, a.head_dim, lane, a);
            if (lane.has_rows) forward_probs(probs, scores, o, state, coord, lane, a);
            gemm_nn<1>(o, probs, stream, a.value_dim, coord.is_full, lane, a);
            coord.first_key += FORWARD_KEYS;
        }
    }
    store_rows(state, o, b, work_tile.split, first_head, first_query, recomputed(lane), a);
}

// Grid of both kernels: query tiles, each with its ranges of keys × groups of packed_heads query
// heads × batch rows.
KERNEL_OF(FORWARD_THREADS, FORWARD_BLOCKS, forward_matrix, Attention) {
    forward_on_matrices<FORWARD_STAGES>(a);
}

#if FORWARD_STAGES < SPLIT_STAGES
KERNEL_OF(FORWARD_THREADS, FORWARD_BLOCKS, forward_matrix_split, Attention) {
    forward_on_matrices<SPLIT_STAGES>(a);
}
#endif

#endif
