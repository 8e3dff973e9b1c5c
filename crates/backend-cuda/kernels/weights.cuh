// Weights as 16-bit elements, in pairs as matrix units take them, and which of them are of pairs that are not seen.
#pragma once

#include "numbers.cuh"

#if ANNULUS_DTYPE >= 2

// The weight of a hidden pair: minus zero, which adds nothing to anything finite and is not the weight of a visible pair.
#define HIDDEN 0x8000u

DEVICE u32 narrow_pair(float first, float second) {
#if ANNULUS_DTYPE == 2
    return pair_bf16(first, second);
#else
    return pair_f16(first, second);
#endif
}

// A pair of weights with those of hidden pairs marked.
DEVICE u32 marked(u32 pair, bool first_seen, bool second_seen) {
    u32 first = pair & 0xffffu, second = pair >> 16;
    first = !first_seen ? HIDDEN : first == HIDDEN ? 0 : first;
    second = !second_seen ? HIDDEN : second == HIDDEN ? 0 : second;
    return first | second << 16;
}

// eˣ where sixteen bits are enough.
DEVICE float quick_exponential(float x) { return power_of_two(x * 1.44269504088896341f); }

#endif
