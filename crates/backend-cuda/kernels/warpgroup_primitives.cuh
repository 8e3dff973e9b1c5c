// Primitives of compute capability 9.0 (included by primitives.cuh): warpgroups, wgmma, TMA loads
// and stores, mbarriers, named barriers, setmaxnreg.
//
// Three orderings, none of which implies another:
//
//   mbarrier       a phase completes after the expected arrivals and bytes (expect_tx)
//   proxy fence    wgmma and TMA access shared memory through the async proxy: a thread's stores
//                  are visible to them after its fence.proxy.async and a barrier
//   wgmma groups   accumulators, and A operands in registers, may not be read or written until
//                  wgmma.wait_group has waited for their group
//
// A TMA store is part of a bulk group of its thread, which is waited for as a wgmma group is.
//
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions",
// "mbarrier", "cp.async.bulk.tensor", "cp.async.bulk.wait_group", "setmaxnreg".
#pragma once

#define WARPGROUP 128

// CUtensorMap: opaque, encoded by the driver. Aligned as in cuda.h of CUDA 13.
struct alignas(128) TensorMap {
    u64 words[16];
};

// mbarrier object in shared memory: opaque.
struct Mbarrier {
    u64 word;
};

#ifdef ANNULUS_EMULATED
#include "warpgroup_host.h"
#else

DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// __syncwarp: waits for all lanes of the warp; their earlier writes are visible afterwards.
DEVICE void warp_barrier() { __syncwarp(); }
// True if any lane of the warp passes true. All lanes must call it.
DEVICE bool warp_any(bool mine) { return __any_sync(0xffffffffu, mine) != 0; }
// Returns the value of lane 0 from a shuffle, by which the compiler proves that it is the same in
// all lanes. All lanes must call it.
DEVICE u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }
// bar.sync: as barrier, for the `threads` threads that use the same name, 1 … 15 (0: barrier()).
DEVICE void named_barrier(u32 name, u32 threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(name), "r"(threads) : "memory");
}
// bar.arrive: counts as an arrival at the named barrier without waiting.
DEVICE void named_arrive(u32 name, u32 threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(name), "r"(threads) : "memory");
}
// As named_barrier; returns true if any thread passed true.
DEVICE bool named_barrier_any(u32 name, u32 threads, bool mine) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred mine, any;\n"
        "setp.ne.u32 mine, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, mine;\n"
        "selp.u32 %0, 1, 0, any;\n"
        "}"
        : "=r"(any)
        : "r"(name), "r"(threads), "r"(u32(mine))
        : "memory");
    return any != 0;
}

// Initializes an mbarrier whose phases complete after `arrivals` arrivals. One thread calls it;
// other threads may use the mbarrier after fence_mbarrier_init and a barrier.
DEVICE void mbarrier_init(Mbarrier* mbarrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :
                 : "r"(shared_address(mbarrier)), "r"(arrivals)
                 : "memory");
}
DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
DEVICE void mbarrier_arrive(Mbarrier* mbarrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 :
                 : "r"(shared_address(mbarrier))
                 : "memory");
}
// Arrives, and adds `bytes` to the transaction count that the current phase waits for.
DEVICE void mbarrier_arrive_expect_tx(Mbarrier* mbarrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(mbarrier)), "r"(bytes)
                 : "memory");
}
// Waits until the phase with this parity has completed. The first phase has parity 0; the phase
// before it counts as completed, so a wait for parity 1 on a new mbarrier returns at once.
DEVICE void mbarrier_wait(Mbarrier* mbarrier, u32 parity) {
    u32 over;
    do {
        asm volatile(
            "{\n"
            ".reg .pred over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, over;\n"
            "}"
            : "=r"(over)
            : "r"(shared_address(mbarrier)), "r"(parity)
            : "memory");
    } while (!over);
}

// Issues a TMA load of one box to shared memory, zero-filled beyond the tensor; its bytes complete
// on `mbarrier`. The coordinates are those of the box's first element, innermost first.
DEVICE void tma_load_box(u16* to, const TensorMap& map, Mbarrier* mbarrier, u32 x, u32 row,
                         u32 head, u32 batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3, %4, %5, %6}], [%2];"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(mbarrier)), "r"(x), "r"(row),
          "r"(head), "r"(batch)
        : "memory");
}

