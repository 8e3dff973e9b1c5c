// Forward over one block of keys on matrix units, for 16-bit elements: what forward.cuh does, with sums of products in f32 and weights rounded to
// the element type, as the value product needs them. Maxima and sums of the two halves of a row meet in shared memory. Where there are few queries, a
// tile's rows are pairs of a query and a head (`packed_row`).
//
// An output that is not normalised does not come here: backward would have to find the largest logit again, to the bit.
//
// Source: Dao 2023 (FlashAttention-2).
#pragma once

#include "matrix.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Grid: query tiles × query heads (by the number that shares a tile) × batch rows, the last tiles first: of a causal mask those with the most keys.
KERNEL(forward_matrix, Attention) {
    u32 tile = a.sight.tiles - 1 - block_x(), first_head = block_y() * a.packed_heads, b = block_z();
    u32 first_query = tile * packed_queries(a);
    Visits visits;
    visits.begin(a, b, tile, first_head, first_head + 1);
    if (!visits.more()) return;
    Lane lane = lane_of_thread();

    SHARED(u16, slots, SLOTS * STAGE_ELEMENTS);
    SHARED(u16, weights, TILE * TILE);
    SHARED(float, part_max, 2 * TILE);
    SHARED(float, part_sum, 2 * TILE);

    Stream<FORWARD> stream;
    stream.begin(a, slots, visits);
    OwnRows<true> queries;
    queries.begin(operand_of(a.q, b, first_head, a.queries, a.head_dim), first_query, lane, a);

    float* acc = reinterpret_cast<float*>(a.acc);
    MatrixSums sums;
    float max[2], sum[2];
    UNROLL for (u32 r = 0; r < 2; ++r) {
        PackedRow own = packed_row(a, first_head, lane.row + 8 * r);
        u64 i = first_query + own.query;
        bool there = own.there && i < a.queries;
        u64 place = (u64(b) * a.q_heads + own.h) * a.queries + i;
        max[r] = there ? reinterpret_cast<const float*>(a.max)[place] : -infinity();
        sum[r] = there ? reinterpret_cast<const float*>(a.sum)[place] : 0.0f;
        const float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + own.h) * a.value_dim;
        UNROLL for (u32 stage = 0; stage < STAGES; ++stage)
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = stage * STAGE + lane.half * 32 + piece * 8 + lane.column + c;
                    sums[stage][piece][2 * r + c] = there && x < a.value_dim ? line[x] : 0.0f;
                }
    }

    for (; visits.more(); visits.next(a)) {
        Entry entry = visits.entry(a);
        Site site = site_of<true>(a, b, first_head, tile, entry.tile, entry);
        Products pairs;
        multiply_stream(pairs, queries, stream, a.head_dim, lane, a);

        // logits, and their largest over both halves
        u32 seen = 0;
        UNROLL for (u32 r = 0; r < 2; ++r) {
            Site of_row = site;
            u32 query = lane.row + 8 * r;
            u64 line = line_of_packed(of_row, query, a);
            float most = -infinity();
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    float derivative;
                    u32 key = lane.half * 32 + piece * 8 + lane.column + c;
                    bool visible = logit(pairs[piece][2 * r + c], derivative, line, query, key, of_row, a);
                    if (visible) most = larger(most, pairs[piece][2 * r + c]);
                    seen |= u32(visible) << (piece * 4 + 2 * r + c);
                }
            most = larger(most, shuffle_xor(most, 1));
            most = larger(most, shuffle_xor(most, 2));
            if (lane.lane % 4 == 0) part_max[lane.half * TILE + lane.row + 8 * r] = most;
        }
        barrier();

        // weights, and their sum over both halves
        float factor[2];
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u32 row = lane.row + 8 * r;
            PackedRow own = packed_row(a, first_head, row);
            float next = larger(max[r], larger(part_max[row], part_max[TILE + row]));
            bool nothing = next == -infinity();
            factor[r] = next == max[r] ? 1.0f : quick_exponential(max[r] - next);
            float mine = 0;
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece) {
                u32 key = lane.half * 32 + piece * 8 + lane.column;
                bool visible[2];
                float weight[2];
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    visible[c] = seen >> (piece * 4 + 2 * r + c) & 1;
                    weight[c] = visible[c] && !nothing ? quick_exponential(pairs[piece][2 * r + c] - next) : 0.0f;
                    mine += weight[c];
                    if (visible[c] && (a.flags & HAS_DROPOUT)) weight[c] *= kept(a, b, own.h, first_query + own.query, site.first_key + key + c);
                }
                u32 pair = narrow_pair(weight[0], weight[1]);
                if (!site.plain) pair = marked(pair, visible[0], visible[1]);
                *reinterpret_cast<u32*>(weights + swizzled(row, key)) = pair;
            }
            mine += shuffle_xor(mine, 1);
            mine += shuffle_xor(mine, 2);
            if (lane.lane % 4 == 0) part_sum[lane.half * TILE + row] = mine;
            max[r] = next;
        }
        UNROLL for (u32 stage = 0; stage < STAGES; ++stage)
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 e = 0; e < 4; ++e) sums[stage][piece][e] *= factor[e / 2];

        // the stream's barriers lie between these writes and reads, and between reads and the next tile's writes
        add_stream(sums, weights, stream, a.value_dim, site.plain, lane, a);
        UNROLL for (u32 r = 0; r < 2; ++r)
            sum[r] = sum[r] * factor[r] + (part_sum[lane.row + 8 * r] + part_sum[TILE + lane.row + 8 * r]);
    }

    UNROLL for (u32 r = 0; r < 2; ++r) {
        PackedRow own = packed_row(a, first_head, lane.row + 8 * r);
        u64 i = first_query + own.query;
        if (!own.there || i >= a.queries) continue;
        if (lane.half == 0 && lane.lane % 4 == 0) {
            u64 place = (u64(b) * a.q_heads + own.h) * a.queries + i;
            reinterpret_cast<float*>(a.max)[place] = max[r];
            reinterpret_cast<float*>(a.sum)[place] = sum[r];
        }
        float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + own.h) * a.value_dim;
        UNROLL for (u32 stage = 0; stage < STAGES; ++stage)
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = stage * STAGE + lane.half * 32 + piece * 8 + lane.column + c;
                    if (x < a.value_dim) line[x] = sums[stage][piece][2 * r + c];
                }
    }
}

#endif
