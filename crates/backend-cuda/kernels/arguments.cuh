// Argument structures of the kernels. `src/arguments.rs` mirrors them field by field.
#pragma once

#include "primitives.cuh"

// A tensor [batch, row, head, dim]: address and strides. Strides count elements, or 2-byte units
// where a comment says so. A broadcast axis has stride 0.
struct Tensor {
    u64 at;
    i64 batch, row, head, dim;
};

// Block-sparse mask: for every plane (batch row × head, or fewer if the mask is shared) and every
// tile, a list of runs of visible tiles of the other side.
struct BlockMask {
    u64 starts;  // u32 [planes][lists] and the end of the last list: first run of every list
    u64 runs;    // TileRun []
    u64 bits;    // tile masks: one u64 a query row of a tile; bit j is key j of the tile
    u32 lists, per_batch, per_head;
    // Ranges of keys per tile, each with a list of its own: list tile · splits + range. More than
    // one only in a forward pass of few queries (split-KV decoding); otherwise a list is a tile.
    u32 splits;
};

// Consecutive tiles of the other side.
struct TileRun {
    u32 first, count;
    u32 mask_index;  // tile mask of a single partial tile; FULL_TILE: every pair is visible
};
#define FULL_TILE 0xffffffffu

enum Flag {
    HAS_BIAS = 1,
    HAS_CAP = 2,
    BIAS_BEFORE_CAP = 4,
    HAS_DROPOUT = 8,
    UNNORMALIZED = 16,
    HAS_SLOPES = 32,
    ADD = 64,  // accumulate into dk and dv instead of overwriting them
    QUERY_POSITIONS_PER_BATCH = 128,
    KEY_POSITIONS_PER_BATCH = 256,
    EMPTY_STATE = 512,     // no block has been attended to: acc, max, sum and ties have no contents
    WRITE_OUTPUTS = 1024,  // the last block: write outputs instead of acc, max, sum and ties
    PARTIAL = 2048,        // of the row kernels: results are partial, and not rounded
};

// Outputs of a forward pass for every row: Sum [batch, row, head]. at = 0 of max and sum if they
// are not wanted.
struct RowOutputs {
    Tensor lse, max, sum;
};

// Arguments of every tile kernel: this rank's queries and one block of keys.
struct Attention {
    Tensor q, k, v, bias, dout;
    Tensor dk, dv;      // Sum
    Tensor
        statistics;  // Sum [batch, row, head, 4]: max, 1 / sum, Δ, share; strides in 2-byte units
    u64 acc;            // Sum [batch, row, head, value_dim]
    u64 dq;             // Sum [batch, row, head, head_dim]
    u64 max, sum, ties; // Sum [batch, head, row]
    u64 dbias;          // Sum [bias_batch, bias_heads, bias_rows, bias_keys]
    BlockMask block_mask;
    u64 query_rows, key_rows;            // u64: global row numbers (bias columns, dropout)
    u64 query_positions, key_positions;  // i64: positions (ALiBi)
    u64 slopes;                          // double, one per query head (ALiBi)
    double scale, cap, keep_scale;
    u32 queries, keys;
    u32 batches, q_heads, kv_heads, head_dim, value_dim;
    u32 flags, rounding;
    u32 dropout_low, dropout_high, dropout_threshold;
    u32 dropout_first_head, dropout_q_heads;  // in the attention of which these heads are a part
    u32 bias_batch, bias_heads, bias_rows, bias_keys;
    // GQA packing (forward only): query heads per tile, and ⌈2¹⁶ / packed_heads⌉.
    u32 packed_heads, packed_reciprocal;
    // Outputs, with WRITE_OUTPUTS: Element; Sum [batch, row, head], as in RowArguments.
    Tensor out;
    RowOutputs of_rows;
};

// Arguments of the kernels that process one query row without its keys (rows.cuh).
struct RowArguments {
    Tensor out, dout;    // Element
    // Sum [batch, head, row, 1], strides under the names `head` and `row`; at = 0 where absent
    Tensor lse, max, sum, ties, dlse;
    Tensor sinks;        // Sum; axis `head` is the line (one per head, or one), axis `row` the sink
    Tensor dsinks;       // as sinks
    Tensor statistics;   // as in Attention
    u64 acc, row_max, row_sum, row_ties;
    u32 queries, batches, q_heads, value_dim;
    u32 sinks_count, sinks_lines, flags, reserved;
};

// Copies one tensor to another of the same shape.
struct Copy {
    Tensor from, to;
    u32 batches, rows, heads, dim;
};

// Writes one value to `count` sums.
struct Fill {
    u64 at, count;
    double value;
};

// Copies or adds ranges of gradient records. `ranges` is u64 [count][3]: first record in `to`,
// first record in `from`, number of records.
struct Combine {
    u64 to, from, ranges;
    u64 record_sums;  // sums per record
    u32 add, reserved;
};

// Merges the partial results of all ranges of keys into the state of the pass. Partial results are
// arrays like those of the state, one range after the other.
struct Merge {
    u64 acc, max, sum, ties;
    u64 split_acc, split_max, split_sum, split_ties;
    Tensor out;  // as in Attention
    RowOutputs of_rows;
    u32 batches, queries, q_heads, value_dim;
    u32 splits, flags;
};

// Copies several byte ranges of a buffer to the front of another one, or back. Mirrored in
// `staged.rs` of annulus-device-cuda.
struct ByteRange {
    u64 start, at, bytes;  // offset in the buffer, offset in the packed one, length
};
struct RangeCopy {
    u64 buffer, packed;
    u64 table;  // ByteRange [ranges]; 0: they are in `few`
    u32 gathers, reserved;  // 1: from the buffer to the packed one; 0: back
    ByteRange few[32];
};
static_assert(sizeof(RangeCopy) == 800, "as in staged.rs");
