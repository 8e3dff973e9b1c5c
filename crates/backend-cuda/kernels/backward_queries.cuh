// dQ from one block of keys, level plain.
//
//   for each tile of queries (one thread block each):
//       for each visible tile of keys:  dX from S and dP;  dQ += scale·dX·K
#pragma once

#include "gradient.cuh"

// Grid: query tiles × query heads × batch rows.
KERNEL(backward_queries, Attention) {
    u32 tile = a.block_mask.lists - 1 - block_x(), h = block_y(), b = block_z();
    TileIterator tiles;
    tiles.begin(a, b, h, tile);
    if (!tiles.more()) return;
    u32 kv_head = h / (a.q_heads / a.kv_heads);

    SHARED(Sum, left_slice, TILE * SLICE_LINE);
    SHARED(Sum, right_slice, TILE * SLICE_LINE);
    SHARED(Sum, shared_dx, TILE * TILE_LINE);
    SHARED(u8, visibility, TILE * TILE);

    AccTile dq;
    UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
        UNROLL for (u32 r = 0; r < M; ++r) dq[slice][r][0] = dq[slice][r][1] = 0;

    for (; tiles.more(); tiles.next(a)) {
        TileEntry entry = tiles.entry(a);
        TileCoord coord = tile_coord(a, b, h, tile, entry.tile, entry);
        ScoreTile scores, dprobs, dx;
        dot_products(scores, left_slice, right_slice, a.q, a.k, coord, a, a.head_dim);
        u32 visible_bits = score_epilogue(scores, &dx, coord, a);
        dot_products(dprobs, left_slice, right_slice, a.dout, a.v, coord, a, a.value_dim);
        visible_bits = gradients(scores, dprobs, dx, visible_bits, coord, a);
        UNROLL for (u32 r = 0; r < M; ++r)
            UNROLL for (u32 c = 0; c < M; ++c) dx[r][c] *= Sum(a.scale);
        store_shared(shared_dx, visibility, dx, visible_bits, coord.is_full);
        accumulate<false>(dq, shared_dx, visibility, right_slice, a.k, b, kv_head, coord.first_key,
                          a.keys, a.head_dim, coord.is_full);
    }

    UNROLL for (u32 r = 0; r < M; ++r) {
        u64 i = u64(tile) * TILE + query_of(r);
        if (i >= a.queries) continue;
        Sum* line =
            reinterpret_cast<Sum*>(a.dq) + ((u64(b) * a.queries + i) * a.q_heads + h) * a.head_dim;
        UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = slice * SLICE + thread_x() + 16 * c;
                if (x < a.head_dim) line[x] += dq[slice][r][c];
            }
    }
}
