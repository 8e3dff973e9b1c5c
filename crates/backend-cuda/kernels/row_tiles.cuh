// GEMM building blocks of warps that own whole rows, on tensor cores (mma.sync), 16-bit elements;
// on AMD GPUs of waves, on matrix cores (MFMA). Fragments of a product differ, and with them what
// loads and multiplies them (here, and in matrix_amd.cuh); all else is the same text.
//
// A warp owns 16·row_tiles rows of the left operand and all columns of a product (8·columns: 64, or
// 32), so that a row is reduced within four lanes, and P goes from the accumulators of S into the
// left operand of P·V without shared memory:
//
//   gemm_nt   scores (rows × columns) = left·rightᵀ    left from shared memory, by ldmatrix
//   gemm_nn   acc (rows × dims) += left·right          left in registers
//
// An element of the right operand is loaded once for 16·row_tiles rows. panel_nt and panel_nn
// compute the part of one panel of dims. With few rows (forward_decode) all warps own the same
// rows, and each owns other columns of the scores, which are the terms of acc that it adds.
//
// Source: Dao 2023 (FlashAttention-2); PTX ISA, "Matrix Fragments for mma.m16n8k16".
#pragma once

#include "chunk_stream.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Fragment of a thread: four elements of a product, FRAGMENT_ROWS rows × FRAGMENT_COLUMNS adjacent
// columns. Its row m has four lanes on NVIDIA's tensor cores, two on AMD's matrix cores. A warp (a
// wave) has WARP_ROWS rows for each m.
#ifdef ANNULUS_AMD
#define FRAGMENT_ROWS 1
#define WARP_ROWS 32
#define WARP_LANES 64
#else
#define FRAGMENT_ROWS 2
#define WARP_ROWS 16
#define WARP_LANES 32
#endif
#define FRAGMENT_COLUMNS (4 / FRAGMENT_ROWS)

// Scores of a thread; then their probabilities. Element e of fragment (m, n) is row
// lane.row_of(m, e / FRAGMENT_COLUMNS), column 8·n + lane.column + e mod FRAGMENT_COLUMNS.
template <u32 row_tiles, u32 columns>
using RowScores = float[row_tiles][columns][4];
// Pairs of 16-bit elements of a left operand: pair r of fragment (m, n) is its elements 2·r and
// 2·r + 1.
template <u32 row_tiles, u32 columns>
using RowPairs = u32[row_tiles][columns][2];
// Bits of a thread's visible pairs: bit 4·n + e for element e of fragment (m, n).
template <u32 row_tiles>
using VisibleBits = u32[row_tiles];
// Accumulators of a panel of 64 dims.
template <u32 row_tiles>
using PanelAccumulators = float[row_tiles][CHUNK / 8][4];
template <u32 row_tiles>
using RowAccumulators = PanelAccumulators<row_tiles>[CHUNKS];

// Of an online softmax: running maximum of a thread's rows, and sum of its own columns.
template <u32 row_tiles>
struct RowState {
    float max[row_tiles][FRAGMENT_ROWS], sum[row_tiles][FRAGMENT_ROWS];
};

// Position of a thread.
struct RowLane {
    u32 lane, first_row, column;
    u32 first_column;  // of the warp, if warps divide the columns of a product: see gemm_nt
    bool has_rows;     // of the warp: false if all of its rows lie beyond the ends

#ifdef ANNULUS_AMD
    METHOD u32 row_of(u32, u32) const { return first_row + lane % 32; }
#else
    METHOD u32 row_of(u32 m, u32 r) const { return first_row + 16 * m + lane / 4 + 8 * r; }
#endif
};

// `owner`: number of the warp among those that own different rows.
template <u32 row_tiles>
DEVICE RowLane row_lane_of_thread(u32 owner) {
    RowLane at;
    at.lane = thread_index() % WARP_LANES;
    at.first_row = owner * (WARP_ROWS * row_tiles);
#ifdef ANNULUS_AMD
    at.column = at.lane / 32 * 4;
#else
    at.column = 2 * (at.lane % 4);
#endif
    at.first_column = 0;
    at.has_rows = true;
    return at;
}

// Maximum of two scores. On AMD GPUs, which have no instruction for a NaN of either, a NaN is
// dropped: the sum of the row's probabilities is one, and with it the result.
DEVICE float larger_score(float x, float y) {
#ifdef ANNULUS_AMD
    return max_of_numbers(x, y);
#else
    return larger(x, y);
#endif
}

