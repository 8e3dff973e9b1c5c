// Kernels that run once per query row: the forward epilogue (sinks, normalization, rounding), the
// backward prologue (Δ), and the gradient of the sinks. A row is one head's value_dim elements.
#pragma once

#include "records.cuh"

#define LANES 32

struct RowIndex {
    u32 b, h, i;
    bool exists;
};

// Row of this warp in finish_forward, in the order [batch, row, head].
DEVICE RowIndex row_of_warp(const RowArguments& a) {
    u64 row = u64(block_x()) * (THREADS / LANES) + thread_index() / LANES;
    RowIndex at;
    at.exists = row < u64(a.batches) * a.queries * a.q_heads;
    at.h = u32(row % a.q_heads);
    at.i = u32(row / a.q_heads % a.queries);
    at.b = u32(row / a.q_heads / a.queries);
    return at;
}

DEVICE u64 at_row(const Tensor& tensor, u32 b, u32 h, u32 i) {
    return tensor.at +
           u64(i64(b) * tensor.batch + i64(h) * tensor.head + i64(i) * tensor.row) * sizeof(Sum);
}

DEVICE Sum sink_of(const RowArguments& a, u32 h, u32 t) {
    u32 line = a.sinks_lines > 1 ? h : 0;
    return *reinterpret_cast<const Sum*>(
        a.sinks.at + u64(i64(line) * a.sinks.head + i64(t) * a.sinks.row) * sizeof(Sum));
}

template <typename T>
DEVICE T* element_of(const Tensor& tensor, u32 b, u32 h, u32 i, u32 x) {
    return reinterpret_cast<T*>(tensor.at + u64(i64(b) * tensor.batch + i64(i) * tensor.row +
                                                i64(h) * tensor.head + i64(x) * tensor.dim) *
                                                sizeof(T));
}

// Forward epilogue of a row, with the sinks a_t:
//
//   m' = max(m, max_t a_t);  ℓ' = ℓ·e^{m − m'} + Σ_t e^{a_t − m'}
//   out = O·e^{m − m'} / ℓ';  lse = m' + ln ℓ'
//
// Rounds to the element type once, a partial result not at all. Grid: rows, 8 per block.
KERNEL(finish_forward, RowArguments) {
    RowIndex at = row_of_warp(a);
    if (!at.exists) return;
    u64 row = (u64(at.b) * a.q_heads + at.h) * a.queries + at.i;
    Sum none = -Sum(infinity());
    Sum before = reinterpret_cast<const Sum*>(a.row_max)[row], max = before;
    for (u32 t = 0; t < a.sinks_count; ++t) {
        Sum sink = sink_of(a, at.h, t);
        // a sink of −∞ contributes nothing
        if (sink != none) max = larger(max, sink);
    }
    Sum rescale = max == before ? Sum(1) : exponential(before - max);
    Sum sum = reinterpret_cast<const Sum*>(a.row_sum)[row] * rescale;
    Sum ties = max == before ? reinterpret_cast<const Sum*>(a.row_ties)[row] : Sum(0);
    for (u32 t = 0; t < a.sinks_count; ++t) {
        Sum sink = sink_of(a, at.h, t);
        if (sink == none || max == none) continue;
        sum += exponential(sink - max);
        ties += Sum(sink == max);
    }
    if (is_nan(sum)) {
        // a NaN score is never the maximum, and a later block may have reset its acc: all is NaN
        max = sum;
        rescale = sum;
        ties = 0;
    }
    bool divide = !(a.flags & UNNORMALIZED) && sum != Sum(0);
    const Sum* acc = reinterpret_cast<const Sum*>(a.acc) +
                     ((u64(at.b) * a.queries + at.i) * a.q_heads + at.h) * a.value_dim;
    for (u32 x = thread_index() % LANES; x < a.value_dim; x += LANES) {
        // if every visible score is −∞, acc holds 0 · v, which may be NaN
        Sum value = max == none ? Sum(0) : acc[x] * rescale;
        if (divide) value /= sum;
        if (a.flags & PARTIAL)
            *element_of<Sum>(a.out, at.b, at.h, at.i, x) = value;
        else
            *element_of<Element>(a.out, at.b, at.h, at.i, x) = narrow(value);
    }
    if (thread_index() % LANES == 0) {
        *reinterpret_cast<Sum*>(at_row(a.lse, at.b, at.h, at.i)) = max + logarithm(sum);
        if (a.max.at) *reinterpret_cast<Sum*>(at_row(a.max, at.b, at.h, at.i)) = max;
        if (a.sum.at) *reinterpret_cast<Sum*>(at_row(a.sum, at.b, at.h, at.i)) = sum;
        if (a.ties.at) *reinterpret_cast<Sum*>(at_row(a.ties, at.b, at.h, at.i)) = ties;
    }
}

