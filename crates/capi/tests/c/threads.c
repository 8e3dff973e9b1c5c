/*
 * threads RANKS FILE           both passes over an in-process ring; the results go to FILE, those of
 *                              its JVP and its double backward to FILE.second
 * threads RANKS FILE MACHINE   decoding with an in-process KV cache; the results go to FILE. A plan
 *                              takes the strategy of the least time on MACHINE
 * threads                      events of every ring step, whose bytes and operations add up to what
 *                              the plan predicts
 */
#include "case.h"

/* Both passes. */
static void attend(int64_t ranks, const char *file) {
  CHECK(annulus_abi_version() == ANNULUS_ABI_VERSION);
  CHECK(strlen(annulus_version()) > 0);
  annulus_attention *attention = case_attention();
  annulus_plan *plan = NULL;
  OK(annulus_plan_create_threads(attention, ranks, &plan));
  OK(annulus_attention_destroy(attention));

  part whole = {.count = 0};
  OK(annulus_plan_q_rows(plan, whole.rows, LEN, &whole.count));
  CHECK(whole.count == LEN);
  make_part(&whole);
  run_part(plan, &whole);
  /* a warm plan gives the same bits */
  static results first, second;
  put_part(&first, &whole);
  run_part(plan, &whole);
  put_part(&second, &whole);
  CHECK(memcmp(&first, &second, sizeof first) == 0);
  /* so do passes on threads of their own */
  memset(whole.out, 0, sizeof(float) * BATCH * LEN * Q_HEADS * VALUE_DIM);
  run_part_by(plan, &whole, 1);
  put_part(&second, &whole);
  CHECK(memcmp(&first, &second, sizeof first) == 0);
  write_results(file, &first);
  free_part(&whole);
  OK(annulus_plan_destroy(plan));
}

/* Results of the JVP and of the double backward, in the order in which the Rust test has them. */
typedef struct {
  float out_tangent[BATCH][LEN][Q_HEADS][VALUE_DIM], lse_tangent[BATCH][Q_HEADS][LEN];
  float ddout[BATCH][LEN][Q_HEADS][VALUE_DIM], ddlse[BATCH][Q_HEADS][LEN];
} second_results;

