/*
 * annulus: exact attention, forward and backward, over sequences that do not fit one device.
 *
 * annulus_options -> annulus_attention -> annulus_plan -> annulus_forward, annulus_backward
 *                                      -> annulus_cache -> annulus_cache_append, _attend
 *                    annulus_endpoint, for several plans and caches over MPI
 *
 * Every function that can fail returns a status: 0, or a number whose text is that of
 * annulus_error_string and whose details are those of annulus_last_error. Statuses from 1 to 19 are
 * the caller's fault and leave the plan usable, 20 to 39 are resources, from 40 on the plan is dead.
 * "Collective" means that all ranks make the call in the same order; "local" that one rank can.
 * Structs begin with their size, so that fields can be appended; set everything else to 0, or by
 * annulus_options_init. Units: strides in elements, times in seconds, sizes in bytes.
 *
 * Define ANNULUS_WITH_MPI before including this header to declare annulus_plan_create_mpi,
 * annulus_cache_create_mpi and annulus_endpoint_create_mpi. Define ANNULUS_MPI_ABI too if the
 * library has the feature mpi-abi.
 *
 * Made by cbindgen from crates/capi/src.
 */


#ifndef ANNULUS_H
#define ANNULUS_H

#include <stdint.h>
#ifdef ANNULUS_WITH_MPI
#include <mpi.h>
#endif

/**
 * The call succeeded.
 */
#define ANNULUS_SUCCESS 0

/**
 * An argument has a value or shape without meaning. Nothing was written; the plan lives.
 */
#define ANNULUS_INVALID_ARGUMENT 1

/**
 * A meaningful combination that this build cannot compute. Nothing was written; the plan lives.
 */
#define ANNULUS_UNSUPPORTED 2

/**
 * A collective call was given different arguments on different ranks. The same error on every
 * rank; nothing was written; the plan lives.
 */
#define ANNULUS_RANK_MISMATCH 3

/**
 * Another rank refused its arguments. Nothing was written; the plan lives.
 */
#define ANNULUS_REFUSED 4

/**
 * Memory could not be allocated.
 */
#define ANNULUS_OUT_OF_MEMORY 20

/**
 * A file could not be read or written.
 */
#define ANNULUS_IO 21

/**
 * A rank has not made a collective call within the arrival deadline. Nothing was done; the plan
 * lives, and this rank makes the same call again.
 */
#define ANNULUS_ARRIVAL_TIMEOUT 22

/**
 * A device or a thread failed. The plan is dead.
 */
#define ANNULUS_DEVICE 40

/**
 * A transfer failed. The plan is dead.
 */
#define ANNULUS_COMM 41

/**
 * Within a call a rank was silent, or the whole ring made no progress, for the deadline. The plan
 * is dead.
 */
#define ANNULUS_TIMEOUT 42

/**
 * The connection to a rank is lost. The plan is dead.
 */
#define ANNULUS_PEER_LOST 43

/**
 * Another rank failed and ended the call. The plan is dead.
 */
#define ANNULUS_ABORTED 44

/**
 * An earlier call ended this plan.
 */
#define ANNULUS_POISONED 45

/**
 * A defect of annulus, to be reported. The plan is dead.
 */
#define ANNULUS_INTERNAL 46

/**
 * Version of the binary interface: the number in the SONAME of the library.
 *
 * It changes when a function, a constant or a field of a struct changes or disappears. Added
 * functions, and fields at the end of structs that begin with their size, do not change it.
 */
#define ANNULUS_ABI_VERSION 1

/**
 * 32-bit IEEE; sums, lse, bias and sinks in f32.
 */
#define ANNULUS_F32 1

/**
 * 64-bit IEEE; sums, lse, bias and sinks in f64.
 */
#define ANNULUS_F64 2

/**
 * 16-bit IEEE; sums, lse, bias and sinks in f32.
 */
#define ANNULUS_F16 3

/**
 * bfloat16; sums, lse, bias and sinks in f32.
 */
#define ANNULUS_BF16 4

/**
 * Signed 8-bit integer, for `attention_mask`.
 */
#define ANNULUS_I8 5

/**
 * Signed 16-bit integer, for `attention_mask`.
 */
#define ANNULUS_I16 6

/**
 * Signed 32-bit integer, for segment ids, `cum_seqlens` and `attention_mask`.
 */
#define ANNULUS_I32 7

/**
 * Signed 64-bit integer, for positions, `cum_seqlens` and `attention_mask`.
 */
#define ANNULUS_I64 8

/**
 * Unsigned 8-bit integer, for `attention_mask`.
 */
#define ANNULUS_U8 9

/**
 * One byte that is 0 (false) or not, as `bool` of C, for `attention_mask`.
 */
#define ANNULUS_BOOL 10

/**
 * No limit: a side of the sliding window that is open, or no prefix.
 */
#define ANNULUS_NONE -1

/**
 * Query i has position i.
 */
#define ANNULUS_ALIGN_TOP_LEFT 0

/**
 * Query i has position i + kv_len - q_len.
 */
#define ANNULUS_ALIGN_BOTTOM_RIGHT 1

/**
 * cap * tanh(x / cap) + bias.
 */
#define ANNULUS_BIAS_AFTER_SOFT_CAP 0

/**
 * cap * tanh((x + bias) / cap).
 */
#define ANNULUS_BIAS_BEFORE_SOFT_CAP 1

/**
 * No product is rounded, except on matrix units of GPUs: 16-bit probabilities.
 */
#define ANNULUS_PRECISION_HIGHEST 0

/**
 * Products may be split in three terms.
 */
#define ANNULUS_PRECISION_HIGH 1

/**
 * Probabilities of bf16 inputs may be rounded to bf16 before they are multiplied.
 */
#define ANNULUS_PRECISION_DEFAULT 2

/**
 * Keys and values travel again, their gradients one step behind.
 */
#define ANNULUS_BACKWARD_ONE_PASS 0

/**
 * Keys and values travel for dq, then queries for dk and dv.
 */
#define ANNULUS_BACKWARD_TWO_PASS 1

/**
 * The mask chooses the layout.
 */
#define ANNULUS_LAYOUT_AUTO 0

/**
 * Rank r holds one range of rows.
 */
#define ANNULUS_LAYOUT_CONTIGUOUS 1

/**
 * Of 2 * ranks chunks of rows, rank r holds chunks r and 2 * ranks - 1 - r.
 */
#define ANNULUS_LAYOUT_ZIGZAG 2

/**
 * Rank r holds rows r, r + ranks, r + 2 * ranks and so on.
 */
#define ANNULUS_LAYOUT_STRIPED 3

/**
 * The layout of
 * annulus_attention_set_custom_layout.
 */
#define ANNULUS_LAYOUT_CUSTOM 4

/**
 * Equal rows and balanced work on every rank, for the documents of
 * annulus_attention_set_balanced_layout.
 */
#define ANNULUS_LAYOUT_BALANCED 5

/**
 * The mask and the nodes choose the route.
 */
#define ANNULUS_ROUTE_AUTO 0

/**
 * Blocks travel from rank r to rank r + 1.
 */
#define ANNULUS_ROUTE_RELAY_UP 1

/**
 * Blocks travel from rank r to rank r - 1.
 */
#define ANNULUS_ROUTE_RELAY_DOWN 2

/**
 * Blocks travel from their owner to each rank that needs them.
 */
#define ANNULUS_ROUTE_DIRECT 3

/**
 * As RELAY_UP, around the ranks of each node, then from all of them to the same ranks of the next
 * node. The nodes have as many ranks each.
 */
#define ANNULUS_ROUTE_RAILS_UP 4

/**
 * As RAILS_UP, in the other direction.
 */
#define ANNULUS_ROUTE_RAILS_DOWN 5

/**
 * Blocks travel from their owner to one rank of each node, and on to the others of the node that
 * need them. The nodes have as many ranks each.
 */
#define ANNULUS_ROUTE_ONCE_PER_NODE 6

/**
 * Every rank has all heads of its queries; keys and values circulate over all ranks.
 */
#define ANNULUS_STRATEGY_RING 0

/**
 * Groups of options.strategy_heads ranks divide the heads; keys and values of these heads
 * circulate over the groups.
 */
#define ANNULUS_STRATEGY_HEADS_RING 1

/**
 * The strategy that sends the fewest bytes in a forward and a backward pass.
 */
#define ANNULUS_STRATEGY_AUTO 2

/**
 * options.strategy_heads x strategy_queries x strategy_keys ranks: each computes partial results
 * of a part of the queries over a part of the keys, which are merged.
 */
#define ANNULUS_STRATEGY_GRID 3

/**
 * All-gather of keys and values: the ring with ANNULUS_ROUTE_DIRECT, whose blocks are all received
 * from the start of a pass on, unless options.receive_ahead says otherwise.
 */
#define ANNULUS_STRATEGY_ALL_GATHER 4

/**
 * All-to-all over heads among all ranks: HEADS_RING with one group.
 */
#define ANNULUS_STRATEGY_ALL_TO_ALL 5

/**
 * The ring with ANNULUS_ROUTE_ONCE_PER_NODE.
 */
#define ANNULUS_STRATEGY_ONCE_PER_NODE 6

/**
 * Queries travel and partial results return: GRID with one part of heads and queries, and as many
 * of the keys as there are ranks.
 */
#define ANNULUS_STRATEGY_PASS_Q 7

/**
 * The cores of the CPU, by SIMD.
 */
#define ANNULUS_BACKEND_CPU 0

/**
 * A GPU through Vulkan, Metal or DX12. Not with ANNULUS_F64.
 */
#define ANNULUS_BACKEND_WGPU 1

/**
 * NVIDIA GPUs.
 */
