/* One case for all C programs: causal, grouped-query heads, f32, with dlse. Inputs are exact. */
#ifndef CASE_H
#define CASE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "annulus.h"

enum { BATCH = 2, LEN = 37, Q_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 8, VALUE_DIM = 6 };

/* Ends the program with status 1 if a call failed. */
#define OK(call)                                                                                  \
  do {                                                                                            \
    int status_ = (call);                                                                         \
    if (status_ != ANNULUS_SUCCESS) {                                                             \
      fprintf(stderr, "%s:%d: %s: %d, %s: %s\n", __FILE__, __LINE__, #call, status_,              \
              annulus_error_string(status_), annulus_last_error());                               \
      exit(1);                                                                                    \
    }                                                                                             \
  } while (0)

#define CHECK(holds)                                                                              \
  do {                                                                                            \
    if (!(holds)) {                                                                               \
      fprintf(stderr, "%s:%d: %s does not hold; last error: %s\n", __FILE__, __LINE__, #holds,    \
              annulus_last_error());                                                              \
      exit(1);                                                                                    \
    }                                                                                             \
  } while (0)

static inline annulus_options case_options(void) {
  annulus_options options;
  OK(annulus_options_init(&options, sizeof options));
  options.batch = BATCH;
  options.q_len = LEN;
  options.kv_len = LEN;
  options.q_heads = Q_HEADS;
  options.kv_heads = KV_HEADS;
  options.head_dim = HEAD_DIM;
  options.value_dim = VALUE_DIM;
  options.causal = 1;
  options.deadline_seconds = 60;
  return options;
}

static inline annulus_attention *case_attention(void) {
  annulus_options options = case_options();
  annulus_attention *attention = NULL;
  OK(annulus_attention_create(&options, &attention));
  return attention;
}

/* A number of a tensor, exact in f32. */
static inline float value(int64_t salt, int64_t b, int64_t row, int64_t head, int64_t c) {
  return (float)((row * 31 + head * 7 + c * 3 + b * 5 + salt * 11) % 17 - 8) / 8.0f;
}

/* A contiguous tensor [BATCH, rows, heads, dim] of f32. */
static inline annulus_tensor rows_tensor(float *data, int64_t rows, int64_t heads, int64_t dim) {
  annulus_tensor tensor = {data, ANNULUS_F32, {BATCH, rows, heads, dim},
                           {rows * heads * dim, heads * dim, dim, 1}};
  return tensor;
}

/* A contiguous tensor [BATCH, Q_HEADS, rows] of f32. */
static inline annulus_tensor lse_tensor(float *data, int64_t rows) {
  annulus_tensor tensor = {data, ANNULUS_F32, {BATCH, Q_HEADS, rows, 1},
                           {Q_HEADS * rows, rows, 1, 0}};
  return tensor;
}

/* The tensors of some rows. */
typedef struct {
  int64_t count;
  int64_t rows[LEN];
  float *q, *k, *v, *out, *lse, *max, *sum, *dout, *dlse, *dq, *dk, *dv;
} part;

static inline float *numbers(int64_t salt, const part *of, int64_t heads, int64_t dim) {
  int64_t n = of->count;
  float *all = malloc(sizeof(float) * (size_t)(BATCH * n * heads * dim + 1));
  CHECK(all != NULL);
  for (int64_t b = 0; b < BATCH; b++)
    for (int64_t i = 0; i < n; i++)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t c = 0; c < dim; c++)
          all[((b * n + i) * heads + h) * dim + c] = value(salt, b, of->rows[i], h, c);
  return all;
}

/* Outputs are not initialised: what annulus does not write shows up under valgrind. */
static inline float *room(const part *of, int64_t heads, int64_t dim) {
  float *all = malloc(sizeof(float) * (size_t)(BATCH * of->count * heads * dim + 1));
  CHECK(all != NULL);
  return all;
}

