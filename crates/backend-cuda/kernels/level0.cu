// Level 0: true products of the sums' type on any architecture, every feature, forward and backward.
#include "forward.cuh"
#include "backward_queries.cuh"
#include "backward_keys.cuh"
#include "bias_gradient.cuh"
#include "ends.cuh"
#include "records.cuh"
