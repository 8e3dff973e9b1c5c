// dQ, dK and dV of one block of keys by one kernel of five products, on warpgroups, without score
// epilogue. As in the dK/dV pass of backward_warpgroup.cuh, a thread block owns 128 keys of one KV
// head, 64 for each of two consumer warpgroups, and streams the queries of all query heads of the
// group:
//
//   Sᵀ = K·Qᵀ     dPᵀ = V·dOᵀ     dV += Pᵀ·dO     dK += dXᵀ·Q     dQ += dX·K
//
//   producer (warp 0):
//       for each visible tile:  wait for an empty stage, issue the TMA loads of Q and dO
//   consumers (warpgroups 1, 2):
//       issue S of the first tile
//       for each visible tile:
//           issue dP;      P ← e^{S − max} / sum      (overlaps dP)
//           issue dV += Pᵀ·dO                         (at 64 dims after dX)
//           wait for dP;   dX ← P·(dP − delta);   store dX to shared memory
//           wait for the other consumer's half of dX
//           issue dQ ← dX·K;   issue dK += dXᵀ·Q
//           wait for dQ;   issue S of the next tile
//           wait until the dQ tile in shared memory is free, store dQ  (overlaps dK and S)
//           wait for all products; release the stage
//   dQ writers (warps 1 and 2, in turn):
//       for each visible tile:
//           wait for the dQ tile;  wait for its turn (backward_dq_order.cuh)
//           add the tile to dQ in global memory by bulk operations;  release the tile
//           wait until the additions are complete;  pass the turn on
//
// Waiting for a turn, adding and passing it on are round trips to the L2 cache, one after the
// other. With two writers those of a tile overlap those of the next one, which made the kernel 3 %
// faster on an H200; most of what the turns cost remains (docs/cuda.md).
//
// dX is the only operand that passes through shared memory: dQ needs the keys of both consumers.
// Two buffers of dX make one barrier per tile enough: a consumer that writes buffer 0 again has
// passed the barrier of buffer 1, before which the other one has waited for its product of buffer
// 0.
//
// A dQ product has 64 queries × 64 dims. At 64 dims a tile is 128 queries, of which each consumer
// computes 64; at 128 dims it is 64 queries, of which each computes half of the dims.
//
// Shared memory of one block (FusedStorage), bytes at 64 / 128 dims:
//
//   own         2 × 128 rows × dims × 2                    32 K /  64 K
//   streamed    2 × 2 stages × rows × dims × 2             64 K /  64 K   (rows: 128 / 64)
//   dx          2 × 128 keys × rows × 2                    64 K /  32 K
//   dq          rows × (dims + 8) × 4                      36 K /  34 K
//   statistics  2 stages × rows × 12                        3 K / 1.5 K
//   StreamedTile 2 × 16; DqTile 4 × 16; mbarriers 7 × 8    152
//   ticket, tile                                            8
//
// Registers of a consumer thread, of 240, at 128 dims: dK 64, dV 64, P in f32 or S 32, dP or dQ 32,
// P 16, dX 16; at 64 dims: dK 32, dV 32, P in f32 64, dP 64, later in their place S 64, dQ 32,
// P 32, dX 32. What can be read or computed again is not kept: positions of a thread (lane_again),
// and tiles, which the producer writes to shared memory for the consumers.
//
// Named barriers: 0 whole block, 3 and 4 WARPGROUP_BARRIER, 5 CONSUMER_BARRIER. A phase of the
// mbarrier `dq_full` of a dQ writer completes with an arrival of each warp of the consumers, which
// have stored their parts of a dQ tile for it, or have no further tile; one of `dq_empty` with that
// of the dQ writer whose bulk operations have read the tile.
//
// Source: Shah et al. 2024 (FlashAttention-3), section 3 and appendix B.
#pragma once

#include "backward_key_rows.cuh"
#include "backward_dq_order.cuh"