static inline void make_part(part *p) {
  p->q = numbers(1, p, Q_HEADS, HEAD_DIM);
  p->k = numbers(2, p, KV_HEADS, HEAD_DIM);
  p->v = numbers(3, p, KV_HEADS, VALUE_DIM);
  p->dout = numbers(4, p, Q_HEADS, VALUE_DIM);
  p->dlse = room(p, Q_HEADS, 1);
  for (int64_t b = 0; b < BATCH; b++)
    for (int64_t h = 0; h < Q_HEADS; h++)
      for (int64_t i = 0; i < p->count; i++)
        p->dlse[(b * Q_HEADS + h) * p->count + i] = value(5, b, p->rows[i], h, 0);
  p->out = room(p, Q_HEADS, VALUE_DIM);
  p->lse = room(p, Q_HEADS, 1);
  p->max = room(p, Q_HEADS, 1);
  p->sum = room(p, Q_HEADS, 1);
  p->dq = room(p, Q_HEADS, HEAD_DIM);
  p->dk = room(p, KV_HEADS, HEAD_DIM);
  p->dv = room(p, KV_HEADS, VALUE_DIM);
}

static inline void free_part(part *p) {
  float *all[] = {p->q,    p->k,    p->v,  p->out, p->lse, p->max,
                  p->sum,  p->dout, p->dlse, p->dq, p->dk, p->dv};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* Ends the pass that was started, by looking now and then. */
static inline void end_pass(annulus_plan *plan) {
  int32_t done = 7;
  long looks = 0;
  do {
    OK(annulus_plan_test(plan, &done));
    looks++;
  } while (done == 0);
  CHECK(done == 1 && looks > 0);
}

/* Runs both passes, on threads of their own if `starts`. Queries and keys are the same rows. */
static inline void run_part_by(annulus_plan *plan, part *p, int starts) {
  int64_t n = p->count;
  annulus_tensor q = rows_tensor(p->q, n, Q_HEADS, HEAD_DIM);
  annulus_tensor k = rows_tensor(p->k, n, KV_HEADS, HEAD_DIM);
  annulus_tensor v = rows_tensor(p->v, n, KV_HEADS, VALUE_DIM);
  annulus_tensor out = rows_tensor(p->out, n, Q_HEADS, VALUE_DIM);
  annulus_tensor dout = rows_tensor(p->dout, n, Q_HEADS, VALUE_DIM);
  annulus_tensor lse = lse_tensor(p->lse, n), dlse = lse_tensor(p->dlse, n);
  annulus_tensor max = lse_tensor(p->max, n), sum = lse_tensor(p->sum, n);
  annulus_tensor dq = rows_tensor(p->dq, n, Q_HEADS, HEAD_DIM);
  annulus_tensor dk = rows_tensor(p->dk, n, KV_HEADS, HEAD_DIM);
  annulus_tensor dv = rows_tensor(p->dv, n, KV_HEADS, VALUE_DIM);
  annulus_forward_args forward = {
      .struct_size = sizeof forward, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse,
      .max = &max, .sum = &sum};
  if (starts) {
    OK(annulus_forward_start(plan, &forward));
    end_pass(plan);
  } else {
    OK(annulus_forward(plan, &forward));
  }
  annulus_backward_args backward = {.struct_size = sizeof backward,
                                    .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse,
                                    .max = &max, .sum = &sum, .dout = &dout, .dlse = &dlse,
                                    .dq = &dq, .dk = &dk, .dv = &dv};
  if (starts) {
    OK(annulus_backward_start(plan, &backward));
    OK(annulus_plan_wait(plan));
  } else {
    OK(annulus_backward(plan, &backward));
  }
}

static inline void run_part(annulus_plan *plan, part *p) { run_part_by(plan, p, 0); }

/* Results of all rows, in the order in which the Rust test has them. */
typedef struct {
  float out[BATCH][LEN][Q_HEADS][VALUE_DIM], lse[BATCH][Q_HEADS][LEN];
  float dq[BATCH][LEN][Q_HEADS][HEAD_DIM], dk[BATCH][LEN][KV_HEADS][HEAD_DIM];
  float dv[BATCH][LEN][KV_HEADS][VALUE_DIM];
} results;

/* Copies the rows of a part to their places. */
static inline void put_part(results *all, const part *p) {
  int64_t n = p->count;
  for (int64_t b = 0; b < BATCH; b++)
    for (int64_t i = 0; i < n; i++) {
      int64_t row = p->rows[i], at = b * n + i;
      memcpy(all->out[b][row], p->out + at * Q_HEADS * VALUE_DIM, sizeof all->out[b][row]);
      memcpy(all->dq[b][row], p->dq + at * Q_HEADS * HEAD_DIM, sizeof all->dq[b][row]);
      memcpy(all->dk[b][row], p->dk + at * KV_HEADS * HEAD_DIM, sizeof all->dk[b][row]);
      memcpy(all->dv[b][row], p->dv + at * KV_HEADS * VALUE_DIM, sizeof all->dv[b][row]);
      for (int64_t h = 0; h < Q_HEADS; h++)
        all->lse[b][h][row] = p->lse[(b * Q_HEADS + h) * n + i];
    }
}

static inline void write_results(const char *path, const results *all) {
  FILE *file = fopen(path, "wb");
  CHECK(file != NULL);
  CHECK(fwrite(all, sizeof *all, 1, file) == 1);
  CHECK(fclose(file) == 0);
}

/* Decoding with a KV cache: a prefill in two chunks, then tokens one by one. */
enum { PAGE_ROWS = 4, FIRST_CHUNK = 20, PREFILL = 24 };

/* Results of all rows, in the order in which the Rust test has them. */
typedef struct {
  float out[BATCH][LEN][Q_HEADS][VALUE_DIM], lse[BATCH][Q_HEADS][LEN];
} decoded;

static inline annulus_options cache_options(void) {
  annulus_options options = case_options();
  options.q_len = options.kv_len = 0;
  options.page_rows = PAGE_ROWS;
  return options;
}

/* Appends the rows from `first` on, of which this rank passes its own only if `own`, and attends
 * with their queries. */
static inline void decode_rows(annulus_cache *cache, int64_t first, int64_t end, int own,
                               decoded *all) {
  part of_all = {.count = end - first}, mine = {.count = 0};
  int64_t n = of_all.count, next[LEN], before = -1, after = -1;
  for (int64_t i = 0; i < n; i++) of_all.rows[i] = first + i;
  make_part(&of_all);
  OK(annulus_cache_len(cache, &before));
  CHECK(before == first);
  if (own) {
    OK(annulus_cache_own_rows(cache, n, next, LEN, &mine.count));
    for (int64_t i = 0; i < mine.count; i++) mine.rows[i] = first + next[i];
  }
  make_part(&mine);
  const part *appended = own ? &mine : &of_all;
  annulus_tensor k = rows_tensor(appended->k, appended->count, KV_HEADS, HEAD_DIM);
  annulus_tensor v = rows_tensor(appended->v, appended->count, KV_HEADS, VALUE_DIM);
  if (own)
    OK(annulus_cache_append_own(cache, n, &k, &v));
  else
    OK(annulus_cache_append(cache, &k, &v));
  OK(annulus_cache_len(cache, &after));
  CHECK(after == end);

  annulus_tensor q = rows_tensor(of_all.q, n, Q_HEADS, HEAD_DIM);
  annulus_tensor out = rows_tensor(of_all.out, n, Q_HEADS, VALUE_DIM);
  annulus_tensor lse = lse_tensor(of_all.lse, n);
  annulus_attend_args args = {.struct_size = sizeof args, .q = &q, .out = &out, .lse = &lse};
  OK(annulus_cache_attend(cache, &args));
  for (int64_t b = 0; b < BATCH; b++)
    for (int64_t i = 0; i < n; i++) {
      memcpy(all->out[b][first + i], of_all.out + (b * n + i) * Q_HEADS * VALUE_DIM,
             sizeof all->out[b][first + i]);
      for (int64_t h = 0; h < Q_HEADS; h++)
        all->lse[b][h][first + i] = of_all.lse[(b * Q_HEADS + h) * n + i];
    }
  free_part(&mine);
  free_part(&of_all);
}

static inline void decode(annulus_cache *cache, decoded *all) {
  decode_rows(cache, 0, FIRST_CHUNK, 0, all);
  decode_rows(cache, FIRST_CHUNK, PREFILL, 1, all);
  for (int64_t row = PREFILL; row < LEN; row++) decode_rows(cache, row, row + 1, 0, all);
}

static inline void write_decoded(const char *path, const decoded *all) {
  FILE *file = fopen(path, "wb");
  CHECK(file != NULL);
  CHECK(fwrite(all, sizeof *all, 1, file) == 1);
  CHECK(fclose(file) == 0);
}

#endif
