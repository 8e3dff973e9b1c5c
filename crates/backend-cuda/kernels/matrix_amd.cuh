// Fragments, operands and streams on AMD's matrix cores (MFMA), 16-bit elements; row_tiles.cuh
// includes it in place of NVIDIA's.
//
// A wave of 64 lanes owns 32 rows. All products are computed transposed, so that a lane owns one
// row and half of the columns of each group of eight:
//
//   Sᵀ = K·Qᵀ    lane l: row l mod 32, keys 8·n + 4·(l / 32) + 0 … 3
//   Oᵀ = Vᵀ·Pᵀ   lane l: row l mod 32, dims likewise
//
// P is the right operand of the second product where the first one has left it, without a shuffle.
// The row maximum is one exchange, with lane l xor 32. Backward passes are alike: rows are queries
// for dQ, keys for dK and dV.
//
// Streamed operands pass through registers, because there is no asynchronous copy with zeros beyond
// the ends. A thread loads 4 rows × some dims of a chunk while the chunk before is multiplied, and
// stores them to shared memory: for the first products in rows of 64 dims with the swizzle of
// chunk_stream.cuh, for the last ones transposed, in rows of the chunk's 64 or 32 rows.
//
// Source: AMD Matrix Instruction Calculator 1.3 (layouts); ROCm/FlyDSL, FMHA kernels (transposed
// products).
#pragma once

// Eight elements of a lane's row for each 16 dims: dims 16·c + 8·(lane / 32) + 0 … 7.
struct RowFragments {
    u32 pieces[ANNULUS_DIM / 16][4];
};

