/* Arguments without meaning: each gives a status and a message that names it, and changes nothing. */
#include <math.h>
#include <stddef.h>

#include "case.h"

static void refused_(int line, int status, int want, const char *name) {
  const char *message = annulus_last_error();
  if (status != want || strncmp(message, name, strlen(name)) != 0) {
    fprintf(stderr, "line %d: got %d, %s; want %d, %s...\n", line, status, message, want, name);
    exit(1);
  }
}
#define REFUSED(call, name) refused_(__LINE__, (call), ANNULUS_INVALID_ARGUMENT, name)
#define UNSUPPORTED(call, name) refused_(__LINE__, (call), ANNULUS_UNSUPPORTED, name)

/* Sets one option and expects it to be refused by its name. */
#define BAD_OPTION(field, bad, name)                                                              \
  do {                                                                                            \
    annulus_options options_ = case_options();                                                    \
    options_.field = (bad);                                                                       \
    annulus_attention *none_ = (annulus_attention *)&options_;                                    \
    REFUSED(annulus_attention_create(&options_, &none_), name);                                   \
    CHECK(none_ == NULL);                                                                         \
  } while (0)

static int32_t all_visible(void *context, const annulus_pair *pair) {
  (void)context;
  return pair->q_row >= 0;
}

static void options_are_checked(void) {
  annulus_options options = case_options();
  annulus_attention *attention = NULL;
  REFUSED(annulus_options_init(NULL, sizeof options), "options");
  REFUSED(annulus_options_init(&options, 8), "options.struct_size");
  REFUSED(annulus_attention_create(NULL, &attention), "options");
  REFUSED(annulus_attention_create(&options, NULL), "attention");
  REFUSED(annulus_attention_create((annulus_options *)((char *)&options + 1), &attention),
          "options");
  BAD_OPTION(struct_size, 0, "options.struct_size");
  BAD_OPTION(struct_size, 16, "options.struct_size");
  BAD_OPTION(struct_size, UINT64_MAX, "options.struct_size");
  BAD_OPTION(batch, 0, "batch");
  BAD_OPTION(batch, -1, "batch");
  BAD_OPTION(q_len, -1, "q_len");
  BAD_OPTION(kv_len, INT64_MIN, "kv_len");
  BAD_OPTION(q_heads, 3, "q_heads");
  BAD_OPTION(kv_heads, 0, "kv_heads");
  BAD_OPTION(head_dim, 1025, "head_dim");
  BAD_OPTION(value_dim, 0, "value_dim");
  BAD_OPTION(dtype, 0, "dtype");
  BAD_OPTION(dtype, ANNULUS_I32, "dtype");
  BAD_OPTION(causal, 2, "causal");
  BAD_OPTION(window_left, -2, "window_left");
  BAD_OPTION(window_right, INT64_MIN, "window_right");
  BAD_OPTION(attention_sink_size, 1, "attention_sink_size");
  BAD_OPTION(chunk_size, -1, "chunk_size");
  BAD_OPTION(prefix_len, -2, "prefix_len");
  BAD_OPTION(alignment, 2, "alignment");
  BAD_OPTION(bias_order, -1, "bias_order");
  BAD_OPTION(has_softmax_scale, 7, "has_softmax_scale");
  BAD_OPTION(softmax_scale, 0.5, "softmax_scale");
  BAD_OPTION(unnormalized, -1, "unnormalized");
  BAD_OPTION(logits_soft_cap, -1, "logits_soft_cap");
  BAD_OPTION(logits_soft_cap, NAN, "logits_soft_cap");
  BAD_OPTION(bias_dims[0], 5, "bias");
  BAD_OPTION(bias_dims[3], -5, "bias_dims");
  BAD_OPTION(sinks, -1, "sinks");
  BAD_OPTION(sinks_per_head, 1, "softmax_aux");
  BAD_OPTION(logits_dtype, ANNULUS_I8, "logits_dtype");
  BAD_OPTION(dropout_prob, 1, "dropout_prob");
  BAD_OPTION(dropout_prob, NAN, "dropout_prob");
  BAD_OPTION(dropout_seed, 1, "dropout_seed");
  BAD_OPTION(precision, 3, "precision");
  BAD_OPTION(backward_mode, 2, "backward_mode");
  BAD_OPTION(forward_only, 3, "forward_only");
  BAD_OPTION(local_gradients, -3, "local_gradients");
  BAD_OPTION(layout, 6, "layout");
  BAD_OPTION(route, -1, "route");
  BAD_OPTION(deadline_seconds, 0.5, "deadline");
  BAD_OPTION(deadline_seconds, -1, "deadline_seconds");
  BAD_OPTION(deadline_seconds, INFINITY, "deadline_seconds");
  BAD_OPTION(threads, -1, "threads");
  BAD_OPTION(kv_block_size, -1, "kv_block_size");
  BAD_OPTION(receive_ahead, -1, "receive_ahead");
  BAD_OPTION(arrival_deadline_seconds, 0.5, "arrival_deadline");
  BAD_OPTION(arrival_deadline_seconds, -1, "arrival_deadline_seconds");
  BAD_OPTION(adopt_communicator, 2, "adopt_communicator");
  BAD_OPTION(reproducible, 2, "reproducible");
  BAD_OPTION(strategy, 8, "strategy");
  BAD_OPTION(strategy, ANNULUS_STRATEGY_GRID, "strategy_heads");
  BAD_OPTION(strategy_queries, 2, "strategy_queries");
  BAD_OPTION(strategy_keys, 2, "strategy_keys");
  BAD_OPTION(strategy_keys, -1, "strategy_keys");
  BAD_OPTION(strategy, ANNULUS_STRATEGY_HEADS_RING, "strategy_heads");
  BAD_OPTION(strategy_heads, -1, "strategy_heads");
  BAD_OPTION(strategy_heads, 2, "strategy_heads");
  BAD_OPTION(page_rows, -1, "page_rows");

  /* a struct of an older header, without the last fields: what lies behind it is not read */
  options.struct_size = offsetof(annulus_options, kv_block_size);
  options.kv_block_size = -1;
  OK(annulus_attention_create(&options, &attention));
  OK(annulus_attention_destroy(attention));
  options = case_options();

  /* a struct of a newer header */
  struct {
    annulus_options known;
    uint64_t newer;
  } longer = {case_options(), 0};
  longer.known.struct_size = sizeof longer;
  OK(annulus_attention_create(&longer.known, &attention));
  OK(annulus_attention_destroy(attention));
  longer.newer = 1;
  UNSUPPORTED(annulus_attention_create(&longer.known, &attention), "the field at byte");
  OK(annulus_options_init(&longer.known, sizeof longer));
  CHECK(longer.newer == 0 && longer.known.struct_size == sizeof longer);
}

