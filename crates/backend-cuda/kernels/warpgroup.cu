// Kernels for compute capability 9.0 alone, whose blocks are a warpgroup that copies and two that multiply.
#define ANNULUS_WARPGROUP
#define THREADS 384
#include "forward_warpgroup.cuh"