#define ANNULUS_BACKEND_CUDA 2

/**
 * AMD GPUs.
 */
#define ANNULUS_BACKEND_HIP 3

/**
 * The forward pass.
 */
#define ANNULUS_PASS_FORWARD 0

/**
 * The backward pass.
 */
#define ANNULUS_PASS_BACKWARD 1

/**
 * Tiles of one block of keys and values (in a two-pass backward also of queries), or of a part.
 */
#define ANNULUS_ACTIVITY_COMPUTE 0

/**
 * Messages that were posted together, from their post until the rank found them sent.
 */
#define ANNULUS_ACTIVITY_SEND 1

/**
 * Exposed communication: the rank waited for messages.
 */
#define ANNULUS_ACTIVITY_WAIT 2

/**
 * The mask depends on the query head.
 */
#define ANNULUS_MASK_PER_HEAD 1

/**
 * The mask depends on the batch row other than through positions.
 */
#define ANNULUS_MASK_PER_BATCH 2

/**
 * The description of an attention. Opaque.
 */
typedef struct annulus_attention annulus_attention;

/**
 * A KV cache for decoding and chunked prefill, whose rows are sharded over ranks. Opaque.
 */
typedef struct annulus_cache annulus_cache;

/**
 * A duplicate of a communicator, which several plans and caches share. Opaque.
 */
typedef struct annulus_endpoint annulus_endpoint;

/**
 * A plan: made once, used for many passes. Opaque.
 */
typedef struct annulus_plan annulus_plan;

/**
 * The definition of one attention. annulus_options_init sets the
 * defaults; the caller then sets the seven lengths and what differs.
 *
 * A pair of query and key is visible if every condition that is given holds; i' and j' are their
 * positions. docs/semantics.md defines every parameter. Flags are 0 or 1.
 */
typedef struct annulus_options {
  /**
   * sizeof(annulus_options).
   */
  uint64_t struct_size;
  /**
   * Independent problems, at least 1.
   */
  int64_t batch;
  /**
   * Queries of the whole sequence, over all ranks; may be 0. With a KV cache it must be 0.
   */
  int64_t q_len;
  /**
   * Keys of the whole sequence, over all ranks; may be 0. With a KV cache it must be 0.
   */
  int64_t kv_len;
  /**
   * Query heads, a multiple of kv_heads.
   */
  int64_t q_heads;
  /**
   * Key and value heads, at least 1.
   */
  int64_t kv_heads;
  /**
   * Elements of a query and of a key, 1 to 1024.
   */
  int64_t head_dim;
  /**
   * Elements of a value and of an output, 1 to 1024.
   */
  int64_t value_dim;
  /**
   * Element type of q, k, v, out and their gradients: ANNULUS_F32 (default), ANNULUS_F64,
   * ANNULUS_F16 or ANNULUS_BF16.
   */
  int32_t dtype;
  /**
   * Flag: visible only if j' <= i'. Default: 0.
   */
  int32_t causal;
  /**
   * Visible only if i' - window_left <= j'. Default: ANNULUS_NONE, an open side.
   */
  int64_t window_left;
  /**
   * Visible only if j' <= i' + window_right. Default: ANNULUS_NONE, an open side.
   */
  int64_t window_right;
  /**
   * Keys with j' below this number are exempt from the window, and from nothing else. Without a
   * window it must be 0. Default: 0.
   */
  int64_t attention_sink_size;
  /**
   * Visible only if i' and j' are in the same chunk of this many positions and j' <= i'.
   * Default: 0, which is no chunks.
   */
  int64_t chunk_size;
  /**
   * Prefix-LM: visible only if j' < prefix_len or j' <= i'. Default: ANNULUS_NONE, no such
   * condition.
   */
  int64_t prefix_len;
  /**
   * Positions of queries among the keys: ANNULUS_ALIGN_TOP_LEFT (default) or BOTTOM_RIGHT.
   */
  int32_t alignment;
  /**
   * Order of bias and soft cap: ANNULUS_BIAS_AFTER_SOFT_CAP (default) or BEFORE_SOFT_CAP.
   */
  int32_t bias_order;
  /**
   * Flag: softmax_scale is the factor of q * k. Default: 0, the factor is 1 / sqrt(head_dim).
   */
  int32_t has_softmax_scale;
  /**
   * Flag: out is not divided by the row sum; max, sum and ties are outputs too. Default: 0.
   */
  int32_t unnormalized;
  /**
   * Factor of q * k, finite. Must be 0 unless has_softmax_scale is set.
   */
  double softmax_scale;
  /**
   * cap in cap * tanh(x / cap), finite and above 0. Default: 0, which is no cap.
   */
  double logits_soft_cap;
  /**
   * Shape of the additive bias tensor over the whole sequence, `[batch or 1, q_heads or 1, q_len
   * or 1, kv_len or 1]`. Default: zeros, no bias.
   */
  int64_t bias_dims[4];
  /**
   * Learnable attention sinks of a head. Default: 0, none.
   */
  int64_t sinks;
  /**
   * Flag: every query head has sinks of its own. Default: 0, all share them.
   */
  int32_t sinks_per_head;
  /**
   * Type to which q * k is rounded before scale, bias and cap. Default: 0, the accumulator's.
   */
  int32_t logits_dtype;
  /**
   * Probability with which a pair is dropped, 0 <= p < 1. Default: 0.
   */
  double dropout_prob;
  /**
   * Seed of dropout, an unsigned 64-bit number. Must be 0 if dropout_prob is 0. Default: 0.
   */
  uint64_t dropout_seed;
  /**
   * Rounding of products that is permitted: ANNULUS_PRECISION_HIGHEST (default), HIGH or
   * DEFAULT.
   */
  int32_t precision;
  /**
   * Form of the backward pass: ANNULUS_BACKWARD_ONE_PASS (default) or TWO_PASS.
   */
  int32_t backward_mode;
  /**
   * Flag: no backward pass follows, which needs less memory. Default: 0.
   */
  int32_t forward_only;
  /**
   * Flag: dsoftmax_aux, and dbias broadcast over queries, are each rank's own part instead of
   * the sum over ranks. Default: 0.
   */
  int32_t local_gradients;
  /**
   * Assignment of rows to ranks: ANNULUS_LAYOUT_AUTO (default), CONTIGUOUS, ZIGZAG, STRIPED,
   * CUSTOM or BALANCED.
   */
  int32_t layout;
  /**
   * Route of the blocks: ANNULUS_ROUTE_AUTO (default), RELAY_UP, RELAY_DOWN, DIRECT, RAILS_UP,
   * RAILS_DOWN or ONCE_PER_NODE.
   */
  int32_t route;
  /**
   * Longest silence of a rank within a call before the call fails, in seconds, at least 1.
   * ANNULUS_DEADLINE in the environment replaces it. A plan over several processes is made only
   * if all ranks begin to make it within this time. Default: 0, which is 120 s.
   */
  double deadline_seconds;
  /**
   * Threads that each rank computes with on the CPU. Default: 0, which is 1. With another
   * backend it must be 0.
   */
  int64_t threads;
  /**
   * Hint: a KV block is split into messages at multiples of this many rows, so that computing on
   * one part overlaps receiving the next. Larger parts are fewer and longer messages; results
   * change by rounding at most, and not with one rank. Ranks may differ: all use the largest.
   * Default: 0, which is the KV tile of the backend, to multiples of which it is rounded up.
   */
  int64_t kv_block_size;
  /**
   * Longest wait at the entry of a collective call (a plan, an update, a pass) for ranks that
   * have not made it, in seconds, at least 1. Then the call fails with ANNULUS_ARRIVAL_TIMEOUT
   * (`ArrivalTimeout` in Python); an update or a pass has changed nothing and is made again with
   * the same arguments, within the deadline of the other ranks. Default: 0, which is no limit.
   */
  double arrival_deadline_seconds;
  /**
   * Flag: the communicator of a plan over MPI is a duplicate that the host has made for it. The
   * plan takes it over: the host neither uses nor frees it afterwards, also if the call fails,
   * and nothing is called on any other communicator. Default: 0, the plan makes a duplicate.
   */
  int32_t adopt_communicator;
  /**
   * Flag: results have the same bits for any number of ranks, layout, transport and threads, on
   * machines of the same arithmetic (numerics of the command `annulus doctor`). A backward pass
   * takes two passes around the ring, about 1.4 times the time. Default: 0.
   */
  int32_t reproducible;
  /**
   * Division of the attention among ranks: ANNULUS_STRATEGY_RING (default), HEADS_RING, AUTO,
   * GRID, ALL_GATHER, ALL_TO_ALL, ONCE_PER_NODE or PASS_Q. Results differ by rounding at most.
   */
  int32_t strategy;
  /**
   * Ranks of a group of ANNULUS_STRATEGY_HEADS_RING, or parts of the heads of
   * ANNULUS_STRATEGY_GRID, at least 1: a divisor of the number of ranks and of q_heads, and a
   * divisor or a multiple of kv_heads. With other strategies it must be 0. Default: 0.
   */
  int32_t strategy_heads;
  /**
   * Parts of the queries of ANNULUS_STRATEGY_GRID, at least 1. With other strategies it must be
   * 0. Default: 0.
   */
  int32_t strategy_queries;
  /**
   * Parts of the keys of ANNULUS_STRATEGY_GRID, at least 1. With other strategies it must be 0.
   * Default: 0.
   */
  int32_t strategy_keys;
  /**
   * Rows of a page of a KV cache (annulus_cache), at least 1; in the reproducible order 256
   * times a power of two. With plans it must be 0. Default: 0, which is 64, or 256 in the
   * reproducible order.
   */
  int64_t page_rows;
  /**
   * What computes: ANNULUS_BACKEND_CPU (default), WGPU, CUDA or HIP. Tensors are in host memory
   * on each, unless annulus_attention_set_cuda_stream is called. The plans share the GPU.
   * annulus_attention_create refuses a backend that the library (annulus_features) or the
   * machine does not have.
   */
  int32_t backend;
  /**
   * Flag: device is the number of the GPU. Default: 0, which is the GPUs of a node, round robin
   * over its ranks; with WGPU the first and those of its kind.
   */
  int32_t has_device;
  /**
   * Number of the GPU, as `annulus doctor` lists them. Must be 0 unless has_device is set.
   */
  int64_t device;
  /**
   * Ring steps by which a rank posts the receive of a block ahead of the step that computes on
   * it, equal on all ranks. Each step but the first takes the memory of one more block, and in a
   * backward pass of its gradients; with 2, a rank does not wait for a neighbour that is late by
   * less than a step. On a direct route, as many receives are posted as fit into that memory.
   * Results are the same, bit for bit. Default: 0, which is 1, and 4 on a balanced layout.
   */
  int64_t receive_ahead;
  /**
   * Flag: the plan also has a JVP and a double backward: derivatives of the outputs along a
   * direction, and gradients of gradients. On the CPU, with one key column (`ring`, `heads:H`);
   * not with `reproducible`, nor of an output that is not normalised. Default: 0.
   */
  int32_t second_derivatives;
  /**
   * Flag: every forward pass writes statistics of the scores too, by row, and by head over all
   * ranks: the largest scale * q * k, the largest score, the entropy of the probabilities.
   * Default: 0.
   */
  int32_t statistics;
} annulus_options;

