// Fragments, operands and stream of the forward pass on AMD's matrix cores (MFMA), 16-bit elements;
// row_tiles.cuh includes it in place of NVIDIA's.
//
// A wave of 64 lanes owns 32 rows. Both products are computed transposed, so that a lane owns one
// row and half of the columns of each group of eight:
//
//   Sᵀ = K·Qᵀ    lane l: row l mod 32, keys 8·n + 4·(l / 32) + 0 … 3
//   Oᵀ = Vᵀ·Pᵀ   lane l: row l mod 32, dims likewise
//
// P is the right operand of the second product where the first one has left it, without a shuffle.
// The row maximum is one exchange, with lane l xor 32.
//
// K and V pass through registers, because there is no asynchronous copy with zeros beyond the ends.
// A chunk is 64 rows × 64 or 128 dims. A thread loads 4 rows × dims / 16 of it while the chunk
// before is multiplied, and stores them to one of two stages of shared memory: K in rows of 64 dims
// with the swizzle of chunk_stream.cuh, V transposed, in rows of 64 keys.
//
//                     64 dims    128 dims    256 dims
//   stages of K, V    2 × 8 KB   2 × 16 KB   2 × 16 KB   shared memory: 64 KiB a compute unit
//   Q, P              16, 16     32, 16      64, 16      registers of a thread
//   S, O              32, 32     32, 64      32, 128
//   rows on the way   8          16          16
//
// Source: AMD Matrix Instruction Calculator 1.3 (layouts); ROCm/FlyDSL, FMHA kernels (transposed
// products).
#pragma once

#define FORWARD_WAVES 4
#define FORWARD_WARPS FORWARD_WAVES
#define FORWARD_THREADS (64 * FORWARD_WAVES)
#define FORWARD_STAGES 2
// Waves of a SIMD unit: with 256 dims, O and Q need more than half of its registers.
#define FORWARD_BLOCKS (ANNULUS_DIM <= 128 ? 2 : 1)

// Eight elements of a row of Q for each 16 dims: dims 16·c + 8·(lane / 32) + 0 … 7.
struct QueryFragments {
    u32 pieces[ANNULUS_DIM / 16][4];
};

template <u32 rows>
DEVICE const u32 (*left_panel(const QueryFragments& left, u32 panel))[4] {
    return left.pieces + panel * (CHUNK / 16);
}

// acc (32 × 32) += left (32 × 16) · right (16 × 32): see mma_bf16_32x32x16. `acc` are four
// fragments.
DEVICE void mma_32x32x16(float (*acc)[4], const u32 (&left)[4], const u32 (&right)[4]) {
#if ANNULUS_DTYPE == 2
    mma_bf16_32x32x16(acc, left, right);
#else
    mma_f16_32x32x16(acc, left, right);
#endif
}

// Offset of keys 4·piece … of a dim of Vᵀ: pieces of 8 bytes, swizzled with pairs of dims.
DEVICE u32 transposed_at(u32 dim, u32 piece) { return dim * TILE + (piece ^ dim / 2 % 16) * 4; }

// scores += left·rightᵀ of one panel each.
template <u32 columns>
DEVICE void panel_nt(float (&scores)[1][columns][4], const u32 (*left_panel)[4],
                     const u16* right_panel, const RowLane& lane) {
    const u32 own = recomputed(lane.lane), row = own % 32, half = own / 32;
    UNROLL for (u32 c = 0; c < CHUNK / 16; ++c)
        UNROLL for (u32 n = 0; n < columns / 4; ++n) {
            u32 right[4];
            load_shared_16(right, right_panel + swizzled(32 * n + row, 16 * c + 8 * half));
            mma_32x32x16(scores[0] + 4 * n, right, left_panel[c]);
        }
}

// As in row_tiles.cuh: acc += left·right on scalar units, of elements that are not finite. Four
// dims at once, because loops that are unrolled would take registers of the products.
template <u32 columns>
DEVICE void nn_nonfinite_fixup(PanelAccumulators<1>& acc, u32 (&left)[1][columns][2],
                               const u16* right_panel, const RowLane& lane) {
    NOT_UNROLLED for (u32 n = 0; n < CHUNK / 8; ++n) {
        NOT_UNROLLED for (u32 group = 0; group < columns; ++group) {
            // the two lanes of a row exchange their pairs; both add in the order of columns
            NOT_UNROLLED for (u32 owner = 0; owner < 2; ++owner) {
                u32 pairs[2];
                UNROLL for (u32 r = 0; r < 2; ++r)
                    pairs[r] = shuffle_xor(left[0][0][r], (lane.lane / 32 ^ owner) * 32);
                NOT_UNROLLED for (u32 c = 0; c < 4; ++c) {
                    const u16 element = u16((c < 2 ? pairs[0] : pairs[1]) >> 16 * (c % 2));
                    UNROLL for (u32 e = 0; e < 4; ++e) {
                        const u32 dim = 8 * n + lane.column + e;
                        const u16 right =
                            right_panel[transposed_at(dim, 2 * group + owner) + c];
                        if (element != MASKED && !is_element_finite(right))
                            acc[0][0][e] =
                                multiply_add(widen(element), widen(right), acc[0][0][e]);
                    }
                }
            }
            rotate(left[0]);
        }
        rotate(acc[0]);
    }
}

