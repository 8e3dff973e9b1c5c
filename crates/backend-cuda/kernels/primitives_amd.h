// AMD side of primitives.cuh, for level plain: HIP C++ by hipRTC, or by clang alone. It uses
// builtins of the compiler and functions of ROCm's device library, and no HIP header.
//
// The kernels shuffle within 32 lanes, their warp. A wave of 64 lanes holds two warps, which may
// diverge: a lane reads lanes of its own warp only, and all of these take part.
#pragma once

#ifndef __HIPCC_RTC__
// what hipRTC declares by itself
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif

#define DEVICE static __device__ inline __attribute__((always_inline))
#define METHOD __device__ inline __attribute__((always_inline))
// Inlined: the compiler would copy the argument structure of the kernel to scratch memory for a
// function that is called, 640 bytes a thread.
#define DEVICE_CALL DEVICE
#define UNROLL _Pragma("unroll")
#define NOT_UNROLLED _Pragma("unroll 1")

// `blocks` is not used: shared memory admits one block of 256 threads a compute unit.
#define KERNEL_OF(threads, blocks, name, Arguments)                                         \
    extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(threads, threads))) void \
        name(const Arguments a)
#define KERNEL(name, Arguments) KERNEL_OF(THREADS, 1, name, Arguments)

#define SHARED(type, name, count) __shared__ __attribute__((aligned(16))) type name[count]

DEVICE u32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE u32 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE u32 block_z() { return __builtin_amdgcn_workgroup_id_z(); }

// Fields of the kernel's dispatch packet (HSA runtime specification,
// `hsa_kernel_dispatch_packet_t`), which is the same in every version of the code object; the grid
// counts threads.
typedef __attribute__((address_space(4))) const u16 ConstantU16;
typedef __attribute__((address_space(4))) const u32 ConstantU32;
DEVICE u32 dispatched_blocks(u32 axis) {
    auto packet = __builtin_amdgcn_dispatch_ptr();
    const u32 threads_of_block = ((ConstantU16*)packet)[2 + axis];
    const u32 threads_of_grid = ((ConstantU32*)packet)[3 + axis];
    return threads_of_grid / threads_of_block;
}
DEVICE u32 blocks_x() { return dispatched_blocks(0); }
DEVICE u32 blocks_y() { return dispatched_blocks(1); }

DEVICE u32 recomputed(u32 x) {
    asm volatile("" : "+v"(x));
    return x;
}

DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// There is no instruction for it: a word of shared memory, cleared between two barriers.
DEVICE bool barrier_any(bool mine) {
    __shared__ u32 any;
    barrier();
    if (thread_index() == 0) any = 0;
    barrier();
    if (mine) any = 1;
    barrier();
    return any != 0;
}

DEVICE u32 lane_of_wave() {
    return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
}
DEVICE u32 shuffle_xor(u32 mine, u32 lanes) {
    return u32(__builtin_amdgcn_ds_bpermute(int((lane_of_wave() ^ lanes) << 2), int(mine)));
}
DEVICE float shuffle_xor(float mine, u32 lanes) {
    return __builtin_bit_cast(float, shuffle_xor(__builtin_bit_cast(u32, mine), lanes));
}
DEVICE double shuffle_xor(double mine, u32 lanes) {
    const u64 bits = __builtin_bit_cast(u64, mine);
    const u64 low = shuffle_xor(u32(bits), lanes), high = shuffle_xor(u32(bits >> 32), lanes);
    return __builtin_bit_cast(double, low | high << 32);
}

typedef u32 Words4 __attribute__((ext_vector_type(4)));
DEVICE void load_16(u32* to, u64 from) {
    const Words4 words = *reinterpret_cast<const Words4*>(from);
    to[0] = words.x;
    to[1] = words.y;
    to[2] = words.z;
    to[3] = words.w;
}
DEVICE void store_16(u64 to, const u32* from) {
    *reinterpret_cast<Words4*>(to) = Words4{from[0], from[1], from[2], from[3]};
}

// Rounds to nearest, ties to even.
DEVICE u32 bf16_bits(float x) {
    const u32 bits = __builtin_bit_cast(u32, x);
    const u32 rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return x != x ? bits >> 16 | 0x40u : rounded >> 16;
}
DEVICE u32 pack_bf16x2(float first, float second) {
    return bf16_bits(first) | bf16_bits(second) << 16;
}
DEVICE u32 pack_f16x2(float first, float second) {
    const u32 low = __builtin_bit_cast(u16, _Float16(first));
    const u32 high = __builtin_bit_cast(u16, _Float16(second));
    return low | high << 16;
}
DEVICE float widen_f16(u16 x) { return float(__builtin_bit_cast(_Float16, x)); }

DEVICE float max_or_nan(float x, float y) {
    // v_max_f32 drops a NaN
    const float max = __builtin_fmaxf(x, y);
    return x != x || y != y ? __builtin_nanf("") : max;
}

// ROCm's device library.
extern "C" __device__ float __ocml_native_exp2_f32(float);
extern "C" __device__ float __ocml_exp_f32(float);
extern "C" __device__ float __ocml_log_f32(float);
extern "C" __device__ float __ocml_tanh_f32(float);
extern "C" __device__ double __ocml_exp_f64(double);
extern "C" __device__ double __ocml_log_f64(double);
extern "C" __device__ double __ocml_tanh_f64(double);

// v_exp_f32: 2ˣ to within 1 ulp; results below 2⁻¹²⁶ flush to 0.
DEVICE float exp2_approx(float x) { return __ocml_native_exp2_f32(x); }
// v_rcp_f32: to within 1 ulp.
DEVICE float reciprocal_approx(float x) { return __builtin_amdgcn_rcpf(x); }

DEVICE float multiply_add(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
DEVICE double multiply_add(double x, double y, double z) { return __builtin_fma(x, y, z); }
DEVICE float exponential(float x) { return __ocml_exp_f32(x); }
DEVICE double exponential(double x) { return __ocml_exp_f64(x); }
DEVICE float logarithm(float x) { return __ocml_log_f32(x); }
DEVICE double logarithm(double x) { return __ocml_log_f64(x); }
DEVICE float hyperbolic_tangent(float x) { return __ocml_tanh_f32(x); }
DEVICE double hyperbolic_tangent(double x) { return __ocml_tanh_f64(x); }

DEVICE u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
// Rounds towards zero: one ulp back, if rounding to nearest went away from zero.
DEVICE float truncated(double x) {
    const float nearest = float(x);
    const bool is_away = __builtin_fabs(double(nearest)) > __builtin_fabs(x);
    return is_away ? float_of(bits_of(nearest) - 1) : nearest;
}
