/* The functions of a host that carries messages over MPI. */
#ifndef CARRIER_H
#define CARRIER_H

#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
  MPI_Comm comm;
  int calls;
} carrier;

static inline int start(void *context, int receives, int64_t peer, int32_t tag, void *data,
                        uint64_t bytes, void **request) {
  carrier *host = context;
  MPI_Request *made = malloc(sizeof *made);
  host->calls++;
  int status = receives ? MPI_Irecv(data, (int)bytes, MPI_BYTE, (int)peer, tag, host->comm, made)
                        : MPI_Isend(data, (int)bytes, MPI_BYTE, (int)peer, tag, host->comm, made);
  *request = made;
  return status;
}

static inline int carry_send(void *context, int64_t peer, int32_t tag, const void *data,
                             uint64_t bytes, void **request) {
  return start(context, 0, peer, tag, (void *)data, bytes, request);
}

static inline int carry_recv(void *context, int64_t peer, int32_t tag, void *data, uint64_t bytes,
                             void **request) {
  return start(context, 1, peer, tag, data, bytes, request);
}

static inline int carry_test(void *context, void *request, int32_t *done) {
  (void)context;
  int flag = 0, status = MPI_Test(request, &flag, MPI_STATUS_IGNORE);
  if (flag || status != MPI_SUCCESS) free(request);
  *done = flag;
  return status;
}

static inline int carry_cancel(void *context, void *request) {
  (void)context;
  int status = MPI_Cancel(request);
  if (status == MPI_SUCCESS) status = MPI_Wait(request, MPI_STATUS_IGNORE);
  free(request);
  return status;
}

#endif
