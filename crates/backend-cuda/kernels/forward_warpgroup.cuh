// Forward over one block of keys on warpgroups: the algorithm of forward.cuh with wgmma and TMA,
// compute capability 9.0 only.
//
//   producer (warpgroup 0):
//       for each visible KV tile:  wait for an empty stage, issue the TMA loads of K and V
//   consumers (warpgroups 1, 2), 64 query rows each:
//       S ← Q·K₀ᵀ;  (P, m, ℓ) ← online softmax of S;  O ← O·e^{m₋₁ − m}
//       for each further KV tile j:
//           issue S ← Q·K_jᵀ;  issue O ← O + P·V_{j−1}      (asynchronous, in this order)
//           wait for S;  (P', m', ℓ') ← online softmax of S  (overlaps P·V)
//           wait for O;  O ← O·e^{m − m'};  P ← P'
//       O ← O + P·V of the last tile
//
// S, P and O stay in registers. The consumers take turns to issue wgmma (ping-pong scheduling with
// named barriers), so that the GEMMs of one overlap the softmax of the other. If the scores need no
// epilogue they are never formed: e^{scale·s − m} is one multiply-add and one ex2.
//
// Registers per thread: 168 at launch (65,536 / 384, in units of 8), then 24 for the producer and
// 240 for a consumer: 128·24 + 256·240 = 384·168.
//
// Source: Shah et al. 2024 (FlashAttention-3), algorithms 1 and 2.
#pragma once

#include "warpgroup.cuh"
#include "warpgroup_lane.cuh"

#if ANNULUS_DTYPE < 2 || ANNULUS_DIM < 64
#error "warpgroups multiply 16-bit elements of at least 64 dims"
#endif

// Elements of S of one thread: 64 × KV_ROWS over 128 threads.
#define S_REGISTERS (KV_ROWS / 2)

// Visibility of a thread's pairs, one bit each.
struct VisiblePairs {
    u32 words[(S_REGISTERS + 31) / 32];

    METHOD void set(u32 e, bool visible) {
        words[e / 32] = (words[e / 32] & ~(1u << e % 32)) | u32(visible) << e % 32;
    }
    METHOD bool get(u32 e) const { return words[e / 32] >> e % 32 & 1; }
};

// Softmax statistics (m, ℓ) and the factor e^{m − m'} of the last update, for a thread's two rows.
struct SoftmaxState {
    float max[2], sum[2], rescale[2];
};

// Coordinates of one consumer's score tile: 64 queries × KV_ROWS keys.
struct WarpgroupTile {
    u32 b, h;
    u32 first_query, first_key;
    u32 mask_index;  // as in TileRun
    bool is_full;    // no pair is masked, except keys beyond the end
};

DEVICE WarpgroupTile warpgroup_tile(const Attention& a, u32 b, u32 h, u32 tile, u32 group,
                                    TileEntry entry) {
    WarpgroupTile coord;
    coord.b = b;
    coord.h = h;
    coord.first_query = (tile * CONSUMERS + group) * Q_ROWS;
    coord.first_key = entry.tile * KV_ROWS;
    coord.mask_index = entry.mask_index;
    coord.is_full = entry.mask_index == FULL_TILE && !(a.flags & (HAS_BIAS | HAS_SLOPES));
    return coord;
}

// Returns 64 bits of the tile mask: keys 64·`word` … of one query row. Keys beyond the end are
// masked.
DEVICE u64 warpgroup_mask_row(const Attention& a, const WarpgroupTile& coord, u32 group, u32 row,
                              u32 word) {
    u64 line = ~0ull;
    const u32 row_words = KV_ROWS / 64;
    if (coord.mask_index != FULL_TILE)
        line = reinterpret_cast<const u64*>(a.block_mask.bits)
            [(u64(coord.mask_index) * (CONSUMERS * Q_ROWS) + group * Q_ROWS + row) * row_words +
             word];
    if (planted(MASK_OFF_BY_ONE)) line = line << 1 | 1;
    u32 first = coord.first_key + 64 * word;
    u32 left = a.keys > first ? a.keys - first : 0;
    return left < 64 ? line & ((1ull << left) - 1) : line;
}

