// Forward over one block of keys on warpgroups: the algorithm of forward.cuh with wgmma and TMA,
// compute capability 9.0 only.
//
//   for each tile of queries of the block (forward_scheduler.cuh), in both:
//       producer (warpgroup 0):
//           for each visible KV tile:  wait for an empty stage, issue the TMA loads of K and V
//       consumers (the other warpgroups), 64 rows each:
//           S ← Q·K₀ᵀ;  (P, m, ℓ) ← online softmax of S;  O ← O·e^{m₋₁ − m}
//           for each further KV tile j:
//               issue S ← Q·K_jᵀ;  issue O ← O + P·V_{j−1}      (asynchronous, in this order)
//               wait for S;  (P', m', ℓ') ← online softmax of S  (overlaps P·V)
//               wait for O;  O ← O·e^{m − m'};  P ← P'
//           O ← O + P·V of the last KV tile;  write O (forward_outputs.cuh)
//
// S, P and O stay in registers. Scores with an epilogue have an instantiation of their own
// (warpgroup_tile.cuh), so that its code and registers do not slow down the others. Without one
// the scores are never formed: e^{scale·s − m} is one multiply-add and one ex2. The consumers take
// turns to issue wgmma (ping-pong scheduling with named barriers), so that the GEMMs of one overlap
// the softmax of the others. With GQA packing the rows of a tile are (query, head) pairs, as in
// forward_matrix.cuh. Tiles, shared memory, registers and barriers: warpgroup.cuh.
//
// Source: Shah et al. 2024 (FlashAttention-3), algorithms 1 and 2.
#pragma once

#include "forward_outputs.cuh"
#include "warpgroup_tile.cuh"

// Online softmax of one tile: scores become probabilities, softmax statistics are updated. Masked
// pairs get score −∞ and so probability 0. Row sums are partial: this thread's columns only. Maxima
// and sums of even and odd columns are separate chains, which halves their latency.
template <bool with_epilogue>
DEVICE void online_softmax(float (&scores)[S_REGISTERS], VisiblePairs& visible_pairs,
                           SoftmaxState& softmax, const WarpgroupTile& coord,
                           const ConsumerLane& at, const Attention& a) {
    // from here on a score is natural · scores[e]
    float natural = float(a.scale);
    if (with_epilogue) {
        score_epilogue_in_registers(scores, visible_pairs, coord, at, a);
        natural = 1;
    } else if (coord.mask_index != FULL_TILE || coord.first_key + KV_ROWS > a.keys) {
        UNROLL for (u32 r = 0; r < 2; ++r)
            UNROLL for (u32 word = 0; word < MASK_WORDS; ++word) {
                u64 line =
                    warpgroup_mask_row(a, coord, at.group, at.row + 8 * r, word) >> at.column;
                UNROLL for (u32 n_tile = 0; n_tile < 8; ++n_tile)
                    UNROLL for (u32 c = 0; c < 2; ++c) {
                        if (8 * word + n_tile >= KV_ROWS / 8) continue;
                        u32 e = 4 * (8 * word + n_tile) + 2 * r + c;
                        bool visible = line >> (8 * n_tile + c) & 1;
                        visible_pairs.set(e, visible);
                        if (!visible) scores[e] = -infinity();
                    }
            }
    }
    float unit = natural * LOG2_E;
    UNROLL for (u32 r = 0; r < 2; ++r) {
        float column_max[2] = {-infinity(), -infinity()}, column_sum[2] = {0, 0};
        UNROLL for (u32 n_tile = 0; n_tile < KV_ROWS / 8; ++n_tile)
            UNROLL for (u32 c = 0; c < 2; ++c)
                column_max[c] = max_number(column_max[c], scores[4 * n_tile + 2 * r + c]);
        float tile_max = max_number(column_max[0], column_max[1]);
        tile_max = max_number(tile_max, shuffle_xor(tile_max, 1));
        tile_max = max_number(tile_max, shuffle_xor(tile_max, 2));
        float before = softmax.max[r], new_max = max_number(before, natural * tile_max);
        // every score so far is −∞: a base of 0 gives probabilities 0 instead of NaN
        float base = new_max == -infinity() ? 0.0f : new_max * LOG2_E;
        softmax.rescale[r] = new_max == before ? 1.0f : exp2_approx((before - new_max) * LOG2_E);
        if (base <= FUSED_EXPONENT_LIMIT && base >= -FUSED_EXPONENT_LIMIT) {
            UNROLL for (u32 n_tile = 0; n_tile < KV_ROWS / 8; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    float& score = scores[4 * n_tile + 2 * r + c];
                    score = exp2_approx(multiply_add(score, unit, -base));
                    column_sum[c] += score;
                }
        } else {
            // one product for the maximum and the scores: the difference is 0 at the maximum
            UNROLL for (u32 n_tile = 0; n_tile < KV_ROWS / 8; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    float& score = scores[4 * n_tile + 2 * r + c];
                    score = exp2_approx((natural * score - new_max) * LOG2_E);
                    column_sum[c] += score;
                }
        }
        softmax.max[r] = new_max;
        softmax.sum[r] = softmax.sum[r] * softmax.rescale[r] + (column_sum[0] + column_sum[1]);
    }
    if (with_epilogue && (a.flags & HAS_DROPOUT)) apply_dropout(scores, coord, at, a);
}

