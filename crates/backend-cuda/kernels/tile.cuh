// One score tile (queries × keys) held by the 256 threads of a block: dot products, score epilogue,
// tile mask, and the second GEMM. Level plain: scalar multiply-adds, any element type, any
// architecture.
//
//   ANNULUS_TILE   queries and keys per tile, 32 or 64; in warpgroup programs keys (warpgroup.cuh)
//   ANNULUS_DIM    upper bound of head and value dim: 32, 64, 128 or 256
//
// Register tile: thread (y, x) of 16 × 16 holds the scores of queries y·M … y·M + M − 1 and keys
// x, x + 16, …, with M = tile / 16. The 16 threads of one y are half a warp, so a query's scores
// are reduced with shuffles. Operands pass through shared memory in slices of 32 dims.
#pragma once

#include "arguments.cuh"
#include "numbers.cuh"
#include "dropout.cuh"

#define TILE ANNULUS_TILE
#define M (TILE / 16)
#define SLICE 32
#define SLICES (ANNULUS_DIM / SLICE)
// Row pitch in shared memory: odd, so that the elements of a column lie in different banks.
#define SLICE_LINE (SLICE + 1)
#define TILE_LINE (TILE + 1)

typedef Sum ScoreTile[M][M];
// TILE × 32·SLICES accumulators of a block: thread (y, x) holds rows y·M + r and, of each slice,
// columns x and x + 16.
typedef Sum AccTile[SLICES][M][2];

// One visible tile of the other side.
struct TileEntry {
    u32 tile;
    u32 mask_index;  // as in TileRun
};

// Coordinates of one score tile.
struct TileCoord {
    u32 b, h;                    // batch row, query head (the first one of a packed tile)
    u32 first_query, first_key;  // local row numbers
    TileEntry entry;
    bool is_full;  // no pair is masked, except rows beyond the ends
};

DEVICE u32 thread_y() { return thread_index() / 16; }
DEVICE u32 thread_x() { return thread_index() % 16; }
DEVICE u32 query_of(u32 r) { return thread_y() * M + r; }
DEVICE u32 key_of(u32 c) { return thread_x() + 16 * c; }

// Plane of the block mask: one for each batch row and head, unless they share a mask.
DEVICE u64 mask_plane(const Attention& a, u32 b, u32 h) {
    return (a.block_mask.per_batch ? b : 0) * u64(a.block_mask.per_head ? a.q_heads : 1) +
           (a.block_mask.per_head ? h : 0);
}

DEVICE const u32* list_starts(const Attention& a, u32 b, u32 h) {
    return reinterpret_cast<const u32*>(a.block_mask.starts) +
           mask_plane(a, b, h) * a.block_mask.lists;
}

DEVICE const TileRun& tile_run(const Attention& a, u32 index) {
    return reinterpret_cast<const TileRun*>(a.block_mask.runs)[index];
}

// Iterates over the visible tiles of one list. The run is read from memory again for every tile:
// keeping it would cost registers in the inner loop, and the line stays in L1.
struct TileIterator {
    u32 run, end_run;  // current run, end of the list
    u32 in_run;        // tiles of the run that are done

    // `list`: a tile, or with split-KV decoding a range of its keys.
    METHOD void begin(const Attention& a, u32 b, u32 h, u32 list) {
        const u32* starts = list_starts(a, b, h);
        run = starts[list];
        end_run = starts[list + 1];
        in_run = 0;
    }
    METHOD bool more() const { return run < end_run; }
    METHOD TileEntry entry(const Attention& a) const {
        const TileRun& current = tile_run(a, run);
        return {current.first + in_run, current.mask_index};
    }
    // True for the last tile of the list.
    METHOD bool is_last(const Attention& a) const {
        return run + 1 == end_run && in_run + 1 == tile_run(a, run).count;
    }
    METHOD void next(const Attention& a) {
        if (++in_run < tile_run(a, run).count) return;
        in_run = 0;
        ++run;
    }
};

// As TileIterator, with the current run in registers, for kernels that have enough of them: the
// next tile then costs no load.
struct KeptTileIterator : TileIterator {
    TileRun current;

    METHOD void begin(const Attention& a, u32 b, u32 h, u32 list) {
        TileIterator::begin(a, b, h, list);
        current = {};
        if (more()) current = tile_run(a, run);
    }
    METHOD TileEntry entry(const Attention&) const {
        return {current.first + in_run, current.mask_index};
    }
    METHOD void next(const Attention& a) {
        if (++in_run < current.count) return;
        in_run = 0;
        ++run;
        if (more()) current = tile_run(a, run);
    }
};

