/* Any MPI of version 3 or newer, under the standard ABI of MPI 5.0.
 *
 * A library of annulus that loads MPI at run time calls it with the handles and constants of the
 * standard ABI. An MPI whose library has another ABI gets this shim, which its own compiler wrapper
 * compiles and which ANNULUS_MPI_LIBRARY names:
 *
 *   mpicc -shared -fPIC -O2 -o libannulus_mpi_shim.so annulus_mpi_shim.c
 *   export ANNULUS_MPI_LIBRARY=$PWD/libannulus_mpi_shim.so
 *
 * It has the functions that annulus calls, with the prefix annulus_, because it calls MPI's own.
 * The values of the ABI are those of MPI 5.0, chapter Application Binary Interface; return codes
 * other than 0 and keys of attributes are the MPI's own, and pass through.
 *
 * A handle of the ABI is a pointer, and one of an MPI a pointer or an integer of at most its size.
 * It is passed on as a number, except for the predefined objects. MPI_Comm_idup writes its result
 * when it completes, after the call, so a handle must be readable where MPI has written it: below
 * 64 bits, only on a little-endian machine. */
#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(MPI_Comm) <= sizeof(void *), "a handle fits a pointer");
_Static_assert(sizeof(MPI_Request) <= sizeof(void *), "a handle fits a pointer");
_Static_assert(sizeof(MPI_Message) <= sizeof(void *), "a handle fits a pointer");
_Static_assert(MPI_MAX_ERROR_STRING <= 512, "texts fit the buffers of the ABI");
_Static_assert(MPI_MAX_LIBRARY_VERSION_STRING <= 8192, "texts fit the buffers of the ABI");
_Static_assert(MPI_MAX_PROCESSOR_NAME <= 256, "texts fit the buffers of the ABI");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
_Static_assert(sizeof(MPI_Comm) == sizeof(void *), "an integer handle is at the slot's start");
#endif

/* Values of the ABI. */
enum {
  ABI_COMM_NULL = 0x100,
  ABI_COMM_WORLD = 0x101,
  ABI_COMM_SELF = 0x102,
  ABI_ERRORS_RETURN = 0x143,
  ABI_REQUEST_NULL = 0x180,
  ABI_UINT8_T = 0x241,
  ABI_ANY_SOURCE = -1,
  ABI_ANY_TAG = -2,
  ABI_UNDEFINED = -32766,
  ABI_TAG_UB = 501,
  ABI_ERR_TRUNCATE = 15,
  ABI_ERR_OTHER = 16,
  ABI_ERR_IN_STATUS = 19,
  ABI_THREAD_SINGLE = 0,
  ABI_THREAD_FUNNELED = 1024,
  ABI_THREAD_SERIALIZED = 2048,
  ABI_THREAD_MULTIPLE = 4096
};

/* The status of the ABI. The integers that it leaves to the library hold the number of bytes. */
typedef struct {
  int source;
  int tag;
  int error;
  int bytes;
  int unused[4];
} abi_status;

static MPI_Comm to_comm(void *abi) {
  switch ((intptr_t)abi) {
    case ABI_COMM_NULL: return MPI_COMM_NULL;
    case ABI_COMM_WORLD: return MPI_COMM_WORLD;
    case ABI_COMM_SELF: return MPI_COMM_SELF;
    default: return (MPI_Comm)(intptr_t)abi;
  }
}

static void *from_comm(MPI_Comm comm) {
  if (comm == MPI_COMM_NULL) return (void *)(intptr_t)ABI_COMM_NULL;
  if (comm == MPI_COMM_WORLD) return (void *)(intptr_t)ABI_COMM_WORLD;
  if (comm == MPI_COMM_SELF) return (void *)(intptr_t)ABI_COMM_SELF;
  return (void *)(intptr_t)comm;
}

static MPI_Request to_request(void *abi) {
  return (intptr_t)abi == ABI_REQUEST_NULL ? MPI_REQUEST_NULL : (MPI_Request)(intptr_t)abi;
}

static void *from_request(MPI_Request request) {
  return request == MPI_REQUEST_NULL ? (void *)(intptr_t)ABI_REQUEST_NULL
                                     : (void *)(intptr_t)request;
}

static MPI_Datatype to_type(void *abi) {
  return (intptr_t)abi == ABI_UINT8_T ? MPI_UINT8_T : MPI_DATATYPE_NULL;
}

static int to_level(int abi) {
  if (abi >= ABI_THREAD_MULTIPLE) return MPI_THREAD_MULTIPLE;
  if (abi >= ABI_THREAD_SERIALIZED) return MPI_THREAD_SERIALIZED;
  return abi >= ABI_THREAD_FUNNELED ? MPI_THREAD_FUNNELED : MPI_THREAD_SINGLE;
}

static int from_level(int level) {
  if (level >= MPI_THREAD_MULTIPLE) return ABI_THREAD_MULTIPLE;
  if (level >= MPI_THREAD_SERIALIZED) return ABI_THREAD_SERIALIZED;
  return level >= MPI_THREAD_FUNNELED ? ABI_THREAD_FUNNELED : ABI_THREAD_SINGLE;
}

