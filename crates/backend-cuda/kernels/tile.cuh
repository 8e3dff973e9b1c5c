// One tile of queries × keys, held by the 256 threads of a block: products, logits, who sees whom.
//
//   ANNULUS_TILE   queries and keys a tile, 32 or 64
//   ANNULUS_DIM    head and value dims are at most this; 32, 64, 128 or 256
//
// Thread (y, x) of 16 × 16 holds the pairs of queries y·M … y·M + M − 1 and keys x, x + 16, …; M = tile / 16. The 16 threads of one y are half a
// warp, so a query's pairs are reduced by shuffles. Operands go through shared memory in slices of 32 dims.
#pragma once

#include "arguments.cuh"
#include "numbers.cuh"
#include "dropout.cuh"

// Macros that begin with PLANTED put a mistake in; tests show that each is caught.
#define TILE ANNULUS_TILE
#define M (TILE / 16)
#define SLICE 32
#define SLICES (ANNULUS_DIM / SLICE)
// of a line of shared memory: odd, so that a column's elements lie in different banks
#define SLICE_LINE (SLICE + 1)
#define TILE_LINE (TILE + 1)

typedef Sum Pairs[M][M];
// TILE × 32·SLICES sums of a block: thread (y, x) holds rows y·M + r and, of each slice, columns x and x + 16
typedef Sum Rows[SLICES][M][2];

// A row of a tile of forward: its query, counted from the tile's first, and its query head. Where there are few queries, `packed_heads` heads of those that
// read the same keys share a tile, query by query, and its keys are read once for all of them. Rows that are left over are not there.
struct PackedRow {
    u32 query, h;
    bool there;
};

// How many queries of each of its heads a tile of forward has.
DEVICE u32 packed_queries(const Attention& a) { return TILE * a.packed_reciprocal >> 16; }

DEVICE PackedRow packed_row(const Attention& a, u32 first_head, u32 row) {
    PackedRow at;
    // row / packed_heads: rows are few enough for this to be exact
    at.query = row * a.packed_reciprocal >> 16;
    at.h = first_head + (row - at.query * a.packed_heads);
    at.there = at.query < packed_queries(a);
    return at;
}

// One tile of a list.
struct Entry {
    u32 tile;  // of the other side
    u32 bits;  // as in its run
};

// The tile at hand.
struct Site {
    u32 b, h;                    // batch row, query head; of a tile that is packed the first
    u32 first_query, first_key;  // local rows
    Entry entry;
    // no pair is hidden, apart from those beyond the ends
    bool plain;
};

DEVICE u32 thread_y() { return thread_index() / 16; }
DEVICE u32 thread_x() { return thread_index() % 16; }
DEVICE u32 query_of(u32 r) { return thread_y() * M + r; }
DEVICE u32 key_of(u32 c) { return thread_x() + 16 * c; }

DEVICE const u32* starts_of(const Attention& a, u32 b, u32 h) {
    u64 plane = (a.sight.per_batch ? b : 0) * u64(a.sight.per_head ? a.q_heads : 1) + (a.sight.per_head ? h : 0);
    return reinterpret_cast<const u32*>(a.sight.starts) + plane * a.sight.tiles;
}

DEVICE const Run& run_of(const Attention& a, u32 place) { return reinterpret_cast<const Run*>(a.sight.runs)[place]; }

// The tiles of one list, one after another. What a run says is read again for every tile: that costs less than registers to remember it in.
struct Walk {
    u32 place, last;  // runs: the one at hand, and the end
    u32 passed;       // tiles of the run

    METHOD void begin(const Attention& a, u32 b, u32 h, u32 tile) {
        const u32* starts = starts_of(a, b, h);
        place = starts[tile];
        last = starts[tile + 1];
        passed = 0;
    }
    METHOD bool more() const { return place < last; }
    METHOD Entry entry(const Attention& a) const {
        const Run& run = run_of(a, place);
        return {run.first + passed, run.bits};
    }
    // Whether the tile at hand is the last one.
    METHOD bool is_last(const Attention& a) const { return place + 1 == last && passed + 1 == run_of(a, place).count; }
    METHOD void next(const Attention& a) {
        if (++passed < run_of(a, place).count) return;
        passed = 0;
        ++place;
    }
};

template <typename T>
DEVICE u64 offset(const Tensor& tensor, u64 b, u64 row, u64 head, u64 x) {
    return tensor.at + u64(i64(b) * tensor.batch + i64(row) * tensor.row + i64(head) * tensor.head + i64(x) * tensor.dim) * sizeof(T);
}

