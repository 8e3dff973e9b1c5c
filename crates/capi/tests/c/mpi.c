/*
 * mpi FILE         both passes over a communicator of half the ranks of the job, by MPI_Comm, and
 *                  by MPI_Fint of another communicator with the ranks in reverse, at once. The
 *                  host's error handler stays. Rank 0 of the first half writes its results to FILE
 * mpi FILE cache   likewise, decoding with KV caches
 * mpi documents    packed documents over the ranks of the job. On each layout both passes give what
 *                  attention over every document alone gives, and the strategy is chosen for the
 *                  documents
 */
#ifndef ANNULUS_WITH_MPI
#error "pkg-config annulus-mpi and annulus::mpi define ANNULUS_WITH_MPI"
#endif
#include <math.h>
#include <mpi.h>

#include "case.h"

/* Collects the parts of all ranks on rank 0. */
static void collect(MPI_Comm comm, const results *own, results *all) {
  /* rows of other ranks are 0: the bits of all, or-ed, are the whole */
  MPI_Reduce(own, all, (int)(sizeof *own / 4), MPI_INT, MPI_BOR, 0, comm);
}

static void part_of(annulus_plan *plan, part *p) {
  int64_t keys[LEN], count = 0;
  OK(annulus_plan_q_rows(plan, p->rows, LEN, &p->count));
  OK(annulus_plan_kv_rows(plan, keys, LEN, &count));
  CHECK(count == p->count && memcmp(keys, p->rows, sizeof *keys * (size_t)count) == 0);
  make_part(p);
}

