// Backward on warpgroups, compute capability 9.0 only: storage, pipeline and GEMMs of the kernels
// for dQ and for dK and dV.
//
// A block owns 128 rows of one side, 64 for each of two consumer warpgroups, and streams tiles of
// the other side. Both operands of its own rows stay in shared memory:
//
//                          own rows    streamed        products
//   dQ pass                Q, dO       K, V            S = Q·Kᵀ     dP = dO·Vᵀ    dQ += dX·K
//   dK/dV pass             K, V        Q, dO           Sᵀ = K·Qᵀ    dPᵀ = V·dOᵀ   dV += Pᵀ·dO
//                                                                                 dK += dXᵀ·Q
//
//   producer (warpgroup 0):
//       for each visible tile:  wait for an empty stage, issue the TMA loads of both operands
//   consumers (warpgroups 1, 2):
//       issue S of the first tile
//       for each visible tile:
//           issue dP;      P ← e^{S − max} / sum      (overlaps dP)
//           dK/dV pass: issue dV += Pᵀ·dO
//           wait for dP;   dX ← P·(dP − delta)        (overlaps dV)
//           issue dQ += dX·K, or dK += dXᵀ·Q;  issue S of the next tile
//           wait for all of them; release the stage
//
// Each pass has two instantiations: with `epilogue` every pair has its own score epilogue (bias,
// soft cap, dropout, rounding), without it a full tile has no code per pair but that of the lines
// above. With the epilogue the dQ pass streams 64 keys at a time, because it needs more registers.
//
// The accumulator layout of S is that of wgmma's left operand in registers, so P and dX are never
// written to shared memory. Every product reads its right operand there, but only those of S and dP
// also the left one. The dK/dV pass computes Sᵀ, of which a thread has two keys (rows) and 16
// queries (columns).
//
// One block owns an accumulator tile and adds in a fixed order: no atomics, bitwise reproducible.
//
// Shared memory of one block (BackwardStorage), bytes at 64 / 128 dims:
//
//   own         2 × 128 rows × dims × 2                    32 K /  64 K
//   streamed    2 × 2 stages × 128 rows × dims × 2, or
//               2 × 4 stages × 64 rows × dims × 2          64 K / 128 K
//   statistics  2 stages × 128 rows × 12                    3 K
//   mbarriers   2 × stages × 8                             32 or 64
//
// Registers of a consumer thread, of 240, at 128 dims: dQ 64, S 64, dP 64, dX 32; or dK 64, dV 64,
// S 32, dP 32, P 16, dX 16. At 256 dims dK and dV alone would take 256.
//
// Named barriers: 0 whole block, 3 and 4 WARPGROUP_BARRIER, 5 CONSUMER_BARRIER. A phase of the
// mbarrier `full` of a stage completes with the producer's arrival and the bytes of both operands
// and of the statistics, one of `empty` with an arrival of each warp of the consumers, which have
// read the stage.
//
// Source: Shah et al. 2024 (FlashAttention-3), section 3; Dao 2023 (FlashAttention-2), algorithm 2.
#pragma once

#include "warpgroup.cuh"
#include "backward_pair.cuh"
#include "tile.cuh"

#if ANNULUS_DTYPE < 2 || ANNULUS_DIM < 64 || ANNULUS_DIM > 128
#error "backward on warpgroups: 16-bit elements, 64 or 128 dims"
#endif

#define BACKWARD_CONSUMERS CONSUMERS
// Own rows of a consumer, and of a block: the M of a wgmma instruction, and the tile of the block
// mask on either side.
#define OWN_ROWS 64
#define BACKWARD_TILE (BACKWARD_CONSUMERS * OWN_ROWS)
#define OWN_PANEL (OWN_ROWS * PANEL_DIMS)
#define OWN_ELEMENTS (OWN_ROWS * ANNULUS_DIM)
// Accumulators of a thread: 64 rows × dims over 128 threads.
#define ACC_REGISTERS (ANNULUS_DIM / 2)

// QueryStatistics of 64 queries.
struct StatisticsTile {
    float exponent[64], delta[64], base[64];
};
static_assert(sizeof(StatisticsTile) == 768, "as in src/backward_warpgroup.rs");