// Queries of a tile.
#define FUSED_ROWS (ANNULUS_DIM == 64 ? 128 : 64)
// True if dV is issued before dX is computed, which then overlaps it. At 64 dims it is issued
// after: P in f32, dP, and P as an operand would together take more registers than there are.
#define DV_BEFORE_DX (ANNULUS_DIM > 64)
// Columns of a dQ product.
#define DQ_COLUMNS 64
// Distance of the rows of the dQ tile: a multiple of 16 bytes, as bulk operations need, and 8 words
// more than a multiple of 32, so that the rows of a store lie in as many banks as possible.
#define DQ_PITCH (ANNULUS_DIM + 8)

typedef BackwardStorage<FUSED_ROWS, 2> FusedTiles;

// Tile of queries in a stage, for the consumers: iterating would take registers.
struct alignas(16) StreamedTile {
    u32 h, first_query;
    u32 mask_index;  // as in TileRun
    u32 is_last;
};

// Warps that write dQ, from warp 1 on: tile `number` of a block is that of number % DQ_WRITERS.
#define DQ_WRITERS 2

// Tile of dQ, for its writer.
struct alignas(16) DqTile {
    u32 h, first_query;
    u32 number;  // of the block's tiles
    u32 is_last;
};
// Entries for tiles of dQ, which the producer writes together with the loads of a tile. It then has
// an empty stage, so that the consumers have stored dQ of the tile two before; for that they waited
// until the writer of the tile three before had read its entry.
#define DQ_TILES 4

// Dynamic shared memory of a block; `Variant::dynamic_shared_bytes` (src/variant.rs) has its size.
struct FusedStorage {
    // dXᵀ, keys × queries, in panels of 64 queries: two buffers
    u16 dx[2][BACKWARD_TILE * FUSED_ROWS];
    FusedTiles tiles;
    alignas(16) float dq[FUSED_ROWS * DQ_PITCH];
    StreamedTile streamed[FusedTiles::stages];
    DqTile dq_tiles[DQ_TILES];
    Mbarrier dq_full[DQ_WRITERS], dq_empty;
    u32 ticket, tile;
};
static_assert(sizeof(FusedStorage) <= 227 * 1024, "shared memory of a block");
static_assert(BACKWARD_TILE * PANEL_DIMS * 2 % SWIZZLE_ATOM_BYTES == 0 &&
                  sizeof(FusedStorage::dx) % SWIZZLE_ATOM_BYTES == 0,
              "operands of wgmma are aligned to the period of the swizzle");
// dK, dV, dQ, the next S, dX
static_assert(2 * ACC_REGISTERS + DQ_COLUMNS / 2 + FusedTiles::pairs * 3 / 2 <=
                  CONSUMER_REGISTERS - 16,
              "registers of a consumer");

typedef DescendingTiles<FUSED_ROWS> FusedQueries;

DEVICE void backward_wgmma_tt(float (&acc)[DQ_COLUMNS / 2], u64 left, u64 right, bool add) {
#if ANNULUS_DTYPE == 2
    wgmma_tt_bf16(acc, left, right, add);
#else
    wgmma_tt_f16(acc, left, right, add);
#endif
}

// Stores a consumer's half of dXᵀ for the dQ products of both. Masked pairs are marked unless
// `visible` has all bits set.
DEVICE void store_dx(u16* to, const u32 (&dx)[FusedTiles::pairs / 8][4], u64 visible,
                     const ConsumerLane& at) {
    // Addresses of one row differ in the swizzled number of 16 bytes, three bits that an exclusive
    // or changes, and both rows of a thread have the same swizzle. Computed anew in each tile: the
    // compiler would keep every address in a register.
    const u32 own_row = at.group * OWN_ROWS + at.row;
    const u32 first =
        recomputed(shared_address(to + swizzled_offset(BACKWARD_TILE, own_row, at.column)));
    UNROLL for (u32 y = 0; y < FusedTiles::pairs / 8; ++y)
        UNROLL for (u32 index = 0; index < 4; ++index) {
            u32 e = 8 * y + 2 * index, n_tile = e / 4, pair = dx[y][index];
            if (visible != ~0ull) pair = mark_masked(pair, visible >> e & 1, visible >> e & 2);
            u32 row = n_tile / 8 * BACKWARD_TILE + index % 2 * 8;
            store_pair_for_async_proxy((first ^ n_tile % 8 * 16) + row * PANEL_DIMS * 2, pair);
        }
    fence_proxy_async();
}

