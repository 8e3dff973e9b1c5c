// Streams tiles of 64 rows of 16-bit elements through shared memory: the right operands of the
// kernels on tensor cores (mma.sync).
//
// A chunk is some rows of one operand × panels of 64 dims, mostly 8 KB: 64 rows × 64 dims, 32 rows
// × 128 dims. A stage of the pipeline holds one chunk, in the dK/dV pass one of each operand.
// cp.async fills all stages but one while that one is consumed; with two stages that is double
// buffering. Stream::next has the one barrier of a stage: it publishes the chunk that has arrived,
// and all threads have consumed the one whose stage is filled next.
//
// The 16-byte pieces of a panel's row are swizzled with the row number, so that the eight rows that
// ldmatrix reads at once lie in different banks.
//
// On AMD GPUs, matrix_amd.cuh has the stream; operands and phases are those of this file.
//
// Source: Dao 2023 (FlashAttention-2); PTX ISA, "cp.async".
#pragma once

#include "tile.cuh"
#include "numbers.cuh"

#if ANNULUS_DTYPE >= 2 && TILE == 64

// Dims of a panel: a row of 128 bytes, which spans all 32 banks.
#define CHUNK 64
#define CHUNKS (ANNULUS_DIM / CHUNK)
#define CHUNK_ELEMENTS (TILE * CHUNK)

// Kernel that streams a tile, and with it the order of its operands: k v; k v k; q with dout.
enum Pass { FORWARD = 1, QUERIES = 2, KEYS = 3 };

#ifndef ANNULUS_AMD

typedef u32 Fragment[4];

DEVICE void mma(float (&acc)[4], const Fragment& left, u32 first, u32 second) {
#if ANNULUS_DTYPE == 2
    mma_bf16(acc, left, first, second);
#else
    mma_f16(acc, left, first, second);
#endif
}

#endif

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

#ifndef ANNULUS_AMD

// Copies up to `count` elements one by one, then zeros, eight in all.
DEVICE_CALL void copy_unaligned(u16* to, const u16* from, i64 step, u32 count) {
    for (u32 c = 0; c < 8; ++c) to[c] = c < count ? from[i64(c) * step] : u16(0);
}

// Row and dims of a panel that a thread copies, eight elements at once: rows `copy_row`,
// `copy_row` + copy_rows, … Every thread copies the same offsets of every chunk, so it may test
// them without a barrier.
template <u32 threads, u32 rows>
DEVICE constexpr u32 copy_rows() {
    static_assert(threads * 8 % CHUNK == 0 && rows % (threads * 8 / CHUNK) == 0 &&
                      threads * 8 / CHUNK % 8 == 0,
                  "whole rows, as many copies for every thread, with the same swizzle");
    return threads * 8 / CHUNK;
}
DEVICE u32 copy_row() { return thread_index() / (CHUNK / 8); }
DEVICE u32 copy_dim() { return thread_index() % (CHUNK / 8) * 8; }

// Copies a panel, dims `from … from + 63` of `rows` rows `first …`, 0 beyond the ends, for strides
// that do not allow copies of 16 bytes.
template <u32 threads, u32 rows>
DEVICE void load_panel_unaligned(u16* to, const Operand& operand, u32 first, u32 from) {
    u32 x = from + copy_dim();
    for (u32 row = copy_row(); row < rows; row += copy_rows<threads, rows>()) {
        bool inside = first + row < operand.rows && x < operand.dim;
        i64 offset = inside ? i64(first + row) * operand.row + i64(x) * operand.step : 0;
        copy_unaligned(to + swizzled(row, copy_dim()), operand.at + offset, operand.step,
                       inside ? operand.dim - x : 0);
    }
}

// Returns true if an element of the stage that this thread loaded is not finite. `rows`: those of
// all of its panels.
template <u32 threads, u32 rows>
DEVICE_CALL bool thread_part_non_finite(const u16* stage) {
    bool non_finite = false;
    for (u32 row = copy_row(); row < rows; row += copy_rows<threads, rows>()) {
        const u32* words = reinterpret_cast<const u32*>(stage + swizzled(row, copy_dim()));
        for (u32 c = 0; c < 4; ++c) non_finite |= !is_pair_finite(words[c]);
    }
    return non_finite;
}

#endif