// As in row_tiles.cuh: acc += left·right of one panel, transposed, on matrix cores. The terms of an
// instruction are keys 16·y + 4·half + 0 … 3 and 8 keys further, of both operands.
template <bool finite_only, u32 columns>
DEVICE void panel_nn_products(PanelAccumulators<1>& acc, const u32 (&left)[1][columns][2],
                              const u16* right_panel, const RowLane& lane) {
    const u32 own = recomputed(lane.lane), row = own % 32, half = own / 32;
    UNROLL for (u32 y = 0; y < columns / 2; ++y) {
        const u32 probs[4] = {left[0][2 * y][0], left[0][2 * y][1], left[0][2 * y + 1][0],
                              left[0][2 * y + 1][1]};
        UNROLL for (u32 n = 0; n < CHUNK / 32; ++n) {
            u32 right[4];
            UNROLL for (u32 part = 0; part < 2; ++part)
                load_shared_8(right + 2 * part,
                              right_panel +
                                  transposed_at(32 * n + row, 4 * y + 2 * part + half));
            if (finite_only)
                UNROLL for (u32 index = 0; index < 4; ++index)
                    right[index] = finite_pair(right[index]);
            mma_32x32x16(acc[0] + 4 * n, right, probs);
        }
    }
}

// Loads `count` elements, at most eight, one by one, and zeros behind them.
template <u32 words>
DEVICE void load_elements(u32 (&to)[words], const u16* from, i64 step, u32 count) {
    UNROLL for (u32 word = 0; word < words; ++word) {
        to[word] = 0;
        UNROLL for (u32 c = 0; c < 2; ++c)
            if (2 * word + c < count) to[word] |= u32(from[i64(2 * word + c) * step]) << 16 * c;
    }
}

// Streams K and V of all visible tiles; see above. Stream::next has the one barrier of a chunk: it
// publishes the stage that the threads have stored, and all threads have consumed the chunk before,
// whose stage the next call overwrites.
struct KeyValueStream {
    static const u32 rows = TILE, panels = CHUNKS < 2 ? CHUNKS : 2, dims = panels * CHUNK;
    static const u32 stage_elements = rows * dims;
    static const u32 words = dims / 32;  // of one row that a thread loads
    // True if an operand is one chunk: K is in stage 0 then, and V in stage 1.
    static const bool one_chunk = dims >= ANNULUS_DIM;

    u16* stages;
    TileIterator prefetch_tiles;
    const u16* operands[2];  // K and V of the head
    u32 first_row;           // of the chunk that is loaded
    bool aligned;            // both operands allow loads of 16 bytes
    u32 phase, chunk;        // of the chunk that is loaded: phase 1 is V
    u32 consumed;            // stage that is consumed next
    u32 loaded[4][words];    // rows of a thread, on the way

    static METHOD u32 copy_row() { return thread_index_again() / 16 * 4; }
    static METHOD u32 copy_dim() { return thread_index_again() % 16 * (dims / 16); }

    METHOD void begin(const Attention& a, u16* of_stages, const TileIterator& tiles) {
        stages = of_stages;
        prefetch_tiles = tiles;
        phase = chunk = consumed = first_row = 0;
        operands[0] = operands[1] = nullptr;
        aligned = true;
        if (!tiles.more()) return;
        UNROLL for (u32 index = 0; index < 2; ++index) {
            const Operand operand =
                streamed_operand<FORWARD>(a, block_z(), head_of<FORWARD>(tiles, a), index == 1);
            operands[index] = operand.at;
            aligned &= operand.aligned;
        }
        first_row = prefetch_tiles.entry(a).tile * TILE;
        prefetch(a);
    }

    // Loads the next chunk, zeros beyond the ends, if there is one.
    METHOD void prefetch(const Attention& a) {
        if (!prefetch_tiles.more()) return;
        const bool second = phase == 1;
        const i64 row = second ? a.v.row : a.k.row, step = second ? a.v.dim : a.k.dim;
        const u32 dim = second ? a.value_dim : a.head_dim;
        const u32 first = first_row + copy_row(), x = chunk * dims + copy_dim();
        const u16* from =
            (second ? operands[1] : operands[0]) + (i64(first) * row + i64(x) * step);
        // dims that this thread loads of each row
        const u32 left = x < dim ? dim - x : 0;
        UNROLL for (u32 r = 0; r < 4; ++r) {
            const bool inside = left > 0 && first + r < a.keys;
            const u16* of_row = from + i64(r) * row;
            if (aligned)
                load_or_zero(loaded[r], of_row, inside);
            else
                load_elements(loaded[r], of_row, step, inside ? left : 0);
        }
        advance(dim, a);
    }

