// Tiles of 16-bit elements on matrix units: what the forward and the backward pass share.
//
// A block of threads owns a tile of rows, queries or keys, and meets tiles of the other side one after another. 8 warps: warp w has own rows
// 16·(w mod 4) … + 15, and of every product one half of the columns:
//
//   products (64 × 64) = own·otherᵀ:         32 other rows a warp, own rows from registers
//   sums (64 × dims) += weights·other:       half of the dims a warp, weights from shared memory
//
// The other side comes through shared memory in stages of 64 rows × 64 dims: three are on their way while one is used, each copied by cp.async.
// A stage's 16-byte chunks change places with the row, so that what ldmatrix reads at once lies in different banks.
//
// Source: Dao 2023 (FlashAttention-2); NVIDIA, PTX ISA, "Matrix fragments for mma.m16n8k16", "cp.async".
#pragma once

#include "tile.cuh"
#include "weights.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Dims of a stage.
#define STAGE 64
#define STAGES (ANNULUS_DIM / STAGE)
#define STAGE_ELEMENTS (TILE * STAGE)
#define SLOTS 4
// 8-column pieces of half a product.
#define PIECES 4
// Own rows stay in registers where there is room; else they are read from memory again and again.
#define RESIDENT (ANNULUS_DIM <= 128)

// Which pass streams, and so which operands in which order: per tile k v; k v k; q dout dout q.
enum Pass { FORWARD = 1, QUERIES = 2, KEYS = 3 };

typedef float Products[PIECES][4];
typedef float MatrixSums[STAGES][PIECES][4];
typedef u32 Fragment[4];

// A thread's place among the products: element e of piece p is row + 8·(e / 2), half·32 + 8·p + column + e mod 2.
struct Lane {
    u32 lane, half, first_row, row, column;
};

DEVICE Lane lane_of_thread() {
    Lane at;
    u32 warp = thread_index() / 32;
    at.lane = thread_index() % 32;
    at.half = warp / 4;
    at.first_row = warp % 4 * 16;
    at.row = at.first_row + at.lane / 4;
    at.column = 2 * (at.lane % 4);
    return at;
}

DEVICE void multiply(float (&sums)[4], const Fragment& left, u32 first, u32 second) {
#if ANNULUS_DTYPE == 2
    multiply_bf16(sums, left, first, second);
#else
    multiply_f16(sums, left, first, second);
#endif
}

// Of a row of 64 elements in shared memory: where element x lies.
DEVICE u32 swizzled(u32 row, u32 x) { return row * STAGE + ((x / 8 ^ row % 8) * 8 | x % 8); }

// One head's rows of one batch row.
struct Operand {
    const u16* at;
    i64 row, step;  // strides
    u32 rows, dim;
    bool aligned;   // 16 bytes at a time
};

DEVICE Operand operand_of(const Tensor& tensor, u32 b, u32 head, u32 rows, u32 dim) {
    Operand operand;
    u64 at = offset<u16>(tensor, b, 0, head, 0);
    operand.at = reinterpret_cast<const u16*>(at);
    operand.row = tensor.row;
    operand.step = tensor.dim;
    operand.rows = rows;
    operand.dim = dim;
    operand.aligned = tensor.dim == 1 && at % 16 == 0 && tensor.row % 8 == 0 && dim % 8 == 0;
    return operand;
}

// Eight elements, one by one: at most `count`, then zeros.
DEVICE_CALL void copy_unaligned(u16* to, const u16* from, i64 step, u32 count) {
    for (u32 c = 0; c < 8; ++c) to[c] = c < count ? from[i64(c) * step] : u16(0);
}

// Begins to read dims `from … from + 63` of rows `first …`, 0 beyond the ends. A thread reads the same places of every stage.
DEVICE void load_stage(u16* to, const Operand& operand, u32 first, u32 from) {
    for (u32 place = thread_index(); place < STAGE_ELEMENTS / 8; place += THREADS) {
        u32 row = place / 8, x = place % 8 * 8;
        u16* there = to + swizzled(row, x);
        bool inside = first + row < operand.rows && from + x < operand.dim;
        const u16* source = operand.at + (inside ? i64(first + row) * operand.row + i64(from + x) * operand.step : 0);
        if (operand.aligned) {
            copy_16(there, source, inside);
        } else {
            copy_unaligned(there, source, operand.step, inside ? operand.dim - (from + x) : 0);
        }
    }
}

// Whether something that this thread has read of a stage is not finite.
DEVICE_CALL bool own_part_is_odd(const u16* stage) {
    const u32 exponent = ANNULUS_DTYPE == 2 ? 0x7f80u : 0x7c00u;
    bool odd = false;
    for (u32 place = thread_index(); place < STAGE_ELEMENTS / 8; place += THREADS) {
        const u32* there = reinterpret_cast<const u32*>(stage + swizzled(place / 8, place % 8 * 8));
        for (u32 c = 0; c < 4; ++c) odd |= (there[c] & exponent) == exponent || (there[c] >> 16 & exponent) == exponent;
    }
    return odd;
}

