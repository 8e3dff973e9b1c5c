// Forward over one block of keys on tensor cores (mma.sync), 16-bit elements. Same algorithm as
// forward.cuh; S and O accumulate in f32, P is rounded to the element type for the P·V product.
// With GQA packing a tile's rows are (query, head) pairs (forward_state.cuh).
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
// Up to 16 rows (decoding) have a kernel of their own, forward_decode. With them, dividing rows
// would leave all products of a tile to one warp, in which every instruction waits for the one
// before. So the warps divide the keys: each owns all 16 rows and 16 keys of a tile, with (m, ℓ, O)
// of its own, and merge_warps adds them after the last tile. A stage holds the keys or values of a
// tile, at 256 dims half of them.
//
//                     64 dims    128 dims    256 dims
//   rows of Q         2 KB       4 KB        8 KB        shared memory
//   stages of K, V    8 × 8 KB   4 × 16 KB   4 × 16 KB
//   O                 32         64          128         registers of a thread
//   S, then P         8          8           8
//
// On AMD GPUs (matrix_amd.cuh) a block is four waves of 32 rows. A chunk is 64 rows × 64 or 128
// dims. forward_matrix serves ranges of keys, too, and forward_decode up to 32 rows.
//
//                       64 dims    128 dims    256 dims
//   stages of K, V      2 × 8 KB   2 × 16 KB   2 × 16 KB   shared memory: 64 KB a compute unit
//   Q, P                16, 16     32, 16      64, 16      registers of a thread
//   S, O                32, 32     32, 64      32, 128
//   rows on the way     8          16          16
//   decoding: Q, S, O   16, 16, 32 32, 16, 64  64, 16, 128
//
// Unnormalized outputs use level plain: their backward pass must recompute the row maximum bit for
// bit.
//
// Source: Dao 2023 (FlashAttention-2).
#pragma once

#include "forward_state.cuh"
#include "forward_probs.cuh"

// Merges the partial results of the warps of a block, each of its own keys of the same rows, in the
// order of the warps, by the formula of merge_splits.cuh:
//
//   m' = max_w m_w;  f_w = e^{m_w − m'};  ℓ' = Σ_w f_w·ℓ_w;  O' = Σ_w f_w·O_w
//
// The warps run the online softmax on their own, so that they need no barrier for their maxima in
// each tile. The first warp merges, each thread what the threads of its number in all warps have: ℓ
// of a row is still that of a thread's columns.

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Results of all warps but the first, in shared memory. The 32 threads of a warp write and read 16
// adjacent bytes each.
//
// On AMD GPUs, where there is less of it, warps are merged one by one (`warps` is 2), and threads
// that neither give nor take wait.
template <u32 row_tiles, u32 warps>
struct WarpResults {
    RowState<row_tiles> states[warps - 1][WARP_LANES];
    float o[warps - 1][CHUNKS][row_tiles][CHUNK / 8][WARP_LANES][4];
};

// Merges the results of `warps` warps, numbered by `warp`, into those of the first one. `memory`
// may be in use by warps that have not arrived.
template <u32 row_tiles, u32 warps>
DEVICE void merge_warps(RowState<row_tiles>& state, RowAccumulators<row_tiles>& o,
                        WarpResults<row_tiles, warps>& memory, u32 warp) {
    const u32 lane = thread_index() % WARP_LANES;
    barrier();
    if (warps == 2 ? warp == 1 : warp > 0) {
        memory.states[warp - 1][lane] = state;
        UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
            UNROLL for (u32 m = 0; m < row_tiles; ++m)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                    UNROLL for (u32 e = 0; e < 4; ++e)
                        memory.o[warp - 1][panel][m][n][lane][e] = o[panel][m][n][e];
    }
    barrier();
    if (warp > 0) return;

    RowState<row_tiles> states[warps];
    states[0] = state;
    UNROLL for (u32 other = 1; other < warps; ++other) {
        states[other] = memory.states[other - 1][lane];
        UNROLL for (u32 m = 0; m < row_tiles; ++m)
            UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r)
                state.max[m][r] = larger(state.max[m][r], states[other].max[m][r]);
    }
    float factors[warps][row_tiles][FRAGMENT_ROWS];
    UNROLL for (u32 m = 0; m < row_tiles; ++m)
        UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
            state.sum[m][r] = 0;
            UNROLL for (u32 other = 0; other < warps; ++other) {
                factors[other][m][r] = merge_factor(states[other].max[m][r], state.max[m][r]);
                state.sum[m][r] += factors[other][m][r] * states[other].sum[m][r];
            }
        }
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
        UNROLL for (u32 m = 0; m < row_tiles; ++m)
            UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                UNROLL for (u32 e = 0; e < 4; ++e) {
                    float sum = factors[0][m][e / FRAGMENT_COLUMNS] * o[panel][m][n][e];
                    UNROLL for (u32 other = 1; other < warps; ++other)
                        sum = multiply_add(factors[other][m][e / FRAGMENT_COLUMNS],
                                           memory.o[other - 1][panel][m][n][lane][e], sum);
                    o[panel][m][n][e] = sum;
                }
}

