// The part of primitives.cuh that only compute capability 9.0 has: warpgroups (four warps that multiply together), matrix products that run while
// their threads go on, boxes of tensors copied by the copy engine, and barriers that count phases and bytes.
//
// Three kinds of order, none of which implies another:
//
//   phases      a phase of a Phases ends when as many have arrived as were said, and as many bytes have been copied as were announced
//   the units   the matrix units and the copy engine see what a thread has stored once it has called show_units, before a barrier
//   products    sums are whole once their group has been waited for; until then nobody reads or writes them, nor the left registers
//
// Source: NVIDIA, PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier", "cp.async.bulk.tensor", "setmaxnreg".
#pragma once

#define WARPGROUP 128

// How a tensor lies in memory: opaque, made by the driver.
struct alignas(64) TensorMap {
    u64 words[16];
};

// A barrier in shared memory: opaque.
struct Phases {
    u64 word;
};

#ifdef ANNULUS_EMULATED
#include "warpgroup_twin.h"
#else

// Shared memory of this launch; aligned as the swizzle of 128 bytes needs it: its pattern repeats every 1024.
extern __shared__ __align__(1024) u8 shared_of_launch[];
DEVICE u8* launch_shared() { return shared_of_launch; }
DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// Every lane of the warp has come here, and sees what the others wrote before.
DEVICE void warp_barrier() { __syncwarp(); }
// As barrier, for the `threads` that name the same one, 1 … 15.
DEVICE void named_barrier(u32 name, u32 threads) { asm volatile("bar.sync %0, %1;" : : "r"(name), "r"(threads) : "memory"); }
// Is counted there, and does not wait.
DEVICE void named_arrive(u32 name, u32 threads) { asm volatile("bar.arrive %0, %1;" : : "r"(name), "r"(threads) : "memory"); }
// As named_barrier; whether anybody said yes.
DEVICE bool named_barrier_any(u32 name, u32 threads, bool mine) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred said, heard;\n"
        "setp.ne.u32 said, %3, 0;\n"
        "bar.red.or.pred heard, %1, %2, said;\n"
        "selp.u32 %0, 1, 0, heard;\n"
        "}"
        : "=r"(any)
        : "r"(name), "r"(threads), "r"(u32(mine))
        : "memory");
    return any != 0;
}

// A phase ends when `arrivals` have come. One thread; others after show_phases and a barrier.
DEVICE void begin_phases(Phases* phases, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(phases)), "r"(arrivals) : "memory");
}
DEVICE void show_phases() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
DEVICE void arrive(Phases* phases) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(phases)) : "memory");
}
// Arrives, and lets the phase wait for so many copied bytes.
DEVICE void arrive_expecting(Phases* phases, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(phases)), "r"(bytes) : "memory");
}
// Waits until the last phase that has this parity is over. The first phase has parity 0; the one before it counts as over.
DEVICE void wait_for_phase(Phases* phases, u32 parity) {
    u32 over;
    do {
        asm volatile(
            "{\n"
            ".reg .pred over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, over;\n"
            "}"
            : "=r"(over)
            : "r"(shared_address(phases)), "r"(parity)
            : "memory");
    } while (!over);
}

// Begins to copy a box to shared memory, zeros where it is beyond the tensor; all of its bytes are counted by `phases`. Coordinates are those of the
// box's first element, innermost first.
DEVICE void copy_box(u16* to, const TensorMap& map, Phases* phases, u32 x, u32 row, u32 head, u32 batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(phases)), "r"(x), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// Stores 16 bytes, at a multiple of 16, that a unit will read.
DEVICE void store_for_units(u16* to, const u32 (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared_address(to)), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}
DEVICE void show_units() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

// From here on the warps of this warpgroup have so many registers a thread: fewer give them back, more wait for them.
template <u32 count>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(count));
}
template <u32 count>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(count));
}

// Before products: what the threads have done to sums and left registers is done.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
// The products since the last group are a group.
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
// Waits for all groups of this warp but the last `open`.
template <u32 open>
DEVICE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(open) : "memory");
}
// Keeps the compiler from moving what touches these sums across this place.
template <u32 count>
DEVICE void pin(float (&sums)[count]) {
    UNROLL for (u32 place = 0; place < count; ++place) asm volatile("" : "+f"(sums[place]) : : "memory");
}