template <u32 rows>
DEVICE const u32 (*left_panel(const RowFragments& left, u32 panel))[4] {
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

// Rows of a chunk of which a wave multiplies 8·columns: all of them, or 16 of 64 (forward_decode).
template <u32 columns>
DEVICE constexpr u32 chunk_rows() {
    return columns == 2 ? 64 : 8 * columns;
}

// Offset of rows 4·piece … of a dim of a transposed chunk of `rows` rows: pieces of 8 bytes,
// swizzled so that the lanes of a load, and those of a store, are spread over all banks.
template <u32 rows>
DEVICE u32 transposed_at(u32 dim, u32 piece) {
    const u32 by = rows == 64 ? dim / 2 % 16 : (dim / 2 + dim / 16) % 8;
    return dim * rows + (piece ^ by) * 4;
}

// scores += left·rightᵀ of one panel each.
template <u32 columns>
DEVICE void panel_nt(float (&scores)[1][columns][4], const u32 (*left_panel)[4],
                     const u16* right_panel, const RowLane& lane) {
    const u32 own = recomputed(lane.lane), half = own / 32;
    // of 16 columns: the others, those of the same rows again, are of no use
    const bool is_half = columns == 2;
    const u32 row = own % (is_half ? 16 : 32);
    float both[4][4] = {};
    if (is_half) UNROLL for (u32 e = 0; e < 8; ++e) both[e / 4][e % 4] = scores[0][e / 4][e % 4];
    UNROLL for (u32 c = 0; c < CHUNK / 16; ++c)
        UNROLL for (u32 n = 0; n < (columns + 2) / 4; ++n) {
            u32 right[4];
            load_shared_16(right, right_panel + swizzled(32 * n + row, 16 * c + 8 * half));
            mma_32x32x16(is_half ? both : scores[0] + 4 * n, right, left_panel[c]);
        }
    if (is_half) UNROLL for (u32 e = 0; e < 8; ++e) scores[0][e / 4][e % 4] = both[e / 4][e % 4];
}

// The rows of a panel that a product adds, which are columns of a transposed chunk: see warp_panel.
template <typename RightStream>
DEVICE const u16* summed_panel(const u16* chunk, u32 panel, const RowLane&) {
    return chunk + panel % RightStream::panels * RightStream::rows * CHUNK;
}

// As in row_tiles.cuh: acc += left·right on scalar units, of elements that are not finite. Four
// dims at once, because loops that are unrolled would take registers of the products.
template <u32 columns>
DEVICE void nn_nonfinite_fixup(PanelAccumulators<1>& acc, u32 (&left)[1][columns][2],
                               const u16* right_panel, const RowLane& lane) {
    const u32 first = lane.first_column / 4;
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
                            right_panel[transposed_at<chunk_rows<columns>()>(
                                            dim, first + 2 * group + owner) + c];
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
    const u32 own = recomputed(lane.lane), row = own % 32;
    const u32 first = lane.first_column / 4 + own / 32;
    UNROLL for (u32 y = 0; y < columns / 2; ++y) {
        const u32 probs[4] = {left[0][2 * y][0], left[0][2 * y][1], left[0][2 * y + 1][0],
                              left[0][2 * y + 1][1]};
        UNROLL for (u32 n = 0; n < CHUNK / 32; ++n) {
            u32 right[4];
            UNROLL for (u32 part = 0; part < 2; ++part)
                load_shared_8(right + 2 * part,
                              right_panel + transposed_at<chunk_rows<columns>()>(
                                                32 * n + row, 4 * y + 2 * part + first));
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

// A thread's part of a chunk of `rows` rows × `dims` dims on its way to shared memory, of the part
// that `threads` threads have: four rows, and of each as many dims as others do.
template <u32 rows, u32 dims, u32 threads>
struct RowsOnTheWay {
    static const u32 across = 4 * threads / rows, elements = dims / across;
    // Of a load of a row.
    static const u32 words = elements < 8 ? elements / 2 : 4, pieces = elements / (2 * words);
    static_assert(elements % 4 == 0 || elements == 2, "stores of 8 or 4 bytes");

    u32 loaded[4][pieces][words];

    static METHOD u32 number() { return thread_index_again() % threads; }
    static METHOD u32 row() { return number() / across * 4; }
    static METHOD u32 dim() { return number() % across * elements; }

    // Loads from an operand, whose first element of the chunk is `from`, with `left_rows` rows and
    // `left_dims` dims from there on; zeros beyond the ends. `aligned`: 4, 8 or 16 bytes at once.
    METHOD void load(const u16* from, i64 row_step, i64 step, u32 left_rows, u32 left_dims,
                     bool aligned) {
        from += i64(row()) * row_step + i64(dim()) * step;
        UNROLL for (u32 r = 0; r < 4; ++r)
            UNROLL for (u32 piece = 0; piece < pieces; ++piece) {
                const u32 x = 2 * words * piece;
                const bool inside = row() + r < left_rows && dim() + x < left_dims;
                const u16* at = from + (i64(r) * row_step + i64(x) * step);
                if (aligned)
                    load_or_zero(loaded[r][piece], at, inside);
                else
                    load_elements(loaded[r][piece], at, step, inside ? left_dims - dim() - x : 0);
            }
    }

    METHOD u32 word(u32 r, u32 index) const { return loaded[r][index / words][index % words]; }

    // Stores to a chunk in shared memory, by rows.
    METHOD void store(u16* chunk) const {
        u16* panel = chunk + dim() / CHUNK * (rows * CHUNK);
        UNROLL for (u32 r = 0; r < 4; ++r)
            UNROLL for (u32 at = 0; at < elements / 2; at += 2) {
                u16* to = panel + swizzled(row() + r, dim() % CHUNK + 2 * at);
                if (elements == 2)
                    *reinterpret_cast<u32*>(to) = word(r, 0);
                else
                    store_shared_8(to, word(r, at), word(r, at + 1));
            }
    }

    // As store, transposed.
    METHOD void store_transposed(u16* chunk) const {
        u16* panel = chunk + dim() / CHUNK * (rows * CHUNK);
        UNROLL for (u32 c = 0; c < elements; ++c) {
            u32 pairs[2];
            UNROLL for (u32 pair = 0; pair < 2; ++pair) {
                const u32 first = word(2 * pair, c / 2), second = word(2 * pair + 1, c / 2);
                pairs[pair] = c % 2 ? first >> 16 | (second & 0xffff0000u)
                                    : (first & 0xffffu) | second << 16;
            }
            store_shared_8(panel + transposed_at<rows>(dim() % CHUNK + c, row() / 4), pairs[0],
                           pairs[1]);
        }
    }
};

// True for all lanes of a wave if it is for one.
DEVICE bool any_of_wave(bool mine) {
    u32 found = mine;
    NOT_UNROLLED for (u32 lanes = 32; lanes > 0; lanes /= 2) found |= shuffle_xor(found, lanes);
    return found != 0;
}

// Returns true if one of the `count` elements of a stage is not finite, the same for all lanes of a
// wave. Every wave tests all elements: a word of shared memory, for one answer of the block, would
// leave too little for a second block.
template <u32 count>
DEVICE bool is_stage_non_finite(const u16* stage) {
    bool found = false;
    NOT_UNROLLED for (u32 at = thread_index() % 64 * 8; at < count; at += 64 * 8) {
        u32 piece[4];
        load_shared_16(piece, stage + at);
        UNROLL for (u32 c = 0; c < 4; ++c) found |= !is_pair_finite(piece[c]);
    }
    return any_of_wave(found);
}

// Streams the operands of all visible tiles (chunk_stream.cuh), those of the last phase transposed.
// Stream::next has the one barrier of a chunk: it publishes the stage that the threads have stored,
// and all threads have consumed the chunk before, whose stage the next call overwrites.
template <u32 pass, u32 threads, u32 depth, u32 part_rows>
struct Stream {
    static const u32 rows = part_rows, panels = CHUNKS < 2 ? CHUNKS : 2, dims = panels * CHUNK;
    static const u32 stage_elements = rows * dims, last_phase = phases<pass>() - 1;
    // True if the phase of a chunk is its stage: of two phases, each with one chunk.
    static const bool stage_of_phase = dims >= ANNULUS_DIM && last_phase == 1;
    static_assert(depth == 2, "the stage that is stored and the one that is consumed");

    u16* stages;
    TileIterator prefetch_tiles;
    const u16* operands[2];  // of the head
    u32 first_row;           // of the part that is loaded
    bool aligned;            // both operands allow loads of 16 bytes
    u32 phase, chunk;        // of the part that is loaded
    u32 consumed;            // stage that is consumed next
    RowsOnTheWay<rows, dims, threads> on_the_way;

    METHOD void begin(const Attention& a, u16* of_stages, const TileIterator& tiles) {
        stages = of_stages;
        prefetch_tiles = tiles;
        phase = chunk = consumed = first_row = 0;
        operands[0] = operands[1] = nullptr;
        aligned = true;
        if (!tiles.more()) return;
        UNROLL for (u32 index = 0; index < 2; ++index) {
            const Operand operand =
                streamed_operand<pass>(a, block_z(), head_of<pass>(tiles, a), index == 1);
            operands[index] = operand.at;
            aligned &= operand.aligned;
        }
        first_row = prefetch_tiles.entry(a).tile * TILE;
        prefetch(a);
    }

    // Between tiles: true if there is another one, whose first chunk has been loaded.
    METHOD bool has_tile() const { return prefetch_tiles.more(); }

    // Loads the next chunk, if there is one.
    METHOD void prefetch(const Attention& a) {
        if (!prefetch_tiles.more()) return;
        const bool second = phase == 1;
        const i64 row = second ? a.v.row : a.k.row, step = second ? a.v.dim : a.k.dim;
        const u32 dim = second ? a.value_dim : a.head_dim, x = chunk * dims;
        const u16* from =
            (second ? operands[1] : operands[0]) + (i64(first_row) * row + i64(x) * step);
        on_the_way.load(from, row, step, first_row < a.keys ? a.keys - first_row : 0,
                        x < dim ? dim - x : 0, aligned);
        advance(dim, a);
    }

    // Moves on to the chunk that follows one of an operand with `dim` dims.
    METHOD void advance(u32 dim, const Attention& a) {
        if (++chunk * dims < dim) return;
        chunk = 0;
        phase = phase == last_phase ? 0 : phase + 1;
        if (phase != 0) return;
        first_row += rows;
        if (rows < TILE && first_row % TILE != 0) return;
        prefetch_tiles.next(a);
        if (prefetch_tiles.more()) first_row = prefetch_tiles.entry(a).tile * TILE;
    }

    // Returns the next chunk, which is of phase `consumed_phase`, once it is complete for all
    // threads. `non_finite`: in, true to test it; out, true if an element is not finite.
    template <u32 consumed_phase>
    METHOD const u16* next(const Attention& a, bool& non_finite) {
        u16* stage = stages + (stage_of_phase ? consumed_phase : consumed) * stage_elements;
        if (consumed_phase == last_phase)
            on_the_way.store_transposed(stage);
        else
            on_the_way.store(stage);
        barrier();
        if (non_finite) non_finite = is_stage_non_finite<stage_elements>(stage);
        prefetch(a);
        consumed ^= 1;
        return stage;
    }
};

// As Stream with KEYS: parts of Q and dO with all of their dims, each loaded by half of the
// threads. A part is multiplied twice, by rows and then transposed: both in the one stage, because
// shared memory has no more for a second block.
template <u32 threads, u32 part_rows>
struct PairStream {
    static const u32 rows = part_rows, elements = rows * ANNULUS_DIM;
    static const u32 stage_elements = 2 * elements;
    static_assert(TILE / rows >= 2, "parts of a tile: see has_tile");

    u16* stage;
    HeadTileIterator prefetch_tiles;
    Operand operand;  // of this thread
    u32 first_row;    // of the part that is loaded
    RowsOnTheWay<rows, ANNULUS_DIM, threads / 2> on_the_way;

    static METHOD bool of_dout() { return thread_index_again() >= threads / 2; }
    METHOD u16* own_stage() const { return stage + (of_dout() ? elements : 0); }

    METHOD void begin(const Attention& a, u16* of_stage, const HeadTileIterator& tiles) {
        stage = of_stage;
        prefetch_tiles = tiles;
        operand = {};
        first_row = 0;
        if (!tiles.more()) return;
        begin_head(a);
        first_row = prefetch_tiles.entry(a).tile * TILE;
        prefetch(a);
    }

    METHOD void begin_head(const Attention& a) {
        operand = streamed_operand<KEYS>(a, block_z(), prefetch_tiles.h, of_dout());
    }

    // Between tiles: true if there is another one, whose first part has been loaded.
    METHOD bool has_tile() const { return prefetch_tiles.more(); }

    // Loads the next part, if there is one.
    METHOD void prefetch(const Attention& a) {
        if (!prefetch_tiles.more()) return;
        on_the_way.load(operand.at + i64(first_row) * operand.row, operand.row, operand.step,
                        first_row < a.queries ? a.queries - first_row : 0, operand.dim,
                        operand.aligned);
        first_row += rows;
        if (first_row % TILE != 0) return;
        const u32 head = prefetch_tiles.h;
        prefetch_tiles.next(a);
        if (!prefetch_tiles.more()) return;
        if (prefetch_tiles.h != head) begin_head(a);
        first_row = prefetch_tiles.entry(a).tile * TILE;
    }

    // Returns the next part by rows, once it is complete for all threads: Q, then dO. `non_finite`:
    // as in Stream.
    template <u32>
    METHOD const u16* next(const Attention&, bool& non_finite) {
        // all threads have consumed the part before
        barrier();
        on_the_way.store(own_stage());
        barrier();
        if (non_finite) non_finite = is_stage_non_finite<stage_elements>(stage);
        return stage;
    }

    // Transposes the part that all threads have consumed by rows. It is complete after a barrier.
    // The one in here also publishes what threads have written before.
    METHOD void transpose(const Attention& a) {
        barrier();
        on_the_way.store_transposed(own_stage());
        prefetch(a);
    }
};

// Scale of the left operand of the last product of a backward pass: f16 has too few exponents for
// dX, and matrix units of gfx90a flush its subnormal numbers. Each row has a power of two that
// brings its largest element so far to 2¹⁴ … 2¹⁵; `acc` is multiplied by it, too.
struct LeftScale {
#if ANNULUS_DTYPE == 3
    // Of the largest element, with the bias of f32: at least 2⁻¹¹², so that scales are normal.
    u32 exponent = 15;

    METHOD float inverse() const { return float_of((exponent - 14) << 23); }

    template <u32 columns>
    METHOD void apply(float (&left)[1][columns][4], RowAccumulators<1>& acc) {
        float largest = 0;
        UNROLL for (u32 n = 0; n < columns; ++n)
            UNROLL for (u32 e = 0; e < 4; ++e)
                largest = max_of_numbers(largest, float_of(bits_of(left[0][n][e]) & 0x7fffffffu));
        largest = max_of_numbers(largest, shuffle_xor(largest, 32));
        u32 next = bits_of(largest) >> 23;
        if (next > 254) next = 254;
        if (next > exponent) {
            const float factor =
                float_of(next - exponent < 127 ? (127 - (next - exponent)) << 23 : 0);
            UNROLL for (u32 panel = 0; panel < CHUNKS; ++panel)
                UNROLL for (u32 n = 0; n < CHUNK / 8; ++n)
                    UNROLL for (u32 e = 0; e < 4; ++e) acc[panel][0][n][e] *= factor;
            exponent = next;
        }
        const float scale = float_of((268 - exponent) << 23);
        UNROLL for (u32 n = 0; n < columns; ++n)
            UNROLL for (u32 e = 0; e < 4; ++e) left[0][n][e] *= scale;
    }
#else
    METHOD float inverse() const { return 1; }
    template <u32 columns>
    METHOD void apply(float (&)[1][columns][4], RowAccumulators<1>&) {}
#endif
};

// Loads a lane's part of `row`, which is in an operand, or zeros if not; zeros beyond its dims.
DEVICE void load_row(RowFragments& to, const u16* row, bool exists, const Operand& operand,
                     bool aligned) {
    UNROLL for (u32 c = 0; c < ANNULUS_DIM / 16; ++c) {
        const u32 x = 16 * c + 8 * (thread_index() % 64 / 32);
        const bool inside = exists && x < operand.dim;
        const u16* from = row + i64(x) * operand.step;
        if (aligned)
            load_or_zero(to.pieces[c], from, inside);
        else
            load_elements(to.pieces[c], from, operand.step, inside ? operand.dim - x : 0);
    }
}

// Loads a lane's part of row `row` of an operand.
DEVICE void load_row(RowFragments& to, const Operand& operand, u32 row) {
    const bool exists = row < operand.rows;
    load_row(to, operand.at + (exists ? i64(row) * operand.row : 0), exists, operand,
             operand.aligned);
}
