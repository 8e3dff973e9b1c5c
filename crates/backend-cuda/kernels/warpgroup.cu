// Program of the warpgroup kernels, compute capability 9.0 only. 384 threads: one producer
// warpgroup and two consumer warpgroups.
#define ANNULUS_WARPGROUP
#define THREADS 384
#include "forward_warpgroup.cuh"