// Reads dims `from … from + 31` of a tile's rows into shared memory, 0 beyond the ends. Whether one of them is not finite.
DEVICE bool load_slice(Sum* to, const Tensor& tensor, u32 b, u32 head, u32 first, u32 rows, u32 from, u32 dim) {
    bool odd = false;
    for (u32 place = thread_index(); place < TILE * SLICE; place += THREADS) {
        u32 row = place / SLICE, x = place % SLICE;
        Sum value = 0;
        if (first + row < rows && from + x < dim)
            value = widen(*reinterpret_cast<const Element*>(offset<Element>(tensor, b, first + row, head, from + x)));
        odd |= !is_finite(value);
        to[row * SLICE_LINE + x] = value;
    }
    return odd;
}

// pairs ← ⟨left_i, right_j⟩. One chain of multiply-adds a pair, so that every pass meets the same numbers.
DEVICE void dot_products(Pairs& pairs, Sum* left_slice, Sum* right_slice, const Tensor& left, const Tensor& right, const Site& site,
                         const Attention& a, u32 dim) {
    u32 kv_head = site.h / (a.q_heads / a.kv_heads);
    UNROLL for (u32 r = 0; r < M; ++r)
        UNROLL for (u32 c = 0; c < M; ++c) pairs[r][c] = 0;
    for (u32 from = 0; from < dim; from += SLICE) {
        barrier();
        load_slice(left_slice, left, site.b, site.h, site.first_query, a.queries, from, dim);
        load_slice(right_slice, right, site.b, kv_head, site.first_key, a.keys, from, dim);
#ifndef PLANTED_NO_BARRIER
        barrier();
#endif
_Pragma("unroll 4") for (u32 x = 0; x < SLICE; ++x) {
            Sum lefts[M], rights[M];
            UNROLL for (u32 r = 0; r < M; ++r) lefts[r] = left_slice[query_of(r) * SLICE_LINE + x];
            UNROLL for (u32 c = 0; c < M; ++c) rights[c] = right_slice[key_of(c) * SLICE_LINE + x];
            UNROLL for (u32 r = 0; r < M; ++r)
                UNROLL for (u32 c = 0; c < M; ++c) pairs[r][c] = fused(lefts[r], rights[c], pairs[r][c]);
        }
    }
}

// The bias of one pair: the tensor's and the function's.
DEVICE_CALL Sum bias_of(const Attention& a, u32 b, u32 h, u32 i, u32 j) {
    Sum bias = 0;
    if (a.flags & HAS_BIAS) {
        u64 row = reinterpret_cast<const u64*>(a.key_rows)[j];
        bias = *reinterpret_cast<const Sum*>(offset<Sum>(a.bias, b, i, h, row));
    }
    if (a.flags & HAS_SLOPES) {
        u64 of_query = (a.flags & QUERY_POSITIONS_PER_BATCH ? u64(b) * a.queries : 0) + i;
        u64 of_key = (a.flags & KEY_POSITIONS_PER_BATCH ? u64(b) * a.keys : 0) + j;
        i64 p = reinterpret_cast<const i64*>(a.query_positions)[of_query];
        i64 q = reinterpret_cast<const i64*>(a.key_positions)[of_key];
        u64 distance = p > q ? u64(p) - u64(q) : u64(q) - u64(p);
        bias += Sum(-reinterpret_cast<const double*>(a.slopes)[h] * double(distance));
    }
    return bias;
}

// What is rare in a logit, out of line: kernels have a logit a pair a thread.
DEVICE_CALL Sum rounded_product(Sum product, u32 rounding) { return rounded_to(product, rounding); }
DEVICE_CALL Sum bent_by_cap(Sum x, Sum cap) { return hyperbolic_tangent(x / cap); }

// What the mask alone says of the keys of a tile of so many queries, as seen by query `row` of it.
DEVICE u64 line_of(const Attention& a, const Site& site, u32 row, u32 queries = TILE) {
    if (site.entry.bits == EVERYTHING) return ~0ull;
    return reinterpret_cast<const u64*>(a.sight.bits)[u64(site.entry.bits) * queries + row];
}

// As above, of a row of a tile that is packed: `row` becomes its query, the site's head its own.
DEVICE u64 line_of_packed(Site& site, u32& row, const Attention& a) {
    PackedRow at = packed_row(a, site.h, row);
    site.h = at.h;
    row = at.query;
    return at.there ? line_of(a, site, at.query, packed_queries(a)) : 0;
}

