/* Decoding with a KV cache, for all C programs: a prefill in two chunks, then tokens one by one. */
#ifndef DECODE_H
#define DECODE_H

#include "case.h"

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
