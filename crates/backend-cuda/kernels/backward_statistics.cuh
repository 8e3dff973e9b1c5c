// lse and delta of all queries as aligned arrays of f32, from the row statistics of this rank or of
// query records, which are only 2-byte aligned. A row beyond the end has lse = delta = 0: with the
// zeros that TMA loads for its q and dout, P = 1 and dX = 0, which contribute nothing.
#pragma once

#include "backward_warpgroup.cuh"

// Grid: rows in steps of THREADS × query heads × batch rows.
KERNEL(backward_statistics, BackwardAttention) {
    const Attention& all = a.attention;
    u32 row = block_x() * THREADS + thread_index(), h = block_y(), b = block_z();
    if (row >= a.statistics_tiles * 64) return;
    float lse = 0, delta = 0;
    if (row < all.queries) {
        const u16* from = reinterpret_cast<const u16*>(offset<u16>(all.statistics, b, row, h, 0));
        lse = load_sum(from);
        // after lse and max
        delta = load_sum(from + 4);
    }
    StatisticsTile& to = statistics_of_head(a, b, h)[row / 64];
    to.lse[row % 64] = lse;
    to.delta[row % 64] = delta;
}
