// GEMM building blocks on tensor cores (mma.sync) for 16-bit elements, shared by forward and
// backward.
//
// A block owns one tile of 64 rows (the left operand: queries or keys) and iterates over the
// visible tiles of the other side (the right operand). Warp w of 8 holds left rows 16·(w mod 4) … +
// 15, and one half of the columns of every product:
//
//   gemm_nt   scores (64 × 64) = left·rightᵀ:       32 columns a warp, left from registers
//   gemm_nn   acc (64 × dims) += left_tile·right:   half of the dims, left from shared memory
//
// The right operand passes through shared memory in chunks of 64 rows × 64 dims. Pipeline of four
// stages: cp.async fills three while the fourth is consumed. The 16-byte pieces of a chunk's row
// are swizzled with the row number, so that the eight rows that ldmatrix reads at once lie in
// different banks.
//
// Source: Dao 2023 (FlashAttention-2); PTX ISA, "Matrix Fragments for mma.m16n8k16", "cp.async".
#pragma once

#include "head_tiles.cuh"
#include "probs.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Dims per chunk: a row of 128 bytes, which spans all 32 banks.
#define CHUNK 64
#define CHUNKS (ANNULUS_DIM / CHUNK)
#define CHUNK_ELEMENTS (TILE * CHUNK)
// Pipeline stages of 8 KB. Four stages and the two 8 KB tiles of backward_keys_matrix fill the 48
// KB of static shared memory.
#define STAGES 4
// MMA tiles of 8 columns in a warp's half of a product.
#define N_TILES 4
// Up to 128 dims the left fragments stay in registers; at 256 they would take 64 registers, so they
// are loaded from global memory for every tile.
#define RESIDENT (ANNULUS_DIM <= 128)

// Kernel that streams a tile, and with it the order of its operands: k v; k v k; q dout dout q.
enum Pass { FORWARD = 1, QUERIES = 2, KEYS = 3 };

typedef float ScoreFragments[N_TILES][4];
typedef float Accumulators[CHUNKS][N_TILES][4];
typedef u32 Fragment[4];

// Position of a thread in a product: element e of MMA tile n is row + 8·(e / 2),
// half·32 + 8·n + column + e mod 2.
struct Lane {
    u32 lane, half, first_row, row, column;
    bool has_rows;  // of the warp: false if all of its left rows lie beyond the ends
};

DEVICE Lane lane_of_thread() {
    Lane at;
    u32 warp = thread_index() / 32;
    at.lane = thread_index() % 32;
    at.half = warp / 4;
    at.first_row = warp % 4 * 16;
    at.row = at.first_row + at.lane / 4;
    at.column = 2 * (at.lane % 4);
    at.has_rows = true;
    return at;
}

DEVICE void mma(float (&acc)[4], const Fragment& left, u32 first, u32 second) {
#if ANNULUS_DTYPE == 2
    mma_bf16(acc, left, first, second);
#else
    mma_f16(acc, left, first, second);
#endif
}

// Returns the offset of element x of a row of 64 elements in shared memory.
DEVICE u32 swizzled(u32 row, u32 x) { return row * CHUNK + ((x / 8 ^ row % 8) * 8 | x % 8); }

// Rows of one batch row and one head.
struct Operand {
    const u16* at;
    i64 row, step;  // strides of rows and dims
    u32 rows, dim;
    bool aligned;  // copies of 16 bytes are possible
};

DEVICE Operand operand_of(const Tensor& tensor, u32 b, u32 head, u32 rows, u32 dim) {
    Operand operand;
    u64 at = offset<u16>(tensor, b, 0, head, 0);
    operand.at = reinterpret_cast<const u16*>(at);
    operand.row = tensor.row;
    operand.step = tensor.dim;
    operand.rows = rows;
    operand.dim = dim;
    operand.aligned = tensor.dim == 1 && at % 16 == 0 && tensor.row % 8 == 0 && dim % 8 == 0;
    return operand;
}

// Copies up to `count` elements one by one, then zeros, eight in all.
DEVICE_CALL void copy_unaligned(u16* to, const u16* from, i64 step, u32 count) {
    for (u32 c = 0; c < 8; ++c) to[c] = c < count ? from[i64(c) * step] : u16(0);
}

// Row and dims of a chunk that a thread copies, eight elements at once: rows `copy_row` and
// `copy_row` + COPY_ROWS. Every thread copies the same offsets of every chunk, so it may test them
// without a barrier.
#define COPY_ROWS (THREADS * 8 / CHUNK)
static_assert(2 * COPY_ROWS == TILE, "two copies a thread and chunk");
DEVICE u32 copy_row() { return thread_index() / (CHUNK / 8); }
DEVICE u32 copy_dim() { return thread_index() % (CHUNK / 8) * 8; }

