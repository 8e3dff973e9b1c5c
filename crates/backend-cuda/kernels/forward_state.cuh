// Rows of a forward kernel's block in memory: the state of the pass, partial results, or outputs.
//
//   state            O, m and ℓ after the KV blocks so far. With EMPTY_STATE it has no contents,
//                    and the block starts from O = 0, m = −∞, ℓ = 0.
//   partial results  O, m and ℓ of one range of keys, if a tile has more than one (split-KV
//                    decoding). They start empty, too; merge_splits.cuh merges them.
//   outputs          with WRITE_OUTPUTS out = O / ℓ, lse = m + ln ℓ, m and ℓ, so that O is neither
//                    written nor read back. Sinks and unnormalized outputs need finish_forward
//                    (rows.cuh).
//
// A block without a visible tile also writes its rows, unless the state does not change.
#pragma once

#include "tile.cuh"
#include "numbers.cuh"

// Tile of queries of a block, its range of keys, and its list in the block mask.
struct ForwardTile {
    u32 tile, split, list;
};

// Tiles run in reverse order: under a causal mask the last ones have the most visible keys.
DEVICE ForwardTile forward_tile(const Attention& a) {
    ForwardTile at;
    at.list = a.block_mask.lists - 1 - block_x();
    at.tile = at.list / a.block_mask.splits;
    at.split = at.list - at.tile * a.block_mask.splits;
    return at;
}

DEVICE bool starts_empty(const Attention& a) {
    return (a.flags & EMPTY_STATE) || a.block_mask.splits > 1;
}

// True if rows without a visible tile need not be written.
DEVICE bool keeps_state(const Attention& a) {
    return !starts_empty(a) && !(a.flags & WRITE_OUTPUTS);
}

DEVICE u64 rows_before(const Attention& a, u32 split) {
    return u64(split) * a.batches * a.q_heads * a.queries;
}
// Index of a row in max, sum and ties.
DEVICE u64 statistics_row(const Attention& a, u32 split, u32 b, u32 h, u64 i) {
    return rows_before(a, split) + (u64(b) * a.q_heads + h) * a.queries + i;
}
// Accumulator of a row.
DEVICE Sum* acc_row(const Attention& a, u32 split, u32 b, u32 h, u64 i) {
    u64 row = rows_before(a, split) + (u64(b) * a.queries + i) * a.q_heads + h;
    return reinterpret_cast<Sum*>(a.acc) + row * a.value_dim;
}

// Factor e^{m − m'} of a partial result with maximum m in a merge with maximum m': 1 if they are
// equal, also if both are infinite.
DEVICE Sum merge_factor(Sum of_part, Sum max) {
    return of_part == max ? Sum(1) : exponential(of_part - max);
}

// Epilogue of a row with a complete softmax.
struct RowOutput {
    Sum divisor;   // of 16-bit elements its reciprocal
    bool is_zero;  // no visible key, or all scores are −∞: O may hold 0 · v, which may be NaN

    METHOD Sum of(Sum acc) const {
#if ANNULUS_DTYPE >= 2
        return is_zero ? 0.0f : acc * divisor;
#else
        return is_zero ? Sum(0) : acc / divisor;
#endif
    }
};

DEVICE RowOutput row_output(Sum max, Sum sum) {
    RowOutput row;
    // a NaN score is never the maximum, and a later block may have reset its O: all is NaN
    row.is_zero = max == -Sum(infinity()) && !is_nan(sum);
    row.divisor = sum == Sum(0) ? Sum(1) : sum;
#if ANNULUS_DTYPE >= 2
    // a division has a slow path that is a call, across which ptxas serializes wgmma
    row.divisor = reciprocal_approx(row.divisor);
#endif
    return row;
}

template <typename T>
DEVICE void store_output(const T& a, u32 b, u32 h, u64 i, u32 x, Sum value) {
    *reinterpret_cast<Element*>(offset<Element>(a.out, b, i, h, x)) = narrow(value);
}
// Stores lse = m + ln ℓ, m and ℓ of a row.
DEVICE void store_row_outputs(const RowOutputs& to, u32 b, u32 h, u64 i, Sum max, Sum sum) {
    if (is_nan(sum)) max = sum;
    *reinterpret_cast<Sum*>(offset<Sum>(to.lse, b, i, h, 0)) = max + logarithm(sum);
    if (to.max.at) *reinterpret_cast<Sum*>(offset<Sum>(to.max, b, i, h, 0)) = max;
    if (to.sum.at) *reinterpret_cast<Sum*>(offset<Sum>(to.sum, b, i, h, 0)) = sum;
}

#if ANNULUS_DTYPE >= 2

// True if pairs of elements of `out` begin at multiples of 4 bytes.
DEVICE bool stores_pairs(const Attention& a) {
    return a.out.dim == 1 && a.out.at % 4 == 0 && a.value_dim % 2 == 0 &&
           u64(a.out.batch | a.out.row | a.out.head) % 2 == 0;
}

// Writes elements x and x + 1 of a row, which may be beyond the value dim.
DEVICE void store_output_pair(const Attention& a, const RowOutput& row, u32 b, u32 h, u64 i, u32 x,
                              float first, float second, bool in_pairs) {
    if (in_pairs && x < a.value_dim) {
        *reinterpret_cast<u32*>(offset<Element>(a.out, b, i, h, x)) =
            narrow_pair(row.of(first), row.of(second));
        return;
    }
    if (x < a.value_dim) store_output(a, b, h, i, x, row.of(first));
    if (x + 1 < a.value_dim) store_output(a, b, h, i, x + 1, row.of(second));
}

#endif

// Rows of a forward tile under GQA packing (src/forward_tiles.rs). With few queries, `packed_heads`
// heads of one KV head share a tile, so that each key is read once for all of them:
//
//   row = query · packed_heads + head        left-over rows do not exist

// One row of a packed tile of `rows` rows: the query, counted from the tile's first, and the query
// head.
struct PackedRow {
    u32 query, h;
    bool exists;
};

// Queries per tile: rows / packed_heads.
template <u32 rows>
DEVICE u32 packed_queries(const Attention& a) {
    return rows * a.packed_reciprocal >> 16;
}

template <u32 rows>
DEVICE PackedRow packed_row(const Attention& a, u32 first_head, u32 row) {
    PackedRow at;
    // row / packed_heads; exact, because row ≤ 2¹⁵ (src/forward_tiles.rs)
    at.query = row * a.packed_reciprocal >> 16;
    at.h = first_head + (row - at.query * a.packed_heads);
    at.exists = at.query < packed_queries<rows>(a);
    return at;
}