static void handles_are_checked(void) {
  annulus_attention *attention = case_attention();
  annulus_plan *plan = (annulus_plan *)attention, *other = NULL;
  int64_t count = 7;
  int foreign = 0;

  REFUSED(annulus_attention_add_mask(NULL, "x", 0, all_visible, NULL), "attention: got NULL");
  REFUSED(annulus_attention_add_mask(attention, NULL, 0, all_visible, NULL), "name");
  REFUSED(annulus_attention_add_mask(attention, "", 0, all_visible, NULL), "name");
  REFUSED(annulus_attention_add_mask(attention, "\xff", 0, all_visible, NULL), "name");
  REFUSED(annulus_attention_add_mask(attention, "x", 4, all_visible, NULL), "flags");
  REFUSED(annulus_attention_add_mask(attention, "x", 0, NULL, NULL), "visible");
  REFUSED(annulus_attention_add_neighborhood(attention, NULL), "text: got NULL");
  REFUSED(annulus_attention_add_neighborhood(attention, "8x8"), "window");
  REFUSED(annulus_attention_add_neighborhood(attention, "8x8:9"), "window");
  int64_t shape[2] = {0, 8};
  REFUSED(annulus_attention_set_boxes_layout(attention, 2, 2, shape), "layout");
  REFUSED(annulus_attention_set_bias_function(attention, "x", NULL, NULL), "bias");
  REFUSED(annulus_attention_on_silence(attention, NULL, NULL), "silence");
  REFUSED(annulus_attention_on_step(attention, NULL, NULL), "step");
  double slopes[3] = {1, 2, 3};
  REFUSED(annulus_attention_set_alibi(attention, slopes, 3), "slopes");
  REFUSED(annulus_attention_set_alibi(attention, NULL, 4), "slopes: got NULL");
  REFUSED(annulus_attention_set_alibi(attention, slopes, INT64_MAX), "slopes");
  REFUSED(annulus_attention_set_custom_layout(attention, 1, &count, &count, &count, &count),
          "layout");
  REFUSED(annulus_attention_set_balanced_layout(attention, 2, NULL), "layout");
  REFUSED(annulus_attention_q_rows(attention, 2, 0, NULL, 0, &count), "layout: got none");
  CHECK(count == 7);

  REFUSED(annulus_plan_create_threads(NULL, 1, &plan), "attention: got NULL");
  CHECK(plan == NULL);
  REFUSED(annulus_plan_create_threads(attention, 0, &plan), "ranks");
  REFUSED(annulus_plan_create_threads(attention, -3, &plan), "ranks");
  REFUSED(annulus_plan_create_threads(attention, 1, NULL), "plan: got NULL");
  if (strstr(annulus_features(), "mpi") == NULL)
    UNSUPPORTED(annulus_plan_create_mpi_f(attention, 0, &plan), "a ring over the MPI");
  else /* MPI is not initialised */
    REFUSED(annulus_plan_create_mpi_f(attention, 0, &plan), "MPI");
  CHECK(plan == NULL);

  OK(annulus_plan_create_threads(attention, 2, &plan));
  OK(annulus_plan_create_threads(attention, 1, &other));
  CHECK(plan != other);
  /* a handle of another kind, one of the host's objects, one that was destroyed */
  REFUSED(annulus_plan_ranks((annulus_plan *)attention, &count), "plan");
  REFUSED(annulus_plan_ranks((annulus_plan *)&foreign, &count), "plan");
  REFUSED(annulus_attention_destroy((annulus_attention *)plan), "attention");
  REFUSED(annulus_plan_ranks(plan, NULL), "ranks: got NULL");
  REFUSED(annulus_plan_ranks(plan, (int64_t *)((char *)&count + 1)), "ranks: got 0x");
  REFUSED(annulus_plan_q_rows(plan, NULL, 5, &count), "rows");
  REFUSED(annulus_plan_q_rows(plan, NULL, -1, &count), "capacity");
  REFUSED(annulus_plan_q_rows(plan, NULL, 0, NULL), "count");
  OK(annulus_plan_destroy(plan));
  REFUSED(annulus_plan_destroy(plan), "plan: got 0x");
  REFUSED(annulus_plan_ranks(plan, &count), "plan: got 0x");
  REFUSED(annulus_plan_update(plan, NULL), "plan: got 0x");
  REFUSED(annulus_forward(plan, NULL), "plan: got 0x");
  REFUSED(annulus_backward(plan, NULL), "plan: got 0x");
  REFUSED(annulus_forward_start(plan, NULL), "plan: got 0x");
  REFUSED(annulus_backward_start(plan, NULL), "plan: got 0x");
  REFUSED(annulus_plan_wait(plan), "plan: got 0x");
  REFUSED(annulus_plan_destroy(NULL), "plan: got NULL");
  OK(annulus_plan_destroy(other));
  OK(annulus_attention_destroy(attention));
  REFUSED(annulus_attention_destroy(attention), "attention: got 0x");
  REFUSED(annulus_plan_create_threads(attention, 1, &plan), "attention: got 0x");
}