    // Moves on to the chunk that follows one of an operand with `dim` dims.
    METHOD void advance(u32 dim, const Attention& a) {
        if (++chunk * dims < dim) return;
        chunk = 0;
        phase ^= 1;
        if (phase == 1) return;
        prefetch_tiles.next(a);
        if (prefetch_tiles.more()) first_row = prefetch_tiles.entry(a).tile * TILE;
    }

    // Stores the rows on the way to a stage: K by rows, V transposed.
    METHOD void store(u16* stage, bool transposed) const {
        u16* panel = stage + copy_dim() / CHUNK * (rows * CHUNK);
        const u32 x = copy_dim() % CHUNK;
        if (!transposed) {
            UNROLL for (u32 r = 0; r < 4; ++r)
                UNROLL for (u32 word = 0; word < words; word += 2)
                    store_shared_8(panel + swizzled(copy_row() + r, x + 2 * word),
                                   loaded[r][word], loaded[r][word + 1]);
            return;
        }
        UNROLL for (u32 c = 0; c < 2 * words; ++c) {
            u32 keys[2];
            UNROLL for (u32 pair = 0; pair < 2; ++pair) {
                const u32 first = loaded[2 * pair][c / 2], second = loaded[2 * pair + 1][c / 2];
                keys[pair] = c % 2 ? first >> 16 | (second & 0xffff0000u)
                                   : (first & 0xffffu) | second << 16;
            }
            store_shared_8(panel + transposed_at(x + c, copy_row() / 4), keys[0], keys[1]);
        }
    }

    // Returns true if an element of a stage is not finite. Every wave tests all elements: a word of
    // shared memory, for one answer of the block, would leave too little for a second block.
    static METHOD bool is_stage_non_finite(const u16* stage) {
        u32 found = 0;
        NOT_UNROLLED for (u32 at = thread_index() % 64 * 8; at < stage_elements; at += 64 * 8) {
            u32 piece[4];
            load_shared_16(piece, stage + at);
            UNROLL for (u32 c = 0; c < 4; ++c) found |= !is_pair_finite(piece[c]);
        }
        NOT_UNROLLED for (u32 lanes = 32; lanes > 0; lanes /= 2)
            found |= shuffle_xor(found, lanes);
        return found != 0;
    }

    // Returns the next chunk, which is of phase `consumed_phase`, once it is complete for all
    // threads. `non_finite`: in, true to test it; out, true if an element is not finite, which is
    // the same for all lanes of a wave.
    template <u32 consumed_phase>
    METHOD const u16* next(const Attention& a, bool& non_finite) {
        u16* stage = stages + (one_chunk ? consumed_phase : consumed) * stage_elements;
        store(stage, consumed_phase == 1);
        barrier();
        if (non_finite) non_finite = is_stage_non_finite(stage);
        prefetch(a);
        consumed ^= 1;
        return stage;
    }
};

// Division of a tile among the waves of a block, each with all keys of its rows.
template <u32>
struct RowsShape {
    static const u32 row_tiles = 1, keys = TILE, columns = keys / 8;
    static const bool divides_keys = false;
    static const u32 rows = 32 * FORWARD_WAVES, keys_at_once = keys;

    typedef TileIterator Tiles;
    typedef KeyValueStream KeyStream;
    typedef RowScores<row_tiles, columns> Scores;
    typedef RowPairs<row_tiles, columns> Probs;
    typedef VisibleBits<row_tiles> Visible;
    typedef RowAccumulators<row_tiles> Accumulators;
    typedef RowState<row_tiles> State;

    // Dynamic shared memory of a block, as in `Variant::dynamic_shared_bytes` (src/variant.rs).
    struct Storage {
        u16 stages[FORWARD_STAGES * KeyStream::stage_elements];
    };
    typedef QueryFragments Queries;
    static METHOD Queries queries(Storage&) { return {}; }
};
static_assert(FORWARD_BLOCKS * sizeof(RowsShape<0>::Storage) <= 64 * 1024, "shared memory");

// Loads a lane's part of its row of Q, zeros beyond the ends.
template <typename Shape>
DEVICE void load_query_rows(QueryFragments& to, const Operand& operand, u32 first_query,
                            const Attention& a) {
    const RowLane lane = row_lane_of_thread<1>(thread_index() / 64);
    const bool aligned = operand.aligned && a.q.head % 8 == 0;
    const PackedRow packed = packed_row<Shape::rows>(a, 0, lane.row_of(0, 0));
    const bool exists = packed.exists && first_query + packed.query < operand.rows;
    const u16* row = operand.at;
    if (exists) row += i64(first_query + packed.query) * operand.row + i64(packed.h) * a.q.head;
    UNROLL for (u32 c = 0; c < ANNULUS_DIM / 16; ++c) {
        const u32 x = 16 * c + 8 * (lane.lane / 32);
        const bool inside = exists && x < operand.dim;
        const u16* from = row + i64(x) * operand.step;
        if (aligned)
            load_or_zero(to.pieces[c], from, inside);
        else
            load_elements(to.pieces[c], from, operand.step, inside ? operand.dim - x : 0);
    }
}