// First query and dim of a consumer's part of the dQ tile.
DEVICE u32 dq_first_row(u32 group) { return FUSED_ROWS == BACKWARD_TILE ? group * 64 : 0; }
DEVICE u32 dq_first_dim(u32 group) { return FUSED_ROWS == BACKWARD_TILE ? 0 : group * DQ_COLUMNS; }

// Issues dQ (64 queries × 64 dims) ← dX·K as one wgmma group. `dx` is that of the consumer's
// queries; `keys` the panel of its dims, of the first 64 keys.
DEVICE void issue_dq(float (&dq)[DQ_COLUMNS / 2], const u16* dx, const u16* keys) {
    const OperandLow left = uniform(OperandLow(mn_major_descriptor(dx, 0))),
                     right = uniform(OperandLow(mn_major_descriptor(keys, 0)));
    wgmma_fence();
    UNROLL for (u32 key = 0; key < BACKWARD_TILE; key += 16)
        backward_wgmma_tt(dq, operand_descriptor(left, key * PANEL_DIMS),
                          operand_descriptor(right, key / OWN_ROWS * OWN_ELEMENTS +
                                                        key % OWN_ROWS * PANEL_DIMS),
                          key > 0);
    wgmma_commit();
}

// dQ += dX·K of the elements of K that are not finite, on scalar units, skipping masked pairs,
// which store_dx has marked; for partial tiles.
DEVICE void dq_nonfinite_fixup(float (&dq)[DQ_COLUMNS / 2], const u16* dx, const u16* keys,
                               const ConsumerLane& at) {
    NOT_UNROLLED for (u32 key = 0; key < BACKWARD_TILE; ++key) {
        u16 factors[2];
        UNROLL for (u32 r = 0; r < 2; ++r)
            factors[r] = dx[swizzled_offset(BACKWARD_TILE, key, at.row + 8 * r)];
        const u16* line = keys + key / OWN_ROWS * OWN_ELEMENTS;
        UNROLL for (u32 e = 0; e < DQ_COLUMNS / 2; ++e) {
            u16 factor = factors[e / 2 % 2];
            u16 value = line[swizzled_offset(OWN_ROWS, key % OWN_ROWS, at.column_of(e))];
            if (factor != MASKED && !is_element_finite(value))
                dq[e] = multiply_add(widen(factor), widen(value), dq[e]);
        }
    }
}

// Stores a consumer's part of dQ tile `number` of the block for its writer, when the tile in shared
// memory is free.
template <bool is_last>
DEVICE void store_dq(FusedStorage& memory, const float (&dq)[DQ_COLUMNS / 2], float scale,
                     u32 number, const ConsumerLane& at) {
    mbarrier_wait(&memory.dq_empty, number % 2 ^ 1);
    const u32 first = shared_address(memory.dq + (dq_first_row(at.group) + at.row) * DQ_PITCH +
                                     dq_first_dim(at.group) + at.column);
    UNROLL for (u32 e = 0; e < DQ_COLUMNS / 2; e += 2)
        store_floats_for_async_proxy(first + (e / 2 % 2 * 8 * DQ_PITCH + e / 4 * 8) * 4,
                                     scale * dq[e], scale * dq[e + 1]);
    fence_proxy_async();
    warp_barrier();
    if (at.lane != 0) return;
    mbarrier_arrive(memory.dq_full + number % DQ_WRITERS);
    // the other writers find the entry of another number than theirs
    if (is_last)
        for (u32 more = 1; more < DQ_WRITERS; ++more)
            mbarrier_arrive(memory.dq_full + (number + more) % DQ_WRITERS);
}