/* Makes a cache with one option changed, and returns its status. */
#define CACHE_WITH(field, changed, ranks)                                                         \
  do {                                                                                            \
    annulus_options options_ = case_options();                                                    \
    options_.q_len = options_.kv_len = 0;                                                         \
    options_.field = (changed);                                                                   \
    OK(annulus_attention_create(&options_, &attention));                                          \
    status = annulus_cache_create_threads(attention, ranks, &cache);                              \
    OK(annulus_attention_destroy(attention));                                                     \
  } while (0)
#define CACHE_LACKS(field, changed, name)                                                         \
  do {                                                                                            \
    CACHE_WITH(field, changed, 2);                                                                \
    UNSUPPORTED(status, name " is not supported by the KV cache");                                \
    CHECK(cache == NULL);                                                                         \
  } while (0)

static void no_step(void *context, const annulus_step_event *event) {
  (void)context;
  CHECK(event == NULL);
}

static void caches_are_checked(void) {
  annulus_attention *attention = case_attention();
  annulus_cache *cache = (annulus_cache *)attention;
  int status, foreign = 0;
  int64_t number = 7, rows[8];
  uint64_t bytes = 7;
  REFUSED(annulus_cache_create_threads(attention, 2, &cache), "q_len: got 37");
  CHECK(cache == NULL);
  OK(annulus_attention_destroy(attention));
  REFUSED(annulus_cache_create_threads(attention, 2, &cache), "attention: got 0x");
  CACHE_WITH(kv_len, 1, 2);
  REFUSED(status, "kv_len: got 1");
  CACHE_LACKS(layout, ANNULUS_LAYOUT_ZIGZAG, "layout");
  CACHE_LACKS(layout, ANNULUS_LAYOUT_CUSTOM, "layout");
  CACHE_LACKS(route, ANNULUS_ROUTE_DIRECT, "route");
  CACHE_LACKS(strategy, ANNULUS_STRATEGY_AUTO, "strategy");
  CACHE_LACKS(kv_block_size, 64, "kv_block_size");
  CACHE_LACKS(receive_ahead, 2, "receive_ahead");
  CACHE_LACKS(backward_mode, ANNULUS_BACKWARD_TWO_PASS, "backward_mode");
  CACHE_LACKS(local_gradients, 1, "local_gradients");
  CACHE_LACKS(unnormalized, 1, "unnormalized");
  annulus_options options = case_options();
  annulus_plan *plan = NULL;
  options.page_rows = 1;
  OK(annulus_attention_create(&options, &attention));
  REFUSED(annulus_plan_create_threads(attention, 1, &plan), "page_rows: got 1");
  OK(annulus_attention_destroy(attention));
  options.q_len = options.kv_len = 0;
  options.page_rows = INT64_MAX;
  OK(annulus_attention_create(&options, &attention));
  REFUSED(annulus_cache_create_threads(attention, 1, &cache), "page_rows: got 9223372036854775807");
  OK(annulus_attention_destroy(attention));
  options.page_rows = 0;
  options.bias_dims[0] = options.bias_dims[1] = options.bias_dims[2] = options.bias_dims[3] = 1;
  OK(annulus_attention_create(&options, &attention));
  UNSUPPORTED(annulus_cache_create_threads(attention, 1, &cache), "bias is not supported");
  OK(annulus_attention_destroy(attention));
  memset(options.bias_dims, 0, sizeof options.bias_dims);
  OK(annulus_attention_create(&options, &attention));
  OK(annulus_attention_on_step(attention, no_step, NULL));
  UNSUPPORTED(annulus_cache_create_threads(attention, 1, &cache), "on_step is not supported");
  OK(annulus_attention_destroy(attention));
  options.sinks = 2;
  OK(annulus_attention_create(&options, &attention));
  REFUSED(annulus_cache_create_threads(attention, 0, &cache), "ranks");
  REFUSED(annulus_cache_create_threads(attention, -3, &cache), "ranks");
  REFUSED(annulus_cache_create_threads(attention, 1, NULL), "cache: got NULL");
  if (strstr(annulus_features(), "mpi") == NULL)
    UNSUPPORTED(annulus_cache_create_mpi_f(attention, 0, &cache), "a ring over the MPI");
  else /* MPI is not initialised */
    REFUSED(annulus_cache_create_mpi_f(attention, 0, &cache), "MPI");
  CHECK(cache == NULL);
  OK(annulus_cache_create_threads(attention, 2, &cache));
  OK(annulus_attention_destroy(attention));

  part p = {.count = 3, .rows = {0, 1, 2}};
  make_part(&p);
  float sink_values[2] = {0.5f, 1};
  annulus_tensor k = rows_tensor(p.k, 3, KV_HEADS, HEAD_DIM), no_k = k;
  annulus_tensor v = rows_tensor(p.v, 3, KV_HEADS, VALUE_DIM), q, out, lse;
  annulus_tensor sinks = {sink_values, ANNULUS_F32, {1, 2, 1, 1}, {2, 1, 1, 1}};
  REFUSED(annulus_cache_append(cache, NULL, &v), "k: got NULL");
  REFUSED(annulus_cache_append(cache, &k, NULL), "v: got NULL");
  REFUSED(annulus_cache_append(cache, &v, &k), "k: got ");
  REFUSED(annulus_cache_append(cache, &k, &k), "v: got ");
  no_k.dims[1] = -3;
  REFUSED(annulus_cache_append(cache, &no_k, &v), "k.dims");
  no_k.dims[1] = INT64_MAX;
  REFUSED(annulus_cache_append(cache, &no_k, &v), "k: got dims");
  no_k.dims[1] = 2;
  REFUSED(annulus_cache_append(cache, &no_k, &v), "v: got ");
  no_k = k;
  no_k.dtype = ANNULUS_F64;
  REFUSED(annulus_cache_append(cache, &no_k, &v), "k.dtype");
  REFUSED(annulus_cache_append_own(cache, -1, &k, &v), "count: got -1");
  REFUSED(annulus_cache_append_own(cache, 4, &k, &v), "count: got 4");
  REFUSED(annulus_cache_own_rows(cache, -1, NULL, 0, &number), "next: got -1");
  REFUSED(annulus_cache_own_rows(cache, INT64_MAX, NULL, 0, &number), "next: got 9");
  REFUSED(annulus_cache_own_rows(cache, 9, rows, 8, &number), "capacity");
  REFUSED(annulus_cache_own_rows(cache, 8, rows, 8, NULL), "count: got NULL");
  REFUSED(annulus_cache_truncate(cache, 1), "len: got 1, want at most the 0 cached rows");
  REFUSED(annulus_cache_truncate(cache, -1), "len: got -1");
  OK(annulus_cache_len(cache, &number));
  CHECK(number == 0);
  OK(annulus_cache_append(cache, &k, &v));
  REFUSED(annulus_cache_truncate(cache, 4), "len: got 4, want at most the 3 cached rows");

  q = rows_tensor(p.q, 3, Q_HEADS, HEAD_DIM);
  out = rows_tensor(p.out, 3, Q_HEADS, VALUE_DIM);
  lse = lse_tensor(p.lse, 3);
  annulus_attend_args args = {sizeof args, &q, &sinks, &out, &lse};
  OK(annulus_cache_attend(cache, &args));
  REFUSED(annulus_cache_attend(cache, NULL), "args");
  args.struct_size = 8;
  REFUSED(annulus_cache_attend(cache, &args), "args.struct_size");
  args.struct_size = sizeof args;
#define WITHOUT(field, name)                                                                      \
  do {                                                                                            \
    args.field = NULL;                                                                            \
    REFUSED(annulus_cache_attend(cache, &args), name);                                            \
    args.field = &field;                                                                          \
  } while (0)
  WITHOUT(q, "q: got NULL");
  WITHOUT(out, "out: got NULL");
  WITHOUT(lse, "lse: got NULL");
  args.softmax_aux = NULL;
  REFUSED(annulus_cache_attend(cache, &args), "softmax_aux");
  args.softmax_aux = &sinks;
  args.out = &q;
  REFUSED(annulus_cache_attend(cache, &args), "out");
  args.out = &out;
  OK(annulus_cache_truncate(cache, 2));
  REFUSED(annulus_cache_attend(cache, &args), "q: got 3 queries, want at most the 2 cached rows");

  REFUSED(annulus_cache_len(cache, NULL), "len: got NULL");
  REFUSED(annulus_cache_local_len(cache, NULL), "len: got NULL");
  REFUSED(annulus_cache_page_rows(cache, NULL), "rows: got NULL");
  REFUSED(annulus_cache_rank(cache, NULL), "rank: got NULL");
  REFUSED(annulus_cache_ranks(cache, NULL), "ranks: got NULL");
  REFUSED(annulus_cache_predicted_bytes(cache, -1, &bytes), "queries: got -1");
  REFUSED(annulus_cache_predicted_bytes(cache, 1, NULL), "bytes: got NULL");
  REFUSED(annulus_cache_buffer_bytes(cache, NULL), "bytes: got NULL");
  CHECK(bytes == 7);
  REFUSED(annulus_cache_len((annulus_cache *)&foreign, &number), "cache: got 0x");
  REFUSED(annulus_cache_len(NULL, &number), "cache: got NULL");
  REFUSED(annulus_plan_destroy((annulus_plan *)cache), "plan: got 0x");
  OK(annulus_cache_destroy(cache));
  REFUSED(annulus_cache_destroy(cache), "cache: got 0x");
  REFUSED(annulus_cache_append(cache, &k, &v), "cache: got 0x");
  REFUSED(annulus_cache_append_own(cache, 3, &k, &v), "cache: got 0x");
  REFUSED(annulus_cache_attend(cache, &args), "cache: got 0x");
  REFUSED(annulus_cache_truncate(cache, 0), "cache: got 0x");
  REFUSED(annulus_cache_destroy(NULL), "cache: got NULL");
  free_part(&p);
}