/* The JVP and the double backward along one direction. */
static void differentiate_twice(int64_t ranks, const char *file) {
  static second_results second;
  static results first;
  part whole = {.count = 0};
  for (int32_t has = 0; has <= 1; has++) {
    annulus_options options = case_options();
    annulus_attention *attention = NULL;
    annulus_plan *plan = NULL;
    options.second_derivatives = has;
    OK(annulus_attention_create(&options, &attention));
    OK(annulus_plan_create_threads(attention, ranks, &plan));
    OK(annulus_attention_destroy(attention));
    if (!has) {
      OK(annulus_plan_q_rows(plan, whole.rows, LEN, &whole.count));
      make_part(&whole);
    }
    part *p = &whole;
    float *of_q = numbers(6, p, Q_HEADS, HEAD_DIM), *of_k = numbers(7, p, KV_HEADS, HEAD_DIM);
    float *of_v = numbers(8, p, KV_HEADS, VALUE_DIM);
    annulus_tensor q = rows_tensor(p->q, LEN, Q_HEADS, HEAD_DIM);
    annulus_tensor k = rows_tensor(p->k, LEN, KV_HEADS, HEAD_DIM);
    annulus_tensor v = rows_tensor(p->v, LEN, KV_HEADS, VALUE_DIM);
    annulus_tensor q_direction = rows_tensor(of_q, LEN, Q_HEADS, HEAD_DIM);
    annulus_tensor k_direction = rows_tensor(of_k, LEN, KV_HEADS, HEAD_DIM);
    annulus_tensor v_direction = rows_tensor(of_v, LEN, KV_HEADS, VALUE_DIM);
    annulus_tensor out = rows_tensor(p->out, LEN, Q_HEADS, VALUE_DIM);
    annulus_tensor lse = lse_tensor(p->lse, LEN);
    annulus_tensor out_tangent = rows_tensor((float *)second.out_tangent, LEN, Q_HEADS, VALUE_DIM);
    annulus_tensor lse_tangent = lse_tensor((float *)second.lse_tangent, LEN);
    annulus_jvp_args jvp = {.struct_size = sizeof jvp, .q = &q, .k = &k, .v = &v,
                            .q_tangent = &q_direction, .k_tangent = &k_direction,
                            .v_tangent = &v_direction, .out = &out, .lse = &lse,
                            .out_tangent = &out_tangent, .lse_tangent = &lse_tangent};
    annulus_tensor dout = rows_tensor(p->dout, LEN, Q_HEADS, VALUE_DIM);
    annulus_tensor dlse = lse_tensor(p->dlse, LEN);
    annulus_tensor dq = rows_tensor(p->dq, LEN, Q_HEADS, HEAD_DIM);
    annulus_tensor dk = rows_tensor(p->dk, LEN, KV_HEADS, HEAD_DIM);
    annulus_tensor dv = rows_tensor(p->dv, LEN, KV_HEADS, VALUE_DIM);
    annulus_tensor ddout = rows_tensor((float *)second.ddout, LEN, Q_HEADS, VALUE_DIM);
    annulus_tensor ddlse = lse_tensor((float *)second.ddlse, LEN);
    annulus_double_backward_args twice = {
        .struct_size = sizeof twice, .q = &q, .k = &k, .v = &v, .dout = &dout, .dlse = &dlse,
        .q_cotangent = &q_direction, .k_cotangent = &k_direction, .v_cotangent = &v_direction,
        .dq = &dq, .dk = &dk, .dv = &dv, .ddout = &ddout, .ddlse = &ddlse};
    if (has) {
      OK(annulus_jvp(plan, &jvp));
      OK(annulus_double_backward(plan, &twice));
      /* the derivative along the cotangents is the gradient with respect to dout */
      CHECK(memcmp(second.ddout, second.out_tangent, sizeof second.ddout) == 0);
      ddout.dims[3]--;
      CHECK(annulus_double_backward(plan, &twice) == ANNULUS_INVALID_ARGUMENT);
      CHECK(strstr(annulus_last_error(), "ddout.dims") != NULL);
    } else {
      CHECK(annulus_jvp(plan, &jvp) == ANNULUS_INVALID_ARGUMENT);
      CHECK(strstr(annulus_last_error(), "second_derivatives") != NULL);
      CHECK(annulus_double_backward(plan, &twice) == ANNULUS_INVALID_ARGUMENT);
    }
    free(of_q);
    free(of_k);
    free(of_v);
    OK(annulus_plan_destroy(plan));
  }
  put_part(&first, &whole);
  free_part(&whole);
  char name[1100];
  CHECK(snprintf(name, sizeof name, "%s.second", file) < (int)sizeof name);
  FILE *into = fopen(name, "wb");
  CHECK(into != NULL);
  CHECK(fwrite(&first, sizeof first, 1, into) == 1);
  CHECK(fwrite(&second, sizeof second, 1, into) == 1);
  CHECK(fclose(into) == 0);
}

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

/* Decoding. */
static void decode_and_compare(int64_t ranks, const char *file) {
  int64_t number = -1;
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
  write_decoded(file, &first);
  OK(annulus_cache_destroy(cache));
}

enum { MOST_RANKS = 5 };

/* Sums of one rank, which only the thread of that rank writes. */
typedef struct {
  uint64_t bytes[2];
  double flops[2];
  int64_t computed, waited;
} sums;

static void add(void *context, const annulus_step_event *event) {
  CHECK(event->struct_size == sizeof *event);
  CHECK(0 <= event->rank && event->rank < MOST_RANKS && 0 <= event->step);
  CHECK(event->pass == ANNULUS_PASS_FORWARD || event->pass == ANNULUS_PASS_BACKWARD);
  CHECK(0 <= event->begin_seconds && event->begin_seconds <= event->end_seconds);
  sums *rank = (sums *)context + event->rank;
  CHECK((event->bytes > 0) == (event->activity == ANNULUS_ACTIVITY_SEND));
  CHECK(event->flops == 0 || event->activity == ANNULUS_ACTIVITY_COMPUTE);
  rank->bytes[event->pass] += event->bytes;
  rank->flops[event->pass] += event->flops;
  rank->computed += event->activity == ANNULUS_ACTIVITY_COMPUTE;
  rank->waited += event->activity == ANNULUS_ACTIVITY_WAIT;
}

