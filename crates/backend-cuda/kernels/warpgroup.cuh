// Shared-memory layout and K/V pipeline of the forward pass on warpgroups (compute capability 9.0).
// The backward pass uses its descriptors and swizzle (backward_warpgroup.cuh).
//
// A block computes one tile of queries after the other (forward_scheduler.cuh) and iterates over
// the visible KV tiles of each. Warp specialization: warpgroup 0 is the producer; one of its
// threads issues TMA loads of K and V tiles into a pipeline of STAGES stages each. The others are
// consumers with 64 query rows each. Every stage has two mbarriers: `full` counts the bytes of the
// tile, `empty` the consumer warps that released it.
//
// Tiles, rows × keys (`Variant::tile` of src/variant.rs):
//
//   dims                     64          128         256
//   without score epilogue   192 × 128   128 × 176   128 × 80
//   with                     128 × 128   128 × 128
//
// Those without are FlashAttention-3's; at 64 dims they have three consumers. With an epilogue the
// registers of larger tiles would spill.
//
// A tile is stored in panels of 64 dims: rows of 128 bytes in the 128-byte swizzle of TMA and
// wgmma, which exchanges 16-byte pieces according to the row number, so that any eight rows that
// are read at once lie in different banks.
//
// Shared memory of one block (SharedStorage), bytes at 64 / 128 / 256 dims:
//
//                                                 without epilogue      with
//   q         consumers × 64 rows × dims × 2        24 K /  32 K /  64 K  16 K /  32 K
//             (after the last product with K: outputs, for TMA stores)
//   k, v      2 × 2 stages × KV_ROWS × dims × 2     64 K / 176 K / 160 K  64 K / 128 K
//   work      2 slots × 16                          32                    32
//   mbarriers 12 × 8                                96                    96
//
// Registers of a thread, for 2 and 3 consumers: 168 and 128 at launch, then 24 and 32 of the
// producer, 240 and 160 of a consumer. S, O and P take 64 + dims / 2 + 32 of these with 128 keys.
//
// Named barriers: 0 whole block, then a SCHEDULER_BARRIER and a WARPGROUP_BARRIER of each consumer,
// and the CONSUMER_BARRIER.
//
// A phase of an mbarrier completes with
//
//   k_full, v_full    the producer's arrival and the bytes of the tile
//   k_empty, v_empty  an arrival of each warp of the consumers, which have read the tile
//   work_full         the producer's arrival, which has written the work tile
//   work_empty        an arrival of each warp of the consumers, which have read the work tile
//
// Source: Shah et al. 2024 (FlashAttention-3); PTX ISA, "Asynchronous Warpgroup Level Matrix Shared
// Memory Layout", "Matrix Descriptor Format".
#pragma once

#include "tile.cuh"
#include "numbers.cuh"

// Keys per tile.
#define KV_ROWS ANNULUS_TILE
// Query rows per consumer warpgroup: the M of a wgmma instruction.
#define Q_ROWS 64
// Consumer warpgroups, 2 or 3.
#define CONSUMERS ANNULUS_CONSUMERS
// Query rows per block and tile.
#define TILE_ROWS (CONSUMERS * Q_ROWS)
// Registers per thread at launch, a multiple of 8, and after setmaxnreg. The producer keeps as few
// as leave a multiple of 8 for each consumer: it computes addresses only.
#define LAUNCH_REGISTERS (64 * 1024 / THREADS / 8 * 8)
#define PRODUCER_REGISTERS (CONSUMERS == 2 ? 24 : 32)
#define CONSUMER_REGISTERS (CONSUMERS == 2 ? 240 : 160)
#define PANELS (ANNULUS_DIM / 64)
// Double buffering: two stages of K and V are the most that fit 227 KB at 128 and 256 dims.
#define STAGES 2
#define PANEL_DIMS 64
// Elements of one panel of a tile, and of a tile.
#define KV_PANEL (KV_ROWS * PANEL_DIMS)
#define KV_TILE (KV_ROWS * ANNULUS_DIM)
#define Q_PANEL (Q_ROWS * PANEL_DIMS)
#define Q_TILE (Q_ROWS * ANNULUS_DIM)
// Columns of O per wgmma instruction, at most 128; 256 dims take two.
#define O_COLUMNS (ANNULUS_DIM < 128 ? ANNULUS_DIM : 128)
#define O_PARTS (ANNULUS_DIM / O_COLUMNS)
// Bytes of eight rows of a panel, the unit that the 128-byte swizzle repeats.
#define SWIZZLE_ATOM_BYTES 1024
// Named barriers: the turn of a consumer to issue wgmma, which it waits for and the one before it
// passes on; the threads of one consumer; those of all consumers.
#define SCHEDULER_BARRIER(group) (1 + (group))
#define SCHEDULER_THREADS (2 * WARPGROUP)
#define WARPGROUP_BARRIER(group) (1 + CONSUMERS + (group))
#define CONSUMER_BARRIER (1 + 2 * CONSUMERS)