// Loads a tensor map into the cache of descriptors.
DEVICE void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// Copies `bytes` from global to shared memory asynchronously, as TMA loads do; both addresses and
// the length are multiples of 16. The bytes complete on `mbarrier`.
DEVICE void bulk_load(void* to, const void* from, u32 bytes, Mbarrier* mbarrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(mbarrier))
        : "memory");
}

// Issues a TMA store of one box from shared memory, as part of the thread's next bulk group.
// Elements beyond the tensor are not written. The shared memory may be overwritten after
// bulk_wait_read.
DEVICE void tma_store_box(const TensorMap& map, const u16* from, u32 x, u32 row, u32 head,
                          u32 batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(&map), "r"(shared_address(from)), "r"(x), "r"(row), "r"(head), "r"(batch)
        : "memory");
}
// Commits this thread's TMA stores since the last commit as one group.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }
// Waits until this thread's groups, except the last `open`, have read their shared memory.
template <u32 open>
DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(open) : "memory");
}

// Adds to a number in global memory; returns what it was.
DEVICE u32 atomic_add(u32* at, u32 number) { return atomicAdd(at, number); }

// Stores 16 bytes, 16-byte aligned, that wgmma will read. On the device an ordinary store; the
// emulator delays it until fence_proxy_async.
DEVICE void store_for_async_proxy(u16* to, const u32 (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared_address(to)), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                   "r"(words[3])
                 : "memory");
}
// As store_for_async_proxy, of 4 bytes, 4-byte aligned, that wgmma or a TMA store will read.
DEVICE void store_pair_for_async_proxy(u16* to, u32 pair) {
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(shared_address(to)), "r"(pair) : "memory");
}
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

// setmaxnreg: sets the registers per thread of this warpgroup; _dec releases registers, _inc waits
// until enough are free.
template <u32 count>
DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(count));
}
template <u32 count>
DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(count));
}

// wgmma.fence: orders earlier register accesses to accumulators and A operands before wgmma.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
// Commits the wgmma operations since the last commit as one group.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
// Waits for this warp's wgmma groups, except the last `open`.
template <u32 open>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(open) : "memory");
}
// Compiler barrier on accumulators or A fragments (CUTLASS: warpgroup_fence_operand): keeps reads
// and writes of these registers on their side of a wgmma_wait. After the wait for a group, all of
// its register operands that are used again pass through it.
template <u32 count>
DEVICE void fence_operand(float (&acc)[count]) {
    UNROLL for (u32 index = 0; index < count; ++index)
        asm volatile("" : "+f"(acc[index]) : : "memory");
}
template <u32 count>
DEVICE void fence_operand(u32 (&fragments)[count][4]) {
    UNROLL for (u32 y = 0; y < count; ++y)
        UNROLL for (u32 index = 0; index < 4; ++index)
            asm volatile("" : "+r"(fragments[y][index]) : : "memory");
}

// wgmma: acc (64 × columns, f32) (+)= left (64 × 16) · right (16 × columns), 16-bit elements, by
// one warpgroup. Warp w computes rows 16·w …; lane l holds, for every 8 columns, the elements of
// acc in rows l / 4 and l / 4 + 8, columns 2·(l mod 4) and the next. Names as in CUTLASS:
//
//   wgmma_ss   both operands in shared memory, K-major: left·rightᵀ
//   wgmma_rs   left in registers (fragments as for mma_bf16), right in shared memory, MN-major
//
// An operand in shared memory is passed as a matrix descriptor (warpgroup.cuh).
#define ACC_8(acc, at)                                                                         \
    "+f"(acc[at]), "+f"(acc[at + 1]), "+f"(acc[at + 2]), "+f"(acc[at + 3]), "+f"(acc[at + 4]), \
        "+f"(acc[at + 5]), "+f"(acc[at + 6]), "+f"(acc[at + 7])
