// Probabilities P as 16-bit elements, packed in pairs as MMA operands, with masked pairs marked.
#pragma once

#include "numbers.cuh"

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