// Argument of the warpgroup kernels: mirrored in src/arguments.rs.
struct WarpgroupAttention {
    TensorMap k_map, v_map, out_map;
    Attention attention;
    // Of the tile scheduler (forward_scheduler.cuh).
    u64 order;    // u32 [planes][lists]: the lists of a plane, that of most tiles first
    u64 counter;  // u32: tiles that blocks have fetched; 0 before and after a launch
    u32 tiles;    // of the launch: lists × groups of packed heads × batch rows
    u32 section;  // groups of packed heads in a section
    u32 stores_by_tma, reserved;  // 1: outputs are written through `out_map`
};
static_assert(alignof(TensorMap) == 128 && sizeof(TensorMap) == 128, "CUtensorMap");
static_assert(sizeof(Attention) == 712 && sizeof(WarpgroupAttention) == 1152,
              "as in src/arguments.rs");

// A tile of queries that a block computes: batch row, first query head of its group, and its list
// in the block mask.
struct alignas(16) WorkTile {
    u32 b, first_head, list, reserved;
};
// List of a WorkTile that stands for the end.
#define NO_TILE 0xffffffffu

// Dynamic shared memory of a block. `Variant::dynamic_shared_bytes` (src/variant.rs) has its size.
struct SharedStorage {
    u16 q[CONSUMERS][Q_TILE];
    u16 k[STAGES][KV_TILE], v[STAGES][KV_TILE];
    // Tiles that the producer passes to the consumers. As many slots as stages, so that
    // PipelineState serves both: one that is computed, and the next one.
    WorkTile work[STAGES];
    Mbarrier k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    Mbarrier work_full[STAGES], work_empty[STAGES];
};

// The most that a block of compute capability 9.0 can have. Operands of wgmma begin at a multiple
// of the swizzle's period, for which the sizes of the arrays before them suffice.
static_assert(sizeof(SharedStorage) <= 227 * 1024, "shared memory of a block");
static_assert(WARPGROUP * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) ==
                  THREADS * LAUNCH_REGISTERS,
              "registers of a block");
// S, O and P; the other variables of a thread have the remaining 32
static_assert(KV_ROWS / 2 + ANNULUS_DIM / 2 + KV_ROWS / 4 <= CONSUMER_REGISTERS - 32,
              "registers of a consumer");
static_assert(KV_ROWS % 16 == 0 && KV_ROWS <= 256, "K of P·V, and rows of a TMA box");
static_assert(CONSUMER_BARRIER < 16, "named barriers");
static_assert(Q_TILE * 2 % SWIZZLE_ATOM_BYTES == 0 && KV_TILE * 2 % SWIZZLE_ATOM_BYTES == 0,
              "operands of wgmma are aligned to the period of the swizzle");

// Position in the pipeline (CUTLASS: PipelineState) as the number of a tile: its stage, and the
// parity of the full mbarrier's phase that a consumer waits for. A producer waits for the opposite
// parity of the empty mbarrier. One register, where a stage and a parity take two.
struct PipelineState {
    u32 tile;

    METHOD u32 stage() const { return tile % STAGES; }
    METHOD u32 parity() const { return tile / STAGES % 2; }
    METHOD void advance() { ++tile; }
    // Of the tile before.
    METHOD PipelineState before() const { return {tile - 1}; }
};
static_assert((STAGES & (STAGES - 1)) == 0, "stage and parity are bits of the tile's number");

