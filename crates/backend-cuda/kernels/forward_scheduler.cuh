// Tile scheduler of the forward pass on warpgroups: a persistent grid to which tiles of queries are
// assigned dynamically.
//
//   tiles of a launch, numbered:
//       for each section of heads:  for each list of the block mask, that of most KV tiles first:
//           for each group of packed heads of the section
//   block k:  computes tile k;  then, while there are any, the tile that it fetches by the counter
//
// The producer fetches the next tile when it has issued all loads of the current one and passes it
// to the consumers through shared memory. It loads the first K and V of that tile while the
// consumers still compute the current one and write their outputs. Work slots have mbarriers as the
// stages of K and V have.
//
// Longest first: the blocks that finish last then have the shortest tiles. The K and V of all heads
// of a section fit half of the L2 cache, from which its later lists then read them. The last
// section also has the heads that are left, so that it has enough tiles to be balanced: a section
// of few heads would end with the blocks that compute its longest ones.
//
// A block fetches until a number is beyond the end. As many tiles as there are blocks need no
// fetch, and each block has one fetch in vain: there are as many fetches as tiles. The last one
// sets the counter to 0 for the next launch.
//
// Each tile is computed by one block alone, so its bits do not depend on which block that is.
//
// Source: FlashAttention-3, hopper/tile_scheduler.hpp: dynamic persistent scheduler, and an order
// of tiles by sections of the L2 cache.
#pragma once

#include "warpgroup_tile.cuh"

// Returns tile `number` of the launch.
DEVICE WorkTile work_tile(const WarpgroupAttention& a, u32 number) {
    const Attention& all = a.attention;
    const u32 lists = all.block_mask.lists, groups = all.q_heads / all.packed_heads;
    const u32 all_groups = groups * all.batches, last = all_groups / a.section - 1;
    const u32 any = number / (lists * a.section), section = any < last ? any : last;
    const u32 first_group = section * a.section;
    const u32 in_section = number - first_group * lists;
    const u32 in_row = section < last ? a.section : all_groups - first_group;
    const u32 rank = in_section / in_row, group = first_group + (in_section - rank * in_row);
    WorkTile work;
    work.b = group / groups;
    work.first_head = (group - work.b * groups) * all.packed_heads;
    const u64 row = mask_plane(all, work.b, work.first_head) * lists + rank;
    work.list = reinterpret_cast<const u32*>(a.order)[row];
    return work;
}

// Fetches the number of a further tile, beyond the end if there is none.
DEVICE u32 fetch_tile(const WarpgroupAttention& a) {
    u32* counter = reinterpret_cast<u32*>(a.counter);
    const u32 fetched = atomic_add(counter, 1);
    if (fetched + 1 == a.tiles) *counter = 0;
    return fetched + blocks_x();
}

// Producer: passes a tile to the consumers.
DEVICE void send_work(SharedStorage& memory, const PipelineState& slot, const WorkTile& work) {
    mbarrier_wait(memory.work_empty + slot.stage(), slot.parity() ^ 1);
    memory.work[slot.stage()] = work;
    mbarrier_arrive(memory.work_full + slot.stage());
}

// Consumer: receives the next tile. All threads call it. One lane of a warp reads the slot, so that
// it may be released at once.
DEVICE WorkTile receive_work(SharedStorage& memory, const PipelineState& slot, u32 lane) {
    mbarrier_wait(memory.work_full + slot.stage(), slot.parity());
    WorkTile work = {};
    if (lane == 0) {
        work = memory.work[slot.stage()];
        mbarrier_arrive(memory.work_empty + slot.stage());
    }
    return {uniform(work.b), uniform(work.first_head), uniform(work.list), 0};
}

// Producer thread: issues the TMA loads of all tiles of the block.
DEVICE void load_tiles(SharedStorage& memory, const WarpgroupAttention& a) {
    const Attention& all = a.attention;
    prefetch_tensor_map(a.k_map);
    prefetch_tensor_map(a.v_map);
    if (a.stores_by_tma) prefetch_tensor_map(a.out_map);
    PipelineState state = {0}, slot = {0};
    for (u32 number = block_x(); number < a.tiles; number = fetch_tile(a), slot.advance()) {
        const WorkTile work = work_tile(a, number);
        send_work(memory, slot, work);
        const u32 kv_head = work.first_head / (all.q_heads / all.kv_heads);
        RunIterator tiles;
        tiles.begin(all, work.b, work.first_head, work.list);
        for (; tiles.more(); tiles.next(all), state.advance()) {
            const u32 row = tiles.tile * KV_ROWS;
            tma_load(memory.k[0], a.k_map, memory.k_full, memory.k_empty, state, row, kv_head,
                     work.b);
            tma_load(memory.v[0], a.v_map, memory.v_full, memory.v_empty, state, row, kv_head,
                     work.b);
        }
    }
    send_work(memory, slot, {0, 0, NO_TILE, 0});
}