// sums (64 × columns) (+)= left (64 × 16) · right (16 × columns) of 16-bit elements, sums in f32, by a warpgroup. Warp w has rows 16·w …; lane l holds
// of sums, piece of 8 columns by piece, rows l / 4 and l / 4 + 8, columns 2·(l mod 4) and the next, and of a left operand in registers what
// multiply_bf16 has. An operand in shared memory is told by a descriptor (warpgroup.cuh). `left` there is rows of dims, `right` in
// multiply_shared is rows of dims, too: the product is left·rightᵀ; in multiply_registers it is rows of the summed index.
#define SUMS_8(sums, at)                                                                                                               \
    "+f"(sums[at]), "+f"(sums[at + 1]), "+f"(sums[at + 2]), "+f"(sums[at + 3]), "+f"(sums[at + 4]), "+f"(sums[at + 5]), "+f"(sums[at + 6]), \
        "+f"(sums[at + 7])
#define SUMS_32(sums, at) SUMS_8(sums, at), SUMS_8(sums, at + 8), SUMS_8(sums, at + 16), SUMS_8(sums, at + 24)
#define NAMES_32                                                                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
    "%28, %29, %30, %31"
#define NAMES_64                                                                                                                          \
    NAMES_32                                                                                                                              \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
    "%58, %59, %60, %61, %62, %63"

#define MULTIPLY_SHARED(name, type, columns, names, count, left_name, right_name, add_name, ...)                                 \
    DEVICE void name(float (&sums)[count], u64 left, u64 right, bool add) {                                                      \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_name ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns          \
                     "k16.f32." type "." type " {" names "}, " left_name ", " right_name ", add, 1, 1, 0, 0;\n}"                 \
                     : __VA_ARGS__                                                                                               \
                     : "l"(left), "l"(right), "r"(u32(add)));                                                                    \
    }
#define MULTIPLY_REGISTERS(name, type, columns, names, count, left_names, right_name, ...)                                       \
    DEVICE void name(float (&sums)[count], const u32 (&left)[4], u64 right) {                                                    \
        asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 1, 1;\nwgmma.mma_async.sync.aligned.m64n" columns                    \
                     "k16.f32." type "." type " {" names "}, {" left_names "}, " right_name ", add, 1, 1, 1;\n}"                \
                     : __VA_ARGS__                                                                                               \
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));                                      \
    }

MULTIPLY_SHARED(multiply_shared_bf16, "bf16", "64", NAMES_32, 32, "%32", "%33", "%34", SUMS_32(sums, 0))
MULTIPLY_SHARED(multiply_shared_bf16, "bf16", "128", NAMES_64, 64, "%64", "%65", "%66", SUMS_32(sums, 0), SUMS_32(sums, 32))
MULTIPLY_SHARED(multiply_shared_f16, "f16", "64", NAMES_32, 32, "%32", "%33", "%34", SUMS_32(sums, 0))
MULTIPLY_SHARED(multiply_shared_f16, "f16", "128", NAMES_64, 64, "%64", "%65", "%66", SUMS_32(sums, 0), SUMS_32(sums, 32))
MULTIPLY_REGISTERS(multiply_registers_bf16, "bf16", "64", NAMES_32, 32, "%32, %33, %34, %35", "%36", SUMS_32(sums, 0))
MULTIPLY_REGISTERS(multiply_registers_bf16, "bf16", "128", NAMES_64, 64, "%64, %65, %66, %67", "%68", SUMS_32(sums, 0), SUMS_32(sums, 32))
MULTIPLY_REGISTERS(multiply_registers_f16, "f16", "64", NAMES_32, 32, "%32, %33, %34, %35", "%36", SUMS_32(sums, 0))
MULTIPLY_REGISTERS(multiply_registers_f16, "f16", "128", NAMES_64, 64, "%64, %65, %66, %67", "%68", SUMS_32(sums, 0), SUMS_32(sums, 32))

// The larger of two; of a number and NaN the number.
DEVICE float larger_number(float x, float y) { return fmaxf(x, y); }

#endif
