// AMD side of primitives.cuh: HIP C++ by hipRTC, or by clang alone. It uses builtins of the
// compiler and functions of ROCm's device library, and no HIP header.
//
// Kernels of level plain shuffle within 32 lanes, their warp. A wave of 64 lanes holds two warps,
// which may diverge: a lane reads lanes of its own warp only, and all of these take part. Kernels
// of level matrix use whole waves.
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

// The compiler limits the registers so that `blocks` blocks fit a compute unit, whose four SIMD
// units hold one wave of 64 threads each for every block of 256.
#define KERNEL_OF(threads, blocks, name, Arguments)                                        \
    extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(threads, threads),    \
                                         amdgpu_waves_per_eu((blocks) * (threads) / 256))) \
    void name(const Arguments a)
#define KERNEL(name, Arguments) KERNEL_OF(THREADS, 1, name, Arguments)

#define SHARED(type, name, count) __shared__ __attribute__((aligned(16))) type name[count]
extern __shared__ __attribute__((aligned(1024))) u8 dynamic_shared_memory[];
DEVICE u8* dynamic_shared() { return dynamic_shared_memory; }

DEVICE u32 recomputed(u32 x) {
    asm volatile("" : "+v"(x));
    return x;
}
DEVICE u32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 thread_index_again() { return recomputed(thread_index()); }
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

// 8 or 16 bytes of shared memory, at a multiple of as many bytes. Through pointers, of which the
// compiler finds out that they are to shared memory.
typedef u32 Words2 __attribute__((ext_vector_type(2)));
DEVICE void load_shared_8(u32* to, const u16* from) {
    const Words2 words = *reinterpret_cast<const Words2*>(from);
    to[0] = words.x;
    to[1] = words.y;
}
DEVICE void load_shared_16(u32 (&to)[4], const u16* from) {
    const Words4 words = *reinterpret_cast<const Words4*>(from);
    UNROLL for (u32 c = 0; c < 4; ++c) to[c] = words[c];
}
DEVICE void store_shared_8(u16* to, u32 first, u32 second) {
    *reinterpret_cast<Words2*>(to) = Words2{first, second};
}

// Loads 4, 8 or 16 bytes of global memory, at a multiple of as many bytes; zeros if not `inside`.
// The compiler does not find out that an address from the arguments is not one of shared memory.
typedef __attribute__((address_space(1))) const u32 GlobalWord;
typedef __attribute__((address_space(1))) const Words2 GlobalWords2;
typedef __attribute__((address_space(1))) const Words4 GlobalWords4;
DEVICE void load_or_zero(u32 (&to)[1], const u16* from, bool inside) {
    to[0] = inside ? *(GlobalWord*)from : 0;
}
DEVICE void load_or_zero(u32 (&to)[2], const u16* from, bool inside) {
    Words2 words = {0, 0};
    if (inside) words = *(GlobalWords2*)from;
    UNROLL for (u32 c = 0; c < 2; ++c) to[c] = words[c];
}
DEVICE void load_or_zero(u32 (&to)[4], const u16* from, bool inside) {
    Words4 words = {0, 0, 0, 0};
    if (inside) words = *(GlobalWords4*)from;
    UNROLL for (u32 c = 0; c < 4; ++c) to[c] = words[c];
}

#ifdef ANNULUS_MATRIX

// v_mfma_f32_32x32x8, twice, or v_mfma_f32_32x32x16: acc (32 × 32, f32) += left (32 × 16) · right
// (16 × 32). Lane l passes eight elements of row l mod 32 of left and of column l mod 32 of right:
// terms 0 … 7 of lanes 0 to 31, and 8 … 15 of the others, in any order that is the same in both
// operands. It holds elements of acc in column l mod 32, rows 8·g + 4·(l / 32) + 0 … 3 in acc[g].
typedef float Floats16 __attribute__((ext_vector_type(16)));
DEVICE Floats16 gathered(const float (*acc)[4]) {
    Floats16 all;
    UNROLL for (u32 e = 0; e < 16; ++e) all[e] = acc[e / 4][e % 4];
    return all;
}
DEVICE void scatter(float (*acc)[4], const Floats16& all) {
    UNROLL for (u32 e = 0; e < 16; ++e) acc[e / 4][e % 4] = all[e];
}

#ifdef __gfx950__