static void machines_are_checked(void) {
  annulus_attention *attention = case_attention();
  REFUSED(annulus_attention_set_machine(attention, "none.json"), "machine: got none.json");
  OK(annulus_attention_destroy(attention));
  REFUSED(annulus_attention_set_machine(attention, "none.json"), "attention: got 0x");
  annulus_options options = case_options();
  options.strategy = ANNULUS_STRATEGY_AUTO;
  OK(annulus_attention_create(&options, &attention));
  REFUSED(annulus_attention_set_machine(attention, NULL), "path: got NULL");
  refused_(__LINE__, annulus_attention_set_machine(attention, "none.json"), ANNULUS_IO,
           "none.json: ");
  refused_(__LINE__, annulus_attention_set_machine(attention, "/"), ANNULUS_IO,
           "/: want a regular file");
  OK(annulus_attention_destroy(attention));
}

static void layouts_are_checked(void) {
  annulus_options options = case_options();
  options.q_len = options.kv_len = 4;
  options.layout = ANNULUS_LAYOUT_CUSTOM;
  annulus_attention *attention = NULL;
  annulus_plan *plan = NULL;
  OK(annulus_attention_create(&options, &attention));
  REFUSED(annulus_plan_create_threads(attention, 2, &plan), "layout");
  int64_t counts[] = {1, 3}, rows[] = {2, 0, 1, 3}, twice[] = {2, 0, 1, 2}, wild[] = {1, -3};
#define LAYOUT(q_counts, q_rows)                                                                  \
  annulus_attention_set_custom_layout(attention, 2, q_counts, q_rows, counts, rows)
  REFUSED(LAYOUT(counts, twice), "layout");
  REFUSED(LAYOUT(wild, rows), "q_counts");
  REFUSED(LAYOUT(NULL, rows), "q_counts: got NULL");
  REFUSED(LAYOUT(counts, NULL), "q_rows: got NULL");
  OK(LAYOUT(counts, rows));
  REFUSED(annulus_plan_create_threads(attention, 3, &plan), "layout");
  OK(annulus_plan_create_threads(attention, 2, &plan));
  OK(annulus_plan_destroy(plan));
  OK(annulus_attention_destroy(attention));
}