// The pair of query `row` and key `key` of a tile: its product becomes its logit, `derivative` ∂s/∂x. Whether it is seen.
DEVICE bool logit(Sum& product, Sum& derivative, u64 line, u32 row, u32 key, const Site& site, const Attention& a) {
    u32 i = site.first_query + row, j = site.first_key + key;
#ifdef PLANTED_MASK_OFF_BY_ONE
    line = line << 1 | 1;
#endif
    bool visible = i < a.queries && j < a.keys && (line >> key & 1);
    Sum before = 0, after = 0;
    if (visible && (a.flags & (HAS_BIAS | HAS_SLOPES))) {
        Sum bias = bias_of(a, site.b, site.h, i, j);
        // −∞ hides
        visible = bias != -Sum(infinity());
        (a.flags & BIAS_BEFORE_CAP ? before : after) = bias;
    }
    if (a.rounding != ROUND_NOT) product = rounded_product(product, a.rounding);
    Sum x = Sum(a.scale) * product + before;
    derivative = 1;
    if (a.flags & HAS_CAP) {
        Sum bent = bent_by_cap(x, Sum(a.cap));
        x = Sum(a.cap) * bent;
        derivative = 1 - bent * bent;
    }
    product = x + after;
    return visible;
}

// Makes logits of products: s, and ∂s/∂x into `slope` unless it is null. Bit r·M + c of the answer: the pair is seen.
DEVICE u32 logits(Pairs& pairs, Pairs* slope, const Site& site, const Attention& a) {
    u32 seen = 0;
    UNROLL for (u32 r = 0; r < M; ++r) {
        u64 line = line_of(a, site, query_of(r));
        UNROLL for (u32 c = 0; c < M; ++c) {
            Sum derivative;
            bool visible = logit(pairs[r][c], derivative, line, query_of(r), key_of(c), site, a);
            if (slope) (*slope)[r][c] = derivative;
            seen |= u32(visible) << (r * M + c);
        }
    }
    return seen;
}

DEVICE bool is_seen(u32 seen, u32 r, u32 c) { return seen >> (r * M + c) & 1; }

template <bool packed = false>
DEVICE Site site_of(const Attention& a, u32 b, u32 h, u32 query_tile, u32 key_tile, Entry entry) {
    Site site;
    site.b = b;
    site.h = h;
    site.first_query = query_tile * (packed ? packed_queries(a) : TILE);
    site.first_key = key_tile * TILE;
    site.entry = entry;
    site.plain = entry.bits == EVERYTHING && !(a.flags & (HAS_BIAS | HAS_SLOPES));
    return site;
}

// Puts a thread's pairs where the whole block can read them, 0 for those that are hidden.
DEVICE void share(Sum* weights, u8* shown, const Pairs& pairs, u32 seen, bool plain) {
    UNROLL for (u32 r = 0; r < M; ++r)
        UNROLL for (u32 c = 0; c < M; ++c) {
            weights[query_of(r) * TILE_LINE + key_of(c)] = is_seen(seen, r, c) ? pairs[r][c] : Sum(0);
            if (!plain) shown[query_of(r) * TILE + key_of(c)] = is_seen(seen, r, c);
        }
}

// sums_i += Σ_j weights_ij · right_j, or with `transposed` sums_j += Σ_i weights_ij · right_i.
//
// A hidden pair's weight is 0, and 0 · NaN would be felt: where something in `right` is not finite, hidden pairs are left out one by one.
template <bool transposed>
DEVICE void add_products(Rows& sums, const Sum* weights, const u8* shown, Sum* right_slice, const Tensor& right, u32 b, u32 head,
                         u32 first, u32 rows, u32 dim, bool plain) {
    UNROLL for (u32 slice = 0; slice < SLICES; ++slice) {
        if (slice * SLICE >= dim) break;
        // the slice before has been read, and the weights are written
        barrier();
        bool odd = load_slice(right_slice, right, b, head, first, rows, slice * SLICE, dim);
#ifdef PLANTED_LATE_WAIT
        bool careful = odd && !plain;
#else
        bool careful = barrier_any(odd && !plain);
#endif
_Pragma("unroll 4") for (u32 j = 0; j < TILE; ++j) {
            Sum rights[2];
            UNROLL for (u32 c = 0; c < 2; ++c) rights[c] = right_slice[j * SLICE_LINE + thread_x() + 16 * c];
            UNROLL for (u32 r = 0; r < M; ++r) {
                u32 row = thread_y() * M + r;
                u32 query = transposed ? j : row, key = transposed ? row : j;
                if (careful && !shown[query * TILE + key]) continue;
                Sum weight = weights[query * TILE_LINE + key];
                UNROLL for (u32 c = 0; c < 2; ++c) sums[slice][r][c] = fused(weight, rights[c], sums[slice][r][c]);
            }
        }
    }
#ifdef PLANTED_SPLIT_BARRIER
    if (thread_index() == 77) return;
#endif
    barrier();
}

// The sum over the 16 threads that hold one query's pairs.
DEVICE Sum sum_of_query(Sum mine) {
    for (u32 lanes = 8; lanes > 0; lanes /= 2) mine += shuffle_xor(mine, lanes);
    return mine;
}

DEVICE Sum largest_of_query(Sum mine) {
    for (u32 lanes = 8; lanes > 0; lanes /= 2) mine = larger(mine, shuffle_xor(mine, lanes));
    return mine;
}
