// Backward on matrix units, for 16-bit elements, in two passes that share this file: dq by tiles of queries, dk and dv by tiles of keys. Sums are f32;
// the factors of the last products, weights and dX, are rounded to the element type.
//
//   for each tile of the other side that is met:
//       S = own·otherᵀ of queries and keys, dP likewise of dout and values;  weights = keep·p, dX = p·(keep·dP − Δ)·∂s/∂x  (gradient.cuh)
//       own queries:  dQ += dX·K          own keys:  dV += weightsᵀ·dout, dK += dXᵀ·Q
//
// With own keys everything is transposed to begin with, so that own rows are always the left side. S and dP stay in registers. A tile of sums is owned
// by one block of threads, which adds in a fixed order: no atomics, the same bits every time. Outputs that are not normalised do not come here.
//
// Source: Dao 2023 (FlashAttention-2), algorithm 2.
#pragma once

#include "gradient.cuh"
#include "matrix.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// What the pass must know of one query.
struct QueryFacts {
    float lse, delta;
};

DEVICE QueryFacts facts_of(const Attention& a, u32 b, u32 h, u32 i) {
    if (i >= a.queries) return {-infinity(), 0.0f};
    Statistics row = load_statistics(a, b, h, i);
    return {row.lse, row.delta};
}

// Makes weights and dX of S and dP, in shared memory.
template <u32 pass>
DEVICE void share_gradients(u16* weights, u16* slopes, Products& pairs, const Products& products, const QueryFacts (&facts)[2 * PIECES],
                            const Site& site, const Lane& lane, const Attention& a) {
    UNROLL for (u32 r = 0; r < 2; ++r)
        UNROLL for (u32 piece = 0; piece < PIECES; ++piece) {
            u32 own = lane.row + 8 * r, other = lane.half * 32 + piece * 8 + lane.column;
            bool seen[2];
            float weight[2], slope[2];
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 query = pass == KEYS ? other + c : own, key = pass == KEYS ? own : other + c;
                QueryFacts fact = facts[pass == KEYS ? 2 * piece + c : r];
                u64 line = line_of(a, site, query);
#ifdef PLANTED_BACKWARD_MASK_OFF_BY_ONE
                if (pass == PLANTED_BACKWARD_MASK_OFF_BY_ONE) line = line << 1 | 1;
#endif
                float s = pairs[piece][2 * r + c], derivative;
                // a row that saw nothing has no gradient
                seen[c] = logit(s, derivative, line, query, key, site, a) && fact.lse != -infinity();
                weight[c] = slope[c] = 0;
                if (!seen[c]) continue;
                float keep = 1;
                if (a.flags & HAS_DROPOUT) keep = kept(a, site.b, site.h, site.first_query + query, site.first_key + key);
                float p = quick_exponential(s - fact.lse);
                weight[c] = keep * p;
                slope[c] = p * (keep * products[piece][2 * r + c] - fact.delta) * derivative;
            }
            u32 place = swizzled(own, other);
            if (pass == KEYS) {
                u32 pair = narrow_pair(weight[0], weight[1]);
                *reinterpret_cast<u32*>(weights + place) = site.plain ? pair : marked(pair, seen[0], seen[1]);
            }
            u32 pair = narrow_pair(slope[0], slope[1]);
            *reinterpret_cast<u32*>(slopes + place) = site.plain ? pair : marked(pair, seen[0], seen[1]);
        }
}

DEVICE void clear(MatrixSums& sums) {
    UNROLL for (u32 stage = 0; stage < STAGES; ++stage)
        UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
            UNROLL for (u32 e = 0; e < 4; ++e) sums[stage][piece][e] = 0;
}