// Applies the score epilogue pair by pair. The scores go through scratch, because the loop is not
// unrolled and a register array cannot be indexed at run time; a thread uses only its own elements.
DEVICE void score_epilogue_in_scratch(float (&scores)[S_REGISTERS], VisiblePairs& visible_pairs,
                                      float* scratch, const WarpgroupTile& coord,
                                      const ConsumerLane& at, const Attention& a) {
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e) scratch[e * WARPGROUP + at.thread] = scores[e];
    for (u32 word = 0; word < (S_REGISTERS + 31) / 32; ++word) {
        u32 bits = 0;
        for (u32 bit = 0; bit < 32; ++bit) {
            u32 e = word * 32 + bit, row = at.row_of(e), key = at.column_of(e);
            TileCoord pair_coord;
            pair_coord.b = coord.b;
            pair_coord.h = coord.h;
            pair_coord.first_query = coord.first_query;
            pair_coord.first_key = coord.first_key + key / 64 * 64;
            float score = scratch[e * WARPGROUP + at.thread], derivative;
            bool visible = pair_epilogue(score, derivative,
                                         warpgroup_mask_row(a, coord, at.group, row, key / 64), row,
                                         key % 64, pair_coord, a);
            scratch[e * WARPGROUP + at.thread] = visible ? score : -infinity();
            bits |= u32(visible) << bit;
        }
        visible_pairs.words[word] = bits;
    }
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e) scores[e] = scratch[e * WARPGROUP + at.thread];
}

// Applies dropout to the probabilities, pair by pair; through scratch as above.
DEVICE void apply_dropout(float (&probs)[S_REGISTERS], float* scratch, const WarpgroupTile& coord,
                          const ConsumerLane& at, const Attention& a) {
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e) scratch[e * WARPGROUP + at.thread] = probs[e];
    for (u32 e = 0; e < S_REGISTERS; ++e) {
        u32 i = coord.first_query + at.row_of(e), j = coord.first_key + at.column_of(e);
        float prob = 0;
        if (i < a.queries && j < a.keys)
            prob = scratch[e * WARPGROUP + at.thread] * keep_factor(a, coord.b, coord.h, i, j);
        scratch[e * WARPGROUP + at.thread] = prob;
    }
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e) probs[e] = scratch[e * WARPGROUP + at.thread];
}

// Online softmax of one tile: scores become probabilities, softmax statistics are updated. Masked
// pairs get score −∞ and so probability 0. Row sums are partial: this thread's columns only.
DEVICE void online_softmax(float (&scores)[S_REGISTERS], VisiblePairs& visible_pairs,
                           SoftmaxState& softmax, float* scratch, const WarpgroupTile& coord,
                           const ConsumerLane& at, const Attention& a) {
    // from here on a score is natural · scores[e]
    float natural = float(a.scale);
    if (needs_epilogue(a)) {
        score_epilogue_in_scratch(scores, visible_pairs, scratch, coord, at, a);
        natural = 1;
    } else if (coord.mask_index != FULL_TILE || coord.first_key + KV_ROWS > a.keys) {
        UNROLL for (u32 r = 0; r < 2; ++r)
            UNROLL for (u32 word = 0; word < KV_ROWS / 64; ++word) {
                u64 line =
                    warpgroup_mask_row(a, coord, at.group, at.row + 8 * r, word) >> at.column;
                UNROLL for (u32 n_tile = 0; n_tile < 8; ++n_tile)
                    UNROLL for (u32 c = 0; c < 2; ++c) {
                        u32 e = 4 * (8 * word + n_tile) + 2 * r + c;
                        bool visible = line >> (8 * n_tile + c) & 1;
                        visible_pairs.set(e, visible);
                        if (!visible) scores[e] = -infinity();
                    }
            }
    }
    float unit = natural * LOG2_E;
    UNROLL for (u32 r = 0; r < 2; ++r) {
        float tile_max = -infinity();
        UNROLL for (u32 n_tile = 0; n_tile < KV_ROWS / 8; ++n_tile)
            UNROLL for (u32 c = 0; c < 2; ++c)
                tile_max = max_number(tile_max, scores[4 * n_tile + 2 * r + c]);
        tile_max = max_number(tile_max, shuffle_xor(tile_max, 1));
        tile_max = max_number(tile_max, shuffle_xor(tile_max, 2));
        float before = softmax.max[r], new_max = max_number(before, natural * tile_max);
        // every score so far is −∞: a base of 0 gives probabilities 0 instead of NaN
        float base = new_max == -infinity() ? 0.0f : new_max * LOG2_E;
        softmax.rescale[r] = new_max == before ? 1.0f : exp2_approx((before - new_max) * LOG2_E);
        float sum = 0;
        if (base <= FUSED_LIMIT && base >= -FUSED_LIMIT) {
            UNROLL for (u32 n_tile = 0; n_tile < KV_ROWS / 8; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    float& score = scores[4 * n_tile + 2 * r + c];
                    score = exp2_approx(multiply_add(score, unit, -base));
                    sum += score;
                }
        } else {
            // one product for the maximum and the scores: the difference is 0 at the maximum
            UNROLL for (u32 n_tile = 0; n_tile < KV_ROWS / 8; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    float& score = scores[4 * n_tile + 2 * r + c];
                    score = exp2_approx((natural * score - new_max) * LOG2_E);
                    sum += score;
                }
        }
        softmax.max[r] = new_max;
        softmax.sum[r] = softmax.sum[r] * softmax.rescale[r] + sum;
    }
    if (a.flags & HAS_DROPOUT) apply_dropout(scores, scratch, coord, at, a);
}

