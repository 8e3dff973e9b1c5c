// Merges the partial results of the warps of a block, each of its own keys of the same rows, in the
// order of the warps, by the formula of merge_splits.cuh:
//
//   m' = max_w m_w;  f_w = e^{m_w − m'};  ℓ' = Σ_w f_w·ℓ_w;  O' = Σ_w f_w·O_w
//
// The warps run the online softmax on their own, so that they need no barrier for their maxima in
// each tile. The first warp merges, each thread what the threads of its number in all warps have: ℓ
// of a row is still that of a thread's columns.
#pragma once

#include "row_tiles.cuh"
#include "forward_state.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Results of all warps but the first, in shared memory. The 32 threads of a warp write and read 16
// adjacent bytes each.
template <u32 row_tiles, u32 warps>
struct WarpResults {
    RowState<row_tiles> states[warps - 1][32];
    float o[warps - 1][CHUNKS][row_tiles][CHUNK / 8][32][4];
};

// Merges the results of all warps into those of the first one. `memory` may be in use by warps that
// have not arrived.
template <u32 row_tiles, u32 warps>
DEVICE void merge_warps(RowState<row_tiles>& state, RowAccumulators<row_tiles>& o,
                        WarpResults<row_tiles, warps>& memory) {
    const u32 warp = thread_index() / 32, lane = thread_index() % 32;
    barrier();
    if (warp > 0) {
        memory.states[warp - 1][lane] = state;
        UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
            UNROLL for (u32 m = 0; m < row_tiles; ++m)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                    UNROLL for (u32 e = 0; e < 4; ++e)
                        memory.o[warp - 1][panel][m][n][lane][e] = o[panel][m][n][e];
    }
    barrier();
    if (warp > 0) return;

    RowState<row_tiles> states[warps];
    states[0] = state;
    UNROLL for (u32 other = 1; other < warps; ++other) {
        states[other] = memory.states[other - 1][lane];
        UNROLL for (u32 m = 0; m < row_tiles; ++m)
            UNROLL for (u32 r = 0; r < 2; ++r)
                state.max[m][r] = larger(state.max[m][r], states[other].max[m][r]);
    }
    float factors[warps][row_tiles][2];
    UNROLL for (u32 m = 0; m < row_tiles; ++m)
        UNROLL for (u32 r = 0; r < 2; ++r) {
            state.sum[m][r] = 0;
            UNROLL for (u32 other = 0; other < warps; ++other) {
                factors[other][m][r] = merge_factor(states[other].max[m][r], state.max[m][r]);
                state.sum[m][r] += factors[other][m][r] * states[other].sum[m][r];
            }
        }
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
        UNROLL for (u32 m = 0; m < row_tiles; ++m)
            UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                UNROLL for (u32 e = 0; e < 4; ++e) {
                    float sum = factors[0][m][e / 2] * o[panel][m][n][e];
                    UNROLL for (u32 other = 1; other < warps; ++other)
                        sum = multiply_add(factors[other][m][e / 2],
                                           memory.o[other - 1][panel][m][n][lane][e], sum);
                    o[panel][m][n][e] = sum;
                }
}

#endif
