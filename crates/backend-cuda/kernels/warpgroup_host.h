// Host twin of warpgroup_primitives.cuh. Every asynchronous operation completes as late as the
// rules allow, and its destination holds NaN until then:
//
//   TMA loads      and bulk copies complete when no fiber can run: first those whose mbarrier a
//                  thread waits for, in an order drawn from the seed; with EARLY_COPIES at once
//   wgmma          computed when its group is waited for; until then writes to the accumulators
//                  are lost, and its operands, in A registers or shared memory, may not change
//   async stores   (store_for_async_proxy) take effect at the thread's fence_proxy_async
//   TMA stores     write global memory when their bulk group is waited for; until then their shared
//                  memory may not change
//
// Descriptors are decoded bit by bit and shared memory is read through the swizzle, so a wrong
// descriptor gives wrong numbers. A violation fails the launch: an mbarrier used before
// mbarrier_init or fence_mbarrier_init, an arrival too many, wgmma without wgmma_fence, registers
// of a wgmma used again without fence_operand, an operand overwritten in flight, an address out of
// bounds or misaligned, more registers than there are, an arrival left at a named barrier at the
// end of the block.
#pragma once

#include <algorithm>
#include <array>

namespace emulated {
namespace {

// Registers per thread at launch: 64 K per multiprocessor, in units of 8.
const u32 REGISTERS = 64 * 1024 / THREADS / 8 * 8;
const u32 SWIZZLE_128 = 1;

// Layout of the emulated driver's tensor map: mirrored in crates/cuda-emulator/src/memory.rs.
const u64 MAP_MAGIC = 0x70616d736e6e61ull;
struct Map {
    u64 magic, address;
    u64 lengths[4];
    u64 strides[4];  // bytes; the first is the element size
    u32 box[4];
};

struct MbarrierState {
    const Mbarrier* at;
    u32 owner;
    bool fenced;
    u32 count, pending, parity;
    i64 bytes;
};

struct TmaCopy {
    u8* to;
    Map map;
    u32 first[4];
    Mbarrier* mbarrier;
    bool swizzled;  // false: a bulk copy, whose map has one row
};

struct Store {
    u16* to;
    u32 words[4];
    u32 bytes;
};

// A TMA store of one box.
struct TmaStore {
    const u8* from;
    Map map;
    u32 first[4];
    u32 group;
    std::vector<u16> elements;  // as they were when it was issued
};

// A bulk addition: what it adds to global memory.
// Most columns of a product of the kernels.
const u32 MOST_COLUMNS = 176;

// Elements of the operands of a product, as read_operands orders them. In shared memory the left
// operand is that of all four warps: a warp may not know when the others have read it.
struct Operands {
    u16 left[64 * 16];
    u16 right[16 * MOST_COLUMNS];
};

// Form of a product.
struct ProductForm {
    bool add, is_f16;
};

// A wgmma of one warp.
struct Product {
    std::array<float*, WARP> acc;
    std::array<const u32*, WARP> left;  // null: the left operand is `left_descriptor`
    u64 left_descriptor, right;
    u32 columns, group, lanes;
    ProductForm form;
    std::unique_ptr<Operands> operands;  // as they were when it was issued
};

// Operands of a product of a warpgroup, as its first warp has issued it.
struct WarpgroupProduct {
    Operands operands;
    u32 number, warps;  // warps that have issued it
};

// Accumulators with pending products: their values so far, and the number of products to come.
struct PendingAcc {
    float* at;
    std::vector<float> values;
    u32 products;
};

// Registers of a completed product: accumulators, or an A operand.
struct RegisterOperand {
    const void* at;
    bool is_acc;
};

struct Lane {
    std::vector<PendingAcc> pending;
    // registers that fence_operand has not pinned since the wait
    std::vector<RegisterOperand> unpinned;
    std::vector<Store> stores;
    std::vector<TmaStore> tma_stores;
    u32 issued, groups, bulk_groups, registers;
    bool wgmma_fenced;
    const Mbarrier* awaited;
};

struct NamedBarrier {
    u32 arrived, expected;
    u64 generation;
    bool any, latched;
};

struct AsyncUnits {
    std::vector<MbarrierState> mbarriers;
    std::vector<TmaCopy> copies;
    std::array<Lane, THREADS> lanes;
    // pending products of a warp; `done` products were completed before them
    std::array<std::vector<Product>, THREADS / WARP> products;
    std::array<u32, THREADS / WARP> done;
    // products with both operands in shared memory that not all warps of a warpgroup have issued
    std::array<std::vector<WarpgroupProduct>, THREADS / WARPGROUP> of_warpgroup;
    std::array<NamedBarrier, 16> named;
    i64 free_registers;
};

inline AsyncUnits& async_units() { return *current()->async_units; }
inline Lane& own_lane() { return async_units().lanes[current()->thread]; }

inline void changed() { ++current()->changes; }

template <typename Over>
inline void wait_until(Over over) {
    Block& block = *current();
    Fiber& fiber = block.fibers[block.thread];
    while (!over()) {
        fiber.changes_seen = block.changes;
        pause(Wait::change);
    }
}

void init_async_units(Block& block) {
    if (!block.async_units) block.async_units = std::make_shared<AsyncUnits>();
    AsyncUnits& all = *block.async_units;
    all.mbarriers.clear();
    all.copies.clear();
    for (Lane& lane : all.lanes) {
        lane.pending.clear();
        lane.unpinned.clear();
        lane.stores.clear();
        lane.tma_stores.clear();
        lane.issued = lane.groups = lane.bulk_groups = 0;
        lane.registers = REGISTERS;
        lane.wgmma_fenced = false;
        lane.awaited = nullptr;
    }
    for (auto& products : all.products) products.clear();
    all.done.fill(0);
    for (auto& products : all.of_warpgroup) products.clear();
    all.named.fill(NamedBarrier{});
    all.free_registers = 0;
}

bool finish_async_units(Block& block) {
    AsyncUnits& all = *block.async_units;
    // a load or a store that was not waited for
    bool whole = all.copies.empty();
    for (const Lane& lane : all.lanes) {
        whole = whole && lane.pending.empty() && lane.stores.empty() && lane.tma_stores.empty();
        for (const RegisterOperand& one : lane.unpinned) whole = whole && !one.is_acc;
    }
    for (const NamedBarrier& barrier : all.named) whole = whole && barrier.arrived == 0;
    if (!whole)
        trace("an asynchronous operation was not waited for, or accumulators were not pinned");
    return whole;
}

// Returns the offset of a shared-memory address, which is the address as wgmma and TMA use it.
inline u32 offset_in_block(const void* at, u32 bytes) {
    u64 offset = reinterpret_cast<u64>(at) - reinterpret_cast<u64>(current()->dynamic_shared);
    if (offset + bytes > current()->dynamic_shared_bytes) fault("address outside of shared memory");
    return u32(offset);
}

// ---- mbarriers

inline MbarrierState& mbarrier_state(const Mbarrier* mbarrier) {
    for (MbarrierState& state : async_units().mbarriers) {
        if (state.at != mbarrier) continue;
        if (!state.fenced && state.owner != current()->thread)
            fault("mbarrier without fence_mbarrier_init");
        return state;
    }
    fault("mbarrier without mbarrier_init");
    return async_units().mbarriers.front();
}

inline void complete_phase(MbarrierState& state) {
    if (state.pending > 0 || state.bytes != 0) return;
    state.parity ^= 1;
    state.pending = state.count;
}

inline void mbarrier_arrive(Mbarrier* mbarrier, u32 bytes) {
    MbarrierState& state = mbarrier_state(mbarrier);
    state.bytes += bytes;
    if (state.pending == 0) fault("mbarrier: more arrivals than it was initialized for");
    --state.pending;
    u32 before = state.parity;
    complete_phase(state);
    changed();
    // let a thread that waited for this phase run first
    if (state.parity != before) pause(Wait::others);
}

// ---- TMA loads

inline u32 swizzled_128(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

// Calls `with` for each element of a box: its address in global memory, null beyond the tensor, and
// its number in the box.
template <typename With>
inline void each_of_box(const Map& map, const u32 (&first)[4], With with) {
    u32 index = 0;
    for (u32 w = 0; w < map.box[3]; ++w)
        for (u32 z = 0; z < map.box[2]; ++z)
            for (u32 y = 0; y < map.box[1]; ++y)
                for (u32 x = 0; x < map.box[0]; ++x, ++index) {
                    u64 at[4] = {u64(first[0]) + x, u64(first[1]) + y, u64(first[2]) + z,
                                 u64(first[3]) + w};
                    bool inside = true;
                    u64 address = map.address;
                    for (u32 axis = 0; axis < 4; ++axis) {
                        inside = inside && at[axis] < map.lengths[axis];
                        address += at[axis] * map.strides[axis];
                    }
                    with(inside ? reinterpret_cast<u16*>(address) : nullptr, index);
                }
}

inline void complete_copy(Block& block, const TmaCopy& copy) {
    u32 start = u32(reinterpret_cast<char*>(copy.to) - block.dynamic_shared), index = 0;
    each_of_box(copy.map, copy.first, [&](const u16* from, u32 number) {
        index = 2 * number;
        u16 element = from ? *from : u16(0);
        u32 to = copy.swizzled ? swizzled_128(start + index) : start + index;
        std::memcpy(block.dynamic_shared + to, &element, 2);
    });
    index += 2;
    for (MbarrierState& state : block.async_units->mbarriers)
        if (state.at == copy.mbarrier) {
            state.bytes -= index;
            complete_phase(state);
        }
}

inline void add_copy(const TmaCopy& copy, u32 bytes) {
    Block& block = *current();
    if (block.mistake & EARLY_COPIES) {
        complete_copy(block, copy);
        changed();
        return;
    }
    std::memset(copy.to, 0xff, bytes);
    block.async_units->copies.push_back(copy);
}

// Reads the elements of a TMA store as they are now.
inline std::vector<u16> elements_of(Block& block, const TmaStore& store) {
    const char* base = block.dynamic_shared;
    u32 start = u32(reinterpret_cast<const char*>(store.from) - base);
    std::vector<u16> elements;
    each_of_box(store.map, store.first, [&](const u16*, u32 number) {
        u16 element;
        std::memcpy(&element, base + swizzled_128(start + 2 * number), 2);
        elements.push_back(element);
    });
    return elements;
}

// Hardware may read the shared memory at any time until then: it is read at both ends.
inline void complete_tma_stores(Lane& lane, u32 open) {
    Block& block = *current();
    while (!lane.tma_stores.empty() && lane.tma_stores.front().group + open < lane.bulk_groups) {
        const TmaStore& store = lane.tma_stores.front();
        if (elements_of(block, store) != store.elements)
            fault("TMA store: shared memory was overwritten before it was waited for");
        each_of_box(store.map, store.first, [&](u16* to, u32 number) {
            if (to) *to = store.elements[number];
        });
        lane.tma_stores.erase(lane.tma_stores.begin());
    }
}

bool step_async_units(Block& block) {
    AsyncUnits& all = *block.async_units;
    if (all.copies.empty()) return false;
    auto is_awaited = [&](const TmaCopy& copy) {
        return std::any_of(all.lanes.begin(), all.lanes.end(),
                           [&](const Lane& lane) { return lane.awaited == copy.mbarrier; });
    };
    auto rest = std::partition(all.copies.begin(), all.copies.end(), is_awaited);
    u64 count = rest == all.copies.begin() ? all.copies.size() : u64(rest - all.copies.begin());
    auto which = all.copies.begin() + i64(draw(*block.seed) % count);
    complete_copy(block, *which);
    all.copies.erase(which);
    ++block.changes;
    return true;
}

}  // namespace
}  // namespace emulated

#include "wgmma_host.h"

namespace emulated {
namespace {

// ---- named barriers

inline NamedBarrier& arrive_at(u32 name, u32 threads, bool mine) {
    if (name == 0 || name > 15 || threads % WARP != 0)
        fault("named barrier: invalid name or thread count");
    NamedBarrier& barrier = async_units().named[name];
    if (barrier.arrived > 0 && barrier.expected != threads)
        fault("named barrier: thread counts differ");
    barrier.expected = threads;
    barrier.any |= mine;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        barrier.latched = barrier.any;
        barrier.any = false;
        ++barrier.generation;
        changed();
    }
    return barrier;
}

inline bool arrive_and_wait(u32 name, u32 threads, bool mine) {
    u64 before = async_units().named[name % 16].generation;
    NamedBarrier& barrier = arrive_at(name, threads, mine);
    wait_until([&] { return barrier.generation != before; });
    return barrier.latched;
}

}  // namespace
}  // namespace emulated