// begin_backward is bound by the memory of dO and O. A row has as many lanes as 16-byte pieces, at
// most a warp; a lane loads its pieces of four rows, or four pieces of one, before it adds any.
#define ROW_PIECES (ANNULUS_DIM * u32(sizeof(Element)) / 16)
#define ROW_LANES (ROW_PIECES < LANES ? ROW_PIECES : LANES)
#define LANE_PIECES (ROW_PIECES / ROW_LANES)
#define ROWS_AT_ONCE (4 / LANE_PIECES)
#define PIECE (16 / u32(sizeof(Element)))

static_assert(ROWS_AT_ONCE >= 1 && ROWS_AT_ONCE <= ROW_LANES, "one lane for each row");

typedef Vector<Element, PIECE> RowPiece;

// Row number `row` of the order [batch, row, head]. In 32 bits where that suffices, because a
// 64-bit division is a call of some seventy instructions.
DEVICE RowIndex row_index(const RowArguments& a, u64 row, u64 rows) {
    RowIndex at;
    at.exists = row < rows;
    if (rows < 1ull << 32) {
        const u32 line = u32(row) / a.q_heads;
        at.h = u32(row) - line * a.q_heads;
        at.b = line / a.queries;
        at.i = line - at.b * a.queries;
    } else {
        const u64 line = row / a.q_heads;
        at.h = u32(row - line * a.q_heads);
        at.b = u32(line / a.queries);
        at.i = u32(line - u64(at.b) * a.queries);
    }
    return at;
}

// Loads elements x … of a row, zeros beyond the ends; `aligned`: by one instruction.
DEVICE void load_piece(RowPiece& piece, const RowArguments& a, const Tensor& tensor,
                       const RowIndex& at, u32 x, bool aligned) {
    UNROLL for (u32 c = 0; c < PIECE; ++c) piece.elements[c] = Element(0);
    if (!at.exists) return;
    if (aligned) {
        if (x < a.value_dim)
            piece.load(u64(element_of<const Element>(tensor, at.b, at.h, at.i, x)));
        return;
    }
    UNROLL for (u32 c = 0; c < PIECE; ++c)
        if (x + c < a.value_dim)
            piece.elements[c] = *element_of<const Element>(tensor, at.b, at.h, at.i, x + c);
}

// A lane's terms of ⟨dO, O⟩ of the rows `first`, `first` + `stride`, …. They do not depend on
// whether pieces can be loaded by one instruction.
DEVICE void lane_products(Sum (&products)[ROWS_AT_ONCE], const RowArguments& a, u64 first,
                          u64 stride, u64 rows) {
    const bool aligned = has_vectors<Element>(a.dout, a.value_dim, PIECE) &&
                         has_vectors<Element>(a.out, a.value_dim, PIECE);
    RowPiece dout[ROWS_AT_ONCE][LANE_PIECES], out[ROWS_AT_ONCE][LANE_PIECES];
    UNROLL for (u32 r = 0; r < ROWS_AT_ONCE; ++r) {
        const RowIndex at = row_index(a, first + r * stride, rows);
        UNROLL for (u32 piece = 0; piece < LANE_PIECES; ++piece) {
            const u32 x = (piece * ROW_LANES + thread_index() % ROW_LANES) * PIECE;
            load_piece(dout[r][piece], a, a.dout, at, x, aligned);
            load_piece(out[r][piece], a, a.out, at, x, aligned);
        }
    }
    UNROLL for (u32 r = 0; r < ROWS_AT_ONCE; ++r) {
        products[r] = 0;
        UNROLL for (u32 piece = 0; piece < LANE_PIECES; ++piece)
            UNROLL for (u32 c = 0; c < PIECE; ++c)
                products[r] = multiply_add(widen(dout[r][piece].elements[c]),
                                           widen(out[r][piece].elements[c]), products[r]);
    }
}

