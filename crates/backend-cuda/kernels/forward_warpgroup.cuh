// Forward over one block of keys on warpgroups: what forward_matrix.cuh does, for compute capability 9.0.
//
//   warpgroup 0:       keys and values of one tile after another, by the copy engine
//   warpgroups 1, 2:   S₀ = Q·K₀ᵀ;  P₀ = softmax(S₀)
//                      for each further tile j:  begin S_j = Q·K_jᵀ;  begin O += P_{j−1}·V_{j−1};  softmax of S_j meanwhile;  O = O·e^{m − m'}
//                      O += P·V of the last
//
// S, P and O stay in registers. The two warpgroups take turns to begin products, so that one multiplies while the other is in its softmax.
// Where no feature asks for logits one by one, they are never formed: e^{scale·s − m} is one multiply-add and one power of two.
//
// Source: Shah et al. 2024 (FlashAttention-3), algorithms 1 and 2.
#pragma once

#include "warpgroup.cuh"

#if ANNULUS_DTYPE < 2 || ANNULUS_DIM < 64
#error "warpgroups multiply 16-bit elements of at least 64 dims"
#endif

// Elements of a thread's products, and of one row of sums.
#define PAIRS (OTHERS / 2)
#define LOG2_E 1.44269504088896341f

// A thread's place among the products of its warpgroup: element e of PAIRS is row + 8·(e / 2 mod 2), 8·(e / 4) + column + e mod 2.
struct GroupLane {
    u32 group, thread, lane, row, column;

    METHOD u32 row_of(u32 e) const { return row + 8 * (e / 2 % 2); }
    METHOD u32 column_of(u32 e) const { return 8 * (e / 4) + column + e % 2; }
};

DEVICE GroupLane lane_of_group() {
    GroupLane at;
    at.group = thread_index() / WARPGROUP - 1;
    at.thread = thread_index() % WARPGROUP;
    at.lane = thread_index() % 32;
    at.row = at.thread / 32 * 16 + at.lane / 4;
    at.column = 2 * (at.lane % 4);
    return at;
}

// Which of a thread's pairs are seen, a bit each.
struct Seen {
    u32 words[(PAIRS + 31) / 32];

    METHOD void set(u32 e, bool visible) { words[e / 32] = (words[e / 32] & ~(1u << e % 32)) | u32(visible) << e % 32; }
    METHOD bool get(u32 e) const { return words[e / 32] >> e % 32 & 1; }
};

// What a warpgroup knows of its rows: two of them a thread.
struct RowState {
    float max[2], sum[2], factor[2];
};

// The tile at hand, as a warpgroup sees it.
struct GroupSite {
    u32 b, h;
    u32 first_query, first_key;
    u32 set;     // of bits
    bool plain;  // no pair is hidden, apart from those beyond the ends
};

DEVICE GroupSite group_site(const Attention& a, u32 b, u32 h, u32 tile, u32 group, Entry entry) {
    GroupSite site;
    site.b = b;
    site.h = h;
    site.first_query = (tile * GROUPS + group) * OWN;
    site.first_key = entry.tile * OTHERS;
    site.set = entry.bits;
    site.plain = entry.bits == EVERYTHING && !(a.flags & (HAS_BIAS | HAS_SLOPES));
    return site;
}

// What the mask says of 64 keys, from key 64·`word` of the tile on, as seen by a row of the warpgroup; keys beyond the end are not seen.
DEVICE u64 group_line(const Attention& a, const GroupSite& site, u32 group, u32 row, u32 word) {
    u64 line = ~0ull;
    if (site.set != EVERYTHING)
        line = reinterpret_cast<const u64*>(a.sight.bits)[(u64(site.set) * (GROUPS * OWN) + group * OWN + row) * (OTHERS / 64) + word];
    if (planted(MASK_OFF_BY_ONE)) line = line << 1 | 1;
    u32 first = site.first_key + 64 * word;
    u32 left = a.keys > first ? a.keys - first : 0;
    return left < 64 ? line & ((1ull << left) - 1) : line;
}

