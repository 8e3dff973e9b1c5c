// The host's side of warpgroup_primitives.cuh. Everything happens as late as the rules allow, and what is on its way is NaN until then:
//
//   copies of boxes   done when no fiber can go on, first those that somebody waits for, in an order drawn from the seed; where they go is NaN from
//                     the moment they are begun
//   products          done when their group is waited for; until then their sums are NaN, and what a thread writes there is lost. Left registers and
//                     shared memory are read then, not before
//   stores for units  there once their thread has called show_units
//
// A descriptor is decoded by its bits and shared memory read through its swizzle, so that a wrong one gives wrong numbers. What the rules forbid
// outright fails the launch: a barrier that was not begun or not shown, an arrival too many, products without begin_products, an address out of
// bounds or out of line, registers that are not there, a named barrier that somebody is still waited for at when the block ends.
#pragma once

#include <algorithm>
#include <array>

namespace emulated {
namespace {

const u32 REGISTERS = 64 * 1024 / THREADS / 8 * 8;
const u32 GUARD_BYTES = 1024;
const u32 SWIZZLE_128 = 1;

// The layout of a tensor map of the emulated driver: mirrored in emulator/maps.rs.
const u64 MAP_MAGIC = 0x70616d736e6e61ull;
struct Map {
    u64 magic, address;
    u64 lengths[4];
    u64 strides[4];  // bytes; the first is an element
    u32 box[4];
};

struct PhaseState {
    const Phases* at;
    u32 owner;
    bool shown;
    u32 count, pending, parity;
    i64 bytes;
};

struct BoxCopy {
    u8* to;
    Map map;
    u32 first[4];
    Phases* phases;
};

struct Store {
    u16* to;
    u32 words[4];
};

// A product of one warp.
struct Product {
    std::array<float*, WARP> sums;
    std::array<const u32*, WARP> left;  // null: `left_description`
    u64 left_description, right;
    u32 columns, group, lanes;
    bool add, is_f16;
};

// Sums in flight: their numbers, and how many products have yet to touch them.
struct Flying {
    float* at;
    std::vector<float> numbers;
    u32 products;
};

struct Lane {
    std::vector<Flying> flying;
    std::vector<Store> stores;
    u32 issued, groups, registers;
    bool begun;
    const Phases* awaited;
};

struct NamedBarrier {
    u32 arrived, expected;
    u64 generation;
    bool any, latched;
};

struct Units {
    std::vector<char> memory;
    char* base;
    std::vector<PhaseState> phases;
    std::vector<BoxCopy> copies;
    std::array<Lane, THREADS> lanes;
    // products of a warp that are not done; `done` of them came before
    std::array<std::vector<Product>, THREADS / WARP> products;
    std::array<u32, THREADS / WARP> done;
    std::array<NamedBarrier, 16> named;
    i64 free_registers;
};

inline Units& units() { return *current()->units; }
inline Lane& own_lane() { return units().lanes[current()->thread]; }

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

void begin_units(Block& block) {
    if (!block.units) block.units = std::make_shared<Units>();
    Units& all = *block.units;
    all.memory.assign(block.launch_bytes + 2 * GUARD_BYTES, char(0xff));
    u64 start = reinterpret_cast<u64>(all.memory.data());
    all.base = reinterpret_cast<char*>((start + 1023) / 1024 * 1024);
    all.phases.clear();
    all.copies.clear();
    for (Lane& lane : all.lanes) {
        lane.flying.clear();
        lane.stores.clear();
        lane.issued = lane.groups = 0;
        lane.registers = REGISTERS;
        lane.begun = false;
        lane.awaited = nullptr;
    }
    for (auto& products : all.products) products.clear();
    all.done.fill(0);
    all.named.fill(NamedBarrier{});
    all.free_registers = 0;
}

bool end_units(Block& block) {
    Units& all = *block.units;
    // a copy or a store that nobody waited for, or memory past the end
    bool whole = all.copies.empty();
    for (const Lane& lane : all.lanes) whole = whole && lane.flying.empty() && lane.stores.empty();
    for (const NamedBarrier& barrier : all.named) whole = whole && barrier.arrived == 0;
    for (const char* at = all.base + block.launch_bytes; at < all.memory.data() + all.memory.size(); ++at) whole = whole && *at == char(0xff);
    if (!whole) tell("something is left that nobody waited for, or memory was written past its end");
    return whole;
}

// Of bytes of this block's shared memory: the offset, which is the address as the units have it.
inline u32 offset_in_block(const void* at, u32 bytes) {
    u64 offset = reinterpret_cast<u64>(at) - reinterpret_cast<u64>(units().base);
    if (offset + bytes > current()->launch_bytes) fault("an address outside of shared memory");
    return u32(offset);
}

// ---- phases

inline PhaseState& state_of(const Phases* phases) {
    for (PhaseState& state : units().phases) {
        if (state.at != phases) continue;
        if (!state.shown && state.owner != current()->thread) fault("a barrier that was not shown");
        return state;
    }
    fault("a barrier that was not begun");
    return units().phases.front();
}

inline void settle(PhaseState& state) {
    if (state.pending > 0 || state.bytes != 0) return;
    state.parity ^= 1;
    state.pending = state.count;
}

inline void arrive(Phases* phases, u32 bytes) {
    PhaseState& state = state_of(phases);
    state.bytes += bytes;
    if (state.pending == 0) fault("an arrival too many");
    --state.pending;
    u32 before = state.parity;
    settle(state);
    changed();
    // whoever waited for this may be the faster one
    if (state.parity != before) pause(Wait::others);
}

// ---- copies

inline u32 swizzled_128(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

inline void do_copy(Block& block, const BoxCopy& copy) {
    const Map& map = copy.map;
    u32 start = u32(reinterpret_cast<char*>(copy.to) - block.units->base), place = 0;
    for (u32 w = 0; w < map.box[3]; ++w)
        for (u32 z = 0; z < map.box[2]; ++z)
            for (u32 y = 0; y < map.box[1]; ++y)
                for (u32 x = 0; x < map.box[0]; ++x, place += 2) {
                    u64 at[4] = {u64(copy.first[0]) + x, u64(copy.first[1]) + y, u64(copy.first[2]) + z, u64(copy.first[3]) + w};
                    bool inside = true;
                    u64 from = map.address;
                    for (u32 axis = 0; axis < 4; ++axis) {
                        inside = inside && at[axis] < map.lengths[axis];
                        from += at[axis] * map.strides[axis];
                    }
                    u16 element = inside ? *reinterpret_cast<const u16*>(from) : u16(0);
                    std::memcpy(block.units->base + swizzled_128(start + place), &element, 2);
                }
    for (PhaseState& state : block.units->phases)
        if (state.at == copy.phases) {
            state.bytes -= place;
            settle(state);
        }
}

bool step_units(Block& block) {
    Units& all = *block.units;
    if (all.copies.empty()) return false;
    auto is_awaited = [&](const BoxCopy& copy) {
        return std::any_of(all.lanes.begin(), all.lanes.end(), [&](const Lane& lane) { return lane.awaited == copy.phases; });
    };
    auto rest = std::partition(all.copies.begin(), all.copies.end(), is_awaited);
    u64 count = rest == all.copies.begin() ? all.copies.size() : u64(rest - all.copies.begin());
    auto which = all.copies.begin() + i64(draw(*block.seed) % count);
    do_copy(block, *which);
    all.copies.erase(which);
    ++block.changes;
    return true;
}

}  // namespace
}  // namespace emulated

#include "products_twin.h"

namespace emulated {
namespace {

// ---- named barriers

inline NamedBarrier& come(u32 name, u32 threads, bool mine) {
    if (name == 0 || name > 15 || threads % WARP != 0) fault("a named barrier that there is not");
    NamedBarrier& barrier = units().named[name];
    if (barrier.arrived > 0 && barrier.expected != threads) fault("a named barrier for two numbers of threads");
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

inline bool wait_there(u32 name, u32 threads, bool mine) {
    u64 before = units().named[name % 16].generation;
    NamedBarrier& barrier = come(name, threads, mine);
    wait_until([&] { return barrier.generation != before; });
    return barrier.latched;
}

}  // namespace
}  // namespace emulated

DEVICE u8* launch_shared() { return reinterpret_cast<u8*>(emulated::units().base); }
DEVICE u32 shared_address(const void* at) { return emulated::offset_in_block(at, 1); }

DEVICE void warp_barrier() { emulated::exchange({}); }
DEVICE void named_barrier(u32 name, u32 threads) { emulated::wait_there(name, threads, false); }
DEVICE void named_arrive(u32 name, u32 threads) { emulated::come(name, threads, false); }
DEVICE bool named_barrier_any(u32 name, u32 threads, bool mine) { return emulated::wait_there(name, threads, mine); }

DEVICE void begin_phases(Phases* phases, u32 arrivals) {
    emulated::offset_in_block(phases, sizeof *phases);
    if (arrivals == 0 || reinterpret_cast<u64>(phases) % 8 != 0) emulated::fault("a barrier that nobody can end");
    emulated::units().phases.push_back({phases, emulated::current()->thread, false, arrivals, arrivals, 0, 0});
}
DEVICE void show_phases() {
    for (emulated::PhaseState& state : emulated::units().phases) state.shown |= state.owner == emulated::current()->thread;
}
DEVICE void arrive(Phases* phases) { emulated::arrive(phases, 0); }
DEVICE void arrive_expecting(Phases* phases, u32 bytes) { emulated::arrive(phases, bytes); }
DEVICE void wait_for_phase(Phases* phases, u32 parity) {
    emulated::state_of(phases);
    emulated::own_lane().awaited = phases;
    emulated::wait_until([&] { return emulated::state_of(phases).parity != parity; });
    emulated::own_lane().awaited = nullptr;
}

DEVICE void copy_box(u16* to, const TensorMap& map, Phases* phases, u32 x, u32 row, u32 head, u32 batch) {
    emulated::BoxCopy copy = {reinterpret_cast<u8*>(to), {}, {x, row, head, batch}, phases};
    std::memcpy(&copy.map, &map, sizeof copy.map);
    emulated::state_of(phases);
    // a map is read where kernels get their arguments, at a multiple of 64
    if (copy.map.magic != emulated::MAP_MAGIC || reinterpret_cast<u64>(&map) % 64 != 0) emulated::fault("no tensor map");
    u32 bytes = 2;
    for (u32 length : copy.map.box) bytes *= length;
    if (emulated::offset_in_block(to, bytes) % 128 != 0) emulated::fault("a box that is not aligned");
    std::memset(to, 0xff, bytes);
    emulated::units().copies.push_back(copy);
}

DEVICE void store_for_units(u16* to, const u32 (&words)[4]) {
    if (emulated::offset_in_block(to, 16) % 16 != 0) emulated::fault("a store that is not aligned");
    emulated::own_lane().stores.push_back({to, {words[0], words[1], words[2], words[3]}});
}
DEVICE void show_units() {
    for (const emulated::Store& store : emulated::own_lane().stores) std::memcpy(store.to, store.words, 16);
    emulated::own_lane().stores.clear();
}

template <u32 count>
DEVICE void fewer_registers() {
    emulated::Lane& lane = emulated::own_lane();
    if (count % 8 != 0 || count < 24 || count > lane.registers) emulated::fault("registers that cannot be given back");
    emulated::units().free_registers += lane.registers - count;
    lane.registers = count;
    emulated::changed();
}
template <u32 count>
DEVICE void more_registers() {
    emulated::Lane& lane = emulated::own_lane();
    if (count % 8 != 0 || count > 256 || count < lane.registers) emulated::fault("registers that cannot be had");
    emulated::wait_until([&] { return emulated::units().free_registers >= i64(count - lane.registers); });
    emulated::units().free_registers -= count - lane.registers;
    lane.registers = count;
}

DEVICE void begin_products() { emulated::own_lane().begun = true; }
DEVICE void end_products() { ++emulated::own_lane().groups; }
template <u32 open>
DEVICE void wait_for_products() {
    emulated::exchange({{open, 0, 0, 0}}, emulated::do_products);
    emulated::own_lane().begun = false;
}
template <u32 count>
DEVICE void pin(float (&)[count]) {}

template <u32 count>
DEVICE void multiply_shared_bf16(float (&sums)[count], u64 left, u64 right, bool add) {
    emulated::multiply_later(sums, count, nullptr, left, right, add, false);
}
template <u32 count>
DEVICE void multiply_shared_f16(float (&sums)[count], u64 left, u64 right, bool add) {
    emulated::multiply_later(sums, count, nullptr, left, right, add, true);
}
template <u32 count>
DEVICE void multiply_registers_bf16(float (&sums)[count], const u32 (&left)[4], u64 right) {
    emulated::multiply_later(sums, count, left, 0, right, true, false);
}
template <u32 count>
DEVICE void multiply_registers_f16(float (&sums)[count], const u32 (&left)[4], u64 right) {
    emulated::multiply_later(sums, count, left, 0, right, true, true);
}

DEVICE float larger_number(float x, float y) { return std::fmax(x, y); }