// O ← O·e^{m − m'}, unless no maximum of the warp's rows has changed: then all factors are 1. In
// long sequences that is the usual case, and the multiplications are a tenth of a tile's
// instructions.
DEVICE void rescale_o(float (&o)[O_PARTS][O_COLUMNS / 2], const SoftmaxState& softmax) {
    bool changed = softmax.rescale[0] != 1.0f || softmax.rescale[1] != 1.0f;
    if (!warp_any(changed)) return;
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
    return named_barrier_any(WARPGROUP_BARRIER(at.group), WARPGROUP,
                             part_non_finite(values, KV_TILE, at));
}

// O += P·V of the elements of one key that are not finite, on scalar units, unless its pair is
// masked: element `c` of the pairs of a thread's two rows.
DEVICE void add_key(float (&o)[O_PARTS][O_COLUMNS / 2], const u32 (&pairs)[2], u32 c,
                    const u16* values, u32 key, const ConsumerLane& at) {
    UNROLL for (u32 r = 0; r < 2; ++r) {
        u16 prob = u16(pairs[r] >> 16 * c);
        if (prob == MASKED) continue;
        UNROLL for (u32 part = 0; part < O_PARTS; ++part)
            UNROLL for (u32 e = 0; e < O_COLUMNS / 4; ++e) {
                // element 4·n_tile + 2·r + column
                u32 n_tile = e / 2, column = e % 2;
                float& sum = o[part][4 * n_tile + 2 * r + column];
                u16 value = values[swizzled_offset(
                    KV_ROWS, key, part * O_COLUMNS + 8 * n_tile + at.column + column)];
                if (!is_element_finite(value))
                    sum = multiply_add(widen(prob), widen(value), sum);
            }
    }
}

