// Host twin of primitives.cuh: the emulator runs a block as fibers, one per thread, cooperatively
// on one host thread.
//
//   until all blocks of the grid, which start in an order drawn from a seed, have ended:
//       choose one of the RESIDENT_BLOCKS blocks that run at the same time
//       for each warp of the block, in an order drawn from the seed:
//           resume its fibers until all of them wait at a barrier or an exchange
//       if no fiber can run:  complete one asynchronous operation of the block
//       if neither has happened in any resident block:  fail (deadlock)
//
// A fiber runs until it must wait: at a barrier for the block, at a shuffle for its warp, at a
// matrix instruction of AMD for its wave of 64. A warp runs ahead of the others as far as barriers
// allow, so that a missing barrier makes it read data that is not written yet. Shared memory is
// filled with NaN when a block starts. Every wait is for a condition that the scheduler can test, so
// that a launch that cannot end fails at once.
#pragma once

#include <csetjmp>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <ucontext.h>
#include <vector>

#define DEVICE static inline __attribute__((always_inline))
#define METHOD inline __attribute__((always_inline))
#define DEVICE_CALL static
#define UNROLL
#define NOT_UNROLLED _Pragma("unroll 1")

// Unnamed namespace: several kernel libraries are loaded side by side, and a shared symbol would
// let one resume fibers with the code of another.
namespace emulated {
namespace {

const u32 WARP = 32;
// Threads that run together: a warp, or a wave of two warps.
#ifdef ANNULUS_AMD
const u32 WAVE = 64;
#else
const u32 WAVE = WARP;
#endif
// Enough for a kernel's local arrays (accumulators of 256 dims) with every call inlined.
const size_t STACK_BYTES = 64 * 1024;
// Distance of two stacks: with an odd number of cache lines (64 bytes) more, equal parts of the
// stacks lie in different sets of the caches.
const size_t STACK_STRIDE = STACK_BYTES + 5 * 64;
// Static shared memory per block: CUDA's limit.
const size_t SHARED_BYTES = 48 * 1024;
// Static and dynamic shared memory per block: that of compute capability 9.0; of a compute unit.
#ifdef ANNULUS_AMD
const size_t ALL_SHARED_BYTES = 64 * 1024;
#else
const size_t ALL_SHARED_BYTES = 227 * 1024;
#endif
// Bytes behind the dynamic shared memory of a block, in which no kernel may write.
const size_t GUARD_BYTES = 1024;

// State in which a fiber waits. `change`: resumed after every change of the block's state;
// `others`: resumed after every other warp had its turn.
enum class Wait { nothing, block, warp, change, others };

// A pending cp.async copy. It completes when its thread waits for the group, not earlier.
struct Copy {
    u16* to;
    const u16* from;  // null for zeros
    u32 group;
};

struct Fiber {
    jmp_buf at;
    bool started = false, done;
    Wait wait;
    size_t shared_used;
    u32 exchanges[2];  // of its warp, of its wave
    std::vector<Copy> copies;
    u32 groups;
    u64 changes_seen;
};

// Data that a lane passes to the other lanes of its warp.
struct LaneWords {
    u64 words[4];
};

struct Warp {
    u32 arrived, ended;  // lanes in the current exchange; lanes whose kernel has ended
    bool needs_all;      // the current exchange reads every lane
    void (*last)(const LaneWords*);  // of the current exchange
    LaneWords slots[2][WAVE];
};

// State of wgmma, TMA and mbarriers; defined in warpgroup_host.h.
struct AsyncUnits;

// Blocks that run at the same time: enough that two wait for a third. A block that waits for one
// beyond them would wait for ever, as it may on a GPU with as many multiprocessors.
const u32 RESIDENT_BLOCKS = 3;

// Added to a planted mistake: asynchronous copies complete when they are issued. Mirrored in
// crates/cuda-emulator/src/context.rs.
const u32 EARLY_COPIES = 1 << 16;
// Likewise: shuffles are exchanges of all lanes of a wave whose kernel has not ended. A GPU does not
// require it of lanes that read within their warp, but every kernel keeps to it, so that a lane that
// is missing in a shuffle is found.
const u32 WHOLE_WAVES = 1 << 17;

struct Block {
    std::vector<Fiber> fibers = std::vector<Fiber>(THREADS);
    std::vector<Warp> warps = std::vector<Warp>(THREADS / WARP);
    std::vector<Warp> waves = std::vector<Warp>(THREADS / WAVE);
    // not initialized: only the stack pages that are used become resident
    std::unique_ptr<char[]> stacks{new char[THREADS * STACK_STRIDE]};
    alignas(16) char shared[SHARED_BYTES];
    jmp_buf scheduler;
    u32 index[3];
    u32 grid[3];
    u32 threads;  // of the kernel: at most THREADS
    u32 thread;
    u32 arrived;
    bool any, any_latched;
    // a rule was broken: the launch fails
    bool fault;
    void (*kernel)(const void*);
    const void* arguments;
    // dynamic shared memory of the launch, aligned as on the device, with guards behind it
    u32 dynamic_shared_bytes;
    std::vector<char> dynamic_memory;
    char* dynamic_shared;
    u32 mistake;  // perhaps with EARLY_COPIES or WHOLE_WAVES
    u64* seed;
    u64 changes;
    // fibers that have not ended, and the order in which they run
    u32 alive;
    std::vector<u32> waves_order, lanes_order;
    // the blocks that run at the same time, this one among them
    std::shared_ptr<AsyncUnits> async_units;
};

#ifdef ANNULUS_WARPGROUP
// init: a block starts. step: completes one asynchronous operation; returns false if there is none.
// finish: returns false if the block left an operation or an arrival behind.
void init_async_units(Block& block);
bool step_async_units(Block& block);
bool finish_async_units(Block& block);
#else
inline void init_async_units(Block&) {}
inline bool step_async_units(Block&) { return false; }
inline bool finish_async_units(Block&) { return true; }
#endif

inline Block*& current() {
    static thread_local Block* block = nullptr;
    return block;
}

inline void pause(Wait wait) {
    Block& block = *current();
    Fiber& fiber = block.fibers[block.thread];
    fiber.wait = wait;
    if (!_setjmp(fiber.at)) _longjmp(block.scheduler, 1);
}

// Prints why a launch fails, if kernels are compiled with ANNULUS_TRACE.
inline void trace(const char* why) {
#ifdef ANNULUS_TRACE
    std::fprintf(stderr, "emulated kernel: %s\n", why);
#else
    (void)why;
#endif
}

// Fails the launch.
inline void fault(const char* why) {
    trace(why);
    current()->fault = true;
    pause(Wait::block);
}

inline void barrier() {
    Block& block = *current();
    if (++block.arrived < block.threads) {
        pause(Wait::block);
        return;
    }
    block.arrived = 0;
    block.any_latched = block.any;
    block.any = false;
    for (Fiber& fiber : block.fibers)
        if (fiber.wait == Wait::block) fiber.wait = Wait::nothing;
    // the last arrival does not continue first: another warp may run ahead
    pause(Wait::nothing);
}

// Ends the current exchange of the lanes of `warp`, of which `first` is the first, if all have
// arrived that can.
inline bool release(Block& block, Warp& warp, u32 first, u32 lanes) {
    if (warp.arrived == 0 || warp.arrived + warp.ended < lanes) return false;
    if (warp.needs_all && warp.ended > 0) {
        trace("an exchange that reads a lane whose kernel has ended");
        block.fault = true;
    }
    warp.arrived = 0;
    warp.needs_all = false;
    for (u32 other = first; other < first + lanes; ++other)
        if (block.fibers[other].wait == Wait::warp) block.fibers[other].wait = Wait::nothing;
    return true;
}

// Passes `mine` to all lanes of the warp, or of the wave, and returns everyone's data, valid until
// the lane's next exchange but one. The last lane to arrive calls `last` before the others continue.
// `needs_all`: lanes of a wave read beyond their own warp.
template <u32 lanes = WARP>
inline const LaneWords* exchange(const LaneWords& mine, void last(const LaneWords*) = nullptr,
                                 bool needs_all = false) {
    Block& block = *current();
    u32 lane = block.thread % lanes, first = block.thread - lane;
    const bool of_wave = lanes > WARP;
    Warp& warp = (of_wave ? block.waves : block.warps)[block.thread / lanes];
    // a lane can be at most one exchange ahead of another, so two sets of slots are enough
    LaneWords* slots = warp.slots[block.fibers[block.thread].exchanges[of_wave]++ % 2];
    slots[lane] = mine;
    if (warp.arrived > 0 && warp.last != last) fault("lanes that are at different instructions");
    warp.last = last;
    warp.needs_all |= needs_all;
    if (++warp.arrived == lanes && last) last(slots);
    if (!release(block, warp, first, lanes)) pause(Wait::warp);
    return slots;
}

inline u32 lane() { return current()->thread % WARP; }

template <typename T>
inline T shuffle(T mine, u32 lanes) {
    LaneWords lane_words = {};
    std::memcpy(lane_words.words, &mine, sizeof mine);
    u32 self = current()->thread;
    T other;
    if (WAVE > WARP && (lanes >= WARP || (current()->mistake & WHOLE_WAVES)))
        std::memcpy(&other,
                    exchange<WAVE>(lane_words, nullptr, lanes >= WARP)[self % WAVE ^ lanes].words,
                    sizeof other);
    else
        std::memcpy(&other, exchange(lane_words)[self % WARP ^ lanes].words, sizeof other);
    return other;
}

// ldmatrix: lane 8·m + i passes the address of row i of matrix m.
template <u32 count, bool transposed>
inline void ldmatrix(u32 (&to)[count], const u16* row) {
    LaneWords lane_words = {};
    lane_words.words[0] = reinterpret_cast<u64>(row);
    u32 self = lane();
    const LaneWords* rows = exchange(lane_words);
    for (u32 matrix = 0; matrix < count; ++matrix) {
        u32 pair = 0;
        for (u32 half = 0; half < 2; ++half) {
            u32 y = self / 4, x = 2 * (self % 4) + half;
            const u16* line =
                reinterpret_cast<const u16*>(rows[8 * matrix + (transposed ? x : y)].words[0]);
            pair |= u32(line[transposed ? y : x]) << (16 * half);
        }
        to[matrix] = pair;
    }
}

// Rounds towards zero; infinity if the nearest float is.
inline float cut_to_float(double x) {
    float near = float(x);
    return std::isfinite(near) && std::fabs(double(near)) > std::fabs(x)
               ? std::nextafter(near, 0.0f)
               : near;
}

// Computes an mma for the whole warp. Each lane passes its fragments and the address of its
// accumulators. Tensor cores add the products of an instruction at once, and the sum is cut, so
// that it differs from a chain of multiply-adds of f32; so does this one.
//
// Source: Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores".
template <float widened(u16)>
inline void mma_all(const LaneWords* all) {
    bool nothing = true;
    for (u32 of = 0; of < WARP; ++of)
        nothing = nothing && !(all[of].words[0] | all[of].words[1] | all[of].words[2]);
    // padding of a tile: adds nothing
    if (nothing) return;
    // a row as a vector: kernels are compiled without automatic vectorization
    typedef double Row __attribute__((vector_size(64)));
    double left[16][16];
    Row right[16], acc[16];
    for (u32 of = 0; of < WARP; ++of) {
        const u64* words = all[of].words;
        const float* mine = reinterpret_cast<const float*>(words[3]);
        for (u32 index = 0; index < 4; ++index) {
            u32 row = of / 4 + (index >= 2 ? 8 : 0), column = 2 * (of % 4) + index % 2;
            acc[row][column] = mine[index];
            // register `index / 2` of this half of the dims, then the halves of a register
            for (u32 half = 0; half < 2; ++half)
                left[row][8 * half + column] =
                    widened(u16(words[half] >> (index >= 2 ? 32 : 0) >> (16 * (index % 2))));
            right[column + (index >= 2 ? 8 : 0)][of / 4] =
                widened(u16(words[2] >> (index >= 2 ? 32 : 0) >> (16 * (index % 2))));
        }
    }
    for (u32 k = 0; k < 16; ++k)
        for (u32 row = 0; row < 16; ++row) acc[row] += left[row][k] * right[k];
    for (u32 of = 0; of < WARP; ++of)
        for (u32 index = 0; index < 4; ++index)
            reinterpret_cast<float*>(all[of].words[3])[index] =
                cut_to_float(acc[of / 4 + (index >= 2 ? 8 : 0)][2 * (of % 4) + index % 2]);
}

// mma.m16n8k16. The last lane to arrive computes for all.
template <float widened(u16)>
inline void mma(float (&acc)[4], const u32 (&left)[4], u32 first, u32 second) {
    exchange({{left[0] | u64(left[1]) << 32, left[2] | u64(left[3]) << 32,
               first | u64(second) << 32, reinterpret_cast<u64>(acc)}},
             mma_all<widened>);
}

#ifdef ANNULUS_MATRIX

// 16-bit element of a matrix instruction. On gfx90a those below the normal range count as 0.
//
// Source: PyTorch's numerical accuracy notes, "Reduced Precision FP16 and BF16 GEMMs and
// Convolutions on AMD Instinct MI200 Devices".
template <float widened(u16)>
inline double matrix_element(u16 bits) {
    const float x = widened(bits);
#ifdef __gfx90a__
    const float smallest = ANNULUS_DTYPE == 3 ? 6.103515625e-05f : 1.17549435e-38f;
    if (std::fabs(x) < smallest) return 0;
#endif
    return x;
}

// Computes one v_mfma_f32_32x32x8 (32x32x16 on gfx950) for the whole wave: the products and the
// accumulator are added exactly and rounded once, so that no result depends on an order. `part`:
// the half of the elements that lanes pass, with instructions of eight terms.
template <float widened(u16), u32 part, u32 elements>
inline void mfma_all(const LaneWords* all) {
    // a row as a vector: kernels are compiled without automatic vectorization
    typedef double Row __attribute__((vector_size(256)));
    static thread_local double left[32][2 * elements];
    static thread_local Row right[2 * elements], acc[32];
    bool nothing = true;
    for (u32 of = 0; of < WAVE; ++of) {
        auto lefts = reinterpret_cast<const u32*>(all[of].words[0]),
             rights = reinterpret_cast<const u32*>(all[of].words[1]);
        auto own = reinterpret_cast<const float(*)[4]>(all[of].words[2]);
        for (u32 e = 0; e < elements; ++e) {
            const u32 at = elements * part + e, k = elements * (of / 32) + e;
            left[of % 32][k] = matrix_element<widened>(u16(lefts[at / 2] >> 16 * (at % 2)));
            right[k][of % 32] = matrix_element<widened>(u16(rights[at / 2] >> 16 * (at % 2)));
            nothing = nothing && left[of % 32][k] == 0 && right[k][of % 32] == 0;
        }
        for (u32 e = 0; e < 16; ++e)
            acc[8 * (e / 4) + 4 * (of / 32) + e % 4][of % 32] =
                own[e / 4][e % 4];
    }
    // padding of a tile: adds nothing
    if (nothing) return;
    for (u32 row = 0; row < 32; ++row)
        for (u32 k = 0; k < 2 * elements; ++k) acc[row] += left[row][k] * right[k];
    for (u32 of = 0; of < WAVE; ++of) {
        auto own = reinterpret_cast<float(*)[4]>(all[of].words[2]);
        for (u32 e = 0; e < 16; ++e)
            own[e / 4][e % 4] = float(acc[8 * (e / 4) + 4 * (of / 32) + e % 4][of % 32]);
    }
}

// See mma_bf16_32x32x16 of primitives_amd.h. The last lane to arrive computes for all.
template <float widened(u16)>
inline void mfma(float (*acc)[4], const u32 (&left)[4], const u32 (&right)[4]) {
    const LaneWords mine = {{reinterpret_cast<u64>(left), reinterpret_cast<u64>(right),
                             reinterpret_cast<u64>(acc), 0}};
#ifdef __gfx950__
    exchange<WAVE>(mine, mfma_all<widened, 0, 8>, true);
#else
    exchange<WAVE>(mine, mfma_all<widened, 0, 4>, true);
    exchange<WAVE>(mine, mfma_all<widened, 1, 4>, true);
#endif
}

#endif

inline void* shared(size_t bytes) {
    Block& block = *current();
    size_t& used = block.fibers[block.thread].shared_used;
    char* index = block.shared + used;
    used += (bytes + 15) / 16 * 16;
    if (used > SHARED_BYTES || used + block.dynamic_shared_bytes > ALL_SHARED_BYTES)
        fault("shared memory exceeds that of a block");
    return index;
}

// Completes the copies of all groups of this thread, except the last `open`.
inline void cp_async_wait(u32 open) {
    Block& block = *current();
    Fiber& fiber = block.fibers[block.thread];
    size_t left = 0;
    for (const Copy& copy : fiber.copies) {
        if (copy.group + open >= fiber.groups) {
            fiber.copies[left++] = copy;
        } else if (copy.from) {
            std::memcpy(copy.to, copy.from, 16);
        } else {
            std::memset(copy.to, 0, 16);
        }
    }
    fiber.copies.resize(left);
}

// Main function of a fiber: runs one kernel's thread after another. The block's address is passed
// in halves (makecontext takes ints). Between kernels the fiber may move to another host thread, so
// nothing thread-local may be kept across the loop.
inline void fiber_main(u32 low, u32 high, u32 thread) {
    Block& block = *reinterpret_cast<Block*>(u64(low) | u64(high) << 32);
    Fiber& fiber = block.fibers[thread];
    for (;;) {
        block.kernel(block.arguments);
        fiber.done = true;
        Warp& wave = block.waves[thread / WAVE];
        ++wave.ended;
        release(block, wave, thread / WAVE * WAVE, WAVE);
        if (!_setjmp(fiber.at)) _longjmp(block.scheduler, 1);
    }
}

inline u64 draw(u64& seed) {
    u64 z = seed += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

inline std::vector<u32> shuffled(u32 count, u64& seed) {
    std::vector<u32> order(count);
    for (u32 index = 0; index < count; ++index) {
        u32 other = draw(seed) % (index + 1);
        order[index] = order[other];
        order[other] = index;
    }
    return order;
}

// Runs fiber `thread` until it waits or ends.
inline __attribute__((noinline)) void resume(Block& block, u32 thread) {
    Fiber& fiber = block.fibers[thread];
    block.thread = thread;
    if (_setjmp(block.scheduler)) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = block.stacks.get() + thread * STACK_STRIDE;
    start.uc_stack.ss_size = STACK_BYTES;
    start.uc_link = nullptr;
    u64 address = reinterpret_cast<u64>(&block);
    makecontext(&start, reinterpret_cast<void (*)()>(fiber_main), 3, u32(address),
                u32(address >> 32), thread);
    setcontext(&start);
}

// Idle blocks with their fibers, reused by later launches.
struct Pool {
    std::mutex mutex;
    std::vector<std::unique_ptr<Block>> blocks;

    std::unique_ptr<Block> take() {
        std::lock_guard<std::mutex> held(mutex);
        if (blocks.empty()) return std::make_unique<Block>();
        std::unique_ptr<Block> block = std::move(blocks.back());
        blocks.pop_back();
        return block;
    }

    void give(std::unique_ptr<Block> block) {
        std::lock_guard<std::mutex> held(mutex);
        blocks.push_back(std::move(block));
    }
};

inline Pool& pool() {
    static Pool all;
    return all;
}

inline void init_dynamic_shared(Block& block) {
    // one guard's worth of bytes for the alignment
    block.dynamic_memory.assign(block.dynamic_shared_bytes + 2 * GUARD_BYTES, char(0xff));
    u64 start = reinterpret_cast<u64>(block.dynamic_memory.data());
    block.dynamic_shared = reinterpret_cast<char*>((start + 1023) / 1024 * 1024);
}

// Returns false if the block wrote past the end of its dynamic shared memory.
inline bool guards_hold(const Block& block) {
    const char* end = block.dynamic_memory.data() + block.dynamic_memory.size();
    for (const char* at = block.dynamic_shared + block.dynamic_shared_bytes; at < end; ++at)
        if (*at != char(0xff)) {
            trace("a write past the end of shared memory");
            return false;
        }
    return true;
}

inline void start_block(Block& block, const u32 (&index)[3]) {
    std::memset(block.shared, 0xff, SHARED_BYTES);
    init_dynamic_shared(block);
    for (u32 axis = 0; axis < 3; ++axis) block.index[axis] = index[axis];
    block.arrived = 0;
    block.any = block.fault = false;
    for (std::vector<Warp>* all : {&block.warps, &block.waves})
        for (Warp& warp : *all) {
            warp.arrived = warp.ended = 0;
            warp.needs_all = false;
        }
    for (Fiber& fiber : block.fibers) {
        fiber.done = false;
        fiber.wait = Wait::nothing;
        fiber.shared_used = 0;
        fiber.exchanges[0] = fiber.exchanges[1] = 0;
        fiber.copies.clear();
        fiber.groups = 0;
    }
    block.changes = 0;
    block.alive = block.threads;
    init_async_units(block);
    block.waves_order = shuffled(block.threads / WAVE, *block.seed);
    block.lanes_order = shuffled(WAVE, *block.seed);
}

// Resumes every fiber of a block until all of them wait or have ended; if none could run, completes
// one asynchronous operation. Returns false if neither was possible.
inline bool run_round(Block& block) {
    bool moved = false;
    current() = &block;
    for (Fiber& fiber : block.fibers)
        if (fiber.wait == Wait::others) fiber.wait = Wait::nothing;
    // each wave runs ahead of the others as far as barriers allow
    for (u32 wave : block.waves_order)
        for (bool ahead = true; ahead;) {
            ahead = false;
            for (u32 lane : block.lanes_order) {
                Fiber& fiber = block.fibers[wave * WAVE + lane];
                bool changed = fiber.wait == Wait::change && fiber.changes_seen != block.changes;
                if (fiber.done || (fiber.wait != Wait::nothing && !changed)) continue;
                resume(block, wave * WAVE + lane);
                moved = ahead = true;
                block.alive -= fiber.done;
            }
        }
    return block.fault || moved || step_async_units(block);
}

// Result of a launch: mirrored in crates/cuda-emulator/src/modules.rs.
enum Outcome { ENDED = 0, FAILED = 1, DEADLOCK = 2 };

// Blocks of a grid that have not started, in the order in which they will.
struct Grid {
    const u32* size;
    std::vector<u32> order;

    bool start_next(Block& block) {
        if (order.empty()) return false;
        u32 number = order.back();
        order.pop_back();
        start_block(block, {number % size[0], number / size[0] % size[1],
                            number / size[0] / size[1]});
        return true;
    }
};

// Runs all blocks of a grid. Those that have not ended are dropped from `resident` if it fails.
inline Outcome run_grid(Grid& grid, std::vector<std::unique_ptr<Block>>& running, u64& seed) {
    u64 stuck = 0, turn = 0;
    while (!running.empty()) {
        // after a block that is stuck the next one, so that all are tried
        turn = stuck > 0 ? turn + 1 : draw(seed);
        u64 which = turn % running.size();
        Block& block = *running[which];
        if (!run_round(block)) {
            if (++stuck < running.size()) continue;
            trace("deadlock: every fiber waits");
            return DEADLOCK;
        }
        stuck = 0;
        if (block.fault) return FAILED;
        if (block.alive > 0) continue;
        if (!guards_hold(block) || !finish_async_units(block)) return FAILED;
        if (grid.start_next(block)) continue;
        pool().give(std::move(running[which]));
        running.erase(running.begin() + i64(which));
    }
    return ENDED;
}

}  // namespace
}  // namespace emulated

// Runs a grid of blocks of `threads` threads.
extern "C" int annulus_emulate(void (*kernel)(const void*), u32 threads, const void* arguments,
                               const u32* size, u32 dynamic_shared_bytes, u32 mistake, u64 seed) {
    if (dynamic_shared_bytes > emulated::ALL_SHARED_BYTES) return emulated::FAILED;
    u64 blocks = u64(size[0]) * size[1] * size[2];
    emulated::Grid grid = {size, emulated::shuffled(u32(blocks), seed)};
    std::vector<std::unique_ptr<emulated::Block>> running;
    while (running.size() < emulated::RESIDENT_BLOCKS && running.size() < blocks) {
        std::unique_ptr<emulated::Block> block = emulated::pool().take();
        block->dynamic_shared_bytes = dynamic_shared_bytes;
        block->mistake = mistake;
        block->kernel = kernel;
        block->threads = threads;
        block->arguments = arguments;
        block->seed = &seed;
        for (int axis = 0; axis < 3; ++axis) block->grid[axis] = size[axis];
        grid.start_next(*block);
        running.push_back(std::move(block));
    }
    return emulated::run_grid(grid, running, seed);
}

#define KERNEL_OF(threads, blocks, name, Arguments)                        \
    static_assert((threads) <= THREADS && (threads) % emulated::WAVE == 0, \
                  "whole warps of a block's fibers");                      \
    static void name##_of_thread(const Arguments& a);                      \
    extern "C" void name(const void* arguments) {                          \
        name##_of_thread(*static_cast<const Arguments*>(arguments));       \
    }                                                                      \
    extern "C" u32 name##_threads() { return threads; }                    \
    extern "C" u32 name##_argument_bytes() { return sizeof(Arguments); }   \
    static void name##_of_thread(const Arguments& a)

#define KERNEL(name, Arguments) KERNEL_OF(THREADS, 1, name, Arguments)

#define SHARED(type, name, count) \
    type* name = static_cast<type*>(emulated::shared(sizeof(type) * (count)))
DEVICE u8* dynamic_shared() {
    return reinterpret_cast<u8*>(emulated::current()->dynamic_shared);
}

// True if the launch plants this mistake: used by the edits that tests make of the kernels' text
// (tests/emulated/mistakes), not by the kernels.
DEVICE bool planted(u32 mistake) {
    const u32 flags = emulated::EARLY_COPIES | emulated::WHOLE_WAVES;
    return (emulated::current()->mistake & ~flags) == mistake;
}

DEVICE u32 thread_index() { return emulated::current()->thread; }
DEVICE u32 thread_index_again() { return thread_index(); }
DEVICE u32 block_x() { return emulated::current()->index[0]; }
DEVICE u32 block_y() { return emulated::current()->index[1]; }
DEVICE u32 block_z() { return emulated::current()->index[2]; }
DEVICE u32 blocks_x() { return emulated::current()->grid[0]; }
DEVICE u32 blocks_y() { return emulated::current()->grid[1]; }

// As on the device, a misaligned address fails the launch.
DEVICE void load_16(u32* to, u64 from) {
    if (from % 16 != 0) emulated::fault("load of 16 bytes at a misaligned address");
    std::memcpy(to, reinterpret_cast<const void*>(from), 16);
}
DEVICE void store_16(u64 to, const u32* from) {
    if (to % 16 != 0) emulated::fault("store of 16 bytes at a misaligned address");
    std::memcpy(reinterpret_cast<void*>(to), from, 16);
}

DEVICE u32 recomputed(u32 x) { return x; }

DEVICE void barrier() { emulated::barrier(); }
DEVICE bool barrier_any(bool mine) {
    emulated::current()->any |= mine;
    emulated::barrier();
    return emulated::current()->any_latched;
}

DEVICE float shuffle_xor(float mine, u32 lanes) { return emulated::shuffle(mine, lanes); }
DEVICE double shuffle_xor(double mine, u32 lanes) { return emulated::shuffle(mine, lanes); }
DEVICE u32 shuffle_xor(u32 mine, u32 lanes) { return emulated::shuffle(mine, lanes); }

DEVICE void ldmatrix_x4(u32 (&to)[4], const u16* row) { emulated::ldmatrix<4, false>(to, row); }
DEVICE void ldmatrix_x4_trans(u32 (&to)[4], const u16* row) {
    emulated::ldmatrix<4, true>(to, row);
}

DEVICE void cp_async_16(u16* to, const u16* from, bool in_range) {
    emulated::Block& block = *emulated::current();
    emulated::Fiber& fiber = block.fibers[block.thread];
    // the device faults on a misaligned address
    if ((reinterpret_cast<u64>(to) | (in_range ? reinterpret_cast<u64>(from) : 0)) % 16 != 0)
        emulated::fault("cp.async of 16 bytes at a misaligned address");
    fiber.copies.push_back({to, in_range ? from : nullptr, fiber.groups});
}
DEVICE void cp_async_commit() {
    emulated::Block& block = *emulated::current();
    ++block.fibers[block.thread].groups;
}
template <u32 open>
DEVICE void cp_async_wait() {
    emulated::cp_async_wait(open);
}
DEVICE float from_bf16(u16 x);
DEVICE float from_f16(u16 x);
DEVICE void mma_bf16(float (&acc)[4], const u32 (&left)[4], u32 first, u32 second) {
    emulated::mma<from_bf16>(acc, left, first, second);
}
DEVICE void mma_f16(float (&acc)[4], const u32 (&left)[4], u32 first, u32 second) {
    emulated::mma<from_f16>(acc, left, first, second);
}


// Shared and global memory of AMD's kernels: see primitives_amd.h.
template <u32 words>
DEVICE void load_words(u32* to, const u16* from) {
    if (reinterpret_cast<u64>(from) % (4 * words) != 0)
        emulated::fault("a load at a misaligned address");
    std::memcpy(to, from, 4 * words);
}
DEVICE void load_shared_8(u32* to, const u16* from) { load_words<2>(to, from); }
DEVICE void load_shared_16(u32 (&to)[4], const u16* from) { load_words<4>(to, from); }
DEVICE void store_shared_8(u16* to, u32 first, u32 second) {
    const u32 words[2] = {first, second};
    if (reinterpret_cast<u64>(to) % 8 != 0) emulated::fault("a store at a misaligned address");
    std::memcpy(to, words, 8);
}
template <u32 words>
DEVICE void load_or_zero(u32 (&to)[words], const u16* from, bool inside) {
    std::memset(to, 0, 4 * words);
    if (inside) load_words<words>(to, from);
}
#ifdef ANNULUS_MATRIX
DEVICE void mma_bf16_32x32x16(float (*acc)[4], const u32 (&left)[4], const u32 (&right)[4]) {
    emulated::mfma<from_bf16>(acc, left, right);
}
DEVICE void mma_f16_32x32x16(float (*acc)[4], const u32 (&left)[4], const u32 (&right)[4]) {
    emulated::mfma<from_f16>(acc, left, right);
}
#endif

DEVICE u16 to_bf16(float x);
DEVICE u16 to_f16(float x);
DEVICE u32 pack_bf16x2(float first, float second) {
    return to_bf16(first) | u32(to_bf16(second)) << 16;
}
// As on a GPU of AMD, a NaN may become any number, here 0.
DEVICE u32 pack_numbers_bf16x2(float first, float second) {
    return pack_bf16x2(first == first ? first : 0, second == second ? second : 0);
}
DEVICE u32 pack_f16x2(float first, float second) {
    return to_f16(first) | u32(to_f16(second)) << 16;
}
DEVICE float widen_f16(u16 x) { return from_f16(x); }
DEVICE float exp2_approx(float x) {
    float power = std::exp2(x);
    return power < 1.17549435e-38f ? 0.0f : power;
}

DEVICE float log2_approx(float x) { return std::log2(x); }
DEVICE float reciprocal_approx(float x) { return 1.0f / x; }
DEVICE float max_or_nan(float x, float y) { return x > y || x != x ? x : y; }
DEVICE float max_of_numbers(float x, float y) { return std::fmax(x, y); }

DEVICE float multiply_add(float x, float y, float z) { return std::fma(x, y, z); }
DEVICE double multiply_add(double x, double y, double z) { return std::fma(x, y, z); }
DEVICE float exponential(float x) { return std::exp(x); }
DEVICE double exponential(double x) { return std::exp(x); }
DEVICE float logarithm(float x) { return std::log(x); }
DEVICE double logarithm(double x) { return std::log(x); }
DEVICE float hyperbolic_tangent(float x) { return std::tanh(x); }
DEVICE double hyperbolic_tangent(double x) { return std::tanh(x); }

DEVICE u32 bits_of(float x) {
    u32 bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
DEVICE float float_of(u32 bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
DEVICE float truncated(double x) {
    float nearest = static_cast<float>(x);
    bool away = std::isfinite(x) && std::fabs(static_cast<double>(nearest)) > std::fabs(x);
    return away ? std::nextafter(nearest, 0.0f) : nearest;
}
