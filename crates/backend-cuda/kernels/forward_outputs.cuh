// Rows of a tile of queries on warpgroups: reads the state before its KV tiles, writes the state,
// partial results or outputs after them (forward_state.cuh).
//
// Outputs leave through shared memory with a TMA store where the caller's layout allows it, while
// the consumers begin with the next tile. They replace Q, which has been read. The next Q is
// written when the store has read them. A packed tile, whose rows belong to several heads, is
// written by threads.
#pragma once

#include "forward_state.cuh"
#include "forward_scheduler.cuh"
#include "warpgroup.cuh"

// Softmax statistics (m, ℓ) and the factor e^{m − m'} of the last update, for a thread's two rows.
struct SoftmaxState {
    float max[2], sum[2], rescale[2];
};

// The query and the head of a row.
struct ConsumerRow {
    u64 query;
    u32 h;
    bool exists;
};

// A consumer's part of a tile of queries.
struct ConsumerTile {
    u32 b, first_head;
    u32 tile, split;  // of the list: tile of queries and range of keys

    // Of a row of the consumer's 64.
    METHOD ConsumerRow row(const Attention& a, u32 group, u32 row) const {
        const PackedRow packed = consumer_row(a, first_head, group, row);
        const u64 query = u64(tile) * queries_per_tile(a) + packed.query;
        return {query, packed.h, packed.exists && query < a.queries};
    }
};

DEVICE ConsumerTile consumer_tile(const Attention& a, const WorkTile& work) {
    ConsumerTile part;
    part.b = work.b;
    part.first_head = work.first_head;
    part.tile = work.list / a.block_mask.splits;
    part.split = work.list - part.tile * a.block_mask.splits;
    return part;
}

// Writes a consumer's rows of a tile without visible KV tiles.
DEVICE void write_rows_without_tiles(const Attention& a, const ConsumerTile& part,
                                     const ConsumerLane& at) {
    for (u32 row = at.thread / 32; row < Q_ROWS; row += WARPGROUP / 32) {
        const ConsumerRow own = part.row(a, at.group, row);
        if (!own.exists) continue;
        bool is_empty = starts_empty(a), write_outputs = a.flags & WRITE_OUTPUTS;
        u64 from = statistics_row(a, 0, part.b, own.h, own.query),
            to = statistics_row(a, part.split, part.b, own.h, own.query);
        float max = is_empty ? -infinity() : reinterpret_cast<const float*>(a.max)[from];
        float sum = is_empty ? 0.0f : reinterpret_cast<const float*>(a.sum)[from];
        RowOutput output = row_output(max, sum);
        for (u32 x = at.lane; x < a.value_dim; x += 32) {
            float value = is_empty ? 0.0f : acc_row(a, 0, part.b, own.h, own.query)[x];
            if (write_outputs)
                store_output(a, part.b, own.h, own.query, x, output.of(value));
            else
                acc_row(a, part.split, part.b, own.h, own.query)[x] = value;
        }
        if (at.lane != 0) continue;
        if (write_outputs) {
            store_row_outputs(a.of_rows, part.b, own.h, own.query, max, sum);
        } else {
            reinterpret_cast<float*>(a.max)[to] = max;
            reinterpret_cast<float*>(a.sum)[to] = sum;
        }
    }
}

// Reads O, m and ℓ of a thread's rows, or begins with nothing.
DEVICE void read_state(float (&o)[O_PARTS][O_COLUMNS / 2], SoftmaxState& softmax,
                       const Attention& a, const ConsumerTile& part, const ConsumerLane& at) {
    UNROLL for (u32 r = 0; r < 2; ++r) {
        const ConsumerRow own = part.row(a, at.group, at.row + 8 * r);
        bool exists = own.exists && !starts_empty(a);
        u64 row_index = statistics_row(a, 0, part.b, own.h, own.query);
        softmax.max[r] = exists ? reinterpret_cast<const float*>(a.max)[row_index] : -infinity();
        // row sums are partial sums of four lanes: the first lane starts from the stored value
        softmax.sum[r] =
            exists && at.lane % 4 == 0 ? reinterpret_cast<const float*>(a.sum)[row_index] : 0.0f;
        const float* line = acc_row(a, 0, part.b, own.h, own.query);
        UNROLL for (u32 columns = 0; columns < O_PARTS; ++columns)
            UNROLL for (u32 n_tile = 0; n_tile < O_COLUMNS / 8; ++n_tile)
                UNROLL for (u32 c = 0; c < 2; ++c) {
                    u32 x = columns * O_COLUMNS + 8 * n_tile + at.column + c;
                    o[columns][4 * n_tile + 2 * r + c] =
                        exists && x < a.value_dim ? line[x] : 0.0f;
                }
    }
}