#endif

#if ANNULUS_DTYPE >= 2 && TILE == 64

#define FORWARD_WARPS 4
#define FORWARD_THREADS (WARP_LANES * FORWARD_WARPS)

#ifdef ANNULUS_AMD

#define FORWARD_STAGES 2
// Waves of a SIMD unit: with 256 dims, O and Q need more than half of its registers.
#define FORWARD_BLOCKS (ANNULUS_DIM <= 128 ? 2 : 1)

// Division of a tile among the waves of a block: each has all keys of its rows, or (`divides`) all
// rows, of which there are 32, and 16 keys.
template <bool divides>
struct ForwardShape {
    static const u32 row_tiles = 1, keys = divides ? TILE / FORWARD_WARPS : TILE;
    static const u32 columns = keys / 8, keys_at_once = TILE;
    static const bool divides_keys = divides;
    static const u32 rows = divides ? WARP_ROWS : WARP_ROWS * FORWARD_WARPS;

    typedef TileIterator Tiles;
    typedef Stream<FORWARD, FORWARD_THREADS, FORWARD_STAGES, TILE> KeyStream;
    typedef RowScores<row_tiles, columns> Scores;
    typedef RowPairs<row_tiles, columns> Probs;
    typedef VisibleBits<row_tiles> Visible;
    typedef RowAccumulators<row_tiles> Accumulators;
    typedef RowState<row_tiles> State;

    typedef WarpResults<row_tiles, 2> Results;

    // Dynamic shared memory of a block; `Variant::dynamic_shared_bytes` (src/variant.rs) has its
    // size.
    union Storage {
        u16 stages[FORWARD_STAGES * KeyStream::stage_elements];
        Results results;
    };
    typedef RowFragments Queries;
    static METHOD Queries queries(Storage&) { return {}; }
};
template <u32>
using RowsShape = ForwardShape<false>;
typedef ForwardShape<true> DecodeShape;
static_assert(FORWARD_BLOCKS * sizeof(DecodeShape::Storage) <= 64 * 1024, "shared memory");

// Loads a lane's part of its row of Q.
template <typename Shape>
DEVICE void load_query_rows(RowFragments& to, const Operand& operand, u32 first_query,
                            const Attention& a) {
    const RowLane lane = row_lane_of_thread<1>(Shape::divides_keys ? 0 : thread_index() / 64);
    const PackedRow packed = packed_row<Shape::rows>(a, 0, lane.row_of(0, 0));
    const bool exists = packed.exists && first_query + packed.query < operand.rows;
    const u16* row = operand.at;
    if (exists) row += i64(first_query + packed.query) * operand.row + i64(packed.h) * a.q.head;
    load_row(to, row, exists, operand, operand.aligned && a.q.head % 8 == 0);
}

#else

#define FORWARD_STAGES (ANNULUS_DIM <= 64 ? 4 : 2)
#define FORWARD_BLOCKS 2
// Of a block that computes a range of keys: three chunks of 8 KB in flight.
#define SPLIT_STAGES 4
// Panels of dims of a stage of forward_decode, of which there are 64 KB.
#define DECODE_PANELS (CHUNKS < 2 ? CHUNKS : 2)
#define DECODE_STAGES (8 / DECODE_PANELS)

