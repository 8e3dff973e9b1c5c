/* Counts the messages that a rank sends, through the profiling interface of MPI. Preloaded by
 * scripts/scale-check; the MPI of mpicc compiles it:
 *
 *   mpicc -shared -fPIC -o count.so count.c
 *
 * In MPI_Finalize every rank prints one line to standard error:
 *
 *   counts rank R seconds S peers N heartbeat N/M announce N/M gather N/M abort N/M leave N/M
 *     barrier N/M gathered B inquiries N receives N waiting N
 *
 * S is the time since MPI was initialised; peers counts the ranks to which it has sent anything;
 * N/M are messages of a kind of control frame and the ranks to which they went; B is the bytes of
 * those of all-gathers. Control frames have MPI tag 0, which no block has, and begin with their
 * kind (crates/comm/src/mpi/frame.rs). Inquiries are calls of MPI_Initialized and MPI_Finalized.
 * Receives are those of blocks; waiting counts those of them whose message was there before.
 *
 * After MPI_Finalize follows another line, of the communicators that were given a name which begins
 * with "annulus":
 *
 *   communicators rank R named N freed N */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#define KINDS 6
#define RANKS 65536

static const char *const names[KINDS] = {"heartbeat", "announce", "gather",
                                         "abort",     "leave",    "barrier"};
#define GATHER 2
static int rank = -1;
static double began;
static char sent[RANKS];
static char sent_kind[KINDS][RANKS];
static long messages[KINDS];
static long gathered, inquiries, named, freed, receives, waiting;

/* Peers are ranks of the communicator of a send. All communicators of the tests have the ranks of
 * the world, in its order. */
static void count(const void *bytes, int length, int peer, int tag) {
  if (peer < 0 || peer >= RANKS)
    return;
  sent[peer] = 1;
  if (tag != 0 || length == 0)
    return;
  unsigned char kind = *(const unsigned char *)bytes;
  if (kind >= KINDS)
    return;
  messages[kind]++;
  if (kind == GATHER)
    gathered += length;
  sent_kind[kind][peer] = 1;
}

static int distinct(const char *peers) {
  int found = 0;
  for (int peer = 0; peer < RANKS; peer++)
    found += peers[peer];
  return found;
}

int MPI_Isend(const void *bytes, int length, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request *request) {
  count(bytes, length, peer, tag);
  return PMPI_Isend(bytes, length, type, peer, tag, comm, request);
}

int MPI_Issend(const void *bytes, int length, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
               MPI_Request *request) {
  count(bytes, length, peer, tag);
  return PMPI_Issend(bytes, length, type, peer, tag, comm, request);
}

int MPI_Irecv(void *bytes, int length, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request *request) {
  char name[MPI_MAX_OBJECT_NAME] = "";
  int name_length, found = 0;
  PMPI_Comm_get_name(comm, name, &name_length);
  if (strcmp(name, "annulus data") == 0) {
    /* the first call may only advance what a later one finds */
    for (int tries = 0; tries < 3 && !found; tries++)
      PMPI_Iprobe(peer, tag, comm, &found, MPI_STATUS_IGNORE);
    receives++;
    waiting += found;
  }
  return PMPI_Irecv(bytes, length, type, peer, tag, comm, request);
}

int MPI_Initialized(int *flag) {
  inquiries++;
  return PMPI_Initialized(flag);
}

int MPI_Finalized(int *flag) {
  inquiries++;
  return PMPI_Finalized(flag);
}

static int is_ours(const char *name) { return strncmp(name, "annulus", 7) == 0; }

int MPI_Comm_set_name(MPI_Comm comm, const char *name) {
  named += is_ours(name);
  return PMPI_Comm_set_name(comm, name);
}

int MPI_Comm_free(MPI_Comm *comm) {
  char name[MPI_MAX_OBJECT_NAME] = "";
  int length;
  PMPI_Comm_get_name(*comm, name, &length);
  freed += is_ours(name);
  return PMPI_Comm_free(comm);
}

static void begin(void) {
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  began = PMPI_Wtime();
}

int MPI_Init(int *count, char ***words) {
  int code = PMPI_Init(count, words);
  begin();
  return code;
}

int MPI_Init_thread(int *count, char ***words, int wanted, int *granted) {
  int code = PMPI_Init_thread(count, words, wanted, granted);
  begin();
  return code;
}

int MPI_Finalize(void) {
  char line[512];
  int end = snprintf(line, sizeof line, "counts rank %d seconds %.3f peers %d", rank,
                     PMPI_Wtime() - began, distinct(sent));
  for (int kind = 0; kind < KINDS; kind++)
    end += snprintf(line + end, sizeof line - end, " %s %ld/%d", names[kind], messages[kind],
                    distinct(sent_kind[kind]));
  fprintf(stderr, "%s gathered %ld inquiries %ld receives %ld waiting %ld\n", line, gathered,
          inquiries, receives, waiting);
  /* endpoints that were dropped on another thread are freed within it */
  int code = PMPI_Finalize();
  fprintf(stderr, "communicators rank %d named %ld freed %ld\n", rank, named, freed);
  return code;
}