static void documents_are_checked(void) {
  annulus_options options = case_options();
  annulus_attention *attention = case_attention();
  int64_t count = 0, starts[] = {0, 20, 10, LEN}, one = 1;
  annulus_tensor packed = {starts, ANNULUS_I64, {4, 1, 1, 1}, {1, 0, 0, 0}};
  annulus_batch batch = {.struct_size = sizeof batch, .cum_seqlens_q = &packed};
  /* the strategy is the ring */
  REFUSED(annulus_attention_set_documents(attention, &batch),
          "documents: got a batch, for the strategy ring, want none, or options.strategy");
  OK(annulus_attention_set_documents(attention, NULL));
  OK(annulus_attention_destroy(attention));
  REFUSED(annulus_attention_set_documents(attention, &batch), "attention: got 0x");

  options.strategy = ANNULUS_STRATEGY_AUTO;
  options.layout = ANNULUS_LAYOUT_CONTIGUOUS;
  OK(annulus_attention_create(&options, &attention));
  REFUSED(annulus_attention_set_documents(attention, &batch), "cum_seqlens_q: got 10 after 20");
  starts[2] = LEN + 1;
  REFUSED(annulus_attention_set_documents(attention, &batch), "cum_seqlens_q");
  starts[2] = 30, starts[0] = 1;
  REFUSED(annulus_attention_set_documents(attention, &batch), "cum_seqlens_q: got 1 as the first");
  starts[0] = -1;
  REFUSED(annulus_attention_set_documents(attention, &batch), "cum_seqlens_q: got -1 as the first");
  starts[0] = 0, packed.dims[0] = 0;
  REFUSED(annulus_attention_set_documents(attention, &batch), "cum_seqlens_q: got an empty list");
  packed.dims[0] = 4, packed.dtype = ANNULUS_F64;
  REFUSED(annulus_attention_set_documents(attention, &batch), "cum_seqlens_q");
  packed.dtype = ANNULUS_I64, batch.struct_size = 8;
  REFUSED(annulus_attention_set_documents(attention, &batch), "batch.struct_size");
  batch.struct_size = sizeof batch;
  annulus_tensor ids = {&one, ANNULUS_I32, {BATCH, LEN - 1, 1, 1}, {0, 0, 0, 0}};
  annulus_batch by_ids = {.struct_size = sizeof by_ids, .q_segment_ids = &ids};
  REFUSED(annulus_attention_set_documents(attention, &by_ids), "q_segment_ids: got (2, 36), want");
  /* ids of one side are those of both, but an error has the name that was given */
  by_ids.q_segment_ids = NULL, by_ids.kv_segment_ids = &ids;
  REFUSED(annulus_attention_set_documents(attention, &by_ids), "kv_segment_ids: got (2, 36), want");
  /* a document without a row, and padding after the last */
  starts[2] = 20, starts[3] = LEN - 5;
  OK(annulus_attention_set_documents(attention, &batch));
  /* the strategy leaves the rows where the layout has them */
  int64_t rows[LEN], all = 0;
  for (int64_t rank = 0; rank < 2; rank++) {
    OK(annulus_attention_q_rows(attention, 2, rank, rows, LEN, &count));
    for (int64_t i = 0; i < count; i++) CHECK(rows[i] == all + i);
    all += count;
  }
  CHECK(all == LEN);
  annulus_plan *plan = NULL;
  OK(annulus_plan_create_threads(attention, 2, &plan));
  OK(annulus_plan_destroy(plan));
  OK(annulus_attention_destroy(attention));

  /* with more keys than queries */
  options.kv_len = LEN + 1;
  OK(annulus_attention_create(&options, &attention));
  ids.dims[1] = LEN, by_ids.q_segment_ids = &ids, by_ids.kv_segment_ids = NULL;
  REFUSED(annulus_attention_set_documents(attention, &by_ids), "q_segment_ids: got alone, with");
  OK(annulus_attention_destroy(attention));
  options.kv_len = LEN;

  /* the layout is chosen with the strategy */
  options.layout = ANNULUS_LAYOUT_AUTO;
  OK(annulus_attention_create(&options, &attention));
  OK(annulus_attention_set_documents(attention, &batch));
  REFUSED(annulus_attention_q_rows(attention, 2, 0, NULL, 0, &count), "layout");
  OK(annulus_attention_destroy(attention));
}

