// Program of the forward kernels on warpgroups, compute capability 9.0 only: one producer warpgroup
// and ANNULUS_CONSUMERS consumer warpgroups of 128 threads.
#define ANNULUS_WARPGROUP
#define THREADS (128 * (1 + ANNULUS_CONSUMERS))
#include "forward_warpgroup.cuh"
