// The one header through which kernels reach the machine: threads, barriers, shuffles, shared memory, the few functions of numbers.
// Compiled by NVRTC it is CUDA; compiled by a host compiler with ANNULUS_EMULATED it is host_twin.h, one fiber per thread.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Threads of every block.
#define THREADS 256

#ifdef ANNULUS_EMULATED
#include "host_twin.h"
#else

#define DEVICE __device__ __forceinline__
// What is rare and long: one copy, called.
#define DEVICE_CALL __device__ __noinline__
// Arrays of a thread stay in registers only where every index is known: loops over them are unrolled.
#define UNROLL _Pragma("unroll")

// A kernel takes one structure, by value.
#define KERNEL(name, Arguments) extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ Arguments a)

// An array of this block, uninitialised.
#define SHARED(type, name, count) __shared__ type name[count]

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