// Phases of a tile: a pass reads chunks of both operands in turn, then again those of the first
// one, if it is needed twice (see Pass). With KEYS both are in one stage.
template <u32 pass>
DEVICE constexpr u32 phases() {
    return pass == KEYS ? 1 : pass == QUERIES ? 3 : 2;
}

// Visible tiles of a block: those of one query head, or with KEYS of the heads of a group.
template <u32 pass>
struct StreamTiles {
    typedef TileIterator Iterator;
};
template <>
struct StreamTiles<KEYS> {
    typedef HeadTileIterator Iterator;
};

// Query head of the next tile. That of a block's only head is not kept: registers are few.
template <u32 pass>
DEVICE u32 head_of(const TileIterator&, const Attention& a) {
    return block_y() * (pass == FORWARD ? a.packed_heads : 1);
}
template <u32 pass>
DEVICE u32 head_of(const HeadTileIterator& tiles, const Attention&) {
    return tiles.h;
}

// The second (v, dout) or first operand (k, q) of a pass, for query head h.
template <u32 pass>
DEVICE Operand streamed_operand(const Attention& a, u32 b, u32 h, bool second) {
    u32 kv_head = h / (a.q_heads / a.kv_heads);
    return pass == KEYS ? second ? operand_of(a.dout, b, h, a.queries, a.value_dim)
                                 : operand_of(a.q, b, h, a.queries, a.head_dim)
           : second ? operand_of(a.v, b, kv_head, a.keys, a.value_dim)
                    : operand_of(a.k, b, kv_head, a.keys, a.head_dim);
}

#ifndef ANNULUS_AMD

// Called rather than inlined: gemm_nt and gemm_nn would contain a dozen copies.
template <u32 pass, u32 threads, u32 rows, u32 panels>
DEVICE_CALL void load_streamed_unaligned(u16* to, const Attention& a, u32 b, u32 h, u32 first,
                                         bool second, u32 from) {
    Operand operand = streamed_operand<pass>(a, b, h, second);
    for (u32 panel = 0; panel < panels; ++panel)
        load_panel_unaligned<threads, rows>(to + panel * rows * CHUNK, operand, first,
                                            from + panel * CHUNK);
}

// Streams the right operand's chunks of all visible tiles through `depth` stages, by `threads`
// threads. A tile of 64 rows is streamed in parts of `part_rows`, a part in chunks of
// `chunk_panels` panels of dims. `Iterator` is that of the tiles.
//
// What a copy needs is kept: a thread's addresses in both operands, and the first row of the tile.
// A copy then costs about a dozen instructions. With a division and the addresses of both operands
// for every chunk it cost two hundred, more than the products.
template <u32 pass, u32 threads, u32 depth, u32 part_rows = TILE,
          u32 chunk_panels = TILE / part_rows,
          typename Iterator = typename StreamTiles<pass>::Iterator>
struct Stream {
    // Of a chunk.
    static const u32 rows = part_rows, panels = chunk_panels, dims = panels * CHUNK,
                     elements = rows * dims;
    static const u32 stage_elements = (pass == KEYS ? 2 : 1) * elements;
    // True if a part of a tile has one chunk of each phase. Neither the number of the chunk that is
    // loaded then takes a register, nor its phase, which follows from the one that is consumed.
    static const bool one_chunk = dims >= ANNULUS_DIM;
    static_assert(pass != KEYS || one_chunk, "a stage has all dims of both operands");

    u16* stages;
    Iterator prefetch_tiles;
    const u16* operands[2];  // rows copy_row(), dims copy_dim() of both, of one head
    u32 first_row;           // of the part that is loaded
    bool aligned;            // both operands allow copies of 16 bytes
    u32 phase, chunk;        // of the part that is loaded
    u32 consumed;            // stage that is consumed next

    METHOD void begin(const Attention& a, u16* of_stages, const Iterator& tiles) {
        stages = of_stages;
        prefetch_tiles = tiles;
        phase = chunk = consumed = first_row = 0;
        operands[0] = operands[1] = nullptr;
        aligned = false;
        if (tiles.more()) {
            begin_head(a);
            first_row = prefetch_tiles.entry(a).tile * TILE;
        }
        UNROLL for (u32 stage = 0; stage + 1 < depth; ++stage)
            prefetch(stage, stage % phases<pass>(), a);
    }

