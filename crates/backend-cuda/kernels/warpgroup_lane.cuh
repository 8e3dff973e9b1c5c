// Position of a thread of a consumer warpgroup in its accumulators, forward and backward.
#pragma once

#include "warpgroup.cuh"

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

// Returns true if one of a thread's elements of a tile of `count` elements in shared memory is not
// finite. Adding the lowest bit of the exponent carries into the sign's place only if all of its
// bits are set. Four loads at a time, so that their latencies overlap.
DEVICE bool part_non_finite(const u16* values, u32 count, const ConsumerLane& at) {
    const u32 exponent = ANNULUS_DTYPE == 2 ? 0x7f80u : 0x7c00u;
    const u32 lowest = ANNULUS_DTYPE == 2 ? 0x0080u : 0x0400u;
    u32 carries = 0;
    NOT_UNROLLED for (u32 first = at.thread; first < count / 8; first += 4 * WARPGROUP) {
        SharedWords words[4] = {};
        UNROLL for (u32 c = 0; c < 4; ++c)
            if (first + c * WARPGROUP < count / 8)
                words[c] = reinterpret_cast<const SharedWords*>(values)[first + c * WARPGROUP];
        UNROLL for (u32 c = 0; c < 4; ++c)
            UNROLL for (u32 word = 0; word < 4; ++word)
                carries |= (words[c].of[word] & exponent * 0x10001u) + lowest * 0x10001u;
    }
    return carries & 0x80008000u;
}