DEVICE u32 bits_of(float x);

DEVICE u32 shared_address(const void* at) { return emulated::offset_in_block(at, 1); }

DEVICE void warp_barrier() { emulated::exchange({}); }
DEVICE bool warp_any(bool mine) {
    const emulated::LaneWords* all = emulated::exchange({{mine, 0, 0, 0}});
    bool any = false;
    for (u32 lane = 0; lane < emulated::WARP; ++lane) any |= all[lane].words[0] != 0;
    return any;
}
DEVICE u32 uniform(u32 value) { return u32(emulated::exchange({{value, 0, 0, 0}})[0].words[0]); }
DEVICE void named_barrier(u32 name, u32 threads) {
    emulated::arrive_and_wait(name, threads, false);
}
DEVICE void named_arrive(u32 name, u32 threads) { emulated::arrive_at(name, threads, false); }
DEVICE bool named_barrier_any(u32 name, u32 threads, bool mine) {
    return emulated::arrive_and_wait(name, threads, mine);
}

DEVICE void mbarrier_init(Mbarrier* mbarrier, u32 arrivals) {
    emulated::offset_in_block(mbarrier, sizeof *mbarrier);
    if (arrivals == 0 || reinterpret_cast<u64>(mbarrier) % 8 != 0)
        emulated::fault("mbarrier_init: zero arrivals or misaligned");
    emulated::async_units().mbarriers.push_back(
        {mbarrier, emulated::current()->thread, false, arrivals, arrivals, 0, 0});
}
DEVICE void fence_mbarrier_init() {
    for (emulated::MbarrierState& state : emulated::async_units().mbarriers)
        state.fenced |= state.owner == emulated::current()->thread;
}
DEVICE void mbarrier_arrive(Mbarrier* mbarrier) { emulated::mbarrier_arrive(mbarrier, 0); }
DEVICE void mbarrier_arrive_expect_tx(Mbarrier* mbarrier, u32 bytes) {
    emulated::mbarrier_arrive(mbarrier, bytes);
}
DEVICE void mbarrier_wait(Mbarrier* mbarrier, u32 parity) {
    emulated::mbarrier_state(mbarrier);
    emulated::own_lane().awaited = mbarrier;
    emulated::wait_until([&] { return emulated::mbarrier_state(mbarrier).parity != parity; });
    emulated::own_lane().awaited = nullptr;
}