// wgmma matrix descriptor: start address, leading byte offset (distance of the next 64 columns of
// an MN-major operand), stride byte offset (distance of the next eight rows), 128-byte swizzle. The
// start address may be any multiple of 32 bytes within a row of a panel.
DEVICE u64 smem_descriptor(const u16* at, u32 leading, u32 stride) {
    return (shared_address(at) & 0x3ffffu) >> 4 | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 |
           1ull << 62;
}
// K-major: rows of dims, dims are the summed index (Q, K).
DEVICE u64 k_major_descriptor(const u16* at) { return smem_descriptor(at, 16, SWIZZLE_ATOM_BYTES); }
// MN-major: rows are the summed index (V); `panel` elements to the next 64 columns.
DEVICE u64 mn_major_descriptor(const u16* at, u32 panel) {
    return smem_descriptor(at, panel * 2, SWIZZLE_ATOM_BYTES);
}
// Returns the descriptor of the operand `elements` elements further. Adds to the low word only,
// which holds the address: a 64-bit addition would need a carry.
DEVICE u64 descriptor_advance(u64 descriptor, u32 elements) {
    return (descriptor & ~0xffffffffull) | (u32(descriptor) + (elements * 2 >> 4));
}

// Returns a descriptor that is the same in all lanes in a form of which the compiler can prove it
// (uniform). It is then computed in uniform registers, from which wgmma reads it.
DEVICE u64 uniform_descriptor(u64 descriptor) {
    return (descriptor & ~0xffffffffull) | uniform(u32(descriptor));
}

// Offset of element x of a row in a tile whose panels have `rows` rows.
DEVICE u32 swizzled_offset(u32 rows, u32 row, u32 x) {
    return x / 64 * rows * PANEL_DIMS + row * PANEL_DIMS + ((x / 8 ^ row) % 8 * 8 | x % 8);
}

// Initializes all mbarriers. One thread calls it.
DEVICE void init_pipeline(SharedStorage& memory, u32 consumer_warps) {
    for (u32 stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(memory.k_full + stage, 1);
        mbarrier_init(memory.v_full + stage, 1);
        mbarrier_init(memory.k_empty + stage, consumer_warps);
        mbarrier_init(memory.v_empty + stage, consumer_warps);
        mbarrier_init(memory.work_full + stage, 1);
        mbarrier_init(memory.work_empty + stage, consumer_warps);
    }
    fence_mbarrier_init();
}

// Eight elements, loaded by one instruction.
struct alignas(16) SharedWords {
    u32 of[4];
};

// Replaces the elements of a tile that are not finite by 0, for wgmma after the next barrier:
// number `thread` of `threads` threads, every one of which calls it.
DEVICE void zero_non_finite(u16* tile, u32 elements, u32 thread, u32 threads) {
    NOT_UNROLLED for (u32 index = thread; index < elements / 8; index += threads) {
        SharedWords words = reinterpret_cast<const SharedWords*>(tile)[index];
        UNROLL for (u32 c = 0; c < 4; ++c) words.of[c] = finite_pair(words.of[c]);
        store_for_async_proxy(tile + 8 * index, words.of);
    }
    fence_proxy_async();
}

// Waits for all consumers.
DEVICE void consumer_barrier() { named_barrier(CONSUMER_BARRIER, CONSUMERS * WARPGROUP); }
// Number of a thread of a consumer among those of all consumers.
DEVICE u32 consumer_thread() { return thread_index() - WARPGROUP; }

// Producer: waits until the stage is empty, then issues the TMA loads of one tile, a box per panel.
DEVICE void tma_load(u16* to, const TensorMap& map, Mbarrier* full, Mbarrier* empty,
                     const PipelineState& state, u32 row, u32 head, u32 batch) {
    mbarrier_wait(empty + state.stage(), state.parity() ^ 1);
    mbarrier_arrive_expect_tx(full + state.stage(), KV_TILE * 2);
    for (u32 panel = 0; panel < PANELS; ++panel)
        tma_load_box(to + state.stage() * KV_TILE + panel * KV_PANEL, map, full + state.stage(),
                     panel * 64, row, head, batch);
}

