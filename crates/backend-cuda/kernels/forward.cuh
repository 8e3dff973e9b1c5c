// Forward over one block of keys.
//
//   for each tile of queries (a block of threads each, those with the most keys first):
//       for each tile of keys of which the queries see some:
//           S = scale·Q·Kᵀ, made logits;  m' = max(m, S);  P = e^{S − m'};  sum = sum·e^{m − m'} + P·1;  O = O·e^{m − m'} + P·V
//
// O, m and sum come from memory and go back there, so that the next block goes on where this one ends.
//
// Source: Dao et al. 2022, algorithm 1; the running softmax of Milakov and Gimelshein 2018.
#pragma once

#include "tile.cuh"

// Grid: query tiles × query heads × batch rows.
KERNEL(forward, Attention) {
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
    Sum max[M], sum[M], ties[M];
    Sum* acc = reinterpret_cast<Sum*>(a.acc);
    UNROLL for (u32 r = 0; r < M; ++r) {
        u64 i = u64(tile) * TILE + query_of(r);
        bool there = i < a.queries;
        u64 row = (u64(b) * a.q_heads + h) * a.queries + i;
        max[r] = there ? reinterpret_cast<const Sum*>(a.max)[row] : -Sum(infinity());
        sum[r] = there ? reinterpret_cast<const Sum*>(a.sum)[row] : Sum(0);
        ties[r] = there ? reinterpret_cast<const Sum*>(a.ties)[row] : Sum(0);
        const Sum* line = acc + ((u64(b) * a.queries + i) * a.q_heads + h) * a.value_dim;
        UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = slice * SLICE + thread_x() + 16 * c;
                sums[slice][r][c] = there && x < a.value_dim ? line[x] : Sum(0);
            }
    }

    for (; walk.more(); walk.next(a)) {
        Entry entry = walk.entry(a);
        Site site = site_of(a, b, h, tile, entry.tile, entry);
        Pairs pairs;
        dot_products(pairs, left_slice, right_slice, a.q, a.k, site, a, a.head_dim);
        u32 seen = logits(pairs, nullptr, site, a);
        UNROLL for (u32 r = 0; r < M; ++r) {
            Sum most = -Sum(infinity());
            UNROLL for (u32 c = 0; c < M; ++c)
                if (is_seen(seen, r, c)) most = larger(most, pairs[r][c]);
            Sum next = larger(max[r], largest_of_query(most));
            // no logit but −∞ so far
            bool nothing = next == -Sum(infinity());
            bool same = next == max[r];
            Sum factor = same ? Sum(1) : exponential(max[r] - next);
            Sum mine = 0, equal = 0;
            UNROLL for (u32 c = 0; c < M; ++c) {
                bool counts = is_seen(seen, r, c) && !nothing;
                equal += Sum(counts && pairs[r][c] == next);
                Sum weight = counts ? exponential(pairs[r][c] - next) : Sum(0);
                mine += weight;
                if (counts && (a.flags & HAS_DROPOUT))
                    weight *= kept(a, b, h, site.first_query + query_of(r), site.first_key + key_of(c));
                pairs[r][c] = weight;
            }
            mine = sum_of_query(mine);
            equal = sum_of_query(equal);
            sum[r] = sum[r] * factor + mine;
            ties[r] = (same ? ties[r] : Sum(0)) + equal;
            max[r] = next;
            UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
                UNROLL for (u32 c = 0; c < 2; ++c) sums[slice][r][c] *= factor;
        }
        share(weights, shown, pairs, seen, site.plain);
        add_products<false>(sums, weights, shown, right_slice, a.v, b, kv_head, site.first_key, a.keys, a.value_dim, site.plain);
    }

    UNROLL for (u32 r = 0; r < M; ++r) {
        u64 i = u64(tile) * TILE + query_of(r);
        if (i >= a.queries) continue;
        if (thread_x() == 0) {
            u64 row = (u64(b) * a.q_heads + h) * a.queries + i;
            reinterpret_cast<Sum*>(a.max)[row] = max[r];
            reinterpret_cast<Sum*>(a.sum)[row] = sum[r];
            reinterpret_cast<Sum*>(a.ties)[row] = ties[r];
        }
        Sum* line = acc + ((u64(b) * a.queries + i) * a.q_heads + h) * a.value_dim;
        UNROLL for (u32 slice = 0; slice < SLICES; ++slice)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 x = slice * SLICE + thread_x() + 16 * c;
                if (x < a.value_dim) line[x] = sums[slice][r][c];
            }
    }
}