namespace emulated {
namespace {

// Decodes a tensor map, and checks the box at `shared`. Returns the bytes of the box.
inline u32 decode_map(Map& to, const TensorMap& map, const u16* shared) {
    std::memcpy(&to, &map, sizeof to);
    // the argument structure of the kernel is aligned to 128 bytes, as that of a map
    if (to.magic != MAP_MAGIC || reinterpret_cast<u64>(&map) % 128 != 0)
        fault("TMA: invalid tensor map");
    u32 bytes = 2;
    for (u32 length : to.box) bytes *= length;
    if (offset_in_block(shared, bytes) % 128 != 0) fault("TMA: misaligned shared memory");
    return bytes;
}

}  // namespace
}  // namespace emulated

DEVICE void tma_load_box(u16* to, const TensorMap& map, Mbarrier* mbarrier, u32 x, u32 row,
                         u32 head, u32 batch) {
    emulated::TmaCopy copy = {reinterpret_cast<u8*>(to), {}, {x, row, head, batch}, mbarrier, true};
    emulated::mbarrier_state(mbarrier);
    u32 bytes = emulated::decode_map(copy.map, map, to);
    emulated::add_copy(copy, bytes);
}

DEVICE void tma_store_box(const TensorMap& map, const u16* from, u32 x, u32 row, u32 head,
                          u32 batch) {
    emulated::Lane& lane = emulated::own_lane();
    emulated::TmaStore store = {
        reinterpret_cast<const u8*>(from), {}, {x, row, head, batch}, lane.bulk_groups, {}};
    emulated::decode_map(store.map, map, from);
    store.elements = emulated::elements_of(*emulated::current(), store);
    lane.tma_stores.push_back(std::move(store));
}
DEVICE void bulk_commit() { ++emulated::own_lane().bulk_groups; }
template <u32 open>
DEVICE void bulk_wait_read() {
    emulated::complete_tma_stores(emulated::own_lane(), open);
}

