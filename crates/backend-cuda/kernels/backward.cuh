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

// dK and dV of one block of keys, level plain.
//
//   for each tile of keys (one thread block each), for each query head of its KV head:
//       for each visible tile of queries:
//           P and dX from S and dP;  dK += scale·dXᵀ·Q;  dV += Pᵀ·dO
//
// One thread block owns a tile of dK and dV and adds in a fixed order: no atomics, so the result is
// bitwise reproducible.

DEVICE void store_rows(const AccTile& acc, const Tensor& to, u32 b, u32 head, u32 first, u32 rows,
                       u32 dim, bool add) {
    UNROLL for (u32 r = 0; r < M; ++r) {
        u32 row = first + thread_y() * M + r;
        if (row >= rows) continue;
        UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = slice * SLICE + thread_x() + 16 * c;
                if (x >= dim) continue;
                Sum* element = reinterpret_cast<Sum*>(offset<Sum>(to, b, row, head, x));
                *element = (add ? *element : Sum(0)) + acc[slice][r][c];
            }
    }
}

// Grid: key tiles × KV heads × batch rows. The block mask lists query tiles by key tile.
KERNEL(backward_keys, Attention) {
    u32 tile = block_x(), kv_head = block_y(), b = block_z(), group = a.q_heads / a.kv_heads;

    SHARED(Sum, left_slice, TILE * SLICE_LINE);
    SHARED(Sum, right_slice, TILE * SLICE_LINE);
    SHARED(Sum, shared_left, TILE * TILE_LINE);
    SHARED(u8, visibility, TILE * TILE);

    AccTile dk, dv;
    UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
        UNROLL for (u32 r = 0; r < M; ++r)
            dk[slice][r][0] = dk[slice][r][1] = dv[slice][r][0] = dv[slice][r][1] = 0;

    for (u32 h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        TileIterator tiles;
        for (tiles.begin(a, b, h, tile); tiles.more(); tiles.next(a)) {
            TileEntry entry = tiles.entry(a);
            TileCoord coord = tile_coord(a, b, h, entry.tile, tile, entry);
            ScoreTile scores, dprobs, dx;
            dot_products(scores, left_slice, right_slice, a.q, a.k, coord, a, a.head_dim);
            u32 visible_bits = score_epilogue(scores, &dx, coord, a);
            dot_products(dprobs, left_slice, right_slice, a.dout, a.v, coord, a, a.value_dim);
            visible_bits = gradients(scores, dprobs, dx, visible_bits, coord, a);
            UNROLL for (u32 r = 0; r < M; ++r)
                UNROLL for (u32 c = 0; c < M; ++c) dx[r][c] *= Sum(a.scale);
            store_shared(shared_left, visibility, scores, visible_bits, coord.is_full);
            accumulate<true>(dv, shared_left, visibility, right_slice, a.dout, b, h,
                             coord.first_query, a.queries, a.value_dim, coord.is_full);
            store_shared(shared_left, visibility, dx, visible_bits, coord.is_full);
            accumulate<true>(dk, shared_left, visibility, right_slice, a.q, b, h, coord.first_query,
                             a.queries, a.head_dim, coord.is_full);
        }
    }
    bool add = a.flags & ADD;
    store_rows(dk, a.dk, b, kv_head, tile * TILE, a.keys, a.head_dim, add);
    store_rows(dv, a.dv, b, kv_head, tile * TILE, a.keys, a.value_dim, add);
}
