// Rows of a forward tile under GQA packing (src/forward_tiles.rs). With few queries, `packed_heads`
// heads of one KV head share a tile, so that each key is read once for all of them:
//
//   row = query · packed_heads + head        left-over rows do not exist
#pragma once

#include "tile.cuh"

// One row of a packed tile of `rows` rows: the query, counted from the tile's first, and the query
// head.
struct PackedRow {
    u32 query, h;
    bool exists;
};

// Queries per tile: rows / packed_heads.
template <u32 rows>
DEVICE u32 packed_queries(const Attention& a) {
    return rows * a.packed_reciprocal >> 16;
}

template <u32 rows>
DEVICE PackedRow packed_row(const Attention& a, u32 first_head, u32 row) {
    PackedRow at;
    // row / packed_heads; exact, because row ≤ 2¹⁵ (src/forward_tiles.rs)
    at.query = row * a.packed_reciprocal >> 16;
    at.h = first_head + (row - at.query * a.packed_heads);
    at.exists = at.query < packed_queries<rows>(a);
    return at;
}