/* The status of a request that was cancelled or of a send has no count: it gets 0. */
static void from_status(const MPI_Status *status, abi_status *abi) {
  int bytes = 0;
  if (abi == NULL) return;
  if (MPI_Get_count(status, MPI_UINT8_T, &bytes) != MPI_SUCCESS || bytes == MPI_UNDEFINED) {
    bytes = 0;
  }
  abi->source = status->MPI_SOURCE;
  abi->tag = status->MPI_TAG;
  abi->error = status->MPI_ERROR;
  abi->bytes = bytes;
}

int annulus_MPI_Abi_get_version(int *major, int *minor) {
  *major = 1;
  *minor = 0;
  return 0;
}

int annulus_MPI_Abort(void *comm, int code) { return MPI_Abort(to_comm(comm), code); }

int annulus_MPI_Cancel(void **request) {
  MPI_Request native = to_request(*request);
  return MPI_Cancel(&native);
}

void *annulus_MPI_Comm_fromint(int comm) { return from_comm(MPI_Comm_f2c(comm)); }

/* Attributes: the callbacks of the ABI are called by callbacks of this MPI. */
typedef int abi_copy(void *comm, int key, void *state, void *from, void *to, int *flag);
typedef int abi_delete(void *comm, int key, void *value, void *state);
typedef struct {
  abi_copy *copy;
  abi_delete *delete;
  void *state;
} callbacks;

static int copies(MPI_Comm comm, int key, void *state, void *from, void *to, int *flag) {
  const callbacks *calls = state;
  return calls->copy(from_comm(comm), key, calls->state, from, to, flag);
}

static int deletes(MPI_Comm comm, int key, void *value, void *state) {
  const callbacks *calls = state;
  return calls->delete(from_comm(comm), key, value, calls->state);
}

/* MPI keeps the callbacks as long as an attribute, so their state is never freed. */
int annulus_MPI_Comm_create_keyval(abi_copy *copy, abi_delete *delete, int *key,
                                   void *state) {
  callbacks *calls = malloc(sizeof *calls);
  if (calls == NULL) return MPI_ERR_NO_MEM;
  calls->copy = copy;
  calls->delete = delete;
  calls->state = state;
  return MPI_Comm_create_keyval(copies, deletes, key, calls);
}

int annulus_MPI_Comm_free(void **comm) {
  MPI_Comm native = to_comm(*comm);
  int code = MPI_Comm_free(&native);
  *comm = from_comm(native);
  return code;
}

int annulus_MPI_Comm_free_keyval(int *key) { return MPI_Comm_free_keyval(key); }

int annulus_MPI_Comm_get_attr(void *comm, int key, void *value, int *found) {
  return MPI_Comm_get_attr(to_comm(comm), key == ABI_TAG_UB ? MPI_TAG_UB : key, value, found);
}

/* The result is no predefined communicator, so what MPI writes is a handle of the ABI. */
int annulus_MPI_Comm_idup(void *comm, void **duplicate, void **request) {
  MPI_Request native = MPI_REQUEST_NULL;
  int code;
  *duplicate = NULL;
  code = MPI_Comm_idup(to_comm(comm), (MPI_Comm *)duplicate, &native);
  *request = from_request(native);
  return code;
}

int annulus_MPI_Comm_rank(void *comm, int *rank) {
  return MPI_Comm_rank(to_comm(comm), rank);
}

int annulus_MPI_Comm_set_attr(void *comm, int key, void *value) {
  return MPI_Comm_set_attr(to_comm(comm), key, value);
}

int annulus_MPI_Comm_set_errhandler(void *comm, void *handler) {
  if ((intptr_t)handler != ABI_ERRORS_RETURN) return MPI_ERR_ARG;
  return MPI_Comm_set_errhandler(to_comm(comm), MPI_ERRORS_RETURN);
}

int annulus_MPI_Comm_set_name(void *comm, const char *name) {
  return MPI_Comm_set_name(to_comm(comm), name);
}

int annulus_MPI_Comm_size(void *comm, int *size) {
  return MPI_Comm_size(to_comm(comm), size);
}

int annulus_MPI_Comm_split(void *comm, int color, int key, void **part) {
  MPI_Comm native = MPI_COMM_NULL;
  int code = MPI_Comm_split(to_comm(comm), color == ABI_UNDEFINED ? MPI_UNDEFINED : color, key,
                            &native);
  *part = from_comm(native);
  return code;
}

int annulus_MPI_Comm_test_inter(void *comm, int *flag) {
  return MPI_Comm_test_inter(to_comm(comm), flag);
}

int annulus_MPI_Error_class(int code, int *class) {
  int native = MPI_SUCCESS;
  int status = MPI_Error_class(code, &native);
  *class = native == MPI_SUCCESS         ? 0
           : native == MPI_ERR_TRUNCATE  ? ABI_ERR_TRUNCATE
           : native == MPI_ERR_IN_STATUS ? ABI_ERR_IN_STATUS
                                         : ABI_ERR_OTHER;
  return status;
}