static void run_steps(int64_t ranks, int32_t layout, int32_t route, int32_t mode) {
  static sums of_ranks[MOST_RANKS];
  memset(of_ranks, 0, sizeof of_ranks);
  annulus_options options = case_options();
  options.layout = layout;
  options.route = route;
  options.backward_mode = mode;
  annulus_attention *attention = NULL;
  annulus_plan *plan = NULL;
  OK(annulus_attention_create(&options, &attention));
  OK(annulus_attention_on_step(attention, add, of_ranks));
  OK(annulus_plan_create_threads(attention, ranks, &plan));
  OK(annulus_attention_destroy(attention));
  part whole = {.count = 0};
  OK(annulus_plan_q_rows(plan, whole.rows, LEN, &whole.count));
  make_part(&whole);
  run_part(plan, &whole);

  /* products of a visible pair: S, P V; S, dP, dQ, dK, dV, in two passes S and dP twice */
  double pairs = (double)(BATCH * Q_HEADS) * LEN * (LEN + 1) / 2;
  int two = mode == ANNULUS_BACKWARD_TWO_PASS && ranks > 1;
  double want[2] = {2 * pairs * (HEAD_DIM + VALUE_DIM),
                    2 * pairs * ((two ? 4 : 3) * HEAD_DIM + (two ? 3 : 2) * VALUE_DIM)};
  for (int32_t pass = ANNULUS_PASS_FORWARD; pass <= ANNULUS_PASS_BACKWARD; pass++) {
    uint64_t predicted = 7, bytes = 0;
    double flops = 0;
    OK(annulus_plan_predicted_bytes(plan, pass, &predicted));
    for (int64_t rank = 0; rank < ranks; rank++) {
      bytes += of_ranks[rank].bytes[pass];
      flops += of_ranks[rank].flops[pass];
      CHECK(of_ranks[rank].computed > 0 && (of_ranks[rank].waited > 0) == (ranks > 1));
    }
    CHECK(bytes == predicted);
    CHECK((predicted > 0) == (ranks > 1));
    CHECK(want[pass] * (1 - 1e-12) < flops && flops < want[pass] * (1 + 1e-12));
  }
  free_part(&whole);
  OK(annulus_plan_destroy(plan));
}

/* All steps of every layout, route and form of the backward pass. */
static void every_step(void) {
  int32_t layouts[] = {ANNULUS_LAYOUT_CONTIGUOUS, ANNULUS_LAYOUT_ZIGZAG, ANNULUS_LAYOUT_STRIPED};
  int32_t routes[] = {ANNULUS_ROUTE_RELAY_UP, ANNULUS_ROUTE_RELAY_DOWN, ANNULUS_ROUTE_DIRECT};
  for (int64_t ranks = 1; ranks <= MOST_RANKS; ranks++)
    for (int layout = 0; layout < 3; layout++)
      for (int route = 0; route < 3; route++)
        for (int32_t mode = ANNULUS_BACKWARD_ONE_PASS; mode <= ANNULUS_BACKWARD_TWO_PASS; mode++)
          run_steps(ranks, layouts[layout], routes[route], mode);
}

int main(int count, char **arguments) {
  CHECK(count == 1 || count == 3 || count == 4);
  if (count == 1) {
    every_step();
  } else if (count == 3) {
    attend(atoi(arguments[1]), arguments[2]);
    differentiate_twice(atoi(arguments[1]), arguments[2]);
  } else {
    plan_by_machine(arguments[3]);
    reproducible_decoding(atoi(arguments[1]));
    decode_and_compare(atoi(arguments[1]), arguments[2]);
  }
  return 0;
}
