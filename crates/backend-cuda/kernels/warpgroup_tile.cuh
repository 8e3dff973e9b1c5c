// One consumer's score tile of the forward pass, 64 rows × KV_ROWS keys: visible pairs, and the
// iteration over the tiles of a list.
#pragma once

#include "forward_state.cuh"
#include "warpgroup.cuh"

#if ANNULUS_DTYPE < 2 || ANNULUS_DIM < 64
#error "warpgroups multiply 16-bit elements of at least 64 dims"
#endif

// Elements of S of one thread: 64 × KV_ROWS over 128 threads.
#define S_REGISTERS (KV_ROWS / 2)

// Words of 64 keys of a row of the tile mask; the last one may have fewer keys.
#define MASK_WORDS ((KV_ROWS + 63) / 64)

// Iterates over the visible tiles of one list as TileIterator, with the current run in registers: a
// consumer has enough of them, and each tile then saves up to four loads.
struct RunIterator {
    u32 next_run, end_run;      // the run after the current one, end of the list
    u32 tile, end, mask_index;  // of the current run: current tile, end, mask as in TileRun

    METHOD void begin(const Attention& a, u32 b, u32 h, u32 list) {
        const u32* starts = list_starts(a, b, h);
        next_run = starts[list];
        end_run = starts[list + 1];
        tile = end = mask_index = 0;
        load(a);
    }
    METHOD void load(const Attention& a) {
        if (next_run == end_run) return;
        const TileRun& run = tile_run(a, next_run++);
        tile = run.first;
        end = run.first + run.count;
        mask_index = run.mask_index;
    }
    METHOD bool more() const { return tile < end; }
    METHOD TileEntry entry() const { return {tile, mask_index}; }
    // True for the last tile of the list.
    METHOD bool is_last() const { return tile + 1 == end && next_run == end_run; }
    METHOD void next(const Attention& a) {
        if (++tile == end) load(a);
    }
};

// Visibility of a thread's pairs, one bit each.
struct VisiblePairs {
    u32 words[(S_REGISTERS + 31) / 32];

    METHOD void set(u32 e, bool visible) {
        words[e / 32] = (words[e / 32] & ~(1u << e % 32)) | u32(visible) << e % 32;
    }
    METHOD bool get(u32 e) const { return words[e / 32] >> e % 32 & 1; }
};

// Queries of a tile of TILE_ROWS rows, which are (query, head) pairs under GQA packing.
DEVICE u32 queries_per_tile(const Attention& a) { return packed_queries<TILE_ROWS>(a); }

// Query, counted from the tile's first, and head of a row of consumer `group`.
DEVICE PackedRow consumer_row(const Attention& a, u32 first_head, u32 group, u32 row) {
    return packed_row<TILE_ROWS>(a, first_head, group * Q_ROWS + row);
}

// Coordinates of one score tile of a block: TILE_ROWS rows × KV_ROWS keys.
struct WarpgroupTile {
    u32 b, first_head;
    u32 first_query, first_key;
    u32 mask_index;  // as in TileRun
    bool is_full;    // no pair is masked, except keys beyond the end
};

DEVICE WarpgroupTile warpgroup_tile(const Attention& a, u32 b, u32 first_head, u32 tile,
                                    TileEntry entry) {
    WarpgroupTile coord;
    coord.b = b;
    coord.first_head = first_head;
    coord.first_query = tile * queries_per_tile(a);
    coord.first_key = entry.tile * KV_ROWS;
    coord.mask_index = entry.mask_index;
    coord.is_full = entry.mask_index == FULL_TILE && !(a.flags & (HAS_BIAS | HAS_SLOPES));
    return coord;
}

// Returns 64 bits of the tile mask: keys 64·`word` … of one row of consumer `group`. Keys beyond
// the end are masked.
DEVICE u64 warpgroup_mask_row(const Attention& a, const WarpgroupTile& coord, u32 group, u32 row,
                              u32 word) {
    u64 line = ~0ull;
    if (coord.mask_index != FULL_TILE) {
        const PackedRow at = consumer_row(a, coord.first_head, group, row);
        const u64 first_row = u64(coord.mask_index) * queries_per_tile(a);
        line = at.exists ? reinterpret_cast<const u64*>(
                               a.block_mask.bits)[(first_row + at.query) * MASK_WORDS + word]
                         : 0;
    }
    u32 first = coord.first_key + 64 * word;
    u32 left = a.keys > first ? a.keys - first : 0;
    return left < 64 ? line & ((1ull << left) - 1) : line;
}