// dQ writer: adds its dQ tiles of the block to dQ, each in its turn. The 32 threads of one warp.
DEVICE void write_dq_tiles(FusedStorage& memory, const BackwardAttention& arguments,
                           const OwnTile& own, u32 writer) {
    const Attention& a = arguments.attention;
    const u32 lane = thread_index() % 32;
    for (u32 number = writer;; number += DQ_WRITERS) {
        mbarrier_wait(memory.dq_full + writer, number / DQ_WRITERS % 2);
        const DqTile& tile = memory.dq_tiles[number % DQ_TILES];
        if (tile.number != number) break;
        const u32 h = tile.h, first_row = tile.first_query;
        const bool is_last = tile.is_last;
        const AdditionRank turn =
            addition_rank(arguments, own.b, h, first_row / BACKWARD_TILE, own.tile);
        u32* semaphore = semaphore_of(arguments, own.b, h, first_row);
        if (lane == 0) semaphore_wait(semaphore, turn.rank);
        warp_barrier();
        fence_proxy_async_global();
        NOT_UNROLLED for (u32 row = lane; row < FUSED_ROWS; row += 32) {
            if (first_row + row >= a.queries) break;
            float* to = reinterpret_cast<float*>(a.dq) +
                        ((u64(own.b) * a.queries + first_row + row) * a.q_heads + h) *
                            a.head_dim;
            bulk_reduce_add(to, memory.dq + row * DQ_PITCH, a.head_dim * 4);
        }
        bulk_commit();
        bulk_wait_read<0>();
        warp_barrier();
        // not by the lane that passes the turn on, which has more to do
        if (lane == 31) mbarrier_arrive(&memory.dq_empty);
        bulk_wait();
        fence_proxy_async_global();
        warp_barrier();
        const u32 next = turn.is_last ? 0 : turn.rank + 1;
        if (lane == 0) semaphore_set(semaphore, next);
        if (is_last) break;
    }
}

// For a dQ product of keys that are not all finite: replaces the elements that are not by 0. Both
// consumers call it, when no product reads the keys.
DEVICE void zero_own_keys(FusedTiles& operands, const ConsumerLane& at) {
    zero_non_finite(operands.own[0][at.group], OWN_ELEMENTS, at.thread, WARPGROUP);
    consumer_barrier();
}
// After that product, for the scores of the next tile: loads the keys again.
DEVICE void load_own_keys(FusedStorage& memory, const BackwardAttention& arguments,
                          const ConsumerLane& at) {
    const Attention& a = arguments.attention;
    const OwnTile own = key_tile_of(arguments, recomputed(memory.ticket));
    consumer_barrier();
    // one load at a time: the registers hold the accumulators
    load_q<1>(memory.tiles.own[0][at.group], a.k, own.b, own.head,
           own.tile * BACKWARD_TILE + at.group * OWN_ROWS, a.keys, a.head_dim);
    consumer_barrier();
}