/**
 * One pair of query and key, as a callback gets it.
 */
typedef struct annulus_pair {
  /**
   * Batch row. 0 for a mask without ANNULUS_MASK_PER_BATCH.
   */
  int64_t batch;
  /**
   * Query head. 0 for a mask without ANNULUS_MASK_PER_HEAD.
   */
  int64_t head;
  /**
   * Row number of the query in the whole sequence.
   */
  int64_t q_row;
  /**
   * Row number of the key in the whole sequence.
   */
  int64_t kv_row;
  /**
   * Position i' of the query.
   */
  int64_t q_position;
  /**
   * Position j' of the key.
   */
  int64_t kv_position;
} annulus_pair;

/**
 * Returns 1 if the pair is visible, 0 if it is masked.
 *
 * A pure function: called any number of times, from several threads at once, during plan_create,
 * plan_update, forward and backward. It does not unwind and calls no function of annulus.
 */
typedef int32_t (*annulus_mask_function)(void *context, const struct annulus_pair *pair);

/**
 * Returns the bias of the pair; -INFINITY masks it. Rules: as annulus_mask_function.
 */
typedef double (*annulus_bias_function)(void *context, const struct annulus_pair *pair);

/**
 * A tensor of the caller's, read or written in place.
 *
 * The element with the indices i is at `data + sum(i[a] * strides[a])`, in elements. Axes beyond
 * those of a tensor have length 1: lse is `[batch, heads, seq, 1]`, segment ids
 * `[batch, rows, 1, 1]`. The stride of an axis of length 1 is not read.
 *
 * Strides are 0 or more. A stride of 0 repeats an input; an output has no two indices for one
 * element. `data` is a multiple of the size of an element; it may be NULL if a length is 0.
 */
typedef struct annulus_tensor {
  /**
   * First element.
   */
  void *data;
  /**
   * Element type, `ANNULUS_F32` to `ANNULUS_BOOL`.
   */
  int32_t dtype;
  /**
   * Lengths of the axes.
   */
  int64_t dims[4];
  /**
   * Distance of neighbours along each axis, in elements.
   */
  int64_t strides[4];
} annulus_tensor;

/**
 * The part of a batch that decides which pairs are visible. NULL: no such condition.
 *
 * Over MPI, `rows` are the rows of the calling rank in its local order; in an
 * in-process ring they are all rows.
 */
typedef struct annulus_batch {
  /**
   * sizeof(annulus_batch).
   */
  uint64_t struct_size;
  /**
   * `[batch, q rows, 1, 1]`, ANNULUS_I32. A pair is visible only if both ids are equal and not
   * negative. Ids of one side serve for both if the lengths agree.
   */
  const struct annulus_tensor *q_segment_ids;
  /**
   * `[batch, kv rows, 1, 1]`, ANNULUS_I32.
   */
  const struct annulus_tensor *kv_segment_ids;
  /**
   * Positions i', `[batch, q rows, 1, 1]`, ANNULUS_I64. Default: row numbers.
   */
  const struct annulus_tensor *q_positions;
  /**
   * Positions j', `[batch, kv rows, 1, 1]`, ANNULUS_I64. Default: row numbers.
   */
  const struct annulus_tensor *kv_positions;
  /**
   * `[batch or 1, q_heads or 1, q rows, all keys]`, an integer type or ANNULUS_BOOL. A pair is
   * visible only if its element is not 0.
   */
  const struct annulus_tensor *attention_mask;
  /**
   * `[sequences + 1, 1, 1, 1]`, ANNULUS_I32 or ANNULUS_I64: first rows of packed sequences and
   * the end of the last, ascending from 0, whole on every rank. Lengths of one side serve for
   * both if q_len = kv_len.
   */
  const struct annulus_tensor *cum_seqlens_q;
  /**
   * `[sequences + 1, 1, 1, 1]`, ANNULUS_I32 or ANNULUS_I64.
   */
  const struct annulus_tensor *cum_seqlens_k;
  /**
   * `[batch or 1, groups, q rows + 1, 1]`, ANNULUS_I32 or ANNULUS_I64: list n of a group of query
   * heads has the entries offsets[n] to offsets[n + 1] - 1; groups follow each other. A pair is
   * visible only if it is listed.
   */
  const struct annulus_tensor *key_list_offsets;
  /**
   * `[entries, 1, 1, 1]`, ANNULUS_I32 or ANNULUS_I64: global key rows, ascending in each list.
   */
  const struct annulus_tensor *key_list_indices;
  /**
   * As key_list_indices: an entry is then the range of keys from its index to before its end.
   * NULL: an entry is one key.
   */
  const struct annulus_tensor *key_list_ends;
  /**
   * `[listed pairs, 1, 1, 1]`, ANNULUS_F32 or ANNULUS_F64: one number that is added to the score
   * of each listed pair. Its gradient: annulus_plan_list_bias_gradient. NULL: 0.
   */
  const struct annulus_tensor *key_list_bias;
} annulus_batch;

/**
 * Is called, on a thread that waits within a call of annulus, when rank `peer` has been silent for
 * `waited_seconds`, a quarter of the deadline, in ring step `step`: once per silence. At the entry
 * of a collective call, in every quarter of the deadline, with a rank that has not made the call.
 * While a plan over MPI waits for ranks that have not begun to make it, every 30 s with -1 as
 * `peer`.
 */
typedef void (*annulus_silence_function)(void *context,
                                         int64_t peer,
                                         int64_t step,
                                         double waited_seconds);

/**
 * One activity of one rank in a pass. Times are seconds since the pass began on this rank.
 */
typedef struct annulus_step_event {
  /**
   * sizeof(annulus_step_event) in the library.
   */
  uint64_t struct_size;
  /**
   * The rank.
   */
  int64_t rank;
  /**
   * An ANNULUS_PASS constant.
   */
  int32_t pass;
  /**
   * An ANNULUS_ACTIVITY constant.
   */
  int32_t activity;
  /**
   * Ring step. A two-pass backward counts from 0 twice.
   */
  int64_t step;
  /**
   * Payload bytes of ANNULUS_ACTIVITY_SEND, otherwise 0. Their sum over a pass is that of
   * annulus_plan_predicted_bytes.
   */
  uint64_t bytes;
  /**
   * Floating-point operations of ANNULUS_ACTIVITY_COMPUTE, otherwise 0: two for each
   * multiply-add of the matrix products, for visible pairs only. Pairs that only a dense mask or
   * a mask of the host's hides are counted.
   */
  double flops;
  /**
   * Start.
   */
  double begin_seconds;
  /**
   * End.
   */
  double end_seconds;
} annulus_step_event;

/**
 * Is called with every activity of a pass, on the thread of the rank, which in an in-process ring
 * of several ranks is not the caller's: by several threads at once. It does not unwind and calls
 * no function of annulus. `event` is valid during the call.
 */
typedef void (*annulus_step_function)(void *context, const struct annulus_step_event *event);

/**
 * The tensors of a forward pass. q_len and kv_len are those of the whole sequence in an in-process
 * ring, and the numbers of this rank's rows otherwise. T is the type of the options; A is f64 for
 * f64 and f32 for the others.
 */