// Argument of the backward kernels: mirrored in src/arguments.rs. The maps are those of K and V, or
// of Q and dO.
struct BackwardAttention {
    TensorMap first_map, second_map;
    Attention attention;
    // StatisticsTile [batch, q_heads, statistics_tiles]; rows beyond the end are 0
    u64 statistics;
    u32 statistics_tiles;
    u32 section;  // heads in a section of own tiles (own_tile_of)
};
static_assert(sizeof(BackwardAttention) == 1024, "as in src/arguments.rs");

// A tile of own rows: of a query head in the dQ pass, else of a KV head.
struct OwnTile {
    u32 b, head, tile;
};

// Returns own tile `number` of the launch; `heads` are those of a batch row. Tiles are numbered
// tile by tile of a section of heads, whose streamed rows fit half of the L2 cache: blocks that run
// at the same time stream the same rows, and under a causal mask the last ones of a launch have
// the shortest lists. The last section also has the heads that are left (forward_scheduler.cuh).
DEVICE OwnTile own_tile_of(const BackwardAttention& a, u32 number, u32 heads) {
    const u32 lists = a.attention.block_mask.lists, all_heads = heads * a.attention.batches;
    const u32 last = all_heads / a.section - 1, any = number / (lists * a.section);
    const u32 first_head = (any < last ? any : last) * a.section;
    const u32 in_section = number - first_head * lists;
    const u32 in_row = any < last ? a.section : all_heads - first_head;
    const u32 tile = in_section / in_row, head = first_head + (in_section - tile * in_row);
    return {head / heads, head % heads, tile};
}

DEVICE StatisticsTile* statistics_of_head(const BackwardAttention& a, u32 b, u32 h) {
    return reinterpret_cast<StatisticsTile*>(a.statistics) +
           (u64(b) * a.attention.q_heads + h) * a.statistics_tiles;
}

// Dynamic shared memory of a block; `Variant::dynamic_shared_bytes` (src/variant.rs) has its size.
template <u32 tile_rows, u32 stage_count>
struct BackwardStorage {
    static constexpr u32 rows = tile_rows, stages = stage_count;
    static constexpr u32 elements = rows * ANNULUS_DIM, panel = rows * PANEL_DIMS;
    // elements of a score tile of one thread: 64 × rows over 128 threads
    static constexpr u32 pairs = rows / 2;

    u16 own[2][BACKWARD_CONSUMERS][OWN_ELEMENTS];
    u16 streamed[2][stages][elements];
    // of streamed queries
    StatisticsTile statistics[stages][rows / 64];
    Mbarrier full[stages], empty[stages];

    static_assert(OWN_ELEMENTS * 2 % SWIZZLE_ATOM_BYTES == 0 &&
                      elements * 2 % SWIZZLE_ATOM_BYTES == 0,
                  "operands of wgmma are aligned to the period of the swizzle");
    static_assert((stages & (stages - 1)) == 0, "stage and parity are bits of the tile's number");
};
typedef BackwardStorage<128, 2> WideStorage;
typedef BackwardStorage<64, 4> NarrowStorage;
static_assert(sizeof(WideStorage) <= 227 * 1024 && sizeof(NarrowStorage) <= 227 * 1024,
              "shared memory of a block");

// dQ, S, dP, dX; dK, dV, S, dP, P, dX: the others of a thread have the remaining 16
static_assert(ACC_REGISTERS + WideStorage::pairs * 5 / 2 <= CONSUMER_REGISTERS - 16 &&
                  2 * ACC_REGISTERS + NarrowStorage::pairs * 3 <= CONSUMER_REGISTERS - 16,
              "registers of a consumer");

// As PipelineState, for any number of stages.
template <u32 stages>
struct StageCursor {
    u32 tile;

    METHOD u32 stage() const { return tile % stages; }
    METHOD u32 parity() const { return tile / stages % 2; }
};

// Iterates over the visible tiles of the streamed side, `rows` rows at a time. Parts beyond the
// last row are skipped.
template <u32 rows>
struct StreamedTiles {
    HeadTileIterator tiles;
    u32 part;

    METHOD void begin(const Attention& a, u32 b, u32 tile, u32 first_head, u32 end_head) {
        tiles.begin(a, b, tile, first_head, end_head);
        part = 0;
    }
    METHOD bool more() const { return tiles.more(); }
    METHOD u32 first_row(const Attention& a) const {
        return tiles.entry(a).tile * BACKWARD_TILE + part * rows;
    }
    METHOD void next(const Attention& a, u32 end_row) {
        if (rows < BACKWARD_TILE && part + 1 < BACKWARD_TILE / rows &&
            first_row(a) + rows < end_row) {
            ++part;
            return;
        }
        part = 0;
        tiles.next(a);
    }
};