template <typename T>
DEVICE u64 offset(const Tensor& tensor, u64 b, u64 row, u64 head, u64 x) {
    return tensor.at + u64(i64(b) * tensor.batch + i64(row) * tensor.row + i64(head) * tensor.head +
                           i64(x) * tensor.dim) *
                           sizeof(T);
}

// Loads dims `from … from + 31` of a tile's rows into shared memory, 0 beyond the ends. Returns
// true if any element that this thread loaded is not finite.
DEVICE bool load_slice(Sum* to, const Tensor& tensor, u32 b, u32 head, u32 first, u32 rows,
                       u32 from, u32 dim) {
    bool non_finite = false;
    for (u32 index = thread_index(); index < TILE * SLICE; index += THREADS) {
        u32 row = index / SLICE, x = index % SLICE;
        Sum value = 0;
        if (first + row < rows && from + x < dim)
            value = widen(*reinterpret_cast<const Element*>(
                offset<Element>(tensor, b, first + row, head, from + x)));
        non_finite |= !is_finite(value);
        to[row * SLICE_LINE + x] = value;
    }
    return non_finite;
}

// scores ← left·rightᵀ. Each score is one chain of fused multiply-adds in dim order, so that
// forward and backward compute the same bits (gradient.cuh compares s with the row maximum).
DEVICE void dot_products(ScoreTile& scores, Sum* left_slice, Sum* right_slice, const Tensor& left,
                         const Tensor& right, const TileCoord& coord, const Attention& a, u32 dim) {
    u32 kv_head = coord.h / (a.q_heads / a.kv_heads);
    UNROLL for (u32 r = 0; r < M; ++r)
        UNROLL for (u32 c = 0; c < M; ++c) scores[r][c] = 0;
    for (u32 from = 0; from < dim; from += SLICE) {
        barrier();
        load_slice(left_slice, left, coord.b, coord.h, coord.first_query, a.queries, from, dim);
        load_slice(right_slice, right, coord.b, kv_head, coord.first_key, a.keys, from, dim);
        barrier();
_Pragma("unroll 4") for (u32 x = 0; x < SLICE; ++x) {
            Sum lefts[M], rights[M];
            UNROLL for (u32 r = 0; r < M; ++r) lefts[r] = left_slice[query_of(r) * SLICE_LINE + x];
            UNROLL for (u32 c = 0; c < M; ++c) rights[c] = right_slice[key_of(c) * SLICE_LINE + x];
            UNROLL for (u32 r = 0; r < M; ++r)
                UNROLL for (u32 c = 0; c < M; ++c)
                    scores[r][c] = multiply_add(lefts[r], rights[c], scores[r][c]);
        }
    }
}

// Returns the bias of one pair: bias tensor plus ALiBi, −slope·|i − j|.
DEVICE_CALL Sum bias_of(const Attention& a, u32 b, u32 h, u32 i, u32 j) {
    Sum bias = 0;
    if (a.flags & HAS_BIAS) {
        u64 row = reinterpret_cast<const u64*>(a.key_rows)[j];
        bias = *reinterpret_cast<const Sum*>(offset<Sum>(a.bias, b, i, h, row));
    }
    if (a.flags & HAS_SLOPES) {
        // Added under a condition, not chosen between a product and 0: for that NVRTC 13.0 makes a
        // zero of two registers (CS2R) and reads it after 5 cycles, when it is not written yet. See
        // scripts/cuda-hazards.
        u64 of_query = i, of_key = j;
        if (a.flags & QUERY_POSITIONS_PER_BATCH) of_query += u64(b) * a.queries;
        if (a.flags & KEY_POSITIONS_PER_BATCH) of_key += u64(b) * a.keys;
        i64 p = reinterpret_cast<const i64*>(a.query_positions)[of_query];
        i64 q = reinterpret_cast<const i64*>(a.key_positions)[of_key];
        u64 distance = p > q ? u64(p) - u64(q) : u64(q) - u64(p);
        bias += Sum(-reinterpret_cast<const double*>(a.slopes)[h] * double(distance));
    }
    return bias;
}

// Rare steps of the score epilogue, out of line: every thread has M² scores, unrolled.
DEVICE_CALL Sum rounded_product(Sum product, u32 rounding) { return rounded_to(product, rounding); }
DEVICE_CALL Sum soft_cap_tanh(Sum x, Sum cap) { return hyperbolic_tangent(x / cap); }