typedef struct annulus_forward_args {
  /**
   * sizeof(annulus_forward_args).
   */
  uint64_t struct_size;
  /**
   * Input `[batch, q_len, q_heads, head_dim]`, T.
   */
  const struct annulus_tensor *q;
  /**
   * Input `[batch, kv_len, kv_heads, head_dim]`, T.
   */
  const struct annulus_tensor *k;
  /**
   * Input `[batch, kv_len, kv_heads, value_dim]`, T.
   */
  const struct annulus_tensor *v;
  /**
   * Input, A: options.bias_dims, with this rank's queries and all keys. NULL without a bias.
   */
  const struct annulus_tensor *bias;
  /**
   * Input `[q_heads or 1, sinks, 1, 1]`, A. NULL without sinks.
   */
  const struct annulus_tensor *softmax_aux;
  /**
   * Output `[batch, q_len, q_heads, value_dim]`, T.
   */
  const struct annulus_tensor *out;
  /**
   * Output `[batch, q_heads, q_len, 1]`, A: natural logarithm of the row sum of e^score.
   */
  const struct annulus_tensor *lse;
  /**
   * Output as lse: row maximum. NULL without sum, of a normalised output. A backward pass that
   * is given max and sum is exact also in rows whose scores share a large constant.
   */
  const struct annulus_tensor *max;
  /**
   * Output as lse: row sum of e^(score - max). NULL without max, of a normalised output.
   */
  const struct annulus_tensor *sum;
  /**
   * Output as lse: number of keys and sinks that share the maximum. NULL unless
   * options.unnormalized is set.
   */
  const struct annulus_tensor *ties;
  /**
   * Output as out: rounding residual of out, which is out before it was rounded - out, rounded.
   * NULL if it is not wanted; of f16 and bf16 only. A backward pass that is given it has no
   * error of the rounding of out.
   */
  const struct annulus_tensor *out_residual;
  /**
   * Output `[batch, q_heads, q_len, 3]`, A: of each row the largest scale * q * k before bias and
   * soft cap, the largest score after them, and the entropy of the probabilities. NULL unless
   * options.statistics is set.
   */
  const struct annulus_tensor *statistics;
  /**
   * Output `[q_heads, 3, 2, 1]`, A: maximum and mean of each of these over the rows of all ranks
   * that have a visible key. NULL unless options.statistics is set.
   */
  const struct annulus_tensor *head_statistics;
} annulus_forward_args;

/**
 * The tensors of a backward pass. Lengths and types: as of annulus_forward_args.
 */
typedef struct annulus_backward_args {
  /**
   * sizeof(annulus_backward_args).
   */
  uint64_t struct_size;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *q;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *k;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *v;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *bias;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *softmax_aux;
  /**
   * Input: output of the forward pass.
   */
  const struct annulus_tensor *out;
  /**
   * Input: output of the forward pass.
   */
  const struct annulus_tensor *lse;
  /**
   * Input: output of the forward pass. NULL without sum, of a normalised output: probabilities
   * are then e^(score - lse), wrong by a factor e^x with |x| up to 2^-24 |lse| in f32.
   */
  const struct annulus_tensor *max;
  /**
   * Input: output of the forward pass. NULL unless options.unnormalized is set.
   */
  const struct annulus_tensor *ties;
  /**
   * Input as out: gradient of the loss by out.
   */
  const struct annulus_tensor *dout;
  /**
   * Input as lse: gradient of the loss by lse. NULL: 0.
   */
  const struct annulus_tensor *dlse;
  /**
   * Output as q.
   */
  const struct annulus_tensor *dq;
  /**
   * Output as k.
   */
  const struct annulus_tensor *dk;
  /**
   * Output as v.
   */
  const struct annulus_tensor *dv;
  /**
   * Output as bias. NULL without a bias.
   */
  const struct annulus_tensor *dbias;
  /**
   * Output as softmax_aux. NULL without sinks.
   */
  const struct annulus_tensor *dsoftmax_aux;
  /**
   * Input: output of the forward pass. NULL without max, of a normalised output.
   */
  const struct annulus_tensor *sum;
  /**
   * Input: output of the forward pass. NULL: 0, so that dq of f16 and bf16 is off where all keys
   * share a large component.
   */
  const struct annulus_tensor *out_residual;
} annulus_backward_args;

/**
 * The tensors of a JVP. Lengths and types: as of annulus_forward_args.
 *
 * annulus_forward_args: crate::annulus_forward_args
 */
typedef struct annulus_jvp_args {
  /**
   * sizeof(annulus_jvp_args).
   */
  uint64_t struct_size;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *q;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *k;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *v;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *bias;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *softmax_aux;
  /**
   * Input as q: tangent of q.
   */
  const struct annulus_tensor *q_tangent;
  /**
   * Input as k: tangent of k.
   */
  const struct annulus_tensor *k_tangent;
  /**
   * Input as v: tangent of v.
   */
  const struct annulus_tensor *v_tangent;
  /**
   * Input as bias: tangent of bias. NULL: 0.
   */
  const struct annulus_tensor *bias_tangent;
  /**
   * Input as softmax_aux: tangent of softmax_aux. NULL: 0.
   */
  const struct annulus_tensor *softmax_aux_tangent;
  /**
   * Output, as in the forward pass. NULL if it is not wanted.
   */
  const struct annulus_tensor *out;
  /**
   * Output, as in the forward pass. NULL if it is not wanted.
   */
  const struct annulus_tensor *lse;
  /**
   * Output as out: tangent of out.
   */
  const struct annulus_tensor *out_tangent;
  /**
   * Output as lse: tangent of lse; 0 for a query without a visible key and without sinks.
   */
  const struct annulus_tensor *lse_tangent;
  /**
   * Input as the batch's key_list_bias: tangent of it. NULL: 0.
   */
  const struct annulus_tensor *key_list_bias_tangent;
} annulus_jvp_args;

/**
 * The tensors of a double backward. Lengths and types: as of annulus_forward_args.
 *
 * annulus_forward_args: crate::annulus_forward_args
 */
typedef struct annulus_double_backward_args {
  /**
   * sizeof(annulus_double_backward_args).
   */
  uint64_t struct_size;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *q;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *k;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *v;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *bias;
  /**
   * Input, as in the forward pass.
   */
  const struct annulus_tensor *softmax_aux;
  /**
   * Input, as in the backward pass.
   */
  const struct annulus_tensor *dout;
  /**
   * Input, as in the backward pass. NULL: 0.
   */
  const struct annulus_tensor *dlse;
  /**
   * Input as q: cotangent of the dq of the backward pass.
   */
  const struct annulus_tensor *q_cotangent;
  /**
   * Input as k: cotangent of its dk.
   */
  const struct annulus_tensor *k_cotangent;
  /**
   * Input as v: cotangent of its dv.
   */
  const struct annulus_tensor *v_cotangent;
  /**
   * Input as bias: cotangent of its dbias. NULL: 0.
   */
  const struct annulus_tensor *bias_cotangent;
  /**
   * Input as softmax_aux: cotangent of its dsoftmax_aux. NULL: 0.
   */
  const struct annulus_tensor *softmax_aux_cotangent;
  /**
   * Output as q: gradient with respect to q.
   */
  const struct annulus_tensor *dq;
  /**
   * Output as k: gradient with respect to k.
   */
  const struct annulus_tensor *dk;
  /**
   * Output as v: gradient with respect to v.
   */
  const struct annulus_tensor *dv;
  /**
   * Output as bias: gradient with respect to bias. NULL without a bias.
   */
  const struct annulus_tensor *dbias;
  /**
   * Output as softmax_aux: gradient with respect to softmax_aux. NULL without sinks.
   */
  const struct annulus_tensor *dsoftmax_aux;
  /**
   * Output as out: gradient with respect to dout.
   */
  const struct annulus_tensor *ddout;
  /**
   * Output as lse: gradient with respect to dlse.
   */
  const struct annulus_tensor *ddlse;
  /**
   * Input as the batch's key_list_bias: cotangent of its gradient. NULL: 0. The gradient with
   * respect to key_list_bias: annulus_plan_list_bias_gradient.
   */
  const struct annulus_tensor *key_list_bias_cotangent;
} annulus_double_backward_args;

/**
 * The tensors of annulus_cache_attend. T is the type of the options; A is f64 for f64 and f32
 * for the others.
 */
typedef struct annulus_attend_args {
  /**
   * sizeof(annulus_attend_args).
   */
  uint64_t struct_size;
  /**
   * Input `[batch, queries, q_heads, head_dim]`, T: the queries of the last cached rows.
   */
  const struct annulus_tensor *q;
  /**
   * Input `[q_heads or 1, sinks, 1, 1]`, A. NULL without sinks.
   */
  const struct annulus_tensor *softmax_aux;
  /**
   * Output `[batch, queries, q_heads, value_dim]`, T.
   */
  const struct annulus_tensor *out;
  /**
   * Output `[batch, q_heads, queries, 1]`, A: natural logarithm of the row sum of e^score.
   */
  const struct annulus_tensor *lse;
} annulus_attend_args;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the message of the last call that failed on the calling thread, as UTF-8; empty if none
 * has. It names the argument, what was given and what would have been accepted.
 *
 * The text lives until the next call that fails on this thread. Never NULL.
 */
const char *annulus_last_error(void);

/**
 * Returns a short text for a status, which never has to be freed; "unknown status" for a number
 * that is no status. Never NULL.
 */
const char *annulus_error_string(int status);

/**
 * Returns ANNULUS_ABI_VERSION of the library that is loaded. A program compares it with that
 * of its header.
 */
int annulus_abi_version(void);

/**
 * Returns the version of the library, such as "0.1.0", which never has to be freed.
 */
const char *annulus_version(void);

/**
 * Returns the features that the library was built with, separated by spaces: "mpi" for rings over
 * MPI, and "mpi-abi" if that is loaded at run time; "cuda" and "wgpu" for the backends, "nccl" for
 * communicators of NCCL. The text never has to be freed.
 */
const char *annulus_features(void);

/**
 * Sets the defaults of all options, and `struct_size`.
 *
 * `struct_size` is sizeof(annulus_options) of the header that the program was compiled with.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT for NULL or a size that no version of the struct has.
 *
 * Safety
 * `options` is NULL or points to `struct_size` writable bytes.
 */
int annulus_options_init(struct annulus_options *options, uint64_t struct_size);