    // Between tiles: true if there is another one. Its first stage is loaded and others follow, so
    // that it is the tile of `prefetch_tiles`: an iterator of its own would take registers.
    METHOD bool has_tile() const {
        static_assert(depth == 2 && TILE / rows * phases<pass>() >= 2, "stages of a tile");
        return prefetch_tiles.more();
    }

    METHOD void begin_head(const Attention& a) {
        aligned = true;
        UNROLL for (u32 index = 0; index < 2; ++index) {
            Operand operand =
                streamed_operand<pass>(a, block_z(), head_of<pass>(prefetch_tiles, a), index == 1);
            operands[index] = operand.at + (i64(copy_row()) * operand.row + i64(copy_dim()));
            aligned &= operand.aligned;
        }
    }

    // Loads the next chunk of the first or `second` operand.
    METHOD void load(u16* to, bool second, const Attention& a) const {
        if (!aligned) {
            load_streamed_unaligned<pass, threads, rows, panels>(
                to, a, block_z(), head_of<pass>(prefetch_tiles, a), first_row, second,
                chunk * dims);
            return;
        }
        i64 stride = pass == KEYS ? second ? a.dout.row : a.q.row : second ? a.v.row : a.k.row;
        u32 all = pass == KEYS ? a.queries : a.keys, row = first_row + copy_row();
        u32 dim = second ? a.value_dim : a.head_dim;
        const u16* from =
            (second ? operands[1] : operands[0]) + (i64(first_row) * stride + i64(chunk * dims));
        to += swizzled(copy_row(), copy_dim());
        UNROLL for (u32 panel = 0; panel < panels; ++panel) {
            bool inside = chunk * dims + panel * CHUNK + copy_dim() < dim;
            UNROLL for (u32 r = 0; r < rows; r += copy_rows<threads, rows>())
                cp_async_16(to + (panel * rows + r) * CHUNK,
                            from + (i64(r) * stride + panel * CHUNK), inside && row + r < all);
        }
    }

    // Moves on from a chunk of phase `loaded`.
    METHOD void advance(u32 loaded, const Attention& a) {
        if (!one_chunk) {
            u32 dim = loaded == 1 ? a.value_dim : a.head_dim;
            if (++chunk * dims < dim) return;
            chunk = 0;
        }
        const bool last = loaded + 1 == phases<pass>();
        if (!one_chunk) phase = last ? 0 : loaded + 1;
        if (!last) return;
        first_row += rows;
        if (rows < TILE && first_row % TILE != 0) return;
        const u32 head = head_of<pass>(prefetch_tiles, a);
        prefetch_tiles.next(a);
        if (!prefetch_tiles.more()) return;
        if (pass == KEYS && head_of<pass>(prefetch_tiles, a) != head) begin_head(a);
        first_row = prefetch_tiles.entry(a).tile * TILE;
    }

    // Issues the loads of the next stage's chunks, if there are more, into a stage. Every call
    // commits one cp.async group, so that the number of groups in flight is constant. `in_turn`:
    // their phase, with one_chunk.
    METHOD void prefetch(u32 stage, u32 in_turn, const Attention& a) {
        if (prefetch_tiles.more()) {
            u16* to = stages + stage * stage_elements;
            const u32 loaded = one_chunk ? in_turn : phase;
            load(to, loaded == 1, a);
            if (pass == KEYS) load(to + elements, true, a);
            advance(loaded, a);
        }
        cp_async_commit();
    }

    // Returns the next stage, which is of phase `consumed_phase`, once it is complete for all
    // threads; the barrier also publishes earlier writes to shared memory. `non_finite`: in, true
    // to test the stage; out, true if any of its elements is not finite.
    template <u32 consumed_phase>
    METHOD const u16* next(const Attention& a, bool& non_finite) {
        const u16* stage = stages + consumed * stage_elements;
        cp_async_wait<depth - 2>();
        bool mine =
            non_finite && thread_part_non_finite<threads, stage_elements / CHUNK>(stage);
        non_finite = barrier_any(mine);
        // the barrier above: all threads have consumed the previous stage, which may be overwritten
        prefetch((consumed + depth - 1) % depth, (consumed_phase + depth - 1) % phases<pass>(), a);
        consumed = (consumed + 1) % depth;
        return stage;
    }
};

#endif

#endif
