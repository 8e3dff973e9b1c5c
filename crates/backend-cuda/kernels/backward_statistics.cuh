// Statistics of all queries as aligned arrays of f32, from the row statistics of this rank or of
// query records, which are only 2-byte aligned. A row beyond the end has zeros: with those that TMA
// loads for its q and dout, P = 1 and dX = 0, which contribute nothing.
#pragma once

#include "backward_warpgroup.cuh"

// Grid: rows in steps of THREADS × query heads × batch rows.
KERNEL(backward_statistics, BackwardAttention) {
    const Attention& all = a.attention;
    u32 row = block_x() * THREADS + thread_index(), h = block_y(), b = block_z();
    if (row >= a.statistics_tiles * 64) return;
    QueryStatistics own = {};
    if (row < all.queries) {
        const u16* from = reinterpret_cast<const u16*>(offset<u16>(all.statistics, b, row, h, 0));
        own = fused_statistics(load_exact_statistics(from));
    }
    StatisticsTile& to = statistics_of_head(a, b, h)[row / 64];
    to.exponent[row % 64] = own.exponent;
    to.delta[row % 64] = own.delta;
    to.base[row % 64] = own.base;
}