/**
 * Describes an attention: checks the options and returns a handle in `*attention`.
 *
 * Local. The handle is destroyed by annulus_attention_destroy; plans that were made of it live
 * on. `*attention` is NULL if the call fails.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, with the name of the option; ANNULUS_UNSUPPORTED for an option of a
 * newer header.
 *
 * Safety
 * `options` points to initialised options, `attention` to a writable pointer.
 */
int annulus_attention_create(const struct annulus_options *options,
                             struct annulus_attention **attention);

/**
 * Adds a mask of the host's, as one more condition.
 *
 * `name` identifies the mask: ranks compare it, so two functions that differ, and two contexts
 * that differ, have two names. `flags` is a sum of ANNULUS_MASK_PER_HEAD and
 * ANNULUS_MASK_PER_BATCH; without them the function is called once for all heads and batch rows.
 * `context` is passed back.
 *
 * The function and its context must live until this attention and all plans that were made of it
 * are destroyed. See annulus_mask_function for what it may do.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `name` is a text that ends with a zero byte, and the function is as said.
 */
int annulus_attention_add_mask(struct annulus_attention *attention,
                               const char *name,
                               uint32_t flags,
                               annulus_mask_function visible,
                               void *context);

/**
 * Adds a neighbourhood on a grid of one to three axes, whose points are the positions in row-major
 * order, as one more condition (docs/semantics.md).
 *
 * `text` is SHAPE:WINDOW[:OPTION=...], with a number for each axis or one for all:
 * "64x128:7x5:dilation=2x1:causal=0x1:periodic=0:edge=clip". A window of w points has w / 2 before
 * the query, 3+2 stands for 3 before and 2 after. Default: dilation 1, no causal and no periodic
 * axis, edge=shift, by which every query has all its keys.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, naming `shape`, `window`, `dilation`, `causal`, `periodic`, `edge` or
 * `neighborhood`.
 *
 * Safety
 * `text` is a text that ends with a zero byte.
 */
int annulus_attention_add_neighborhood(struct annulus_attention *attention, const char *text);

/**
 * Sets a bias that the host computes from each pair, in place of an earlier one. It is added to
 * the bias tensor, if there is one, and has no gradient.
 *
 * Name, context and function: as of annulus_attention_add_mask.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * As of annulus_attention_add_mask.
 */
int annulus_attention_set_bias_function(struct annulus_attention *attention,
                                        const char *name,
                                        annulus_bias_function bias,
                                        void *context);

/**
 * Sets the bias -slope * |i' - j'| of ALiBi (Press et al. 2022), in place of another bias
 * function.
 *
 * `slopes` has `count` numbers, one per query head.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, also if `count` is not the number of query heads.
 *
 * Safety
 * `slopes` points to `count` numbers.
 */
int annulus_attention_set_alibi(struct annulus_attention *attention,
                                const double *slopes,
                                int64_t count);

/**
 * Sets which rows each rank holds, for the layout ANNULUS_LAYOUT_CUSTOM.
 *
 * `q_rows` has the global query rows of rank 0 in its local order, then those of rank 1, and so
 * on; `q_counts[r]` is the number of rows of rank r. `kv_counts` and `kv_rows` are alike for keys.
 * Every row is on one rank. A plan of another number of ranks is refused.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, with the row that is missing or there twice.
 *
 * Safety
 * `q_counts` and `kv_counts` point to `ranks` numbers, `q_rows` and `kv_rows` to as many as these
 * add up to.
 */
int annulus_attention_set_custom_layout(struct annulus_attention *attention,
                                        int64_t ranks,
                                        const int64_t *q_counts,
                                        const int64_t *q_rows,
                                        const int64_t *kv_counts,
                                        const int64_t *kv_rows);

/**
 * Divides a grid of one to three axes, whose points are the rows in row-major order, into one box
 * per rank, for the layout ANNULUS_LAYOUT_CUSTOM: boxes of about equal size and least surface, so
 * that a neighbourhood receives the least halo, with the rows of a rank in patches of 8 x 8 or
 * 4 x 4 x 4 points. A plan of another number of ranks is refused.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, naming `shape`, `ranks` or `layout`.
 *
 * Safety
 * `shape` points to `axes` numbers.
 */
int annulus_attention_set_boxes_layout(struct annulus_attention *attention,
                                       int64_t ranks,
                                       int64_t axes,
                                       const int64_t *shape);

/**
 * Makes the bias, whose shape options.bias_dims is then `[1, q_heads or 1, 1, entries]`, a table by
 * relative positions, in place of an earlier one. A plan's dbias is the gradient of the table.
 *
 * Local. `kind` is `clipped:LEFT,RIGHT` (LEFT + RIGHT + 1 entries, by the difference of key and
 * query position), `t5:BUCKETS,DISTANCE` (BUCKETS entries, bidirectional),
 * `t5-causal:BUCKETS,DISTANCE`, or `grid:LENGTHS` or `grid:LENGTHS,WINDOWS` with one to three
 * lengths such as `8x8`. docs/semantics.md defines the entries.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT naming `bias_table` for another text; of another options.bias_dims when
 * a plan is made.
 *
 * Safety
 * `kind` is a text that ends with a zero byte.
 */
int annulus_attention_set_bias_table(struct annulus_attention *attention, const char *kind);

/**
 * Sets the machine, of the machine file `path` (docs/machine.md), in place of an earlier one:
 * ANNULUS_STRATEGY_AUTO then takes the strategy of the least predicted time whose buffers fit the
 * memory of a rank, instead of the fewest bytes. All ranks have the same machine.
 *
 * Local: the file is read by this call only. The command `annulus measure` writes it.
 *
 * Errors
 * ANNULUS_IO with the path, if the file cannot be read or is no machine; ANNULUS_INVALID_ARGUMENT
 * naming path and field for a wrong number, and naming `machine` if options.strategy is not
 * ANNULUS_STRATEGY_AUTO. The machine that was set before stays.
 *
 * Safety
 * `path` is a text that ends with a zero byte.
 */
int annulus_attention_set_machine(struct annulus_attention *attention, const char *path);

/**
 * Gives every rank equal rows and balanced work for the documents of `batch`, for the layout
 * ANNULUS_LAYOUT_BALANCED on `ranks` ranks. With ANNULUS_ROUTE_AUTO it also chooses the route on
 * which rows are sent only to ranks that need them.
 *
 * Local; every rank makes the same call. It uses the masks that were added before. `batch` has all
 * rows, on every rank: segment ids, positions or packed lengths; a dense mask is not used. NULL is
 * a batch without documents. Nothing of it is kept: the plan is given its own rows of the batch by
 * annulus_plan_update. Other batches are computed correctly, less
 * balanced. A plan of another number of ranks is refused.
 *
 * annulus_attention_q_rows then returns the rows of a rank.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, with the name of the tensor, or of `layout` if the options have
 * another one; ANNULUS_OUT_OF_MEMORY.
 *
 * Safety
 * `batch` is NULL or points to an initialised batch, whose tensors nobody writes to meanwhile.
 */
int annulus_attention_set_balanced_layout(struct annulus_attention *attention,
                                          int64_t ranks,
                                          const struct annulus_batch *batch);

/**
 * Sets the documents for which ANNULUS_STRATEGY_AUTO chooses the strategy, in place of earlier
 * ones. Default: those of annulus_attention_set_balanced_layout; without either, it chooses by
 * the mask alone. NULL restores the default.
 *
 * Local; every rank makes the same call, because the strategy is the same on all. `batch` has all
 * rows, on every rank: packed lengths, segment ids or positions; a dense mask is not used. Rows
 * after the last packed document are padding, and a document may have no row. The batch is copied,
 * and only the choice depends on it: the plan is given its own rows of it by
 * annulus_plan_update, and other batches are computed correctly.
 *
 * With a layout other than ANNULUS_LAYOUT_AUTO, annulus_attention_q_rows returns the rows of a
 * rank before there is a plan, whichever strategy is chosen. With ANNULUS_LAYOUT_AUTO the layout
 * depends on the strategy, and annulus_plan_q_rows returns them.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, with the name of the tensor, or of `documents` if options.strategy is
 * not ANNULUS_STRATEGY_AUTO; ANNULUS_OUT_OF_MEMORY. The documents that were set before stay.
 *
 * Safety
 * `batch` is NULL or points to an initialised batch, whose tensors nobody writes to meanwhile.
 */
int annulus_attention_set_documents(struct annulus_attention *attention,
                                    const struct annulus_batch *batch);

/**
 * Writes the global query rows of `rank` of `ranks` to `rows`, in the order of its tensors, and
 * their number to `*count`, before there is a plan. Local.
 *
 * `rows` has room for `capacity` numbers. With NULL as `rows` and 0 as `capacity` only the number
 * is written. A plan of `ranks` ranks has these rows, over MPI.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT: `layout` if it is ANNULUS_LAYOUT_AUTO, which a plan chooses together
 * with the order of its ranks, or one of another number of ranks; also if there is too little
 * room: then `*count` is written, and no row.
 *
 * Safety
 * `rows` points to `capacity` writable numbers, `count` to one.
 */
int annulus_attention_q_rows(const struct annulus_attention *attention,
                             int64_t ranks,
                             int64_t rank,
                             int64_t *rows,
                             int64_t capacity,
                             int64_t *count);

/**
 * As annulus_attention_q_rows, of keys.
 *
 * Errors
 * As annulus_attention_q_rows.
 *
 * Safety
 * As annulus_attention_q_rows.
 */
int annulus_attention_kv_rows(const struct annulus_attention *attention,
                              int64_t ranks,
                              int64_t rank,
                              int64_t *rows,
                              int64_t capacity,
                              int64_t *count);

