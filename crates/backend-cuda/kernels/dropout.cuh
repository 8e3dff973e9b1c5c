// Dropout mask: Philox 4×32-10, keyed by the seed; the counter holds the global query row and key
// row, the batch row and the head, so the mask does not depend on ranks, tiles or threads.
//
// Source: Salmon et al. 2011; the counter layout is that of annulus_core::DropoutMask.
#pragma once

#include "arguments.cuh"

DEVICE u32 philox_word(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1, u32 word) {
    for (int round = 0; round < 10; ++round) {
        u64 first = u64(0xd2511f53u) * c0, second = u64(0xcd9e8d57u) * c2;
        u32 next0 = u32(second >> 32) ^ c1 ^ k0, next2 = u32(first >> 32) ^ c3 ^ k1;
        c1 = u32(second);
        c3 = u32(first);
        c0 = next0;
        c2 = next2;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return word == 0 ? c0 : word == 1 ? c1 : word == 2 ? c2 : c3;
}

// Returns the factor of this pair's probability in P·V: 0 if dropped, else 1 / (1 − rate).
DEVICE_CALL Sum keep_factor(const Attention& a, u32 b, u32 h, u32 i, u32 j) {
    u64 row_i = reinterpret_cast<const u64*>(a.query_rows)[i],
        row_j = reinterpret_cast<const u64*>(a.key_rows)[j];
    // one Philox call yields four words: four consecutive keys share a counter
    u64 block = row_j / 4;
    u32 upper = u32((row_i >> 32) << 16) + u32(block >> 32);
    u32 plane = b * recomputed(a.dropout_q_heads) + a.dropout_first_head + h;
    u32 word = philox_word(u32(row_i), u32(block), upper, plane, a.dropout_low, a.dropout_high,
                           u32(row_j % 4));
    return word < a.dropout_threshold ? Sum(0) : Sum(a.keep_scale);
}