// One score tile of a consumer.
struct BackwardTile {
    u32 b, h, first_query, first_key;
    u32 mask_index;          // as in TileRun
    u32 mask_row, mask_word;  // of the first query and key: rows and words of 64 keys
    bool is_full;            // no pair is masked, except rows beyond the ends
};

DEVICE bool is_full_tile(const Attention& a, u32 mask_index) {
    return mask_index == FULL_TILE && !(a.flags & (HAS_BIAS | HAS_SLOPES));
}

// Returns the tile mask of one query: 64 bits of keys from the tile's key 64·`word` on. Keys beyond
// the end are masked.
DEVICE u64 backward_mask_row(const Attention& a, const BackwardTile& coord, u32 query, u32 word) {
    u64 line = ~0ull;
    if (coord.mask_index != FULL_TILE)
        line = reinterpret_cast<const u64*>(
            a.block_mask.bits)[(u64(coord.mask_index) * BACKWARD_TILE + coord.mask_row + query) *
                                   (BACKWARD_TILE / 64) +
                               coord.mask_word + word];
    u32 first = coord.first_key + 64 * word, left = a.keys > first ? a.keys - first : 0;
    return left < 64 ? line & ((1ull << left) - 1) : line;
}

DEVICE TileCoord pair_coord(const BackwardTile& coord, u32 word) {
    TileCoord pairs;
    pairs.b = coord.b;
    pairs.h = coord.h;
    pairs.first_query = coord.first_query;
    pairs.first_key = coord.first_key + 64 * word;
    return pairs;
}

// Initializes the mbarriers, and waits for all threads of the block.
template <typename Storage>
DEVICE void begin_backward_storage(Storage& memory) {
    if (thread_index() == 0) {
        for (u32 stage = 0; stage < Storage::stages; ++stage) {
            mbarrier_init(memory.full + stage, 1);
            // consumers release a stage once per warp
            mbarrier_init(memory.empty + stage, BACKWARD_CONSUMERS * WARPGROUP / 32);
        }
        fence_mbarrier_init();
    }
    barrier();
}

// Producer: waits until all consumers have released a stage.
template <typename Storage>
DEVICE void producer_acquire(Storage& memory, const StageCursor<Storage::stages>& at) {
    mbarrier_wait(memory.empty + at.stage(), at.parity() ^ 1);
}

// Producer: issues the loads of a tile of both operands to an empty stage, a box per panel, and
// unless null those of its row statistics.
template <typename Storage>
DEVICE void load_tile(Storage& memory, const BackwardAttention& arguments,
                      const StageCursor<Storage::stages>& at, u32 row, u32 head, u32 batch,
                      const StatisticsTile* statistics) {
    const u32 stage = at.stage(), operand_bytes = Storage::elements * 2;
    u32 bytes = 2 * operand_bytes;
    if (statistics) bytes += sizeof memory.statistics[0];
    mbarrier_arrive_expect_tx(memory.full + stage, bytes);
    for (u32 operand = 0; operand < 2; ++operand)
        for (u32 panel = 0; panel < PANELS; ++panel)
            tma_load_box(memory.streamed[operand][stage] + panel * Storage::panel,
                         operand == 0 ? arguments.first_map : arguments.second_map,
                         memory.full + stage, panel * 64, row, head, batch);
    if (statistics)
        bulk_load(memory.statistics[stage], statistics, sizeof memory.statistics[0],
                  memory.full + stage);
}

// Consumer: waits until the loads of a stage are complete.
template <typename Storage>
DEVICE void consumer_wait(Storage& memory, const StageCursor<Storage::stages>& at) {
    mbarrier_wait(memory.full + at.stage(), at.parity());
}

// Statistics of the queries of a stage.
template <typename Storage>
DEVICE const StatisticsTile* statistics_of_stage(const Storage& memory, u32 stage) {
    return memory.statistics[stage];
}

// Consumer: this warp has read a stage.
template <typename Storage>
DEVICE void consumer_release(Storage& memory, u32 stage, const ConsumerLane& at) {
    if (at.lane == 0) mbarrier_arrive(memory.empty + stage);
}