// The tiles that a block meets: for each of its query heads those that the list of its own tile names.
struct Visits {
    u32 b, tile, h, end;
    Walk walk;

    METHOD void begin(const Attention& a, u32 of_b, u32 of_tile, u32 first_head, u32 end_head) {
        b = of_b;
        tile = of_tile;
        h = first_head;
        end = end_head;
        walk = {0, 0, 0};
        settle(a);
    }
    METHOD void settle(const Attention& a) {
        for (; h < end; ++h) {
            walk.begin(a, b, h, tile);
            if (walk.more()) return;
        }
    }
    METHOD bool more() const { return h < end; }
    METHOD Entry entry(const Attention& a) const { return walk.entry(a); }
    METHOD void next(const Attention& a) {
        walk.next(a);
        if (walk.more()) return;
        ++h;
        settle(a);
    }
};

// How many stages a pass reads of one tile.
template <u32 pass>
DEVICE u32 parts_of(const Attention& a) {
    u32 heads = (a.head_dim + STAGE - 1) / STAGE, values = (a.value_dim + STAGE - 1) / STAGE;
    return heads + values + (pass == KEYS ? values + heads : pass == QUERIES ? heads : 0);
}

// Begins to read part `part` of what a pass needs of one tile: the first two operands in turn, then again what it needs twice. One copy, called: it would
// be inlined a dozen times.
template <u32 pass>
DEVICE_CALL void load_part(u16* to, const Attention& a, u32 b, u32 h, u32 tile, u32 part) {
    u32 heads = (a.head_dim + STAGE - 1) / STAGE, values = (a.value_dim + STAGE - 1) / STAGE;
    bool of_values = part >= heads && part < heads + (pass == KEYS ? 2 : 1) * values;
    u32 stage = of_values ? (part - heads) % values : part >= heads ? part - parts_of<pass>(a) + heads : part;
    u32 kv_head = h / (a.q_heads / a.kv_heads);
    Operand operand = pass == KEYS ? of_values ? operand_of(a.dout, b, h, a.queries, a.value_dim) : operand_of(a.q, b, h, a.queries, a.head_dim)
                      : of_values  ? operand_of(a.v, b, kv_head, a.keys, a.value_dim)
                                   : operand_of(a.k, b, kv_head, a.keys, a.head_dim);
    load_stage(to, operand, tile * TILE, stage * STAGE);
}

// The stages of all tiles that a block meets.
template <u32 pass>
struct Stream {
    u16* slots;
    Visits ahead;
    u32 part, fetched, taken;

    METHOD void begin(const Attention& a, u16* of_slots, const Visits& visits) {
        slots = of_slots;
        ahead = visits;
        part = fetched = taken = 0;
        for (u32 slot = 0; slot + 1 < SLOTS; ++slot) fetch(a);
    }

    // Begins to read the next stage, if there is one. Every call ends a group of copies.
    METHOD void fetch(const Attention& a) {
        if (ahead.more()) {
            load_part<pass>(slots + fetched % SLOTS * STAGE_ELEMENTS, a, ahead.b, ahead.h, ahead.entry(a).tile, part);
            if (++part == parts_of<pass>(a)) {
                part = 0;
                ahead.next(a);
            }
        }
        end_group();
        ++fetched;
    }

    // The next stage, for everybody; what was written before to shared memory is there for everybody, too. `odd`: asked whether something in the stage
    // is not finite, in: to ask; out: the answer.
    METHOD const u16* next(const Attention& a, bool& odd) {
        const u16* stage = slots + taken++ % SLOTS * STAGE_ELEMENTS;
#ifdef PLANTED_LATE_WAIT
        wait_for_groups<SLOTS - 2 + (pass == PLANTED_LATE_WAIT)>();
#else
        wait_for_groups<SLOTS - 2>();
#endif
        bool mine = odd && own_part_is_odd(stage);
#ifdef PLANTED_NO_BARRIER
        odd = pass == PLANTED_NO_BARRIER ? mine : barrier_any(mine);
#else
        odd = barrier_any(mine);
#endif
        // everybody is done with the slot of the stage before
        fetch(a);
        return stage;
    }
};

// Rows of the block's own tile as left fragments; `packed`: pairs of queries and heads.
template <bool packed>
struct OwnRows {
    Operand operand;
    u32 first;  // row, or query
#if RESIDENT
    Fragment held[STAGES * STAGE / 16];
#endif