// Consumer: waits until the tile of a stage is loaded.
DEVICE void consumer_wait(Mbarrier* full, const PipelineState& state) {
    mbarrier_wait(full + state.stage(), state.parity());
}
// Consumer: this warp has read the tile of a stage.
DEVICE void consumer_release(Mbarrier* empty, const PipelineState& state, u32 lane) {
    if (lane == 0) mbarrier_arrive(empty + state.stage());
}

// Ping-pong scheduling: waits for the turn of a consumer to issue wgmma.
DEVICE void scheduler_wait(u32 consumer) {
    named_barrier(SCHEDULER_BARRIER(consumer), SCHEDULER_THREADS);
}
// Passes the turn to a consumer.
DEVICE void scheduler_arrive(u32 consumer) {
    named_arrive(SCHEDULER_BARRIER(consumer), SCHEDULER_THREADS);
}

// Copies a consumer's 64 rows of `dim` elements to shared memory for wgmma, zeros beyond the ends.
// By threads rather than TMA, because the caller's tensor may have any strides. `line_of` returns
// the address of the first element of a row, null if there is no such row. With `aligned` eight
// elements are loaded by one instruction. A thread issues up to eight such loads before the
// first store, so that their latencies overlap.
template <typename LineOf>
DEVICE void load_rows(u16* to, const LineOf& line_of, i64 stride, u32 dim, bool aligned) {
    const u32 row_pieces = ANNULUS_DIM / 8, pieces = Q_TILE / 8 / WARPGROUP;
    const u32 batch = pieces < 8 ? pieces : 8, thread = thread_index() % WARPGROUP;
    NOT_UNROLLED for (u32 first = 0; first < pieces; first += batch) {
        u32 words[batch][4];
        UNROLL for (u32 c = 0; c < batch; ++c) {
            const u32 index = (first + c) * WARPGROUP + thread, x = index % row_pieces * 8;
            const u16* line = line_of(index / row_pieces);
            UNROLL for (u32 word = 0; word < 4; ++word) words[c][word] = 0;
            if (!line) continue;
            if (aligned) {
                if (x < dim) load_16(words[c], u64(line + x));
                continue;
            }
            UNROLL for (u32 e = 0; e < 8; ++e)
                if (x + e < dim)
                    words[c][e / 2] |= u32(line[i64(x + e) * stride]) << 16 * (e % 2);
        }
        UNROLL for (u32 c = 0; c < batch; ++c) {
            const u32 index = (first + c) * WARPGROUP + thread, row = index / row_pieces;
            const u32 x = index % row_pieces * 8;
            store_for_async_proxy(to + swizzled_offset(Q_ROWS, row, x), words[c]);
        }
    }
    fence_proxy_async();
}

// As load_rows, of one head of a tensor from row `first` on; rows from `rows` on do not exist.
DEVICE void load_q(u16* to, const Tensor& tensor, u32 b, u32 head, u32 first, u32 rows, u32 dim) {
    const u64 at = offset<u16>(tensor, b, 0, head, 0);
    const bool aligned = tensor.dim == 1 && at % 16 == 0 && tensor.row % 8 == 0 && dim % 8 == 0;
    const auto line_of = [&](u32 row) -> const u16* {
        return first + row < rows
                   ? reinterpret_cast<const u16*>(at) + i64(first + row) * tensor.row
                   : nullptr;
    };
    load_rows(to, line_of, tensor.dim, dim, aligned);
}

DEVICE void wgmma_ss(float (&o)[KV_ROWS / 2], u64 left, u64 right, bool add) {
#if ANNULUS_DTYPE == 2
    wgmma_ss_bf16(o, left, right, add);
#else
    wgmma_ss_f16(o, left, right, add);
#endif
}

DEVICE void wgmma_rs(float (&o)[O_COLUMNS / 2], const u32 (&left)[4], u64 right) {
#if ANNULUS_DTYPE == 2
    wgmma_rs_bf16(o, left, right);
#else
    wgmma_rs_f16(o, left, right);
#endif
}

