/*
 * documents: packed documents over the ranks of the job. On each layout both passes give what
 * attention over every document alone gives, and the strategy is chosen for the documents.
 */
#ifndef ANNULUS_WITH_MPI
#error "pkg-config annulus-mpi and annulus::mpi define ANNULUS_WITH_MPI"
#endif
#include <math.h>
#include <mpi.h>

#include "case.h"

/* First rows of the documents, of which one is empty, and the end of the last: row 36 is
   padding. */
enum { DOCUMENTS = 5, PADDING = 36 };
static int64_t starts[DOCUMENTS + 1] = {0, 9, 22, 22, 30, PADDING};

/* A list of packed lengths. */
static annulus_tensor list(int64_t *data, int64_t count) {
  annulus_tensor tensor = {data, ANNULUS_I64, {count, 1, 1, 1}, {1, 0, 0, 0}};
  return tensor;
}

/* Computes the results of all rows, each document by a plan of one rank for its rows alone. */
static void attend_to_each(results *want) {
  memset(want, 0, sizeof *want);
  for (int d = 0; d < DOCUMENTS; d++) {
    part p = {.count = starts[d + 1] - starts[d]};
    for (int64_t i = 0; i < p.count; i++) p.rows[i] = starts[d] + i;
    annulus_options options = case_options();
    options.q_len = options.kv_len = p.count;
    annulus_attention *attention = NULL;
    annulus_plan *plan = NULL;
    OK(annulus_attention_create(&options, &attention));
    OK(annulus_plan_create_threads(attention, 1, &plan));
    make_part(&p);
    run_part(plan, &p);
    put_part(want, &p);
    free_part(&p);
    OK(annulus_plan_destroy(plan));
    OK(annulus_attention_destroy(attention));
  }
  for (int64_t b = 0; b < BATCH; b++)
    for (int64_t h = 0; h < Q_HEADS; h++) want->lse[b][h][PADDING] = -INFINITY;
}

/* Runs both passes over the ranks, and collects the results of all rows on each of them. */
static void attend_over_ranks(int layout, int rank, int ranks, results *all) {
  annulus_options options = case_options();
  options.layout = layout;
  options.strategy = ANNULUS_STRATEGY_AUTO;
  annulus_attention *attention = NULL;
  annulus_plan *plan = NULL;
  annulus_tensor packed = list(starts, DOCUMENTS + 1);
  annulus_batch batch = {.struct_size = sizeof batch, .cum_seqlens_q = &packed};
  OK(annulus_attention_create(&options, &attention));
  if (layout == ANNULUS_LAYOUT_BALANCED)
    OK(annulus_attention_set_balanced_layout(attention, ranks, &batch));
  OK(annulus_attention_set_documents(attention, &batch));

  part p = {.count = 0};
  int64_t early[LEN], keys[LEN], count = 0;
  if (layout != ANNULUS_LAYOUT_AUTO)
    OK(annulus_attention_q_rows(attention, ranks, rank, early, LEN, &count));
  OK(annulus_plan_create_mpi(attention, MPI_COMM_WORLD, &plan));
  OK(annulus_plan_q_rows(plan, p.rows, LEN, &p.count));
  size_t bytes = sizeof *keys * (size_t)p.count;
  if (layout != ANNULUS_LAYOUT_AUTO)
    CHECK(count == p.count && memcmp(early, p.rows, bytes) == 0);
  OK(annulus_plan_kv_rows(plan, keys, LEN, &count));
  CHECK(count == p.count && memcmp(keys, p.rows, bytes) == 0);
  OK(annulus_plan_update(plan, &batch));
  make_part(&p);
  run_part(plan, &p);
  OK(annulus_plan_destroy(plan));
  OK(annulus_attention_destroy(attention));

  static results own;
  int held[LEN] = {0}, on_ranks[LEN];
  for (int64_t i = 0; i < p.count; i++) held[p.rows[i]]++;
  MPI_Allreduce(held, on_ranks, LEN, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  for (int row = 0; row < LEN; row++) CHECK(on_ranks[row] == 1);
  /* rows of other ranks are 0: the bits of all, or-ed, are the whole */
  memset(&own, 0, sizeof own);
  put_part(&own, &p);
  MPI_Allreduce(&own, all, (int)(sizeof own / 4), MPI_INT, MPI_BOR, MPI_COMM_WORLD);
  free_part(&p);
}

/* Returns the strategy that is chosen for full attention over documents of which no rank has a
   part, and the bytes of its forward pass; with `is_told`, for these documents. There are ten keys
   for each query, so that by the mask alone moving queries is cheaper than moving keys. */
static int32_t chosen(int ranks, int is_told, uint64_t *bytes) {
  annulus_options options = case_options();
  options.causal = 0;
  options.q_len = 12 * ranks;
  options.kv_len = 10 * options.q_len;
  options.layout = ANNULUS_LAYOUT_CONTIGUOUS;
  options.strategy = ANNULUS_STRATEGY_AUTO;
  int count = 2 * ranks + 1;
  int64_t *of_q = malloc(sizeof *of_q * (size_t)count);
  int64_t *of_k = malloc(sizeof *of_k * (size_t)count);
  CHECK(of_q != NULL && of_k != NULL);
  for (int i = 0; i < count; i++) of_q[i] = 6 * i, of_k[i] = 60 * i;
  annulus_tensor q = list(of_q, count), k = list(of_k, count);
  annulus_batch batch = {.struct_size = sizeof batch, .cum_seqlens_q = &q, .cum_seqlens_k = &k};
  annulus_attention *attention = NULL;
  annulus_plan *plan = NULL;
  int32_t strategy = -1, heads = -1;
  OK(annulus_attention_create(&options, &attention));
  OK(annulus_attention_set_documents(attention, is_told ? &batch : NULL));
  OK(annulus_plan_create_mpi(attention, MPI_COMM_WORLD, &plan));
  OK(annulus_plan_update(plan, &batch));
  OK(annulus_plan_strategy(plan, &strategy, &heads));
  OK(annulus_plan_predicted_bytes(plan, ANNULUS_PASS_FORWARD, bytes));
  OK(annulus_plan_destroy(plan));
  OK(annulus_attention_destroy(attention));
  free(of_q);
  free(of_k);
  return strategy;
}

int main(void) {
  int rank, ranks;
  MPI_Init(NULL, NULL);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  static results want, got;
  attend_to_each(&want);
  int layouts[] = {ANNULUS_LAYOUT_BALANCED, ANNULUS_LAYOUT_CONTIGUOUS, ANNULUS_LAYOUT_AUTO};
  for (int i = 0; i < 3; i++) {
    attend_over_ranks(layouts[i], rank, ranks, &got);
    const float *one = (const float *)&got, *other = (const float *)&want;
    for (size_t at = 0; at < sizeof got / sizeof *one; at++)
      if (!(one[at] == other[at] || fabsf(one[at] - other[at]) < 2e-5f)) {
        fprintf(stderr, "layout %d, number %zu of results: got %g, want %g\n", layouts[i], at,
                (double)one[at], (double)other[at]);
        MPI_Abort(MPI_COMM_WORLD, 1);
      }
  }
  if (ranks > 1) {
    uint64_t by_mask = 0, by_documents = 1;
    CHECK(chosen(ranks, 0, &by_mask) == ANNULUS_STRATEGY_GRID && by_mask > 0);
    CHECK(chosen(ranks, 1, &by_documents) == ANNULUS_STRATEGY_RING && by_documents == 0);
  }
  MPI_Finalize();
  return 0;
}
