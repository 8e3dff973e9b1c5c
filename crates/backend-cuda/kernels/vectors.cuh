// Loads and stores of 16 bytes, of kernels that are bound by global memory.
#pragma once

#include "arguments.cuh"
#include "numbers.cuh"

// Consecutive elements, loaded and stored by instructions of 16 bytes if there are more than one.
template <typename T, u32 width>
union Vector {
    T elements[width];
    u32 words[sizeof(T) * width < 16 ? 4 : sizeof(T) * width / 4];

    METHOD void load(u64 from) {
        if constexpr (width == 1) {
            elements[0] = *reinterpret_cast<const T*>(from);
        } else {
            UNROLL for (u32 at = 0; at < sizeof(T) * width; at += 16)
                load_16(words + at / 4, from + at);
        }
    }
    METHOD void store(u64 to) const {
        if constexpr (width == 1) {
            *reinterpret_cast<T*>(to) = elements[0];
        } else {
            UNROLL for (u32 at = 0; at < sizeof(T) * width; at += 16)
                store_16(to + at, words + at / 4);
        }
    }
};

// True if every `width` consecutive elements from a multiple of `width` on begin at a multiple of
// 16 bytes.
template <typename T>
DEVICE bool has_vectors(const Tensor& tensor, u32 dim, u32 width) {
    const u64 unit = 16 / sizeof(T);
    return tensor.dim == 1 && dim % width == 0 && tensor.at % 16 == 0 &&
           u64(tensor.batch | tensor.row | tensor.head) % unit == 0;
}
