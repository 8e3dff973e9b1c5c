// Tensors to records and back, and sums of gradient records. Threads go through the elements in strides of the whole grid.
#pragma once

#include "arguments.cuh"
#include "numbers.cuh"

template <typename From, typename To, To convert(From)>
DEVICE void copy_all(const Copy& a) {
    u64 count = u64(a.batches) * a.rows * a.heads * a.dim;
    for (u64 place = u64(block_x()) * THREADS + thread_index(); place < count; place += u64(blocks_x()) * THREADS) {
        u64 x = place % a.dim, rest = place / a.dim;
        i64 head = i64(rest % a.heads), b = i64(rest / a.heads % a.batches), row = i64(rest / a.heads / a.batches);
        u64 from = a.from.at + u64(b * a.from.batch + row * a.from.row + head * a.from.head + i64(x) * a.from.dim) * sizeof(From);
        u64 to = a.to.at + u64(b * a.to.batch + row * a.to.row + head * a.to.head + i64(x) * a.to.dim) * sizeof(To);
        *reinterpret_cast<To*>(to) = convert(*reinterpret_cast<const From*>(from));
    }
}

DEVICE Element as_it_is(Element x) { return x; }
DEVICE Sum as_it_was(Sum x) { return x; }

KERNEL(copy_elements, Copy) { copy_all<Element, Element, as_it_is>(a); }
KERNEL(round_sums, Copy) { copy_all<Sum, Element, narrow>(a); }
KERNEL(copy_sums, Copy) { copy_all<Sum, Sum, as_it_was>(a); }

// Sums that lie at any even address, strides in 2-byte units; dim counts sums.
KERNEL(copy_statistics, Copy) {
    u64 count = u64(a.batches) * a.rows * a.heads * a.dim;
    for (u64 place = u64(block_x()) * THREADS + thread_index(); place < count; place += u64(blocks_x()) * THREADS) {
        u64 x = place % a.dim, rest = place / a.dim;
        i64 head = i64(rest % a.heads), b = i64(rest / a.heads % a.batches), row = i64(rest / a.heads / a.batches);
        const u16* from = reinterpret_cast<const u16*>(a.from.at) + (b * a.from.batch + row * a.from.row + head * a.from.head + i64(x) * a.from.dim);
        u16* to = reinterpret_cast<u16*>(a.to.at) + (b * a.to.batch + row * a.to.row + head * a.to.head + i64(x) * a.to.dim);
        store_sum(to, load_sum(from));
    }
}

KERNEL(fill_sums, Fill) {
    for (u64 place = u64(block_x()) * THREADS + thread_index(); place < a.count; place += u64(blocks_x()) * THREADS)
        reinterpret_cast<Sum*>(a.at)[place] = Sum(a.value);
}

// Grid: places.
KERNEL(combine_records, Combine) {
    const u64* place = reinterpret_cast<const u64*>(a.places) + 3 * u64(block_x());
    Sum* to = reinterpret_cast<Sum*>(a.to) + place[0] * a.record;
    const Sum* from = reinterpret_cast<const Sum*>(a.from) + place[1] * a.record;
    for (u64 x = thread_index(); x < place[2] * a.record; x += THREADS) to[x] = (a.add ? to[x] : Sum(0)) + from[x];
}