// Returns the tile mask of one query row: bit j is key j of the tile. `queries` is the number of
// queries per tile.
DEVICE u64 mask_row(const Attention& a, const TileCoord& coord, u32 row, u32 queries = TILE) {
    if (coord.entry.mask_index == FULL_TILE) return ~0ull;
    return reinterpret_cast<const u64*>(
        a.block_mask.bits)[u64(coord.entry.mask_index) * queries + row];
}

// True if a pair is visible by its row's tile mask `line`, and exists.
DEVICE bool is_pair_visible(u64 line, u32 row, u32 key, const TileCoord& coord,
                            const Attention& a) {
    return coord.first_query + row < a.queries && coord.first_key + key < a.keys &&
           (line >> key & 1);
}

// Score epilogue of one pair, query `row` and key `key` of a tile:
//
//   x = scale·round(⟨q, k⟩) + bias     (bias before the cap, if so ordered)
//   s = cap·tanh(x / cap) + bias       (else after it)
//
// The product becomes s; `derivative` becomes ∂s/∂x. Returns true if the pair is `visible` and its
// bias is not −∞.
DEVICE bool score_of_pair(Sum& product, Sum& derivative, bool visible, u32 row, u32 key,
                          const TileCoord& coord, const Attention& a) {
    Sum before = 0, after = 0;
    if (visible && (a.flags & (HAS_BIAS | HAS_SLOPES))) {
        Sum bias =
            bias_of(a, coord.b, coord.h, coord.first_query + row, coord.first_key + key);
        // a bias of −∞ masks the pair
        visible = bias != -Sum(infinity());
        (a.flags & BIAS_BEFORE_CAP ? before : after) = bias;
    }
    if (a.rounding != ROUND_NOT) product = rounded_product(product, a.rounding);
    Sum x = Sum(a.scale) * product + before;
    derivative = 1;
    if (a.flags & HAS_CAP) {
        Sum tanh_x = soft_cap_tanh(x, Sum(a.cap));
        x = Sum(a.cap) * tanh_x;
        derivative = 1 - tanh_x * tanh_x;
    }
    product = x + after;
    return visible;
}

// As score_of_pair, for a pair of the row with tile mask `line`.
DEVICE bool pair_epilogue(Sum& product, Sum& derivative, u64 line, u32 row, u32 key,
                          const TileCoord& coord, const Attention& a) {
    return score_of_pair(product, derivative, is_pair_visible(line, row, key, coord, a), row, key,
                         coord, a);
}

// Tile mask of a thread's pairs: bit r·M + c is pair (r, c). Row after row, because the 64-bit
// lines of all rows at once would take registers that a second block per multiprocessor needs.
DEVICE u32 mask_bits(const TileCoord& coord, const Attention& a) {
    u32 bits = 0;
    NOT_UNROLLED for (u32 r = 0; r < M; ++r) {
        u64 line = mask_row(a, coord, query_of(r));
        UNROLL for (u32 c = 0; c < M; ++c)
            bits |= u32(is_pair_visible(line, query_of(r), key_of(c), coord, a)) << (r * M + c);
    }
    return bits;
}

// Score epilogue of a tile: products become scores s, and `dx`, unless null, receives ∂s/∂x. Bit
// r·M + c of the result is set if pair (r, c) is visible.
DEVICE u32 score_epilogue(ScoreTile& scores, ScoreTile* dx, const TileCoord& coord,
                          const Attention& a) {
    u32 mask = mask_bits(coord, a), visible_bits = 0;
    UNROLL for (u32 r = 0; r < M; ++r)
        UNROLL for (u32 c = 0; c < M; ++c) {
            u32 bit = r * M + c;
            Sum derivative;
            bool visible = score_of_pair(scores[r][c], derivative, mask >> bit & 1, query_of(r),
                                         key_of(c), coord, a);
            if (dx) (*dx)[r][c] = derivative;
            visible_bits |= u32(visible) << bit;
        }
    return visible_bits;
}

DEVICE bool is_visible(u32 visible_bits, u32 r, u32 c) { return visible_bits >> (r * M + c) & 1; }

// Coordinates of a tile whose first query is `queries`·query_tile.
DEVICE TileCoord tile_coord(const Attention& a, u32 b, u32 h, u32 query_tile, u32 key_tile,
                            TileEntry entry, u32 queries = TILE) {
    TileCoord coord;
    coord.b = b;
    coord.h = h;
    coord.first_query = query_tile * queries;
    coord.first_key = key_tile * TILE;
    coord.entry = entry;
    coord.is_full = entry.mask_index == FULL_TILE && !(a.flags & (HAS_BIAS | HAS_SLOPES));
    return coord;
}

