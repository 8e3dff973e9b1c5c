// What is done once a row: the end of forward, the beginning of backward, the gradient of the sinks. Half a warp's worth of work, so a warp a row.
#pragma once

#include "arguments.cuh"
#include "numbers.cuh"

#define LANES 32

struct Place {
    u32 b, h, i;
    bool there;
};

// The row of this warp: rows are counted [batch, row, head].
DEVICE Place place_of(const Ends& a) {
    u64 row = u64(block_x()) * (THREADS / LANES) + thread_index() / LANES;
    Place place;
    place.there = row < u64(a.batches) * a.queries * a.q_heads;
    place.h = u32(row % a.q_heads);
    place.i = u32(row / a.q_heads % a.queries);
    place.b = u32(row / a.q_heads / a.queries);
    return place;
}

DEVICE u64 at_row(const Tensor& tensor, u32 b, u32 h, u32 i) {
    return tensor.at + u64(i64(b) * tensor.batch + i64(h) * tensor.head + i64(i) * tensor.row) * sizeof(Sum);
}

DEVICE Sum sink_of(const Ends& a, u32 h, u32 t) {
    u32 line = a.sinks_lines > 1 ? h : 0;
    return *reinterpret_cast<const Sum*>(a.sinks.at + u64(i64(line) * a.sinks.head + i64(t) * a.sinks.row) * sizeof(Sum));
}

template <typename T>
DEVICE T* element_of(const Tensor& tensor, u32 b, u32 h, u32 i, u32 x) {
    return reinterpret_cast<T*>(tensor.at +
                                u64(i64(b) * tensor.batch + i64(i) * tensor.row + i64(h) * tensor.head + i64(x) * tensor.dim) * sizeof(T));
}

// Folds in the sinks, once; divides, once; rounds, once. Grid: rows, 8 a block.
KERNEL(finish_forward, Ends) {
    Place place = place_of(a);
    if (!place.there) return;
    u64 row = (u64(place.b) * a.q_heads + place.h) * a.queries + place.i;
    Sum none = -Sum(infinity());
    Sum before = reinterpret_cast<const Sum*>(a.row_max)[row], max = before;
    for (u32 t = 0; t < a.sinks_count; ++t) {
        Sum sink = sink_of(a, place.h, t);
        // a sink of −∞ is no sink
        if (sink != none) max = larger(max, sink);
    }
    Sum factor = max == before ? Sum(1) : exponential(before - max);
    Sum sum = reinterpret_cast<const Sum*>(a.row_sum)[row] * factor;
    Sum ties = max == before ? reinterpret_cast<const Sum*>(a.row_ties)[row] : Sum(0);
    for (u32 t = 0; t < a.sinks_count; ++t) {
        Sum sink = sink_of(a, place.h, t);
        if (sink == none || max == none) continue;
        sum += exponential(sink - max);
        ties += Sum(sink == max);
    }
    bool divide = !(a.flags & UNNORMALIZED) && sum != Sum(0);
    const Sum* acc = reinterpret_cast<const Sum*>(a.acc) + ((u64(place.b) * a.queries + place.i) * a.q_heads + place.h) * a.value_dim;
    for (u32 x = thread_index() % LANES; x < a.value_dim; x += LANES) {
        Sum value = acc[x] * factor;
        *element_of<Element>(a.out, place.b, place.h, place.i, x) = narrow(divide ? value / sum : value);
    }
    if (thread_index() % LANES == 0) {
        *reinterpret_cast<Sum*>(at_row(a.lse, place.b, place.h, place.i)) = max + logarithm(sum);
        if (a.max.at) *reinterpret_cast<Sum*>(at_row(a.max, place.b, place.h, place.i)) = max;
        if (a.sum.at) *reinterpret_cast<Sum*>(at_row(a.sum, place.b, place.h, place.i)) = sum;
        if (a.ties.at) *reinterpret_cast<Sum*>(at_row(a.ties, place.b, place.h, place.i)) = ties;
    }
}

// Row statistics: [lse, max, delta, share]. Grid: rows, 8 a block.
KERNEL(begin_backward, Ends) {
    Place place = place_of(a);
    Sum product = 0;
    if (place.there)
        for (u32 x = thread_index() % LANES; x < a.value_dim; x += LANES)
            product = fused(widen(*element_of<const Element>(a.dout, place.b, place.h, place.i, x)),
                            widen(*element_of<const Element>(a.out, place.b, place.h, place.i, x)), product);
    for (u32 lanes = LANES / 2; lanes > 0; lanes /= 2) product += shuffle_xor(product, lanes);
    if (!place.there || thread_index() % LANES != 0) return;
    Sum lse = *reinterpret_cast<const Sum*>(at_row(a.lse, place.b, place.h, place.i));
    Sum dlse = 0, max = 0, delta, share = 0;
    if (a.dlse.at && lse != -Sum(infinity())) dlse = *reinterpret_cast<const Sum*>(at_row(a.dlse, place.b, place.h, place.i));
    if (a.flags & UNNORMALIZED) {
        max = *reinterpret_cast<const Sum*>(at_row(a.max, place.b, place.h, place.i));
        share = product / *reinterpret_cast<const Sum*>(at_row(a.ties, place.b, place.h, place.i));
        delta = -dlse;
    } else {
        delta = product - dlse;
    }
    u16* to = reinterpret_cast<u16*>(a.statistics.at) +
              (i64(place.b) * a.statistics.batch + i64(place.i) * a.statistics.row + i64(place.h) * a.statistics.head);
    const u32 apart = sizeof(Sum) / 2;
    store_sum(to, lse);
    store_sum(to + apart, max);
    store_sum(to + 2 * apart, delta);
    store_sum(to + 3 * apart, share);
}

// dsinks of one sink: −Σ ( [a = max]·share + e^{a − lse}·delta ) over all rows that have it. Grid: sinks × lines.
KERNEL(sink_gradient, Ends) {
    SHARED(Sum, parts, THREADS);
    u32 t = block_x(), line = block_y();
    Sum sink = *reinterpret_cast<const Sum*>(a.sinks.at + u64(i64(line) * a.sinks.head + i64(t) * a.sinks.row) * sizeof(Sum));
    u32 heads = a.sinks_lines > 1 ? 1 : a.q_heads;
    u64 rows = u64(a.batches) * heads * a.queries;
    Sum sum = 0;
    for (u64 row = thread_index(); row < rows && sink != -Sum(infinity()); row += THREADS) {
        u32 i = u32(row % a.queries), h = a.sinks_lines > 1 ? line : u32(row / a.queries % heads), b = u32(row / a.queries / heads);
        const u16* from = reinterpret_cast<const u16*>(a.statistics.at) +
                          (i64(b) * a.statistics.batch + i64(i) * a.statistics.row + i64(h) * a.statistics.head);
        const u32 apart = sizeof(Sum) / 2;
        Sum lse = load_sum(from), max = load_sum(from + apart), delta = load_sum(from + 2 * apart), share = load_sum(from + 3 * apart);
        bool through_max = (a.flags & UNNORMALIZED) && sink == max;
        sum -= (through_max ? share : Sum(0)) + exponential(sink - lse) * delta;
    }
    parts[thread_index()] = sum;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        barrier();
        if (thread_index() < half) parts[thread_index()] += parts[thread_index() + half];
    }
    barrier();
    if (thread_index() == 0)
        *reinterpret_cast<Sum*>(a.dsinks.at + u64(i64(line) * a.dsinks.head + i64(t) * a.dsinks.row) * sizeof(Sum)) = parts[0];
}