int annulus_MPI_Error_string(int code, char *text, int *length) {
  return MPI_Error_string(code, text, length);
}

int annulus_MPI_Finalize(void) { return MPI_Finalize(); }

int annulus_MPI_Finalized(int *flag) { return MPI_Finalized(flag); }

int annulus_MPI_Get_count(const abi_status *status, void *type, int *count) {
  if ((intptr_t)type != ABI_UINT8_T) return MPI_ERR_TYPE;
  *count = status->bytes;
  return MPI_SUCCESS;
}

int annulus_MPI_Get_library_version(char *text, int *length) {
  return MPI_Get_library_version(text, length);
}

int annulus_MPI_Get_processor_name(char *text, int *length) {
  return MPI_Get_processor_name(text, length);
}

int annulus_MPI_Improbe(int source, int tag, void *comm, int *flag, void **message,
                        abi_status *status) {
  MPI_Message native = MPI_MESSAGE_NULL;
  MPI_Status found;
  int code = MPI_Improbe(source == ABI_ANY_SOURCE ? MPI_ANY_SOURCE : source,
                         tag == ABI_ANY_TAG ? MPI_ANY_TAG : tag, to_comm(comm), flag, &native,
                         &found);
  if (code == MPI_SUCCESS && *flag) {
    *message = (void *)(intptr_t)native;
    from_status(&found, status);
  }
  return code;
}

int annulus_MPI_Imrecv(void *buffer, int count, void *type, void **message,
                       void **request) {
  MPI_Message native = (MPI_Message)(intptr_t)*message;
  MPI_Request started = MPI_REQUEST_NULL;
  int code = MPI_Imrecv(buffer, count, to_type(type), &native, &started);
  *message = (void *)(intptr_t)native;
  *request = from_request(started);
  return code;
}

int annulus_MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  int level = MPI_THREAD_SINGLE;
  int code = MPI_Init_thread(argc, argv, to_level(required), &level);
  *provided = from_level(level);
  return code;
}

int annulus_MPI_Initialized(int *flag) { return MPI_Initialized(flag); }

int annulus_MPI_Irecv(void *buffer, int count, void *type, int source, int tag,
                      void *comm, void **request) {
  MPI_Request started = MPI_REQUEST_NULL;
  int code = MPI_Irecv(buffer, count, to_type(type), source, tag, to_comm(comm), &started);
  *request = from_request(started);
  return code;
}

int annulus_MPI_Is_thread_main(int *flag) { return MPI_Is_thread_main(flag); }

int annulus_MPI_Isend(const void *buffer, int count, void *type, int peer, int tag,
                      void *comm, void **request) {
  MPI_Request started = MPI_REQUEST_NULL;
  int code = MPI_Isend(buffer, count, to_type(type), peer, tag, to_comm(comm), &started);
  *request = from_request(started);
  return code;
}

int annulus_MPI_Issend(const void *buffer, int count, void *type, int peer, int tag,
                       void *comm, void **request) {
  MPI_Request started = MPI_REQUEST_NULL;
  int code = MPI_Issend(buffer, count, to_type(type), peer, tag, to_comm(comm), &started);
  *request = from_request(started);
  return code;
}

int annulus_MPI_Query_thread(int *provided) {
  int level = MPI_THREAD_SINGLE;
  int code = MPI_Query_thread(&level);
  *provided = from_level(level);
  return code;
}

int annulus_MPI_Test(void **request, int *flag, abi_status *status) {
  MPI_Request native = to_request(*request);
  MPI_Status found;
  int code = MPI_Test(&native, flag, &found);
  *request = from_request(native);
  if (code == MPI_SUCCESS && *flag) from_status(&found, status);
  return code;
}

/* Requests and statuses in the types of this MPI: on the stack for a few, as a ring step has. */
enum { FEW = 64 };

int annulus_MPI_Testsome(int count, void **requests, int *done, int *indices,
                         abi_status *statuses) {
  MPI_Request few_requests[FEW];
  MPI_Status few_statuses[FEW];
  MPI_Request *native = few_requests;
  MPI_Status *found = few_statuses;
  int code;
  int i;
  if (count > FEW) {
    native = malloc((size_t)count * sizeof *native);
    found = malloc((size_t)count * sizeof *found);
    if (native == NULL || found == NULL) {
      free(native);
      free(found);
      return MPI_ERR_NO_MEM;
    }
  }
  for (i = 0; i < count; i++) native[i] = to_request(requests[i]);
  /* only with MPI_ERR_IN_STATUS MPI writes this field, and it is read only then */
  memset(found, 0, (size_t)count * sizeof *found);
  code = MPI_Testsome(count, native, done, indices, found);
  for (i = 0; i < count; i++) requests[i] = from_request(native[i]);
  if (*done == MPI_UNDEFINED) {
    *done = ABI_UNDEFINED;
  } else {
    for (i = 0; i < *done; i++) from_status(&found[i], &statuses[i]);
  }
  if (count > FEW) {
    free(native);
    free(found);
  }
  return code;
}
