// Device primitives: threads, barriers, shuffles, shared memory, PTX instructions, math functions.
// Kernels use CUDA through this header only. NVRTC compiles the CUDA side; hipRTC compiles
// primitives_amd.h, with ANNULUS_AMD; a host compiler with ANNULUS_EMULATED compiles the host twin,
// primitives_host.h, where one fiber emulates one thread.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Threads per block, unless a kernel has its own number: 256 = 8 warps, 16 × 16 threads per score
// tile at level plain.
#ifndef THREADS
#define THREADS 256
#endif

#ifdef ANNULUS_EMULATED
#include "primitives_host.h"
#elif defined(ANNULUS_AMD)
#include "primitives_amd.h"
#else

#define DEVICE __device__ __forceinline__
// As DEVICE, for member functions.
#define METHOD __device__ __forceinline__
// A long function on a rare path: compiled once and called, which keeps kernels small. Inlined in
// warpgroup kernels, because ptxas serializes wgmma across a call.
#ifdef ANNULUS_WARPGROUP
#define DEVICE_CALL DEVICE
#else
#define DEVICE_CALL __device__ __noinline__
#endif
// Arrays stay in registers only if every index is a compile-time constant, so loops over them are
// unrolled.
#define UNROLL _Pragma("unroll")
#define NOT_UNROLLED _Pragma("unroll 1")

// A kernel takes one argument structure, by value. ptxas limits the registers so that `blocks`
// blocks of `threads` threads fit a multiprocessor, and to 255 a thread.
#define KERNEL_OF(threads, blocks, name, Arguments)                \
    extern "C" __global__ void __launch_bounds__(threads, blocks) \
        name(const __grid_constant__ Arguments a)
#define KERNEL(name, Arguments) KERNEL_OF(THREADS, 1, name, Arguments)

// Static shared memory of this block, uninitialized.
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
// Dynamic shared memory of the launch. Aligned to 1024 bytes, the period of the 128-byte swizzle.
extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
DEVICE u8* dynamic_shared() { return dynamic_shared_memory; }

DEVICE u32 thread_index() { return threadIdx.x; }
// As thread_index, read anew wherever it is called: what is computed from it need not be kept.
DEVICE u32 thread_index_again() {
    u32 index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE u32 blocks_x() { return gridDim.x; }
DEVICE u32 blocks_y() { return gridDim.y; }

// Loads or stores 16 bytes of global memory, at a multiple of 16.
DEVICE void load_16(u32* to, u64 from) {
    uint4 words = *reinterpret_cast<const uint4*>(from);
    to[0] = words.x;
    to[1] = words.y;
    to[2] = words.z;
    to[3] = words.w;
}
DEVICE void store_16(u64 to, const u32* from) {
    *reinterpret_cast<uint4*>(to) = make_uint4(from[0], from[1], from[2], from[3]);
}

// Returns `x`, which the compiler takes for another value: what is computed from it is computed
// again where it is needed, instead of being kept in registers across a loop that needs them.
DEVICE u32 recomputed(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// __syncthreads: waits for all threads of the block; their earlier writes are visible afterwards.
DEVICE void barrier() { __syncthreads(); }
// As barrier; returns true if any thread passed true.
DEVICE bool barrier_any(bool mine) { return __syncthreads_or(mine) != 0; }

// Returns the value of lane (own ^ lanes). All 32 lanes of the warp must call it.
DEVICE float shuffle_xor(float mine, u32 lanes) {
    return __shfl_xor_sync(0xffffffffu, mine, lanes);
}
DEVICE double shuffle_xor(double mine, u32 lanes) {
    return __shfl_xor_sync(0xffffffffu, mine, lanes);
}
DEVICE u32 shuffle_xor(u32 mine, u32 lanes) { return __shfl_xor_sync(0xffffffffu, mine, lanes); }

// ldmatrix: loads four 8 × 8 matrices of 16-bit elements as MMA fragments. Lane 8·m + i passes the
// address of row i of matrix m (8 elements, 16-byte aligned). Lane l receives elements 2·(l mod 4)
// and the next of row l / 4 of each matrix.
DEVICE void ldmatrix_x4(u32 (&to)[4], const u16* row) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}
// As ldmatrix_x4, transposing each matrix.
DEVICE void ldmatrix_x4_trans(u32 (&to)[4], const u16* row) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}

// cp.async: copies 16 bytes from global to shared memory asynchronously, or writes zeros if not
// in_range. Both addresses must be multiples of 16. The copying thread may read the bytes after
// cp_async_wait; other threads after a barrier that follows.
DEVICE void cp_async_16(u16* to, const u16* from, bool in_range) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(at), "l"(from), "r"(in_range ? 16 : 0)
                 : "memory");
}
// Commits this thread's copies since the last commit as one group; a group may be empty.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
// Waits for this thread's groups, except the last `open`.
template <u32 open>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(open) : "memory");
}

// mma.m16n8k16: acc (16 × 8, f32) += left (16 × 16) · right (16 × 8). Lane l holds elements of acc
// in rows l / 4 and l / 4 + 8, columns 2·(l mod 4) and the next; right in two registers, rows 0–7
// and 8–15.
DEVICE void mma_bf16(float (&acc)[4], const u32 (&left)[4], u32 first, u32 second) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(first), "r"(second));
}
DEVICE void mma_f16(float (&acc)[4], const u32 (&left)[4], u32 first, u32 second) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(first), "r"(second));
}

// Packs two floats as 16-bit elements, the first in the lower half; nearest, ties to even.
DEVICE u32 pack_bf16x2(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
DEVICE u32 pack_f16x2(float first, float second) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Exact; a NaN stays one, with other bits.
DEVICE float widen_f16(u16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
}

// 2ˣ to within 2 ulp (f32), by the special-function unit; results below 2⁻¹²⁶ flush to 0.
DEVICE float exp2_approx(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// log₂ x to within 2⁻²² absolutely or relatively, by the special-function unit; subnormal numbers
// count as 0.
DEVICE float log2_approx(float x) {
    float power;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 1 / x to within 1 ulp, by the special-function unit; subnormal numbers flush to 0.
DEVICE float reciprocal_approx(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

// Maximum of two numbers; NaN if either is NaN. One instruction since compute capability 8.0.
DEVICE float max_or_nan(float x, float y) {
    float max;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(x), "f"(y));
    return max;
}

DEVICE float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
DEVICE double multiply_add(double x, double y, double z) { return fma(x, y, z); }
DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }
DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
DEVICE double hyperbolic_tangent(double x) { return tanh(x); }

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
// Rounds towards zero.
DEVICE float truncated(double x) { return __double2float_rz(x); }

#endif

#ifdef ANNULUS_WARPGROUP
#include "warpgroup_primitives.cuh"
#endif
