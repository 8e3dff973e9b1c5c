/*
 * endpoint FILE: two plans and a cache over one endpoint of a communicator of half the ranks of the
 * job. They duplicate no further communicator, have the bits of plans of their own, run on threads
 * of their own at a time where MPI allows it, and are destroyed in another order on each rank. Rank
 * 0 of the first half writes the results of the second plan to FILE. A forked child of each rank
 * cannot use MPI, before and after the library has, and leaves the parent's plans as they are.
 */
#ifndef ANNULUS_WITH_MPI
#error "pkg-config annulus-mpi and annulus::mpi define ANNULUS_WITH_MPI"
#endif
#define _DEFAULT_SOURCE
#include <mpi.h>
#include <sys/wait.h>
#include <unistd.h>

#include "case.h"

/* Counts the communicators that the library duplicates, where it is linked with this MPI. */
static int made = 0;
int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *out, MPI_Request *request) {
  made++;
  return PMPI_Comm_idup(comm, out, request);
}
int MPI_Comm_dup(MPI_Comm comm, MPI_Comm *out) {
  made++;
  return PMPI_Comm_dup(comm, out);
}

static void part_of(annulus_plan *plan, part *p) {
  OK(annulus_plan_q_rows(plan, p->rows, LEN, &p->count));
  make_part(p);
}

/* Handles of the parent, NULL before it has made them. */
static void refuse_in_child(annulus_attention *attention, annulus_endpoint *endpoint,
                            annulus_plan *plan) {
  const char *want = "MPI is not supported by a forked process";
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(15);
    annulus_endpoint *none = NULL;
    annulus_plan *made = NULL;
    CHECK(annulus_endpoint_create_mpi(attention, MPI_COMM_WORLD, &none) == ANNULUS_UNSUPPORTED);
    CHECK(strncmp(annulus_last_error(), want, strlen(want)) == 0);
    CHECK(annulus_plan_create_mpi(attention, MPI_COMM_WORLD, &made) == ANNULUS_UNSUPPORTED);
    if (plan != NULL) {
      CHECK(annulus_plan_create_endpoint(attention, endpoint, &made) == ANNULUS_UNSUPPORTED);
      CHECK(annulus_plan_update(plan, NULL) == ANNULUS_INVALID_ARGUMENT);
      CHECK(strncmp(annulus_last_error(), "plan: got one of process ", 25) == 0);
      OK(annulus_plan_destroy(plan));
      OK(annulus_endpoint_destroy(endpoint));
    }
    OK(annulus_plan_create_threads(attention, 2, &made));
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(int count, char **arguments) {
  CHECK(count == 2);
  annulus_attention *attention = case_attention(), *of_cache = NULL;
  annulus_options options = cache_options();
  OK(annulus_attention_create(&options, &of_cache));
  annulus_endpoint *endpoint = (annulus_endpoint *)attention;
  int status = annulus_endpoint_create_mpi(attention, MPI_COMM_WORLD, &endpoint);
  CHECK(status == ANNULUS_INVALID_ARGUMENT && endpoint == NULL); /* before MPI_Init */

  int level, world_rank, rank, ranks;
  CHECK(MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level) == MPI_SUCCESS);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
#ifndef ANNULUS_MPI_ABI
  refuse_in_child(attention, NULL, NULL);
#endif
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, world_rank, &half);
  MPI_Comm_rank(half, &rank);
  MPI_Comm_size(half, &ranks);

  OK(annulus_endpoint_create_mpi(attention, half, &endpoint));
  MPI_Comm_free(&half);
  int before = made;
#ifndef ANNULUS_MPI_ABI
  CHECK(before == 2);
