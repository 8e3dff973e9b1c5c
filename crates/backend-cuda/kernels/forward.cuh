// Forward over one block of keys, level plain.
//
//   for each tile of queries (one thread block each):
//       for each visible tile of keys:
//           S  = scale·Q·Kᵀ, score epilogue
//           m' = max(m, rowmax(S));  P = e^{S − m'}
//           ℓ  = ℓ·e^{m − m'} + rowsum(P);  O = O·e^{m − m'} + P·V;  m = m'
//
// O, m and ℓ are loaded from memory and stored back, so that the next ring step continues
// (forward_state.cuh).
//
// A thread holds TILE² / 256 scores, and TILE · dims / 256 elements of O in registers. Shared
// memory, in elements of Sum: a slice of 32 dims of the left and the right operand, TILE × 33 each;
// P, TILE × (TILE + 1); a byte for each pair, which tells visible pairs of partial tiles.
//
// Source: Dao et al. 2022, algorithm 1; Milakov and Gimelshein 2018 (online softmax).
#pragma once

#include "forward_state.cuh"

// Blocks per multiprocessor: with 64 dims, 128 registers a thread suffice for two. The barriers of
// a block separate loads from arithmetic, so that only another block can overlap them.
#define PLAIN_FORWARD_BLOCKS (ANNULUS_DIM <= 64 ? 2 : 1)

// Grid: query tiles, each with its ranges of keys × query heads × batch rows.
KERNEL_OF(THREADS, PLAIN_FORWARD_BLOCKS, forward, Attention) {
    const ForwardTile work_tile = forward_tile(a);
    u32 tile = work_tile.tile, h = block_y(), b = block_z();
    TileIterator tiles;
    tiles.begin(a, b, h, work_tile.list);
    if (!tiles.more() && keeps_state(a)) return;
    u32 kv_head = h / (a.q_heads / a.kv_heads);

    SHARED(Sum, left_slice, TILE * SLICE_LINE);
    SHARED(Sum, right_slice, TILE * SLICE_LINE);
    SHARED(Sum, probs, TILE * TILE_LINE);
    SHARED(u8, visibility, TILE * TILE);

    AccTile o;
    Sum max[M], sum[M], ties[M];
    UNROLL for (u32 r = 0; r < M; ++r) {
        u64 i = u64(tile) * TILE + query_of(r);
        bool exists = i < a.queries && !starts_empty(a);
        u64 row = statistics_row(a, 0, b, h, i);
        max[r] = exists ? reinterpret_cast<const Sum*>(a.max)[row] : -Sum(infinity());
        sum[r] = exists ? reinterpret_cast<const Sum*>(a.sum)[row] : Sum(0);
        ties[r] = exists ? reinterpret_cast<const Sum*>(a.ties)[row] : Sum(0);
        const Sum* line = acc_row(a, 0, b, h, i);
        UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = slice * SLICE + thread_x() + 16 * c;
                o[slice][r][c] = exists && x < a.value_dim ? line[x] : Sum(0);
            }
    }

    for (; tiles.more(); tiles.next(a)) {
        TileEntry entry = tiles.entry(a);
        TileCoord coord = tile_coord(a, b, h, tile, entry.tile, entry);
        ScoreTile scores;
        dot_products(scores, left_slice, right_slice, a.q, a.k, coord, a, a.head_dim);
        u32 visible_bits = score_epilogue(scores, nullptr, coord, a);
        UNROLL for (u32 r = 0; r < M; ++r) {
            Sum tile_max = -Sum(infinity());
            UNROLL for (u32 c = 0; c < M; ++c)
                if (is_visible(visible_bits, r, c)) tile_max = larger(tile_max, scores[r][c]);
            Sum new_max = larger(max[r], reduce_row_max(tile_max));
            // every score so far is −∞: e^{−∞ − −∞} would be NaN
            bool all_masked = new_max == -Sum(infinity());
            bool same_max = new_max == max[r];
            Sum rescale = same_max ? Sum(1) : exponential(max[r] - new_max);
            Sum partial_sum = 0, partial_ties = 0;
            UNROLL for (u32 c = 0; c < M; ++c) {
                bool counts = is_visible(visible_bits, r, c) && !all_masked;
                partial_ties += Sum(counts && scores[r][c] == new_max);
                Sum prob = counts ? exponential(scores[r][c] - new_max) : Sum(0);
                partial_sum += prob;
                if (counts && (a.flags & HAS_DROPOUT))
                    prob *= keep_factor(a, b, h, coord.first_query + query_of(r),
                                        coord.first_key + key_of(c));
                scores[r][c] = prob;
            }
            partial_sum = reduce_row_sum(partial_sum);
            partial_ties = reduce_row_sum(partial_ties);
            sum[r] = sum[r] * rescale + partial_sum;
            ties[r] = (same_max ? ties[r] : Sum(0)) + partial_ties;
            max[r] = new_max;
            UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
                UNROLL for (u32 c = 0; c < 2; ++c) o[slice][r][c] *= rescale;
        }
        store_shared(probs, visibility, scores, visible_bits, coord.is_full);
        accumulate<false>(o, probs, visibility, right_slice, a.v, b, kv_head, coord.first_key,
                          a.keys, a.value_dim, coord.is_full);
    }

    // Statistics go through shared memory to one thread a row, because their addresses do not fit
    // the registers beside the accumulators.
    Sum* row_max = left_slice;
    Sum* row_sum = right_slice;
    barrier();
    if (thread_x() == 0)
        UNROLL for (u32 r = 0; r < M; ++r) {
            row_max[query_of(r)] = max[r];
            row_sum[query_of(r)] = sum[r];
        }
    UNROLL for (u32 r = 0; r < M; ++r) {
        u64 i = u64(tile) * TILE + query_of(r);
        if (i >= a.queries) continue;
        bool write_outputs = a.flags & WRITE_OUTPUTS;
        RowOutput output = row_output(max[r], sum[r]);
        if (thread_x() == 0 && !write_outputs) {
            u64 row = statistics_row(a, work_tile.split, b, h, i);
            reinterpret_cast<Sum*>(a.max)[row] = max[r];
            reinterpret_cast<Sum*>(a.sum)[row] = sum[r];
            reinterpret_cast<Sum*>(a.ties)[row] = ties[r];
        }
        Sum* line = acc_row(a, work_tile.split, b, h, i);
        UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = slice * SLICE + thread_x() + 16 * c;
                if (x >= a.value_dim) continue;
                if (write_outputs)
                    store_output(a, b, h, i, x, output.of(o[slice][r][c]));
                else
                    line[x] = o[slice][r][c];
            }
    }
    barrier();
    u32 own = thread_index();
    u64 i = u64(tile) * TILE + own;
    if (own < TILE && i < a.queries && (a.flags & WRITE_OUTPUTS))
        store_row_outputs(a.of_rows, b, h, i, row_max[own], row_sum[own]);
}
