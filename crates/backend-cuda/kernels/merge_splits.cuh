// Split-KV decoding: merges the partial results of all ranges of keys into the state of the pass.
//
//   m' = max(m, max_s m_s);  f = e^{m − m'}, f_s = e^{m_s − m'}
//   ℓ' = f·ℓ + Σ_s f_s·ℓ_s;  O' = f·O + Σ_s f_s·O_s
//
// With few queries a grid of query tiles leaves most multiprocessors idle, so that ranges of keys
// are blocks of their own (src/state.rs). One block merges one row: thread s computes f_s, warp
// w adds the terms s = w, w + 8, …, and the sums of the warps are added in order. The order of all
// sums is fixed, hence the bits repeat. Shared memory, in elements of Sum: `factors` f_s, 256;
// `of_warps` maxima, sums and ties of 8 warps, 24; `terms` of O of 8 warps, 8 × dims. A barrier
// follows the maxima, the factors, and the terms.
//
// Source: Flash-Decoding (Dao et al. 2023).
#pragma once

#include "forward_state.cuh"

#define MERGE_WARPS (THREADS / 32)

// Sums or maxima of the threads of a warp, in all of its lanes.
DEVICE Sum warp_sum(Sum mine) {
    for (u32 lanes = 16; lanes > 0; lanes /= 2) mine += shuffle_xor(mine, lanes);
    return mine;
}
DEVICE Sum warp_max(Sum mine) {
    for (u32 lanes = 16; lanes > 0; lanes /= 2) mine = larger(mine, shuffle_xor(mine, lanes));
    return mine;
}

// Grid: rows [batch, row, head]. At most THREADS ranges.
KERNEL(merge_splits, Merge) {
    SHARED(Sum, factors, THREADS);
    SHARED(Sum, of_warps, 3 * MERGE_WARPS);
    SHARED(Sum, terms, MERGE_WARPS * ANNULUS_DIM);
    const Sum none = -Sum(infinity());
    u64 row = block_x(), rows = u64(a.batches) * a.queries * a.q_heads;
    u32 h = u32(row % a.q_heads), i = u32(row / a.q_heads % a.queries),
        b = u32(row / a.q_heads / a.queries);
    u64 statistics = (u64(b) * a.q_heads + h) * a.queries + i;
    u32 s = thread_index(), lane = thread_index() % 32, warp = thread_index() / 32;
    bool exists = s < a.splits, is_empty = a.flags & EMPTY_STATE;

    Sum mine = exists ? reinterpret_cast<const Sum*>(a.split_max)[s * rows + statistics] : none;
    Sum before = is_empty ? none : reinterpret_cast<const Sum*>(a.max)[statistics];
    Sum max = warp_max(mine);
    if (lane == 0) of_warps[warp] = max;
    barrier();
    max = before;
    for (u32 other = 0; other < MERGE_WARPS; ++other) max = larger(max, of_warps[other]);

    Sum factor = merge_factor(mine, max), sum = 0, ties = 0;
    if (exists) {
        factors[s] = factor;
        sum = factor * reinterpret_cast<const Sum*>(a.split_sum)[s * rows + statistics];
        // ties are counted for unnormalized outputs only
        if ((a.flags & UNNORMALIZED) && mine == max)
            ties = reinterpret_cast<const Sum*>(a.split_ties)[s * rows + statistics];
    }
    sum = warp_sum(sum);
    ties = warp_sum(ties);
    if (lane == 0) {
        of_warps[MERGE_WARPS + warp] = sum;
        of_warps[2 * MERGE_WARPS + warp] = ties;
    }
    barrier();

    Sum acc[ANNULUS_DIM / 32];
    UNROLL for (u32 c = 0; c < ANNULUS_DIM / 32; ++c) acc[c] = 0;
    for (u32 split = warp; split < a.splits; split += MERGE_WARPS) {
        const Sum* line = reinterpret_cast<const Sum*>(a.split_acc) +
                          (split * rows + row) * a.value_dim;
        UNROLL for (u32 c = 0; c < ANNULUS_DIM / 32; ++c)
            if (lane + 32 * c < a.value_dim)
                acc[c] = multiply_add(factors[split], line[lane + 32 * c], acc[c]);
    }
    UNROLL for (u32 c = 0; c < ANNULUS_DIM / 32; ++c)
        terms[warp * ANNULUS_DIM + lane + 32 * c] = acc[c];
    barrier();

    Sum of_state = is_empty ? Sum(0) : merge_factor(before, max);
    sum = is_empty ? Sum(0) : of_state * reinterpret_cast<const Sum*>(a.sum)[statistics];
    ties = !is_empty && before == max ? reinterpret_cast<const Sum*>(a.ties)[statistics] : Sum(0);
    for (u32 other = 0; other < MERGE_WARPS; ++other) {
        sum += of_warps[MERGE_WARPS + other];
        ties += of_warps[2 * MERGE_WARPS + other];
    }
    RowOutput output = row_output(max, sum);
    for (u32 x = thread_index(); x < a.value_dim; x += THREADS) {
        Sum& stored = reinterpret_cast<Sum*>(a.acc)[row * a.value_dim + x];
        Sum total = is_empty ? Sum(0) : of_state * stored;
        for (u32 other = 0; other < MERGE_WARPS; ++other) total += terms[other * ANNULUS_DIM + x];
        if (a.flags & WRITE_OUTPUTS)
            store_output(a, b, h, i, x, output.of(total));
        else
            stored = total;
    }
    if (thread_index() != 0) return;
    if (a.flags & WRITE_OUTPUTS) {
        store_row_outputs(a.of_rows, b, h, i, max, sum);
        return;
    }
    reinterpret_cast<Sum*>(a.max)[statistics] = max;
    reinterpret_cast<Sum*>(a.sum)[statistics] = sum;
    reinterpret_cast<Sum*>(a.ties)[statistics] = ties;
}