// Writes a thread's rows of outputs to shared memory, in the layout of Q, and issues the TMA store
// of the consumer's tile.
DEVICE void store_tile_by_tma(u16* tile, const float (&o)[O_PARTS][O_COLUMNS / 2],
                              const RowOutput (&outputs)[2], const WarpgroupAttention& a,
                              const ConsumerTile& part, const ConsumerLane& at) {
    // the products Q·Kᵀ of all warps have been waited for
    named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);
    UNROLL for (u32 r = 0; r < 2; ++r)
        UNROLL for (u32 columns = 0; columns < O_PARTS; ++columns)
            UNROLL for (u32 n_tile = 0; n_tile < O_COLUMNS / 8; ++n_tile) {
                const float* pair = o[columns] + (4 * n_tile + 2 * r);
                const u32 x = columns * O_COLUMNS + 8 * n_tile + at.column;
                store_pair_for_async_proxy(
                    tile + swizzled_offset(Q_ROWS, at.row + 8 * r, x),
                    narrow_pair(outputs[r].of(pair[0]), outputs[r].of(pair[1])));
            }
    fence_proxy_async();
    named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);
    const u32 first_query = part.tile * TILE_ROWS + at.group * Q_ROWS;
    if (at.thread != 0 || first_query >= a.attention.queries) return;
    // rows and dims beyond the ends of the tensor are not written
    for (u32 x = 0; x < a.attention.value_dim; x += PANEL_DIMS)
        tma_store_box(a.out_map, tile + x / PANEL_DIMS * Q_PANEL, x, first_query, part.first_head,
                      part.b);
    bulk_commit();
}

// Writes a thread's rows: outputs, or O, m and ℓ as state or partial results. `tile` is the
// consumer's part of Q in shared memory.
DEVICE void write_rows(u16* tile, const float (&o)[O_PARTS][O_COLUMNS / 2],
                       const SoftmaxState& softmax, const WarpgroupAttention& all,
                       const ConsumerTile& part, const ConsumerLane& at) {
    const Attention& a = all.attention;
    const bool write_outputs = a.flags & WRITE_OUTPUTS, in_pairs = stores_pairs(a);
    RowOutput outputs[2];
    UNROLL for (u32 r = 0; r < 2; ++r) {
        float sum = softmax.sum[r];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        outputs[r] = row_output(softmax.max[r], sum);
        const ConsumerRow own = part.row(a, at.group, at.row + 8 * r);
        if (!own.exists) continue;
        if (at.lane % 4 == 0 && write_outputs)
            store_row_outputs(a.of_rows, part.b, own.h, own.query, softmax.max[r], sum);
        if (at.lane % 4 == 0 && !write_outputs) {
            u64 row_index = statistics_row(a, part.split, part.b, own.h, own.query);
            reinterpret_cast<float*>(a.max)[row_index] = softmax.max[r];
            reinterpret_cast<float*>(a.sum)[row_index] = sum;
        }
        if (all.stores_by_tma) continue;
        float* line = acc_row(a, part.split, part.b, own.h, own.query);
        UNROLL for (u32 columns = 0; columns < O_PARTS; ++columns)
            UNROLL for (u32 n_tile = 0; n_tile < O_COLUMNS / 8; ++n_tile) {
                u32 x = columns * O_COLUMNS + 8 * n_tile + at.column;
                const float* pair = o[columns] + (4 * n_tile + 2 * r);
                if (write_outputs)
                    store_output_pair(a, outputs[r], part.b, own.h, own.query, x, pair[0], pair[1],
                                      in_pairs);
                else
                    UNROLL for (u32 c = 0; c < 2; ++c)
                        if (x + c < a.value_dim) line[x + c] = pair[c];
            }
    }
    if (all.stores_by_tma) store_tile_by_tma(tile, o, outputs, all, part, at);
}