DEVICE u32 atomic_add(u32* at, u32 number) {
    u32 before = *at;
    *at += number;
    return before;
}

DEVICE void bulk_load(void* to, const void* from, u32 bytes, Mbarrier* mbarrier) {
    u64 address = reinterpret_cast<u64>(from), count = bytes / 2;
    emulated::mbarrier_state(mbarrier);
    if (emulated::offset_in_block(to, bytes) % 16 != 0 || address % 16 != 0 || bytes % 16 != 0)
        emulated::fault("bulk copy: misaligned");
    emulated::Map map = {0, address, {count, 1, 1, 1}, {2, 0, 0, 0}, {u32(count), 1, 1, 1}};
    emulated::add_copy({static_cast<u8*>(to), map, {0, 0, 0, 0}, mbarrier, false}, bytes);
}

DEVICE void prefetch_tensor_map(const TensorMap&) {}
DEVICE void store_for_async_proxy(u16* to, const u32 (&words)[4]) {
    if (emulated::offset_in_block(to, 16) % 16 != 0)
        emulated::fault("16-byte store at a misaligned address");
    emulated::own_lane().stores.push_back({to, {words[0], words[1], words[2], words[3]}, 16});
}
DEVICE void store_pair_for_async_proxy(u16* to, u32 pair) {
    if (emulated::offset_in_block(to, 4) % 4 != 0)
        emulated::fault("4-byte store at a misaligned address");
    emulated::own_lane().stores.push_back({to, {pair, 0, 0, 0}, 4});
}
DEVICE void fence_proxy_async() {
    for (const emulated::Store& store : emulated::own_lane().stores)
        std::memcpy(store.to, store.words, store.bytes);
    emulated::own_lane().stores.clear();
}

