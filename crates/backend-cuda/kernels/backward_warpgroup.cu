// Program of the backward kernels on warpgroups, compute capability 9.0 only. 384 threads: one
// producer warpgroup and two consumer warpgroups.
#define ANNULUS_WARPGROUP
#define THREADS 384
#include "backward_warpgroup.cuh"
#include "backward_queries_warpgroup.cuh"
#include "backward_keys_warpgroup.cuh"