static void balanced_layouts_are_checked(void) {
  annulus_options options = case_options();
  options.layout = ANNULUS_LAYOUT_BALANCED;
  annulus_attention *attention = NULL;
  annulus_plan *plan = NULL;
  int64_t count = 0, rows[LEN], starts[] = {0, 20, 10, LEN};
  OK(annulus_attention_create(&options, &attention));
  REFUSED(annulus_plan_create_threads(attention, 2, &plan), "layout");
  REFUSED(annulus_attention_kv_rows(attention, 2, 0, NULL, 0, &count), "layout");
  REFUSED(annulus_attention_set_custom_layout(attention, 1, &count, &count, &count, &count),
          "layout");
  REFUSED(annulus_attention_set_balanced_layout(attention, 0, NULL), "ranks");
  REFUSED(annulus_attention_set_balanced_layout(attention, -2, NULL), "ranks");
  annulus_tensor packed = {starts, ANNULUS_I64, {4, 1, 1, 1}, {1, 0, 0, 0}};
  annulus_batch batch = {.struct_size = 8, .cum_seqlens_q = &packed};
  REFUSED(annulus_attention_set_balanced_layout(attention, 2, &batch), "batch.struct_size");
  batch.struct_size = sizeof batch;
  REFUSED(annulus_attention_set_balanced_layout(attention, 2, &batch), "cum_seqlens_q");
  starts[2] = 30;
  OK(annulus_attention_set_balanced_layout(attention, 2, &batch));
  REFUSED(annulus_attention_q_rows(attention, 2, 2, NULL, 0, &count), "rank");
  REFUSED(annulus_attention_q_rows(attention, 2, -1, NULL, 0, &count), "rank");
  REFUSED(annulus_attention_q_rows(attention, 3, 0, NULL, 0, &count), "layout");
  REFUSED(annulus_attention_q_rows(attention, 2, 0, NULL, 0, NULL), "count");
  REFUSED(annulus_attention_q_rows(attention, 2, 0, rows, 1, &count), "capacity");
  int64_t all = 0;
  for (int64_t rank = 0; rank < 2; rank++) {
    OK(annulus_attention_q_rows(attention, 2, rank, rows, LEN, &count));
    all += count;
  }
  CHECK(all == LEN);
  REFUSED(annulus_plan_create_threads(attention, 3, &plan), "layout");
  OK(annulus_plan_create_threads(attention, 2, &plan));
  int32_t layout = 0;
  OK(annulus_plan_layout(plan, &layout));
  CHECK(layout == ANNULUS_LAYOUT_BALANCED);
  char text[256];
  int64_t length = 0;
  OK(annulus_plan_numerics(plan, text, sizeof text, &length));
  CHECK(length > 4 && strncmp(text, "cpu ", 4) == 0 && strlen(text) == (size_t)length);
  OK(annulus_plan_numerics(plan, NULL, 0, &length));
  REFUSED(annulus_plan_numerics(plan, text, length, &length), "capacity");
  REFUSED(annulus_plan_numerics(plan, NULL, 1, &length), "text");
  REFUSED(annulus_plan_numerics(plan, text, -1, &length), "capacity");
  REFUSED(annulus_plan_numerics(plan, text, sizeof text, NULL), "length");
  OK(annulus_plan_destroy(plan));
  OK(annulus_attention_destroy(attention));
}

