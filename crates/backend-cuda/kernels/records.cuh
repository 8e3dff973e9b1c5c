// Copies between tensors and wire records, and sums of gradient records. Grid-stride loops.
#pragma once

#include "arguments.cuh"
#include "numbers.cuh"

template <typename From, typename To, To convert(From)>
DEVICE void copy_all(const Copy& a) {
    u64 count = u64(a.batches) * a.rows * a.heads * a.dim;
    for (u64 index = u64(block_x()) * THREADS + thread_index(); index < count;
         index += u64(blocks_x()) * THREADS) {
        u64 x = index % a.dim, rest = index / a.dim;
        i64 head = i64(rest % a.heads), b = i64(rest / a.heads % a.batches),
            row = i64(rest / a.heads / a.batches);
        u64 from = a.from.at + u64(b * a.from.batch + row * a.from.row + head * a.from.head +
                                   i64(x) * a.from.dim) *
                                   sizeof(From);
        u64 to =
            a.to.at + u64(b * a.to.batch + row * a.to.row + head * a.to.head + i64(x) * a.to.dim) *
                          sizeof(To);
        *reinterpret_cast<To*>(to) = convert(*reinterpret_cast<const From*>(from));
    }
}

DEVICE Element as_it_is(Element x) { return x; }
DEVICE Sum as_it_was(Sum x) { return x; }

KERNEL(copy_elements, Copy) { copy_all<Element, Element, as_it_is>(a); }
KERNEL(round_sums, Copy) { copy_all<Sum, Element, narrow>(a); }
KERNEL(copy_sums, Copy) { copy_all<Sum, Sum, as_it_was>(a); }

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

// Adds or copies ranges of gradient records. Grid: ranges, one block each.
KERNEL(combine_records, Combine) {
    const u64* range = reinterpret_cast<const u64*>(a.ranges) + 3 * u64(block_x());
    Sum* to = reinterpret_cast<Sum*>(a.to) + range[0] * a.record_sums;
    const Sum* from = reinterpret_cast<const Sum*>(a.from) + range[1] * a.record_sums;
    for (u64 x = thread_index(); x < range[2] * a.record_sums; x += THREADS)
        to[x] = (a.add ? to[x] : Sum(0)) + from[x];
}