// Loads a consumer's own rows of both operands and waits until wgmma may read them.
template <typename Storage>
DEVICE void load_own_rows(Storage& memory, const Tensor& first, u32 first_dim, const Tensor& second,
                          u32 second_dim, u32 b, u32 head, u32 row, u32 rows,
                          const ConsumerLane& at) {
    static_assert(OWN_ROWS == Q_ROWS, "load_q stores as many rows");
    load_q(memory.own[0][at.group], first, b, head, row, rows, first_dim);
    load_q(memory.own[1][at.group], second, b, head, row, rows, second_dim);
    named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);
}

template <u32 count>
DEVICE void backward_wgmma_ss(float (&acc)[count], u64 left, u64 right, bool add) {
#if ANNULUS_DTYPE == 2
    wgmma_ss_bf16(acc, left, right, add);
#else
    wgmma_ss_f16(acc, left, right, add);
#endif
}

DEVICE void backward_wgmma_rs(float (&acc)[ACC_REGISTERS], const u32 (&left)[4], u64 right) {
#if ANNULUS_DTYPE == 2
    wgmma_rs_bf16(acc, left, right);
#else
    wgmma_rs_f16(acc, left, right);
#endif
}

// Lower half of a matrix descriptor: address and leading byte offset. The upper half is the same
// for all operands here, and no step overflows the address, so that 32 bits suffice.
typedef u32 OperandLow;

DEVICE u64 operand_descriptor(OperandLow operand, u32 elements) {
    const u64 upper = u64(SWIZZLE_ATOM_BYTES >> 4) << 32 | 1ull << 62;
    return upper | u64(operand + (elements * 2 >> 4));
}

// Issues scores (64 × rows) ← own·streamedᵀ as one wgmma group.
template <typename Storage>
DEVICE void issue_nt(float (&scores)[Storage::pairs], OperandLow own, const u16* streamed) {
    OperandLow right = OperandLow(k_major_descriptor(streamed));
    wgmma_fence();
    UNROLL for (u32 x = 0; x < ANNULUS_DIM; x += 16)
        backward_wgmma_ss(scores, operand_descriptor(own, x / 64 * OWN_PANEL + x % 64),
                          operand_descriptor(right, x / 64 * Storage::panel + x % 64), x > 0);
    wgmma_commit();
}

// Waits for all products, of which that of S is the last one.
template <u32 count>
DEVICE void await_s(float (&scores)[count]) {
    wgmma_wait<0>();
    fence_operand(scores);
}

// Issues acc (64 × dims) += left·streamed as one wgmma group.
template <typename Storage>
DEVICE void issue_nn(float (&acc)[ACC_REGISTERS], const u32 (&left)[Storage::rows / 16][4],
                     const u16* streamed) {
    OperandLow right = uniform(OperandLow(mn_major_descriptor(streamed, Storage::panel)));
    wgmma_fence();
    UNROLL for (u32 y = 0; y < Storage::rows / 16; ++y)
        backward_wgmma_rs(acc, left[y], operand_descriptor(right, y * 16 * PANEL_DIMS));
    wgmma_commit();
}

DEVICE void clear_acc(float (&acc)[ACC_REGISTERS]) {
    UNROLL for (u32 e = 0; e < ACC_REGISTERS; ++e) acc[e] = 0;
    // the zeros are written before the first product, not while one is in flight
    fence_operand(acc);
}

// Rounds P or dX to the element type, in the layout of wgmma's A operand in registers.
template <u32 count>
DEVICE void narrow_left(u32 (&left)[count / 8][4], const float (&values)[count]) {
    UNROLL for (u32 y = 0; y < count / 8; ++y)
        UNROLL for (u32 index = 0; index < 4; ++index)
            left[y][index] =
                narrow_pair(values[8 * y + 2 * index], values[8 * y + 2 * index + 1]);
}

// Moves every element forward by `shift`, and the first ones to the end. A loop with a long body is
// not unrolled: it uses the first elements and rotates, because a register array cannot be indexed
// at run time.
template <u32 shift, u32 count>
DEVICE void rotate(float (&values)[count]) {
    float first[shift];
    UNROLL for (u32 e = 0; e < shift; ++e) first[e] = values[e];
    UNROLL for (u32 e = 0; e + shift < count; ++e) values[e] = values[e + shift];
    UNROLL for (u32 e = 0; e < shift; ++e) values[count - shift + e] = first[e];
}

