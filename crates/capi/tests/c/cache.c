/* cache RANKS FILE MACHINE: decoding with an in-process KV cache; the results go to FILE. A plan
 * takes the strategy of the least time on MACHINE. */
#include "decode.h"

/* Attention over all rows at once, as one plan of one rank. */
static void one_shot(int32_t reproducible, results *once) {
  annulus_options options = case_options();
  annulus_attention *attention = NULL;
  annulus_plan *plan = NULL;
  options.reproducible = reproducible;
  OK(annulus_attention_create(&options, &attention));
  OK(annulus_plan_create_threads(attention, 1, &plan));
  OK(annulus_attention_destroy(attention));
  part whole = {.count = 0};
  OK(annulus_plan_q_rows(plan, whole.rows, LEN, &whole.count));
  make_part(&whole);
  run_part(plan, &whole);
  put_part(once, &whole);
  free_part(&whole);
  OK(annulus_plan_destroy(plan));
}

/* Decoding agrees with one attention up to rounding. */
static void compare_with_one_shot(const decoded *all) {
  static results once;
  one_shot(0, &once);
  const float *got = &all->out[0][0][0][0], *want = &once.out[0][0][0][0];
  for (size_t i = 0; i < sizeof all->out / sizeof *got; i++)
    CHECK(got[i] - want[i] < 1e-5f && want[i] - got[i] < 1e-5f);
  got = &all->lse[0][0][0], want = &once.lse[0][0][0];
  for (size_t i = 0; i < sizeof all->lse / sizeof *got; i++)
    CHECK(got[i] - want[i] < 1e-5f && want[i] - got[i] < 1e-5f);
}

/* In the reproducible order decoding has the bits of one attention. */
static void reproducible_decoding(int64_t ranks) {
  static results once;
  static decoded all;
  int64_t page_rows = 0;
  annulus_options options = cache_options();
  annulus_attention *attention = NULL;
  annulus_cache *cache = NULL;
  options.reproducible = 1;
  OK(annulus_attention_create(&options, &attention));
  /* pages of 4 rows are no nodes of the tree over leaves */
  CHECK(annulus_cache_create_threads(attention, ranks, &cache) == ANNULUS_INVALID_ARGUMENT);
  OK(annulus_attention_destroy(attention));
  options.page_rows = 0;
  OK(annulus_attention_create(&options, &attention));
  OK(annulus_cache_create_threads(attention, ranks, &cache));
  OK(annulus_attention_destroy(attention));
  OK(annulus_cache_page_rows(cache, &page_rows));
  CHECK(page_rows == 256);
  decode(cache, &all);
  OK(annulus_cache_destroy(cache));
  one_shot(1, &once);
  CHECK(memcmp(all.out, once.out, sizeof all.out) == 0);
  CHECK(memcmp(all.lse, once.lse, sizeof all.lse) == 0);
}

/* Two nodes of two ranks with a slow network: the ranks of a node divide the keys. */
static void plan_by_machine(const char *machine) {
  annulus_options options = case_options();
  options.strategy = ANNULUS_STRATEGY_AUTO;
  options.batch = 1;
  options.q_len = options.kv_len = 64;
  options.kv_heads = 1;
  options.value_dim = HEAD_DIM;
  options.causal = 0;
  annulus_attention *attention = NULL;
  annulus_plan *plan = NULL;
  OK(annulus_attention_create(&options, &attention));
  for (int has_machine = 0; has_machine < 2; has_machine++) {
    int32_t strategy = -1, heads = -1, queries = -1, keys = -1;
    if (has_machine) OK(annulus_attention_set_machine(attention, machine));
    OK(annulus_plan_create_threads(attention, 4, &plan));
    OK(annulus_plan_strategy(plan, &strategy, &heads));
    OK(annulus_plan_grid(plan, &queries, &keys));
    int is_chosen = strategy == ANNULUS_STRATEGY_GRID && heads == 1 && queries == 2 && keys == 2;
    CHECK(is_chosen == has_machine);
    OK(annulus_plan_destroy(plan));
  }
  OK(annulus_attention_destroy(attention));
}

int main(int count, char **arguments) {
  CHECK(count == 4);
  plan_by_machine(arguments[3]);
  int64_t ranks = atoi(arguments[1]), number = -1;
  reproducible_decoding(ranks);
  annulus_options options = cache_options();
  annulus_attention *attention = NULL;
  annulus_cache *cache = NULL;
  OK(annulus_attention_create(&options, &attention));
  OK(annulus_cache_create_threads(attention, ranks, &cache));
  OK(annulus_attention_destroy(attention));
  OK(annulus_cache_ranks(cache, &number));
  CHECK(number == ranks);
  OK(annulus_cache_rank(cache, &number));
  CHECK(number == 0);
  OK(annulus_cache_page_rows(cache, &number));
  CHECK(number == PAGE_ROWS);

  static decoded first, again;
  decode(cache, &first);
  compare_with_one_shot(&first);
  OK(annulus_cache_local_len(cache, &number));
  CHECK(number == LEN);
  uint64_t bytes = 1;
  OK(annulus_cache_predicted_bytes(cache, 3, &bytes));
  /* every rank sends out, maximum and sum of each query to every other rank */
  CHECK(bytes == (uint64_t)(ranks * (ranks - 1) * BATCH * 3 * Q_HEADS * (VALUE_DIM + 2) * 4));
  OK(annulus_cache_buffer_bytes(cache, &bytes));
  CHECK(bytes >= (uint64_t)(LEN * BATCH * KV_HEADS * (HEAD_DIM + VALUE_DIM) * 4));

  /* tokens of a speculation that were refused, and the same tokens again */
  again = first;
  memset(again.out[0][PREFILL + 3], 0, sizeof again.out[0][0]);
  OK(annulus_cache_truncate(cache, PREFILL + 2));
  for (int64_t row = PREFILL + 2; row < LEN; row++)
    decode_rows(cache, row, row + 1, 0, &again);
  CHECK(memcmp(&first, &again, sizeof first) == 0);
  /* and from the beginning */
  OK(annulus_cache_truncate(cache, 0));
  memset(&again, 0, sizeof again);
  decode(cache, &again);
  CHECK(memcmp(&first, &again, sizeof first) == 0);
  write_decoded(arguments[2], &first);
  OK(annulus_cache_destroy(cache));
  return 0;
}
