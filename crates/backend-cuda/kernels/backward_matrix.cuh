// Backward on tensor cores (mma.sync) or AMD's matrix cores (MFMA), 16-bit elements: two kernels,
// dQ by query tiles (backward_queries_matrix.cuh), dK and dV by key tiles
// (backward_keys_matrix.cuh). Accumulators are f32; P and dX are rounded to the element type for the
// last products.
//
//   for each visible tile of the other side:
//       S = left·rightᵀ of Q and K;  dP = left·rightᵀ of dO and V;  P, dX (gradient.cuh)
//       dQ pass:     dQ += dX·K
//       dK/dV pass:  dV += Pᵀ·dO;  dK += dXᵀ·Q
//
// The dK/dV pass computes Sᵀ and dPᵀ to begin with, so the block's own rows are always the left
// operand. They stay in shared memory, on AMD GPUs in registers; P and dX go from accumulators to
// left operands in registers. A warp has 32 rows of every left operand (on NVIDIA's GPUs 16 with 256
// dims, whose accumulators take twice the registers), so that it reads an element of the right
// operand once for 32 rows. One warp adds to an accumulator in a fixed order: no atomics, bitwise
// reproducible. Unnormalized outputs use level plain.
//
// Source: Dao 2023 (FlashAttention-2), algorithm 2.
#pragma once

#include "gradient.cuh"
#include "backward_pair.cuh"
#include "row_tiles.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// BACKWARD_BLOCKS: blocks that registers leave room for.
#ifdef ANNULUS_AMD

#define BACKWARD_THREADS 256
#define BACKWARD_BLOCKS (ANNULUS_DIM <= 128 ? 2 : 1)
#define BACKWARD_ROW_TILES 1
// Two blocks fit a compute unit with up to 128 dims.
#define MATRIX_SHARED_BYTES (64 * 1024 / BACKWARD_BLOCKS)

#else

#define BACKWARD_THREADS 128
#define BACKWARD_BLOCKS 2
#define BACKWARD_ROW_TILES (ANNULUS_DIM <= 128 ? 2 : 1)

// Registers of a multiprocessor, for two blocks of 256 registers a thread.
static_assert(2 * BACKWARD_THREADS * 256 <= 64 * 1024, "registers");

// Bytes of dynamic shared memory of a block. Of compute capabilities 8.6 and 8.9, which have the
// least: 99 KB, and 100 KB a multiprocessor, of which the system takes 1 KB for each block. Two
// blocks fit with 64 dims; with more dims they fit 8.0 (164 KB) and 9.0.
#define MATRIX_SHARED_BYTES ((ANNULUS_DIM <= 64 ? 49 : 81) * 1024)

// Only AMD's matrix cores need a scale of left operands (matrix_amd.cuh).
struct LeftScale {
    METHOD float inverse() const { return 1; }
    template <typename Left, typename Accumulators>
    METHOD void apply(Left&, Accumulators&) {}
};

#endif

#define BACKWARD_WARPS (BACKWARD_THREADS / WARP_LANES)

// Reads the statistics of a query, with base = max. Beyond the end all are 0: with the zeros that
// are loaded for its q and dO, P = 1 and dX = 0, which contribute nothing.
DEVICE QueryStatistics load_query_statistics(const Attention& a, u32 b, u32 h, u32 i) {
    if (i >= a.queries) return {};
    // records of dims that are not even put the statistics at odd multiples of two bytes
    const u16* from = statistics_of(a, b, h, i);
    return load_exact_statistics(from);
}

#endif