// Consumer warpgroup: dK and dV of its 64 keys, and its part of the dQ tiles of the block.
DEVICE void fused_key_rows(FusedStorage& memory, const BackwardAttention& arguments, OwnTile own) {
    typedef FusedTiles Storage;
    Storage& operands = memory.tiles;
    const u32 pairs = Storage::pairs;
    const Attention& a = arguments.attention;
    ConsumerLane at = consumer_lane();
    load_own_rows(operands, a.k, a.head_dim, a.v, a.value_dim, own.b, own.head,
                  own.tile * BACKWARD_TILE + at.group * OWN_ROWS, a.keys, at);
    // a dQ product reads the keys of both consumers, which the barrier also waits for
    const bool keys_non_finite =
        named_barrier_any(CONSUMER_BARRIER, BACKWARD_CONSUMERS * WARPGROUP,
                          part_non_finite(operands.own[0][at.group], OWN_ELEMENTS, at));

    float dk[ACC_REGISTERS], dv[ACC_REGISTERS], scores[pairs];
    u32 p[pairs / 8][4] = {}, dx[pairs / 8][4] = {};
    clear_acc(dk);
    clear_acc(dv);
    const OperandLow k = OperandLow(k_major_descriptor(operands.own[0][at.group])),
                     v = OperandLow(k_major_descriptor(operands.own[1][at.group]));
    const u16* dq_keys = operands.own[0][0] + dq_first_dim(at.group) / PANEL_DIMS * OWN_PANEL;
    const float unit = float(a.scale) * LOG2_E;
    StageCursor<Storage::stages> state = {0};
    consumer_wait(operands, state);
    issue_nt<Storage>(scores, k, operands.streamed[0][0]);
    await_s(scores);

    for (;;) {
        // uniform: descriptors then need no per-thread arithmetic
        const u32 stage = uniform(state.stage());
        const u16 *queries = operands.streamed[0][stage], *douts = operands.streamed[1][stage];
        const StatisticsTile* statistics = statistics_of_stage(operands, stage);
        const ConsumerLane here = lane_again(at);
        float dprobs[pairs];
        issue_nt<Storage>(dprobs, v, douts);

        const StreamedTile& streamed = memory.streamed[recomputed(stage)];
        BackwardTile coord = {};
        coord.first_query = streamed.first_query;
        coord.first_key = memory.tile * BACKWARD_TILE + at.group * OWN_ROWS;
        coord.mask_index = streamed.mask_index;
        coord.mask_row = coord.first_query % BACKWARD_TILE;
        coord.mask_word = at.group;
        coord.is_full = is_full_tile(a, coord.mask_index);
        // the same for all threads of the consumers
        const bool finite =
            coord.is_full ||
            !named_barrier_any(WARPGROUP_BARRIER(recomputed(at.group)), WARPGROUP,
                               part_non_finite(queries, Storage::elements, here) ||
                                   part_non_finite(douts, Storage::elements, here));
        // likewise
        const bool keys_finite = coord.is_full || !keys_non_finite;
        // P of keys beyond the end need not be finite
        const bool plain = coord.mask_index == FULL_TILE &&
                           (memory.tile + 1) * BACKWARD_TILE <= a.keys &&
                           are_fused<Storage>(statistics, here);
        u64 visible = ~0ull;
        if (plain) {
            fused_key_probs<Storage>(scores, statistics, unit, here);
        } else {
            visible = visible_queries<Storage>(a, coord, statistics, here);
            masked_key_probs<Storage>(scores, statistics, visible, here, a);
        }
        u16* dx_tile = memory.dx[state.tile % 2];
        const u64 marks = keys_finite ? ~0ull : visible;
        if (!finite) {
            wgmma_wait<0>();
            fence_operand(dprobs);
            key_score_gradients<false, Storage>(dprobs, scores, statistics, visible,
                                                lane_again(at));
            nn_nonfinite_fixup<Storage>(dv, scores, visible, douts, lane_again(at));
            nn_nonfinite_fixup<Storage>(dk, dprobs, visible, queries, lane_again(at));
            zero_streamed(operands, stage, 2);
        }
        if (DV_BEFORE_DX) {
            narrow_left(p, scores);
            issue_nn<Storage>(dv, p, douts);
        }
        // of the groups of dP and dV, that of dP is complete
        wgmma_wait<DV_BEFORE_DX ? 1 : 0>();
        fence_operand(dprobs);
        if (finite && plain)
            key_score_gradients<true, Storage>(dprobs, scores, statistics, visible,
                                               lane_again(at));
        else if (finite)
            key_score_gradients<false, Storage>(dprobs, scores, statistics, visible,
                                                lane_again(at));
        narrow_left(dx, dprobs);
        store_dx(dx_tile, dx, marks, lane_again(at));
        if (!DV_BEFORE_DX) {
            narrow_left(p, scores);
            issue_nn<Storage>(dv, p, douts);
        }
        consumer_barrier();
        if (!keys_finite) zero_own_keys(operands, lane_again(at));
        float dq[DQ_COLUMNS / 2];
        const u16* dx_rows =
            dx_tile + dq_first_row(at.group) / PANEL_DIMS * (BACKWARD_TILE * PANEL_DIMS);
        issue_dq(dq, dx_rows, dq_keys);
        issue_nn<Storage>(dk, dx, queries);
        // of the groups of dV, dQ and dK, the first two are complete
        wgmma_wait<1>();
        fence_operand(dq);
        if (!keys_finite) load_own_keys(memory, arguments, lane_again(at));
        // dV has read P until here. Pinning its registers ties narrow_left to the wait.
        fence_operand(p);
        if (!keys_finite) dq_nonfinite_fixup(dq, dx_rows, dq_keys, lane_again(at));
        if (memory.streamed[recomputed(stage)].is_last) {
            store_dq<true>(memory, dq, float(a.scale), state.tile, lane_again(at));
            break;
        }
        ++state.tile;
        consumer_wait(operands, state);
        const u32 next_stage = uniform(state.stage());
        // an array of its own: P does not flow into the accumulators of S
        float next_scores[pairs];
        issue_nt<Storage>(next_scores, k, operands.streamed[0][next_stage]);
        store_dq<false>(memory, dq, float(a.scale), state.tile - 1, lane_again(at));
        await_s(next_scores);
        UNROLL for (u32 e = 0; e < pairs; ++e) scores[e] = next_scores[e];
        fence_operand(dk);
        fence_operand(dv);
        // dK has read dX until here
        fence_operand(dx);
        consumer_release(operands, stage, lane_again(at));
    }
    wgmma_wait<0>();
    fence_operand(dk);
    fence_operand(dv);
    // computed again, rather than kept
    own = key_tile_of(arguments, recomputed(memory.ticket));
    const u32 first_key = own.tile * BACKWARD_TILE + at.group * OWN_ROWS;
    store_key_rows(dk, float(a.scale), a.dk, own.b, own.head, first_key, a.head_dim, at, a);
    store_key_rows(dv, 1.0f, a.dv, own.b, own.head, first_key, a.value_dim, at, a);
}