#endif
  annulus_plan *plans[2] = {NULL, NULL};
  annulus_cache *cache = NULL;
  for (int turn = 0; turn < 40; turn++) {
    annulus_plan *brief = NULL;
    OK(annulus_plan_create_endpoint(attention, endpoint, &brief));
    OK(annulus_plan_destroy(brief));
  }
  OK(annulus_plan_create_endpoint(attention, endpoint, &plans[0]));
  OK(annulus_cache_create_endpoint(of_cache, endpoint, &cache));
  OK(annulus_plan_create_endpoint(attention, endpoint, &plans[1]));
  CHECK(made == before);
  int64_t number = -1;
  OK(annulus_plan_rank(plans[1], &number));
  CHECK(number == rank);
  OK(annulus_cache_ranks(cache, &number));
  CHECK(number == ranks);

  /* bad handles */
  annulus_plan *none = plans[0];
  CHECK(annulus_plan_create_endpoint(attention, NULL, &none) == ANNULUS_INVALID_ARGUMENT);
  CHECK(none == NULL && strstr(annulus_last_error(), "endpoint: got NULL") != NULL);
  CHECK(annulus_plan_create_endpoint(attention, (annulus_endpoint *)plans[0], &none) ==
        ANNULUS_INVALID_ARGUMENT);
  CHECK(annulus_plan_create_endpoint(attention, endpoint, NULL) == ANNULUS_INVALID_ARGUMENT);
  CHECK(annulus_endpoint_destroy(NULL) == ANNULUS_INVALID_ARGUMENT);

  refuse_in_child(attention, endpoint, plans[0]);
  /* plans outlive the handle */
  OK(annulus_endpoint_destroy(endpoint));
  CHECK(annulus_endpoint_destroy(endpoint) == ANNULUS_INVALID_ARGUMENT);
  static decoded tokens;
  decode(cache, &tokens);
  static results own[3];
  part p = {.count = 0}, q = {.count = 0};
  part_of(plans[0], &p);
  part_of(plans[1], &q);
  run_part(plans[0], &p);
  run_part(plans[1], &q);
  put_part(&own[0], &p);
  put_part(&own[1], &q);
  CHECK(memcmp(&own[0], &own[1], sizeof own[0]) == 0);
  if (level == MPI_THREAD_MULTIPLE) {
    /* in another order on each rank, at a time */
    part *parts[2] = {&p, &q};
    for (int i = 0; i < 2; i++) {
      int at = (i + rank) % 2;
      annulus_tensor t[5] = {rows_tensor(parts[at]->q, p.count, Q_HEADS, HEAD_DIM),
                             rows_tensor(parts[at]->k, p.count, KV_HEADS, HEAD_DIM),
                             rows_tensor(parts[at]->v, p.count, KV_HEADS, VALUE_DIM),
                             rows_tensor(parts[at]->out, p.count, Q_HEADS, VALUE_DIM),
                             lse_tensor(parts[at]->lse, p.count)};
      annulus_forward_args args = {.struct_size = sizeof args, .q = &t[0], .k = &t[1],
                                   .v = &t[2], .out = &t[3], .lse = &t[4]};
      memset(parts[at]->out, 0, sizeof(float) * (size_t)(BATCH * p.count * Q_HEADS * VALUE_DIM));
      OK(annulus_forward_start(plans[at], &args));
    }
    OK(annulus_plan_wait(plans[0]));
    OK(annulus_plan_wait(plans[1]));
    put_part(&own[2], &p);
    CHECK(memcmp(own[2].out, own[0].out, sizeof own[0].out) == 0);
    put_part(&own[2], &q);
    CHECK(memcmp(own[2].out, own[0].out, sizeof own[0].out) == 0);
  }
  /* what one rank refuses concerns its plan alone */
  if (ranks > 1) {
    status = annulus_plan_update(plans[0], NULL);
    CHECK(status == ANNULUS_SUCCESS);
    if (rank == 0) {
      CHECK(annulus_forward(plans[0], NULL) == ANNULUS_INVALID_ARGUMENT);
    } else {
      annulus_tensor t[5] = {rows_tensor(p.q, p.count, Q_HEADS, HEAD_DIM),
                             rows_tensor(p.k, p.count, KV_HEADS, HEAD_DIM),
                             rows_tensor(p.v, p.count, KV_HEADS, VALUE_DIM),
                             rows_tensor(p.out, p.count, Q_HEADS, VALUE_DIM),
                             lse_tensor(p.lse, p.count)};
      annulus_forward_args args = {.struct_size = sizeof args, .q = &t[0], .k = &t[1],
                                   .v = &t[2], .out = &t[3], .lse = &t[4]};
      CHECK(annulus_forward(plans[0], &args) == ANNULUS_REFUSED);
    }
    run_part(plans[1], &q);
  }
  static results whole;
  MPI_Comm again;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, world_rank, &again);
  MPI_Reduce(&own[1], &whole, (int)(sizeof whole / 4), MPI_INT, MPI_BOR, 0, again);
  MPI_Comm_free(&again);
  if (world_rank == 0) write_results(arguments[1], &whole);

  OK(annulus_plan_destroy(plans[rank % 2]));
  OK(annulus_cache_destroy(cache));
  OK(annulus_plan_destroy(plans[1 - rank % 2]));
  MPI_Finalize();
  CHECK(annulus_endpoint_create_mpi(attention, MPI_COMM_WORLD, &endpoint) ==
        ANNULUS_INVALID_ARGUMENT);
  OK(annulus_attention_destroy(of_cache));
  OK(annulus_attention_destroy(attention));
  free_part(&p);
  free_part(&q);
  return 0;
}