/**
 * Sets the function that is called when a rank has been silent for a quarter of the deadline.
 * NULL is refused: by default there is none.
 *
 * Function and context must live until this attention and all plans that were made of it are
 * destroyed. The function does not unwind and calls no function of annulus.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * The function is as said.
 */
int annulus_attention_on_silence(struct annulus_attention *attention,
                                 annulus_silence_function silence,
                                 void *context);

/**
 * Sets the function that is called with every activity of a pass, in place of an earlier one. NULL
 * is refused: by default there is none, and then no clock is read.
 *
 * Function and context must live until this attention and all plans that were made of it are
 * destroyed. See annulus_step_function for what the function may do.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * The function is as said.
 */
int annulus_attention_on_step(struct annulus_attention *attention,
                              annulus_step_function step,
                              void *context);

/**
 * Destroys the handle of a description. Local. Plans that were made of it live on.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT for NULL, a foreign handle, or one that was destroyed.
 */
int annulus_attention_destroy(struct annulus_attention *attention);

/**
 * Lets the plans of this attention compute in a CUDA stream of the host's, on tensors in device
 * memory.
 *
 * `context` is a CUcontext of GPU options.device, `stream` a CUstream of it, NULL for the default
 * stream; pointers of the CUDA runtime (cudaStream_t, the primary context) are the same.
 * options.backend is ANNULUS_BACKEND_CUDA, and options.has_device is set. Then the tensors of a
 * pass are in memory of this context. A pass reads them after the work that the stream has been
 * given before, and may return before its own work is done: results are complete in the order of
 * the stream, and tensors live until then. The batch of annulus_plan_update stays in host memory.
 *
 * Such a plan has the strategy ring. It is a rank over MPI, or an in-process ring of
 * one rank. Its calls leave `context` the current one of the thread. A context and a stream are
 * neither created nor destroyed, and live until all plans of this attention are destroyed.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT for another backend, without a device, or for NULL as `context`.
 * ANNULUS_UNSUPPORTED in a library without the feature cuda (annulus_features).
 *
 * Safety
 * `context` and `stream` are as said.
 */
int annulus_attention_set_cuda_stream(struct annulus_attention *attention,
                                      void *context,
                                      void *stream);

/**
 * Lets keys, values and gradients travel over an NCCL communicator of the host's, after
 * annulus_attention_set_cuda_stream. Its ranks are those of the plan, which still needs MPI
 * for control messages.
 *
 * The communicator is neither aborted nor destroyed: after a pass has failed, that is up to the
 * host. It lives until all plans of this attention are destroyed, and is used by one of them at a
 * time.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT without a stream, or for NULL. ANNULUS_UNSUPPORTED in a library without
 * the feature nccl.
 *
 * Safety
 * `communicator` is an ncclComm_t of the stream's GPU, and no other code uses it while a plan is
 * made or a pass runs.
 */
int annulus_attention_set_nccl_communicator(struct annulus_attention *attention,
                                            void *communicator);

/**
 * Makes an endpoint over the ranks of a communicator of MPI, given as Fortran and MPI_Comm_c2f
 * have it, for several plans and caches: annulus_plan_create_endpoint,
 * annulus_cache_create_endpoint.
 *
 * They share its communicators, heartbeats and buffers. A plan over an endpoint takes no further
 * communicator, of which an MPI has some thousands, and no collective operation of MPI. Of
 * `attention`, only options.adopt_communicator, options.arrival_deadline_seconds and the function
 * of annulus_attention_on_silence are used.
 *
 * Collective over the communicator, by the rules of
 * annulus_plan_create_mpi_f. `*endpoint` is NULL if the call
 * fails.
 *
 * Errors
 * As annulus_plan_create_mpi_f.
 *
 * Safety
 * As annulus_plan_create_mpi_f.
 */
int annulus_endpoint_create_mpi_f(const struct annulus_attention *attention,
                                  int32_t communicator,
                                  struct annulus_endpoint **endpoint);

#if defined(ANNULUS_WITH_MPI)
/**
 * As annulus_endpoint_create_mpi_f, of a communicator as C has it.
 *
 * Only in a library with the feature mpi. The header declares it where ANNULUS_WITH_MPI is
 * defined, and then includes mpi.h.
 *
 * Errors
 * As annulus_endpoint_create_mpi_f.
 *
 * Safety
 * As annulus_endpoint_create_mpi_f.
 */
int annulus_endpoint_create_mpi(const struct annulus_attention *attention,
                                MPI_Comm communicator,
                                struct annulus_endpoint **endpoint);
#endif

/**
 * Destroys the handle of an endpoint. Plans and caches over it live on; the communicators are
 * freed with the last of them.
 *
 * Local. If it is the last, it waits up to one second for the other ranks to do the same. After
 * MPI_Finalize it is harmless.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT for NULL, a foreign handle, or one that was destroyed.
 */
int annulus_endpoint_destroy(struct annulus_endpoint *endpoint);

/**
 * Plans a ring of `ranks` ranks in this process, over whole tensors.
 *
 * Every pass starts one thread per rank (none for one rank), each of which computes with
 * `options.threads` threads, and returns when all have ended. `*plan` is NULL if the call fails.
 *
 * Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, ANNULUS_UNSUPPORTED, ANNULUS_OUT_OF_MEMORY.
 *
 * Safety
 * `plan` points to a writable pointer.
 */
int annulus_plan_create_threads(const struct annulus_attention *attention,
                                int64_t ranks,
                                struct annulus_plan **plan);

/**
 * Plans this rank of a ring over the ranks of a communicator of MPI, given as Fortran and
 * MPI_Comm_c2f have it.
 *
 * Collective over the communicator. It is duplicated and neither changed nor freed; its error
 * handler stays. Ranks wait for each other without a limit, as in any collective operation of MPI.
 * With options.adopt_communicator the plan takes the communicator over instead, and ranks wait up
 * to options.arrival_deadline_seconds, if that is set; then the call returns ANNULUS_COMM. MPI
 * must be initialised, with MPI_THREAD_FUNNELED at least; below MPI_THREAD_MULTIPLE the plan is
 * made and used on MPI's main thread. A handle that is not alive is refused locally, without the
 * other ranks. `*plan` is NULL if the call fails.
 *
 * Errors
 * ANNULUS_UNSUPPORTED in a library without the feature mpi (annulus_features).
 * ANNULUS_INVALID_ARGUMENT before MPI_Init and after MPI_Finalize, and for a null or an
 * inter-communicator. ANNULUS_REFUSED, ANNULUS_RANK_MISMATCH, ANNULUS_OUT_OF_MEMORY, ANNULUS_COMM.
 *
 * Safety
 * The handle is that of MPI_COMM_NULL or of a communicator that lives; with
 * options.adopt_communicator no other code uses or frees it. `plan` points to a writable pointer.
 */
int annulus_plan_create_mpi_f(const struct annulus_attention *attention,
                              int32_t communicator,
                              struct annulus_plan **plan);

#if defined(ANNULUS_WITH_MPI)
/**
 * As annulus_plan_create_mpi_f, of a communicator as C has it.
 *
 * Only in a library with the feature mpi. The header declares it where ANNULUS_WITH_MPI is
 * defined, and then includes mpi.h.
 *
 * Errors
 * As annulus_plan_create_mpi_f.
 *
 * Safety
 * As annulus_plan_create_mpi_f.
 */
int annulus_plan_create_mpi(const struct annulus_attention *attention,
                            MPI_Comm communicator,
                            struct annulus_plan **plan);
#endif

/**
 * Plans this rank of a ring over an endpoint, which several plans and caches share.
 *
 * Collective over the ranks of the endpoint: all of them make its plans and caches in the same
 * order. Plans over one endpoint are used and destroyed independently of each other, but an error
 * that ends a plan (from 40 on) ends all of them. options.adopt_communicator has no effect here.
 * `*plan` is NULL if the call fails.
 *
 * Errors
 * As annulus_plan_create_mpi_f; the error that ended the endpoint.
 *
 * Safety
 * `plan` points to a writable pointer.
 */
int annulus_plan_create_endpoint(const struct annulus_attention *attention,
                                 const struct annulus_endpoint *endpoint,
                                 struct annulus_plan **plan);

/**
 * Writes this rank to `*rank`; 0 for an in-process ring. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `rank` points to a writable number.
 */
int annulus_plan_rank(const struct annulus_plan *plan, int64_t *rank);

/**
 * Writes the number of ranks to `*ranks`. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `ranks` points to a writable number.
 */
int annulus_plan_ranks(const struct annulus_plan *plan, int64_t *ranks);

/**
 * Writes the layout in force to `*layout`, a constant ANNULUS_LAYOUT_* other than AUTO. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `layout` points to a writable number.
 */
int annulus_plan_layout(const struct annulus_plan *plan, int32_t *layout);

/**
 * Writes the route in force to `*route`, a constant ANNULUS_ROUTE_* other than AUTO. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `route` points to a writable number.
 */
int annulus_plan_route(const struct annulus_plan *plan, int32_t *route);

/**
 * Writes the strategy in force to `*strategy`: ANNULUS_STRATEGY_RING, HEADS_RING or GRID, which
 * are the forms of all others. `*heads` is the ranks of a group, 1 for the ring, or the parts of
 * the heads of ANNULUS_STRATEGY_GRID. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `strategy` and `heads` point to writable numbers.
 */
int annulus_plan_strategy(const struct annulus_plan *plan, int32_t *strategy, int32_t *heads);

/**
 * Writes the parts into which the strategy in force divides queries and keys: the parts over which
 * keys and values circulate, and 1 unless the strategy is ANNULUS_STRATEGY_GRID. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `queries` and `keys` point to writable numbers.
 */