// Maximum and sum over the lanes that share a row.
DEVICE float row_max(float mine) {
#ifdef ANNULUS_AMD
    return larger_score(mine, shuffle_xor(mine, 32));
#else
    mine = larger(mine, shuffle_xor(mine, 1));
    return larger(mine, shuffle_xor(mine, 2));
#endif
}
DEVICE float row_sum(float mine) {
#ifdef ANNULUS_AMD
    return mine + shuffle_xor(mine, 32);
#else
    mine += shuffle_xor(mine, 1);
    return mine + shuffle_xor(mine, 2);
#endif
}

// As recomputed, for what is computed from a thread's position.
DEVICE RowLane recomputed(RowLane lane) {
    lane.first_row = recomputed(lane.first_row);
    lane.column = recomputed(lane.column);
#ifdef ANNULUS_AMD
    lane.lane = recomputed(lane.lane);
#endif
    return lane;
}
// As recomputed on AMD GPUs, where a lane's row and what follows from it, over all tiles of a loop,
// would take registers of the products.
DEVICE RowLane recomputed_in_loop(const RowLane& lane) {
#ifdef ANNULUS_AMD
    return recomputed(lane);
#else
    return lane;
#endif
}

// Moves every element of a list one place forward, the first one to the end. A loop that handles
// the first element and then rotates needs no index that is known only at run time, which registers
// do not have, and is compiled once instead of unrolled: for long code on rare paths.
template <typename T, u32 count>
DEVICE void rotate(T (&list)[count]) {
    T first = list[0];
    UNROLL for (u32 index = 0; index + 1 < count; ++index) list[index] = list[index + 1];
    list[count - 1] = first;
}
template <typename T, u32 count, u32 width>
DEVICE void rotate(T (&list)[count][width]) {
    UNROLL for (u32 e = 0; e < width; ++e) {
        T first = list[0][e];
        UNROLL for (u32 index = 0; index + 1 < count; ++index) list[index][e] = list[index + 1][e];
        list[count - 1][e] = first;
    }
}

#ifndef ANNULUS_AMD

// Copies `rows` rows of a left operand, from row `first` on, to shared memory, in panels of 64 dims
// with the swizzle of a chunk; 0 beyond the ends. The copies belong to the first group of the
// stream that begins next.
template <u32 threads, u32 rows>
DEVICE void load_left_rows(u16* to, const Operand& operand, u32 first) {
    NOT_UNROLLED for (u32 panel = 0; panel < CHUNKS; ++panel) {
        u16* panel_to = to + panel * rows * CHUNK;
        if (!operand.aligned) {
            load_panel_unaligned<threads, rows>(panel_to, operand, first, panel * CHUNK);
            continue;
        }
        u32 x = panel * CHUNK + copy_dim();
        for (u32 row = copy_row(); row < rows; row += copy_rows<threads, rows>()) {
            bool inside = first + row < operand.rows && x < operand.dim;
            i64 offset = inside ? i64(first + row) * operand.row + x : 0;
            cp_async_16(panel_to + swizzled(row, copy_dim()), operand.at + offset, inside);
        }
    }
}

#endif

// Rounds scores to pairs of a left operand. If a NaN is found `elsewhere`, one of bf16 may become a
// number on AMD GPUs, for which its conversion would need further instructions: see larger_score.
template <bool elsewhere>
DEVICE u32 narrow_scores(float first, float second) {
#if defined(ANNULUS_AMD) && ANNULUS_DTYPE == 2
    if (elsewhere) return pack_numbers_bf16x2(first, second);
#endif
    return narrow_pair(first, second);
}
template <bool elsewhere = false, u32 row_tiles, u32 columns>
DEVICE void narrow_left(u32 (&left)[row_tiles][columns][2],
                        const float (&scores)[row_tiles][columns][4]) {
    UNROLL for (u32 m = 0; m < row_tiles; ++m)
        UNROLL for (u32 n = 0; n < columns; ++n)
            UNROLL for (u32 r = 0; r < 2; ++r)
                left[m][n][r] =
                    narrow_scores<elsewhere>(scores[m][n][2 * r], scores[m][n][2 * r + 1]);
}

template <u32 row_tiles>
DEVICE bool is_visible(const u32 (&visible)[row_tiles], u32 m, u32 n, u32 e) {
    return visible[m] >> (4 * n + e) & 1;
}

