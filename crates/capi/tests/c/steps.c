/* steps: events of every ring step, whose bytes and operations add up to what the plan predicts. */
#include "case.h"

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

static void run(int64_t ranks, int32_t layout, int32_t route, int32_t mode) {
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

int main(void) {
  int32_t layouts[] = {ANNULUS_LAYOUT_CONTIGUOUS, ANNULUS_LAYOUT_ZIGZAG, ANNULUS_LAYOUT_STRIPED};
  int32_t routes[] = {ANNULUS_ROUTE_RELAY_UP, ANNULUS_ROUTE_RELAY_DOWN, ANNULUS_ROUTE_DIRECT};
  for (int64_t ranks = 1; ranks <= MOST_RANKS; ranks++)
    for (int layout = 0; layout < 3; layout++)
      for (int route = 0; route < 3; route++)
        for (int32_t mode = ANNULUS_BACKWARD_ONE_PASS; mode <= ANNULUS_BACKWARD_TWO_PASS; mode++)
          run(ranks, layouts[layout], routes[route], mode);
  return 0;
}