int annulus_plan_grid(const struct annulus_plan *plan, int32_t *queries, int32_t *keys);

/**
 * Writes the fingerprint of the arithmetic to `text`, with a zero byte at its end, and its length
 * without that byte to `*length`. Local.
 *
 * With options.reproducible, machines with the same fingerprint give the same bits. It is one line
 * of ASCII, the one that the command `annulus doctor` prints as "numerics". `text` has room for
 * `capacity` bytes. With NULL as `text` and 0 as `capacity` only the length is written.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, also if there is too little room: then `*length` is written, and no
 * text.
 *
 * Safety
 * `text` points to `capacity` writable bytes, `length` to one writable number.
 */
int annulus_plan_numerics(const struct annulus_plan *plan,
                          char *text,
                          int64_t capacity,
                          int64_t *length);

/**
 * Writes the bytes of memory that the plan keeps to `*bytes`, of all ranks in this process. Local.
 *
 * Counted are the message buffers of the ring (blocks of keys, values and queries, and their
 * gradients in flight) and the memory of the kernels: accumulators, row statistics, and the
 * scratch memory of each thread; where ranks divide the heads, also the tensors of a rank's heads.
 * On a GPU they are in its memory, with a copy of the tensors. The first pass of each kind adds
 * lists of visible keys, or these copies; later passes add nothing. Not counted: row numbers and
 * positions, the schedule, stacks of threads, and rows that an in-process ring copies during a
 * pass.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `bytes` points to a writable number.
 */
int annulus_plan_workspace_bytes(const struct annulus_plan *plan, uint64_t *bytes);

/**
 * Writes the payload bytes that a pass sends by the schedule to `*bytes`: those of this rank, or
 * of all ranks of an in-process ring. `pass` is an ANNULUS_PASS constant. Local.
 *
 * 0 for the backward pass with options.forward_only. The agreement before a pass is not counted;
 * sums of gradients over ranks only if ranks send each other slices of them, from 8,193 numbers on
 * three ranks.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `bytes` points to a writable number.
 */
int annulus_plan_predicted_bytes(const struct annulus_plan *plan, int32_t pass, uint64_t *bytes);

/**
 * Writes the global query rows of this rank, in the order of its tensors, to `rows`, and their
 * number to `*count`. Local.
 *
 * `rows` has room for `capacity` numbers. With NULL as `rows` and 0 as `capacity` only the number
 * is written. In an in-process ring these are all rows, because its tensors are whole.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, also if there is too little room: then `*count` is written, and no
 * row.
 *
 * Safety
 * `rows` points to `capacity` writable numbers, `count` to one.
 */
int annulus_plan_q_rows(const struct annulus_plan *plan,
                        int64_t *rows,
                        int64_t capacity,
                        int64_t *count);

/**
 * As annulus_plan_q_rows, of keys.
 *
 * Errors
 * As annulus_plan_q_rows.
 *
 * Safety
 * As annulus_plan_q_rows.
 */
int annulus_plan_kv_rows(const struct annulus_plan *plan,
                         int64_t *rows,
                         int64_t capacity,
                         int64_t *count);

/**
 * Writes the gradient of the batch's key_list_bias that the last backward pass has computed to
 * `numbers`, in the order of the listed pairs, and their number to `*count`. Local.
 *
 * `numbers` has room for `capacity` numbers. With NULL as `numbers` and 0 as `capacity` only the
 * number is written.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, also if there is too little room, or no key_list_bias.
 *
 * Safety
 * `numbers` points to `capacity` writable numbers, `count` to one.
 */
int annulus_plan_list_bias_gradient(const struct annulus_plan *plan,
                                    double *numbers,
                                    int64_t capacity,
                                    int64_t *count);

/**
 * Adapts the plan to a new batch, which stays in force until the next call: segment ids,
 * positions, packed lengths, dense mask, key lists. NULL removes them all. The tensors are copied.
 *
 * Collective over the ranks. Layout and route stay; the schedule is derived anew.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, with the name of the tensor (of key lists also row and entry),
 * ANNULUS_UNSUPPORTED and ANNULUS_OUT_OF_MEMORY here, ANNULUS_REFUSED elsewhere;
 * ANNULUS_RANK_MISMATCH: the old batch
 * stays in force on all ranks. As annulus_forward if communication
 * fails.
 *
 * Safety
 * `batch` is NULL or points to an initialised batch, whose tensors nobody writes to meanwhile.
 */
int annulus_plan_update(struct annulus_plan *plan, const struct annulus_batch *batch);

/**
 * Destroys a plan. If a call is using it, it is destroyed when that call ends. A pass that was
 * started is cancelled, which ends it on all ranks, unless it has ended; afterwards nothing uses
 * its tensors.
 *
 * Local: a rank that failed can do it alone. Over MPI it waits up to one second for
 * the other ranks to do the same, so that nothing is in flight. After MPI_Finalize it is harmless.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT for NULL, a foreign handle, or one that was destroyed.
 */
int annulus_plan_destroy(struct annulus_plan *plan);

/**
 * Computes out and lse, in place. Reads and writes the caller's tensors and copies none of them,
 * except the rows of an in-process ring whose ranks hold several ranges of rows (zigzag).
 *
 * Collective over the ranks. Outputs share no element with another tensor of the call.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT here and ANNULUS_REFUSED elsewhere if a tensor does not fit the plan,
 * and ANNULUS_RANK_MISMATCH: nothing was written, the plan lives. ANNULUS_ARRIVAL_TIMEOUT:
 * likewise, and the call is to be made again with the same arguments, before the other ranks judge
 * this one to be silent (options.deadline_seconds). ANNULUS_COMM, ANNULUS_TIMEOUT,
 * ANNULUS_PEER_LOST, ANNULUS_ABORTED, ANNULUS_DEVICE and ANNULUS_INTERNAL end the plan: later
 * calls return ANNULUS_POISONED. A handle that is not alive is refused locally, without the other
 * ranks.
 *
 * Safety
 * `args` points to initialised arguments, which point to tensors whose elements are allocated and
 * which nobody else writes to during the call; outputs are not read either.
 */
int annulus_forward(struct annulus_plan *plan, const struct annulus_forward_args *args);

/**
 * Computes the gradients, in place, from the inputs and outputs of the forward pass.
 *
 * dsoftmax_aux, and dbias if it is broadcast over queries, are sums over all ranks, unless
 * options.local_gradients is set. Collective over the ranks. Outputs share no element with another
 * tensor of the call.
 *
 * Errors
 * As annulus_forward; ANNULUS_INVALID_ARGUMENT also of a plan with options.forward_only.
 *
 * Safety
 * As annulus_forward.
 */
int annulus_backward(struct annulus_plan *plan, const struct annulus_backward_args *args);

/**
 * Starts annulus_forward on a thread of its own, so that the program can do something else.
 *
 * annulus_plan_test or annulus_plan_wait ends the pass and returns its status, also that
 * of tensors that do not fit. Until then no other call uses the plan. `args` and its tensor
 * structs are copied; the elements are not.
 *
 * Collective over the ranks, which may start or call the pass. Over MPI it needs
 * MPI_THREAD_MULTIPLE.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT for a plan that is not alive or has a pass under way,
 * ANNULUS_UNSUPPORTED below MPI_THREAD_MULTIPLE, ANNULUS_DEVICE if no thread starts: the pass is
 * not started, and the other ranks get no message.
 *
 * Safety
 * As annulus_forward; the elements live, and nobody else writes inputs or touches outputs,
 * until the pass has ended.
 */
int annulus_forward_start(struct annulus_plan *plan, const struct annulus_forward_args *args);

/**
 * Starts annulus_backward on a thread of its own. Rules: as of annulus_forward_start.
 *
 * Errors
 * As annulus_forward_start.
 *
 * Safety
 * As annulus_forward_start.
 */
int annulus_backward_start(struct annulus_plan *plan, const struct annulus_backward_args *args);

/**
 * Writes 1 to `*done` and returns the status of the pass if the pass that was started has ended;
 * else writes 0 and returns 0. Does not wait. Local.
 *
 * Errors
 * Those of the pass; ANNULUS_INVALID_ARGUMENT if none is under way.
 *
 * Safety
 * `done` points to a writable number.
 */
int annulus_plan_test(struct annulus_plan *plan, int32_t *done);

/**
 * Waits for the pass that was started, and returns its status.
 *
 * Errors
 * Those of the pass; ANNULUS_INVALID_ARGUMENT if none is under way.
 */
int annulus_plan_wait(struct annulus_plan *plan);

/**
 * Computes out, lse and their derivatives along the tangents of the inputs, by forward-mode
 * differentiation: a Jacobian-vector product.
 *
 * Collective over the ranks. Outputs share no element with another tensor of the call.
 *
 * Errors
 * As annulus_forward; ANNULUS_INVALID_ARGUMENT also of a plan without
 * options.second_derivatives.
 *
 * Safety
 * As annulus_forward.
 *
 * annulus_forward: crate::annulus_forward
 */
int annulus_jvp(struct annulus_plan *plan, const struct annulus_jvp_args *args);

/**
 * Computes the gradients of annulus_backward's gradients: those of the product of its dq, dk,
 * dv, dbias and dsoftmax_aux with their cotangents, with respect to the inputs, dout and dlse. It
 * needs no result of a forward pass.
 *
 * dsoftmax_aux and dbias are summed over ranks as in the backward pass; their cotangents are then
 * the same on all ranks. Collective over the ranks. Outputs share no element with another tensor
 * of the call.
 *
 * Errors
 * As annulus_jvp; ANNULUS_INVALID_ARGUMENT also of a plan with options.forward_only.
 *
 * Safety
 * As annulus_forward.
 *
 * annulus_backward: crate::annulus_backward
 * annulus_forward: crate::annulus_forward
 */