// Grid: query tiles × query heads × batch rows, the last tiles first.
KERNEL(backward_queries_matrix, Attention) {
    u32 tile = a.sight.tiles - 1 - block_x(), h = block_y(), b = block_z();
    Visits visits;
    visits.begin(a, b, tile, h, h + 1);
    if (!visits.more()) return;
    Lane lane = lane_of_thread();

    SHARED(u16, slots, SLOTS * STAGE_ELEMENTS);
    SHARED(u16, slopes, TILE * TILE);

    Stream<QUERIES> stream;
    stream.begin(a, slots, visits);
    Own queries, douts;
    queries.begin(operand_of(a.q, b, h, a.queries, a.head_dim), tile * TILE, lane, a);
    douts.begin(operand_of(a.dout, b, h, a.queries, a.value_dim), tile * TILE, lane, a);
    QueryFacts facts[2 * PIECES];
    UNROLL for (u32 r = 0; r < 2; ++r) facts[r] = facts_of(a, b, h, tile * TILE + lane.row + 8 * r);
    MatrixSums sums;
    clear(sums);

    for (; visits.more(); visits.next(a)) {
        Entry entry = visits.entry(a);
        Site site = site_of(a, b, h, tile, entry.tile, entry);
        Products pairs, products;
        multiply_stream(pairs, queries, stream, a.head_dim, lane, a);
        multiply_stream(products, douts, stream, a.value_dim, lane, a);
        // the stream's barriers lie between these writes and reads, and between reads and the next tile's writes
        share_gradients<QUERIES>(nullptr, slopes, pairs, products, facts, site, lane, a);
        add_stream(sums, slopes, stream, a.head_dim, site.plain, lane, a);
    }

    UNROLL for (u32 r = 0; r < 2; ++r) {
        u64 i = u64(tile) * TILE + lane.row + 8 * r;
        if (i >= a.queries) continue;
        float* line = reinterpret_cast<float*>(a.dq) + ((u64(b) * a.queries + i) * a.q_heads + h) * a.head_dim;
        UNROLL for (u32 stage = 0; stage < STAGES; ++stage)
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = stage * STAGE + lane.half * 32 + piece * 8 + lane.column + c;
                    if (x < a.head_dim) line[x] += float(a.scale) * sums[stage][piece][2 * r + c];
                }
    }
}

DEVICE void put_sums(const MatrixSums& sums, float scale, const Tensor& to, u32 b, u32 head, u32 first, const Lane& lane, u32 dim,
                     const Attention& a) {
    UNROLL for (u32 r = 0; r < 2; ++r) {
        u32 row = first + lane.row + 8 * r;
        if (row >= a.keys) continue;
        UNROLL for (u32 stage = 0; stage < STAGES; ++stage)
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = stage * STAGE + lane.half * 32 + piece * 8 + lane.column + c;
                    if (x >= dim) continue;
                    float* place = reinterpret_cast<float*>(offset<float>(to, b, row, head, x));
                    *place = (a.flags & ADD ? *place : 0.0f) + scale * sums[stage][piece][2 * r + c];
                }
    }
}

// Grid: key tiles × kv heads × batch rows; sight by tiles of keys.
KERNEL(backward_keys_matrix, Attention) {
    u32 tile = block_x(), kv_head = block_y(), b = block_z(), group = a.q_heads / a.kv_heads;
    Visits visits;
    visits.begin(a, b, tile, kv_head * group, (kv_head + 1) * group);
    Lane lane = lane_of_thread();

    SHARED(u16, slots, SLOTS * STAGE_ELEMENTS);
    SHARED(u16, weights, TILE * TILE);
    SHARED(u16, slopes, TILE * TILE);

    Stream<KEYS> stream;
    stream.begin(a, slots, visits);
    Own keys, values;
    keys.begin(operand_of(a.k, b, kv_head, a.keys, a.head_dim), tile * TILE, lane, a);
    values.begin(operand_of(a.v, b, kv_head, a.keys, a.value_dim), tile * TILE, lane, a);
    MatrixSums dk, dv;
    clear(dk);
    clear(dv);

    for (; visits.more(); visits.next(a)) {
        Entry entry = visits.entry(a);
        Site site = site_of(a, b, visits.h, entry.tile, tile, entry);
        Products pairs, products;
        multiply_stream(pairs, keys, stream, a.head_dim, lane, a);
        multiply_stream(products, values, stream, a.value_dim, lane, a);
        QueryFacts facts[2 * PIECES];
        UNROLL for (u32 place = 0; place < 2 * PIECES; ++place)
            facts[place] = facts_of(a, b, visits.h, site.first_query + lane.half * 32 + place / 2 * 8 + lane.column + place % 2);
        share_gradients<KEYS>(weights, slopes, pairs, products, facts, site, lane, a);
        add_stream(dv, weights, stream, a.value_dim, site.plain, lane, a);
        add_stream(dk, slopes, stream, a.head_dim, site.plain, lane, a);
    }

    put_sums(dk, float(a.scale), a.dk, b, kv_head, tile * TILE, lane, a.head_dim, a);
    put_sums(dv, 1.0f, a.dv, b, kv_head, tile * TILE, lane, a.value_dim, a);
}

#endif