// Copies dims `from … from + 63` of rows `first …`, 0 beyond the ends, for strides that do not
// allow copies of 16 bytes.
DEVICE void load_chunk_unaligned(u16* to, const Operand& operand, u32 first, u32 from) {
    u32 x = from + copy_dim();
    for (u32 row = copy_row(); row < TILE; row += COPY_ROWS) {
        bool inside = first + row < operand.rows && x < operand.dim;
        i64 offset = inside ? i64(first + row) * operand.row + i64(x) * operand.step : 0;
        copy_unaligned(to + swizzled(row, copy_dim()), operand.at + offset, operand.step,
                       inside ? operand.dim - x : 0);
    }
}

// Returns true if an element of the chunk that this thread loaded is not finite.
DEVICE_CALL bool thread_part_non_finite(const u16* chunk) {
    const u32 exponent = ANNULUS_DTYPE == 2 ? 0x7f80u : 0x7c00u;
    bool non_finite = false;
    for (u32 row = copy_row(); row < TILE; row += COPY_ROWS) {
        const u32* words = reinterpret_cast<const u32*>(chunk + swizzled(row, copy_dim()));
        for (u32 c = 0; c < 4; ++c)
            non_finite |=
                (words[c] & exponent) == exponent || (words[c] >> 16 & exponent) == exponent;
    }
    return non_finite;
}

// A pass reads both operands of a tile in turn, then again those that are needed twice: the phases
// of a tile (see Pass).
template <u32 pass>
DEVICE constexpr u32 phases() {
    return pass == KEYS ? 4 : pass == QUERIES ? 3 : 2;
}
// True if a phase reads the second operand (v, dout), false for the first one (k, q).
template <u32 pass>
DEVICE bool is_second(u32 phase) {
    return phase == 1 || (pass == KEYS && phase == 2);
}

// Operand that is read in `phase`, for query head h.
template <u32 pass>
DEVICE Operand streamed_operand(const Attention& a, u32 b, u32 h, bool second) {
    u32 kv_head = h / (a.q_heads / a.kv_heads);
    return pass == KEYS ? second ? operand_of(a.dout, b, h, a.queries, a.value_dim)
                                 : operand_of(a.q, b, h, a.queries, a.head_dim)
           : second ? operand_of(a.v, b, kv_head, a.keys, a.value_dim)
                    : operand_of(a.k, b, kv_head, a.keys, a.head_dim);
}

// Called rather than inlined: gemm_nt and gemm_nn would contain a dozen copies.
template <u32 pass>
DEVICE_CALL void load_streamed_unaligned(u16* to, const Attention& a, u32 b, u32 h, u32 first,
                                         bool second, u32 chunk) {
    load_chunk_unaligned(to, streamed_operand<pass>(a, b, h, second), first, chunk * CHUNK);
}

// Streams the right operand's chunks of all visible tiles through the pipeline stages.
//
// What a copy needs is kept: a thread's addresses in both operands, and the first row of the tile.
// A copy then costs about a dozen instructions. With a division and the addresses of both operands
// for every chunk it cost two hundred, more than the products.
template <u32 pass>
struct Stream {
    u16* stages;
    HeadTileIterator prefetch_tiles;
    const u16* operands[2];  // rows copy_row(), dims copy_dim() of both, of one head
    u32 first_row;           // of the tile that is loaded
    bool aligned;            // both operands allow copies of 16 bytes
    u32 phase, chunk;        // of the tile that is loaded
    u32 consumed;            // stage that is consumed next

    METHOD void begin(const Attention& a, u16* of_stages, const HeadTileIterator& tiles) {
        stages = of_stages;
        prefetch_tiles = tiles;
        phase = chunk = consumed = first_row = 0;
        operands[0] = operands[1] = nullptr;
        aligned = false;
        if (tiles.more()) {
            begin_head(a);
            first_row = prefetch_tiles.entry(a).tile * TILE;
        }
        for (u32 stage = 0; stage + 1 < STAGES; ++stage) prefetch(stage, a);
    }

    METHOD void begin_head(const Attention& a) {
        aligned = true;
        UNROLL for (u32 index = 0; index < 2; ++index) {
            Operand operand =
                streamed_operand<pass>(a, prefetch_tiles.b, prefetch_tiles.h, index == 1);
            operands[index] = operand.at + (i64(copy_row()) * operand.row + i64(copy_dim()));
            aligned &= operand.aligned;
        }
    }

    METHOD void load(u16* to, const Attention& a) const {
        bool second = is_second<pass>(phase);
        if (!aligned) {
            load_streamed_unaligned<pass>(to, a, prefetch_tiles.b, prefetch_tiles.h, first_row,
                                          second, chunk);
            return;
        }
        i64 stride = pass == KEYS ? second ? a.dout.row : a.q.row : second ? a.v.row : a.k.row;
        u32 rows = pass == KEYS ? a.queries : a.keys, row = first_row + copy_row();
        bool inside = chunk * CHUNK + copy_dim() < (second ? a.value_dim : a.head_dim);
        const u16* from =
            (second ? operands[1] : operands[0]) + (i64(first_row) * stride + i64(chunk * CHUNK));
        to += swizzled(copy_row(), copy_dim());
        cp_async_16(to, from, inside && row < rows);
        cp_async_16(to + COPY_ROWS * CHUNK, from + i64(COPY_ROWS) * stride,
                    inside && row + COPY_ROWS < rows);
    }