// Whether logits are formed one by one: by bias, cap or rounding, or because the largest product need not have the largest logit.
DEVICE bool has_rare_logits(const Attention& a) {
    return (a.flags & (HAS_BIAS | HAS_SLOPES | HAS_CAP)) || a.rounding != ROUND_NOT || !(float(a.scale) > 1e-30f);
}

// Products become logits, one at a time: their places in scratch are this thread's alone.
DEVICE void form_rare_logits(float (&pairs)[PAIRS], Seen& seen, float* scratch, const GroupSite& site, const GroupLane& at,
                             const Attention& a) {
    UNROLL for (u32 e = 0; e < PAIRS; ++e) scratch[e * WARPGROUP + at.thread] = pairs[e];
    for (u32 word = 0; word < (PAIRS + 31) / 32; ++word) {
        u32 bits = 0;
        for (u32 bit = 0; bit < 32; ++bit) {
            u32 e = word * 32 + bit, row = at.row_of(e), key = at.column_of(e);
            Site near;
            near.b = site.b;
            near.h = site.h;
            near.first_query = site.first_query;
            near.first_key = site.first_key + key / 64 * 64;
            float s = scratch[e * WARPGROUP + at.thread], derivative;
            bool visible = logit(s, derivative, group_line(a, site, at.group, row, key / 64), row, key % 64, near, a);
            scratch[e * WARPGROUP + at.thread] = visible ? s : -infinity();
            bits |= u32(visible) << bit;
        }
        seen.words[word] = bits;
    }
    UNROLL for (u32 e = 0; e < PAIRS; ++e) pairs[e] = scratch[e * WARPGROUP + at.thread];
}

// Weights are multiplied by what dropout leaves of them, one at a time.
DEVICE void drop(float (&weights)[PAIRS], float* scratch, const GroupSite& site, const GroupLane& at, const Attention& a) {
    UNROLL for (u32 e = 0; e < PAIRS; ++e) scratch[e * WARPGROUP + at.thread] = weights[e];
    for (u32 e = 0; e < PAIRS; ++e) {
        u32 i = site.first_query + at.row_of(e), j = site.first_key + at.column_of(e);
        float weight = 0;
        if (i < a.queries && j < a.keys) weight = scratch[e * WARPGROUP + at.thread] * kept(a, site.b, site.h, i, j);
        scratch[e * WARPGROUP + at.thread] = weight;
    }
    UNROLL for (u32 e = 0; e < PAIRS; ++e) weights[e] = scratch[e * WARPGROUP + at.thread];
}

// Products become weights; maxima and sums go on. Hidden pairs have logit −∞, weight 0. Sums are those of this thread's pairs alone.
DEVICE void fold(float (&pairs)[PAIRS], Seen& seen, RowState& rows, float* scratch, const GroupSite& site, const GroupLane& at,
                 const Attention& a) {
    // logits are `natural` times what is in `pairs` from here on
    float natural = float(a.scale);
    if (has_rare_logits(a)) {
        form_rare_logits(pairs, seen, scratch, site, at, a);
        natural = 1;
    } else if (site.set != EVERYTHING || site.first_key + OTHERS > a.keys) {
        UNROLL for (u32 r = 0; r < 2; ++r)
            UNROLL for (u32 word = 0; word < OTHERS / 64; ++word) {
                u64 line = group_line(a, site, at.group, at.row + 8 * r, word) >> at.column;
                UNROLL for (u32 piece = 0; piece < 8; ++piece)
                    UNROLL for (u32 c = 0; c < 2; ++c) {
                        u32 e = 4 * (8 * word + piece) + 2 * r + c;
                        bool visible = line >> (8 * piece + c) & 1;
                        seen.set(e, visible);
                        if (!visible) pairs[e] = -infinity();
                    }
            }
    }
    float unit = natural * LOG2_E;
    UNROLL for (u32 r = 0; r < 2; ++r) {
        float most = -infinity();
        UNROLL for (u32 piece = 0; piece < OTHERS / 8; ++piece)
            UNROLL for (u32 c = 0; c < 2; ++c) most = larger_number(most, pairs[4 * piece + 2 * r + c]);
        most = larger_number(most, shuffle_xor(most, 1));
        most = larger_number(most, shuffle_xor(most, 2));
        float before = rows.max[r], next = larger_number(before, natural * most);
        // no logit but −∞ so far: all weights are 0
        float base = next == -infinity() ? 0.0f : next * LOG2_E;
        rows.factor[r] = next == before ? 1.0f : power_of_two(before * LOG2_E - base);
        float sum = 0;
        UNROLL for (u32 piece = 0; piece < OTHERS / 8; ++piece)
            UNROLL for (u32 c = 0; c < 2; ++c) {
                float& pair = pairs[4 * piece + 2 * r + c];
                pair = power_of_two(fused(pair, unit, -base));
                sum += pair;
            }
        rows.max[r] = next;
        rows.sum[r] = rows.sum[r] * rows.factor[r] + sum;
    }
    if (a.flags & HAS_DROPOUT) drop(pairs, scratch, site, at, a);
}