// Marks the masked elements of a left operand (numbers.cuh).
template <u32 row_tiles, u32 columns>
DEVICE void mark_left(u32 (&left)[row_tiles][columns][2], const u32 (&visible)[row_tiles]) {
    UNROLL for (u32 m = 0; m < row_tiles; ++m)
        UNROLL for (u32 n = 0; n < columns; ++n)
            UNROLL for (u32 r = 0; r < 2; ++r)
                left[m][n][r] = mark_masked(left[m][n][r], is_visible(visible, m, n, 2 * r),
                                            is_visible(visible, m, n, 2 * r + 1));
}

template <u32 row_tiles, u32 columns>
DEVICE void clear(float (&scores)[row_tiles][columns][4]) {
    UNROLL for (u32 m = 0; m < row_tiles; ++m)
        UNROLL for (u32 n = 0; n < columns; ++n)
            UNROLL for (u32 e = 0; e < 4; ++e) scores[m][n][e] = 0;
}

#ifdef ANNULUS_AMD

#include "matrix_amd.cuh"

#else

// Returns a panel of a left operand whose panels have `rows` rows.
template <u32 rows>
DEVICE const u16* left_panel(const u16* left, u32 panel) {
    return left + panel * rows * CHUNK;
}

// scores += left·rightᵀ of one panel each.
template <u32 row_tiles, u32 columns>
DEVICE void panel_nt(float (&scores)[row_tiles][columns][4], const u16* left_panel,
                     const u16* right_panel, const RowLane& lane) {
    // rows and pieces of ldmatrix: 16 × 16 of the left operand, 16 × 16 of the right one
    u32 left_row = lane.first_row + lane.lane % 16, left_piece = lane.lane / 16 ^ left_row % 8;
    u32 right_row = lane.lane / 16 * 8 + lane.lane % 8,
        right_piece = lane.lane / 8 % 2 ^ right_row % 8;
    left_panel += left_row * CHUNK;
    right_panel += right_row * CHUNK;
    UNROLL for (u32 x = 0; x < CHUNK / 8; x += 2) {
        Fragment lefts[row_tiles];
        UNROLL for (u32 m = 0; m < row_tiles; ++m)
            ldmatrix_x4(lefts[m], left_panel + 16 * m * CHUNK + (x ^ left_piece) * 8);
        UNROLL for (u32 n = 0; n < columns; n += 2) {
            Fragment right;
            ldmatrix_x4(right, right_panel + 8 * n * CHUNK + (x ^ right_piece) * 8);
            UNROLL for (u32 m = 0; m < row_tiles; ++m) {
                mma(scores[m][n], lefts[m], right[0], right[1]);
                mma(scores[m][n + 1], lefts[m], right[2], right[3]);
            }
        }
    }
}

#endif

// Returns the part of a chunk of the stream that a warp multiplies: rows lane.first_column … of a
// panel.
template <typename RightStream>
DEVICE const u16* warp_panel(const u16* chunk, u32 panel, const RowLane& lane) {
    return chunk + (panel % RightStream::panels * RightStream::rows + lane.first_column) * CHUNK;
}

#ifndef ANNULUS_AMD

// As warp_panel, for a product that adds over the rows.
template <typename RightStream>
DEVICE const u16* summed_panel(const u16* chunk, u32 panel, const RowLane& lane) {
    return warp_panel<RightStream>(chunk, panel, lane);
}

#endif

// scores ← left·rightᵀ over the next chunks of the stream, of this phase. `left` is in shared
// memory, in panels of `rows` rows × 64 dims (on AMD GPUs in registers). Of a chunk's rows, which
// are the columns of the product, a warp multiplies those from lane.first_column on.
template <u32 rows, u32 phase, u32 row_tiles, u32 columns, typename Left, typename RightStream>
DEVICE void gemm_nt(float (&scores)[row_tiles][columns][4], const Left& left, RightStream& stream,
                    u32 dim, const RowLane& lane, const Attention& a) {
    clear(scores);
    const u16* right_chunk = nullptr;
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel) {
        if (panel * CHUNK >= dim) break;
        if (panel % RightStream::panels == 0) {
            bool non_finite = false;
            right_chunk = stream.template next<phase>(a, non_finite);
        }
        if (!lane.has_rows) continue;
        panel_nt(scores, left_panel<rows>(left, panel),
                 warp_panel<RightStream>(right_chunk, panel, lane), lane);
    }
}

#ifndef ANNULUS_AMD

