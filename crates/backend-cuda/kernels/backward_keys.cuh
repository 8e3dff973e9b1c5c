// What queries give to dk and dv of one block of keys.
//
//   for each tile of keys (a block of threads each), for each query head of its kv head:
//       for each tile of queries that sees some:  dX and weights from S and dP;  dK += scale·dXᵀ·Q;  dV += weightsᵀ·dout
//
// A tile of keys is owned by one block of threads, which adds in a fixed order: no atomics, the same bits every time.
#pragma once

#include "gradient.cuh"

DEVICE void put_rows(const Rows& sums, const Tensor& to, u32 b, u32 head, u32 first, u32 rows, u32 dim, bool add) {
    UNROLL for (u32 r = 0; r < M; ++r) {
        u32 row = first + thread_y() * M + r;
        if (row >= rows) continue;
        UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = slice * SLICE + thread_x() + 16 * c;
                if (x >= dim) continue;
                Sum* place = reinterpret_cast<Sum*>(offset<Sum>(to, b, row, head, x));
                *place = (add ? *place : Sum(0)) + sums[slice][r][c];
            }
    }
}

// Grid: key tiles × kv heads × batch rows; sight by tiles of keys.
KERNEL(backward_keys, Attention) {
    u32 tile = block_x(), kv_head = block_y(), b = block_z(), group = a.q_heads / a.kv_heads;

    SHARED(Sum, left_slice, TILE * SLICE_LINE);
    SHARED(Sum, right_slice, TILE * SLICE_LINE);
    SHARED(Sum, weights, TILE * TILE_LINE);
    SHARED(u8, shown, TILE * TILE);

    Rows dk, dv;
    UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
        UNROLL for (u32 r = 0; r < M; ++r) dk[slice][r][0] = dk[slice][r][1] = dv[slice][r][0] = dv[slice][r][1] = 0;

    for (u32 h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        Walk walk;
        for (walk.begin(a, b, h, tile); walk.more(); walk.next(a)) {
            Entry entry = walk.entry(a);
            Site site = site_of(a, b, h, entry.tile, tile, entry);
            Pairs pairs, products, slope;
            dot_products(pairs, left_slice, right_slice, a.q, a.k, site, a, a.head_dim);
            u32 seen = logits(pairs, &slope, site, a);
            dot_products(products, left_slice, right_slice, a.dout, a.v, site, a, a.value_dim);
            seen = gradients(pairs, products, slope, seen, site, a);
            UNROLL for (u32 r = 0; r < M; ++r)
                UNROLL for (u32 c = 0; c < M; ++c) slope[r][c] *= Sum(a.scale);
            share(weights, shown, pairs, seen, site.plain);
            add_products<true>(dv, weights, shown, right_slice, a.dout, b, h, site.first_query, a.queries, a.value_dim, site.plain);
            share(weights, shown, slope, seen, site.plain);
            add_products<true>(dk, weights, shown, right_slice, a.q, b, h, site.first_query, a.queries, a.head_dim, site.plain);
        }
    }
    bool add = a.flags & ADD;
    put_rows(dk, a.dk, b, kv_head, tile * TILE, a.keys, a.head_dim, add);
    put_rows(dv, a.dv, b, kv_head, tile * TILE, a.keys, a.value_dim, add);
}