    // Where a row of the tile begins, in elements; whether it is there.
    METHOD bool find(i64& at, u32 row, const Attention& a) const {
        if (!packed) {
            at = i64(first + row) * operand.row;
            return first + row < operand.rows;
        }
#ifdef PLANTED_PACKED_HEAD
        PackedRow place = packed_row(a, 0, row ^ (a.packed_heads > 1));
#else
        PackedRow place = packed_row(a, 0, row);
#endif
        at = i64(first + place.query) * operand.row + i64(place.h) * a.q.head;
        return place.there && first + place.query < operand.rows;
    }

    METHOD void read(Fragment& to, u32 x, const Lane& lane, const Attention& a) const {
        UNROLL for (u32 r = 0; r < 2; ++r) {
            i64 at;
            bool there = find(at, lane.row + 8 * r, a);
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 from = x + lane.column + 8 * c, pair = 0;
                if (there && from < operand.dim) {
                    const u16* source = operand.at + (at + i64(from) * operand.step);
                    if (operand.aligned) {
                        pair = *reinterpret_cast<const u32*>(source);
                    } else {
                        pair = source[0];
                        if (from + 1 < operand.dim) pair |= u32(source[operand.step]) << 16;
                    }
                }
                to[2 * c + r] = pair;
            }
        }
    }

    METHOD void begin(const Operand& of, u32 first_row, const Lane& lane, const Attention& a) {
        operand = of;
        first = first_row;
        if (packed) operand.aligned &= a.q.head % 8 == 0;
#if RESIDENT
        UNROLL for (u32 x = 0; x < STAGES * STAGE; x += 16) read(held[x / 16], x, lane, a);
#else
        (void)lane;
#endif
    }
};
typedef OwnRows<false> Own;

// products ← own·otherᵀ, the next stages of the stream.
template <u32 pass, bool packed>
DEVICE void multiply_stream(Products& products, const OwnRows<packed>& own, Stream<pass>& stream, u32 dim, const Lane& lane, const Attention& a) {
    UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
        UNROLL for (u32 e = 0; e < 4; ++e) products[piece][e] = 0;
#if RESIDENT
    UNROLL
#endif
    for (u32 stage = 0; stage < STAGES; ++stage) {
        if (stage * STAGE >= dim) break;
        bool odd = false;
        const u16* other = stream.next(a, odd);
        UNROLL for (u32 x = 0; x < STAGE; x += 16) {
#if RESIDENT
            const Fragment& left = own.held[(stage * STAGE + x) / 16];
#else
            Fragment left;
            own.read(left, stage * STAGE + x, lane, a);
#endif
            UNROLL for (u32 piece = 0; piece < PIECES; piece += 2) {
                Fragment right;
                u32 row = lane.half * 32 + piece * 8 + lane.lane / 16 * 8 + lane.lane % 8;
                load_matrices_4(right, other + swizzled(row, x + lane.lane / 8 % 2 * 8));
                multiply(products[piece], left, right[0], right[1]);
                multiply(products[piece + 1], left, right[2], right[3]);
            }
        }
    }
}

// sums += weights·other, the next stages of the stream. In a tile that is not plain, hidden pairs are left out one by one where something in `other`
// is not finite: 0 · NaN would be felt.
template <u32 pass>
DEVICE void add_stream(MatrixSums& sums, const u16* weights, Stream<pass>& stream, u32 dim, bool plain, const Lane& lane,
                       const Attention& a) {
    UNROLL for (u32 stage = 0; stage < STAGES; ++stage) {
        if (stage * STAGE >= dim) break;
        bool careful = !plain;
        const u16* other = stream.next(a, careful);
        if (careful) {
            for (u32 y = 0; y < TILE; ++y)
                UNROLL for (u32 r = 0; r < 2; ++r) {
                    u16 weight = weights[swizzled(lane.row + 8 * r, y)];
                    if (weight == HIDDEN) continue;
                    UNROLL for (u32 piece = 0; piece < PIECES; ++piece)
                        UNROLL for (u32 c = 0; c < 2; ++c) {
                            float& sum = sums[stage][piece][2 * r + c];
                            sum = fused(widen(weight), widen(other[swizzled(y, lane.half * 32 + piece * 8 + lane.column + c)]), sum);
                        }
                }
            continue;
        }
        UNROLL for (u32 y = 0; y < TILE; y += 16) {
            Fragment left;
            load_matrices_4(left, weights + swizzled(lane.first_row + lane.lane % 16, y + lane.lane / 16 * 8));
            UNROLL for (u32 piece = 0; piece < PIECES; piece += 2) {
                Fragment right;
                load_transposed_4(right, other + swizzled(y + lane.lane % 16, lane.half * 32 + piece * 8 + lane.lane / 16 * 8));
                multiply(sums[stage][piece], left, right[0], right[1]);
                multiply(sums[stage][piece + 1], left, right[2], right[3]);
            }
        }
    }
}

#endif