// Writes the row statistics of a row whose ⟨dO, O⟩ is `product`.
DEVICE void store_row_statistics(const RowArguments& a, const RowIndex& at, Sum product) {
    auto of_row = [&](const Tensor& tensor) {
        return *reinterpret_cast<const Sum*>(at_row(tensor, at.b, at.h, at.i));
    };
    // of a row without a visible key, whose probabilities are 0
    Sum max = infinity(), inverse_sum = 0, delta = 0, share = 0;
    if (of_row(a.max) != -Sum(infinity())) {
        max = of_row(a.max);
        inverse_sum = a.sum.at ? 1 / of_row(a.sum) : Sum(1);
        delta = a.dlse.at ? -of_row(a.dlse) : Sum(0);
        if (a.flags & UNNORMALIZED)
            share = a.flags & PARTIAL ? -of_row(a.ties) : product / of_row(a.ties);
        else
            delta += product;
    }
    u16* to = reinterpret_cast<u16*>(a.statistics.at) +
              (i64(at.b) * a.statistics.batch + i64(at.i) * a.statistics.row +
               i64(at.h) * a.statistics.head);
    const u32 apart = sizeof(Sum) / 2;
    store_sum(to, max);
    store_sum(to + apart, inverse_sum);
    store_sum(to + 2 * apart, delta);
    store_sum(to + 3 * apart, share);
}

// Backward prologue: row statistics [max, 1 / sum, Δ, share]; see gradient.cuh. Of partial results,
// dlse and ties are −Δ and −share of the whole attention, and out is not read. Grid-stride loop
// over rows.
KERNEL(begin_backward, RowArguments) {
    const u64 rows = u64(a.batches) * a.queries * a.q_heads;
    const u64 stride = u64(blocks_x()) * (THREADS / ROW_LANES);
    const u32 warp = thread_index() / LANES, in_warp = LANES / ROW_LANES;
    // the same for all lanes of a warp, which take part in the shuffles
    u64 first_of_warp = u64(block_x()) * (THREADS / ROW_LANES) + warp * in_warp;
    for (; first_of_warp < rows; first_of_warp += stride * ROWS_AT_ONCE) {
        const u64 first = first_of_warp + thread_index() % LANES / ROW_LANES;
        Sum products[ROWS_AT_ONCE];
        UNROLL for (u32 r = 0; r < ROWS_AT_ONCE; ++r) products[r] = 0;
        if (!(a.flags & PARTIAL)) lane_products(products, a, first, stride, rows);
        // lane r of a row's lanes writes the statistics of row r
        const u32 own = thread_index() % ROW_LANES;
        Sum product = 0;
        UNROLL for (u32 r = 0; r < ROWS_AT_ONCE; ++r) {
            for (u32 lanes = ROW_LANES / 2; lanes > 0; lanes /= 2)
                products[r] += shuffle_xor(products[r], lanes);
            if (own == r) product = products[r];
        }
        if (own >= ROWS_AT_ONCE) continue;
        const RowIndex at = row_index(a, first + own * stride, rows);
        if (at.exists) store_row_statistics(a, at, product);
    }
}

// dsinks of one sink a: −Σ ( [a = max]·share + e^{a − max}·Δ / sum ) over all rows that have the
// sink.
// Grid: sinks × lines.
KERNEL(sink_gradient, RowArguments) {
    SHARED(Sum, parts, THREADS);
    u32 t = block_x(), line = block_y();
    Sum sink = *reinterpret_cast<const Sum*>(
        a.sinks.at + u64(i64(line) * a.sinks.head + i64(t) * a.sinks.row) * sizeof(Sum));
    u32 heads = a.sinks_lines > 1 ? 1 : a.q_heads;
    u64 rows = u64(a.batches) * heads * a.queries;
    Sum sum = 0;
    for (u64 row = thread_index(); row < rows && sink != -Sum(infinity()); row += THREADS) {
        u32 i = u32(row % a.queries), h = a.sinks_lines > 1 ? line : u32(row / a.queries % heads),
            b = u32(row / a.queries / heads);
        const u16* from =
            reinterpret_cast<const u16*>(a.statistics.at) +
            (i64(b) * a.statistics.batch + i64(i) * a.statistics.row + i64(h) * a.statistics.head);
        const u32 apart = sizeof(Sum) / 2;
        Sum max = load_sum(from), inverse_sum = load_sum(from + apart),
            delta = load_sum(from + 2 * apart), share = load_sum(from + 3 * apart);
        bool through_max = (a.flags & UNNORMALIZED) && sink == max;
        sum -= (through_max ? share : Sum(0)) + exponential(sink - max) * inverse_sum * delta;
    }
    parts[thread_index()] = sum;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        barrier();
        if (thread_index() < half) parts[thread_index()] += parts[thread_index() + half];
    }
    barrier();
    if (thread_index() == 0)
        *reinterpret_cast<Sum*>(
            a.dsinks.at + u64(i64(line) * a.dsinks.head + i64(t) * a.dsinks.row) * sizeof(Sum)) =
            parts[0];
}
