// Copies between tensors and wire records, and of byte ranges; sums of gradient records.
// Grid-stride loops.
#pragma once

#include "arguments.cuh"
#include "numbers.cuh"

// Loads and stores of 16 bytes, of kernels that are bound by global memory.
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

// Copies `width` consecutive elements per step. `Index` counts the steps; it is u32 where that
// suffices, because a 64-bit division is a call of some seventy instructions.
template <typename From, typename To, To convert(From), typename Index, u32 width>
DEVICE void copy_vectors(const Copy& a) {
    Index vectors = a.dim / width, count = vectors * a.heads * a.batches * a.rows;
    for (Index index = Index(block_x()) * THREADS + thread_index(); index < count;
         index += Index(blocks_x()) * THREADS) {
        Index rest = index / vectors, lines = rest / a.heads, row = lines / a.batches;
        i64 x = i64(index - rest * vectors) * width, head = i64(rest - lines * a.heads),
            b = i64(lines - row * a.batches);
        u64 from = a.from.at + u64(b * a.from.batch + i64(row) * a.from.row + head * a.from.head +
                                   x * a.from.dim) *
                                   sizeof(From);
        u64 to = a.to.at + u64(b * a.to.batch + i64(row) * a.to.row + head * a.to.head +
                               x * a.to.dim) *
                               sizeof(To);
        Vector<From, width> loaded;
        Vector<To, width> stored;
        loaded.load(from);
        UNROLL for (u32 c = 0; c < width; ++c) stored.elements[c] = convert(loaded.elements[c]);
        stored.store(to);
    }
}

template <typename From, typename To, To convert(From)>
DEVICE void copy_all(const Copy& a) {
    const u32 width = 16 / (sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
    // the stride of the grid is added to an index below this count
    bool is_short = u64(a.batches) * a.rows * a.heads * a.dim < 1ull << 31;
    if (is_short && has_vectors<From>(a.from, a.dim, width) && has_vectors<To>(a.to, a.dim, width))
        copy_vectors<From, To, convert, u32, width>(a);
    else if (is_short)
        copy_vectors<From, To, convert, u32, 1>(a);
    else
        copy_vectors<From, To, convert, u64, 1>(a);
}

DEVICE Element same_element(Element x) { return x; }
DEVICE Sum same_sum(Sum x) { return x; }

KERNEL(copy_elements, Copy) { copy_all<Element, Element, same_element>(a); }
KERNEL(round_sums, Copy) { copy_all<Sum, Element, narrow>(a); }
KERNEL(copy_sums, Copy) { copy_all<Sum, Sum, same_sum>(a); }

// Copies sums at addresses that are only 2-byte aligned; strides in 2-byte units, dim counts sums.
KERNEL(copy_statistics, Copy) {
    u64 count = u64(a.batches) * a.rows * a.heads * a.dim;
    for (u64 index = u64(block_x()) * THREADS + thread_index(); index < count;
         index += u64(blocks_x()) * THREADS) {
        u64 x = index % a.dim, rest = index / a.dim;
        i64 head = i64(rest % a.heads), b = i64(rest / a.heads % a.batches),
            row = i64(rest / a.heads / a.batches);
        const u16* from =
            reinterpret_cast<const u16*>(a.from.at) +
            (b * a.from.batch + row * a.from.row + head * a.from.head + i64(x) * a.from.dim);
        u16* to = reinterpret_cast<u16*>(a.to.at) +
                  (b * a.to.batch + row * a.to.row + head * a.to.head + i64(x) * a.to.dim);
        store_sum(to, load_sum(from));
    }
}

KERNEL(fill_sums, Fill) {
    for (u64 index = u64(block_x()) * THREADS + thread_index(); index < a.count;
         index += u64(blocks_x()) * THREADS)
        reinterpret_cast<Sum*>(a.at)[index] = Sum(a.value);
}

// Adds or copies ranges of gradient records. Grid: ranges × parts of a range.
KERNEL(combine_records, Combine) {
    const u64* range = reinterpret_cast<const u64*>(a.ranges) + 3 * u64(block_x());
    u64 to = a.to + range[0] * a.record_sums * sizeof(Sum),
        from = a.from + range[1] * a.record_sums * sizeof(Sum), count = range[2] * a.record_sums;
    u64 first = u64(block_y()) * THREADS + thread_index(), stride = u64(blocks_y()) * THREADS;
    const u32 width = 16 / sizeof(Sum);
    if ((to | from) % 16 == 0 && count % width == 0) {
        for (u64 index = first; index < count / width; index += stride) {
            Vector<Sum, width> sums, terms;
            terms.load(from + 16 * index);
            if (a.add) {
                sums.load(to + 16 * index);
                UNROLL for (u32 c = 0; c < width; ++c)
                    terms.elements[c] = sums.elements[c] + terms.elements[c];
            }
            terms.store(to + 16 * index);
        }
        return;
    }
    for (u64 index = first; index < count; index += stride) {
        Sum& sum = reinterpret_cast<Sum*>(to)[index];
        Sum term = reinterpret_cast<const Sum*>(from)[index];
        sum = a.add ? sum + term : term;
    }
}

template <typename T>
DEVICE void copy_units(u64 to, u64 from, u64 bytes) {
    u64 stride = u64(blocks_y()) * THREADS;
    for (u64 index = u64(block_y()) * THREADS + thread_index(); index < bytes / sizeof(T);
         index += stride)
        reinterpret_cast<T*>(to)[index] = reinterpret_cast<const T*>(from)[index];
}

// Gathers byte ranges for a message, or scatters them. Grid: ranges × parts of a range.
KERNEL(copy_ranges, RangeCopy) {
    const ByteRange* ranges = a.table ? reinterpret_cast<const ByteRange*>(a.table) : a.few;
    const ByteRange range = ranges[block_x()];
    u64 in_buffer = a.buffer + range.start, in_packed = a.packed + range.at;
    u64 to = a.gathers ? in_packed : in_buffer, from = a.gathers ? in_buffer : in_packed;
    u64 aligned = to | from | range.bytes;
    if (aligned % 16 == 0) {
        u64 stride = u64(blocks_y()) * THREADS * 16;
        for (u64 at = (u64(block_y()) * THREADS + thread_index()) * 16; at < range.bytes;
             at += stride) {
            u32 words[4];
            load_16(words, from + at);
            store_16(to + at, words);
        }
    } else if (aligned % 4 == 0) {
        copy_units<u32>(to, from, range.bytes);
    } else {
        copy_units<u8>(to, from, range.bytes);
    }
}