// P of one pair, for any row and 0 for a masked pair.
DEVICE float masked_prob(float product, bool visible, const QueryStatistics& row,
                         const Attention& a) {
    return visible && row.exponent != -infinity() ? prob_of(float(a.scale) * product, row) : 0.0f;
}

// acc += left·streamed of the elements of a tile that are not finite, on scalar units, skipping
// masked pairs: with wgmma these would contribute 0 · NaN. wgmma then multiplies the finite
// elements (zero_streamed), because scalar units would round otherwise: the bits of a row do not
// depend on elements that it masks. `left` is unchanged. The four lanes of a quad have the columns
// of a row of `left` between them and exchange them by shuffles.
template <typename Storage>
DEVICE void nn_nonfinite_fixup(float (&acc)[ACC_REGISTERS], float (&left)[Storage::pairs],
                               u64 visible, const u16* streamed, const ConsumerLane& at) {
    NOT_UNROLLED for (u32 n_tile = 0; n_tile < Storage::rows / 8; ++n_tile) {
        u32 own[2];
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u32 bits = u32(visible >> (4 * n_tile + 2 * r));
            u32 pair = narrow_pair(left[2 * r], left[2 * r + 1]);
            own[r] = mark_masked(pair, bits & 1, bits >> 1 & 1);
        }
        NOT_UNROLLED for (u32 lanes = 0; lanes < 4; ++lanes) {
            u32 pairs[2];
            UNROLL for (u32 r = 0; r < 2; ++r)
                pairs[r] = bits_of(shuffle_xor(float_of(own[r]), lanes));
            NOT_UNROLLED for (u32 c = 0; c < 2; ++c) {
                u32 row = 8 * n_tile + (at.column ^ 2 * lanes) + c;
                float factors[2];
                bool visible_pair[2];
                UNROLL for (u32 r = 0; r < 2; ++r) {
                    u16 factor = u16(pairs[r] >> 16 * c);
                    factors[r] = widen(factor);
                    visible_pair[r] = factor != MASKED;
                }
                UNROLL for (u32 e = 0; e < ACC_REGISTERS; e += 4) {
                    u32 pair = *reinterpret_cast<const u32*>(
                        streamed + swizzled_offset(Storage::rows, row, 2 * e + at.column));
                    if (is_pair_finite(pair)) continue;
                    UNROLL for (u32 r = 0; r < 2; ++r)
                        UNROLL for (u32 x = 0; x < 2; ++x) {
                            u16 value = u16(pair >> 16 * x);
                            if (visible_pair[r] && !is_element_finite(value))
                                acc[e + 2 * r + x] =
                                    multiply_add(factors[r], widen(value), acc[e + 2 * r + x]);
                        }
                }
            }
        }
        rotate<4>(left);
    }
}

// Replaces the elements of streamed operands that are not finite by 0, for the wgmma of all
// consumers. All consumers call it, each of them when no product of its own reads the operands.
template <typename Storage>
DEVICE void zero_streamed(Storage& memory, u32 stage, u32 operands) {
    consumer_barrier();
    NOT_UNROLLED for (u32 operand = 0; operand < operands; ++operand)
        zero_non_finite(memory.streamed[operand][stage], Storage::elements, consumer_thread(),
                        CONSUMERS * WARPGROUP);
    consumer_barrier();
}

// Statistics of all queries as aligned arrays of f32, from the row statistics of this rank or of
// query records, which are only 2-byte aligned. A row beyond the end has zeros: with those that TMA
// loads for its q and dout, P = 1 and dX = 0, which contribute nothing.

// Grid: rows in steps of THREADS × query heads × batch rows.
KERNEL(backward_statistics, BackwardAttention) {
    const Attention& all = a.attention;
    u32 row = block_x() * THREADS + thread_index(), h = block_y(), b = block_z();
    if (row >= a.statistics_tiles * 64) return;
    QueryStatistics own = {};
    if (row < all.queries) {
        const u16* from = reinterpret_cast<const u16*>(offset<u16>(all.statistics, b, row, h, 0));
        own = fused_statistics(load_exact_statistics(from));
    }
    StatisticsTile& to = statistics_of_head(a, b, h)[row / 64];
    to.exponent[row % 64] = own.exponent;
    to.delta[row % 64] = own.delta;
    to.base[row % 64] = own.base;
}