// Sums become those for the maxima that have just changed.
DEVICE void scale_sums(float (&sums)[PRODUCTS][COLUMNS / 2], const RowState& rows) {
    UNROLL for (u32 part = 0; part < PRODUCTS; ++part)
        UNROLL for (u32 e = 0; e < COLUMNS / 2; ++e) sums[part][e] *= rows.factor[e / 2 % 2];
}

// Weights as left operands.
DEVICE void narrow_weights(u32 (&weights)[OTHERS / 16][4], const float (&pairs)[PAIRS]) {
    UNROLL for (u32 y = 0; y < OTHERS / 16; ++y)
        UNROLL for (u32 place = 0; place < 4; ++place) weights[y][place] = narrow_pair(pairs[8 * y + 2 * place], pairs[8 * y + 2 * place + 1]);
}

// Whether something in a tile of values is not finite: the answer of the whole warpgroup.
DEVICE bool is_odd(const u16* values, const GroupLane& at) {
    const u32 exponent = ANNULUS_DTYPE == 2 ? 0x7f80u : 0x7c00u;
    bool odd = false;
    for (u32 place = at.thread; place < OTHER_TILE / 2; place += WARPGROUP) {
        u32 pair = reinterpret_cast<const u32*>(values)[place];
        odd |= (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent;
    }
    return named_barrier_any(OF_GROUP(at.group), WARPGROUP, odd);
}

// sums += weights·values without the hidden pairs, one by one: their 0 · NaN would be felt. What the units are given instead are zeros.
DEVICE Right add_carefully(float (&sums)[PRODUCTS][COLUMNS / 2], u32 (&weights)[OTHERS / 16][4], const Seen& seen, float* scratch,
                           const u16* values, const GroupLane& at) {
    u16* shared_weights = reinterpret_cast<u16*>(scratch);
    u16* zeros = shared_weights + OWN * OTHERS;
    u32 nothing[4] = {0, 0, 0, 0};
    for (u32 place = at.thread; place < 16 * ANNULUS_DIM / 8; place += WARPGROUP) store_for_units(zeros + 8 * place, nothing);
    show_units();
    UNROLL for (u32 y = 0; y < OTHERS / 16; ++y)
        UNROLL for (u32 place = 0; place < 4; ++place) {
            u32 e = 8 * y + 2 * place;
            u32 to = at.row_of(e) * OTHERS + at.column_of(e);
            *reinterpret_cast<u32*>(shared_weights + to) = marked(weights[y][place], seen.get(e), seen.get(e + 1));
            weights[y][place] = 0;
        }
    named_barrier(OF_GROUP(at.group), WARPGROUP);
    for (u32 key = 0; key < OTHERS; ++key)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u16 weight = shared_weights[(at.row + 8 * r) * OTHERS + key];
            if (weight == HIDDEN) continue;
            UNROLL for (u32 part = 0; part < PRODUCTS; ++part)
                UNROLL for (u32 piece = 0; piece < COLUMNS / 8; ++piece)
                    UNROLL for (u32 c = 0; c < 2; ++c) {
                        float& sum = sums[part][4 * piece + 2 * r + c];
                        u16 value = values[place_of(OTHERS, key, part * COLUMNS + 8 * piece + at.column + c)];
                        sum = fused(widen(weight), widen(value), sum);
                    }
        }
    // scratch is free again
    warp_barrier();
    return {summed_rows(zeros, 16 * PANEL_LINE), 16 * PANEL_LINE, 0};
}