// O ← O·e^{m − m'}, unless no maximum of the warp's rows has changed: then all factors are 1. In
// long sequences that is the usual case, and the multiplications are a tenth of a tile's
// instructions.
DEVICE void rescale_o(float (&o)[O_PARTS][O_COLUMNS / 2], const SoftmaxState& softmax) {
    bool changed = softmax.rescale[0] != 1.0f || softmax.rescale[1] != 1.0f;
    if (planted(RESCALED_IF_ALL) ? warp_any(!changed) : !warp_any(changed)) return;
    UNROLL for (u32 part = 0; part < O_PARTS; ++part)
        UNROLL for (u32 e = 0; e < O_COLUMNS / 2; ++e) o[part][e] *= softmax.rescale[e / 2 % 2];
}

// Rounds P to the element type, in the layout of wgmma's A operand in registers.
DEVICE void narrow_p(u32 (&probs)[KV_ROWS / 16][4], const float (&scores)[S_REGISTERS]) {
    UNROLL for (u32 y = 0; y < KV_ROWS / 16; ++y)
        UNROLL for (u32 index = 0; index < 4; ++index)
            probs[y][index] = narrow_pair(scores[8 * y + 2 * index], scores[8 * y + 2 * index + 1]);
}

// Returns, to all threads of the warpgroup, true if an element of the V tile is not finite.
DEVICE bool tile_non_finite(const u16* values, const ConsumerLane& at) {
    const u32 exponent = ANNULUS_DTYPE == 2 ? 0x7f80u : 0x7c00u;
    bool non_finite = false;
    for (u32 index = at.thread; index < KV_TILE / 2; index += WARPGROUP) {
        u32 pair = reinterpret_cast<const u32*>(values)[index];
        non_finite |= (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent;
    }
    return named_barrier_any(WARPGROUP_BARRIER(at.group), WARPGROUP, non_finite);
}

// O += P·V on scalar units, skipping masked pairs, for V tiles with non-finite elements: with wgmma
// a masked pair would contribute 0 · NaN. Sets P to zero; the main loop then issues its wgmma with
// zero_values instead of V.
DEVICE void pv_nonfinite_fixup(float (&o)[O_PARTS][O_COLUMNS / 2], u32 (&probs)[KV_ROWS / 16][4],
                               const VisiblePairs& visible_pairs, float* scratch,
                               const u16* values, const ConsumerLane& at) {
    u16* shared_p = reinterpret_cast<u16*>(scratch);
    UNROLL for (u32 y = 0; y < KV_ROWS / 16; ++y)
        UNROLL for (u32 index = 0; index < 4; ++index) {
            u32 e = 8 * y + 2 * index;
            u32 to = at.row_of(e) * KV_ROWS + at.column_of(e);
            *reinterpret_cast<u32*>(shared_p + to) =
                mark_masked(probs[y][index], visible_pairs.get(e), visible_pairs.get(e + 1));
            probs[y][index] = 0;
        }
    // a row of P is written and read by the same warp
    warp_barrier();
    for (u32 key = 0; key < KV_ROWS; ++key)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u16 prob = shared_p[(at.row + 8 * r) * KV_ROWS + key];
            if (prob == MASKED) continue;
            UNROLL for (u32 part = 0; part < O_PARTS; ++part)
                UNROLL for (u32 n_tile = 0; n_tile < O_COLUMNS / 8; ++n_tile)
                    UNROLL for (u32 c = 0; c < 2; ++c) {
                        float& sum = o[part][4 * n_tile + 2 * r + c];
                        u16 value = values[swizzled_offset(
                            KV_ROWS, key, part * O_COLUMNS + 8 * n_tile + at.column + c)];
                        sum = multiply_add(widen(prob), widen(value), sum);
                    }
        }
    // the warp has read P: its part of scratch may be overwritten
    warp_barrier();
}