// Score epilogue and dropout on warpgroups, in registers.
//
//   x = scale·round(⟨q, k⟩) + bias     (bias before the cap, if so ordered)
//   s = cap·tanh(x / cap) + bias       (else after it)
//
// A register array cannot be indexed at run time, so that loops over the scores of a thread are
// unrolled, each under the flag of its feature.

// Adds the bias and applies the soft cap, in the order of the spec, as pair_epilogue does for one
// pair. Bits of pairs with a bias of −∞ are cleared.
DEVICE void bias_and_cap(float (&scores)[S_REGISTERS], VisiblePairs& visible_pairs,
                         const WarpgroupTile& coord, const ConsumerLane& at, const Attention& a) {
    const u32 bias_pass = a.flags & BIAS_BEFORE_CAP ? 0 : 1;
    // not unrolled, because its bodies are unrolled over the scores of a thread
    NOT_UNROLLED for (u32 pass = 0; pass < 2; ++pass) {
        if ((a.flags & (HAS_BIAS | HAS_SLOPES)) && pass == bias_pass)
            UNROLL for (u32 e = 0; e < S_REGISTERS; ++e) {
                if (!visible_pairs.get(e)) continue;
                const PackedRow row =
                    consumer_row(a, coord.first_head, at.group, at.row_of(e));
                float bias = bias_of(a, coord.b, row.h, coord.first_query + row.query,
                                     coord.first_key + at.column_of(e));
                // a bias of −∞ masks the pair
                if (bias == -infinity()) visible_pairs.set(e, false);
                scores[e] += bias;
            }
        if (pass == 0 && (a.flags & HAS_CAP)) {
            const float inverse = 1.0f / float(a.cap);
            UNROLL for (u32 e = 0; e < S_REGISTERS; ++e)
                scores[e] = float(a.cap) * tanh_approx(scores[e] * inverse);
        }
    }
}

// Score epilogue of a tile: products become scores, −∞ where masked.
DEVICE void score_epilogue_in_registers(float (&scores)[S_REGISTERS], VisiblePairs& visible_pairs,
                                        const WarpgroupTile& coord, const ConsumerLane& at,
                                        const Attention& a) {
    UNROLL for (u32 r = 0; r < 2; ++r)
        UNROLL for (u32 word = 0; word < MASK_WORDS; ++word) {
            const u32 row = at.row + 8 * r;
            const PackedRow packed = consumer_row(a, coord.first_head, at.group, row);
            u64 line = packed.exists && coord.first_query + packed.query < a.queries
                           ? warpgroup_mask_row(a, coord, at.group, row, word) >> at.column
                           : 0;
            UNROLL for (u32 n_tile = 0; n_tile < 8; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c)
                    visible_pairs.set(4 * (8 * word + n_tile) + 2 * r + c,
                                      line >> (8 * n_tile + c) & 1);
        }
    if (a.rounding != ROUND_NOT)
        UNROLL for (u32 e = 0; e < S_REGISTERS; ++e)
            scores[e] = rounded_product(scores[e], a.rounding);
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e) scores[e] *= float(a.scale);
    bias_and_cap(scores, visible_pairs, coord, at, a);
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e)
        if (!visible_pairs.get(e)) scores[e] = -infinity();
}

// Applies dropout to the probabilities. The loop is not unrolled, so it collects bits: a register
// array cannot be indexed at run time.
DEVICE void apply_dropout(float (&probs)[S_REGISTERS], const WarpgroupTile& coord,
                          const ConsumerLane& at, const Attention& a) {
    VisiblePairs kept;
    UNROLL for (u32 word = 0; word < (S_REGISTERS + 31) / 32; ++word) {
        u32 bits = 0;
        NOT_UNROLLED for (u32 bit = 0; bit < 32; ++bit) {
            u32 e = word * 32 + bit;
            const PackedRow row = consumer_row(a, coord.first_head, at.group, at.row_of(e));
            u32 i = coord.first_query + row.query, j = coord.first_key + at.column_of(e);
            if (row.exists && i < a.queries && j < a.keys)
                bits |= u32(keep_factor(a, coord.b, row.h, i, j) != 0.0f) << bit;
        }
        kept.words[word] = bits;
    }
    UNROLL for (u32 e = 0; e < S_REGISTERS; ++e)
        probs[e] = kept.get(e) ? probs[e] * float(a.keep_scale) : 0.0f;
}