/* Both passes, over two plans at once. */
static void attend(const char *file) {
  annulus_attention *attention = case_attention();
  annulus_plan *plan = (annulus_plan *)attention, *reversed = NULL;
  int status = annulus_plan_create_mpi(attention, MPI_COMM_WORLD, &plan);
  CHECK(status == ANNULUS_INVALID_ARGUMENT && plan == NULL); /* before MPI_Init */

  int level, world_rank, world, rank, ranks;
  CHECK(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) == MPI_SUCCESS);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  MPI_Comm half, backwards;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, world_rank, &half);
  MPI_Comm_rank(half, &rank);
  MPI_Comm_size(half, &ranks);
  MPI_Comm_split(half, 0, -rank, &backwards);
  MPI_Errhandler before, after;
  MPI_Comm_get_errhandler(half, &before);

  CHECK(annulus_plan_create_mpi(attention, MPI_COMM_NULL, &plan) == ANNULUS_INVALID_ARGUMENT);
  OK(annulus_plan_create_mpi(attention, half, &plan));
  /* `backwards` was made for this plan, which frees it */
  annulus_options adopting = case_options();
  adopting.adopt_communicator = 1;
  annulus_attention *adopter = NULL;
  OK(annulus_attention_create(&adopting, &adopter));
  OK(annulus_plan_create_mpi_f(adopter, MPI_Comm_c2f(backwards), &reversed));
  OK(annulus_attention_destroy(adopter));
  MPI_Comm_get_errhandler(half, &after);
  CHECK(before == after);

  int64_t plan_rank, plan_ranks;
  OK(annulus_plan_rank(reversed, &plan_rank));
  OK(annulus_plan_ranks(reversed, &plan_ranks));
  CHECK(plan_rank == ranks - 1 - rank && plan_ranks == ranks);

  /* two plans at once, used in turn, beside traffic of the host's on the same communicator */
  annulus_plan *plans[] = {plan, reversed};
  static results own[2], all[2];
  for (int turn = 0; turn < 2; turn++)
    for (int i = 0; i < 2; i++) {
      int token = world_rank, sum = 0;
      MPI_Request request;
      MPI_Iallreduce(&token, &sum, 1, MPI_INT, MPI_SUM, half, &request);
      part p = {.count = 0};
      part_of(plans[i], &p);
      run_part(plans[i], &p);
      memset(&own[i], 0, sizeof own[i]);
      put_part(&own[i], &p);
      free_part(&p);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
  for (int i = 0; i < 2; i++) {
    collect(half, &own[i], &all[i]);
    CHECK(rank != 0 || memcmp(&all[0], &all[i], sizeof all[0]) == 0);
  }
  if (world_rank == 0) write_results(file, &all[0]);

  /* bad arguments of one rank are refused on all ranks of its plan, and the plan lives */
  if (rank == 0)
    CHECK(annulus_forward(plan, NULL) == ANNULUS_INVALID_ARGUMENT);
  else {
    part p = {.count = 0};
    part_of(plan, &p);
    annulus_tensor q = rows_tensor(p.q, p.count, Q_HEADS, HEAD_DIM);
    annulus_tensor k = rows_tensor(p.k, p.count, KV_HEADS, HEAD_DIM);
    annulus_tensor v = rows_tensor(p.v, p.count, KV_HEADS, VALUE_DIM);
    annulus_tensor out = rows_tensor(p.out, p.count, Q_HEADS, VALUE_DIM);
    annulus_tensor lse = lse_tensor(p.lse, p.count);
    annulus_forward_args args = {
        .struct_size = sizeof args, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse};
    CHECK(annulus_forward(plan, &args) == ANNULUS_REFUSED);
    free_part(&p);
  }
  /* a pass on a thread of its own needs MPI_THREAD_MULTIPLE */
  part p = {.count = 0};
  part_of(plan, &p);
  if (level < MPI_THREAD_MULTIPLE) {
    annulus_forward_args none = {.struct_size = sizeof none};
    CHECK(annulus_forward_start(plan, &none) == ANNULUS_UNSUPPORTED);
    run_part(plan, &p);
  } else {
    run_part_by(plan, &p, 1);
  }
  static results again;
  put_part(&again, &p);
  CHECK(memcmp(&again, &own[0], sizeof again) == 0);

  OK(annulus_plan_destroy(reversed));
  MPI_Comm_free(&half);
  MPI_Finalize();

  /* one plan is left: it can be destroyed, and neither used nor made */
  annulus_tensor q = rows_tensor(p.q, p.count, Q_HEADS, HEAD_DIM);
  annulus_tensor k = rows_tensor(p.k, p.count, KV_HEADS, HEAD_DIM);
  annulus_tensor v = rows_tensor(p.v, p.count, KV_HEADS, VALUE_DIM);
  annulus_tensor out = rows_tensor(p.out, p.count, Q_HEADS, VALUE_DIM);
  annulus_tensor lse = lse_tensor(p.lse, p.count);
  annulus_forward_args args = {
      .struct_size = sizeof args, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse};
  CHECK(annulus_forward(plan, &args) != ANNULUS_SUCCESS);
  CHECK(strstr(annulus_last_error(), "MPI") != NULL);
  OK(annulus_plan_destroy(plan));
  CHECK(annulus_plan_create_mpi(attention, MPI_COMM_WORLD, &plan) == ANNULUS_INVALID_ARGUMENT);
  CHECK(annulus_plan_create_mpi_f(attention, 0, &plan) == ANNULUS_INVALID_ARGUMENT);
  OK(annulus_attention_destroy(attention));
  free_part(&p);
}