static void tensors_are_checked(int64_t ranks) {
  annulus_attention *attention = case_attention();
  annulus_plan *plan = NULL;
  OK(annulus_plan_create_threads(attention, ranks, &plan));
  OK(annulus_attention_destroy(attention));
  part p = {.count = LEN};
  for (int64_t row = 0; row < LEN; row++) p.rows[row] = row;
  make_part(&p);

  annulus_tensor q = rows_tensor(p.q, LEN, Q_HEADS, HEAD_DIM);
  annulus_tensor k = rows_tensor(p.k, LEN, KV_HEADS, HEAD_DIM);
  annulus_tensor v = rows_tensor(p.v, LEN, KV_HEADS, VALUE_DIM);
  annulus_tensor out = rows_tensor(p.out, LEN, Q_HEADS, VALUE_DIM);
  annulus_tensor lse = lse_tensor(p.lse, LEN);
  annulus_forward_args args = {
      .struct_size = sizeof args, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse};
#define BAD_TENSOR(tensor, field, bad, name)                                                      \
  do {                                                                                            \
    annulus_tensor good_ = tensor;                                                                \
    tensor.field = (bad);                                                                         \
    REFUSED(annulus_forward(plan, &args), name);                                                  \
    tensor = good_;                                                                               \
  } while (0)
  REFUSED(annulus_forward(plan, NULL), "args");
  args.struct_size = 8;
  REFUSED(annulus_forward(plan, &args), "args.struct_size");
  args.struct_size = sizeof args;
  args.q = NULL;
  REFUSED(annulus_forward(plan, &args), "q: got NULL");
  args.q = (annulus_tensor *)((char *)&q + 1);
  REFUSED(annulus_forward(plan, &args), "q: got 0x");
  args.q = &q;
  args.lse = NULL;
  REFUSED(annulus_forward(plan, &args), "lse: got NULL");
  args.lse = &lse;
  args.bias = &q;
  REFUSED(annulus_forward(plan, &args), "bias");
  args.bias = NULL;
  args.max = &lse;
  REFUSED(annulus_forward(plan, &args), "max");
  args.max = NULL;
  BAD_TENSOR(q, data, NULL, "q.data");
  BAD_TENSOR(q, data, (char *)p.q + 1, "q.data");
  BAD_TENSOR(q, dtype, 0, "q.dtype");
  BAD_TENSOR(q, dtype, ANNULUS_F16, "q.dtype");
  BAD_TENSOR(q, dims[1], LEN - 1, "q");
  BAD_TENSOR(q, dims[1], -LEN, "q.dims");
  BAD_TENSOR(q, dims[1], INT64_MAX, "q: got dims");
  BAD_TENSOR(v, strides[2], INT64_MIN, "v.strides");
  BAD_TENSOR(v, strides[2], INT64_MAX, "v: got dims");
  BAD_TENSOR(lse, dims[3], 2, "lse");
  BAD_TENSOR(out, strides[1], 0, "out.strides");
  BAD_TENSOR(out, strides[2], 1, "out.strides");
  BAD_TENSOR(out, data, p.q, "out: got memory that q has");
  BAD_TENSOR(out, data, p.q + 5, "out: got memory that q has");
  BAD_TENSOR(lse, data, p.out, "lse: got memory that out has");
  OK(annulus_forward(plan, &args));

  annulus_tensor dout = rows_tensor(p.dout, LEN, Q_HEADS, VALUE_DIM);
  annulus_tensor dq = rows_tensor(p.dq, LEN, Q_HEADS, HEAD_DIM);
  annulus_tensor dk = rows_tensor(p.dk, LEN, KV_HEADS, HEAD_DIM);
  annulus_tensor dv = rows_tensor(p.dv, LEN, KV_HEADS, VALUE_DIM);
  annulus_backward_args back = {.struct_size = sizeof back, .q = &q, .k = &k, .v = &v,
                                .out = &out, .lse = &lse, .dout = &dout,
                                .dq = &dq, .dk = &dk, .dv = &dv};
  back.dq = NULL;
  REFUSED(annulus_backward(plan, &back), "dq: got NULL");
  back.dq = &dk;
  REFUSED(annulus_backward(plan, &back), "dk: got memory that dq has");
  back.dq = &dout;
  REFUSED(annulus_backward(plan, &back), "dq: got memory that dout has");
  back.dq = &dq;
  back.dsoftmax_aux = &lse;
  REFUSED(annulus_backward(plan, &back), "dsoftmax_aux");
  back.dsoftmax_aux = NULL;
  OK(annulus_backward(plan, &back));

  /* passes that are started */
  int32_t done = 7;
  int64_t count = 0;
  REFUSED(annulus_plan_wait(plan), "plan: got one without a pass");
  REFUSED(annulus_plan_test(plan, &done), "plan: got one without a pass");
  REFUSED(annulus_plan_test(plan, NULL), "done: got NULL");
  OK(annulus_forward_start(plan, &args));
  REFUSED(annulus_forward(plan, &args), "plan: got one with a pass under way");
  REFUSED(annulus_backward_start(plan, &back), "plan: got one with a pass under way");
  REFUSED(annulus_plan_update(plan, NULL), "plan: got one with a pass under way");
  REFUSED(annulus_plan_ranks(plan, &count), "plan: got one with a pass under way");
  OK(annulus_plan_wait(plan));
  REFUSED(annulus_plan_wait(plan), "plan: got one without a pass");
  /* what the pass refuses comes when it has ended */
  args.q = NULL;
  OK(annulus_forward_start(plan, &args));
  REFUSED(annulus_plan_wait(plan), "q: got NULL");
  OK(annulus_forward_start(plan, &args));
  int status;
  do status = annulus_plan_test(plan, &done);
  while (done == 0);
  REFUSED(status, "q: got NULL");
  args.q = &q;

  int32_t ids[BATCH * LEN] = {0};
  annulus_tensor segments = {ids, ANNULUS_I32, {BATCH, LEN, 1, 1}, {LEN, 1, 0, 0}};
  annulus_batch batch = {.struct_size = sizeof batch, .q_segment_ids = &segments};
  OK(annulus_plan_update(plan, &batch));
  segments.dtype = ANNULUS_I64;
  segments.dims[0] = 1;
  REFUSED(annulus_plan_update(plan, &batch), "q_segment_ids.dtype");
  segments.dtype = ANNULUS_I32;
  REFUSED(annulus_plan_update(plan, &batch), "q_segment_ids");
  segments.dims[2] = 3;
  REFUSED(annulus_plan_update(plan, &batch), "q_segment_ids.dims");
  batch.struct_size = 1;
  REFUSED(annulus_plan_update(plan, &batch), "batch.struct_size");
  /* the plan lives */
  OK(annulus_forward(plan, &args));
  /* destroying waits for the pass, after which its tensors can be freed */
  OK(annulus_forward_start(plan, &args));
  OK(annulus_plan_destroy(plan));
  free_part(&p);
}

