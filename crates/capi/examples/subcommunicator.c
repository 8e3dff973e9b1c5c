/* Half of the ranks of an MPI program compute causal attention over their own communicator. */
#include <annulus.h> /* with -DANNULUS_WITH_MPI: pkg-config --cflags annulus-mpi */
#include <stdio.h>
#include <stdlib.h>

static void check(int status) {
  if (status == ANNULUS_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", annulus_error_string(status), annulus_last_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv) {
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half; /* the other ranks of the program do something else */
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2 ? MPI_UNDEFINED : 0, rank, &half);
  if (half == MPI_COMM_NULL) return MPI_Finalize();

  annulus_options options;
  annulus_attention *attention;
  annulus_plan *plan;
  check(annulus_options_init(&options, sizeof options));
  options.batch = 1, options.q_len = options.kv_len = 512, options.causal = 1;
  options.q_heads = options.kv_heads = 4, options.head_dim = options.value_dim = 16;
  check(annulus_attention_create(&options, &attention));
  check(annulus_plan_create_mpi(attention, half, &plan)); /* collective over `half` */
  int64_t rows[512], n; /* the rows that this rank holds */
  check(annulus_plan_q_rows(plan, rows, 512, &n));
  float *x = malloc(n * 64 * 4), *out = malloc(n * 64 * 4), *lse = malloc(n * 4 * 4);
  for (int64_t i = 0; i < n * 64; i++) x[i] = (float)(rows[i / 64] % 7);
  annulus_tensor q = {x, ANNULUS_F32, {1, n, 4, 16}, {n * 64, 64, 16, 1}}, o = q;
  annulus_tensor l = {lse, ANNULUS_F32, {1, 4, n, 1}, {4 * n, n, 1, 1}};
  o.data = out;
  annulus_forward_args args = {
      .struct_size = sizeof args, .q = &q, .k = &q, .v = &q, .out = &o, .lse = &l};
  check(annulus_forward(plan, &args));
  printf("rank %d has row %d: out %g, lse %g\n", rank, (int)rows[0], out[0], lse[0]);
  free(x), free(out), free(lse), annulus_plan_destroy(plan), annulus_attention_destroy(attention);
  return MPI_Finalize();
}
