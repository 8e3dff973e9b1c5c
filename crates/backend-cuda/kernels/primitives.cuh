// The one header through which kernels reach the machine: threads, barriers, shuffles, shared memory, the few functions of numbers.
// Compiled by NVRTC it is CUDA; compiled by a host compiler with ANNULUS_EMULATED it is host_twin.h, one fiber per thread.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Threads of every block of a program.
#ifndef THREADS
#define THREADS 256
#endif

#ifdef ANNULUS_EMULATED
#include "host_twin.h"
#else

#define DEVICE __device__ __forceinline__
// As DEVICE, for functions of a structure.
#define METHOD __device__ __forceinline__
// What is rare and long: one copy, called. Not where products run meanwhile: a call would have to wait for them.
#ifdef ANNULUS_WARPGROUP
#define DEVICE_CALL DEVICE
#else
#define DEVICE_CALL __device__ __noinline__
#endif
// Arrays of a thread stay in registers only where every index is known: loops over them are unrolled.
#define UNROLL _Pragma("unroll")

// A kernel takes one structure, by value.
#define KERNEL(name, Arguments) extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ Arguments a)

// An array of this block, uninitialised.
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]

// Whether this mistake is to be made: never, but in tests on the twin, which show that it is caught.
DEVICE constexpr bool planted(u32) { return false; }

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE u32 blocks_x() { return gridDim.x; }

// Everybody in the block has come here, and sees what the others wrote before.
DEVICE void barrier() { __syncthreads(); }
// As barrier; whether anybody said yes.
DEVICE bool barrier_any(bool mine) { return __syncthreads_or(mine) != 0; }

// The value of the lane whose number differs by these bits. All lanes of the warp take part.
DEVICE float shuffle_xor(float mine, u32 lanes) { return __shfl_xor_sync(0xffffffffu, mine, lanes); }
DEVICE double shuffle_xor(double mine, u32 lanes) { return __shfl_xor_sync(0xffffffffu, mine, lanes); }

// Matrix units: fragments of 16-bit elements, as ldmatrix deals them out. Every lane names one row of 8 elements, 16-byte aligned: lanes
// 0 … 7 those of the first 8 × 8 matrix, 8 … 15 those of the second, and so on. Lane l gets elements 2·(l mod 4) and the next of row l / 4 of each.
DEVICE void load_matrices_4(u32 (&to)[4], const u16* row) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}
// As above, of the transposed matrices.
DEVICE void load_transposed_4(u32 (&to)[4], const u16* row) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}

// Copies 16 bytes to shared memory, or writes zeros there, while the thread goes on. Both addresses are multiples of 16. The bytes are there for this
// thread once it has waited for their group, and for others after a barrier that follows.
DEVICE void copy_16(u16* to, const u16* from, bool there) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// The copies of this thread since the last group are a group, be there some or none.
DEVICE void end_group() { asm volatile("cp.async.commit_group;" : : : "memory"); }
// Waits for all groups of this thread but the last `open`.
template <u32 open>
DEVICE void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" : : "n"(open) : "memory");
}

// sums (16 × 8) += left (16 × 16) · right (16 × 8). Lane l holds of sums rows l / 4 and l / 4 + 8, columns 2·(l mod 4) and the next; of right two
// registers, the first and the second 8 rows.
DEVICE void multiply_bf16(float (&sums)[4], const u32 (&left)[4], u32 first, u32 second) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(first), "r"(second));
}
DEVICE void multiply_f16(float (&sums)[4], const u32 (&left)[4], u32 first, u32 second) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(first), "r"(second));
}

// Two floats as 16-bit elements, the first in the lower half; to the nearest, ties to even.
DEVICE u32 pair_bf16(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
DEVICE u32 pair_f16(float first, float second) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// 2ˣ, to two units in the last place of a float; 0 below 2⁻¹²⁶.
DEVICE float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

DEVICE float fused(float x, float y, float z) { return fmaf(x, y, z); }
DEVICE double fused(double x, double y, double z) { return fma(x, y, z); }
DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }
DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
DEVICE double hyperbolic_tangent(double x) { return tanh(x); }

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
// Towards zero.
DEVICE float truncated(double x) { return __double2float_rz(x); }

#endif

#ifdef ANNULUS_WARPGROUP
#include "warpgroup_primitives.cuh"
#endif