#define ACC_32(acc, at) ACC_8(acc, at), ACC_8(acc, at + 8), ACC_8(acc, at + 16), ACC_8(acc, at + 24)
#define ACC_24(acc, at) ACC_8(acc, at), ACC_8(acc, at + 8), ACC_8(acc, at + 16)
#define OPERANDS_32                                                          \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OPERANDS_40 OPERANDS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define OPERANDS_64                                                                      \
    OPERANDS_32                                                                          \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OPERANDS_88                                                                      \
    OPERANDS_64                                                                          \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87"

#define WGMMA_SS(name, type, columns, names, count, left_name, right_name, add_name, ...)        \
    DEVICE void name(float (&acc)[count], u64 left, u64 right, bool add) {                       \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_name ", 0;\n"                   \
                     "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {"   \
                     names "}, " left_name ", " right_name ", add, 1, 1, 0, 0;\n}"               \
                     : __VA_ARGS__                                                               \
                     : "l"(left), "l"(right), "r"(u32(add)));                                    \
    }
#define WGMMA_RS(name, type, columns, names, count, left_names, right_name, ...)               \
    DEVICE void name(float (&acc)[count], const u32 (&left)[4], u64 right) {                   \
        asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 1, 1;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" \
                     names "}, {" left_names "}, " right_name ", add, 1, 1, 1;\n}"             \
                     : __VA_ARGS__                                                             \
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));    \
    }

WGMMA_SS(wgmma_ss_bf16, "bf16", "64", OPERANDS_32, 32, "%32", "%33", "%34", ACC_32(acc, 0))
WGMMA_SS(wgmma_ss_bf16, "bf16", "128", OPERANDS_64, 64, "%64", "%65", "%66",
         ACC_32(acc, 0), ACC_32(acc, 32))
WGMMA_SS(wgmma_ss_bf16, "bf16", "80", OPERANDS_40, 40, "%40", "%41", "%42",
         ACC_32(acc, 0), ACC_8(acc, 32))
WGMMA_SS(wgmma_ss_bf16, "bf16", "176", OPERANDS_88, 88, "%88", "%89", "%90",
         ACC_32(acc, 0), ACC_32(acc, 32), ACC_24(acc, 64))
WGMMA_SS(wgmma_ss_f16, "f16", "64", OPERANDS_32, 32, "%32", "%33", "%34", ACC_32(acc, 0))
WGMMA_SS(wgmma_ss_f16, "f16", "80", OPERANDS_40, 40, "%40", "%41", "%42",
         ACC_32(acc, 0), ACC_8(acc, 32))
WGMMA_SS(wgmma_ss_f16, "f16", "176", OPERANDS_88, 88, "%88", "%89", "%90",
         ACC_32(acc, 0), ACC_32(acc, 32), ACC_24(acc, 64))
WGMMA_SS(wgmma_ss_f16, "f16", "128", OPERANDS_64, 64, "%64", "%65", "%66",
         ACC_32(acc, 0), ACC_32(acc, 32))
WGMMA_RS(wgmma_rs_bf16, "bf16", "64", OPERANDS_32, 32, "%32, %33, %34, %35", "%36", ACC_32(acc, 0))
WGMMA_RS(wgmma_rs_bf16, "bf16", "128", OPERANDS_64, 64, "%64, %65, %66, %67", "%68", ACC_32(acc, 0),
         ACC_32(acc, 32))
WGMMA_RS(wgmma_rs_f16, "f16", "64", OPERANDS_32, 32, "%32, %33, %34, %35", "%36", ACC_32(acc, 0))
WGMMA_RS(wgmma_rs_f16, "f16", "128", OPERANDS_64, 64, "%64, %65, %66, %67", "%68", ACC_32(acc, 0),
         ACC_32(acc, 32))

// tanh x = 1 − 2 / (1 + e²ˣ) to within 2·10⁻⁷, by the special-function unit.
DEVICE float tanh_approx(float x) {
    return 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(x * 2.88539008177792681f));
}

// Maximum of two numbers; if one of them is NaN, the other (IEEE maxNum).
DEVICE float max_number(float x, float y) { return fmaxf(x, y); }

#endif
