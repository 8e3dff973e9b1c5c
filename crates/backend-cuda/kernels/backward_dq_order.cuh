// Order in which thread blocks add to dQ, in the fused backward kernel on warpgroups
// (backward_fused_warpgroup.cuh). Several blocks add to the same tile of queries, one tile of keys
// each. f32 sums depend on their order, so it is fixed: ascending tiles of keys.
//
//   Every tile of streamed queries has a semaphore: how many blocks have added to it.
//   A block with the r-th of the tiles of keys that are visible to these queries
//       waits until the semaphore is r;  adds;  sets it to r + 1, or after the last one to 0
//
// No deadlock, in whatever order blocks start and however many run at the same time: a block
// obtains its tile of keys by a ticket, a counter in global memory. For a KV head ascending tickets
// are ascending tiles of keys, so a block waits only for lower tickets, which blocks that already
// run have obtained. The block with the lowest ticket of those that run waits for no other. (Blocks
// by blockIdx would rely on the order in which the hardware starts them, which CUDA does not
// define.)
//
// A block visits its queries in descending order. Under a causal mask or a window, tiles of keys
// that start together then add to different queries at first, and wait only one step for each
// other; ascending, each would wait for all before it to reach the diagonal. Tickets take tile
// after tile of a section of KV heads (own_tile_of): the blocks that run at the same time are then
// of several heads, and few wait for each other.
//
// Source: FlashAttention-3, hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp: dQ semaphore of the
// deterministic mode.
#pragma once

#include "backward_warpgroup.cuh"

// Obtains the next tile of keys. One thread of a block calls it once.
DEVICE u32 take_ticket(const BackwardAttention& a) {
    u32* counter = reinterpret_cast<u32*>(a.order.tickets);
    const u32 ticket = atomic_add(counter, 1);
    // the last one: the next launch begins at 0
    if (ticket + 1 == a.order.key_tiles) *counter = 0;
    return ticket;
}

// The tile of keys of a ticket.
DEVICE OwnTile key_tile_of(const BackwardAttention& a, u32 ticket) {
    return own_tile_of(a, ticket, a.attention.kv_heads);
}

// Number of a block among those that add to a tile of queries, from 0 on.
struct AdditionRank {
    u32 rank;
    bool is_last;
};

// Rank of a visible tile of keys in the list of a tile of queries: the list's runs are in ascending
// order, and `first_of_run` counts the tiles before each of them.
DEVICE AdditionRank addition_rank(const BackwardAttention& a, u32 b, u32 h, u32 query_tile,
                                  u32 key_tile) {
    const u64 list = mask_plane(a.attention, b, h) * a.order.query_tiles + query_tile;
    const u32* starts = reinterpret_cast<const u32*>(a.order.starts) + list;
    const TileRun* runs = reinterpret_cast<const TileRun*>(a.order.runs);
    const u32* first_of_run = reinterpret_cast<const u32*>(a.order.first_of_run);
    // the last run that does not begin after the tile
    u32 low = starts[0], high = starts[1];
    const u32 last = high - 1;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (runs[middle].first <= key_tile)
            low = middle;
        else
            high = middle;
    }
    const u32 rank = first_of_run[low] + (key_tile - runs[low].first);
    return {rank, rank + 1 == first_of_run[last] + runs[last].count};
}

// Semaphore of the tile of queries that begins at `first_query`.
DEVICE u32* semaphore_of(const BackwardAttention& a, u32 b, u32 h, u32 first_query) {
    return reinterpret_cast<u32*>(a.order.semaphores) +
           (u64(b) * a.attention.q_heads + h) * a.statistics_tiles + first_query / 64;
}

// Iterates over the visible tiles of queries of one or more heads, heads ascending and the tiles of
// a head descending, `rows` queries at a time. Parts beyond the last query are skipped.
template <u32 rows>
struct DescendingTiles {
    u32 b, tile, h, end;
    u32 run, first_run;  // current run, first one of the list
    u32 in_run, part;

    METHOD void begin(const Attention& a, u32 of_b, u32 of_tile, u32 first_head, u32 end_head) {
        b = of_b;
        tile = of_tile;
        h = first_head;
        end = end_head;
        begin_head(a);
    }
    // Begins with the last tile of head `h`, or of the next one that has any.
    METHOD void begin_head(const Attention& a) {
        for (; h < end; ++h) {
            const u32* starts = list_starts(a, b, h);
            first_run = starts[tile];
            run = starts[tile + 1];
            if (run == first_run) continue;
            --run;
            in_run = tile_run(a, run).count - 1;
            begin_tile(a);
            return;
        }
    }
    METHOD void begin_tile(const Attention& a) {
        part = 0;
        if (rows < BACKWARD_TILE && first_row(a) + rows < a.queries)
            part = BACKWARD_TILE / rows - 1;
    }
    METHOD bool more() const { return h < end; }
    METHOD u32 query_tile(const Attention& a) const { return tile_run(a, run).first + in_run; }
    METHOD u32 mask_index(const Attention& a) const { return tile_run(a, run).mask_index; }
    METHOD u32 first_row(const Attention& a) const {
        return query_tile(a) * BACKWARD_TILE + part * rows;
    }
    METHOD void next(const Attention& a) {
        if (rows < BACKWARD_TILE && part > 0) {
            --part;
        } else if (in_run > 0) {
            --in_run;
            begin_tile(a);
        } else if (run > first_run) {
            --run;
            in_run = tile_run(a, run).count - 1;
            begin_tile(a);
        } else {
            ++h;
            begin_head(a);
        }
    }
};
