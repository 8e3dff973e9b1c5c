/* threads RANKS FILE: both passes over an in-process ring; the results go to FILE. */
#include "case.h"

int main(int count, char **arguments) {
  CHECK(count == 3);
  CHECK(annulus_abi_version() == ANNULUS_ABI_VERSION);
  CHECK(strlen(annulus_version()) > 0);
  annulus_attention *attention = case_attention();
  annulus_plan *plan = NULL;
  OK(annulus_plan_create_threads(attention, atoi(arguments[1]), &plan));
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
  write_results(arguments[2], &first);
  free_part(&whole);
  OK(annulus_plan_destroy(plan));
  return 0;
}