// acc += left·right on scalar units, of the elements of `right_panel` that are not finite. Masked
// pairs are skipped, because 0 · NaN would reach every row.
template <u32 row_tiles, u32 columns>
DEVICE void nn_nonfinite_fixup(PanelAccumulators<row_tiles>& acc,
                               u32 (&left)[row_tiles][columns][2], const u16* right_panel,
                               const RowLane& lane) {
    NOT_UNROLLED for (u32 group = 0; group < columns; ++group) {
        // the four lanes of a row exchange their pairs; all add in the order of columns
        NOT_UNROLLED for (u32 owner = 0; owner < 4; ++owner) {
            const u32 other = lane.lane % 4 ^ owner;
            u32 pairs[row_tiles][2];
            UNROLL for (u32 m = 0; m < row_tiles; ++m)
                UNROLL for (u32 r = 0; r < 2; ++r) pairs[m][r] = shuffle_xor(left[m][0][r], other);
            NOT_UNROLLED for (u32 half = 0; half < 2; ++half) {
                u32 y = 8 * group + 2 * owner + half;
                UNROLL for (u32 m = 0; m < row_tiles; ++m)
                    UNROLL for (u32 r = 0; r < 2; ++r) {
                        u16 element = u16(pairs[m][r] >> 16 * half);
                        if (element == MASKED) continue;
                        UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                            UNROLL for (u32 c = 0; c < 2; ++c) {
                                float& sum = acc[m][n][2 * r + c];
                                u16 right = right_panel[swizzled(y, 8 * n + lane.column + c)];
                                if (!is_element_finite(right))
                                    sum = multiply_add(widen(element), widen(right), sum);
                            }
                    }
            }
        }
        UNROLL for (u32 m = 0; m < row_tiles; ++m) rotate(left[m]);
    }
}

// acc += left·right of one panel on tensor cores; with `finite_only` of the elements of
// `right_panel` that are finite, by the same instructions in the same order, so that the bits of a
// row do not depend on elements that it masks. (Scalar units would round otherwise.)
template <bool finite_only, u32 row_tiles, u32 columns>
DEVICE void panel_nn_products(PanelAccumulators<row_tiles>& acc,
                              const u32 (&left)[row_tiles][columns][2], const u16* right_panel,
                              const RowLane& lane) {
    u32 right_row = lane.lane % 16, right_piece = lane.lane / 16 ^ right_row % 8;
    right_panel += right_row * CHUNK;
    UNROLL for (u32 y = 0; y < columns; y += 2)
        UNROLL for (u32 n = 0; n < CHUNK / 8; n += 2) {
            Fragment right;
            ldmatrix_x4_trans(right, right_panel + 8 * y * CHUNK + (n ^ right_piece) * 8);
            if (finite_only)
                UNROLL for (u32 index = 0; index < 4; ++index)
                    right[index] = finite_pair(right[index]);
            UNROLL for (u32 m = 0; m < row_tiles; ++m) {
                const Fragment lefts = {left[m][y][0], left[m][y][1], left[m][y + 1][0],
                                        left[m][y + 1][1]};
                mma(acc[m][n], lefts, right[0], right[1]);
                mma(acc[m][n + 1], lefts, right[2], right[3]);
            }
        }
}

#endif

// acc += left·right of one panel. `left` is unchanged. `fixup`: the panel has elements that are not
// finite, and the masked pairs of `left` are marked.
template <u32 row_tiles, u32 columns>
DEVICE void panel_nn(PanelAccumulators<row_tiles>& acc, u32 (&left)[row_tiles][columns][2],
                     const u16* right_panel, bool fixup, const RowLane& lane) {
    if (fixup) {
        nn_nonfinite_fixup(acc, left, right_panel, lane);
        panel_nn_products<true>(acc, left, right_panel, lane);
    } else {
        panel_nn_products<false>(acc, left, right_panel, lane);
    }
}

// acc += left·right over the next chunks of the stream, of this phase, of their rows from
// lane.first_column on. In a partial tile the masked pairs of `left` are marked (numbers.cuh).
template <u32 phase, u32 row_tiles, u32 columns, typename RightStream>
DEVICE void gemm_nn(RowAccumulators<row_tiles>& acc, u32 (&left)[row_tiles][columns][2],
                    RightStream& stream, u32 dim, bool is_full, const RowLane& lane,
                    const Attention& a) {
    const u16* right_chunk = nullptr;
    bool fixup = false;
    UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel) {
        if (panel * CHUNK >= dim) break;
        if (panel % RightStream::panels == 0) {
            fixup = !is_full;
            right_chunk = stream.template next<phase>(a, fixup);
        }
        if (!lane.has_rows) continue;
        panel_nn(acc[panel], left, summed_panel<RightStream>(right_chunk, panel, lane), fixup,
                 lane);
    }
}

#endif