// Division of a tile among the warps of a block: each has 16·row_tiles rows and `keys` keys at
// once. With `divides_keys` all have the same rows, otherwise all have the same keys.
template <u32 of_row_tiles, u32 of_keys, bool of_divides_keys, u32 panels, u32 depth,
          typename TilesOfBlock>
struct ForwardShape {
    static const u32 row_tiles = of_row_tiles, keys = of_keys, columns = keys / 8;
    static const bool divides_keys = of_divides_keys;
    // Of the block.
    static const u32 rows = 16 * row_tiles * (divides_keys ? 1 : FORWARD_WARPS);
    static const u32 keys_at_once = keys * (divides_keys ? FORWARD_WARPS : 1);

    typedef TilesOfBlock Tiles;
    typedef Stream<FORWARD, FORWARD_THREADS, depth, keys_at_once, panels, Tiles> KeyStream;
    typedef RowScores<row_tiles, columns> Scores;
    typedef RowPairs<row_tiles, columns> Probs;
    typedef VisibleBits<row_tiles> Visible;
    typedef RowAccumulators<row_tiles> Accumulators;
    typedef RowState<row_tiles> State;
    typedef WarpResults<row_tiles, FORWARD_WARPS> Results;

    // Dynamic shared memory of a block; `Variant::dynamic_shared_bytes` (src/variant.rs) has its
    // size.
    struct Storage {
        u16 queries[rows * ANNULUS_DIM];
        u16 stages[depth * KeyStream::stage_elements];
    };
    typedef u16 (&Queries)[rows * ANNULUS_DIM];
    static METHOD Queries queries(Storage& memory) { return memory.queries; }
};

// Shapes of forward_matrix and forward_matrix_split, and of forward_decode.
template <u32 depth>
using RowsShape = ForwardShape<(ANNULUS_DIM <= 128 ? 2 : 1), (ANNULUS_DIM == 128 ? 32 : 64), false,
                               (ANNULUS_DIM == 128 ? 2 : 1), depth, TileIterator>;
typedef ForwardShape<1, TILE / FORWARD_WARPS, true, DECODE_PANELS, DECODE_STAGES, KeptTileIterator>
    DecodeShape;

// Blocks of a shape that fit `bytes` of shared memory, of which the system takes 1 KB for each.
template <typename Shape>
DEVICE constexpr u32 blocks_in(u32 bytes) {
    return bytes / (sizeof(typename Shape::Storage) + 1024);
}
// A multiprocessor has 100 KB in compute capability 8.6 and 8.9, 164 KB in 8.0.
static_assert(blocks_in<RowsShape<FORWARD_STAGES>>(100 * 1024) >= FORWARD_BLOCKS &&
                  blocks_in<RowsShape<SPLIT_STAGES>>(164 * 1024) >= FORWARD_BLOCKS &&
                  blocks_in<DecodeShape>(164 * 1024) >= FORWARD_BLOCKS,
              "shared memory of a multiprocessor");
static_assert(FORWARD_BLOCKS * FORWARD_THREADS * 256 <= 64 * 1024, "registers");
static_assert(sizeof(DecodeShape::Results) <= sizeof(DecodeShape::Storage::stages),
              "the results of the warps replace the stages");

// Copies the block's rows of Q to shared memory, in panels of 64 dims with the swizzle of a chunk;
// 0 beyond the ends. The copies belong to the first group of the stream that begins next.
template <typename Shape>
DEVICE void load_query_rows(u16* to, const Operand& operand, u32 first_query, const Attention& a) {
    // rows of several heads
    bool aligned = operand.aligned && a.q.head % 8 == 0;
    for (u32 index = thread_index(); index < Shape::rows * ANNULUS_DIM / 8;
         index += FORWARD_THREADS) {
        u32 row = index / (ANNULUS_DIM / 8), x = index % (ANNULUS_DIM / 8) * 8;
        PackedRow packed = packed_row<Shape::rows>(a, 0, row);
        bool inside =
            packed.exists && first_query + packed.query < operand.rows && x < operand.dim;
        i64 offset = inside ? i64(first_query + packed.query) * operand.row +
                                  i64(packed.h) * a.q.head + i64(x) * operand.step
                            : 0;
        u16* piece = to + x / CHUNK * (Shape::rows * CHUNK) + swizzled(row, x % CHUNK);
        if (aligned)
            cp_async_16(piece, operand.at + offset, inside);
        else
            copy_unaligned(piece, operand.at + offset, operand.step, inside ? operand.dim - x : 0);
    }
}

