// Forward over one block of keys on matrix units, for 16-bit elements: what forward.cuh does, with sums of products in f32 and weights rounded to
// the element type, as the value product needs them.
//
//   8 warps: warp w has queries 16·(w mod 4) … + 15 of a tile, and of every product one half of the columns:
//   S (64 × 64) = Q·Kᵀ: 32 keys a warp;  maxima and sums of the two halves meet in shared memory;  O (64 × dims) += P·V: half of the dims a warp
//
// Fragments come from shared memory by ldmatrix; a line there is 16 bytes longer than its elements, so that eight rows lie in different banks.
// An output that is not normalised does not come here: backward would have to find the largest logit again, to the bit.
//
// Source: Dao 2023 (FlashAttention-2); NVIDIA, PTX ISA, "Matrix fragments for mma.m16n8k16".
#pragma once

#include "tile.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Dims that are in shared memory at a time.
#define STAGE 64
#define STAGES (ANNULUS_DIM / STAGE)
#define STAGE_LINE (STAGE + 8)
#define KEYS_LINE (TILE + 8)
// 8-column pieces of half a product
#define PIECES 4

DEVICE void multiply(float (&sums)[4], const u32 (&left)[4], const u32 (&right)[2]) {
#if ANNULUS_DTYPE == 2
    multiply_bf16(sums, left, right);
#else
    multiply_f16(sums, left, right);
#endif
}

// Reads dims `from … from + 63` of a tile's rows, 0 beyond the ends. Whether one of them is not finite.
DEVICE bool load_stage(u16* to, const Tensor& tensor, u32 b, u32 head, u32 first, u32 rows, u32 from, u32 dim) {
    const u16 exponent = ANNULUS_DTYPE == 2 ? 0x7f80 : 0x7c00;
    bool odd = false;
    for (u32 place = thread_index(); place < TILE * STAGE; place += THREADS) {
        u32 row = place / STAGE, x = place % STAGE;
        u16 value = 0;
        if (first + row < rows && from + x < dim)
            value = *reinterpret_cast<const u16*>(offset<u16>(tensor, b, first + row, head, from + x));
        odd |= (value & exponent) == exponent;
        to[row * STAGE_LINE + x] = value;
    }
    return odd;
}