// Returns the V tile of a stage as right operand.
DEVICE ValueOperand v_operand_of(const SharedStorage& memory, const PipelineState& state) {
    u32 panel = planted(WRONG_PANEL) ? KV_PANEL / 2 : KV_PANEL;
    return {mn_major_descriptor(memory.v[state.stage()], panel), KV_PANEL, 16 * PANEL_DIMS};
}

// Consumer warpgroup: attends its 64 query rows to all visible KV tiles.
DEVICE void attend_rows(SharedStorage& memory, const Attention& a, u32 b, u32 h, u32 tile,
                        TileIterator tiles) {
    ConsumerLane at = consumer_lane();
    u16* q_shared = memory.q[at.group];
    float* scratch = memory.scratch[at.group];
    u32 first_query = (tile * CONSUMERS + at.group) * Q_ROWS;
    load_q(q_shared, a.q, b, h, first_query, a.queries, a.head_dim);

    float* acc = reinterpret_cast<float*>(a.acc);
    float o[O_PARTS][O_COLUMNS / 2];
    SoftmaxState softmax;
    UNROLL for (u32 r = 0; r < 2; ++r) {
        u64 i = first_query + at.row + 8 * r;
        bool exists = i < a.queries;
        u64 row_index = (u64(b) * a.q_heads + h) * a.queries + i;
        softmax.max[r] = exists ? reinterpret_cast<const float*>(a.max)[row_index] : -infinity();
        // row sums are partial sums of four lanes: the first lane starts from the stored value
        softmax.sum[r] =
            exists && at.lane % 4 == 0 ? reinterpret_cast<const float*>(a.sum)[row_index] : 0.0f;
        const float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + h) * a.value_dim;
        UNROLL for (u32 part = 0; part < O_PARTS; ++part)
            UNROLL for (u32 n_tile = 0; n_tile < O_COLUMNS / 8; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = part * O_COLUMNS + 8 * n_tile + at.column + c;
                    o[part][4 * n_tile + 2 * r + c] = exists && x < a.value_dim ? line[x] : 0.0f;
                }
    }
    // all of Q is stored and fenced: wgmma may read it
    named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);

    float scores[S_REGISTERS];
    u32 probs[KV_ROWS / 16][4];
    VisiblePairs visible_pairs = {};
    PipelineState k_state = {0};
    u64 q_descriptor = k_major_descriptor(q_shared);
    WarpgroupTile coord = warpgroup_tile(a, b, h, tile, at.group, tiles.entry(a));

    mbarrier_wait(memory.k_full + k_state.stage(), k_state.parity());
    wgmma_fence();
    issue_qk(scores, q_descriptor, k_major_descriptor(memory.k[k_state.stage()]));
    wgmma_wait<0>();
    fence_operand(scores);
    if (at.lane == 0) mbarrier_arrive(memory.k_empty + k_state.stage());
    k_state.advance();
    online_softmax(scores, visible_pairs, softmax, scratch, coord, at, a);
    rescale_o(o, softmax);
    narrow_p(probs, scores);

    for (tiles.next(a); tiles.more(); tiles.next(a)) {
        // V is consumed one tile behind K
        const PipelineState v_state = k_state.before();
        ValueOperand v_operand = v_operand_of(memory, v_state);
        if (!coord.is_full) {
            mbarrier_wait(memory.v_full + v_state.stage(), v_state.parity());
            if (tile_non_finite(memory.v[v_state.stage()], at)) {
                pv_nonfinite_fixup(o, probs, visible_pairs, scratch, memory.v[v_state.stage()],
                                   at);
                v_operand = zero_values(memory);
            }
        }
        coord = warpgroup_tile(a, b, h, tile, at.group, tiles.entry(a));
        mbarrier_wait(memory.k_full + k_state.stage(), k_state.parity());
        named_barrier(SCHEDULER_BARRIER(at.group), CONSUMERS * WARPGROUP);
        if (planted(EARLY_RELEASE) && at.lane == 0)
            mbarrier_arrive(memory.v_empty + v_state.stage());
        if (!planted(NO_WGMMA_FENCE)) wgmma_fence();
        issue_qk(scores, q_descriptor, k_major_descriptor(memory.k[k_state.stage()]));
        if (!planted(NO_FULL_WAIT))
            mbarrier_wait(memory.v_full + v_state.stage(), v_state.parity());
        if (!planted(NO_WGMMA_FENCE)) wgmma_fence();
        issue_pv(o, probs, v_operand);
        // after the last tile there is no turn to pass on: an arrival would be left at the barrier
        bool is_last_turn = at.group == 1 && tiles.is_last(a);
        if (!is_last_turn && !planted(NO_SCHEDULER_ARRIVE))
            named_arrive(SCHEDULER_BARRIER(at.group ^ 1), CONSUMERS * WARPGROUP);
        if (!planted(NO_WGMMA_WAIT)) wgmma_wait<1>();
        fence_operand(scores);
        if (!planted(STAGE_NOT_RELEASED) && at.lane == 0)
            mbarrier_arrive(memory.k_empty + k_state.stage());
        online_softmax(scores, visible_pairs, softmax, scratch, coord, at, a);
        if (planted(RESCALED_IN_FLIGHT)) rescale_o(o, softmax);
        if (planted(P_IN_FLIGHT)) narrow_p(probs, scores);
        wgmma_wait<0>();
        UNROLL for (u32 part = 0; part < O_PARTS; ++part) fence_operand(o[part]);
        // P·V has read P until here. Pinning S as well ties narrow_p, which reads it, to the wait.
        if (!planted(NO_OPERAND_FENCE)) fence_operand(probs);
        fence_operand(scores);
        if (!planted(EARLY_RELEASE) && at.lane == 0)
            mbarrier_arrive(memory.v_empty + v_state.stage());
        k_state.advance();
        if (!planted(RESCALED_IN_FLIGHT)) rescale_o(o, softmax);
        narrow_p(probs, scores);
    }

    const PipelineState v_state = k_state.before();
    mbarrier_wait(memory.v_full + v_state.stage(), v_state.parity());
    ValueOperand v_operand = v_operand_of(memory, v_state);
    if (!coord.is_full && tile_non_finite(memory.v[v_state.stage()], at)) {
        pv_nonfinite_fixup(o, probs, visible_pairs, scratch, memory.v[v_state.stage()], at);
        v_operand = zero_values(memory);
    }
    wgmma_fence();
    issue_pv(o, probs, v_operand);
    wgmma_wait<0>();
    UNROLL for (u32 part = 0; part < O_PARTS; ++part) fence_operand(o[part]);

    UNROLL for (u32 r = 0; r < 2; ++r) {
        float sum = softmax.sum[r];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        u64 i = first_query + at.row + 8 * r;
        if (i >= a.queries) continue;
        if (at.lane % 4 == 0) {
            u64 row_index = (u64(b) * a.q_heads + h) * a.queries + i;
            reinterpret_cast<float*>(a.max)[row_index] = softmax.max[r];
            reinterpret_cast<float*>(a.sum)[row_index] = sum;
        }
        float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + h) * a.value_dim;
        UNROLL for (u32 part = 0; part < O_PARTS; ++part)
            UNROLL for (u32 n_tile = 0; n_tile < O_COLUMNS / 8; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = part * O_COLUMNS + 8 * n_tile + at.column + c;
                    if (x < a.value_dim) line[x] = o[part][4 * n_tile + 2 * r + c];
                }
    }
}