#endif

// Loads state and O of the pass. A thread's sum is that of its columns: the row's is added once. Of
// warps that own the same rows, only the first has the state of the pass.
template <typename Shape>
DEVICE void load_state(typename Shape::State& state, typename Shape::Accumulators& o, u32 b,
                       u32 first_head, u32 first_query, const RowLane& lane, const Attention& a) {
    const bool is_empty = starts_empty(a) || lane.first_column > 0;
    UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m)
        UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
            PackedRow packed = packed_row<Shape::rows>(a, first_head, lane.row_of(m, r));
            u64 i = first_query + packed.query;
            bool exists = packed.exists && i < a.queries && !is_empty;
            u64 index = statistics_row(a, 0, b, packed.h, i);
            state.max[m][r] = exists ? reinterpret_cast<const float*>(a.max)[index] : -infinity();
            state.sum[m][r] = exists && lane.column == 0
                                  ? PROBS_SCALE * reinterpret_cast<const float*>(a.sum)[index]
                                  : 0.0f;
            const float* line = acc_row(a, 0, b, packed.h, i);
            UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                    UNROLL for (u32 c = 0; c < FRAGMENT_COLUMNS; ++c) {
                        u32 x = panel * CHUNK + 8 * n + lane.column + c;
                        o[panel][m][n][FRAGMENT_COLUMNS * r + c] =
                            exists && x < a.value_dim ? PROBS_SCALE * line[x] : 0.0f;
                    }
        }
}

// Writes the state of the pass, partial results, or outputs: see forward_state.cuh.
template <typename Shape>
DEVICE void store_rows(const typename Shape::State& state, const typename Shape::Accumulators& o,
                       u32 b, u32 split, u32 first_head, u32 first_query, const RowLane& lane,
                       const Attention& a) {
    const bool write_outputs = a.flags & WRITE_OUTPUTS, in_pairs = stores_pairs(a);
    UNROLL for (u32 m = 0; m < Shape::row_tiles; ++m)
        UNROLL for (u32 r = 0; r < FRAGMENT_ROWS; ++r) {
            const float scaled_sum = row_sum(state.sum[m][r]), sum = scaled_sum / PROBS_SCALE;
            PackedRow packed = packed_row<Shape::rows>(a, first_head, lane.row_of(m, r));
            u64 i = first_query + packed.query;
            if (!packed.exists || i >= a.queries) continue;
            RowOutput output = row_output(state.max[m][r], scaled_sum);
            if (lane.column == 0 && write_outputs)
                store_row_outputs(a.of_rows, b, packed.h, i, state.max[m][r], sum);
            if (lane.column == 0 && !write_outputs) {
                u64 index = statistics_row(a, split, b, packed.h, i);
                reinterpret_cast<float*>(a.max)[index] = state.max[m][r];
                reinterpret_cast<float*>(a.sum)[index] = sum;
            }
            float* line = acc_row(a, split, b, packed.h, i);
            UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                    UNROLL for (u32 first = 0; first < FRAGMENT_COLUMNS; first += 2) {
                        u32 x = panel * CHUNK + 8 * n + lane.column + first;
                        const float* pair = o[panel][m][n] + (FRAGMENT_COLUMNS * r + first);
                        if (write_outputs)
                            store_output_pair(a, output, b, packed.h, i, x, pair[0], pair[1],
                                              in_pairs);
                        else
                            UNROLL for (u32 c = 0; c < 2; ++c)
                                if (x + c < a.value_dim) line[x + c] = pair[c] / PROBS_SCALE;
                    }
        }
}

// Position of a thread in the division of a tile among warps.
template <typename Shape>
DEVICE RowLane forward_lane() {
    const u32 warp = thread_index() / WARP_LANES;
    RowLane lane = row_lane_of_thread<Shape::row_tiles>(Shape::divides_keys ? 0 : warp);
    if (Shape::divides_keys) lane.first_column = warp * Shape::keys;
    return lane;
}