typedef __bf16 Bf16x8 __attribute__((ext_vector_type(8)));
typedef _Float16 F16x8 __attribute__((ext_vector_type(8)));
template <typename T>
DEVICE T operand_of_8(const u32 (&words)[4]) {
    return __builtin_bit_cast(T, Words4{words[0], words[1], words[2], words[3]});
}
DEVICE void mma_bf16_32x32x16(float (*acc)[4], const u32 (&left)[4], const u32 (&right)[4]) {
    scatter(acc, __builtin_amdgcn_mfma_f32_32x32x16_bf16(operand_of_8<Bf16x8>(left),
                                                         operand_of_8<Bf16x8>(right),
                                                         gathered(acc), 0, 0, 0));
}
DEVICE void mma_f16_32x32x16(float (*acc)[4], const u32 (&left)[4], const u32 (&right)[4]) {
    scatter(acc, __builtin_amdgcn_mfma_f32_32x32x16_f16(operand_of_8<F16x8>(left),
                                                        operand_of_8<F16x8>(right),
                                                        gathered(acc), 0, 0, 0));
}

#else

typedef short Bf16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 F16x4 __attribute__((ext_vector_type(4)));
template <typename T>
DEVICE T operand_of_4(const u32 (&words)[4], u32 part) {
    return __builtin_bit_cast(T, Words2{words[2 * part], words[2 * part + 1]});
}
DEVICE void mma_bf16_32x32x16(float (*acc)[4], const u32 (&left)[4], const u32 (&right)[4]) {
    Floats16 sum = gathered(acc);
    UNROLL for (u32 part = 0; part < 2; ++part)
        sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(operand_of_4<Bf16x4>(left, part),
                                                       operand_of_4<Bf16x4>(right, part), sum, 0,
                                                       0, 0);
    scatter(acc, sum);
}
DEVICE void mma_f16_32x32x16(float (*acc)[4], const u32 (&left)[4], const u32 (&right)[4]) {
    Floats16 sum = gathered(acc);
    UNROLL for (u32 part = 0; part < 2; ++part)
        sum = __builtin_amdgcn_mfma_f32_32x32x8f16(operand_of_4<F16x4>(left, part),
                                                   operand_of_4<F16x4>(right, part), sum, 0, 0,
                                                   0);
    scatter(acc, sum);
}

#endif

#endif

// Rounds to nearest, ties to even, in the upper half of the word. A NaN may become any number.
DEVICE u32 bf16_of_number(float x) {
    const u32 bits = __builtin_bit_cast(u32, x);
    return bits + 0x7fffu + (bits >> 16 & 1u);
}
DEVICE u32 bf16_bits(float x) {
    const u32 rounded = bf16_of_number(x);
    return x != x ? 0x7fc00000u : rounded;
}
// The upper halves of two words.
DEVICE u32 upper_halves(u32 first, u32 second) {
    return __builtin_amdgcn_perm(second, first, 0x07060302u);
}
#ifdef __gfx950__
typedef __bf16 Bf16x2 __attribute__((ext_vector_type(2)));
typedef float Floats2 __attribute__((ext_vector_type(2)));
DEVICE u32 pack_bf16x2(float first, float second) {
    return __builtin_bit_cast(u32, __builtin_convertvector(Floats2{first, second}, Bf16x2));
}
DEVICE u32 pack_numbers_bf16x2(float first, float second) { return pack_bf16x2(first, second); }
#else
DEVICE u32 pack_bf16x2(float first, float second) {
    return upper_halves(bf16_bits(first), bf16_bits(second));
}
DEVICE u32 pack_numbers_bf16x2(float first, float second) {
    return upper_halves(bf16_of_number(first), bf16_of_number(second));
}
#endif
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
extern "C" __device__ float __ocml_native_log2_f32(float);
extern "C" __device__ float __ocml_exp_f32(float);
extern "C" __device__ float __ocml_log_f32(float);
extern "C" __device__ float __ocml_tanh_f32(float);
extern "C" __device__ double __ocml_exp_f64(double);
extern "C" __device__ double __ocml_log_f64(double);
extern "C" __device__ double __ocml_tanh_f64(double);

// v_exp_f32: 2ˣ to within 1 ulp; results below 2⁻¹²⁶ flush to 0.
#if __has_builtin(__builtin_amdgcn_exp2f)
DEVICE float exp2_approx(float x) { return __builtin_amdgcn_exp2f(x); }
#else
DEVICE float exp2_approx(float x) { return __ocml_native_exp2_f32(x); }
#endif
// v_log_f32: log₂ x to within 1 ulp.
#if __has_builtin(__builtin_amdgcn_logf)
DEVICE float log2_approx(float x) { return __builtin_amdgcn_logf(x); }
#else
DEVICE float log2_approx(float x) { return __ocml_native_log2_f32(x); }
#endif
// Maximum of two numbers; a NaN is dropped.
DEVICE float max_of_numbers(float x, float y) { return __builtin_fmaxf(x, y); }
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
