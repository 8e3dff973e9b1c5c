/*
 * cache_mpi FILE: decoding over a communicator of half the ranks of the job, by MPI_Comm, and by
 * MPI_Fint of a communicator with the ranks in reverse. Rank 0 of the first half writes its results
 * to FILE.
 */
#ifndef ANNULUS_WITH_MPI
#error "pkg-config annulus-mpi and annulus::mpi define ANNULUS_WITH_MPI"
#endif
#include "decode.h"

int main(int count, char **arguments) {
  CHECK(count == 2);
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
  if (world_rank == 0) write_decoded(arguments[1], &all[0]);

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
  return 0;
}
