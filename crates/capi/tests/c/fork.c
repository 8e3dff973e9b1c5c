/* Forked children: handles of the parent are refused, and new plans compute. Each child has a
   deadline. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "case.h"

enum { RANKS = 2, FORKS = 20, DEADLINE_SECONDS = 15 };

static part whole;
static results want;

static annulus_plan *new_plan(annulus_attention *attention) {
  annulus_plan *plan = NULL;
  OK(annulus_plan_create_threads(attention, RANKS, &plan));
  return plan;
}

/* Computes both passes, and compares their bits with those of the first plan. */
static void check_plan(annulus_plan *plan) {
  static results got;
  run_part(plan, &whole);
  put_part(&got, &whole);
  CHECK(memcmp(&got, &want, sizeof got) == 0);
}

/* Runs `work` in a child, which has to end with status 0 before the deadline. */
static void in_child(void (*work)(void *), void *context) {
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(DEADLINE_SECONDS);
    work(context);
    /* statics are not destroyed, and exit handlers of the parent do not run */
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

#define REFUSED(call, name)                                                                       \
  do {                                                                                            \
    CHECK((call) == ANNULUS_INVALID_ARGUMENT);                                                    \
    CHECK(strncmp(annulus_last_error(), name ": got one of process ",                             \
                  sizeof name ": got one of process " - 1) == 0);                                 \
  } while (0)

typedef struct {
  annulus_attention *attention;
  annulus_plan *plan;
  annulus_cache *cache;
} handles;

static void refuse_plan(annulus_plan *plan) {
  annulus_tensor q = rows_tensor(whole.q, LEN, Q_HEADS, HEAD_DIM);
  annulus_tensor k = rows_tensor(whole.k, LEN, KV_HEADS, HEAD_DIM);
  annulus_tensor v = rows_tensor(whole.v, LEN, KV_HEADS, VALUE_DIM);
  annulus_tensor out = rows_tensor(whole.out, LEN, Q_HEADS, VALUE_DIM);
  annulus_tensor lse = lse_tensor(whole.lse, LEN);
  annulus_forward_args forward = {
      .struct_size = sizeof forward, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse};
  REFUSED(annulus_forward(plan, &forward), "plan");
  REFUSED(annulus_forward_start(plan, &forward), "plan");
  int64_t ranks = 0;
  REFUSED(annulus_plan_ranks(plan, &ranks), "plan");
}

static void uses_handles(void *context) {
  handles *of = context;
  refuse_plan(of->plan);
  REFUSED(annulus_cache_truncate(of->cache, 0), "cache");
  OK(annulus_cache_destroy(of->cache));
  OK(annulus_plan_destroy(of->plan));
  CHECK(annulus_plan_destroy(of->plan) == ANNULUS_INVALID_ARGUMENT);
  /* an attention is data */
  annulus_plan *plan = new_plan(of->attention);
  check_plan(plan);
  OK(annulus_plan_destroy(plan));
  OK(annulus_attention_destroy(of->attention));
}

static void forks_again(void *context) {
  handles *of = context;
  of->plan = new_plan(of->attention);
  in_child(uses_handles, of);
  check_plan(of->plan);
}

/* A daemon: a child of a child that has ended. It reports by a pipe. */
static void is_daemon(handles *of) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(DEADLINE_SECONDS);
    CHECK(daemon(1, 1) == 0);
    alarm(DEADLINE_SECONDS);
    uses_handles(of);
    CHECK(write(ends[1], "", 1) == 1);
    _exit(0);
  }
  int status = -1;
  CHECK(close(ends[1]) == 0 && waitpid(child, &status, 0) == child && status == 0);
  char done = 1;
  CHECK(read(ends[0], &done, 1) == 1 && done == 0);
  CHECK(close(ends[0]) == 0);
}

static void started_pass(void *context) {
  annulus_plan *plan = context;
  int32_t done = 7;
  REFUSED(annulus_plan_test(plan, &done), "plan");
  REFUSED(annulus_plan_wait(plan), "plan");
  OK(annulus_plan_destroy(plan));
}

static volatile int ends;

/* Computes on another thread of the parent, also while it forks. */
static void *computes(void *context) {
  part own = {.count = LEN};
  memcpy(own.rows, whole.rows, sizeof own.rows);
  make_part(&own);
  while (!__atomic_load_n(&ends, __ATOMIC_RELAXED)) {
    annulus_plan *plan = new_plan(context);
    run_part(plan, &own);
    OK(annulus_plan_destroy(plan));
  }
  free_part(&own);
  return NULL;
}

int main(int count, char **arguments) {
  annulus_options options = case_options();
  options.threads = 2;
  annulus_attention *attention = NULL;
  OK(annulus_attention_create(&options, &attention));
  annulus_plan *plan = new_plan(attention);
  whole.count = 0;
  OK(annulus_plan_q_rows(plan, whole.rows, LEN, &whole.count));
  make_part(&whole);
  run_part(plan, &whole);
  put_part(&want, &whole);
  if (count > 1) return 0; /* run by `exec` */

  annulus_options of_cache = case_options();
  of_cache.q_len = of_cache.kv_len = 0;
  annulus_attention *cached = NULL;
  annulus_cache *cache = NULL;
  OK(annulus_attention_create(&of_cache, &cached));
  OK(annulus_cache_create_threads(cached, RANKS, &cache));

  handles all = {attention, plan, cache};
  in_child(uses_handles, &all);
  handles again = all;
  in_child(forks_again, &again);
  is_daemon(&all);
  check_plan(plan);

  annulus_tensor q = rows_tensor(whole.q, LEN, Q_HEADS, HEAD_DIM);
  annulus_tensor k = rows_tensor(whole.k, LEN, KV_HEADS, HEAD_DIM);
  annulus_tensor v = rows_tensor(whole.v, LEN, KV_HEADS, VALUE_DIM);
  annulus_tensor out = rows_tensor(whole.out, LEN, Q_HEADS, VALUE_DIM);
  annulus_tensor lse = lse_tensor(whole.lse, LEN);
  annulus_forward_args forward = {
      .struct_size = sizeof forward, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse};
  OK(annulus_forward_start(plan, &forward));
  in_child(started_pass, plan);
  OK(annulus_plan_wait(plan));

  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, computes, attention) == 0);
  for (int i = 0; i < FORKS; i++) in_child(uses_handles, &all);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(DEADLINE_SECONDS);
    execl("/proc/self/exe", arguments[0], "exec", (char *)NULL);
    _exit(1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  __atomic_store_n(&ends, 1, __ATOMIC_RELAXED);
  CHECK(pthread_join(thread, NULL) == 0);

  check_plan(plan);
  free_part(&whole);
  OK(annulus_plan_destroy(plan));
  OK(annulus_cache_destroy(cache));
  OK(annulus_attention_destroy(attention));
  OK(annulus_attention_destroy(cached));
  return 0;
}
