// Position of a thread of a consumer warpgroup in its accumulators, forward and backward.
#pragma once

#include "tile.cuh"

// Position of a thread in its warpgroup's accumulators: element e of S is
// row + 8·(e / 2 mod 2), 8·(e / 4) + column + e mod 2.
struct ConsumerLane {
    u32 group, thread, lane, row, column;

    METHOD u32 row_of(u32 e) const { return row + 8 * (e / 2 % 2); }
    METHOD u32 column_of(u32 e) const { return 8 * (e / 4) + column + e % 2; }
};

DEVICE ConsumerLane consumer_lane(u32 group, u32 index) {
    ConsumerLane at;
    at.group = group;
    at.thread = index % WARPGROUP;
    at.lane = index % 32;
    at.row = at.thread / 32 * 16 + at.lane / 4;
    at.column = 2 * (at.lane % 4);
    return at;
}
DEVICE ConsumerLane consumer_lane() {
    // uniform: descriptors and barrier names then need no per-thread arithmetic
    return consumer_lane(uniform(thread_index() / WARPGROUP) - 1, thread_index());
}
// The same, computed anew, where registers are too few to keep it.
DEVICE ConsumerLane lane_again(const ConsumerLane& at) {
    return consumer_lane(at.group, thread_index_again());
}
