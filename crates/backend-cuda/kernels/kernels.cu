// All kernels: level 0, on any architecture and with every feature, and forward and backward on matrix units for 16-bit elements.
#include "forward.cuh"
#include "backward_queries.cuh"
#include "backward_keys.cuh"
#include "forward_matrix.cuh"
#include "backward_matrix.cuh"
#include "bias_gradient.cuh"
#include "ends.cuh"
#include "records.cuh"