int annulus_double_backward(struct annulus_plan *plan,
                            const struct annulus_double_backward_args *args);

/**
 * Creates an empty KV cache of `ranks` ranks in this process.
 *
 * Each rank has every ranks-th page of options.page_rows rows. options.q_len and kv_len are 0: the
 * cache has the rows that are appended. annulus_cache_attend starts one thread per rank (none for
 * one rank), each of which computes with `options.threads` threads. `*cache` is NULL if the call
 * fails.
 *
 * Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT; ANNULUS_OUT_OF_MEMORY; ANNULUS_UNSUPPORTED, with its name, for what a
 * cache does not have: layout, route, strategy, kv_block_size, receive_ahead, backward_mode,
 * local_gradients, bias_dims, unnormalized, a machine, and a function of
 * annulus_attention_on_step.
 *
 * Safety
 * `cache` points to a writable pointer.
 */
int annulus_cache_create_threads(const struct annulus_attention *attention,
                                 int64_t ranks,
                                 struct annulus_cache **cache);

/**
 * Creates this rank of an empty KV cache over the ranks of a communicator of MPI, given as Fortran
 * and MPI_Comm_c2f have it. The rules for the communicator are those of
 * annulus_plan_create_mpi_f.
 *
 * Collective over the communicator. `*cache` is NULL if the call fails.
 *
 * Errors
 * As annulus_cache_create_threads and
 * annulus_plan_create_mpi_f.
 *
 * Safety
 * As annulus_plan_create_mpi_f.
 */
int annulus_cache_create_mpi_f(const struct annulus_attention *attention,
                               int32_t communicator,
                               struct annulus_cache **cache);

#if defined(ANNULUS_WITH_MPI)
/**
 * As annulus_cache_create_mpi_f, of a communicator as C has it.
 *
 * Only in a library with the feature mpi. The header declares it where ANNULUS_WITH_MPI is
 * defined, and then includes mpi.h.
 *
 * Errors
 * As annulus_cache_create_mpi_f.
 *
 * Safety
 * As annulus_cache_create_mpi_f.
 */
int annulus_cache_create_mpi(const struct annulus_attention *attention,
                             MPI_Comm communicator,
                             struct annulus_cache **cache);
#endif

/**
 * Creates this rank of an empty KV cache over an endpoint, which several plans and caches share,
 * by the rules of annulus_plan_create_endpoint.
 *
 * Collective over the ranks of the endpoint. `*cache` is NULL if the call fails.
 *
 * Errors
 * As annulus_cache_create_threads and
 * annulus_plan_create_endpoint.
 *
 * Safety
 * `cache` points to a writable pointer.
 */
int annulus_cache_create_endpoint(const struct annulus_attention *attention,
                                  const struct annulus_endpoint *endpoint,
                                  struct annulus_cache **cache);

/**
 * Appends rows that every rank passes: each rank copies those of its pages.
 *
 * `k` is `[batch, rows, kv_heads, head_dim]` and `v` `[batch, rows, kv_heads, value_dim]`, of the
 * type of the options: the same rows on every rank.
 *
 * Local: nothing is sent. annulus_cache_attend checks that all ranks have appended as many
 * rows.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, ANNULUS_OUT_OF_MEMORY, ANNULUS_POISONED: nothing was appended.
 *
 * Safety
 * `k` and `v` point to tensors whose elements are allocated and which nobody writes to during the
 * call.
 */
int annulus_cache_append(struct annulus_cache *cache,
                         const struct annulus_tensor *k,
                         const struct annulus_tensor *v);

/**
 * Appends `count` rows, of which this rank passes only those of its pages, in ascending order
 * (annulus_cache_own_rows): a prefill whose keys and values are sharded. In an in-process ring
 * these are all rows.
 *
 * `k` is `[batch, own rows, kv_heads, head_dim]` and `v` `[batch, own rows, kv_heads, value_dim]`.
 *
 * Local. `count` is the same on every rank.
 *
 * Errors
 * As annulus_cache_append.
 *
 * Safety
 * As annulus_cache_append.
 */
int annulus_cache_append_own(struct annulus_cache *cache,
                             int64_t count,
                             const struct annulus_tensor *k,
                             const struct annulus_tensor *v);

/**
 * Writes the rows of this rank among the next `next` rows, which count from 0, to `rows`, and
 * their number to `*count`. Local.
 *
 * `rows` has room for `capacity` numbers. With NULL as `rows` and 0 as `capacity` only the number
 * is written. In an in-process ring these are all rows, because its tensors are whole.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, also if there is too little room: then `*count` is written, and no
 * row.
 *
 * Safety
 * `rows` points to `capacity` writable numbers, `count` to one.
 */
int annulus_cache_own_rows(const struct annulus_cache *cache,
                           int64_t next,
                           int64_t *rows,
                           int64_t capacity,
                           int64_t *count);

/**
 * Removes the rows from `len` on, for example tokens of a speculation that were refused. Their
 * memory is kept for later rows.
 *
 * Local, as annulus_cache_append.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT, also if there are fewer rows.
 */
int annulus_cache_truncate(struct annulus_cache *cache, int64_t len);

/**
 * Computes out and lse of the queries of the last cached rows, in place: of n queries, query i has
 * the row number and the position len - n + i. All ranks pass the same queries and sinks, and all
 * get the result, with the same bits.
 *
 * Collective over the ranks. Outputs share no element with another tensor of the call. A rank
 * sends annulus_cache_predicted_bytes, whatever the number of cached rows.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT and ANNULUS_OUT_OF_MEMORY here and ANNULUS_REFUSED elsewhere;
 * ANNULUS_RANK_MISMATCH if ranks have different numbers of cached rows or of queries: nothing was
 * written, the cache lives. ANNULUS_ARRIVAL_TIMEOUT: likewise, and the call is to be made again
 * with the same arguments. ANNULUS_COMM, ANNULUS_TIMEOUT, ANNULUS_PEER_LOST, ANNULUS_ABORTED,
 * ANNULUS_DEVICE and ANNULUS_INTERNAL end the cache: later calls return ANNULUS_POISONED. A handle
 * that is not alive is refused locally, without the other ranks.
 *
 * Safety
 * `args` points to initialised arguments, which point to tensors whose elements are allocated and
 * which nobody else writes to during the call; outputs are not read either.
 */
int annulus_cache_attend(struct annulus_cache *cache, const struct annulus_attend_args *args);

/**
 * Writes the number of cached rows of all ranks to `*len`. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `len` points to a writable number.
 */
int annulus_cache_len(const struct annulus_cache *cache, int64_t *len);

/**
 * Writes the number of cached rows of this rank to `*len`: all rows in an in-process ring. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `len` points to a writable number.
 */
int annulus_cache_local_len(const struct annulus_cache *cache, int64_t *len);

/**
 * Writes the rows of a page to `*rows`. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `rows` points to a writable number.
 */
int annulus_cache_page_rows(const struct annulus_cache *cache, int64_t *rows);

/**
 * Writes this rank to `*rank`; 0 for an in-process ring. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `rank` points to a writable number.
 */
int annulus_cache_rank(const struct annulus_cache *cache, int64_t *rank);

/**
 * Writes the number of ranks to `*ranks`. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `ranks` points to a writable number.
 */
int annulus_cache_ranks(const struct annulus_cache *cache, int64_t *ranks);

/**
 * Writes the payload bytes that a call of annulus_cache_attend with `queries` queries sends to
 * `*bytes`: those of this rank, or of all ranks of an in-process ring. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `bytes` points to a writable number.
 */
int annulus_cache_predicted_bytes(const struct annulus_cache *cache,
                                  int64_t queries,
                                  uint64_t *bytes);

/**
 * Writes the bytes of keys, values and message buffers of the ranks in this process to `*bytes`.
 * The memory of a rank grows by segments of at least 4,096 rows. Local.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT.
 *
 * Safety
 * `bytes` points to a writable number.
 */
int annulus_cache_buffer_bytes(const struct annulus_cache *cache, uint64_t *bytes);

/**
 * Destroys a cache. If a call is using it, it is destroyed when that call ends.
 *
 * Local: a rank that failed can do it alone. Over MPI it waits up to one second for
 * the other ranks to do the same, so that nothing is in flight. After MPI_Finalize it is harmless.
 *
 * Errors
 * ANNULUS_INVALID_ARGUMENT for NULL, a foreign handle, or one that was destroyed.
 */
int annulus_cache_destroy(struct annulus_cache *cache);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* ANNULUS_H */

/* A library that loads MPI takes communicators of the standard ABI; others are converted. */
#if defined(ANNULUS_WITH_MPI) && defined(ANNULUS_MPI_ABI) && \
    !defined(annulus_plan_create_mpi) && !(defined(MPI_ABI_VERSION) && MPI_ABI_VERSION >= 1)
/* Some MPIs convert no handle before MPI_Init; the call is refused then, whatever the handle. */
static inline int32_t annulus_mpi_handle(MPI_Comm communicator) {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized && !finalized ? (int32_t)MPI_Comm_c2f(communicator) : 0;
}
#define annulus_plan_create_mpi(attention, communicator, plan) \
  annulus_plan_create_mpi_f(attention, annulus_mpi_handle(communicator), plan)
#define annulus_cache_create_mpi(attention, communicator, cache) \
  annulus_cache_create_mpi_f(attention, annulus_mpi_handle(communicator), cache)
#define annulus_endpoint_create_mpi(attention, communicator, endpoint) \
  annulus_endpoint_create_mpi_f(attention, annulus_mpi_handle(communicator), endpoint)
#endif