    METHOD void advance(const Attention& a) {
        u32 dim = is_second<pass>(phase) ? a.value_dim : a.head_dim;
        if (++chunk * CHUNK < dim) return;
        chunk = 0;
        if (++phase < phases<pass>()) return;
        phase = 0;
        const u32 head = prefetch_tiles.h;
        prefetch_tiles.next(a);
        if (!prefetch_tiles.more()) return;
        if (pass == KEYS && prefetch_tiles.h != head) begin_head(a);
        first_row = prefetch_tiles.entry(a).tile * TILE;
    }

    // Issues the loads of the next chunk, if there is one, into a stage. Every call commits one
    // cp.async group, so that the number of groups in flight is constant.
    METHOD void prefetch(u32 stage, const Attention& a) {
        if (prefetch_tiles.more()) {
            load(stages + stage * CHUNK_ELEMENTS, a);
            advance(a);
        }
        cp_async_commit();
    }

    // Returns the next chunk, once it is complete for all threads; the barrier also publishes
    // earlier writes to shared memory. `non_finite`: in, true to test the chunk; out, true if any
    // of its elements is not finite.
    METHOD const u16* next(const Attention& a, bool& non_finite) {
        const u16* chunk = stages + consumed * CHUNK_ELEMENTS;
#ifdef PLANTED_LATE_WAIT
        cp_async_wait<STAGES - 2 + (pass == PLANTED_LATE_WAIT)>();
#else
        cp_async_wait<STAGES - 2>();
#endif
        bool mine = non_finite && thread_part_non_finite(chunk);
#ifdef PLANTED_NO_BARRIER
        non_finite = pass == PLANTED_NO_BARRIER ? mine : barrier_any(mine);
#else
        non_finite = barrier_any(mine);
#endif
        // the barrier above: all threads have consumed the previous stage, which may be overwritten
        prefetch((consumed + STAGES - 1) % STAGES, a);
        consumed = (consumed + 1) % STAGES;
        return chunk;
    }
};

// Left operand of a block: 64 rows of one head, or with `packed` of (query, head) pairs.
template <bool packed>
struct LeftRows {
    Operand operand;
    u32 first;  // row, or query
#if RESIDENT
    Fragment fragments[CHUNKS * CHUNK / 16];
#endif

    // Computes the offset of a row in elements; returns true if the row exists.
    METHOD bool find(i64& at, u32 row, const Attention& a) const {
        if (!packed) {
            at = i64(first + row) * operand.row;
            return first + row < operand.rows;
        }
#ifdef PLANTED_PACKED_HEAD
        PackedRow row_of_head = packed_row(a, 0, row ^ (a.packed_heads > 1));
#else
        PackedRow row_of_head = packed_row(a, 0, row);
#endif
        at = i64(first + row_of_head.query) * operand.row + i64(row_of_head.h) * a.q.head;
        return row_of_head.exists && first + row_of_head.query < operand.rows;
    }

    METHOD void read(Fragment& to, u32 x, const Lane& lane, const Attention& a) const {
        UNROLL for (u32 r = 0; r < 2; ++r) {
            i64 at;
            bool exists = find(at, lane.row + 8 * r, a);
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

    METHOD void begin(const Operand& of, u32 first_row, const Lane& lane, const Attention& a) {
        operand = of;
        first = first_row;
        if (packed) operand.aligned &= a.q.head % 8 == 0;
#if RESIDENT
        UNROLL for (u32 x = 0; x < CHUNKS * CHUNK; x += 16) read(fragments[x / 16], x, lane, a);
#else
        (void)lane;
#endif
    }
};
typedef LeftRows<false> UnpackedLeft;

// scores ← left·rightᵀ over the next chunks of the stream.
template <u32 pass, bool packed>
DEVICE void gemm_nt(ScoreFragments& scores, const LeftRows<packed>& left_rows, Stream<pass>& stream,
                    u32 dim, const Lane& lane, const Attention& a) {
    UNROLL for (u32 n_tile = 0; n_tile < N_TILES; ++n_tile)
        UNROLL for (u32 e = 0; e < 4; ++e) scores[n_tile][e] = 0;
#if RESIDENT
    UNROLL
#endif
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
        if (chunk * CHUNK >= dim) break;
        bool non_finite = false;
        const u16* right_chunk = stream.next(a, non_finite);
        if (!lane.has_rows) continue;
        UNROLL for (u32 x = 0; x < CHUNK; x += 16) {
#if RESIDENT
            const Fragment& left = left_rows.fragments[(chunk * CHUNK + x) / 16];
#else
            Fragment left;
            left_rows.read(left, chunk * CHUNK + x, lane, a);
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
DEVICE void gemm_nn(Accumulators& acc, const u16* left_tile, Stream<pass>& stream, u32 dim,
                    bool is_full, const Lane& lane, const Attention& a) {
    UNROLL for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
        if (chunk * CHUNK >= dim) break;
        bool fixup = !is_full;
        const u16* right_chunk = stream.next(a, fixup);
        if (!lane.has_rows) continue;
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