// True if no pair of the tile needs a test, but for rows beyond the ends: all are visible, and
// s = scale·⟨q, k⟩ without bias, soft cap, rounding or dropout.
DEVICE bool is_plain(const TileCoord& coord, const Attention& a) {
    return coord.is_full && !(a.flags & (HAS_CAP | HAS_DROPOUT)) && a.rounding == ROUND_NOT;
}

// Stores a thread's P or dX elements to shared memory, 0 for masked pairs; `visibility` is written
// for partial tiles only.
DEVICE void store_shared(Sum* left_tile, u8* visibility, const ScoreTile& scores, u32 visible_bits,
                         bool is_full) {
    UNROLL for (u32 r = 0; r < M; ++r)
        UNROLL for (u32 c = 0; c < M; ++c) {
            left_tile[query_of(r) * TILE_LINE + key_of(c)] =
                is_visible(visible_bits, r, c) ? scores[r][c] : Sum(0);
            if (!is_full)
                visibility[query_of(r) * TILE + key_of(c)] = is_visible(visible_bits, r, c);
        }
}

// acc_i += Σ_j left_ij · right_j, or with `transposed` acc_j += Σ_i left_ij · right_i.
//
// A masked pair has the factor 0, but 0 · NaN = NaN and 0 · ∞ = NaN: if `right` has a non-finite
// element in this slice, masked pairs are skipped one by one.
template <bool transposed>
DEVICE void accumulate(AccTile& acc, const Sum* left_tile, const u8* visibility, Sum* right_slice,
                       const Tensor& right, u32 b, u32 head, u32 first, u32 rows, u32 dim,
                       bool is_full) {
    UNROLL for (u32 slice = 0; slice < SLICES; ++slice) {
        if (slice * SLICE >= dim) break;
        // all threads have read the previous slice and written the left tile
        barrier();
        bool non_finite = load_slice(right_slice, right, b, head, first, rows, slice * SLICE, dim);
        bool fixup = barrier_any(non_finite && !is_full);
_Pragma("unroll 4") for (u32 j = 0; j < TILE; ++j) {
            Sum rights[2];
            UNROLL for (u32 c = 0; c < 2; ++c)
                rights[c] = right_slice[j * SLICE_LINE + thread_x() + 16 * c];
            UNROLL for (u32 r = 0; r < M; ++r) {
                u32 row = thread_y() * M + r;
                u32 query = transposed ? j : row, key = transposed ? row : j;
                if (fixup && !visibility[query * TILE + key]) continue;
                Sum left_element = left_tile[query * TILE_LINE + key];
                UNROLL for (u32 c = 0; c < 2; ++c)
                    acc[slice][r][c] = multiply_add(left_element, rights[c], acc[slice][r][c]);
            }
        }
    }
    barrier();
}

// Sums over the 16 threads that hold one query's scores.
DEVICE Sum reduce_row_sum(Sum mine) {
    for (u32 lanes = 8; lanes > 0; lanes /= 2) mine += shuffle_xor(mine, lanes);
    return mine;
}

// Maximum over the 16 threads that hold one query's scores; NaN if any is NaN.
DEVICE Sum reduce_row_max(Sum mine) {
    for (u32 lanes = 8; lanes > 0; lanes /= 2) mine = larger(mine, shuffle_xor(mine, lanes));
    return mine;
}

// Visible tiles of several query heads in turn: the tiles of a KV head's group.

// Iterates over the visible tiles of one or more query heads: heads first … end − 1 in turn.
struct HeadTileIterator {
    u32 b, tile, h, end;
    TileIterator tiles;

    METHOD void begin(const Attention& a, u32 of_b, u32 of_tile, u32 first_head, u32 end_head) {
        b = of_b;
        tile = of_tile;
        h = first_head;
        end = end_head;
        tiles = {0, 0, 0};
        skip_empty_heads(a);
    }
    METHOD void skip_empty_heads(const Attention& a) {
        for (; h < end; ++h) {
            tiles.begin(a, b, h, tile);
            if (tiles.more()) return;
        }
    }
    METHOD bool more() const { return h < end; }
    METHOD TileEntry entry(const Attention& a) const { return tiles.entry(a); }
    METHOD void next(const Attention& a) {
        tiles.next(a);
        if (tiles.more()) return;
        ++h;
        skip_empty_heads(a);
    }
};
