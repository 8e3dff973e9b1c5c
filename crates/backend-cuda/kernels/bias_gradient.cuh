// dbias from one block of keys, summed over the axes along which the bias is broadcast.
//
//   for each tile of the bias (one thread block each):
//       for each batch row, head and score tile that reads it:  dbias += dS (or dX before the cap)
//
// The sums run in a fixed order, without atomics. A broadcast axis is summed inside one block, so
// parallelism shrinks with every broadcast axis: a scalar bias is computed by a single block.
#pragma once

#include "gradient.cuh"

// Grid: query tiles (1 if the bias has one row) × key tiles (1 if it has one key) × its batch rows
// · heads.
KERNEL(bias_gradient, Attention) {
    bool of_rows = a.bias_rows > 1 || a.queries == 1, of_keys = a.bias_keys > 1;
    u32 bias_head = block_z() % a.bias_heads, bias_batch = block_z() / a.bias_heads;

    SHARED(Sum, left_slice, TILE * SLICE_LINE);
    SHARED(Sum, right_slice, TILE * SLICE_LINE);
    SHARED(Sum, shared_sums, TILE * TILE_LINE);

    ScoreTile partial_sums;
    UNROLL for (u32 r = 0; r < M; ++r)
        UNROLL for (u32 c = 0; c < M; ++c) partial_sums[r][c] = 0;

    u32 first_tile = of_rows ? block_x() : 0,
        last_tile = of_rows ? block_x() + 1 : a.block_mask.lists;
    u32 first_b = a.bias_batch > 1 ? bias_batch : 0,
        last_b = a.bias_batch > 1 ? bias_batch + 1 : a.batches;
    u32 first_h = a.bias_heads > 1 ? bias_head : 0,
        last_h = a.bias_heads > 1 ? bias_head + 1 : a.q_heads;
    for (u32 b = first_b; b < last_b; ++b)
        for (u32 h = first_h; h < last_h; ++h)
            for (u32 tile = first_tile; tile < last_tile; ++tile) {
                const u32* starts = list_starts(a, b, h);
                for (u32 index = starts[tile]; index < starts[tile + 1]; ++index) {
                    TileRun run = tile_run(a, index);
                    // of a run: every tile if keys are broadcast, else the block's own key tile
                    u32 first = of_keys ? block_y() : run.first,
                        end = of_keys ? block_y() + 1 : run.first + run.count;
                    if (first < run.first || end > run.first + run.count) continue;
                    for (u32 key_tile = first; key_tile < end; ++key_tile) {
                        TileCoord coord =
                            tile_coord(a, b, h, tile, key_tile, {key_tile, run.mask_index});
                        ScoreTile scores, dprobs, dx;
                        dot_products(scores, left_slice, right_slice, a.q, a.k, coord, a,
                                     a.head_dim);
                        u32 visible_bits = score_epilogue(scores, &dx, coord, a);
                        dot_products(dprobs, left_slice, right_slice, a.dout, a.v, coord, a,
                                     a.value_dim);
                        gradients(scores, dprobs, dx, visible_bits, coord, a);
                        UNROLL for (u32 r = 0; r < M; ++r)
                            UNROLL for (u32 c = 0; c < M; ++c)
                                partial_sums[r][c] +=
                                    a.flags & BIAS_BEFORE_CAP ? dx[r][c] : dprobs[r][c];
                    }
                }
            }

    UNROLL for (u32 r = 0; r < M; ++r)
        UNROLL for (u32 c = 0; c < M; ++c)
            shared_sums[query_of(r) * TILE_LINE + key_of(c)] = partial_sums[r][c];
    barrier();
    // thread t reduces the elements that share one element of the bias, in order
    u32 lines = of_rows ? TILE : 1, columns = of_keys ? TILE : 1;
    Sum* dbias = reinterpret_cast<Sum*>(a.dbias) + u64(block_z()) * a.bias_rows * a.bias_keys;
    for (u32 number = thread_index(); number < lines * columns; number += THREADS) {
        u32 line = number / columns, column = number % columns;
        u32 i = of_rows ? block_x() * TILE + line : 0, j = of_keys ? block_y() * TILE + column : 0;
        if ((of_rows && i >= a.queries) || (of_keys && j >= a.keys)) continue;
        Sum sum = 0;
        for (u32 x = of_rows ? line : 0; x < (of_rows ? line + 1 : TILE); ++x)
            for (u32 y = of_keys ? column : 0; y < (of_keys ? column + 1 : TILE); ++y)
                sum += shared_sums[x * TILE_LINE + y];
        u64 key = of_keys ? reinterpret_cast<const u64*>(a.key_rows)[j] : 0;
        dbias[u64(a.bias_rows > 1 ? i : 0) * a.bias_keys + key] += sum;
    }
}