// Issues S ← Q·Kᵀ as one wgmma group.
DEVICE void issue_qk(float (&scores)[KV_ROWS / 2], u64 q, u64 kv) {
    q = uniform_descriptor(q);
    kv = uniform_descriptor(kv);
    wgmma_fence();
    UNROLL for (u32 x = 0; x < ANNULUS_DIM; x += 16)
        wgmma_ss(scores, descriptor_advance(q, x / 64 * Q_PANEL + x % 64),
                 descriptor_advance(kv, x / 64 * KV_PANEL + x % 64), x > 0);
    wgmma_commit();
}

// Issues O += P·V as one wgmma group.
DEVICE void issue_pv(float (&o)[O_PARTS][O_COLUMNS / 2], const u32 (&probs)[KV_ROWS / 16][4],
                     const u16* values) {
    const u64 descriptor = uniform_descriptor(mn_major_descriptor(values, KV_PANEL));
    wgmma_fence();
    UNROLL for (u32 y = 0; y < KV_ROWS / 16; ++y)
        UNROLL for (u32 part = 0; part < O_PARTS; ++part)
            wgmma_rs(o[part], probs[y],
                     descriptor_advance(descriptor, y * (16 * PANEL_DIMS) +
                                                        part * (O_COLUMNS / 64) * KV_PANEL));
    wgmma_commit();
}

// Waits for Q·Kᵀ, of the two groups in flight the first one.
DEVICE void await_qk(float (&scores)[KV_ROWS / 2]) {
    wgmma_wait<1>();
    fence_operand(scores);
}

// Waits for P·V, which has read P until then.
DEVICE void await_pv(float (&o)[O_PARTS][O_COLUMNS / 2], u32 (&probs)[KV_ROWS / 16][4]) {
    wgmma_wait<0>();
    UNROLL for (u32 part = 0; part < O_PARTS; ++part) fence_operand(o[part]);
    fence_operand(probs);
}

// Position of a thread of a consumer warpgroup in its accumulators, forward and backward.

// Position of a thread in its warpgroup's accumulators: element e of S is
// row + 8·(e / 2 mod 2), 8·(e / 4) + column + e mod 2.
struct ConsumerLane {
    u32 group, thread, lane, row, column;

    METHOD u32 row_of(u32 e) const { return row + 8 * (e / 2 % 2); }
    METHOD u32 column_of(u32 e) const { return 8 * (e / 4) + column + e % 2; }
};

DEVICE ConsumerLane consumer_lane(u32 group, u32 index) {
    ConsumerLane at;
    at.group = group;
    at.thread = index % WARPGROUP;
    at.lane = index % 32;
    at.row = at.thread / 32 * 16 + at.lane / 4;
    at.column = 2 * (at.lane % 4);
    return at;
}
DEVICE ConsumerLane consumer_lane() {
    // uniform: descriptors and barrier names then need no per-thread arithmetic
    return consumer_lane(uniform(thread_index() / WARPGROUP) - 1, thread_index());
}
// The same, computed anew, where registers are too few to keep it.
DEVICE ConsumerLane lane_again(const ConsumerLane& at) {
    return consumer_lane(at.group, thread_index_again());
}

// Returns true if one of a thread's elements of a tile of `count` elements in shared memory is not
// finite. Adding the lowest bit of the exponent carries into the sign's place only if all of its
// bits are set. Four loads at a time, so that their latencies overlap.
DEVICE bool part_non_finite(const u16* values, u32 count, const ConsumerLane& at) {
    const u32 exponent = ANNULUS_DTYPE == 2 ? 0x7f80u : 0x7c00u;
    const u32 lowest = ANNULUS_DTYPE == 2 ? 0x0080u : 0x0400u;
    u32 carries = 0;
    NOT_UNROLLED for (u32 first = at.thread; first < count / 8; first += 4 * WARPGROUP) {
        SharedWords words[4] = {};
        UNROLL for (u32 c = 0; c < 4; ++c)
            if (first + c * WARPGROUP < count / 8)
                words[c] = reinterpret_cast<const SharedWords*>(values)[first + c * WARPGROUP];
        UNROLL for (u32 c = 0; c < 4; ++c)
            UNROLL for (u32 word = 0; word < 4; ++word)
                carries |= (words[c].of[word] & exponent * 0x10001u) + lowest * 0x10001u;
    }
    return carries & 0x80008000u;
}