template <u32 count>
DEVICE void setmaxnreg_dec() {
    emulated::Lane& lane = emulated::own_lane();
    if (count % 8 != 0 || count < 24 || count > lane.registers)
        emulated::fault("setmaxnreg.dec: invalid count");
    emulated::async_units().free_registers += lane.registers - count;
    lane.registers = count;
    emulated::changed();
}
template <u32 count>
DEVICE void setmaxnreg_inc() {
    emulated::Lane& lane = emulated::own_lane();
    if (count % 8 != 0 || count > 256 || count < lane.registers)
        emulated::fault("setmaxnreg.inc: invalid count");
    emulated::wait_until(
        [&] { return emulated::async_units().free_registers >= i64(count - lane.registers); });
    emulated::async_units().free_registers -= count - lane.registers;
    lane.registers = count;
}

DEVICE void wgmma_fence() { emulated::own_lane().wgmma_fenced = true; }
DEVICE void wgmma_commit() { ++emulated::own_lane().groups; }
template <u32 open>
DEVICE void wgmma_wait() {
    emulated::exchange({{open, 0, 0, 0}}, emulated::complete_products);
    emulated::own_lane().wgmma_fenced = false;
}
template <u32 count>
DEVICE void fence_operand(float (&acc)[count]) {
    emulated::pin(acc);
}
template <u32 count>
DEVICE void fence_operand(u32 (&fragments)[count][4]) {
    for (const u32(&fragment)[4] : fragments) emulated::pin(fragment);
}

template <u32 count>
DEVICE void wgmma_ss_bf16(float (&acc)[count], u64 left, u64 right, bool add) {
    emulated::issue_product(acc, count, nullptr, left, right, {add, false});
}
template <u32 count>
DEVICE void wgmma_ss_f16(float (&acc)[count], u64 left, u64 right, bool add) {
    emulated::issue_product(acc, count, nullptr, left, right, {add, true});
}
template <u32 count>
DEVICE void wgmma_rs_bf16(float (&acc)[count], const u32 (&left)[4], u64 right) {
    emulated::issue_product(acc, count, left, 0, right, {true, false});
}
template <u32 count>
DEVICE void wgmma_rs_f16(float (&acc)[count], const u32 (&left)[4], u64 right) {
    emulated::issue_product(acc, count, left, 0, right, {true, true});
}

DEVICE float tanh_approx(float x) { return std::tanh(x); }
DEVICE float max_number(float x, float y) { return std::fmax(x, y); }