// Computes a block's tile of queries, or one range of its keys.
template <typename Shape>
DEVICE void forward_on_matrices(const Attention& a) {
    const ForwardTile work_tile = forward_tile(a);
    u32 tile = work_tile.tile, first_head = block_y() * a.packed_heads, b = block_z();
    u32 queries = packed_queries<Shape::rows>(a), first_query = tile * queries;
    typename Shape::Tiles tiles;
    tiles.begin(a, b, first_head, work_tile.list);
    if (!tiles.more() && keeps_state(a)) return;
    RowLane lane = forward_lane<Shape>();
    if (!Shape::divides_keys) {
        // warps without rows copy, and neither read shared memory nor multiply
        PackedRow first_row = packed_row<Shape::rows>(a, first_head, lane.first_row);
        lane.has_rows = first_row.exists && first_query + first_row.query < a.queries;
    }

    typename Shape::Storage& memory =
        *reinterpret_cast<typename Shape::Storage*>(dynamic_shared());
    typename Shape::KeyStream stream;
    typename Shape::Queries queries_of_tile = Shape::queries(memory);
    if (tiles.more())
        load_query_rows<Shape>(queries_of_tile,
                               operand_of(a.q, b, first_head, a.queries, a.head_dim), first_query,
                               a);
    stream.begin(a, memory.stages, tiles);
    typename Shape::State state;
    typename Shape::Accumulators o;
    load_state<Shape>(state, o, b, first_head, first_query, recomputed(lane), a);

    const ScoreOptions kept_options = score_options(a);

    for (; tiles.more(); tiles.next(a)) {
        TileEntry entry = tiles.entry(a);
        TileCoord coord = tile_coord(a, b, first_head, tile, entry.tile, entry, queries);
        coord.first_key += lane.first_column;
        NOT_UNROLLED for (u32 part = 0; part < TILE / Shape::keys_at_once; ++part) {
            typename Shape::Scores scores;
            typename Shape::Probs probs;
            gemm_nt<Shape::rows, 0>(scores, queries_of_tile, stream, a.head_dim, lane, a);
            if (lane.has_rows) {
                // with many rows, options that are kept would take registers that O needs
                const ScoreOptions options =
                    Shape::divides_keys ? kept_options : score_options(a);
                forward_probs<Shape>(probs, scores, o, state, coord, options,
                                     recomputed_in_loop(lane), a);
            }
            gemm_nn<1>(o, probs, stream, a.value_dim, coord.is_full, lane, a);
            coord.first_key += Shape::keys_at_once;
        }
    }
    if constexpr (Shape::divides_keys) {
#ifdef ANNULUS_AMD
        const u32 warp = thread_index() / WARP_LANES;
        NOT_UNROLLED for (u32 other = 1; other < FORWARD_WARPS; ++other)
            merge_warps(state, o, memory.results, warp == 0 ? 0 : warp == other ? 1 : 2);
#else
        merge_warps(state, o, *reinterpret_cast<typename Shape::Results*>(memory.stages),
                    thread_index() / WARP_LANES);
#endif
        if (thread_index() / WARP_LANES > 0) return;
    }
    store_rows<Shape>(state, o, b, work_tile.split, first_head, first_query, recomputed(lane), a);
}

// Grid of all kernels: query tiles, each with its ranges of keys × groups of packed_heads
// query heads × batch rows.
KERNEL_OF(FORWARD_THREADS, FORWARD_BLOCKS, forward_matrix, Attention) {
    forward_on_matrices<RowsShape<FORWARD_STAGES>>(a);
}

#ifndef ANNULUS_AMD

#if ANNULUS_DIM > 64
KERNEL_OF(FORWARD_THREADS, FORWARD_BLOCKS, forward_matrix_split, Attention) {
    forward_on_matrices<RowsShape<SPLIT_STAGES>>(a);
}
#endif

#endif

KERNEL_OF(FORWARD_THREADS, FORWARD_BLOCKS, forward_decode, Attention) {
    forward_on_matrices<DecodeShape>(a);
}

#endif