// Grid: query tiles × query heads × batch rows.
KERNEL(forward_matrix, Attention) {
    u32 tile = a.sight.tiles - 1 - block_x(), h = block_y(), b = block_z();
    const u32* starts = starts_of(a, b, h);
    u32 first = starts[tile], last = starts[tile + 1];
    if (first == last) return;
    u32 kv_head = h / (a.q_heads / a.kv_heads);
    u32 lane = thread_index() % 32, warp = thread_index() / 32, half = warp / 4, first_row = warp % 4 * 16;
    // this lane's rows of a fragment are first_row + lane / 4 and that + 8, its columns two from here on
    u32 row = first_row + lane / 4, column = 2 * (lane % 4);

    SHARED(u16, left_stage, TILE * STAGE_LINE);
    SHARED(u16, right_stage, TILE * STAGE_LINE);
    SHARED(u16, weights, TILE * KEYS_LINE);
    SHARED(u8, shown, TILE * TILE);
    SHARED(float, part_max, 2 * TILE);
    SHARED(float, part_sum, 2 * TILE);

    float* acc = reinterpret_cast<float*>(a.acc);
    float sums[STAGES][PIECES][4], max[2], sum[2];
    UNROLL for (u32 r = 0; r < 2; ++r) {
        u64 i = u64(tile) * TILE + row + 8 * r;
        bool there = i < a.queries;
        u64 place = (u64(b) * a.q_heads + h) * a.queries + i;
        max[r] = there ? reinterpret_cast<const float*>(a.max)[place] : -infinity();
        sum[r] = there ? reinterpret_cast<const float*>(a.sum)[place] : 0.0f;
        const float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + h) * a.value_dim;
        UNROLL for (u32 stage = 0; stage < STAGES; ++stage)
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = stage * STAGE + half * 32 + piece * 8 + column + c;
                    sums[stage][piece][2 * r + c] = there && x < a.value_dim ? line[x] : 0.0f;
                }
    }

    for (u32 place = first; place < last; ++place) {
        Entry entry = entry_of(a, place);
        Site site = site_of(a, b, h, tile, entry.tile, entry);

        // S
        float pairs[PIECES][4];
        UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
            UNROLL for (u32 e = 0; e < 4; ++e) pairs[piece][e] = 0;
        for (u32 from = 0; from < a.head_dim; from += STAGE) {
            barrier();
            load_stage(left_stage, a.q, b, h, site.first_query, a.queries, from, a.head_dim);
            load_stage(right_stage, a.k, b, kv_head, site.first_key, a.keys, from, a.head_dim);
#ifndef PLANTED_NO_BARRIER
            barrier();
#endif
            UNROLL for (u32 x = 0; x < STAGE; x += 16) {
                u32 left[4];
                load_matrices_4(left, left_stage + (first_row + lane % 16) * STAGE_LINE + x + lane / 16 * 8);
                UNROLL for (u32 piece = 0; piece < PIECES; ++piece) {
                    u32 right[2];
                    load_matrices_2(right, right_stage + (half * 32 + piece * 8 + lane % 8) * STAGE_LINE + x + lane / 8 % 2 * 8);
                    multiply(pairs[piece], left, right);
                }
            }
        }

        // logits, and their largest over both halves
        u32 seen = 0;
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u64 line = line_of(a, site, row + 8 * r);
            float most = -infinity();
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    float derivative;
                    u32 key = half * 32 + piece * 8 + column + c;
                    bool visible = logit(pairs[piece][2 * r + c], derivative, line, row + 8 * r, key, site, a);
                    if (visible) most = larger(most, pairs[piece][2 * r + c]);
                    seen |= u32(visible) << (piece * 4 + 2 * r + c);
                }
            most = larger(most, shuffle_xor(most, 1));
            most = larger(most, shuffle_xor(most, 2));
            if (lane % 4 == 0) part_max[half * TILE + row + 8 * r] = most;
        }
        barrier();

        // weights, and their sum over both halves
        float factor[2];
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u32 query = row + 8 * r;
            float next = larger(max[r], larger(part_max[query], part_max[TILE + query]));
            bool nothing = next == -infinity();
            factor[r] = next == max[r] ? 1.0f : exponential(max[r] - next);
            float mine = 0;
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 key = half * 32 + piece * 8 + column + c;
                    bool visible = seen >> (piece * 4 + 2 * r + c) & 1;
                    float weight = visible && !nothing ? exponential(pairs[piece][2 * r + c] - next) : 0.0f;
                    mine += weight;
                    if (visible && (a.flags & HAS_DROPOUT)) weight *= kept(a, b, h, site.first_query + query, site.first_key + key);
                    weights[query * KEYS_LINE + key] = narrow(weight);
                    if (!site.plain) shown[query * TILE + key] = visible;
                }
            mine += shuffle_xor(mine, 1);
            mine += shuffle_xor(mine, 2);
            if (lane % 4 == 0) part_sum[half * TILE + query] = mine;
            max[r] = next;
        }
        UNROLL for (u32 stage = 0; stage < STAGES; ++stage)
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 e = 0; e < 4; ++e) sums[stage][piece][e] *= factor[e / 2];

        // P·V
        UNROLL for (u32 stage = 0; stage < STAGES; ++stage) {
            if (stage * STAGE >= a.value_dim) break;
            barrier();
            bool odd = load_stage(right_stage, a.v, b, kv_head, site.first_key, a.keys, stage * STAGE, a.value_dim);
            // a hidden pair's weight is 0, and 0 · NaN would be felt
#ifdef PLANTED_LATE_WAIT
            bool careful = odd && !site.plain;
#else
            bool careful = barrier_any(odd && !site.plain);
#endif
            if (careful) {
                UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                    UNROLL for (u32 e = 0; e < 4; ++e) {
                        u32 query = row + 8 * (e / 2), x = half * 32 + piece * 8 + column + e % 2;
                        for (u32 key = 0; key < TILE; ++key)
                            if (shown[query * TILE + key])
                                sums[stage][piece][e] = fused(widen(weights[query * KEYS_LINE + key]),
                                                              widen(right_stage[key * STAGE_LINE + x]), sums[stage][piece][e]);
                    }
                continue;
            }
            UNROLL for (u32 key = 0; key < TILE; key += 16) {
                u32 left[4];
                load_matrices_4(left, weights + (first_row + lane % 16) * KEYS_LINE + key + lane / 16 * 8);
                UNROLL for (u32 piece = 0; piece < PIECES; ++piece) {
                    u32 right[2];
                    load_transposed_2(right, right_stage + (key + lane % 16) * STAGE_LINE + half * 32 + piece * 8);
                    multiply(sums[stage][piece], left, right);
                }
            }
        }
        UNROLL for (u32 r = 0; r < 2; ++r)
            sum[r] = sum[r] * factor[r] + (part_sum[row + 8 * r] + part_sum[TILE + row + 8 * r]);
        // the parts have been read
        barrier();
    }

    UNROLL for (u32 r = 0; r < 2; ++r) {
        u64 i = u64(tile) * TILE + row + 8 * r;
        if (i >= a.queries) continue;
        if (half == 0 && lane % 4 == 0) {
            u64 place = (u64(b) * a.q_heads + h) * a.queries + i;
            reinterpret_cast<float*>(a.max)[place] = max[r];
            reinterpret_cast<float*>(a.sum)[place] = sum[r];
        }
        float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + h) * a.value_dim;
        UNROLL for (u32 stage = 0; stage < STAGES; ++stage)
            UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = stage * STAGE + half * 32 + piece * 8 + column + c;
                    if (x < a.value_dim) line[x] = sums[stage][piece][2 * r + c];
                }
    }
}

#endif
