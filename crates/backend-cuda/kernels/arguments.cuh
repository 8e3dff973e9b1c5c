// What kernels are given: mirrored field by field in src/arguments.rs.
#pragma once

#include "primitives.cuh"

// A tensor [batch, row, head, dim]: address, and strides in elements (in 2-byte units where the text says so). An axis that is broadcast
// has stride 0.
struct Tensor {
    u64 at;
    i64 batch, row, head, dim;
};

// Who sees whom, by tiles: for every plane and every tile a list of runs.
struct Sight {
    u64 starts;  // u32 [planes][tiles], and the end of the last list
    u64 runs;    // Run
    u64 bits;    // u64 a query row of a tile; bit j is key j of the tile
    u32 tiles, per_batch, per_head, reserved;
};

// Neighbouring tiles of the other side.
struct Run {
    u32 first, count;
    u32 bits;  // which set of bits, if it is one tile of which some pairs are hidden; EVERYTHING: all pairs
};
#define EVERYTHING 0xffffffffu

enum Flag {
    HAS_BIAS = 1,
    HAS_CAP = 2,
    BIAS_BEFORE_CAP = 4,
    HAS_DROPOUT = 8,
    UNNORMALIZED = 16,
    HAS_SLOPES = 32,
    ADD = 64,                  // dk, dv are added to what is there
    QUERY_POSITIONS_PER_BATCH = 128,
    KEY_POSITIONS_PER_BATCH = 256,
};

// Everything about queries and one block of keys.
struct Attention {
    Tensor q, k, v, bias, dout;
    Tensor dk, dv;      // Sum
    Tensor statistics;  // Sum [batch, row, head, 4]: lse, max, delta, share; strides in 2-byte units
    u64 acc;            // Sum [batch, row, head, value_dim]
    u64 dq;             // Sum [batch, row, head, head_dim]
    u64 max, sum, ties; // Sum [batch, head, row]
    u64 dbias;          // Sum [bias_batch, bias_heads, bias_rows, bias_keys]
    Sight sight;
    u64 query_rows, key_rows;            // u64: row numbers in the whole sequence
    u64 query_positions, key_positions;  // i64
    u64 slopes;                          // double, one a query head
    double scale, cap, keep_scale;
    u32 queries, keys;
    u32 batches, q_heads, kv_heads, head_dim, value_dim;
    u32 flags, rounding;
    u32 dropout_low, dropout_high, dropout_threshold;
    u32 bias_batch, bias_heads, bias_rows, bias_keys;
    // Of forward: how many query heads share the rows of a tile, and 2¹⁶ divided by that, rounded up.
    u32 packed_heads, packed_reciprocal;
};

// Rows without their keys: the end of forward, the beginning and the end of backward.
struct Ends {
    Tensor out, dout;    // Element
    Tensor lse, max, sum, ties, dlse;  // Sum [batch, head, row, 1]: the strides named row and head are theirs; at = 0 where absent
    Tensor sinks;        // Sum; the axis named head is the line, row the sink
    Tensor dsinks;       // likewise
    Tensor statistics;   // as in Attention
    u64 acc, row_max, row_sum, row_ties;
    u32 queries, batches, q_heads, value_dim;
    u32 sinks_count, sinks_lines, flags, reserved;
};

// A tensor to a tensor.
struct Copy {
    Tensor from, to;
    u32 batches, rows, heads, dim;
};

// One value everywhere.
struct Fill {
    u64 at, count;
    double value;
};

// Ranges of gradient records: places is u64 [count][3]: first record in `to`, first in `from`, how many.
struct Combine {
    u64 to, from, places;
    u64 record;  // sums a record
    u32 add, reserved;
};