// The values of one stage as right operand.
DEVICE Right values_of(const BlockMemory& memory, const Turn& turn) {
    u32 panel = planted(WRONG_PANEL) ? OTHER_PANEL / 2 : OTHER_PANEL;
    return {summed_rows(memory.second[turn.stage], panel), OTHER_PANEL, 16 * PANEL_LINE};
}

// A warpgroup's share of the block: 64 rows.
DEVICE void attend_rows(BlockMemory& memory, const Attention& a, u32 b, u32 h, u32 tile, Walk walk) {
    GroupLane at = lane_of_group();
    u16* own = memory.own[at.group];
    float* scratch = memory.scratch[at.group];
    u32 first_query = (tile * GROUPS + at.group) * OWN;
    read_own(own, a.q, b, h, first_query, a.queries, a.head_dim);

    float* acc = reinterpret_cast<float*>(a.acc);
    float sums[PRODUCTS][COLUMNS / 2];
    RowState rows;
    UNROLL for (u32 r = 0; r < 2; ++r) {
        u64 i = first_query + at.row + 8 * r;
        bool there = i < a.queries;
        u64 line_of_row = (u64(b) * a.q_heads + h) * a.queries + i;
        rows.max[r] = there ? reinterpret_cast<const float*>(a.max)[line_of_row] : -infinity();
        // sums of a row are shared among four lanes: one of them has what was there
        rows.sum[r] = there && at.lane % 4 == 0 ? reinterpret_cast<const float*>(a.sum)[line_of_row] : 0.0f;
        const float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + h) * a.value_dim;
        UNROLL for (u32 part = 0; part < PRODUCTS; ++part)
            UNROLL for (u32 piece = 0; piece < COLUMNS / 8; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = part * COLUMNS + 8 * piece + at.column + c;
                    sums[part][4 * piece + 2 * r + c] = there && x < a.value_dim ? line[x] : 0.0f;
                }
    }
    // the units may read what all of the warpgroup has stored
    named_barrier(OF_GROUP(at.group), WARPGROUP);

    float pairs[PAIRS];
    u32 weights[OTHERS / 16][4];
    Seen seen = {};
    Turn keys = {0, 0}, values = {0, 0};
    u64 queries = rows_of_dims(own);
    GroupSite site = group_site(a, b, h, tile, at.group, walk.entry(a));

    wait_for_phase(memory.first_full + keys.stage, keys.parity);
    begin_products();
    begin_pairs(pairs, queries, rows_of_dims(memory.first[keys.stage]));
    wait_for_products<0>();
    pin(pairs);
    if (at.lane == 0) arrive(memory.first_empty + keys.stage);
    keys.next();
    fold(pairs, seen, rows, scratch, site, at, a);
    scale_sums(sums, rows);
    narrow_weights(weights, pairs);

    for (walk.next(a); walk.more(); walk.next(a)) {
        Right right = values_of(memory, values);
        if (!site.plain) {
            wait_for_phase(memory.second_full + values.stage, values.parity);
            if (is_odd(memory.second[values.stage], at))
                right = add_carefully(sums, weights, seen, scratch, memory.second[values.stage], at);
        }
        site = group_site(a, b, h, tile, at.group, walk.entry(a));
        wait_for_phase(memory.first_full + keys.stage, keys.parity);
        named_barrier(TURN_OF(at.group), GROUPS * WARPGROUP);
        if (planted(EARLY_RELEASE) && at.lane == 0) arrive(memory.second_empty + values.stage);
        if (!planted(NO_PRODUCT_BEGIN)) begin_products();
        begin_pairs(pairs, queries, rows_of_dims(memory.first[keys.stage]));
        if (!planted(NO_FULL_WAIT)) wait_for_phase(memory.second_full + values.stage, values.parity);
        if (!planted(NO_PRODUCT_BEGIN)) begin_products();
        begin_sums(sums, weights, right);
        // nobody is left to wait for the second warpgroup's last turn
        bool last_turn = at.group == 1 && walk.is_last(a);
        if (!last_turn && !planted(NO_TURN)) named_arrive(TURN_OF(at.group ^ 1), GROUPS * WARPGROUP);
        if (!planted(NO_PRODUCT_WAIT)) wait_for_products<1>();
        pin(pairs);
        if (!planted(STAGE_NOT_RELEASED) && at.lane == 0) arrive(memory.first_empty + keys.stage);
        keys.next();
        fold(pairs, seen, rows, scratch, site, at, a);
        if (planted(SCALED_IN_FLIGHT)) scale_sums(sums, rows);
        wait_for_products<0>();
        UNROLL for (u32 part = 0; part < PRODUCTS; ++part) pin(sums[part]);
        if (!planted(EARLY_RELEASE) && at.lane == 0) arrive(memory.second_empty + values.stage);
        values.next();
        if (!planted(SCALED_IN_FLIGHT)) scale_sums(sums, rows);
        narrow_weights(weights, pairs);
    }

    wait_for_phase(memory.second_full + values.stage, values.parity);
    Right right = values_of(memory, values);
    if (!site.plain && is_odd(memory.second[values.stage], at))
        right = add_carefully(sums, weights, seen, scratch, memory.second[values.stage], at);
    begin_products();
    begin_sums(sums, weights, right);
    wait_for_products<0>();
    UNROLL for (u32 part = 0; part < PRODUCTS; ++part) pin(sums[part]);

    UNROLL for (u32 r = 0; r < 2; ++r) {
        float sum = rows.sum[r];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        u64 i = first_query + at.row + 8 * r;
        if (i >= a.queries) continue;
        if (at.lane % 4 == 0) {
            u64 line_of_row = (u64(b) * a.q_heads + h) * a.queries + i;
            reinterpret_cast<float*>(a.max)[line_of_row] = rows.max[r];
            reinterpret_cast<float*>(a.sum)[line_of_row] = sum;
        }
        float* line = acc + ((u64(b) * a.queries + i) * a.q_heads + h) * a.value_dim;
        UNROLL for (u32 part = 0; part < PRODUCTS; ++part)
            UNROLL for (u32 piece = 0; piece < COLUMNS / 8; ++piece)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = part * COLUMNS + 8 * piece + at.column + c;
                    if (x < a.value_dim) line[x] = sums[part][4 * piece + 2 * r + c];
                }
    }
}

