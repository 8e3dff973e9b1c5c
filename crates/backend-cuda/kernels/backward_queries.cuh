// What one block of keys gives to dq.
//
//   for each tile of queries (a block of threads each):
//       for each tile of keys of which they see some:  dX from S and dP;  dQ += scale·dX·K
#pragma once

#include "gradient.cuh"

// Grid: query tiles × query heads × batch rows.
KERNEL(backward_queries, Attention) {
    u32 tile = a.sight.tiles - 1 - block_x(), h = block_y(), b = block_z();
    Walk walk;
    walk.begin(a, b, h, tile);
    if (!walk.more()) return;
    u32 kv_head = h / (a.q_heads / a.kv_heads);

    SHARED(Sum, left_slice, TILE * SLICE_LINE);
    SHARED(Sum, right_slice, TILE * SLICE_LINE);
    SHARED(Sum, weights, TILE * TILE_LINE);
    SHARED(u8, shown, TILE * TILE);

    Rows sums;
    UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
        UNROLL for (u32 r = 0; r < M; ++r) sums[slice][r][0] = sums[slice][r][1] = 0;

    for (; walk.more(); walk.next(a)) {
        Entry entry = walk.entry(a);
        Site site = site_of(a, b, h, tile, entry.tile, entry);
        Pairs pairs, products, slope;
        dot_products(pairs, left_slice, right_slice, a.q, a.k, site, a, a.head_dim);
        u32 seen = logits(pairs, &slope, site, a);
        dot_products(products, left_slice, right_slice, a.dout, a.v, site, a, a.value_dim);
        seen = gradients(pairs, products, slope, seen, site, a);
        UNROLL for (u32 r = 0; r < M; ++r)
            UNROLL for (u32 c = 0; c < M; ++c) slope[r][c] *= Sum(a.scale);
        share(weights, shown, slope, seen, site.plain);
        add_products<false>(sums, weights, shown, right_slice, a.k, b, kv_head, site.first_key, a.keys, a.head_dim, site.plain);
    }

    UNROLL for (u32 r = 0; r < M; ++r) {
        u64 i = u64(tile) * TILE + query_of(r);
        if (i >= a.queries) continue;
        Sum* line = reinterpret_cast<Sum*>(a.dq) + ((u64(b) * a.queries + i) * a.q_heads + h) * a.head_dim;
        UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = slice * SLICE + thread_x() + 16 * c;
                if (x < a.head_dim) line[x] += sums[slice][r][c];
            }
    }
}