/* Decoding, over two caches at once. */
static void decode_over_both(const char *file) {
  annulus_options options = cache_options();
  annulus_attention *attention = NULL, *adopter = NULL;
  OK(annulus_attention_create(&options, &attention));
  options.adopt_communicator = 1;
  OK(annulus_attention_create(&options, &adopter));
  annulus_cache *caches[2] = {(annulus_cache *)attention, NULL};
  int status = annulus_cache_create_mpi(attention, MPI_COMM_WORLD, &caches[0]);
  CHECK(status == ANNULUS_INVALID_ARGUMENT && caches[0] == NULL); /* before MPI_Init */

  int level, world_rank, rank, ranks;
  CHECK(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) == MPI_SUCCESS);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm half, backwards;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, world_rank, &half);
  MPI_Comm_rank(half, &rank);
  MPI_Comm_size(half, &ranks);
  MPI_Comm_split(half, 0, -rank, &backwards);
  OK(annulus_cache_create_mpi(attention, half, &caches[0]));
  OK(annulus_cache_create_mpi_f(adopter, MPI_Comm_c2f(backwards), &caches[1]));
  int64_t number = -1;
  OK(annulus_cache_rank(caches[1], &number));
  CHECK(number == ranks - 1 - rank);
  OK(annulus_cache_ranks(caches[1], &number));
  CHECK(number == ranks);

  static decoded all[2];
  for (int i = 0; i < 2; i++) {
    decode(caches[i], &all[i]);
    int64_t own = -1, sum = 0;
    OK(annulus_cache_local_len(caches[i], &own));
    MPI_Allreduce(&own, &sum, 1, MPI_INT64_T, MPI_SUM, half);
    CHECK(sum == LEN && (ranks == 1 || own < LEN));
  }
  /* all ranks get the same bits */
  static decoded of_rank_0;
  of_rank_0 = all[0];
  MPI_Bcast(&of_rank_0, sizeof of_rank_0, MPI_BYTE, 0, half);
  CHECK(memcmp(&all[0], &of_rank_0, sizeof of_rank_0) == 0);
  CHECK(memcmp(&all[0], &all[1], sizeof all[0]) == 0);
  if (world_rank == 0) write_decoded(file, &all[0]);

  /* bad arguments of one rank are refused on all ranks, and the cache lives */
  part token = {.count = 1, .rows = {LEN - 1}};
  make_part(&token);
  annulus_tensor q = rows_tensor(token.q, 1, Q_HEADS, HEAD_DIM);
  annulus_tensor out = rows_tensor(token.out, 1, Q_HEADS, VALUE_DIM);
  annulus_tensor lse = lse_tensor(token.lse, 1);
  annulus_attend_args args = {.struct_size = sizeof args, .q = &q, .out = &out, .lse = &lse};
  if (rank == 0)
    CHECK(annulus_cache_attend(caches[0], NULL) == ANNULUS_INVALID_ARGUMENT);
  else
    CHECK(annulus_cache_attend(caches[0], &args) == ANNULUS_REFUSED);
  /* so are caches of different lengths */
  if (rank == 0) OK(annulus_cache_truncate(caches[0], LEN - 1));
  status = annulus_cache_attend(caches[0], &args);
  CHECK(status == (ranks == 1 ? ANNULUS_SUCCESS : ANNULUS_RANK_MISMATCH));
  CHECK(ranks == 1 || strstr(annulus_last_error(), "cached rows") != NULL);
  OK(annulus_cache_truncate(caches[0], LEN - 1));
  decode_rows(caches[0], LEN - 1, LEN, 0, &all[1]);
  CHECK(memcmp(&all[0], &all[1], sizeof all[0]) == 0);

  OK(annulus_cache_destroy(caches[1]));
  MPI_Comm_free(&half);
  MPI_Finalize();
  /* one cache is left: it can be destroyed, and neither used nor made */
  CHECK(annulus_cache_attend(caches[0], &args) != ANNULUS_SUCCESS);
  CHECK(strstr(annulus_last_error(), "MPI") != NULL);
  OK(annulus_cache_destroy(caches[0]));
  CHECK(annulus_cache_create_mpi(attention, MPI_COMM_WORLD, &caches[0]) ==
        ANNULUS_INVALID_ARGUMENT);
  OK(annulus_attention_destroy(attention));
  OK(annulus_attention_destroy(adopter));
  free_part(&token);
}

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

/* Packed documents on each layout, and the strategy that is chosen for them. */
static void attend_to_documents(void) {
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
}

int main(int count, char **arguments) {
  CHECK(count == 2 || (count == 3 && strcmp(arguments[2], "cache") == 0));
  if (count == 3)
    decode_over_both(arguments[1]);
  else if (strcmp(arguments[1], "documents") == 0)
    attend_to_documents();
  else
    attend(arguments[1]);
  return 0;
}