// Producer thread: issues the loads of all tiles of queries.
DEVICE void load_query_tiles(FusedStorage& memory, const BackwardAttention& arguments,
                             FusedQueries tiles) {
    const Attention& a = arguments.attention;
    StageCursor<FusedTiles::stages> state = {0};
    while (tiles.more()) {
        const u32 b = tiles.b, h = tiles.h, row = tiles.first_row(a);
        const u32 mask_index = tiles.mask_index(a);
        tiles.next(a);
        producer_acquire(memory.tiles, state);
        // before the arrival of load_tile at the full mbarrier
        memory.streamed[state.stage()] = {h, row, mask_index, !tiles.more()};
        memory.dq_tiles[state.tile % DQ_TILES] = {h, row, state.tile, !tiles.more()};
        load_tile(memory.tiles, arguments, state, row, h, b,
                  statistics_of_head(arguments, b, h) + row / 64);
        ++state.tile;
    }
}

// Obtains the tile of keys of this block. All threads call it.
DEVICE OwnTile own_key_tile(FusedStorage& memory, const BackwardAttention& a) {
    if (thread_index() == 0) memory.ticket = take_ticket(a);
    barrier();
    const OwnTile own = key_tile_of(a, memory.ticket);
    if (thread_index() == 0) memory.tile = own.tile;
    return own;
}

// Grid: as many blocks as tiles of 128 keys × KV heads × batch rows. The block mask lists query
// tiles by key tile.
KERNEL(backward_fused_warpgroup, BackwardAttention) {
    const Attention& all = a.attention;
    FusedStorage& memory = *reinterpret_cast<FusedStorage*>(dynamic_shared());
    const OwnTile own = own_key_tile(memory, a);
    const u32 group = all.q_heads / all.kv_heads;
    FusedQueries tiles;
    tiles.begin(all, own.b, own.tile, own.head * group, (own.head + 1) * group);
    if (!tiles.more()) {
        store_no_gradient(all, own.b, own.head, own.tile);
        return;
    }
    if (thread_index() == 0) {
        for (u32 writer = 0; writer < DQ_WRITERS; ++writer)
            mbarrier_init(memory.dq_full + writer, BACKWARD_CONSUMERS * WARPGROUP / 32);
        mbarrier_init(&memory.dq_empty, 1);
        for (u32 tile = 0; tile < DQ_TILES; ++tile) memory.dq_tiles[tile].number = ~0u;
    }
    begin_backward_storage(memory.tiles);
    if (thread_index() < WARPGROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const u32 warp = uniform(thread_index() / 32);
        if (thread_index() == 0)
            load_query_tiles(memory, a, tiles);
        else if (warp >= 1 && warp <= DQ_WRITERS)
            write_dq_tiles(memory, a, own, warp - 1);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        fused_key_rows(memory, a, own);
    }
}