// Grid: tiles of 128 queries × query heads × batch rows, the last tiles first: of a causal mask those with the most keys.
KERNEL(forward_warpgroup, WarpgroupAttention) {
    const Attention& all = a.attention;
    u32 tile = all.sight.tiles - 1 - block_x(), h = block_y(), b = block_z();
    Walk walk;
    walk.begin(all, b, h, tile);
    if (!walk.more()) return;
    BlockMemory& memory = *reinterpret_cast<BlockMemory*>(launch_shared());

    // who is done with a stage says so a warp at a time
    if (thread_index() == 0) begin_ring(memory, GROUPS * WARPGROUP / 32);
    barrier();
    if (thread_index() < WARPGROUP) {
        fewer_registers<24>();
        if (thread_index() == 0) {
            u32 kv_head = h / (all.q_heads / all.kv_heads);
            Turn turn = {0, 0};
            for (; walk.more(); walk.next(all), turn.next()) {
                u32 row = walk.entry(all).tile * OTHERS;
                bring(memory.first[0], a.first, memory.first_full, memory.first_empty, turn, row, kv_head, b);
                bring(memory.second[0], a.second, memory.second_full, memory.second_empty, turn, row, kv_head, b);
            }
        }
    } else {
        more_registers<240>();
        // the first turn is that of the first warpgroup
        if (thread_index() >= 2 * WARPGROUP && !walk.is_last(all)) named_arrive(TURN_OF(0), GROUPS * WARPGROUP);
        attend_rows(memory, all, b, h, tile, walk);
    }
}