static void forward_only_plans_have_no_backward(void) {
  annulus_options options = case_options();
  options.forward_only = 1;
  annulus_attention *attention = NULL;
  annulus_plan *plan = NULL;
  OK(annulus_attention_create(&options, &attention));
  OK(annulus_plan_create_threads(attention, 2, &plan));
  part p = {.count = LEN};
  for (int64_t row = 0; row < LEN; row++) p.rows[row] = row;
  make_part(&p);
  annulus_tensor q = rows_tensor(p.q, LEN, Q_HEADS, HEAD_DIM);
  annulus_tensor k = rows_tensor(p.k, LEN, KV_HEADS, HEAD_DIM);
  annulus_tensor v = rows_tensor(p.v, LEN, KV_HEADS, VALUE_DIM);
  annulus_tensor out = rows_tensor(p.out, LEN, Q_HEADS, VALUE_DIM);
  annulus_tensor lse = lse_tensor(p.lse, LEN);
  annulus_tensor dq = rows_tensor(p.dq, LEN, Q_HEADS, HEAD_DIM);
  annulus_tensor dk = rows_tensor(p.dk, LEN, KV_HEADS, HEAD_DIM);
  annulus_tensor dv = rows_tensor(p.dv, LEN, KV_HEADS, VALUE_DIM);
  annulus_backward_args back = {.struct_size = sizeof back, .q = &q, .k = &k, .v = &v,
                                .out = &out, .lse = &lse, .dout = &out,
                                .dq = &dq, .dk = &dk, .dv = &dv};
  REFUSED(annulus_backward(plan, &back), "backward");
  OK(annulus_plan_destroy(plan));
  OK(annulus_attention_destroy(attention));
  free_part(&p);
}

int main(void) {
  CHECK(strcmp(annulus_last_error(), "") == 0);
  CHECK(strcmp(annulus_error_string(ANNULUS_TIMEOUT), annulus_error_string(-5)) != 0);
  options_are_checked();
  handles_are_checked();
  caches_are_checked();
  machines_are_checked();
  layouts_are_checked();
  documents_are_checked();
  balanced_layouts_are_checked();
  tensors_are_checked(1);
  tensors_are_checked(3);
  forward_only_plans_have_no_backward();
  return 0;
}