// Grid: tiles of 128 queries × query heads × batch rows. Tiles run in reverse order: under a causal
// mask the last ones have the most visible keys.
KERNEL(forward_warpgroup, WarpgroupAttention) {
    const Attention& all = a.attention;
    u32 tile = all.block_mask.tiles - 1 - block_x(), h = block_y(), b = block_z();
    TileIterator tiles;
    tiles.begin(all, b, h, tile);
    if (!tiles.more()) return;
    SharedStorage& memory = *reinterpret_cast<SharedStorage*>(dynamic_shared());

    // consumers release a stage once per warp
    if (thread_index() == 0) init_pipeline(memory, CONSUMERS * WARPGROUP / 32);
    if (thread_index() < WARPGROUP) clear_zeros(memory);
    barrier();
    if (thread_index() < WARPGROUP) {
        setmaxnreg_dec<24>();
        if (thread_index() == 0) {
            u32 kv_head = h / (all.q_heads / all.kv_heads);
            PipelineState state = {0};
            for (; tiles.more(); tiles.next(all), state.advance()) {
                u32 row = tiles.entry(all).tile * KV_ROWS;
                tma_load(memory.k[0], a.k_map, memory.k_full, memory.k_empty, state, row, kv_head,
                         b);
                tma_load(memory.v[0], a.v_map, memory.v_full, memory.v_empty, state, row, kv_head,
                         b);
            }
        }
    } else {
        setmaxnreg_inc<240>();
        // the first turn belongs to the first consumer
        if (thread_index() >= 2 * WARPGROUP && !tiles.is_last(all))
            named_arrive(SCHEDULER_BARRIER(0), CONSUMERS * WARPGROUP);
        attend_rows(memory, all, b, h, tile, tiles);
    }
}
