// Element types and the types of their sums. One variant is compiled for one element type:
//
//   ANNULUS_DTYPE    Element (in memory)     Sum (in registers)
//   0                f64                     f64
//   1                f32                     f32
//   2                bf16, as u16            f32
//   3                f16, as u16             f32
#pragma once

#include "primitives.cuh"

#if ANNULUS_DTYPE == 0
typedef double Element;
typedef double Sum;
#elif ANNULUS_DTYPE == 1
typedef float Element;
typedef float Sum;
#else
typedef u16 Element;
typedef float Sum;
#endif

DEVICE float infinity() { return float_of(0x7f800000u); }

template <typename T>
DEVICE bool is_nan(T x) {
    return x != x;
}

template <typename T>
DEVICE bool is_finite(T x) {
    return x - x == T(0);
}

// Maximum of two numbers; NaN if either is NaN.
template <typename T>
DEVICE T larger(T x, T y) {
    return x > y || is_nan(x) ? x : y;
}
DEVICE float larger(float x, float y) { return max_or_nan(x, y); }

// ---- 16-bit conversions by integer operations. Elements are converted by instructions on a device
// (widen, narrow), with the same result but for the bits of a NaN.

DEVICE float from_bf16(u16 x) { return float_of(u32(x) << 16); }

// Rounds to nearest, ties to even.
DEVICE u16 to_bf16(float x) {
    u32 bits = bits_of(x);
    if (is_nan(x)) return u16((bits >> 16) | 0x40u);
    return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

DEVICE float from_f16(u16 x) {
    u32 sign = u32(x & 0x8000u) << 16, exponent = (x >> 10) & 0x1fu, fraction = x & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | (fraction << 13));
    // subnormal: fraction · 2⁻²⁴
    if (exponent == 0) return float_of(sign | bits_of(float(fraction) * float_of(0x33800000u)));
    return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

// Rounds to nearest, ties to even.
DEVICE u16 to_f16(float x) {
    u32 bits = bits_of(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return u16(sign | 0x7e00u | ((size >> 13) & 0x3ffu));
    // 65520 and more round to infinity
    if (size >= 0x477ff000u) return u16(sign | 0x7c00u);
    if (size < 0x38800000u) {
        // subnormal: adding 2⁻¹ · 2⁰ aligns the last bit of the float with 2⁻²⁴, so the add rounds
        u32 aligned = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
        return u16(sign | aligned);
    }
    u32 rounded = size + 0xfffu + ((size >> 13) & 1u);
    return u16(sign | ((rounded - 0x38000000u) >> 13));
}

// Rounds f64 to f32 by rounding to odd: truncates, and sets the last bit if anything was lost.
// Rounding the result once more to 16 bits then equals rounding x directly, without the error of
// rounding twice.
//
// Source: Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums".
DEVICE float round_to_odd(double x) {
    float cut = truncated(x);
    return double(cut) == x || is_nan(x) ? cut : float_of(bits_of(cut) | 1u);
}
DEVICE float round_to_odd(float x) { return x; }

// ---- elements

DEVICE Sum widen(Element x) {
#if ANNULUS_DTYPE == 2
    return from_bf16(x);
#elif ANNULUS_DTYPE == 3
    return widen_f16(x);
#else
    return x;
#endif
}

DEVICE Element narrow(Sum x) {
#if ANNULUS_DTYPE == 2
    return u16(pack_bf16x2(x, 0.0f));
#elif ANNULUS_DTYPE == 3
    return u16(pack_f16x2(x, 0.0f));
#else
    return x;
#endif
}

// Element type to which a QKᵀ product is rounded (Spec::logits_dtype); ROUND_NOT keeps it.
enum Rounding { ROUND_NOT = 0, ROUND_F32 = 1, ROUND_BF16 = 2, ROUND_F16 = 3 };

DEVICE Sum rounded_to(Sum x, u32 rounding) {
    if (rounding == ROUND_F32) return Sum(float(x));
    if (rounding == ROUND_BF16) return Sum(from_bf16(to_bf16(round_to_odd(x))));
    if (rounding == ROUND_F16) return Sum(from_f16(to_f16(round_to_odd(x))));
    return x;
}

// Loads a Sum from an address that is only 2-byte aligned: query records put 4- or 8-byte
// statistics behind 16-bit elements.
DEVICE Sum load_sum(const u16* from) {
    union {
        Sum sum;
        u16 parts[sizeof(Sum) / 2];
    } both;
    for (u32 part = 0; part < sizeof(Sum) / 2; ++part) both.parts[part] = from[part];
    return both.sum;
}

DEVICE void store_sum(u16* to, Sum sum) {
    union {
        Sum sum;
        u16 parts[sizeof(Sum) / 2];
    } both;
    both.sum = sum;
    for (u32 part = 0; part < sizeof(Sum) / 2; ++part) to[part] = both.parts[part];
}

// Probabilities P as 16-bit elements, packed in pairs as MMA operands, with masked pairs marked.

#if ANNULUS_DTYPE >= 2

// Marks the probability of a masked pair: minus zero adds nothing to a finite product, and differs
// from every probability of a visible pair (mark_masked turns a visible −0 into +0).
#define MASKED 0x8000u

DEVICE u32 narrow_pair(float first, float second) {
#if ANNULUS_DTYPE == 2
    return pack_bf16x2(first, second);
#else
    return pack_f16x2(first, second);
#endif
}

// Marks the masked ones of a packed pair of probabilities.
DEVICE u32 mark_masked(u32 pair, bool first_visible, bool second_visible) {
    u32 first = pair & 0xffffu, second = pair >> 16;
    first = !first_visible ? MASKED : first == MASKED ? 0 : first;
    second = !second_visible ? MASKED : second == MASKED ? 0 : second;
    return first | second << 16;
}

// Exponent bits of an element; all are set if it is not finite.
#define EXPONENT_BITS (ANNULUS_DTYPE == 2 ? 0x7f80u : 0x7c00u)

DEVICE bool is_element_finite(u16 element) { return (element & EXPONENT_BITS) != EXPONENT_BITS; }
DEVICE bool is_pair_finite(u32 pair) {
    return is_element_finite(u16(pair)) && is_element_finite(u16(pair >> 16));
}

// Replaces the elements of a pair that are not finite by 0.
DEVICE u32 finite_pair(u32 pair) {
    return (is_element_finite(u16(pair)) ? pair & 0xffffu : 0) |
           (is_element_finite(u16(pair >> 16)) ? pair & 0xffff0000u : 0);
}

#define LOG2_E 1.44269504088896341f

// Largest |m|·log₂e for which e^{s − m} is computed as 2^{unit·x − m·log₂e}, with s = scale·x and
// unit = scale·log₂e. `unit` and m·log₂e are rounded separately, which changes the exponent by up
// to 3·2⁻²⁴·|m|·log₂e: for this bound a probability by 2⁻¹³, less than its rounding to f16. For
// |m| = 10⁹ it would be a factor of 2¹⁷².
#define FUSED_EXPONENT_LIMIT 1024.0f

// eˣ as 2^(x·log₂e), for results that are rounded to 16 bits.
DEVICE float fast_exp(float x) { return exp2_approx(x * LOG2_E); }

#endif
