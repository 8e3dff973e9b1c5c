// GEMM building blocks of the backward kernels on tensor cores (mma.sync), 16-bit elements.
//
// A block owns one tile of 64 rows (the left operand: queries or keys) and iterates over the
// visible tiles of the other side (the right operand, chunk_stream.cuh). Warp w of 8 holds left
// rows 16·(w mod 4) … + 15, and one half of the columns of every product:
//
//   gemm_nt   scores (64 × 64) = left·rightᵀ:       32 columns a warp, left from registers
//   gemm_nn   acc (64 × dims) += left_tile·right:   half of the dims, left from shared memory
//
// Source: Dao 2023 (FlashAttention-2); PTX ISA, "Matrix Fragments for mma.m16n8k16".
#pragma once

#include "chunk_stream.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Pipeline stages of 8 KB. Four stages and the two 8 KB tiles of backward_keys_matrix fill the 48
// KB of static shared memory.
#define STAGES 4
// MMA tiles of 8 columns in a warp's half of a product.
#define N_TILES 4
// Up to 128 dims the left fragments stay in registers; at 256 they would take 64 registers, so they
// are loaded from global memory for every tile.
#define RESIDENT (ANNULUS_DIM <= 128)

typedef float ScoreFragments[N_TILES][4];
typedef float Accumulators[CHUNKS][N_TILES][4];

// Position of a thread in a product: element e of MMA tile n is row + 8·(e / 2),
// half·32 + 8·n + column + e mod 2.
struct Lane {
    u32 lane, half, first_row, row, column;
};

DEVICE Lane lane_of_thread() {
    Lane at;
    u32 warp = thread_index() / 32;
    at.lane = thread_index() % 32;
    at.half = warp / 4;
    at.first_row = warp % 4 * 16;
    at.row = at.first_row + at.lane / 4;
    at.column = 2 * (at.lane % 4);
    return at;
}

typedef Stream<QUERIES, THREADS, STAGES> QueriesStream;
typedef Stream<KEYS, THREADS, STAGES> KeysStream;

// Left operand of a block: 64 rows of one head.
struct LeftRows {
    Operand operand;
    u32 first;  // row
#if RESIDENT
    Fragment fragments[CHUNKS * CHUNK / 16];
#endif

    METHOD void read(Fragment& to, u32 x, const Lane& lane) const {
        UNROLL for (u32 r = 0; r < 2; ++r) {
            u32 row = first + lane.row + 8 * r;
            bool exists = row < operand.rows;
            i64 at = i64(row) * operand.row;
            UNROLL for (u32 c = 0; c < 2; ++c) {
                u32 from = x + lane.column + 8 * c, pair = 0;
                if (exists && from < operand.dim) {
                    const u16* source = operand.at + (at + i64(from) * operand.step);
                    if (operand.aligned) {
                        pair = *reinterpret_cast<const u32*>(source);
                    } else {
                        pair = source[0];
                        if (from + 1 < operand.dim) pair |= u32(source[operand.step]) << 16;
                    }
                }
                to[2 * c + r] = pair;
            }
        }
    }

    METHOD void begin(const Operand& of, u32 first_row, const Lane& lane) {
        operand = of;
        first = first_row;
#if RESIDENT
        UNROLL for (u32 x = 0; x < CHUNKS * CHUNK; x += 16) read(fragments[x / 16], x, lane);
#else
        (void)lane;
#endif
    }
};

// scores ← left·rightᵀ over the next chunks of the stream.
template <u32 pass>
DEVICE void gemm_nt(ScoreFragments& scores, const LeftRows& left_rows,
                    Stream<pass, THREADS, STAGES>& stream, u32 dim, const Lane& lane,
                    const Attention& a) {
    UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
        UNROLL for (u32 e = 0; e < 4; ++e) scores[n_tile][e] = 0;
#if RESIDENT
    UNROLL
#endif
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
        if (chunk * CHUNK >= dim) break;
        bool non_finite = false;
        const u16* right_chunk = stream.next(a, non_finite);
        UNROLL for (u32 x = 0; x < CHUNK; x += 16) {
#if RESIDENT
            const Fragment& left = left_rows.fragments[(chunk * CHUNK + x) / 16];
#else
            Fragment left;
            left_rows.read(left, chunk * CHUNK + x, lane);
#endif
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; n_tile += 2) {
                Fragment right;
                u32 row = lane.half * 32 + n_tile * 8 + lane.lane / 16 * 8 + lane.lane % 8;
                ldmatrix_x4(right, right_chunk + swizzled(row, x + lane.lane / 8 % 2 * 8));
                mma(scores[n_tile], left, right[0], right[1]);
                mma(scores[n_tile + 1], left, right[2], right[3]);
            }
        }
    }
}

// acc += left_tile·right over the next chunks of the stream. In a partial tile, if a chunk has a
// non-finite element, masked pairs are skipped one by one: 0 · NaN would reach every row.
template <u32 pass>
DEVICE void gemm_nn(Accumulators& acc, const u16* left_tile, Stream<pass, THREADS, STAGES>& stream,
                    u32 dim, bool is_full, const Lane& lane, const Attention& a) {
    UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
        if (chunk * CHUNK >= dim) break;
        bool fixup = !is_full;
        const u16* right_chunk = stream.next(a, fixup);
        if (fixup) {
            for (u32 y = 0; y < TILE; ++y)
                UNROLL for (u32 r = 0; r < 2; ++r) {
                    u16 element = left_tile[swizzled(lane.row + 8 * r, y)];
                    if (element == MASKED) continue;
                    UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
                        UNROLL for (u32 c = 0; c < 2; ++c) {
                            float& sum = acc[chunk][n_tile][2 * r + c];
                            sum = multiply_add(
                                widen(element),
                                widen(right_chunk[swizzled(
                                    y, lane.half * 32 + n_tile * 8 + lane.column + c)]),
                                sum);
                        }
                }
            continue;
        }
        UNROLL for (u32 y = 0; y < TILE; y += 16) {
            Fragment left;
            ldmatrix_x4(left, left_tile + swizzled(lane.first_row + lane.lane % 16,
                                                   y + lane.lane / 16 * 8));
            UNROLL for (u32 n_tile = 0; n_tile < N_TILES; n_tile += 2) {
                Fragment right;
                ldmatrix_x4_trans(
                    right, right_chunk + swizzled(y + lane.lane % 16, lane.half * 32 + n_tile * 8 +
                                                                          lane.lane / 16 * 8));
                mma(acc[chunk][n_tile], left, right[0], right[1]);
                mma(acc[chunk][n_tile + 1], left, right[2], right[3]);
            }
        }
    }
}

#endif