// O += P·V of the elements of a V tile that are not finite, on scalar units, skipping masked pairs:
// with wgmma these would contribute 0 · NaN. The four lanes that have the columns of a row of P
// exchange them by shuffles. Then replaces these elements by 0, for the wgmma of all consumers,
// which all call it. The finite elements are left to wgmma, because scalar units would round
// otherwise: the bits of a row do not depend on elements that it masks.
DEVICE void pv_nonfinite_fixup(float (&o)[O_PARTS][O_COLUMNS / 2],
                               const u32 (&probs)[KV_ROWS / 16][4],
                               const VisiblePairs& visible_pairs, u16* values,
                               const ConsumerLane& at) {
    UNROLL for (u32 y = 0; y < KV_ROWS / 16; ++y) {
        u32 own[4];
        UNROLL for (u32 index = 0; index < 4; ++index) {
            u32 e = 8 * y + 2 * index;
            own[index] =
                mark_masked(probs[y][index], visible_pairs.get(e), visible_pairs.get(e + 1));
        }
        // key = 16·y + 8·half + 2·owner + c
        NOT_UNROLLED for (u32 half = 0; half < 2; ++half)
            NOT_UNROLLED for (u32 owner = 0; owner < 4; ++owner) {
                u32 pairs[2];
                UNROLL for (u32 r = 0; r < 2; ++r)
                    pairs[r] = shuffle_xor(half ? own[2 + r] : own[r], at.lane % 4 ^ owner);
                NOT_UNROLLED for (u32 c = 0; c < 2; ++c)
                    add_key(o, pairs, c, values, 16 * y + 8 * half + 2 * owner + c, at);
            }
    }
    // no consumer waits for a turn here that another one passes on later (scheduler_wait)
    consumer_barrier();
    zero_non_finite(values, KV_TILE, consumer_thread(), CONSUMERS * WARPGROUP);
    consumer_barrier();
}

// Copies the rows of a consumer to shared memory as load_q, of a tile of (query, head) pairs.
DEVICE void load_packed_q(u16* to, const Attention& a, const ConsumerTile& part,
                          const ConsumerLane& at) {
    const Tensor& q = a.q;
    const bool aligned = q.dim == 1 && offset<u16>(q, part.b, 0, part.first_head, 0) % 16 == 0 &&
                         q.row % 8 == 0 && q.head % 8 == 0 && a.head_dim % 8 == 0;
    const auto line_of = [&](u32 row) -> const u16* {
        const ConsumerRow own = part.row(a, at.group, row);
        return own.exists
                   ? reinterpret_cast<const u16*>(offset<u16>(q, part.b, own.query, own.h, 0))
                   : nullptr;
    };
    load_rows(to, line_of, q.dim, a.head_dim, aligned);
}

// Consumer warpgroup: attends its 64 rows of a tile to all visible KV tiles. The KV pipeline goes
// on from `k_state`, which becomes its position after the last tile.
template <bool with_epilogue>
DEVICE void attend_rows(SharedStorage& memory, const WarpgroupAttention& all,
                        const ConsumerTile& part, RunIterator tiles, PipelineState& k_state,
                        const ConsumerLane& at) {
    const Attention& a = all.attention;
    u16* q_shared = memory.q[at.group];
    // the first turn belongs to the first consumer
    const bool is_last_consumer = at.group == CONSUMERS - 1;
    const u32 next_consumer = is_last_consumer ? 0 : at.group + 1;
    if (is_last_consumer && !tiles.is_last()) scheduler_arrive(0);
    // all warps have left the tile before, and the TMA store has read its outputs
    if (at.thread == 0) bulk_wait_read<0>();
    named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);
    load_packed_q(q_shared, a, part, at);

    float o[O_PARTS][O_COLUMNS / 2];
    SoftmaxState softmax;
    read_state(o, softmax, a, part, at);
    // all of Q is stored and fenced: wgmma may read it
    named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);

    float scores[S_REGISTERS];
    u32 probs[KV_ROWS / 16][4];
    VisiblePairs visible_pairs = {};
    u64 q_descriptor = k_major_descriptor(q_shared);
    WarpgroupTile coord = warpgroup_tile(a, part.b, part.first_head, part.tile, tiles.entry());

    consumer_wait(memory.k_full, k_state);
    issue_qk(scores, q_descriptor, k_major_descriptor(memory.k[k_state.stage()]));
    wgmma_wait<0>();
    fence_operand(scores);
    consumer_release(memory.k_empty, k_state, at.lane);
    k_state.advance();
    online_softmax<with_epilogue>(scores, visible_pairs, softmax, coord, at, a);
    rescale_o(o, softmax);
    narrow_p(probs, scores);

    for (tiles.next(a); tiles.more(); tiles.next(a)) {
        // V is consumed one tile behind K
        const PipelineState v_state = k_state.before();
        u16* values = memory.v[v_state.stage()];
        if (!coord.is_full) {
            consumer_wait(memory.v_full, v_state);
            // the same for all threads of the consumers
            if (tile_non_finite(values, at))
                pv_nonfinite_fixup(o, probs, visible_pairs, values, at);
        }
        coord = warpgroup_tile(a, part.b, part.first_head, part.tile, tiles.entry());
        consumer_wait(memory.k_full, k_state);
        scheduler_wait(at.group);
        issue_qk(scores, q_descriptor, k_major_descriptor(memory.k[k_state.stage()]));
        consumer_wait(memory.v_full, v_state);
        issue_pv(o, probs, values);
        // after the last tile there is no turn to pass on: an arrival would be left at the barrier
        bool is_last_turn = is_last_consumer && tiles.is_last();
        if (!is_last_turn) scheduler_arrive(next_consumer);
        await_qk(scores);
        consumer_release(memory.k_empty, k_state, at.lane);
        online_softmax<with_epilogue>(scores, visible_pairs, softmax, coord, at, a);
        await_pv(o, probs);
        // the next P is rounded from S: pinning S keeps the compiler from writing P before the wait
        fence_operand(scores);
        consumer_release(memory.v_empty, v_state, at.lane);
        k_state.advance();
        rescale_o(o, softmax);
        narrow_p(probs, scores);
    }

    const PipelineState v_state = k_state.before();
    consumer_wait(memory.v_full, v_state);
    u16* values = memory.v[v_state.stage()];
    if (!coord.is_full && tile_non_finite(values, at))
        pv_nonfinite_fixup(o, probs, visible_pairs, values, at);
    issue_pv(o, probs, values);
    await_pv(o, probs);
    consumer_release(memory.v_empty, v_state, at.lane);
    write_rows(q_shared, o, softmax, all, part, at);
}

// Consumer warpgroup: computes its rows of all tiles of the block.
template <bool with_epilogue>
DEVICE void attend_tiles(SharedStorage& memory, const WarpgroupAttention& a) {
    const Attention& all = a.attention;
    const ConsumerLane at = consumer_lane();
    PipelineState k_state = {0};
    for (PipelineState slot = {0};; slot.advance()) {
        const WorkTile work = receive_work(memory, slot, at.lane);
        if (work.list == NO_TILE) break;
        const ConsumerTile part = consumer_tile(all, work);
        RunIterator tiles;
        tiles.begin(all, work.b, work.first_head, work.list);
        if (tiles.more())
            attend_rows<with_epilogue>(memory, a, part, tiles, k_state, at);
        else if (!keeps_state(all))
            write_rows_without_tiles(all, part, at);
    }
    // shared memory ends with the block
    if (at.thread == 0) bulk_wait_read<0>();
}

// Grid: blocks, of which each computes the tiles that the scheduler assigns to it.
template <bool with_epilogue>
DEVICE void forward_on_warpgroups(const WarpgroupAttention& a) {
    SharedStorage& memory = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    // consumers release a stage once per warp
    if (thread_index() == 0) init_pipeline(memory, CONSUMERS * WARPGROUP / 32);
    barrier();
    if (thread_index() < WARPGROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (thread_index() == 0) load_tiles(memory, a);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        attend_tiles<with_epilogue>(memory, a);
    }
}

#ifdef ANNULUS_EPILOGUE
// For scores with an epilogue, and dropout: see `needs_epilogue` of src/variant.rs.
KERNEL(forward_warpgroup_epilogue, WarpgroupAttention) { forward_on_warpgroups<true>(a); }
#else
// For scores scale·⟨q, k⟩ with a positive scale, which the softmax applies.
KERNEL(forward_warpgroup, WarpgroupAttention) { forward_on_warpgroups<false>(a); }
#endif
